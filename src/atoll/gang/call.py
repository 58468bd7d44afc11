"""One call: what was asked, how far it is, and how it ended."""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.gang.progress import Sight
from atoll.wire.frames import Frame
from atoll.wire.payloads import Arena, Encoded

# Ids and seeds need to differ, not to be secret. The system is asked once: it would be asked twice a call.
_random = random.Random()
random_bits = _random.getrandbits
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


def new_job_id() -> str:
    """An id that no other call has."""
    return f"{random_bits(48):012x}"


@dataclass(slots=True)
class Request:
    """What a caller asks of a gang; knows nothing of ranks.

    ``fresh``: it needs ranks in which no framework is loaded that can be set up only before its first use.
    """

    function: Shipped
    arguments: Encoded
    whole_gang: bool
    name: str
    timeout_s: float | None = None
    retries: int = 0
    path: tuple[str, ...] | None = None
    job_id: str = field(default_factory=new_job_id)
    fresh: bool = False

    @property
    def encoded(self) -> tuple[Encoded, Encoded]:
        """Function and arguments as they lie ready to be sent."""
        return self.function.encoded, self.arguments

    def release(self, arena: Arena | None) -> None:
        """Release the memory files of arguments and function: to the arena, or for good."""
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
    """Receives what a call's ranks send. Called with the gang's lock held; must not block.

    Attributes:
        hears_start: ``started`` is called.
    """

    hears_start = False

    def started(self, ranks: tuple[int, ...]) -> None:  # noqa: B027 - most have nothing to do then
        """The call was sent to these ranks, once more where it is a repetition."""

    @abstractmethod
    def frame(self, frame: Frame, rank: int, node: int) -> None:
        """A streamed value, the start of a stream, or a report. Owns the frame's descriptors."""

    def returned(self, results: dict[int, Frame]) -> None:  # noqa: B027 - as above
        """A rank returned, and others stream."""

    @abstractmethod
    def done(self, results: dict[int, Frame], failures: list[Failure], error: BaseException | None) -> None:
        """The call ended: with a frame for each rank, or failures from ranks, or an error of the gang."""


class Call:
    """A request on its way through a gang.

    Attributes:
        number: of this attempt; 0 while it waits.
        ranks: those it was sent to; ``ended`` are those of them that are through with it, however.
        error: decided by the gang: cancelled, timed out, hung, pool closed.
        kept: some rank still maps the arguments.
        reader: the thread that waits for it and reads its rank's channel meanwhile, else 0.
    """

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.whole_gang = request.whole_gang
        self.attempt = 0
        self.kept = self.done = self.warned = False
        self.error: BaseException | None = None
        self.number = self.reader = 0
        self.ranks: tuple[int, ...] = ()
        self.results: dict[int, Frame] = {}
        self.failures: list[Failure] = []
        self.ended: set[int] = set()
        self.streaming = self.stopping = False

    def begin(self, number: int, ranks: tuple[int, ...], now: float) -> None:
        """Forget an earlier attempt and start on these ranks."""
        self.ranks = ranks
        self.started_s = now
        self.results = {}
        self.failures = []
        self.ended = set()
        self.wants_group: dict[int, str] = {}  # what each that asked offers to the others
        self.progress: dict[int, Sight] = {}  # by rank: what it looked like when it was last looked at
        self.no_group = self.streaming = self.stopping = False
        self.number = number

    @property
    def unfinished(self) -> list[int]:
        """Ranks that still run it."""
        return [rank for rank in self.ranks if rank not in self.ended]

    @property
    def may_repeat(self) -> bool:
        """Did it lose a rank, and may it be started again as a whole? Not where values were taken of it already."""
        lost_a_rank = any(failure.is_death for failure in self.failures)
        return lost_a_rank and self.attempt < self.request.retries and not self.streaming

    def failure_text(self, error: BaseException | None) -> str | None:
        """What to say of a call that ended with this error or with failures; None where it succeeded."""
        if error is None and not self.failures:
            return None
        text = str(error or self.failures[0].error or "")
        return text or (f"rank {self.failures[0].rank} raised" if self.failures else None)

    def ask_group(self, rank: int, offer: str) -> tuple[Sequence[int], list[str] | None]:
        """A rank asks whether all will make a group: which ranks to answer now, and with what offers of all of them."""
        self.wants_group[rank] = offer
        if self.no_group or self.ended - self.wants_group.keys():
            self.no_group = True
            return [rank], None
        if len(self.wants_group) < len(self.ranks):
            return [], None
        offers = [self.wants_group[each] for each in self.ranks]
        self.wants_group.clear()  # a decorated function may ask again
        return self.ranks, offers

    def end_rank(self, rank: int) -> list[int]:
        """Mark a rank as through with it; returns the ranks that wait for a group that it will not join."""
        self.ended.add(rank)
        if not self.wants_group or rank in self.wants_group or self.no_group:
            return []
        self.no_group = True
        return [waiting for waiting in self.wants_group if waiting not in self.ended]

    def saw(self, rank: int, now: float) -> None:
        """Note that the rank did something: it printed, reported or produced a value."""
        if rank in self.progress:
            self.progress[rank].quiet_since = now
