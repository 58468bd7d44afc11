"""Files that hold data, wherever they lie: folders, globs, lists and URLs become one sorted list of files."""

from __future__ import annotations

import contextlib
import functools
import glob
import gzip
import hashlib
import io
import os
import sys
import zlib
from collections.abc import Iterator
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

    @property
    def name(self) -> str:
        """For messages: the path without secrets."""
        return redact(self.path)

    @property
    def is_local(self) -> bool:
        """Whether it is on a mounted file system."""
        return not is_url(self.path)

    @property
    def is_seekable(self) -> bool:
        """Whether any part can be read; of a web server it is a stream, as many send no parts."""
        return not _is_web(self.path)

    @functools.cached_property
    def extensions(self) -> list[str]:
        """Lower case, without that of a compression: ``[".jsonl"]`` for ``a.b/x.jsonl.gz``."""
        base, last = os.path.splitext(self.path if self.is_local else self.path.partition("?")[0])
        found = [os.path.splitext(base)[1].lower(), last.lower()]
        return [each for each in found if each and each not in COMPRESSIONS][-1:]

    @contextlib.contextmanager
    def open_raw(self) -> Iterator[io.BufferedReader]:
        """The bytes as they lie there.

        Raises:
            ConfigError: it cannot be opened or read.
        """
        with reading(self.name):
            if self.is_local:
                with Path(self.path).open("rb") as file:
                    yield file
            else:
                file_system, path = _file_system(self.path)
                options = {} if self.is_seekable else {"block_size": 0}
                with io.BufferedReader(file_system.open(path, "rb", **options), _BLOCK) as file:
                    yield file

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Its content, decompressed, and the raw file below, whose position tells the progress."""
        with self.open_raw() as raw:
            kind = self._compression(raw)
            if kind is None:
                yield raw, raw
                return
            try:
                with _decompressed(raw, kind) as content:
                    yield content, raw
            except (EOFError, zlib.error, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the content
                    raise
                raise ConfigError(f"{self.name} is a broken {kind} file ({error}): get it again") from None

    def is_compressed(self) -> bool:
        """Whether what lies there has to be decompressed."""
        with self.open_raw() as raw:
            return self._compression(raw) is not None

    def _compression(self, raw: io.BufferedReader) -> str | None:
        """By the first bytes; but a token file may begin with any, so there the name has to say it."""
        magic = raw.peek(4)[:4]
        kind = next((name for name, start in COMPRESSIONS.items() if magic.startswith(start)), None)
        expected = next((name for name in COMPRESSIONS if self.path.lower().endswith(name)), None)
        if expected and not kind:
            raise ConfigError(f"{self.name} is not a {expected} file, although its name ends so: rename or remake it")
        return kind if expected or self.extensions != [".bin"] else None


def _decompressed(raw: IO[bytes], kind: str) -> IO[bytes]:
    if kind == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw, mode="rb"))
    try:
        import pyarrow  # whose reader, unlike that of zstandard, does not take a cut file for a whole one
    except ImportError:
        raise ConfigError(".zst files need pyarrow: pip install pyarrow") from None
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), _BLOCK)


def is_url(path: str) -> bool:
    """``s3://…``, ``https://…``, ``memory://…``; not a Windows drive, and not a path."""
    return "://" in path


def _is_web(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def find_files(asked: str, left_out: list[str] | None = None) -> list[SourceFile]:
    """The files behind a file name, folder, glob or URL, sorted by name; hidden ones in folders are skipped.

    Args:
        left_out: what a folder or glob holds and cannot be read is added here, each with the reason.

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
        if path.is_file():
            return [_local(path)]
        if path.is_dir():
            paths = _walk(path, left_out)
        elif os.path.lexists(path):
            raise ConfigError(f"[data] path = {asked!r} is a pipe, a device or a broken link, expected a file")
        elif glob.has_magic(asked):
            matches = (Path(each) for each in sorted(glob.glob(str(path), recursive=True)))
            paths = (each for each in matches if not each.is_dir())
        else:
            raise _missing(path, asked)
        found: list[SourceFile] = []
        for each in paths:
            if each.is_file():
                found.append(_local(each))
            else:
                left_out.append(f"{each.name} (a pipe, a device or a broken link)")
        return found


def _missing(path: Path, asked: str) -> ConfigError:
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    where = "" if path.is_absolute() else f" (looked for in {Path.cwd()})"
    return ConfigError(
        f"[data] path = {asked!r} does not exist{where}{nearest(path.name, names, os.path.dirname(asked))}"
    )


def _walk(folder: Path, left_out: list[str]) -> Iterator[Path]:
    """What lies in a folder; each folder below once, so that a circle of links ends."""

    def closed(error: OSError) -> None:
        left_out.append(f"{Path(error.filename).name} ({error.strerror})")

    seen: set[str] = set()
    for where, folders, names in os.walk(folder, onerror=closed, followlinks=True):
        real = os.path.realpath(where)
        if real in seen:
            left_out.append(f"{Path(where).name} (found twice)")
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        yield from (Path(where) / name for name in sorted(names) if not name.startswith("."))


def _local(path: Path) -> SourceFile:
    facts = path.stat()
    return SourceFile(str(path.absolute()), facts.st_size, f"mtime {facts.st_mtime_ns}")


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a missing driver, or a protocol that nobody knows
        raise ConfigError(f"{redact(url)}: {error}") from None
    return file_system, path


def _find_remote(asked: str) -> list[SourceFile]:
    file_system, path = _file_system(asked)
    with reading(redact(asked)):
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
        with SourceFile(url, None, "").open_raw() as file:
            stamp = f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
    return SourceFile(url, facts.get("size"), stamp)
