"""One dispatched call: what was asked, how far it is, and how it ended."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.pool.timers import Timer
from atoll.wire.frames import Frame
from atoll.wire.segments import Encoded

# Ids and seeds need to differ, not to be secret. The system is asked once: it would be asked twice a call.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


@dataclass(slots=True)
class Shipped:
    """A function ready to send. ``digest`` names it; a rank that has it is sent the name alone.

    ``cacheable``: a rank may keep its bytes; ``pure``: it holds nothing a call could change, so a rank may keep
    the rebuilt function too.
    """

    digest: str
    encoded: Encoded
    cacheable: bool
    pure: bool


@dataclass(slots=True)
class Request:
    """What a caller asks of a gang; knows nothing of ranks."""

    function: Shipped
    arguments: Encoded
    whole_gang: bool
    name: str
    timeout_s: float | None = None
    retries: int = 0
    path: tuple[str, ...] | None = None
    job_id: str = field(default_factory=lambda: f"{_random.getrandbits(48):012x}")
    seed: int = field(default_factory=lambda: _random.getrandbits(63))


@dataclass(slots=True)
class Failure:
    """Why a call failed: an error made here, or a frame with the exception a rank sent."""

    rank: int
    node: int
    error: BaseException | None = None
    frame: Frame | None = None

    @property
    def is_death(self) -> bool:
        """A process ended, rather than a function raised."""
        return self.error is not None


class Sink(Protocol):
    """Where a call's frames go. Called from the gang's reader thread; must not block."""

    def started(self, ranks: tuple[int, ...]) -> None:
        """The call was sent to these ranks, once more where it is a repetition."""

    def frame(self, frame: Frame, rank: int, node: int) -> None:
        """A streamed value, the start of a stream, or a report. Owns the frame's descriptors."""

    def returned(self, results: dict[int, Frame]) -> None:
        """A rank returned, and others stream."""

    def done(self, results: dict[int, Frame], failures: list[Failure], error: BaseException | None) -> None:
        """The call ended: with a frame for each rank, or failures from ranks, or an error of the gang."""


class Job:
    """A request on its way through a gang."""

    __slots__ = (
        "attempt",
        "done",
        "ended",
        "error",
        "failures",
        "kept",
        "no_group",
        "number",
        "progress",
        "ranks",
        "request",
        "results",
        "sink",
        "started_s",
        "stopping",
        "streaming",
        "timers",
        "wants_group",
        "warned",
    )

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.attempt = 0
        self.kept = False  # some rank still maps the arguments
        self.error: BaseException | None = None  # decided here: cancelled, timed out, hung, pool closed
        self.done = False
        self.warned = False
        self.timers: list[Timer] = []  # the gang's, taken back when the call ends
        self.begin(0, ())

    @property
    def whole_gang(self) -> bool:
        """Is it a broadcast?"""
        return self.request.whole_gang

    @property
    def unfinished(self) -> list[int]:
        """Ranks that still run it."""
        return [rank for rank in self.ranks if rank not in self.ended]

    def begin(self, number: int, ranks: tuple[int, ...]) -> None:
        """Forget an earlier attempt and start on these ranks."""
        self.number, self.ranks, self.started_s = number, ranks, time.monotonic()
        self.results: dict[int, Frame] = {}
        self.failures: list[Failure] = []
        self.ended: set[int] = set()  # ranks that are through with this call, however
        self.wants_group: set[int] = set()
        self.progress: dict[int, tuple[str, float]] = {}  # by rank: last stack, and since when
        self.no_group = self.streaming = self.stopping = False

    def saw(self, rank: int) -> None:
        """The rank did something: it printed, reported or produced a value."""
        if rank in self.progress:
            self.progress[rank] = (self.progress[rank][0], time.monotonic())

    def meta(self, head_port: int) -> dict[str, Any]:
        """The part of the CALL frame that is the same for every rank."""
        request = self.request
        meta: dict[str, Any] = {
            "j": request.job_id,
            "s": request.seed,
            "f": request.function.digest,
            "a": request.arguments.table,
        }
        if request.whole_gang:
            meta["b"] = 1
            meta["hp"] = head_port
        if request.function.pure:
            meta["p"] = 1
        return meta
