"""Files that hold data, wherever they lie: a folder, a glob or a URL becomes a sorted list of files."""

from __future__ import annotations

import contextlib
import glob
import gzip
import hashlib
import io
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError
from atoll.core.secrets import redact
from atoll.core.validation import nearest

_COMPRESSIONS = (".gz", ".zst")
_BLOCK = 1 << 20
_STAMPS = ("ETag", "etag", "Content-MD5", "LastModified", "last_modified", "Last-Modified", "mtime", "created")


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

    @property
    def name(self) -> str:
        """For messages: the path without secrets."""
        return redact(self.path)

    @property
    def is_local(self) -> bool:
        """Whether it is on a mounted file system."""
        return not is_url(self.path)

    @property
    def endings(self) -> tuple[str, str]:
        """Its extension and that of its compression, in lower case: ``(".jsonl", ".gz")``."""
        path = self.path if self.is_local else self.path.partition("?")[0]
        base, last = os.path.splitext(path.lower())
        return (os.path.splitext(base)[1], last) if last in _COMPRESSIONS else (last, "")

    @contextlib.contextmanager
    def open(self, *, seekable: bool = False) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Its content, decompressed, and the raw file below, whose position tells the progress.

        Raises:
            ConfigError: it cannot be opened or read.
        """
        _, compression = self.endings
        with reading(self.name), _open_raw(self.path) as raw, contextlib.ExitStack() as stack:
            content: IO[bytes] = raw
            if compression:
                content = stack.enter_context(_decompressed(raw, compression))
            if seekable and (compression or _is_web(self.path)):
                copy = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(content, copy)
                copy.seek(0)
                content = copy
            yield content, raw

    def read(self) -> NDArray[np.uint8]:
        """All of its content; that of a plain local file is mapped."""
        if self.is_local and not self.endings[1]:
            return np.memmap(self.path, np.uint8, "r") if self.num_bytes else np.empty(0, np.uint8)
        with self.open() as (content, _):
            return np.frombuffer(content.read(), np.uint8)


@contextlib.contextmanager
def _open_raw(path: str) -> Iterator[IO[bytes]]:
    if not is_url(path):
        with Path(path).open("rb") as file:
            yield file
        return
    file_system, inside = _file_system(path)
    options = {"block_size": 0} if _is_web(path) else {}  # a stream, as many web servers send no parts
    with io.BufferedReader(file_system.open(inside, "rb", **options), _BLOCK) as file:
        yield file


def _decompressed(raw: IO[bytes], compression: str) -> IO[bytes]:
    if compression == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw, mode="rb"))
    try:
        import pyarrow  # whose reader, unlike that of zstandard, does not take a cut file for a whole one
    except ImportError:
        raise ConfigError('.zst files need pyarrow: pip install "atoll[data]"') from None
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), _BLOCK)


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """What goes wrong between here and a file, told as ``ConfigError``."""
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist (any more)") from None
    except PermissionError:
        raise ConfigError(f"{name} may not be read: check its permissions, or the credentials") from None
    except _read_errors() as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(f"{name} cannot be read: {redact(why)}") from error


def _read_errors() -> tuple[type[BaseException], ...]:
    """Errors of files, of what decompresses them, and of those clients behind URLs that were imported."""
    clients = (
        ("aiohttp", "ClientError"),
        ("botocore.exceptions", "BotoCoreError"),
        ("botocore.exceptions", "ClientError"),
    )
    found = (getattr(sys.modules[module], name) for module, name in clients if module in sys.modules)
    return OSError, EOFError, zlib.error, *found


def is_url(path: str) -> bool:
    """``s3://…``, ``https://…``, ``memory://…``."""
    return "://" in path


def _is_web(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def find_files(asked: str, left_out: list[str]) -> list[SourceFile]:
    """The files behind a file name, folder, glob or URL, sorted by name; hidden ones in folders are skipped.

    Args:
        left_out: what a folder or glob holds and cannot be read is added here.

    Raises:
        ConfigError: there is nothing, or it cannot be reached; the message names what was asked for.
    """
    with reading(redact(asked)):
        found = _find_remote(asked) if is_url(asked) else _find_local(asked, left_out)
    if not found:
        but = f" but {', '.join(left_out[:3])}" if left_out else ""
        raise ConfigError(f"[data] path = {redact(asked)!r}: nothing matches, or the folder holds no files{but}")
    return found


def _find_local(asked: str, left_out: list[str]) -> list[SourceFile]:
    path = Path(asked).expanduser()
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        paths = list(_walk(path, left_out))
    elif glob.has_magic(asked) and not os.path.lexists(path):
        paths = [Path(each) for each in sorted(glob.glob(str(path), recursive=True)) if not os.path.isdir(each)]
    else:
        if os.path.lexists(path):
            raise ConfigError(f"[data] path = {asked!r} is a pipe, a device or a broken link: expected a file")
        names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        where = "" if path.is_absolute() else f" (looked for in {Path.cwd()})"
        hint = nearest(path.name, names, os.path.dirname(asked))
        raise ConfigError(f"[data] path = {asked!r} does not exist{where}{hint}")
    left_out += [f"{each.name} (a pipe, a device or a broken link)" for each in paths if not each.is_file()]
    facts = [(each, each.stat()) for each in paths if each.is_file()]
    return [SourceFile(str(each.absolute()), fact.st_size, f"mtime {fact.st_mtime_ns}") for each, fact in facts]


def _walk(folder: Path, left_out: list[str]) -> Iterator[Path]:
    """What lies in a folder; each folder below once, so that a circle of links ends."""
    seen: set[str] = set()
    closed: list[OSError] = []
    for where, folders, names in os.walk(folder, onerror=closed.append, followlinks=True):
        if (real := os.path.realpath(where)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        yield from (Path(where) / name for name in sorted(names) if not name.startswith("."))
    left_out += [f"{Path(error.filename).name} ({error.strerror})" for error in closed]


def _find_remote(asked: str) -> list[SourceFile]:
    file_system, path = _file_system(asked)
    file_system.invalidate_cache()  # a listing from earlier in this process may be old
    # Of a web server only single files: a "folder" there is a page of links.
    if not _is_web(asked) and glob.has_magic(path):
        found = file_system.glob(path, detail=True)
    elif not _is_web(asked) and file_system.isdir(path):
        found = file_system.find(path, detail=True)
    else:
        found = {path: file_system.info(path)}
    shown = path.rstrip("/")
    return [
        _remote(file_system, name, facts)
        for name, facts in sorted(found.items())
        if facts.get("type") != "directory" and "/." not in name.removeprefix(shown)
    ]


def _remote(file_system: Any, path: str, facts: dict[str, Any]) -> SourceFile:
    url = path if is_url(path) else str(file_system.unstrip_protocol(path))
    stamp = next((f"{key} {facts[key]}" for key in _STAMPS if facts.get(key)), None)
    if stamp is None:  # the server tells nothing: only the content itself can
        with _open_raw(url) as file:
            digest = hashlib.file_digest(cast(io.BufferedReader, file), "sha256")
        stamp = f"sha256 {digest.hexdigest()}"
    return SourceFile(url, facts.get("size"), stamp)


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a missing driver, or a protocol that nobody knows
        raise ConfigError(f"{redact(url)}: {error}") from None
    return file_system, path
