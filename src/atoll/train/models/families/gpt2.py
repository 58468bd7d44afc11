"""GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from atoll.core.errors import ConfigError
from atoll.train.models.family import Family
from atoll.train.models.parts import Attention, Decoder, PreNormBlock
from atoll.train.recipe.schema import ModelSection


class FeedForward(nn.Module):
    """Two layers with the tanh form of GELU between them."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden_dim)
        self.down = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class Gpt2(Family):
    """GPT-2. It knows ``max_seq_len`` positions and no more."""

    model_types = ("gpt2",)
    architecture = "GPT2LMHeadModel"
    outer_names: ClassVar[Mapping[str, str]] = {
        "transformer.wte": "embed",
        "transformer.wpe": "learned_positions",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    }
    block_prefix = "transformer.h"
    block_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attn.c_attn": ("attention.q", "attention.k", "attention.v"),
        "attn.c_proj": ("attention.o",),
        "mlp.c_fc": ("feed_forward.up",),
        "mlp.c_proj": ("feed_forward.down",),
        "ln_1": ("attention_norm",),
        "ln_2": ("feed_forward_norm",),
    }
    transposed = True
    rotary = False
    config_keys: ClassVar[Mapping[str, str]] = {
        "layers": "n_layer",
        "dim": "n_embd",
        "heads": "n_head",
        "hidden_dim": "n_inner",
        "max_seq_len": "n_positions",
        "norm_eps": "layer_norm_epsilon",
    }
    defaults: ClassVar[Mapping[str, Any]] = {"hidden_dim": None, "max_seq_len": 1024, "norm_eps": 1e-5, "tied": True}
    computes: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }

    def build(self, config: ModelSection) -> Decoder:
        norm = partial(nn.LayerNorm, config.dim, eps=config.norm_eps)
        blocks: list[nn.Module] = [
            PreNormBlock(norm, Attention(config, bias=True), FeedForward(config.dim, self.hidden_dim(config)))
            for _ in range(config.layers)
        ]
        model = Decoder(config, blocks, norm())
        model.learned_positions = nn.Embedding(config.max_seq_len, config.dim)
        model.rope = None
        return model

    def write_config(self, config: ModelSection) -> dict[str, Any]:
        if config.num_kv_heads != config.heads or config.size_of_head * config.heads != config.dim:
            raise ConfigError(
                f"[model] family = 'gpt2' with kv_heads = {config.num_kv_heads}, head_dim = {config.size_of_head}: "
                f"transformers' GPT-2 has as many kv-heads as heads ({config.heads}) and head_dim = dim / heads"
            )
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return {**super().write_config(config), "n_ctx": config.max_seq_len, **dropout}


FAMILY = Gpt2()
