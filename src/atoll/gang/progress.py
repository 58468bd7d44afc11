"""What a rank of a running call looks like, and since when it has looked like that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STOPPED = "T"  # its state, by a signal; `t` is a debugger's
# Less CPU time than this is none: looking costs some, and so do threads that wait.
_IDLE_S, _IDLE_SHARE = 0.03, 0.01
# Files and functions in which a rank waits for the others.
_WAITS = (
    "atoll/worker/process_group.py",  # for the others to import torch
    "atoll/functions/integrations/",
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
        if self.state == STOPPED:
            state = f"stopped by a signal ({state}); before that it was"
        elif not self.answers:
            state = f"native code holds the GIL, so it has no Python stack to show ({state}); before that it was"
        return f"  {state}\n{self.stack}" if self.stack else f"  {state.removesuffix('; before that it was')}"


def own_frames(stack: str) -> str:
    """A stack without the worker's own frames; all of it where there are no others."""
    lines = stack.splitlines()
    own = [line for line in lines if _waits(line) or not any(part in line for part in _MACHINERY)]
    return "\n".join(own or lines)


def _waits(stack: str) -> bool:
    return any(part in stack for part in _WAITS)
