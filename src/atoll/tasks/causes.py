"""Why an attempt of a job ended before its time, in the words people read. Standard library only."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from atoll.tasks.spec import node_name
from atoll.tasks.transitions import ProcessEnded

# Signals that say something about the process they ended. Not those by which processes are asked to end, and not
# SIGABRT: what aborts within the instant may do so because it was asked to end.
_TELLING = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGKILL})

# What torchrun says at its start and, around the ranks' own last words, when one of them failed: which rank that was,
# its own traceback, and a box without the cause.
_BANNER = re.compile(r"torch[/.]distributed[/.]run(\.py:\d+\]|: \[)")
_CLOSING = re.compile(r"Sending process \d+ closing signal |no error file defined for parent, to copy child error")
_RANK_FAILED = re.compile(r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\)")
_FOOTER_BEGINS = re.compile(r"\S*ChildFailedError:\s*$")
_FOOTER_FRAME = re.compile(r"={20,}\s*$")
_NUM_TAIL_LINES = 10
# The last words of a process that ended while a C++ thread wanted the interpreter: DDP keeps its group's threads, also
# past destroy_process_group() (pytorch pull request 179291).
_TERMINATE = "terminate called without an active exception"


@dataclass(frozen=True, slots=True)
class Cause:
    """What ended an attempt.

    Attributes:
        kind: a process of ``run`` or ``setup`` failed; a node was ``lost``, or could not be had (``start``); the job
            ran past its time; its nodes are ``taken``; somebody cancelled it.
        reason: one line for people.
        at_s: when it was heard of.
        node, rank: the culprit, where there is one.
        exit_code: as a shell has it (128 + n for signal n).
        tail: the culprit's last lines, without torchrun's own.
        telling: did it end in a way that we can't have brought about?
    """

    kind: Literal["run", "setup", "lost", "start", "timeout", "taken", "cancel"]
    reason: str
    at_s: float
    node: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    tail: tuple[str, ...] = ()
    telling: bool = False


def process_cause(event: ProcessEnded, rank: int, now: float) -> Cause:
    """A process of the run phase that failed."""
    return Cause(
        "run",
        f"rank {rank} on {node_name(event.node)} {ended_text(event)}",
        now,
        event.node,
        rank,
        shell_code(event),
        telling_lines(event.tail),
        event.oom or _ended_by(event) in _TELLING,
    )


def setup_cause(failed: Sequence[ProcessEnded], now: float) -> Cause:
    """Setups that failed, in the order they did: all are named, the first is the culprit."""
    first = failed[0]
    if len(failed) == 1:
        reason = f"setup on {node_name(first.node)} {ended_text(first)}"
    else:
        each = ", ".join(f"{node_name(event.node)} {ended_text(event)}" for event in failed)
        reason = f"setup failed on {len(failed)} nodes: {each}"
    return Cause("setup", reason, now, first.node, None, shell_code(first), telling_lines(first.tail))


def telling_lines(said: Sequence[str]) -> tuple[str, ...]:
    """The last lines that may say why: without what torchrun adds, unless there is nothing else."""
    kept: list[str] = []
    in_traceback = 0  # where in ``kept`` torchrun's own traceback may begin; 0 while no rank failed
    lines = iter(said)
    for line in lines:
        if _BANNER.search(line) or _CLOSING.search(line):
            continue
        if _FOOTER_BEGINS.match(line) and in_traceback:
            del kept[in_traceback:]
            _skip_footer(lines)
            in_traceback = 0
            continue
        kept.append(line)
        if _RANK_FAILED.search(line):
            in_traceback = len(kept)
    return tuple((kept or said)[-_NUM_TAIL_LINES:])


def _skip_footer(lines: Iterator[str]) -> None:
    """Past the box: from its upper frame to its lower one."""
    frames = 0
    while frames < 2 and (line := next(lines, None)) is not None:
        frames += _FOOTER_FRAME.match(line) is not None


def failed(event: ProcessEnded) -> bool:
    """Did it end otherwise than with exit code 0?"""
    return event.exit_code != 0 or event.signal is not None or event.oom


def shell_code(event: ProcessEnded) -> int | None:
    """The exit code as a shell has it: 128 + n where signal n ended the process."""
    return 128 + event.signal if event.signal is not None else event.exit_code


def ended_text(event: ProcessEnded) -> str:
    """How it ended, as the rest of a sentence, with what the number means where that helps."""
    if event.oom:
        return "was killed for memory (the kernel's OOM killer)"
    if event.signal is not None:
        return f"was killed by {_signal_name(event.signal)}{_hint(event)}"
    if event.exit_code is None:
        return "ended, its exit code is not known"
    return f"exited with code {event.exit_code}{_hint(event)}"


def _hint(event: ProcessEnded) -> str:
    if _ended_by(event) == signal.SIGSEGV:
        what = "a segmentation fault: look at native code and at versions of packages that don't fit each other"
        return f" ({what})"
    if _ended_by(event) == signal.SIGABRT and event.tail and event.tail[-1].strip() == _TERMINATE:
        return (
            " (at its exit torch's Gloo threads raced with Python's, as DDP on CPU does under torchrun too: end the "
            "script with sys.stdout.flush(); os._exit(0))"
        )
    if event.exit_code == 127:
        return " (command not found: is it installed there, and on PATH?)"
    if event.exit_code == 126:
        return " (found, but it can't be executed: is it executable, and for this machine?)"
    if event.signal is None and _ended_by(event) in _SIGNALS:
        return f" (what it ran was killed by {_signal_name(_ended_by(event))})"
    return ""


_SIGNALS = frozenset(signal.valid_signals())

# Why a supervisor that is asked to end cancels its jobs: with its nodes, or by itself.
TAKEN_BACK = ("its nodes are taken back", "the supervisor was asked to end")


def _ended_by(event: ProcessEnded) -> int:
    """The signal that ended it, or that ended what it ran as a shell tells it; 0 for none."""
    return max(0, (shell_code(event) or 0) - 128)


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
