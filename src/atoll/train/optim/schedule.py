"""The learning rate as a function of the step, or of the tokens trained before it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.core.errors import ConfigError
from atoll.train.recipe.durations import Duration
from atoll.train.recipe.schema import ScheduleSection


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule whose lengths are known in steps."""

    section: ScheduleSection
    total_steps: int
    warmup_steps: int  # at most all
    decay_steps: int  # of wsd
    tokens_per_step: float = 1.0

    def factor(self, step: int, tokens: int = 0) -> float:
        """What the learning rate of ``step``, the first of which is 1, is multiplied by, in [0, 1].

        Args:
            tokens: trained before it. With ``by = "tokens"`` the step counts as the one that a run of full steps would
                be at, 1 + tokens / ``tokens_per_step``, a fraction perhaps.

        With n = ``total_steps`` and w = ``warmup_steps``: the factor of steps 1 to w is step / w. Over the last d steps
        it falls from 1 to what would be ``floor`` at step n + 1, so that no step of the run is lost to a rate of 0, as
        TorchTitan has it: evenly for ``linear`` and ``wsd`` (Hu et al., "MiniCPM", 2024), along half a ``cosine``
        (Loshchilov and Hutter, "SGDR", 2017). d is ``decay_steps`` for ``wsd``, n - w for the other two; ``constant``
        stays. Steps after n are as step n.
        """
        kind, floor, total_steps = self.section.kind, self.section.floor, self.total_steps
        at = min(step if self.section.by == "steps" else 1 + tokens / self.tokens_per_step, total_steps)
        if at < self.warmup_steps:
            return at / self.warmup_steps
        decay = self.decay_steps if kind == "wsd" else total_steps - self.warmup_steps
        start = total_steps + 1 - decay  # the last step with the full rate
        if kind == "constant" or at <= start:
            return 1.0
        done = (at - start) / decay
        left = (1.0 + math.cos(math.pi * done)) / 2 if kind == "cosine" else 1.0 - done
        return floor + (1.0 - floor) * left


def resolve(section: ScheduleSection, total_steps: int, steps_per_epoch: float, tokens_per_step: float) -> Schedule:
    """The schedule of a run.

    Args:
        steps_per_epoch: steps, with a fraction where an epoch is not a whole number of them.

    Raises:
        ConfigError: warmup and decay are longer than the run.
    """

    def steps(length: Duration) -> int:
        return length.in_steps(steps_per_epoch=steps_per_epoch, tokens_per_step=tokens_per_step)

    warmup = min(2000, total_steps // 20) if section.warmup is None else steps(section.warmup)
    decay = 0
    if section.kind == "wsd":
        by_default = max(0, min(-(-total_steps // 10), total_steps - warmup))
        decay = by_default if section.decay is None else steps(section.decay)
    if warmup + decay > total_steps:
        raise ConfigError(
            f"[schedule] warmup and decay are {warmup} + {decay} steps, longer than the run of {total_steps}: shorten "
            f"them, as --schedule.warmup {total_steps // 10}, or raise [train] steps"
        )
    return Schedule(section, total_steps, warmup, decay, tokens_per_step)
