"""Llama 3 (Grattafiori et al., "The Llama 3 herd of models", 2024), and what has its shape, as Mistral and SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from atoll.train.models.config_json import ConfigJson
from atoll.train.models.family import Family
from atoll.train.models.parts import Attention, Decoder, SwiGLU
from atoll.train.recipe.schema import ModelSection


class LlamaBlock(nn.Module):
    """Attention and a gated feed-forward part, each after a norm and added to what came in."""

    def __init__(self, config: ModelSection, hidden_dim: int, *, head_norm: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, head_norm=head_norm)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = SwiGLU(config.dim, hidden_dim)

    def forward(self, x: Tensor, mask: Any, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), mask, rope)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Llama(Family):
    """Llama. Others of its kind override what they do differently."""

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
        "dim": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "layers": "num_hidden_layers",
    }
    deep: ClassVar[tuple[str, ...]] = ("feed_forward.up",)
    # What config.json leaves out.
    default_length: ClassVar[int] = 2048
    default_eps: ClassVar[float] = 1e-6
    default_head_dim: ClassVar[int | None] = None
    windowed: ClassVar[bool] = True  # whether ``sliding_window`` counts without ``use_sliding_window``

    def block(self, config: ModelSection) -> nn.Module:
        """One layer."""
        return LlamaBlock(config, self.hidden_dim(config))

    def build(self, config: ModelSection) -> Decoder:
        """As ``Family.build``."""
        blocks = [self.block(config) for _ in range(config.layers)]
        return Decoder(config, blocks, nn.RMSNorm(config.dim, eps=config.norm_eps))

    def hidden_dim(self, config: ModelSection) -> int:
        """As ``Family.hidden_dim``: 8/3 of ``dim`` unless given, so that three matrices have the size of two of 4."""
        return config.hidden_dim or -(-8 * config.dim // (3 * 64)) * 64

    def read_config(self, config: ConfigJson) -> dict[str, Any]:
        """As ``Family.read_config``."""
        config.must("hidden_act", ("silu",))
        for key in ("attention_bias", "mlp_bias"):
            config.must(key, (False, None))
        dim, heads = config.number("hidden_size"), config.number("num_attention_heads")
        length = config.number("max_position_embeddings", self.default_length)
        window = config.window(self.windowed)
        theta, scaling = config.rope(length)
        head_dim = self.default_head_dim
        if head_dim is not None or config.has("head_dim"):
            head_dim = config.number("head_dim", head_dim)
        return {
            "layers": config.number("num_hidden_layers"),
            "dim": dim,
            "heads": heads,
            "kv_heads": config.number("num_key_value_heads", heads),
            "head_dim": None if head_dim is None or head_dim * heads == dim else head_dim,
            "hidden_dim": config.number("intermediate_size"),
            "vocab_size": config.number("vocab_size"),
            # Within its window a token sees all before it, as here: shorter sequences are exact.
            "max_seq_len": min(length, window or length),
            "tied": config.flag("tie_word_embeddings", False),
            "norm_eps": config.positive("rms_norm_eps", self.default_eps),
            "rope_theta": theta,
            "rope_scaling": scaling,
        }

    def write_config(self, config: ModelSection) -> dict[str, Any]:
        """As ``Family.write_config``."""
        found: dict[str, Any] = {
            "hidden_size": config.dim,
            "intermediate_size": self.hidden_dim(config),
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.size_of_head,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_seq_len,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "attention_bias": False,
            "mlp_bias": False,
        }
        if (scaling := config.rope_scaling) is not None:
            rope: dict[str, Any] = {
                "rope_type": scaling.kind,
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
            if scaling.kind == "llama3":
                rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
            else:
                rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
                rope |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
            found["rope_scaling"] = rope
            found["rope_parameters"] = {**rope, "rope_theta": config.rope_theta}
        return found


FAMILY = Llama()
