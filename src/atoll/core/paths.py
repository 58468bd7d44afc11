"""Where Atoll keeps its state, and how it writes files that are never seen half written."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def atoll_home() -> Path:
    """The state folder: ``$ATOLL_HOME``, else ``~/.atoll``. Made with mode 0700 where it does not exist yet."""
    home = Path(os.environ.get("ATOLL_HOME") or "~/.atoll").expanduser().absolute()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


def user_name() -> str:
    """Who runs this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        return f"uid{os.getuid()}"


def write_atomic(path: str | os.PathLike[str], data: bytes, *, mode: int = 0o600) -> None:
    """Write ``data`` so that ``path`` holds either its old content or all of the new, also after a power cut.

    The bytes go to a temporary file in the same folder, which is synced and then renamed over ``path``.
    """
    target = Path(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException as error:  # also Ctrl-C: the temporary file is ours to remove
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = os.fspath(target)  # a disk that is full does not say which
        raise
    fsync_folder(target.parent)


def sweep_temporary(path: str | os.PathLike[str], older_s: float = 0.0) -> None:
    """Remove what ``write_atomic`` left of ``path`` where its process was killed, if it is so many seconds old."""
    target = Path(path)
    oldest = time.time() - older_s
    for left in target.parent.glob(f".{target.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime <= oldest:
                left.unlink()


def fsync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames and new names inside ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def short_path(folder: str | os.PathLike[str], name: str) -> Iterator[str]:
    """A path to what is called so in the folder, for as long as this lasts: one that fits into a socket's address."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Does a process hold this file's lock for itself? Unlike a pid it can't be mistaken for another's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def shown_path(path: str) -> str:
    """A path as people type it: relative to where they are, if it lies below. URLs stay as they are."""
    if "://" in path or not Path(path).is_relative_to(Path.cwd()):
        return path
    return os.path.relpath(path)


# The pid that people see, for ranks that live in a PID namespace of their own: set for them by `atoll train`.
DRIVER_PID = "ATOLL_DRIVER_PID"


def visible_pid() -> int:
    """The pid under which people find this process, or the one that started it, on this machine."""
    return int(os.environ.get(DRIVER_PID) or os.getpid())
