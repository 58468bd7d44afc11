"""Where checkpoints lie: a folder, where a rename makes one complete, or an object store, where its manifest does."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from atoll.core.errors import ConfigError
from atoll.core.paths import fsync_folder, write_atomic
from atoll.train.checkpoint import claim as claims
from atoll.train.checkpoint import manifest as manifests
from atoll.train.checkpoint.claim import Claim, FolderClaim, ObjectClaim, Relay
from atoll.train.checkpoint.files import Files
from atoll.train.checkpoint.manifest import step_name, step_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_MARKER = ".saving"  # an object store's step that is being written, or was when its writer died


class Store(Protocol):
    """Steps by number. Only one process changes it at a time: rank 0 of the run that has its claim.

    Every method raises ``OSError`` where the storage fails.
    """

    root: str

    def claim(self, run: str, another: str, say: Callable[[str], None]) -> Claim:
        """Be the one who changes it; the arguments are those of ``ObjectClaim``.

        Raises:
            ConfigError: somebody else is; the message says who.
        """

    def listing(self) -> dict[int, dict[str, int]]:
        """For every step that is there, whole or not: bytes by file name, relative to the step's folder.

        One that is still being written is not there yet.
        """

    def read(self, step: int, name: str) -> bytes:
        """A file of a step."""

    def files(self) -> Files:
        """For DCP."""

    def begin(self, step: int) -> str:
        """Make an empty place to write a step's files into."""

    def sizes(self, place: str) -> dict[str, int]:
        """Bytes by file name of a place that ``begin`` made."""

    def folder_of(self, place: str) -> str:
        """Where the files of a place will lie, relative to the step's folder."""

    def commit(self, place: str, step: int, manifest: bytes) -> None:
        """Make the files at ``place`` the step: all of it, or nothing of it. An earlier one of that step goes."""

    def discard(self, place: str, step: int) -> None:
        """Remove what a failed save has written."""

    def remove(self, step: int) -> None:
        """Delete a step; a kill in the middle leaves none that looks whole."""

    def sweep(self) -> None:
        """Remove what saves and removals of dead runs left."""

    def path(self, step: int) -> str:
        """Where a step lies, as a user would write it."""
        return f"{self.root.rstrip('/')}/{step_name(step)}"


def open_store(root: str | os.PathLike[str]) -> Store:
    """The store of a folder, or of an fsspec URL.

    Raises:
        ConfigError: no package for the URL's protocol is installed, or there is none of that name.
    """
    text = os.fspath(root)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" not in text:
        return FolderStore(text)
    from fsspec.core import url_to_fs

    try:
        with Relay():
            remote, prefix = url_to_fs(text, use_listings_cache=False)
    except ImportError as error:
        raise ConfigError(f"checkpoints at {text}: {error}") from None
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(
            f"checkpoints at {text}: {error}; expected a folder, or a URL that fsspec reads such as s3://bucket/run"
        ) from None
    return ObjectStore(text, remote, prefix)


class FolderStore(Store):
    """A folder of a file system with atomic renames: a local disk, NFS, Lustre.

    ``.step-N.RANDOM.tmp`` is being written, ``.old`` gives way to a new one of the same step, ``.trash`` is being
    deleted.
    """

    def __init__(self, root: str) -> None:
        self._root = Path(root).absolute()
        self.root = str(self._root)

    def claim(self, run: str, another: str, say: Callable[[str], None]) -> Claim:
        self._root.mkdir(parents=True, exist_ok=True)
        return FolderClaim(self._root, run, another)

    def listing(self) -> dict[int, dict[str, int]]:
        if not self._root.is_dir():
            return {}
        steps = {step_of(entry.name): entry for entry in self._root.iterdir() if entry.is_dir()}
        return {step: _sizes(folder) for step, folder in steps.items() if step is not None}

    def read(self, step: int, name: str) -> bytes:
        return (self._root / step_name(step) / name).read_bytes()

    def files(self) -> Files:
        return Files(None)

    def begin(self, step: int) -> str:
        place = self._hidden(step, "tmp")
        place.mkdir(parents=True)
        return str(place)

    def sizes(self, place: str) -> dict[str, int]:
        return _sizes(Path(place))

    def folder_of(self, place: str) -> str:
        return ""

    def commit(self, place: str, step: int, manifest: bytes) -> None:
        write_atomic(Path(place) / manifests.NAME, manifest, mode=0o644)
        final, old = self._root / step_name(step), self._hidden(step, "old")
        if final.exists():
            final.rename(old)  # killed between the two renames: ``sweep`` puts it back
        Path(place).rename(final)
        fsync_folder(self._root)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self, place: str, step: int) -> None:
        shutil.rmtree(place)

    def remove(self, step: int) -> None:
        trash = self._hidden(step, "trash")
        (self._root / step_name(step)).rename(trash)
        shutil.rmtree(trash)

    def sweep(self) -> None:
        for entry in list(self._root.iterdir()) if self._root.is_dir() else []:
            name, _, rest = entry.name.removeprefix(".").partition(".")
            kind = rest.rpartition(".")[2]
            if not entry.name.startswith(".") or step_of(name) is None or kind not in ("tmp", "old", "trash"):
                continue
            if kind == "old" and not (self._root / name).exists():
                entry.rename(self._root / name)
            else:
                shutil.rmtree(entry)

    def _hidden(self, step: int, kind: str) -> Path:
        return self._root / f".{step_name(step)}.{secrets.token_hex(4)}.{kind}"


class ObjectStore(Store):
    """A bucket, or whatever else fsspec writes to: files first, the manifest last.

    While a step is written it has a marker, so that what a dead run left can be told from a checkpoint that somebody
    damaged: the first is swept, the second is an error. A step that is whole already is written into a folder of its
    own below the step's, and the manifest that replaces the old one points there.
    """

    def __init__(self, root: str, remote: AbstractFileSystem, prefix: str) -> None:
        self.root = root
        self._remote = remote
        self._prefix = prefix.rstrip("/")

    def claim(self, run: str, another: str, say: Callable[[str], None]) -> Claim:
        return ObjectClaim(self._remote, self.root, f"{self._prefix}/{claims.NAME}", run, another, say)

    def listing(self) -> dict[int, dict[str, int]]:
        steps = {step: files for step, files in self._all().items() if _MARKER not in files or manifests.NAME in files}
        return {step: {n: size for n, size in files.items() if n != _MARKER} for step, files in steps.items()}

    def read(self, step: int, name: str) -> bytes:
        with Relay():
            return bytes(self._remote.cat_file(f"{self._folder(step)}/{name}"))

    def files(self) -> Files:
        return Files(self._remote)

    def begin(self, step: int) -> str:
        folder = self._folder(step)
        self._mark(folder)
        self._tidy(step)
        whole = manifests.NAME in self._of(step)
        place = f"{folder}/again-{secrets.token_hex(4)}" if whole else folder
        if whole:
            self._mark(place)
        return place

    def sizes(self, place: str) -> dict[str, int]:
        folder = place.rpartition("/again-")[0] or place
        step = step_of(folder.rpartition("/")[2])
        found = self._of(step) if step is not None else {}
        inside = self.folder_of(place)
        return {name.removeprefix(f"{inside}/"): size for name, size in found.items() if name.startswith(inside)}

    def folder_of(self, place: str) -> str:
        last = place.rpartition("/")[2]
        return last if last.startswith("again-") else ""

    def commit(self, place: str, step: int, manifest: bytes) -> None:
        with Relay():
            self._remote.pipe_file(f"{self._folder(step)}/{manifests.NAME}", manifest)
        self._tidy(step, marker=True)

    def discard(self, place: str, step: int) -> None:
        self._tidy(step, marker=True)

    def remove(self, step: int) -> None:
        self._mark(self._folder(step))
        with Relay():
            self._remote.rm_file(f"{self._folder(step)}/{manifests.NAME}")
        self._tidy(step, marker=True)

    def sweep(self) -> None:
        for step, files in self._all().items():
            if _MARKER in files:
                self._tidy(step, marker=True)

    def _mark(self, folder: str) -> None:
        with Relay():
            try:
                self._remote.pipe_file(f"{folder}/{_MARKER}", b"")
            except FileNotFoundError:
                # It has true folders. None is made elsewhere: s3fs would look at the bucket, which may be forbidden.
                self._remote.makedirs(folder, exist_ok=True)
                self._remote.pipe_file(f"{folder}/{_MARKER}", b"")

    def _tidy(self, step: int, *, marker: bool = False) -> None:
        """Delete what the step's manifest doesn't name (everything where it has none), the marker last if asked."""
        files = self._of(step)
        named: Mapping[str, Any] = {}
        if manifests.NAME in files:
            named = manifests.Manifest.decode(self.read(step, manifests.NAME)).files
        surplus = [name for name in files if name not in named and name not in (manifests.NAME, _MARKER)]
        folder = self._folder(step)
        with Relay():
            if surplus:
                self._remote.rm([f"{folder}/{name}" for name in surplus])
            if marker and _MARKER in files:
                self._remote.rm_file(f"{folder}/{_MARKER}")

    def _of(self, step: int) -> dict[str, int]:
        return self._all(self._folder(step)).get(step, {})

    def _all(self, under: str | None = None) -> dict[int, dict[str, int]]:
        """As ``listing``, with markers and what is being written; of all steps, or of what lies under a folder."""
        with Relay():
            self._remote.invalidate_cache()
            found = self._remote.find(under or self._prefix, detail=True)
        steps: dict[int, dict[str, int]] = {}
        for path, info in found.items():
            name, _, inside = path.removeprefix(f"{self._prefix}/").partition("/")
            step = step_of(name)
            if step is not None and inside:
                steps.setdefault(step, {})[inside] = int(info["size"])
        return steps

    def _folder(self, step: int) -> str:
        return f"{self._prefix}/{step_name(step)}"


def _sizes(folder: Path) -> dict[str, int]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}
