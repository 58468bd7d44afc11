"""A cluster's past jobs, their store and their logs, as a tar: they move with its supervisor, and logs are copied here.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from atoll.core.errors import AtollError
from atoll.tasks.tarball import BUFFER_BYTES

STORE, JOBS = "jobs.db", "jobs"  # in a cluster's folder
_SECRETS = "secrets.json"
_STORE_FILES = (STORE, f"{STORE}-wal", f"{STORE}-shm")


def pack(folder: Path, names: Sequence[str], stream: IO[bytes]) -> None:
    """Write what is there of some files and folders in a cluster's folder, without secrets.

    Raises:
        BrokenPipeError: nobody reads it.
        AtollError: something can't be read, or went away meanwhile.
    """
    try:
        with tarfile.open(fileobj=stream, mode="w|", bufsize=BUFFER_BYTES) as tar:
            for name in names:
                if name == STORE and (folder / name).exists():
                    _pack_store(folder / name, tar)
                elif (folder / name).exists():
                    tar.add(folder / name, name, filter=_unless_secret)
    except BrokenPipeError:
        raise
    except (OSError, sqlite3.Error) as error:
        raise AtollError(f"{folder} can't be read: {error}") from None


def _pack_store(path: Path, tar: tarfile.TarFile) -> None:
    """The store as of now, whoever else has it open."""
    with tempfile.NamedTemporaryFile() as file:
        with contextlib.closing(sqlite3.connect(path)) as store, contextlib.closing(sqlite3.connect(file.name)) as copy:
            store.backup(copy)
        tar.add(file.name, STORE)


def _unless_secret(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if PurePosixPath(member.name).name == _SECRETS else member


def unpack(stream: IO[bytes], folder: Path, below: str = "") -> int:
    """Put what ``pack`` wrote into a folder; what is there and is called otherwise stays. Returns how many files came.

    Args:
        below: take only what is below this path, and leave that path out.

    Raises:
        AtollError: it ended early, or names something outside of the folder.
        OSError: it can't be written.
    """
    num_files = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=BUFFER_BYTES) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise AtollError(f"{member.name!r} in what came leads out of {folder}: nothing more was written")
                if path.is_relative_to(below) and (member.isdir() or member.isreg()):
                    _put(tar, member, folder / path.relative_to(below))
                    num_files += member.isreg()
    except tarfile.TarError as error:
        raise AtollError(f"jobs' files ended early on their way to {folder} ({error}): try again") from None
    return num_files


def _put(tar: tarfile.TarFile, member: tarfile.TarInfo, at: Path) -> None:
    content = tar.extractfile(member)
    if content is None:
        at.mkdir(mode=0o700, parents=True, exist_ok=True)
        return
    at.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = at.with_name(f".{at.name}.part")
    try:
        with aside.open("wb") as file:
            shutil.copyfileobj(content, file, BUFFER_BYTES)
        aside.chmod(member.mode & 0o700)
        os.utime(aside, (member.mtime, member.mtime))
        for name in _STORE_FILES[1:] if at.name == STORE else ():  # they belong to the one that it replaces
            at.with_name(name).unlink(missing_ok=True)
        aside.replace(at)
    finally:
        aside.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove past jobs from a cluster's folder."""
    shutil.rmtree(folder / JOBS, ignore_errors=True)
    for name in _STORE_FILES:
        (folder / name).unlink(missing_ok=True)
