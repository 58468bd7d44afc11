"""Progress of the training on the terminal, and its curve as a picture."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from atoll.core import events


class Curve:
    """The loss of each step, put together from what the ranks report."""

    def __init__(self) -> None:
        self.train: dict[int, float] = {}  # step -> nats per token, over all ranks
        self.held_out: dict[int, float] = {}
        self._waiting: dict[int, list[float]] = defaultdict(list)

    def add(self, metrics: dict[str, Any], world_size: int) -> int | None:
        """Take one rank's report in; returns the step if it is now known from every rank."""
        step = metrics["step"]
        if "held_out" in metrics:
            self.held_out[step] = metrics["held_out"]
        if "loss" not in metrics:
            return None
        losses = self._waiting[step]
        losses.append(metrics["loss"])
        if len(losses) < world_size:
            return None
        # Each rank had equally many tokens, so the mean over ranks is the mean over tokens.
        self.train[step] = sum(self._waiting.pop(step)) / world_size
        return step

    def smoothed(self, width: int) -> list[tuple[int, float]]:
        """The mean of each ``width`` steps, at the last of them."""
        steps = sorted(self.train)
        groups = [steps[i : i + width] for i in range(0, len(steps), width)]
        return [(group[-1], sum(self.train[step] for step in group) / len(group)) for group in groups]


class Display:
    """Shows a training as it goes: call it with the events of a pool (``on_event=display``).

    On a terminal it is a bar with a line of figures below, redrawn in place; elsewhere one line per tenth of the way.
    """

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.steps = steps
        self.curve = Curve()
        self.console = console or Console()
        self.world_size = 1
        self._latest: dict[int, dict[str, Any]] = {}  # rank -> its last report
        self._started = time.monotonic()
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            expand=True,
        )
        self._task = self._bar.add_task("training", total=steps, start=False)
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.PoolStarted):
            self.world_size = event.world_size
            self._say(f"{event.nodes} nodes with {event.world_size} ranks are up after {event.took_s:.2f} s")
        elif isinstance(event, events.CallRetried):
            self._say(f"starting again: {event.reason}")
        elif isinstance(event, events.RankDied):
            self._say(f"rank {event.rank} on node {event.node} died: {event.reason}")
        elif isinstance(event, events.MetricsReported):
            self._report(event.rank, event.metrics)

    def _report(self, rank: int, metrics: dict[str, Any]) -> None:
        if not self._latest:
            self._started = time.monotonic()
            self._bar.start_task(self._task)
        self._latest[rank] = {**self._latest.get(rank, {}), **metrics}
        step = self.curve.add(metrics, self.world_size)
        if step is None:
            return
        self._bar.update(self._task, completed=step)
        if not self.console.is_terminal and (step in (1, self.steps) or step % max(1, self.steps // 10) == 0):
            line = f"step {step:>4}/{self.steps}   {self.figures()}"
            if 1 < step < self.steps:  # the first step also warms up
                line += f"   {(time.monotonic() - self._started) / (step - 1) * (self.steps - step):.0f} s left"
            self._say(line)

    def figures(self) -> str:
        """Loss, speed and memory as they are now."""
        curve, ranks = self.curve, self._latest.values()
        if not curve.train:
            return "ranks are getting ready"
        parts = [f"loss {curve.smoothed(10)[-1][1]:.3f}"]
        if curve.held_out:
            parts.append(f"held out {curve.held_out[max(curve.held_out)]:.3f}")
        parts.append(f"{sum(rank.get('tokens_per_s', 0.0) for rank in ranks):,.0f} tokens/s")
        parts.append(f"{max(rank.get('memory_bytes', 0) for rank in ranks) / 2**20:,.0f} MiB a rank")
        return "   ".join(parts)

    def _render(self) -> Group:
        width = max(1, len(self.curve.train) // 20)
        line = sparkline([loss for _, loss in self.curve.smoothed(width)])
        return Group(self._bar, Text(f"{self.figures()}   {line}", overflow="ellipsis", no_wrap=True))

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)


def sparkline(values: list[float]) -> str:
    """A small chart of one line: the highest value as a full block, the lowest as a thin one."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / ((high - low) or 1))] for value in values)


def save_curve(curve: Curve, path: Path, title: str) -> None:
    """Draw training and held-out loss over the steps into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(list(curve.train), list(curve.train.values()), color="#8fb8de", linewidth=0.7, label="train, each step")
    smooth = curve.smoothed(max(1, len(curve.train) // 40))
    axes.plot([step for step, _ in smooth], [loss for _, loss in smooth], color="#1f5a94", label="train, averaged")
    axes.plot(
        list(curve.held_out), list(curve.held_out.values()), "o-", color="#d1495b", markersize=4, label="held out"
    )
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path)
