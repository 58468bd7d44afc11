"""Process groups of a layout, and the place of this rank in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from atoll.train.parallel.layout import AXES, Layout


@dataclass(frozen=True)
class Mesh:
    """The device mesh of a layout, with the groups that training asks for.

    Attributes:
        fsdp: what parameters are sharded over: shard × context, with replicate outside under HSDP; None where
            parameters are not sharded.
        gradients: the ranks that a replicated parameter's gradient is summed over; None where it is one rank, or where
            FSDP does it.
    """

    layout: Layout
    device: torch.device
    whole: DeviceMesh
    fsdp: DeviceMesh | None
    gradients: dist.ProcessGroup | None

    @property
    def place(self) -> dict[str, int]:
        """This rank's coordinate on each axis."""
        own = self.whole.get_coordinate()
        assert own is not None
        return dict(zip(AXES, own, strict=True))

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on ``axis`` alone."""
        return self.whole[axis].get_group()

    @property
    def data_rank(self) -> int:
        """Which share of the sequences this rank reads."""
        place = self.place
        return place["replicate"] * self.layout.shard + place["shard"]


def make_mesh(layout: Layout, device: torch.device) -> Mesh:
    """Make the groups of ``layout``. Collective: every rank calls it at the same point."""
    whole = init_device_mesh(device.type, tuple(getattr(layout, axis) for axis in AXES), mesh_dim_names=AXES)
    fsdp, gradients = None, None
    if layout.sharded:
        flat = whole["shard", "context"]._flatten("fsdp") if layout.context > 1 else whole["shard"]
        name = "fsdp" if layout.context > 1 else "shard"
        fsdp = whole["replicate", name] if layout.replicate > 1 else flat
    elif layout.replicate > 1:
        gradients = whole["replicate"].get_group()
    return Mesh(layout, device, whole, fsdp, gradients)
