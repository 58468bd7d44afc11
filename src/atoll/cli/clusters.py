"""Commands that look after clusters and their jobs. Imports are late, so that help is fast."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import shown
from atoll.core.errors import AtollError
from atoll.tasks.spec import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_OK, ClusterSpec, ClusterStatus

if TYPE_CHECKING:
    from atoll.tasks.store import JobRow

_DAMAGED = "DAMAGED"  # a cluster whose record or jobs can't be read
_NUM_SHOWN = 20  # jobs of a queue, unless all are asked for

Name = Annotated[str, typer.Argument(metavar="CLUSTER", help="A name that `atoll status` shows.")]
Names = Annotated[
    list[str] | None, typer.Argument(metavar="CLUSTERS", help="Names; a pattern such as 'train-*' means several.")
]
All = Annotated[bool, typer.Option("--all", "-a", help="All of them.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Nothing is asked; taken because scripts give it.")]


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
    ip: Annotated[bool, typer.Option("--ip", help="Only the address of the head of the one cluster named.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Those that are down, too.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", "-r", help="Ask the hosts of ssh clusters, too.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="With what was said when each was made.")] = False,
    output: shown.Output = "table",
) -> None:
    """Show clusters.

    \b
        atoll status
        atoll status train --ip
        atoll status 'train-*' -o json
    """
    from atoll.tasks import api, clusters

    as_json = shown.as_json(output)
    damaged: dict[str, AtollError | OSError] = {}
    found = api.status(names or None, all=everything, on_error=damaged.__setitem__)
    if ip:
        if len(found) != 1 or not names:
            raise typer.BadParameter("--ip needs the name of one cluster: atoll status CLUSTER --ip")
        print(clusters.head_address(found[0]))
        return
    rows = [(each, _num_unfinished(each, refresh)) for each in found]
    if as_json:
        bad = [{"name": name, "status": _DAMAGED, "error": str(error)} for name, error in damaged.items()]
        shown.print_json([*(shown.cluster_row(each, num) for each, num in rows), *bad])
    else:
        _print_status(rows, damaged, refresh)
    for each in found if verbose and not as_json else ():
        for line in each.notes:
            print(f"{each.name}: {line}")
    for name, error in damaged.items():
        shown.note(f"atoll: cluster {name}: {error}. `atoll down --purge {name}` removes it, whatever is damaged")
    if damaged and names:
        raise typer.Exit(EXIT_FAILED)


def _print_status(rows: Sequence[tuple[ClusterSpec, int | None]], damaged: Iterable[str], refreshed: bool) -> None:
    if not rows and not damaged:
        print("no cluster is up; `atoll launch -c my-cluster TASK` makes one")
        return
    shown.print_table(
        ("NAME", "INFRA", "RESOURCES", "STATUS", "AUTOSTOP", "JOBS", "LAUNCHED"),
        [
            (
                each.name,
                each.infra,
                shown.resources_text(each.num_nodes, each.accelerator, each.num_accelerators, each.simulated),
                each.status.value,
                _autostop_text(each),
                "?" if num is None else f"{num} running" if num else "-",
                shown.ago(each.created_s),
            )
            for each, num in rows
        ]
        + [(name, "-", "-", _DAMAGED, "-", "?", "-") for name in damaged],
    )
    if any(num is None for _, num in rows) and not refreshed:
        print("?: their heads were not asked for their jobs; `atoll status --refresh` does")


def _num_unfinished(cluster: ClusterSpec, ask: bool) -> int | None:
    """How many of its jobs go on; None where that would have to be asked elsewhere, or nobody answers."""
    from atoll.tasks import clusters

    if cluster.supervised_from != "here" and not ask:
        return None
    try:
        return len(clusters.unfinished(cluster))
    except (AtollError, OSError) as error:
        shown.note(f"atoll: cluster {cluster.name}: {error}")
        return None


def _autostop_text(cluster: ClusterSpec) -> str:
    if cluster.autostop_minutes is None:
        return "-"
    return f"{cluster.autostop_minutes}m" + (" (down)" if cluster.autodown else "")


def queue(
    names: Names = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help=f"Also jobs beyond the last {_NUM_SHOWN}.")] = False,
    skip_finished: Annotated[bool, typer.Option("--skip-finished", "-s", help="Only those that go on.")] = False,
    all_users: Annotated[bool, typer.Option("--all-users", "-u", help="Everybody's; what is always shown.")] = False,
    output: shown.Output = "table",
) -> None:
    """Show the jobs of clusters, the newest first. By default of every cluster that is up.

    \b
        atoll queue train
        atoll queue train --skip-finished -o json
    """
    from atoll.tasks import api, clusters

    as_json = shown.as_json(output)
    problems = _Problems()
    up = api.status(on_error=problems.of) if not names else []
    wanted = clusters.matching(names) if names else [each.name for each in up]
    found: dict[str, list[JobRow]] = {}
    for name in wanted:
        with problems.told(name):
            found[name] = api.queue(name, skip_finished=skip_finished)
    if as_json:
        shown.print_json([{"cluster": name, **shown.job_row(row)} for name, rows in found.items() for row in rows])
    else:
        _print_queues(found, everything, skip_finished)
    problems.exit(EXIT_OK if not names else EXIT_FAILED)


def _print_queues(found: Mapping[str, list[JobRow]], everything: bool, skip_finished: bool) -> None:
    if not found:
        print("no cluster is up; `atoll launch -c my-cluster TASK` makes one")
    for name, rows in found.items():
        if len(found) > 1:
            print(f"\ncluster {name}")
        if not rows:
            print(
                f"no job {'goes on' if skip_finished else 'yet'} on cluster {name}; `atoll exec {name} TASK` starts one"
            )
            continue
        kept = rows if everything else [row for at, row in enumerate(rows) if at < _NUM_SHOWN or not row.status.ended]
        shown.print_jobs(kept)
        if len(kept) < len(rows):
            print(f"{len(rows) - len(kept)} older ones: atoll queue {name} --all")


def logs(
    name: Name,
    job_id: Annotated[int | None, typer.Argument(metavar="JOB", help="A job's number; the newest by default.")] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f", help="Wait for what is still to come.")] = True,
    tail: Annotated[int, typer.Option(min=0, help="Only the last lines; 0 for all.", metavar="N")] = 0,
    rank: Annotated[int | None, typer.Option(min=0, help="Only what this rank wrote.", metavar="R")] = None,
    only_status: Annotated[bool, typer.Option("--status", help="Only where it stands, as exit code too.")] = False,
    sync_down: Annotated[bool, typer.Option("--sync-down", "-s", help="Copy the log files here instead.")] = False,
    output: shown.Output = "table",
) -> None:
    """Show a job's log, and exit as the job stands. That is 0 succeeded, 100 failed, 101 not finished, 103 cancelled.

    \b
        atoll logs train
        atoll logs train 3 --no-follow --tail 50
        atoll logs train --rank 2
    Ctrl-C only stops showing it.
    """
    from atoll.tasks import api

    as_json = shown.as_json(output)
    job = api.job(name, job_id)
    if only_status or as_json:
        row = job.row()
        if as_json:
            log = {} if only_status else {"log": job.logs(follow=follow, tail=tail, rank=rank)}
            row = job.row()
            shown.print_json({"cluster": name, **shown.job_row(row), **log})
        else:
            print(f"Job {job.id}: {row.status}" + (f", {row.reason}" if row.reason else ""))
        raise typer.Exit(row.status.exit_code)
    if sync_down:
        print(f"logs of job {job.id} of cluster {name}: {api.sync_down_logs(name, job.id)}")
        return
    if follow:
        code = shown.follow(job, sys.stdout, tail=tail, rank=rank)
    else:
        writer = shown.LogWriter(sys.stdout)
        code = job.follow(writer, follow=False, tail=tail, rank=rank).exit_code
        writer.close()
    if code != EXIT_OK:
        raise typer.Exit(code)


def cancel(
    name: Name,
    job_ids: Annotated[list[int] | None, typer.Argument(metavar="JOBS", help="Numbers of jobs.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Every job that has not ended.")] = False,
    yes: Yes = False,
    output: shown.Output = "table",
) -> None:
    """Cancel jobs; the newest that goes on, where none is named.

    \b
        atoll cancel train 3 4
        atoll cancel train --all
    """
    from atoll.tasks import api

    as_json = shown.as_json(output)
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
        print(f"no job goes on on cluster {name}")


def stop(names: Names = None, everything: All = False, yes: Yes = False, output: shown.Output = "table") -> None:
    """Stop clusters: their jobs end, their nodes' files are kept.

    \b
        atoll stop train
        atoll stop 'train-*'
    """
    from atoll.tasks import clusters

    _each(names, everything, output, clusters.stop, "stopped; `atoll start {name}` takes it up again", up_only=True)


def start(names: Names = None, everything: All = False, yes: Yes = False, output: shown.Output = "table") -> None:
    """Take up stopped clusters again. `atoll launch` and `atoll exec` then run on them.

    \b
        atoll start train
    """
    from atoll.tasks import clusters

    def take_up(name: str) -> list[int]:
        clusters.start(name)
        return []

    _each(names, everything, output, take_up, "up; `atoll exec {name} TASK` runs on it")


def down(
    names: Names = None,
    everything: All = False,
    yes: Yes = False,
    purge: Annotated[bool, typer.Option("--purge", "-p", help="Remove the logs of their jobs, too.")] = False,
    output: shown.Output = "table",
) -> None:
    """Take clusters down: their jobs end, their nodes' files go. The logs of their jobs are kept.

    \b
        atoll down train
        atoll down 'train-*' other
        atoll down --all
    """
    from atoll.tasks import clusters

    if purge:
        act = functools.partial(clusters.purge, say=lambda line: shown.note(f"atoll: {line}"))
        _each(names, everything, output, act, "down and forgotten", find=clusters.left)
    else:
        _each(names, everything, output, clusters.down, "down; `atoll logs {name}` still shows its jobs' logs")


def _each(
    names: list[str] | None,
    everything: bool,
    output: str,
    act: Callable[[str], list[int]],
    said: str,
    *,
    up_only: bool = False,
    find: Callable[[Sequence[str]], list[str]] | None = None,
) -> None:
    """Do something to clusters one by one, and say so; ``act`` gives the jobs that it ended.

    What one of them is refused, or is not there, stops none of the others.
    """
    from atoll.tasks import api, clusters

    as_json = shown.as_json(output)
    if not names and not everything:
        raise typer.BadParameter("name a cluster, or give --all; `atoll status` lists them")
    problems = _Problems()
    wanted: dict[str, None] = {}
    if everything:
        damaged: dict[str, object] = {}
        up = api.status(on_error=damaged.__setitem__)
        names_up = [each.name for each in up if not up_only or each.status is ClusterStatus.UP]
        wanted = dict.fromkeys([*names_up, *damaged])
    for pattern in names or () if not everything else ():
        with problems.told():
            wanted |= dict.fromkeys((find or clusters.matching)([pattern]))
    if not wanted and not as_json and everything:
        print("no cluster is up")
    rows: list[dict[str, Any]] = []
    for name in wanted:
        with problems.told(name):
            ended = act(name)
            kept = clusters.find(name)
            status = (kept.status if kept else ClusterStatus.DOWN).value
            rows.append({"name": name, "status": status, "cancelled_jobs": ended})
            if not as_json:
                was = "was" if len(ended) == 1 else "were"
                jobs = f" (job {', '.join(map(str, ended))} {was} cancelled)" if ended else ""
                print(f"Cluster {name} is {said.format(name=name)}{jobs}", flush=True)
    if as_json:
        shown.print_json(rows)
    problems.exit()


class _Problems:
    """What went wrong with single clusters; it is told at once, and counts in the exit code."""

    def __init__(self) -> None:
        self._code = EXIT_OK

    @contextlib.contextmanager
    def told(self, name: str | None = None) -> Iterator[None]:
        """Tell what fails inside, and go on after it."""
        try:
            yield
        except (AtollError, OSError) as error:
            self.of(name, error)

    def of(self, name: str | None, error: AtollError | OSError) -> None:
        """Something failed for the cluster of this name, or for one that there is not."""
        text = str(error)
        shown.note(f"atoll: {text}" if name is None or name in text else f"atoll: cluster {name}: {text}")
        self._code = max(self._code, EXIT_NOT_FOUND if isinstance(error, LookupError) else EXIT_FAILED)

    def exit(self, most: int = EXIT_NOT_FOUND) -> None:
        """Exit as the worst of it, with ``most`` at most; go on where nothing went wrong."""
        if min(self._code, most) != EXIT_OK:
            raise typer.Exit(min(self._code, most))


def autostop(
    names: Names = None,
    everything: All = False,
    idle: Annotated[
        int, typer.Option("--idle-minutes", "-i", help="Idle minutes; 0: after the last job, -1: never.")
    ] = 5,
    down: Annotated[bool, typer.Option("--down", help="Take it down instead of stopping it.")] = False,
    never: Annotated[bool, typer.Option("--cancel", help="Take an autostop back.")] = False,
    wait_for: Annotated[str | None, typer.Option("--wait-for", hidden=True)] = None,
    yes: Yes = False,
    output: shown.Output = "table",
) -> None:
    """Stop clusters by themselves once no job has run for a while.

    \b
        atoll autostop train -i 30
        atoll autostop train -i 0 --down
        atoll autostop train --cancel
    """
    from atoll.tasks import api

    minutes = -1 if never else idle

    def set_it(name: str) -> list[int]:
        api.autostop(name, minutes, down=down)
        return []

    said = (
        f"{'taken down' if down else 'stopped'} after {minutes} idle minute{'s' if minutes != 1 else ''}"
        if minutes >= 0
        else "never stopped"
    )
    _each(names, everything, output, set_it, f"{said} from now on", up_only=True)
