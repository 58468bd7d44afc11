"""Causal attention of the last positions of a sequence to all of its keys, by the kernels of whole sequences.

Those align a causal mask to the first key. So the queries attend twice: to the keys before them, unmasked, and to the
keys of their own positions, causally. The log-sum-exps join the two, as in ring attention (Liu et al., 2023): in the
backward pass each part takes the joined output and log-sum-exp, and its gradients are its share of the whole's.

Shapes: B batch, S queries, T > S keys, H heads, K kv-heads, E head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten


def attend_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q [B, H, S, E], the last S of T positions, to k and v [B, K, T, E]: [B, H, S, E]."""
    if _has_kernel(q):
        out: Tensor = _Joined.apply(q, k, v)  # type: ignore[no-untyped-call]
        return out
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])


def _has_kernel(q: Tensor) -> bool:
    if not q.is_cuda:
        return q.device.type == "cpu"
    # cuDNN's: on an H100 it takes 0.56 of the time of PyTorch's flash kernel.
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    return torch.version.cuda is not None and narrow and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Output, log-sum-exp, and two tensors that the backward pass of cuDNN's dropout, which is off, wants."""
    if q.is_cuda:
        out, lse, *_, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        return out, lse, seed, offset
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse, None, None


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, random: Any, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor]
    if q.is_cuda:
        nothing = (None, None, None, q.shape[2], k.shape[2])  # no bias, and every sequence is whole
        gradients = _aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, *random, *nothing, 0.0, causal
        )
    else:
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    return gradients


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = k.shape[2] - q.shape[2]
        out, lse, *random = _forward(q, k[:, :, before:], v[:, :, before:], True)
        far, far_lse, *_ = _forward(q, k[:, :, :before], v[:, :, :before], False)
        both = torch.logaddexp(lse, far_lse)
        weight, far_weight = (
            (part - both).exp().view(*out.shape[:3], 1).to(torch.promote_types(out.dtype, part.dtype))
            for part in (lse, far_lse)
        )
        out, lse = (out * weight + far * far_weight).to(out.dtype), both
        ctx.save_for_backward(q, k, v, out, lse, *random)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse, *random = ctx.saved_tensors
        before = k.shape[2] - q.shape[2]
        near = _backward(grad, q, k[:, :, before:], v[:, :, before:], out, lse, random, True)
        far = _backward(grad, q, k[:, :, :before], v[:, :, :before], out, lse, random, False)
        return near[0] + far[0], torch.cat((far[1], near[1]), dim=2), torch.cat((far[2], near[2]), dim=2)
