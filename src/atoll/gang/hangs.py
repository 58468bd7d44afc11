"""Whether a call hangs: what its ranks look like now and then, and what of that proves it.

A stack that stays the same proves nothing: a healthy loop may spend most of a step on one line. A call is ended where
nothing of it has changed for the whole limit, and a process is stopped, some ranks have entered a collective that
others have not, or no rank has used CPU time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import HangError, name_ranks
from atoll.core.events import HangSuspected
from atoll.gang.call import Call
from atoll.gang.progress import STOPPED, Sight
from atoll.wire import frames

_WARNING_S = 600.0  # without a hang_timeout: no progress for so long is worth a line,
_DESERTED_S = 30.0  # or for so long where some ranks returned and all others wait for them
_PERIOD_S = 15.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """What proves that a call hangs; ``missing`` are the ranks that hold it up, none where that can't be told."""

    missing: tuple[int, ...]
    why: str


class HangWatch:
    """Tells from what a call's ranks look like, now and then, whether it goes on."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self.period_s = min(max(limit_s / 20, 0.2), _PERIOD_S) if limit_s is not None else _PERIOD_S

    def seen(self, call: Call, ranks: Mapping[int, Mapping[str, Any]], now: float) -> HangError | HangSuspected | None:
        """Take in what a call's ranks look like; says so if that makes it a hang, or one worth a warning."""
        for rank, seen in ranks.items():
            if rank not in call.progress:
                call.progress[rank] = Sight(now, now, seen["cpu_s"])
            call.progress[rank].update(seen, now)
        running = {rank: sight for rank, sight in sorted(call.progress.items()) if rank not in call.ended}
        if not running:
            return None
        if self._limit_s is not None and (found := evidence(call, running, now - self._limit_s)) is not None:
            waiting = [rank for rank, sight in running.items() if sight.waits and rank not in found.missing]
            stacks = {rank: sight.text(now) for rank, sight in running.items()}
            return HangError(self._limit_s, found.missing, waiting, stacks, found.why)
        if call.warned:
            return None
        deserted = bool(call.ended) and all(sight.waits for sight in running.values())
        patience = self._limit_s / 2 if self._limit_s else _DESERTED_S if deserted else _WARNING_S
        found = evidence(call, running, now - patience)
        quiet_s = now - max(sight.quiet_since for sight in running.values())
        if found is not None:
            stuck, why = found.missing or tuple(running), found.why
            quiet_s = max(quiet_s, patience)
        elif quiet_s >= (self._limit_s or _WARNING_S):
            stuck, why = tuple(running), "they use CPU time, so this may be fine: the call continues"
        else:
            return None
        call.warned = True
        stacks = {rank: sight.text(now) for rank, sight in running.items()}
        return HangSuspected(job_id=call.request.job_id, ranks=stuck, silent_s=quiet_s, stacks=stacks, why=why)


def evidence(call: Call, running: Mapping[int, Sight], since: float) -> Evidence | None:
    """What proves that a call has hung since then, or None."""
    quiet = {rank for rank, sight in running.items() if sight.quiet_since <= since}
    idle = {rank for rank in quiet if running[rank].idle_since <= since}
    if stopped := tuple(sorted(rank for rank in idle if running[rank].state == STOPPED)):
        pids = " ".join(str(running[rank].pid) for rank in stopped)
        return Evidence(stopped, f"{name_ranks(stopped)} stopped by a signal; `kill -CONT {pids}` continues it")
    for entered in (*_entered(running, len(call.ranks)).values(), _asked_for_group(call, running)):
        missing = tuple(rank for rank, number in entered.items() if number < max(entered.values()))
        ahead = [rank for rank in entered if rank not in missing]
        # A collective may let those ahead go on, so one of them has to wait there.
        if missing and quiet >= entered.keys() and any(running[rank].waits or rank in idle for rank in ahead):
            return Evidence(missing, f"{name_ranks(ahead)} entered a collective that {name_ranks(missing)} did not")
    if len(idle) < len(running):
        return None
    missing = tuple(rank for rank, sight in running.items() if not sight.waits)
    if not missing:  # all wait: those that returned are the ones that will never come
        missing = tuple(sorted(call.ended))
        why = f"{name_ranks(missing)} returned, and the others wait for them" if missing else ""
    elif len(missing) == len(running):
        missing, why = (missing if len(missing) == 1 else ()), ""
    else:
        why = f"the others wait for {name_ranks(missing)}"
    none = f"no CPU time was used by {name_ranks(list(running))}"
    return Evidence(missing, f"{none}; {why}" if why else none)


def _entered(running: Mapping[int, Sight], num_ranks: int) -> dict[str, dict[int, int]]:
    """By process group: how many of its collectives each of its ranks has entered."""
    found: dict[str, dict[int, int]] = {}
    for rank, sight in running.items():
        for name, (entered, size) in sight.groups.items():
            # Of a group of all ranks, those that don't know it yet are behind, too.
            every = dict.fromkeys(running, 0) if size == num_ranks else {}
            found.setdefault(name, every)[rank] = entered
    return found


def _asked_for_group(call: Call, running: Mapping[int, Sight]) -> dict[int, int]:
    asked = {rank for rank, offer in call.wants_group.items() if offer != frames.RETURNED}
    return {rank: int(rank in asked) for rank in running}


def suspicion(event: HangSuspected) -> str:
    """What to tell the user of it."""
    why = f"; {event.why}" if event.why else ""
    stacks = "".join(f"\nrank {rank}:\n{stack}" for rank, stack in event.stacks.items())
    return f"{name_ranks(event.ranks)} made no progress for {event.silent_s:.0f} s{why}{stacks}"


def unread_streams(waiting: Call | None, running: Collection[Call]) -> str | None:
    """A call waits for ranks that only stream: whoever made it may be the one who should read the streams.

    What to tell the user then, once; else None.
    """
    if waiting is None or waiting.warned or not running or not all(call.streaming for call in running):
        return None
    waiting.warned = True
    streams = ", ".join(sorted({call.request.name for call in running}))
    return (
        f"{waiting.request.name} waits for a free rank while {streams} is being streamed: read that stream to "
        f"its end or close() it, or give the pool more ranks"
    )
