"""The loss curve of a run as a picture."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core.paths import write_atomic
from atoll.train.metrics.figures import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_TRAIN, _VALIDATION, _LR = "#2563a8", "#d1495b", "#7a8794"
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#b8c0c8",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "grid.alpha": 0.22,
    "legend.frameon": False,
}


def save_curve(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw training and validation loss over steps and tokens into a PNG, with the learning rate below.

    Args:
        rows: objects of ``metrics.jsonl``, as ``journal.read`` gives them: of the whole run, resumed or not. Losses
            that are None or not finite leave a gap and a mark.

    Raises:
        ImportError: matplotlib is not there.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = sorted((row for row in rows if "loss" in row), key=lambda row: row["step"])
    points = sorted((row for row in rows if "validation_loss" in row), key=lambda row: row["step"])
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.0, 5.0), dpi=140, layout="constrained", facecolor="white")
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
        _draw_loss(axes, steps, points)
        _draw_tokens(axes, steps)
        below.plot(_column(steps, "step"), _column(steps, "lr"), "." if len(steps) == 1 else "-", color=_LR)
        below.set(xlabel="step", ylabel="lr")
        below.set_ylim(bottom=0.0)
        below.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        below.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
        below.yaxis.set_major_formatter(lambda lr, _: f"{lr:g}".replace("e-0", "e-"))
        axes.set_title(title, parse_math=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    write_atomic(path, picture.getvalue(), mode=0o644)


def _draw_loss(axes: Axes, steps: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]) -> None:
    x, loss = _column(steps, "step"), _column(steps, "loss")
    finite = np.isfinite(loss)
    x_mean, mean = averaged(x, loss, 60)
    if len(loss) > 30:
        axes.plot(x, loss, color=_TRAIN, alpha=0.32, linewidth=0.8, label="each step")
        axes.plot(x_mean, mean, color=_TRAIN, linewidth=2.0, label="train, averaged", solid_capstyle="round")
    elif finite.any():
        axes.plot(x, loss, "o-", color=_TRAIN, linewidth=1.6, markersize=3.5, label="train")
    x_held, held = _column(points, "step"), _column(points, "validation_loss")
    if np.isfinite(held).any():
        last = f"validation, {held[np.isfinite(held)][-1]:.3f} last"
        axes.plot(x_held, held, "o-", color=_VALIDATION, linewidth=1.2, markersize=4.5, label=last, zorder=3)
    if not finite.all():
        lost = x[~finite]
        floor = axes.get_xaxis_transform()
        axes.plot(lost, np.zeros_like(lost), "x", color="#b00020", transform=floor, clip_on=False, label="not finite")
    # A spike of one step must not press the curve flat: the averaged curve and the validation set the range.
    known = np.concatenate([values[np.isfinite(values)] for values in (mean, held)])
    if known.size:
        low, high = min(known.min(), loss[finite].min(initial=math.inf)), known.max()
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)
    axes.set_ylabel("loss (nats per token)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right")


def _draw_tokens(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """Trained tokens along the top edge: steps have about equally many, so one factor serves."""
    last = next((row for row in reversed(steps) if row.get("tokens") and row["step"]), None)
    if last is None:
        return
    each = last["tokens"] / last["step"]
    top = axes.secondary_xaxis("top", functions=(lambda step: step * each, lambda tokens: tokens / each))
    top.xaxis.set_major_formatter(lambda tokens, _: count(tokens).replace(".00 ", " ").replace(".0 ", " "))
    top.set_xlabel("tokens")


def averaged(x: Array, y: Array, num: int) -> tuple[Array, Array]:
    """At most ``num`` points that stand for as many values each: their means, those that are not finite left out."""
    finite = np.isfinite(y)
    parts = min(num, int(finite.sum()))
    groups = [np.array_split(each[finite], max(1, parts)) for each in (x, y)]
    along, up = (np.array([part.mean() for part in group if part.size]) for group in groups)
    return along, up


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> Array:
    values = (row.get(key) for row in rows)
    return np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)
