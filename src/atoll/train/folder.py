"""The folder of a run: one writer, one recipe."""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, ConfigError
from atoll.core.paths import shown_path, sweep_temporary, write_atomic
from atoll.train.recipe.compare import diff, harmful
from atoll.train.recipe.schema import Recipe

_RECIPE, _IDENTITY = "recipe.json", ".identity"


class RunFolder:
    """``output_dir``, held by one run at a time; on rank 0.

    Attributes:
        notes: lines for the reader: what changed in the recipe.
        identity: of the run that began here, which its checkpoints carry; None where none did.
    """

    def __init__(self, wanted: Path, recipe: Recipe, *, resume: bool, allow_changes: bool) -> None:
        """Make the folder, take its lock and check that the recipe is the one it was made with.

        Args:
            resume: False takes a new folder beside ``wanted`` where that holds a run.

        Raises:
            ConfigError: another run writes here, or the recipe differs in a way that changes what is trained, or the
                folder can't be made.
        """
        from atoll.train.checkpoint.claim import FolderClaim  # with torch, which whoever starts the ranks does without

        self.path = wanted if resume else fresh_folder(wanted)
        self.notes: list[str] = []
        self._recipe, self._resume, self._allow_changes = recipe, resume, allow_changes
        self._began = False
        with self.blamed():
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderClaim(self.path, recipe.name, "--train.output_dir DIR", name=".lock")
        for inside in (self.path, self.path / "tokenizer"):
            sweep_temporary(inside / "*")
        try:
            with self.blamed():
                self._check()
                self.identity = stored_identity(self.path)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Errors of the file system inside name the folder."""
        try:
            yield
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # which is not a mistake in the recipe
            raise (AtollError if is_full else ConfigError)(
                f"[train] output_dir {str(self.path)!r}: {error.strerror}; choose another with --train.output_dir DIR"
            ) from None

    def _check(self) -> None:
        before = stored_recipe(self.path)
        if before is None:
            return
        what = f"{str(self.path)!r} already contains a run"
        self._refuse_changes(before, self._recipe, what, "--no-resume starts over in a new folder")
        # output_dir is where it is told apart from others, not what it is: one folder has many names.
        changed = [line for line in diff(before, self._recipe) if not line.startswith("[train] output_dir")]
        self.notes += [f"changed since the run began: {line}" for line in changed]

    def _refuse_changes(self, before: Recipe, now: Recipe, what: str, otherwise: str) -> None:
        changed = harmful(before, now)
        if changed and not self._allow_changes:
            lines = "\n  ".join(changed)
            allow = f"--allow-changes resumes with the new settings, {otherwise}"
            raise ConfigError(f"{what} with different settings:\n  {lines}\n{allow}")

    def identify(self, recipe: Recipe, root: str, found: Mapping[str, Any] | None, note: Callable[[str], None]) -> str:
        """The run's identity, which its checkpoints carry: no run resumes from those of another.

        Args:
            recipe: its vocabulary known.
            root: where the checkpoints are.
            found: what was saved with the newest there; None where there is none.

        Raises:
            ConfigError: the checkpoints in ``root`` belong to another run.
        """
        theirs = None if found is None else found.get("run")
        if found is not None:
            what = f"[checkpoint] path {shown_path(root)!r} holds step {found['step']} of"
            choose = "choose another with --checkpoint.path PLACE"
            if not self._resume or (self.identity is not None and theirs not in (None, self.identity)):
                raise ConfigError(f"{what} another run: {choose}")
            if self.identity is None:
                self._refuse_changes(Recipe.model_validate(found["recipe"]), recipe, f"{what} a run", f"or {choose}")
                note(f"resuming from step {found['step']} in {shown_path(root)}")
        self.identity = self.identity or theirs or secrets.token_hex(8)
        return self.identity

    def keep(self) -> None:
        """The run begins: its recipe is the folder's from now on. One that could not begin leaves the old one."""
        self._began = True
        recipe = json.dumps(self._recipe.model_dump(mode="json"), indent=1)
        for name, text in ((_IDENTITY, self.identity), (_RECIPE, recipe)):
            if text is not None:
                write_atomic(self.path / name, text.encode(), mode=0o644)

    def close(self) -> None:
        """Let others write here. A folder that was made for a run that could not begin goes away again."""
        remove = self._made and not self._began
        if remove:
            shutil.rmtree(self.path / "tokenizer", ignore_errors=True)
        self._lock.close()
        for empty in (self.path / "checkpoints", *self._made) if remove else ():
            with contextlib.suppress(OSError):
                empty.rmdir()


def stored_identity(folder: Path) -> str | None:
    """What the checkpoints of a run carry, too."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / _IDENTITY).read_text(errors="replace") or None
    return None


def stored_recipe(folder: Path) -> Recipe | None:
    """The resolved recipe that a run's folder was made with; None where it holds none.

    Raises:
        ConfigError: what is there is no recipe.
    """
    path = folder / _RECIPE
    try:
        return Recipe.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except ValueError as error:  # of json, of Unicode and of pydantic
        why = str(error).splitlines()[0]
        raise ConfigError(
            f"{str(path)!r} is damaged ({why}): it should hold the recipe that the run was made with. Remove it to go "
            f"on with the one given, or start over with --no-resume"
        ) from None


def fresh_folder(path: Path) -> Path:
    """``path``, or ``path-2``, ``path-3``, ... if it holds a run."""
    candidate, number = path, 1
    while (candidate / _RECIPE).exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
