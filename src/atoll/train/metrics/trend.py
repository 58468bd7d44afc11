"""A loss over many steps, kept small."""

from __future__ import annotations

import math


class Trend:
    """The means of equal runs of values, at most ``2 * width`` of them, however many values come."""

    def __init__(self, width: int = 32) -> None:
        self._width = width
        self._each = 1  # values that a full bucket stands for
        self._buckets: list[tuple[float, int]] = []  # sum, count

    def add(self, value: float) -> None:
        """Take a value in; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        if self._buckets and self._buckets[-1][1] < self._each:
            total, num = self._buckets[-1]
            self._buckets[-1] = (total + value, num + 1)
            return
        if len(self._buckets) == 2 * self._width:
            pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
            self._buckets = [(a + b, n + m) for (a, n), (b, m) in pairs]
            self._each *= 2
        self._buckets.append((value, 1))

    def values(self, width: int) -> list[float]:
        """At most ``width`` means, the oldest first."""
        group = max(1, -(-len(self._buckets) // max(1, width)))
        groups = [self._buckets[i : i + group] for i in range(0, len(self._buckets), group)]
        return [sum(total for total, _ in each) / sum(num for _, num in each) for each in groups]
