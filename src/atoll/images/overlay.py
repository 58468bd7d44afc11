"""Makes an ``Image`` true on this machine: an interpreter, extra import paths and variables for the ranks.

What the running interpreter lacks is built once into ``ATOLL_HOME/images/<hash>/site-packages`` and put in front of
its own packages. Two steps are kept on disk: the *plan* (what would have to be installed, by requirements, constraints
and the state of the interpreter's package folders) and the *folder* (by what the plan says), so that a changed
environment costs a new plan and seldom a new folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from atoll.core.hints import redact
from atoll.core.paths import atoll_home, fsync_folder, write_atomic
from atoll.images.built_images import prune_images
from atoll.images.image import Image, check_env, check_pip
from atoll.images.installer import DROPPED_VARIABLES, Installer, Pin, Progress, with_credentials
from atoll.images.interpreters import Interpreter, find_interpreter, make_venv, running_interpreter
from atoll.images.local_files import check_apt, include_paths
from atoll.images.requirements import Installed, constraint_lines, location_stamp, merge, without_cuda
from atoll.worker.folder_locks import IMAGE_MARKER

_FORMAT = 2  # part of every hash: raise it when folders or plans change their layout


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
    paths: tuple[str, ...]
    env: dict[str, str]
    lines: tuple[str, ...]


def resolve(
    image: Image,
    *,
    pip: str | Sequence[str] | None = (),
    env: Mapping[str, object] | None = None,
    has_gpu: bool,
    progress: Progress | None = None,
) -> Environment:
    """The environment of ranks on this machine, with what is missing built first.

    Args:
        pip: requirements of the pool: one of a project that the image names too replaces the image's.
        env: variables of the pool, which win over the image's.
        has_gpu: whether the node has a GPU; without one, CUDA extras become the CPU package.
        progress: called with a line for each step that takes time. A build is interrupted by raising from it.

    Raises:
        ConfigError: a requirement, variable, constraint or include that cannot work.
        ImageError: a package cannot be installed, a Debian package or the Python version is missing.
    """
    report = progress or _silent
    requirements = merge(image.pip, check_pip("pip=", pip))
    variables = {**check_env("Image(env=)", image.env), **check_env("env=", env)}
    lines: list[str] = []
    if not has_gpu:
        requirements, lines = without_cuda(requirements)
    constraints = constraint_lines(image.constraints)  # also where nothing is to install: a wrong path is a mistake
    check_apt(image.apt)
    paths = include_paths(image.includes)
    interpreter = running_interpreter()
    if image.python is not None and image.python != interpreter.minor:
        interpreter = _venv(find_interpreter(image.python), report)
        requirements = merge([_own_cloudpickle()], requirements)
    if requirements:
        store = _store()
        plan = _plan(store, interpreter, requirements, constraints, report)
        if plan.pins:
            paths.append(_folder(store, plan, report))
        lines += plan.lines
    return Environment(interpreter.python, tuple(dict.fromkeys(paths)), variables, tuple(lines))


def _silent(line: str) -> None:
    """The progress of a caller that wants none."""


def _own_cloudpickle() -> str:
    """cloudpickle as the driver has it, so that both ends speak one dialect."""
    version = Installed(sys.path).version("cloudpickle")
    return f"cloudpickle=={version}" if version else "cloudpickle"


@dataclass(frozen=True, slots=True)
class _Plan:
    """Packages an interpreter lacks for some requirements; ``lines`` say what of its own they hide."""

    interpreter: Interpreter
    constraints: tuple[str, ...]
    pins: tuple[Pin, ...]
    stamps: list[object]
    lines: tuple[str, ...]


def _store() -> Path:
    store = atoll_home() / "images"
    store.mkdir(mode=0o700, exist_ok=True)
    return store


def _digest(*parts: object) -> str:
    text = json.dumps([_FORMAT, sysconfig.get_platform(), *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _plan(
    store: Path, interpreter: Interpreter, requirements: Sequence[str], constraints: Sequence[str], progress: Progress
) -> _Plan:
    """What has to be installed: from disk where the same was asked before, else from the metadata, else from pip."""
    limits = [*constraints, *_variable_constraints()]
    stamps: list[object] = [location_stamp(text) for text in requirements]
    wanted = sorted(requirements)
    key = _digest("plan", asdict(interpreter), interpreter.state(), wanted, limits, _installer_variables(), stamps)
    path = store / f"plan-{key}.json"

    def made(pins: Sequence[Pin]) -> _Plan:
        lines = _hidden(interpreter, pins)
        return _Plan(interpreter, tuple(constraints), tuple(pins), stamps, lines)

    known = _read_plan(path, requirements)
    if known is not None:
        return made(known)
    if interpreter.running and Installed(interpreter.folders).satisfy(wanted, limits):
        _write_plan(path, ())
        return made(())
    with _workshop(store, f"plan-{key}", progress) as work:
        known = _read_plan(path, requirements)  # another process may have made it while this one waited
        if known is None:
            progress(redact(f"looking up {', '.join(wanted)}"))
            known = Installer.find(interpreter.python).plan(wanted, constraints, work, progress)
            _write_plan(path, known)
    return made(known)


def _variable_constraints() -> list[str]:
    """The lines that ``PIP_CONSTRAINT`` adds. pip reads that variable by itself; here its content decides too."""
    paths = os.environ.get("PIP_CONSTRAINT", "").split()
    return [line for path in paths if "://" not in path for line in constraint_lines(path)]


def _installer_variables() -> dict[str, str]:
    """Variables that change what an installer would choose, such as ``PIP_INDEX_URL``."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "UV_")) and name not in DROPPED_VARIABLES
    }


def _hidden(interpreter: Interpreter, pins: Sequence[Pin]) -> tuple[str, ...]:
    """One line naming the packages of the interpreter that ranks will see in another version."""
    installed = Installed(interpreter.folders)
    changed = [(pin, installed.version(pin.name)) for pin in pins]
    named = [f"{pin.name} {pin.version} (there {own})" for pin, own in changed if own not in (None, pin.version)]
    return (f"ranks see other versions than {interpreter.python} has: {', '.join(named)}",) if named else ()


def _read_plan(path: Path, requirements: Sequence[str]) -> list[Pin] | None:
    """The pins of a plan, with user and password of their URLs as the requirements have them."""
    try:
        os.utime(path)  # it was used
        pins = [Pin(**pin) for pin in json.loads(path.read_bytes())]
    except FileNotFoundError:
        return None
    return [replace(pin, spec=with_credentials(pin.spec, requirements)) for pin in pins]


def _write_plan(path: Path, pins: Sequence[Pin]) -> None:
    """Keep a plan, without what nobody may read on this disk."""
    write_atomic(path, json.dumps([asdict(pin) | {"spec": redact(pin.spec)} for pin in pins]).encode())


def _folder(store: Path, plan: _Plan, progress: Progress) -> str:
    """The folder that holds a plan's packages, built if no process has built it yet."""
    interpreter, pins = plan.interpreter, [asdict(pin) for pin in plan.pins]
    key = _digest("folder", interpreter.python, interpreter.version, pins, plan.stamps)
    folder = store / key
    packages = folder / "site-packages"
    if _is_built(folder):
        return str(packages)
    with _workshop(store, key, progress) as work:
        if _is_built(folder):
            return str(packages)
        started = time.monotonic()
        progress(f"installing {', '.join(f'{pin.name} {pin.version}' for pin in plan.pins)}")
        built = work / "image"
        built.mkdir()
        installer = Installer.find(interpreter.python)
        installer.install(plan.pins, plan.constraints, built / "site-packages", work, progress)
        shown = [{**pin, "spec": redact(pin["spec"])} for pin in pins]
        marker = {"python": interpreter.python, "version": interpreter.version, "packages": shown}
        _publish(built, folder, marker)
        progress(f"installed {len(pins)} package{'s' * (len(pins) != 1)} in {time.monotonic() - started:.1f} s")
    return str(packages)


def _venv(base: Interpreter, progress: Progress) -> Interpreter:
    """A bare virtual environment of another Python; packages come on top as an overlay, as for the running one."""
    store = _store()
    key = _digest("venv", base.python, base.version)
    folder = store / f"venv-{key}"
    if not _is_built(folder):
        with _workshop(store, folder.name, progress) as work:
            if not _is_built(folder):
                progress(f"making an environment of Python {base.version} ({base.python})")
                make_venv(base, work / "image")
                _publish(work / "image", folder, {"python": base.python, "version": base.version})
    packages = folder / f"lib/python{base.minor}/site-packages"
    return Interpreter(str(folder / "bin" / "python"), base.version, (str(packages),), running=False)


def _is_built(folder: Path) -> bool:
    """Is it there, whole? Then it counts as used now."""
    try:
        os.utime(folder / IMAGE_MARKER)
    except FileNotFoundError:
        return False
    return True


def _publish(built: Path, folder: Path, marker: Mapping[str, object]) -> None:
    """Make a finished folder visible in one step; the marker inside says that it is whole."""
    write_atomic(built / IMAGE_MARKER, json.dumps(marker).encode())
    if folder.exists():  # one without a marker: somebody's hand was in it
        shutil.rmtree(folder)
    os.rename(built, folder)
    fsync_folder(folder.parent)
    prune_images()


@contextmanager
def _workshop(store: Path, key: str, progress: Progress) -> Iterator[Path]:
    """A folder to build ``key`` in, for one process at a time; it is gone afterwards, whatever happened.

    A second process that wants the same waits for the first and says so. The kernel drops the lock of a process that
    dies, and the next one to build anything clears what it left.
    """
    with locked(store, key, progress):
        _sweep(store)
        work = store / f".build-{key}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def locked(store: Path, key: str, progress: Progress) -> Iterator[None]:
    """One process at a time gets on with ``key``; those that wait say so."""
    descriptor = os.open(store / f".lock-{key}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        told_at = time.monotonic() - 29  # nothing is said of a wait of less than a second
        while not _try_lock(descriptor):
            if time.monotonic() - told_at >= 30:
                told_at = time.monotonic()
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "?"
                progress(f"process {holder} is building the same image: waiting for it")
            time.sleep(0.05)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(store: Path) -> None:
    """Remove build folders whose builder is dead (its lock can be had)."""
    for left in store.glob(".build-*"):
        try:
            descriptor = os.open(store / left.name.replace(".build-", ".lock-", 1), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if _try_lock(descriptor):
                shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(descriptor)
