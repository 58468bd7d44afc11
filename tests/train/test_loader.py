"""Steps of micro-batches: the same samples for any number of ranks, nothing lost, nothing left running."""

from __future__ import annotations

import threading
import time
from collections import Counter as Bag
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import ConfigError
from atoll.train.batch import Batch
from atoll.train.data.loader import Loader, Step, validation_batches
from atoll.train.data.packing import PackedDataset, Sample
from atoll.train.data.shards import ShardWriter, TokenShards
from atoll.train.objectives.pretrain import Pretrain
from atoll.train.outer import Counter

CPU = torch.device("cpu")
SEQ_LEN = 16


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[PackedDataset]:
    """61 sequences of 16, of documents of 1 to 40 tokens; every token is another one."""
    lengths = np.random.default_rng(0).integers(1, 40, size=100)
    stops = np.minimum(np.cumsum(lengths), 61 * SEQ_LEN - 3)
    with ShardWriter(tmp_path, vocab_size=1 << 16) as writer:
        for start, stop in zip([0, *stops[:-1]], stops, strict=True):
            if stop > start:
                writer.add(np.arange(start, stop))
        writer.finish()
    with TokenShards.open(tmp_path) as shards:
        yield PackedDataset([(shards, 1.0)], SEQ_LEN, seed=11)


class Numbers:
    """Sequences that hold their own number, for tests that need no text."""

    def __init__(self, size: int = 1000, error_at: int | None = None) -> None:
        self.size = size
        self.error_at = error_at

    def __len__(self) -> int:
        return self.size

    def samples(self, numbers: Sequence[int] | np.ndarray) -> list[Sample]:
        return [self.window(int(number)) for number in numbers]

    def window(self, index: int) -> Sample:
        if index == self.error_at:
            raise ConfigError("tokens-00000.bin cannot be read")
        row = np.array([index])
        return Sample(row, row, np.zeros(1, dtype=np.int64), None)

    def filler(self) -> Sample:
        return Sample(np.array([0]), np.array([-100]), np.zeros(1, dtype=np.int64), None)


def loader(
    data: Numbers | PackedDataset,
    *,
    rank: int = 0,
    size: int = 1,
    batch: int = 8,
    micro: int = 1,
    limit: int | None = None,
    start: int = 0,
    fixed: bool = False,
) -> Loader:
    source = Counter(limit, start)
    return Loader(
        data,
        Pretrain(),
        source,
        data_rank=rank,
        data_size=size,
        global_batch=batch,
        micro_batch=micro,
        device=CPU,
        fixed_micro_batches=fixed,
    )


def steps_of(data: Numbers | PackedDataset, num: int | None = None, **options: int | bool | None) -> list[Step]:
    with loader(data, **options) as steps:  # type: ignore[arg-type]  # one dict for options of several kinds
        return list(steps) if num is None else [next(steps) for _ in range(num)]


def rows(batches: Sequence[Batch]) -> list[tuple[tuple[int, ...], ...]]:
    """The sequences of batches that train something, as tuples."""
    found = []
    for batch in batches:
        assert batch.documents is not None
        for parts in zip(batch.tokens, batch.labels, batch.positions, batch.documents, strict=True):
            if (parts[1] != -100).any():
                found.append(tuple(tuple(part.tolist()) for part in parts))
    return found


def numbers_of(batches: Sequence[Batch]) -> list[int]:
    return [int(label) for batch in batches for label in batch.labels.flatten() if label != -100]


def test_global_batches_are_the_same_for_any_number_of_ranks(dataset: PackedDataset) -> None:
    limit = 2 * len(dataset) + 5  # over two epochs, with a last step that is no whole batch
    alone = [rows(step.micro_batches) for step in steps_of(dataset, batch=8, micro=2, limit=limit)]
    assert len(alone) == -(-limit // 8)
    for size in (2, 4):
        for micro in (1, 2):
            ranks = [steps_of(dataset, batch=8, micro=micro, limit=limit, rank=rank, size=size) for rank in range(size)]
            for together, one in zip(zip(*ranks, strict=True), alone, strict=True):
                assert [row for step in together for row in rows(step.micro_batches)] == one
                assert len({len(step.micro_batches) for step in together}) == 1
                assert len({step.numbers for step in together}) == 1


def test_an_epoch_of_steps_trains_each_label_once(dataset: PackedDataset) -> None:
    size = len(dataset)
    steps = [step for rank in range(2) for step in steps_of(dataset, batch=6, micro=1, limit=size, rank=rank, size=2)]
    labels = Bag(label for step in steps for row in rows(step.micro_batches) for label in row[1] if label != -100)
    starts = set(dataset.parts[0].offsets.tolist())
    assert labels == Bag(token for token in range(dataset.parts[0].num_tokens) if token not in starts)
    assert sum(step.trained_tokens for step in steps) == labels.total()


@given(cursor=st.integers(0, 130), batch=st.sampled_from([4, 8]))
@settings(max_examples=15, deadline=None)
def test_a_run_goes_on_at_any_sample(cursor: int, batch: int) -> None:
    whole = [number for step in steps_of(Numbers(), batch=1, limit=140) for number in numbers_of(step.micro_batches)]
    resumed = steps_of(Numbers(), batch=batch, limit=140, start=cursor)
    assert [number for step in resumed for number in numbers_of(step.micro_batches)] == whole[cursor:]
    assert [step.numbers.start for step in resumed] == list(range(cursor, 140, batch))


def test_the_cursor_is_that_of_trained_steps(dataset: PackedDataset) -> None:
    source = Counter()
    options = {"data_rank": 0, "data_size": 1, "global_batch": 8, "micro_batch": 4, "device": CPU}
    with Loader(dataset, Pretrain(), source, prefetch=4, **options) as steps:  # type: ignore[arg-type]  # as above
        for _ in range(3):
            source.commit(next(steps).numbers)
        saved = source.state()
        rest = [rows(next(steps).micro_batches) for _ in range(3)]
    assert source.consumed == 24
    resumed = Counter()
    resumed.load(saved)
    with Loader(dataset, Pretrain(), resumed, **options) as steps:  # type: ignore[arg-type]  # as above
        assert [rows(next(steps).micro_batches) for _ in range(3)] == rest


def test_seven_micro_batches_at_accumulation_four() -> None:
    steps = steps_of(Numbers(), batch=8, micro=2, limit=14)
    assert [len(step.micro_batches) for step in steps] == [4, 3]
    assert [len(step.numbers) for step in steps] == [8, 6]
    assert [step.trained_tokens for step in steps] == [8, 6]


def test_a_pipeline_gets_full_steps() -> None:
    steps = steps_of(Numbers(), batch=8, micro=2, limit=14, fixed=True)
    assert [len(step.micro_batches) for step in steps] == [4, 4]
    assert [step.trained_tokens for step in steps] == [8, 6]
    assert (steps[1].micro_batches[3].labels == -100).all()


@given(
    size=st.integers(1, 5), micro=st.integers(1, 3), accumulate=st.integers(1, 3), limit=st.integers(1, 60),
    fixed=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_short_last_step_loses_nothing(size: int, micro: int, accumulate: int, limit: int, fixed: bool) -> None:
    batch = size * micro * accumulate
    ranks = [
        steps_of(Numbers(), batch=batch, micro=micro, limit=limit, rank=r, size=size, fixed=fixed) for r in range(size)
    ]
    seen = []
    for together in zip(*ranks, strict=True):
        shares = [numbers_of(step.micro_batches) for step in together]
        seen += [number for share in shares for number in share]
        assert [len(share) for share in shares] == [step.trained_tokens for step in together]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        num_micro_batches = {len(step.micro_batches) for step in together}
        assert len(num_micro_batches) == 1
        needed = accumulate if fixed else -(-max(map(len, shares)) // micro)
        assert num_micro_batches == {needed}
        assert all(each.tokens.shape == (micro, 1) for step in together for each in step.micro_batches)
    assert seen == list(range(limit))


def test_batches_have_the_promised_shapes(dataset: PackedDataset) -> None:
    (step,) = steps_of(dataset, 1, batch=8, micro=4)
    for batch in step.micro_batches:
        assert batch.documents is not None
        for part in (batch.tokens, batch.labels, batch.positions, batch.documents):
            assert part.shape == (4, SEQ_LEN)
            assert part.dtype == torch.int64
    flat = PackedDataset([(dataset.parts[0], 1.0)], SEQ_LEN, isolate=False)
    assert steps_of(flat, 1, batch=4)[0].micro_batches[0].documents is None


def test_an_error_while_reading_reaches_the_consumer() -> None:
    steps = loader(Numbers(error_at=17), batch=8)
    assert next(steps).numbers.start == 0
    assert next(steps).numbers.start == 8
    with pytest.raises(ConfigError, match="cannot be read"):
        next(steps)
    # It is over: the samples after the error are not trained as if nothing had been.
    assert list(steps) == []


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("atoll-data")]


def test_no_thread_stays() -> None:
    steps = loader(Numbers())
    assert _threads() == []
    next(steps)
    assert len(_threads()) == 1
    steps.close()
    assert _threads() == []
    steps.close()
    assert list(steps) == []
    # Nor after the end of a limited run that nobody closed.
    finished = loader(Numbers(), limit=20)
    assert len(list(finished)) == 3
    assert _threads() == []


def test_reading_runs_ahead_but_not_away() -> None:
    source = Counter()
    options = {"data_rank": 0, "data_size": 1, "global_batch": 2, "micro_batch": 1, "device": CPU}
    with Loader(Numbers(), Pretrain(), source, prefetch=3, **options) as steps:  # type: ignore[arg-type]  # as above
        next(steps)
        steps.close()  # waits for what is being read
    assert 2 <= source.next_range(1).start <= 8  # the one taken, and three ahead


def test_the_wait_for_data_is_measured() -> None:
    class Slow(Numbers):
        def samples(self, numbers: Sequence[int] | np.ndarray) -> list[Sample]:
            time.sleep(0.1)  # begins after the wait for it
            return super().samples(numbers)

    with loader(Slow()) as steps:
        next(steps)
        assert steps.wait_s >= 0.1


@given(length=st.integers(1, 40), size=st.integers(1, 5), micro=st.integers(1, 4), most=st.none() | st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_validation_reads_each_sequence_once(length: int, size: int, micro: int, most: int | None) -> None:
    data = Numbers(length)
    ranks = [list(validation_batches(data, Pretrain(), rank, size, micro, most)) for rank in range(size)]
    assert len({len(batches) for batches in ranks}) == 1
    seen = [number for batches in ranks for number in numbers_of(batches)]
    assert len(seen) == len(set(seen)) == min(length, most or length)
    if most is None:
        assert seen == list(range(length))
    else:
        gaps = np.diff([*seen, length + seen[0]])
        assert gaps.max() - gaps.min() <= 1
    assert all(batch.tokens.shape == (micro, 1) for batches in ranks for batch in batches)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_in_process")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_batches_go_to_the_card_without_a_wait(dataset: PackedDataset) -> None:
    card = torch.device("cuda", torch.cuda.device_count() - 1)
    expected = steps_of(dataset, 4, batch=8, micro=2)
    options = {"data_rank": 0, "data_size": 1, "global_batch": 8, "micro_batch": 2}
    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.device(card):
        try:
            with Loader(dataset, Pretrain(), Counter(), device=card, **options) as steps:  # type: ignore[arg-type]  # as above
                found = [next(steps) for _ in range(4)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    for step, other in zip(found, expected, strict=True):
        for batch, plain in zip(step.micro_batches, other.micro_batches, strict=True):
            assert batch.tokens.device == card
            assert torch.equal(batch.tokens.cpu(), plain.tokens)
            assert torch.equal(batch.labels.cpu(), plain.labels)
