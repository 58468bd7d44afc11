"""`atoll train` on two GPUs: every way to spread a model over them learns the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    *(pytest.mark.gpu, pytest.mark.serial, pytest.mark.timeout(300)),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
STEPS = 6
SMALL = {
    "model.layers": 3,
    "model.vocab_size": 8192,
    "train.seq_len": 2048,
    "train.global_batch": 2,
    "train.micro_batch": 1,
    "train.steps": STEPS,
    "schedule.warmup": 2,
    "checkpoint.at_end": "false",
    "metrics.plot": "false",
}


def losses_of(folder: Path, **options: object) -> list[float]:
    """Losses of each step of a narrow llama3_8b on two GPUs, on the text of its own folder of data."""
    name = "_".join(f"{key}-{value}" for key, value in options.items()) or "plain"
    out = folder / name
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("\n\n".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))) * 20)
    settings = {
        **SMALL,
        "data.path": text,
        "data.tokenizer": "bytes",
        "train.output_dir": out,
        **{key.replace("__", "."): value for key, value in options.items()},
    }
    command = [sys.executable, "-m", "atoll", "train", "llama3_8b", "--nproc", "2"]
    command += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_every_layout_learns_the_same(tmp_path: Path) -> None:
    apart = losses_of(tmp_path, parallel__shard=2)
    assert len(apart) == STEPS
    assert losses_of(tmp_path, parallel__context=2) == pytest.approx(apart, rel=0.01)
    assert losses_of(tmp_path, parallel__tensor=2) == pytest.approx(apart, rel=0.01)
    assert losses_of(tmp_path, parallel__replicate=2) == pytest.approx(apart, rel=0.01)
    assert losses_of(tmp_path, parallel__shard=2, precision__float8="tensorwise") == pytest.approx(apart, rel=0.03)
    together = losses_of(tmp_path, parallel__shard=2, data__isolate_documents="false")
    found = losses_of(tmp_path, parallel__context=2, data__isolate_documents="false")
    assert found == pytest.approx(together, rel=0.01)
