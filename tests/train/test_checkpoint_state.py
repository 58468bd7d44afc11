"""An optimizer that was loaded goes on bit by bit as the one that was saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from atoll.core.errors import CheckpointError
from atoll.train.checkpoint.checkpointer import SavedTensor
from atoll.train.checkpoint.state import optimizer_tensors
from checkpoints import checkpointer, net, train, whole

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),  # keeps a running product that starts at one
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "sgd dampening": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5),  # its first step differs
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
}


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Any = None) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **optimizer_tensors(optimizer, names_of(model), saved)}


def go_on(root: str, make: Make, shape: dict[str, int], first: int = 2) -> bool:
    """Whether steps after a resume equal those of a run that never stopped, to the bit."""
    model = net(**shape)
    optimizer = make(list(model.parameters()))
    train(model, optimizer, range(first))
    saver = checkpointer(root)
    saver.save(first, state_of(model, optimizer), {})
    losses = train(model, optimizer, range(first, first + 3))
    saver.wait()

    other = net(**shape)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(9.0)
    fresh = make(list(other.parameters()))
    tensors = state_of(other, fresh, saver.tensors(first))
    saver.load(first, tensors)
    after = train(other, fresh, range(first, first + 3))
    saver.close()
    mine, wanted = state_of(other, fresh), state_of(model, optimizer)
    ours, theirs = whole(mine), whole(wanted)
    return (
        all(torch.equal(a, b) for a, b in zip(losses, after, strict=True))
        and ours.keys() == theirs.keys()
        and all(torch.equal(ours[name], theirs[name]) for name in ours)
        and all(type(mine[name]) is type(wanted[name]) for name in mine)
    )


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on_bit_by_bit(tmp_path, name, first):
    assert go_on(str(tmp_path), OPTIMIZERS[name], {}, first)


def every(root: str, shape: dict[str, int]) -> dict[str, bool]:
    names = ["adamw", "adamw fused", "sgd dampening"]
    return {name: go_on(f"{root}/{name}", OPTIMIZERS[name], shape) for name in names}


@pytest.mark.parametrize("shape", [{"shard": 2}, {"replicate": 2, "shard": 2}], ids=str)
def test_goes_on_bit_by_bit_when_sharded(tmp_path, shape):
    world = shape.get("replicate", 1) * shape["shard"]
    for outcome in ranks.run(world, every, str(tmp_path), shape):
        assert outcome == {"adamw": True, "adamw fused": True, "sgd dampening": True}


def test_momentum_of_matrices(tmp_path):
    assert go_on(
        str(tmp_path), lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01), {}
    )


def test_a_parameter_without_state_gets_none():
    """Its first gradient may come later, and must find what a fresh optimizer finds."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    names = {used: "used", unused: "unused"}
    optimizer = torch.optim.AdamW([used, unused])
    used.sum().backward()
    optimizer.step()
    tensors = optimizer_tensors(optimizer, names)
    assert sorted(tensors) == ["optim.used.exp_avg", "optim.used.exp_avg_sq", "optim.used.step"]
    assert tensors["optim.used.exp_avg"] is optimizer.state[used]["exp_avg"]
    unused.sum().backward()
    optimizer.step()
    assert len(optimizer_tensors(optimizer, names)) == 6


def test_counters_lie_where_the_kernel_reads_them(tmp_path):
    for fused, device in ((False, "cpu"), (True, "meta")):
        parameter = nn.Parameter(torch.ones(2, device="meta"))
        optimizer = torch.optim.AdamW([parameter])
        optimizer.param_groups[0]["fused"] = fused
        source = nn.Parameter(torch.ones(2))
        trained = torch.optim.AdamW([source])
        source.sum().backward()
        trained.step()
        saver = checkpointer(tmp_path)
        saver.save(1, optimizer_tensors(trained, {source: "a.b"}), {})
        saver.wait()
        tensors = optimizer_tensors(optimizer, {parameter: "a.b"}, saver.tensors(1))
        assert tensors["optim.a.b.step"].device.type == device
        assert tensors["optim.a.b.exp_avg"].device.type == "meta"


def test_a_state_that_is_no_tensor_is_named():
    class Counting(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["count"] = 1

    parameter = nn.Parameter(torch.ones(2))
    optimizer = Counting([parameter], lr=0.1)
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"Counting keeps count = 1 of up.weight: only tensors can be saved"):
        optimizer_tensors(optimizer, {parameter: "up.weight"})


def test_state_that_is_there_from_the_start_stays():
    """Such an optimizer knows what it has; where the checkpoint has something else, loading says so."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    momentum = torch.zeros(2)
    optimizer.state[parameter]["momentum_buffer"] = momentum
    saved = {"optim.w.exp_avg": SavedTensor((2,), torch.float32), "optim.other.step": SavedTensor((), torch.float32)}
    tensors = optimizer_tensors(optimizer, {parameter: "w"}, saved)
    assert list(tensors) == ["optim.w.momentum_buffer"]
    assert tensors["optim.w.momentum_buffer"] is momentum
