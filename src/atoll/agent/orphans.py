"""What earlier drivers of a cluster left on this machine: stopped, hung or orphaned. Found and ended here.

An agent of a cluster, and every process below it, has ``ATOLL_OWNER=CLUSTER.DRIVER`` in its environment; a link's
session has the same in its folder's name. CLUSTER can't be guessed and is no other cluster's; DRIVER is one of the
processes that drove it one after the other. ``orphans OWNER PATIENCE_S`` answers with a JSON list of what could not be
ended. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.agent.process_tree import command_line, shared_memory_names

VARIABLE = "ATOLL_OWNER"
LINK = "atoll-link-"  # how folders of links begin
_KILL_S = 5.0  # what is killed is gone within milliseconds, unless it sits in the kernel
_LOOK_S = 0.02
_TMP = re.compile(r"/.*/atoll-[0-9a-f]{8}-n\d+")  # a node's folder for temporary files; its agent has it open


@dataclass(frozen=True)
class _Process:
    """One process. A later one with the same pid has another start time, in clock ticks since boot."""

    pid: int
    parent: int
    session: int
    state: str
    started: int

    @classmethod
    def read(cls, pid: int) -> _Process | None:
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                # The command name may hold spaces and brackets: what counts comes after the last bracket.
                fields = stat.read().rpartition(b")")[2].split()
            return cls(pid, int(fields[1]), int(fields[3]), fields[0].decode(), int(fields[19]))
        except (OSError, IndexError):
            return None

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless its pid has become somebody else's."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            pidfd = os.pidfd_open(self.pid)
            try:
                if (now := _Process.read(self.pid)) is not None and now.started == self.started:
                    signal.pidfd_send_signal(pidfd, number)
            finally:
                os.close(pidfd)

    def __str__(self) -> str:
        words = command_line(self.pid).replace(b"\0", b" ").decode(errors="replace").strip()
        return f"process {self.pid} ({words[:60]})" if words else f"process {self.pid}"


def end(owner: str, but: str = "", patience_s: float = 3.0) -> list[str]:
    """End every process of this user that belongs to ``owner``, and what is below it.

    Agents that run get ``patience_s`` seconds to end what they started and to remove its files; where one is stopped,
    or none is left, everything is killed at once.

    Args:
        owner: ``CLUSTER``, ``CLUSTER.DRIVER``, or a single link of that.
        but: such an owner whose processes stay.
        patience_s: see above.

    Returns:
        what could not be ended, as "process 12 (sleep 1000)".
    """
    began = time.monotonic()
    seen: dict[tuple[int, int], bool] = {}
    folders: set[str] = set()
    shm: set[str] = set()
    while found := _find(owner, but, seen):
        passed_s = time.monotonic() - began
        if passed_s > patience_s + _KILL_S:
            return [str(process) for process in found]
        agents = [process for process, leads in found.items() if leads]
        gentle = agents and passed_s < patience_s and not any(process.stopped for process in agents)
        for process, leads in found.items():  # before any is killed, which may end others
            if (process.pid, process.started) not in seen:
                seen[process.pid, process.started] = leads
                folders |= _folders_of(process.pid)
                shm |= shared_memory_names(process.pid)
        for process in found:
            if not gentle:
                process.signal(signal.SIGKILL)
            elif _link_of(process.pid) is not None:
                process.signal(signal.SIGTERM)
        time.sleep(_LOOK_S)
    for name in shm:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join("/dev/shm", name))
    for folder in folders:
        _remove(folder)
    return []


def _find(owner: str, but: str, seen: Mapping[tuple[int, int], bool]) -> dict[_Process, bool]:
    """The processes of an owner that live, and whether each is an agent, or comes before one.

    Those that were ``seen`` before, by pid and start, are still known while they die, having no environment any more.
    """
    read = (_Process.read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    known = {process.pid: process for process in read if process is not None}
    spared: set[int] = set()  # we ourselves, and whoever started us
    pid = os.getpid()
    while pid in known and pid not in spared:
        spared.add(pid)
        pid = known[pid].parent
    found: dict[int, bool] = {}
    for pid, process in known.items():
        if (leads := seen.get((pid, process.started))) is not None:
            found[pid] = leads
        elif pid not in spared and _is_mine(pid):
            its, tagged = _owner_of(pid)
            if its is not None and _belongs(its, owner) and not (but and _belongs(its, but)):
                found[pid] = not tagged
    grew = True
    while grew:
        below = [
            pid
            for pid, process in known.items()
            if pid not in found and pid not in spared and (process.parent in found or process.session in found)
        ]
        found |= dict.fromkeys(below, False)
        grew = bool(below)
    return {known[pid]: leads for pid, leads in found.items() if known[pid].state not in "ZX"}


def _is_mine(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    return False


def _owner_of(pid: int) -> tuple[str | None, bool]:
    """Whose it is, as far as it says so itself; and whether an agent started it."""
    link = _link_of(pid)
    if link is not None:
        return os.path.basename(link).removeprefix(LINK), False
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            entries = dict(entry.partition(b"=")[::2] for entry in environ.read().split(b"\0"))
    except OSError:
        return None, False
    its = entries.get(VARIABLE.encode())
    return None if its is None else its.decode(errors="replace"), b"ATOLL_POOL_TAG" in entries


def _link_of(pid: int) -> str | None:
    """The folder of the link whose session, or whose front, it is."""
    words = command_line(pid).decode(errors="replace").split("\0")
    for what, folder in itertools.pairwise(words):
        if what in ("start", "attach") and os.path.basename(folder).startswith(LINK):
            return folder
    return None


def _belongs(its: str, owner: str) -> bool:
    return its == owner or its.startswith(f"{owner}.")


def _folders_of(pid: int) -> set[str]:
    """What it would have removed at its end."""
    link = _link_of(pid)
    found = {link} if link is not None else set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if _TMP.fullmatch(target := os.readlink(f"/proc/{pid}/fd/{name}")):
                    found.add(target)
    return found


def _remove(folder: str) -> None:
    """Remove a folder of ours that nobody uses: an agent holds a lock on its own as long as it lives."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


def main(arguments: Sequence[str]) -> None:
    """Entry: ``orphans OWNER PATIENCE_S``."""
    owner, patience_s = arguments
    sys.stdout.write(json.dumps(end(owner, patience_s=float(patience_s))))
