"""Tensors that are spread over a mesh: what this rank holds of them, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import Shard, _StridedShard


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; a weight that torchao wraps to gather it in 8 bits, plain."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if not type(part).__module__.startswith("torchao."):
        return part
    names, _ = part.__tensor_flatten__()  # type: ignore[attr-defined]  # the protocol of tensors around tensors
    inner: Tensor = getattr(part, names[0])
    return inner.detach()


def as_sharded(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient spread as its parameter is: tensor parallelism can leave sums that are still to be made."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of the part that this rank holds."""
    assert parameter.grad is not None
    gradient = as_sharded(parameter.grad, parameter)
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def whole_of(part: Tensor, like: Tensor, placements: Sequence[Placement] | None = None) -> Tensor:
    """``part`` as this rank's of a tensor that is spread as ``like`` is, or as ``placements`` say."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, placements or like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_of(tensor: Tensor, whole: Tensor, dim: int | None = None) -> Tensor:
    """What this rank holds of ``whole``, where that is spread as ``tensor`` is; it shares its memory.

    Args:
        dim: ``whole`` has this one of the dimensions alone.
    """
    if not isinstance(tensor, DTensor):
        return whole
    mesh = tensor.device_mesh
    cuts = list(zip(tensor.placements, mesh.get_coordinate() or (), mesh.shape, strict=True))
    # FSDP over tensor parallelism: the outer mesh dimension splits what the inner one left, and says so.
    for place, number, count in sorted(cuts, key=lambda cut: isinstance(cut[0], _StridedShard)):
        if isinstance(place, Shard | _StridedShard) and dim in (None, place.dim):
            along = place.dim if dim is None else 0
            pieces = whole.chunk(count, along)  # fewer than ``count`` where there are fewer places
            whole = pieces[number] if number < len(pieces) else whole.narrow(along, 0, 0)
    return whole


def copy_part(whole: Tensor, tensor: Tensor) -> Tensor:
    """Set and return what this rank holds of ``tensor`` from the whole of it, of which only that part is read."""
    return local(tensor).copy_(part_of(tensor, whole))
