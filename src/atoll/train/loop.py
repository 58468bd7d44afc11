"""The training loop: fetch, forward and backward, norm, optimizer, publish; then report, validate, save."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.core.errors import CheckpointError, NonFiniteError
from atoll.core.paths import shown_path
from atoll.train.batch import Batch
from atoll.train.checkpoint.checkpointer import Checkpointer, Saved, optimizer_tensors
from atoll.train.data.loader import Loader, Step, validation_batches
from atoll.train.data.packing import PackedDataset
from atoll.train.engine import Engine
from atoll.train.events import CheckpointSaved, Event, Note, Progress, StepDone, Validated
from atoll.train.facts import Facts, PendingFacts
from atoll.train.metrics.flops import mfu
from atoll.train.metrics.memory import peak_memory_bytes
from atoll.train.metrics.profile import StepProfiler
from atoll.train.models.init import key
from atoll.train.optim.optimizer import LocalOptimizer
from atoll.train.optim.schedule import Schedule
from atoll.train.outer import OuterSync, SampleSource
from atoll.train.parallel.norm import GradientNorm
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
    validated_step: int | None = None


@dataclass
class Run:
    """Everything that is there when the first step begins."""

    recipe: Recipe
    world: World
    engine: Engine
    grad_norm: GradientNorm
    optimizer: LocalOptimizer
    schedule: Schedule
    source: SampleSource
    loader: Loader
    validation: PackedDataset | None
    checkpointer: Checkpointer
    stop: StopRequest
    report: Callable[[Event], None]  # does something on rank 0 only
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
    save_error: CheckpointError | None = None
    outer: OuterSync | None = None
    since: float = 0.0  # when the step began that is reported next
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
    if cursor.step and owed and cursor.validated_step != cursor.step:
        validate(run)  # a stop had cut it short
    if run.outer is not None:
        run.outer.begin(cursor.step, cursor.tokens, run.engine.weights.masters)
    queued: Update | None = None  # the step that the device may still be at
    run.since = time.perf_counter()
    with run.profiler, GarbageCollection() as garbage:
        for step in run.loader if cursor.step < run.steps else ():
            number = cursor.step + 1 + (queued is not None)
            queued = train_step(run, number, step, queued)
            if queued is None:
                break  # asked to stop: the step before was the last
            run.profiler.step()
            garbage.collect_at(number)
            if must_wait(run, number):
                update, queued = queued, None
                if finish_step(run, update):
                    break
                run.since = time.perf_counter()  # not of the next step: what validation and saving took
        else:
            if queued is not None:  # a resumed run with smaller batches has fewer samples left than steps
                finish_step(run, queued, at_end=True)
    report_saved(run, run.checkpointer.wait())


def train_step(run: Run, number: int, step: Step, before: Update | None) -> Update | None:
    """One optimizer step. Its facts stay on the device: the host waits for those of the step ``before`` alone, once
    this step's forward and backward passes are queued, so that the device is never without work.

    Returns:
        what was queued; None where the run ended with the step before: then no weight has moved since.
    """
    started = time.perf_counter()
    data_wait_s = run.loader.wait_s
    # A user's dropout draws numbers that are a function of seed, step and data rank: resuming can't shift them.
    torch.manual_seed(key(run.recipe.train.seed, f"step {number} of data rank {run.engine.mesh.data_rank}"))
    sums = run.engine.forward_backward(step.micro_batches)  # of loss and metrics
    busy_s = time.perf_counter() - started

    if before is not None and finish_step(run, before):
        return None

    norm, norms = run.grad_norm()
    facts = sum_facts(run, step, sums, busy_s, norm)

    rate = run.schedule.factor(number, run.cursor.tokens)
    for group in run.optimizer.param_groups:
        group["lr"] = group["peak"] * rate
    # Gradients are sums: divided by their weight, and clipped. Nothing moves where they are not finite.
    divisor = facts.weight
    max_norm = run.recipe.optimizer.max_grad_norm
    if max_norm > 0:
        divisor = torch.maximum(divisor, (norm + 1e-6 * divisor) / max_norm)
    run.checkpointer.before_change()
    run.optimizer.step(grad_scale=divisor, found_inf=facts.found_inf)
    run.engine.publish()

    lr = run.optimizer.param_groups[0]["lr"]
    done_at = None if norm.is_cuda else time.perf_counter()
    return Update(number, step, facts, lr, data_wait_s, done_at, sums, norms)


@dataclass(frozen=True)
class Update:
    """A step that is queued on the device."""

    number: int
    step: Step
    facts: PendingFacts
    lr: float
    data_wait_s: float
    done_at: float | None  # known already where the host computes
    sums: Tensor  # of this rank: of loss and metrics
    norms: dict[str, Tensor]  # of each gradient's part on this rank


def must_wait(run: Run, number: int) -> bool:
    """Whether the facts of a step are needed before the next begins."""
    return (
        number >= run.steps
        or due(number, run.save_at)
        or (run.validation is not None and due(number, run.validate_at))
        or (run.outer is not None and run.outer.due(number))
        or bool(run.engine.buffers)  # another forward pass would change what a stop saves
    )


def finish_step(run: Run, update: Update, *, at_end: bool = False) -> bool:
    """Wait until the device is done with a step; report it, and validate and save where that is due.

    Args:
        at_end: no samples are left, whatever its number.

    Returns:
        whether the run ends with it.
    """
    facts = update.facts.read()
    if not facts.finite:
        raise_nonfinite(run, update)
    cursor = run.cursor
    run.source.commit(update.step.numbers)
    cursor.step, cursor.tokens, cursor.loss = update.number, cursor.tokens + facts.tokens, facts.loss
    report_step(run, update, facts)
    if run.outer is not None:
        run.outer.after_step(cursor.step, facts.tokens, run.engine.weights.masters)
        if run.outer.due(cursor.step):
            run.engine.publish()
    at_end = at_end or cursor.step >= run.steps
    stopping = facts.asked_to_stop
    if not stopping and (due(cursor.step, run.validate_at) or at_end):
        stopping = validate(run)
    if stopping and not at_end:
        report_stop(run)
    if facts.save_failed:
        raise_save_error(run)
    if due(cursor.step, run.save_at) or stopping or (at_end and run.recipe.checkpoint.at_end):
        save(run)
    return stopping or at_end


class GarbageCollection:
    """Python's collector, run at the same step on every rank: where each runs when it likes, the others wait for it.

    What was there before the first step is not looked at.
    """

    EVERY = 50  # steps

    def __enter__(self) -> Self:
        gc.collect(1)
        gc.freeze()
        gc.disable()
        return self

    def collect_at(self, step: int) -> None:
        """Collect, if it is time to."""
        if step % self.EVERY == 0:
            gc.collect(1)

    def __exit__(self, *_: object) -> None:
        gc.enable()
        gc.unfreeze()


def due(step: int, intervals: Sequence[Interval | None]) -> bool:
    """Whether something that happens at any of these intervals happens at the end of this step."""
    return any(each is not None and each.due(step) for each in intervals)


def sum_facts(run: Run, step: Step, sums: Tensor, busy_s: float, norm: Tensor) -> PendingFacts:
    """Add up what the ranks know of a step. Every rank calls it."""
    engine = run.engine
    counted = (step.trained_tokens, step.weight) if engine.counts_tokens else (0, 0.0)
    own = (*counted, run.stop.asked, has_failed(run), busy_s, peak_memory_bytes(engine.mesh.device))
    sums = sums.double() if engine.counts_loss else torch.zeros_like(sums, dtype=torch.float64)
    return PendingFacts(run.world, engine.objective.metrics, own, sums, norm)


def has_failed(run: Run) -> bool:
    """Whether a save in flight has failed; reports one that is complete."""
    try:
        report_saved(run, run.checkpointer.poll())
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


def raise_nonfinite(run: Run, update: Update) -> None:
    """Name the ranks and parameters that are not finite. No weight was changed.

    Raises:
        NonFiniteError: always.
    """
    bad = [name for name, norm in update.norms.items() if not bool(torch.isfinite(norm))]
    found = run.world.gather((bool(torch.isfinite(update.sums[0])), bad))
    guilty = [rank for rank, (fine, _) in enumerate(found) if not fine]
    names = sorted({name for _, names in found for name in names})
    holders = [rank for rank, (_, names) in enumerate(found) if names]
    step, first = update.number, run.source.consumed
    what = f"the loss is not finite on rank {_some(guilty)}"
    if not guilty:
        what = f"gradients are not finite on rank {_some(holders)}, the loss is"
    parameters = f"; parameters: {_some(names)}" if names else ""
    saved = "nothing is saved yet" if run.saved_step is None else f"the newest checkpoint is of step {run.saved_step}"
    raise NonFiniteError(
        f"step {step}: {what}{parameters}. The weights are those of step {step - 1}; {saved}. Lower [optimizer] lr or "
        f"max_grad_norm, lengthen [schedule] warmup, or look at samples {first} to "
        f"{first + run.recipe.train.global_batch - 1} with atoll data preview"
    )


def _some(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items[:5])) + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def report_step(run: Run, update: Update, facts: Facts) -> None:
    """Report a step."""
    now = update.done_at or time.perf_counter()
    took_s, run.since = now - run.since, now
    seen = run.seen
    if seen["memory_bytes"]:
        seen["tokens"] += facts.tokens
        seen["seconds"] += took_s
    seen["memory_bytes"] = float(facts.memory_bytes)
    per_s = facts.tokens / took_s
    per_gpu = per_s / run.world.size
    run.report(
        StepDone(
            step=run.cursor.step,
            tokens=run.cursor.tokens,
            samples=run.source.consumed,
            loss=facts.loss,
            lr=update.lr,
            grad_norm=facts.grad_norm,
            tokens_per_s=per_s,
            tokens_per_s_per_gpu=per_gpu,
            step_s=took_s,
            data_wait_s=update.data_wait_s,
            memory_bytes=facts.memory_bytes,
            mfu=mfu(per_gpu, run.flops_per_token, run.peak_flops),
            step_spread_s=max(facts.busy_s) - min(facts.busy_s),
            first_sample=update.step.numbers.start,
            num_samples=len(update.step.numbers),
            metrics=facts.metrics,
        )
    )


def report_stop(run: Run) -> None:
    """Report who asked the run to end."""
    reasons = run.world.gather(run.stop.reason)
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
    run.stopped_by = f"{reason} on rank {rank}" if reason.startswith("SIG") else reason
    run.report(Note(f"{run.stopped_by}: saving step {run.cursor.step}, then stopping; {run.again} resumes from there"))


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
            run.report(Progress("validating", number + 1, count))
    dist.all_reduce(own)
    tokens, weight, *totals = own.tolist()
    cursor = run.cursor
    cursor.validation_loss, *values = (total / (weight or 1.0) for total in totals)
    cursor.validated_step = cursor.step
    metrics = dict(zip(objective.metrics, values, strict=True))
    run.report(Validated(cursor.step, cursor.validation_loss, int(tokens), time.perf_counter() - started, metrics))
    return False


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    while group := list(islice(batches, size)):
        yield group


def save(run: Run) -> None:
    """Begin a checkpoint of this moment; files are written while training goes on."""
    cursor = run.cursor
    if run.saved_step == cursor.step:
        return
    report_saved(run, run.checkpointer.wait())
    meta = {
        **run.about,
        **asdict(cursor),
        "source": run.source.state(),
        "outer": None if run.outer is None else run.outer.state(),
        "keep": due(cursor.step, [run.keep_at]),
    }
    metric = (
        cursor.validation_loss if cursor.validated_step == cursor.step else None
    )  # an older one is of other weights
    run.checkpointer.save(cursor.step, state_tensors(run.engine, run.optimizer, run.outer), meta, metric=metric)
    run.saved_step = cursor.step
    if run.engine.buffers:
        run.checkpointer.before_change()  # the forward pass changes them


def state_tensors(engine: Engine, optimizer: LocalOptimizer, outer: OuterSync | None) -> dict[str, Tensor]:
    """Weights, optimizer state and that of the exchange with other runs by name, to save or to load into."""
    masters = engine.weights.masters
    tensors: dict[str, Tensor] = {f"model.{name}": parameter.detach() for name, parameter in masters.items()}
    tensors |= {f"model.{name}": buffer for name, buffer in engine.buffers.items()}
    if outer is not None:
        tensors |= {f"outer.{name}": tensor for name, tensor in outer.tensors(masters).items()}
    return tensors | optimizer_tensors(optimizer, {parameter: name for name, parameter in masters.items()})


def report_saved(run: Run, saved: Saved | None) -> None:
    """Report a complete checkpoint."""
    if saved is not None:
        run.checkpoint = saved.path
        run.report(CheckpointSaved(saved.step, shown_path(saved.path), saved.stall_s, saved.took_s))
