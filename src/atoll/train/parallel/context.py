"""Context parallelism: each rank holds a part of every sequence, and attends to the keys and values of all.

A sequence is cut into twice as many pieces as there are ranks; rank r holds pieces r and 2n-1-r, so that every rank
has as much to attend to under a causal mask. Keys and values are gathered for the attention (Llama 3, section 3.3.2),
which works on every backend and lets documents be told apart across the cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.train.batch import Batch
from atoll.train.models.attention import SdpaKernel, document_starts, use_kernel
from atoll.train.models.logprobs import LogProbs
from atoll.train.models.parts import Head

# Newer versions of torch have new names for these two, and warn at the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def places(rank: int, size: int, length: int) -> Tensor:
    """Which positions of a sequence of ``length`` rank ``rank`` of ``size`` holds, in its order."""
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]))


class _Gather(torch.autograd.Function):
    """[B, S/n, ...] of each rank to [B, S, ...] in the order of the sequence.

    Backwards gradients are summed over the ranks. Where all ranks compute the same of it, any one's is the whole
    gradient: of that each takes its ``own`` places.
    """

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, group: dist.ProcessGroup, order: Tensor, inverse: Tensor, own: Tensor | None
    ) -> Tensor:
        ctx.group, ctx.order, ctx.own = group, order, own
        return gathered(part, group).index_select(1, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.own is not None:
            return grad.index_select(1, ctx.own), None, None, None, None
        size = dist.get_world_size(ctx.group)
        pieces = torch.unflatten(grad.index_select(1, ctx.order), 1, (size, -1)).transpose(0, 1).contiguous()
        own = torch.empty_like(pieces[0])
        _reduce_scatter(own, pieces.flatten(0, 1), group=ctx.group)
        return own, None, None, None, None


def gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S/n, ...] of each rank, one rank's part after the other: [B, S, ...]."""
    size = dist.get_world_size(group)
    pieces = part.new_empty((size * part.shape[0], *part.shape[1:]))
    _all_gather(pieces, part.contiguous(), group=group)
    return torch.unflatten(pieces, 0, (size, -1)).transpose(0, 1).flatten(1, 2)


class _Sequence:
    """Where the parts of all ranks lie in the sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._known: dict[tuple[int, torch.device], tuple[Tensor, Tensor, Tensor]] = {}

    def orders(self, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """For sequences of ``length``: own places [S/n], the places in rank order [S], and the way back [S]."""
        key = (length, device)
        if key not in self._known:
            order = torch.cat([places(rank, self.size, length) for rank in range(self.size)])
            own = places(self.rank, self.size, length)
            self._known[key] = (own.to(device), order.to(device), order.argsort().to(device))
        return self._known[key]


class _SumAlike(torch.autograd.Function):
    """The sum over the ranks, of which every rank computes the same."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@dataclass(eq=False)
class WholeLogProbs:
    """Log-probabilities of whole sequences, from those of this rank's ``part``."""

    sequence: _Sequence
    part: LogProbs

    def nll(self) -> Tensor:
        """As ``LogProbs.nll``."""
        out: Tensor = _SumAlike.apply(self.part.nll(), self.sequence.group)  # type: ignore[no-untyped-call]
        return out

    def tokens(self) -> Tensor:
        """As ``LogProbs.tokens``."""
        part = self.part.tokens()
        own, order, inverse = self.sequence.orders(part.shape[1] * self.sequence.size, part.device)
        out: Tensor = _Gather.apply(part, self.sequence.group, order, inverse, own)  # type: ignore[no-untyped-call]
        return out


class ContextKernel(SdpaKernel):
    """Attention of this rank's queries, S/n positions, to the keys and values of all ranks, by another kernel."""

    def __init__(self, kernel: SdpaKernel, sequence: _Sequence) -> None:
        self.kernel = kernel
        self.sequence = sequence

    def document_mask(self, documents: Tensor | None) -> Any:
        """S/n queries by S keys, of this rank's ``documents`` [B, S/n]."""
        if documents is None:
            return None
        own, _, inverse = self.sequence.orders(documents.shape[1] * self.sequence.size, documents.device)
        starts = document_starts(gathered(documents, self.sequence.group).index_select(1, inverse))
        return self.kernel.mask(starts.index_select(1, own), own, starts.shape[1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Gathers keys and values first."""
        length = q.shape[1] * self.sequence.size
        _, order, inverse = self.sequence.orders(length, q.device)
        both = torch.cat((k, v), dim=-1)
        both = _Gather.apply(both, self.sequence.group, order, inverse, None)  # type: ignore[no-untyped-call]
        k, v = both.chunk(2, dim=-1)
        if mask is not None:
            return self.kernel.attend(q, k, v, mask)
        # Each of the two pieces sees the keys up to its own end, so that no work is spent on what is masked.
        piece, rank, size = q.shape[1] // 2, self.sequence.rank, self.sequence.size
        ends = ((rank + 1) * piece, (2 * size - rank) * piece)
        parts = zip(q.chunk(2, dim=1), ends, strict=True)
        return torch.cat([self.kernel.attend(part, k[:, :end], v[:, :end], None) for part, end in parts], dim=1)


def apply_context(model: nn.Module, group: dist.ProcessGroup, kernel: SdpaKernel) -> None:
    """Have ``model`` compute this rank's part of each sequence; ``kernel`` and objective see those of every rank."""
    sequence = _Sequence(group)

    def cut(_: nn.Module, inputs: tuple[Tensor], fields: dict[str, Tensor]) -> tuple[tuple[Tensor], dict[str, Any]]:
        batch = Batch.of(fields)
        own = sequence.orders(batch.tokens.shape[1], batch.tokens.device)[0]
        parts = {name: part.index_select(1, own) for name, part in batch.model_fields.items()}
        hidden = inputs[0].is_floating_point()  # of the stage before: it has this rank's part already
        return (inputs if hidden else (parts["tokens"],)), {**parts, "batch": batch}

    model.register_forward_pre_hook(cut, with_kwargs=True)
    use_kernel(model, ContextKernel(kernel, sequence))
    for module in model.modules():
        if isinstance(module, Head):
            module.whole = partial(WholeLogProbs, sequence)
