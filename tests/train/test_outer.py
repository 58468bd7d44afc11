"""The seams by which runs train one model together: weights exchanged at some steps, samples leased by rank 0."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ranks
import small
from atoll.train.dtensor import local
from atoll.train.events import StepDone
from atoll.train.outer import Counter, OuterSync, SampleSource

pytestmark = pytest.mark.usefixtures("torch_in_process")


class Averaging(OuterSync):
    """Every third step: weights go on from where the window began, by momentum along the mean way of all islands.

    Args:
        store: where islands exchange what they have; None is one island.
    """

    EVERY, RATE, MOMENTUM = 3, 0.7, 0.5

    def __init__(self, store: dist.Store | None = None, island: int = 0, islands: int = 1) -> None:
        self._store, self._island, self._islands = store, island, islands
        self._kept: dict[str, Tensor] = {}
        self._tokens = self._windows = 0

    def tensors(self, masters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not self._kept:
            self._kept = {f"start.{name}": master.detach().clone() for name, master in masters.items()}
            self._kept |= {f"momentum.{name}": torch.zeros_like(master) for name, master in masters.items()}
        return self._kept

    def state(self) -> dict[str, Any]:
        return {"tokens": self._tokens, "windows": self._windows}

    def load(self, state: dict[str, Any]) -> None:
        self._tokens, self._windows = state["tokens"], state["windows"]

    def begin(self, step: int, tokens: int, masters: Mapping[str, Tensor]) -> None:
        assert (step == 0) == (tokens == 0)
        self.tensors(masters)

    def due(self, step: int) -> bool:
        return step % self.EVERY == 0

    @torch.no_grad()
    def after_step(self, step: int, tokens: int, masters: Mapping[str, Tensor]) -> None:
        self._tokens += tokens
        if not self.due(step):
            return
        for name, way in self._mean_way(masters).items():
            start, momentum = local(self._kept[f"start.{name}"]), local(self._kept[f"momentum.{name}"])
            momentum.mul_(self.MOMENTUM).add_(way)
            start.add_(momentum, alpha=self.RATE)
            local(masters[name]).copy_(start)
        self._tokens, self._windows = 0, self._windows + 1

    def _mean_way(self, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """How far weights have come in this window, each island's counting by its tokens."""
        ways = {name: local(master) - local(self._kept[f"start.{name}"]) for name, master in masters.items()}
        if self._store is None:
            return ways
        told = io.BytesIO()
        torch.save((self._tokens, ways), told)
        self._store.set(f"{self._windows}-{self._island}", told.getvalue())
        keys = [f"{self._windows}-{island}" for island in range(self._islands)]
        heard = [torch.load(io.BytesIO(self._store.get(key))) for key in keys]
        whole = sum(tokens for tokens, _ in heard)
        return {name: sum(way[name] * (tokens / whole) for tokens, way in heard) for name in ways}


def _island(recipe: dict[str, Any], number: int, store: Path, stop_after: int | None) -> dict[str, Tensor]:
    """A run of one rank, which exchanges weights with the other island; the weights at its end."""
    from atoll.train.trainer import run

    folder = Path(recipe["train"]["output_dir"])

    def report(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == stop_after:
            (folder / "stop").touch()
            time.sleep(0.6)  # it is looked for twice a second

    torch.set_num_threads(1)
    outer = Averaging(dist.FileStore(str(store), 2), number, 2)
    first = 1000 * number  # each island trains on other samples
    result = run(recipe, report=report, outer=outer, source=lambda _: Counter(start=first))
    assert result.step == (recipe["train"]["steps"] if stop_after is None else stop_after + 1)
    return small.weights(folder)


def _two_islands(trees: list[dict[str, Any]], store: Path, stop_after: int | None = None) -> list[dict[str, Tensor]]:
    gangs = [ranks.start(1, _island, tree, number, store, stop_after, group=False) for number, tree in enumerate(trees)]
    return [gang.wait()[0] for gang in gangs]


def _trees(folder: Path, name: str) -> list[dict[str, Any]]:
    each = small.tree(folder, train__steps=9, train__global_batch=2, checkpoint__every=0)
    return [small.changed(each, train__output_dir=str(folder / f"{name}{number}")) for number in range(2)]


def test_two_runs_exchange_weights_and_resume_in_the_middle_of_a_window(tmp_path: Path) -> None:
    whole, stopped = _trees(tmp_path, "whole"), _trees(tmp_path, "stopped")
    one, two = _two_islands(whole, tmp_path / "store")
    assert all(torch.equal(one[name], two[name]) for name in one), "step 9 ends a window"
    assert small.losses(tmp_path / "whole0") != small.losses(tmp_path / "whole1")
    # Stopped after step 5: one window is done, of the next two steps.
    halves = _two_islands(stopped, tmp_path / "other", stop_after=4)
    assert not all(torch.equal(halves[0][name], halves[1][name]) for name in one)
    for resumed in _two_islands(stopped, tmp_path / "other"):
        assert all(torch.equal(resumed[name], one[name]) for name in one)


def test_its_state_is_sharded_and_goes_over_to_another_mesh(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=8, precision__compute="fp64", checkpoint__every=4)
    expected = _weights(small.changed(tree, train__output_dir=str(tmp_path / "alone")))
    small.train(small.changed(tree, train__output_dir=str(tmp_path / "none")))
    assert not torch.equal(small.weights(tmp_path / "none")["head.weight"], expected["head.weight"])
    sharded = small.changed(tree, parallel__shard=2)
    ranks.run(2, _stopped_at_four, sharded)
    for name, weight in _weights(tree).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-11, atol=1e-13)


def _weights(recipe: dict[str, Any]) -> dict[str, Tensor]:
    small.train(recipe, outer=Averaging())
    return small.weights(recipe["train"]["output_dir"])


def _stopped_at_four(recipe: dict[str, Any]) -> None:
    from atoll.train.trainer import run

    class Ended(Exception):
        pass

    class Once(Averaging):
        def after_step(self, step: int, tokens: int, masters: Mapping[str, Tensor]) -> None:
            if step == 6:
                raise Ended
            super().after_step(step, tokens, masters)

    with pytest.raises(Ended):
        run(recipe, report=lambda event: None, outer=Once())


class Leased(SampleSource):
    """Rank 0 leases blocks of six samples, every second one; the others are another run's."""

    BLOCK = 6

    def __init__(self, limit: int | None) -> None:
        self._limit, self._handed_out, self._consumed = limit, 0, 0
        self.asked: list[range] = []

    def next_range(self, count: int) -> range:
        assert threading.current_thread() is threading.main_thread()
        lease: list[Any] = [None]
        if dist.get_rank() == 0:
            inside = self._handed_out % self.BLOCK
            first = 2 * (self._handed_out - inside) + inside
            left = count if self._limit is None else self._limit - self._handed_out
            lease = [(first, min(count, self.BLOCK - inside, left))]
        dist.broadcast_object_list(lease)
        first, length = lease[0]
        self._handed_out += length
        return range(first, first + length)

    def commit(self, numbers: range) -> None:
        self._consumed += len(numbers)

    @property
    def consumed(self) -> int:
        return self._consumed

    def state(self) -> dict[str, Any]:
        return {"consumed": self._consumed}

    def load(self, state: dict[str, Any]) -> None:
        self._consumed = self._handed_out = state["consumed"]


def test_samples_are_leased_by_rank_0_and_resume_at_the_next(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=6, checkpoint__every=3, parallel__shard=2)
    # Blocks of six in steps of four are a step of four and one of two.
    leased = [(0, 4), (4, 2), (12, 4), (16, 2), (24, 4), (28, 2)]
    assert ranks.run(2, _leased, tree, None)[0] == leased
    again = small.changed(tree, train__output_dir=str(tmp_path / "again"))
    assert ranks.run(2, _leased, again, 4)[0] == leased[:5]
    assert ranks.run(2, _leased, again, None)[0] == leased[5:]
    small.assert_same_run(tmp_path / "run", tmp_path / "again")


def _leased(recipe: dict[str, Any], stop_after: int | None) -> list[tuple[int, int]]:
    """The samples of each step of this session, as rank 0 was told."""
    from atoll.train.trainer import run

    found: list[tuple[int, int]] = []

    def report(event: Any) -> None:
        if isinstance(event, StepDone):
            found.append((event.first_sample, event.num_samples))
            if event.step == stop_after:
                (Path(recipe["train"]["output_dir"]) / "stop").touch()
                time.sleep(0.6)

    torch.set_num_threads(1)
    run(recipe, report=report, source=Leased)
    return found
