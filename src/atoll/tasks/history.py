"""A cluster's past jobs, their store and their logs, as a tar: they go with its supervisor, and logs are copied here.

Where they came from they stay, until the cluster is forgotten. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import sqlite3
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from atoll.core.errors import AtollError
from atoll.tasks.store import VARIABLES
from atoll.tasks.sync.receive import BUFFER_BYTES

STORE, JOBS = "jobs.db", "jobs"  # in a cluster's folder
_STORE_FILES = (STORE, f"{STORE}-wal", f"{STORE}-shm")
_ARRIVING = ".arriving"


def pack(folder: Path, names: Sequence[str], stream: IO[bytes]) -> None:
    """Write what is there of some files and folders in a cluster's folder, without values of variables.

    Raises:
        BrokenPipeError: nobody reads it.
        OSError, sqlite3.Error: something can't be read or written, or went away meanwhile.
    """
    with tarfile.open(fileobj=stream, mode="w|", bufsize=BUFFER_BYTES) as tar:
        for name in names:
            if name == STORE and (folder / name).exists():
                _pack_store(folder / name, tar)
            elif (folder / name).exists():
                tar.add(folder / name, name, filter=_unless_variables)


def _pack_store(path: Path, tar: tarfile.TarFile) -> None:
    """The store as of now, whoever else has it open; by way of memory, since the disk may be full."""
    with contextlib.closing(sqlite3.connect(path)) as store, contextlib.closing(sqlite3.connect(":memory:")) as copy:
        store.backup(copy)
        data = copy.serialize()
    member = tarfile.TarInfo(STORE)
    member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
    tar.addfile(member, io.BytesIO(data))


def _unless_variables(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if PurePosixPath(member.name).name == VARIABLES else member


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
        aside.replace(at)
    finally:
        aside.unlink(missing_ok=True)


def take(stream: IO[bytes], folder: Path) -> tuple[int, Path | None]:
    """Have what ``pack`` wrote as the past jobs of a cluster's folder, if it goes on where those that it has end.

    Nothing happens where the folder has all of these jobs: it may be the same one. Jobs that it has and that are no
    part of what came are put aside. Nobody else may have the store open.

    Returns:
        How many files came, and where the jobs are that were put aside.

    Raises:
        AtollError: it ended early, or names something outside of the folder; nothing has changed then.
        OSError, sqlite3.Error: it can't be read or written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    arriving, aside = folder / _ARRIVING, folder / f"jobs-{time.strftime('%Y%m%d-%H%M%S')}"
    shutil.rmtree(arriving, ignore_errors=True)
    try:
        num_files = unpack(stream, arriving)
        new, old = _task_ids(arriving), _task_ids(folder)
        if new.items() <= old.items():
            return 0, None
        nothing_else = old.items() <= new.items() and _folders(folder) <= _folders(arriving)
        _swap(arriving, folder, aside)
        if nothing_else:
            shutil.rmtree(aside, ignore_errors=True)
            return num_files, None
        return num_files, aside
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _swap(arriving: Path, folder: Path, aside: Path) -> None:
    """Put the past jobs of a folder aside, and have others there; the store, which says what there is, goes last."""
    aside.mkdir(mode=0o700)
    try:
        for at, to in ((folder, aside), (arriving, folder)):
            for name in (JOBS, *_STORE_FILES[1:], STORE):
                with contextlib.suppress(FileNotFoundError):
                    (at / name).rename(to / name)
    except OSError:
        for name in (JOBS, *_STORE_FILES):
            with contextlib.suppress(OSError):
                (aside / name).rename(folder / name)
        raise


def trouble(error: OSError | sqlite3.Error, folder: Path) -> str:
    """What can't be read or written there, why, and what helps."""
    what = f"{getattr(error, 'filename', None) or folder}: {getattr(error, 'strerror', None) or error}"
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in str(error)
    return f"{what}: free some space there" if is_full else what


def _folders(folder: Path) -> set[str]:
    return set(os.listdir(folder / JOBS)) if (folder / JOBS).is_dir() else set()


def _task_ids(folder: Path) -> dict[int, str]:
    """What tells the jobs of a store from any others."""
    if not (folder / STORE).exists():
        return {}
    with contextlib.closing(sqlite3.connect(folder / STORE)) as store:
        if not store.execute("SELECT 1 FROM sqlite_master WHERE name = 'jobs'").fetchone():
            return {}
        return dict(store.execute("SELECT id, task_id FROM jobs"))
