"""The one process behind a cluster's jobs: started by whoever adds a job, gone when none is left.

It belongs to no terminal, and holds a lock as long as it lives, so that everybody can tell that it does. It alone
changes the cluster's jobs; whoever wants that asks it on its socket. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import atoll
from atoll.agent import keeper
from atoll.agent.orphans import VARIABLE
from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.paths import is_locked
from atoll.core.secrets import is_secret
from atoll.providers import registry
from atoll.tasks import record
from atoll.tasks.protocol import wait_readable
from atoll.tasks.service import at_socket
from atoll.tasks.store import IN_THE_WAY, Store, unusable

LOG = "supervisor.log"
STARTED = "-- supervisor started"  # a line of the log; what stands before it an earlier one said
LONGEST_ERROR = 2000  # characters of one that is passed on
NO = b"-"  # no message begins so: a supervisor could not start, or need not
_LOCK = "supervisor.lock"
PROBE_S = 0.3  # who only looks whether the lock is held has it for less
_START_S = 20.0
_KILL_S = 10.0  # one that is killed is gone within milliseconds, unless its disk hangs
# What it is started with: it runs no user code, and finds ssh's agent, homes and state where its user does.
_ENVIRONMENT = (
    "PATH",
    "LD_LIBRARY_PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "SSH_AUTH_SOCK",
    "TZ",
    "SLURM_CONF",
)
_BOOT = """import os, sys
if os.fork(): os._exit(0)
sys.path.insert(0, sys.argv[1])
from atoll.tasks.dispatcher import main
main(sys.argv[2], int(sys.argv[3]))"""
_ALONE = "import os\nif os.fork(): os._exit(0)\n"
_GUARD = """import os, sys
if os.fork(): os._exit(0)
sys.path.insert(0, sys.argv[1])
from atoll.tasks.watcher import guard
guard(sys.argv[2])"""
_WATCHER = "import sys; sys.path.insert(0, sys.argv[1]); from atoll.tasks.watcher import main; main(sys.argv[2])"


def is_running(folder: Path) -> bool:
    """Does the cluster's supervisor run? The lock tells, which a pid that somebody else has by now would not.

    Raises:
        AtollError: the lock's file can't be opened.
    """
    try:
        return is_locked(folder / _LOCK)
    except IN_THE_WAY as error:
        raise unusable(folder / _LOCK, error) from error


def kill(folder: Path, patience_s: float = _KILL_S) -> bool:
    """End the cluster's supervisor at once, and with it all that it started, whatever it is doing; has it ended?

    Not where it runs on another machine that shares the folder.
    """
    deadline = time.monotonic() + patience_s
    with contextlib.suppress(AtollError):  # a lock that we may not open none of ours holds
        while is_running(folder):
            if time.monotonic() > deadline:
                return False
            with contextlib.suppress(ValueError, OSError):  # it just began, or just ended
                pid = int((folder / _LOCK).read_text())
                if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
    return True


def connect(folder: Path) -> socket.socket | None:
    """A connection to the supervisor that runs; None where none answers."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        at_socket(folder, sock.connect)
    except OSError:
        sock.close()
        return None
    return sock


def reach(folder: Path) -> socket.socket:
    """A connection to the cluster's supervisor, which is started where none runs.

    Raises:
        ProvisionError: it ended at once, or did not start; the message says why.
        AtollError: nobody can tell whether one runs, or the one that does is not to be reached.
    """
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if (sock := connect(folder)) is not None:
            return sock
        if is_running(folder):  # it begins just now, or ends
            time.sleep(0.01)
        elif (sock := _start(folder)) is not None:
            return sock
    raise AtollError(
        f"the supervisor of cluster {folder.name}, process {pid_of(folder)}, can't be reached: it runs on another "
        f"machine that shares {folder}, or does not finish"
    )


def _start(folder: Path) -> socket.socket | None:
    """Starts a supervisor; None where another one was faster."""
    log = folder / LOG
    ours, theirs = socket.socketpair()
    try:
        with theirs, _opened(log) as output:
            _spawn(folder, theirs.fileno(), output)
        if not wait_readable(ours.fileno(), _START_S):
            raise ProvisionError(f"the supervisor of cluster {folder.name} did not start within {_START_S:.0f} s")
        said = ours.recv(LONGEST_ERROR, socket.MSG_PEEK)
    except OSError as error:
        ours.close()
        raise ProvisionError(f"the supervisor of cluster {folder.name} could not be started: {error}") from error
    except BaseException:
        ours.close()
        raise
    if said[:1] == NO:
        ours.close()
        if reason := said[1:].decode(errors="replace"):
            raise ProvisionError(reason)
        return None
    if not said:
        ours.close()
        why = f"{last_line(folder) or 'it printed nothing'} (see {log})"
        raise ProvisionError(f"the supervisor of cluster {folder.name} did not start: {why}")
    return ours


def _environment(folder: Path) -> dict[str, str]:
    """What it needs of the caller's environment, and no secret."""
    env = {name: value for name, value in os.environ.items() if name in _ENVIRONMENT or name.startswith("ATOLL_")}
    # One that a job starts is not below that job.
    env = {name: value for name, value in env.items() if not is_secret(name, value) and name != VARIABLE}
    return {**env, "ATOLL_HOME": str(folder.parent.parent)}


def _spawn(folder: Path, first: int, output: IO[bytes]) -> None:
    """Run a supervisor that is nobody's child."""
    _detach([_BOOT, _source(), str(folder), str(first)], folder, output, first)


def guard(folder: Path) -> None:
    """Have a process of its own start a supervisor again that ends before its managed jobs do (``watcher.guard``)."""
    with _opened(folder / LOG) as output:
        _detach([_GUARD, _source(), str(folder)], folder, output)


def _detach(program: list[str], folder: Path, output: IO[bytes], *fds: int) -> None:
    """Run a program that is nobody's child."""
    env = _environment(folder)
    command = [sys.executable, "-I", "-S", "-c", *program]
    if keeper.spawn(command, {1: output.fileno(), 2: output.fileno(), **{fd: fd for fd in fds}}, env):
        return
    subprocess.run(
        command,
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        cwd="/",
        env=env,
    )


def watch(folder: Path, *, alone: bool = False) -> None:
    """Have the cluster looked after by a process of its own (``watcher``), in the job that holds its nodes.

    ``alone``: where there is none, too, as its nodes cost something.
    """
    with _opened(folder / LOG) as output:
        if keeper.VARIABLE in os.environ:
            keeper.spawn(
                [sys.executable, "-I", "-S", "-c", _WATCHER, _source(), str(folder)],
                {1: output.fileno(), 2: output.fileno()},
                _environment(folder),
                again_log=str(folder / LOG),
            )
        elif alone:
            _detach([_ALONE + _WATCHER, _source(), str(folder)], folder, output)


def _source() -> str:
    """The folder, or the archive, that this package lies in."""
    return str(Path(atoll.__file__).parent.parent)


def _opened(log: Path) -> IO[bytes]:
    try:
        return open(log, "ab")
    except IN_THE_WAY as error:
        raise unusable(log, error) from error


def resume(folder: Path, store: Store) -> None:
    """Starts a supervisor where jobs have not ended and none runs: those that were begun have failed, others start.

    Raises:
        AtollError: it could not be started.
    """
    if store.jobs(limit=1, unfinished=True) and not is_running(folder) and belongs_here(folder):
        reach(folder).close()


def belongs_here(folder: Path) -> bool:
    """May this machine start the cluster's jobs?"""
    try:
        allocation = record.load(folder).allocation
        return registry.of(allocation).may_supervise(allocation)
    except (LookupError, ConfigError):  # none can be started, and the job is told so
        return True


def last_line(folder: Path) -> str:
    """Of what the last supervisor said: of a traceback, the error."""
    return next(iter(said_last(folder).splitlines()[-1:]), "")[:LONGEST_ERROR]


def said_last(folder: Path) -> str:
    """What the last supervisor wrote into its log."""
    try:
        text = (folder / LOG).read_text(errors="replace")
    except OSError:
        return ""
    starts = [*re.finditer(rf"^{STARTED}.*\n", text, re.M)]
    return text[starts[-1].end() if starts else 0 :].strip()


def pid_of(folder: Path) -> int | None:
    """The pid of the supervisor that runs, or ran last."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / _LOCK).read_text())
    return None


def open_lock(folder: Path) -> int:
    """A descriptor of the lock that a supervisor holds.

    Raises:
        AtollError: its file can't be opened.
    """
    try:
        return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except IN_THE_WAY as error:
        raise unusable(folder / _LOCK, error) from error
