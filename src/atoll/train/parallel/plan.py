"""What a run will do on the ranks it has: layout, recomputation, compilation; checked at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from atoll.core.errors import ConfigError
from atoll.train.metrics.figures import size
from atoll.train.parallel import recompute
from atoll.train.parallel.estimate import Device, Estimate, estimate, is_compiled
from atoll.train.parallel.fit import choose, first_fix, fits_replicated
from atoll.train.parallel.layout import Layout, resolve
from atoll.train.parallel.precision import check_float8, scale_float8
from atoll.train.recipe.schema import Recipe
from atoll.train.world import World

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """The decisions of a run.

    Attributes:
        mode: of activation checkpointing.
        compiles: whether blocks are compiled.
    """

    recipe: Recipe
    layout: Layout
    mode: recompute.Mode
    compiles: bool
    estimate: Estimate
    device_bytes: int
    device: Device

    def apply_to_blocks(self, model: nn.Module) -> None:
        """Recomputation and compilation of a model's blocks, in the order they must have."""
        recompute.apply(model, self.mode)
        if self.compiles:
            compile_blocks(model, self.recipe.compile.mode)

    def after_step(self, model: nn.Module) -> None:
        """What a model needs each time its weights have moved."""
        if self.recipe.precision.float8 == "tensorwise" and self.layout.sharded and self.layout.tensor == 1:
            scale_float8(model)

    @property
    def first_fix(self) -> str | None:
        """The first change that would make the run need less memory than the card has."""
        return first_fix(self.recipe, self.layout, self.device_bytes, self.device)


def plan(recipe: Recipe, world: World, memory: int, *, tell: Tell) -> Plan:
    """Decide how ``recipe`` runs on ``world``.

    Args:
        memory: bytes that the smallest rank has, so that all decide alike.

    Raises:
        ConfigError: it can't run there, or asks for what the card can't do.
    """
    check_float8(recipe, world.device)
    check_compile(recipe, world)
    device: Device = "cuda" if world.device.type == "cuda" else "cpu"
    replicated = fits_replicated(recipe, world.size, memory, device)
    layout = resolve(recipe, world.size, fits_replicated=replicated)
    chosen = choose(recipe, layout, memory, device)
    found = estimate(recipe, layout, recompute=chosen, device_bytes=memory, device=device)
    if recipe.parallel.replicate is None and recipe.parallel.shard is None and world.size > 1:
        tell(f"memory estimate: {size(found.total)} per rank ({layout}); by component: --dryrun")
    made = Plan(recipe, layout, chosen, is_compiled(recipe, device), found, memory, device)
    if not found.fits(memory):
        advice = f"; it would with {made.first_fix}" if made.first_fix else ""
        tell(f"the run needs about {size(found.total)} per rank, more than the {size(memory)} available{advice}")
    return made


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
    """Compile each block's ``forward`` whole, in place: the blocks are alike, so the second comes from the cache.

    What can't be compiled whole, and a block that would be compiled too often, is an error of torch, not run uncompiled
    (``session.py`` says what to do). Hooks, as FSDP's, stay outside.

    Raises:
        ConfigError: the model has no ``blocks``.
    """
    model = getattr(model, "inner", model)  # a user's, inside of ours
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, (nn.ModuleDict, nn.ModuleList)):
        raise ConfigError(
            f"[compile] enabled works block by block, and {type(model).__name__} has no ModuleList or ModuleDict named "
            "blocks; name it so, or set enabled = false"
        )
    for block in blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks:
        block.forward = torch.compile(block.forward, mode=None if mode == "default" else mode, fullgraph=True)
