"""Atoll itself as one zip file that a bare Python runs from, with cloudpickle; on a host at most once per content."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import io
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import atoll
from atoll.core.errors import ProvisionError
from atoll.core.paths import atoll_home, write_atomic
from atoll.providers.base import Bundle

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same content is the same file, whenever it was packed


def atoll_bundle(digest: str = "") -> Bundle:
    """Atoll as one file under ``ATOLL_HOME``: as it is installed here, or the one of a digest where that is there.

    A supervisor names the digest of its cluster's: it can't pack one. Where Atoll runs from such a file, that is it.
    """
    kept = Bundle(atoll_home() / "bundle" / f"{digest[:24]}.zip", digest)
    if digest and kept.path.exists():
        return kept
    if (source := Path(atoll.__file__).parents[1]).is_file():
        return Bundle(source, hashlib.sha256(source.read_bytes()).hexdigest())
    try:
        return pack([*_package("atoll"), *_package("cloudpickle")])
    except ProvisionError:
        if digest:
            raise ProvisionError(f"{kept.path} is gone: launch the task again, which brings it back") from None
        raise


def pack(files: Sequence[tuple[str, Path]]) -> Bundle:
    """Files, by their names in the archive, as a bundle under ``ATOLL_HOME``."""
    stamp = hashlib.sha256()
    for name, path in files:
        about = path.stat()
        stamp.update(f"{name}\0{path}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    folder = atoll_home() / "bundle"
    folder.mkdir(mode=0o700, exist_ok=True)
    known = folder / f"{stamp.hexdigest()[:24]}.of"  # says which archive these very files gave
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if known.exists():
            digest = known.read_text()
            if (folder / f"{digest[:24]}.zip").exists():
                return Bundle(folder / f"{digest[:24]}.zip", digest)
        data = _zipped(files)
        digest = hashlib.sha256(data).hexdigest()
        bundle = Bundle(folder / f"{digest[:24]}.zip", digest)
        write_atomic(bundle.path, data)
        write_atomic(known, digest.encode())
    return bundle


def _package(name: str) -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ProvisionError(f"the package {name} is not installed beside Atoll: reinstall Atoll")
    return folder_files(Path(spec.origin).parent, name)


def folder_files(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    """Files below a folder, named from ``prefix`` on, in a fixed order; bytecode and hidden ones left out."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in parts):
            yield "/".join([*([prefix] if prefix else []), *parts]), path


def _zipped(files: Sequence[tuple[str, Path]]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, path in files:
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()
