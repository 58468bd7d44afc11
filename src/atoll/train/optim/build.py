"""The optimizer that a recipe asks for; which parameters decay, and which are matrices that Muon moves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atoll.core.errors import ConfigError
from atoll.train.optim.adamw import AdamW
from atoll.train.optim.muon import Muon
from atoll.train.optim.optimizer import SGD, LocalOptimizer
from atoll.train.recipe.schema import OptimizerSection

# Parts of the names of tables that are looked up by index, ours (embed, learned_positions) and common ones.
_TABLES = ("embed", "position", "wte", "wpe")
_HEADS = {"head", "lm_head", "output", "unembed"}


def build_optimizer(
    parameters: dict[str, nn.Parameter],
    section: OptimizerSection,
    *,
    seed: int = 0,
    replicas: dist.ProcessGroup | None = None,
) -> LocalOptimizer:
    """An optimizer of named parameters, plain or DTensors on any meshes.

    Args:
        parameters: fp32 or fp64.
        seed: of the rounding of moments in bf16.
        replicas: the ranks that hold copies of parameters, beyond what their meshes say; None where none do.

    Raises:
        ConfigError: none of the parameters is to be trained.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not trained:
        raise ConfigError(f"none of the model's {len(parameters)} parameters has requires_grad: there is none to train")
    if section.kind == "sgd":
        return SGD(_groups(trained, section, momentum=section.momentum, lr=section.lr))
    adamw: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
    if section.kind == "adamw":
        moments = torch.bfloat16 if section.moments == "bf16" else None
        return AdamW(_groups(trained, section, **adamw), moments=moments, seed=seed, fused=section.fused)
    hidden = matrices(trained)
    ours = {name: parameter for name, parameter in trained.items() if name in hidden}
    others = {name: parameter for name, parameter in trained.items() if name not in hidden}
    muon = _groups(ours, section, kind="muon", lr=section.muon_lr, momentum=section.momentum)
    return Muon(muon + _groups(others, section, kind="adamw", **adamw), replicas=replicas)


def _groups(parameters: dict[str, nn.Parameter], section: OptimizerSection, **options: Any) -> list[dict[str, Any]]:
    """Those that decay and those that do not; the optimizer leaves out a group without parameters."""
    decaying = [parameter for name, parameter in parameters.items() if decays(name, parameter)]
    others = [parameter for name, parameter in parameters.items() if not decays(name, parameter)]
    return [
        {"params": decaying, "weight_decay": section.weight_decay, **options},
        {"params": others, "weight_decay": 0.0, **options},
    ]


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: never to norms, biases and embeddings, but to the head."""
    is_table = any(table in name for table in _TABLES) and "unembed" not in name
    return parameter.ndim >= 2 and not name.endswith("bias") and "norm" not in name and not is_table


def matrices(parameters: dict[str, nn.Parameter]) -> set[str]:
    """The names of the hidden layers' matrices: those of two dimensions inside the blocks.

    In a model that has no ``blocks``, all of two dimensions but embeddings and the head.
    """
    hidden = {name for name, each in parameters.items() if each.ndim == 2 and decays(name, each)}
    in_blocks = {name for name in hidden if "blocks" in name.split(".")}
    return in_blocks or {name for name in hidden if _HEADS.isdisjoint(name.split("."))}
