"""What a run would take, told before it starts: memory by part, steps, tokens, the checkpoint's size."""

from __future__ import annotations

import glob
import os
from typing import Any, NamedTuple

import torch

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest
from atoll.train.corpus import with_vocabulary
from atoll.train.data.tokenizer import bpe_size, load_tokenizer
from atoll.train.metrics.figures import count, size
from atoll.train.models.registry import flops_per_token, parameter_count
from atoll.train.optim.schedule import resolve as resolve_schedule
from atoll.train.parallel.estimate import GIB, Device, state_bytes
from atoll.train.parallel.plan import decide, device_bytes, first_fix
from atoll.train.parallel.recompute import describe
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


class Requirements(NamedTuple):
    """What a run would take: lines for people, the same facts for programs."""

    lines: list[str]
    facts: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether it fits and its local data exist."""
        return bool(self.facts["fits"]) and not self.facts["missing_data"]


def dryrun(recipe: Recipe, *, nodes: int = 1, nproc: int | None = None, gpus: str | None = None) -> Requirements:
    """Compute what a recipe would need; nothing is started, and no GPU is needed.

    Args:
        recipe: without data where it has the vocabulary's size, else that is its tokenizer's, which is read.
        nproc: ranks on each; by default one for each of its GPUs.
        gpus: of each node, ``"H100:8"``; by default what this machine has, else its memory.

    Raises:
        ConfigError: no such card or tokenizer is known, or the recipe does not go with that many ranks.
    """
    device: Device = "cuda"
    if gpus is not None:
        name, per_node, memory = parse_gpus(gpus)
        nproc = nproc or per_node
    elif torch.cuda.is_available():
        nproc = nproc or torch.cuda.device_count()
        name, memory = torch.cuda.get_device_name(0), device_bytes(torch.device("cuda", 0), nproc)
    else:
        device, nproc = "cpu", nproc or 1
        name, memory = "a share of this machine", device_bytes(torch.device("cpu"), nproc)
    return requirements(_with_vocabulary(recipe), nodes * nproc, nproc, memory, name, device=device)


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
            f"--gpus {text}: {name!r} is not a card whose memory is known{nearest(name.upper(), _CARDS)}; known: "
            f"{', '.join(_CARDS)}; with a count: H100:8"
        )
    if count and not (count.isdecimal() and int(count)):
        raise ConfigError(f"{text!r}: expected for instance '{card}:8', a card and how many")
    return card, int(count or 1), int(_CARDS[card] * GIB)


def _with_vocabulary(recipe: Recipe) -> Recipe:
    """The recipe with its tokenizer's vocabulary where it leaves the size open."""
    if recipe.model.vocab_size is not None:
        return recipe
    spec = recipe.data.tokenizer
    if spec is None:
        return with_vocabulary(recipe, None)  # which says what is missing
    # A tokenizer that would be learnt from the data has the size that was asked for, or a little less.
    return with_vocabulary(recipe, bpe_size(spec) if spec.startswith("bpe:") else load_tokenizer(spec).vocab_size)


def requirements(
    recipe: Recipe,
    world_size: int,
    local_world_size: int,
    memory_bytes: int,
    device_name: str,
    *,
    device: Device = "cuda",
) -> Requirements:
    """Compute what a recipe would need on ``world_size`` ranks.

    Args:
        memory_bytes: of a rank's device, or its share of the machine's.

    Raises:
        ConfigError: the recipe does not go with that many ranks.
    """
    plan, needed = decide(recipe, world_size, memory_bytes, device)
    chosen = " (chosen: the least that fits)" if recipe.train.recompute == "auto" and needed.fits(memory_bytes) else ""
    nodes = -(-world_size // local_world_size)
    lines = [
        f"{recipe.name}: {recipe.model.python or recipe.model.family}, "
        f"{count(parameter_count(recipe.model))} parameters",
        f"{_plural(world_size, 'rank')} on {_plural(nodes, 'node')}, each {device_name} with "
        f"{memory_bytes / GIB:.1f} GiB",
        f"layout: {plan.layout}",
        f"recompute: {describe(plan.recompute, recipe.model.layers)}{chosen}",
        "memory per rank:",
        *(f"  {line}" for line in needed.describe()),
    ]
    each = "GPU" if device == "cuda" else "rank"
    missing = _no_data(recipe)
    if needed.fits(memory_bytes):
        lines.append(f"fits: {100 * needed.total / memory_bytes:.0f} % of a device")
    else:
        fix = first_fix(recipe, plan.layout, memory_bytes, device, ranks_per_node=local_world_size)
        lines += [
            f"does not fit: {size(needed.total - memory_bytes)} over the limit per {each}",
            f"first change that would make it fit: {fix}" if fix else "no single change would make it fit",
        ]
    lines += [f"data: {path} matches no file here" for path in missing]
    masters, states = state_bytes(recipe, device)
    facts = {
        "name": recipe.name,
        "parameters": parameter_count(recipe.model),
        "ranks": world_size,
        "nodes": nodes,
        "device": device_name,
        "device_bytes": memory_bytes,
        "layout": str(plan.layout),
        "recompute": plan.recompute,
        "memory_bytes_per_rank": needed.parts,
        "fits": needed.fits(memory_bytes),
        "missing_data": missing,
        "checkpoint_bytes": masters + states,
    }
    checkpoint = (
        f"checkpoint: {size(masters + states)} = weights {size(masters)} + optimizer {size(states)}; "
        f"{recipe.checkpoint.keep} kept"
    )
    return Requirements([*lines, *_length(recipe), checkpoint], facts)


def _no_data(recipe: Recipe) -> list[str]:
    """The paths of this machine's files that lead nowhere."""
    return [
        path
        for path in recipe.data.paths
        if "://" not in path
        and not os.path.lexists(found := os.path.expanduser(path))
        and not glob.glob(found, recursive=True)
    ]


def _length(recipe: Recipe) -> list[str]:
    """Steps, tokens and arithmetic of the run."""
    train = recipe.train
    tokens_per_step = train.global_batch * train.seq_len
    batch = f"{train.global_batch} sequences × {train.seq_len:,} = {tokens_per_step:,} tokens per step"
    length, schedule = train.length, recipe.schedule
    units = {each.unit for each in (length, schedule.warmup, schedule.decay) if each is not None and each.value}
    if length is not None and ("ep" not in units or units == {"ep"}):  # else it takes the data to compare them
        scale = {"steps_per_epoch": 1e6, "tokens_per_step": tokens_per_step}
        resolve_schedule(schedule, length.in_steps(**scale), **scale)
    if length is None:
        return [f"steps: not given, set --train.steps; {batch}"]
    if length.unit == "ep":
        return [f"steps: {length}, known when the data has been read; {batch}"]
    steps = length.in_steps(steps_per_epoch=0.0, tokens_per_step=tokens_per_step)
    tokens = steps * tokens_per_step
    flops = flops_per_token(recipe.model, train.seq_len)
    return [
        f"steps: {steps:,}; {batch}",
        f"tokens: {count(tokens)}",
        f"compute: {_flop(tokens * flops)} = {_flop(flops)} per token (6 × matrix parameters, plus causal attention)",
    ]


def _flop(number: float) -> str:
    """1.2e12 as ``1.20 TFLOP``."""
    for power, prefix in zip(range(21, 3, -3), "ZEPTGM", strict=True):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {prefix}FLOP"
    return f"{number:,.0f} FLOP"


def _plural(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)
