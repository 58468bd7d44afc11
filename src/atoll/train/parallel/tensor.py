"""Tensor parallelism (Shoeybi et al., "Megatron-LM", 2019), with the sequence split between the blocks
(Korthikanti et al., 2022) and a vocabulary-parallel loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from atoll.train.models.family import Cut, family_of
from atoll.train.models.parts import Decoder


def _spread(x: Tensor, mesh: DeviceMesh, layout: Shard | Replicate) -> DTensor:
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [layout], run_check=False)


def _local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.to_local() if isinstance(output, DTensor) else output


def _split_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))


class _Everywhere(ParallelStyle):
    """A module whose parameters and inputs are whole on every rank."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, mesh, None, self._enter, _local)  # type: ignore[arg-type]  # takes tuples

    @staticmethod
    def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, *others = inputs
        return (_spread(x, mesh, Replicate()), *others)


class _Gather(ParallelStyle):
    """A module whose first input is made whole on each rank; its matrices are cut."""

    def __init__(self, layout: Shard | Replicate) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *others = inputs
            return (_spread(x, mesh, self.layout).redistribute(mesh, [Replicate()]), *others)

        module.register_forward_pre_hook(enter)
        return module


class _WidthNorm(ParallelStyle):
    """A norm over all heads, of which each rank has its share."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _split_rows(module, mesh)
        return distribute_module(module, mesh, None, self._enter, _local)  # type: ignore[arg-type]  # takes tuples

    @staticmethod
    def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return (_spread(inputs[0], mesh, Shard(-1)),)


class _VocabularyParallel(ParallelStyle):
    """The head: each rank has a slice of the vocabulary."""

    def __init__(self, layout: Shard | Replicate) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _split_rows(module, mesh)
        return distribute_module(module, mesh, None, self._enter, None)  # type: ignore[arg-type]  # takes tuples

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        hidden, weight, labels, batch = inputs
        # The loss sums the hidden state's gradient over the ranks itself: what comes back is whole.
        hidden = _spread(hidden, mesh, self.layout).redistribute(mesh, [Replicate()])
        placements = [Replicate()] if labels is not None else [Partial()]
        return hidden.to_local(grad_placements=placements), weight, labels, batch


def apply_tensor(model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard the model's matrices over ``mesh``, a mesh of one dimension."""
    between: Shard | Replicate = Shard(1) if sequence_parallel else Replicate()
    norm: ParallelStyle = SequenceParallel(use_local_output=True) if sequence_parallel else _Everywhere()

    plan: dict[str, ParallelStyle] = {}
    if model.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if model.learned_positions is not None:
        plan["learned_positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    styles: dict[Cut, ParallelStyle] = {
        "gather": _Gather(between),
        "columns": ColwiseParallel(),
        "rows": RowwiseParallel(output_layouts=between),
        "norm": norm,
        "head_norm": SequenceParallel(sequence_dim=2, use_local_output=True),  # heads, not positions, are split
        "width_norm": _WidthNorm(),
    }
    cuts = family_of(model.config).cuts
    for number, block in model.blocks.items():
        there = {name for name, _ in block.named_modules()}
        plan.update({f"blocks.{number}.{name}": styles[cut] for name, cut in cuts.items() if name in there})
    if model.norm is not None:
        plan["norm"] = norm
    if model.head is not None:
        plan["head"] = _VocabularyParallel(between)
    parallelize_module(model, mesh, plan)
    if model.head is not None:
        per_rank = -(-model.config.vocabulary // mesh.size())
        model.head.group, model.head.vocab_start = mesh.get_group(), mesh.get_local_rank() * per_rank
