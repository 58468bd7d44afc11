"""torch.compile, block by block: where it can't be had is refused, and never run without."""

from __future__ import annotations

import torch
from torch import nn

from atoll.core.errors import ConfigError
from atoll.train.parallel.layers import layers_of
from atoll.train.recipe.schema import Recipe
from atoll.train.world import World


def check_compile(recipe: Recipe, world: World) -> None:
    """Refuse CUDA graphs where they do not hold: they replay fixed addresses, and collectives of one order.

    Raises:
        ConfigError: there are several ranks, or no GPU.
    """
    mode = recipe.compile.mode
    if mode in ("reduce-overhead", "max-autotune") and (world.size > 1 or world.device.type != "cuda"):
        where = f"{world.size} ranks" if world.size > 1 else "a CPU"
        raise ConfigError(
            f"[compile] mode = {mode!r} records CUDA graphs, which hold on one GPU alone, and this run has {where}: "
            'set "default" or "max-autotune-no-cudagraphs"'
        )


def compile_refusal(error: BaseException) -> str | None:
    """What to do about an error of torch.compile; None where it is another."""
    if type(error).__module__ != "torch._dynamo.exc":
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = next((line for line in reversed(lines) if line.startswith("File ")), "")
    reason = f"{lines[0] if lines else type(error).__name__}{f' ({where})' if where else ''}"
    return (
        f"[compile] enabled = true: torch.compile can't make one graph of each block: {reason}. Change what it names, "
        "or set [compile] enabled = false"
    )


def compile_blocks(model: nn.Module, mode: str) -> None:
    """Compile each layer's ``forward`` whole, in place: they are alike, so the second comes from the cache.

    What can't be compiled whole, and a layer that would be compiled too often, is an error of torch, not run uncompiled
    (``compile_refusal`` says what to do). Hooks, as FSDP's, stay outside.

    Raises:
        ConfigError: the model has no list of layers.
    """
    for block in layers_of(model, needed_by="[compile] enabled = true"):
        block.forward = torch.compile(block.forward, mode=None if mode == "default" else mode, fullgraph=True)
