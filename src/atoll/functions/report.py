"""``sky.report`` and ``sky.latest_checkpoint``: metrics to the driver, checkpoints that outlive a rank."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.core.context import CallContext, current
from atoll.core.errors import ConfigError, UsageError
from atoll.core.paths import fsync_folder
from atoll.core.validation import check_truth

_KEEP = 2


def report(
    metrics: Mapping[str, Any], checkpoint: str | os.PathLike[str] | None = None, *, sharded: bool = False
) -> None:
    """Send metrics to the driver, and keep a checkpoint.

    The metrics appear in ``results.metrics`` and ``future.metrics`` and as ``MetricsReported`` events. A checkpoint is
    copied aside, synced and renamed, so that a torn one is never found; the last two are kept. One rank, usually the
    head, reports a checkpoint for all; with ``sharded=True`` every rank reports its own part each time, and the parts
    are one checkpoint once all of them are there.

    Args:
        metrics: names and values.
        checkpoint: path of a file or folder that the function has written.
        sharded: the checkpoint is this rank's part of one that all ranks report.

    Raises:
        UsageError: metrics that are not a mapping, or checkpoints of several ranks without ``sharded=True``.
        ConfigError: a checkpoint path that does not exist, or ``sharded`` neither True nor False.

    Outside a pool it does nothing but check its arguments.
    """
    if not isinstance(metrics, Mapping):
        raise UsageError(f"sky.report takes a dict of metrics, not {type(metrics).__name__}: report({{'loss': 0.5}})")
    if checkpoint is not None and not isinstance(checkpoint, (str, os.PathLike)):
        raise UsageError(
            f"checkpoint= takes the path of a file or folder, not {type(checkpoint).__name__}: write it first, with "
            f"torch.save(state, path) for example"
        )
    if checkpoint is not None and not os.path.exists(os.fspath(checkpoint)):
        raise ConfigError(f"checkpoint={os.fspath(checkpoint)!r} does not exist: write it before reporting it")
    sharded = check_truth("sharded", sharded)
    context = current()
    if context is None or context.send_report is None:
        return
    kept = None
    if checkpoint is not None and context.checkpoint_dir is not None:
        kept = str(_keep(Path(checkpoint), context, sharded))
    context.send_report(dict(metrics), kept)


def latest_checkpoint() -> Path | None:
    """The last whole checkpoint of this call, from before it was started again; None where there is none.

    The path is that of this rank's part where every rank reported its own (``sharded=True``), else that of the one that
    was reported. What was reported since this start does not count, so that every rank gets the same answer whenever it
    asks.
    """
    context = current()
    if context is None or context.checkpoint_dir is None:
        return None
    attempt = Path(context.checkpoint_dir)
    found = {step: parts for step, parts in _all(attempt.parent).items() if step[0] < attempt.name}
    whole = _whole(found)
    if not whole:
        return None
    parts = found[whole[-1]]
    return parts.get(context.rank) or next(iter(parts.values()))


def _keep(source: Path, context: CallContext, sharded: bool) -> Path:
    """Copy a checkpoint into the job's folder as one atomic thing.

    ``{attempt}/{step}/rank{N}/NAME``, or ``rank{N}of{WORLD_SIZE}`` for a part. Steps are counted from the start of an
    attempt, so that the parts of one step meet whatever an earlier attempt left unfinished.
    """
    assert context.checkpoint_dir is not None
    attempt = Path(context.checkpoint_dir)
    mine = [step for number, step in _all(attempt.parent, context.rank) if number == attempt.name]
    step = attempt / f"{int(max(mine, default='0')) + 1:08d}"
    step.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = step / (f"rank{context.rank}of{context.world_size}" if sharded else f"rank{context.rank}") / source.name
    aside = step / f".rank{context.rank}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    if source.is_dir():
        shutil.copytree(source, aside / source.name)
    else:
        shutil.copy2(source, aside / source.name)
    _sync(aside)
    os.rename(aside, target.parent)
    fsync_folder(step)
    for (number, _), parts in _all(attempt.parent).items():  # of two ranks that do so, the later one sees the other's
        others = [rank for rank, path in parts.items() if rank != context.rank and _part(path)[1] == 1]
        if others and not sharded and number == attempt.name:
            raise UsageError(
                f"rank {context.rank} reported a checkpoint, and so did rank {others[0]}: where every rank reports its "
                f"own part, pass report(..., sharded=True); otherwise report it on one rank only"
            )
    _forget_old(attempt.parent, context)
    return target


Step = tuple[str, str]  # the names of its attempt's folder and its own


def _forget_old(root: Path, context: CallContext) -> None:
    """Drop this rank's parts of steps before the last whole ones; a slower rank may yet need those."""
    whole = _whole(_all(root))
    if len(whole) < _KEEP:
        return
    for step, parts in _all(root, context.rank).items():
        if step < whole[-_KEEP]:
            shutil.rmtree(parts[context.rank].parent, ignore_errors=True)
            with contextlib.suppress(OSError):
                root.joinpath(*step).rmdir()


def _all(root: Path, rank: int | None = None) -> dict[Step, dict[int, Path]]:
    """Every part by step and rank, or those of one rank. What is still being copied has another name."""
    found: dict[Step, dict[int, Path]] = {}
    for path in root.glob("*/*/rank*/*") if root.is_dir() else ():
        owner, _ = _part(path)
        if rank in (None, owner):
            found.setdefault((path.parents[2].name, path.parents[1].name), {})[owner] = path
    return found


def _part(path: Path) -> tuple[int, int]:
    """The rank that reported it, and how many parts the checkpoint has."""
    rank, _, parts = path.parent.name.removeprefix("rank").partition("of")
    return int(rank), int(parts or 1)


def _whole(found: dict[Step, dict[int, Path]]) -> list[Step]:
    """Complete checkpoints, oldest first."""
    return sorted(step for step, parts in found.items() if len(parts) >= max(_part(path)[1] for path in parts.values()))


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            fsync_folder(path)
        elif path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
