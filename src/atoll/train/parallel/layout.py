"""The sizes of the mesh: how many ranks each axis of parallelism takes, and who sits where."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.core.errors import ConfigError
from atoll.train.recipe.schema import Recipe

AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks per axis, the outermost first: tensor ranks are neighbours, pipeline stages are far apart."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Ranks that read different sequences."""
        return self.replicate * self.shard

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded (FSDP): over the ranks of shard × context, as TorchTitan does."""
        return self.shard * self.context > 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on each axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def data_rank(self, rank: int) -> int:
        """Which share of the sequences a rank reads, of ``data``."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]

    def __str__(self) -> str:
        names = {"pipeline": "pipeline", "replicate": "DDP", "shard": "FSDP", "context": "context", "tensor": "tensor"}
        if self.shard == 1:
            names["context"] = "FSDP over context"
        parts = [f"{names[axis]} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        if self.replicate > 1 and self.shard > 1:
            parts = [f"HSDP {self.replicate}×{self.shard}", *(p for p in parts if p[:4] not in ("DDP ", "FSDP"))]
        return " × ".join(parts) or "one rank"


def resolve(recipe: Recipe, world_size: int, *, fits_replicated: bool = True) -> Layout:
    """The layout a recipe asks for on ``world_size`` ranks.

    Args:
        recipe: ``[parallel]`` may leave replicate and shard open, or give -1 for the rest on one axis.
        world_size: ranks there are.
        fits_replicated: whether a rank can hold whole parameters and optimizer state: then open axes become DDP, else
            FSDP.

    Raises:
        ConfigError: the sizes don't multiply to ``world_size``, or the model or batch can't be split that way; the
            message names both numbers.
    """
    layout = divide(recipe, world_size, fits_replicated=fits_replicated)
    check(recipe, layout)
    return layout


def divide(recipe: Recipe, world_size: int, *, fits_replicated: bool = True) -> Layout:
    """The sizes of ``resolve``, which the model and the batch may still not allow.

    Raises:
        ConfigError: the sizes don't multiply to ``world_size``.
    """
    wanted = recipe.parallel
    sizes = {axis: getattr(wanted, axis) for axis in AXES}
    if wanted.replicate is None and wanted.shard is None:
        open_axis = "replicate" if fits_replicated else "shard"
        other = "shard" if fits_replicated else "replicate"
        sizes[other] = 1
        sizes[open_axis] = 1 if -1 in sizes.values() else -1
    else:
        # One of the two is given: the other takes what is left where nothing else does.
        for axis in ("replicate", "shard"):
            if sizes[axis] is None:
                sizes[axis] = 1
    given = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)) or "1"
    product = 1
    for size in sizes.values():
        product *= 1 if size == -1 else size
    if world_size % product:
        raise ConfigError(
            f"[parallel] {given} = {product} ranks do not divide the {world_size} there are: change an axis"
        )
    rest = [axis for axis, size in sizes.items() if size == -1]
    if rest:
        sizes[rest[0]] = world_size // product
    elif product != world_size:
        raise ConfigError(
            f"[parallel] {given} = {product} ranks, but {world_size} were started; set one axis to -1 (the rest)"
        )
    return Layout(**sizes)


def check(recipe: Recipe, layout: Layout) -> None:
    """Refuse a layout that the model, the sequence or the batch can't be split by.

    Raises:
        ConfigError: names both numbers.
    """
    model, train, parallel = recipe.model, recipe.train, recipe.parallel

    def must_divide(what: str, number: int, axis: str, size: int, advice: str) -> None:
        if number % size:
            raise ConfigError(f"{what} = {number} is not divisible by {axis} = {size}: {advice}")

    tensor, context, pipeline = layout.tensor, layout.context, layout.pipeline
    for axis, size in (("tensor", tensor), ("pipeline", pipeline), ("context", context)):
        if model.python is not None and size > 1:
            raise ConfigError(
                f"[model] python = {model.python!r} with [parallel] {axis} = {size}: a model of your own can be "
                f"replicated or sharded; set {axis} = 1"
            )
    if (train.seq_len > model.max_seq_len and model.python is None) or tensor > 1:
        from atoll.train.models.family import family_of  # with torch, which whoever starts the ranks does without

        rotary, hidden_dim = family_of(model).rotary, family_of(model).hidden_dim(model)
    if train.seq_len > model.max_seq_len and model.python is None and not rotary:
        raise ConfigError(
            f"[train] seq_len = {train.seq_len} is longer than [model] max_seq_len = {model.max_seq_len}, and "
            f"{model.family} has a learnt vector for each position: shorten seq_len, or raise max_seq_len"
        )
    if tensor > 1:
        common = math.gcd(model.heads, model.num_kv_heads, hidden_dim)
        allowed = f"it can be {', '.join(str(size) for size in range(1, common + 1) if common % size == 0)}"
        for name, number in (("heads", model.heads), ("kv_heads", model.num_kv_heads), ("hidden_dim", hidden_dim)):
            must_divide(f"[model] {name}", number, "[parallel] tensor", tensor, allowed)
    if context > 1:
        must_divide(
            "[train] seq_len",
            train.seq_len,
            "2 × [parallel] context",
            2 * context,
            "each context rank takes an early and a late piece of the sequence",
        )
    if tensor > 1 and parallel.sequence_parallel:
        must_divide(
            "[train] seq_len / context",
            train.seq_len // context,
            "[parallel] tensor",
            tensor,
            "sequence parallelism splits the sequence; or set sequence_parallel = false",
        )
    if pipeline > 1:
        if model.tied:
            raise ConfigError(
                f"[model] tied = true with [parallel] pipeline = {pipeline}: the shared weight would lie on the first "
                "and the last stage; set pipeline = 1, or tied = false"
            )
        if recipe.precision.reduce == "bf16" and layout.sharded:
            raise ConfigError(
                f'[precision] reduce = "bf16" with [parallel] pipeline = {pipeline} and shard × context = '
                f'{layout.shard * context}: FSDP would add up micro-batches in bf16, too; set reduce = "fp32", or '
                "replicate instead"
            )
        _check_stages_per_rank(recipe)
        stages = pipeline * num_stages_per_rank(recipe)
        if model.layers < stages:
            raise ConfigError(
                f"[model] layers = {model.layers} are fewer than the {stages} stages of [parallel] pipeline = "
                f"{pipeline} with schedule {parallel.pipeline_schedule!r}"
            )
    share = layout.data * train.micro_batch
    if train.global_batch % share:
        raise ConfigError(
            f"[train] global_batch = {train.global_batch} is not divisible by {layout.data} data ranks × micro_batch "
            f"{train.micro_batch} = {share}"
        )
    micro_batches = train.global_batch // share
    if pipeline > 1 and micro_batches % pipeline and parallel.pipeline_schedule in ("interleaved", "zero_bubble"):
        raise ConfigError(
            f"a step has {micro_batches} micro-batches, not divisible by [parallel] pipeline = {pipeline}, which the "
            f"schedule {parallel.pipeline_schedule!r} needs; change [train] global_batch or micro_batch"
        )
    if micro_batches < pipeline and parallel.pipeline_schedule == "1f1b":
        raise ConfigError(
            f"a step has {micro_batches} micro-batches, fewer than the {pipeline} stages of [parallel] pipeline = "
            f"{pipeline}, which the schedule '1f1b' needs at least: raise [train] global_batch, or lower micro_batch "
            "or pipeline"
        )


def _check_stages_per_rank(recipe: Recipe) -> None:
    schedule, given = recipe.parallel.pipeline_schedule, recipe.parallel.stages_per_rank
    if given is None:
        return
    what = f"[parallel] stages_per_rank = {given} with pipeline_schedule = {schedule!r}"
    if schedule in ("gpipe", "1f1b") and given != 1:
        raise ConfigError(
            f'{what}: a rank holds one stage there; leave stages_per_rank out, or set pipeline_schedule = "interleaved"'
        )
    if schedule == "zbv" and given != 2:
        raise ConfigError(f"{what}: a rank holds two stages there; leave stages_per_rank out")


def reshards(recipe: Recipe, layout: Layout) -> bool:
    """Whether FSDP frees gathered weights between the forward and the backward pass.

    Where the recipe leaves it open it does, but in a pipeline: a stage's are needed again at the next micro-batch.
    """
    wanted = recipe.parallel.reshard_after_forward
    return layout.pipeline == 1 if wanted is None else wanted


def num_stages_per_rank(recipe: Recipe) -> int:
    """Pipeline stages that each rank holds."""
    looped = recipe.parallel.pipeline_schedule in ("interleaved", "zero_bubble", "zbv")
    return recipe.parallel.stages_per_rank or (2 if looped else 1)
