"""Parallelism from outside: one function that turns a single-device model into this rank's part of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from atoll.train.models.attention import KERNELS, kernel_name, use_kernel
from atoll.train.models.parts import Decoder
from atoll.train.parallel.compile import compile_blocks
from atoll.train.parallel.context import apply_context
from atoll.train.parallel.gradients import ReplicatedWeights, ShardedWeights, Weights
from atoll.train.parallel.layers import layers_of
from atoll.train.parallel.layout import reshards
from atoll.train.parallel.mesh import Mesh
from atoll.train.parallel.plan import Plan
from atoll.train.parallel.precision import convert_float8, number_formats
from atoll.train.parallel.recompute import checkpoint_activations
from atoll.train.parallel.tensor import apply_tensor
from atoll.train.recipe.schema import Recipe


def parallelize(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Turn ``model``, which is on the meta device, into this rank's part of it, in place.

    The order matters: tensor parallelism hooks into the linear layers, which float8 replaces; both and context
    parallelism change what a block does, which activation checkpointing runs again; compilation takes that as it is,
    and FSDP gathers the parameters of all this.
    """
    recipe, layout = plan.recipe, mesh.layout
    kernel = KERNELS[kernel_name(recipe, mesh.device.type)]()
    use_kernel(model, kernel)
    if layout.context > 1:
        apply_context(model, mesh.group("context"), kernel)
    convert_float8(model, recipe, gathers=plan.gathers_float8)
    if layout.tensor > 1:
        apply_tensor(model, mesh.whole["tensor"], sequence_parallel=recipe.parallel.sequence_parallel)  # type: ignore[arg-type]  # ``layout.check`` refuses others
    checkpoint_activations(model, plan.recompute)
    if plan.compiled:
        compile_blocks(model, recipe.compile.mode)
    if layout.sharded:
        shard(model, recipe, mesh)


def shard(model: nn.Module, recipe: Recipe, mesh: Mesh) -> None:
    """Shard the parameters of each block, of the embedding and of the head (FSDP), in place."""
    assert mesh.fsdp is not None
    compute, master, reduce = number_formats(recipe, mesh.device)
    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != master else None,
        reduce_dtype=reduce if reduce != compute else None,
        # Blocks of ours get what they take: the angles stay exact. Users' modules may mix formats.
        cast_forward_inputs=compute != master and not isinstance(model, Decoder),
    )
    fsdp = partial(fully_shard, mesh=mesh.fsdp, mp_policy=policy)
    reshard = reshards(recipe, mesh.layout)
    parts = layers_of(model)
    if isinstance(model, Decoder) and not model.config.tied:
        # Under tensor parallelism the embedding returns a view, through which FSDP's hooks can't be sure to be reached.
        if model.embed is not None and mesh.layout.tensor == 1:
            parts.append(model.embed)
        if model.norm is not None and model.head is not None:
            fsdp([model.norm, model.head], reshard_after_forward=False)  # the backward pass needs them again at once
    for part in [*parts, model]:
        fsdp(part, reshard_after_forward=reshard)


def weights_of(stages: Sequence[nn.Module], recipe: Recipe, mesh: Mesh) -> Weights:
    """The weights of a parallelized model, or of its stages on this rank, after they were set."""
    formats = number_formats(recipe, mesh.device)
    if mesh.fsdp is not None:
        once = mesh.layout.replicate > 1 and formats.reduce == formats.master
        return ShardedWeights(stages, sums_replicas_once=once)
    return ReplicatedWeights(stages, formats, group=mesh.gradients, overlap=mesh.layout.pipeline == 1)
