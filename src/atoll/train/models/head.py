"""The output projection and its loss, in chunks of tokens, so that logits are never whole in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


@dataclass(eq=False)
class ChunkedCrossEntropy:
    """The sum of negative log-likelihoods; gradients, where wanted, are computed with the loss, chunk by chunk.

    Args:
        chunk_tokens: tokens whose logits exist at a time.
        group: the tensor-parallel ranks, each of which holds a contiguous slice of the vocabulary; None: one has all.
        vocab_start: first token id of this rank's slice.
    """

    chunk_tokens: int = 2048
    group: dist.ProcessGroup | None = None
    vocab_start: int = 0

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """The loss [1], in float32 or wider, of ``hidden`` [N, D] under ``weight`` [V, D] and ``labels`` [N]."""
        if isinstance(weight, DTensor):  # this rank's slice; the gradient finds its way back
            weight = weight.to_local()
        wanted = torch.is_grad_enabled()
        with torch.no_grad():
            total, grad_hidden, grad_weight = _loss_and_gradients(
                hidden,
                weight,
                labels,
                self,
                wants_hidden=wanted and hidden.requires_grad,
                wants_weight=wanted and weight.requires_grad,
            )
        # One node for each, joined by an addition: pipeline schedules that run the backward pass of inputs and of
        # weights at different times find the place where the two part.
        if grad_hidden is not None:
            total = _known(hidden, total, grad_hidden)
        if grad_weight is not None:
            total = total + _known(weight, torch.zeros_like(total), grad_weight)
        return total


def _known(x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """``value`` [1], as a function of ``x`` with a gradient that is known already."""
    out: Tensor = _Known.apply(x, value, gradient)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


class _Known(torch.autograd.Function):
    """Since the loss is a sum, the gradient of each chunk is known as soon as its logits are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = x.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        out = torch.empty_like(gradient, dtype=ctx.dtype)
        return torch.mul(gradient, grad_value.to(gradient.dtype), out=out), None, None


def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: ChunkedCrossEntropy,
    *,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Summed loss [1], its gradient by ``hidden`` in that dtype and by ``weight`` in float32 or wider."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    total = torch.zeros(1, dtype=wide, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if wants_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
    for start in range(0, len(hidden), options.chunk_tokens):
        place = slice(start, start + options.chunk_tokens)
        logits = hidden[place] @ weight.t()
        wanted = wants_hidden or wants_weight
        loss, grad_logits = (_on_gpu if _has_kernels(logits) else _plainly)(logits, labels[place], options, wanted)
        total += loss
        if grad_logits is None:
            continue
        if grad_hidden is not None:
            part = grad_logits @ weight
            if options.group is not None:
                dist.all_reduce(part, group=options.group)
            grad_hidden[place] = part
        if grad_weight is not None:
            _add_product(grad_weight, grad_logits.t(), hidden[place])
    return total, grad_hidden, grad_weight


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to ``total``, which may be wider; on a GPU the product is never rounded to the narrow format."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64 and logits.shape[1] > 0


def _on_gpu(
    logits: Tensor, labels: Tensor, options: ChunkedCrossEntropy, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """As ``_plainly``, by two Triton kernels; the gradient takes the place of ``logits``."""
    from atoll.train.models.softmax import softmax_gradient_, softmax_sums

    columns = labels - options.vocab_start
    columns = columns.where(labels != IGNORED, -1)
    largest, sums, target = softmax_sums(logits, columns)
    if options.group is not None:
        own = largest
        largest = own.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=options.group)
        both = torch.stack((sums * (own - largest).exp(), target))
        dist.all_reduce(both, group=options.group)
        sums, target = both.unbind()
    normalizers = sums.log() + largest
    trained = labels != IGNORED
    loss = (normalizers - target).where(trained, 0.0).sum()
    if not wants_gradient:
        return loss, None
    return loss, softmax_gradient_(logits, columns, normalizers.where(trained, torch.inf))


def _plainly(
    logits: Tensor, labels: Tensor, options: ChunkedCrossEntropy, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Summed loss [] of ``logits`` [N, V of this rank], and where wanted its gradient by them, in their format."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss, sums = _loss(wide, labels, options)
    return loss, _gradient(wide, sums, labels, options).to(logits.dtype) if wants_gradient else None


def _loss(logits: Tensor, labels: Tensor, options: ChunkedCrossEntropy) -> tuple[Tensor, Tensor]:
    """Summed loss [] and, per token, the sum of exponentials [N, 1]; ``logits`` [N, V of this rank] become these."""
    trained = labels != IGNORED
    own, here = _own(labels, logits.shape[1], options)
    if logits.shape[1]:
        largest = logits.amax(dim=1, keepdim=True)
        target = logits.gather(1, own)
    else:  # more ranks than the vocabulary has slices
        largest = logits.new_full((len(logits), 1), -torch.inf)
        target = largest
    if options.group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=options.group)
    target = (target - largest).where(here, 0.0)
    logits.sub_(largest).exp_()
    sums = logits.sum(dim=1, keepdim=True)
    if options.group is not None:
        both = torch.cat((sums, target), dim=1)
        dist.all_reduce(both, group=options.group)
        sums, target = both[:, :1], both[:, 1:]
    return (sums.log() - target).where(trained[:, None], 0.0).sum(), sums


def _gradient(exponentials: Tensor, sums: Tensor, labels: Tensor, options: ChunkedCrossEntropy) -> Tensor:
    """The gradient by the logits, in the place of their exponentials [N, V of this rank]."""
    exponentials /= sums
    if exponentials.shape[1]:
        own, here = _own(labels, exponentials.shape[1], options)
        exponentials.scatter_add_(1, own, -here.to(exponentials.dtype))
    exponentials *= (labels != IGNORED)[:, None]
    return exponentials


def _own(labels: Tensor, width: int, options: ChunkedCrossEntropy) -> tuple[Tensor, Tensor]:
    """Column of each label in this rank's slice of the vocabulary, and whether it is there; both [N, 1]."""
    own = labels - options.vocab_start
    here = (labels != IGNORED) & (own >= 0) & (own < width)
    return own.where(here, 0)[:, None], here[:, None]
