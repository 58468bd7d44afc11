"""What the optimizers share: they move this rank's part of each parameter, on whatever mesh it is sharded."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from atoll.train.dtensor import local, local_gradient


class Scaling(NamedTuple):
    """What happens to gradients before they move anything, known to the device alone. Named as torch's kernels do.

    Attributes:
        grad_scale: [] fp64, what gradients are divided by.
        found_inf: [] fp32, 1 where loss or gradients are not finite, so that nothing may move.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def divide(self, gradients: list[Tensor]) -> None:
        """Divide in place, in a pass of its own."""
        torch._foreach_div_(gradients, self.grad_scale)

    def skips(self) -> bool:
        """Whether nothing may move; waits for the device."""
        return bool(self.found_inf)

    def for_torch(self, gradients: list[Tensor]) -> dict[str, Any]:
        """Arguments of torch's fused kernels; their scale is fp32, so gradients in fp64 are divided here."""
        if gradients[0].dtype == torch.float64:
            self.divide(gradients)
            return {"grad_scale": None, "found_inf": self.found_inf}
        return {"grad_scale": self.grad_scale.float(), "found_inf": self.found_inf}


@dataclass(frozen=True)
class LocalParts:
    """What this rank holds of some parameters and their states; the tensors share memory with them."""

    parameters: list[nn.Parameter]
    weights: list[Tensor]
    states: dict[str, list[Tensor]]

    def gradients(self, *, narrow: bool = False) -> list[Tensor]:
        """What this rank holds of this step's gradients, in the weights' format.

        Args:
            narrow: or as the backward pass has made them, in the compute format.
        """
        found = [local_gradient(parameter) for parameter in self.parameters]
        return found if narrow else [each.to(weight.dtype) for each, weight in zip(found, self.weights, strict=True)]


class LocalOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer that works on local parts, without a DTensor's cost for each operation.

    Since an element's update depends on that element alone, a part can be moved without the others; Muon, for which
    this does not hold, gathers its matrices itself.

    Every state is a tensor in ``state[parameter]``, sharded as the parameter is (``step`` is a scalar), and is there
    from the start, so that a checkpoint can be read into it. A group's ``peak`` is its learning rate before the
    schedule; the loop sets ``lr`` to ``peak`` × the schedule's factor before each step.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__([{**group, "peak": group["lr"]} for group in groups if group["params"]], {})
        self._parts: dict[tuple[int, ...], LocalParts] = {}
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].update(self.initial_state(parameter, group))

    @abc.abstractmethod
    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter that no step has moved."""

    @abc.abstractmethod
    def move(self, parameters: list[nn.Parameter], group: dict[str, Any], scaling: Scaling) -> None:
        """One step of the parameters of a group that have a gradient."""

    @torch.no_grad()
    def step(self, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:  # type: ignore[override]  # no closure, and no loss comes back
        """Move every parameter that has a gradient. Nothing waits for the device; gradients hold anything afterwards.

        Args:
            grad_scale, found_inf: of ``Scaling``, on the parameters' device; left out, nothing is divided or skipped.
        """
        device = self.param_groups[0]["params"][0].device
        scaling = Scaling(
            torch.ones((), dtype=torch.float64, device=device) if grad_scale is None else grad_scale,
            torch.zeros((), device=device) if found_inf is None else found_inf,
        )
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            if moving:
                self.move(moving, group, scaling)

    def parts(self, parameters: list[nn.Parameter]) -> LocalParts:
        """The local parts of parameters whose states have the same names, found once: they stay where they are.

        FSDP may move a parameter's until its first forward pass, so ask in a step and not before.
        """
        key = tuple(map(id, parameters))
        if key not in self._parts:
            names = self.state[parameters[0]]
            states = {name: [local(self.state[parameter][name]) for parameter in parameters] for name in names}
            self._parts[key] = LocalParts(parameters, [local(parameter) for parameter in parameters], states)
        return self._parts[key]


class SGD(LocalOptimizer):
    """torch's SGD with momentum. Groups have ``lr``, ``momentum`` and ``weight_decay``, which the gradient gets."""

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(parameter)} if group["momentum"] else {}

    def move(self, parameters: list[nn.Parameter], group: dict[str, Any], scaling: Scaling) -> None:
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
