"""The norm of all gradients, on any mesh."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.train.dtensor import local
from atoll.train.parallel.mesh import Mesh

Groups = tuple[dist.ProcessGroup, ...]


class GradientNorm:
    """Euclidean norm of the gradients of ``masters``, over all ranks.

    An element counts once: a gradient is summed over the mesh axes that it is sharded over, not over those that hold
    copies; stages of a pipeline hold different parameters. Which are sharded alike is found out once.
    """

    def __init__(self, masters: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
        self._masters, self._mesh = masters, mesh
        self._wide = torch.float64 if any(p.dtype == torch.float64 for p in masters.values()) else torch.float32
        self._held: list[str] = []
        self._alike: dict[Groups, list[str]] = {}

    @torch.no_grad()
    def __call__(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Every rank calls it; nothing waits for the device.

        Returns:
            the norm, [] fp64, equal on every rank; and [] of each gradient's part on this rank, by name.
        """
        held = [name for name, parameter in self._masters.items() if parameter.grad is not None]
        if held != self._held:
            self._held, self._alike = held, self._sharded_alike(held)
        total = torch.zeros((), dtype=self._wide, device=self._mesh.device)
        parts: dict[str, Tensor] = {}
        for groups, names in self._alike.items():
            gradients = {name: local(self._masters[name].grad) for name in names}  # type: ignore[arg-type]  # is held
            own = {name: each for name, each in gradients.items() if each.numel()}
            squares = torch.zeros_like(total)
            if own:
                norms = torch._foreach_norm(list(own.values()), 2.0, dtype=self._wide)
                parts |= zip(own, norms, strict=True)
                squares = torch.stack(list(norms)).square().sum()
            for group in groups:
                dist.all_reduce(squares, group=group)
            total += squares
        if self._mesh.layout.pipeline > 1:
            dist.all_reduce(total, group=self._mesh.group("pipeline"))
        return total.double().sqrt(), parts

    def _sharded_alike(self, names: list[str]) -> dict[Groups, list[str]]:
        """Names by the groups of ranks that their gradients are sharded over; of none first, on every rank."""
        alike: dict[Groups, list[str]] = {(): []}
        for name in names:
            gradient = self._masters[name].grad
            groups: Groups = ()
            if isinstance(gradient, DTensor):
                mesh = gradient.device_mesh
                axes = enumerate(gradient.placements)
                groups = tuple(mesh.get_group(axis) for axis, place in axes if not place.is_replicate())
            alike.setdefault(groups, []).append(name)
        return alike
