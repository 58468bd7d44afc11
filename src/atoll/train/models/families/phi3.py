"""Phi-3 (Abdin et al., "Phi-3 technical report", 2024): a Llama whose published checkpoints hold q, k, v as one matrix,
and gate, up as another; here they are apart, as everywhere, so that tensor parallelism cuts them alike. Those of
phi3-mini-4k name a sliding window of 2,047 tokens: each token here sees all before it, which is the same up to that
length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from atoll.core.errors import ConfigError
from atoll.train.models.families.llama import Llama
from atoll.train.recipe.schema import ModelSection


class Phi3(Llama):
    """Phi-3."""

    model_types = ("phi3",)
    architecture = "Phi3ForCausalLM"
    block_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "self_attn.qkv_proj": ("attention.q", "attention.k", "attention.v"),
        "self_attn.o_proj": ("attention.o",),
        "mlp.gate_up_proj": ("feed_forward.gate", "feed_forward.up"),
        "mlp.down_proj": ("feed_forward.down",),
        "input_layernorm": ("attention_norm",),
        "post_attention_layernorm": ("feed_forward_norm",),
    }
    permuted = False
    defaults: ClassVar[Mapping[str, Any]] = {**Llama.defaults, "max_seq_len": 4096, "norm_eps": 1e-5}

    def write_config(self, config: ModelSection) -> dict[str, Any]:
        if config.rope_scaling is not None:
            raise ConfigError(
                f"[model] rope_scaling = {config.rope_scaling.kind!r} with family = 'phi3' cannot be exported: there "
                "transformers knows 'longrope' only. The same network is family = 'llama'"
            )
        window = {"sliding_window": None, "original_max_position_embeddings": config.max_seq_len}
        return super().write_config(config) | window


FAMILY = Phi3()
