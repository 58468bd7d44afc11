"""``atoll run``: what ``torchrun`` does, on any infra. Imports are late."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets as random
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options, shown
from atoll.cli.options import is_number, num_processes
from atoll.cli.output import OutputClosed
from atoll.cli.torchrun import RunCommand
from atoll.core.errors import AtollError
from atoll.core.exit_codes import ExitCode
from atoll.core.paths import current_folder
from atoll.core.validation import MOST_TRIES, command_line, nearest
from atoll.providers import registry
from atoll.providers.base import DEFAULT
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobSpec, Restarts

if TYPE_CHECKING:
    from atoll.tasks.jobs import Job

_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_RUN_NAME = re.compile(r"run-[0-9a-f]{6}")
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
            help="These signals end the run, and go to every rank as they are: SIGTERM,SIGUSR1. By default Ctrl-C, "
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
    words = [*(script or ()), *context.args]
    if not words:
        raise typer.BadParameter("name a script: atoll run --nodes 2 train.py; or a command after --")
    if virtual_local_rank:
        raise typer.BadParameter(
            "--virtual-local-rank is not supported: ranks see all GPUs of their node, and LOCAL_RANK is theirs"
        )
    for line in context.meta["atoll.notes"]:
        shown.note(f"atoll: {line}")
    once_a_node = context.meta["atoll.command"]
    if once_a_node and nproc != "auto":
        shown.note(f"atoll: --nproc-per-node {nproc} has no effect: a command after -- runs once a node")
    kind = "program" if once_a_node or no_python else "module" if module and not run_path else "script"
    place = _Place(
        infra or DEFAULT,
        nodes or 1,
        options.last_of("--gpus", gpus),
        not no_simulate,
        _workdir(workdir, infra or DEFAULT),
    )
    if kind == "program":
        place.check_program(words[0], once_a_node)
    if kind == "script":
        words = [place.script(words[0]), *words[1:]]
    handed_on = _signals(signals)
    try:
        with _interrupted_by_signals(handed_on), registry.kept():
            cores = len(os.sched_getaffinity(0)) if place.local else None
            cluster, num_gpus = place.cluster()
            variables, values = _variables(env, secret)
            spec = dataclasses.replace(
                place.job(cluster, (*place.interpreter(kind, cluster), *words)),
                num_processes=1 if once_a_node else num_processes(nproc, num_gpus, cores, place.infra),
                env=variables,
                secret_names=tuple(values),
                restarts=Restarts(on_errors=max_restarts, on_lost_nodes=max_restarts),
                run_id=rdzv_id,
                master_port=master_port,
                owner_pid=os.getpid(),
                grace_s=_grace_s(shutdown_timeout, {**os.environ, **variables}),
            )
            shown_ranks = _local_ranks(local_ranks, spec.num_processes)
            code = _run(cluster, spec, values, place.workdir, shown_ranks, handed_on)
    except KeyboardInterrupt:  # before there was a job
        code = ExitCode.CANCELLED
    raise typer.Exit(code)


# ------------------------------------------------------------------------------------------------- what was asked
def _local_ranks(text: str | None, num_processes: int) -> frozenset[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(is_number(word) and int(word) < num_processes for word in words):
        raise typer.BadParameter(f"--local-ranks-filter {text}: expected numbers from 0 to {num_processes - 1}, as 0,1")
    return frozenset(map(int, words))


def _signals(text: str | None) -> frozenset[int]:
    """The signals that torchrun's flag names."""
    numbers = set()
    for name in (text or "").split(",") if text is not None else ():
        number = getattr(signal, name.strip(), None)
        if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP):
            raise typer.BadParameter(
                f"--signals-to-handle {text}: {name.strip()!r} is no signal that can be handled; expected names such "
                f"as SIGTERM,SIGUSR1"
            )
        numbers.add(int(number))
    return frozenset(numbers)


def _grace_s(given: int | None, variables: Mapping[str, str]) -> float | None:
    from atoll.tasks.variables import shutdown_s

    return shutdown_s(variables) if given is None else float(given)


def _variables(env: Sequence[str] | None, secret: Sequence[str] | None) -> tuple[dict[str, str], dict[str, str]]:
    if not env and not secret:
        return {}, {}
    from atoll.tasks.variables import gather

    return gather("--env", env or (), (), os.environ), gather("--secret", secret or (), (), os.environ)


def _workdir(given: str | None, infra: str) -> Path:
    folder = Path(current_folder(), os.path.expanduser(given or ""))
    if not folder.is_dir():
        raise typer.BadParameter(f"--workdir {given}: no such folder")
    if given is None and not registry.is_here(infra) and folder in (Path.home(), Path("/")):
        raise typer.BadParameter(
            f"{folder} would be copied to the hosts whole: run this in the script's folder, or name it with --workdir"
        )
    return folder


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where it is run."""

    infra: str
    num_nodes: int
    gpus: str | None
    simulate: bool
    workdir: Path

    @property
    def local(self) -> bool:
        """On this machine, as the caller has it."""
        return registry.is_here(self.infra)

    def script(self, path: str) -> str:
        """The script as the nodes call it."""
        here = self.workdir / path
        if not here.is_file():
            near = nearest(here.name, os.listdir(here.parent), os.path.dirname(path)) if here.parent.is_dir() else ""
            raise typer.BadParameter(
                f"{path}: no such script{near or '.'} A module is run with -m, any command after --"
            )
        if not self.local and not Path(os.path.abspath(here)).is_relative_to(os.path.abspath(self.workdir)):
            raise typer.BadParameter(
                f"{path} is outside the workdir {self.workdir}, which is all that hosts get: name a --workdir around it"
            )
        if not self.local and os.path.isabs(path) and here.is_relative_to(self.workdir):
            return str(here.relative_to(self.workdir))
        return path

    def check_program(self, path: str, after_dashes: bool) -> None:
        """Refuse a file of the workdir that can't be executed."""
        here = self.workdir / path
        if not here.is_file():
            return
        if after_dashes and path.endswith(".py") and "/" not in path and shutil.which(path) is None:
            raise typer.BadParameter(f"{path} is a script, and after -- stands a command: leave the -- out")
        if "/" in path and not os.access(here, os.X_OK):
            raise typer.BadParameter(
                f"{path} is not executable: {command_line('chmod', '+x', here)}, or run it with its interpreter"
            )

    def cluster(self) -> tuple[ClusterSpec, int]:
        """The cluster it will run on, and how many GPUs each node has.

        Raises:
            ConfigError: an unknown infra, or GPUs that can't be had.
            ProvisionError: a host can't be used.
        """
        from atoll.providers.accelerators import AcceleratorSpec
        from atoll.tasks.placing import Wish, decide
        from atoll.tasks.spec import is_none

        asked = None if is_none(self.gpus) else AcceleratorSpec.parse(self.gpus)
        wish = Wish(
            num_nodes=self.num_nodes,
            infra=self.infra,
            accelerators=None if asked is None else ((asked.name, asked.count),),
            simulate=self.simulate,
            files_in="" if self.local else _files_in(self.workdir),
        )
        decision = decide(f"run-{random.token_hex(3)}", None, wish)
        for line in decision.lines:
            shown.note(f"atoll: {line}")
        # Should this process be killed, whoever looks next takes the cluster down.
        cluster = dataclasses.replace(decision.cluster, autostop_minutes=0, autodown=True)
        return cluster, cluster.num_accelerators

    def interpreter(self, kind: str, cluster: ClusterSpec) -> tuple[str, ...]:
        """What stands before the script or module: on hosts the declared Python, or the one of a login there."""
        if kind == "program":
            return ()
        if self.local:
            from atoll.images.interpreters import user_python

            python = user_python()
        else:
            python = cluster.allocation.python
        return (python, "-u", "-m") if kind == "module" else (python, "-u")

    def job(self, cluster: ClusterSpec, command: tuple[str, ...]) -> JobSpec:
        """The job, with what the place itself says."""
        return JobSpec(
            num_nodes=self.num_nodes,
            command=command,
            accelerator=cluster.accelerator,
            num_accelerators=cluster.num_accelerators,
            simulated=cluster.simulated,
            workdir=not self.local,
            inherit_env=self.local,
            base_env=dict(os.environ) if self.local else {},
            cwd=str(self.workdir) if self.local else None,
        )


def _files_in(workdir: Path) -> str:
    """Where hosts keep a workdir between runs: one place for each folder of each machine that runs come from."""
    import hashlib
    import socket

    digest = hashlib.sha256(f"{socket.gethostname()}:{workdir}".encode()).hexdigest()[:8]
    name = re.sub(r"[^\w.-]+", "-", workdir.name) or "workdir"
    return f"runs/{name}-{digest}"


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


def _run(
    cluster: ClusterSpec,
    spec: JobSpec,
    secrets: Mapping[str, str],
    workdir: Path,
    local_ranks: frozenset[int] | None,
    handed_on: frozenset[int],
) -> int:
    """Run the job on a cluster of its own, show it, and leave nothing but its log; returns the exit code.

    ``handed_on``: signals that ranks get as they come; for others they get SIGTERM.
    """
    from atoll.cli.ranks import RankWriter
    from atoll.tasks import lifecycle
    from atoll.tasks.clusters import UnknownCluster

    writer = RankWriter(spec.num_nodes * spec.num_processes, spec.num_processes, local_ranks)
    try:
        job = _submit(cluster, spec, secrets, workdir)
        code = _show(job, writer, handed_on)
        _say(f"the whole log: {command_line('atoll', 'logs', cluster.name)}")
        return code
    finally:
        try:
            lifecycle.down(cluster.name, on_line=_say)
            _forget_old_runs()
        except UnknownCluster:  # it was never made
            pass
        except (AtollError, OSError) as error:  # the exit code is the job's
            _say(f"{error}; `{command_line('atoll', 'down', cluster.name)}` tries again")


def _submit(cluster: ClusterSpec, spec: JobSpec, secrets: Mapping[str, str], workdir: Path) -> Job:
    from atoll.tasks import clusters
    from atoll.tasks.jobs import Job

    with clusters.locked(cluster.name, "run", _say):
        cluster = clusters.make_ready(cluster, _say, from_here=True)
        clusters.save(cluster)
        if not cluster.allocation.shares_machine:
            from atoll.tasks.sync.task_files import ship

            ship(cluster, str(workdir), {}, say=_say, progress=shown.CopyProgress())
        return Job(cluster.name, clusters.control_of(cluster).submit(spec, secrets))


def _say(line: str) -> None:
    shown.note(f"atoll: {line}")


def _show(job: Job, writer: Any, handed_on: frozenset[int]) -> int:
    try:
        status = job.follow(writer)
    except (KeyboardInterrupt, OutputClosed) as error:
        number = error.args[0] if isinstance(error, KeyboardInterrupt) and error.args else None
        _say("standard output is closed: ending the ranks" if isinstance(error, OutputClosed) else "ending the ranks")
        job.cancel(number if number in handed_on else signal.SIGTERM)
        writer.begin_again()
        status = job.follow(writer)
    writer.close()
    return status.exit_code


def _forget_old_runs() -> None:
    """Keep the logs of the last runs, and no others."""
    from atoll.tasks import clusters, lifecycle

    ended = []
    for name in filter(_RUN_NAME.fullmatch, clusters.all_names()):
        with contextlib.suppress(AtollError):
            cluster = clusters.load(name)
            if cluster.status is ClusterStatus.DOWN:
                ended.append((cluster.created_s, name))
    for _, name in sorted(ended)[:-_NUM_KEPT]:
        with contextlib.suppress(FileNotFoundError):  # another run was faster
            lifecycle.forget(name, on_line=_say)
