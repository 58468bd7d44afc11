"""``sky.DistributedSampler``, with torch's own sampler as the oracle, and the order behind it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from atoll.core.context import CallContext, Peer, current, set_current
from atoll.core.errors import UsageError
from atoll.functions.sampler import DistributedSampler, _splitmix64, permutation

# A busy machine may take its time for any example.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def on_ranks(world: int, function: Callable[[], Any]) -> list[Any]:
    """What ``function`` returns on each rank of a call."""
    before = current()
    results = []
    try:
        for rank in range(world):
            peers = (Peer(0, "127.0.0.1"),)
            set_current(CallContext(0, 1, rank, rank, world, world, "127.0.0.1", 1, peers, None, 0, "job", seed=7))
            results.append(function())
    finally:
        set_current(before)
    return results


def torch_parts(n: int, world: int, drop_last: bool, shuffle: bool, epoch: int = 0) -> list[list[int]]:
    parts = []
    for rank in range(world):
        sampler: TorchSampler[int] = TorchSampler(range(n), world, rank, shuffle, drop_last=drop_last)
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
        assert len(sampler) == len(parts[-1])
    return parts


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", range(1, 10))
def test_unshuffled_equals_torch_index_for_index(world: int, drop_last: bool) -> None:
    for n in range(41):
        samplers = on_ranks(world, lambda n=n: DistributedSampler(range(n), shuffle=False, drop_last=drop_last))
        expected = torch_parts(n, world, drop_last, shuffle=False)
        assert [list(sampler) for sampler in samplers] == expected
        assert [len(sampler) for sampler in samplers] == [len(part) for part in expected]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", range(1, 10))
def test_shuffled_has_torchs_lengths_and_cover(world: int, drop_last: bool) -> None:
    for n in range(41):
        samplers = on_ranks(world, lambda n=n: DistributedSampler(range(n), drop_last=drop_last))
        parts = [list(sampler) for sampler in samplers]
        expected = torch_parts(n, world, drop_last, shuffle=True)
        assert [len(part) for part in parts] == [len(part) for part in expected] == [len(s) for s in samplers]
        # The multiset of how often an index occurs is the same; which index is repeated or dropped is the order's.
        mine = np.bincount([i for part in parts for i in part], minlength=n)
        torchs = np.bincount([i for part in expected for i in part], minlength=n)
        assert sorted(mine) == sorted(torchs)
        assert [list(sampler) for sampler in samplers] == parts


@calm
@given(n=st.integers(0, 60), world=st.integers(1, 9), seed=st.one_of(st.none(), st.integers()), epoch=st.integers(0))
def test_ranks_are_disjoint_apart_from_padding(n: int, world: int, seed: int | None, epoch: int) -> None:
    samplers = on_ranks(world, lambda: DistributedSampler(range(n), seed=seed))
    for sampler in samplers:
        sampler.set_epoch(epoch)
    dealt = [i for row in zip(*samplers, strict=True) for i in row]  # the epoch's order, continued from its beginning
    assert sorted(dealt[:n]) == list(range(n))
    assert dealt[n:] == [dealt[i % n] for i in range(n, len(dealt))]


def test_epochs_and_seeds_give_different_orders() -> None:
    sampler = DistributedSampler(range(30))
    orders = set()
    for epoch in range(5):
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    orders.add(tuple(DistributedSampler(range(30), seed=1)))
    assert len(orders) == 6
    sampler.set_epoch(0)
    assert list(sampler) == list(DistributedSampler(range(30)))


def test_seed_none_differs_between_samplers_of_a_call() -> None:
    first, second = on_ranks(1, lambda: [list(DistributedSampler(range(30), seed=None)) for _ in range(2)])[0]
    assert first != second
    assert sorted(first) == sorted(second)


def test_set_epoch_after_iter_leaves_the_running_epoch_alone() -> None:
    sampler = DistributedSampler(range(20))
    expected = list(sampler)
    running = iter(sampler)
    sampler.set_epoch(1)
    assert list(running) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_loader_covers_the_dataset(num_workers: int) -> None:
    dataset = TensorDataset(torch.arange(21))

    def rows() -> list[int]:
        loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), num_workers=num_workers)
        assert len(loader) == 3
        return [int(i) for (batch,) in loader for i in batch]

    parts = on_ranks(2, rows)
    assert [len(part) for part in parts] == [11, 11]
    assert set(parts[0]) | set(parts[1]) == set(range(21))


def test_works_with_a_hugging_face_dataset() -> None:
    table = datasets.Dataset.from_dict({"i": list(range(10))}).with_format("torch")
    parts = on_ranks(3, lambda: [int(row["i"]) for row in DataLoader(table, None, sampler=DistributedSampler(table))])
    assert {i for part in parts for i in part} == set(range(10))
    assert [len(part) for part in parts] == [4, 4, 4]


def test_pickles_with_its_rank() -> None:
    sampler = on_ranks(3, lambda: DistributedSampler(range(10), shuffle=False))[2]
    copied = pickle.loads(pickle.dumps(sampler))
    assert list(copied) == list(sampler) == [2, 5, 8, 1]
    assert (copied.rank, copied.num_replicas, copied.total_size) == (2, 3, 12)


def test_made_outside_a_pool_it_takes_the_place_of_the_task_it_is_sent_to() -> None:
    sent = pickle.dumps(DistributedSampler(range(10), shuffle=False))
    assert list(pickle.loads(sent)) == list(range(10))
    assert on_ranks(2, lambda: list(pickle.loads(sent))) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("dataset", "advice"),
    [
        ((i for i in range(3)), "generator has none .* pass list"),
        (None, "NoneType has none"),
        (Endless(), "Endless is an iterable dataset: a DataLoader takes no sampler"),
        (datasets.Dataset.from_dict({"i": [1]}).to_iterable_dataset(), "is an iterable dataset"),
        (DataLoader([1]), r"pass loader\.dataset"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_datasets_it_cannot_deal_are_refused(dataset: Any, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        DistributedSampler(dataset)


def test_torchs_positional_rank_and_world_are_refused() -> None:
    with pytest.raises(UsageError, match="rank and world size come from the pool"):
        DistributedSampler([1, 2], 4, 0)


# --- the order ---


@calm
@given(n=st.integers(0, 300), start=st.integers(0, 2**64 - 1))
def test_order_is_the_same_with_and_without_numpy(n: int, start: int) -> None:
    numbers = _splitmix64(np.arange(n, dtype=np.uint64), start)
    assert numbers.tolist() == [_splitmix64(i, start) for i in range(n)]
    order = permutation(n, start)
    assert isinstance(order, array)
    assert sorted(order) == list(range(n))


def test_order_agrees_with_a_process_that_has_no_numpy() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from atoll.functions.sampler import permutation; print(*permutation(20_000, 3, 1))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert [int(i) for i in out.split()] == list(permutation(20_000, 3, 1))


def test_order_never_changes_between_releases() -> None:
    # A run that is resumed under a newer Atoll must find its data in the order it left it.
    assert list(permutation(10, 0)) == [3, 6, 4, 5, 2, 8, 1, 7, 9, 0]
    assert list(permutation(10, 0, 1)) == [3, 4, 8, 2, 1, 7, 5, 6, 9, 0]


def test_order_is_fair() -> None:
    # 120 orders of five elements, 24,000 draws: chi-squared with 119 degrees of freedom, 99.99 % below 185.
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(24_000):
        order = tuple(permutation(5, seed))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 120
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 185
