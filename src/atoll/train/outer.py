"""What may be shared with other runs: which samples come next, and weights. The seams by which a fleet trains."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class OuterSync(Protocol):
    """Exchanges weights with other runs at the end of some steps.

    Every rank calls each method at the same step, so that it may do collectives of its own. A checkpoint holds
    ``state()`` and ``tensors()``; a resumed run gets them back before ``begin``.
    """

    def tensors(self, masters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """State like weights, by name, sharded as ``masters`` are: saved, and loaded in place. Asked before ``begin``.

        Args:
            masters: the weights, by name; where the layout shards them, DTensors.
        """

    def state(self) -> dict[str, Any]:
        """What else ``load`` needs; JSON, equal on every rank."""

    def load(self, state: dict[str, Any]) -> None:
        """Resume where ``state`` was taken; ``tensors`` are loaded already."""

    def begin(self, step: int, tokens: int, masters: Mapping[str, Tensor]) -> None:
        """Training begins after this step, with so many tokens trained; 0 in a new run."""

    def due(self, step: int) -> bool:
        """Whether ``after_step`` of this step may move weights: the next then waits for it."""

    def after_step(self, step: int, tokens: int, masters: Mapping[str, Tensor]) -> None:
        """This step has trained ``tokens``, over all ranks of this run.

        If it is due, ``masters`` may be moved, in place; if not, the next step may have begun.
        """


class SampleSource(Protocol):
    """Hands out ranges of global sample numbers and keeps account of those that were trained.

    ``next_range`` runs ahead of training; ``commit`` follows, once a range's optimizer step is done. All ranks call
    each method at the same step and on their main thread, so that it may do a collective.
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
    """The default source: one integer, the first number that was not trained yet.

    Args:
        limit: samples of the whole run, counted from 0; None never ends.
    """

    def __init__(self, limit: int | None = None, start: int = 0) -> None:
        self._limit = sys.maxsize if limit is None else limit
        self._handed_out = self.consumed = start

    def next_range(self, count: int) -> range:
        """The next ``count`` numbers, fewer before the limit."""
        first = self._handed_out
        self._handed_out = max(first, min(first + count, self._limit))
        return range(first, self._handed_out)

    def commit(self, numbers: range) -> None:
        """These were trained."""
        self.consumed = numbers.stop

    def state(self) -> dict[str, Any]:
        """The cursor."""
        return {"samples_consumed": self.consumed}

    def load(self, state: dict[str, Any]) -> None:
        """Go on at a cursor."""
        self.consumed = self._handed_out = int(state["samples_consumed"])
