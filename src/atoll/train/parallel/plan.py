"""What a run will do on the ranks it has: layout, recomputation, compilation; checked at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.train.metrics.figures import size
from atoll.train.parallel.compile import check_compile
from atoll.train.parallel.estimate import Device, is_compiled
from atoll.train.parallel.fit import decide, first_fix, fits_replicated
from atoll.train.parallel.layout import Layout, resolve
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


def plan(recipe: Recipe, world: World, memory: int, *, note: Callable[[str], None]) -> Plan:
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
    decided, found = decide(recipe, layout, memory, device)
    if recipe.parallel.replicate is None and recipe.parallel.shard is None and world.size > 1:
        note(f"memory estimate: {size(found.total)} per rank ({layout}); by component: --dryrun")
    made = Plan(decided, layout, found.recompute, is_compiled(recipe, device), memory, device)
    if not found.fits(memory):
        advice = f"; it would with {made.first_fix}" if made.first_fix else ""
        note(f"the run needs about {size(found.total)} per rank, more than the {size(memory)} available{advice}")
    return made
