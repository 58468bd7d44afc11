"""Where files arrive: puts what a client sends into a folder, one whole file at a time, and nowhere else.

Standard library only: on an ssh host ``python -m atoll.tasks.sync.receive FOLDER [LINK]`` reads from the connection,
and for local nodes ``send`` uses the same ``Receiver``. Beside a folder ``x`` it keeps ``.atoll-x.json``: the paths
that transfers brought, the only ones that a later transfer may delete. Paths are relative, with ``/``; bytes that are
not UTF-8 are surrogates.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol

from atoll.core.errors import ConfigError, ProvisionError
from atoll.core.paths import write_atomic
from atoll.providers.base import WORKDIR

END = ".atoll-end"  # last member of a tar: one that is cut between two members looks whole to tarfile
MOUNTS = ".atoll-mounts"  # below HOME: what was to lie elsewhere
SELF = "."  # the path of what is not a folder but a single file
BUFFER_BYTES = 1 << 20


class Readable(Protocol):
    """What a file's bytes are read from."""

    def read(self, size: int = ..., /) -> bytes: ...


class Entry(NamedTuple):
    """One file, link or empty folder of a listing.

    Attributes:
        path: below the folder.
        kind: ``file``, ``link`` or ``folder``.
        size: bytes of a file, else 0.
        mtime_ns: when a file was changed, else 0.
        mode: permission bits of a file, else 0.
        target: where a link points to.
    """

    path: str
    kind: str
    size: int = 0
    mtime_ns: int = 0
    mode: int = 0
    target: str = ""


def entry_of(path: str, at: str) -> Entry | None:
    """What lies at ``at`` as an entry called ``path``, or None for sockets, fifos and devices.

    Raises:
        OSError: nothing lies there.
    """
    found = os.lstat(at)
    if stat.S_ISREG(found.st_mode):
        return Entry(path, "file", found.st_size, found.st_mtime_ns, found.st_mode & 0o777)
    if stat.S_ISLNK(found.st_mode):
        return Entry(path, "link", target=os.readlink(at))
    return Entry(path, "folder") if stat.S_ISDIR(found.st_mode) else None


def below(root: str | os.PathLike[str], path: str) -> str:
    """Where the entry ``path`` of ``root`` lies."""
    return os.fspath(root) if path == SELF else os.path.join(root, path)


def receive(stream: IO[bytes], dest: Path, answer: Callable[[object], object]) -> None:
    """Make ``dest`` what a client sends: a line with all entries of its source, then a tar of the files ``answer``ed.

    Raises:
        ConfigError: it names something outside ``dest``, ends early, or a folder of the job is in the way.
        OSError: the disk is full, or may not be written.
    """
    try:
        entries = {entry.path: entry for entry in (Entry(*each) for each in json.loads(stream.readline()))}
        with Receiver(dest, entries) as receiver:
            answer([entry.path for entry in receiver.wanted()])
            with tarfile.open(fileobj=stream, mode="r|", bufsize=BUFFER_BYTES) as tar:
                while (member := tar.next()) is not None and member.name != END:
                    entry, content = entries.get(member.name), tar.extractfile(member) if member.isreg() else None
                    if entry is None or content is None:
                        raise ConfigError(f"{member.name!r} in the tar was not listed: nothing more was unpacked")
                    receiver.put(entry, content)
            if member is None:
                raise EOFError("its last file is missing")
        while stream.read(BUFFER_BYTES):
            pass  # padding, whose writer must not find the pipe closed
    except (tarfile.TarError, EOFError, json.JSONDecodeError) as error:
        raise ConfigError(f"{dest}: the transfer ended early or was damaged ({error}): try again") from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # a secret is nobody else's to read, also before it has its mode


def expose(at: Path, path: Path) -> str | None:
    """Make ``at`` a link to ``path``; a line for the user where it can't be, or is taken from another workdir."""
    old = None
    try:
        if at.is_symlink() and (MOUNTS in (found := Path(os.readlink(at))).parts or found.name == WORKDIR):
            at.unlink()  # an earlier one of ours
            old = found if found.name == WORKDIR and found != path and found.exists() else None
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(path)
    except OSError as error:
        if at.is_symlink() and os.readlink(at) == str(path):  # another host of a shared home was faster
            return None
        return f"{at} could not be made ({error.strerror}): it is at {path}; targets below ~/ or /tmp always work"
    return None if old is None else f"{at} led to {old} until now, and leads to {path}, also for jobs that run there"


class Receiver:
    """A folder that a transfer fills; a context manager, one at a time a folder.

    Entering deletes what earlier transfers brought and ``entries`` lacks, and never what the job wrote. Each file is
    written aside and renamed, so that a running job never sees half of one.

    Args:
        dest: the folder (or, of a source that is a single file, that file).
        entries: all of the source's, by path, whether they are going to be sent or are there already.

    Raises:
        ConfigError: an entry that names something outside ``dest``.
    """

    def __init__(self, dest: Path, entries: Mapping[str, Entry]) -> None:
        for path in entries:
            if path != SELF and ("\0" in path or any(part in ("", ".", "..") for part in path.split("/"))):
                raise ConfigError(f"{path!r}: a path below {dest} was expected, without '..': nothing was written")
        self._dest = Path(os.path.realpath(dest))
        self._entries = entries
        self._state = state_file(self._dest)
        self._parts = self._dest.parent / f".atoll-{self._dest.name}.part"
        self._parents: dict[str, str] = {}  # folders that were seen to be inside, and where to write for each
        self._num_parts = 0

    def __enter__(self) -> Receiver:
        self._dest.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context(open(lock_file(self._dest), "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # two clients that send at once
            shutil.rmtree(self._parts, ignore_errors=True)  # of a transfer that was killed
            self._parts.mkdir(mode=0o700)
            stack.callback(shutil.rmtree, self._parts, ignore_errors=True)
            self._before = self._brought = _brought(self._state)
            # Both, until all has arrived: what an interrupted transfer brought is ours too.
            self._remember(self._before | self._entries.keys())
            self._delete(self._before - self._entries.keys())
            if SELF not in self._entries:
                _make_folder(self._dest)
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            if error is None:
                self._put_links_and_folders()
                self._remember(self._entries.keys())

    def wanted(self) -> list[Entry]:
        """The files that no earlier transfer brought, or that are not as they are to be."""
        return [entry for entry in self._entries.values() if entry.kind == "file" and not self._has(entry)]

    def _has(self, entry: Entry) -> bool:
        try:
            return entry.path in self._before and entry_of(entry.path, below(self._dest, entry.path)) == entry
        except OSError:
            return False  # the job has removed it, or made a file of its folder

    def put(self, entry: Entry, content: Readable) -> None:
        """Write a file, which takes its place once ``content`` is read to its end."""
        part = self._new_part(entry.path)
        try:
            with open(part, "wb", buffering=0, opener=_private) as file:
                shutil.copyfileobj(content, file, BUFFER_BYTES)
                os.fchmod(file.fileno(), entry.mode)
                os.utime(file.fileno(), ns=(entry.mtime_ns, entry.mtime_ns))
            _replace(part, below(self._dest, entry.path))
        except BaseException:  # also Ctrl-C
            Path(part).unlink(missing_ok=True)
            raise

    def _put_links_and_folders(self) -> None:
        """Make the links and empty folders among the entries; last, so that no file goes through a new link."""
        for entry in self._entries.values():
            target = below(self._dest, entry.path)
            if entry.kind == "folder":
                self._parent(entry.path)
                _make_folder(target)
            elif entry.kind == "link" and not (os.path.islink(target) and os.readlink(target) == entry.target):
                part = self._new_part(entry.path)
                os.symlink(entry.target, part)
                _replace(part, target)

    def _new_part(self, path: str) -> str:
        self._num_parts += 1
        return os.path.join(self._parent(path), f"{self._num_parts}.atoll-part")

    def _parent(self, path: str) -> str:
        """Make the folder of ``path``, and say where its files are written before they are renamed into it."""
        parent = os.path.dirname(below(self._dest, path))
        if parent not in self._parents:
            real = os.path.realpath(parent)
            if path != SELF and os.path.commonpath([real, self._dest]) != os.fspath(self._dest):
                raise ConfigError(
                    f"{path!r} would be written to {real}, outside {self._dest}: a link there points out. "
                    "Remove the link, or rename the folder in the source"
                )
            _make_folder(parent)
            same_disk = os.stat(parent).st_dev == os.stat(self._parts).st_dev
            self._parents[parent] = os.fspath(self._parts) if same_disk else parent
        return self._parents[parent]

    def _delete(self, paths: Iterable[str]) -> None:
        parents = set()
        for path in paths:
            target = below(self._dest, path)
            parent = os.path.dirname(target)
            if path != SELF and os.path.realpath(parent) != parent:
                continue  # the job has put a link there: what lies behind it is not ours
            try:
                os.rmdir(target) if os.path.isdir(target) and not os.path.islink(target) else os.unlink(target)
            except OSError:
                continue  # gone already, or a folder that the job has filled
            parents.add(parent)
        # Folders that are empty now, the deepest first.
        for parent in sorted(parents, key=len, reverse=True):
            folder = parent
            with contextlib.suppress(OSError):
                while folder.startswith(f"{self._dest}/"):
                    os.rmdir(folder)
                    folder = os.path.dirname(folder)

    def _remember(self, paths: Set[str]) -> None:
        if paths != self._brought:
            write_atomic(self._state, json.dumps({"format": 1, "paths": sorted(paths)}).encode())
            self._brought = set(paths)


def _replace(part: str, target: str) -> None:
    try:
        os.replace(part, target)
    except (IsADirectoryError, NotADirectoryError):
        # An empty folder of an earlier transfer may lie there; one with files is the job's.
        try:
            os.rmdir(target)
        except OSError:
            raise _in_the_way(target, "a folder with files", "a file") from None
        os.replace(part, target)


def _make_folder(path: str | os.PathLike[str]) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise _in_the_way(os.fspath(path), "a file", "a folder") from None


def _in_the_way(path: str, found: str, wanted: str) -> ConfigError:
    return ConfigError(
        f"{path} on the node is {found} that a job wrote, and the source has {wanted} there: move it away"
    )


def state_file(dest: Path) -> Path:
    """Beside a folder: what was brought into it."""
    return dest.parent / f".atoll-{dest.name}.json"


def lock_file(dest: Path) -> Path:
    """Beside a folder: held by whoever brings something into it."""
    return dest.parent / f".atoll-{dest.name}.lock"


def _brought(state: Path) -> set[str]:
    try:
        data: Any = json.loads(state.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return {path for path in data["paths"] if isinstance(path, str)}


def unwritable(dest: Path, error: OSError) -> ProvisionError:
    """The error for a folder into which files could not be put."""
    at = error.filename or dest
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ProvisionError(f"no space left for {at}: free some, or list large files in .gitignore")
    return ProvisionError(f"{at} could not be written: {error.strerror}")


def main(arguments: list[str]) -> int:
    """The program: fills a folder from stdin, and links it where it is to be seen; two lines of JSON go to stdout.

    The first lists the files it wants, the second is a remark for the user or null. It exits with 1 and one line on
    stderr where the folder cannot be what it should be.
    """
    dest, *links = (Path(each).expanduser() for each in arguments)

    def answer(said: object) -> None:
        sys.stdout.write(f"{json.dumps(said)}\n")
        sys.stdout.flush()

    try:
        receive(sys.stdin.buffer, dest, answer)
        answer(expose(links[0], dest) if links else None)
    except (OSError, ConfigError) as error:
        sys.stderr.write(f"{unwritable(dest, error) if isinstance(error, OSError) else error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
