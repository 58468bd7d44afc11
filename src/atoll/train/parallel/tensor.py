"""Tensor parallelism (Shoeybi et al., "Megatron-LM", 2019), with the sequence split between the blocks
(Korthikanti et al., 2022) and a vocabulary-parallel loss.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from atoll.train.models.parts import Decoder


class _Everywhere(ParallelStyle):
    """A module whose parameters and inputs are whole on every rank."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, mesh, None, self._enter, self._leave)  # type: ignore[arg-type]  # takes tuples

    @staticmethod
    def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, *others = inputs
        return (x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False), *others)

    @staticmethod
    def _leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local() if isinstance(output, DTensor) else output


class _VocabularyParallel(ParallelStyle):
    """The head: each rank has a slice of the vocabulary."""

    def __init__(self, layout: Shard | Replicate) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters(recurse=False):
            sharded = distribute_tensor(parameter, mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(sharded))
        return distribute_module(module, mesh, None, self._enter, None)  # type: ignore[arg-type]  # takes tuples

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        hidden, weight, batch = inputs
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [self.layout], run_check=False)
        # The loss sums the hidden state's gradient over the ranks itself: what comes back is whole.
        hidden = hidden.redistribute(mesh, [Replicate()])
        placements = [Replicate()] if batch is not None else [Partial()]
        return hidden.to_local(grad_placements=placements), weight, batch


def apply_tensor(model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard the model's matrices over ``mesh``, a mesh of one dimension."""
    between: Shard | Replicate = Shard(1) if sequence_parallel else Replicate()
    norm: ParallelStyle = SequenceParallel() if sequence_parallel else _Everywhere()

    plan: dict[str, ParallelStyle] = {}
    if model.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if model.learned_positions is not None:
        plan["learned_positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    for number, block in model.blocks.items():
        parts = _block_plan(block, between, norm)
        plan.update({f"blocks.{number}.{name}": style for name, style in parts.items()})
    if model.norm is not None:
        plan["norm"] = norm
    if model.head is not None:
        plan["head"] = _VocabularyParallel(between)
    parallelize_module(model, mesh, plan)
    if model.head is not None:
        per_rank = -(-model.config.vocabulary // mesh.size())
        model.head.group, model.head.vocab_start = mesh.get_group(), mesh.get_local_rank() * per_rank


def _block_plan(block: nn.Module, between: Shard | Replicate, norm: ParallelStyle) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "attention_norm": norm,
        "attention": PrepareModuleInput(
            input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.o": RowwiseParallel(output_layouts=between),
        "feed_forward_norm": norm,
        "feed_forward": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "feed_forward.down": RowwiseParallel(output_layouts=between),
    }
    names = {name for name, _ in block.named_modules()}
    for name in ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"):
        if name in names:
            plan[name] = ColwiseParallel()
    for name in ("attention.q_norm", "attention.k_norm"):
        if name in names and block.get_submodule(name) is not None:
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)  # heads, not positions, are split
    return plan
