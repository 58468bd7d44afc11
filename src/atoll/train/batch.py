"""One micro-batch of packed sequences. B sequences, S positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.train.data.packing import UNTRAINED


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
        extra: what the objective adds, each [B, S, ...], by names that are no other field's.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, fields: Mapping[str, Tensor]) -> Batch:
        """The batch of which these are the fields."""
        extra = dict(fields)
        tokens, labels, positions = (extra.pop(name) for name in ("tokens", "labels", "positions"))
        return cls(tokens, labels, positions, extra.pop("documents", None), extra)

    @property
    def model_fields(self) -> dict[str, Tensor]:
        """The tensors that a model reads, by name."""
        fields = {"tokens": self.tokens, "labels": self.labels, "positions": self.positions}
        return fields if self.documents is None else {**fields, "documents": self.documents}

    @property
    def fields(self) -> dict[str, Tensor]:
        """All tensors by name, as ``Batch.of`` and a model's ``forward`` take them."""
        return {**self.model_fields, **self.extra}

    @property
    def num_trained(self) -> int:
        """Places with a label."""
        return int((self.labels != UNTRAINED).sum())

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with each of its tensors changed."""
        return Batch.of({name: change(part) for name, part in self.fields.items()})

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``; from pinned memory the copy is asynchronous."""
        return self.map(lambda part: part.to(device, non_blocking=True))
