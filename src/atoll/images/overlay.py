"""Builds what an interpreter of this machine lacks, once, into ``ATOLL_HOME/images/<hash>/site-packages``.

Ranks have that folder in front of the interpreter's own packages. The answer to a request is kept beside the folders,
by the request and the state of the interpreter's packages; folders are named by what they hold, so that a changed
environment or another wording of the same requirements seldom costs a new one. Standard library only: hosts run this.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import Distribution
from pathlib import Path

from atoll.core.paths import atoll_home, fsync_folder, write_atomic
from atoll.core.secrets import redact
from atoll.images.built_images import prune_images
from atoll.images.installer import DROPPED_VARIABLES, Pin, Pip, Progress
from atoll.images.interpreters import Interpreter, find_interpreter, make_venv, running_interpreter
from atoll.images.local_files import check_apt
from atoll.worker.folder_locks import IMAGE_MARKER

_FORMAT = 3  # part of every hash: raise it when folders or answers change their layout


@dataclass(frozen=True, slots=True)
class Request:
    """What ranks need beside a bare interpreter; plain data, which goes to hosts as JSON.

    Attributes:
        python: minor version, or None for the interpreter that runs this.
        requirements, constraints: for pip.
        apt: Debian packages that must be there.
        stamps: of requirements that are paths: names, sizes and mtimes of their files.
    """

    python: str | None
    requirements: list[str]
    constraints: list[str]
    apt: list[str]
    stamps: dict[str, object]


@dataclass(frozen=True, slots=True)
class Environment:
    """What a rank is started with.

    Attributes:
        python: path of the interpreter.
        paths: folders to put in front of its import path.
        env: variables to set.
        lines: one line for each thing the user should know, e.g. that a CUDA extra was dropped.
    """

    python: str
    paths: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def ensure_overlay(
    request: Request, progress: Progress, requirements: Callable[[], Sequence[str]] | None = None
) -> Environment:
    """The environment of a request, built now if this machine has not built it yet.

    Args:
        progress: called with a line for each step that takes time. A build is interrupted by raising from it.
        requirements: called before a build: what to install in place of the request's own.

    Raises:
        ImageError: a package cannot be installed, a Debian package or the Python version is missing.
    """
    check_apt(request.apt)
    base = running_interpreter()
    if request.python not in (None, base.minor):
        base = find_interpreter(str(request.python))
    if base.running and not request.requirements:
        return Environment(base.python)
    store = atoll_home() / "images"
    store.mkdir(mode=0o700, exist_ok=True)
    answer = store / f"plan-{_digest(asdict(request), asdict(base), base.state(), _pip_settings())}.json"
    if (known := _known(answer)) is not None:
        return known
    with _workshop(store, progress) as work:
        if (known := _known(answer)) is not None:  # another process built it while this one waited
            return known
        interpreter = base if base.running else _venv(store, work, base, progress)
        made = Environment(interpreter.python)
        if request.requirements:
            wanted = requirements() if requirements else request.requirements
            progress(redact(f"looking up {', '.join(sorted(wanted))}"))
            pip = Pip(interpreter.python, work, progress, request.constraints)
            pins = pip.plan(wanted)
            paths = [_folder(store, work, interpreter, pip, pins, request.stamps, progress)] if pins else []
            made = Environment(interpreter.python, tuple(paths), lines=_hidden(interpreter, pins))
        write_atomic(answer, json.dumps(asdict(made)).encode())
    prune_images()
    return made


def _digest(*parts: object) -> str:
    text = json.dumps([_FORMAT, sysconfig.get_platform(), *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _pip_settings() -> dict[str, str]:
    """Variables that change what pip would choose, such as ``PIP_INDEX_URL``; of constraint files their content."""
    settings = {
        name: value for name, value in os.environ.items() if name.startswith("PIP_") and name not in DROPPED_VARIABLES
    }
    for path in settings.get("PIP_CONSTRAINT", "").split():
        if "://" not in path and os.path.isfile(path):
            settings[path] = Path(path).read_text(encoding="utf-8", errors="replace")
    return settings


def _known(answer: Path) -> Environment | None:
    """An answer on disk whose folders are all there; they count as used now."""
    try:
        said = json.loads(answer.read_bytes())
        made = Environment(said["python"], tuple(said["paths"]), lines=tuple(said["lines"]))
        os.utime(answer)
        for folder in (Path(made.python).parents[1], *(Path(path).parent for path in made.paths)):
            if folder.parent == answer.parent:
                os.utime(folder / IMAGE_MARKER)
    except FileNotFoundError:
        return None
    return made


def _hidden(interpreter: Interpreter, pins: Sequence[Pin]) -> tuple[str, ...]:
    """One line naming the packages of the interpreter that ranks will see in another version."""
    changed = []
    for pin in pins:
        found = Distribution.discover(name=pin.name, path=list(interpreter.folders))
        # Half-removed packages leave metadata without a version behind.
        own = next((each.version for each in found if each.metadata["Version"]), pin.version)
        if own != pin.version:
            changed.append(f"{pin.name} {pin.version} (installed: {own})")
    return (f"ranks see other versions than {interpreter.python} has: {', '.join(changed)}",) if changed else ()


def _folder(
    store: Path,
    work: Path,
    interpreter: Interpreter,
    pip: Pip,
    pins: Sequence[Pin],
    stamps: Mapping[str, object],
    progress: Progress,
) -> str:
    """The folder that holds just these packages, built if it is not there."""
    folder = store / _digest(interpreter.python, interpreter.version, [asdict(pin) for pin in pins], stamps)
    if not _is_built(folder):
        started = time.monotonic()
        progress(f"installing {', '.join(f'{pin.name} {pin.version}' for pin in pins)}")
        pip.install(pins, work / "image" / "site-packages")
        packages = [f"{pin.name}=={pin.version}" for pin in pins]
        _publish(work / "image", folder, {"version": interpreter.version, "packages": packages})
        progress(f"installed {len(pins)} package{'s' * (len(pins) != 1)} in {time.monotonic() - started:.1f} s")
    return str(folder / "site-packages")


def _venv(store: Path, work: Path, base: Interpreter, progress: Progress) -> Interpreter:
    """A bare virtual environment of another Python; packages come on top as an overlay, as for the running one."""
    folder = store / f"venv-{_digest(base.python, base.version)}"
    if not _is_built(folder):
        progress(f"creating an environment with Python {base.version} ({base.python})")
        make_venv(base, work / "venv")
        _publish(work / "venv", folder, {"version": base.version, "packages": []})
    packages = folder / f"lib/python{base.minor}/site-packages"
    return Interpreter(str(folder / "bin" / "python"), base.version, (str(packages),), running=False)


def _is_built(folder: Path) -> bool:
    """Is it there, whole? Then it counts as used now."""
    try:
        os.utime(folder / IMAGE_MARKER)
    except FileNotFoundError:
        return False
    return True


def _publish(built: Path, folder: Path, about: Mapping[str, object]) -> None:
    """Make a finished folder visible in one step; the marker inside says that it is whole."""
    write_atomic(built / IMAGE_MARKER, json.dumps(about).encode())
    if folder.exists():  # one without a marker: somebody's hand was in it
        shutil.rmtree(folder)
    os.rename(built, folder)
    fsync_folder(folder.parent)


@contextmanager
def _workshop(store: Path, progress: Progress) -> Iterator[Path]:
    """A folder to build in, for one process at a time; it is gone afterwards, whatever happened.

    A second process waits for the first and says so. The kernel drops the lock of a process that dies, and the next
    one to build anything removes what it left.
    """
    descriptor = os.open(store / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, progress)
        # The host is in the name because a shared home may come without locks that hold between hosts.
        work = store / f".build-{socket.gethostname()}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, progress: Progress) -> None:
    said_at = time.monotonic() - 29  # nothing is said of a wait of less than a second
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            break
        if time.monotonic() - said_at >= 30:
            said_at = time.monotonic()
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "?"
            progress(f"process {holder} is building an image: waiting for it")
        time.sleep(0.05)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
