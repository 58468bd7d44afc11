"""`atoll train` on two GPUs: every way to spread a model over them learns the same."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


LAYOUTS: dict[str, dict[str, object]] = {
    "apart": {"parallel__shard": 2},
    "context": {"parallel__context": 2},
    "tensor": {"parallel__tensor": 2},
    "replicate": {"parallel__replicate": 2},
    "float8": {"parallel__shard": 2, "precision__float8": "tensorwise"},
    "together": {"parallel__shard": 2, "data__isolate_documents": "false"},
    "context_together": {"parallel__context": 2, "data__isolate_documents": "false"},
}


def test_every_layout_learns_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = dict(zip(LAYOUTS, threads.map(lambda each: losses_of(tmp_path, **each), LAYOUTS.values()), strict=True))
    assert len(found["apart"]) == STEPS
    assert found["context"] == pytest.approx(found["apart"], rel=0.01)
    assert found["tensor"] == pytest.approx(found["apart"], rel=0.01)
    assert found["replicate"] == pytest.approx(found["apart"], rel=0.01)
    assert found["float8"] == pytest.approx(found["apart"], rel=0.03)
    assert found["context_together"] == pytest.approx(found["together"], rel=0.01)
