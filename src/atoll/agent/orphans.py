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

from atoll.agent.process_tree import SharedMemory, Stat, all_stats, below, command_line, environ, stat_of

VARIABLE = "ATOLL_OWNER"
LINK = "atoll-link-"  # how folders of links begin
_KILL_S = 5.0  # what is killed is gone within milliseconds, unless it sits in the kernel
_LOOK_S = 0.02
_TMP = re.compile(r"/.*/atoll-[0-9a-f]{8}-n\d+")  # a node's folder for temporary files; its agent has it open


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
    memory = SharedMemory()
    while found := _find(owner, but, seen):
        passed_s = time.monotonic() - began
        if passed_s > patience_s + _KILL_S:
            return [_name(pid) for pid in found]
        agents = [stat for stat, leads in found.values() if leads]
        gentle = agents and passed_s < patience_s and not any(stat.state in "Tt" for stat in agents)
        for pid, (stat, leads) in found.items():  # before any is killed, which may end others
            if (pid, stat.started) not in seen:
                seen[pid, stat.started] = leads
                folders |= _folders_of(pid)
                memory.note(pid)
        for pid, (stat, _) in found.items():
            if not gentle:
                _signal(pid, stat, signal.SIGKILL)
            elif _link_of(pid) is not None:
                _signal(pid, stat, signal.SIGTERM)
        time.sleep(_LOOK_S)
    memory.remove()
    for folder in folders:
        _remove(folder)
    return []


def _find(owner: str, but: str, seen: Mapping[tuple[int, int], bool]) -> dict[int, tuple[Stat, bool]]:
    """The processes of an owner that live, and whether each is an agent, or comes before one.

    Those that were ``seen`` before, by pid and start, are still known while they die, having no environment any more.
    """
    stats = all_stats()
    spared: set[int] = set()  # we ourselves, and whoever started us
    pid = os.getpid()
    while pid in stats and pid not in spared:
        spared.add(pid)
        pid = stats[pid].parent
    found: dict[int, bool] = {}
    for pid, stat in stats.items():
        if (leads := seen.get((pid, stat.started))) is not None:
            found[pid] = leads
        elif pid not in spared and _is_mine(pid):
            its, tagged = _owner_of(pid)
            if its is not None and _belongs(its, owner) and not (but and _belongs(its, but)):
                found[pid] = not tagged
    lives = (pid for pid in below(found, stats, spared) if stats[pid].is_alive)
    return {pid: (stats[pid], found.get(pid, False)) for pid in lives}


def _signal(pid: int, stat: Stat, number: signal.Signals) -> None:
    """Send a process a signal, unless its pid has become somebody else's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        pidfd = os.pidfd_open(pid)
        try:
            if (now := stat_of(pid)) is not None and now.started == stat.started:
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def _name(pid: int) -> str:
    words = command_line(pid).replace(b"\0", b" ").decode(errors="replace").strip()
    return f"process {pid} ({words[:60]})" if words else f"process {pid}"


def _is_mine(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    return False


def _owner_of(pid: int) -> tuple[str | None, bool]:
    """Whose it is, as far as it says so itself; and whether an agent started it."""
    link = _link_of(pid)
    if link is not None:
        return os.path.basename(link).removeprefix(LINK), False
    entries = dict(entry.partition(b"=")[::2] for entry in environ(pid))
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
