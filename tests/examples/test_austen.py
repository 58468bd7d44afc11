"""The main job: the novels, and a short run of their recipe on two nodes: finished, begun again, killed half-way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.core.paths import is_locked

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "examples/austen/austen.toml"
ATOLL = "from atoll.cli.main import main; main()"
# The recipe as it is, but a run of seconds. A step is four sequences.
SMALL = (
    *("--data.tokenizer", "bpe:300", "--model.layers", "2", "--model.dim", "96", "--model.hidden_dim", "128"),
    *("--train.seq_len", "32", "--train.global_batch", "4", "--train.micro_batch", "2", "--schedule.warmup", "1"),
    *("--train.validate_batches", "2", "--metrics.sample_tokens", "20"),
)


def command(folder: Path, *more: str) -> list[str]:
    where = ["--train.output_dir", str(folder / "run"), "--data.cache", str(folder / "cache")]
    return [sys.executable, "-c", ATOLL, "train", RECIPE, "--nodes", "2", *SMALL, *where, *more]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "160"}


def train(folder: Path, *more: str) -> str:
    """What a run prints that finishes."""
    done = subprocess.run(
        command(folder, *more), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_done(folder: Path) -> list[dict[str, Any]]:
    """The objects of metrics.jsonl, without a line that is still being written."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def test_the_six_novels_are_whole() -> None:
    novels = {path.stem: path.read_bytes().decode() for path in (ROOT / "examples/austen/data").glob("*.txt")}
    assert {name: len(text) for name, text in novels.items()} == {
        "emma": 883_027,
        "mansfield_park": 883_278,
        "northanger_abbey": 433_410,
        "persuasion": 466_853,
        "pride_and_prejudice": 684_767,
        "sense_and_sensibility": 673_687,
    }
    assert sum(map(len, novels.values())) == 4_025_022
    assert novels["emma"].startswith("EMMA\n\nBy Jane Austen")
    assert novels["emma"].endswith("FINIS")
    assert "\r" not in "".join(novels.values())


def test_two_nodes_train_it(tmp_path: Path) -> None:
    shown = train(tmp_path, "--train.steps", "3")
    assert "data: 6 text files, 4.0 MB" in shown
    assert "the last 5.0% of each is held out" in shown
    assert "parameters · FSDP 2 · CPU" in shown
    assert all(f"step {step}/3   loss " in shown for step in (1, 2, 3))
    assert "step 3   validation loss " in shown
    assert "finished: 3 of 3 steps" in shown
    assert "sample:\nElizabeth was" in shown
    (longer,) = (line for line in shown.splitlines() if "train longer" in line)
    assert f"atoll train {RECIPE} --nodes 2 " in longer
    assert longer.endswith(" --train.steps 6")
    assert "--train.steps 3" not in longer
    assert "atoll generate" in shown
    assert "atoll export" in shown

    run = tmp_path / "run"
    lines = steps_done(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["first_sample"] for line in lines] == [0, 4, 8]
    assert [line["tokens"] for line in lines] == [128, 256, 384]
    assert lines[0]["loss"] > lines[2]["loss"]
    assert [json.loads(line)["step"] for line in (run / "validation.jsonl").read_text().splitlines()] == [3]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "checkpoints/step-00000003/manifest.json").is_file()
    assert (run / "tokenizer/tokenizer.json").is_file()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["world_size"]) == ("finished", 3, 2)
    assert summary["sample"].startswith("Elizabeth was")


@pytest.mark.long
def test_killed_half_way_it_goes_on_at_the_next_sample_and_then_has_nothing_to_do(tmp_path: Path) -> None:
    length = ("--train.steps", "120", "--checkpoint.every", "5")
    process = subprocess.Popen(
        command(tmp_path, *length),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    manifest = tmp_path / "run/checkpoints/step-00000005/manifest.json"
    deadline = time.monotonic() + 60
    while not manifest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None, "it ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert manifest.exists()
    while is_locked(tmp_path / "run/.lock"):  # its ranks notice, and end, within seconds
        assert time.monotonic() < deadline + 15
        time.sleep(0.02)

    killed_at = steps_done(tmp_path)[-1]["step"]
    assert 5 <= killed_at < 120
    resumed = train(tmp_path, *length)
    kept = range(5, killed_at + 1, 5)
    assert any(f"resumed at step {step}" in resumed for step in kept), resumed
    lines = steps_done(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 121))
    assert [line["first_sample"] for line in lines] == list(range(0, 480, 4))

    again = train(tmp_path, *length)
    assert "already finished: 120 of 120 steps" in again
    assert steps_done(tmp_path) == lines
