"""Whether a run fits a device: which recompute it takes, and the first change that would make it fit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest
from atoll.train.parallel.estimate import GIB, Device, estimate
from atoll.train.parallel.layout import Layout, check, resolve
from atoll.train.parallel.recompute import Mode
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

Candidate = tuple[str, Recipe, Layout]  # the flag, and what the run would be with it


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


def choose(recipe: Recipe, layout: Layout, memory_bytes: int, device: Device = "cuda") -> Mode:
    """The recompute of a run: what the recipe says, or under ``auto`` the least that fits, ``full`` if none does."""
    if recipe.train.recompute != "auto":
        return recipe.train.recompute
    for mode in _MODES:
        if estimate(recipe, layout, recompute=mode, device_bytes=memory_bytes, device=device).fits(memory_bytes):
            return mode
    return "full"


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
    if fits(recipe, layout, memory_bytes, device):
        return None
    for change in _CHANGES:
        for flag, with_it, spread in change(recipe, layout):
            if fits(with_it, spread, memory_bytes, device):
                return flag
    flags: list[str] = []
    all_of_them, spread = recipe, layout
    for change in _CHANGES:
        candidates = list(change(all_of_them, spread))
        for flag, with_it, changed in candidates:
            if fits(with_it, changed, memory_bytes, device):
                return " ".join([*flags, flag])
        if candidates:
            flag, all_of_them, spread = candidates[-1]
            flags.append(flag)
    for start, needed in ((recipe, []), (all_of_them, flags)):
        found = _more_ranks(start, layout if start is recipe else spread, memory_bytes, device)
        if found is not None:
            return " ".join([*needed, found])
    return None


def _more_ranks(recipe: Recipe, layout: Layout, memory_bytes: int, device: Device) -> str | None:
    shard = 2 * layout.data
    while shard <= _MOST_RANKS:
        spread = dataclasses.replace(layout, replicate=1, shard=shard)
        if _possible(recipe, spread) and fits(recipe, spread, memory_bytes, device):
            return f"--parallel.shard {shard} on {spread.world_size} ranks instead of {layout.world_size}"
        shard *= 2
    return None


def _possible(recipe: Recipe, layout: Layout) -> bool:
    try:
        check(recipe, layout)
    except ConfigError:
        return False
    return True


def _changed(recipe: Recipe, section: str, **values: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def _more_recompute(recipe: Recipe, layout: Layout) -> Iterator[Candidate]:
    now = recipe.train.recompute
    if now == "auto":  # has tried them all
        return
    for mode in _MODES[_MODES.index(now) + 1 :]:
        yield f"--train.recompute {mode}", _changed(recipe, "train", recompute=mode), layout


def _smaller_micro_batch(recipe: Recipe, layout: Layout) -> Iterator[Candidate]:
    now = recipe.train.micro_batch
    for size in range(now // 2, 0, -1):
        smaller = _changed(recipe, "train", micro_batch=size)
        if now % size == 0 and _possible(smaller, layout):
            yield f"--train.micro_batch {size}", smaller, layout


def _sharding(recipe: Recipe, layout: Layout) -> Iterator[Candidate]:
    if layout.replicate == 1:
        return
    flag = f"--parallel.shard {layout.data}"
    if recipe.parallel.replicate not in (None, 1):
        flag = f"--parallel.replicate 1 {flag}"
    changed = _changed(recipe, "parallel", replicate=1, shard=layout.data)
    yield flag, changed, dataclasses.replace(layout, replicate=1, shard=layout.data)


def _narrow_moments(recipe: Recipe, layout: Layout) -> Iterator[Candidate]:
    if recipe.optimizer.kind == "adamw" and recipe.optimizer.moments == "fp32":
        yield "--optimizer.moments bf16", _changed(recipe, "optimizer", moments="bf16"), layout


def _tensor(recipe: Recipe, layout: Layout) -> Iterator[Candidate]:
    ranks = layout.data * layout.tensor
    for size in (2, 4, 8):
        if size <= layout.tensor or ranks % size or recipe.model.python is not None:
            continue
        shard = ranks // size
        spread = dataclasses.replace(layout, replicate=1, shard=shard, tensor=size)
        if _possible(recipe, spread):
            flag = f"--parallel.tensor {size} --parallel.shard {shard}"
            yield flag, _changed(recipe, "parallel", replicate=1, shard=shard, tensor=size), spread


_CHANGES: tuple[Callable[[Recipe, Layout], Iterator[Candidate]], ...] = (
    _more_recompute,
    _smaller_micro_batch,
    _sharding,
    _narrow_moments,
    _tensor,
)
