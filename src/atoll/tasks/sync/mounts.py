"""``file_mounts``: folders, files and URLs that are put at named places of every node.

Everything is copied, buckets too: a node of one's own has no bucket to mount. What the job writes there stays there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any

from atoll.core.errors import AtollError, ConfigError
from atoll.core.paths import write_atomic
from atoll.core.secrets import redact
from atoll.core.validation import nearest
from atoll.tasks.nodes import TARGETS
from atoll.tasks.spec import WORKDIR
from atoll.tasks.sync.receive import MOUNTS, SELF, Entry, Receiver, manifest, unwritable
from atoll.tasks.sync.select import Survey
from atoll.tasks.sync.send import Progress, mirror
from atoll.tasks.variables import substitute

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_MODES = ("MOUNT", "COPY", "MOUNT_CACHED")
_EXTRAS = {"s3": "atoll[s3]", "s3a": "atoll[s3]", "gs": "atoll[gcs]", "gcs": "atoll[gcs]", "az": "adlfs"}
_EXTRAS |= {"abfs": "adlfs", "http": "fsspec[http]", "https": "fsspec[http]", "hf": "huggingface_hub"}
_PIECE_BYTES = 1 << 22
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


def resolve_mounts(
    mounts: Mapping[str, object], variables: Mapping[str, str] | None = None, *, workdir: bool = False
) -> list[Mount]:
    """Read and check ``file_mounts``.

    Args:
        mounts: target to a path, a URL, or a storage mapping with ``source``, ``mode``, ``name`` and ``store``.
        variables: values for ``$NAME`` in them.
        workdir: has the task one? Then its place is taken.

    Raises:
        ConfigError: a target or source that cannot be; the message names both.
    """
    found = []
    for target, value in substitute(dict(mounts), variables or {}).items():
        key = f"file_mounts.{target}"
        _check_target(key, target, workdir)
        sources = _sources(key, value)
        if not isinstance(sources, list):
            found.append(Mount(key, target, _checked(key, sources)))
            continue
        for each in sources:  # a bucket that was to be filled from several places
            name = PurePosixPath(str(each)).name
            found.append(Mount(key, f"{target}/{name}", _checked(key, each)))
    return found


def _check_target(key: str, target: object, workdir: bool) -> None:
    if not isinstance(target, str) or not target:
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


def _sources(key: str, value: object) -> Any:
    if not isinstance(value, Mapping):
        return value
    mode = value.get("mode", "MOUNT")
    if not isinstance(mode, str) or mode.upper() not in _MODES:
        hint = nearest(str(mode).upper(), _MODES)
        raise ConfigError(f"{key}: mode is {mode!r}{hint or ': expected ' + ', '.join(_MODES)}")
    return value.get("source")


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


def place(target: str, home: Path) -> tuple[Path, Path | None]:
    """Where a target of a node of this machine lies, and the path that its jobs see it at, where that is another."""
    parts = PurePosixPath(target).parts
    if parts[0] == "~":
        return home.joinpath(*parts[1:]), None
    if not target.startswith("/"):
        return home / WORKDIR / target, None
    at = Path(target)
    if at.is_relative_to(home):
        return at, None
    return home / MOUNTS / at.relative_to("/"), at


def apply_mount(
    mount: Mount, home: Path, progress: Progress | None = None, seen_there: Survey | None = None
) -> list[str]:
    """Put a mount on a node of this machine; lines for the user.

    Args:
        home: the node's HOME. Beside it is noted what its jobs see outside of it.
        seen_there: what the source is known to hold.

    Raises:
        ConfigError: the source cannot be read; the message names the mount.
        ProvisionError: the node cannot be written to.
    """
    at, seen = place(mount.target, home)
    if mount.source is None:
        lines = [f"{mount.key} has no source: an empty folder that stays on its node"]
        try:
            at.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(at, error) from None
    elif mount.is_url:
        lines = _download(mount, mount.source, at, progress)
    else:
        lines = [f"{mount.key}: {line}" for line in mirror(seen_there or Path(mount.source), at, progress).notes]
    if seen is not None:
        _note_target(home.parent / TARGETS, str(seen), str(at))
    return lines


def _note_target(path: Path, target: str, source: str) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    if target not in known:
        write_atomic(path, json.dumps({**known, target: source}).encode())


def fetch_mount(mount: Mount, cache: Path, progress: Progress | None = None) -> Mount:
    """The mount with a source on this machine: what a URL names is fetched into ``cache``, once for all nodes.

    Raises:
        ConfigError, ProvisionError: as ``apply_mount``.
    """
    if mount.source is None or not mount.is_url:
        return mount
    parts = [part for part in PurePosixPath(mount.target).parts if part not in ("~", "/")]
    at = cache.joinpath(*parts)
    _download(mount, mount.source, at, progress)
    return dataclasses.replace(mount, source=os.fspath(at))


# ---------------------------------------------------------------------------------------------------------- URLs


class _Remote:
    """Turns whatever a file system raises into a ``ConfigError`` that names the mount; each has types of its own."""

    def __init__(self, mount: Mount) -> None:
        self._what = f"{mount.key}: {redact(str(mount.source))}"

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, AtollError) or not isinstance(error, Exception):
            return
        if isinstance(error, FileNotFoundError):
            raise ConfigError(f"{self._what}: there is nothing at this address") from None
        reason = redact(str(error)) or type(error).__name__
        raise ConfigError(f"{self._what} could not be read ({reason}): check address and login") from None


def _download(mount: Mount, url: str, dest: Path, progress: Progress | None) -> list[str]:
    remote = _Remote(mount)
    system, files = _look(mount, url, remote)
    entries = {path: entry for path, (_, entry) in files.items()}
    there = manifest(dest)
    todo = [(name, entry) for path, (name, entry) in files.items() if there.get(path) != entry]
    in_all, done = sum(entry.size for _, entry in todo), 0
    try:
        with Receiver(dest, entries) as receiver:
            for name, entry in todo:
                with remote:
                    source = system.open(name, "rb")
                with source, receiver.file(entry) as file:
                    while True:
                        with remote:
                            piece = source.read(_PIECE_BYTES)
                        if not piece:
                            break
                        file.write(piece)
                        done += len(piece)
                        if progress is not None:
                            progress(done, max(done, in_all))
    except OSError as error:
        raise unwritable(dest, error) from None
    return []


def _look(mount: Mount, url: str, remote: _Remote) -> tuple[AbstractFileSystem, dict[str, tuple[str, Entry]]]:
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
    with remote:
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
