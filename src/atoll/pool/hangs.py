"""Reading rank stacks: who waits in a collective, who never came, and when that is a hang."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from atoll.core.errors import HangError, name_ranks
from atoll.core.events import HangSuspected
from atoll.pool.job import Job

_WARNING_S = 600.0  # without a hang_timeout: no progress for so long is worth a line,
_DESERTED_S = 30.0  # or for so long where some ranks returned and all others wait for them
_PERIOD_S = 15.0
# Files and functions in which a rank waits for the others.
_WAITS = (
    "pool/worker/torch_group.py",  # for the others to import torch
    "torch/distributed/",
    "torch/nn/parallel/distributed.py",
    "_engine_run_backward",
    "jax/_src/distributed.py",
)
_MACHINERY = ("atoll/pool/worker/", "atoll/wire/", '"<string>"')


class HangWatch:
    """Tells from the stacks of a call's ranks, read now and then, whether it goes on."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        # Often enough that a loop is not always met at the same line.
        self.period_s = min(max(limit_s / 20, 0.2), _PERIOD_S) if limit_s is not None else _PERIOD_S

    def seen(
        self, job: Job, dumps: Mapping[int, str], main_threads: Mapping[int, int]
    ) -> HangError | HangSuspected | None:
        """Take the stacks of a call's running ranks in; says so if that makes it a hang, or one worth a warning."""
        now = time.monotonic()
        for rank, text in dumps.items():
            main = summary(text, main_threads[rank])
            # One that gave no answer this time has shown no progress either.
            if rank not in job.progress or (main and job.progress[rank][0] != main):
                job.progress[rank] = (main, now)
        silent = {rank: now - since for rank, (_, since) in job.progress.items() if rank not in job.ended}
        stacks = {rank: job.progress[rank][0] for rank in silent}
        longest = hung_for(silent, stacks)
        if self._limit_s is not None and longest >= self._limit_s:
            missing, waiting = hung(stacks, sorted(job.ended))
            return HangError(self._limit_s, missing, waiting, stacks)
        deserted = bool(job.ended) and all(map(_waits, stacks.values()))
        patience = self._limit_s / 2 if self._limit_s else _DESERTED_S if deserted else _WARNING_S
        if job.warned or longest < patience:
            return None
        job.warned = True
        stuck = tuple(sorted(rank for rank, quiet in silent.items() if quiet >= longest))
        why = f"{len(job.ended)} of {len(job.ranks)} ranks have returned, and they wait for those"
        return HangSuspected(
            job_id=job.request.job_id,
            ranks=stuck,
            silent_s=longest,
            stacks={rank: stacks[rank] for rank in stuck},
            why=why if deserted else "",
        )


def suspicion(event: HangSuspected) -> str:
    """What to tell the user of it."""
    why = f"; {event.why}" if event.why else ""
    stacks = "".join(f"\nrank {rank}:\n{stack}" for rank, stack in event.stacks.items())
    return f"{name_ranks(event.ranks)} made no progress for {event.silent_s:.0f} s{why}{stacks}"


def unread_streams(waiting: Job | None, running: Collection[Job]) -> str | None:
    """A call waits for ranks that only stream: whoever made it may be the one who should read the streams.

    What to tell the user then, once; else None.
    """
    if waiting is None or waiting.warned or not running or not all(job.streaming for job in running):
        return None
    waiting.warned = True
    streams = ", ".join(sorted({job.request.name for job in running}))
    return (
        f"{waiting.request.name} waits for a free rank while {streams} is being streamed: read that stream to "
        f"its end or close() it, or give the pool more ranks"
    )


def summary(dump: str, main_thread: int) -> str:
    """The main thread's frames out of a faulthandler dump, most recent call first, without the worker's own."""
    lines: list[str] = []
    inside = False
    marker = f"0x{main_thread:016x}"
    for line in dump.splitlines():
        if "hread 0x" in line:
            inside = marker in line
        elif inside and line.startswith("  "):
            lines.append(line)
    own = [line for line in lines if _waits(line) or not any(part in line for part in _MACHINERY)]
    return "\n".join(own or lines)


def hung_for(silent: Mapping[int, float], stacks: Mapping[int, str]) -> float:
    """Seconds that the call as a whole makes no progress, of how long each of its running ranks has made none.

    A rank that waits for one that works is in no trouble: those that don't wait count. Where all wait, nobody will
    ever come, and it is so since the last of them got there.
    """
    working = [quiet for rank, quiet in silent.items() if not _waits(stacks[rank])]
    return max(working) if working else min(silent.values(), default=0.0)


def _waits(stack: str) -> bool:
    return any(part in stack for part in _WAITS)


def hung(stacks: Mapping[int, str], ended: Sequence[int]) -> tuple[list[int], list[int]]:
    """Ranks that did not arrive, and ranks that wait in a collective.

    Where all that still run wait, those that returned are the ones that will never come.
    """
    waiting = [rank for rank, stack in sorted(stacks.items()) if _waits(stack)]
    missing = [rank for rank in sorted(stacks) if rank not in waiting]
    return missing or list(ended) or waiting, waiting
