"""A GPT of minGPT's shape: learnt positions, pre-norm blocks, causal attention, the head tied to the embedding."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # bytes


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attention_out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim)
        self.mlp_out = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # B S D
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))  # B S 3 H D/H
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each B H S D/H
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, num_layers: int, dim: int, num_heads: int, seq_len: int) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Embedding(seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                # What adds to the residual stream starts smaller, the more layers add to it.
                into_stream = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5 if into_stream else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Mean loss where targets (B S) are given, else logits (B S V)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def continue_text(self, text: str, num_bytes: int) -> str:
        tokens = torch.tensor([list(text.encode())], device=self.tokens.weight.device)
        chance = torch.Generator(tokens.device).manual_seed(0)
        for _ in range(num_bytes):
            odds = self(tokens[:, -self.seq_len :])[:, -1].float().softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(odds, 1, generator=chance)], 1)
        written = bytes(tokens[0].tolist()).decode(errors="ignore")  # at first it is hardly text
        return "".join(letter for letter in written if letter.isprintable() or letter == "\n")
