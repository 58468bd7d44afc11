"""Files that hold data, wherever they lie: folders, globs, lists and URLs become one sorted list of files."""

from __future__ import annotations

import contextlib
import functools
import glob
import gzip
import hashlib
import io
import os
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from atoll.core.errors import ConfigError
from atoll.core.secrets import redact
from atoll.core.validation import nearest

COMPRESSIONS = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}

_BLOCK = 1 << 20
_STAMPS = (
    "ETag",
    "etag",
    "Content-MD5",
    "md5Hash",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "mtime",
    "created",
)


@dataclass(frozen=True)
class SourceFile:
    """One file.

    Attributes:
        num_bytes: its size as it lies there; None where the server does not tell.
        stamp: changes when the content does: the time of the last change, an ETag, or a digest of the content.
    """

    path: str
    num_bytes: int | None
    stamp: str
    asked: str

    @property
    def name(self) -> str:
        """For messages: the path without secrets."""
        return redact(self.path)

    @property
    def is_local(self) -> bool:
        """Whether it is on a mounted file system."""
        return not is_url(self.path)

    @functools.cached_property
    def extensions(self) -> list[str]:
        """Lower case, without that of a compression: ``[".jsonl"]`` for ``a.b/x.jsonl.gz``."""
        base, last = os.path.splitext(self.path.partition("?")[0])
        found = [os.path.splitext(base)[1].lower(), last.lower()]
        return [each for each in found if each and each not in COMPRESSIONS][-1:]

    @contextlib.contextmanager
    def open_raw(self) -> Iterator[IO[bytes]]:
        """The bytes as they lie there, seekable.

        Raises:
            ConfigError: it cannot be opened or read.
        """
        with reading(self.name):
            if self.is_local:
                with Path(self.path).open("rb") as file:
                    yield file
            else:
                with _seekable(*_file_system(self.path)) as file:
                    yield file

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Its content, decompressed, and the raw file below, whose position tells the progress."""
        with self.open_raw() as raw:
            kind = self._compression(raw)
            if kind is None:
                yield raw, raw
                return
            content, broken = _decompressed(raw, kind)
            try:
                with content:
                    yield content, raw
            except broken as error:  # torn
                raise ConfigError(f"{self.name} is a broken {kind} file ({error}): get it again") from None

    def is_compressed(self) -> bool:
        """Whether what lies there has to be decompressed."""
        with self.open_raw() as raw:
            return self._compression(raw) is not None

    def _compression(self, raw: IO[bytes]) -> str | None:
        """By the first bytes; but a token file may begin with any, so there the name has to say it."""
        magic = raw.read(4)
        raw.seek(0)
        kind = next((name for name, start in COMPRESSIONS.items() if magic.startswith(start)), None)
        expected = next((name for name in COMPRESSIONS if self.path.lower().endswith(name)), None)
        if expected and not kind:
            raise ConfigError(f"{self.name} is not a {expected} file, although its name ends so: rename or remake it")
        return kind if expected or self.extensions != [".bin"] else None


def is_url(path: str) -> bool:
    """``s3://…``, ``https://…``, ``memory://…``; not a Windows drive, and not a path."""
    return "://" in path


def find_files(asked: str, left_out: list[str] | None = None) -> list[SourceFile]:
    """The files behind a file name, folder, glob or URL, sorted by name; hidden ones in folders are skipped.

    Args:
        left_out: what a folder or glob holds and no data can be read from is added here, each with the reason: links
            to nothing, pipes, devices.

    Raises:
        ConfigError: there is nothing, or it cannot be reached; the message names what was asked for.
    """
    skipped = [] if left_out is None else left_out
    found = _find_remote(asked) if is_url(asked) else _find_local(asked, skipped)
    if not found:
        but = f" but {', '.join(skipped[:3])}" if skipped else ""
        raise ConfigError(f"[data] path = {redact(asked)!r}: nothing matches, or the folder holds no files{but}")
    return found


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """What goes wrong between here and a file, told as ``ConfigError``."""
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist (any more)") from None
    except PermissionError:
        raise ConfigError(f"{name} may not be read: check its permissions, or the credentials") from None
    except _remote_errors() as error:
        raise ConfigError(f"{name} cannot be read: {redact(str(error) or type(error).__name__)}") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {redact(error.strerror or str(error))}") from error


def _remote_errors() -> tuple[type[BaseException], ...]:
    """Errors of the clients behind URLs that are no OSError; only of those that were imported."""
    known = (
        ("aiohttp", "ClientError"),
        ("botocore.exceptions", "BotoCoreError"),
        ("botocore.exceptions", "ClientError"),
    )
    return tuple(getattr(sys.modules[module], name) for module, name in known if module in sys.modules)


def _find_local(asked: str, left_out: list[str]) -> list[SourceFile]:
    path = Path(asked).expanduser()
    with reading(asked):
        if path.is_dir():
            return _regular(_walk(path, left_out), asked, left_out)
        if os.path.lexists(path):
            if wrong := _unreadable(path):
                raise ConfigError(f"[data] path = {asked!r} is {wrong}, expected a file: write the data to one first")
            return [_local(path, asked)]
        if glob.has_magic(asked):
            matches = (Path(each) for each in sorted(glob.glob(str(path), recursive=True)))
            return _regular((each for each in matches if not each.is_dir()), asked, left_out)
    near = nearest(
        path.name, [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else [], os.path.dirname(asked)
    )
    where = "" if path.is_absolute() else f" (looked for in {Path.cwd()})"
    raise ConfigError(f"[data] path = {asked!r} does not exist{where}{near}")


def _walk(folder: Path, left_out: list[str]) -> Iterator[Path]:
    """What lies in a folder; each folder below once, however many links lead there, so that a circle of them ends."""

    def closed(error: OSError) -> None:
        left_out.append(f"{Path(error.filename).name} ({error.strerror})")

    seen: set[tuple[int, int]] = set()
    for where, folders, names in os.walk(folder, onerror=closed, followlinks=True):
        facts = Path(where).stat()
        if (facts.st_dev, facts.st_ino) in seen:
            left_out.append(f"{Path(where).name} (a link to a folder that is read already)")
            folders.clear()
            continue
        seen.add((facts.st_dev, facts.st_ino))
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        yield from (Path(where) / name for name in sorted(names) if not name.startswith("."))


def _regular(paths: Iterable[Path], asked: str, left_out: list[str]) -> list[SourceFile]:
    found: list[SourceFile] = []
    seen: set[tuple[object, str]] = set()  # a glob with ** goes through a circle of links again and again
    real = functools.cache(os.path.realpath)
    for path in paths:
        place = real(path.parent), path.name
        with reading(str(path)):
            if place in seen:
                left_out.append(f"{path.name} (found twice, through a link)")
            elif wrong := _unreadable(path):
                left_out.append(f"{path.name} ({wrong})")
            else:
                found.append(_local(path, asked))
        seen.add(place)
    return found


def _unreadable(path: Path) -> str | None:
    """What a path is that is no file to read, and to read more than once; None for a file."""
    try:
        mode = path.stat().st_mode
    except OSError:
        if path.is_symlink():
            return f"a link to nothing, {str(path.readlink())!r}"
        raise
    kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return None if stat.S_ISREG(mode) else next((name for test, name in kinds if test(mode)), "a device")


def _local(path: Path, asked: str) -> SourceFile:
    facts = path.stat()
    return SourceFile(str(path.absolute()), facts.st_size, f"mtime {facts.st_mtime_ns}", asked)


def _file_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f"{redact(url)}: URLs need fsspec: pip install fsspec") from None
    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a missing driver, or a protocol that nobody knows
        raise ConfigError(f"{redact(url)}: {error}") from None
    return file_system, path


@contextlib.contextmanager
def _seekable(file_system: Any, path: str) -> Iterator[IO[bytes]]:
    """A file behind a URL. A web server that cannot send parts of one has it copied to a temporary file first."""
    with file_system.open(path, "rb") as file:
        if not is_url(path) or _sends_parts(file):
            yield cast(IO[bytes], file)
            return
    with tempfile.TemporaryFile() as copy:
        for block in _blocks(file_system, path):
            copy.write(block)
        copy.seek(0)
        yield copy


def _sends_parts(file: Any) -> bool:
    if file.size is None:
        return False
    try:
        file.seek(max(0, file.size - 1))
        file.read(1)
        file.seek(0)
    except ValueError:  # how fsspec says that the server sent the whole, or never sends less
        return False
    return True


def _blocks(file_system: Any, path: str) -> Iterator[bytes]:
    """The content from the beginning; from a web server (the only one whose paths are URLs) as one stream."""
    options = {"block_size": 0} if is_url(path) else {}
    with file_system.open(path, "rb", **options) as file:
        while block := file.read(_BLOCK):
            yield block


def _find_remote(asked: str) -> list[SourceFile]:
    file_system, path = _file_system(asked)
    with reading(redact(asked)):
        file_system.invalidate_cache()  # a listing from earlier in this process may be old
        # Of a web server only single files: a "folder" there is a page of links.
        is_web = asked.startswith(("http://", "https://"))
        if not is_web and glob.has_magic(path):
            found = file_system.glob(path, detail=True)
        elif not is_web and file_system.isdir(path):
            found = file_system.find(path, detail=True)
        else:
            found = {path: file_system.info(path)}
        files = {name: facts for name, facts in sorted(found.items()) if facts.get("type") != "directory"}
        shown = path.rstrip("/")
        return [
            _remote(file_system, name, facts, asked)
            for name, facts in files.items()
            if "/." not in name.removeprefix(shown)
        ]


def _remote(file_system: Any, path: str, facts: dict[str, Any], asked: str) -> SourceFile:
    url = path if is_url(path) else str(file_system.unstrip_protocol(path))
    stamp = next((f"{key} {facts[key]}" for key in _STAMPS if facts.get(key)), None)
    if stamp is None:  # the server tells nothing: only the content itself can
        digest = hashlib.sha256()
        for block in _blocks(file_system, path):
            digest.update(block)
        stamp = f"sha256 {digest.hexdigest()}"
    return SourceFile(url, facts.get("size"), stamp, asked)


def _decompressed(raw: IO[bytes], kind: str) -> tuple[IO[bytes], tuple[type[BaseException], ...]]:
    """The content, and what reading it raises where the file is torn."""
    if kind == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw, mode="rb")), (EOFError, gzip.BadGzipFile, zlib.error)
    try:
        import zstandard
    except ImportError:
        raise ConfigError(".zst files need zstandard: pip install zstandard") from None
    blocks = _Blocks(_zstd_blocks(raw, zstandard.ZstdDecompressor()))
    return cast(IO[bytes], io.BufferedReader(blocks, _BLOCK)), (EOFError, zstandard.ZstdError)


def _zstd_blocks(raw: IO[bytes], engine: Any) -> Iterator[bytes]:
    """The content of all frames of a stream. The package's own reader takes a cut frame for a whole one."""
    frame = engine.decompressobj()
    data = raw.read(_BLOCK)
    while data:
        yield frame.decompress(data)
        if frame.eof:
            data = frame.unused_data or raw.read(_BLOCK)
            frame = engine.decompressobj() if data else frame
        else:
            data = raw.read(_BLOCK)
            if not data:
                raise EOFError("it ends in the middle")


class _Blocks(io.RawIOBase):
    """Blocks of bytes as a stream."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` with what comes next; 0 at the end."""
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
