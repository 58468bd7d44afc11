"""A small GPT, plain PyTorch on one device: nothing in this file knows that it will be trained on several."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Shapes: B batch, S sequence, D model, H heads, V vocabulary.


class Attention(nn.Module):
    """Causal self-attention: each position sees itself and those before it."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D) -> (B, S, D)
        b, s, d = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, S, D / H)
        return self.out(x.transpose(1, 2).reshape(b, s, d))


class Block(nn.Module):
    """Attention, then two linear layers, each added to what came in."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, bias=False)
        self.attention = Attention(dim, num_heads)
        self.mlp_norm = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D) -> (B, S, D)
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Predicts the next token at every position, from at most ``seq_len`` tokens before it."""

    def __init__(self, vocab_size: int, seq_len: int, dim: int = 128, num_heads: int = 4, num_layers: int = 4) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.token = nn.Embedding(vocab_size, dim)
        self.position = nn.Embedding(seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What is added to the residual stream starts smaller, so that depth does not make it grow (GPT-2).
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if into_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, S) -> (B, S, V)
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.T  # the embedding also reads the answer off

    @torch.no_grad()
    def generate(self, tokens: list[int], num_tokens: int, seed: int = 0, temperature: float = 0.8) -> list[int]:
        """``tokens`` followed by ``num_tokens`` drawn one by one, each among the 30 likeliest."""
        generator = torch.Generator().manual_seed(seed)
        tokens = list(tokens)
        for _ in range(num_tokens):
            logits = self(torch.tensor([tokens[-self.seq_len :]]))[0, -1]  # (V,)
            values, ids = logits.topk(min(30, len(logits)))
            drawn = torch.multinomial(torch.softmax(values / temperature, dim=-1), 1, generator=generator)
            tokens.append(int(ids[drawn]))
        return tokens


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Stretches of ``seq_len`` tokens, each with the same stretch moved on by one: the token to predict."""

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[i * self.seq_len : (i + 1) * self.seq_len + 1]
        return window[:-1], window[1:]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats per token: ``logits`` (B, S, V), ``targets`` (B, S)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Of step 1 to ``steps``: rises over the first twentieth, then follows a cosine down to a tenth of ``peak``."""
    warmup = max(1, steps // 20)
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))
