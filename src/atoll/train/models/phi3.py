"""Phi-3 (Abdin et al., "Phi-3 technical report", 2024): the shape of a Llama.

Published checkpoints hold q, k, v as one matrix, and gate, up as another; here they are apart, as everywhere, so that
tensor parallelism cuts them alike. Those of phi3-mini-4k name a sliding window of 2,047 tokens: each token here sees
all before it, which is the same up to that length and differs beyond.
"""

from __future__ import annotations

from torch import nn

from atoll.train.models.llama import LlamaBlock
from atoll.train.models.parts import Decoder
from atoll.train.recipe.schema import ModelSection


def build(config: ModelSection) -> Decoder:
    """A Phi-3 of these dimensions, its weights not set."""
    blocks: list[nn.Module] = [LlamaBlock(config) for _ in range(config.layers)]
    return Decoder(config, blocks, nn.RMSNorm(config.dim, eps=config.norm_eps))
