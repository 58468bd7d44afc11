"""Processes of a rank's tree: finding them, killing them, reaping them, and telling why one died."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Names that libraries give to shared memory they mean to remove themselves. A process that is killed can't.
_SHM_PREFIXES = ("psm_", "torch_", "nccl-", "sem.mp-", "pym-", "cuda.shm.", "__KMP_REGISTERED_LIB_")
TICK_S = 0.5
_KILL_S = 1.5  # a process that sits in the kernel is waited for no longer
_TRACKER_S = 0.5  # what Python's resource tracker gets to remove what the killed left, before it is left to itself,
_LAST_TRACKER_S = 3.0  # and at the end of all, before it is killed too: it may only just have started
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """One prctl call, e.g. to become a subreaper."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


# ------------------------------------------------------------------------------------------------- what /proc says
class Stat(NamedTuple):
    """A process. A later one with the same pid has another start time, in clock ticks since boot.

    ``state`` is one letter, as ``ps`` shows it; ``cpu_ticks`` are also those of children that have ended.
    """

    state: str
    parent: int
    session: int
    started: int
    cpu_ticks: int

    @property
    def is_alive(self) -> bool:
        """Does it run? One that has ended and was not waited for yet does not."""
        return self.state not in "ZX"


def stat_of(pid: int) -> Stat | None:
    """What a process is; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The command name may hold spaces and brackets: what counts comes after the last bracket.
            fields = stat.read().rpartition(b")")[2].split()
        cpu_ticks = sum(map(int, fields[11:15]))
        return Stat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]), cpu_ticks)
    except (OSError, IndexError):
        return None


def all_stats() -> dict[int, Stat]:
    """Every process."""
    found = ((int(name), stat_of(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return {pid: stat for pid, stat in found if stat is not None}


def below(roots: Iterable[int], stats: Mapping[int, Stat], spared: Collection[int] = ()) -> set[int]:
    """Roots and all processes below them; one that was orphaned is found by the session of a root or a descendant."""
    found = set(roots)
    grew = True
    while grew:
        new = {
            pid
            for pid, stat in stats.items()
            if pid not in found and pid not in spared and (stat.parent in found or stat.session in found)
        }
        found |= new
        grew = bool(new)
    return found


def alive(pid: int) -> bool:
    """Does it run? One that has ended and was not waited for yet does not."""
    stat = stat_of(pid)
    return stat is not None and stat.is_alive


def is_stopped(pid: int) -> bool:
    """Has a signal stopped it?"""
    stat = stat_of(pid)
    return stat is not None and stat.state in "Tt"


def command_line(pid: int) -> bytes:
    """Its arguments, each ended by a zero byte; empty where it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as cmdline:
        return cmdline.read()
    return b""


def environ(pid: int) -> list[bytes]:
    """Its environment at its start, ``NAME=VALUE`` each; empty where it is gone, or another user's."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().split(b"\0")
    return []


def activity(pids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What each of these does, seen from outside.

    The letter of its state, where it sleeps in the kernel, and the CPU seconds of all its session. Each of them leads
    one.
    """
    stats = all_stats()
    ticks = dict.fromkeys(pids, 0)
    for stat in stats.values():
        if stat.session in ticks:
            ticks[stat.session] += stat.cpu_ticks
    found: dict[int, dict[str, Any]] = {}
    for pid in pids:
        wchan = ""
        with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
            wchan = file.read()
        state = stats[pid].state if pid in stats else ""
        found[pid] = {"state": state, "wchan": wchan, "cpu_s": ticks[pid] / _TICKS_PER_S}
    return found


def outer_pid(proc_fd: int, pid: int) -> int:
    """What a child of this process is called outside of its PID namespace; ``pid`` itself where that is not known.

    Args:
        proc_fd: ``/proc`` as it is there; -1 where it is not to be had.
        pid: what it is called here.
    """
    proc = f"/proc/self/fd/{proc_fd}"
    with contextlib.suppress(OSError):
        me = os.readlink(f"{proc}/self")
        with open(f"{proc}/{me}/task/{me}/children") as children:
            outer = children.read().split()
        for each in reversed(outer):  # the newest is last, and mostly the one in question
            with contextlib.suppress(OSError), open(f"{proc}/{each}/status") as status:
                if any(line.startswith("NSpid:") and line.split()[-1] == str(pid) for line in status):
                    return int(each)
    return pid


# ------------------------------------------------------------------------------------------------- killing
def tree(root: int | None, tag: str) -> list[int]:
    """Every process below ``root``, and every one whose environment carries ``tag``; ``root`` itself first.

    A grandchild that was orphaned is found by its session, or where it left that by the tag it inherited.
    """
    stats = all_stats()
    found = below(() if root is None else (root,), stats)
    needle = tag.encode()
    found |= {pid for pid in stats if pid not in found and needle in environ(pid)}
    found.discard(os.getpid())
    return sorted(found, key=lambda pid: (pid != root, pid))


def kill_tree(root: int | None, tag: str) -> None:
    """SIGKILL a rank and everything below it; what it forks meanwhile is found in the next round.

    With no ``root``, everything that carries the tag; with this process for ``root``, everything below it: for good.
    """
    last = root is None or root == os.getpid()
    tracker_s = _LAST_TRACKER_S if last else _TRACKER_S
    memory = SharedMemory()
    started = time.monotonic()
    while (passed_s := time.monotonic() - started) < _KILL_S + tracker_s:
        pids = [pid for pid in tree(root, tag) if alive(pid)]
        if not pids:
            break
        doomed = [pid for pid in pids if b"resource_tracker" not in command_line(pid)]
        if not doomed and passed_s < tracker_s:
            time.sleep(0.005)  # with everybody else gone it unlinks what they left, and ends
            continue
        if not doomed and not last:
            break
        for pid in doomed or pids:
            memory.note(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    memory.remove()


class SharedMemory:
    """Library-made shared memory of processes that are killed."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def note(self, pid: int) -> None:
        """Note the files that a process maps."""
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            for line in maps:
                _, found, path = line.partition(b"/dev/shm/")
                name = path.rstrip(b"\n").removesuffix(b" (deleted)").decode(errors="replace")
                if found and name.startswith(_SHM_PREFIXES):
                    self.names.add(name)

    def remove(self) -> None:
        """Remove all that was noted."""
        for name in self.names:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join("/dev/shm", name))


def reap_orphans(known: Iterable[int]) -> None:
    """Collect children that are not ranks: grandchildren whose parents died before them."""
    ours = set(known)
    while True:
        try:
            ready = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ready is None or ready.si_pid in ours:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ready.si_pid, os.WNOHANG)


# ------------------------------------------------------------------------------------------------- memory
class OomCounter:
    """Tells whether the kernel killed a process for memory: its count of such kills is readable by anyone."""

    def __init__(self) -> None:
        self._count = self._explained = _oom_kills()  # up to which count a death was put down to a kill
        self._looked_s = time.monotonic()
        self._rose_s = -math.inf

    def tick(self) -> None:
        """Call often, so that it is known when the count rose."""
        if time.monotonic() - self._looked_s >= TICK_S:
            self._look()

    def rose(self) -> bool:
        """Did the kernel kill anything for memory just now that no earlier death was put down to?"""
        rose = self.rose_within(2 * TICK_S) and self._count > self._explained
        self._explained = self._count
        return rose

    def rose_within(self, seconds: float) -> bool:
        """Did it in so many seconds? For a death that somebody else had to notice first."""
        self._look()
        return time.monotonic() - self._rose_s < seconds

    def _look(self) -> None:
        before, self._count = self._count, _oom_kills()
        self._looked_s = time.monotonic()
        if self._count > before:
            self._rose_s = self._looked_s


def _oom_kills() -> int:
    with contextlib.suppress(OSError), open("/proc/vmstat", "rb") as stat:
        for line in stat:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0
