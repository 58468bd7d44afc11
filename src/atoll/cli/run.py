"""``atoll run``: what ``torchrun`` does, on any infra. Imports are late."""

from __future__ import annotations

import contextlib
import os
import re
import secrets as random
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options, shown
from atoll.cli.options import is_number, num_processes
from atoll.cli.output import CopyProgress, OutputClosed, spinner
from atoll.cli.torchrun import RunCommand
from atoll.core.errors import AtollError
from atoll.core.exit_codes import ExitCode
from atoll.core.paths import current_folder, shown_path
from atoll.core.validation import MOST_TRIES, check_kind_of_file, command_line, nearest
from atoll.providers import registry
from atoll.providers.base import DEFAULT
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobSpec, Restarts

if TYPE_CHECKING:
    from atoll.cli.ranks import RankWriter
    from atoll.tasks.jobs import Job

_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
RUN_NAME = re.compile(r"run-[0-9a-f]{6}")  # of the clusters that ``atoll run`` makes
_NUM_KEPT = 20  # runs that have ended, whose logs are kept


def register(app: typer.Typer) -> None:
    """Add the command to ``atoll``."""
    settings = {"allow_interspersed_args": False, "allow_extra_args": True}
    app.command("run", cls=RunCommand, context_settings=settings)(run)


def run(
    context: typer.Context,
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]", help="A script and its arguments; or, after --, any command, once per node."
        ),
    ] = None,
    nodes: options.Nodes = 1,
    nproc: options.Nproc = "auto",
    infra: options.Infra = DEFAULT,
    gpus: options.Gpus = None,
    no_simulate: options.NoSimulate = False,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in `python -m`.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is an executable, not Python.")] = False,
    run_path: Annotated[bool, typer.Option("--run-path", hidden=True)] = False,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Accepted for torchrun compatibility; no effect.")
    ] = False,
    virtual_local_rank: Annotated[bool, typer.Option("--virtual-local-rank", hidden=True)] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts", min=0, max=MOST_TRIES, help="Maximum number of restarts of all ranks.", metavar="N"
        ),
    ] = 0,
    rdzv_id: Annotated[
        str | None, typer.Option("--rdzv-id", help="Run id, exported as TORCHELASTIC_RUN_ID.", metavar="ID")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master-port", min=1, max=65535, help="Port of the rendezvous; a free one by default.", metavar="PORT"
        ),
    ] = None,
    local_ranks: Annotated[
        str | None,
        typer.Option("--local-ranks-filter", help="Show only these ranks of each node: 0,1.", metavar="RANKS"),
    ] = None,
    shutdown_timeout: Annotated[
        int | None,
        typer.Option(
            "--shutdown-timeout",
            min=0,
            max=9_999_999,
            help="Seconds from SIGTERM to SIGKILL for ranks; by default 4 after a cancel, 1.5 after a failure.",
            metavar="S",
        ),
    ] = None,
    signals: Annotated[
        str | None,
        typer.Option(
            "--signals-to-handle",
            help="Signals that end the run and are sent to every rank unchanged: SIGTERM,SIGUSR1. By default Ctrl-C, "
            "SIGTERM and SIGHUP end it, and ranks get SIGTERM.",
            metavar="SIGNALS",
        ),
    ] = None,
    env: options.Env = None,
    secret: options.Secret = None,
    workdir: Annotated[
        str | None,
        typer.Option("--workdir", help="Folder to start ranks in, copied to SSH hosts; the current folder by default."),
    ] = None,
) -> None:
    """Run a script on every rank, as torchrun does, on any infra.

    \b
        atoll run train.py --lr 0.1
        atoll run --nodes 2 --nproc 2 train.py --lr 0.1
        atoll run --infra ssh/lab --nodes 2 --nproc gpu train.py
        atoll run --nodes 2 -m package.train
        atoll run --nodes 4 -- bash -c 'echo node $SKYPILOT_NODE_RANK'

    Every flag of torchrun is accepted, before the script. Lines of the ranks go to standard output, all else to
    standard error. Ctrl-C, or a closed terminal, ends the ranks within 5 s. The exit code is 0 after success, 100
    after a failure, 103 after Ctrl-C or a cancel, 2 for a mistake on the command line. ssh hosts get a copy of the
    workdir, which stays there: the next run sends only what changed, and finds what this one wrote.
    """
    from atoll.cli.ranks import RankWriter
    from atoll.providers.base import NodeRequest
    from atoll.tasks.launches import launch
    from atoll.tasks.requests import JobRequest, Options, accelerators_of, kept_files_in

    words = [*(script or ()), *context.args]
    if not words:
        raise typer.BadParameter("name a script: atoll run --nodes 2 train.py; or a command after --")
    if virtual_local_rank:
        raise typer.BadParameter(
            "--virtual-local-rank is not supported: ranks see all GPUs of their node, and LOCAL_RANK is theirs"
        )
    for line in context.meta["atoll.notes"]:
        _say(line)
    once_per_node = context.meta["atoll.command"]
    if once_per_node and nproc != "auto":
        _say(f"--nproc-per-node {nproc} has no effect: a command after -- runs once per node")
    kind = "program" if once_per_node or no_python else "module" if module and not run_path else "script"
    where, num_nodes = infra or DEFAULT, nodes or 1
    is_local = registry.is_here(where)
    folder = _workdir(workdir)
    if kind == "program":
        _check_program(folder, words[0], once_per_node)
    if kind == "script":
        words = [_script(folder, words[0], is_local), *words[1:]]
    handled = _handled_signals(signals)
    shown_ranks = _rank_filter(local_ranks)
    writer: RankWriter | None = None

    def make(cluster: ClusterSpec) -> tuple[JobSpec, Mapping[str, str]]:
        nonlocal writer
        num_cores = len(os.sched_getaffinity(0)) if is_local else None
        per_node = 1 if once_per_node else num_processes(nproc, cluster.num_accelerators, num_cores, where)
        if shown_ranks is not None and max(shown_ranks) >= per_node:
            raise typer.BadParameter(
                f"--local-ranks-filter {local_ranks}: expected numbers from 0 to {per_node - 1}, as 0,1"
            )
        writer = RankWriter(num_nodes * per_node, per_node, shown_ranks)
        variables, secrets = _variables(env, secret)
        return JobSpec(
            num_nodes=num_nodes,
            command=(*_interpreter(kind, cluster), *words),
            num_processes=per_node,
            env=variables,
            secret_names=tuple(secrets),
            restarts=Restarts(on_errors=max_restarts, on_lost_nodes=max_restarts),
            run_id=rdzv_id,
            master_port=master_port,
            owner_pid=os.getpid(),
            grace_s=_grace_s(shutdown_timeout, {**os.environ, **variables}),
            workdir=not is_local,
            inherit_env=is_local,
            base_env=dict(os.environ) if is_local else {},
            cwd=str(folder) if is_local else None,
        ), secrets

    gpu_text = options.last_of("--gpus", gpus)
    request = JobRequest(
        resources=NodeRequest(
            num_nodes=num_nodes,
            infra=where,
            accelerators=None if gpu_text is None else accelerators_of(gpu_text),
            files_in="" if is_local else kept_files_in(folder),
            simulate=not no_simulate,
        ),
        make=make,
        workdir=None if is_local else str(folder),
    )
    how = Options(
        command="run",
        down=True,  # should this process be killed, whoever looks next takes the cluster down
        from_here=True,
        announce=False,
        say=_say,
        progress=CopyProgress(),
    )
    name = f"run-{random.token_hex(3)}"
    code: int = ExitCode.CANCELLED
    with contextlib.suppress(KeyboardInterrupt), _interrupted_by_signals(handled), registry.kept():
        try:
            with spinner("starting ranks", interrupted="the run is cancelled"):
                (job,) = launch([request], name, how)
            assert writer is not None
            code = _show(job, writer, handled)
            _say(f"the whole log: {command_line('atoll', 'logs', name)}")
        finally:
            _remove_cluster(name)
    raise typer.Exit(code)


# ------------------------------------------------------------------------------------------------- what was asked
def _rank_filter(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(map(is_number, words)):
        raise typer.BadParameter(f"--local-ranks-filter {text}: expected numbers of ranks, as 0,1")
    return frozenset(map(int, words))


def _handled_signals(text: str | None) -> frozenset[int]:
    """The signals that torchrun's flag names."""
    numbers = set()
    for name in (text or "").split(",") if text is not None else ():
        number = getattr(signal, name.strip(), None)
        if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP):
            raise typer.BadParameter(
                f"--signals-to-handle {text}: {name.strip()!r} is not a signal that can be handled; expected names "
                f"such as SIGTERM,SIGUSR1"
            )
        numbers.add(int(number))
    return frozenset(numbers)


def _grace_s(given: int | None, variables: Mapping[str, str]) -> float | None:
    from atoll.tasks.variables import shutdown_s

    return shutdown_s(variables) if given is None else float(given)


def _variables(env: Sequence[str] | None, secret: Sequence[str] | None) -> tuple[dict[str, str], dict[str, str]]:
    from atoll.tasks.variables import gather

    return gather("--env", env or (), (), os.environ), gather("--secret", secret or (), (), os.environ)


def _workdir(given: str | None) -> Path:
    folder = Path(current_folder(), os.path.expanduser(given or ""))
    if not folder.is_dir():
        raise typer.BadParameter(f"--workdir {given}: no such folder")
    return folder


def _script(folder: Path, path: str, is_local: bool) -> str:
    """The script as the nodes call it."""
    here = folder / path
    if here.is_dir():
        raise typer.BadParameter(f"{path} is a folder: name a script in it, such as {os.path.join(path, 'train.py')}")
    if not here.is_file():
        near = nearest(here.name, os.listdir(here.parent), os.path.dirname(path)) if here.parent.is_dir() else ""
        raise typer.BadParameter(
            f"{path}: no such script{near or '.'} A module is run with -m, any command after --, a recipe with "
            f"`atoll train`"
        )
    check_kind_of_file(shown_path(str(here)), "run")
    if is_local:
        return path
    if not Path(os.path.abspath(here)).is_relative_to(os.path.abspath(folder)):
        raise typer.BadParameter(
            f"{path} is outside the workdir {folder}, which is all that hosts get: name a --workdir around it"
        )
    return str(here.relative_to(folder)) if os.path.isabs(path) and here.is_relative_to(folder) else path


def _check_program(folder: Path, path: str, after_dashes: bool) -> None:
    """Refuse a file of the workdir that can't be executed."""
    here = folder / path
    if not here.is_file():
        return
    if after_dashes and path.endswith(".py") and "/" not in path and shutil.which(path) is None:
        raise typer.BadParameter(f"{path} is a script, and after -- stands a command: leave the -- out")
    if "/" in path and not os.access(here, os.X_OK):
        raise typer.BadParameter(
            f"{path} is not executable: {command_line('chmod', '+x', here)}, or run it with its interpreter"
        )


def _interpreter(kind: str, cluster: ClusterSpec) -> tuple[str, ...]:
    """What comes before the script or module: on hosts the declared Python, or the one of a login there."""
    if kind == "program":
        return ()
    python = cluster.allocation.python
    if cluster.allocation.shares_machine:
        from atoll.images.interpreters import user_python

        python = user_python()
    return (python, "-u", "-m") if kind == "module" else (python, "-u")


# ------------------------------------------------------------------------------------------------- the run itself
@contextlib.contextmanager
def _interrupted_by_signals(more: frozenset[int]) -> Iterator[None]:
    """The first of Ctrl-C, SIGTERM, SIGHUP and ``more`` interrupts; later ones do not disturb the end that follows."""
    before = {number: signal.getsignal(number) for number in _SIGNALS | more}

    def interrupt(number: int, _frame: object) -> None:
        for each in before:
            signal.signal(each, lambda _number, _frame: None)  # children would inherit SIG_IGN
        raise KeyboardInterrupt(number)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(job: Job, writer: RankWriter, handled: frozenset[int]) -> int:
    """Show the job until it ends; a signal ends it, ``handled`` ones reach the ranks as they are, others as SIGTERM."""
    try:
        status = job.follow(writer)
    except (KeyboardInterrupt, OutputClosed) as error:
        number = error.args[0] if isinstance(error, KeyboardInterrupt) and error.args else None
        _say("standard output is closed: ending the ranks" if isinstance(error, OutputClosed) else "ending the ranks")
        job.cancel(number if number in handled else signal.SIGTERM)
        writer.begin_again()
        status = job.follow(writer)
    writer.close()
    return status.exit_code


def _remove_cluster(name: str) -> None:
    """Remove the run's cluster, and the logs of old runs."""
    from atoll.tasks import clusters, lifecycle

    try:
        lifecycle.down(name, on_line=_say)
        _forget_old_runs()
    except clusters.UnknownCluster:  # it was never made
        pass
    except (AtollError, OSError) as error:  # the exit code is the job's
        _say(f"{error}; `{command_line('atoll', 'down', name)}` tries again")


def _forget_old_runs() -> None:
    """Keep the logs of the last runs only."""
    from atoll.tasks import clusters, lifecycle

    ended = []
    for name in filter(RUN_NAME.fullmatch, clusters.all_names()):
        with contextlib.suppress(AtollError):
            cluster = clusters.load(name)
            if cluster.status is ClusterStatus.DOWN:
                ended.append((cluster.created_s, name))
    for _, name in sorted(ended)[:-_NUM_KEPT]:
        with contextlib.suppress(FileNotFoundError):  # another run was faster
            lifecycle.forget(name, on_line=_say)


def _say(line: str) -> None:
    shown.note(f"atoll: {line}")
