"""The optimizer that a recipe asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atoll.train.optim.adamw import AdamW, AdamWLowMemory
from atoll.train.optim.groups import matrices, split_by_decay
from atoll.train.optim.muon import Muon
from atoll.train.optim.sgd import SGD
from atoll.train.recipe.schema import OptimizerSection


def build_optimizer(
    parameters: dict[str, nn.Parameter], section: OptimizerSection, *, seed: int = 0
) -> torch.optim.Optimizer:
    """An optimizer of named parameters, plain or DTensors on any meshes.

    Each group has its learning rate before the schedule as ``peak``; the loop sets ``lr`` before every step. All state
    is tensors in ``optimizer.state[parameter]``, there from the start.

    Args:
        parameters: fp32 or fp64.
        section: ``[optimizer]``.
        seed: of the rounding of moments in bf16.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if section.kind == "sgd":
        return SGD(_groups(list(trained), trained, section, momentum=section.momentum, lr=section.lr))
    adamw: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
    if section.kind == "adamw":
        groups = _groups(list(trained), trained, section, **adamw)
        return AdamW(groups) if section.moments == "fp32" else AdamWLowMemory(groups, seed=seed)
    hidden = matrices(trained)
    ours = [name for name in trained if name in hidden]
    others = [name for name in trained if name not in hidden]
    return Muon(
        _groups(ours, trained, section, kind="muon", lr=section.muon_lr, momentum=section.momentum)
        + _groups(others, trained, section, kind="adamw", **adamw)
    )


def _groups(
    names: list[str], parameters: dict[str, nn.Parameter], section: OptimizerSection, **options: Any
) -> list[dict[str, Any]]:
    """Groups with and without weight decay; those without a parameter are left out."""
    groups = []
    for decay, members in zip((section.weight_decay, 0.0), split_by_decay(names, parameters), strict=True):
        if members:
            groups.append({"params": [parameters[name] for name in members], "weight_decay": decay, **options})
    return groups
