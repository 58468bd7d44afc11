"""Documents packed into sequences: each label once, borders told apart."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import ConfigError
from atoll.train.data.packing import UNTRAINED, PackedDataset
from atoll.train.data.shards import ShardWriter, TokenShards

Documents = list[list[int]]


@contextmanager
def shards_of(*parts: Documents) -> Iterator[list[TokenShards]]:
    """Real shards of each part, in small files so that reads cross borders."""
    opened: list[TokenShards] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, documents in enumerate(parts):
            path = Path(folder, str(number))
            with ShardWriter(path, vocab_size=1 << 16, file_tokens=16) as writer:
                for document in documents:
                    writer.add(np.array(document, dtype=np.int64))
                writer.finish()
            opened.append(TokenShards.open(path))
        try:
            yield opened
        finally:
            for shards in opened:
                shards.close()


def plain(documents: Documents, seq_len: int, isolate: bool) -> Iterator[tuple[list[int], ...]]:
    """The same sequences token by token: (tokens, labels, positions, documents) of each."""
    tokens = [token for document in documents for token in document]
    owner = [number for number, document in enumerate(documents) for _ in document]
    for start in range(0, len(tokens) - 1, seq_len):
        rows: tuple[list[int], ...] = ([], [], [], [])
        for place in range(start, start + seq_len):
            inside = place < len(tokens)
            has_next = place + 1 < len(tokens) and (not isolate or owner[place] == owner[place + 1])
            rows[0].append(tokens[place] if inside else 0)
            rows[1].append(tokens[place + 1] if has_next else UNTRAINED)
            own = owner[place] if inside else -1
            new = place > start and own != (owner[place - 1] if place - 1 < len(tokens) else -1)
            rows[2].append(place - start if not isolate else 0 if place == start or new else rows[2][-1] + 1)
            rows[3].append(0 if place == start else rows[3][-1] + new)
        yield rows


documents_of = st.lists(st.lists(st.integers(0, 60_000), min_size=1, max_size=30), min_size=1, max_size=12).filter(
    lambda documents: max(map(len, documents)) > 1
)


@given(documents=documents_of, seq_len=st.integers(1, 40), isolate=st.booleans())
@settings(max_examples=80, deadline=None)
@pytest.mark.long
def test_sequences_equal_those_made_token_by_token(documents: Documents, seq_len: int, isolate: bool) -> None:
    with shards_of(documents) as (shards,):
        dataset = PackedDataset([(shards, 1.0)], seq_len, isolate=isolate, shuffle=False)
        expected = list(plain(documents, seq_len, isolate))
        assert len(dataset) == len(expected)
        for number, rows in enumerate(expected):
            sample = dataset.samples([number])[0]
            assert sample.tokens.tolist() == rows[0]
            assert sample.labels.tolist() == rows[1]
            assert sample.positions.tolist() == rows[2]
            assert (sample.documents is None) is (not isolate)
            assert sample.documents is None or sample.documents.tolist() == rows[3]
            assert sample.num_trained == sum(label != UNTRAINED for label in rows[1])


@given(documents=documents_of, seq_len=st.integers(1, 40), isolate=st.booleans(), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_an_epoch_trains_each_label_once(documents: Documents, seq_len: int, isolate: bool, epoch: int) -> None:
    with shards_of(documents) as (shards,):
        dataset = PackedDataset([(shards, 1.0)], seq_len, isolate=isolate, shuffle=True, seed=3)
        samples = dataset.samples(np.arange(epoch * len(dataset), (epoch + 1) * len(dataset)))
        labels = Counter(int(label) for sample in samples for label in sample.labels if label != UNTRAINED)
        if isolate:
            assert labels == Counter(token for document in documents for token in document[1:])
        else:
            assert labels == Counter([token for document in documents for token in document][1:])
        assert dataset.mean_trained * len(dataset) == pytest.approx(labels.total())


def test_a_small_example_to_the_last_place() -> None:
    with shards_of([[11, 12, 13], [21, 22], [31, 32, 33, 34]]) as (shards,):
        dataset = PackedDataset([(shards, 1.0)], 6, shuffle=False)
        first, last = dataset.samples([0, 1])
    assert first.tokens.tolist() == [11, 12, 13, 21, 22, 31]
    assert first.labels.tolist() == [12, 13, -100, 22, -100, 32]
    assert first.positions.tolist() == [0, 1, 2, 0, 1, 0]
    assert first.documents is not None
    assert first.documents.tolist() == [0, 0, 0, 1, 1, 2]
    # The rest of a document that was cut starts at position 0; what fills up is a document of its own.
    assert last.tokens.tolist() == [32, 33, 34, 0, 0, 0]
    assert last.labels.tolist() == [33, 34, -100, -100, -100, -100]
    assert last.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert last.documents is not None
    assert last.documents.tolist() == [0, 0, 0, 1, 1, 1]


def test_empty_documents_change_nothing() -> None:
    with shards_of([[], [1, 2], [], [], [3, 4, 5], []], [[1, 2], [3, 4, 5]]) as (with_empty, without):
        one, other = (PackedDataset([(shards, 1.0)], 4, shuffle=False) for shards in (with_empty, without))
        assert len(one) == len(other) == 1
        for left, right in zip(one.samples([0]), other.samples([0]), strict=True):
            assert left.labels.tolist() == right.labels.tolist()
            assert left.positions.tolist() == right.positions.tolist()
        assert one.samples([0])[0].num_trained == 3


def test_epochs_differ_and_depend_on_the_seed_alone() -> None:
    with shards_of([list(range(400))]) as (shards,):
        dataset = PackedDataset([(shards, 1.0)], 8, seed=1)
        size = len(dataset)
        orders = [dataset.order(np.arange(epoch * size, (epoch + 1) * size)).tolist() for epoch in range(4)]
        assert all(sorted(order) == list(range(size)) for order in orders)
        assert len({tuple(order) for order in orders}) == 4
        again = PackedDataset([(shards, 1.0)], 8, seed=1)
        assert again.order(np.arange(size)).tolist() == orders[0]
        # Any range, also over the border of epochs, is the same piece of the one order.
        assert again.order(np.arange(size - 5, size + 5)).tolist() == orders[0][-5:] + orders[1][:5]
        assert PackedDataset([(shards, 1.0)], 8, seed=2).order(np.arange(size)).tolist() != orders[0]
        unshuffled = PackedDataset([(shards, 1.0)], 8, shuffle=False)
        assert unshuffled.order(np.arange(2 * size)).tolist() == 2 * list(range(size))


def test_a_mixture_keeps_its_shares_and_each_part_its_epochs() -> None:
    small, large = [list(range(100, 181))], [list(range(1000, 1801))]  # 10 and 100 sequences of 8
    with shards_of(small, large) as (one, other):
        dataset = PackedDataset([(one, 0.25), (other, 0.75)], 8, seed=5)
        assert len(dataset) == 110
        from_small = [sample.tokens[0] < 1000 for sample in dataset.samples(np.arange(400))]
        for k in range(1, 401):
            assert abs(sum(from_small[:k]) - k / 4) <= 0.5
        # The small part's stream: whole epochs, each another order.
        windows = [int(w) for w, small_one in zip(dataset.order(np.arange(400)), from_small, strict=True) if small_one]
        epochs = [windows[at : at + 10] for at in range(0, 100, 10)]
        assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 10


def test_windows_lie_part_after_part() -> None:
    with shards_of([[1, 2, 3]], [[4, 5, 6]]) as (one, other):
        dataset = PackedDataset([(one, 1.0), (other, 9.0)], 2)
        assert [dataset.window(index).tokens.tolist() for index in range(2)] == [[1, 2], [4, 5]]
        with pytest.raises(IndexError, match="window 2 of 2"):
            dataset.window(2)


def test_filler_trains_nothing() -> None:
    with shards_of([[1, 2, 3]]) as (shards,):
        for isolate in (True, False):
            filler = PackedDataset([(shards, 1.0)], 5, isolate=isolate).filler()
            assert filler.num_trained == 0
            assert filler.tokens.shape == (5,)
            assert (filler.documents is None) is (not isolate)


@pytest.mark.parametrize(("documents", "isolate"), [([], True), ([[1]], True), ([[1]], False), ([[1], [2]], True)])
def test_data_without_anything_to_learn_is_refused(documents: Documents, isolate: bool) -> None:
    with shards_of(documents) as (shards,), pytest.raises(ConfigError, match=r"no token to learn.*look at"):
        PackedDataset([(shards, 1.0)], 4, isolate=isolate)


def test_a_sequence_longer_than_all_documents_is_filled_up() -> None:
    with shards_of([[1, 2], [3, 4]]) as (shards,):
        dataset = PackedDataset([(shards, 1.0)], 100)
        assert len(dataset) == 1
        assert dataset.samples([0])[0].num_trained == 2
