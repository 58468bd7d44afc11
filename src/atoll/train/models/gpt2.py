"""GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from atoll.train.models.parts import Attention, Decoder
from atoll.train.recipe.schema import ModelSection


class FeedForward(nn.Module):
    """Two layers with the tanh form of GELU between them."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.ffn_dim)
        self.down = nn.Linear(config.ffn_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class Gpt2Block(nn.Module):
    """Attention and a feed-forward part, each after a norm and added to what came in."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, bias=True)
        self.feed_forward_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, mask: Any, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), mask, rope)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


def build(config: ModelSection) -> Decoder:
    """A GPT-2 of these dimensions, its weights not set. It knows ``max_seq_len`` positions and no more."""
    blocks: list[nn.Module] = [Gpt2Block(config) for _ in range(config.layers)]
    model = Decoder(config, blocks, nn.LayerNorm(config.dim, eps=config.norm_eps))
    model.learned_positions = nn.Embedding(config.max_seq_len, config.dim)
    model.rope = None
    return model
