"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.sgd import sgd

from atoll.train.optim.optimizer import LocalOptimizer, Scaling, like


class SGD(LocalOptimizer):
    """torch's SGD on local parts: weight decay is added to the gradient. State: ``momentum``, where there is any.

    Groups have ``lr``, ``momentum`` and ``weight_decay``.
    """

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """Zero momentum."""
        return {"momentum": like(parameter)} if group["momentum"] else {}

    def move(self, parameters: list[nn.Parameter], group: dict[str, Any], scaling: Scaling) -> None:
        """One fused step."""
        parts = self.parts(parameters)
        gradients = parts.gradients()
        momenta: list[Tensor | None] = [*parts.states.get("momentum", [None] * len(parameters))]
        sgd(
            parts.weights,
            gradients,
            momenta,
            fused=True,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            **scaling.for_torch(gradients),
        )
