"""Attention kernels: one choice a run, made at the start.

Shapes: B batch, S sequence (queries), T sequence (keys), H heads, K kv-heads, E head width.

A kernel makes what its mask is, once a forward pass for all blocks, and attends with it. Context parallelism and
generation have kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.core.errors import ConfigError
from atoll.train.recipe.schema import Recipe

_BLOCK = 128  # queries and keys of a block; FlexAttention's own default
_aten = torch.ops.aten


class SdpaKernel:
    """PyTorch's scaled dot-product attention, causal; the base of other kernels.

    With documents apart it needs a dense mask, which no flash kernel takes: all S² products are made.
    """

    def document_mask(self, documents: Tensor | None) -> Any:
        """What ``attend`` takes as its mask, of each token's document, [B, S]; None where they are not told apart."""
        if documents is None:
            return None
        places = torch.arange(documents.shape[1], device=documents.device)
        return self.mask(document_starts(documents), places, documents.shape[1])

    def mask(self, starts: Tensor, places: Tensor, num_keys: int) -> Any:
        """The mask of any queries of a sequence, here [B, 1, S, T], true where a query sees a key.

        Args:
            starts: [B, S] int64, the first key that each query sees: where its document begins in the sequence.
            places: [S] int64, the last key that it sees: where it is in the sequence.
            num_keys: length of the sequence.
        """
        keys = torch.arange(num_keys, device=places.device)
        return ((keys >= starts[..., None]) & (keys <= places[:, None]))[:, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Attention of q [B, S, H, E] to k and v [B, T, K, E], where H is a multiple of K: [B, S, H, E].

        Without a mask it is causal, and the queries are the last S of T positions.
        """
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if mask is None and q.shape[2] != k.shape[2]:
            return attend_last(q, k, v).transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return out.transpose(1, 2)


class FlexKernel(SdpaKernel):
    """FlexAttention (Dong et al., 2024) over a block mask, which skips every 128 × 128 block that no query of its rows
    sees; without a mask as the base. GPU only, always compiled.

    Documents apart cost less with it than the borderless causal kernel.
    """

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        # Uncompiled it makes the whole [S, T] product; inside a compiled block this is compiled with the block.
        self.flex: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True)

    def mask(self, starts: Tensor, places: Tensor, num_keys: int) -> Any:
        """A ``BlockMask``, made of the first and last key that each block of queries sees, without an S × S mask."""
        from torch.nn.attention.flex_attention import BlockMask

        partial, full = _blocks(starts, places, num_keys)
        first, last = starts.int(), places.int()  # in 64 bits they take twice the registers

        def sees(b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= first[b, query]) & (key <= last[query])

        return BlockMask.from_kv_blocks(
            *_listed(partial),
            *_listed(full),
            BLOCK_SIZE=_BLOCK,
            mask_mod=sees,
            seq_lengths=(places.shape[0], num_keys),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        if mask is None:
            return super().attend(q, k, v, None)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out: Tensor = self.flex(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)


def _blocks(starts: Tensor, places: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Which blocks of keys each block of queries sees in part, and which wholly: each [B, S/128, T/128] of booleans."""
    spare = -places.shape[0] % _BLOCK  # the last block's missing queries are as its last one
    places = torch.cat((places, places[-1:].expand(spare))).view(-1, _BLOCK)
    starts = torch.cat((starts, starts[:, -1:].expand(-1, spare)), dim=1).view(starts.shape[0], -1, _BLOCK)
    block = torch.arange(-(-num_keys // _BLOCK), device=places.device)
    seen = (block >= starts.amin(-1)[..., None] // _BLOCK) & (block <= places.amax(-1)[:, None] // _BLOCK)
    full = (block * _BLOCK >= starts.amax(-1)[..., None]) & ((block + 1) * _BLOCK <= places.amin(-1)[:, None] + 1)
    return seen & ~full, full


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of each block of queries: how many blocks of keys, [B, 1, S/128]; their numbers first, [B, 1, S/128, T/128]."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


def document_starts(documents: Tensor) -> Tensor:
    """Where the document of each token begins, [B, S], from the number of each token's document, [B, S]."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(begins, places, 0).cummax(dim=1).values


def kernel_name(recipe: Recipe, device: str) -> str:
    """The kernel of a run on ``device`` (``cuda`` or ``cpu``): ``flex`` or ``sdpa``.

    Raises:
        ConfigError: the recipe names one that can't be had there.
    """
    wanted = recipe.compile.attention
    able = device == "cuda" and recipe.precision.compute != "fp64" and recipe.model.size_of_head >= 16
    if wanted == "flex" and not able:
        raise ConfigError(
            '[compile] attention = "flex" needs a GPU, heads of 16 or wider and [precision] compute other than fp64; '
            'set "auto" or "sdpa"'
        )
    if wanted == "auto":
        return "flex" if able and recipe.data.isolate_documents else "sdpa"
    return wanted


KERNELS = {"sdpa": SdpaKernel, "flex": FlexKernel}


def use_kernel(model: nn.Module, kernel: SdpaKernel) -> None:
    """Have every part of ``model`` that masks or attends use this one."""
    for module in model.modules():
        if hasattr(module, "attention_kernel"):
            module.attention_kernel = kernel  # type: ignore[assignment]


# ------------------------------------------------------------------------------- the last positions, without a mask
# The kernels of whole sequences align a causal mask to the first key. So the queries attend twice: to the keys before
# them, unmasked, and to the keys of their own positions, causally. The log-sum-exps join the two, as in ring attention
# (Liu et al., 2023): in the backward pass each part takes the joined output and log-sum-exp, and its gradients are its
# share of the whole's.
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
