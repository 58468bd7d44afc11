"""The operations behind the commands, the Python SDK (``sdk``) and the dashboard."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.errors import AtollError, ProvisionError, UsageError
from atoll.core.validation import checks_arguments
from atoll.providers.base import AllocationState
from atoll.tasks import clusters, launches, lifecycle, waiting
from atoll.tasks.client import tell
from atoll.tasks.jobs import Job, find_job
from atoll.tasks.lifecycle import Say, silent
from atoll.tasks.logs import RUN_LOG
from atoll.tasks.requests import Options, task_request
from atoll.tasks.spec import ClusterSpec, ClusterStatus
from atoll.tasks.store import VARIABLES
from atoll.tasks.waiting import WaitingLaunch

if TYPE_CHECKING:
    from atoll.tasks.rows import JobRow
    from atoll.tasks.task import Task

__all__ = [
    "Job",
    "autostop",
    "cancel",
    "exec",
    "job",
    "launch",
    "plan",
    "queue",
    "status",
    "sync_down_logs",
    "waiting_launches",
]


def launch(task: Task, cluster_name: str | None = None, **how: Any) -> Job:
    """Start a task on a cluster, which is made, reused or resized for it; ``how`` as in ``sky.launch``.

    Raises:
        ConfigError: the task, the name or the infra can't work, or the cluster is too small and busy.
    """
    options = _options("launch", task, **how)
    return launches.launch([task_request(task, options)], cluster_name or clusters.fresh_name(), options)[0]


def exec(task: Task, cluster_name: str, *, strict: bool = False, on_line: Say = silent) -> Job:
    """Start a task on a cluster that is up: copies its workdir, skips its setup and file_mounts.

    Raises:
        UnknownCluster: there is no such cluster.
        ConfigError: the cluster is not up, or has less than the task needs.
    """
    options = _options("exec", task, as_it_is=True, strict=strict, on_line=on_line)
    return launches.launch([task_request(task, options)], cluster_name, options)[0]


def plan(task: Task, cluster_name: str | None = None, *, as_it_is: bool = False, **how: Any) -> str:
    """Decide and tell where ``launch``, or ``exec`` (``as_it_is``), would run a task; the cluster's name.

    Raises:
        ConfigError: as ``launch``.
    """
    options = _options("exec" if as_it_is else "launch", task, as_it_is=as_it_is, **how)
    name, requests = cluster_name or clusters.fresh_name(), [task_request(task, options)]
    for line in launches.announcement(requests, launches.plan(requests, name, options)):
        options.say(line)
    return name


def _options(
    command: str,
    task: object,
    *,
    as_it_is: bool = False,
    infra: str | None = None,
    idle_minutes_to_autostop: int | None = None,
    down: bool = False,
    no_setup: bool = False,
    fast: bool = False,
    simulate: bool = True,
    strict: bool = False,
    on_line: Say = silent,
) -> Options:
    check_task(command, task)
    return Options(
        command=command,
        as_it_is=as_it_is,
        infra=infra,
        simulate=simulate,
        setup=not no_setup,
        fast=fast,
        strict=strict,
        idle_minutes=idle_minutes_to_autostop,
        down=down,
        say=on_line,
    )


def check_task(call: str, task: object) -> None:
    """Refuses what is no task where ``sky.CALL`` takes one."""
    from atoll.tasks.task import Task

    if not isinstance(task, Task):
        raise UsageError(f"sky.{call}() takes a sky.Task, not {type(task).__name__}: {_task_hint(call, task)}")


def _task_hint(call: str, task: object) -> str:
    if isinstance(task, dict):
        return f"write sky.{call}(sky.Task.from_yaml_config(config))"
    if isinstance(task, (list, tuple)):
        return f"for each task of a pipeline, write sky.{call}(task); for a command, sky.Task(run='python train.py')"
    if not isinstance(task, (str, Path)):
        return f"write sky.{call}(sky.Task(run=...)), or sky.Task.from_yaml(path)"
    text = str(task)
    if text.lower().endswith((".yaml", ".yml")):
        return f"write sky.{call}(sky.Task.from_yaml({text!r}))"
    if text.endswith(".py") and Path(text).is_file():
        return f"for a script, write sky.{call}(sky.Task(run={'python ' + text!r}, workdir='.'))"
    return f"for a command, write sky.{call}(sky.Task(run={text!r}))"


# ------------------------------------------------------------------------------------------ clusters afterwards
@checks_arguments
def status(
    cluster_names: str | Sequence[str] | None = None,
    *,
    all: bool = False,
    on_error: Callable[[str, AtollError | OSError], None] | None = None,
) -> list[ClusterSpec]:
    """Records of clusters; by default of all that are not down, with ``all`` of those too.

    Args:
        on_error: called with the name of a cluster that can't be read and why, instead of raising.

    Raises:
        UnknownCluster: a name that no cluster has.
        AtollError: the record of a cluster is damaged.
    """
    if cluster_names is None:
        awaited = {each.name for each in waiting.launches()}
        names = [each for each in clusters.all_names() if each not in awaited or not clusters.load(each).is_awaited]
    else:
        names = clusters.matching([cluster_names] if isinstance(cluster_names, str) else cluster_names)
    found, began = [], time.monotonic()
    for name in names:
        try:
            cluster = clusters.load(name)
            try:
                cluster = lifecycle.refresh(cluster, max_age_s=time.monotonic() - began)
            except ProvisionError as error:
                tell(f"cluster {name} is shown as it was known last: {error}")
            found.append(cluster)
        except (AtollError, OSError) as error:
            if on_error is None:
                raise
            on_error(name, error)
    return [each for each in found if all or cluster_names is not None or each.status is not ClusterStatus.DOWN]


def waiting_launches(cluster_names: str | Sequence[str] | None = None) -> list[WaitingLaunch]:
    """Launches that wait for the nodes of clusters that are not there yet; names may be patterns."""
    given = [cluster_names] if isinstance(cluster_names, str) else cluster_names
    found = [each for each in waiting.launches() if given is None or any(fnmatch(each.name, name) for name in given)]
    return [each for each in found if (have := clusters.find(each.name)) is None or not have.is_there]


@checks_arguments
def queue(cluster_name: str, *, skip_finished: bool = False) -> list[JobRow]:
    """The jobs of a cluster, the newest first.

    Raises:
        UnknownCluster: there is no such cluster.
    """
    cluster = lifecycle.refresh(clusters.load(cluster_name))
    if cluster.allocation.state is AllocationState.PENDING and not cluster.is_awaited:
        tell(f"cluster {cluster_name} waits for nodes of {cluster.infra}: {cluster.allocation.reason}")
    rows = clusters.control_of(cluster).queue()
    return [row for row in rows if not (skip_finished and row.status.ended)]


@checks_arguments
def job(cluster_name: str, job_id: int | None = None) -> Job:
    """A job of a cluster, the newest by default.

    Raises:
        UnknownCluster: there is no such cluster or job.
    """
    cluster = lifecycle.refresh(clusters.load(cluster_name))
    return Job(cluster_name, find_job(cluster, job_id).id)


@checks_arguments
def cancel(cluster_name: str, job_ids: Sequence[int] | None = None, *, all: bool = False) -> list[int]:
    """Cancel jobs: those given, ``all`` unfinished ones, or the newest unfinished one. Returns their numbers.

    The newest is cancelled with its whole pipeline; later jobs of a pipeline are cancelled with an earlier one.

    Raises:
        UnknownCluster: there is no such cluster or job.
    """
    cluster = lifecycle.refresh(clusters.load(cluster_name))
    for job_id in job_ids or ():
        find_job(cluster, job_id)
    if all:
        return clusters.control_of(cluster).cancel(None)
    if job_ids:
        return clusters.control_of(cluster).cancel(list(job_ids))
    going = {row.id: row for row in clusters.unfinished(cluster)}
    chosen = [max(going)] if going else []
    while chosen and (before := going[chosen[0]].spec.after) in going:
        chosen.insert(0, before)
    return clusters.control_of(cluster).cancel(chosen) if chosen else []


@checks_arguments
def sync_down_logs(cluster_name: str, job_id: int) -> Path:
    """Copy a job's log files to ``./sky_logs/CLUSTER/JOB``; returns that folder.

    Raises:
        UnknownCluster: there is no such cluster or job.
    """
    cluster = clusters.load(cluster_name)
    find_job(cluster, job_id)
    dest = Path("sky_logs", cluster_name, str(job_id))
    if not cluster.allocation.supervised_here:
        dest.mkdir(mode=0o700, parents=True, exist_ok=True)
        (dest / RUN_LOG).touch(0o600)
        with open(dest / RUN_LOG, "wb") as file:
            clusters.control_of(cluster).follow(job_id, file.write, follow=False)
        return dest
    source = clusters.folder_of(cluster_name) / "jobs" / str(job_id)
    shutil.copytree(source, dest, ignore=shutil.ignore_patterns(VARIABLES), dirs_exist_ok=True)
    return dest


@checks_arguments
def autostop(cluster_name: str, idle_minutes: int, down: bool = False) -> None:
    """Stop a cluster, or remove it (``down``), once no job has run for ``idle_minutes``; never if negative.

    Raises:
        UnknownCluster: there is no such cluster, or it is down.
    """
    lifecycle.set_autostop(clusters.up_or_stopped(cluster_name), idle_minutes, down=down)
