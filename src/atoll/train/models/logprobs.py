"""Log-probabilities of labels, in chunks of tokens, so that logits are never whole in memory.

N tokens, D model, V vocabulary (of this rank, where the tensor-parallel ranks share it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from atoll.train.data.packing import UNTRAINED


class LogProbs(Protocol):
    """How likely a model finds the labels of a micro-batch: what an objective makes its loss of."""

    def nll(self) -> Tensor:
        """The sum of the negative log-probabilities, [1], in float32 or wider: the fastest loss there is."""

    def tokens(self) -> Tensor:
        """The log-probability of each label, [B, S] as the labels, in float32 or wider; 0 where there is none."""


@dataclass(eq=False)
class LogitsLogProbs:
    """Log-probabilities from logits [B, S, V] that a user's own model has made."""

    logits: Tensor
    labels: Tensor

    def nll(self) -> Tensor:
        return self._cross_entropy("sum").reshape(1)

    def tokens(self) -> Tensor:
        return -self._cross_entropy("none").view_as(self.labels)

    def _cross_entropy(self, reduction: str) -> Tensor:
        logits = self.logits.flatten(0, 1).to(_wide(self.logits))
        return F.cross_entropy(logits, self.labels.flatten(), ignore_index=UNTRAINED, reduction=reduction)


@dataclass(eq=False)
class ChunkedLogProbs:
    """Log-probabilities from the hidden state before the output projection.

    Args:
        hidden: [N, D].
        weight: [V, D], or a DTensor of which this rank has a slice.
        labels: N in all, of any shape; -100 where there is none.
        chunk_tokens: tokens whose logits exist at a time.
        group: the tensor-parallel ranks, each of which holds a contiguous slice of the vocabulary; None: one has all.
        vocab_start: first token id of this rank's slice.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    chunk_tokens: int = 2048
    group: dist.ProcessGroup | None = None
    vocab_start: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.weight, DTensor):  # this rank's slice; the gradient finds its way back
            self.weight = self.weight.to_local()

    def nll(self) -> Tensor:
        """As it is a sum, the gradients of each chunk are made with it, where they are wanted."""
        wanted = torch.is_grad_enabled()
        with torch.no_grad():
            total = torch.zeros(1, dtype=_wide(self.hidden), device=self.hidden.device)
            gradients = _Gradients(
                self, by_hidden=wanted and self.hidden.requires_grad, by_weight=wanted and self.weight.requires_grad
            )
            for place, losses, by_logits in self.chunks(with_gradient=gradients.wanted):
                total += losses.sum()
                if by_logits is not None:
                    gradients.add(place, by_logits)
        # One node for each, joined by an addition: pipeline schedules that run the backward pass of inputs and of
        # weights at different times find the place where the two part.
        if gradients.by_hidden is not None:
            total = _Known.apply(self.hidden, total, gradients.by_hidden)  # type: ignore[no-untyped-call]
        if gradients.by_weight is not None:
            nothing = torch.zeros_like(total)
            total = total + _Known.apply(self.weight, nothing, gradients.by_weight)  # type: ignore[no-untyped-call]
        return total

    def tokens(self) -> Tensor:
        """The backward pass makes the logits of each chunk again."""
        out: Tensor = _Tokens.apply(self.hidden, self.weight, self)  # type: ignore[no-untyped-call]
        return out.view_as(self.labels)

    def chunks(self, *, with_gradient: bool) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Of each chunk: its place, the negative log-probabilities [n], and if wanted their gradient by the logits."""
        labels = self.labels.flatten()
        for start in range(0, len(self.hidden), self.chunk_tokens):
            place = slice(start, start + self.chunk_tokens)
            yield place, *self._losses(self.hidden[place] @ self.weight.t(), labels[place], with_gradient)

    def _losses(self, logits: Tensor, labels: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Of ``logits`` [n, V], whose memory is used again: the losses [n], and their gradient in the same format."""
        trained = labels != UNTRAINED
        columns = (labels - self.vocab_start).where(trained, -1)
        has_kernels = _has_kernels(logits)
        if has_kernels:
            from atoll.train.models.softmax import softmax_gradient_, softmax_sums

            largest, sums, target = softmax_sums(logits, columns)
        else:
            exponentials = logits.to(_wide(logits))
            largest, sums, target = _exponentiate_(exponentials, columns)
        own = largest
        if self.group is not None:
            largest = own.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
            both = torch.stack((sums * (own - largest).exp(), target))
            dist.all_reduce(both, group=self.group)
            sums, target = both.unbind()
        normalizers = sums.log() + largest
        losses = (normalizers - target).where(trained, 0.0)
        if not with_gradient:
            return losses, None
        if has_kernels:
            return losses, softmax_gradient_(logits, columns, normalizers.where(trained, torch.inf))
        exponentials *= ((own - largest).exp() / sums).where(trained, 0.0)[:, None]
        column, here = _own(columns, logits.shape[1])
        exponentials.scatter_add_(1, column, -here.to(exponentials.dtype))
        return losses, exponentials.to(logits.dtype)


class _Gradients:
    """Gradients of a loss by the hidden state, in its format, and by the weight, in float32 or wider."""

    def __init__(self, of: ChunkedLogProbs, *, by_hidden: bool, by_weight: bool) -> None:
        self._of = of
        self.wanted = by_hidden or by_weight
        self.by_hidden = torch.empty_like(of.hidden) if by_hidden else None
        self.by_weight = torch.zeros_like(of.weight, dtype=_wide(of.hidden)) if by_weight else None

    def add(self, place: slice, by_logits: Tensor) -> None:
        """Add the part of one chunk."""
        hidden, weight, group = self._of.hidden[place], self._of.weight, self._of.group
        if self.by_hidden is not None:
            part = by_logits @ weight
            if group is not None:
                dist.all_reduce(part, group=group)
            self.by_hidden[place] = part
        if self.by_weight is None:
            return
        if hidden.is_cuda and hidden.dtype != self.by_weight.dtype:  # the product is never rounded to the narrow format
            torch.addmm(self.by_weight, by_logits.t(), hidden, out_dtype=self.by_weight.dtype, out=self.by_weight)
        else:
            self.by_weight += by_logits.t() @ hidden


class _Known(torch.autograd.Function):
    """``value`` [1], as a function of ``x`` with a gradient that is known already."""

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


class _Tokens(torch.autograd.Function):
    """The log-probability of each token, [N]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, of: ChunkedLogProbs) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.options = (of.labels, of.chunk_tokens, of.group, of.vocab_start)
        return -torch.cat([losses for _, losses, _ in of.chunks(with_gradient=False)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        of = ChunkedLogProbs(hidden, weight, *ctx.options)
        gradients = _Gradients(of, by_hidden=ctx.needs_input_grad[0], by_weight=ctx.needs_input_grad[1])
        for place, _, by_logits in of.chunks(with_gradient=True):
            assert by_logits is not None
            gradients.add(place, by_logits.mul_(-grad[place, None]))
        by_weight = gradients.by_weight
        return gradients.by_hidden, None if by_weight is None else by_weight.to(weight.dtype), None


def _exponentiate_(logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``softmax.softmax_sums`` on any device; ``logits`` become their exponentials beside the largest."""
    column, here = _own(columns, logits.shape[1])
    largest, target = logits.amax(dim=1, keepdim=True), logits.gather(1, column)
    sums = logits.sub_(largest).exp_().sum(dim=1)
    return largest[:, 0], sums, target.where(here, 0.0)[:, 0]


def _own(columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The columns that are in [0, width), 0 for others, and whether they are there; both [N, 1]."""
    here = (columns >= 0) & (columns < width)
    return columns.where(here, 0)[:, None], here[:, None]


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
