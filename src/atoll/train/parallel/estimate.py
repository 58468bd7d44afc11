"""How much memory a rank needs, by part, before anything runs. Bytes throughout.

Of what ``estimate`` computes with, c, w and r are the bytes of a number of the compute format, of the masters and of
the reduction.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

import torch

from atoll.train.models.attention import kernel_name
from atoll.train.models.family import family_of
from atoll.train.models.registry import build
from atoll.train.parallel.layout import (
    AXES,
    Layout,
    layers_of_stage,
    num_micro_batches,
    num_stages_per_rank,
    reshards,
    stage_numbers,
)
from atoll.train.parallel.precision import number_formats
from atoll.train.parallel.recompute import Recompute, count_of, mode_of
from atoll.train.parallel.trace import block_memory
from atoll.train.recipe.schema import ModelSection, Recipe

Device = Literal["cuda", "cpu"]

GIB = 2**30
_TABLES = ("embed", "learned_positions")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that the fullest rank needs.

    Attributes:
        parts: bytes by part; they add up to ``total``.
        formulas: how each part comes about.
    """

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
    """Parameters of a model: of each layer (its matrices, all else in it), of tables, of norm and head."""

    blocks: tuple[tuple[int, int], ...]
    tables: int
    head: int

    @property
    def whole(self) -> int:
        """All of them."""
        return sum(map(sum, self.blocks)) + self.tables + self.head


@functools.lru_cache(maxsize=32)
def sizes(model: ModelSection) -> Sizes:
    """Parameters of ``[model]``, which is built on the meta device for it; a layer is what has a number in its name."""
    blocks: dict[str, list[int]] = {}
    ends = {True: 0, False: 0}
    for name, parameter in build(model).named_parameters():
        layer = re.match(r".*?\.\d+\.", name)
        if layer is None:
            ends[name.startswith(_TABLES)] += parameter.numel()
        else:
            blocks.setdefault(layer[0], [0, 0])[parameter.ndim < 2] += parameter.numel()
    return Sizes(tuple((matrices, others) for matrices, others in blocks.values()), ends[True], ends[False])


class _Rank:
    """What the pipeline's rank ``place`` holds, its tensor-parallel share taken: parameters, activations in flight."""

    def __init__(self, recipe: Recipe, layout: Layout, place: int) -> None:
        whole, t = sizes(recipe.model), layout.tensor
        stages = stage_numbers(recipe, place, layout.pipeline)
        num_stages = layout.pipeline * num_stages_per_rank(recipe)
        first, last = 0 in stages, num_stages - 1 in stages
        layers = [each for stage in stages for each in layers_of_stage(stage, num_stages, len(whole.blocks))]
        count = max(1, num_micro_batches(recipe, layout))
        gpipe = layout.pipeline > 1 and recipe.parallel.pipeline_schedule == "gpipe"

        # Parameters: of each layer, of the layers' matrices, of tables, of the head with the norm before it.
        self.blocks = [-(-whole.blocks[each][0] // t) + whole.blocks[each][1] for each in layers]
        self.matrices = sum(-(-whole.blocks[each][0] // t) for each in layers)
        self.tables = -(-whole.tables // t) if first else 0
        self.head = -(-whole.head // t) if last else 0  # of a tied one none, but the table is used
        self.parameters = sum(self.blocks) + self.tables + self.head
        # Rows of the head's weight, micro-batches whose activations are kept, and whose losses.
        self.vocabulary = -(-recipe.model.vocabulary // t) if last else 0
        self.in_flight = _in_flight(recipe, layout, place, count)
        self.losses_in_flight = count if gpipe else 1
        # Numbers in the buffers that the pipeline receives into, and sends from, of each micro-batch.
        self.buffers = 2 * ((not first) + (not last)) * count * recipe.model.dim


def estimate(
    recipe: Recipe, layout: Layout, *, recompute: Recompute, device_bytes: int | None = None, device: Device = "cuda"
) -> Estimate:
    """What the fullest rank needs.

    Args:
        device_bytes: where given, the share that the allocator loses is a share of it at most.
        device: decides number formats and kernels.
    """
    ranks = [_Rank(recipe, layout, place) for place in range(layout.pipeline)]
    estimates = [_of_rank(recipe, layout, rank, recompute, device, device_bytes) for rank in ranks]
    return max(estimates, key=lambda each: each.total)


def _of_rank(
    recipe: Recipe, layout: Layout, rank: _Rank, recompute: Recompute, device: Device, device_bytes: int | None
) -> Estimate:
    c, w, r = (each.itemsize for each in number_formats(recipe, torch.device(device)))
    shards = layout.shard * layout.context
    own = -(-rank.parameters // shards)
    found = Estimate({}, {})

    def add(part: str, size: float, formula: str) -> None:
        found.parts[part], found.formulas[part] = int(size), formula

    share = f", 1/{shards} of the model per rank" if shards > 1 else ""
    add("weights", own * w, f"{own / 1e6:,.1f} M master weights × {w} B{share}")
    largest = max(rank.blocks, default=0)
    if layout.sharded:
        resharded = reshards(recipe, layout)
        gathered = min(2 * largest, sum(rank.blocks)) if resharded else sum(rank.blocks)
        gathered += rank.head + (rank.tables if recipe.model.tied or not resharded else 0)
        how = "2 blocks + output head" if resharded else "the whole model"
        add("gathered", gathered * c, f"all-gather buffers ({how}) × {c} B")
        # A block's gradients, and what is being reduced of it and of the block before.
        before = "plus one block before reduce-scatter"
        add("gradients", own * w + largest * (c + 2 * r), f"{own / 1e6:,.1f} M × {w} B, {before}")
    else:
        add("gathered", own * c if c != w else 0, f"copies in the compute format, {c} B each")
        several = layout.pipeline > 1 or num_micro_batches(recipe, layout) > 1
        summed = layout.replicate > 1 or (several and c != w)
        kept = w + (r if r != w and layout.replicate > 1 else 0) if summed else c  # and what travels
        add("gradients", own * kept + (largest * c // 4 if summed else 0), f"{own / 1e6:,.1f} M × {kept} B")
    states, formula = _optimizer(recipe, rank.parameters, rank.matrices, w)
    add("optimizer", -(-states // shards), formula)

    tokens = recipe.train.micro_batch * recipe.train.seq_len // layout.context
    model = recipe.model
    if model.python is not None:  # of its blocks nothing is known: they count as those of a family, of even heads
        model = model.model_copy(update={"python": None, "head_dim": -(-model.size_of_head // 2) * 2})
    block = block_memory(
        model,
        c,
        tensor=layout.tensor,
        between=layout.tensor if recipe.parallel.sequence_parallel else 1,
        context=layout.context,
        gpu=device == "cuda",
        compiled=is_compiled(recipe, device),
    )
    # Documents are apart by a mask of every query and key, which each block turns into one of additions.
    masked = recipe.data.isolate_documents and kernel_name(recipe, device) == "sdpa"
    mask = recipe.train.seq_len if masked else 0
    layers, again_in = len(rank.blocks), count_of(recompute, len(rank.blocks))
    everything = block.none + mask * c
    per_token = everything if recompute == "none" else getattr(block, mode_of(recompute))
    # Outside of the blocks: token ids, mask, angles, the last norm, the hidden state's gradient.
    angles = 2 * recipe.model.size_of_head * max(c, 4) if family_of(recipe.model).rotary else 0
    ends = 32 + mask + angles + (block.last_norm + recipe.model.dim * c if rank.vocabulary else 0)
    others = layers - again_in if recompute != "none" else 0
    inside = rank.in_flight * (per_token * (layers - others) + everything * others)
    how = f"{rank.in_flight * tokens:,.0f} tokens × {layers - others} blocks × {per_token:,.0f} B, recompute "
    how += mode_of(recompute) + (f", and {others} blocks × {everything:,.0f} B" if others else "")
    add("activations", tokens * (inside + ends * rank.losses_in_flight + rank.buffers * c), how)
    logits = min(recipe.objective.chunk_tokens, tokens)
    add("head and loss", _loss(recipe, rank, logits, c, device), f"logits of {logits:,} tokens, gradient [V, D]")
    again = everything - block.full if again_in else 0
    # The loss and a block's backward pass come one after the other: the larger of the two counts.
    working = tokens * (block.working + again) - found.parts["head and loss"]
    add("temporaries", max(0, working), "of one block's backward pass" + (", computed again" if again else ""))
    gaps = (found.total if device_bytes is None else min(found.total, device_bytes)) // 20
    groups = sum(getattr(layout, axis) > 1 for axis in AXES)
    tenths, what = (3, "the process") if device == "cpu" else (6 + 3 * groups, "CUDA context, libraries, NCCL buffers")
    add("reserve", GIB * tenths // 10 + gaps, f"{what}, and 5 % for gaps")
    return found


def _optimizer(recipe: Recipe, parameters: int, matrices: int, w: int) -> tuple[int, str]:
    """Bytes of the optimizer state, and how they come about."""
    section = recipe.optimizer
    if section.kind == "sgd":
        each = w if section.momentum else 0
        return parameters * each, f"momentum, {each} B per parameter"
    each = 4 if section.kind == "adamw" and section.moments == "bf16" else 2 * w
    if section.kind == "muon":
        size = matrices * w + (parameters - matrices) * each
        return size, f"momentum of matrices, {w} B; two moments of the others, {each} B"
    return parameters * each, f"two moments, {each} B per parameter"


def state_bytes(recipe: Recipe, device: Device = "cuda") -> tuple[int, int]:
    """Bytes of the whole model's masters and of its optimizer state: what a checkpoint holds."""
    w = number_formats(recipe, torch.device(device)).master.itemsize
    found = sizes(recipe.model)
    matrices = sum(matrices for matrices, _ in found.blocks)
    return found.whole * w, _optimizer(recipe, found.whole, matrices, w)[0]


def is_compiled(recipe: Recipe, device: Device) -> bool:
    """Whether blocks are compiled."""
    if recipe.compile.enabled is not None:
        return recipe.compile.enabled
    return device == "cuda" and recipe.model.python is None


def _loss(recipe: Recipe, rank: _Rank, tokens: int, c: int, device: Device) -> int:
    """The larger of what the loss needs forward (logits of a chunk) and backward (the weight's gradient, scaled)."""
    if not rank.vocabulary:
        return 0
    wide = max(c, 4)
    weight, logits = rank.vocabulary * recipe.model.dim, tokens * rank.vocabulary
    narrow = c if c != wide else 0
    in_place = device == "cuda" and c <= 4  # the kernels write the gradient over the logits
    forward = logits * (c if in_place else wide + narrow) + weight * c
    return rank.losses_in_flight * weight * wide + max(forward, weight * narrow)


# ------------------------------------------------------------------------------------------------------- pipeline
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
