"""One run, from a recipe to a result: what is made before the loop, and what comes after it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from atoll import __version__
from atoll.core.errors import AtollError, ConfigError
from atoll.core.paths import shown_path
from atoll.train.checkpoint.store import open_store
from atoll.train.corpus import Corpus, Length, StoppedEarly, open_corpus, prepare_together, with_vocabulary
from atoll.train.data.loader import Loader
from atoll.train.data.prepare import Prepared
from atoll.train.engine import Engine
from atoll.train.events import Event, Note, Progress, RunEnded, RunStarted, TrainResult
from atoll.train.folder import RunFolder
from atoll.train.loop import Cursor, Run, train
from atoll.train.metrics.flops import formula_line, peak_flops
from atoll.train.metrics.journal import Journal
from atoll.train.metrics.profile import StepProfiler
from atoll.train.metrics.reporter import Reporters
from atoll.train.models.family import check_network
from atoll.train.models.init import initialize
from atoll.train.models.registry import flops_per_token, parameter_count
from atoll.train.optim.build import build_optimizer
from atoll.train.optim.schedule import resolve as resolve_schedule
from atoll.train.outer import Counter, OuterSync, SampleSource
from atoll.train.parallel.compile import compile_refusal
from atoll.train.parallel.mesh import Mesh, make_mesh
from atoll.train.parallel.norm import GradientNorm
from atoll.train.parallel.plan import device_bytes, plan
from atoll.train.parallel.precision import fastest_dtype
from atoll.train.prompt import continue_prompt
from atoll.train.recipe.load import load_recipe, require_complete
from atoll.train.recipe.schema import Recipe
from atoll.train.reporters import open_reporters
from atoll.train.resume import load_state, open_checkpointer
from atoll.train.stop import StopRequest
from atoll.train.world import World, join

Report = Callable[[Event], None]
T = TypeVar("T")


def run(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe | None = None,
    overrides: Sequence[str] = (),
    *,
    resume: bool = True,
    allow_changes: bool = False,
    report: Report | None = None,
    outer: OuterSync | None = None,
    source: Callable[[int | None], SampleSource] = Counter,
) -> TrainResult:
    """Train a recipe on the ranks that this process belongs to, or alone. Every rank calls it.

    Args:
        recipe: a shipped recipe's name, a file, a tree as TOML has it, or a ``Recipe``; None for ``CONFIG_FILE``.
        overrides: as on the command line: ``["--train.steps", "100"]``.
        resume: resume from the newest checkpoint in ``output_dir``; False starts over in a new folder.
        allow_changes: resume although the recipe differs from that of the folder.
        report: takes the events on rank 0, instead of the console.
        outer: exchanges weights with other runs.
        source: makes what says which samples come next, given how many the whole run has where steps don't say it.

    Raises:
        ConfigError: the recipe, the data or the ranks can't work together.
        CheckpointError: saving or loading failed.
        NonFiniteError: loss or gradients are not finite.
    """
    world_size = int(os.environ.get("WORLD_SIZE") or 1)
    loaded = load_recipe(recipe, overrides, world_size=world_size)
    require_complete(loaded.recipe)
    check_network(loaded.recipe.model)
    stop = StopRequest()
    hook = sys.excepthook
    with stop.listening():
        world = join(timeout_s=loaded.recipe.train.hang_timeout_s)
        try:
            return _Trainer(loaded.recipe, world, stop, report, resume, allow_changes, outer, source).run(loaded.notes)
        except AtollError as error:
            if not world.is_known(str(error)):
                error.add_note(f"on rank {world.rank}")  # rank 0 does not have it, so this one has to be told of
            raise
        finally:
            world.close()
            if world.size == 1:
                sys.excepthook = hook  # init_process_group put "[rank0]:" before every line of later tracebacks


@dataclass
class _Trainer:
    """The parts of a run on this rank, made one after the other."""

    recipe: Recipe
    world: World
    stop: StopRequest
    report: Report | None
    resume: bool
    allow_changes: bool
    outer: OuterSync | None
    source: Callable[[int | None], SampleSource]
    started: float = field(default_factory=time.monotonic)
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    reporters: Reporters | None = None  # on rank 0

    def run(self, notes: Sequence[str]) -> TrainResult:
        with self.cleanup:
            folder = self._open_folder()
            self.world.decide(lambda: self._open_reporters(folder))
            for line in [*notes, *(self._folder.notes if self.world.is_head else ())]:
                self._note(line)
            run: Run | None = None
            try:
                run = self._set_up(folder)
                begins_at = run.cursor.step
                self.world.decide(lambda: self._begin(begins_at))
                self._report_start(run, folder)
                train(run)
            except StoppedEarly:
                return self._end(run, folder, "stopped")
            except AtollError as error:
                if run is not None:  # else it did not begin, and whoever typed the command is told now
                    self._end(run, folder, "failed", str(error))
                raise
            except BaseException as error:  # a lost rank, a user's model, Ctrl-C: those who are told when it ends wait
                ours = self._explained(error)
                self._end(run, folder, "failed", str(ours or f"{type(error).__name__}: {error}".rstrip(": ")))
                if ours is not None:
                    raise ours from error
                raise
            return self._end(run, folder, "stopped" if run.stopped_by else "finished")

    def _explained(self, error: BaseException) -> AtollError | None:
        """Errors of torch that have something that a user can do about them."""
        if isinstance(error, torch.OutOfMemoryError):
            advice = self._plan.first_fix or "use more ranks"
            why = str(error).splitlines()[0]
            return AtollError(f"rank {self.world.rank} ran out of GPU memory: {why} Try: {advice}")
        uncompiled = compile_refusal(error)
        return None if uncompiled is None else ConfigError(uncompiled)

    def _report(self, event: Event) -> None:
        if self.reporters is not None:
            self.reporters(event)

    def _note(self, line: str) -> None:
        self._report(Note(line))

    # -- before the loop ------------------------------------------------------------------------------------------

    def _open_folder(self) -> Path:
        wanted = Path(self.recipe.train.output_dir).absolute()

        def open_it() -> str:
            folder = RunFolder(wanted, self.recipe, resume=self.resume, allow_changes=self.allow_changes)
            self.cleanup.callback(folder.close)
            with folder.blamed():
                self.stop.watch_file(folder.path)
            self.cleanup.callback(self.stop.forget_file)
            self._folder = folder
            return str(folder.path)

        return Path(self.world.decide(open_it))

    def _open_reporters(self, folder: Path) -> None:
        self.reporters = open_reporters(self.recipe, folder, self.report)
        self.cleanup.callback(self.reporters.close)

    def _begin(self, step: int) -> None:
        """From now on the folder holds a run of this recipe, with a journal."""
        assert self.reporters is not None
        folder = self._folder.path
        with self._folder.blamed():
            self._folder.keep()
            self.reporters.active.insert(0, Journal(folder, step, self._note))  # drops what will be done again

    def _set_up(self, folder: Path) -> Run:
        world, train = self.world, self.recipe.train
        torch.manual_seed(train.seed)
        if train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            self.cleanup.callback(torch.use_deterministic_algorithms, False)
        prepared = prepare_together(self.recipe, world, self.stop, self._report, self.cleanup)
        memory = min(world.gather(device_bytes(world.device, world.local_size)))
        corpus, length = self._agreed(lambda: self._plan_run(prepared, folder, memory))
        recipe, mesh = self.recipe, make_mesh(self._plan.layout, world.device)

        root = recipe.checkpoint.path or str(folder / "checkpoints")
        save_at = [length.interval(each) for each in (recipe.checkpoint.every, recipe.checkpoint.keep_every)]
        if recipe.checkpoint.keep_best and corpus.validation is None:
            raise ConfigError(
                "[checkpoint] keep_best = true keeps the lowest validation loss, and nothing is held out: set [data] "
                "validation, or leave keep_best out"
            )
        checkpointer = open_checkpointer(root, recipe, world, self._note, self.cleanup)
        found = checkpointer.latest()

        def identify() -> str:
            return self._folder.identify(recipe, root, None if found is None else found.meta, self._note)

        about = {"recipe": recipe.model_dump(mode="json"), "data": corpus.identity, "atoll": __version__}
        about |= {"layout": str(self._plan.layout), "run": world.decide(identify)}
        engine = self._agreed(lambda: self._engine(mesh, fresh=found is None))
        optimizer = build_optimizer(engine.weights.masters, recipe.optimizer, seed=train.seed, replicas=mesh.gradients)
        source = self.source(length.samples)
        cursor = Cursor()
        if found is not None:
            cursor = load_state(checkpointer, engine, optimizer, source, self.outer, about, self._note)
            if cursor.step >= length.steps:
                done = f"already finished: {cursor.step} of {length.steps} steps"
                self._note(f"{done}; to train longer: --train.steps N")
        loader = Loader(
            corpus.dataset,
            engine.objective,
            source,
            data_rank=mesh.data_rank,
            data_size=mesh.layout.data,
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            device=world.device,
            fixed_micro_batches=mesh.layout.pipeline > 1,
        )
        self.cleanup.callback(loader.close)
        return Run(
            recipe=recipe,
            world=world,
            engine=engine,
            grad_norm=GradientNorm(engine.weights.masters, mesh),
            optimizer=optimizer,
            schedule=resolve_schedule(recipe.schedule, length.steps, length.steps_per_epoch, length.tokens_per_step),
            source=source,
            outer=self.outer,
            loader=loader,
            validation=corpus.validation,
            checkpointer=checkpointer,
            stop=self.stop,
            report=self._report,
            profiler=StepProfiler(recipe.metrics.profile, folder, world.rank, say=self._note),
            steps=length.steps,
            save_at=save_at,
            validate_at=[length.interval(train.validate_every), *(save_at if recipe.checkpoint.keep_best else ())],
            keep_at=length.interval(recipe.checkpoint.keep_every),
            flops_per_token=flops_per_token(recipe.model, train.seq_len),
            peak_flops=peak_flops(_device_name(world.device), fastest_dtype(recipe, world.device)),
            about=about,
            cursor=cursor,
            again="the same command" if self.resume else f"--train.output_dir {shown_path(str(folder))}",
            saved_step=None if found is None else cursor.step,
            checkpoint=None if found is None else open_store(root).path(cursor.step),
        )

    def _plan_run(self, prepared: Prepared, folder: Path, memory: int) -> tuple[Corpus, Length]:
        """What each rank finds out by itself, before they make groups together."""
        tokenizer = prepared.tokenizer
        self.recipe = with_vocabulary(self.recipe, None if tokenizer is None else tokenizer.vocab_size)
        if self.world.is_head and tokenizer is not None:
            with self._folder.blamed():
                tokenizer.save(folder / "tokenizer")
        corpus = open_corpus(self.recipe, prepared)
        self._plan = plan(self.recipe, self.world, memory, note=self._note)
        return corpus, Length(self.recipe, corpus.dataset)

    def _agreed(self, action: Callable[[], T]) -> T:
        """Do something that needs no other rank; where it fails on one, it fails on all."""
        try:
            done = action()
        except AtollError as error:
            self.world.agree(error)
            raise
        self.world.agree(None)
        return done

    def _engine(self, mesh: Mesh, *, fresh: bool) -> Engine:
        recipe = self.recipe

        init = recipe.model.init if fresh else None

        def progress(done: float, total: float | None) -> None:
            self._report(Progress("loading weights", done, total, "bytes"))

        def set_weights(model: nn.Module) -> None:
            if init is None or recipe.model.python is not None:  # the latter may have buffers
                theirs = initialize(model, recipe.train.seed)
                drawn = len(list(model.parameters())) - len(theirs)
                others = f", {drawn} drawn by Atoll" if drawn else ""
                whose = f"{len(theirs)} as {recipe.model.python} makes them{others}"
                lines = [f"weights under seed {recipe.train.seed}: {whose}"] if theirs else []
            if init is not None:
                from atoll.train.weights import load_weights

                lines = load_weights(model, recipe.model, init, progress)
            for line in lines if fresh else ():
                self._note(line)

        return Engine(self._plan, mesh, set_weights)

    def _report_start(self, run: Run, folder: Path) -> None:
        if not self.world.is_head:
            return
        name = _device_name(self.world.device)
        self._report(
            RunStarted(
                name=self.recipe.name,
                output_dir=shown_path(str(folder)),
                parameters=parameter_count(self.recipe.model),
                layout=str(self._plan.layout),
                device=name,
                world_size=self.world.size,
                first_step=run.cursor.step,
                steps=run.steps,
                tokens_per_step=self.recipe.train.global_batch * self.recipe.train.seq_len,
                resumed_from=None if not run.cursor.step else f"step {run.cursor.step}",
            )
        )
        if self.world.device.type == "cuda":
            dtype = fastest_dtype(self.recipe, self.world.device)
            self._note(formula_line(run.flops_per_token, run.peak_flops, name, dtype))

    # -- after the loop -------------------------------------------------------------------------------------------

    def _end(self, run: Run | None, folder: Path, status: str, error: str | None = None) -> TrainResult:
        cursor = Cursor() if run is None else run.cursor
        known: dict[str, Any] = {
            "status": status,
            "step": cursor.step,
            "steps": 0 if run is None else run.steps,
            "loss": cursor.loss,
            "validation_loss": cursor.validation_loss,
            "tokens": cursor.tokens,
            "output_dir": str(folder),
            "checkpoint": None if run is None or run.checkpoint is None else shown_path(run.checkpoint),
            "took_s": time.monotonic() - self.started,
            "world_size": self.world.size,
            "figures": {} if run is None else run.figures(),
        }
        if self.world.is_head:
            sample = None
            if status == "finished" and known["checkpoint"] is not None:
                sample = continue_prompt(self.recipe, known["checkpoint"], self._note)
            curve = shown_path(str(folder / "loss.png")) if self.recipe.metrics.plot and cursor.step > 0 else None
            self._report(RunEnded(**known, sample=sample, curve=curve, error=error))
        return TrainResult(**known)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
