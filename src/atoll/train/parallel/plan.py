"""What a run will do on the ranks it has: layout, recomputation, compilation; and whether it fits."""

from __future__ import annotations

import bisect
import functools
import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from atoll.core.errors import ConfigError
from atoll.train.metrics.figures import size
from atoll.train.parallel.compile import check_compile
from atoll.train.parallel.estimate import Device, Estimate, estimate, is_compiled
from atoll.train.parallel.layout import AXES, Layout, check, reshards, resolve
from atoll.train.parallel.precision import check_float8
from atoll.train.parallel.recompute import Mode, Recompute
from atoll.train.recipe.schema import Recipe
from atoll.train.world import World

_MODES: tuple[Mode, ...] = ("none", "selective", "full")
_MOST_RANKS = 1 << 14

Change = dict[str, Any]  # values by section.key


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


def device_bytes(device: torch.device, local_world_size: int) -> int:
    """Memory that a rank has: of its GPU, or its share of this machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size


def choose(recipe: Recipe, layout: Layout, memory_bytes: int, device: Device = "cuda") -> Recompute:
    """The recompute of a run: what the recipe says, or under ``auto`` the least that fits, ``full`` if none does.

    Between ``none`` and ``selective`` that is the smallest number of blocks, as a share of all.

    Raises:
        ConfigError: the recipe asks for more blocks than there are.
    """
    wanted, layers = recipe.train.recompute, recipe.model.layers

    def enough(recompute: Recompute) -> bool:
        needed = estimate(recipe, layout, recompute=recompute, device_bytes=memory_bytes, device=device)
        return needed.fits(memory_bytes)

    if isinstance(wanted, int):
        if wanted > layers:
            raise ConfigError(
                f"[train] recompute = {wanted}: the model has {layers} blocks; at most that many, or 'full'"
            )
        return wanted / layers
    if wanted != "auto":
        return wanted
    if enough("none"):
        return "none"
    if not enough("selective"):
        return "full"
    smallest = bisect.bisect_left(range(1, layers), True, key=lambda blocks: enough(blocks / layers)) + 1
    return smallest / layers if smallest < layers else "selective"


def fits(recipe: Recipe, layout: Layout, memory_bytes: int, device: Device = "cuda") -> bool:
    """Whether the fullest rank's share is within ``memory_bytes``."""
    mode = choose(recipe, layout, memory_bytes, device)
    return estimate(recipe, layout, recompute=mode, device_bytes=memory_bytes, device=device).fits(memory_bytes)


def fits_replicated(recipe: Recipe, world_size: int, memory_bytes: int, device: Device = "cuda") -> bool:
    """Whether a recipe that leaves it open should replicate its parameters (DDP), not shard them (FSDP).

    It should where whole parameters, optimizer state and activations fit a device, without computing more activations
    again than it would take sharded.

    Raises:
        ConfigError: the recipe does not go with ``world_size`` ranks at all.
    """
    replicated = resolve(recipe, world_size, fits_replicated=True)
    sharded = resolve(recipe, world_size, fits_replicated=False)
    if replicated == sharded:
        return True
    same = choose(recipe, replicated, memory_bytes, device) == choose(recipe, sharded, memory_bytes, device)
    return same and fits(recipe, replicated, memory_bytes, device)


def first_fix(
    recipe: Recipe,
    layout: Layout,
    memory_bytes: int,
    device: Device = "cuda",
    *,
    ranks_per_node: int = _MOST_RANKS,
) -> str | None:
    """The first change that makes a run fit which doesn't, as flags to add; more ranks only where nothing else does.

    Tried in the order of what they cost: more recompute, a smaller micro-batch, sharding instead of replicas, moments
    in bf16, tensor parallelism; each alone, then two together, and so on.

    Returns:
        flags, or what else to do; None where it fits as it is, or nothing known helps.
    """
    now = {f"parallel.{axis}": getattr(layout, axis) for axis in AXES}

    def changed(change: Change) -> tuple[Recipe, Layout] | None:
        resharded = {"parallel.replicate": 1} if "parallel.shard" in change else {}
        other = replaced(recipe, now | resharded | change)
        axes = Layout(**{axis: getattr(other.parallel, axis) for axis in AXES})
        try:
            check(other, axes)
        except ConfigError:
            return None
        return other, axes

    def helps(change: Change) -> bool:
        run = changed(change)
        return run is not None and fits(*run, memory_bytes, device)

    if helps({}):
        return None
    kinds = [[change for change in kind if changed(change)] for kind in _changes(recipe, layout)]
    for count in range(1, len(kinds) + 1):
        for together in itertools.combinations(kinds, count):
            for changes in itertools.product(*together):
                if helps(change := _joined(changes)):
                    return _flags(change)
    for most in ({}, _joined(kind[-1] for kind in kinds if kind)):
        tensor = most.get("parallel.tensor", layout.tensor)
        shard = 2 * layout.data * layout.tensor // tensor
        while shard <= _MOST_RANKS:
            if helps(change := {**most, "parallel.shard": shard}):
                ranks = shard * tensor * layout.context * layout.pipeline
                nodes = -(-ranks // ranks_per_node)
                more = f" (--nodes {nodes})" if nodes > -(-layout.world_size // ranks_per_node) else ""
                return f"{_flags(change)} on {ranks} ranks instead of {layout.world_size}{more}"
            shard *= 2
    return None


def _changes(recipe: Recipe, layout: Layout) -> list[list[Change]]:
    """What can be changed, one list a kind, the cheapest first."""
    train, section = recipe.train, recipe.optimizer
    asked = train.recompute if isinstance(train.recompute, str) else "none"
    modes = () if asked == "auto" else _MODES[_MODES.index(asked) + 1 :]  # auto has tried them all
    smaller = [size for size in range(train.micro_batch // 2, 0, -1) if train.micro_batch % size == 0]
    ranks = layout.data * layout.tensor
    cuts = [size for size in (2, 4, 8) if size > layout.tensor and ranks % size == 0]
    no_replicas = {} if recipe.parallel.replicate in (None, 1) else {"parallel.replicate": 1}
    return [
        [{"train.recompute": mode} for mode in modes],
        [{"train.micro_batch": size} for size in smaller],
        [{**no_replicas, "parallel.shard": layout.data}] if layout.replicate > 1 else [],
        [{"optimizer.moments": "bf16"}] if section.kind == "adamw" and section.moments == "fp32" else [],
        [{**no_replicas, "parallel.tensor": size, "parallel.shard": ranks // size} for size in cuts],
    ]


def _joined(changes: Iterable[Change]) -> Change:
    return {key: value for change in changes for key, value in change.items()}


def _flags(change: Change) -> str:
    return " ".join(f"--{key} {value}" for key, value in change.items())


def replaced(recipe: Recipe, values: Change) -> Recipe:
    """The recipe with other values, by ``section.key``; it is not validated again."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        recipe = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update={name: value})})
    return recipe
