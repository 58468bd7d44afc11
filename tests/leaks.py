"""Finds what a test left behind: processes, threads, descriptors, ports, shared memory, temporary files, pool state.

``tests/conftest.py`` takes a snapshot before each test and compares afterwards. Where nothing is new, that costs a
few hundred microseconds; where something is, it gets ``GRACE_S`` seconds to go away, then the test fails with a list
and what was left is removed, so that the next test is not blamed for it.

Only this process's own descendants are looked at (it makes itself a subreaper, so orphans come to it), and processes
that carry its tag in their environment; nothing is ever looked for, or killed, machine-wide.

For tests: ``is_running(pid)`` is False for a zombie, which ``os.kill(pid, 0)`` is not. A session-scoped fixture wraps
what it starts in ``with leaks.keep():`` (``torch_in_process`` and ``jupyter_in_process`` in conftest.py do that for
what those libraries keep once in a process), and a module that shares pools between its tests is marked
``pytestmark = pytest.mark.leaks_per_module``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import process as mp_process
from pathlib import Path

GRACE_S = 20.0  # for what ends by itself, on a busy machine too; only what does not costs it
TAG = "ATOLL_TEST_TAG"
_PR_SET_CHILD_SUBREAPER = 36
_SHM = "/dev/shm"

# ------------------------------------------------------------------------------------------------- allow lists
# Things that a library makes once in a process and keeps on purpose. Each says whose it is.

_THREAD_CLASSES = {
    "TMonitor",  # tqdm: one monitor thread for all bars, ends with the process
    "_DummyThread",  # a thread of C++ code (autograd, OpenMP) that once called into Python
}
_THREAD_NAMES = (
    "pytest_timeout",  # pytest-timeout's timer where SIGALRM cannot be used
    "execnet",  # the channel of an xdist worker to its controller
)
_FD_TARGETS = (
    "/dev/urandom",  # opened once by OpenSSL and by NumPy's seeding
    "/dev/null",  # opened once by subprocess.DEVNULL users and by C libraries
    "/dev/nvidia",  # the CUDA driver's, for the life of the process
    "/sys/",  # topology files of OpenMP and hwloc
    "anon_inode:inotify",  # file watchers of mkdocs and IPython
)
_FD_ENDINGS = (
    ".so",  # libraries being mapped
    ".coverage",  # coverage's own database
    ".ttf",  # matplotlib's cache of open fonts
)
_COMMANDS = (
    "multiprocessing.resource_tracker",  # started once by SharedMemory and semaphores, ends with the process
    "loky.backend.resource_tracker",  # joblib's copy of it
)
_SHARED_MEMORY = {"atoll-gpus"}  # who leases which GPU: one file a GPU, for all users, meant to stay
_TEMPORARY = ("torchinductor_",)  # compiled kernels, a cache meant to stay


@dataclass(frozen=True)
class Process:
    """One process, told apart from a later one with the same pid by its start time (clock ticks since boot)."""

    pid: int
    started: int

    def describe(self) -> str:
        ports = f", listening on {', '.join(map(str, found))}" if (found := listening_ports(self.pid)) else ""
        return f"process {self.pid} ({_command(self.pid) or 'no command line'}){ports}"


@dataclass(frozen=True)
class Snapshot:
    """What there was at one moment."""

    processes: frozenset[Process]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    shared_memory: frozenset[str]
    files: frozenset[str]
    pools: frozenset[str]


@dataclass
class Watch:
    """Takes snapshots of this process's surroundings and tells what is new.

    Attributes:
        temporary: the session's own ``TMPDIR``; only its top-level names are compared.
        home: the session's ``ATOLL_HOME``; new names under its ``pools`` are leftovers.
        tag: value of ``ATOLL_TEST_TAG`` in the environment of everything this process starts.
    """

    temporary: Path
    home: Path
    tag: str = field(default_factory=lambda: uuid.uuid4().hex)
    # Processes seen without our tag: an environment block is fixed at exec, so they need no second look.
    _strangers: set[int] = field(default_factory=set)
    # Made by session-scoped fixtures under keep().
    _kept: list[tuple[Snapshot, Snapshot]] = field(default_factory=list)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            processes=frozenset(self._processes()),
            threads=frozenset(_threads()),
            descriptors=frozenset(_descriptors()),
            shared_memory=frozenset(_names(_SHM)) - _SHARED_MEMORY,
            files=frozenset(name for name in _names(self.temporary) if not name.startswith(_TEMPORARY)),
            pools=frozenset(_names(self.home / "pools")),
        )

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """What is started inside belongs to the session, and no test is blamed for it."""
        before = self.snapshot()
        try:
            yield
        finally:
            self._kept.append((before, self.snapshot()))

    def leftovers(self, before: Snapshot) -> Snapshot:
        """What is there now and was not in ``before``, less what libraries and the session keep."""
        now = self.snapshot()
        new = _minus(now, before)
        for start, end in self._kept:
            new = _minus(new, _minus(end, start))
        if not any(vars(new).values()):
            return new
        return Snapshot(
            processes=frozenset(p for p in new.processes if _counts(p)),
            threads=frozenset(t for t in new.threads if t.is_alive()),
            descriptors=frozenset(d for d in new.descriptors if d[0] not in _tracker_descriptors()),
            shared_memory=frozenset(n for n in new.shared_memory if self._ours(n)),
            files=frozenset(n for n in new.files if not _is_multiprocessing_folder(n)),
            pools=new.pools,
        )

    def check(self, before: Snapshot) -> list[str]:
        """One line for each thing left since ``before`` and still there after the grace; removes what it names."""
        left = self.leftovers(before)
        deadline = time.monotonic() + GRACE_S
        pause_s = 0.005
        while any(vars(left).values()) and time.monotonic() < deadline:
            gc.collect()  # an unreachable socket or pool in a reference cycle is not left behind
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)
            left = self.leftovers(before)
        lines: list[str] = []
        if any(vars(left).values()):
            lines = self._describe(left)
            self._remove(left)
        reap_adopted()
        return lines

    def _describe(self, left: Snapshot) -> list[str]:
        lines = [process.describe() for process in sorted(left.processes, key=lambda p: p.pid)]
        lines += [f"thread {thread.name!r} ({type(thread).__qualname__})" for thread in left.threads]
        ports = _listening_inodes(os.getpid())
        for number, target in sorted(left.descriptors):
            port = ports.get(target)
            lines.append(f"port {port}, descriptor {number}" if port else f"descriptor {number} ({target})")
        lines += [f"shared memory {_SHM}/{name}" for name in sorted(left.shared_memory)]
        lines += [f"temporary file {self.temporary / name}" for name in sorted(left.files)]
        lines += [f"pool state {self.home / 'pools' / name}" for name in sorted(left.pools)]
        return lines

    def _remove(self, left: Snapshot) -> None:
        """Kill our descendants and delete our files. Threads and descriptors cannot be taken away safely."""
        kill(process for process in left.processes if process in set(_descendants(os.getpid())))
        paths = [Path(_SHM, name) for name in left.shared_memory]
        paths += [self.temporary / name for name in left.files]
        paths += [self.home / "pools" / name for name in left.pools]
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _processes(self) -> Iterator[Process]:
        """Our descendants that run, and tagged processes that are not our descendants any more."""
        own = list(_descendants(os.getpid()))
        yield from own
        known = {process.pid for process in own} | {os.getpid()}
        wanted = f"{TAG}={self.tag}".encode()
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._strangers &= present
        for pid in present - known - self._strangers:
            try:
                tagged = wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:  # gone, or another user's
                tagged = False
            status = _status(pid)
            if not tagged:
                # One that is between fork and exec shows its parent's environment: look at new ones again.
                if status is not None and time.clock_gettime(time.CLOCK_BOOTTIME) - _seconds(status.started) > 2:
                    self._strangers.add(pid)
            elif status is not None and status.running:
                yield Process(pid, status.started)

    def _ours(self, name: str) -> bool:
        """Whether a new name in /dev/shm can be this process's: owned by us, and not held by anyone else.

        The folder is the machine's, and other test workers use it at the same time.
        """
        try:
            file = os.stat(f"{_SHM}/{name}")
        except OSError:
            return False
        if file.st_uid != os.getuid():
            return False
        own = {process.pid for process in _descendants(os.getpid())} | {os.getpid()}
        others = (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) not in own)
        return not any(_holds(pid, file) for pid in others)


# ---------------------------------------------------------------------------------------------------- processes
@dataclass(frozen=True)
class _Status:
    state: str
    parent: int
    started: int

    @property
    def running(self) -> bool:
        return self.state not in "ZX"


def become_subreaper() -> None:
    """From now on orphaned grandchildren become children of this process instead of the machine's init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(code)}")


def is_running(pid: int) -> bool:
    """Whether ``pid`` exists and is not a zombie."""
    status = _status(pid)
    return status is not None and status.running


def descendants(pid: int | None = None) -> list[int]:
    """Pids of the running descendants of ``pid``, or of this process."""
    return [process.pid for process in _descendants(os.getpid() if pid is None else pid)]


def listening_ports(pid: int) -> list[int]:
    """TCP ports that ``pid`` listens on, in its own network namespace."""
    return sorted(_listening_inodes(pid).values())


def kill(processes: Iterable[Process]) -> None:
    """SIGKILL each process, through a pidfd so that a reused pid is never hit, and wait until all are gone."""
    doomed = list(processes)
    for process in doomed:
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            status = _status(process.pid)
            if status is not None and status.started == process.started:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended meanwhile
        finally:
            os.close(handle)
    deadline = time.monotonic() + 10
    while any(is_running(process.pid) for process in doomed) and time.monotonic() < deadline:
        time.sleep(0.005)


def reap_adopted() -> None:
    """Collect zombies that nobody in this process will ever wait for: the orphans that came to the subreaper.

    A zombie that a live ``Popen`` or ``multiprocessing.Process`` stands for keeps its exit status for it. Finding
    those objects means a walk over the heap, which is why it is done only where there is a zombie.
    """
    zombies = [pid for pid in _children(os.getpid()) if (s := _status(pid)) is not None and s.state == "Z"]
    if not zombies:
        return
    claimed = {process.pid for process in mp_process.active_children()}
    # `type()`, not isinstance: lazy proxies on the heap would import things when asked for their class.
    popens = [o for o in gc.get_objects() if issubclass(type(o), subprocess.Popen)]
    # Another thread may be making one: it has no exit status yet, nor perhaps a pid.
    claimed |= {getattr(popen, "pid", None) for popen in popens if getattr(popen, "returncode", None) is None}
    for pid in zombies:
        if pid not in claimed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
        except OSError:
            pass  # that thread ended
    return found


def _descendants(root: int) -> Iterator[Process]:
    """Running descendants; children of a zombie have been given away already."""
    todo, seen = _children(root), set()
    while todo:
        pid = todo.pop()
        if pid in seen:
            continue
        seen.add(pid)
        status = _status(pid)
        if status is not None and status.running:
            yield Process(pid, status.started)
            todo += _children(pid)


def _status(pid: int) -> _Status | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and brackets
    return _Status(state=fields[0], parent=int(fields[1]), started=int(fields[19]))


def _seconds(ticks: int) -> float:
    return ticks / os.sysconf("SC_CLK_TCK")


def _command(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()[:300]


def _counts(process: Process) -> bool:
    command = _command(process.pid)
    return is_running(process.pid) and not any(allowed in command for allowed in _COMMANDS)


# --------------------------------------------------------------------------------------- threads, descriptors, files
def _threads() -> Iterator[threading.Thread]:
    for thread in threading.enumerate():
        if type(thread).__name__ not in _THREAD_CLASSES and not thread.name.startswith(_THREAD_NAMES):
            yield thread


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that listdir itself used
        # pytest's capture swaps 0, 1 and 2 between the phases of a test.
        if int(name) > 2 and not target.startswith(_FD_TARGETS) and not target.endswith(_FD_ENDINGS):
            yield int(name), target


def _tracker_descriptors() -> set[int]:
    """Our end of the pipe to multiprocessing's, and loky's, resource tracker."""
    found = set()
    for module in ("multiprocessing.resource_tracker", "joblib.externals.loky.backend.resource_tracker"):
        tracker = getattr(sys.modules.get(module), "_resource_tracker", None)
        if tracker is not None and tracker._fd is not None:
            found.add(tracker._fd)
    return found


def _listening_inodes(pid: int) -> dict[str, int]:
    """``socket:[inode]`` -> port, for the TCP sockets that ``pid`` holds open and listens on."""
    listening: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            if columns[3] == "0A":  # TCP_LISTEN
                listening[f"socket:[{columns[9]}]"] = int(columns[1].rsplit(":", 1)[1], 16)
    held = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target in listening:
                    held[target] = listening[target]
    return held


def _holds(pid: int, file: os.stat_result) -> bool:
    """Whether ``pid`` has ``file`` mapped or open. By inode: glibc maps a semaphore before it gives it its name."""
    mapped = [f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}", str(file.st_ino)]
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        if any(line.split()[3:5] == mapped for line in lines):
            return True
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.path.samestat(entry.stat(), file):
                    return True
    return False


def _is_multiprocessing_folder(name: str) -> bool:
    """multiprocessing's own folder for its sockets: made once in a process, removed when it ends."""
    folder = mp_process.current_process()._config.get("tempdir")
    return folder is not None and Path(folder).name == name


def _names(folder: str | Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _minus(a: Snapshot, b: Snapshot) -> Snapshot:
    return Snapshot(**{name: getattr(a, name) - getattr(b, name) for name in vars(a)})


# -------------------------------------------------------------------------------------------------------- session
_session: Watch | None = None


def start_session(root: Path) -> Watch:
    """Make this process the watched one: subreaper, tag, its own TMPDIR and ATOLL_HOME under ``root``."""
    global _session
    become_subreaper()
    temporary, home = root / "t", root / "home"
    for folder in (temporary, home):
        folder.mkdir(mode=0o700)
    _session = Watch(temporary=temporary, home=home)
    return _session


def session() -> Watch:
    """The watch of this test process."""
    if _session is None:
        raise RuntimeError("leaks.start_session() has not been called: tests/conftest.py does it")
    return _session


def kept_processes() -> set[int]:
    """Pids of what the session keeps, and of all that runs below."""
    kept = {process.pid for before, after in session()._kept for process in after.processes - before.processes}
    return kept.union(*map(descendants, kept))


def keep() -> contextlib.AbstractContextManager[None]:
    """For session-scoped fixtures: what is started inside ``with leaks.keep():`` stays, and no test is blamed."""
    return session().keep()
