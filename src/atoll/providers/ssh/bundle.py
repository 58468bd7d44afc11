"""Atoll itself as one zip file that a bare Python runs from, with cloudpickle; on a host at most once per content."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.util
import io
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from atoll.core.errors import ProvisionError
from atoll.core.paths import atoll_home, write_atomic
from atoll.providers.remote import Bundle, RemotePlan
from atoll.providers.ssh.connection import Connection
from atoll.providers.ssh.facts import python_command

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same content is the same file, whenever it was packed
_UPLOAD_S = 300.0
_OLD_S = 30 * 86400

# Written aside and renamed: a home may be shared, and several hosts get the file at once. Old ones go meanwhile.
_PUT = """
import hashlib, os, socket, sys, time
path, digest, old_s = sys.argv[1:]
data = sys.stdin.buffer.read()
if hashlib.sha256(data).hexdigest() != digest:
    sys.exit('it arrived damaged, as %d bytes: does something in ~/.bashrc there read standard input?' % len(data))
folder = os.path.dirname(path)
os.makedirs(folder, 0o700, exist_ok=True)
aside = '%s.%s.%d' % (path, socket.gethostname(), os.getpid())
try:
    with open(aside, 'wb') as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
except OSError as error:
    try:
        os.unlink(aside)
    except OSError:
        pass
    sys.exit(str(error))
for name in os.listdir(folder):
    other = os.path.join(folder, name)
    try:
        if os.stat(other).st_mtime < time.time() - float(old_s):
            os.unlink(other)
    except FileNotFoundError:  # another host's, which has its name now or was old too
        pass
"""


_own: dict[Path, Bundle] = {}  # by ATOLL_HOME


def atoll_bundle() -> Bundle:
    """Atoll as it is installed here, packed once and kept under ``ATOLL_HOME``."""
    home = atoll_home()
    if home not in _own:
        _own[home] = pack([*_package("atoll"), *_package("cloudpickle")])
    return _own[home]


def use_packed(digest: str) -> None:
    """Take the bundle of this digest under ``ATOLL_HOME``: for a process that can't pack one, or runs from it itself.

    Raises:
        ProvisionError: it is not there.
    """
    home = atoll_home()
    bundle = Bundle(home / "bundle" / f"{digest[:24]}.zip", digest)
    if not bundle.path.exists():
        raise ProvisionError(f"{bundle.path} is gone: launch the task again, which brings it back")
    _own[home] = bundle


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


def put(connection: Connection, plan: RemotePlan, bundle: Bundle) -> None:
    """Bring a bundle to a host that lacks it.

    Raises:
        ProvisionError: it can't be written there: the disk is full, say.
    """
    facts = connection.facts
    if bundle.digest in plan.present or (facts is not None and bundle.digest in facts.bundles):
        return
    path = plan.bundle_path(bundle)
    command = python_command(plan.python, _PUT, path, bundle.digest, str(_OLD_S))
    answer = connection.run(command, bundle.path.read_bytes(), limit_s=_UPLOAD_S)
    if answer.returncode != 0:
        said = answer.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        fix = ". Free some space there" if "No space left" in said[-1] or "Disk quota" in said[-1] else ""
        raise ProvisionError(f"{connection.target}: could not write {path} there: {said[-1]}{fix}")
    if facts is not None:
        connection.facts = dataclasses.replace(facts, bundles=facts.bundles | {bundle.digest})
