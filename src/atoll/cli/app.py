"""All of ``atoll``: its commands, and how it ends. Imports are late, so that help is fast."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from atoll import __version__
from atoll.cli import check, clusters, completion, dashboard, launching, nodes, output, run, train, weights
from atoll.cli.data import data_app
from atoll.cli.jobs import jobs_app
from atoll.cli.options import Command, NoSuchOption, Output, as_json, flags_of, normalized
from atoll.cli.recipes import recipes_app
from atoll.cli.shown import duration, print_json, print_table
from atoll.core.errors import AtollError, CallTimeout, RemoteTraceback
from atoll.core.exit_codes import ExitCode, exit_code_of
from atoll.core.packages import trainer_packages

_SAME_S = 1.0  # a Ctrl-C so soon after another counts as the same

_HELP = """Train one model on any hardware you can reach.

\b
I have …                            → type …
a script for torchrun               → atoll run --nodes 2 --nproc 2 train.py
a task file, or a command           → atoll launch -c NAME task.yaml,  atoll exec NAME 'echo hi'
a job that outlives its machines    → atoll jobs launch task.yaml,  atoll jobs queue
clusters and their jobs             → atoll status,  atoll queue NAME,  atoll logs NAME,  atoll down NAME
a model to train, or a recipe       → atoll train llama3_debug --nodes 2
recipes, and data to look at        → atoll recipes ls,  atoll data preview RECIPE
a trained model                     → atoll generate RUN "Once",  atoll export RUN DEST
published weights                   → atoll import SOURCE DEST
a Python function for every rank    → python train.py, with this in it:
        with sky.ComputePool(nodes=2) as pool: f(x) @ pool
a pool that stayed warm             → atoll pools ls,  atoll pools down NAME
the id of a detached call           → atoll result ID
images that fill the disk           → atoll images ls,  atoll images prune
what can be used from here          → atoll check,  atoll gpus
a browser, to see all of it         → atoll dashboard
"""

# The commands of `atoll --help`.
_PANELS = {
    "Run things": ("run", "launch", "exec", "jobs", "train"),
    "Look at them": ("status", "queue", "logs", "dashboard", "gpus", "check"),
    "Clusters and jobs": ("cancel", "stop", "start", "down", "autostop", "ssh", "cp"),
    "Models": ("recipes", "data", "generate", "export", "import"),
    "Functions": ("pools", "result", "images"),
    "Shell": ("completion",),
}


class _Grouped(TyperGroup):
    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the options before the command, where those of a command are a common mistake."""
        try:
            return super().make_context(*args, **kwargs)
        except NoSuchOption as error:
            flag = vars(error)["option_name"]
            takers = [name for name in _PANELS["Run things"] if flag in flags_of(self.commands[name])]
            if takers:
                raise typer.BadParameter(f"{flag} comes after the command: atoll {takers[-1]} {flag}") from None
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in panels."""
        width = max(map(len, self.commands))
        for title, names in _PANELS.items():
            helps = [self.commands[name].get_short_help_str(formatter.width - 6 - width) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in zip(names, helps, strict=True)])


app = typer.Typer(
    cls=_Grouped,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": normalized},
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
pools = typer.Typer(help="Named pools that stay warm between scripts.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(pools, name="pools")
images = typer.Typer(help="Built images of pools.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(images, name="images")
app.add_typer(recipes_app, name="recipes")
app.add_typer(data_app, name="data")
app.add_typer(jobs_app, name="jobs")
launching.register(app)
run.register(app)
clusters.register(app)
nodes.register(app)
check.register(app)
dashboard.register(app)
train.register(app)
weights.register(app)
completion.register(app)
for _commands in (app, *(each.typer_instance for each in app.registered_groups)):
    for _each in _commands.registered_commands if _commands else ():
        _each.cls = Command if _each.cls is TyperCommand else _each.cls

# SkyPilot's commands that this version lacks, and what comes next to each.
_LACKING = {
    "serve": "`atoll launch TASK` runs a server as a job, `atoll ssh NAME -L PORT` reaches it",
    "api": "there is no server to start: every command works by itself",
    "cost-report": "your own machines have no price; `atoll status --all` also shows clusters that are down",
    "show-gpus": "`atoll gpus` shows those of this machine, `atoll gpus ssh/NAME` those of hosts",
}


def _lacking(context: typer.Context) -> None:
    raise typer.BadParameter(f"`atoll {context.info_name}` is not in this version: {_LACKING[str(context.info_name)]}")


for _name in _LACKING:
    _any = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command(_name, hidden=True, context_settings=_any)(_lacking)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Options of the command itself."""
    if version:
        print(f"atoll {__version__}")
        raise typer.Exit


@pools.command("ls")
def pools_ls(output: Output = "table") -> None:
    """List the named pools that are up."""
    from atoll.functions.named.registry import named_pools

    found = named_pools()
    if as_json(output):
        print_json(found)
        return
    if not found:
        print("no named pool is up; `sky.ComputePool(name='my-pool', ...)` starts one")
        return
    rows = [
        (
            pool["name"],
            str(pool["world_size"]),
            str(pool["pid"]),
            duration(time.time() - pool["started"]),
            ", ".join(f"{key}={value}" for key, value in pool["settings"].items()),
        )
        for pool in found
    ]
    print_table(("NAME", "RANKS", "PID", "UP", "DIFFERS FROM THE DEFAULTS IN"), rows)


@pools.command("down")
def pools_down(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Names, as `atoll pools ls` shows them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Every named pool.")] = False,
) -> None:
    """End named pools for every process that uses them."""
    from atoll.functions.named.registry import end_pool, named_pools

    up = [pool["name"] for pool in named_pools()]
    wanted = up if everything else names or []
    if not wanted and not everything:
        raise typer.BadParameter("name a pool, or give --all; `atoll pools ls` lists them")
    if not wanted:
        print("no named pool is up")
    missing = [name for name in wanted if not end_pool(name)]
    for name in wanted:
        print(
            f"{name}: " + ("no such pool is up; `atoll pools ls` lists those that are" if name in missing else "ended")
        )
    if missing:
        raise typer.Exit(ExitCode.NOT_FOUND)


@images.command("ls")
def images_ls(output: Output = "table") -> None:
    """List images built on this machine, the most recently used first."""
    from atoll.images.built_images import built_images

    found = built_images()
    if as_json(output):
        rows = [{**dataclasses.asdict(each), "folder": str(each.folder), "in_use": each.in_use} for each in found]
        print_json(rows)
        return
    if not found:
        print("no image was built here; `sky.ComputePool(image=sky.Image(pip=[...]))` builds one")
        return
    table = [
        (
            each.folder.name,
            str(each.size_bytes >> 20),
            "now" if each.in_use else duration(time.time() - each.used_s),
            each.python,
            ", ".join(each.packages) or "(bare environment)",
        )
        for each in found
    ]
    print_table(("IMAGE", "MIB", "USED", "PYTHON", "PACKAGES"), table)


@images.command("prune")
def images_prune(
    days: Annotated[float, typer.Option(min=0, metavar="N", help="Only images unused for N days.")] = 0.0,
) -> None:
    """Remove images that no rank uses. Those unused for 30 days, or beyond 64 GiB in total, go automatically."""
    from atoll.images.built_images import prune_images

    removed = prune_images(older_s=days * 86400.0)
    print(f"removed {len(removed)} images, {sum(each.size_bytes for each in removed) >> 20} MiB")


@app.command()
def result(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="What pool.submit(..., detach=True) returned.")],
    timeout: Annotated[float | None, typer.Option(metavar="S", help="Seconds to wait; no limit by default.")] = None,
) -> None:
    """Wait for a detached call and print its result."""
    from atoll.functions.named.detached import exists
    from atoll.functions.named.detached import result as fetch

    if not exists(job_id):
        print(f"atoll: no detached call {job_id!r}; its id is what pool.submit(..., detach=True) gave", file=sys.stderr)
        raise typer.Exit(ExitCode.NOT_FOUND)
    try:
        shown = repr(fetch(job_id, timeout))
    except Exception as error:  # noqa: BLE001 - whatever the user's function raised
        print(f"atoll: {type(error).__name__}: {error}", file=sys.stderr)
        if isinstance(error.__cause__, RemoteTraceback):
            print(error.__cause__, file=sys.stderr)
        raise typer.Exit(ExitCode.NOT_FINISHED if isinstance(error, CallTimeout) else ExitCode.FAILED) from None
    print(shown)


def _ready_streams() -> None:
    """Have the standard streams take all that is written to them, also where they are closed or know ASCII only."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
        elif isinstance(stream, io.TextIOWrapper) and name != "stdin":
            stream.reconfigure(errors="backslashreplace")
    output.watch()


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """A Ctrl-C interrupts; more of them at once, in impatience, do not disturb what then comes to its end."""
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):  # as under nohup, or not Python's
        yield
        return
    last_s: float | None = None

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if last_s is None or now_s > last_s + _SAME_S:
            last_s = now_s
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:  # once Python ends, one would kill it
        signal.signal(signal.SIGINT, before if last_s is None else signal.SIG_IGN)


def run_command() -> None:
    """Do what the command line says, and exit."""
    try:
        _ready_streams()
        with _one_interrupt(), output.spinner(" ".join(["atoll", *sys.argv[1:2]]), until_output=True):
            try:
                with trainer_packages():
                    app(prog_name="atoll")
            finally:
                sys.stdout.flush()
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        sys.exit(exit_code_of(error))
    except OSError as error:  # a full disk, a state folder that can't be
        where = f"{error.filename}: " if error.filename else ""
        print(f"atoll: {where}{error.strerror or error}", file=sys.stderr)
        if error.errno == errno.ENOSPC:
            output.drop(sys.stdout.fileno())  # what is left of it can't be written at the end either
        sys.exit(ExitCode.FAILED)
    except (KeyboardInterrupt, SystemExit) as end:
        code = ExitCode.INTERRUPTED if isinstance(end, KeyboardInterrupt) else end.code
        if code == ExitCode.INTERRUPTED and not output.spinner.has_printed:  # nothing has said what that ended
            print("\natoll: interrupted", file=sys.stderr)
        sys.exit(code)
    finally:
        if output.is_closed():
            sys.exit(128 + signal.SIGPIPE)  # as a shell shows the end of programs that know nothing of it
