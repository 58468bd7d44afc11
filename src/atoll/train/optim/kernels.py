"""Triton kernels of the optimizers; each does in one pass over memory what its reference in ``adamw.py`` or
``muon.py`` does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_BLOCK = 1024
_ROWS, _COLUMNS, _DEPTH = 128, 256, 64  # a tile of a symmetric product, and what is read for it at a time


@triton.jit(do_not_specialize=["first", "key"])  # type: ignore[untyped-decorator]
def _adamw_step(  # type: ignore[no-untyped-def]
    weight, gradient, mean, square, divisor, found_inf, count, first, key,
    decay, lerp1, beta2, lerp2, correction2, eps, rate, rounds: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = (place < count) & (tl.load(found_inf) == 0.0)
    g = tl.load(gradient + place, mask=inside).to(tl.float32) / tl.load(divisor)
    m = tl.load(mean + place, mask=inside).to(tl.float32)
    v = tl.load(square + place, mask=inside).to(tl.float32)
    w = tl.load(weight + place, mask=inside) * decay
    m += (g - m) * lerp1
    v = v * beta2 + g * g * lerp2
    w += rate * (m / (tl.sqrt(v) / correction2 + eps))
    tl.store(weight + place, w, mask=inside)
    if rounds:
        # Wellons' lowbias32, as ``adamw._hashed``.
        bits = (place + first).to(tl.uint32) ^ key.to(tl.uint32)
        bits ^= bits >> 16
        bits *= 0x7FEB352D
        bits ^= bits >> 15
        bits *= 0x846CA68B
        bits ^= bits >> 16
        m = ((m.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        v = ((v.to(tl.uint32, bitcast=True) + (bits >> 16)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(mean + place, m.to(mean.dtype.element_ty), mask=inside)
    tl.store(square + place, v.to(square.dtype.element_ty), mask=inside)


def adamw_step(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    group: dict[str, Any],
    divisor: Tensor,
    found_inf: Tensor,
    *,
    first: int,
    key: int,
    step: float,
) -> None:
    """One AdamW step of one tensor, in place: with moments in fp32 and a bf16 gradient 26 bytes moved a parameter.

    Args:
        weight: contiguous, fp32; ``gradient`` of the same shape in fp32 or bf16; ``mean`` and ``square`` too.
        group: the optimizer's, with ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        divisor: [] fp32, of the gradient.
        found_inf: [] fp32, 1 where nothing may move.
        first: place of the first element in the stream of chance, ``key`` the stream's 32-bit key; for bf16 moments.
        step: number of this step, from 1.
    """
    count = weight.numel()
    if count == 0:
        return
    (beta1, beta2), rate = group["betas"], group["lr"]
    _adamw_step[(triton.cdiv(count, _BLOCK),)](
        weight, gradient, mean, square, divisor, found_inf, count, first, key,
        1.0 - rate * group["weight_decay"], 1.0 - beta1, beta2, 1.0 - beta2,
        (1.0 - beta2**step) ** 0.5, group["eps"], -rate / (1.0 - beta1**step),
        rounds=mean.dtype == torch.bfloat16, block=_BLOCK,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _nesterov(  # type: ignore[no-untyped-def]
    momentum, gradient, out, divisor, found_inf, count, share, block: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = (place < count) & (tl.load(found_inf) == 0.0)
    g = tl.load(gradient + place, mask=inside).to(tl.float32) / tl.load(divisor)
    m = tl.load(momentum + place, mask=inside)
    m += (g - m) * (1.0 - share)
    tl.store(momentum + place, m, mask=inside)
    tl.store(out + place, (g + (m - g) * share).to(out.dtype.element_ty), mask=inside)


def nesterov(momentum: Tensor, gradient: Tensor, out: Tensor, share: float, divisor: Tensor, found_inf: Tensor) -> None:
    """Move ``momentum`` towards the gradient by 1 - ``share``; ``out`` is the gradient towards that by ``share``.

    The gradient is ``gradient`` / ``divisor``. Nothing is written where ``found_inf`` is 1. All contiguous;
    ``momentum`` in fp32.
    """
    count = momentum.numel()
    if count:
        _nesterov[(triton.cdiv(count, 2 * _BLOCK),)](
            momentum, gradient, out, divisor, found_inf, count, share, block=2 * _BLOCK
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _decay_and_add(  # type: ignore[no-untyped-def]
    weight, direction, found_inf, count, decay, rate, block: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = (place < count) & (tl.load(found_inf) == 0.0)
    w = tl.load(weight + place, mask=inside) * decay + rate * tl.load(direction + place, mask=inside).to(tl.float32)
    tl.store(weight + place, w, mask=inside)


def decay_and_add(weight: Tensor, direction: Tensor, found_inf: Tensor, *, decay: float, rate: float) -> None:
    """``weight`` = ``decay`` ``weight`` + ``rate`` ``direction``, in place, where ``found_inf`` is 0.

    Contiguous; ``direction`` in any format.
    """
    count = weight.numel()
    if count:
        _decay_and_add[(triton.cdiv(count, 2 * _BLOCK),)](
            weight, direction, found_inf, count, decay, rate, block=2 * _BLOCK
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _symmetric_product(  # type: ignore[no-untyped-def]
    left, right, add, out, mirrored, alpha, beta, side: tl.constexpr, depth: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, tall: tl.constexpr, adds: tl.constexpr,
):  # fmt: skip
    row, column, matrix = tl.program_id(0) * rows, tl.program_id(1) * columns, tl.program_id(2)
    if column > row:
        return  # above the diagonal
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for k in tl.range(0, depth, step):
        if tall:
            a = left.load([matrix * depth + k, row]).T
            b = right.load([matrix * depth + k, column])
        else:
            a = left.load([matrix * side + row, k])
            b = right.load([matrix * side + column, k]).T
        total = tl.dot(a, b, total)
    total *= alpha
    if adds:
        total += beta * add.load([matrix * side + row, column]).to(tl.float32)
    made = total.to(out.dtype)
    out.store([matrix * side + row, column], made)
    if column + columns <= row:
        mirrored.store([matrix * side + column, row], made.T)


def symmetric_product(
    left: Tensor,
    right: Tensor,
    add: Tensor | None = None,
    *,
    dtype: torch.dtype,
    tall: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Tensor:
    """``alpha`` left rightᵀ + ``beta`` add, which is symmetric: tiles above the diagonal are copied from below it.

    Args:
        left: [N, M, K], contiguous, bf16 or fp16, M divisible by 256 and K by 64; ``right`` likewise.
        add: [N, M, M], symmetric.
        dtype: of what comes back.
        tall: they are [N, K, M], and leftᵀ right is made.

    Returns:
        [N, M, M].
    """
    count, side, depth = left.shape
    if tall:
        side, depth = depth, side
    out = torch.empty((count, side, side), dtype=dtype, device=left.device)
    flat = out.view(-1, side)

    def tiles(matrices: Tensor, rows: int, columns: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(matrices.view(-1, matrices.shape[-1]), [rows, columns])

    def read(matrices: Tensor, size: int) -> TensorDescriptor:
        return tiles(matrices, _DEPTH, size) if tall else tiles(matrices, size, _DEPTH)

    _symmetric_product[(side // _ROWS, side // _COLUMNS, count)](
        read(left, _ROWS), read(right, _COLUMNS), tiles(flat if add is None else add, _ROWS, _COLUMNS),
        tiles(flat, _ROWS, _COLUMNS), tiles(flat, _COLUMNS, _ROWS), alpha, beta, side=side, depth=depth,
        rows=_ROWS, columns=_COLUMNS, step=_DEPTH, tall=tall, adds=add is not None, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out
