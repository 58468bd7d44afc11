"""``atoll jobs``: jobs that are started again elsewhere when their nodes are lost. Imports are late."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import clusters, options, shown
from atoll.cli.launching import Entrypoint, hint_at_files, show_plan
from atoll.cli.output import spinner
from atoll.cli.task_flags import TaskFlags, tasks_of, with_task_flags
from atoll.core.exit_codes import ExitCode
from atoll.tasks.listing import job_row, resources_text
from atoll.tasks.spec import JobStatus

if TYPE_CHECKING:
    from atoll.tasks.jobs import Job

jobs_app = typer.Typer(
    help="Managed jobs, started again elsewhere if nodes are lost.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": options.normalized},
)

Controller = Annotated[
    str | None,
    typer.Option("--controller", metavar="INFRA", help="Whose machine looks after the jobs; this one by default."),
]
Name = Annotated[str | None, typer.Option("--name", "-n", metavar="NAME", help="Name of the job.")]
Number = Annotated[int | None, typer.Argument(metavar="JOB", help="A job's number; the newest by default.")]


def launch(
    entrypoint: Entrypoint,
    flags: TaskFlags,
    controller: Controller = None,
    num_jobs: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Number of jobs of this task; SKYPILOT_JOB_RANK differs.")
    ] = None,
    detach: options.Detach = False,
    no_simulate: options.NoSimulate = False,
    yes: options.Yes = False,
    dryrun: options.DryRun = False,
    output: options.Output = "table",
) -> None:
    """Start a managed job and show its log. Its task gets a cluster, and another one when that is lost.

    \b
        atoll jobs launch task.yaml
        atoll jobs launch -n train --infra ssh/lab --num-nodes 2 task.yaml -d
        atoll jobs launch --num-jobs 8 task.yaml

    Ctrl-C only stops showing the log (exit code 101); `atoll jobs cancel` ends the job.
    """
    from atoll.tasks import controllers, managed_api

    if dryrun:
        if controllers.of(controller) != controllers.HERE:
            raise typer.BadParameter(f"--dryrun with --controller {controller}: what can be had is known only there")
        show_plan(entrypoint, flags, output, simulate=not no_simulate)
        return
    as_json = options.as_json(output)
    stream = sys.stderr if as_json else sys.stdout
    tasks = tasks_of(entrypoint, flags)
    hint_at_files(entrypoint, tasks)
    with spinner("submitting"):
        found = managed_api.launch(
            tasks,
            infra=flags.infra,
            controller=controller,
            num_jobs=num_jobs,
            simulate=not no_simulate,
            strict=flags.strict,
            on_line=lambda line: print(line, file=stream, flush=True),
        )
    ids = [job.id for job in found]
    several = len(ids) > 1
    which = f"Managed jobs submitted, IDs: {ids[0]}-{ids[-1]}" if several else f"Managed job submitted, ID: {ids[0]}"
    print(which, file=stream, flush=True)
    code: int = ExitCode.OK
    if detach:
        print(shown.to_see(found[0].cluster, ids), file=stream)
    elif num_jobs is not None and several:
        code = _wait_for(found)
    else:
        for job in found:
            if code == ExitCode.OK:
                code = shown.follow(job, stream, fresh=True)
    if as_json:
        rows = [{"controller": job.cluster, **job_row(job.row())} for job in found]
        shown.print_json(rows if several else rows[0])
    if code != ExitCode.OK:
        raise typer.Exit(code)


def _wait_for(jobs: list[Job]) -> int:
    try:
        statuses = []
        for job in jobs:
            statuses.append(job.wait())
            shown.note(f"managed job {job.id}: {statuses[-1]}")
    except KeyboardInterrupt:
        shown.note(f"\nThe jobs are still running. {shown.to_see(jobs[0].cluster, [job.id for job in jobs])}")
        return ExitCode.NOT_FINISHED
    return max(status.exit_code for status in statuses)


def queue(
    controller: Controller = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also finished jobs beyond the last 20.")] = False,
    skip_finished: Annotated[bool, typer.Option("--skip-finished", "-s", help="Only unfinished jobs.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", "-r", hidden=True)] = False,
    all_users: Annotated[bool, typer.Option("--all-users", "-u", hidden=True)] = False,
    output: options.Output = "table",
) -> None:
    """List managed jobs, the newest first, with why each waits or ended.

    \b
        atoll jobs queue
        atoll jobs queue --skip-finished -o json
    """
    from atoll.tasks import managed_api

    as_json = options.as_json(output)
    rows = managed_api.queue(controller, skip_finished=skip_finished)
    if as_json:
        shown.print_json([{"controller": at, **job_row(row)} for at, row in rows])
        return
    if not rows:
        print(f"no {'unfinished ' if skip_finished else ''}managed job; `atoll jobs launch TASK` starts one")
        return
    shown_rows = rows if everything else [each for at, each in enumerate(rows) if at < 20 or not each[1].status.ended]
    others = len({at for at, _ in rows}) > 1
    shown.print_table(
        ("ID", "NAME", "SUBMITTED", "DURATION", "RECOVERIES", "RESOURCES", "STATUS", ""),
        [
            (
                str(row.id) + (f" ({at})" if others else ""),
                row.name or "-",
                shown.ago(row.submitted_s),
                shown.duration((row.ended_s or time.time()) - row.started_s) if row.started_s else "-",
                str(row.restarts),
                resources_text(row.spec.num_nodes, row.spec.accelerator, row.spec.num_accelerators, row.spec.simulated),
                row.status.value,
                ""
                if row.status is JobStatus.CANCELLED and row.reason == "cancelled"
                else row.reason.partition("\n")[0],
            )
            for at, row in shown_rows
        ],
        cut=True,
    )
    if len(shown_rows) < len(rows):
        print(f"{len(rows) - len(shown_rows)} older ones: atoll jobs queue --all")


def logs(
    job_id: Number = None,
    name: Name = None,
    controller: Controller = None,
    follow: options.Follow = True,
    tail: options.Tail = 0,
    rank: options.OnlyRank = None,
    only_status: options.OnlyStatus = False,
    sync_down: options.SyncDown = False,
    output: options.Output = "table",
) -> None:
    """Show a managed job's log, with why each attempt ended. The exit code is that of `atoll logs`.

    \b
        atoll jobs logs 3
        atoll jobs logs -n train --no-follow --tail 50
    """
    from atoll.tasks import managed_api

    job = managed_api.job(job_id, name, controller)
    clusters.logs(job.cluster, job.id, follow, tail, rank, only_status, sync_down, output)


def cancel(
    job_ids: Annotated[list[int] | None, typer.Argument(metavar="JOBS", help="Numbers of jobs.")] = None,
    name: Name = None,
    controller: Controller = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Cancel all unfinished jobs.")] = False,
    yes: options.Yes = False,
    output: options.Output = "table",
) -> None:
    """Cancel managed jobs, and take their clusters down.

    \b
        atoll jobs cancel 3 4
        atoll jobs cancel -n train
        atoll jobs cancel --all
    """
    from atoll.tasks import controllers, managed_api

    if sum((bool(job_ids), name is not None, everything)) != 1:
        raise typer.BadParameter("give numbers of jobs, --name or --all; `atoll jobs queue` lists them")
    asked = managed_api.cancel(job_ids, name, all=everything, controller=controller)
    if options.as_json(output):
        shown.print_json({"controller": controllers.of(controller), "cancelled": asked})
        return
    for job_id in asked:
        print(f"Managed job {job_id} is being cancelled")
    for job_id in (each for each in job_ids or () if each not in asked):
        print(f"Managed job {job_id} had ended already: {managed_api.job(job_id, None, controller).status}")
    if not asked and not job_ids:
        print("no unfinished managed jobs")


jobs_app.command("launch")(with_task_flags(launch))
jobs_app.command("queue")(queue)
jobs_app.command("logs")(logs)
jobs_app.command("cancel")(cancel)
