"""What the job state machine hears and what it answers: inputs, actions and the events of a job's log.

Plain data, standard library only. ``machine.JobMachine`` turns inputs into actions; ``runner`` does the actions;
every ``Logged`` is one row of the typed event log, from which status and messages are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGTERM
from typing import Literal

from atoll.tasks.spec import JobStatus

Phase = Literal["setup", "run"]

# ------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True, slots=True)
class NodeUp:
    """A node answers and can start processes."""

    node: int
    attempt: int


@dataclass(frozen=True, slots=True)
class NodeDown:
    """A node could not be started, or was lost. ``started`` tells which."""

    node: int
    attempt: int
    reason: str
    started: bool


@dataclass(frozen=True, slots=True)
class NodeSilent:
    """A node has not answered for ``silent_s``, or answers again (0). ``said``: how its provider puts it."""

    node: int
    attempt: int
    silent_s: float
    said: str


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """A process runs. ``process`` counts from 0 on its node."""

    node: int
    process: int
    phase: Phase
    attempt: int
    pid: int


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A process ended by itself, or because it was stopped."""

    node: int
    process: int
    phase: Phase
    attempt: int
    exit_code: int | None  # None where a signal ended it
    signal: int | None = None
    oom: bool = False
    tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """Somebody wants it to end."""

    why: str = "cancelled"
    signal: int = SIGTERM


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; sent when a deadline of ``Wait`` is reached, at the latest."""


Input = NodeUp | NodeDown | NodeSilent | ProcessStarted | ProcessEnded | CancelAsked | Tick

# ------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class StartNode:
    """Start one node; answered by ``NodeUp`` or ``NodeDown``."""

    node: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start one process; answered by ``ProcessStarted``, then ``ProcessEnded``."""

    node: int
    process: int
    phase: Phase
    attempt: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """A signal to what the node runs of this job, which then has time to end by itself."""

    node: int
    signal: int = SIGTERM


@dataclass(frozen=True, slots=True)
class StopNode:
    """End the node and with it everything it runs; not answered."""

    node: int


@dataclass(frozen=True, slots=True)
class Log:
    """Write a row of the event log, and where ``text`` is not empty a line of the job's own into its log."""

    kind: str
    text: str = ""
    node: int | None = None
    rank: int | None = None
    data: tuple[tuple[str, str | int | float | bool | None], ...] = ()


@dataclass(frozen=True, slots=True)
class SetStatus:
    """The job stands like this now. With an end status come the reason and the culprit's exit code."""

    status: JobStatus
    reason: str = ""
    exit_code: int | None = None


Action = StartNode | StartProcess | Terminate | StopNode | Log | SetStatus
