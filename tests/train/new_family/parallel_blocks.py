"""A family that no file of Atoll knows: blocks whose attention and feed-forward part work side by side (GPT-J)."""

from typing import Any, ClassVar

from torch import nn

from atoll.train.models.families.llama import FAMILY as LLAMA
from atoll.train.models.family import Family
from atoll.train.models.parts import Attention, Decoder


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.into = nn.Linear(dim, hidden_dim, bias=False)
        self.out = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x):
        return self.out(self.into(x).relu().square())


class Block(nn.Module):
    def __init__(self, config, hidden_dim: int) -> None:
        super().__init__()
        self.both_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config.dim, hidden_dim)

    def forward(self, x, mask, rope):
        normed = self.both_norm(x)
        return x + self.attention(normed, mask, rope) + self.feed_forward(normed)


class ParallelBlocks(Family):
    model_types = ("parallel_blocks",)
    architecture = "ParallelBlocksForCausalLM"
    outer_names = LLAMA.outer_names
    block_prefix = "model.layers"
    block_names: ClassVar[dict[str, tuple[str, ...]]] = {
        "attn.qkv": ("attention.q", "attention.k", "attention.v"),
        "attn.out": ("attention.o",),
        "mlp.into": ("feed_forward.into",),
        "mlp.out": ("feed_forward.out",),
        "norm": ("both_norm",),
    }
    cuts: ClassVar[dict[str, Any]] = {
        **Family.cuts,
        "both_norm": "norm",
        "feed_forward.into": "columns",
        "feed_forward.out": "rows",
    }
    residual = ("attention.o", "feed_forward.out")
    config_keys: ClassVar[dict[str, str]] = {
        "layers": "n_layer",
        "dim": "n_embd",
        "heads": "n_head",
        "kv_heads": "n_kv",
        "hidden_dim": "n_inner",
        "max_seq_len": "n_positions",
    }
    defaults: ClassVar[dict[str, Any]] = {"tied": False}
    computes: ClassVar[dict[str, tuple[Any, ...]]] = {"activation": ("relu_squared",)}

    def build(self, config):
        blocks = [Block(config, self.hidden_dim(config)) for _ in range(config.layers)]
        return Decoder(config, blocks, nn.RMSNorm(config.dim, eps=config.norm_eps))

    def hidden_dim(self, config):
        return config.hidden_dim or 4 * config.dim


FAMILY = ParallelBlocks()
