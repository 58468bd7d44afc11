"""The checkpoints of a run: who writes them, and what of one goes where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from atoll.core.errors import CheckpointError, ConfigError
from atoll.train.checkpoint.checkpointer import Checkpointer
from atoll.train.checkpoint.claim import Claim, check_shared
from atoll.train.checkpoint.store import open_store
from atoll.train.corpus import described
from atoll.train.engine import Engine
from atoll.train.loop import Cursor, state_tensors
from atoll.train.optim.optimizer import LocalOptimizer
from atoll.train.outer import OuterSync, SampleSource
from atoll.train.recipe.schema import Recipe
from atoll.train.world import World


def open_checkpointer(
    root: str, recipe: Recipe, world: World, note: Callable[[str], None], cleanup: ExitStack
) -> Checkpointer:
    """The checkpoints of a run, which nobody else writes meanwhile.

    Raises:
        ConfigError: not every rank can write there, or another run does.
    """
    guards: list[Claim] = []  # on rank 0

    def hold() -> None:
        run = f"{recipe.name}, output_dir {recipe.train.output_dir}"
        try:
            guards.append(open_store(root).claim(run, "--checkpoint.path PLACE", note))
        except OSError as error:
            raise (CheckpointError if "://" in root else ConfigError)(
                f"checkpoints can't be written to {root}: {error}; choose another place with --checkpoint.path PLACE"
            ) from None
        cleanup.callback(guards[0].close)

    world.decide(hold)
    check_shared(root, world.control)
    section = recipe.checkpoint
    timeout_s = max(1800.0, recipe.train.hang_timeout_s)
    checkpointer = Checkpointer(
        root,
        group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if world.size > 1 else None,
        keep=section.keep,
        keep_best=section.keep_best,
        asynchronous=section.asynchronous,
        note=note,
        timeout_s=timeout_s,
        guard=guards[0].check if guards else lambda: None,
    )
    cleanup.callback(checkpointer.close)
    return checkpointer


def load_state(
    checkpointer: Checkpointer,
    engine: Engine,
    optimizer: LocalOptimizer,
    source: SampleSource,
    outer: OuterSync | None,
    about: dict[str, Any],
    note: Callable[[str], None],
) -> Cursor:
    """Weights, optimizer and place in the data as they were last saved; how far the run was.

    Raises:
        ConfigError: the data are not those that it was trained on.
        CheckpointError: it can't be read, or is of another model.
    """
    meta = checkpointer.load_newest(state_tensors(engine, optimizer, outer))
    engine.publish()
    step = meta["step"]
    if meta.get("data") != about["data"]:
        raise ConfigError(
            f"the data differ from those of step {step}, so that its place in them has no meaning: they had "
            f"{described(meta.get('data'))}, now {described(about['data'])}. Bring them back, or give --no-resume"
        )
    if meta.get("layout", about["layout"]) != about["layout"]:
        note(f"checkpoint saved with {meta['layout']}, resuming with {about['layout']}")
    source.load(meta["source"])
    if outer is not None:
        outer.load(meta["outer"])
    reached: dict[str, Any] = {each.name: meta.get(each.name) for each in dataclasses.fields(Cursor)}
    return Cursor(**reached)
