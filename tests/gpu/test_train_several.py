"""`atoll train` on two GPUs: the ways to spread a model over them learn the same."""

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
    """Losses of each step of a narrow llama3_8b on two GPUs, on Python's own modules."""
    name = "_".join(f"{key}-{value}" for key, value in options.items()) or "plain"
    out = folder / name
    settings = {
        **SMALL,
        "data.path": Path(json.__file__).parents[1] / "[a-e]*.py",
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


TOGETHER = {"data__isolate_documents": "false"}
PAIRS: dict[str, tuple[dict[str, object], dict[str, object], float]] = {
    "context": ({"parallel__shard": 2}, {"parallel__context": 2}, 0.01),
    "context_together": ({"parallel__shard": 2, **TOGETHER}, {"parallel__context": 2, **TOGETHER}, 0.01),
    "tensor": ({"parallel__shard": 2}, {"parallel__tensor": 2}, 0.01),
    "replicate": ({"parallel__shard": 2}, {"parallel__replicate": 2}, 0.01),
    "float8": ({"parallel__shard": 2}, {"parallel__shard": 2, "precision__float8": "tensorwise"}, 0.03),
}


@pytest.mark.parametrize("name", PAIRS)
def test_both_layouts_learn_the_same(tmp_path: Path, name: str) -> None:
    one, other, tolerance = PAIRS[name]
    expected = losses_of(tmp_path, **one)
    assert len(expected) == STEPS
    assert losses_of(tmp_path, **other) == pytest.approx(expected, rel=tolerance)
