"""Llama 3 (Grattafiori et al., "The Llama 3 herd of models", 2024), and what has its shape, as Mistral and SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from atoll.train.models.config_json import ConfigJson
from atoll.train.models.family import Family
from atoll.train.models.parts import Attention, Decoder, PreNormBlock, SwiGLU
from atoll.train.recipe.schema import ModelSection

_ROPE = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "attention_factor")}


class Llama(Family):
    """Llama; its kin override what they do differently, ``block`` and ``attention`` among it."""

    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral")
    architecture = "LlamaForCausalLM"
    outer_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "embed",
        "model.norm": "norm",
        "lm_head": "head",
    }
    block_prefix = "model.layers"
    block_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "self_attn.q_proj": ("attention.q",),
        "self_attn.k_proj": ("attention.k",),
        "self_attn.v_proj": ("attention.v",),
        "self_attn.o_proj": ("attention.o",),
        "mlp.gate_proj": ("feed_forward.gate",),
        "mlp.up_proj": ("feed_forward.up",),
        "mlp.down_proj": ("feed_forward.down",),
        "input_layernorm": ("attention_norm",),
        "post_attention_layernorm": ("feed_forward_norm",),
    }
    permuted = True
    config_keys: ClassVar[Mapping[str, str]] = {
        "layers": "num_hidden_layers",
        "dim": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "hidden_dim": "intermediate_size",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "kv_heads": None,
        "head_dim": None,
        "max_seq_len": 2048,
        "norm_eps": 1e-6,
        "tied": False,
    }
    computes: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
    }
    deep: ClassVar[tuple[str, ...]] = ("feed_forward.up",)
    windowed: ClassVar[bool] = True  # whether ``sliding_window`` counts without ``use_sliding_window``

    def block(self, config: ModelSection) -> nn.Module:
        norm = partial(nn.RMSNorm, config.dim, eps=config.norm_eps)
        return PreNormBlock(norm, self.attention(config), SwiGLU(config.dim, self.hidden_dim(config)))

    def attention(self, config: ModelSection) -> Attention:
        return Attention(config)

    def build(self, config: ModelSection) -> Decoder:
        blocks = [self.block(config) for _ in range(config.layers)]
        return Decoder(config, blocks, nn.RMSNorm(config.dim, eps=config.norm_eps))

    def hidden_dim(self, config: ModelSection) -> int:
        # 8/3 of ``dim``, so that three matrices have the size of two of 4 times ``dim``.
        return config.hidden_dim or -(-8 * config.dim // (3 * 64)) * 64

    def read_config(self, config: ConfigJson) -> dict[str, Any]:
        fields = super().read_config(config)
        if fields.get("head_dim", 0) * fields["heads"] == fields["dim"]:
            del fields["head_dim"]
        fields["rope_theta"], fields["rope_scaling"] = config.rope(fields["max_seq_len"])
        # Within its window a token sees all before it, as here: shorter sequences are exact.
        window = config.window(self.windowed)
        return {**fields, "max_seq_len": min(fields["max_seq_len"], window or fields["max_seq_len"])}

    def write_config(self, config: ModelSection) -> dict[str, Any]:
        found = super().write_config(config)
        rope: dict[str, Any] = {"rope_type": "default"}
        if (scaling := config.rope_scaling) is not None:
            rope = {"rope_type": scaling.kind, "factor": scaling.factor}
            rope["original_max_position_embeddings"] = scaling.original_max_seq_len
            rope |= {key: value for key in _ROPE[scaling.kind] if (value := getattr(scaling, key)) is not None}
            found["rope_scaling"] = rope  # of transformers 4; 5 reads rope_parameters
        found["rope_theta"] = config.rope_theta
        found["rope_parameters"] = {**rope, "rope_theta": config.rope_theta}
        return found


FAMILY = Llama()
