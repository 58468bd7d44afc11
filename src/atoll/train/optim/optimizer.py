"""What the optimizers share: they move this rank's part of each parameter, whatever mesh it is spread over."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from atoll.train.dtensor import local


class LocalOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer that works on local parts, without a DTensor's cost for each operation.

    Since an element's update depends on that element alone, a part can be moved without the others; Muon, for which
    this does not hold, gathers its matrices itself.

    Every state is a tensor in ``state[parameter]``, spread as the parameter is (``step`` is a scalar), and is there
    from the start, so that a checkpoint can be read into it. A group's ``peak`` is its learning rate before the
    schedule; the loop sets ``lr`` to ``peak`` × the schedule's factor before each step.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__([{**group, "peak": group["lr"]} for group in groups if group["params"]], {})
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].update(self.initial_state(parameter, group))

    @abc.abstractmethod
    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter that no step has moved."""

    @abc.abstractmethod
    def move(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """One step of the parameters of a group that have a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss comes back
        """Move every parameter that has a gradient. Nothing waits for the device.

        Raises:
            TypeError: a closure is given; none of these optimizers evaluates the loss again.
        """
        if closure is not None:
            raise TypeError("step() takes no closure: compute the gradients first")
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            if moving:
                self.move(moving, group)

    def locals(self, parameters: list[nn.Parameter], key: str) -> list[Tensor]:
        """The local parts of one state of these parameters."""
        return [local(self.state[parameter][key]) for parameter in parameters]


def like(parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros, spread as the parameter is."""
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
