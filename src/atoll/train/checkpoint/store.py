"""Where checkpoints lie: a folder, where a rename makes one complete, or an object store, where its manifest does."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from atoll.core.errors import ConfigError
from atoll.core.paths import fsync_folder, write_atomic
from atoll.train.checkpoint import manifest as manifests
from atoll.train.checkpoint.claim import Claim, FolderClaim, ObjectClaim
from atoll.train.checkpoint.files import Files, Relay, Remote
from atoll.train.checkpoint.manifest import step_name, step_of

_MARKER = ".saving"  # an object store's step that is being written or removed, or was when its writer died
_LEFT = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}\.(tmp|trash)")  # the same in a folder


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
        """Make an empty place to write a step's files into.

        A run comes to a step that is there already where it was damaged, and passed over: it goes.
        """

    def sizes(self, place: str) -> dict[str, int]:
        """Bytes by file name of a place that ``begin`` made."""

    def commit(self, place: str, step: int, manifest: bytes) -> None:
        """Make the files at ``place`` the step: all of it, or nothing of it."""

    def remove(self, step: int) -> None:
        """Delete a step; a kill in the middle leaves none that looks whole."""

    def sweep(self) -> None:
        """Remove what saves and removals that failed, or whose run is dead, have left."""

    def path(self, step: int) -> str:
        """Where a step lies, as a user would write it."""
        return f"{self.root.rstrip('/')}/{step_name(step)}"


def open_store(root: str) -> Store:
    """The store of a folder, or of an fsspec URL.

    Raises:
        ConfigError: no package for the URL's protocol is installed, or there is none of that name.
    """
    root = root.removeprefix("file://")
    if "://" not in root:
        return FolderStore(root)
    from fsspec.core import url_to_fs

    try:
        with Relay():
            remote, prefix = url_to_fs(root, use_listings_cache=False)
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise ConfigError(
            f"checkpoints at {root}: {error}; expected a folder, or a URL that fsspec reads such as s3://bucket/run"
        ) from None
    return ObjectStore(root, Remote(remote), prefix)


class FolderStore(Store):
    """A folder of a file system with atomic renames: a local disk, NFS, Lustre.

    ``.step-N.RANDOM.tmp`` is being written, ``.trash`` is being deleted.
    """

    def __init__(self, root: str) -> None:
        self._root = Path(root).absolute()
        self.root = str(self._root)

    def claim(self, run: str, another: str, say: Callable[[str], None]) -> Claim:
        self._root.mkdir(parents=True, exist_ok=True)
        return FolderClaim(self._root, run, another)

    def listing(self) -> dict[int, dict[str, int]]:
        folders = [entry for entry in self._root.iterdir() if entry.is_dir()] if self._root.is_dir() else []
        return {step: self.sizes(str(each)) for each in folders if (step := step_of(each.name)) is not None}

    def read(self, step: int, name: str) -> bytes:
        return (self._root / step_name(step) / name).read_bytes()

    def files(self) -> Files:
        return Files(None)

    def begin(self, step: int) -> str:
        place = self._hidden(step, "tmp")
        place.mkdir(parents=True)
        return str(place)

    def sizes(self, place: str) -> dict[str, int]:
        found = (path for path in Path(place).rglob("*") if path.is_file())
        return {path.relative_to(place).as_posix(): path.stat().st_size for path in found}

    def commit(self, place: str, step: int, manifest: bytes) -> None:
        write_atomic(Path(place) / manifests.NAME, manifest, mode=0o644)
        final = self._root / step_name(step)
        if final.exists():
            self.remove(step)
        Path(place).rename(final)
        fsync_folder(self._root)

    def remove(self, step: int) -> None:
        trash = self._hidden(step, "trash")
        (self._root / step_name(step)).rename(trash)
        shutil.rmtree(trash)

    def sweep(self) -> None:
        for entry in list(self._root.iterdir()) if self._root.is_dir() else []:
            if _LEFT.fullmatch(entry.name):
                shutil.rmtree(entry)

    def _hidden(self, step: int, kind: str) -> Path:
        return self._root / f".{step_name(step)}.{secrets.token_hex(4)}.{kind}"


class ObjectStore(Store):
    """A bucket, or whatever else fsspec writes to: files first, the manifest last.

    While a step is written or removed it has a marker, so that what a dead run left can be told from a checkpoint that
    somebody damaged: the first is swept, the second is an error.
    """

    def __init__(self, root: str, remote: Remote, prefix: str) -> None:
        self.root = root
        self._remote = remote
        self._prefix = prefix.rstrip("/")

    def claim(self, run: str, another: str, say: Callable[[str], None]) -> Claim:
        return ObjectClaim(self._remote, self.root, self._prefix, run, another, say)

    def listing(self) -> dict[int, dict[str, int]]:
        return {step: files for step, files in self._all().items() if _MARKER not in files or manifests.NAME in files}

    def read(self, step: int, name: str) -> bytes:
        return bytes(self._remote.cat_file(f"{self._folder(step)}/{name}"))

    def files(self) -> Files:
        return Files(self._remote)

    def begin(self, step: int) -> str:
        folder = self._folder(step)
        self._remote.put(f"{folder}/{_MARKER}", b"")
        files = self.sizes(folder).keys() - {_MARKER}
        if manifests.NAME in files:
            self._remote.rm_file(f"{folder}/{manifests.NAME}")
        if rest := [f"{folder}/{name}" for name in files if name != manifests.NAME]:
            self._remote.rm(rest)
        return folder

    def sizes(self, place: str) -> dict[str, int]:
        self._remote.invalidate_cache()
        found = self._remote.find(place, detail=True)
        return {path.removeprefix(f"{place}/"): int(info["size"]) for path, info in found.items()}

    def commit(self, place: str, step: int, manifest: bytes) -> None:
        self._remote.put(f"{place}/{manifests.NAME}", manifest)
        self._remote.rm_file(f"{place}/{_MARKER}")

    def remove(self, step: int) -> None:
        self._remote.rm_file(f"{self.begin(step)}/{_MARKER}")

    def sweep(self) -> None:
        for step, files in self._all().items():
            if _MARKER in files and manifests.NAME in files:
                self._remote.rm_file(f"{self._folder(step)}/{_MARKER}")
            elif _MARKER in files:
                self.remove(step)

    def _all(self) -> dict[int, dict[str, int]]:
        """As ``listing``, with those that are being written."""
        steps: dict[int, dict[str, int]] = {}
        for path, size in self.sizes(self._prefix).items():
            name, _, inside = path.partition("/")
            step = step_of(name)
            if step is not None and inside:
                steps.setdefault(step, {})[inside] = size
        return steps

    def _folder(self, step: int) -> str:
        return f"{self._prefix}/{step_name(step)}"
