"""Who says which samples come next: the seam by which a fleet hands out leased ranges."""

from __future__ import annotations

from typing import Any, Protocol


class SampleSource(Protocol):
    """Hands out ranges of global sample numbers and keeps account of those that were trained.

    ``next_range`` runs ahead, on the thread that prefetches; ``commit`` follows, once a range's optimizer step is done.
    Only what was committed counts: a checkpoint saves ``state()``, and after ``load`` of it the ranges that were handed
    out but not committed are handed out again.
    """

    def next_range(self, count: int) -> range:
        """The next ``count`` sample numbers; fewer before the end of a limited run, none when it is over."""

    def commit(self, numbers: range) -> None:
        """These were trained. Ranges are committed in the order in which they were handed out."""

    @property
    def consumed(self) -> int:
        """Samples trained since the beginning of the run."""

    def state(self) -> dict[str, Any]:
        """What ``load`` needs to go on at the next sample."""

    def load(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; nothing may have been handed out by this source since it was made."""


class Counter:
    """The default source: one integer.

    Args:
        limit: samples of the whole run, counted from 0; None never ends.
    """

    def __init__(self, start: int = 0, limit: int | None = None) -> None:
        self._limit = limit
        self._handed_out = start
        self._consumed = start

    def next_range(self, count: int) -> range:
        """The next ``count`` numbers, fewer before the limit."""
        first = self._handed_out
        stop = first + count if self._limit is None else max(first, min(first + count, self._limit))
        self._handed_out = stop
        return range(first, stop)

    def commit(self, numbers: range) -> None:
        """These were trained."""
        self._consumed = numbers.stop

    @property
    def consumed(self) -> int:
        """The cursor: the first number that was not trained yet."""
        return self._consumed

    def state(self) -> dict[str, Any]:
        """The cursor."""
        return {"samples_consumed": self._consumed}

    def load(self, state: dict[str, Any]) -> None:
        """Go on at a cursor."""
        self._consumed = self._handed_out = int(state["samples_consumed"])
