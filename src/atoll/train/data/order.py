"""The order of samples as a pure function of a counter: a permutation that needs no memory, and a mixture of parts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_Words = NDArray[np.uint64]

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_NUM_ROUNDS = 8
# Below 16 values a Feistel network reaches few of the permutations there are; walking makes up for the larger domain.
_MIN_BITS = 4
# Shares of a mixture are whole multiples of one millionth where its weights have no smaller common denominator.
_RESOLUTION = 1_000_000


class Permutation:
    """A permutation of ``range(size)`` that costs no memory, chosen by ``key``; the same on every platform.

    An alternating Feistel network (Luby and Rackoff, 1988; Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    2002) permutes the smallest power of two that holds ``size``; a value outside of ``range(size)`` is permuted again
    until it falls inside ("cycle walking"), twice on average at most from 16 values on. Its round function is
    splitmix64 (Steele, Lea and Flood, 2014).

    Args:
        key: whole numbers, as seed and epoch; another key is another permutation.
    """

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        bits = max(_MIN_BITS, (size - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        state = 0
        for number in key:
            state = mixed(state ^ mixed(number & _MASK) ^ mixed(number >> 64 & _MASK))
        self._round_keys = [mixed(state + index) for index in range(_NUM_ROUNDS)]

    def __len__(self) -> int:
        return self.size

    def __call__(self, indices: Integers) -> Integers:
        """The values at ``indices``, each in ``range(size)``; any shape."""
        values = np.asarray(indices, dtype=np.int64)
        words = self._encrypted(values.reshape(-1).astype(np.uint64))
        while (outside := np.flatnonzero(words >= np.uint64(self.size))).size:
            words[outside] = self._encrypted(words[outside])
        return words.astype(np.int64).reshape(values.shape)

    def _encrypted(self, words: _Words) -> _Words:
        low_bits = np.uint64(self._low_bits)
        low_mask = np.uint64((1 << self._low_bits) - 1)
        high_mask = np.uint64((1 << self._high_bits) - 1)
        high, low = words >> low_bits, words & low_mask
        for index, key in enumerate(self._round_keys):
            if index % 2:
                low = low ^ (_mixed_words(high, key) & low_mask)
            else:
                high = high ^ (_mixed_words(low, key) & high_mask)
        return (high << low_bits) | low


class Mixture:
    """Which part each sample comes from, so that shares hold at every moment and not only on average.

    Parts are joined two by two, the two smallest shares first (Huffman's tree), and each join deals its samples to its
    two sides by rounding: after k samples the first side has had exactly round(k · its share). So a part is never
    further than 1.7 samples from its exact share, less than 1.5 with up to five parts, however long the run, and where
    a sample comes from is a closed form of its number.

    Each part counts its own epochs: a small part with a large weight begins anew while a large one is still in its
    first. An epoch of the mixture is, by definition, as many samples as its parts have together.

    Args:
        lengths: samples of each part, each at least 1.
        weights: shares, in any unit, each above 0. Kept exactly where a common denominator up to 1,000,000 exists, as
            for decimal fractions; else to the nearest millionth.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float]) -> None:
        self.lengths = tuple(lengths)
        self.shares = _whole_shares(weights)
        self._tree = _joined(self.shares)

    def __len__(self) -> int:
        """Samples of an epoch."""
        return sum(self.lengths)

    def __call__(self, numbers: Integers) -> tuple[Integers, Integers]:
        """Where samples come from.

        Returns:
            For each its part [N], and its index in the part's own stream [N], which counts over the part's epochs.
        """
        parts = np.zeros(len(numbers), dtype=np.int64)
        indices = np.array(numbers, dtype=np.int64)
        pending: list[tuple[_Node, Integers]] = [(self._tree, np.arange(len(numbers)))]
        while pending:
            node, which = pending.pop()
            if isinstance(node, int):
                parts[which] = node
                continue
            left, right, share, total = node
            here = indices[which]
            before = _rounded(here, share, total)
            goes_left = _rounded(here + 1, share, total) > before
            indices[which] = np.where(goes_left, before, here - before)
            pending += [(left, which[goes_left]), (right, which[~goes_left])]
        return parts, indices


_Node = int | tuple["_Node", "_Node", int, int]
"""A part's number, or a join: both sides, the share of the first, and that of the two together."""


def _rounded(numbers: Integers, share: int, total: int) -> Integers:
    """round(numbers · share / total) in whole numbers: exact up to 4·10¹² samples."""
    return (2 * numbers * share + total) // (2 * total)


def _joined(shares: Sequence[int]) -> _Node:
    heap: list[tuple[int, int, _Node]] = [(share, part, part) for part, share in enumerate(shares)]
    heapq.heapify(heap)
    order = len(heap)  # settles equal shares, so that nodes are never compared
    while len(heap) > 1:
        small, _, left = heapq.heappop(heap)
        large, _, right = heapq.heappop(heap)
        heapq.heappush(heap, (small + large, order, (left, right, small, small + large)))
        order += 1
    return heap[0][2]


def _whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of ``weights`` with a sum up to a million, by largest remainder."""
    exact = [Fraction(str(float(weight))) for weight in weights]  # as they were written: 0.1 is a tenth
    total = sum(exact)
    exact = [weight / total for weight in exact]
    denominator = math.lcm(*(share.denominator for share in exact))
    resolution = min(denominator, _RESOLUTION)
    shares = [int(share * resolution) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: shares[part] - exact[part] * resolution)
    for part in by_remainder[: resolution - sum(shares)]:
        shares[part] += 1
    return tuple(max(1, share) for share in shares)  # a part that was named is read, however small its weight


def mixed(word: int) -> int:
    """One output of splitmix64, whose state is ``word``."""
    word = (word + GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def _mixed_words(words: _Words, key: int) -> _Words:
    """``mixed(word ^ key)`` of each; arrays of unsigned words wrap around without a warning."""
    words = (words ^ np.uint64(key)) + np.uint64(GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
