"""Where Atoll keeps its state, and how it writes files that are never seen half written."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import glob
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from atoll.core.errors import ConfigError

_MOST_TEXT_BYTES = 16 << 20


def read_text(path: str | os.PathLike[str], label: str, expected: str) -> str:
    """The text of a file that somebody wrote by hand, without a byte order mark.

    Args:
        label: how messages call the file.
        expected: what it should be, for messages: ``a task file``.

    Raises:
        ConfigError: it can't be read, is not UTF-8, or larger than anybody writes.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{label} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _MOST_TEXT_BYTES:
        raise ConfigError(f"{label} has more than {_MOST_TEXT_BYTES >> 20} MiB: is it {expected}?")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label} is not text in UTF-8 (byte {error.start}): is it {expected}?") from None


def atoll_home() -> Path:
    """The state folder: ``$ATOLL_HOME``, else ``~/.atoll``. Made with mode 0700 where it does not exist yet."""
    home = Path(os.environ.get("ATOLL_HOME") or "~/.atoll").expanduser().absolute()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"ATOLL_HOME={home}: it, or a part of it, is a file; expected a folder") from None
    except OSError as error:
        raise ConfigError(f"ATOLL_HOME={home}: {error.strerror}; set it to a folder that can be written to") from None
    return home


def current_folder() -> str:
    """The folder this process works in.

    Raises:
        ConfigError: it was removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current folder is gone: it was removed after this process entered it, and ranks start there. "
            "Go to one that exists, with cd or os.chdir(...)"
        ) from None


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
    try:
        with temporary_beside(target) as place:
            with open(place, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            os.replace(place, target)
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(target)  # a disk that is full does not say which
        raise
    fsync_folder(target.parent)


@contextlib.contextmanager
def temporary_beside(target: Path, *, folder: bool = False) -> Iterator[Path]:
    """A new file or folder in the folder of ``target``, to be renamed to it; it is removed if it is still there then.

    It is locked for as long as its owner lives, so that ``sweep_temporary`` can tell what a dead one left.
    """
    while True:
        place = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        if folder:
            place.mkdir()
        try:
            descriptor = os.open(
                place, os.O_CLOEXEC | (os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_EXCL), 0o600
            )
        except FileNotFoundError:
            if folder:  # it was swept before it was opened
                continue
            raise
        _try_lock(descriptor, wait=True)  # whoever sweeps holds it for a moment
        if place.exists():  # else it was swept before it was locked
            break
        os.close(descriptor)
    try:
        yield place
    finally:  # also on Ctrl-C
        _remove(place)
        os.close(descriptor)


def sweep_temporary(target: str | os.PathLike[str]) -> None:
    """Remove what dead owners of ``temporary_beside`` left of ``target``, whose name may be ``*``."""
    folder, name = os.path.split(os.path.abspath(target))
    for left in Path(folder).glob(f".{name if name == '*' else glob.escape(name)}.*.tmp"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _try_lock(descriptor):
                    _remove(left)
            finally:
                os.close(descriptor)


def _try_lock(descriptor: int, *, wait: bool = False) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held, or a file system that locks none: nothing is swept there
        return False
    return True


def _remove(place: Path) -> None:
    if place.is_dir():
        import shutil  # where it is needed: agents and workers start without it

        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


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
