"""Qwen3, dense (Yang et al., "Qwen3 technical report", 2025): a Llama whose queries and keys are normed head by head.

The head width is a number of its own there, not D / H: recipes give ``head_dim``.
"""

from __future__ import annotations

from torch import nn

from atoll.train.models.llama import LlamaBlock
from atoll.train.models.parts import Decoder
from atoll.train.recipe.schema import ModelSection


def build(config: ModelSection) -> Decoder:
    """A Qwen3 of these dimensions, its weights not set."""
    blocks: list[nn.Module] = [LlamaBlock(config, head_norm=True) for _ in range(config.layers)]
    return Decoder(config, blocks, nn.RMSNorm(config.dim, eps=config.norm_eps))
