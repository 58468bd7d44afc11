"""Small runs for the tests of runs: a recipe of well under a second, and what a run left in its folder."""

from __future__ import annotations

import copy
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.train.metrics.journal import read
from atoll.train.runs import find_checkpoint

SEQ_LEN = 32

# Figures that depend on how fast a step was, or on what else the process held.
_TIMES = ("tokens_per_s", "tokens_per_s_per_gpu", "step_s", "data_wait_s", "memory_bytes", "step_spread_s", "mfu")


def text(num_documents: int = 40, *, seed: int = 0) -> str:
    """Ragged documents, with an empty line after each, of words that a model can learn a little about."""
    draw = random.Random(seed)
    words = ["sea", "wave", "tern", "reef", "palm", "moon", "tide", "sand"]
    return "".join(
        " ".join(draw.choice(words) for _ in range(draw.randint(1, 14))) + "\n\n" for _ in range(num_documents)
    )


def tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe as TOML has it; its data and its cache lie in ``folder``. ``train__steps=3`` sets ``[train] steps``."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text(text())
    recipe: dict[str, Any] = {
        "name": "small",
        "model": {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "hidden_dim": 64, "max_seq_len": SEQ_LEN},
        "data": {"path": str(path), "tokenizer": "bytes", "cache": str(folder / "cache"), "document_end": ""},
        "train": {
            "steps": 8,
            "output_dir": str(folder / "run"),
            "seq_len": SEQ_LEN,
            "global_batch": 4,
            "micro_batch": 2,
            "hang_timeout_s": 60.0,
        },
        "optimizer": {"lr": 3e-3},
        "schedule": {"kind": "cosine", "warmup": 2},
        "metrics": {"plot": False},
    }
    return changed(recipe, **changes)


def changed(recipe: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The recipe with other values; None takes a key out."""
    result = copy.deepcopy(dict(recipe))
    for key, value in changes.items():
        section, _, name = key.partition("__")
        where = result.setdefault(section, {}) if name else result
        if value is None:
            where.pop(name or section, None)
        else:
            where[name or section] = value
    return result


def train(recipe: Mapping[str, Any], *, events: list[Any] | None = None, **options: Any) -> Any:
    """Run it on the ranks that call this; the result."""
    from atoll.train.session import run

    torch.set_num_threads(1)
    return run(dict(recipe), report=(events if events is not None else []).append, **options)


def train_and_stop(recipe: Mapping[str, Any], after: int, how: str = "file", rank: int = 0) -> Any:
    """Run it, and stop it when step ``after`` is done, by ``"file"`` or by the signal of that name to ``rank``.

    It ends with the step that comes next.
    """
    from atoll.train.events import StepDone
    from atoll.train.session import run
    from atoll.train.stopping import STOP_FILE

    folder = Path(recipe["train"]["output_dir"])
    pids = _pids()

    def report(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == after:
            if how == "file":
                (folder / STOP_FILE).touch()
                time.sleep(0.6)  # it is looked for twice a second
            else:
                os.kill(pids[rank], getattr(signal, how))

    torch.set_num_threads(1)
    return run(dict(recipe), report=report)


def _pids() -> list[int]:
    """Of the ranks."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [os.getpid()]
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def steps(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of the steps of a run, without what differs from run to run."""
    rows = [row for row in read(Path(folder) / "metrics.jsonl") if "loss" in row]
    return [{key: value for key, value in row.items() if key not in _TIMES} for row in rows]


def losses(folder: str | os.PathLike[str]) -> list[float]:
    """The loss of each step."""
    return [row["loss"] for row in steps(folder)]


def weights(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The weights of the newest checkpoint of a run."""
    found = find_checkpoint(str(folder))
    assert found is not None, f"{folder} has no checkpoint"
    return {name: found.read(name) for name in found.shapes}


def saved_step(folder: str | os.PathLike[str]) -> int:
    """The step of the newest whole checkpoint of a run."""
    found = find_checkpoint(str(folder))
    assert found is not None, f"{folder} has no checkpoint"
    return found.step


def assert_same_run(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> None:
    """Losses, learning rates, norms, samples, tokens and final weights are equal, bit for bit."""
    first, second = steps(one), steps(other)
    assert [row["step"] for row in second] == list(range(1, len(first) + 1))
    assert first == second
    expected, found = weights(one), weights(other)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def write_toml(recipe: Mapping[str, Any], path: Path) -> Path:
    """The recipe as a TOML file."""
    from atoll.train.recipe.compare import resolved_toml
    from atoll.train.recipe.load import load_recipe

    path.write_text(resolved_toml(load_recipe(dict(recipe)).recipe))
    return path


def command(*arguments: str | os.PathLike[str]) -> list[str]:
    """``python -m atoll.train`` with arguments."""
    return [sys.executable, "-W", "ignore", "-m", "atoll.train", *map(os.fspath, arguments)]


def environment(**more: str) -> dict[str, str]:
    """For processes that are started: no rank of anything yet."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PYTEST_"))}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}


def spawn(*arguments: str | os.PathLike[str], **more: str) -> subprocess.Popen[str]:
    """Start ``python -m atoll.train``; what it says is one stream."""
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**more),
    )
