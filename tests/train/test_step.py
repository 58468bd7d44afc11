"""What a step does on the host: it waits for nothing but the facts of the step before, and collects no garbage."""

from __future__ import annotations

import gc
import threading
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ranks
import small
from atoll.train.events import StepDone
from atoll.train.loop import GarbageCollection

pytestmark = pytest.mark.usefixtures("torch_in_process")

# On a GPU, each of these waits until it has done all that was queued before.
_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
_OPERATORS = {
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.equal.default,
    torch.ops.aten._local_scalar_dense.default,
}


class _Waits(TorchDispatchMode):
    """Counts, by the function of Atoll's that asked, what reads a tensor on the main thread within ``train_step``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.by: Counter[str] = Counter()
        for name in _METHODS:
            patch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, method: Any) -> Any:
        def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self._count()
            return method(tensor, *args, **kwargs)

        return counted

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator in _OPERATORS:
            self._count()
        return operator(*args, **(kwargs or {}))

    def _count(self) -> None:
        if threading.current_thread() is threading.main_thread():
            frames = [frame for frame in traceback.extract_stack() if "atoll/train" in frame.filename]
            if any(frame.name == "train_step" for frame in frames):
                self.by[f"{Path(frames[-1].filename).name}:{frames[-1].name}"] += 1


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_step_waits_for_the_facts_of_the_step_before_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tree = small.tree(tmp_path, optimizer__kind=kind, checkpoint__every=4, train__steps=8)
    with _Waits(monkeypatch) as waits:
        small.train(tree)
    # Of eight, the fourth and the eighth are waited for at their end: they are saved.
    assert waits.by == {"facts.py:read": 6}


def test_garbage_is_collected_at_the_same_steps_on_every_rank(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=6, parallel__shard=2)
    for collected in ranks.run(2, _collections, tree):
        assert collected == [2, 4, 6]


def _collections(recipe: dict[str, Any]) -> list[int]:
    GarbageCollection.EVERY = 2
    found: list[int] = []
    at = GarbageCollection.collect_at

    def collect_at(self: GarbageCollection, step: int) -> None:
        before = gc.get_stats()[1]["collections"]
        at(self, step)
        if gc.get_stats()[1]["collections"] > before:
            found.append(step)

    GarbageCollection.collect_at = collect_at  # type: ignore[method-assign]
    automatic: list[bool] = []

    class Events(list[Any]):
        def append(self, event: Any) -> None:
            if isinstance(event, StepDone):
                automatic.append(gc.isenabled())

    small.train(recipe, events=Events())
    assert not any(automatic)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    return found
