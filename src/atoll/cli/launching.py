"""``atoll launch`` and ``atoll exec``: start a task and show it. Imports are late, so that help is fast."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import shown
from atoll.cli.task_flags import TaskFlags, tasks_of, with_task_flags
from atoll.core.errors import ConfigError
from atoll.tasks.spec import EXIT_CANCELLED, EXIT_FAILED, EXIT_NOT_FINISHED, EXIT_OK, ClusterStatus, JobStatus

if TYPE_CHECKING:
    from atoll.tasks.jobs import Job
    from atoll.tasks.launches import Options, Variant
    from atoll.tasks.task import Task

Entrypoint = Annotated[
    list[str], typer.Argument(metavar="TASK", help="A task file (YAML), or a command; `--` before one with flags.")
]
Detach = Annotated[bool, typer.Option("--detach-run", "-d", help="Return once the job is submitted.")]
Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", help="One job a value, as in LR=0.1,0.01; several make the product.", metavar="KEY=a,b"),
]
Parallel = Annotated[int, typer.Option(min=1, help="Jobs of a sweep that run at once.", metavar="N")]
DryRun = Annotated[bool, typer.Option("--dryrun", help="Say what would be done, and do nothing.")]


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
    detach: Detach = False,
    idle: Annotated[
        int | None, typer.Option("--idle-minutes-to-autostop", "-i", help="Stop it after so many idle minutes.")
    ] = None,
    down: Annotated[bool, typer.Option("--down", help="Take it down instead; after its last job without -i.")] = False,
    no_setup: Annotated[bool, typer.Option("--no-setup", help="Leave the task's setup out.")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="Leave setup out where the cluster is set up already.")] = False,
    no_simulate: Annotated[
        bool, typer.Option("--no-simulate", help="Refuse accelerators that this machine lacks.")
    ] = False,
    sweep: Sweep = None,
    parallel: Parallel = 1,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Nothing is asked; taken because scripts give it.")] = False,
    dryrun: DryRun = False,
    output: shown.Output = "table",
) -> None:
    """Start a task on a cluster, and show its log. The cluster is made, reused or resized for it.

    \b
        atoll launch -c train task.yaml
        atoll launch -c train task.yaml --num-nodes 4 --gpus L4:2 --env LR=0.1
        atoll launch -c t --num-nodes 2 'echo node $SKYPILOT_NODE_RANK'
        atoll launch -c t task.yaml --sweep LR=0.1,0.01 --parallel 2
    Ctrl-C only stops showing the log (exit code 101); `atoll cancel` ends a job. The exit code is 0 after success,
    100 after a failure, 103 after a cancel.
    """
    from atoll.tasks import clusters
    from atoll.tasks.launches import Options, is_set_up, launch_jobs, plan, told

    command = _Command(flags, detach, sweep, parallel, output)
    tasks = command.tasks(entrypoint)
    _hint_at_files(entrypoint, tasks)
    name = clusters.check_name(cluster) if cluster is not None else clusters.fresh_name()
    options = Options(
        infra=flags.infra,
        simulate=not no_simulate,
        setup=not no_setup and not (fast and is_set_up(name)),
        strict=flags.strict,
        idle_minutes=idle,
        down=down,
        say=command.tell,
        progress=shown.CopyProgress(),
    )
    if dryrun:
        for task in tasks:
            for line in told(task, plan(task, name, options)):
                command.tell(line)
        command.tell("nothing was started (--dryrun)")
        return
    command.run(tasks, name, options, launch_jobs)


def exec_(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="A cluster that is up.")],
    entrypoint: Entrypoint,
    flags: TaskFlags,
    detach: Detach = False,
    sweep: Sweep = None,
    parallel: Parallel = 1,
    dryrun: DryRun = False,
    output: shown.Output = "table",
) -> None:
    """Start a task on a cluster that is up. Its workdir is copied, its setup and file_mounts are left out.

    \b
        atoll exec train task.yaml
        atoll exec train --num-nodes 1 -- python evaluate.py --step 100
    """
    from atoll.tasks.launches import Options, exec_jobs, plan_exec, told

    command = _Command(flags, detach, sweep, parallel, output)
    options = Options(infra=flags.infra, strict=flags.strict, say=command.tell, progress=shown.CopyProgress())
    tasks = command.tasks(entrypoint)
    _hint_at_files(entrypoint, tasks)
    if dryrun:
        for task in tasks:
            for line in told(task, plan_exec(task, cluster, options)):
                command.tell(line)
        command.tell("nothing was started (--dryrun)")
        return
    command.run(tasks, cluster, options, exec_jobs)


def _hint_at_files(entrypoint: Sequence[str], tasks: Sequence[Task]) -> None:
    """Scripts of this folder that a command names, though the folder is not sent along."""
    words = " ".join(entrypoint).split()
    if len(words) == 1 and words[0].endswith(".py") and Path(words[0]).is_file():
        raise ConfigError(
            f"{words[0]} is a script, not a task file or a command: atoll run {words[0]}, or "
            f"atoll launch --workdir . python {words[0]}"
        )
    if any(task.workdir is not None or task.file_mounts for task in tasks):
        return
    if "cd" in words or "sky_workdir" in " ".join(words):  # it knows where it goes
        return
    here = [word for word in words if word.endswith((".py", ".sh")) and not os.path.isabs(word) and Path(word).exists()]
    if here:
        shown.note(f"{here[0]} is in this folder, which is not sent to the nodes: --workdir . sends it")


class _Command:
    """What ``launch`` and ``exec`` share: from the command line to the exit code."""

    def __init__(self, flags: TaskFlags, detach: bool, sweep: list[str] | None, parallel: int, output: str) -> None:
        from atoll.tasks.launches import Variant, variants_of

        self._flags = flags
        self._detach = detach
        self._json = shown.as_json(output)
        self._stream = sys.stderr if self._json else sys.stdout
        self._is_sweep = bool(sweep)
        self._variants: Sequence[Variant] = variants_of(sweep) if sweep else [Variant({})]
        self._parallel = parallel

    def tell(self, line: str) -> None:
        """A line beside the answer: where that is JSON, standard output is its alone."""
        print(line, file=self._stream, flush=True)

    def tasks(self, entrypoint: Sequence[str]) -> list[Task]:
        """The tasks that were meant."""
        tasks = tasks_of(entrypoint, self._flags)
        if len(tasks) > 1 and (self._detach or self._is_sweep):
            flag = "--sweep" if self._is_sweep else "--detach-run"
            raise ConfigError(
                f"{flag} with a pipeline of {len(tasks)} tasks: this command starts each when the one before has "
                f"succeeded; leave {flag} out, or launch the tasks one by one"
            )
        return tasks

    def run(self, tasks: Sequence[Task], cluster: str, options: Options, submit: Callable[..., list[Job]]) -> None:
        """Submit the tasks one after the other, show them, and exit as the last one did."""
        done: list[Job] = []
        code = EXIT_OK
        # A cluster that goes down after its last job must not do so between two of these.
        each = options if len(tasks) == 1 else dataclasses.replace(options, idle_minutes=None, down=False)
        for number, task in enumerate(tasks, 1):
            if len(tasks) > 1:
                self.tell(f"Task {number} of {len(tasks)}: {task.name or 'unnamed'}")
                task.update_envs({"SKYPILOT_TASK_IDS": "\n".join(job.row().task_id for job in done)})
            try:
                jobs = submit(task, cluster, each, self._variants, self._parallel)
            except KeyboardInterrupt:
                self.tell(f"\nnothing was started on cluster {cluster}: this ended before its job was submitted")
                raise
            done += jobs
            code = self._show(jobs)
            left = len(tasks) - number
            if code != EXIT_OK and left:
                self.tell(f"the pipeline ends here: {left} of its tasks {'was' if left == 1 else 'were'} not started")
                break
        if not self._detach and code != EXIT_NOT_FINISHED:
            self._say_next(cluster, done, options)
        if self._json:
            self._print_json(done)
        if code != EXIT_OK:
            raise typer.Exit(code)

    def _show(self, jobs: Sequence[Job]) -> int:
        first = jobs[0]
        if self._is_sweep:
            self.tell(f"Jobs submitted, IDs: {first.id}-{jobs[-1].id}")
        else:
            self.tell(f"Job submitted, ID: {first.id}")
        if self._detach:
            self.tell(f"log: atoll logs {first.cluster} {first.id}   end it: atoll cancel {first.cluster} {first.id}")
            return EXIT_OK
        return self._show_sweep(jobs) if self._is_sweep else shown.follow(first, self._stream, fresh=True)

    def _say_next(self, name: str, jobs: Sequence[Job], options: Options) -> None:
        from atoll.tasks import clusters

        cluster = clusters.load(name)
        if len(jobs) > 1 and (options.down or options.idle_minutes is not None):
            cluster = clusters.set_autostop(cluster, options.idle_minutes or 0, down=options.down)
        cluster = clusters.refresh(cluster, ask=True)  # it may be due now
        said = f"Job ID{'s' if len(jobs) > 1 else ''}: {', '.join(str(job.id) for job in jobs)}"
        if cluster.status is ClusterStatus.UP:
            self.tell(f"{said}. Next: atoll exec {name} TASK, atoll ssh {name}, atoll down {name}")
        else:
            self.tell(f"{said}. Cluster {name} is {cluster.status} now")

    def _show_sweep(self, jobs: Sequence[Job]) -> int:
        try:
            statuses = self._await(jobs)
        except KeyboardInterrupt:
            name = jobs[0].cluster
            self.tell(f"\nThe jobs go on. To see them: atoll queue {name}; to cancel them: atoll cancel {name} --all")
            return EXIT_NOT_FINISHED
        if not self._json:
            shown.print_sweep(shown.sweep_rows(jobs))
        if all(status is JobStatus.SUCCEEDED for status in statuses):
            return EXIT_OK
        failed = any(status.exit_code == EXIT_FAILED for status in statuses)
        return EXIT_FAILED if failed else EXIT_CANCELLED

    def _await(self, jobs: Sequence[Job]) -> list[JobStatus]:
        ended: dict[int, JobStatus] = {}
        pause_s = 0.01
        while len(ended) < len(jobs):
            for job in jobs:
                if job.id in ended:
                    continue
                row = job.row()
                if row.status.ended:
                    ended[job.id] = row.status
                    values = ", ".join(f"{key}={value}" for key, value in row.spec.labels.items())
                    self.tell(f"job {job.id} ({values}): {row.status}" + (f", {row.reason}" if row.reason else ""))
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.25)
        return list(ended.values())

    def _print_json(self, jobs: Sequence[Job]) -> None:
        if self._is_sweep:
            shown.print_json(shown.sweep_rows(jobs))
            return
        rows: list[dict[str, Any]] = [{"cluster": job.cluster, **shown.job_row(job.row())} for job in jobs]
        shown.print_json(rows[0] if len(rows) == 1 else rows)
