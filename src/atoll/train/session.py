"""One run, from a recipe to a result: everything that is made before the loop and told after it."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from atoll import __version__
from atoll.core.errors import AtollError, ConfigError
from atoll.core.paths import shown_path
from atoll.train.checkpoint.checkpointer import Checkpointer
from atoll.train.checkpoint.shared import check_shared
from atoll.train.checkpoint.state import optimizer_tensors
from atoll.train.checkpoint.store import open_store
from atoll.train.corpus import Corpus, Length, described, open_corpus, with_vocabulary
from atoll.train.data.loader import Loader
from atoll.train.data.prepare import Prepared, prepare
from atoll.train.data.samples import Counter
from atoll.train.engine import Engine
from atoll.train.events import Event, Note, Progress, RunEnded, RunStarted
from atoll.train.folder import RunFolder, fresh_folder, take_lock
from atoll.train.loop import Cursor, Run, train
from atoll.train.metrics.flops import formula_line, peak_flops
from atoll.train.metrics.profile import StepProfiler
from atoll.train.models.init import initialize
from atoll.train.models.registry import flops_per_token, parameter_count
from atoll.train.objectives.pretrain import Pretrain
from atoll.train.optim.build import build_optimizer
from atoll.train.optim.schedule import resolve as resolve_schedule
from atoll.train.parallel.apply import compute_dtype
from atoll.train.parallel.fit import device_bytes
from atoll.train.parallel.mesh import Mesh, make_mesh
from atoll.train.parallel.plan import plan
from atoll.train.recipe.load import harmful, load_recipe, require_complete
from atoll.train.recipe.schema import Recipe
from atoll.train.reporting import Telling
from atoll.train.sampling import continue_prompt
from atoll.train.stopping import StopRequest
from atoll.train.world import World, join

Report = Callable[[Event], None]
T = TypeVar("T")

_HEAD_PREPARES, _HEAD_START_S = "head-prepares", 3.0


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        status: ``finished``, or ``stopped`` where it was asked to stop and has saved.
        step, steps: optimizer steps done, and of the whole run.
        loss, validation_loss: nats per token of the last step, and of the last validation; None where there was none.
        tokens: trained since the beginning, over all ranks.
        output_dir: the folder of the run.
        checkpoint: path of the last one; None where none was saved.
        took_s: of this session.
        figures: others by name: ``tokens_per_s``, ``memory_bytes``, ``mfu``.
    """

    status: str
    step: int
    steps: int
    loss: float | None
    validation_loss: float | None
    tokens: int
    output_dir: str
    checkpoint: str | None
    took_s: float
    figures: dict[str, float] = field(default_factory=dict)


class _Stopped(Exception):
    """A rank was asked to stop before the first step: there is nothing to save."""


def run(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe | None = None,
    overrides: Sequence[str] = (),
    *,
    resume: bool = True,
    allow_changes: bool = False,
    report: Report | None = None,
) -> TrainResult:
    """Train a recipe on the ranks that this process belongs to, or alone. Every rank calls it.

    Args:
        recipe: a shipped recipe's name, a file, a tree as TOML has it, or a ``Recipe``; None for ``CONFIG_FILE``.
        overrides: as on the command line: ``["--train.steps", "100"]``.
        resume: go on from the newest checkpoint in ``output_dir``; False starts over in a new folder.
        allow_changes: go on although the recipe differs from that of the folder.
        report: takes the events on rank 0, instead of the console.

    Raises:
        ConfigError: the recipe, the data or the ranks can't work together.
        CheckpointError: saving or loading failed.
        NonFiniteError: loss or gradients are not finite.
    """
    world_size = int(os.environ.get("WORLD_SIZE") or 1)
    loaded = load_recipe(recipe, overrides, world_size=world_size)
    require_complete(loaded.recipe)
    stop = StopRequest()
    with stop.listening():
        world = join(timeout_s=loaded.recipe.train.hang_timeout_s)
        try:
            session = _Session(loaded.recipe, world, stop, report, resume=resume, allow_changes=allow_changes)
            return session.run(loaded.notes)
        except AtollError as error:
            if not world.is_known(str(error)):
                error.add_note(f"on rank {world.rank}")  # rank 0 does not have it, so this one has to be told of
            raise
        finally:
            world.close()


class _Session:
    """The parts of a run on this rank, made one after the other."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        stop: StopRequest,
        report: Report | None,
        *,
        resume: bool,
        allow_changes: bool,
    ) -> None:
        self.recipe = recipe
        self.resume = resume
        self.allow_changes = allow_changes
        self.world = world
        self.stop = stop
        self.report = report
        self.started = time.monotonic()
        self.tell: Report = lambda event: None
        self.cleanup = contextlib.ExitStack()
        self._head_prepares = False

    def run(self, notes: Sequence[str]) -> TrainResult:
        with self.cleanup:
            folder = self._open_folder()
            reporters = self._open_reporters(folder)
            for line in [*notes, *(self._folder.notes if self.world.is_head else ())]:
                self.tell(Note(line))
            run: Run | None = None
            try:
                wanted = self.recipe
                run = self._set_up(folder)
                self._begin(reporters, wanted, run.cursor.step)
                self._tell_start(run, folder)
                train(run)
            except _Stopped:
                return self._end(run, folder, "stopped")
            except torch.OutOfMemoryError as error:
                advice = self._plan.first_fix or "use more ranks"
                text = f"rank {self.world.rank} ran out of GPU memory: {str(error).splitlines()[0]} Try: {advice}"
                self._end(run, folder, "failed", text)
                raise ConfigError(text) from error
            except AtollError as error:
                if run is not None:  # else it did not begin, and whoever typed the command is told now
                    self._end(run, folder, "failed", str(error))
                raise
            except BaseException as error:  # a lost rank, a user's model, Ctrl-C: those who are told when it ends wait
                self._end(run, folder, "failed", f"{type(error).__name__}: {error}".rstrip(": "))
                raise
            return self._end(run, folder, "stopped" if run.stopped_by else "finished")

    def _begin(self, reporters: Telling | None, wanted: Recipe, step: int) -> None:
        """From now on the folder holds a run of this recipe, with a journal."""

        def begin() -> None:
            assert reporters is not None
            with self._folder.told():
                self._folder.keep(wanted)
                reporters.begin(step)

        self.world.decide(begin)

    # -- before the loop ------------------------------------------------------------------------------------------

    def _open_folder(self) -> Path:
        wanted = Path(self.recipe.train.output_dir).absolute()

        def open_it() -> str:
            path = wanted if self.resume else fresh_folder(wanted)
            self._folder = RunFolder(path)
            self._folder.open(self.recipe, allow_changes=self.allow_changes)
            self.cleanup.callback(self._folder.close)
            with self._folder.told():
                self.stop.watch_file(path)
            self.cleanup.callback(self.stop.forget_file)
            return str(path)

        return Path(self.world.decide(open_it))

    def _open_reporters(self, folder: Path) -> Telling | None:
        reporters: list[Telling] = []

        def open_them() -> None:
            reporters.append(Telling(self.recipe, folder, self.report))
            self.cleanup.callback(reporters[0].close)
            self.tell = reporters[0]

        self.world.decide(open_them)
        return reporters[0] if reporters else None

    def _set_up(self, folder: Path) -> Run:
        recipe, world = self.recipe, self.world
        torch.manual_seed(recipe.train.seed)
        if recipe.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            self.cleanup.callback(torch.use_deterministic_algorithms, False)
        prepared = self._prepare_data()
        corpus, length = self._prepare_run(prepared, folder)
        recipe = self.recipe
        mesh = make_mesh(self._plan.layout, world.device)

        root = recipe.checkpoint.path or str(folder / "checkpoints")
        checkpointer = self._checkpointer(root, length)
        found = checkpointer.latest()
        about = {"recipe": recipe.model_dump(mode="json"), "data": corpus.identity, "atoll": __version__}
        about |= {"layout": str(self._plan.layout), "run": self._identify(checkpointer, found, root)}
        engine = self._agreed(lambda: self._engine(mesh, fresh=found is None))
        optimizer = build_optimizer(engine.weights.masters, recipe.optimizer, seed=recipe.train.seed)
        source = Counter(limit=length.samples)
        cursor, validated_step = Cursor(), None
        if found is not None:
            cursor, validated_step = self._resume(checkpointer, found, engine, optimizer, source, about)
        loader = Loader(
            corpus.dataset,
            source,
            data_rank=mesh.data_rank,
            data_size=mesh.layout.data,
            global_batch=recipe.train.global_batch,
            micro_batch=recipe.train.micro_batch,
            device=world.device,
            fixed_micro_batches=mesh.layout.pipeline > 1,
        )
        self.cleanup.callback(loader.close)
        if found is not None and cursor.step >= length.steps:
            self._note(
                f"already finished: {cursor.step} of {length.steps} steps; --train.steps N --allow-changes trains on"
            )
        return Run(
            recipe=recipe,
            world=world,
            engine=engine,
            optimizer=optimizer,
            schedule=resolve_schedule(recipe.schedule, length.steps, length.steps_per_epoch, length.tokens_per_step),
            source=source,
            loader=loader,
            validation=corpus.validation,
            checkpointer=checkpointer,
            stop=self.stop,
            tell=self.tell,
            profiler=StepProfiler(recipe.metrics.profile, folder, world.rank),
            steps=length.steps,
            save_every=length.in_steps(recipe.checkpoint.every),
            validate_every=length.in_steps(recipe.train.validate_every),
            flops_per_token=flops_per_token(recipe.model, recipe.train.seq_len),
            peak_flops=peak_flops(_device_name(world.device), compute_dtype(recipe, world.device)),
            about=about,
            cursor=cursor,
            again="the same command" if self.resume else f"--train.output_dir {shown_path(str(folder))}",
            saved_step=found,
            validated_step=validated_step,
            checkpoint=None if found is None else open_store(root).path(found),
        )

    def _prepare_data(self) -> Prepared:
        """Every rank prepares the data or waits for the one that does; no collective waits meanwhile.

        However it comes out, the ranks meet afterwards: nobody is left waiting for one that failed or was stopped.
        """
        prepared: Prepared | None = None
        error: AtollError | None = None
        if not self.world.is_head:
            # Rank 0 is the one that shows how far it is, so it had better be the one that works.
            self.world.await_announcement(_HEAD_PREPARES, _HEAD_START_S)
        with contextlib.suppress(_Stopped):
            try:
                prepared = prepare(
                    self.recipe.data, seq_len=self.recipe.train.seq_len, progress=self._progress, note=self._note
                )
                self.cleanup.callback(prepared.close)
            except AtollError as failure:
                error = failure
        self.world.announce(_HEAD_PREPARES)
        self.world.meet("data", self._waiting)
        self.world.agree(error)
        if self.world.any(prepared is None or self.stop.asked):
            raise _Stopped
        assert prepared is not None
        return prepared

    def _prepare_run(self, prepared: Prepared, folder: Path) -> tuple[Corpus, Length]:
        """What each rank finds out by itself, before they make groups together."""
        memory = min(self.world.gather(device_bytes(self.world.device, self.world.local_size)))

        def find_out() -> tuple[Corpus, Length]:
            self.recipe = with_vocabulary(self.recipe, prepared)
            if self.world.is_head and prepared.tokenizer is not None:
                with self._folder.told():
                    prepared.tokenizer.save(folder / "tokenizer")
            corpus = open_corpus(self.recipe, prepared)
            length = Length(self.recipe, corpus.dataset)
            self._plan = plan(self.recipe, self.world, memory, tell=self._note)
            return corpus, length

        return self._agreed(find_out)

    def _agreed(self, action: Callable[[], T]) -> T:
        """Do something that needs no other rank; where it fails on one, it fails on all."""
        try:
            done = action()
        except AtollError as error:
            self.world.agree(error)
            raise
        self.world.agree(None)
        return done

    def _progress(self, event: Progress) -> None:
        """Tell how far the data are, and end there once any rank was asked to stop."""
        if self.world.is_head and not self._head_prepares:
            self._head_prepares = True
            self.world.announce(_HEAD_PREPARES)
        if self.stop.asked:
            self.world.announce("stop")
        if self.world.announced("stop"):
            raise _Stopped
        self.tell(event)

    def _waiting(self, missing: int) -> None:
        """Tell for how many ranks this one waits; those hear of it if it was asked to stop."""
        self.tell(Progress("waiting for other ranks to prepare data", 0, missing, "ranks"))
        if self.stop.asked:
            self.world.announce("stop")
            if self.stop.since_s > self.recipe.train.grace_s / 2:
                raise _Stopped  # they don't answer, and there is nothing to save

    def _checkpointer(self, root: str, length: Length) -> Checkpointer:
        section = self.recipe.checkpoint
        check_shared(root, self.world.control)
        if "://" not in root:
            self.world.decide(lambda: self._hold(Path(root)))
        timeout_s = max(1800.0, self.recipe.train.hang_timeout_s)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if self.world.size > 1 else None
        checkpointer = Checkpointer(
            root,
            group=group,
            keep=section.keep,
            keep_every=length.in_steps(section.keep_every),
            keep_best=section.keep_best,
            asynchronous=section.asynchronous,
            note=self._note,
            timeout_s=timeout_s,
        )
        self.cleanup.callback(checkpointer.close)
        return checkpointer

    def _hold(self, root: Path) -> None:
        """Nobody else writes checkpoints there while this run does."""
        if root.absolute() != (self._folder.path / "checkpoints").absolute():
            self.cleanup.callback(os.close, take_lock(root, "--checkpoint.path DIR"))

    def _engine(self, mesh: Mesh, *, fresh: bool) -> Engine:
        recipe = self.recipe

        def set_weights(model: nn.Module) -> None:
            if fresh and recipe.model.init is not None:
                from atoll.train.weights import load_weights

                def progress(done: float, total: float | None) -> None:
                    self.tell(Progress("loading weights", done, total, "bytes"))

                for line in load_weights(model, recipe.model, recipe.model.init, progress):
                    self._note(line)
            else:
                initialize(model, recipe.train.seed)

        return Engine(
            recipe,
            mesh,
            set_weights,
            objective=Pretrain(recipe.objective).install,
            prepare_blocks=self._plan.apply_to_blocks,
            after_step=self._plan.after_step,
        )

    def _resume(
        self,
        checkpointer: Checkpointer,
        step: int,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        source: Counter,
        about: dict[str, Any],
    ) -> tuple[Cursor, int | None]:
        masters = engine.weights.masters
        names = {parameter: name for name, parameter in masters.items()}
        tensors = {f"model.{name}": parameter.detach() for name, parameter in masters.items()}
        tensors |= {f"model.{name}": buffer for name, buffer in engine.buffers.items()}
        tensors |= optimizer_tensors(optimizer, names, checkpointer.tensors(step))
        meta = checkpointer.load(step, tensors)
        engine.publish()
        if meta.get("data") != about["data"]:
            raise ConfigError(
                f"the data differ from those of step {step}, so that its place in them has no meaning: they had "
                f"{described(meta.get('data'))}, now {described(about['data'])}. Bring them back, or start over with "
                f"--no-resume"
            )
        if meta.get("layout", about["layout"]) != about["layout"]:
            self._note(f"saved under {meta['layout']}, goes on under {about['layout']}")
        source.load(meta["source"])
        return Cursor(meta["step"], meta["tokens"], meta["loss"], meta["validation_loss"]), meta.get("validated_step")

    def _identify(self, checkpointer: Checkpointer, found: int | None, root: str) -> str:
        """This run's identity, which its checkpoints carry: those of another run are not gone on from by accident.

        Raises:
            ConfigError: the checkpoints in ``root`` belong to another run.
        """

        def identify() -> str:
            meta = {} if found is None else checkpointer.meta(found)
            theirs, own = meta.get("run"), self._folder.identity
            elsewhere = f"[checkpoint] path {shown_path(root)!r} holds step {found} of "
            if found is not None and not self.resume:
                raise ConfigError(
                    f"{elsewhere}a run before: --no-resume starts over, so choose another with --checkpoint.path PLACE"
                )
            if own is not None and theirs not in (None, own):
                raise ConfigError(f"{elsewhere}another run: choose another with --checkpoint.path PLACE")
            if own is None and found is not None:
                changed = harmful(Recipe.model_validate(meta["recipe"]), self.recipe)
                if changed and not self.allow_changes:
                    lines = "\n  ".join(changed)
                    raise ConfigError(
                        f"{elsewhere}a run of another recipe:\n  {lines}\n--allow-changes goes on with the new one, "
                        "--checkpoint.path PLACE chooses another"
                    )
                self._note(f"goes on from step {found}, which is in {shown_path(root)}")
            self._folder.identity = own or theirs or secrets.token_hex(8)
            return self._folder.identity

        identity: str = self.world.decide(identify)
        return identity

    def _note(self, line: str) -> None:
        self.tell(Note(line))

    def _tell_start(self, run: Run, folder: Path) -> None:
        if not self.world.is_head:
            return
        name = _device_name(self.world.device)
        self.tell(
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
        if run.peak_flops is not None:
            dtype = compute_dtype(self.recipe, self.world.device)
            self._note(formula_line(run.flops_per_token, run.peak_flops, name, dtype))

    # -- after the loop -------------------------------------------------------------------------------------------

    def _end(self, run: Run | None, folder: Path, status: str, error: str | None = None) -> TrainResult:
        took_s = time.monotonic() - self.started
        cursor = Cursor() if run is None else run.cursor
        saved = None if run is None or run.checkpoint is None else shown_path(run.checkpoint)
        figures = {} if run is None else run.figures()
        if self.world.is_head:
            sample = None
            if status == "finished" and saved is not None:
                sample = continue_prompt(self.recipe, saved, self._note)
            plotted = self.recipe.metrics.plot and cursor.step > 0
            self.tell(
                RunEnded(
                    status=status,
                    step=cursor.step,
                    loss=cursor.loss,
                    tokens=cursor.tokens,
                    took_s=took_s,
                    validation_loss=cursor.validation_loss,
                    checkpoint=saved,
                    sample=sample,
                    curve=shown_path(str(folder / "loss.png")) if plotted else None,
                    error=error,
                    figures=figures,
                )
            )
        return TrainResult(
            status,
            cursor.step,
            0 if run is None else run.steps,
            cursor.loss,
            cursor.validation_loss,
            cursor.tokens,
            str(folder),
            saved,
            took_s,
            figures,
        )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
