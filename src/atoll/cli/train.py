"""``atoll train``: starts ranks, shows the run, and lets it save when it is interrupted. Imports are late."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.core.errors import AtollError, ConfigError, RemoteTraceback
from atoll.core.paths import DRIVER_PID, shown_path

if TYPE_CHECKING:
    from atoll.core.events import Event as PoolEvent
    from atoll.pool.logs import LogLine
    from atoll.train.recipe.load import Loaded

_FAILED, _NOT_FINISHED = 100, 101
_SOFT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Nodes = Annotated[
    int,
    typer.Option("--nodes", "--num-nodes", "--nnodes", "--num_nodes", min=1, help="Nodes; local ones by default."),
]
Ranks = Annotated[
    int | None,
    typer.Option("--nproc", "--nproc-per-node", min=1, help="Ranks a node; one for each GPU, or one, by default."),
]


def register(app: typer.Typer) -> None:
    """Add the command to ``atoll``."""
    app.command("train", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)


def train(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(help="A shipped recipe (atoll recipes ls), a TOML file, or nothing where CONFIG_FILE is set."),
    ] = None,
    nodes: Nodes = 1,
    nproc: Ranks = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", "--accelerators", help="Of each node: H100:8. With --dryrun none is needed.")
    ] = None,
    infra: Annotated[str, typer.Option(help="Where nodes come from; this version knows 'local'.")] = "local",
    dryrun: Annotated[
        bool, typer.Option("--dryrun", help="Say what it would need, GiB a rank by part, and start nothing.")
    ] = False,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="Start over, in a new folder.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Go on although the recipe differs from the folder's.")
    ] = False,
    output: Annotated[str, typer.Option("-o", "--output", help="'table' for people, 'json' for programs.")] = "table",
) -> None:
    """Train a language model from a recipe. The same command again goes on where it stopped.

    \b
    Any key of the recipe can be set:
        atoll train llama3_debug --nodes 2 --train.steps 100
        atoll train my.toml --parallel.shard=4 --data.path 'texts/*.jsonl'
    Ctrl-C saves a checkpoint and stops; a second one stops at once.
    """
    from atoll.train.recipe.load import load_recipe, require_complete

    if infra != "local":
        raise ConfigError(f"--infra {infra}: this version trains on local nodes; expected --infra local")
    if output not in ("table", "json"):
        raise typer.BadParameter(f"-o {output}: expected 'table' or 'json'")
    recipe, arguments = _recipe_and_overrides([*([] if recipe is None else [recipe]), *context.args])
    loaded = load_recipe(recipe, arguments, world_size=nodes * (nproc or 1))
    if dryrun:
        _dryrun(loaded, nodes, nproc, gpus)
        return
    require_complete(loaded.recipe)
    try:
        result = _run(
            loaded, nodes, nproc, gpus, quiet=output == "json", resume=not no_resume, allow_changes=allow_changes
        )
    except AtollError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a user's model raises on a rank
        print(f"atoll: a rank failed: {type(error).__name__}: {error}", file=sys.stderr)
        if isinstance(error.__cause__, RemoteTraceback):
            print(error.__cause__, file=sys.stderr)
        raise typer.Exit(_FAILED) from None
    if output == "json":
        print(json.dumps(result, indent=2))
    elif result["steps"]:
        _say_next(loaded, result, nodes, nproc, arguments)
    if result["status"] != "finished":
        raise typer.Exit(_NOT_FINISHED)


def _recipe_and_overrides(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The first argument that is no ``--section.key`` and no value of one; and the others."""
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


def _run(
    loaded: Loaded, nodes: int, nproc: int | None, gpus: str | None, *, quiet: bool, resume: bool, allow_changes: bool
) -> dict[str, Any]:
    from rich.console import Console as Terminal

    from atoll.cli.rank import train_rank
    from atoll.pool.compute_pool import ComputePool
    from atoll.train.events import Note, decode
    from atoll.train.folder import fresh_folder
    from atoll.train.metrics.console import Console

    show = Console(Terminal(stderr=True) if quiet else None)
    tree = loaded.recipe.model_dump(mode="json", exclude_none=True)
    folder = Path(loaded.recipe.train.output_dir).absolute()
    if not resume:
        folder = fresh_folder(folder)
        tree["train"]["output_dir"] = str(folder)
    began = threading.Event()

    def on_event(event: PoolEvent) -> None:
        from atoll.core.events import HangSuspected, MetricsReported

        if isinstance(event, MetricsReported) and "event" in event.metrics:
            began.set()
            show(decode(event.metrics))
        elif isinstance(event, HangSuspected):
            who = ", ".join(map(str, event.ranks))
            show(Note(f"no progress for {event.silent_s:.0f} s on rank {who}; [train] hang_timeout_s ends it"))

    def on_line(line: LogLine) -> None:
        show(Note(f"rank {line.rank}: {line.text}"))

    for note in loaded.notes:
        show(Note(note))
    pool = ComputePool(
        nodes=nodes,
        accelerator=gpus,
        workers_per_node=nproc if nproc is not None else "auto",
        logs=on_line,
        on_event=on_event,
        env={DRIVER_PID: os.getpid()},
        hang_timeout=loaded.recipe.train.hang_timeout_s,
    )
    options = {"resume": resume, "allow_changes": allow_changes}
    with contextlib.closing(show), pool:
        future = pool.submit(train_rank, tree, options, everywhere=True)
        with _interruptible(folder, began, lambda text: show(Note(text))):
            results: list[dict[str, Any]] = list(future.result())
    return results[0]


@contextlib.contextmanager
def _interruptible(folder: Path, began: threading.Event, say: Callable[[str], None]) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP asks the run to save and end, the second ends it.

    Before the run has told of anything there is nothing to save, and nobody who would look at the file.
    """
    from atoll.train.stopping import STOP_FILE

    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            say("stopped at once: what was done since the last checkpoint is lost")
        if asked or not began.is_set():
            raise KeyboardInterrupt
        asked = True
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        (folder / STOP_FILE).write_text(name)
        say(f"{name}: saving a checkpoint, then stopping; once more stops at once")

    before = {number: signal.signal(number, ask) for number in _SOFT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError):
            (folder / STOP_FILE).unlink(missing_ok=True)


def _say_next(loaded: Loaded, result: dict[str, Any], nodes: int, nproc: int | None, arguments: list[str]) -> None:
    from atoll.train.metrics.summary import next_steps

    wanted = loaded.recipe.train
    share, left = divmod(wanted.global_batch, 2 * nodes * (nproc or 1))  # of a rank, on twice as many nodes
    folder = shown_path(result["output_dir"])  # --no-resume has made one of its own
    elsewhere = ["--train.output_dir", folder] if folder != shown_path(str(Path(wanted.output_dir).absolute())) else []
    smaller = ["--train.micro_batch", str(share)] if share and not left and share % wanted.micro_batch else []
    lines = next_steps(
        loaded.source,
        folder,
        options=[*([] if nproc is None else ["--nproc", str(nproc)]), *arguments, *elsewhere],
        steps=2 * result["steps"],
        status=result["status"],
        has_checkpoint=result["checkpoint"] is not None,
        nodes=nodes,
        to_scale=smaller,
        exports=loaded.recipe.model.python is None,
    )
    print("\nnext:")
    for line in lines:
        print(f"  {line}")


def _dryrun(loaded: Loaded, nodes: int, nproc: int | None, gpus: str | None) -> None:
    from atoll.train.dryrun import dryrun

    for line in loaded.notes:
        print(f"note: {line}", file=sys.stderr)
    for line in dryrun(loaded.recipe, nodes=nodes, nproc=nproc, gpus=gpus):
        print(line)
