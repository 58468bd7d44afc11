"""``sky.shard``: parts are disjoint, complete, aligned, and of the type that came in."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections import OrderedDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from atoll.core.context import CallContext, Peer, current, set_current
from atoll.core.errors import ConfigError, UsageError
from atoll.functions.data import shard

Batch = namedtuple("Batch", "x y")

# A busy machine may take its time for any example.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
worlds = st.integers(1, 9)
lengths = st.integers(0, 60)


def context(rank: int, world: int, seed: int = 7) -> CallContext:
    return CallContext(
        job_id="job",
        node=rank,
        total_nodes=world,
        rank=rank,
        local_rank=0,
        world_size=world,
        local_world_size=1,
        head_addr="127.0.0.1",
        head_port=1,
        peers=tuple(Peer(node, "127.0.0.1") for node in range(world)),
        accelerator=None,
        accelerators=0,
        seed=seed,
    )


def on_ranks(world: int, function: Callable[[], Any], seed: int = 7) -> list[Any]:
    """What ``function`` returns on each rank of a call."""
    before = current()
    results = []
    try:
        for rank in range(world):
            set_current(context(rank, world, seed))
            results.append(function())
    finally:
        set_current(before)
    return results


@pytest.fixture
def rank_1_of_3() -> Iterator[None]:
    before = current()
    set_current(context(1, 3))
    yield
    set_current(before)


# --- disjoint, complete, aligned ---


@calm
@given(n=lengths, world=worlds, shuffle=st.booleans(), seed=st.one_of(st.none(), st.integers()))
def test_parts_are_disjoint_and_complete(n: int, world: int, shuffle: bool, seed: int | None) -> None:
    parts = on_ranks(world, lambda: shard(list(range(n)), shuffle=shuffle, seed=seed))
    assert sorted(i for part in parts for i in part) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if not shuffle:
        assert parts == [list(range(n))[rank::world] for rank in range(world)]


@calm
@given(n=lengths, world=worlds, shuffle=st.booleans())
def test_drop_last_gives_equal_blocks(n: int, world: int, shuffle: bool) -> None:
    parts = on_ranks(world, lambda: shard(list(range(n)), shuffle=shuffle, drop_last=True))
    block = n // world
    assert [len(part) for part in parts] == [block] * world
    taken = [i for part in parts for i in part]
    assert len(set(taken)) == len(taken)
    if not shuffle:
        assert taken == list(range(block * world))


@calm
@given(n=lengths, world=worlds, drop_last=st.booleans(), seed=st.one_of(st.none(), st.integers(-(2**70), 2**70)))
def test_all_types_of_one_call_stay_aligned(n: int, world: int, drop_last: bool, seed: int | None) -> None:
    whole = np.arange(n)
    arrays = (
        whole,
        whole.tolist(),
        torch.arange(n),
        pd.Series(whole, index=whole + 100),
        range(n),
        {"a": whole, "b": tuple(whole.tolist())},
        Batch(whole, array("i", whole.tolist())),
        datasets.Dataset.from_dict({"i": whole.tolist()}),
        Subset(whole.tolist(), range(n)),
        deque(whole.tolist()),
    )
    for part in on_ranks(world, lambda: shard(*arrays, shuffle=True, seed=seed, drop_last=drop_last)):
        x, as_list, tensor, series, numbers, record, batch, table, subset, queue = part
        expected = x.tolist()
        assert as_list == numbers == queue == expected
        assert tensor.tolist() == series.tolist() == expected
        assert (series.index - 100).tolist() == expected
        assert record["a"].tolist() == list(record["b"]) == expected
        assert batch.x.tolist() == list(batch.y) == expected
        assert list(table["i"]) == [subset[i] for i in range(len(subset))] == expected


def test_equal_seeds_align_separate_calls_and_seeds_differ() -> None:
    def both() -> tuple[Any, Any, Any]:
        x = list(range(50))
        return shard(x, shuffle=True, seed=1), shard(np.array(x), shuffle=True, seed=1), shard(x, shuffle=True, seed=2)

    for first, again, other in on_ranks(4, both):
        assert first == again.tolist()
        assert first != other


def test_seed_none_agrees_between_ranks_and_differs_between_shards_and_calls() -> None:
    def two() -> tuple[list[int], list[int]]:
        x = list(range(40))
        return shard(x, shuffle=True, seed=None), shard(x, shuffle=True, seed=None)

    parts = on_ranks(4, two)
    for draw in (0, 1):
        assert sorted(i for part in parts for i in part[draw]) == list(range(40))
    assert parts[0][0] != parts[0][1]
    assert on_ranks(4, two) == parts  # the draws of a call are a function of its seed
    assert on_ranks(4, two, seed=8) != parts


def test_shuffle_order_is_independent_of_the_world() -> None:
    whole = shard(list(range(23)), shuffle=True, seed=3)
    for world in range(1, 6):
        parts = on_ranks(world, lambda: shard(list(range(23)), shuffle=True, seed=3))
        assert parts == [whole[rank::world] for rank in range(world)]


# --- outside a pool ---


def test_outside_a_pool_the_whole_data() -> None:
    x = np.arange(6)
    assert shard(x).tolist() == x.tolist()
    assert shard([1, 2, 3], drop_last=True) == [1, 2, 3]
    assert shard("abc", (1, 2, 3)) == ("abc", (1, 2, 3))
    shuffled = shard(x, shuffle=True, seed=5)
    assert sorted(shuffled) == x.tolist() != shuffled.tolist()
    assert sorted(shard(x, shuffle=True, seed=None)) == x.tolist()


# --- types ---


class Tagged(np.ndarray):
    pass


class Named(list):
    def __init__(self, name: str, items: list[int]) -> None:
        super().__init__(items)
        self.name = name


def make_memmap(n: int, folder: Path) -> np.memmap:
    data = np.memmap(folder / "data", dtype=np.int64, mode="w+", shape=(n,))
    data[:] = np.arange(n)
    return data


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        list(range(7)),
        tuple(range(7)),
        b"abcdefg",
        bytearray(b"abcdefg"),
        "abcdéfg",
        array("d", range(7)),
        np.arange(14).reshape(7, 2),
        np.arange(7).view(Tagged),
        np.ma.masked_array(np.arange(7), mask=[0, 1, 0, 0, 1, 0, 0]),
        torch.arange(7.0),
        pd.DataFrame({"a": range(7)}, index=list("tuvwxyz")),
        pd.Series(range(7), index=range(10, 17)),
        pd.Index(list("tuvwxyz")),
        pd.MultiIndex.from_product([["a"], range(7)]),
    ],
    ids=lambda data: type(data).__name__,
)
def test_type_is_kept(rank_1_of_3: None, data: Any, shuffle: bool, drop_last: bool) -> None:
    part = shard(data, shuffle=shuffle, seed=4, drop_last=drop_last)
    assert type(part) is type(data)
    positions = shard(list(range(7)), shuffle=shuffle, seed=4, drop_last=drop_last)
    rows = data.iloc if hasattr(data, "iloc") else data
    got = part.iloc if hasattr(part, "iloc") else part
    assert len(part) == len(positions)
    for i, position in enumerate(positions):
        assert str(got[i]) == str(rows[position])


def test_masks_and_labels_travel_along(rank_1_of_3: None) -> None:
    masked, frame = shard(
        np.ma.masked_array(np.arange(6), mask=[0, 1, 0, 0, 0, 0]), pd.DataFrame({"a": range(6)}, index=range(50, 56))
    )
    assert masked.mask.tolist() == [True, False]
    assert frame.index.tolist() == [51, 54]


def test_range_stays_a_range_unless_shuffled(rank_1_of_3: None) -> None:
    assert shard(range(10)) == range(1, 10, 3)
    assert shard(range(10), drop_last=True) == range(3, 6)
    assert type(shard(range(10), shuffle=True)) is list


def test_slices_are_views(rank_1_of_3: None, tmp_path: Path) -> None:
    x, tensor, mapped = np.arange(9), torch.arange(9), make_memmap(9, tmp_path)
    raw = memoryview(bytearray(9))
    for drop_last in (False, True):
        part, tensor_part, mapped_part, raw_part = shard(x, tensor, mapped, raw, drop_last=drop_last)
        assert np.shares_memory(part, x)
        assert tensor_part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert isinstance(mapped_part, np.memmap)
        assert np.shares_memory(mapped_part, mapped)
        assert isinstance(raw_part, memoryview)
        assert raw_part.obj is raw.obj
    assert not np.shares_memory(shard(x, shuffle=True), x)


def test_gradients_flow_through_a_tensor_part(rank_1_of_3: None) -> None:
    weights = torch.ones(4, requires_grad=True)
    shard(weights).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [0, 1, 0, 0]


def test_dict_values_are_sharded_and_its_type_kept(rank_1_of_3: None) -> None:
    for kind in (dict, OrderedDict):
        part = shard(kind({0: np.arange(6), "nested": {"y": list("abcdef")}}))
        assert type(part) is kind
        assert list(part) == [0, "nested"]
        assert part[0].tolist() == [1, 4]
        assert part["nested"] == {"y": ["b", "e"]}
    data = defaultdict(list, x=[1, 2, 3])
    assert shard(data)["missing"] == []
    assert data == {"x": [1, 2, 3]}
    with pytest.raises(ConfigError, match=r"argument 0\['x'\] \(list\) has length 2, argument 0\['y'\] .* length 3"):
        shard({"x": [1, 2], "y": (1, 2, 3)})
    with pytest.raises(UsageError, match=r"argument 0\['lr'\], which is a float"):
        shard({"x": [1, 2], "lr": 0.1})


def test_named_tuple_of_arrays_is_a_record(rank_1_of_3: None) -> None:
    part = shard(Batch(np.arange(7), list("abcdefg")))
    assert type(part) is Batch
    assert part.x.tolist() == [1, 4]
    assert part.y == ["b", "e"]
    with pytest.raises(ConfigError, match=r"argument 0\.x \(list\) has length 1, argument 0\.y \(list\) has length 2"):
        shard(Batch([1], [1, 2]))
    with pytest.raises(UsageError, match=r"argument 0\.y, which is a float"):
        shard(Batch([1, 2], 0.1))


def test_named_tuple_of_scalars_is_a_sequence() -> None:
    parts = on_ranks(2, lambda: shard(Batch("ab", 3), [10, 20]))
    assert parts == [(("ab",), [10]), ((3,), [20])]
    assert all(type(part[0]) is tuple for part in parts)


def test_subclasses_and_other_sequences(rank_1_of_3: None) -> None:
    named = Named("n", [0, 1, 2, 3, 4])
    for shuffle in (False, True):
        part = shard(named, shuffle=shuffle)
        assert type(part) is Named
        assert part.name == "n"
        assert len(part) == 2
    assert named == [0, 1, 2, 3, 4]
    assert shard(UserList("abcde")) == shard(deque("abcde")) == ["b", "e"]
    assert type(shard(memoryview(b"abcde"), shuffle=True)) is list


def test_torch_dataset_becomes_a_subset() -> None:
    dataset = TensorDataset(torch.arange(10) * 10)
    parts = on_ranks(3, lambda: shard(dataset))
    assert all(isinstance(part, Subset) and part.dataset is dataset for part in parts)
    assert parts[1].indices == range(1, 10, 3)
    rows = [int(batch[0]) for part in parts for batch in DataLoader(part, batch_size=None)]
    assert sorted(rows) == list(range(0, 100, 10))
    shuffled = on_ranks(3, lambda: shard(dataset, shuffle=True))
    assert sorted(i for part in shuffled for i in part.indices) == list(range(10))
    assert all(type(i) is int for i in shuffled[0].indices)


def test_hugging_face_dataset_is_selected_from_lazily(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"i": list(range(10)), "t": list("abcdefghij")}).save_to_disk(tmp_path / "d")
    table = datasets.load_from_disk(tmp_path / "d").with_format("numpy")
    for shuffle in (False, True):
        for drop_last in (False, True):
            parts = on_ranks(4, lambda s=shuffle, d=drop_last: shard(table, shuffle=s, drop_last=d))
            expected = on_ranks(4, lambda s=shuffle, d=drop_last: shard(list(range(10)), shuffle=s, drop_last=d))
            assert [part["i"][:].tolist() for part in parts] == expected
            assert all(isinstance(part, datasets.Dataset) and part.format["type"] == "numpy" for part in parts)
            assert all(part.cache_files == table.cache_files for part in parts)  # still the mapped file
    assert [len(part) for part in on_ranks(12, lambda: shard(table))] == [1] * 10 + [0] * 2


def test_dataset_dict_is_sharded_by_split() -> None:
    splits = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"i": list(range(10))}), test=datasets.Dataset.from_dict({"i": [0, 1, 2]})
    )
    parts = on_ranks(2, lambda: shard(splits, shuffle=True, seed=None))
    assert all(type(part) is datasets.DatasetDict for part in parts)
    assert sorted(i for part in parts for i in part["train"]["i"]) == list(range(10))
    assert sorted(i for part in parts for i in part["test"]["i"]) == [0, 1, 2]
    with pytest.raises(UsageError, match="sharded alone"):
        shard([1], splits)


# --- refusals ---


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (None, "argument 0, which is NoneType: pass the data itself"),
        ((i for i in range(3)), r"a generator: pass list\(data\)"),
        (iter([1]), r"a list_iterator: pass list\(data\)"),
        (map(str, [1]), r"pass list\(data\)"),
        ({1, 2}, r"a set: a set has no order .* sorted\(data\)"),
        (frozenset({1}), r"sorted\(data\)"),
        ({1: 2}.keys(), r"sorted\(data\)"),
        (5, "an int: expected something with a length"),
        (np.array(5), "at least one dimension"),
        (torch.tensor(5), "at least one dimension"),
        (memoryview(np.zeros((2, 2))), r"numpy\.asarray"),
        (DataLoader([1, 2]), r"sky\.shard\(loader\.dataset\), .* sampler=sky\.DistributedSampler"),
        (Endless(), r"itertools\.islice"),
        (datasets.Dataset.from_dict({"i": [1]}).to_iterable_dataset(), "split_dataset_by_node"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_cannot_be_cut_is_refused_with_advice(data: Any, advice: str) -> None:
    with pytest.raises(TypeError, match=advice) as caught:
        shard(data)
    assert isinstance(caught.value, UsageError)


def test_different_lengths_and_no_arrays_are_value_errors() -> None:
    with pytest.raises(ValueError, match=r"argument 0 \(ndarray\) has length 3, argument 1 \(list\) has length 2"):
        shard(np.arange(3), [1, 2])
    with pytest.raises(ConfigError, match="no arrays"):
        shard()
    with pytest.raises(UsageError, match="seed='x': expected int or None"):
        shard([1], shuffle=True, seed="x")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from atoll.functions.data import shard; from atoll.functions.sampler import DistributedSampler\n"
        "assert len(shard(list(range(99)), shuffle=True)) == len(list(DistributedSampler([0] * 99))) == 99\n"
        "assert not {'numpy', 'torch', 'pandas', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
