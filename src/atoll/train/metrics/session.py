"""What the events of one session add up to: the figures that a display shows."""

from __future__ import annotations

import math
import time
from array import array
from collections import deque

from atoll.train.events import CheckpointSaved, Event, RunStarted, StepDone, Validated

_RECENT = 20  # steps that speeds and shares are averaged over


class Session:
    """From the start, or the resume, to now. Speeds and times are of this session only."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.last: StepDone | None = None
        self.first_loss: float | None = None
        self.validation: Validated | None = None
        self.checkpoint: CheckpointSaved | None = None
        self._losses = array("d")  # those that are finite
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
        if math.isfinite(step.loss):
            self._losses.append(step.loss)
        self._recent.append(step)
        self._arrivals.append((time.monotonic(), step.step))
        self._tokens += step.tokens_per_s * step.step_s
        self._training_s += step.step_s

    @property
    def device_word(self) -> str:
        """What a rank computes on, for figures "per GPU"."""
        return "rank" if self.started is None or self.started.device.upper().startswith("CPU") else "GPU"

    @property
    def mean_tokens_per_s(self) -> float:
        """Over all ranks and all steps of the session."""
        return _ratio(self._tokens, self._training_s)

    def trend(self, width: int) -> list[float]:
        """The losses so far as at most ``width`` means of as many steps each, the oldest first."""
        each = max(1, -(-len(self._losses) // width))
        groups = [self._losses[i : i + each] for i in range(0, len(self._losses), each)]
        return [sum(group) / len(group) for group in groups]

    def mean(self, figure: str) -> float:
        """A rate, or MFU, over the last steps: each counts by the time it took."""
        done = sum((getattr(step, figure) or 0.0) * step.step_s for step in self._recent)
        return _ratio(done, sum(step.step_s for step in self._recent))

    def share(self, figure: str) -> float:
        """Seconds of the last steps that went into something, such as ``data_wait_s``, as a share of those steps."""
        return _ratio(sum(getattr(step, figure) for step in self._recent), sum(step.step_s for step in self._recent))

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at the pace of the last steps, with what lay between them; None before the second."""
        if self.started is None or len(self._arrivals) < 2:
            return None
        (begin, first), (end, last) = self._arrivals[0], self._arrivals[-1]
        each = (end - begin) / (last - first)
        return max(0.0, each * (self.started.steps - last) - (time.monotonic() - end))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
