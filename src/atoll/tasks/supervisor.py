"""The one process behind a cluster's jobs: started by whoever adds a job, gone when none is left.

It belongs to no terminal, and holds a lock as long as it lives, so that everybody can tell that it does. Standard
library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import atoll
from atoll.core.errors import ProvisionError
from atoll.core.hints import is_secret
from atoll.core.paths import is_locked
from atoll.tasks.logs import JobLog
from atoll.tasks.spec import JobStatus
from atoll.tasks.store import Store
from atoll.tasks.transitions import SetStatus

LOG = "supervisor.log"
WAKE = "wake"  # a pipe: whoever writes a byte has the store looked at
_LOCK = "supervisor.lock"
_STARTED = "-- supervisor started"  # a line of the log; what stands before it an earlier one said
PROBE_S = 0.3  # who only looks whether the lock is held has it for less
_START_S = 20.0
_KILL_S = 10.0  # one that is killed is gone within milliseconds, unless its disk hangs
# What it is started with: it runs no user code, and finds ssh's agent, homes and state where its user does.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "SSH_AUTH_SOCK", "TZ")
_BOOT = """import os, sys
if os.fork(): os._exit(0)
sys.path.insert(0, sys.argv[1])
from atoll.tasks.supervisor import main
main(sys.argv[2], int(sys.argv[3]))"""


def is_running(folder: Path) -> bool:
    """Does the cluster's supervisor run? The lock tells, which a pid that somebody else has by now would not."""
    return is_locked(folder / _LOCK)


def kill(folder: Path, patience_s: float = _KILL_S) -> bool:
    """End the cluster's supervisor at once, and with it all that it started, whatever it is doing; has it ended?

    Not where it runs on another machine that shares the folder.
    """
    deadline = time.monotonic() + patience_s
    while is_running(folder):
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(ValueError, OSError):  # it just began, or just ended
            pid = int((folder / _LOCK).read_text())
            if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return True


def wake(folder: Path) -> None:
    """Have the supervisor look at the store now, if it runs."""
    try:
        fd = os.open(folder / WAKE, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # nobody reads: it looks when it starts
        return
    with contextlib.suppress(OSError):  # full: it has been woken
        os.write(fd, b"!")
    os.close(fd)


def ensure(folder: Path) -> None:
    """Have a supervisor look at the store: wake the one that runs, or start one and wait until it does.

    Raises:
        ProvisionError: it ended at once, or did not start; the message has the end of its log.
    """
    if is_running(folder):
        wake(folder)
        return
    log = folder / LOG
    try:
        started = _start(folder, log)
    except OSError as error:
        raise ProvisionError(f"the supervisor of cluster {folder.name} could not be started: {error}") from error
    if not started and not is_running(folder):
        end = said_last(folder)[-2000:]
        raise ProvisionError(f"the supervisor of cluster {folder.name} did not start; the end of {log}:\n{end}")
    wake(folder)


def _start(folder: Path, log: Path) -> bool:
    """Start a supervisor; does it say that it will see to the jobs?"""
    env = {name: value for name, value in os.environ.items() if name in _ENVIRONMENT or name.startswith("ATOLL_")}
    env = {name: value for name, value in env.items() if not is_secret(name, value)}
    answer, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            with open(log, "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _BOOT, _source_root(), str(folder), str(theirs)],
                    pass_fds=(theirs,),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    cwd="/",
                    env={**env, "ATOLL_HOME": str(folder.parent.parent)},
                )
        finally:
            os.close(theirs)
        process.wait()  # it forks at once: the supervisor is nobody's child
        return bool(select.select([answer], [], [], _START_S)[0] and os.read(answer, 1))
    finally:
        os.close(answer)


def _source_root() -> str:
    """What has to be on the import path: the folder, or the archive, that this package lies in."""
    return str(Path(atoll.__file__).parent.parent)


def reconcile(folder: Path) -> None:
    """Bring the store in line with what is: jobs whose supervisor is gone have failed, waiting ones get a new one."""
    if (folder / "jobs.db").exists():
        with Store(folder) as store:
            reconcile_store(store, folder)


def reconcile_store(store: Store, folder: Path) -> None:
    """The same for whoever has the store open."""
    if not store.jobs(limit=1, unfinished=True) or is_running(folder):
        return
    lock = open_lock(folder)
    try:
        if take_lock(lock, 0.0):
            fail_orphans(store, folder)
    finally:
        os.close(lock)
    if store.jobs(limit=1, unfinished=True):
        ensure(folder)


def fail_orphans(store: Store, folder: Path) -> None:
    """Jobs that were begun by a supervisor that is no more have failed. For whoever holds the lock.

    Nothing of them lives: a node's agent ends, and everything below it, when its driver does.
    """
    for job in store.jobs(newest_first=False, unfinished=True):
        if job.status is JobStatus.PENDING:
            continue
        reason = "its supervisor was killed, or the machine restarted"
        if said_last(folder):
            reason += f"; what the supervisor said last is in {folder / LOG}"
        log = JobLog(folder / "jobs" / str(job.id))
        log.say(f"✗ Job {job.id} failed (status: {JobStatus.FAILED_DRIVER}): {reason}.")
        log.close(time.monotonic())
        store.apply(job.id, [SetStatus(JobStatus.FAILED_DRIVER, reason)], time.time())


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
    """A descriptor of the lock that a supervisor holds."""
    return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def take_lock(lock: int, patience_s: float) -> bool:
    """Get the lock; whoever only looks whether it is held has it for an instant."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)


def main(folder_name: str, answer: int) -> None:
    """Entry of the supervisor's process; ``answer`` is where it says that jobs will be seen to."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(folder_name)
    lock = open_lock(folder)
    if not take_lock(lock, PROBE_S):  # somebody was faster, and looks at the store after us
        _tell(answer)
        return
    from atoll.tasks.dispatcher import Dispatcher  # clients don't need all of it

    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    with Store(folder) as store:
        store.keep_reserve()
        fail_orphans(store, folder)
        with contextlib.suppress(OSError):  # the disk may be full
            os.write(2, f"{_STARTED} {time.strftime('%Y-%m-%d %H:%M:%S')}, pid {os.getpid()}\n".encode())
        dispatcher = Dispatcher(folder, store, lock)
        _tell(answer)
        os.close(answer)
        dispatcher.run()
    if dispatcher.unreachable:  # a store that came in its place may have jobs that took us for its supervisor
        reconcile(folder)


def _tell(answer: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # who started us is gone; the jobs are there all the same
        os.write(answer, b"+")
