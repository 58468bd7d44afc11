"""The folder of a run: one writer, one recipe."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from atoll.core.errors import AtollError, ConfigError
from atoll.core.paths import shown_path, sweep_temporary, write_atomic
from atoll.train.checkpoint.claim import FolderClaim
from atoll.train.recipe.load import diff, harmful
from atoll.train.recipe.schema import Recipe

_RECIPE, _IDENTITY = "recipe.json", ".identity"


class RunFolder:
    """``output_dir``, held by one run at a time.

    Attributes:
        notes: lines for the reader: what changed in the recipe.
        identity: of the run that began here, which its checkpoints carry; None where none did.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.identity: str | None = None
        self._lock: FolderClaim | None = None
        self._made: list[Path] = []
        self._began = False

    def open(self, recipe: Recipe, *, allow_changes: bool) -> None:
        """Make the folder, take its lock and check that the recipe is the one it was made with.

        Raises:
            ConfigError: another run writes here, or the recipe differs in a way that changes what is trained, or the
                folder can't be made.
        """
        with self.blamed():
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderClaim(self.path, recipe.name, "--train.output_dir DIR", name=".lock")
        for inside in (self.path, self.path / "tokenizer"):
            sweep_temporary(inside / "*")
        try:
            self._check(recipe, allow_changes=allow_changes)
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

    def _check(self, recipe: Recipe, *, allow_changes: bool) -> None:
        before = stored_recipe(self.path)
        if before is None:
            return
        changed = diff(before, recipe)
        serious = harmful(before, recipe)
        if serious and not allow_changes:
            lines = "\n  ".join(serious)
            other = _with_these_settings(self.path, recipe)
            raise ConfigError(
                f"{str(self.path)!r} already contains a run with different settings:\n  {lines}\n"
                f"--allow-changes resumes with the new settings, --no-resume starts over in a new folder{other}"
            )
        # Where it is told apart from others, not what it is: one folder has many names.
        changed = [line for line in changed if not line.startswith("[train] output_dir")]
        self.notes += [f"changed since the run began: {line}" for line in changed]

    def keep(self, recipe: Recipe) -> None:
        """The run begins: this recipe is the folder's from now on. One that could not begin leaves the old one."""
        self._began = True
        if self.identity is not None:
            write_atomic(self.path / _IDENTITY, self.identity.encode(), mode=0o644)
        write_atomic(self.path / _RECIPE, json.dumps(recipe.model_dump(mode="json"), indent=1).encode(), mode=0o644)

    def close(self) -> None:
        """Let others write here. A folder that was made for a run that could not begin goes away again."""
        if self._lock is None:
            return
        if self._made and not self._began:
            shutil.rmtree(self.path / "tokenizer", ignore_errors=True)
            self._lock.close()
            for empty in (self.path / "checkpoints", *self._made):
                with contextlib.suppress(OSError):
                    empty.rmdir()
        else:
            self._lock.close()
        self._lock = None


def _with_these_settings(path: Path, recipe: Recipe) -> str:
    """Names a folder beside ``path`` that ``--no-resume`` made for this recipe; nothing if there is none."""
    for folder in sorted(path.parent.glob(f"{path.name}-*")):
        with contextlib.suppress(ConfigError):
            before = stored_recipe(folder)
            if before is not None and not harmful(before, recipe):
                return f"; {folder.name} was started with these settings: --train.output_dir {shown_path(str(folder))}"
    return ""


def stored_identity(folder: Path) -> str | None:
    """What the checkpoints of a run carry, too."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / _IDENTITY).read_text()
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
