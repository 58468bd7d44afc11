"""Documents one after the other, cut into sequences of equal length. S positions of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.core.errors import ConfigError
from atoll.train.data.order import Integers, Mixture, Permutation
from atoll.train.data.shards import TokenShards

UNTRAINED = -100
"""The label of a place that is not trained."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence; the fields are those of ``atoll.train.batch.Batch``.

    Attributes:
        tokens, labels, positions: [S] int64.
        documents: [S] int64, or None where documents are not separated.
    """

    tokens: Integers
    labels: Integers
    positions: Integers
    documents: Integers | None

    @property
    def fields(self) -> dict[str, Integers]:
        """Its arrays by name."""
        fields = {"tokens": self.tokens, "labels": self.labels, "positions": self.positions}
        return fields if self.documents is None else {**fields, "documents": self.documents}

    @property
    def num_trained(self) -> int:
        """Places with a label."""
        return int(np.count_nonzero(self.labels != UNTRAINED))


class PackedDataset:
    """Token shards as sequences of ``seq_len``, numbered without end.

    The tokens of a part are cut every ``seq_len``, and each place is trained to give the token that follows it, over
    the cut too: every token of a part but its very first is the label of exactly one place of one sequence. The last
    sequence of a part is filled up with places that are not trained.

    Where documents are isolated a document's last place has no label, as the next token is another document's; its
    number says which places belong together, and positions restart with each document. A document that a cut divides
    is two pieces: the second can't see the first, so its positions start at 0 too.

    A sample number counts over epochs. Which sequence it is depends on the seed and the number alone: ``Mixture`` says
    from which part, and ``Permutation`` of (seed, part, epoch of that part) says which of its sequences.

    Args:
        parts: shards, each with its share of the samples.
        shuffle: permute; else sequences come as they lie in the shards, every epoch.

    Raises:
        ConfigError: a part has no token to train on.
    """

    def __init__(
        self,
        parts: Sequence[tuple[TokenShards, float]],
        seq_len: int,
        *,
        isolate: bool = True,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self._num_trainable = [_num_trainable(shards, isolate) for shards, _ in parts]
        for number, (shards, _) in enumerate(parts):
            if not self._num_trainable[number]:
                which = f"part {number + 1} of the data" if len(parts) > 1 else "the data"
                raise ConfigError(
                    f"{which} has no token to learn: {shards.num_tokens} tokens in {shards.num_documents} documents; "
                    "look at [data] path and text_key"
                )
        self.parts = [shards for shards, _ in parts]
        self.seq_len = seq_len
        self.isolate = isolate
        self.shuffle = shuffle
        self.seed = seed
        lengths = [-(-(shards.num_tokens - 1) // seq_len) for shards in self.parts]
        self._mixture = Mixture(lengths, [weight for _, weight in parts])
        self._first_windows = np.concatenate([[0], np.cumsum(lengths)])  # of each part, over all parts

    def __len__(self) -> int:
        """Sequences of all parts together, the partial last ones included; an epoch is that many samples."""
        return len(self._mixture)

    @property
    def mean_trained(self) -> float:
        """Trained places of a sample on average, over a long run."""
        shares, lengths = self._mixture.shares, self._mixture.lengths
        each = [share * num / length for share, num, length in zip(shares, self._num_trainable, lengths, strict=True)]
        return sum(each) / sum(shares)

    def order(self, numbers: Sequence[int] | Integers) -> Integers:
        """The window [N] of each sample number [N]: a number in ``range(len(self))`` for ``window``."""
        parts, indices = self._mixture(np.asarray(numbers, dtype=np.int64))
        windows = np.empty_like(indices)
        for part in np.unique(parts):
            length = self._mixture.lengths[part]
            mine = np.flatnonzero(parts == part)
            epochs, within = indices[mine] // length, indices[mine] % length
            if self.shuffle:
                for epoch in np.unique(epochs):
                    of_epoch = epochs == epoch
                    permutation = Permutation(length, self.seed, int(part), int(epoch))
                    within[of_epoch] = permutation(within[of_epoch])
            windows[mine] = self._first_windows[part] + within
        return windows

    def samples(self, numbers: Sequence[int] | Integers) -> list[Sample]:
        """The sequences of sample numbers."""
        return [self.window(int(window)) for window in self.order(numbers)]

    def window(self, index: int) -> Sample:
        """One of the ``len(self)`` sequences, in the order in which they lie in the parts, one part after the other."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        part = int(np.searchsorted(self._first_windows, index, side="right")) - 1
        shards, start = self.parts[part], int(index - self._first_windows[part]) * self.seq_len
        size = self.seq_len
        read = shards.read(start, min(start + size + 1, shards.num_tokens))
        tokens = np.zeros(size, dtype=np.int64)
        labels = np.full(size, UNTRAINED, dtype=np.int64)
        tokens[: len(read)] = read[:size]
        labels[: len(read) - 1] = read[1:]
        places = np.arange(size, dtype=np.int64)
        if not self.isolate:
            return Sample(tokens, labels, places, None)
        # The end of the last document is a start as well: what fills the sequence up is a document of its own.
        starts = _starts(shards, start, start + size) - start
        labels[starts - 1] = UNTRAINED
        begins = np.zeros(size, dtype=np.int64)
        begins[starts[starts < size]] = 1
        first_places = np.maximum.accumulate(places * begins)
        return Sample(tokens, labels, places - first_places, np.cumsum(begins))

    def filler(self) -> Sample:
        """A sequence that trains nothing, for ranks that have to take part in a step that has none left for them."""
        places = np.arange(self.seq_len, dtype=np.int64)
        nothing = np.zeros(self.seq_len, dtype=np.int64)
        return Sample(nothing, np.full_like(nothing, UNTRAINED), places, nothing if self.isolate else None)


def _num_trainable(shards: TokenShards, isolate: bool) -> int:
    """Tokens of a part that are a label: all but the first, of each document where documents are apart."""
    if not isolate:
        return max(0, shards.num_tokens - 1)
    # In pieces, for a part may have more documents than fit memory. Empty documents have no first token.
    step = 1 << 20
    pieces = (shards.offsets[at : at + step + 1] for at in range(0, shards.num_documents, step))
    return shards.num_tokens - sum(int(np.count_nonzero(np.diff(piece))) for piece in pieces)


def _starts(shards: TokenShards, first: int, last: int) -> Integers:
    """Tokens after ``first``, up to and with ``last``, at which a document starts or the last one ends."""
    low, high = np.searchsorted(shards.offsets, [first, last], side="right")
    return np.unique(shards.offsets[low:high])  # an empty document starts where the next one does
