"""Tensors that are spread over a mesh: what this rank holds of them, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement


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
