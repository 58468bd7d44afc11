"""Commands that look after clusters and their jobs. Imports are late, so that help is fast."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from atoll.cli import options, shown, train_job
from atoll.cli.output import spinner
from atoll.cli.run import RUN_NAME
from atoll.core.errors import AtollError
from atoll.core.exit_codes import ExitCode
from atoll.core.validation import command_line
from atoll.providers.base import AllocationState
from atoll.tasks.listing import cluster_row, job_row, resources_text, status_text, waiting_row
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobStatus

if TYPE_CHECKING:
    from atoll.tasks.jobs import Job
    from atoll.tasks.lifecycle import Say
    from atoll.tasks.rows import JobRow
    from atoll.tasks.waiting import WaitingLaunch

T = TypeVar("T")
_DAMAGED = "DAMAGED"  # a cluster whose record or jobs can't be read
_NUM_SHOWN = 20  # jobs of a queue, unless all are asked for

Name = Annotated[str, typer.Argument(metavar="CLUSTER", help="A name that `atoll status` shows.")]
Names = Annotated[list[str] | None, typer.Argument(metavar="CLUSTERS", help="Names, or patterns such as 'train-*'.")]
All = Annotated[bool, typer.Option("--all", "-a", help="All clusters.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``atoll``."""
    for name, command in (
        ("status", status),
        ("queue", queue),
        ("logs", logs),
        ("cancel", cancel),
        ("stop", stop),
        ("start", start),
        ("down", down),
        ("autostop", autostop),
    ):
        app.command(name)(command)


def status(
    names: Names = None,
    ip: Annotated[bool, typer.Option("--ip", help="Print only the address of the cluster's head.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Include clusters that are down, and those of `atoll run`.")
    ] = False,
    refresh: Annotated[bool, typer.Option("--refresh", "-r", help="Also ask the hosts of SSH clusters.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Include the notes from when each was made.")
    ] = False,
    output: options.Output = "table",
) -> None:
    """Show clusters, the newest first.

    \b
        atoll status
        atoll status train --ip
        atoll status 'train-*' -o json
    """
    from atoll.tasks import api, clusters, record

    as_json = options.as_json(output)
    problems = _Problems()
    damaged: dict[str, AtollError | OSError] = {}
    launches = api.waiting_launches(names)
    wanted = _named(_others(names, launches), problems) if names else None
    found = api.status(wanted, all=everything, on_error=damaged.__setitem__)
    found.sort(key=lambda each: each.created_s, reverse=True)
    hidden = [each for each in found if not names and not everything and RUN_NAME.fullmatch(each.name)]
    found = [each for each in found if each not in hidden]
    if names and not found and not damaged and not launches:
        problems.exit()
    if ip:
        if len(found) != 1 or not names:
            raise typer.BadParameter("--ip needs the name of one cluster: atoll status CLUSTER --ip")
        print(clusters.head_address(found[0]))
        return
    with ThreadPoolExecutor(max(1, len(found))) as threads:  # a head that is gone takes seconds
        rows = list(zip(found, threads.map(lambda each: _unfinished(each, refresh), found), strict=True))
    if as_json:
        bad = [{"name": name, "status": _DAMAGED, "error": str(error)} for name, error in damaged.items()]
        shown.print_json([*map(waiting_row, launches), *(cluster_row(each, jobs) for each, jobs in rows), *bad])
    else:
        _print_status(launches, rows, damaged, refresh)
        if hidden:
            print(f"{len(hidden)} of `atoll run`: atoll status --all")
    for each in found if verbose and not as_json else ():
        for line in each.notes:
            print(f"{each.name}: {line}")
    for name, error in damaged.items():
        then = "" if "down --purge" in str(error) else f". {record.removes(name)}"
        shown.note(f"atoll: cluster {name}: {error}{then}")
    if damaged and names:
        raise typer.Exit(ExitCode.FAILED)
    problems.exit()


def _others(names: list[str] | None, launches: Sequence[WaitingLaunch]) -> list[str]:
    """Those of the names that no launch waits for nodes for."""
    waiting = {each.name for each in launches}
    return [name for name in names or () if name not in waiting]


def _print_status(
    launches: Sequence[WaitingLaunch],
    rows: Sequence[tuple[ClusterSpec, list[JobRow] | None]],
    damaged: Iterable[str],
    refreshed: bool,
) -> None:
    if not rows and not damaged and not launches:
        print("no cluster is up; `atoll launch -c my-cluster TASK` makes one")
        return
    shown.print_table(
        ("NAME", "INFRA", "RESOURCES", "STATUS", "AUTOSTOP", "JOBS", "LAUNCHED"),
        [
            (each.name, each.infra, _resources(each), ClusterStatus.INIT.value, "-", "-", shown.ago(each.since_s))
            for each in launches
        ]
        + [
            (
                each.name,
                each.infra,
                _resources(each),
                status_text(each),
                _autostop_text(each),
                "?" if jobs is None else _jobs_text(jobs),
                shown.ago(each.created_s),
            )
            for each, jobs in rows
        ]
        + [(name, "-", "-", _DAMAGED, "-", "?", "-") for name in damaged],
    )
    for each in launches:
        print(f"{each.name}: {each.reason}")
    for cluster, _ in rows:
        if (given := cluster.allocation).state is AllocationState.PENDING:
            print(f"{cluster.name}: waiting for {cluster.infra}: {given.reason or 'its nodes are not there yet'}")
    if any(jobs is None for _, jobs in rows) and not refreshed:
        print("?: the jobs are known on their heads; `atoll status --refresh` asks them")


def _resources(of: ClusterSpec | WaitingLaunch) -> str:
    return resources_text(of.num_nodes, of.accelerator, of.num_accelerators, of.simulated)


def _unfinished(cluster: ClusterSpec, ask: bool) -> list[JobRow] | None:
    """Its unfinished jobs; None if only its head knows and is not asked, or does not answer."""
    from atoll.tasks import clusters

    if not cluster.allocation.supervised_here and not ask:
        return None
    try:
        return clusters.unfinished(cluster)
    except (AtollError, OSError) as error:
        shown.note(f"atoll: cluster {cluster.name}: {error}")
        return None


def _jobs_text(jobs: Sequence[JobRow]) -> str:
    waiting = sum(job.status is JobStatus.PENDING for job in jobs)
    counts = ((len(jobs) - waiting, "running"), (waiting, "waiting"))
    return ", ".join(f"{num} {what}" for num, what in counts if num) or "-"


def _autostop_text(cluster: ClusterSpec) -> str:
    if cluster.autostop_minutes is None:
        return "-"
    return f"{cluster.autostop_minutes}m" + (" (down)" if cluster.autodown else "")


def queue(
    names: Names = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help=f"Also jobs beyond the last {_NUM_SHOWN}.")] = False,
    skip_finished: Annotated[bool, typer.Option("--skip-finished", "-s", help="Only unfinished jobs.")] = False,
    all_users: Annotated[
        bool, typer.Option("--all-users", "-u", help="Accepted for compatibility; jobs of all users are always shown.")
    ] = False,
    output: options.Output = "table",
) -> None:
    """List jobs, the newest first. By default of every cluster that is up.

    \b
        atoll queue train
        atoll queue train --skip-finished -o json
    """
    from atoll.tasks import api

    as_json = options.as_json(output)
    problems = _Problems()
    launches = api.waiting_launches(names)
    wanted = (
        _named(_others(names, launches), problems)
        if names
        else [each.name for each in api.status(on_error=problems.of)]
    )
    found: dict[str, list[JobRow]] = {}
    for name, answer in _at_once(wanted, lambda name, _: api.queue(name, skip_finished=skip_finished)):
        with problems.reported(name):
            found[name] = answer()
    if as_json:
        waits = [
            {"cluster": each.name, "job_id": None, "status": "PENDING", "reason": each.reason} for each in launches
        ]
        shown.print_json(waits + [{"cluster": name, **job_row(row)} for name, rows in found.items() for row in rows])
        problems.exit(ExitCode.OK if not names else ExitCode.NOT_FOUND)
        return
    for each in launches:
        print(f"cluster {each.name} has no nodes yet, so no job: {each.reason}")
    if found:
        _print_queues(found, everything, skip_finished, titled=len(found) > 1 or not names)
    elif not names and not launches:
        print("no cluster is up; `atoll launch -c my-cluster TASK` makes one")
    problems.exit(ExitCode.OK if not names else ExitCode.NOT_FOUND)


def _print_queues(found: Mapping[str, list[JobRow]], everything: bool, skip_finished: bool, *, titled: bool) -> None:
    for number, (name, rows) in enumerate(found.items()):
        if number:
            print()
        if not rows:
            starts = command_line("atoll", "exec", name, "TASK")
            print(f"no {'unfinished jobs' if skip_finished else 'jobs yet'} on cluster {name}; `{starts}` starts one")
            continue
        if titled:
            print(f"cluster {name}")
        kept = rows if everything else [row for at, row in enumerate(rows) if at < _NUM_SHOWN or not row.status.ended]
        shown.print_jobs(kept)
        if len(kept) < len(rows):
            print(f"{len(rows) - len(kept)} older ones: {command_line('atoll', 'queue', name, '--all')}")


def logs(
    name: Name,
    job_id: Annotated[int | None, typer.Argument(metavar="JOB", help="A job's number; the newest by default.")] = None,
    follow: options.Follow = True,
    tail: options.Tail = 0,
    rank: options.OnlyRank = None,
    only_status: options.OnlyStatus = False,
    sync_down: options.SyncDown = False,
    output: options.Output = "table",
) -> None:
    """Show a job's log. The exit code reflects its status: 0 succeeded, 100 failed, 101 not finished, 103 cancelled.

    \b
        atoll logs train
        atoll logs train 3 --no-follow --tail 50
        atoll logs train --rank 2

    Ctrl-C only stops showing it.
    """
    from atoll.tasks import api

    as_json = options.as_json(output)
    job = api.job(name, job_id)
    if only_status or as_json:
        row = job.row()
        if as_json:
            log = {} if only_status else {"log": job.logs(follow=follow, tail=tail, rank=rank)}
            row = job.row()
            shown.print_json({"cluster": name, **job_row(row), **log})
        else:
            print(f"Job {job.id}: {row.status}" + (f", {row.reason}" if row.reason else ""))
        raise typer.Exit(row.status.exit_code)
    if sync_down:
        print(f"logs of job {job.id} of cluster {name}: {api.sync_down_logs(name, job.id)}")
        return
    if train_job.is_training(name) and not tail and rank is None:
        code = _show_training(job, follow)
    elif follow:
        code = shown.follow(job, sys.stdout, tail=tail, rank=rank)
    else:
        code = job.follow(shown.LogWriter(sys.stdout), follow=False, tail=tail, rank=rank).exit_code
    if code != ExitCode.OK:
        raise typer.Exit(code)


def _show_training(job: Job, follow: bool) -> int:
    """The live panel of ``atoll train --infra``, from the run's start."""
    from atoll.train.metrics.console import Console

    with contextlib.closing(Console()) as console:
        try:
            return train_job.TrainJob(job).follow(console, follow=follow).exit_code
        except KeyboardInterrupt:
            console.close()
            print(f"\nJob {job.id} is still running. {shown.to_see(job.cluster, [job.id])}", flush=True)
            return ExitCode.NOT_FINISHED


def cancel(
    name: Name,
    job_ids: Annotated[list[int] | None, typer.Argument(metavar="JOBS", help="Numbers of jobs.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Cancel all unfinished jobs.")] = False,
    yes: options.Yes = False,
    output: options.Output = "table",
) -> None:
    """Cancel jobs; by default the most recent unfinished job.

    Cancelling a job of a pipeline cancels the jobs after it too; without JOBS, the whole pipeline is cancelled.

    \b
        atoll cancel train 3 4
        atoll cancel train --all
    """
    from atoll.tasks import api

    as_json = options.as_json(output)
    if job_ids and everything:
        raise typer.BadParameter("give numbers of jobs or --all, not both")
    asked = api.cancel(name, job_ids, all=everything)
    if as_json:
        shown.print_json({"cluster": name, "cancelled": asked})
        return
    for job_id in asked:
        print(f"Job {job_id} of cluster {name} is being cancelled")
    ended = [job_id for job_id in job_ids or () if job_id not in asked]
    for job_id in ended:
        print(f"Job {job_id} of cluster {name} had ended already: {api.job(name, job_id).status}")
    if not asked and not ended:
        print(f"no unfinished jobs on cluster {name}")


def stop(
    names: Names = None, everything: All = False, yes: options.Yes = False, output: options.Output = "table"
) -> None:
    """Stop clusters: ends their jobs, keeps their nodes' files.

    \b
        atoll stop train
        atoll stop 'train-*'
    """
    from atoll.tasks import clusters, lifecycle

    def stop_one(name: str, say: Say) -> tuple[list[int], str]:
        jobs = lifecycle.stop(name, on_line=say)
        if clusters.load(name).allocation.state is AllocationState.RELEASED:
            gets = command_line("atoll", "launch", "-c", name, "TASK")
            return jobs, f"stopped, and its nodes are given back; `{gets}` gets others"
        return jobs, f"stopped; `{command_line('atoll', 'start', name)}` restarts it"

    _each(names, everything, output, stop_one, up_only=True)


def start(
    names: Names = None, everything: All = False, yes: options.Yes = False, output: options.Output = "table"
) -> None:
    """Restart stopped clusters.

    \b
        atoll start train
    """
    from atoll.tasks import lifecycle

    def start_one(name: str, say: Say) -> tuple[list[int], str]:
        lifecycle.start(name, on_line=say)
        return [], f"up; `{command_line('atoll', 'exec', name, 'TASK')}` runs on it"

    _each(names, everything, output, start_one)


def down(
    names: Names = None,
    everything: All = False,
    yes: options.Yes = False,
    purge: Annotated[bool, typer.Option("--purge", "-p", help="Delete the logs of their jobs, too.")] = False,
    output: options.Output = "table",
) -> None:
    """Remove clusters and their nodes' files. Ends their jobs; keeps the logs.

    \b
        atoll down train
        atoll down 'train-*' other
        atoll down --all
    """
    from atoll.tasks import clusters, lifecycle

    def remove_one(name: str, say: Say) -> tuple[list[int], str]:
        if purge:
            return lifecycle.purge(name, lambda line: shown.note(f"atoll: {line}"), on_line=say), "down and forgotten"
        already = " already" if clusters.load(name).status is ClusterStatus.DOWN else ""
        jobs = lifecycle.down(name, on_line=say)
        return jobs, f"down{already}; its jobs' logs are kept ({command_line('atoll', 'logs', name)})"

    _each(names, everything, output, remove_one, find=lifecycle.left if purge else None)


def _each(
    names: list[str] | None,
    everything: bool,
    output: str,
    act: Callable[[str, Say], tuple[list[int], str]],
    *,
    up_only: bool = False,
    find: Callable[[Sequence[str]], list[str]] | None = None,
) -> None:
    """Do something to clusters; ``act`` gives the jobs that it ended and what the cluster is now.

    An error of one of them stops none of the others.
    """
    from atoll.tasks import api, clusters

    as_json = options.as_json(output)
    if not names and not everything:
        raise typer.BadParameter("name a cluster, or give --all; `atoll status` lists them")
    if names and everything:
        raise typer.BadParameter("name clusters or give --all, not both")
    problems = _Problems()
    wanted = _named(names or (), problems, find)
    if everything:
        damaged: dict[str, object] = {}
        up = api.status(on_error=damaged.__setitem__)
        wanted = [*(each.name for each in up if not up_only or each.status is ClusterStatus.UP), *damaged]
    if not wanted and not as_json and everything:
        print("no cluster is up")
    rows: list[dict[str, Any]] = []
    for name, answer in _at_once(wanted, act):
        with problems.reported(name), spinner(f"cluster {name}", interrupted="the same command again finishes it"):
            ended, state = answer()
            kept = clusters.find(name)
            status = (kept.status if kept else ClusterStatus.DOWN).value
            rows.append({"name": name, "status": status, "cancelled_jobs": ended})
            if not as_json:
                what, was = ("job", "was") if len(ended) == 1 else ("jobs", "were")
                jobs = f" ({what} {', '.join(map(str, ended))} {was} cancelled)" if ended else ""
                print(f"Cluster {name} is {state}{jobs}", flush=True)
    if as_json:
        shown.print_json(rows)
    problems.exit()


class _HasToWait(Exception):
    """Another command has the cluster."""


def _at_once(names: Sequence[str], act: Callable[[str, Say], T]) -> Iterator[tuple[str, Callable[[], T]]]:
    """Do something with several clusters at the same time; each name, and what waits for its answer or raises.

    Only this thread waits for other commands: Ctrl-C reaches no other.
    """
    if len(names) == 1:
        yield names[0], functools.partial(act, names[0], shown.note)
        return

    def tell(line: str) -> None:
        shown.note(line)
        raise _HasToWait

    def answer(name: str, begun: Future[T]) -> T:
        try:
            return begun.result()
        except _HasToWait:
            return act(name, lambda line: None)

    with ThreadPoolExecutor(max(1, len(names))) as threads:
        begun = [threads.submit(act, name, tell) for name in names]
        yield from [(name, functools.partial(answer, name, each)) for name, each in zip(names, begun, strict=True)]


def _named(
    patterns: Sequence[str], problems: _Problems, find: Callable[[Sequence[str]], list[str]] | None = None
) -> list[str]:
    """The clusters of these names and patterns; one that does not exist stops none of the others."""
    from atoll.tasks import clusters

    wanted: dict[str, None] = {}
    for pattern in patterns:
        with problems.reported():
            wanted |= dict.fromkeys((find or clusters.matching)([pattern]))
    return list(wanted)


class _Problems:
    """Errors of single clusters: printed at once, and counted in the exit code."""

    def __init__(self) -> None:
        self._code = ExitCode.OK

    @contextlib.contextmanager
    def reported(self, name: str | None = None) -> Iterator[None]:
        """Print what fails inside, and continue."""
        try:
            yield
        except (AtollError, OSError) as error:
            self.of(name, error)

    def of(self, name: str | None, error: AtollError | OSError) -> None:
        """Print an error of the cluster of this name, or of no known one."""
        text = str(error)
        shown.note(f"atoll: {text}" if name is None or name in text else f"atoll: cluster {name}: {text}")
        self._code = max(self._code, ExitCode.NOT_FOUND if isinstance(error, LookupError) else ExitCode.FAILED)

    def exit(self, most: int = ExitCode.NOT_FOUND) -> None:
        """Exit with the worst code, at most ``most``; return if there was no error."""
        if min(self._code, most) != ExitCode.OK:
            raise typer.Exit(min(self._code, most))


def autostop(
    names: Names = None,
    everything: All = False,
    idle: Annotated[
        int,
        typer.Option(
            "--idle-minutes", "-i", help="Idle minutes before the stop; 0: right after the last job, -1: never."
        ),
    ] = 5,
    down: Annotated[bool, typer.Option("--down", help="Remove the cluster instead of stopping it.")] = False,
    never: Annotated[bool, typer.Option("--cancel", help="Cancel autostop.")] = False,
    wait_for: Annotated[str | None, typer.Option("--wait-for", hidden=True)] = None,
    yes: options.Yes = False,
    output: options.Output = "table",
) -> None:
    """Stop clusters automatically when they are idle.

    \b
        atoll autostop train -i 30
        atoll autostop train -i 0 --down
        atoll autostop train --cancel
    """
    from atoll.tasks import api

    minutes = -1 if never else idle

    when = f"after {minutes} idle minute{'s' if minutes > 1 else ''}" if minutes else "once no job is left"
    state = (
        f"set to be {'removed' if down else 'stopped'} {when}" if minutes >= 0 else "not stopped automatically any more"
    )

    def set_one(name: str, _say: Say) -> tuple[list[int], str]:
        api.autostop(name, minutes, down=down)
        return [], state

    _each(names, everything, output, set_one, up_only=True)
