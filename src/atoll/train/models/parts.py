"""Parts that the model families share. Shapes: B batch, S sequence, D model, H heads, K kv-heads, E head width."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.train.batch import Batch
from atoll.train.models.attention import SdpaKernel
from atoll.train.models.logprobs import ChunkedLogProbs, LogProbs
from atoll.train.objective import Objective, sums_of
from atoll.train.objectives.pretrain import Pretrain
from atoll.train.recipe.schema import ModelSection, RopeScaling


class Positions(nn.Module):
    """Rotary position angles of a sequence (Su et al., "RoFormer", 2021), with the stretching of Llama 3.1 or YaRN.

    The two halves of a head's width turn as pairs (i, i + E/2), as Hugging Face checkpoints expect.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        # Not a buffer: it is no state, and a model built on the meta device would lose its values. Kept on the device,
        # since a copy from pageable memory waits for the GPU.
        self._frequencies: dict[torch.device, Tensor] = {}

    def frequencies(self, device: torch.device) -> Tensor:
        """Angles per position, [E/2], in float32: what published weights were trained with, to the last bit."""
        if device in self._frequencies:
            return self._frequencies[device]
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device="cpu") / self.head_dim
        powers = self.theta**exponents
        if self.scaling is None:
            inverse = 1.0 / powers
        elif self.scaling.kind == "llama3":
            inverse = _llama3(1.0 / powers, self.scaling)
        else:
            inverse = _yarn(powers, self.scaling, self.head_dim, self.theta)
        inverse = inverse.to(device)
        if type(inverse) is Tensor:  # under FakeTensorMode it has no values to keep
            self._frequencies[device] = inverse
        return inverse

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines; YaRN raises it with the stretch."""
        if self.scaling is None or self.scaling.kind != "yarn":
            return 1.0
        if self.scaling.attention_factor is not None:
            return self.scaling.attention_factor
        return 0.1 * math.log(self.scaling.factor) + 1.0

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [B, S, 1, E], of ``positions`` [B, S], in float32, or float64 where ``dtype`` is."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        angles = positions.to(exact)[..., None] * self.frequencies(positions.device).to(exact)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
        return angles.cos() * self.amplitude, angles.sin() * self.amplitude


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow turns are slowed by ``factor``, fast ones kept, those between blended (Llama 3.1 model card)."""
    turns = scaling.original_max_seq_len / (2 * math.pi / inverse)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * inverse / scaling.factor + kept * inverse


def _yarn(powers: Tensor, scaling: RopeScaling, head_dim: int, theta: float) -> Tensor:
    """Interpolation by parts (Peng et al., "YaRN", 2023, section 3.2)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((steps - low) / max(high - low, 1e-3)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads ``x`` [B, S, H, E] by the angles of their positions; in the angles' format, rounded once."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023), rotary positions, queries and keys normed if asked."""

    def __init__(self, config: ModelSection, *, bias: bool = False, head_norm: bool = False) -> None:
        super().__init__()
        self.head_dim = config.size_of_head
        query_width, key_width = config.heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q = nn.Linear(config.dim, query_width, bias=bias)
        self.k = nn.Linear(config.dim, key_width, bias=bias)
        self.v = nn.Linear(config.dim, key_width, bias=bias)
        self.o = nn.Linear(query_width, config.dim, bias=bias)
        self.q_norm: nn.Module | None = nn.RMSNorm(self.head_dim, eps=config.norm_eps) if head_norm else None
        self.k_norm: nn.Module | None = nn.RMSNorm(self.head_dim, eps=config.norm_eps) if head_norm else None
        self.attention_kernel = SdpaKernel()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, S, H, E], keys and values [B, S, K, E] of ``x`` [B, S, D], before their rotation."""
        # -1 heads: tensor parallelism leaves each rank its share of them.
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def forward(self, x: Tensor, mask: Any, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        q, k, v = self.project(x)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        out: Tensor = self.o(self.attention_kernel.attend(q, k, v, mask).flatten(-2))
        return out


class SwiGLU(nn.Module):
    """Gated feed-forward part (Shazeer, "GLU variants improve Transformer", 2020)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class PreNormBlock(nn.Module):
    """Attention and a feed-forward part, each after a norm and added to what came in."""

    def __init__(self, make_norm: Callable[[], nn.Module], attention: Attention, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = make_norm()
        self.attention = attention
        self.feed_forward_norm = make_norm()
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, mask: Any, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), mask, rope)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Head(nn.Module):
    """The output projection: hidden states to logits, or to what the objective makes of the labels' log-probabilities.

    Attributes:
        objective, chunk_tokens: of the recipe's ``[objective]``.
        group, vocab_start: under tensor parallelism the ranks that share the vocabulary, and where this one's begins.
        whole: under context parallelism makes log-probabilities of whole sequences of those of a part.
    """

    def __init__(self, vocab_size: int, dim: int, *, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))
        self.objective: Objective = Pretrain()
        self.chunk_tokens = 2048
        self.group: dist.ProcessGroup | None = None
        self.vocab_start = 0
        self.whole: Callable[[LogProbs], LogProbs] | None = None

    def forward(self, hidden: Tensor, tied_weight: Tensor | None, labels: Tensor | None, batch: Batch | None) -> Tensor:
        """Logits [B, S, V] of ``hidden`` [B, S, D]; with ``labels`` [B, S] the objective's sums (``sums_of``).

        Args:
            batch: the sequences, whole where ``hidden`` and ``labels`` are a part.
        """
        weight = self.weight if tied_weight is None else tied_weight
        assert weight is not None
        if labels is None or batch is None:
            return nn.functional.linear(hidden, weight)
        options = (self.chunk_tokens, self.group, self.vocab_start)
        logprobs: LogProbs = ChunkedLogProbs(hidden.flatten(0, 1), weight, labels, *options)
        return sums_of(self.objective, logprobs if self.whole is None else self.whole(logprobs), batch)


class Decoder(nn.Module):
    """A stack of blocks between an embedding and a head.

    Pipeline stages are the same class with the parts of other stages set to None. Blocks are in a ``ModuleDict`` under
    their number, so that a parameter has the same name wherever its block runs. A tied head has no weight of its own:
    it is handed the embedding's.
    """

    def __init__(self, config: ModelSection, blocks: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.make: Callable[[int], nn.Module] | None = None  # of a user's function: creates it again, its weights set
        self.embed: nn.Embedding | None = nn.Embedding(config.vocabulary, config.dim)
        self.learned_positions: nn.Embedding | None = None
        self.rope: Positions | None = Positions(config.size_of_head, config.rope_theta, config.rope_scaling)
        self.attention_kernel = SdpaKernel()
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.norm: nn.Module | None = norm
        self.head: Head | None = Head(config.vocabulary, config.dim, tied=config.tied)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        batch: Batch | None = None,
        **others: Tensor,
    ) -> Tensor:
        """Logits, or the objective's sums where ``labels`` are given.

        Args:
            x: tokens [B, S]; on later pipeline stages the hidden state [B, S, D] of the stage before.
            positions: [B, S], each token's place in its document.
            documents: [B, S], each token's document; None lets tokens see all before them.
            labels: [B, S], the token to predict at each place, -100 where none is.
            batch: what the objective sees, where the arguments above are this rank's part of it.
            others: further fields of the batch, ``tokens`` among them where ``x`` is a hidden state.

        Returns:
            the summed loss and metrics, [1 + number of metrics], in float32 or wider; without labels the logits
            [B, S, V]; on stages without the head the hidden state [B, S, D].
        """
        tokens = others.pop("tokens", x)
        if self.embed is not None:
            x = self.embed(x)
            if self.learned_positions is not None:
                x = x + self.learned_positions(positions)
        mask = self.attention_kernel.document_mask(documents)
        rope = None if self.rope is None else self.rope(positions, x.dtype)
        for block in self.blocks.values():
            x = block(x, mask, rope)
        if self.norm is None or self.head is None:
            return x
        weight = self.embed.weight if self.config.tied and self.embed is not None else None
        if labels is not None and batch is None:
            batch = Batch(tokens, labels, positions, documents, others)
        out: Tensor = self.head(self.norm(x), weight, labels, batch)
        return out
