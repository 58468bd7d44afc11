"""Small runs for the tests of runs: a recipe of well under a second, and what a run left in its folder."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import leaks
import ranks
from atoll.train.metrics.journal import read
from atoll.train.saved import find_checkpoint
from atoll.train.weight_source import WeightSource

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


def source_of(model: nn.Module, **others: Tensor) -> WeightSource:
    """The weights of a model that is in memory; ``others`` take the place of some."""
    tensors = {**dict(model.named_parameters()), **others}
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    return WeightSource("the model", model.config, shapes, tensors.__getitem__)  # type: ignore[arg-type]


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
    from atoll.train.trainer import run

    torch.set_num_threads(1)
    return run(dict(recipe), report=(events if events is not None else []).append, **options)


def train_and_stop(recipe: Mapping[str, Any], after: int, how: str = "file", rank: int = 0) -> Any:
    """Run it, and stop it when step ``after`` is done, by ``"file"`` or by the signal of that name to ``rank``.

    It ends with the step that comes next.
    """
    from atoll.train.events import StepDone
    from atoll.train.stop import STOP_FILE
    from atoll.train.trainer import run

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


def corpus(recipe: Mapping[str, Any]) -> Any:
    """The ``Corpus`` that a run of the recipe reads."""
    from atoll.train.corpus import open_corpus, with_vocabulary
    from atoll.train.data.prepare import prepare
    from atoll.train.recipe.load import load_recipe

    loaded = load_recipe(dict(recipe)).recipe
    prepared = prepare(loaded.data, seq_len=SEQ_LEN, progress=lambda _: None, note=lambda _: None)
    assert prepared.tokenizer is not None
    return open_corpus(with_vocabulary(loaded, prepared.tokenizer.vocab_size), prepared)


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
    return found.manifest.step


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


def environment(**more: str) -> dict[str, str]:
    """For processes that are started: no rank of anything yet."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PYTEST_"))}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}


class Forked:
    """``python -m atoll.train`` as one process or several, forked from the server of ranks: torch is there at once.

    Each has its own arguments and the variables that a launcher would give it. ``pids`` by rank.
    """

    def __init__(self, folder: Path, arguments: Sequence[Sequence[str | Path]], variables: Sequence[Mapping[str, str]]):
        self._said = [folder / f"said-{uuid.uuid4().hex}" for _ in arguments]
        texts = [list(map(str, each)) for each in arguments]
        self._gang = ranks.start(
            len(arguments), _be_a_rank, texts, list(map(dict, variables)), self._said, patient=True, group=False
        )
        self.pids = self._gang.pids

    def is_running(self) -> bool:
        """Whether a process of it has not ended."""
        return any(leaks.is_running(pid) for pid in self.pids)

    def finish(self, timeout: float = 90.0) -> list[tuple[int, str]]:
        """By rank, the exit code and what it said."""
        outcomes = self._gang.outcomes(timeout)
        codes = [value if kind == "returned" else (kind, value) for kind, value in outcomes]
        return [(code, path.read_text()) for code, path in zip(codes, self._said, strict=True)]


def _be_a_rank(arguments: list[list[str]], variables: list[dict[str, str]], said: list[Path]) -> int:
    from atoll.train.__main__ import main

    rank = int(os.environ["RANK"])
    places = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name in [name for name in os.environ if name in places or name.startswith("SLURM_")]:
        del os.environ[name]
    os.environ.update(variables[rank])
    sys.stdout = sys.stderr = said[rank].open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    return main(arguments[rank])


def fork(folder: Path, *arguments: str | Path) -> Forked:
    """``python -m atoll.train`` by itself; see ``Forked``."""
    return Forked(folder, [arguments], [{}])
