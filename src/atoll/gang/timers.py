"""Actions to run later, in the gang's reader thread. Not thread-safe: the gang holds its lock."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

_VOID_SLACK = 32


class Timer:
    """An action and when it is due. ``action`` is None once it ran or was taken back."""

    __slots__ = ("action", "when")

    def __init__(self, when: float, action: Callable[[], None]) -> None:
        self.when = when
        self.action: Callable[[], None] | None = action


class Timers:
    """A heap of timers."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._num_void = 0  # taken back, and still lying in the heap

    def __len__(self) -> int:
        """Timers that have not run, those taken back included until their place is needed."""
        return len(self._heap)

    def add(self, delay_s: float, action: Callable[[], None]) -> tuple[Timer, bool]:
        """Run the action after a delay. Also says whether it is now the one due first."""
        timer = Timer(time.monotonic() + delay_s, action)
        soonest = not self._heap or timer.when < self._heap[0][0]
        heapq.heappush(self._heap, (timer.when, next(self._numbers), timer))
        return timer, soonest

    def take_back(self, timer: Timer) -> None:
        """The timer will not run; what it held is let go now, its place in the heap when those are half of it."""
        if timer.action is None:
            return
        timer.action = None
        self._num_void += 1
        if self._num_void > _VOID_SLACK + len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].action is not None]
            heapq.heapify(self._heap)
            self._num_void = 0

    def next_s(self) -> float | None:
        """Seconds until the first is due, or None."""
        return max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None

    def due(self) -> Callable[[], None] | None:
        """Take out an action that is due, or None."""
        while self._heap and self._heap[0][0] <= time.monotonic():
            timer = heapq.heappop(self._heap)[2]
            action, timer.action = timer.action, None
            if action is not None:
                return action
            self._num_void -= 1
        return None
