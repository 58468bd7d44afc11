"""metrics.jsonl: one line a step, over kills, resumes and torn lines."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.train.events import CheckpointSaved, Note, StepDone, Validated
from atoll.train.metrics.journal import STEPS, VALIDATIONS, Journal, read

KEYS = {
    "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "tokens_per_s_per_gpu", "step_s", "data_wait_s",
    "memory_bytes", "mfu", "samples", "first_sample", "num_samples", "step_spread_s",
}  # fmt: skip


def done(step: int, loss: float = 2.5, lr: float = 1e-3) -> StepDone:
    return StepDone(
        step, 100 * step, 8 * step, loss, lr, 1.0, 50.0, 25.0, 2.0, 0.1, 1 << 20, None, 0.0, 8 * step - 8, 8
    )


def write(path: Path, first_step: int, last: int, lr: float = 1e-3) -> None:
    journal = Journal(path.parent, first_step)
    for step in range(first_step + 1, last + 1):
        journal(done(step, lr=lr))
        if step % 2 == 0:
            journal(Validated(step, 3.0, 640, 0.2))
    journal.close()


def test_each_step_is_one_object_with_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(tmp_path, 0)
    journal(Note("nothing for the file"))
    journal(done(1))
    assert len(read(path)) == 1, "a line is there before the next event"
    journal(Validated(1, 3.25, 640, 0.5))
    journal(CheckpointSaved(1, "somewhere", 0.0, 0.1))
    journal.close()
    (step,) = read(path)
    (validation,) = read(tmp_path / VALIDATIONS)
    assert set(step) == KEYS
    assert (step["step"], step["loss"], step["samples"], step["first_sample"]) == (1, 2.5, 8, 0)
    assert validation == {"step": 1, "validation_loss": 3.25, "validation_tokens": 640, "validation_s": 0.5}


def test_a_resume_replaces_redone_steps_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 10)
    path.chmod(0o640)
    before = path.read_bytes()
    write(path, 6, 12, lr=5e-4)
    steps = read(path)
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert [row["step"] for row in read(tmp_path / VALIDATIONS)] == [2, 4, 6, 8, 10, 12]
    assert [row["lr"] for row in steps] == [1e-3] * 6 + [5e-4] * 6
    assert before.startswith(path.read_bytes().split(b'{"step":7')[0]), "kept lines are the same bytes"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == [STEPS, VALIDATIONS]


@pytest.mark.parametrize("torn", [b'{"step":4,"lo', b'{"step":4}', b"\0" * 40, b"\0\0\n", b'{"step":4,"lo\n[1]\n'])
def test_a_torn_end_is_repaired(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 3)
    with path.open("ab") as file:
        file.write(torn)
    assert [row["step"] for row in read(path)] == [1, 2, 3]
    write(path, 3, 4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_figures_that_json_lacks_become_null(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    journal(done(1, loss=math.nan))
    journal(Validated(1, math.inf, 1, 0.0))
    journal.close()

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    rows = [
        json.loads(line, parse_constant=refuse)
        for name in (STEPS, VALIDATIONS)
        for line in (tmp_path / name).read_text().splitlines()
    ]
    assert rows[0]["loss"] is None
    assert rows[0]["nonfinite"] is True
    assert rows[0]["lr"] == 1e-3
    assert rows[1]["validation_loss"] is None


def test_no_file_holds_nothing(tmp_path: Path) -> None:
    assert read(tmp_path / "metrics.jsonl") == []


def test_a_kill_loses_no_line(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from atoll.train.metrics.journal import Journal\n"
        "from atoll.train.events import Validated\n"
        "journal = Journal(sys.argv[1], 0)\n"
        "for step in range(50): journal(Validated(step, 1.0, 1, 0.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode
    assert code == -signal.SIGKILL
    assert [row["step"] for row in read(tmp_path / VALIDATIONS)] == list(range(50))


def test_a_resume_and_a_picture_read_no_more_of_a_long_journal_than_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / STEPS
    write(path, 0, 1)
    line = path.read_text()
    num_steps = 30_000
    rows = [line.replace('"step":1,', f'"step":{step},') for step in range(1, num_steps + 1)]
    rows[700] = rows[700].replace('"loss":2.5', '"loss":null,"nonfinite":true')
    path.write_text("".join(rows))
    parsed: list[bytes] = []
    real = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or real(text))
    Journal(tmp_path, num_steps - 3).close()
    assert len(parsed) < 10, "three lines go, and the one before them stays"
    parsed.clear()
    found = [row["step"] for row in read(path, at_most=100)]
    assert len(parsed) < 200
    assert 90 < len(found) < 200
    assert (found[0], found[-1], 701 in found) == (1, num_steps - 3, True)
    assert found == sorted(set(found))


def test_lines_that_a_full_disk_refuses_are_written_once_it_takes_them(tmp_path: Path) -> None:
    notes: list[str] = []
    journal = Journal(tmp_path, 0, notes.append)
    journal(done(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / STEPS).stat().st_size
    try:
        for limit in (size + 7, size + 9):  # lines are torn, and more than one
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            journal(done(2 + limit - size))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal(CheckpointSaved(2, "there", 0.1, 0.2))
    journal(done(20))
    journal.close()
    assert [row["step"] for row in map(json.loads, (tmp_path / STEPS).read_text().splitlines())] == [1, 9, 11, 20]
    assert notes == [f"{tmp_path / STEPS}: File too large: its lines are held back until there is room"]
