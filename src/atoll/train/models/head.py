"""The output projection and its loss, in chunks of tokens, so that logits are never whole in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

IGNORED = -100

TokenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [N, D], weight [V, D], labels [N] -> [1]


class Head(nn.Module):
    """Hidden states to logits, or to the loss. ``token_loss`` belongs to the objective, which sets it."""

    def __init__(self, vocab_size: int, dim: int, *, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))
        self.token_loss: TokenLoss = ChunkedCrossEntropy()

    def forward(self, hidden: Tensor, labels: Tensor | None, tied_weight: Tensor | None) -> Tensor:
        """Logits [B, S, V] of ``hidden`` [B, S, D]; with ``labels`` [B, S] the summed loss [1]."""
        weight = self.weight if tied_weight is None else tied_weight
        assert weight is not None
        if labels is None:
            return nn.functional.linear(hidden, weight)
        return self.token_loss(hidden.flatten(0, 1), weight, labels.flatten())


class ChunkedCrossEntropy:
    """The sum of negative log-likelihoods; gradients are computed with the loss, chunk by chunk.

    Args:
        chunk_tokens: tokens whose logits exist at a time.
        group: the tensor-parallel ranks, each of which holds a contiguous slice of the vocabulary; None: one has all.
        vocab_start: first token id of this rank's slice.
    """

    def __init__(self, chunk_tokens: int = 2048, group: dist.ProcessGroup | None = None, vocab_start: int = 0) -> None:
        self.chunk_tokens = chunk_tokens
        self.group = group
        self.vocab_start = vocab_start

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, self)  # type: ignore[no-untyped-call]
        return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Since the loss is a sum, the gradient of each chunk is known as soon as its logits are."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: ChunkedCrossEntropy) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        total = torch.zeros(1, dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        for chunk, targets, place in zip(
            torch.split(hidden, options.chunk_tokens),
            torch.split(labels, options.chunk_tokens),
            range(0, len(hidden), options.chunk_tokens),
            strict=True,
        ):
            logits = (chunk @ weight.t()).to(wide)
            loss, grad_logits = _loss_and_gradient(logits, targets, options)
            total += loss
            if grad_hidden is None and grad_weight is None:
                continue
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                part = grad_logits @ weight
                if options.group is not None:
                    dist.all_reduce(part, group=options.group)
                grad_hidden[place : place + len(part)] = part
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ chunk
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_total.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_total).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def _loss_and_gradient(logits: Tensor, labels: Tensor, options: ChunkedCrossEntropy) -> tuple[Tensor, Tensor]:
    """Summed loss [] and the gradient by the logits, which overwrites ``logits`` [N, V of this rank]."""
    trained = labels != IGNORED
    own = labels - options.vocab_start
    here = trained & (own >= 0) & (own < logits.shape[1])
    own = own.where(here, 0)[:, None]
    largest = logits.amax(dim=1, keepdim=True)
    if options.group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=options.group)
    logits -= largest
    target = logits.gather(1, own).where(here[:, None], 0.0)
    logits.exp_()
    total = logits.sum(dim=1, keepdim=True)
    if options.group is not None:
        both = torch.cat((total, target), dim=1)
        dist.all_reduce(both, group=options.group)
        total, target = both[:, :1], both[:, 1:]
    loss = ((total.log() - target).where(trained[:, None], 0.0)).sum()
    logits /= total
    logits.scatter_add_(1, own, -here[:, None].to(logits.dtype))
    logits *= trained[:, None]
    return loss, logits
