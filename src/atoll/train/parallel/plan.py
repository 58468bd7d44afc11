"""What a run will do on the ranks it has: layout, recomputation, compilation; checked at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from atoll.train.metrics.figures import size
from atoll.train.parallel import recompute
from atoll.train.parallel.compile import check_compile, compile_blocks
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
