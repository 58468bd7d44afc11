"""What the tests of checkpoints share: a checkpointer for ranks, and small sharded states that tell who they are."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from atoll.train.checkpoint.checkpointer import Checkpointer
from atoll.train.checkpoint.survey import survey


def checkpointer(root: Any, notes: list[str] | None = None, **options: Any) -> Checkpointer:
    """One over all ranks, or over this process where there is no group."""
    timeout_s = options.setdefault("timeout_s", 60.0)
    group = None
    if dist.is_initialized():
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    usual = {"keep": 100, "keep_best": False, "asynchronous": True}
    return Checkpointer(
        str(root), group=group, note=(notes if notes is not None else []).append, **{**usual, **options}
    )


def whole_steps(saver: Checkpointer) -> list[int]:
    """The whole ones, oldest first."""
    return sorted(survey(saver._store).whole)


def load(saver: Checkpointer, step: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Read a step, which is whole, and not the newest perhaps; its meta."""
    manifest = survey(saver._store).whole[step]
    damage = saver._load(manifest, tensors)
    assert damage is None, damage
    return manifest.meta


def plain(value: float = 1.0, num: int = 1000) -> dict[str, Tensor]:
    """A state that is whole on every rank."""
    return {"weight": torch.full((num,), value), "bias": torch.full((3,), -value, dtype=torch.float64)}


def sharded(value: float, num: int, num_tensors: int = 8) -> dict[str, Tensor]:
    """``num_tensors`` tensors of ``num`` numbers, each split over all ranks and full of ``value``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {f"t{i}": distribute_tensor(torch.full((num,), value + i), mesh, [Shard(0)]) for i in range(num_tensors)}


class Net(nn.Module):
    """Sizes that no world size here divides evenly but TP's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 5, bias=False)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x).relu()))


def net(shard: int = 1, tensor: int = 1, replicate: int = 1) -> Net:
    """The net on a mesh of these sizes, with the weights of seed 0."""
    torch.manual_seed(0)
    model = Net()
    if shard * tensor * replicate == 1:
        return model
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh("cpu", (replicate, shard, tensor), mesh_dim_names=names)
    if tensor > 1:
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if replicate > 1:
        fully_shard(model, mesh=mesh["replicate", "shard"])
    elif shard > 1:
        fully_shard(model, mesh=mesh["shard"])
    return model


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor in full."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """Steps on data that is a function of the step; the loss of each."""
    losses = []
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).pow(2).mean() + model(x)[:, 0].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def replicated(tensor: Tensor) -> Tensor:
    """As a DTensor that every rank holds whole."""
    return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()])
