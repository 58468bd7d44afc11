"""Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024) for the matrices of the
blocks, AdamW for all else.

A matrix X of a momentum moves its weight along the nearest semi-orthogonal one, about: five steps of Newton and
Schulz's iteration, each X ← (a + b G + c G²) X with the Gram matrix G = X Xᵀ of the shorter side. Of a long matrix
several steps work on G alone, so that fewer products have the longer side. Matrices that several ranks hold are dealt
to them: each orthogonalises its share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.train.optim.adamw import adamw_state, move_adamw
from atoll.train.optim.dealing import dealt, num_workers
from atoll.train.optim.optimizer import LocalOptimizer, LocalParts, Scaling

_STEP = (3.4445, -4.7750, 2.0315)  # a, b and c (Jordan et al.)
# How many steps follow one another before the Gram matrix is made anew. What fp16 rounds of it is enlarged by each:
# four at a time learn worse, with five a run of 1B ended in NaN (docs/performance.md).
_SQUARE, _LONG = (1, 1, 1, 1, 1), (2, 3)
_LARGEST = 64.0  # the bound of a Gram matrix's eigenvalues where it is kept, so that fp16 holds its smallest elements
_BATCH_ELEMENTS = 1 << 28  # orthogonalised at a time by a rank: bounds what is whole on it meanwhile


class Muon(LocalOptimizer):
    """Groups with ``kind = "muon"`` have ``lr``, ``momentum`` and ``weight_decay``; the others are AdamW's.

    States: ``momentum`` of matrices; ``exp_avg``, ``exp_avg_sq`` and ``step`` of the others.

    Args:
        replicas: ranks that hold the same parameters, whole; None where this is one rank, or parameters are DTensors.
    """

    def __init__(self, groups: list[dict[str, Any]], *, replicas: dist.ProcessGroup | None = None) -> None:
        super().__init__(groups)
        self._replicas = replicas

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(parameter)} if group["kind"] == "muon" else adamw_state(parameter)

    def move(self, parameters: list[nn.Parameter], group: dict[str, Any], scaling: Scaling) -> None:
        """One step: a matrix moves along the nearest orthogonal matrix to its Nesterov momentum."""
        if group["kind"] != "muon":
            move_adamw(self.parts(parameters), group, scaling)
            return
        for alike in _alike(parameters):
            count = max(1, num_workers(alike[0], self._replicas) * _BATCH_ELEMENTS // max(1, alike[0].numel()))
            for first in range(0, len(alike), count):
                self._move_batch(self.parts(alike[first : first + count]), group, scaling)

    def _move_batch(self, parts: LocalParts, group: dict[str, Any], scaling: Scaling) -> None:
        weights, momenta = parts.weights, parts.states["momentum"]
        rows, columns = parts.parameters[0].shape
        rate = -group["lr"] * max(1.0, rows / columns) ** 0.5
        decay = 1.0 - group["lr"] * group["weight_decay"]
        fused = weights[0].is_cuda and weights[0].dtype == torch.float32
        narrow = torch.bfloat16 if fused else weights[0].dtype
        ahead = torch.empty((len(weights), *weights[0].shape), dtype=narrow, device=weights[0].device)
        if fused:
            from atoll.train.optim.kernels import decay_and_add, nesterov

            divisor, found_inf = scaling.grad_scale.float(), scaling.found_inf
            for momentum, gradient, out in zip(momenta, parts.gradients(narrow=True), ahead, strict=True):
                nesterov(momentum, gradient.contiguous(), out, group["momentum"], divisor, found_inf)
        elif scaling.skips():
            return
        else:
            gradients = parts.gradients()
            scaling.divide(gradients)
            torch._foreach_lerp_(momenta, gradients, 1.0 - group["momentum"])
            torch._foreach_copy_(list(ahead), torch._foreach_lerp(gradients, momenta, group["momentum"]))
        directions = dealt(orthogonalised, parts.parameters[0], self._replicas)(ahead)
        if fused:
            for weight, direction in zip(weights, directions, strict=True):
                decay_and_add(weight, direction, found_inf, decay=decay, rate=rate)
        else:
            torch._foreach_mul_(weights, decay)
            torch._foreach_add_(weights, list(directions), alpha=rate)


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, about: singular values come to lie within 0.68 to 1.21.

    Args:
        matrices: [N, rows, columns]; on a GPU in bf16.

    Returns:
        as ``matrices``.
    """
    if not matrices.numel():
        return matrices
    wide = torch.promote_types(matrices.dtype, torch.float32)
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=wide)
    x = torch.div(matrices, norms.clamp(min=torch.finfo(wide).tiny), out=torch.empty_like(matrices))  # zeros stay zeros
    rows, columns = x.shape[1:]
    for count in _SQUARE if max(rows, columns) < 2 * min(rows, columns) else _LONG:
        share, rest = _polynomial(x, count)
        x = torch.baddbmm(x, rest, x, beta=share) if rows <= columns else torch.baddbmm(x, x, rest, beta=share)
    return x


def _polynomial(x: Tensor, count: int) -> tuple[float, Tensor]:
    """What ``count`` steps multiply ``x`` by, as a number and a symmetric matrix [N, M, M] whose sum it is.

    One step alone rounds as ``x`` is. What several leave between them has more digits than bf16: fp16.
    """
    a, b, c = _STEP
    if count == 1:
        gram = _gram(x, x.dtype)
        return a, _product(gram, gram, gram, alpha=c, beta=b)
    gram = _gram(x, torch.float16 if x.dtype == torch.bfloat16 else x.dtype, _LARGEST)
    root: Tensor | None = None
    for last in range(1 - count, 1):
        factor = _product(gram, gram, gram, alpha=c / _LARGEST**2, beta=b / _LARGEST)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        root = factor if root is None else _product(root, factor)
        if last:
            gram = _product(_product(gram, factor), factor)
    assert root is not None
    root.diagonal(dim1=1, dim2=2).sub_(a**count)
    return a**count, root.to(x.dtype)


def _gram(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """``scale`` times x xᵀ, or xᵀ x where that is smaller."""
    tall = x.shape[1] > x.shape[2]
    if _has_kernel(x, min(x.shape[1:])):
        from atoll.train.optim.kernels import symmetric_product

        return symmetric_product(x, x, dtype=dtype, tall=tall, alpha=scale)
    x = x.transpose(1, 2) if tall else x
    if x.dtype == dtype:
        return torch.bmm(x, x.transpose(1, 2)) * scale
    return (torch.bmm(x, x.transpose(1, 2), out_dtype=torch.float32) * scale).to(dtype)


def _product(
    left: Tensor, right: Tensor, add: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    """``alpha`` left right + ``beta`` add of symmetric matrices, whose product is symmetric, about."""
    if _has_kernel(left, left.shape[1]):
        from atoll.train.optim.kernels import symmetric_product

        return symmetric_product(left, right, add, dtype=left.dtype, alpha=alpha, beta=beta)
    if add is None:
        return torch.bmm(left, right)
    return torch.baddbmm(add, left, right, beta=beta, alpha=alpha)


def _has_kernel(x: Tensor, side: int) -> bool:
    """Whether there is a kernel that makes half of a symmetric product of that side: from Hopper on."""
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    if not (x.is_cuda and narrow and side % 256 == 0 and x.shape[1] % 64 == 0 and x.shape[2] % 64 == 0):
        return False
    return torch.cuda.get_device_capability(x.device) >= (9, 0)


def _alike(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one shape and one spread, the largest first, so that the GPU has work while the others come."""
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.shape, getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)].append(
            parameter
        )
    return iter(sorted(groups.values(), key=lambda group: -group[0].numel()))
