"""What is shown of a run: the live panel, drawn with rich, and the lines of a log."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import category

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.train.events import Progress, RunEnded, RunStarted
from atoll.train.metrics.figures import count, size, span, sparkline
from atoll.train.metrics.session import Session

_MAX_WIDTH = 110
_GAP = "   "


@dataclass(frozen=True, slots=True)
class Phase:
    """Something outside the steps that goes on, since a monotonic time."""

    progress: Progress
    since: float


def run_panel(session: Session, phases: Sequence[Phase], width: int) -> RenderableType:
    """The figures of a session, with a bar; as high as the width asks for."""
    bars = [_bar(each.progress.done, each.progress.total, phase_line(each.progress)) for each in phases]
    started = session.started
    if started is None:
        return Group(*bars)
    step = session.last.step if session.last else started.first_step
    text = f"{step:,}/{started.steps:,}"
    if step < started.steps and session.left_s is not None:
        text += f"  {span(session.left_s)} left"
    rows = [_dim(about(started)), _bar(step, started.steps, text), Columns(live_figures(session), padding=(0, 3))]
    if (saved := session.checkpoint) is not None:
        times = f"{span(saved.took_s)} (training blocked {span(saved.stall_s)})"
        rows.append(_dim(f"checkpoint at step {saved.step:,}, {times}"))
    return Panel(
        Group(*rows, *bars),
        width=min(width, _MAX_WIDTH),
        title=Text(started.name, style="bold"),
        title_align="left",
        subtitle=Text(started.output_dir, style="dim"),
        subtitle_align="right",
        border_style="cyan",
    )


def about(started: RunStarted) -> str:
    """One line on what is trained, and where."""
    parts = [f"{count(started.parameters)} parameters", started.layout, started.device]
    if started.resumed_from is not None:
        parts.append(f"resumed at step {started.first_step:,}")
    return " · ".join(parts)


def live_figures(session: Session) -> list[Text]:
    """The figures of now, the more telling ones first."""
    last = session.last
    if last is None:
        return [Text("running the first step…", style="dim")]
    loss = _figure("loss", f"{last.loss:.3f}", "bold" if math.isfinite(last.loss) else "bold red")
    trend = session.trend(16)
    found = [loss + Text(f" {sparkline(trend)}", style="cyan") if len(trend) > 1 else loss]
    if session.validation is not None:
        value = _figure("validation", f"{session.validation.loss:.3f}", "bold")
        found.append(value.append(f" at {session.validation.step:,}", style="dim"))
    speed = Text.assemble((f"{session.mean('tokens_per_s'):,.0f}", "bold"), (" tokens/s", "dim"))
    if session.started is not None and session.started.world_size > 1:
        speed.append(f" ({session.mean('tokens_per_s_per_gpu'):,.0f} per {session.device_word})", style="dim")
    found.append(speed)
    if last.mfu is not None:
        found.append(_figure("MFU", f"{session.mean('mfu'):.1%}"))
    found.append(_figure("memory", size(last.memory_bytes)))
    found.append(_figure("grad norm", f"{last.grad_norm:.3g}"))
    found.append(_figure("lr", f"{last.lr:.2e}"))
    if (waited := session.share("data_wait_s")) > 0.02:
        found.append(_figure("data wait", f"{waited:.0%}", "yellow"))
    if (behind := session.share("step_spread_s")) > 0.1:
        found.append(_figure("slowest rank", f"+{behind:.0%}", "yellow"))
    return found


def plain_step(session: Session) -> str:
    """The figures of now as a line for logs."""
    last, started = session.last, session.started
    assert last is not None
    steps = f"{last.step}/{started.steps}" if started else str(last.step)
    # Without the sparkline, which says little in a log.
    loss, *others = (text.plain for text in live_figures(session))
    parts = [f"step {steps}", " ".join(loss.split()[:2]), *others]
    left = session.left_s
    if left is not None and started is not None and last.step < started.steps:
        parts.append(f"{span(left)} left")
    return _GAP.join(parts)


def end_rows(ended: RunEnded, session: Session) -> list[tuple[str, str]]:
    """Labels and values of how a run ended."""
    first, started = session.first_loss, session.started
    steps = f"{ended.step:,} of {started.steps:,} steps" if started else f"{ended.step:,} steps"
    rows = [(ended.status, f"{steps} in {span(ended.took_s)}")]
    if ended.loss is not None:
        rows.append(("loss", f"{ended.loss:.3f}" if first is None else f"{first:.3f} → {ended.loss:.3f}"))
    if ended.validation_loss is not None:
        rows.append(("validation loss", f"{ended.validation_loss:.3f}"))
    if session.last is not None:
        speed = f"{session.mean_tokens_per_s:,.0f} tokens/s"
        rows.append(("tokens", f"{count(ended.tokens)}, {speed} in this session"))
        rows.append(("peak memory", f"{size(session.last.memory_bytes)} per rank"))
    if ended.checkpoint:
        rows.append(("checkpoint", ended.checkpoint))
    if ended.curve:
        rows.append(("loss curve", ended.curve))
    return rows


def visible(text: str) -> str:
    """A text without what would move the cursor, or can't be written: control characters and halves of characters."""
    return "".join("\ufffd" if category(each) in ("Cc", "Cs") and each not in "\n\t" else each for each in text)


def phase_line(progress: Progress) -> str:
    """``tokenizing: 12.3 M of 40.0 M tokens``."""
    in_bytes = progress.unit in ("bytes", "B")
    shown = size if in_bytes else count
    unit = "" if in_bytes or not progress.unit else f" {progress.unit}"
    if progress.total is not None and progress.total != 1:  # one of one is no count
        return f"{progress.phase}: {shown(progress.done)} of {shown(progress.total)}{unit}"
    return f"{progress.phase}: {shown(progress.done)}{unit}" if progress.done > 1 else progress.phase


def _figure(label: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{label} ", "dim"), (value, style))


def _dim(line: str) -> Text:
    return Text(line, style="dim", no_wrap=True, overflow="ellipsis")


def _bar(done: float, total: float | None, text: str) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    # Without a total the bar pulses, which needs the time.
    bar = ProgressBar(total=total, completed=done, pulse=total is None, animation_time=time.monotonic())
    grid.add_row(bar, Text(f"  {text}"))
    return grid
