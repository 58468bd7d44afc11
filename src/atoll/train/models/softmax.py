"""Triton kernels of the cross-entropy: two passes over 16-bit logits instead of ten over 32-bit ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _sums(logits, columns, largest, sums, targets, width, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top, total = -float("inf"), 0.0
    for begin in range(0, width, block):
        place = begin + tl.arange(0, block)
        x = tl.load(logits + place, mask=place < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=0)
        top = higher
    column = tl.load(columns + row)
    own = (column >= 0) & (column < width)
    tl.store(largest + row, top)
    tl.store(sums + row, total)
    tl.store(targets + row, tl.load(logits + column, mask=own, other=0.0).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(logits, columns, normalizers, width, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column, normalizer = tl.load(columns + row), tl.load(normalizers + row)
    for begin in range(0, width, block):
        place = begin + tl.arange(0, block)
        x = tl.load(logits + place, mask=place < width, other=0.0).to(tl.float32)
        x = tl.exp(x - normalizer) - (place == column).to(tl.float32)
        tl.store(logits + place, x.to(logits.dtype.element_ty), mask=place < width)


def softmax_sums(logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per row of ``logits`` [N, V]: the largest, the sum of exponentials beside it, and that at ``columns`` [N] or 0.

    Args:
        logits: 16 or 32 bits; the last dimension contiguous, V at least 1.
        columns: int64; one outside of [0, V) is none.

    Returns:
        each [N] in fp32.
    """
    rows, width = logits.shape
    largest, sums, targets = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    if rows:
        _sums[(rows,)](logits, columns, largest, sums, targets, width, logits.stride(0), block=_BLOCK, num_warps=8)
    return largest, sums, targets


def softmax_gradient_(logits: Tensor, columns: Tensor, normalizers: Tensor) -> Tensor:
    """exp(logits - normalizers) - [column = columns], in the place of ``logits``.

    Args:
        normalizers: [N] fp32, the logarithm of the sum of a row's exponentials; infinity makes zeros of it.
    """
    rows, width = logits.shape
    if rows:
        _gradient[(rows,)](logits, columns, normalizers, width, logits.stride(0), block=_BLOCK, num_warps=8)
    return logits
