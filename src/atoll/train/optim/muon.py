"""Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024) for the matrices of the
blocks, AdamW for all else.

A matrix X of a momentum moves its weight along the nearest semi-orthogonal one, U Vᵀ of X = U S Vᵀ, about. That is
Q X with Q = (X Xᵀ)^(-1/2): the iteration works on the Gram matrix of X's shorter side, so that only two products have
X's longer side. Matrices that several ranks hold are dealt to them: each orthogonalises its share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.train.dtensor import local
from atoll.train.optim.adamw import fused_adamw
from atoll.train.optim.dealing import Dealing, dealing_of
from atoll.train.optim.optimizer import LocalOptimizer, LocalParts, Scaling, like

# Polynomials a + b G + c G² of three steps, made as those of Amsel et al., "The Polar Express", 2025: each brings
# singular values nearest to 1 of all of its degree, from where the one before left those of at least 1/100 of the
# norm's bound. They end within 0.73 to 1.27, as do the five steps of Jordan et al. A fourth would enlarge what fp16
# rounds of the Gram matrix: with it a run of 1B learnt worse, with a fifth it ended in NaN (docs/performance.md).
_STEPS = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))
_LARGEST = 64.0  # the bound of a Gram matrix's eigenvalues, so that fp16 holds its smallest elements, too
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
        """Zeros."""
        if group["kind"] == "muon":
            return {"momentum": like(parameter)}
        step = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
        return {"step": step, "exp_avg": like(parameter), "exp_avg_sq": like(parameter)}

    def move(self, parameters: list[nn.Parameter], group: dict[str, Any], scaling: Scaling) -> None:
        """One step: a matrix moves along the nearest orthogonal matrix to its Nesterov momentum."""
        if group["kind"] != "muon":
            fused_adamw(self.parts(parameters), group, scaling)
            return
        for alike in _alike(parameters):
            dealing = dealing_of(alike[0], self._replicas)
            count = max(1, dealing.size * _BATCH_ELEMENTS // max(1, alike[0].numel()))
            for first in range(0, len(alike), count):
                self._move_batch(self.parts(alike[first : first + count]), group, dealing, scaling)

    def _move_batch(self, parts: LocalParts, group: dict[str, Any], dealing: Dealing, scaling: Scaling) -> None:
        weights, gradients, momenta = parts.weights, parts.gradients(), parts.states["momentum"]
        rows, columns = parts.parameters[0].shape
        rate = -group["lr"] * max(1.0, rows / columns) ** 0.5
        decay = 1.0 - group["lr"] * group["weight_decay"]
        fused = weights[0].is_cuda and weights[0].dtype == torch.float32
        narrow = torch.bfloat16 if fused else weights[0].dtype
        ahead = torch.empty((len(weights), *weights[0].shape), dtype=narrow, device=weights[0].device)
        if fused:
            from atoll.train.optim.kernels import decay_and_add, nesterov

            divisor, found_inf = scaling.for_triton(weights[0].device)
            for momentum, gradient, out in zip(momenta, gradients, ahead, strict=True):
                nesterov(momentum, gradient.contiguous(), out, group["momentum"], divisor, found_inf)
        elif scaling.skips():
            return
        else:
            scaling.divide(gradients)
            torch._foreach_lerp_(momenta, gradients, 1.0 - group["momentum"])
            torch._foreach_copy_(list(ahead), torch._foreach_lerp(gradients, momenta, group["momentum"]))
        directions = dealing.back(orthogonalised(dealing.whole(ahead)))
        if fused:
            for weight, direction in zip(weights, directions, strict=True):
                decay_and_add(weight, direction, found_inf, decay=decay, rate=rate)
        else:
            torch._foreach_mul_(weights, decay)
            torch._foreach_add_(weights, list(directions), alpha=rate)


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, about: singular values come to lie within 0.73 to 1.27.

    Args:
        matrices: [N, rows, columns]; on a GPU in bf16.

    Returns:
        as ``matrices``.
    """
    if not matrices.numel():
        return matrices
    x = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.transpose(1, 2)
    root = _inverse_root(x)
    return torch.bmm(root, x) if x is matrices else torch.bmm(x.transpose(1, 2), root)


def _inverse_root(x: Tensor) -> Tensor:
    """(x xᵀ)^(-1/2), about, [N, M, M], of ``x`` [N, M, K].

    What is between has more digits than bf16: fp16 where a GPU is given that.
    """
    narrow = x.is_cuda and x.dtype == torch.bfloat16
    wide = torch.bmm(x, x.transpose(1, 2), out_dtype=torch.float32) if narrow else x @ x.transpose(1, 2)
    bound = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True)  # of the eigenvalues
    share = _LARGEST / bound.clamp(min=torch.finfo(bound.dtype).tiny * _LARGEST)  # zeros stay zeros
    gram = torch.mul(wide, share, out=torch.empty_like(wide, dtype=torch.float16 if narrow else wide.dtype))
    del wide
    # The root of gram / _LARGEST comes with a factor that lets root gram root be its next value.
    (a, b, c), *others = _STEPS
    factor = _LARGEST**-0.5
    root = torch.baddbmm(gram, gram, gram, beta=factor * b / _LARGEST, alpha=factor * c / _LARGEST**2)
    root.diagonal(dim1=1, dim2=2).add_(factor * a)
    for a, b, c in others:
        # Of the root so far, and not of the last such matrix: rounding does not add up.
        moved = torch.bmm(torch.bmm(gram, root), root)
        root = torch.baddbmm(root, root, torch.baddbmm(moved, moved, moved, beta=b, alpha=c), beta=a)
    out: Tensor = (root * share.sqrt()).to(x.dtype)
    return out


def _alike(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one shape and one spread, the largest first, so that the GPU has work while the others come."""
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.shape, getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)].append(
            parameter
        )
    return iter(sorted(groups.values(), key=lambda group: -group[0].numel()))
