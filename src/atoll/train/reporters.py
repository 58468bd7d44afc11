"""What takes the events of a run on rank 0: trackers, the picture, the console."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from atoll.train.events import Event, RunEnded
from atoll.train.metrics.console import Console
from atoll.train.metrics.journal import STEPS, VALIDATIONS, read
from atoll.train.metrics.plot import save_curve
from atoll.train.metrics.reporter import Reporter, Reporters
from atoll.train.metrics.summary import SummaryFile
from atoll.train.metrics.trackers import open_trackers
from atoll.train.recipe.schema import Recipe

_POINTS = 20_000  # of a curve that is some thousand pixels wide


class Forward(Reporter):
    """Hands events to a function."""

    def __init__(self, report: Callable[[Event], None]) -> None:
        self._report = report

    def __call__(self, event: Event) -> None:
        self._report(event)


class LossCurve(Reporter):
    """Draws the loss curve from the journal when the run ends."""

    def __init__(self, folder: Path, title: str) -> None:
        self._folder, self._title = folder, title

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunEnded) and event.step > 0:
            rows = read(self._folder / STEPS, _POINTS) + read(self._folder / VALIDATIONS, _POINTS)
            if rows:
                save_curve(self._folder / "loss.png", rows, self._title)


def open_reporters(recipe: Recipe, folder: Path, report: Callable[[Event], None] | None) -> Reporters:
    """The reporters of the run in ``folder``; the journal joins them once its first step is known.

    Args:
        report: takes the events instead of the console.

    Raises:
        ConfigError: a tracker is not installed or not configured.
    """
    found = open_trackers(recipe, str(folder))
    if recipe.metrics.plot:
        found.append(LossCurve(folder, recipe.name))
    found.append(SummaryFile(folder, recipe.metrics.notify))
    return Reporters([*found, Console() if report is None else Forward(report)])
