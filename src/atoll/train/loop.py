"""The training loop: fetch, forward and backward, divide and clip, step, tell, validate, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.core.errors import CheckpointError, NonFiniteError
from atoll.core.paths import shown_path
from atoll.train.batch import Batch
from atoll.train.checkpoint.checkpointer import Checkpointer, Saved
from atoll.train.checkpoint.state import optimizer_tensors
from atoll.train.data.loader import Loader, Step, validation_batches
from atoll.train.data.packing import PackedDataset
from atoll.train.engine import Engine
from atoll.train.events import CheckpointSaved, Event, Note, Progress, StepDone, Validated
from atoll.train.metrics.flops import mfu
from atoll.train.metrics.memory import peak_memory_bytes
from atoll.train.metrics.profile import StepProfiler
from atoll.train.models.init import key
from atoll.train.optim.schedule import Schedule
from atoll.train.outer import SampleSource
from atoll.train.parallel.clip import local_gradients, scale_gradients, squared_norm
from atoll.train.recipe.durations import Interval
from atoll.train.recipe.schema import Recipe
from atoll.train.stop import StopRequest
from atoll.train.world import World


@dataclass
class Cursor:
    """How far the run is; all that a checkpoint needs beside tensors and the sample source."""

    step: int = 0
    tokens: int = 0  # trained, over all ranks
    loss: float | None = None
    validation_loss: float | None = None  # of the last validation


@dataclass
class Run:
    """Everything that stands when the first step begins."""

    recipe: Recipe
    world: World
    engine: Engine
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    source: SampleSource
    loader: Loader
    validation: PackedDataset | None
    checkpointer: Checkpointer
    stop: StopRequest
    tell: Callable[[Event], None]  # does something on rank 0 only
    profiler: StepProfiler
    steps: int
    save_at: Sequence[Interval | None]
    validate_at: Sequence[Interval | None]
    keep_at: Interval | None  # what is saved then stays for good
    flops_per_token: float
    peak_flops: float | None
    about: dict[str, Any]  # goes into each checkpoint: the recipe, what the data were
    cursor: Cursor = field(default_factory=Cursor)
    again: str = "the same command"  # what goes on with this run
    stopped_by: str | None = None
    checkpoint: str | None = None  # where the newest whole one is
    saved_step: int | None = None
    validated_step: int | None = None
    save_error: CheckpointError | None = None
    seen: dict[str, float] = field(default_factory=lambda: {"tokens": 0.0, "seconds": 0.0, "memory_bytes": 0.0})

    def figures(self) -> dict[str, float]:
        """Of this session, without its first step, which also warms up."""
        found = {"memory_bytes": self.seen["memory_bytes"]}
        if self.seen["seconds"] > 0:
            found["tokens_per_s"] = self.seen["tokens"] / self.seen["seconds"]
            reached = mfu(found["tokens_per_s"] / self.world.size, self.flops_per_token, self.peak_flops)
            if reached is not None:
                found["mfu"] = reached
        return found


def train(run: Run) -> None:
    """Train until the run's length is reached, or until a rank was asked to stop, and save."""
    cursor = run.cursor
    owed = due(cursor.step, run.validate_at) or cursor.step >= run.steps
    if cursor.step and owed and run.validated_step != cursor.step:
        validate(run)  # a stop had cut it short
    with run.profiler:
        for step in run.loader if cursor.step < run.steps else ():
            started = time.perf_counter()
            reseed(run, cursor.step + 1)
            for group in run.optimizer.param_groups:
                group["lr"] = group["peak"] * run.schedule.factor(cursor.step + 1)
            sums = run.engine.forward_backward(step.micro_batches)
            busy_s = time.perf_counter() - started
            facts = agree(run, step, sums, busy_s)
            if not facts.finite:
                raise_nonfinite(run, sums[0])
            scale_gradients(run.engine.parameters, facts.scale(run.recipe.optimizer.max_grad_norm))
            run.optimizer.step()
            run.engine.publish()

            run.source.commit(step.numbers)
            cursor.step += 1
            cursor.tokens += facts.tokens
            cursor.loss = facts.loss
            tell_step(run, step, facts, time.perf_counter() - started + run.loader.wait_s)
            run.profiler.step()
            at_end = cursor.step >= run.steps
            stopping = facts.asked_to_stop
            if not stopping and (due(cursor.step, run.validate_at) or at_end):
                stopping = validate(run)
            if stopping and not at_end:
                tell_stop(run)
            if facts.save_failed:
                raise_save_error(run)
            if due(cursor.step, run.save_at) or stopping or (at_end and run.recipe.checkpoint.at_end):
                save(run)
            if stopping or at_end:
                break
    tell_saved(run, run.checkpointer.wait())


def due(step: int, intervals: Sequence[Interval | None]) -> bool:
    """Whether something that happens at any of these intervals happens at the end of this step."""
    return any(each is not None and each.due(step) for each in intervals)


def reseed(run: Run, step: int) -> None:
    """A user's dropout draws numbers that are a function of seed, step and data rank: resuming can't shift them."""
    torch.manual_seed(key(run.recipe.train.seed, f"step {step} of data rank {run.engine.mesh.data_rank}"))


@dataclass(frozen=True, slots=True)
class Facts:
    """What all ranks know of a step, equal on each."""

    loss: float
    metrics: dict[str, float]
    tokens: int
    weight: float  # what sums are divided by
    grad_norm: float
    asked_to_stop: bool
    save_failed: bool
    busy_s: list[float]  # by rank
    memory_bytes: int  # of the fullest rank

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are numbers."""
        return all(abs(value) < float("inf") for value in (self.loss, self.grad_norm))

    def scale(self, max_norm: float) -> float:
        """What gradients, which are sums, are multiplied by: divided by the weight, and clipped."""
        clip = min(1.0, max_norm / (self.grad_norm + 1e-6)) if max_norm > 0 else 1.0
        return clip / self.weight


def agree(run: Run, step: Step, sums: Tensor, busy_s: float) -> Facts:
    """Add up what the ranks know of a step: the one place of it where the host waits for the device."""
    world, mesh = run.world, run.engine.mesh
    own = torch.zeros(4 + 2 * world.size, dtype=torch.float64)
    if run.engine.counts_tokens:
        own[0], own[1] = step.trained_tokens, step.weight
    own[2] = run.stop.asked
    own[3] = has_failed(run)
    own[4 + world.rank] = busy_s
    own[4 + world.size + world.rank] = peak_memory_bytes(mesh.device)
    sums = sums.double() if run.engine.counts_loss else torch.zeros_like(sums, dtype=torch.float64)
    own = torch.cat((own.to(mesh.device, non_blocking=True), sums))
    dist.all_reduce(own)
    norm = squared_norm(run.engine.parameters, mesh).double().sqrt()
    tokens, weight, asked, failed, *rest = torch.cat((own, norm.reshape(1))).tolist()
    weight = weight or 1.0
    loss, *metrics = (each / weight for each in rest[2 * world.size : -1])
    return Facts(
        loss=loss,
        metrics=dict(zip(run.engine.objective.metrics, metrics, strict=True)),
        tokens=int(tokens),
        weight=weight,
        grad_norm=rest[-1] / weight,
        asked_to_stop=asked > 0,
        save_failed=failed > 0,
        busy_s=rest[: world.size],
        memory_bytes=int(max(rest[world.size : 2 * world.size])),
    )


def has_failed(run: Run) -> bool:
    """Whether a save in flight has failed; tells of one that is complete."""
    try:
        tell_saved(run, run.checkpointer.poll())
    except CheckpointError as error:
        run.save_error = error
        return True
    return False


def raise_save_error(run: Run) -> None:
    """The failure of a save in flight, on the ranks that know of it already and on those that don't yet.

    Raises:
        CheckpointError: always.
    """
    if run.save_error is None:
        run.checkpointer.wait()
    raise run.save_error or CheckpointError("another rank could not save; its own line says why")


def raise_nonfinite(run: Run, loss: Tensor) -> None:
    """Name the ranks and parameters that are not finite. No weight was changed.

    Raises:
        NonFiniteError: always.
    """
    held = {name: p for name, p in run.engine.weights.masters.items() if p.grad is not None}
    gradients = zip(held, local_gradients(held.values()), strict=True)
    bad = [name for name, gradient in gradients if not bool(torch.isfinite(gradient).all())]
    found = run.world.gather((bool(torch.isfinite(loss).all()), bad))
    guilty = [rank for rank, (fine, _) in enumerate(found) if not fine]
    names = sorted({name for _, names in found for name in names})
    holders = [rank for rank, (_, names) in enumerate(found) if names]
    step = run.cursor.step + 1
    what = (
        f"the loss is not finite on rank {_numbers(guilty)}"
        if guilty
        else (f"gradients are not finite on rank {_numbers(holders)}, the loss is")
    )
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    parameters = f"; parameters: {', '.join(names[:5])}{more}"
    raise NonFiniteError(
        f"step {step}: {what}{parameters if names else ''}. The weights are those of step {step - 1}. Lower "
        f"[optimizer] lr or max_grad_norm, lengthen [schedule] warmup, or look at samples "
        f"{run.source.consumed} to {run.source.consumed + run.recipe.train.global_batch - 1} with atoll data preview"
    )


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def tell_step(run: Run, step: Step, facts: Facts, took_s: float) -> None:
    """Report a step."""
    seen = run.seen
    if seen["memory_bytes"]:
        seen["tokens"] += facts.tokens
        seen["seconds"] += took_s
    seen["memory_bytes"] = float(facts.memory_bytes)
    per_s = facts.tokens / took_s
    per_gpu = per_s / run.world.size
    run.tell(
        StepDone(
            step=run.cursor.step,
            tokens=run.cursor.tokens,
            samples=run.source.consumed,
            loss=facts.loss,
            lr=run.optimizer.param_groups[0]["lr"],
            grad_norm=facts.grad_norm,
            tokens_per_s=per_s,
            tokens_per_s_per_gpu=per_gpu,
            step_s=took_s,
            data_wait_s=run.loader.wait_s,
            memory_bytes=facts.memory_bytes,
            mfu=mfu(per_gpu, run.flops_per_token, run.peak_flops),
            step_spread_s=max(facts.busy_s) - min(facts.busy_s),
            first_sample=step.first,
            num_samples=step.count,
            metrics=facts.metrics,
        )
    )


def tell_stop(run: Run) -> None:
    """Say who asked the run to end, and that it does."""
    reasons = run.world.gather(run.stop.reason)
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
    run.stopped_by = f"{reason} on rank {rank}" if reason.startswith("SIG") else reason
    run.tell(Note(f"{run.stopped_by}: saving step {run.cursor.step}, then stopping; {run.again} resumes from there"))


def validate(run: Run) -> bool:
    """Loss and metrics on held-out text, over all ranks, divided by what it weighs.

    Returns:
        whether a request to stop cut it short, its result unused.
    """
    if run.validation is None:
        return False
    started = time.perf_counter()
    mesh, train = run.engine.mesh, run.recipe.train
    limit = None if train.validate_batches is None else train.validate_batches * train.global_batch
    objective = run.engine.objective
    batches = validation_batches(run.validation, objective, mesh.data_rank, mesh.layout.data, train.micro_batch, limit)
    own = torch.zeros(3 + len(objective.metrics), dtype=torch.float64, device=mesh.device)
    share = -(-min(len(run.validation), limit or len(run.validation)) // mesh.layout.data)
    per_group = train.micro_batch * run.engine.evaluation_batches
    count = -(-share // per_group)
    for number, group in enumerate(_groups(batches, run.engine.evaluation_batches)):
        if run.world.any(run.stop.asked):
            return True
        sums = run.engine.evaluate([batch.to(mesh.device) for batch in group])
        if run.engine.counts_loss:
            own[2:] += sums.double()
        if run.engine.counts_tokens:
            own[0] += sum(batch.num_trained for batch in group)
            own[1] += sum(map(objective.weight, group))
        if number + 1 < count:
            run.tell(Progress("validating", number + 1, count))
    dist.all_reduce(own)
    tokens, weight, *totals = own.tolist()
    cursor = run.cursor
    cursor.validation_loss, *values = (total / (weight or 1.0) for total in totals)
    run.validated_step = cursor.step
    metrics = dict(zip(objective.metrics, values, strict=True))
    run.tell(Validated(cursor.step, cursor.validation_loss, int(tokens), time.perf_counter() - started, metrics))
    return False


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    while group := list(islice(batches, size)):
        yield group


def save(run: Run) -> None:
    """Begin a checkpoint of this moment; files are written while training goes on."""
    cursor = run.cursor
    if run.saved_step == cursor.step:
        return
    tell_saved(run, run.checkpointer.wait())
    meta = {
        **run.about,
        "step": cursor.step,
        "tokens": cursor.tokens,
        "loss": cursor.loss,
        "validation_loss": cursor.validation_loss,
        "validated_step": run.validated_step,
        "source": run.source.state(),
        "keep": due(cursor.step, [run.keep_at]),
    }
    metric = cursor.validation_loss if run.validated_step == cursor.step else None  # an older one is of other weights
    run.checkpointer.save(cursor.step, state_tensors(run.engine, run.optimizer), meta, metric=metric)
    run.saved_step = cursor.step


def state_tensors(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and optimizer state by name, to save or to load into."""
    masters = engine.weights.masters
    tensors: dict[str, Tensor] = {f"model.{name}": parameter.detach() for name, parameter in masters.items()}
    tensors |= {f"model.{name}": buffer for name, buffer in engine.buffers.items()}
    return tensors | optimizer_tensors(optimizer, {parameter: name for name, parameter in masters.items()})


def tell_saved(run: Run, saved: Saved | None) -> None:
    """Report a complete checkpoint."""
    if saved is not None:
        run.checkpoint = saved.path
        run.tell(CheckpointSaved(saved.step, shown_path(saved.path), saved.stall_s, saved.took_s))
