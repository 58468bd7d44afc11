"""``atoll launch`` and ``atoll exec``: start a task and show it. Imports are late, so that help is fast."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options, shown
from atoll.cli.output import CopyProgress, OutputClosed, spinner
from atoll.cli.task_flags import TaskFlags, tasks_of, with_task_flags
from atoll.core.errors import ConfigError
from atoll.core.exit_codes import ExitCode
from atoll.core.validation import check_kind_of_file, command_line
from atoll.tasks.listing import job_row
from atoll.tasks.spec import ClusterStatus, JobStatus

if TYPE_CHECKING:
    from atoll.tasks.jobs import Job
    from atoll.tasks.requests import JobRequest, Options
    from atoll.tasks.task import Task

Entrypoint = Annotated[
    list[str], typer.Argument(metavar="TASK", help="A task file (YAML), or a command; `--` before one with flags.")
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        help="One job per value, as in LR=0.1,0.01; repeat the flag for the cross product.",
        metavar="KEY=a,b",
    ),
]
Parallel = Annotated[int, typer.Option(min=1, help="Number of jobs of a sweep that run at once.", metavar="N")]

_CANCELLED_S = 10.0  # what comes after a task that failed is cancelled within this time


def register(app: typer.Typer) -> None:
    """Add the commands to ``atoll``."""
    app.command("launch")(with_task_flags(launch))
    app.command("exec")(with_task_flags(exec_))


def launch(
    entrypoint: Entrypoint,
    flags: TaskFlags,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="Cluster to make, reuse or resize; a new one by default.")
    ] = None,
    detach: options.Detach = False,
    idle: Annotated[
        int | None, typer.Option("--idle-minutes-to-autostop", "-i", help="Stop the cluster after N idle minutes.")
    ] = None,
    down: Annotated[
        bool, typer.Option("--down", help="Remove the cluster when idle; without -i, right after the last job.")
    ] = False,
    no_setup: Annotated[bool, typer.Option("--no-setup", help="Skip setup.")] = False,
    max_cost: Annotated[
        float | None,
        typer.Option(
            "--max-cost", min=0.0, help="Save and take the cluster down at this spend, in US$.", metavar="USD"
        ),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Skip setup if it already ran on this cluster.")] = False,
    no_simulate: options.NoSimulate = False,
    sweep: Sweep = None,
    parallel: Parallel = 1,
    yes: options.Yes = False,
    dryrun: options.DryRun = False,
    output: options.Output = "table",
) -> None:
    """Start a task on a cluster and show its log. Makes, reuses or resizes the cluster.

    \b
        atoll launch -c train task.yaml
        atoll launch -c train task.yaml --num-nodes 4 --gpus L4:2 --env LR=0.1
        atoll launch -c t --num-nodes 2 'echo node $SKYPILOT_NODE_RANK'
        atoll launch -c t task.yaml --sweep LR=0.1,0.01 --parallel 2

    Ctrl-C only stops showing the log (exit code 101); `atoll cancel` ends a job. The exit code is 0 after success,
    100 after a failure, 103 after a cancel.
    """
    from atoll.tasks import clusters

    name = clusters.check_name(cluster) if cluster is not None else clusters.fresh_name()
    how = {"simulate": not no_simulate, "setup": not no_setup, "fast": fast, "idle_minutes": idle, "down": down}
    run = _Command(flags, detach, dryrun, sweep, parallel, output, cluster is None).run
    run(entrypoint, name, max_cost=max_cost, **how)


def exec_(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="A cluster that is up.")],
    entrypoint: Entrypoint,
    flags: TaskFlags,
    detach: options.Detach = False,
    sweep: Sweep = None,
    parallel: Parallel = 1,
    dryrun: options.DryRun = False,
    output: options.Output = "table",
) -> None:
    """Start a task on a cluster that is up. Copies its workdir; skips its setup and file_mounts.

    \b
        atoll exec train task.yaml
        atoll exec train --num-nodes 1 -- python evaluate.py --step 100
    """
    _Command(flags, detach, dryrun, sweep, parallel, output).run(entrypoint, cluster, command="exec", as_it_is=True)


def show_plan(entrypoint: Sequence[str], flags: TaskFlags, output: str, *, simulate: bool) -> None:
    """Print where a task would run on a new cluster; start nothing."""
    from atoll.tasks import clusters

    plan = _Command(flags, detach=False, dryrun=True, sweep=None, parallel=1, output=output, is_unnamed=True)
    plan.run(entrypoint, clusters.fresh_name(), simulate=simulate)


def hint_at_files(entrypoint: Sequence[str], tasks: Sequence[Task]) -> None:
    """Point out scripts of this folder in a command, if the folder is not sent to the nodes."""
    script, words = entrypoint[0], " ".join(entrypoint).split()
    if len(entrypoint) == 1 and script.endswith(".py") and Path(script).is_file():
        raise ConfigError(
            f"{script} is a script, not a task file or a command: {command_line('atoll', 'run', script)}, or "
            f"{command_line('atoll', 'launch', '--workdir', '.', 'python', script)}"
        )
    check_kind_of_file(script, "launch")
    if any(task.workdir is not None or task.file_mounts for task in tasks):
        return
    if "cd" in words or "sky_workdir" in " ".join(words):  # it knows where it goes
        return
    here = [word for word in words if word.endswith((".py", ".sh")) and not os.path.isabs(word) and Path(word).exists()]
    if here:
        shown.note(f"{here[0]} is in this folder, which is not sent to the nodes: --workdir . sends it")


@dataclasses.dataclass
class _Command:
    """What ``launch`` and ``exec`` share: from the command line to the exit code."""

    flags: TaskFlags
    detach: bool
    dryrun: bool
    sweep: list[str] | None
    parallel: int
    output: str
    is_unnamed: bool = False

    def __post_init__(self) -> None:
        self._json = options.as_json(self.output)
        self._stream = sys.stderr if self._json else sys.stdout
        self._submitted: list[Job] = []

    def _print(self, line: str) -> None:
        """Print a line that is not the answer: on standard error if that is JSON."""
        print(line, file=self._stream, flush=True)

    def run(self, entrypoint: Sequence[str], cluster: str, **how: Any) -> None:
        """Submit the tasks, show them, and exit as the last one did."""
        try:
            self._run(entrypoint, cluster, **how)
        except OutputClosed:
            then = self._still_running(cluster)
            if then is None and not self._submitted and not self.dryrun:
                then = f"nothing was started on cluster {cluster}"
            if then is not None:
                shown.note(f"atoll: standard output is closed: {then}")
            raise
        except KeyboardInterrupt:  # between two steps that know what to say
            then = self._still_running(cluster)
            if then is None:
                raise
            self._print(f"\n{then[0].upper()}{then[1:]}")
            raise typer.Exit(ExitCode.NOT_FINISHED) from None

    def _still_running(self, cluster: str) -> str | None:
        """Which jobs are still running, and how to see them; None if none is."""
        going = [job.id for job in self._submitted if not job.status.ended]
        if not going:
            return None
        what = f"job {going[0]} is still running" if len(going) == 1 else "the jobs are still running"
        return f"{what}. {shown.to_see(cluster, going)}"

    def _run(self, entrypoint: Sequence[str], cluster: str, **how: Any) -> None:
        from atoll.tasks.launches import announcement, plan
        from atoll.tasks.requests import Options, reason_not_together, task_request, variants_of

        options = Options(
            infra=self.flags.infra,
            strict=self.flags.strict,
            variants=variants_of(self.sweep or ()),
            parallel=self.parallel,
            say=self._print,
            progress=CopyProgress(),
            **how,
        )
        tasks = tasks_of(entrypoint, self.flags)
        if len(tasks) > 1 and self.sweep:
            raise ConfigError(f"--sweep with a pipeline of {len(tasks)} tasks: launch the tasks one by one with it")
        hint_at_files(entrypoint, tasks)
        requests = [task_request(task, options) for task in tasks]
        if self.dryrun:
            decisions = plan(requests, cluster, options)
            for line in announcement(requests, decisions):
                self._print(line)
            self._print("nothing was started (--dryrun)")
            if self._json:
                shown.print_json([shown.decision_row(each) for each in decisions])
            return
        apart = reason_not_together(requests)
        if apart is None:
            self._exit(cluster, *self._run_together(requests, cluster, options))
        elif self.detach:
            raise ConfigError(
                f"--detach with a pipeline of {len(tasks)} tasks that can't be submitted at once: {apart}. Leave "
                f"--detach out, so that this command starts each when the one before has succeeded"
            )
        else:
            self._exit(cluster, *self._run_apart(requests, cluster, options))

    def _run_together(self, requests: Sequence[JobRequest], cluster: str, options: Options) -> tuple[list[Job], int]:
        """Submit all of them at once; they don't need this process any more."""
        jobs = self._submit(requests, cluster, options)
        if self.detach or self.sweep:
            return jobs, ExitCode.OK if self.detach else self._show_sweep(jobs)
        code: int = ExitCode.OK
        later = list(jobs)
        while later and code == ExitCode.OK:
            job = later.pop(0)
            if len(jobs) > 1:
                self._print(f"Task {len(jobs) - len(later)} of {len(jobs)} is job {job.id}")
            code = shown.follow(job, self._stream, fresh=True)
        if later and code == ExitCode.NOT_FINISHED:
            self._print(f"What follows it in the pipeline starts by itself: {command_line('atoll', 'queue', cluster)}")
        elif later:
            for job in later:
                job.wait(_CANCELLED_S)
            self._say_over(len(later))
        return jobs, code

    def _run_apart(self, requests: Sequence[JobRequest], cluster: str, options: Options) -> tuple[list[Job], int]:
        """Submit each when the one before has succeeded, since they need different clusters."""
        done: list[Job] = []
        code: int = ExitCode.OK
        # A cluster that goes down after its last job must not do so between two of these.
        each = dataclasses.replace(options, idle_minutes=None, down=False)
        for number, request in enumerate(requests, 1):
            self._print(f"Task {number} of {len(requests)}: {request.name or 'unnamed'}")
            done += self._submit([request], cluster, each, done)
            code = shown.follow(done[-1], self._stream, fresh=True)
            if code != ExitCode.OK:
                if number < len(requests):
                    self._say_over(len(requests) - number)
                break
        if options.down or options.idle_minutes is not None:
            from atoll.tasks import clusters, lifecycle

            lifecycle.set_autostop(clusters.load(cluster), options.idle_minutes or 0, down=options.down)
        return done, code

    def _submit(
        self, requests: Sequence[JobRequest], cluster: str, options: Options, earlier: Sequence[Job] | None = None
    ) -> list[Job]:
        from atoll.tasks.launches import launch

        try:
            with spinner(f"launching on cluster {cluster}"):
                jobs = launch(requests, cluster, options, earlier)
        except KeyboardInterrupt:
            self._print(f"\nnothing was started on cluster {cluster}: this ended before its job was submitted")
            raise
        self._submitted += jobs
        first, several = jobs[0].id, len(jobs) > 1
        self._print(f"Jobs submitted, IDs: {first}-{jobs[-1].id}" if several else f"Job submitted, ID: {first}")
        if self.detach:
            self._print(shown.to_see(cluster, [job.id for job in jobs]))
        return jobs

    def _say_over(self, left: int) -> None:
        self._print(f"the pipeline ends here: {left} of its tasks {'was' if left == 1 else 'were'} not started")

    def _exit(self, cluster: str, jobs: Sequence[Job], code: int) -> None:
        if not self.detach and code != ExitCode.NOT_FINISHED:
            self._say_next(cluster, jobs)
        if self._json:
            self._print_json(jobs)
        if code != ExitCode.OK:
            raise typer.Exit(code)

    def _say_next(self, name: str, jobs: Sequence[Job]) -> None:
        from atoll.tasks import clusters, lifecycle

        cluster = lifecycle.refresh(clusters.load(name), ask=True)  # its autostop may be due now
        said = f"Job ID{'s' if len(jobs) > 1 else ''}: {', '.join(str(job.id) for job in jobs)}"
        if cluster.status is ClusterStatus.UP:
            runs, enters = command_line("atoll", "exec", name, "TASK"), command_line("atoll", "ssh", name)
            stays = f"Cluster {name} stays up. " if self.is_unnamed else ""
            self._print(f"{said}. {stays}Next: {runs}, {enters}, {command_line('atoll', 'down', name)}")
        else:
            self._print(f"{said}. Cluster {name} is {cluster.status} now")

    def _show_sweep(self, jobs: Sequence[Job]) -> int:
        try:
            statuses = [self._wait(job) for job in jobs]
        except KeyboardInterrupt:
            name = jobs[0].cluster
            self._print(f"\nThe jobs are still running. {shown.to_see(name, [job.id for job in jobs])}")
            return ExitCode.NOT_FINISHED
        if not self._json:
            shown.print_sweep(shown.sweep_rows(jobs))
        if all(status is JobStatus.SUCCEEDED for status in statuses):
            return ExitCode.OK
        failed = any(status.exit_code == ExitCode.FAILED for status in statuses)
        return ExitCode.FAILED if failed else ExitCode.CANCELLED

    def _wait(self, job: Job) -> JobStatus:
        status = job.wait()
        row = job.row()
        values = ", ".join(f"{key}={value}" for key, value in row.spec.labels.items())
        self._print(f"job {row.id} ({values}): {status}" + (f", {row.reason}" if row.reason else ""))
        return status

    def _print_json(self, jobs: Sequence[Job]) -> None:
        if self.sweep:
            shown.print_json(shown.sweep_rows(jobs))
            return
        rows: list[dict[str, Any]] = [{"cluster": job.cluster, **job_row(job.row())} for job in jobs]
        shown.print_json(rows[0] if len(rows) == 1 else rows)
