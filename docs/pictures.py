"""Draws the pictures of the docs from real output: ``python docs/pictures.py RUN_FOLDER OUTPUT_FILE``.

RUN_FOLDER is ``outputs/austen`` after ``make quickstart``, OUTPUT_FILE what that printed in a pipe.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

from rich.console import Console, Group, RenderableType
from rich.text import Text

from atoll.train.events import CheckpointSaved, RunStarted, StepDone, Validated
from atoll.train.metrics.panel import run_panel
from atoll.train.metrics.session import Session

DOCS = Path(__file__).parent
_WIDTH = 92  # of the panel


def main(folder: Path, output: Path) -> None:
    """Draw all of them."""
    draw(
        "train.svg", "$ atoll train examples/austen/austen.toml --nodes 2", panel(folder, output, at=140), width=_WIDTH
    )
    lines = [line for line in output.read_text().splitlines() if not line.startswith(("validating:", "waiting"))]
    draw("quickstart.svg", "$ make quickstart", Text("\n".join(lines)), width=120)
    for name, words in (
        ("dryrun.svg", "train llama3_8b --data.path hf://allenai/c4 --nodes 2 --gpus H100:8 --dryrun"),
        ("check.svg", "check"),
        ("preview.svg", "data preview llama3_debug --num 1 --train.seq_len 48"),
    ):
        done = subprocess.run(["atoll", *words.split()], capture_output=True, text=True, check=False)
        draw(name, f"$ atoll {words}", Text.from_ansi(done.stdout.rstrip()), width=100)


def draw(name: str, command: str, shown: object, *, width: int) -> None:
    """One terminal as an SVG, as rich exports it, without fonts from elsewhere."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Group(Text(command, style="bold green"), shown), soft_wrap=False)  # type: ignore[arg-type]
    console.save_svg(str(DOCS / name), title="atoll", unique_id=name.partition(".")[0])
    text = (DOCS / name).read_text()
    while "@font-face" in text:
        start = text.index("@font-face")
        text = text[:start] + text[text.index("}", start) + 1 :]
    (DOCS / name).write_text("\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n")


def panel(folder: Path, output: Path, *, at: int) -> RenderableType:
    """The live panel as it was at a step of a run that has ended."""
    about = json.loads((folder / "summary.json").read_text())
    keys = RunStarted.__dataclass_fields__.keys() & about.keys()
    saved = re.search(r"saved checkpoint .* in ([\d.]+) s \(training blocked (\d+) ms\)", output.read_text())
    assert saved is not None
    session = Session()
    with mock.patch("time.monotonic") as clock:  # the time that is left goes by the pace of the steps
        clock.return_value = 0.0
        session.add(RunStarted(**{key: about[key] for key in keys}, tokens_per_step=0))
        session.add(Validated(100, _validation(folder)[100], 0, 0.0))
        session.add(CheckpointSaved(100, "", float(saved[2]) / 1000, float(saved[1])))
        for line in (folder / "metrics.jsonl").read_text().splitlines()[:at]:
            row = json.loads(line)
            clock.return_value += row["step_s"]
            session.add(StepDone(**{key: row[key] for key in StepDone.__dataclass_fields__.keys() & row.keys()}))
        return run_panel(session, [], _WIDTH)


def _validation(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "validation.jsonl").read_text().splitlines())
    return {row["step"]: row["validation_loss"] for row in rows}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
