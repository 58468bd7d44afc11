"""How much memory a rank needs, by part, before anything runs. Bytes throughout.

Notation of the formulas: B micro_batch, S sequence, T tokens of a micro-batch on a rank, D dim, V vocabulary, F hidden
width, Q and K widths of queries and of keys, c bytes of the compute format, w of the masters, r of the reduction.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from atoll.train.models.attention import kernel_name
from atoll.train.models.family import family_of
from atoll.train.models.registry import build
from atoll.train.parallel.layout import Layout, num_stages_per_rank
from atoll.train.parallel.precision import compute_dtype, master_dtype, reduce_dtype
from atoll.train.parallel.recompute import Mode
from atoll.train.parallel.trace import BlockMemory, block_memory
from atoll.train.recipe.schema import ModelSection, Recipe

Device = Literal["cuda", "cpu"]

GIB = 2**30
_TABLES = ("embed", "learned_positions")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that the fullest rank needs.

    Attributes:
        recompute: the mode of activation checkpointing that was counted.
        parts: bytes by part; they add up to ``total``.
        formulas: how each part comes about.
    """

    recompute: Mode
    parts: dict[str, int]
    formulas: dict[str, str]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())

    def fits(self, device_bytes: int) -> bool:
        """Whether a device with ``device_bytes`` is large enough."""
        return self.total <= device_bytes

    def describe(self) -> list[str]:
        """One line a part, in GiB, and the total."""
        lines = [f"{part:<15}{_gib(size)}   {self.formulas[part]}" for part, size in self.parts.items() if size]
        return [*lines, f"{'total':<15}{_gib(self.total)}"]


def _gib(size: int) -> str:
    return f"{size / GIB:8.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:8.2f} MiB"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parameters of a model by what they belong to.

    Attributes:
        blocks: of each layer; its matrices, and all else in it.
        ends: of tables, norm and head, by the first part of their names.
    """

    blocks: tuple[tuple[int, int], ...]
    ends: dict[str, int]

    @property
    def whole(self) -> int:
        """All of them."""
        return sum(map(sum, self.blocks)) + sum(self.ends.values())

    @property
    def matrices(self) -> int:
        """Those that Muon moves."""
        return sum(matrices for matrices, _ in self.blocks)


@functools.lru_cache(maxsize=32)
def _sizes_of(serialized: str) -> Sizes:
    return sizes_of_model(build(ModelSection.model_validate_json(serialized)))


def sizes(model: ModelSection) -> Sizes:
    """Parameters of ``[model]``, which is built on the meta device for it."""
    return _sizes_of(model.model_dump_json(exclude_none=True))


def sizes_of_model(model: nn.Module) -> Sizes:
    """Parameters of a model that stands; a layer is what has a number in its name."""
    blocks: dict[str, list[int]] = {}
    ends: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer = re.match(r".*?\.\d+\.", name)
        if layer is None:
            part = name.split(".", maxsplit=1)[0]
            ends[part] = ends.get(part, 0) + parameter.numel()
        else:
            blocks.setdefault(layer[0], [0, 0])[parameter.ndim < 2] += parameter.numel()
    return Sizes(tuple((matrices, others) for matrices, others in blocks.values()), ends)


@dataclass(frozen=True, slots=True)
class _Rank:
    """What one rank of the pipeline holds, its tensor-parallel share taken: parameters and activations in flight."""

    blocks: list[int]  # parameters of each layer
    matrices: int
    tables: int
    head: int  # with the norm before it; of a tied head none, but the table is used
    vocabulary: int  # rows of the head's weight; 0 on ranks without the head
    in_flight: float  # micro-batches whose activations are kept
    losses_in_flight: int
    buffers: int  # hidden states that the pipeline keeps for sending and receiving

    @property
    def parameters(self) -> int:
        return sum(self.blocks) + self.tables + self.head


def estimate(
    recipe: Recipe, layout: Layout, *, recompute: Mode, device_bytes: int | None = None, device: Device = "cuda"
) -> Estimate:
    """What the fullest rank needs.

    Args:
        device_bytes: where given, the share that the allocator loses is a share of it at most.
        device: decides number formats and kernels.
    """
    ranks = [_rank(recipe, layout, place) for place in range(layout.pipeline)]
    estimates = [_of_rank(recipe, layout, rank, recompute, device, device_bytes) for rank in ranks]
    return max(estimates, key=lambda each: each.total)


def _of_rank(
    recipe: Recipe, layout: Layout, rank: _Rank, recompute: Mode, device: Device, device_bytes: int | None
) -> Estimate:
    c, w, r = widths(recipe, device)
    shards = layout.shard * layout.context
    own = -(-rank.parameters // shards)
    parts = {"weights": own * w}
    formulas = {
        "weights": f"{own / 1e6:,.1f} M master weights × {w} B" + (f", 1/{shards} of the model per rank" * (shards > 1))
    }

    largest = max(rank.blocks, default=0)
    if layout.sharded:
        resharded = recipe.parallel.reshard_after_forward
        if resharded is None:
            resharded = layout.pipeline == 1
        gathered = min(2 * largest, sum(rank.blocks)) if resharded else sum(rank.blocks)
        gathered += rank.head + (rank.tables if recipe.model.tied else 0)
        parts["gathered"] = gathered * c
        formulas["gathered"] = f"all-gather buffers ({'2 blocks' if resharded else 'all blocks'} + output head) × {c} B"
        # A block's gradients, and what is being reduced of it and of the block before.
        parts["gradients"] = own * w + largest * (c + 2 * r)
        formulas["gradients"] = f"{own / 1e6:,.1f} M × {w} B, plus one block before reduce-scatter"
    else:
        own_masters = c != w
        parts["gathered"] = own * c if own_masters else 0
        formulas["gathered"] = f"copies in the compute format, {c} B each"
        summed = own_masters or layout.replicate > 1
        kept = w + (r if r != w and layout.replicate > 1 else 0)  # and what travels
        parts["gradients"] = own * kept + (largest * c // 4 if summed else 0)
        formulas["gradients"] = f"{own / 1e6:,.1f} M × {kept} B"
    parts["optimizer"], formulas["optimizer"] = _optimizer(recipe, rank, shards, w)

    tokens = recipe.train.micro_batch * recipe.train.seq_len // layout.context
    block = _block(recipe, layout, device, c)
    kept_tokens = tokens * rank.in_flight
    # Documents are apart by a mask of every query and key, which each block turns into one of additions.
    mask = recipe.train.seq_len * _has_dense_mask(recipe, device)
    per_token = getattr(block, recompute) + (mask * c if recompute == "none" else 0)
    ends = _ends(recipe, block, c, bool(rank.vocabulary), mask) * tokens * rank.losses_in_flight
    parts["activations"] = int(kept_tokens * per_token * len(rank.blocks)) + ends + rank.buffers * tokens * c
    formulas["activations"] = (
        f"{rank.in_flight * tokens:,.0f} tokens × {len(rank.blocks)} blocks × {per_token:,.0f} B, recompute {recompute}"
    )
    parts["head and loss"] = _loss(recipe, rank, tokens, c, device)
    formulas["head and loss"] = f"logits of {min(recipe.objective.chunk_tokens, tokens):,} tokens, gradient [V, D]"
    again = block.none + mask * c - block.full if recompute != "none" else 0
    working = tokens * (block.working + again)
    # The loss and a block's backward pass come one after the other: the larger of the two counts.
    parts["temporaries"] = max(0, int(working) - parts["head and loss"])
    formulas["temporaries"] = "of one block's backward pass" + (", computed again" if again else "")
    parts["reserve"], formulas["reserve"] = _reserve(sum(parts.values()), layout, device, device_bytes)
    return Estimate(recompute, parts, formulas)


def widths(recipe: Recipe, device: Device) -> tuple[int, int, int]:
    """Bytes a number of the compute format, of the masters and of the reduction."""
    compute = compute_dtype(recipe, torch.device(device))
    return compute.itemsize, master_dtype(recipe).itemsize, reduce_dtype(recipe).itemsize


def _optimizer(recipe: Recipe, rank: _Rank, shards: int, w: int) -> tuple[int, str]:
    """States of a rank."""
    section = recipe.optimizer
    each = 4 if section.kind == "adamw" and section.moments == "bf16" else 2 * w
    if section.kind == "sgd":
        each = w if section.momentum else 0
        return -(-rank.parameters * each // shards), f"momentum, {each} B per parameter"
    if section.kind == "muon":
        size = rank.matrices * w + (rank.parameters - rank.matrices) * each
        return -(-size // shards), f"momentum of matrices, {w} B; two moments of the others, {each} B"
    return -(-rank.parameters * each // shards), f"two moments, {each} B per parameter"


def state_bytes(recipe: Recipe, device: Device = "cuda") -> tuple[int, int]:
    """Bytes of the whole model's masters and of its optimizer's states: what a checkpoint holds."""
    _, w, _ = widths(recipe, device)
    whole = sizes(recipe.model)
    everything = _Rank([whole.whole], whole.matrices, 0, 0, 0, 1, 1, 0)
    return whole.whole * w, _optimizer(recipe, everything, 1, w)[0]


# --------------------------------------------------------------------------------------------------- activations
def _block(recipe: Recipe, layout: Layout, device: Device, c: int) -> BlockMemory:
    return block_memory(
        recipe.model.model_copy(update={"python": None}),
        c,
        tensor=layout.tensor,
        between=layout.tensor if recipe.parallel.sequence_parallel else 1,
        context=layout.context,
        gpu=device == "cuda",
        compiled=is_compiled(recipe, device),
    )


def is_compiled(recipe: Recipe, device: Device) -> bool:
    """Whether blocks are compiled."""
    if recipe.compile.enabled is not None:
        return recipe.compile.enabled
    return device == "cuda" and recipe.model.python is None


def _has_dense_mask(recipe: Recipe, device: Device) -> bool:
    """Whether documents are apart by a mask of every query and key."""
    return recipe.data.isolate_documents and kernel_name(recipe, device) == "sdpa"


def _ends(recipe: Recipe, block: BlockMemory, c: int, has_head: bool, mask: int) -> int:
    """Bytes a token outside of the blocks: the last norm and the hidden state's gradient, angles, mask, token ids."""
    model = recipe.model
    angles = 2 * model.size_of_head * max(c, 4) if family_of(model).rotary else 0
    return 32 + mask + angles + (int(block.last_norm) + model.dim * c if has_head else 0)


def _loss(recipe: Recipe, rank: _Rank, tokens: int, c: int, device: Device) -> int:
    """The larger of what the loss needs forward (logits of a chunk) and backward (the weight's gradient, scaled)."""
    if not rank.vocabulary:
        return 0
    wide = max(c, 4)
    weight = rank.vocabulary * recipe.model.dim
    logits = min(recipe.objective.chunk_tokens, tokens) * rank.vocabulary
    narrow = c if c != wide else 0
    kept = rank.losses_in_flight * weight * wide
    in_place = device == "cuda" and c <= 4  # the kernels write the gradient over the logits
    return kept + max(logits * (c if in_place else wide + narrow) + weight * c, weight * narrow)


def _reserve(others: int, layout: Layout, device: Device, device_bytes: int | None) -> tuple[int, str]:
    """What no tensor of ours takes: the device's context, libraries, and gaps between tensors."""
    gaps = others // 20 if device_bytes is None else min(others, device_bytes) // 20
    if device == "cpu":
        return GIB * 3 // 10 + gaps, "the process, and 5 % for gaps"
    groups = sum(getattr(layout, axis) > 1 for axis in ("pipeline", "replicate", "shard", "context", "tensor"))
    return GIB * 6 // 10 + groups * GIB * 3 // 10 + gaps, "CUDA context, libraries, NCCL buffers, and 5 % for gaps"


# ------------------------------------------------------------------------------------------------------- pipeline
def _rank(recipe: Recipe, layout: Layout, place: int) -> _Rank:
    """What the pipeline's rank ``place`` holds."""
    whole, t = sizes(recipe.model), layout.tensor
    layers, first, last = list(range(len(whole.blocks))), True, True
    num_micro_batches = max(1, recipe.train.global_batch // (layout.data * recipe.train.micro_batch))
    if layout.pipeline > 1:
        from atoll.train.parallel.pipeline import layers_of_stage, stage_numbers

        stages = stage_numbers(recipe, place, layout.pipeline)
        num_stages = layout.pipeline * num_stages_per_rank(recipe)
        first, last = 0 in stages, num_stages - 1 in stages
        layers = [each for stage in stages for each in layers_of_stage(stage, num_stages, len(whole.blocks))]
    tables = sum(whole.ends.get(name, 0) for name in _TABLES)
    head = sum(size for name, size in whole.ends.items() if name not in _TABLES)
    gpipe = layout.pipeline > 1 and recipe.parallel.pipeline_schedule == "gpipe"
    ends = int(not first) + int(not last)
    return _Rank(
        blocks=[-(-whole.blocks[each][0] // t) + whole.blocks[each][1] for each in layers],
        matrices=sum(-(-whole.blocks[each][0] // t) for each in layers),
        tables=-(-tables // t) if first else 0,
        head=-(-head // t) if last else 0,
        vocabulary=-(-recipe.model.vocabulary // t) if last else 0,
        in_flight=_in_flight(recipe, layout, place, num_micro_batches),
        losses_in_flight=num_micro_batches if gpipe else 1,
        # The pipeline receives into, and sends from, buffers of each micro-batch.
        buffers=2 * ends * num_micro_batches * recipe.model.dim if layout.pipeline > 1 else 0,
    )


def _in_flight(recipe: Recipe, layout: Layout, place: int, num_micro_batches: int) -> float:
    """Micro-batches whose activations rank ``place`` keeps, all of its layers counted (Narayanan et al., "Efficient
    large-scale language model training on GPU clusters", 2021; Qi et al., "Zero bubble pipeline parallelism", 2024).
    """
    p, v, schedule = layout.pipeline, num_stages_per_rank(recipe), recipe.parallel.pipeline_schedule
    if p == 1:
        return 1
    if schedule == "gpipe":
        return num_micro_batches
    if schedule == "1f1b":
        return min(num_micro_batches, p - place)
    if schedule == "zbv":
        return min(num_micro_batches, p)
    # Interleaved schedules start with more stages' forward passes; a stage has 1/v of the layers.
    stages = (v - 1) * p + 2 * (p - 1 - place) + 1
    return min(num_micro_batches, stages / v)
