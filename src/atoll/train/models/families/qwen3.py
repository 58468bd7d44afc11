"""Qwen3, dense (Yang et al., "Qwen3 technical report", 2025): a Llama whose queries and keys are normed head by head,
and whose head width is a number of its own, not D / H.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from atoll.train.models.families.llama import Llama
from atoll.train.models.family import Cut, Family
from atoll.train.models.parts import Attention
from atoll.train.recipe.schema import ModelSection


class Qwen3(Llama):
    """Qwen3."""

    model_types = ("qwen3",)
    architecture = "Qwen3ForCausalLM"
    block_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Llama.block_names,
        "self_attn.q_norm": ("attention.q_norm",),
        "self_attn.k_norm": ("attention.k_norm",),
    }
    permuted = False
    cuts: ClassVar[Mapping[str, Cut]] = {
        **Family.cuts,
        "attention.q_norm": "head_norm",
        "attention.k_norm": "head_norm",
    }
    defaults: ClassVar[Mapping[str, Any]] = {**Llama.defaults, "max_seq_len": 32768, "head_dim": 128}
    windowed = False

    def attention(self, config: ModelSection) -> Attention:
        return Attention(config, head_norm=True)


FAMILY = Qwen3()
