"""What all ranks know of a step: summed on the device while it is queued, read when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.train.world import World


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a step, equal on every rank."""

    loss: float
    metrics: dict[str, float]  # of the objective
    tokens: int
    grad_norm: float
    finite: bool  # whether loss and gradients are numbers; else no weight has moved
    asked_to_stop: bool
    save_failed: bool
    busy_s: list[float]  # by rank
    memory_bytes: int  # of the fullest rank


class PendingFacts:
    """Adds up what the ranks know of a step; nothing waits for the device. Every rank makes one at the same point.

    Args:
        metrics: names of the sums after the first, which is the loss.
        own: this rank's trained tokens, their weight, whether it is asked to stop and whether a save has failed, how
            long the host was busy, and the bytes it has needed at most.
        sums: [1 + metrics] fp64, this rank's.
        norm: [] fp64, of the summed gradients over all ranks.

    Attributes:
        weight: [] fp64, what sums are divided by.
        found_inf: [] fp32, 1 where loss or gradients are not finite.
    """

    def __init__(
        self,
        world: World,
        metrics: Sequence[str],
        own: tuple[int, float, bool, bool, float, int],
        sums: Tensor,
        norm: Tensor,
    ) -> None:
        self._world, self._metrics = world, metrics
        *counted, busy_s, memory_bytes = own
        values = torch.zeros(4 + 2 * world.size, dtype=torch.float64, pin_memory=norm.is_cuda)
        for place, value in enumerate(counted):
            values[place] = value
        values[4 + world.rank], values[4 + world.size + world.rank] = busy_s, memory_bytes
        values = torch.cat((values.to(norm.device, non_blocking=True), sums))
        dist.all_reduce(values)
        self.weight = torch.where(values[1] == 0, 1.0, values[1])
        finite = torch.isfinite(values[-len(sums)]) & torch.isfinite(norm)
        self.found_inf = (~finite).float()
        values = torch.cat((values, norm.reshape(1), self.found_inf.double().reshape(1)))
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=norm.is_cuda)
        self._host.copy_(values, non_blocking=True)
        self._copied = torch.cuda.Event() if norm.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()

    def read(self) -> Facts:
        """Wait until the device is done with the step."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, weight, asked, failed, *rest = self._host.tolist()
        size = self._world.size
        *sums, norm, found_inf = rest[2 * size :]
        weight = weight or 1.0
        loss, *metrics = (each / weight for each in sums)
        return Facts(
            loss=loss,
            metrics=dict(zip(self._metrics, metrics, strict=True)),
            tokens=int(tokens),
            grad_norm=norm / weight,
            finite=not found_inf,
            asked_to_stop=asked > 0,
            save_failed=failed > 0,
            busy_s=rest[:size],
            memory_bytes=int(max(rest[size : 2 * size])),
        )
