"""One dispatched call: what was asked, how far it is, and how it ended."""

from __future__ import annotations

import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.gang.timers import Timer
from atoll.wire.frames import CallHeader, Frame
from atoll.wire.payloads import Arena, Encoded

if TYPE_CHECKING:
    from atoll.gang.hangs import Sight

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

    @property
    def encoded(self) -> tuple[Encoded, Encoded]:
        """Function and arguments as they lie ready to be sent."""
        return self.function.encoded, self.arguments

    def release(self, arena: Arena | None) -> None:
        """Let go of the memory files that arguments and function lie in: to be used again, or for good."""
        for encoded in self.encoded:
            segment, encoded.segment = encoded.segment, None
            if segment is None:
                continue
            if arena is not None:
                arena.give_back(segment)
            else:
                segment.close()


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


class Sink(ABC):
    """Where a call's frames go. Called from the gang's reader thread; must not block."""

    def started(self, ranks: tuple[int, ...]) -> None:  # noqa: B027 - some have nothing to do then
        """The call was sent to these ranks, once more where it is a repetition."""

    @abstractmethod
    def frame(self, frame: Frame, rank: int, node: int) -> None:
        """A streamed value, the start of a stream, or a report. Owns the frame's descriptors."""

    def returned(self, results: dict[int, Frame]) -> None:  # noqa: B027 - as above
        """A rank returned, and others stream."""

    @abstractmethod
    def done(self, results: dict[int, Frame], failures: list[Failure], error: BaseException | None) -> None:
        """The call ended: with a frame for each rank, or failures from ranks, or an error of the gang."""


class Job:
    """A request on its way through a gang."""

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
        self.progress: dict[int, Sight] = {}  # by rank: what it looked like when it was last looked at
        self.no_group = self.streaming = self.stopping = False

    @property
    def may_repeat(self) -> bool:
        """Did it lose a rank, and may it be started again as a whole? Not where values were taken of it already."""
        lost_a_rank = any(failure.is_death for failure in self.failures)
        return lost_a_rank and self.attempt < self.request.retries and not self.streaming

    def fault(self, error: BaseException | None) -> str | None:
        """What to say of a call that ended with this error or with failures; None where it succeeded."""
        if error is None and not self.failures:
            return None
        text = str(error or self.failures[0].error or "")
        return text or (f"rank {self.failures[0].rank} raised" if self.failures else None)

    def ask_group(self, rank: int) -> tuple[Sequence[int], bool]:
        """A rank asks whether all will make a process group: which ranks to answer now, and what."""
        self.wants_group.add(rank)
        if self.no_group or self.ended - self.wants_group:
            self.no_group = True
            return [rank], False
        if len(self.wants_group) < len(self.ranks):
            return [], False
        self.wants_group.clear()  # a decorated function may ask again
        return self.ranks, True

    def end_rank(self, rank: int) -> list[int]:
        """The rank is through with it, however: which ranks wait for a group that it will not come to."""
        self.ended.add(rank)
        if not self.wants_group or rank in self.wants_group or self.no_group:
            return []
        self.no_group = True
        return [waiting for waiting in self.wants_group if waiting not in self.ended]

    def saw(self, rank: int) -> None:
        """The rank did something: it printed, reported or produced a value."""
        if rank in self.progress:
            self.progress[rank].quiet_since = time.monotonic()

    def header(self, head_port: int) -> CallHeader:
        """The part of the CALL frame that is the same for every rank."""
        request = self.request
        return CallHeader(
            job_id=request.job_id,
            seed=request.seed,
            function=request.function.digest,
            arguments=request.arguments.table,
            broadcast=request.whole_gang,
            head_port=head_port if request.whole_gang else 0,
            is_pure=request.function.pure,
        )
