"""What a host says about itself: its Python, where it can be written to, its GPUs and its address."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from atoll.core.errors import ProvisionError
from atoll.providers.gpus import QUERY, VISIBLE, Gpu, parse_line, visible_gpus
from atoll.providers.ssh.connection import Connection, connections
from atoll.providers.ssh.hosts import Facts
from atoll.wire.command_output import parsed_object

LEAST_PYTHON = (3, 11)
_ASK_S = 20.0  # with logging in; nvidia-smi of a driver without persistence mode takes seconds
# Of a step, what describes its one task: a program that goes by it would take itself for rank 0 of 1.
_OF_THE_LOGIN = re.compile(
    "SSH_|SLURM_(?!(CONF|CLUSTER_NAME|JOB_(ID|PARTITION|USER|ACCOUNT))$)|PMI|SLURMD_|ATOLL_KEEPER$"
)
_QUERY = [f"{QUERY[0]},memory.used,driver_version", QUERY[1]]

# Understood by every Python since 3.4, so that an old one can say what it is.
_ASK = """
import json, os, re, shutil, site, socket, subprocess, sys, tempfile, time
wanted, query, folder = json.loads(sys.argv[1])
home = os.path.expanduser('~')
runtime = os.environ.get('XDG_RUNTIME_DIR')
places = [os.environ.get('ATOLL_HOME') or os.path.join(home, '.atoll')]
places += [os.path.join(runtime, 'atoll')] if runtime else []
places += ['/tmp/atoll-%d' % os.getuid()]
def writable(place):
    try:
        folder = os.path.join(place, 'bundle')
        os.makedirs(folder, 0o700, exist_ok=True)
        about = os.lstat(place)
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            return place + ': belongs to somebody else'
        handle, name = tempfile.mkstemp(dir=folder)
        os.close(handle)
        os.unlink(name)
    except OSError as error:
        return str(error)
found, refused = None, []
for place in places:
    why = writable(place)
    if why is None:
        found = place
        break
    refused.append(why)
def here(name):
    path = os.path.join(found or '/', 'bundle', name)
    try:
        os.utime(path)
        return True
    except OSError:
        return False
def route():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(('192.0.2.1', 9))
            return probe.getsockname()[0]
        except OSError:
            return ''
def named():
    try:
        return socket.gethostbyname(os.environ.get('SLURMD_NODENAME') or socket.gethostname())
    except OSError:
        return ''
def gpus():
    try:
        return subprocess.check_output(['nvidia-smi'] + query, stderr=subprocess.STDOUT, timeout=10).decode()
    except FileNotFoundError:
        return None
    except Exception as error:
        return 'failed: %s' % error
def free(path):
    while path not in ('', '/') and not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        return shutil.disk_usage(path or '/').free
    except OSError:
        return None
def torch():
    own = [] if sys.prefix != sys.base_prefix else [site.getusersitepackages()]
    for place in sys.path + own + (os.environ.get('PYTHONPATH') or '').split(':'):
        try:
            names = os.listdir(place or '/')
        except OSError:
            continue
        for name in names:
            version = re.match(r'torch-([^-]+)(-py[0-9.]+)?[.](dist|egg)-info$', name)
            if version:
                return version.group(1)
print(json.dumps({
    'python': sys.version_info[:3], 'executable': sys.executable, 'home': home,
    'place': found, 'refused': refused, 'bundles': [digest for digest, name in wanted if here(name)],
    'cpus': len(os.sched_getaffinity(0)), 'gpus': gpus(), 'tmp': tempfile.gettempdir(), 'env': dict(os.environ),
    'addr': (os.environ.get('SSH_CONNECTION') or '').split()[2:3], 'route': route() or named(), 'torch': torch(),
    'shm': free('/dev/shm'), 'disk': free(os.path.expanduser(folder or home)), 'time': time.time()}))
"""


def python_command(python: str, code: str, *arguments: str) -> str:
    """The shell command that runs some Python, its standard library alone, in whatever shell the user has."""
    words = ["-I", "-c", f"exec({code!r})", *arguments]  # one line: csh takes no others
    return f"exec {_quoted(python)} {shlex.join(words)}"


def _quoted(python: str) -> str:
    """``~/`` stays for the shell to fill in."""
    return f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)


def ask(connection: Connection, digests: Sequence[tuple[str, str]], folder: str | None = None) -> Facts:
    """Ask a host about itself, once while ``connections.kept`` lasts.

    Args:
        digests: bundles (digest, file name) that it may have.
        folder: where ranks will work there, whose disk is looked at; its user's home by default.

    Raises:
        ProvisionError: it can't be reached, its Python is missing or too old, or nothing there can be written to.
    """
    if connection.facts is not None:
        return connection.facts
    python = connection.target.python or "python3"
    wish = json.dumps([list(digests), _QUERY, folder])
    answer = connection.run(python_command(python, _ASK, wish), limit_s=_ASK_S)
    found = _understood(connection, python, answer)
    if connections.are_kept:
        connection.facts = found
    return found


def _understood(connection: Connection, python: str, answer: subprocess.CompletedProcess[bytes]) -> Facts:
    target = connection.target
    if answer.returncode != 0 or not answer.stdout.startswith(b"{"):
        text = (answer.stderr if answer.returncode else answer.stdout).decode(errors="replace")
        raise ProvisionError(f"{target}: {_no_python(connection, python, text)}")
    said = parsed_object(str(target), answer.stdout)
    version = tuple(said["python"])
    if version < LEAST_PYTHON:
        raise ProvisionError(f"{target}: {_too_old('.'.join(map(str, version)), python)}")
    if said["place"] is None:
        raise ProvisionError(f"{target}: no folder there can be written to: {'; '.join(said['refused'])}")
    gpus, problem = _gpus(said["gpus"])
    if (visible := said["env"].get(VISIBLE)) is not None:
        gpus = visible_gpus(gpus, visible)
    seen = {
        "skew_s": said["time"] - time.time(),
        "shm_bytes": said["shm"],
        "disk_bytes": said["disk"],
        "torch": said["torch"],
        "gpus": [] if problem else _used(said["gpus"] or ""),
    }
    addr = (said["addr"] or [""])[0].removeprefix("::ffff:")
    if not addr or ":" in addr or addr.startswith("127."):  # peers need an IPv4 address that is not loopback
        addr = said["route"] or addr or "127.0.0.1"
    return Facts(
        target=target,
        python=version,
        executable=said["executable"],
        home=said["home"],
        tmp=said["tmp"],
        place=said["place"],
        bundles=frozenset(said["bundles"]),
        cpus=said["cpus"],
        gpus=gpus,
        gpu_problem=problem,
        addr=addr,
        env={name: value for name, value in said["env"].items() if not _OF_THE_LOGIN.match(name)},
        seen=seen,
    )


def _gpus(said: str | None) -> tuple[tuple[Gpu, ...], str | None]:
    if said is None:
        return (), None
    if said.startswith("failed: "):
        return (), f"nvidia-smi {said}"
    lines = (",".join(line.split(",")[:4]) for line in said.splitlines())
    return tuple(gpu for gpu in map(parse_line, lines) if gpu is not None), None


def _used(said: str) -> list[dict[str, Any]]:
    """How much of each GPU is taken, and its driver."""
    rows = [[field.strip() for field in line.split(",")] for line in said.splitlines()]
    return [
        {"index": row[0], "used_mb": float(row[4]) if row[4].isdigit() else 0.0, "driver": row[5]}
        for row in rows
        if len(row) == 6
    ]


def _no_python(connection: Connection, python: str, said: str) -> str:
    """Why the question was not understood: no such program, or one so old that it knows none of the options."""
    shown = connection.run(f"{_quoted(python)} -V")
    version = re.search(r"^Python ((\d+)\.(\d+)\S*)", (shown.stdout + shown.stderr).decode(errors="replace"), re.M)
    if version is not None and (int(version[2]), int(version[3])) < LEAST_PYTHON:
        return _too_old(version[1], python)
    last = (said.strip().splitlines() or ["it printed nothing"])[-1]
    return f"its {python} ({version[1]}) failed: {last}" if version is not None else f"has no {python} ({last}): {_HOW}"


def _too_old(version: str, python: str) -> str:
    least = ".".join(map(str, LEAST_PYTHON))
    return f"has Python {version} as {python}, and Atoll needs {least} or newer there: {_HOW}"


_HOW = (
    "install one (`uv python install 3.12`, or a package) and name it: SSH(python='~/.local/bin/python3.12'), or "
    'python = "…" in config.toml'
)
