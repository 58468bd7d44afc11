"""Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024) for the matrices of the
blocks, AdamW for all else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from atoll.train.optim.adamw import fused_adamw
from atoll.train.optim.local import LocalOptimizer, like
from atoll.train.spread import as_spread, local, local_gradient, whole_of

# Of the quintic whose five iterations bring singular values from (0, 1] to about 1 (Jordan et al.).
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_BATCH_ELEMENTS = 1 << 26  # orthogonalised at a time: bounds what is whole on each rank meanwhile


class Muon(LocalOptimizer):
    """Groups with ``kind = "muon"`` have ``lr``, ``momentum`` and ``weight_decay``; the others are AdamW's.

    States: ``momentum`` of matrices; ``exp_avg``, ``exp_avg_sq`` and ``step`` of the others.
    """

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """Zeros."""
        if group["kind"] == "muon":
            return {"momentum": like(parameter)}
        step = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
        return {"step": step, "exp_avg": like(parameter), "exp_avg_sq": like(parameter)}

    def move(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """One step: a matrix moves along the nearest orthogonal matrix to its Nesterov momentum."""
        if group["kind"] != "muon":
            fused_adamw(self, parameters, group)
            return
        weights = [local(parameter) for parameter in parameters]
        gradients = [local_gradient(parameter) for parameter in parameters]
        momenta = self.locals(parameters, "momentum")
        torch._foreach_lerp_(momenta, gradients, 1.0 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
        torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
        for places in _batches(parameters):
            # Every rank orthogonalises the whole matrix and keeps its own part: no second exchange.
            whole = torch.stack([_gathered(ahead[place], parameters[place]) for place in places])
            rows, columns = whole.shape[1:]
            direction = orthogonalised(whole).to(weights[places[0]].dtype)
            parts = [_own_part(each, parameters[place]) for each, place in zip(direction, places, strict=True)]
            scale = max(1.0, rows / columns) ** 0.5
            torch._foreach_add_([weights[place] for place in places], parts, alpha=-group["lr"] * scale)


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, about: singular values come to lie within 0.7 to 1.2.

    Args:
        matrices: [N, rows, columns]. On a GPU fp32 ones are handled in bf16, which the iteration tolerates.

    Returns:
        [N, rows, columns], in the format of the arithmetic.
    """
    narrow = matrices.is_cuda and matrices.dtype == torch.float32
    x = matrices.to(torch.bfloat16) if narrow else matrices
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


def _batches(parameters: list[nn.Parameter]) -> Iterator[list[int]]:
    """Places of parameters of one shape, at most ``_BATCH_ELEMENTS`` in all, or one that has more."""
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for place, parameter in enumerate(parameters):
        by_shape[parameter.shape].append(place)
    for shape, places in by_shape.items():
        count = max(1, _BATCH_ELEMENTS // max(1, shape.numel()))
        for first in range(0, len(places), count):
            yield places[first : first + count]


def _gathered(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """The whole of a matrix of which ``part`` is this rank's."""
    whole = whole_of(part, parameter)
    return whole.full_tensor() if isinstance(whole, DTensor) else part


def _own_part(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's part of a matrix that every rank has; without communication."""
    if not isinstance(parameter, DTensor):
        return whole
    everywhere = whole_of(whole, parameter, [Replicate()] * parameter.device_mesh.ndim)
    return local(as_spread(everywhere, parameter))
