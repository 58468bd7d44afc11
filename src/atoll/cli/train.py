"""``atoll train``: starts ranks, shows the run, and lets it save when it is interrupted. Imports are late."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from atoll.cli import options, train_job
from atoll.cli.output import OutputClosed, spinner
from atoll.cli.train_job import Training, TrainJob
from atoll.core.errors import AtollError, ConfigError, ProvisionError, RemoteTraceback
from atoll.core.exit_codes import ExitCode
from atoll.core.paths import DRIVER_PID, shown_path, write_atomic
from atoll.providers import registry
from atoll.providers.base import DEFAULT
from atoll.providers.gpus import local_gpus

if TYPE_CHECKING:
    from atoll.core.events import Event as PoolEvent
    from atoll.gang.log_router import LogLine
    from atoll.train.events import Event
    from atoll.train.metrics.console import Console
    from atoll.train.recipe.load import Loaded
    from atoll.train.recipe.schema import Recipe

_LOADING = "loading PyTorch on every rank"
_ASKS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})  # have a run save and end


def register(app: typer.Typer) -> None:
    """Add the command to ``atoll``."""
    app.command("train", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)


def train(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A shipped recipe (atoll recipes ls) or a TOML file; $CONFIG_FILE by default.",
        ),
    ] = None,
    nodes: options.Nodes = 1,
    nproc: options.Nproc = "auto",
    gpus: options.Gpus = None,
    infra: options.Infra = DEFAULT,
    dryrun: options.DryRun = False,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="Start over in a new folder.")] = False,
    detach: options.Detach = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume even if the recipe has changed since the run started.")
    ] = False,
    output: options.Output = "table",
) -> None:
    """Train a language model from a recipe. Run the same command again to resume.

    \b
    Any key of the recipe can be set:
        atoll train llama3_debug --nodes 2 --train.steps 100
        atoll train my.toml --parallel.shard=4 --data.path 'texts/*.jsonl'
    Ctrl-C saves a checkpoint and stops; a second one stops at once.
    """
    from atoll.train.recipe.load import load_recipe, require_complete

    as_json = options.as_json(output)
    num_nodes, num_ranks, where = nodes or 1, _num_ranks(nproc), infra or DEFAULT
    recipe, arguments = _recipe_and_overrides([*([] if recipe is None else [recipe]), *context.args])
    _refuse_misspelt(context, arguments)
    gpu_text = options.last_of("--gpus", gpus)
    with spinner("reading the recipe"):
        world_size = num_nodes * (num_ranks or _num_gpus(gpu_text, num_nodes, where) or 1)
        loaded = load_recipe(recipe, arguments, world_size=world_size)
    asked = Training(
        loaded,
        recipe,
        arguments,
        where,
        num_nodes,
        num_ranks,
        gpu_text,
        resume=not no_resume,
        allow_changes=allow_changes,
    )
    if dryrun:
        _dryrun(asked, as_json)
        return
    require_complete(loaded.recipe)
    _check_schedule(loaded)
    if registry.is_here(where):
        if detach:
            raise typer.BadParameter("--detach needs --infra: local ranks end with this terminal")
        remote = None
        try:
            result = _run(asked, quiet=as_json)
        except AtollError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a user's model raises on a rank
            print(f"atoll: a rank failed: {type(error).__name__}: {error}", file=sys.stderr)
            if isinstance(error.__cause__, RemoteTraceback):
                print(error.__cause__, file=sys.stderr)
            raise typer.Exit(ExitCode.FAILED) from None
    else:
        show = _screen(as_json)
        with contextlib.closing(show):
            for note in loaded.notes:
                show.say(note)
            remote = train_job.submit(asked, show.say)
            show.say(f"job {remote.job.id} of cluster {remote.job.cluster}. {remote.come_back()}")
            if detach:
                return
            result = _follow(remote, show)
    if as_json:
        print(json.dumps(result, indent=2))
    elif result["steps"]:
        _say_next(asked, result, remote)
    if remote is not None:
        remote.take_down()
    if result["status"] != "finished":
        raise typer.Exit(ExitCode.NOT_FINISHED)


def _refuse_misspelt(context: typer.Context, arguments: list[str]) -> None:
    """Refuse what is neither a key of the recipe nor known under another name, and nearly an option of the command."""
    from atoll.core.validation import nearest
    from atoll.train.recipe.keys import named

    flags = options.flags_of(context.command)
    for argument in arguments:
        name = options.normalized(argument.partition("=")[0])
        plain = name.removeprefix("--").replace("-", "_")
        is_key = "." in name or plain in ("name", "resume") or named(plain)
        if name.startswith("--") and not is_key and (near := nearest(name, flags)):
            raise typer.BadParameter(f"unknown option {argument.partition('=')[0]}{near}")


def _num_ranks(nproc: str) -> int | None:
    """Ranks per node; None: one per GPU, otherwise one."""
    if nproc in ("auto", "gpu"):
        return None
    return options.num_processes(nproc, 0, len(os.sched_getaffinity(0)), DEFAULT)


def _num_gpus(asked: str | None, num_nodes: int, where: str) -> int:
    """GPUs of each node: those that were asked for, or a node's share of this machine's."""
    if asked is None:
        return len(local_gpus()) // num_nodes if registry.is_here(where) else 0
    count = asked.partition(":")[2]
    return int(count) if options.is_number(count) else 1


def _check_schedule(loaded: Loaded) -> None:
    """Does the schedule fit into the run, where that can be told without the data?

    Raises:
        ConfigError: it does not.
    """
    from atoll.train.optim.schedule import resolve

    schedule, length = loaded.recipe.schedule, loaded.recipe.train.length
    assert length is not None
    if all(each is None or each.unit == "step" for each in (length, schedule.warmup, schedule.decay)):
        resolve(schedule, int(length.value), steps_per_epoch=1.0, tokens_per_step=1.0)


def _recipe_and_overrides(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The first argument that is not a ``--section.key`` or its value; and the others."""
    recipe: str | None = None
    overrides: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        if argument.startswith("--"):
            overrides.append(argument)
            if "=" not in argument:
                overrides += [value for value in [next(waiting, None)] if value is not None]
        elif recipe is None:
            recipe = argument
        else:
            overrides.append(argument)  # whoever reads overrides says what is wrong with it
    return recipe, overrides


def _screen(quiet: bool) -> _Screen:
    """Where a run is shown; on standard error where standard output is the result's alone."""
    from rich.console import Console as Terminal

    from atoll.train.metrics.console import Console

    return _Screen(Console(Terminal(stderr=True) if quiet else None))


def _follow(remote: TrainJob, show: _Screen) -> dict[str, Any]:
    """Show a run on other machines until it ends, and have it save when this is interrupted."""
    with ThreadPoolExecutor(1) as threads:  # what a signal's handler prints must not come inside another print
        followed = threads.submit(remote.follow, show)
        try:
            with _interruptible(remote, remote.began, show, _ASKS - {signal.SIGHUP}):
                status = followed.result()
        except KeyboardInterrupt:
            remote.end()
            followed.result()
            remote.take_down()
            raise
    if not status.ended:  # the way to the cluster is lost
        raise typer.Exit(status.exit_code)
    result = remote.result
    if result is None:
        remote.take_down()
        raise typer.Exit(status.exit_code)
    return result


def _run(asked: Training, *, quiet: bool) -> dict[str, Any]:
    """Train on ranks of this terminal."""
    from atoll.cli.rank import train_rank
    from atoll.functions.compute_pool import ComputePool
    from atoll.train.events import Note, Progress, decode
    from atoll.train.folder import fresh_folder
    from atoll.train.parallel.layout import divide

    show, loaded = _screen(quiet), asked.loaded
    tree = loaded.recipe.model_dump(mode="json", exclude_none=True)
    folder = Path(loaded.recipe.train.output_dir).absolute()
    if not asked.resume:
        folder = fresh_folder(folder)
        tree["train"]["output_dir"] = str(folder)
    began, loaded_torch = threading.Event(), threading.Event()

    def on_event(event: PoolEvent) -> None:
        from atoll.core.events import HangSuspected, MetricsReported

        if isinstance(event, MetricsReported) and "event" in event.metrics:
            began.set()
            if not loaded_torch.is_set():
                loaded_torch.set()
                show(Progress(_LOADING, 1, 1))
            show(decode(event.metrics))
        elif isinstance(event, HangSuspected):
            who = ", ".join(map(str, event.ranks))
            show(Note(f"no progress for {event.silent_s:.0f} s on rank {who}: {event.why}"))

    def on_line(line: LogLine) -> None:
        show(Note(f"rank {line.rank}: {line.text}"))

    for note in loaded.notes:
        show(Note(note))
    pool = ComputePool(
        nodes=asked.nodes,
        accelerator=asked.gpus,
        workers_per_node=asked.nproc if asked.nproc is not None else "auto",
        logs=on_line,
        on_event=on_event,
        env={DRIVER_PID: os.getpid()},
        hang_timeout=loaded.recipe.train.hang_timeout_s,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(show))
        with spinner("starting nodes"):
            stack.enter_context(pool)
        divide(loaded.recipe, pool.world_size)  # refused before PyTorch is loaded and data are tokenised
        ranks = "one rank" if pool.world_size == 1 else f"{pool.world_size} ranks"
        show(Note(f"starting {ranks}"))
        show(Progress(_LOADING, 0, None))  # takes seconds
        choices = {"resume": asked.resume, "allow_changes": asked.allow_changes}
        future = pool.submit(train_rank, tree, choices, everywhere=True)
        with _interruptible(_LocalStop(folder), began, show, _ASKS):
            results: list[dict[str, Any]] = list(future.result())
    return results[0]


class _Screen:
    """Shows a run until nobody reads standard output any more, which is then to end it as Ctrl-C does."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_closed = False
        self._signalled = False
        self.is_interrupted = False  # the ranks call the end of their cancelled call a failure

    def __call__(self, event: Event) -> None:
        """Show an event; from any thread."""
        from atoll.train.events import RunEnded

        if self._is_closed:
            return
        if self.is_interrupted and isinstance(event, RunEnded):
            event = dataclasses.replace(event, status="stopped", error=None)
        try:
            self._console(event)
        except OutputClosed:
            self._is_closed = self._signalled = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def say(self, text: str) -> None:
        """A line of our own; on standard error where the rest can't be seen."""
        from atoll.train.events import Note

        if self._is_closed:
            print(f"atoll: {text}", file=sys.stderr, flush=True)
        else:
            self(Note(text))

    def has_signalled(self) -> bool:
        """Is the signal at hand ours? Once."""
        signalled, self._signalled = self._signalled, False
        return signalled

    def close(self) -> None:
        """Leave the terminal as it is now."""
        with contextlib.suppress(OutputClosed):
            self._console.close()


class _Stoppable(Protocol):
    def ask_to_stop(self, reason: str) -> None: ...
    def forget(self) -> None: ...


class _LocalStop:
    """A run on this machine, which looks for a file."""

    def __init__(self, folder: Path) -> None:
        from atoll.train.stop import STOP_FILE

        self._file = folder / STOP_FILE

    def ask_to_stop(self, reason: str) -> None:
        write_atomic(self._file, reason.encode(), mode=0o644)  # never seen without its reason

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


@contextlib.contextmanager
def _interruptible(
    run: _Stoppable, began: threading.Event, screen: _Screen, signals: frozenset[signal.Signals]
) -> Iterator[None]:
    """The first of the ``signals`` asks the run to save and end, the second ends it; so does a closed screen.

    Before the run has told of anything there is nothing to save, and nobody who would look at the file.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if closed := screen.has_signalled():
            if asked:
                return
            name = "standard output is closed"
        if asked:
            screen.say("stopped at once: what was done since the last checkpoint is lost")
        elif not began.is_set():
            screen.say(f"{name}: stopping before the first step")
        if asked or not began.is_set():
            screen.is_interrupted = True
            raise KeyboardInterrupt
        asked = True
        screen.say(f"{name}: saving a checkpoint, then stopping; {'Ctrl-C' if closed else 'once more'} stops at once")
        try:
            run.ask_to_stop(name)
        except ProvisionError as error:
            screen.say(f"the run could not be asked: {error}")
            asked = False

    before = {number: signal.signal(number, ask) for number in signals}
    try:
        if screen.has_signalled():  # while Ctrl-C was ignored, as in the background of a script
            raise KeyboardInterrupt
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        run.forget()


def _say_next(asked: Training, result: dict[str, Any], remote: TrainJob | None) -> None:
    from atoll.train.metrics.summary import next_steps

    recipe = asked.loaded.recipe
    wanted = recipe.train
    folder = shown_path(result["output_dir"])  # --no-resume has made one of its own
    if remote is not None:
        head, fetch, folder = remote.fetch_line(result["output_dir"])
        print(f"\nresults are in {result['output_dir']} on {head}; to get them here:")
        print(f"  {fetch}")
    elsewhere = ["--train.output_dir", folder] if folder != shown_path(str(Path(wanted.output_dir).absolute())) else []
    fits_twice = remote is None or 2 * asked.nodes <= remote.num_hosts
    given = {"--infra": remote and asked.infra, "--gpus": asked.gpus, "--nproc": asked.nproc}
    flags = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    lines = next_steps(
        asked.loaded.source,
        folder,
        options=[*flags, *asked.overrides, *elsewhere],
        steps=2 * result["steps"],
        status=result["status"],
        has_checkpoint=result["checkpoint"] is not None,
        nodes=asked.nodes,
        to_scale=_to_scale(recipe, 2 * result["world_size"]) if fits_twice else None,
        generates=recipe.data.tokenizer is not None,
        exports=recipe.model.python is None,
    )
    if lines:
        print("\nnext:")
    for line in lines:
        print(f"  {line}")


def _to_scale(recipe: Recipe, world_size: int) -> list[str] | None:
    """What a new run of a recipe needs on so many ranks; None where it can't train on them."""
    from atoll.train.parallel.layout import resolve

    more: list[str] = []
    share, left = divmod(recipe.train.global_batch, world_size)
    if share and not left and share % recipe.train.micro_batch:
        more += ["--train.micro_batch", str(share)]
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"micro_batch": share})})
    if recipe.checkpoint.path is not None:  # it holds those of this run
        more += ["--checkpoint.path", f"{recipe.checkpoint.path.rstrip('/')}-{world_size}-ranks"]
    try:
        resolve(recipe, world_size)
    except ConfigError:
        return None
    return more


def _dryrun(asked: Training, as_json: bool) -> None:
    with spinner("loading PyTorch"):
        from atoll.train.dryrun import dryrun

    for line in asked.loaded.notes:
        print(f"note: {line}", file=sys.stderr)
    found = dryrun(asked.loaded.recipe, nodes=asked.nodes, nproc=asked.nproc, gpus=asked.gpus)
    print(json.dumps(found.facts, indent=2) if as_json else "\n".join(found.lines))
    if not found.ok:
        raise typer.Exit(ExitCode.USAGE)
