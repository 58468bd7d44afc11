"""The order of samples: permutations without memory, mixtures without drift."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.train.data.order import Mixture, Permutation
from atoll.train.outer import Counter

FIRST_OF_1000 = [354, 351, 120, 220, 939, 206, 928, 658]
FIRST_OF_A_TRILLION = [387905531057, 700437157451, 334953280856]


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**70), epoch=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_permutation_hits_every_value_once(size: int, seed: int, epoch: int) -> None:
    values = Permutation(size, seed, epoch)(np.arange(size))
    assert np.array_equal(np.sort(values), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 15, 16, 17, 1023, 1024, 1025, 65537])
def test_borders_of_powers_of_two(size: int) -> None:
    assert np.array_equal(np.sort(Permutation(size, 7)(np.arange(size))), np.arange(size))


@given(size=st.integers(10**9, 10**12), start=st.integers(0, 10**9 - 1000))
@settings(max_examples=20, deadline=None)
def test_a_permutation_of_a_trillion_needs_no_memory(size: int, start: int) -> None:
    indices = np.arange(start, start + 1000)
    values = Permutation(size, 1)(indices)
    assert np.unique(values).size == 1000
    assert values.min() >= 0
    assert values.max() < size
    # Values asked for one by one are those asked for together.
    assert [int(Permutation(size, 1)(indices[i : i + 1])[0]) for i in (0, 500)] == [int(values[0]), int(values[500])]


def test_values_are_the_same_on_every_platform() -> None:
    assert Permutation(1000, 42, 0)(np.arange(8)).tolist() == FIRST_OF_1000
    assert Permutation(10**12, 42, 3)(np.array([0, 1, 10**12 - 1])).tolist() == FIRST_OF_A_TRILLION


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(Permutation(50, *key)(np.arange(50))) for key in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0,), ()]}
    assert len(orders) == 7


def test_neighbours_are_spread_evenly() -> None:
    size = 20_000
    values = Permutation(size, 3, 1)(np.arange(size))
    # Of the first half of the places about half have a value of the lower half, over many keys and offsets.
    for bit in range(10):
        low = values[(np.arange(size) >> bit) % 2 == 0] < size // 2
        assert abs(low.mean() - 0.5) < 0.02
    gaps = np.abs(np.diff(values))
    assert abs(gaps.mean() - size / 3) < size * 0.02  # what a random order has


def _counts(mixture: Mixture, num: int) -> np.ndarray:
    """Samples of each part after each of the first ``num`` samples [num, parts]."""
    parts, _ = mixture(np.arange(num))
    return np.cumsum(parts[:, None] == np.arange(len(mixture.lengths)), axis=0)


@given(weights=st.lists(st.integers(1, 200), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_shares_hold_at_every_prefix(weights: list[int]) -> None:
    num = 3000
    counts = _counts(Mixture([1000] * len(weights), weights), num)
    exact = np.arange(1, num + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - np.round(exact)).max() <= 1


@given(weights=st.lists(st.floats(0.001, 100), min_size=2, max_size=24))
@settings(max_examples=40, deadline=None)
def test_shares_of_many_parts_and_any_weights(weights: list[float]) -> None:
    num = 2000
    counts = _counts(Mixture([10] * len(weights), weights), num)
    exact = np.arange(1, num + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - exact).max() < 1.7 + num * 2e-6


def test_shares_do_not_drift() -> None:
    weights = [1.0, 1.0, 1.0, 4.0]
    mixture = Mixture([5] * 4, weights)
    far = 10**12
    _, indices = mixture(np.arange(far, far + 50))
    parts, _ = mixture(np.arange(far, far + 50))
    for part, weight in enumerate(weights):
        number = far + int(np.flatnonzero(parts == part)[0])
        assert abs(int(indices[parts == part][0]) - number * weight / 7) < 1.5


@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=8), start=st.integers(0, 10**9))
@settings(max_examples=40, deadline=None)
def test_each_part_is_a_stream_without_gaps(weights: list[float], start: int) -> None:
    mixture = Mixture([7] * len(weights), weights)
    parts, indices = mixture(np.arange(start, start + 500))
    for part in range(len(weights)):
        own = indices[parts == part]
        assert np.array_equal(own, np.arange(len(own)) + (own[0] if len(own) else 0))
    assert start or all(indices[parts == part][:1].sum() == 0 for part in range(len(weights)))


def test_decimal_weights_are_kept_exactly() -> None:
    assert Mixture([1, 1, 1], [0.7, 0.2, 0.1]).shares == (7, 2, 1)
    assert Mixture([1, 1], [1, 3]).shares == (1, 3)
    counts = _counts(Mixture([1, 1, 1], [0.7, 0.2, 0.1]), 10_000)
    assert counts[-1].tolist() == [7000, 2000, 1000]
    # Each part that was named is read.
    assert min(Mixture([1, 1], [1e-9, 1]).shares) == 1


def test_an_epoch_of_a_mixture_is_all_its_samples() -> None:
    assert len(Mixture([10, 30], [1, 1])) == 40


def test_the_counter_counts_what_was_trained_not_what_was_read_ahead() -> None:
    source = Counter(limit=10)
    ahead = [source.next_range(4) for _ in range(4)]
    assert ahead == [range(4), range(4, 8), range(8, 10), range(10, 10)]
    assert source.consumed == 0
    source.commit(ahead[0])
    assert source.consumed == 4
    resumed = Counter(limit=10)
    resumed.load(source.state())
    assert resumed.next_range(4) == range(4, 8)
    assert resumed.consumed == 4


def test_a_counter_without_a_limit_never_ends() -> None:
    source = Counter(start=10**12)
    assert source.next_range(3) == range(10**12, 10**12 + 3)
