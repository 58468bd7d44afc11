"""Where SkyPilot lives: a virtual environment, a home and a port of its own, below ``ATOLL_HOME/skypilot``."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.resources
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from atoll.core.errors import ProvisionError
from atoll.core.paths import atoll_home, write_atomic

VERSION = "0.14.1"
# What a cloud's own packages are called as an extra of SkyPilot, where that is not the cloud's name.
_EXTRAS = {"k8s": "kubernetes", "*": "", "": ""}
_STAMP = "atoll.json"
_SPIN_S = 0.2
# Of the caller's environment, what would have another Python, state folder or server used; names or their beginnings.
_OTHERS = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "SKY_", "SKYPILOT_")


def folder() -> Path:
    """Everything of SkyPilot's."""
    return atoll_home() / "skypilot"


def interpreter(cloud: str) -> Path:
    """The Python that has SkyPilot and the packages of a cloud; installs what is missing.

    Raises:
        ProvisionError: it can't be installed; the message says what to do.
    """
    extra = _EXTRAS.get(cloud, cloud)
    venv = (folder() / "venv").resolve()  # it may be a link to a disk that has more room
    python = venv / "bin" / "python"
    with _locked(folder() / "venv.lock", "another command to install SkyPilot") as lock:
        have = _stamp(venv)
        if have and have["version"] == VERSION and (not extra or extra in have["extras"]):
            return python
        extras = sorted({*(have["extras"] if have else ()), *([extra] if extra else ())})
        if not have or have["version"] != VERSION:
            end_server()  # one that runs refuses to work once its code has changed
            _run([sys.executable, "-m", "venv", "--clear", str(venv)], f"making {venv}", lock)
        what = f"skypilot[{','.join(extras)}]=={VERSION}" if extras else f"skypilot=={VERSION}"
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what]
        _run(install, f"installing {what} into {venv}: some minutes, once", lock)
        write_atomic(venv / _STAMP, json.dumps({"version": VERSION, "extras": extras}).encode())
    return python


def environ() -> dict[str, str]:
    """The environment of SkyPilot's processes: no telemetry, and a home that has the user's credentials in it."""
    home = folder() / "home"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _link(Path.home(), home)
    plugins = _plugins()
    found = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
    found |= {
        "HOME": str(home),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        "SKYPILOT_GLOBAL_CONFIG": str(_config()),
        "PYTHONUNBUFFERED": "1",
        "SKYPILOT_SERVER_PLUGINS_CONFIG": str(plugins),
        "PYTHONPATH": str(plugins.parent),
    }
    with _locked(folder() / "port.lock", "another command to choose a port and a password"):
        password = _kept("password", r"sky_[0-9a-f]{64}", lambda: f"sky_{secrets.token_hex(32)}")
        found["SKYPILOT_SERVICE_ACCOUNT_TOKEN"] = password
        found["SKYPILOT_API_SERVER_LOCAL_PORT"] = _kept("port", r"\d{1,5}", _free_port, _is_anothers)
    return found


def end_server() -> None:
    """End SkyPilot's server of this state folder, if one runs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        python = folder() / "venv" / "bin" / "python"
        stop = [str(python), "-c", "import sky; sky.api_stop()"]
        subprocess.run(stop, env=environ(), stdin=subprocess.DEVNULL, capture_output=True, timeout=60)


def _config() -> Path:
    """The user's settings for SkyPilot, as its ``config.yaml`` takes them."""
    path = folder() / "config.yaml"
    if not path.exists():
        path.write_text("# SkyPilot's settings, as its config.yaml has them.\n")
    return path


def _kept(name: str, form: str, choose: Callable[[], str], is_bad: Callable[[str], bool] = lambda kept: False) -> str:
    """What was chosen for this state folder; if its file has nothing of the form, it is chosen now."""
    path = folder() / name
    with contextlib.suppress(OSError, ValueError):
        if re.fullmatch(form, kept := path.read_text()) and not is_bad(kept):
            return kept
    write_atomic(path, choose().encode())
    return path.read_text()


def _free_port() -> str:
    """Where its server may listen on the loopback interface: one for each state folder, so that two don't meet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def _is_anothers(port: str) -> bool:
    """Does another user listen there, who would be told the password? As Linux says it."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for _, at, _, state, _, _, _, user, *_ in map(str.split, Path("/proc/net", table).read_text().splitlines()):
                if at.endswith(f":{int(port):04X}") and state == "0A" and int(user) != os.getuid():
                    return True
    return False


def _plugins() -> Path:
    """The plugins of its server, beside what they are."""
    place = folder() / "plugins"
    place.mkdir(mode=0o700, exist_ok=True)
    module = importlib.resources.files(__package__).joinpath("password.py").read_bytes()
    write_atomic(place / "atoll_password.py", module)
    write_atomic(place / "plugins.yaml", b"plugins:\n- class: atoll_password.Password\n")
    return place / "plugins.yaml"


def _link(real: Path, ours: Path) -> None:
    """Have credentials and settings of the user's home (``~/.aws``, ``~/.kube``, …) seen in ours."""
    for each in ours.iterdir():
        if each.is_symlink() and not each.exists():
            each.unlink()
    for each in real.glob(".*"):
        if each.name not in (".sky", ".atoll") and not os.path.lexists(ours / each.name):
            with contextlib.suppress(FileExistsError):  # another process was faster
                (ours / each.name).symlink_to(each)


def _stamp(venv: Path) -> dict[str, str | list[str]] | None:
    """What was installed there to the end."""
    try:
        found = json.loads((venv / _STAMP).read_bytes())
        return found if (venv / "bin" / "python").exists() else None
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _locked(path: Path, holder: str) -> Iterator[int]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"atoll: waiting for {holder}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def _run(command: Sequence[str], doing: str, lock: int) -> None:
    """Run a step of the installation, with a spinner where there is a terminal.

    It holds the lock too: the next command does not write into a folder that it still fills after this one was killed.
    """
    is_terminal, began = sys.stderr.isatty(), time.monotonic()
    if not is_terminal:
        print(f"atoll: {doing}", file=sys.stderr)
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=null, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env, pass_fds=[lock]
    ) as process:
        assert process.stdout is not None
        while True:
            try:
                said, _ = process.communicate(timeout=_SPIN_S)
                break
            except subprocess.TimeoutExpired:
                if is_terminal:
                    seconds = time.monotonic() - began
                    mark = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[int(seconds / _SPIN_S) % 10]
                    print(f"\r{mark} {doing} ({seconds:.0f} s)\x1b[K", end="", file=sys.stderr, flush=True)
    if is_terminal:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if process.returncode != 0:
        errors = [line for line in said.splitlines() if line.startswith("ERROR: ")] or said.strip().splitlines()
        why = errors[0].removeprefix("ERROR: ") if errors else f"exit code {process.returncode}"
        raise ProvisionError(
            f"SkyPilot {VERSION}, which clouds are reached through, could not be installed: {why}. It needs a package "
            f"index that pip reaches (PIP_INDEX_URL, PIP_FIND_LINKS), and Python's venv module"
        )
