"""What the job state machine hears and what it answers: a table, one input or action a line.

Plain data, standard library only. ``machine.JobMachine`` turns inputs into actions; ``runner`` does the actions;
every ``Log`` is one row of the typed event log, from which status and messages are made.
"""
# ruff: noqa: UP014

from __future__ import annotations

from signal import SIGTERM
from typing import Literal, NamedTuple

from atoll.tasks.spec import JobStatus

Phase = Literal["setup", "run"]


class ProcessEnded(NamedTuple):
    """A process ended by itself, or because it was stopped; ``exit_code`` is None where a signal ended it."""

    node: int
    process: int
    phase: Phase
    attempt: int
    exit_code: int | None
    signal: int | None = None
    oom: bool = False
    tail: tuple[str, ...] = ()


class CancelAsked(NamedTuple):
    """Somebody wants it to end."""

    why: str = "cancelled"
    signal: int = SIGTERM


class NodesTaken(NamedTuple):
    """Its nodes are about to be taken: its processes get so long to save. ``again``: others will be given for them."""

    why: str
    save_s: float
    again: bool


class Log(NamedTuple):
    """Write a row of the event log, and where ``text`` is not empty a line of the job's own into its log."""

    kind: str
    text: str = ""
    node: int | None = None
    rank: int | None = None
    data: tuple[tuple[str, str | int | float | bool | None], ...] = ()


class SetStatus(NamedTuple):
    """The job stands like this now. With an end status come the reason and the culprit's exit code."""

    status: JobStatus
    reason: str = ""
    exit_code: int | None = None


class Terminate(NamedTuple):
    """A signal to what the node runs of this job, which then has time to end by itself."""

    node: int
    signal: int = SIGTERM


# Inputs. Processes count from 0 on their node.
NodeUp = NamedTuple("NodeUp", [("node", int), ("attempt", int)])  # it answers and can start processes
NodeDown = NamedTuple(  # it could not be started, or was lost: ``started`` tells which
    "NodeDown", [("node", int), ("attempt", int), ("reason", str), ("started", bool)]
)
NodeSilent = NamedTuple(  # it has not answered for so long, or answers again (0); ``said``: how its provider puts it
    "NodeSilent", [("node", int), ("attempt", int), ("silent_s", float), ("said", str)]
)
ProcessStarted = NamedTuple(
    "ProcessStarted", [("node", int), ("process", int), ("phase", Phase), ("attempt", int), ("pid", int)]
)
Tick = NamedTuple("Tick", [])  # time passed; sent when ``JobMachine.deadline`` is reached, at the latest

Input = NodeUp | NodeDown | NodeSilent | ProcessStarted | ProcessEnded | CancelAsked | NodesTaken | Tick

# Actions.
StartNode = NamedTuple("StartNode", [("node", int), ("attempt", int)])  # answered by NodeUp or NodeDown
StartProcess = NamedTuple(  # answered by ProcessStarted, then ProcessEnded
    "StartProcess", [("node", int), ("process", int), ("phase", Phase), ("attempt", int)]
)
StopNode = NamedTuple("StopNode", [("node", int)])  # end it and everything it runs; not answered

Action = StartNode | StartProcess | Terminate | StopNode | Log | SetStatus
