"""From sample numbers to micro-batches on the device, read ahead by one thread. B sequences, S positions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Self

import numpy as np
import torch

from atoll.train.batch import Batch
from atoll.train.data.packing import PackedDataset, Sample
from atoll.train.objective import Objective
from atoll.train.outer import SampleSource


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank handles in one optimizer step.

    Attributes:
        numbers: the sample numbers of the step over all ranks.
        micro_batches: this rank's, as many as on every other rank.
        trained_tokens: labels in them that are trained, on this rank.
        weight: what the objective divides their sums by, on this rank.
    """

    numbers: range
    micro_batches: list[Batch]
    trained_tokens: int
    weight: float


@dataclass(eq=False)
class Loader:
    """An iterator over the steps of a run, on one rank.

    A step's samples are one range of the source, dealt to the data ranks in contiguous slices as even as can be, so the
    set that makes up a step is the same for any number of ranks. A range shorter than the global batch, before the end
    of a limited run, is a step of fewer micro-batches; where it does not fill those of every rank, sequences that train
    nothing make up for it.

    Reading, and pinning for a GPU, happen on one thread, up to ``prefetch`` steps ahead; the copy to the device is
    started by ``__next__`` and nothing waits for it. Close the loader, or use it as a context manager, to end the
    thread. An error on the thread is raised by ``__next__``, which closes the loader first.

    Args:
        objective: says which fields it adds to a batch, and what a batch weighs; asked on the thread.
        source: says which numbers come next; asked by ``__next__``.
        data_rank, data_size: which share of each step is this rank's.
        prefetch: steps read ahead, 1 or more.
        fixed_micro_batches: every step has as many micro-batches as a full one, as pipeline schedules need.

    Attributes:
        wait_s: how long the last ``__next__`` waited for the thread, in seconds.
    """

    dataset: PackedDataset
    objective: Objective
    source: SampleSource
    _: KW_ONLY
    data_rank: int
    data_size: int
    global_batch: int
    micro_batch: int
    device: torch.device
    prefetch: int = 2
    fixed_micro_batches: bool = False

    def __post_init__(self) -> None:
        self.wait_s = 0.0
        self._ahead: deque[Future[Step | None]] = deque()
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "atoll-data", _current_device_setter(self.device))

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        """The next step, its batches on the device or on their way to it."""
        if self._closed:
            raise StopIteration
        started = time.perf_counter()
        try:
            while len(self._ahead) < self.prefetch:
                self._read_ahead()
            step = self._ahead.popleft().result()
        except BaseException:
            self.close()
            raise
        self.wait_s = time.perf_counter() - started
        if step is None:
            self.close()
            raise StopIteration
        self._read_ahead()
        return replace(step, micro_batches=[batch.to(self.device) for batch in step.micro_batches])

    def close(self) -> None:
        """End the thread, after the step that it is reading. Samples that were read ahead are not consumed."""
        self._closed = True
        self._ahead.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(self) -> None:
        # The source is asked here, where all ranks ask together, not on the thread.
        self._ahead.append(self._thread.submit(self._read, self.source.next_range(self.global_batch)))

    def _read(self, numbers: range) -> Step | None:
        """A step in host memory, None after the last; runs on the thread."""
        if not numbers:
            return None
        dealt = self.global_batch if self.fixed_micro_batches else len(numbers)
        num_micro_batches = _num_batches(dealt, self.data_size, self.micro_batch)
        mine = self.dataset.samples(_share(numbers, self.data_rank, self.data_size))
        mine += [self.dataset.filler()] * (num_micro_batches * self.micro_batch - len(mine))
        groups = [mine[at : at + self.micro_batch] for at in range(0, len(mine), self.micro_batch)]
        batches = [batched(group, self.objective) for group in groups]
        weight = sum(map(self.objective.weight, batches))
        if self.device.type == "cuda":
            batches = [batch.map(torch.Tensor.pin_memory) for batch in batches]
        return Step(numbers, batches, sum(batch.num_trained for batch in batches), weight)


def validation_batches(
    dataset: PackedDataset,
    objective: Objective,
    data_rank: int,
    data_size: int,
    micro_batch: int,
    max_sequences: int | None = None,
) -> Iterator[Batch]:
    """Held-out sequences, each on one rank and once, in host memory.

    Every rank gets as many batches as the others, filled up with sequences that train nothing, so that ranks that
    communicate in each never wait for one that has no more.

    Args:
        dataset: read unshuffled, epoch after epoch the same.
        max_sequences: at most so many over all ranks, spread evenly over the whole; None reads all.
    """
    size = len(dataset)
    count = size if max_sequences is None else min(size, max_sequences)
    mine = _share(range(count), data_rank, data_size)
    for number in range(_num_batches(count, data_size, micro_batch)):
        places = mine[number * micro_batch : (number + 1) * micro_batch]
        sequences = [dataset.window(place * size // count) for place in places]
        yield batched(sequences + [dataset.filler()] * (micro_batch - len(sequences)), objective)


def batched(samples: Sequence[Sample], objective: Objective) -> Batch:
    """Sequences as one batch [B, S], in host memory, with what the objective adds."""
    rows = [{**sample.fields, **objective.fields(sample)} for sample in samples]
    return Batch.of({name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]})


def _share(numbers: range, rank: int, size: int) -> range:
    """The contiguous slice of one rank; those of any two ranks differ by at most one in length."""
    return numbers[rank * len(numbers) // size : (rank + 1) * len(numbers) // size]


def _num_batches(count: int, size: int, micro_batch: int) -> int:
    """Micro-batches that hold the largest share of ``count`` sequences over ``size`` ranks."""
    largest = -(-count // size)
    return -(-largest // micro_batch)


def _current_device_setter(device: torch.device) -> Callable[[], None] | None:
    """Page-locked memory belongs to the thread's current card: a new thread would take the first, on every rank."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]  # of torch.device("cuda") it is None
    return partial(torch.cuda.set_device, index)
