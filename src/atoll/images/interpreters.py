"""Python interpreters of this machine: the running one, and others by version."""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import ImageError


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python.

    Attributes:
        python: path of its executable.
        version: full version, e.g. ``"3.12.1"``.
        folders: where its packages are.
        running: whether it is the one that runs this code.
    """

    python: str
    version: str
    folders: tuple[str, ...]
    running: bool

    @property
    def minor(self) -> str:
        """``"3.12"`` of ``"3.12.1"``."""
        return ".".join(self.version.split(".")[:2])

    def state(self) -> list[tuple[str, int]]:
        """Changes whenever a package is installed, removed or replaced: the folders and their mtimes in ns."""
        return [(folder, os.stat(folder).st_mtime_ns) for folder in self.folders if os.path.isdir(folder)]


def running_interpreter() -> Interpreter:
    """The interpreter that runs this code, with the package folders of its import path."""
    entries: list[object] = [*sys.path]  # import skips what is no text, and so does this
    paths = [entry for entry in entries if isinstance(entry, str)]
    folders = dict.fromkeys(path for path in paths if os.path.basename(path) in ("site-packages", "dist-packages"))
    return Interpreter(sys.executable, platform.python_version(), tuple(folders), running=True)


def find_interpreter(minor: str) -> Interpreter:
    """A Python ``minor`` (e.g. ``"3.12"``) of this machine: of pyenv, on PATH, or of uv.

    Raises:
        ImageError: there is none; the message says how to get one.
    """
    for candidate in _candidates(minor):
        version = _version(candidate)
        if version is not None and version.startswith(f"{minor}."):
            return Interpreter(candidate, version, (), running=False)
    raise ImageError(
        f'Image(python="{minor}"): this machine has no Python {minor} (looked on PATH, in pyenv and with uv); install '
        f"it with `uv python install {minor}` or `pyenv install {minor}`, or leave python= out to use "
        f"{platform.python_version()}"
    )


def make_venv(base: Interpreter, folder: Path) -> None:
    """A bare virtual environment, without pip, that can be moved afterwards.

    Raises:
        ImageError: the interpreter cannot make one.
    """
    answer = _answer([base.python, "-I", "-m", "venv", "--without-pip", "--symlinks", str(folder)])
    if answer.returncode != 0:
        said = (answer.stderr.strip() or answer.stdout.strip())[-500:]
        raise ImageError(
            f"{base.python} could not make a virtual environment: {said}\n"
            f"On Debian and Ubuntu: apt-get install python{base.minor}-venv"
        )


def _candidates(minor: str) -> Iterator[str]:
    # pyenv's own folders first: its shims on PATH start nothing unless that version is switched on.
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    uv = os.environ.get("UV_PYTHON_INSTALL_DIR") or os.path.expanduser("~/.local/share/uv/python")
    yield from _newest_first(f"{glob.escape(pyenv)}/versions/{minor}.*/bin/python")
    for folder in os.get_exec_path():
        found = shutil.which(f"python{minor}", path=folder)
        if found:
            yield os.path.abspath(found)
    yield from _newest_first(f"{glob.escape(uv)}/cpython-{minor}.*/bin/python{minor}")


def _newest_first(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern), key=lambda path: [int(n) for n in re.findall(r"\d+", path)], reverse=True)


def _version(python: str) -> str | None:
    """The version an executable reports, or None where it does not run (a pyenv shim of a version not in use)."""
    try:
        answer = _answer([python, "-I", "-c", "import platform; print(platform.python_version())"])
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _answer(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)


def user_python() -> str:
    """The interpreter that a command of the user's runs under on this machine.

    That of the active virtual environment, of ``.venv`` in the current folder, or the ``python`` on PATH. Where there
    is none, the one that runs Atoll, unless that belongs to a tool's own environment (``uv tool``, ``pipx``), whose
    place takes ``python3`` on PATH.
    """
    for folder in (os.environ.get("VIRTUAL_ENV"), ".venv"):
        if folder and os.access(python := os.path.join(folder, "bin", "python"), os.X_OK):
            return os.path.abspath(python)
    if (found := shutil.which("python")) is not None:
        return os.path.abspath(found)
    if re.search(r"/(uv/tools|pipx/venvs)/", sys.executable):
        return shutil.which("python3") or sys.executable
    return sys.executable


def user_path() -> str:
    """PATH on which that interpreter's folder comes first, unless its ``python`` is found first as it is."""
    path, python = os.environ.get("PATH", os.defpath), user_python()
    folder = os.path.dirname(python)
    found = shutil.which("python", path=path)
    return path if found and os.path.dirname(os.path.abspath(found)) == folder else f"{folder}{os.pathsep}{path}"
