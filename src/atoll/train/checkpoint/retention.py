"""Which checkpoints have served their time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping


def doomed(
    metrics: Mapping[int, float | None], kept: Collection[int], *, saved: int, keep: int, keep_best: bool
) -> list[int]:
    """Steps to delete, oldest first.

    Args:
        metrics: every whole checkpoint, with its validation loss where it has one.
        kept: those that stay for good.
        saved: the step just completed: it stays, also where a run that went back to an older step saved it.
    """
    stay = {saved, *kept, *sorted(metrics)[-keep:]}
    if keep_best:
        rated = {step: metric for step, metric in metrics.items() if metric is not None and not math.isnan(metric)}
        if rated:
            stay.add(min(rated, key=lambda step: (rated[step], -step)))
    return sorted(set(metrics) - stay)
