"""OLMo 2 (OLMo team, "2 OLMo 2 Furious", 2025): a Llama whose blocks norm what comes out of attention and of the
feed-forward part, not what goes in, and whose queries and keys are normed over all heads at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from atoll.train.models.families.llama import Llama
from atoll.train.models.family import Cut, Family
from atoll.train.models.parts import Attention, SwiGLU
from atoll.train.recipe.schema import ModelSection


class WidthNorm(nn.Module):
    """RMSNorm over a width of which each tensor-parallel rank may have a part."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., W] to [..., W]; the mean square is in float32 or wider, as ``nn.RMSNorm``'s is."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


class Olmo2Attention(Attention):
    """Attention whose queries and keys are normed before they are split into heads."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__(config)
        self.q_norm = WidthNorm(config.heads * self.head_dim, config.norm_eps)
        self.k_norm = WidthNorm(config.num_kv_heads * self.head_dim, config.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.q_norm is not None and self.k_norm is not None
        parts = (self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return q, k, v


class Olmo2Block(nn.Module):
    """Attention and a gated feed-forward part, each normed and added to what came in."""

    def __init__(self, config: ModelSection, hidden_dim: int) -> None:
        super().__init__()
        self.attention = Olmo2Attention(config)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = SwiGLU(config.dim, hidden_dim)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: Tensor, mask: Any, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x = x + self.attention_norm(self.attention(x, mask, rope))
        out: Tensor = x + self.feed_forward_norm(self.feed_forward(x))
        return out


class Olmo2(Llama):
    """OLMo 2."""

    model_types = ("olmo2",)
    architecture = "Olmo2ForCausalLM"
    block_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{theirs: ours for theirs, ours in Llama.block_names.items() if not theirs.endswith("layernorm")},
        "self_attn.q_norm": ("attention.q_norm",),
        "self_attn.k_norm": ("attention.k_norm",),
        "post_attention_layernorm": ("attention_norm",),
        "post_feedforward_layernorm": ("feed_forward_norm",),
    }
    permuted = False
    cuts: ClassVar[Mapping[str, Cut]] = {
        **Family.cuts,
        "attention.q_norm": "width_norm",
        "attention.k_norm": "width_norm",
    }
    # The norms that follow make them wide again, and at 0 their gradients would be 1 / sqrt(norm_eps) times as large.
    residual = ()
    deep = ()
    defaults: ClassVar[Mapping[str, Any]] = {**Llama.defaults, "norm_eps": 1e-5}

    def block(self, config: ModelSection) -> nn.Module:
        return Olmo2Block(config, self.hidden_dim(config))

    def check(self, config: ModelSection) -> None:
        super().check(config)
        if config.size_of_head * config.heads != config.dim:
            raise ValueError(f"head_dim = {config.head_dim}: of olmo2 it is dim / heads, so leave it out")


FAMILY = Olmo2()
