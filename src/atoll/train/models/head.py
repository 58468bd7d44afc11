"""The output projection: hidden states to logits, or to what an objective makes of the labels' log-probabilities."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.train.batch import Batch
from atoll.train.models.logprobs import ChunkedLogProbs, LogProbs
from atoll.train.objective import Objective, sums_of
from atoll.train.objectives.pretrain import Pretrain


class Head(nn.Module):
    """The output projection.

    Attributes:
        objective, chunk_tokens: of the recipe's ``[objective]``.
        group, vocab_start: under tensor parallelism the ranks that share the vocabulary, and where this one's begins.
        whole: under context parallelism makes log-probabilities of whole sequences of those of a part.
    """

    def __init__(self, vocab_size: int, dim: int, *, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))
        self.objective: Objective = Pretrain()
        self.chunk_tokens = 2048
        self.group: dist.ProcessGroup | None = None
        self.vocab_start = 0
        self.whole: Callable[[LogProbs], LogProbs] | None = None

    def forward(self, hidden: Tensor, tied_weight: Tensor | None, labels: Tensor | None, batch: Batch | None) -> Tensor:
        """Logits [B, S, V] of ``hidden`` [B, S, D]; with ``labels`` [B, S] the objective's sums (``sums_of``).

        Args:
            batch: the sequences, whole where ``hidden`` and ``labels`` are a part.
        """
        weight = self.weight if tied_weight is None else tied_weight
        assert weight is not None
        if labels is None or batch is None:
            return nn.functional.linear(hidden, weight)
        options = (self.chunk_tokens, self.group, self.vocab_start)
        logprobs: LogProbs = ChunkedLogProbs(hidden.flatten(0, 1), weight, labels, *options)
        return sums_of(self.objective, logprobs if self.whole is None else self.whole(logprobs), batch)
