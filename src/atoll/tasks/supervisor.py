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
import sys
import time
from pathlib import Path
from typing import IO

from atoll.core.errors import AtollError, ProvisionError
from atoll.core.paths import is_locked
from atoll.tasks import background, record, remains
from atoll.tasks.logs import JobLog
from atoll.tasks.protocol import wait_readable
from atoll.tasks.service import at_socket
from atoll.tasks.spec import JobStatus
from atoll.tasks.store import IN_THE_WAY, Store, unusable
from atoll.tasks.transitions import SetStatus

LOG = "supervisor.log"
_LOCK = "supervisor.lock"
_STARTS = "supervisor.starts"  # when supervisors began that have not begun a job yet, nor lived for long
_STARTED = "-- supervisor started"  # a line of the log; what stands before it an earlier one said
PROBE_S = 0.3  # who only looks whether the lock is held has it for less
_START_S = 20.0
_NO = b"-"  # no message begins so: a supervisor could not start, or need not
_MOST_STARTS = 2  # a job that so many supervisors could not even begin has failed
_LONGEST_ERROR = 2000  # characters of one that is passed on
_KILL_S = 10.0  # one that is killed is gone within milliseconds, unless its disk hangs
# What it is started with: it runs no user code, and finds ssh's agent, homes and state where its user does.
_BOOT = """import os, sys
if os.fork(): os._exit(0)
sys.path.insert(0, sys.argv[1])
from atoll.tasks.supervisor import main
main(sys.argv[2], int(sys.argv[3]))"""


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
            background.start(_BOOT, [str(folder), str(theirs.fileno())], folder, output, (theirs.fileno(),))
        if not wait_readable(ours.fileno(), _START_S):
            raise ProvisionError(f"the supervisor of cluster {folder.name} did not start within {_START_S:.0f} s")
        said = ours.recv(_LONGEST_ERROR, socket.MSG_PEEK)
    except OSError as error:
        ours.close()
        raise ProvisionError(f"the supervisor of cluster {folder.name} could not be started: {error}") from error
    except BaseException:
        ours.close()
        raise
    if said[:1] == _NO:
        ours.close()
        if reason := said[1:].decode(errors="replace"):
            raise ProvisionError(reason)
        return None
    if not said:
        ours.close()
        why = f"{last_line(folder) or 'it printed nothing'} (see {log})"
        raise ProvisionError(f"the supervisor of cluster {folder.name} did not start: {why}")
    return ours


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
    if store.jobs(limit=1, unfinished=True) and not is_running(folder):
        reach(folder).close()


def fail_orphans(store: Store, folder: Path) -> None:
    """Jobs that were begun by a supervisor that is no more have failed. For whoever holds the lock.

    A node's agent ends, and everything below it, when its driver does; what is stopped or hangs is ended here.
    """
    orphans = [job for job in store.jobs(newest_first=False, unfinished=True) if job.status is not JobStatus.PENDING]
    if not orphans:
        return
    reason = "its supervisor was killed, or the machine restarted"
    if line := last_line(folder):
        reason += f"; the supervisor's last message, in {folder / LOG}: {line}"
    with contextlib.suppress(OSError, AtollError):  # the next job, which needs it, tells
        if left := remains.end_left(folder, folder / LOG):
            reason += f"; not even SIGKILL ends {', '.join(left)}"
    for job in orphans:
        _fail(store, folder, job.id, reason)


def fail_untried(store: Store, folder: Path) -> None:
    """Jobs that several supervisors in a row could not even begin have failed. For whoever holds the lock."""
    starts = _starts(folder)
    if len(starts) < _MOST_STARTS:
        return
    why = f": {line}" if (line := last_line(folder)) else ", killed by a signal perhaps"
    reason = (
        f"its supervisor ended {_MOST_STARTS} times before it had begun the job{why}. More is in {folder / LOG}; once "
        f"the cause is gone, submit the job again"
    )
    for job in store.jobs(newest_first=False, unfinished=True):
        if job.submitted_s <= starts[-_MOST_STARTS]:
            _fail(store, folder, job.id, reason)


def _fail(store: Store, folder: Path, job_id: int, reason: str) -> None:
    log = JobLog(folder / "jobs" / str(job_id))
    log.say(f"✗ Job {job_id} failed (status: {JobStatus.FAILED_DRIVER}): {reason}.")
    log.close(time.monotonic())
    store.apply(job_id, [SetStatus(JobStatus.FAILED_DRIVER, reason)], time.time())


def _starts(folder: Path) -> list[float]:
    """When the last supervisors began that led to nothing; times as ``time.time`` has them, the latest last."""
    with contextlib.suppress(OSError, ValueError):
        return [float(word) for word in (folder / _STARTS).read_text().split()]
    return []


def settle(folder: Path) -> None:
    """Forget earlier starts: the supervisor has begun a job, has lived for long, or ends because none is left."""
    with contextlib.suppress(OSError):
        (folder / _STARTS).unlink()


def last_line(folder: Path) -> str:
    """Of what the last supervisor said: of a traceback, the error."""
    return next(iter(said_last(folder).splitlines()[-1:]), "")[:_LONGEST_ERROR]


def said_last(folder: Path) -> str:
    """What the last supervisor wrote into its log."""
    try:
        text = (folder / LOG).read_text(errors="replace")
    except OSError:
        return ""
    starts = [*re.finditer(rf"^{_STARTED}.*\n", text, re.M)]
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


def main(folder_name: str, first: int) -> None:
    """Entry of the supervisor's process; ``first`` is the connection of whoever started it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=first)
    try:
        _run(Path(folder_name), sock)
    except AtollError as error:
        _write_log(str(error))
        _refuse(sock, str(error))
        sys.exit(1)


def _run(folder: Path, first: socket.socket) -> None:
    lock = open_lock(folder)
    if not record.take_lock(lock, PROBE_S):  # somebody was faster
        _refuse(first, "")
        return
    from atoll.tasks.dispatcher import Dispatcher  # clients don't need all of it

    os.ftruncate(lock, 0)
    with contextlib.suppress(OSError):  # the disk may be full
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    with Store(folder) as store:
        store.keep_reserve()
        fail_orphans(store, folder)
        fail_untried(store, folder)
        _write_log(f"{_STARTED} {time.strftime('%Y-%m-%d %H:%M:%S')}, pid {os.getpid()}")
        with contextlib.suppress(OSError):
            starts = [*_starts(folder), time.time()][-_MOST_STARTS:]
            (folder / _STARTS).write_text(" ".join(map(str, starts)))
        Dispatcher(folder, store, lock, first).run()


def _write_log(line: str) -> None:
    with contextlib.suppress(OSError):  # the disk may be full
        os.write(2, f"{line}\n".encode(errors="surrogateescape"))


def _refuse(first: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):  # who started us is gone
        first.sendall(_NO + reason.encode(errors="replace")[: _LONGEST_ERROR - 1])
