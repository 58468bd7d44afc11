"""One micro-batch of packed sequences. B sequences, S positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens with what each predicts and which others it sees.

    Attributes:
        tokens: [B, S] int64.
        labels: [B, S] int64, the token to predict at each place; -100 where none is.
        positions: [B, S] int64, each token's place in its document, or in the sequence where documents are not told
            apart.
        documents: [B, S] int64, the number of each token's document within its sequence; None where they are not told
            apart.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with each of its tensors changed."""
        documents = None if self.documents is None else change(self.documents)
        return Batch(change(self.tokens), change(self.labels), change(self.positions), documents)

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``; from pinned memory the copy is asynchronous."""
        return self.map(lambda part: part.to(device, non_blocking=True))
