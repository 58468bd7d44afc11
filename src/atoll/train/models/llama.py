"""Llama 3 (Grattafiori et al., "The Llama 3 herd of models", 2024), and what has its shape: SmolLM2, many others.

Qwen3, dense (Yang et al., "Qwen3 technical report", 2025): queries and keys are normed head by head, and the head width
is a number of its own, not D / H.

Phi-3 (Abdin et al., "Phi-3 technical report", 2024): published checkpoints hold q, k, v as one matrix, and gate, up as
another; here they are apart, as everywhere, so that tensor parallelism cuts them alike. Those of phi3-mini-4k name a
sliding window of 2,047 tokens: each token here sees all before it, which is the same up to that length.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from atoll.train.models.parts import Attention, Decoder, SwiGLU
from atoll.train.recipe.schema import ModelSection


class LlamaBlock(nn.Module):
    """Attention and a gated feed-forward part, each after a norm and added to what came in."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, head_norm=config.family == "qwen3")
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = SwiGLU(config)

    def forward(self, x: Tensor, mask: Any, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), mask, rope)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


def build(config: ModelSection) -> Decoder:
    """A Llama, Qwen3 or Phi-3 of these dimensions, its weights not set."""
    blocks: list[nn.Module] = [LlamaBlock(config) for _ in range(config.layers)]
    return Decoder(config, blocks, nn.RMSNorm(config.dim, eps=config.norm_eps))
