"""The data of a run, prepared by one rank while the others wait; no collective is pending meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from atoll.core.errors import AtollError
from atoll.train.data.prepare import Prepared, prepare
from atoll.train.events import Event, Note, Progress
from atoll.train.recipe.schema import Recipe
from atoll.train.stop import StopRequest
from atoll.train.world import World

_HEAD_PREPARES, _HEAD_START_S = "head-prepares", 3.0
_STOP = "stop"


class StoppedEarly(Exception):
    """A rank was asked to stop before the first step: there is nothing to save."""


def prepare_together(
    recipe: Recipe, world: World, stop: StopRequest, tell: Callable[[Event], None], cleanup: contextlib.ExitStack
) -> Prepared:
    """Every rank prepares the data or waits for the one that does; ``cleanup`` closes them.

    However it comes out, the ranks meet afterwards: nobody is left waiting for one that failed or was stopped.

    Raises:
        ConfigError: some rank could not.
        StoppedEarly: some rank was asked to stop.
    """

    def progress(event: Progress) -> None:
        if world.is_head:
            world.announce(_HEAD_PREPARES)
        if stop.asked:
            world.announce(_STOP)
        if world.announced(_STOP):
            raise StoppedEarly
        tell(event)

    def waiting(missing: int) -> None:
        tell(Progress("waiting for other ranks to prepare data", world.size - missing, world.size, "ranks"))
        if stop.asked:
            world.announce(_STOP)  # those who prepare hear of it
            if stop.since_s > recipe.train.grace_s / 2:
                raise StoppedEarly  # they don't answer, and there is nothing to save

    prepared: Prepared | None = None
    error: AtollError | None = None
    if not world.is_head:
        # Rank 0 is the one that shows how far it is, so it had better be the one that works.
        world.await_announcement(_HEAD_PREPARES, _HEAD_START_S)
    with contextlib.suppress(StoppedEarly):
        try:
            prepared = prepare(
                recipe.data, seq_len=recipe.train.seq_len, progress=progress, note=lambda line: tell(Note(line))
            )
            cleanup.callback(prepared.close)
        except AtollError as failure:
            error = failure
    world.announce(_HEAD_PREPARES)
    world.meet("data", waiting)
    world.agree(error)
    if world.any(prepared is None or stop.asked):
        raise StoppedEarly
    assert prepared is not None
    return prepared
