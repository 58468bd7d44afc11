"""A folder of a shared cache that is built once, however many processes, jobs and hosts want it at the same time.

One of them takes the lock and builds in a folder beside, which is renamed when all of it is on the disk; the others
watch the lock. The kernel drops the lock of a builder that dies, and the next one starts over. No collective is
involved: building may take longer than any of their timeouts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from atoll.core.errors import ConfigError
from atoll.core.paths import fsync_folder, sweep_temporary, temporary_beside, visible_pid
from atoll.train.events import Progress

_POLL_S = 0.1


def build_once(
    folder: Path,
    build: Callable[[Path], None],
    *,
    damage: Callable[[Path], str | None],
    progress: Callable[[Progress], None],
    note: Callable[[str], None],
) -> None:
    """Return when ``folder`` is complete: it is there, another process builds it, or ``build(aside)`` does so here.

    Args:
        build: fills the empty folder it is given, files synced.
        damage: says what a folder lacks; None for a complete one.
        progress: told every second while another process builds.
        note: told where a damaged folder is made again.

    Raises:
        ConfigError: the cache cannot be written to, its disk is full, or its file system has no locks.
    """
    try:
        if damage(folder) is None:  # then a cache that may only be read is enough
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock"), progress):
            wrong = damage(folder)
            if wrong is None:
                return
            if folder.exists():
                note(f"data: the cached {folder} is damaged ({wrong}): it is made again")
                shutil.rmtree(folder)
            sweep_temporary(folder.with_name("*"))
            with temporary_beside(folder, folder=True) as aside:
                build(aside)
                fsync_folder(aside)
                os.replace(aside, folder)
            fsync_folder(folder.parent)
    except OSError as error:
        raise ConfigError(
            f"the data cache {folder.parent} cannot be used: {error.strerror or error}. Make room, or set [data] "
            "cache, or ATOLL_HOME, to a folder on another disk that can be written to"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, progress: Callable[[Progress], None]) -> Iterator[None]:
    """Hold the lock file; while another process holds it, tell which."""
    started = told = time.monotonic()
    with path.open("a+") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() - told >= 1.0 or told == started:
                told = time.monotonic()
                holder = path.read_text() or "another process"  # which has not written its name yet
                progress(Progress(f"waiting for {holder} to prepare the data", told - started, None, "s"))
            time.sleep(_POLL_S)
        file.truncate(0)
        file.write(f"pid {visible_pid()} on host {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
