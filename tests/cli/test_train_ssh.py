"""``atoll train --infra ssh/NAME`` on hosts of the testbed: the command of a local run, with only the infra changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.fixtures import MakeBed, bed, make_bed
from testbed.hosts import Testbed

__all__ = ["bed", "make_bed"]

pytestmark = pytest.mark.timeout(300)
ATOLL = str(Path(sys.executable).parent / "atoll")
ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
name = "tiny"
model = {layers = 1, dim = 16, heads = 2, kv_heads = 2, hidden_dim = 32, max_seq_len = 32}
data = {path = "words/*.txt", tokenizer = "bytes", document_end = ""}
train = {steps = 4, seq_len = 16, global_batch = 4, micro_batch = 2}
schedule = {kind = "cosine", warmup = 1}
checkpoint = {every = 2}
metrics = {plot = false}
"""


def declare(bed: Testbed) -> None:
    hosts = json.dumps([host.name for host in bed.hosts])
    config = f"[ssh.lab]\nhosts = {hosts}\npython = {json.dumps(sys.executable)}\n"
    Path(os.environ["ATOLL_HOME"], "config.toml").write_text(config)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a recipe and its data."""
    folder = tmp_path / "project"
    (folder / "words").mkdir(parents=True)
    (folder / "tiny.toml").write_text(RECIPE)
    for number in range(4):
        (folder / "words" / f"{number}.txt").write_text(f"the tide comes in and goes out, {number} times\n\n" * 40)
    return folder


@pytest.fixture
def lab(bed: Testbed) -> Iterator[Testbed]:
    """Two hosts with a shared home, declared as ssh/lab; no process is left on them."""
    declare(bed)
    yield bed
    nothing_stays(bed)


def nothing_stays(bed: Testbed) -> None:
    deadline = time.monotonic() + 20
    while any(host.command_lines() for host in bed.hosts):
        assert time.monotonic() < deadline, [host.command_lines() for host in bed.hosts]
        time.sleep(0.1)


def command(*words: str) -> list[str]:
    return [ATOLL, "train", "--infra", "ssh/lab", *words]


def train(folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=250, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_two_hosts_train_and_the_results_can_be_fetched(lab: Testbed, project: Path) -> None:
    said = train(project, "tiny.toml", "--num-nodes", "2")
    assert "preflight: 2 hosts OK" in said
    assert "finished: 4 of 4 steps" in said
    assert not (project / "outputs").exists()
    assert "atoll train tiny.toml --nodes 2 --infra ssh/lab --train.steps 8" in said
    assert "--nodes 4" not in said, "there are two"
    (fetch,) = (line.strip() for line in said.splitlines() if "scp -r" in line)
    # scp looks for ssh where it was built to, not on PATH
    fetch = fetch.replace("scp -r", f"scp -S {shutil.which('ssh')} -r")
    subprocess.run(fetch, shell=True, check=True, cwd=project)
    assert steps_in(project / "outputs/tiny") == [1, 2, 3, 4]


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long  # tests/train/test_checkpoint.py has the refusal
def test_hosts_without_a_shared_folder_are_refused_at_the_start(make_bed: MakeBed, project: Path) -> None:
    bed = make_bed(2, shared_home=False)
    declare(bed)
    said = train(project, "tiny.toml", "--num-nodes", "2", code=100)
    assert "checkpoints need a place that every rank can write" in said
    assert "rank 1 on host h2 does not see what rank 0 wrote there" in said
    assert "a folder that all hosts mount" in said
    assert "s3://" in said
    assert "a rank failed" not in said  # the job's end says which and why
    assert "step 1/4" not in said
    assert "Traceback" not in said
    nothing_stays(bed)


def test_what_can_not_be_meant_is_refused_before_anything_is_sent(lab: Testbed, project: Path) -> None:
    assert "ssh/lab has 2 hosts" in train(project, "tiny.toml", "--nodes", "3", code=2)
    said = train(project, "tiny.toml", "--gpus", "L4:2", code=2)
    assert "L4:2 can't be had on h1: it has no GPU; --gpus none requests none" in said
    assert "ssh/lob: no group of that name" in train(project, "tiny.toml", "--infra", "ssh/lob", code=2)


@pytest.mark.long
def test_ctrl_c_saves_on_the_hosts_and_the_same_command_goes_on(lab: Testbed, project: Path) -> None:
    words = ("tiny.toml", "--nodes", "2", "--train.steps", "100000", "--checkpoint.every", "50000")
    said = []
    with subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=project
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if line.startswith("step 1/"):
                process.send_signal(signal.SIGINT)
    text = "".join(said)
    assert process.wait(60) == 101, text
    assert "Ctrl-C: saving a checkpoint, then stopping" in text
    assert "stopped at step" in text or "stopped: " in text
    (folder,) = (lab.folder / "home/sky/.atoll/runs").glob("project-*/sky_workdir")
    done = steps_in(folder / "outputs/tiny")[-1]
    assert not (folder / "outputs/tiny/stop").exists()
    assert f"step-{done:08}" in os.listdir(folder / "outputs/tiny/checkpoints")
    again = train(project, *words, "--train.steps", str(done + 2), "--allow-changes")
    assert f"resumed at step {done}" in again
    assert f"finished: {done + 2} of {done + 2} steps" in again
    elsewhere = train(project, "tiny.toml", "--nodes", "2", "--no-resume", "--train.steps", "1")
    assert "outputs/tiny-2" in elsewhere
    assert steps_in(folder / "outputs/tiny-2") == [1]


@pytest.mark.long
def test_the_austen_recipe_runs_on_two_hosts_with_only_the_infra_changed(lab: Testbed) -> None:
    words = ("examples/recipe/austen.toml", "--num-nodes", "2", "--train.steps", "2", "--schedule.warmup", "1")
    said = train(ROOT, *words, "--data.tokenizer", "bpe:300", "--train.validate_batches", "1")
    assert "data: 6 text files, 4.0 MB" in said
    assert "parameters · FSDP 2 · CPU" in said
    assert "finished: 2 of 2 steps" in said
    assert "sample:" in said
