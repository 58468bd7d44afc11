"""What a terminal, and a log, show of a run. The terminal is rich's, read back as a screen would show it."""

from __future__ import annotations

import io
import json
import math
import re
import time

import pytest
import rich.console

from atoll.train.events import (
    CheckpointSaved,
    Event,
    Note,
    Progress,
    RunEnded,
    RunStarted,
    StepDone,
    Validated,
    decode,
    encode,
)
from atoll.train.metrics.console import Console
from atoll.train.metrics.figures import count, size, span, sparkline
from atoll.train.metrics.session import Session

STEPS = 60


def started(first_step: int = 0, device: str = "NVIDIA H100 80GB HBM3") -> RunStarted:
    resumed = f"out/checkpoints/{first_step}" if first_step else None
    return RunStarted("austen", "out/austen", 1_930_240, "FSDP 2", device, 2, first_step, STEPS, 4096, resumed)


def done(step: int, loss: float = 2.5, speed: float = 7000.0, **others: float) -> StepDone:
    figures = {"step_s": 4096 / speed, "data_wait_s": 0.0, **others}
    return StepDone(step, 4096 * step, 8 * step, loss, 2.5e-4, 0.75, speed, speed / 2, memory_bytes=3 << 29, **figures)


def a_run(first_step: int = 0) -> list[Event]:
    events: list[Event] = [started(first_step)]
    for step in range(first_step + 1, STEPS + 1):
        events.append(done(step, 2.0 + 4.0 / step))
        if step % 20 == 0:
            events += [Validated(step, 2.75, 9000, 0.3), CheckpointSaved(step, f"out/checkpoints/{step}", 0.02, 0.14)]
    return events


def ended(status: str = "finished", **others: str | float) -> RunEnded:
    return RunEnded(status, STEPS, 2.25, 4096 * STEPS, 61.2, 2.75, **others)  # type: ignore[arg-type]


def terminal(file: io.StringIO, width: int) -> rich.console.Console:
    return rich.console.Console(file=file, width=width, height=40, force_terminal=True, force_interactive=True)


def on_terminal(events: list[Event], width: int = 100) -> str:
    """What stands on the screen at the end, without colours."""
    file = io.StringIO()
    console = Console(terminal(file, width))
    for event in events:
        console(event)
    console.close()
    return screen(file.getvalue())


def screen(output: str) -> str:
    """Lines as a terminal has them after ``output``: knows moves up, carriage returns and erased lines."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif not part.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
        elif part.endswith("A"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
    return "\n".join(line.rstrip() for line in lines)


def as_log(events: list[Event]) -> list[str]:
    file = io.StringIO()
    console = Console(rich.console.Console(file=file, width=40, force_terminal=False))
    for event in events:
        console(event)
    console.close()
    return file.getvalue().splitlines()


def test_a_terminal_has_one_panel_with_the_figures_of_now() -> None:
    shown = on_terminal(a_run())
    assert shown.count("austen ──") == 1, "redrawn in place"
    for part in (
        "1.93 M parameters · FSDP 2 · NVIDIA H100 80GB HBM3",
        "60/60",
        "loss 2.",
        "█",
        "validation 2.750 at 60",
        "7,000 tokens/s (3,500 per GPU)",
        "memory 1.50 GiB",
        "grad norm 0.75",
        "lr 2.50e-04",
        "checkpoint at step 60",
        "out/austen ─╯",
    ):
        assert part in shown
    assert "MFU" not in shown
    assert "data wait" not in shown
    assert len(shown.strip().splitlines()) <= 9


def test_what_is_rare_is_shown_when_it_is_there() -> None:
    shown = on_terminal([started(), done(1, mfu=0.412, data_wait_s=0.05, step_spread_s=0.2)])
    assert "MFU 41.2%" in shown
    assert "data wait 9%" in shown
    assert "slowest rank +34%" in shown


@pytest.mark.parametrize("width", [30, 45, 60, 80, 200])
def test_any_width_has_every_figure_and_no_longer_line(width: int) -> None:
    shown = on_terminal(a_run(), width)
    assert max(map(len, shown.splitlines())) <= width
    for part in ("60/60", "validation 2.750", "7,000 tokens/s", "grad norm 0.75", "lr 2.50e-04"):
        assert part in shown


def test_notes_stay_above_the_panel_as_they_were_written() -> None:
    shown = on_terminal([*a_run()[:5], Note("file [bold]x[/] \x1b[2J [/nope]")])
    assert shown.index("file [bold]x[/] \ufffd[2J [/nope]") < shown.index("1.93 M parameters")


def test_the_end_says_where_everything_is_and_shows_the_sample_verbatim() -> None:
    sample = "It is a [bold]truth[/bold]\x1b[31m universally\nacknowledged \ud800, " + "word " * 40
    shown = on_terminal([*a_run(), ended(sample=sample, checkpoint="out/checkpoints/60", curve="out/loss.png")])
    assert "finished: 60 of 60 steps" in shown
    for part in (
        "60 of 60 steps in 1 min 01 s",
        "6.000 → 2.250",
        "2.750",
        "246 k, 7,000 tokens/s",
        "out/checkpoints/60",
    ):
        assert part in shown
    assert "out/loss.png" in shown
    assert "It is a [bold]truth[/bold]\ufffd[31m universally" in shown
    assert shown.count("word") == 40


def test_a_failed_run_leaves_the_reason_to_who_started_it() -> None:
    shown = on_terminal([started(), done(1, math.nan), ended("failed", error="loss is [nan] at step 1")])
    assert "failed: 60 of 60 steps" in shown
    assert "loss is [nan] at step 1" not in shown, "the command prints the error, once"
    assert "loss nan" in shown


def test_a_log_gets_a_line_each_tenth_and_what_happens_between() -> None:
    lines = as_log([*a_run(), Note("a [note]"), ended(sample="once\nupon", curve="out/loss.png")])
    assert lines[0] == "austen: 1.93 M parameters · FSDP 2 · NVIDIA H100 80GB HBM3 · out/austen"
    steps = [line for line in lines if "tokens/s (" in line]
    assert [line.split()[1] for line in steps] == [f"{step}/60" for step in (1, *range(6, 61, 6))]
    assert re.fullmatch(r"step 30/60   loss 2\.\d{3}   validation 2\.750 at 20   7,000 tokens/s .* left", steps[5])
    assert "step 20   validation loss 2.750   0.3 s" in lines
    assert "step 20   saved checkpoint out/checkpoints/20 in 0.1 s (training blocked 20 ms)" in lines
    assert "a [note]" in lines
    assert lines[-3:] == ["sample:", "once", "upon"]
    assert not any("\x1b" in line for line in lines)


def test_a_dumb_terminal_gets_the_lines_of_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    console = Console(rich.console.Console(file=file, width=40, force_terminal=True))
    for event in a_run():
        console(event)
    console.close()
    assert len([line for line in file.getvalue().splitlines() if "tokens/s (" in line]) == 11


def test_a_slow_step_is_told_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = io.StringIO()
    console = Console(rich.console.Console(file=file, force_terminal=False))
    console(RunStarted("big", "out", 10**9, "FSDP 8", "H100", 8, 0, 10_000, 4096))
    for step in range(1, 41):
        now += 10.0
        console(done(step))
    console.close()
    told = [line.split()[1] for line in file.getvalue().splitlines() if line.startswith("step")]
    assert told == ["1/10000", *(f"{step}/10000" for step in range(4, 41, 3))]
    assert "1 d 04 h left" in file.getvalue().splitlines()[2]


def test_a_resume_counts_this_session_only() -> None:
    lines = as_log([*a_run(first_step=40), ended()])
    assert "resumed at step 40" in lines[0]
    assert "tokens: 246 k, 7,000 tokens/s in this session" in lines
    assert next(line for line in lines if line.startswith("loss:")) == f"loss: {2 + 4 / 41:.3f} → 2.250"


def test_a_finished_run_typed_again_says_whose_loss_it_has() -> None:
    lines = as_log([started(first_step=STEPS), ended()])
    assert "loss: 2.250" in lines
    assert not any(line.startswith("finished") for line in lines), "the note before says so"


def test_a_restart_in_the_same_terminal_begins_anew() -> None:
    session_lines = as_log([*a_run()[:20], *a_run(first_step=10), ended()])
    assert sum(line.startswith("austen: ") for line in session_lines) == 2
    assert next(line for line in session_lines if line.startswith("loss:")).startswith(f"loss: {2 + 4 / 11:.3f}")


def test_phases_over_a_second_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = io.StringIO()
    console = Console(rich.console.Console(file=file, force_terminal=False))
    console(Progress("quick", 0, 10))
    console(Progress("quick", 10, 10))
    for second in range(6):
        console(Progress("tokenizing", second * 1e6, 5e6, "bytes"))
        now += 1.5
    console(Progress("loading weights", 0, None))
    now += 2.0
    console(started())
    console.close()
    lines = file.getvalue().splitlines()
    assert lines[0] == "tokenizing: 977 KiB of 4.77 MiB"
    assert lines[-3] == "tokenizing: 4.77 MiB of 4.77 MiB in 7.5 s"
    assert lines[-2] == "loading weights in 2.0 s"
    assert not any("quick" in line for line in lines)


def test_a_phase_has_a_bar_of_its_own_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = io.StringIO()
    console = Console(terminal(file, 80))
    console(Progress("tokenizing", 0, 4e6, "tokens"))
    now += 2.0
    console(Progress("tokenizing", 1e6, 4e6, "tokens"))
    console.close()  # draws once more
    assert re.search(r"━+\s+tokenizing: 1.00 M of 4.00 M tokens", screen(file.getvalue()))


def test_events_of_another_process_look_the_same() -> None:
    events = [*a_run(), ended(sample="once")]
    travelled = [decode(json.loads(json.dumps(encode(event)))) for event in events]
    assert as_log(travelled)[-8:] == as_log(events)[-8:]


def test_cpu_ranks_are_no_gpus_and_time_left_needs_two_steps() -> None:
    session = Session()
    session.add(started(device="CPU"))
    assert session.device_word == "rank"
    session.add(done(1))
    assert session.left_s is None
    session.add(done(2))
    assert session.left_s is not None


def test_numbers_read_well() -> None:
    assert [count(n) for n in (7, 999, 1234, 999_950, 8_030_261_248)] == ["7", "999", "1.23 k", "1.00 M", "8.03 B"]
    assert [size(n) for n in (512, 1536, 80 << 30)] == ["512 B", "1.50 KiB", "80.0 GiB"]
    seconds = (0.0, 0.023, 0.42, 9.99, 59.7, 185, 7620, 273_600, math.inf)
    assert [span(s) for s in seconds] == [
        "0.0 s", "23 ms", "0.4 s", "10 s", "1 min 00 s", "3 min 05 s", "2 h 07 min", "3 d 04 h", "?",
    ]  # fmt: skip
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"


@pytest.mark.parametrize("num", [1, 5, 16, 17, 1000])
def test_the_trend_is_of_the_whole_session(num: int) -> None:
    session = Session()
    assert session.trend(16) == []
    for step in range(1, num + 1):
        session.add(done(step, float(step)))
    session.add(done(num + 1, math.nan))
    trend = session.trend(16)
    assert min(num, 9) <= len(trend) <= 16
    assert trend == sorted(trend)
    assert (trend[0] < 1 + num / 16, trend[-1] > num - num / 8) == (True, True)
