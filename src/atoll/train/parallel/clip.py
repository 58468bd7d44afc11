"""The norm of all gradients on any mesh, and their division by the number of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.train.dtensor import local
from atoll.train.parallel.mesh import Mesh


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """What this rank holds of each gradient."""
    return [local(p.grad) for p in parameters if p.grad is not None]


def squared_norm(parameters: Collection[nn.Parameter], mesh: Mesh) -> Tensor:
    """The sum of squares of all gradient elements of the model, [], equal on every rank. Makes no host sync.

    An element counts once: a gradient is summed over the mesh axes that it is sharded over, not over those that hold
    copies; stages of a pipeline hold different parameters.
    """
    wide = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {(): []}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        axes = enumerate(grad.placements) if isinstance(grad, DTensor) else ()
        spread = tuple(grad.device_mesh.get_group(axis) for axis, place in axes if not place.is_replicate())  # type: ignore[attr-defined]  # where there are axes
        groups.setdefault(spread, []).append(local(grad))
    total = torch.zeros((), dtype=wide, device=mesh.device)
    for spread, grads in groups.items():
        squares = _sum_of_squares(grads, wide, mesh.device)
        for group in spread:
            dist.all_reduce(squares, group=group)
        total += squares
    if mesh.layout.pipeline > 1:
        dist.all_reduce(total, group=mesh.group("pipeline"))
    return total


def _sum_of_squares(grads: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch._foreach_norm(grads, 2.0, dtype=dtype)
    return torch.stack([norm.to(dtype) for norm in norms]).square().sum()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiply every gradient by ``factor``, in place."""
    grads = local_gradients(parameters)
    if grads:
        torch._foreach_mul_(grads, factor)
