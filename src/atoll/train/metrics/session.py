"""What the events of one session add up to: the figures that a display shows."""

from __future__ import annotations

import math
import time
from collections import deque

from atoll.train.events import CheckpointSaved, Event, RunStarted, StepDone, Validated

_RECENT = 20  # steps that speeds and shares are averaged over


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


class Session:
    """From the start, or the resume, to now. Speeds and times are of this session only."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.last: StepDone | None = None
        self.first_loss: float | None = None
        self.validation: Validated | None = None
        self.checkpoint: CheckpointSaved | None = None
        self.trend = Trend()
        self._recent: deque[StepDone] = deque(maxlen=_RECENT)
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # monotonic time, step
        self._tokens = 0.0
        self._training_s = 0.0

    def add(self, event: Event) -> None:
        """Take an event in."""
        if isinstance(event, RunStarted):
            self.started = event
        elif isinstance(event, StepDone):
            self._add_step(event)
        elif isinstance(event, Validated):
            self.validation = event
        elif isinstance(event, CheckpointSaved):
            self.checkpoint = event

    def _add_step(self, step: StepDone) -> None:
        self.last = step
        self.first_loss = step.loss if self.first_loss is None else self.first_loss
        self.trend.add(step.loss)
        self._recent.append(step)
        self._arrivals.append((time.monotonic(), step.step))
        self._tokens += step.tokens_per_s * step.step_s
        self._training_s += step.step_s

    @property
    def device_word(self) -> str:
        """What a rank computes on, for figures "per GPU"."""
        return "rank" if self.started is None or self.started.device.upper().startswith("CPU") else "GPU"

    @property
    def tokens_per_s(self) -> float:
        """Over all ranks, of the last steps."""
        return _ratio(sum(s.tokens_per_s * s.step_s for s in self._recent), sum(s.step_s for s in self._recent))

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Of one rank, of the last steps."""
        done = sum(s.tokens_per_s_per_gpu * s.step_s for s in self._recent)
        return _ratio(done, sum(s.step_s for s in self._recent))

    @property
    def mean_tokens_per_s(self) -> float:
        """Over all ranks and all steps of the session."""
        return _ratio(self._tokens, self._training_s)

    @property
    def mfu(self) -> float | None:
        """Of the last steps, or None where it is not known."""
        known = [(s.mfu, s.step_s) for s in self._recent if s.mfu is not None]
        return _ratio(sum(m * t for m, t in known), sum(t for _, t in known)) if known else None

    @property
    def data_wait(self) -> float:
        """The share of the last steps that went into waiting for data."""
        return _ratio(sum(s.data_wait_s for s in self._recent), sum(s.step_s for s in self._recent))

    @property
    def spread(self) -> float:
        """How far the slowest rank is behind the fastest, as a share of the last steps."""
        return _ratio(sum(s.step_spread_s for s in self._recent), sum(s.step_s for s in self._recent))

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at the pace of the last steps, with what lay between them; None before the second."""
        if self.started is None or len(self._arrivals) < 2:
            return None
        (begin, first), (end, last) = self._arrivals[0], self._arrivals[-1]
        if last <= first:
            return None
        each = (end - begin) / (last - first)
        return max(0.0, each * (self.started.steps - last) - (time.monotonic() - end))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
