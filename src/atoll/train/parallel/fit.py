"""Whether a run fits a device: which recompute it takes, and the first change that would make it fit."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import os
from typing import Any, NamedTuple

import torch

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest
from atoll.train.parallel.estimate import GIB, Device, Estimate, estimate
from atoll.train.parallel.layout import Layout, check, reshards, resolve
from atoll.train.parallel.recompute import Mode, Recompute
from atoll.train.recipe.schema import Recipe

# GiB that CUDA reports for a card, less than what is printed on it.
_CARDS = {
    "B200": 178.3,
    "H200": 139.8,
    "H100": 79.1,
    "A100": 39.4,
    "A100-80GB": 79.1,
    "L40S": 44.4,
    "A10": 22.0,
    "A10G": 22.0,
    "L4": 22.0,
    "V100": 15.7,
    "V100-32GB": 31.7,
    "RTX4090": 23.5,
}
_MODES: tuple[Mode, ...] = ("none", "selective", "full")
_MOST_RANKS = 1 << 14


class Candidate(NamedTuple):
    """Flags, and what the run would be with them."""

    flags: str
    recipe: Recipe
    layout: Layout


def parse_gpus(text: str) -> tuple[str, int, int]:
    """Name, count and bytes a card of ``"H100:8"`` or ``"H100"``.

    Raises:
        ConfigError: no such card is known, or the count is no number.
    """
    name, _, count = text.strip().partition(":")
    known = {card.upper(): card for card in _CARDS}
    card = known.get(name.upper().replace("_", "-").replace(" ", ""))
    if card is None:
        raise ConfigError(
            f"{name!r} is not a card whose memory is known{nearest(name.upper(), _CARDS)}; known: {', '.join(_CARDS)}"
        )
    if count and not (count.isdecimal() and int(count)):
        raise ConfigError(f"{text!r}: expected for instance '{card}:8', a card and how many")
    return card, int(count or 1), int(_CARDS[card] * GIB)


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


def decide(recipe: Recipe, layout: Layout, memory_bytes: int, device: Device = "cuda") -> tuple[Recipe, Estimate]:
    """What the recipe leaves open, decided by what fits, and what the run then needs (its ``recompute`` too).

    Where all blocks fit as FSDP gathers them, they stay so from the forward to the backward pass.
    """
    chosen = choose(recipe, layout, memory_bytes, device)
    needs = functools.partial(estimate, recompute=chosen, device_bytes=memory_bytes, device=device)
    lean = needs(recipe, layout)
    if recipe.parallel.reshard_after_forward is None and layout.sharded and reshards(recipe, layout):
        kept = _with(recipe, "parallel.reshard_after_forward", False)
        whole = needs(kept, layout)
        if whole.fits(memory_bytes):
            return kept, whole
    return recipe, lean


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


def first_fix(recipe: Recipe, layout: Layout, memory_bytes: int, device: Device = "cuda") -> str | None:
    """The first change that makes a run fit which doesn't, as flags to add; more ranks only where nothing else does.

    Tried in the order of what they cost: more recompute, a smaller micro-batch, sharding instead of replicas, moments
    in bf16, tensor parallelism; each alone, then one after the other on top of those before.

    Returns:
        flags, or what else to do; None where it fits as it is, or nothing known helps.
    """

    def helps(candidate: Candidate) -> bool:
        return fits(candidate.recipe, candidate.layout, memory_bytes, device)

    now = Candidate("", recipe, layout)
    if helps(now):
        return None
    kinds = _changes(now)
    for candidate in itertools.chain(*kinds):
        if helps(candidate):
            return candidate.flags
    all_of_them = now
    for kind in range(len(kinds)):
        candidates = _changes(all_of_them)[kind]
        for candidate in candidates:
            if helps(candidate):
                return candidate.flags
        all_of_them = candidates[-1] if candidates else all_of_them
    for start in (now, all_of_them):
        shard = 2 * start.layout.data
        while shard <= _MOST_RANKS:
            wider = dataclasses.replace(start.layout, replicate=1, shard=shard)
            if _possible(start.recipe, wider) and fits(start.recipe, wider, memory_bytes, device):
                ranks = f"--parallel.shard {shard} on {wider.world_size} ranks instead of {start.layout.world_size}"
                return f"{start.flags} {ranks}".strip()
            shard *= 2
    return None


def _changes(now: Candidate) -> list[list[Candidate]]:
    """What can be changed, one list a kind, the cheapest first."""
    train, section, layout = now.recipe.train, now.recipe.optimizer, now.layout
    asked = train.recompute if isinstance(train.recompute, str) else "none"
    modes = () if asked == "auto" else _MODES[_MODES.index(asked) + 1 :]  # auto has tried them all
    smaller = [size for size in range(train.micro_batch // 2, 0, -1) if train.micro_batch % size == 0]
    ranks = layout.data * layout.tensor
    cuts = [size for size in (2, 4, 8) if size > layout.tensor and ranks % size == 0 and not now.recipe.model.python]
    kinds: list[list[dict[str, Any]]] = [
        [{"train.recompute": mode} for mode in modes],
        [{"train.micro_batch": size} for size in smaller],
        [{"parallel.shard": layout.data}] if layout.replicate > 1 else [],
        [{"optimizer.moments": "bf16"}] if section.kind == "adamw" and section.moments == "fp32" else [],
        [{"parallel.tensor": size, "parallel.shard": ranks // size} for size in cuts],
    ]
    candidates = [[_changed(now, values) for values in kind] for kind in kinds]
    return [[each for each in kind if _possible(each.recipe, each.layout)] for kind in candidates]


def _changed(now: Candidate, values: dict[str, Any]) -> Candidate:
    recipe, layout = now.recipe, now.layout
    if "parallel.shard" in values:
        if recipe.parallel.replicate not in (None, 1):
            values = {"parallel.replicate": 1, **values}
        axes = {key.removeprefix("parallel."): size for key, size in values.items()}
        layout = dataclasses.replace(layout, **{"replicate": 1, **axes})
        recipe = _with(recipe, "parallel.replicate", 1)
    for key, value in values.items():
        recipe = _with(recipe, key, value)
    flags = " ".join(f"--{key} {value}" for key, value in values.items())
    return Candidate(f"{now.flags} {flags}".strip(), recipe, layout)


def _with(recipe: Recipe, key: str, value: Any) -> Recipe:
    section, _, name = key.partition(".")
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update={name: value})})


def _possible(recipe: Recipe, layout: Layout) -> bool:
    try:
        check(recipe, layout)
    except ConfigError:
        return False
    return True
