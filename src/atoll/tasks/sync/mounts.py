"""``file_mounts``: folders, files and URLs that are put at named places of every node.

Everything is copied, buckets too: a node of one's own has no bucket to mount. What the job writes there stays there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from atoll.core.errors import AtollError, ConfigError
from atoll.core.secrets import redact
from atoll.core.validation import nearest
from atoll.providers.base import WORKDIR
from atoll.tasks.sync.receive import MOUNTS, SELF, Entry, Receiver, unwritable
from atoll.tasks.sync.send import Progress

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_EXTRAS = {"s3": "atoll[s3]", "s3a": "atoll[s3]", "gs": "atoll[gcs]", "gcs": "atoll[gcs]", "az": "adlfs"}
_EXTRAS |= {"abfs": "adlfs", "http": "fsspec[http]", "https": "fsspec[http]", "hf": "huggingface_hub"}
_SYSTEM = (
    *("bin", "boot", "dev", "etc", "proc", "run", "sbin", "sys", "usr", "var"),
    *("lib", "lib32", "lib64", "libx32"),
)


@dataclass(frozen=True, slots=True)
class Mount:
    """One thing to put on a node.

    Attributes:
        key: what it is called in messages: ``file_mounts.~/data``.
        target: where, as the task says it.
        source: absolute path of a file or folder of this machine, a URL, or None for an empty folder.
    """

    key: str
    target: str
    source: str | None

    @property
    def is_url(self) -> bool:
        """Does ``source`` lie elsewhere than on this machine?"""
        return self.source is not None and "://" in self.source


def resolve_mounts(mounts: Mapping[str, Any], *, workdir: bool = False) -> list[Mount]:
    """Read and check ``file_mounts``.

    Args:
        mounts: target to a path, a URL, or a storage mapping with ``source``.
        workdir: has the task one? Then its place is taken.

    Raises:
        ConfigError: a target or source that cannot be; the message names both.
    """
    found = []
    for target, value in mounts.items():
        key = f"file_mounts.{target}"
        _check_target(key, target, workdir)
        sources = value.get("source") if isinstance(value, Mapping) else value
        if not isinstance(sources, list):
            found.append(Mount(key, target, _checked(key, sources)))
            continue
        for each in sources:  # a bucket that was to be filled from several places
            name = PurePosixPath(str(each)).name
            found.append(Mount(key, f"{target}/{name}", _checked(key, each)))
    return found


def _check_target(key: str, target: str, workdir: bool) -> None:
    if not target:
        raise ConfigError(f"{key}: expected a path on the node, such as ~/data")
    parts = PurePosixPath(target).parts
    if target.endswith("/"):
        raise ConfigError(f"{key}: a target has no / at its end: write {target.rstrip('/') or '~/data'}")
    if ".." in parts or target in ("~", ".", "/tmp") or (parts[0].startswith("~") and parts[0] != "~"):
        raise ConfigError(f"{key}: expected ~/NAME, /PATH, or a path below the workdir, without '..'")
    if target.startswith("/") and len(parts) == 2 and parts[1] in _SYSTEM:
        raise ConfigError(f"{key}: a node can't do without its own {target}: choose a folder in it, or ~/NAME")
    if workdir and parts == ("~", WORKDIR):
        raise ConfigError(f"{key}: that is where the workdir goes: choose a folder in it, or leave workdir out")


def _checked(key: str, source: object) -> str | None:
    if source is None:
        return None  # a bucket that a cloud would make: an empty folder
    if not isinstance(source, str) or not source:
        raise ConfigError(f"{key}: {source!r}: expected a path of this machine, or a URL such as s3://bucket/folder")
    if source.startswith("file://"):
        source = source.removeprefix("file://")
    if "://" in source:
        _check_scheme(key, source)
        return source
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"{key}: {source} is not on this machine (looked for {path})")
    if not path.is_file() and not path.is_dir():
        raise ConfigError(f"{key}: {source} is a device, a pipe or a socket: expected a file or a folder")
    return os.fspath(path)


def _check_scheme(key: str, url: str) -> None:
    """Refuse a URL of a kind that nothing reads; asks nobody. Without fsspec the one who fetches it tells."""
    try:
        import fsspec
    except ImportError:
        return
    scheme, known = url.partition("://")[0], fsspec.available_protocols()
    if scheme.partition("::")[0] not in known:
        hint = nearest(scheme, known) or ": expected s3, gs, https or another scheme that fsspec knows"
        raise ConfigError(f"{key}: {redact(url)}: unknown scheme {scheme!r}{hint}")


def place(target: str, home: str, workdir: str, seen: Sequence[str] = ()) -> tuple[str, str | None]:
    """Where a target lies on a node, and the path that jobs are to see it at, where that is another.

    Args:
        seen: folders of the node's machine, beside ``home``, in which what is put is seen by jobs.
    """
    parts = PurePosixPath(target).parts
    if parts[0] == "~":
        return os.path.join(home, *parts[1:]), None
    if not target.startswith("/"):
        return os.path.join(workdir, target), None
    if any(PurePosixPath(target).is_relative_to(each) for each in (home, *seen)):
        return target, None
    return os.path.join(home, MOUNTS, target.lstrip("/")), target


def download(mount: Mount, dest: Path, progress: Progress | None = None) -> None:
    """Bring what a mount's URL names to this machine, only what is not there yet.

    Raises:
        ConfigError: it cannot be read; the message names the mount.
        ProvisionError: ``dest`` cannot be written.
    """
    assert mount.source is not None
    system, files = _look(mount, mount.source)
    done = in_all = 0

    class Content:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def read(self, size: int = -1, /) -> bytes:
            nonlocal done
            with _naming(mount):
                piece = self._file.read(size)
            done += len(piece)
            if progress is not None:
                progress(done, max(done, in_all))
            return piece

    try:
        with Receiver(dest, {path: entry for path, (_, entry) in files.items()}) as receiver:
            todo = receiver.wanted()
            in_all = sum(entry.size for entry in todo)
            for entry in todo:
                with _naming(mount):
                    source = system.open(files[entry.path][0], "rb")
                with source:
                    receiver.put(entry, Content(source))
    except OSError as error:
        raise unwritable(dest, error) from None


@contextlib.contextmanager
def _naming(mount: Mount) -> Iterator[None]:
    """Turns whatever a file system raises into a ``ConfigError`` that names the mount; each has types of its own."""
    what = f"{mount.key}: {redact(str(mount.source))}"
    try:
        yield
    except AtollError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"{what}: there is nothing at this address") from None
    except Exception as error:  # noqa: BLE001 - see above
        reason = redact(str(error)) or type(error).__name__
        raise ConfigError(f"{what} could not be read ({reason}): check address and login") from None


def _look(mount: Mount, url: str) -> tuple[AbstractFileSystem, dict[str, tuple[str, Entry]]]:
    """The file system of a URL and the files there: path below it to the system's own name, and an entry."""
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        system, root = url_to_fs(url)
    except ImportError as error:
        wanted = _EXTRAS.get(scheme, "fsspec" if error.name == "fsspec" else "")
        how = f'pip install "{wanted}"' if wanted else str(error)
        raise ConfigError(f"{mount.key}: {scheme}:// needs a package that is not installed: {how}") from None
    except ValueError as error:
        raise ConfigError(f"{mount.key}: {redact(url)}: {redact(str(error))}") from None
    with _naming(mount):
        system.invalidate_cache()
        single = scheme in ("http", "https") or system.isfile(root)
        found = {root: system.info(root)} if single else system.find(root, detail=True)
    if not found:
        raise ConfigError(f"{mount.key}: {redact(url)}: there is nothing at this address")
    files = {}
    for name, info in found.items():
        path = SELF if single else name.removeprefix(root.rstrip("/")).lstrip("/")
        if info.get("type") != "directory" and not name.endswith("/"):
            files[path] = (name, Entry(path, "file", info.get("size") or 0, _changed_ns(info), 0o644))
    return system, files


def _changed_ns(info: Mapping[str, Any]) -> int:
    """When a remote file was changed; now, which is never what is there, where its system does not tell."""
    for key in ("LastModified", "last_modified", "updated", "mtime", "created"):
        when = info.get(key)
        if isinstance(when, str):
            when = datetime.fromisoformat(when)
        if isinstance(when, datetime):
            when = when.timestamp()
        if isinstance(when, (int, float)):
            return round(when * 1e6) * 1000
    return time.time_ns()
