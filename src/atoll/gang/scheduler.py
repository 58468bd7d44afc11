"""Which call runs where, decided without I/O: ranks and calls in, starts out.

First come, first served. A broadcast starts on all ranks at once, when all are idle, and nothing overtakes it:
two broadcasts reach every rank in the same order, so their collectives can't cross.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """What the scheduler needs to know of a call."""

    @property
    def whole_gang(self) -> bool:
        """Does it need every rank at once?"""


JobT = TypeVar("JobT", bound=Schedulable)


class Scheduler(Generic[JobT]):
    """The queue of a gang of ``world_size`` ranks. Not thread-safe: the gang holds its lock."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.idle: set[int] = set()
        self.running: dict[int, JobT] = {}
        self._queue: OrderedDict[JobT, None] = OrderedDict()  # one that is cancelled is found at once

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> JobT | None:
        """The call that will start next, or None."""
        return next(iter(self._queue), None)

    def add(self, job: JobT, *, first: bool = False) -> None:
        """Queue a call; ``first`` puts a repetition before everything that waits."""
        self._queue[job] = None
        if first:
            self._queue.move_to_end(job, last=False)

    def remove(self, job: JobT) -> bool:
        """Take a call that has not started out of the queue; False if it has."""
        if job not in self._queue:
            return False
        del self._queue[job]
        return True

    def drain(self) -> list[JobT]:
        """Take everything that waits out of the queue."""
        waiting = list(self._queue)
        self._queue.clear()
        return waiting

    def free(self, rank: int) -> None:
        """The rank is ready for a call."""
        self.running.pop(rank, None)
        self.idle.add(rank)

    def lost(self, rank: int) -> None:
        """The rank is gone until it is freed again."""
        self.running.pop(rank, None)
        self.idle.discard(rank)

    def next(self) -> tuple[JobT, tuple[int, ...]] | None:
        """The call to start now, and on which ranks; None when there is nothing to do."""
        if not self._queue or not self.idle:
            return None
        job = next(iter(self._queue))
        if job.whole_gang:
            if len(self.idle) < self.world_size:
                return None
            ranks = tuple(range(self.world_size))
        else:
            ranks = (min(self.idle),)
        del self._queue[job]
        for rank in ranks:
            self.idle.discard(rank)
            self.running[rank] = job
        return job, ranks
