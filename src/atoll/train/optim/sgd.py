"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.sgd import sgd

from atoll.train.dtensor import local, local_gradient
from atoll.train.optim.optimizer import LocalOptimizer, like


class SGD(LocalOptimizer):
    """torch's SGD on local parts: weight decay is added to the gradient. State: ``momentum``, where there is any.

    Groups have ``lr``, ``momentum`` and ``weight_decay``.
    """

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """Zero momentum."""
        return {"momentum": like(parameter)} if group["momentum"] else {}

    def move(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """One step."""
        momenta: list[Tensor | None] = [None] * len(parameters)
        if group["momentum"]:
            momenta = [*self.locals(parameters, "momentum")]
        sgd(
            [local(parameter) for parameter in parameters],
            [local_gradient(parameter) for parameter in parameters],
            momenta,
            foreach=True,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
