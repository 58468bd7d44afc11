"""What a run will do on the ranks it has: layout, recomputation, compilation; checked at the start."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from atoll.train.metrics.figures import size
from atoll.train.parallel.compile import check_compile
from atoll.train.parallel.estimate import Device, Estimate, estimate, is_compiled
from atoll.train.parallel.fit import choose, first_fix, fits_replicated, replaced
from atoll.train.parallel.layout import Layout, reshards, resolve
from atoll.train.parallel.precision import check_float8
from atoll.train.parallel.recompute import Recompute
from atoll.train.recipe.schema import Recipe
from atoll.train.world import World


@dataclass(frozen=True)
class Plan:
    """The decisions of a run.

    Attributes:
        recompute: activation checkpointing: a mode, or the share of the blocks that are ``selective``.
        compiled: whether blocks are compiled.
        device_bytes: what each rank has.
    """

    recipe: Recipe
    layout: Layout
    recompute: Recompute = "none"
    compiled: bool = False
    device_bytes: int = 0
    device: Device = "cpu"

    @property
    def gathers_float8(self) -> bool:
        """Whether FSDP gathers weights in 8 bits, so that their scales are computed when they have moved."""
        layout = self.layout
        return self.recipe.precision.float8 == "tensorwise" and layout.sharded and layout.tensor == 1

    @property
    def first_fix(self) -> str | None:
        """The first change that would make the run need less memory than the card has."""
        return first_fix(self.recipe, self.layout, self.device_bytes, self.device)


def decide(recipe: Recipe, world_size: int, memory_bytes: int, device: Device) -> tuple[Plan, Estimate]:
    """What the recipe leaves open, decided by what fits, and what the fullest rank then needs.

    Where all blocks fit as FSDP gathers them, they stay so from the forward to the backward pass.

    Raises:
        ConfigError: the recipe does not go with that many ranks.
    """
    replicated = fits_replicated(recipe, world_size, memory_bytes, device)
    layout = resolve(recipe, world_size, fits_replicated=replicated)
    recompute = choose(recipe, layout, memory_bytes, device)
    needs = functools.partial(estimate, layout=layout, recompute=recompute, device_bytes=memory_bytes, device=device)
    found = needs(recipe)
    if recipe.parallel.reshard_after_forward is None and layout.sharded and reshards(recipe, layout):
        kept = replaced(recipe, {"parallel.reshard_after_forward": False})
        if needs(kept).fits(memory_bytes):
            recipe, found = kept, needs(kept)
    return Plan(recipe, layout, recompute, is_compiled(recipe, device), memory_bytes, device), found


def plan(recipe: Recipe, world: World, memory: int, *, note: Callable[[str], None]) -> Plan:
    """Decide how ``recipe`` runs on ``world``.

    Args:
        memory: bytes that the smallest rank has, so that all decide alike.

    Raises:
        ConfigError: it can't run there, or asks for what the card can't do.
    """
    check_float8(recipe, world.device)
    check_compile(recipe, world)
    made, found = decide(recipe, world.size, memory, "cuda" if world.device.type == "cuda" else "cpu")
    if recipe.parallel.replicate is None and recipe.parallel.shard is None and world.size > 1:
        note(f"memory estimate: {size(found.total)} per rank ({made.layout}); by component: --dryrun")
    if not found.fits(memory):
        advice = f"; it would with {made.first_fix}" if made.first_fix else ""
        note(f"the run needs about {size(found.total)} per rank, more than the {size(memory)} available{advice}")
    return made
