"""Whether a call hangs: what its ranks look like now and then, and what of that proves it.

A stack that stays the same proves nothing: a healthy loop may spend most of a step on one line. A call is ended where
nothing of it has changed for the whole limit, and a process is stopped, some ranks have entered a collective that
others have not, or no rank has used CPU time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.core.errors import HangError, name_ranks
from atoll.core.events import HangSuspected
from atoll.gang.call import Call

_WARNING_S = 600.0  # without a hang_timeout: no progress for so long is worth a line,
_DESERTED_S = 30.0  # or for so long where some ranks returned and all others wait for them
_PERIOD_S = 15.0
_STOPPED = "T"  # by a signal; `t` is a debugger's
# Less CPU time than this is none: looking costs some, and so do threads that wait.
_IDLE_S, _IDLE_SHARE = 0.03, 0.01
# Files and functions in which a rank waits for the others.
_WAITS = (
    "atoll/worker/process_group.py",  # for the others to import torch
    "torch/distributed/",
    "torch/nn/parallel/distributed.py",
    "_engine_run_backward",
    "jax/_src/distributed.py",
)
_MACHINERY = ("atoll/worker/", "atoll/wire/", '"<string>"')


@dataclass(slots=True)
class Sight:
    """What a rank looked like, and since when it has looked like that.

    Attributes:
        stack: of its main thread, the worker's own frames left out.
        answers: it could say so itself; else native code holds the GIL, or it is stopped.
        groups: collectives it has entered, and ranks, of each process group.
        quiet_since: nothing of that has changed since then, nor did the rank write anything.
        idle_since: it has used no CPU time since then, by ``idle_cpu_s`` on its clock.
        pid: on its machine, as people see it.
        state, wchan: the letter of its state, and where it sleeps in the kernel.
    """

    quiet_since: float
    idle_since: float
    idle_cpu_s: float
    stack: str = ""
    answers: bool = True
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)
    pid: int = 0
    state: str = ""
    wchan: str = ""

    def update(self, seen: Mapping[str, Any], now: float) -> None:
        """Take in what was seen just now."""
        self.pid, self.state, self.wchan, cpu_s = seen["pid"], seen["state"], seen["wchan"], seen["cpu_s"]
        self.answers = "stack" in seen
        if self.answers:  # one that gave no answer has shown no progress either
            stack = own_frames(seen["stack"])
            groups = {name: (entered, size) for name, (entered, size) in seen["groups"].items()}
            if (stack, groups) != (self.stack, self.groups):
                self.stack, self.groups, self.quiet_since = stack, groups, now
        # Also one that wants a CPU just now: on a busy machine it may not get one for a while.
        if self.state == "R" or cpu_s - self.idle_cpu_s > _IDLE_S + _IDLE_SHARE * (now - self.idle_since):
            self.idle_since, self.idle_cpu_s = now, cpu_s

    @property
    def waits(self) -> bool:
        """Does it wait for other ranks?"""
        return _waits(self.stack)

    def text(self, now: float) -> str:
        """What to show of it."""
        state = f"pid {self.pid}, state {self.state}" + (f" in {self.wchan}" if self.wchan.strip("0") else "")
        if now - self.idle_since >= 1:
            state += f", no CPU time for {now - self.idle_since:.0f} s"
        if self.state == _STOPPED:
            state = f"stopped by a signal ({state}); before that it was"
        elif not self.answers:
            state = f"native code holds the GIL, so it has no Python stack to show ({state}); before that it was"
        return f"  {state}\n{self.stack}" if self.stack else f"  {state.removesuffix('; before that it was')}"


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
    if stopped := tuple(sorted(rank for rank in idle if running[rank].state == _STOPPED)):
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
    return {rank: int(rank in call.wants_group) for rank in running}


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


def own_frames(stack: str) -> str:
    """A stack without the worker's own frames; all of it where there are no others."""
    lines = stack.splitlines()
    own = [line for line in lines if _waits(line) or not any(part in line for part in _MACHINERY)]
    return "\n".join(own or lines)


def _waits(stack: str) -> bool:
    return any(part in stack for part in _WAITS)
