"""The sizes of the mesh: how many ranks each axis of parallelism takes, and who sits where."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.core.errors import ConfigError
from atoll.train.recipe.schema import Recipe

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
_STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "zbv": 2}  # of the schedules that leave no choice


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
    wanted = {axis: getattr(recipe.parallel, axis) for axis in AXES}
    if wanted["replicate"] is None and wanted["shard"] is None and -1 not in wanted.values():
        wanted["replicate" if fits_replicated else "shard"] = -1
    sizes = {axis: 1 if size is None else size for axis, size in wanted.items()}
    given = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)) or "1"
    product = math.prod(size for size in sizes.values() if size != -1)
    if world_size % product:
        raise ConfigError(
            f"[parallel] {given} = {product} ranks do not divide the {world_size} there are: change an axis"
        )
    layout = Layout(**{axis: world_size // product if size == -1 else size for axis, size in sizes.items()})
    if layout.world_size != world_size:
        raise ConfigError(
            f"[parallel] {given} = {product} ranks, but {world_size} were started; set one axis to -1 (the rest)"
        )
    return layout


def check(recipe: Recipe, layout: Layout) -> None:
    """Refuse a layout that the model, the sequence or the batch can't be split by.

    Raises:
        ConfigError: names both numbers.
    """
    for is_broken, why in _rules(recipe, layout):
        if is_broken:
            raise ConfigError(why)


def _rules(recipe: Recipe, layout: Layout) -> Iterator[tuple[bool, str]]:
    """Whether each rule is broken, and what to say then; a rule may rely on those before it."""
    model, train, parallel = recipe.model, recipe.train, recipe.parallel
    tensor, context, pipeline = layout.tensor, layout.context, layout.pipeline
    schedule = parallel.pipeline_schedule

    def divides(what: str, number: int, axis: str, size: int, advice: str) -> tuple[bool, str]:
        return number % size > 0, f"{what} = {number} is not divisible by {axis} = {size}: {advice}"

    for axis, size in (("tensor", tensor), ("pipeline", pipeline), ("context", context)):
        yield (
            model.python is not None and size > 1,
            f"[model] python = {model.python!r} with [parallel] {axis} = {size}: a model of your own can be "
            f"replicated or sharded; set {axis} = 1",
        )
    too_long = train.seq_len > model.max_seq_len and model.python is None
    if too_long or tensor > 1:
        from atoll.train.models.family import family_of  # with torch, which whoever starts the ranks does without

        family = family_of(model)
        yield (
            too_long and not family.rotary,
            f"[train] seq_len = {train.seq_len} is longer than [model] max_seq_len = {model.max_seq_len}, and "
            f"{model.family} has a learnt vector for each position: shorten seq_len, or raise max_seq_len",
        )
        sizes = {"heads": model.heads, "kv_heads": model.num_kv_heads, "hidden_dim": family.hidden_dim(model)}
        common = math.gcd(*sizes.values())
        allowed = f"it can be {', '.join(str(size) for size in range(1, common + 1) if common % size == 0)}"
        for name, number in sizes.items():
            yield divides(f"[model] {name}", number, "[parallel] tensor", tensor, allowed)
    if context > 1:
        pieces = "each context rank takes an early and a late piece of the sequence"
        yield divides("[train] seq_len", train.seq_len, "2 × [parallel] context", 2 * context, pieces)
    if parallel.sequence_parallel:
        split = "sequence parallelism splits the sequence; or set sequence_parallel = false"
        yield divides("[train] seq_len / context", train.seq_len // context, "[parallel] tensor", tensor, split)
    share, micro_batches = layout.data * train.micro_batch, num_micro_batches(recipe, layout)
    if pipeline > 1:
        yield (
            model.tied,
            f"[model] tied = true with [parallel] pipeline = {pipeline}: the shared weight would lie on the first "
            "and the last stage; set pipeline = 1, or tied = false",
        )
        yield (
            recipe.precision.reduce == "bf16" and layout.sharded,
            f'[precision] reduce = "bf16" with [parallel] pipeline = {pipeline} and shard × context = '
            f'{layout.shard * context}: FSDP would add up micro-batches in bf16, too; set reduce = "fp32", or '
            "replicate instead",
        )
        held = _STAGES_PER_RANK.get(schedule)
        yield (
            held is not None and parallel.stages_per_rank not in (None, held),
            f"[parallel] stages_per_rank = {parallel.stages_per_rank} with pipeline_schedule = {schedule!r}: a rank "
            f"holds {'one stage' if held == 1 else 'two stages'} there; leave stages_per_rank out",
        )
        stages = pipeline * num_stages_per_rank(recipe)
        yield (
            model.layers < stages,
            f"[model] layers = {model.layers} are fewer than the {stages} stages of [parallel] pipeline = {pipeline} "
            f"with schedule {schedule!r}",
        )
    yield (
        train.global_batch % share > 0,
        f"[train] global_batch = {train.global_batch} is not divisible by {layout.data} data ranks × micro_batch "
        f"{train.micro_batch} = {share}",
    )
    yield (
        pipeline > 1 and micro_batches % pipeline > 0 and schedule in ("interleaved", "zero_bubble"),
        f"a step has {micro_batches} micro-batches, not divisible by [parallel] pipeline = {pipeline}, which the "
        f"schedule {schedule!r} needs; change [train] global_batch or micro_batch",
    )
    yield (
        micro_batches < pipeline and schedule == "1f1b",
        f"a step has {micro_batches} micro-batches, fewer than the {pipeline} stages of [parallel] pipeline = "
        f"{pipeline}, which the schedule '1f1b' needs at least: raise [train] global_batch, or lower micro_batch or "
        "pipeline",
    )


def reshards(recipe: Recipe, layout: Layout) -> bool:
    """Whether FSDP frees gathered weights between the forward and the backward pass.

    Where the recipe leaves it open it does, but in a pipeline: a stage's are needed again at the next micro-batch.
    """
    wanted = recipe.parallel.reshard_after_forward
    return layout.pipeline == 1 if wanted is None else wanted


def num_micro_batches(recipe: Recipe, layout: Layout) -> int:
    """Micro-batches of a rank in a step."""
    return recipe.train.global_batch // (layout.data * recipe.train.micro_batch)


def num_stages_per_rank(recipe: Recipe) -> int:
    """Pipeline stages that each rank holds."""
    return recipe.parallel.stages_per_rank or _STAGES_PER_RANK.get(recipe.parallel.pipeline_schedule, 2)


def stage_numbers(recipe: Recipe, rank: int, size: int) -> list[int]:
    """Which stages of the model a pipeline rank holds, first to last."""
    per_rank = num_stages_per_rank(recipe)
    if recipe.parallel.pipeline_schedule == "zbv":  # down one leg of a V, up the other
        return [rank, 2 * size - 1 - rank]
    return [rank + turn * size for turn in range(per_rank)]


def layers_of_stage(stage: int, num_stages: int, num_layers: int) -> range:
    """Blocks of a stage; where they don't divide evenly, the middle stages have one more than the ends."""
    base, extra = divmod(num_layers, num_stages)
    # The first and the last stage also have the embedding and the head, so they get extra blocks last.
    order = sorted(range(num_stages), key=lambda each: (each in (num_stages - 1, 0), each))
    bonus = {each: place < extra for place, each in enumerate(order)}
    start = sum(base + bonus[each] for each in range(stage))
    return range(start, start + base + bonus[stage])
