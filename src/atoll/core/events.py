"""What happens in a pool, as values: passed to ``on_event`` in the order it happened."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened. ``time`` is seconds since the epoch."""

    time: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStarted(Event):
    """Every rank is up. ``took_s`` is the time from entering the pool."""

    pool_id: str
    nodes: int
    world_size: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStopped(Event):
    """Every process of the pool is gone."""

    pool_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted(Event):
    """A rank's process is ready for calls; ``restarts`` counts those before it on this rank.

    ``pid`` is what its machine's ``ps`` shows; in the rank itself ``os.getpid()`` counts inside the node's namespace.
    """

    rank: int
    node: int
    pid: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDied(Event):
    """A rank's process ended without being asked to."""

    rank: int
    node: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted(Event):
    """A call was sent to its ranks."""

    job_id: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFinished(Event):
    """A call ended; ``error`` names the failure, None where it succeeded."""

    job_id: str
    took_s: float
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRetried(Event):
    """A call lost a rank and is started again as a whole; ``attempt`` 1 is the first repetition."""

    job_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsReported(Event):
    """A rank called ``sky.report``; ``checkpoint`` is where its checkpoint was put, or None."""

    job_id: str
    rank: int
    node: int
    metrics: dict[str, Any]
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HangSuspected(Event):
    """Ranks have made no progress for ``silent_s`` seconds; the call continues. ``why`` says more, if known."""

    job_id: str
    ranks: tuple[int, ...]
    silent_s: float
    stacks: dict[int, str]
    why: str = ""
