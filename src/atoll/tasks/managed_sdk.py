"""``sky.jobs``: SkyPilot's Python SDK for managed jobs, which run on clusters of their own and survive those."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from atoll.core.errors import UsageError
from atoll.core.validation import checks_arguments
from atoll.tasks import api, managed_api
from atoll.tasks.dag import Dag
from atoll.tasks.lifecycle import Say, silent
from atoll.tasks.sdk import ClusterHandle, Lines, Record, RequestId, job_lines, job_record, writer
from atoll.tasks.task import Task

__all__ = ["cancel", "download_logs", "launch", "queue", "tail_logs"]


@checks_arguments
def launch(
    task: Task | list[Task] | Dag,
    name: str | None = None,
    pool: str | None = None,
    num_jobs: int | None = None,
    *,
    infra: str | None = None,
    controller: str | None = None,
    simulate: bool = True,
    strict: bool = False,
    on_line: Say = silent,
) -> RequestId:
    """Start a managed job. The result: ``(job_id, handle)`` of the job and of its controller's cluster.

    Args:
        task: a ``sky.Task``; of several, or of a ``sky.Dag``, each starts when the one before has succeeded.
        name: of the job, in place of the task's.
        num_jobs: so many jobs of the same task; the result has the list of their numbers.
        infra: where it runs, in place of what the task says.
        controller: the infra whose machine looks after the job; this machine by default.
        simulate, strict, on_line: as in ``sky.launch``.
        pool: SkyPilot's worker pools, which are not here.

    Raises:
        ConfigError: a task, the name or an infra can't work.
    """
    if pool is not None:
        raise UsageError(f"jobs.launch(): pool={pool!r}: there are no pools of workers; leave it out")
    how: dict[str, Any] = {"infra": infra, "controller": controller, "simulate": simulate, "strict": strict}
    tasks = task.tasks if isinstance(task, Dag) else task
    with Lines(on_line) as lines:
        jobs = managed_api.launch(tasks, name, num_jobs=num_jobs, on_line=lines, **how)
    handle = ClusterHandle.named(jobs[0].cluster)
    return RequestId.of(([job.id for job in jobs] if num_jobs is not None else jobs[0].id, handle), lines)


@checks_arguments
def queue(
    refresh: bool = False,
    skip_finished: bool = False,
    all_users: bool = False,
    job_ids: Sequence[int] | None = None,
    *,
    controller: str | None = None,
) -> RequestId:
    """Managed jobs, the newest first, as ``Record``: ``job_id``, ``job_name``, ``status``, ``recovery_count``, …

    Args:
        refresh, all_users: SkyPilot's, without effect: every call looks, and lists the jobs of all users.
        skip_finished: only unfinished jobs.
        job_ids: only these.
        controller: the infra of a controller; by default all that were used.

    Raises:
        UnknownCluster: no job was launched from there.
    """
    rows = managed_api.queue(controller, skip_finished=skip_finished)
    wanted = [(cluster, row) for cluster, row in rows if job_ids is None or row.id in job_ids]
    records = [Record(job_record(cluster, row), recovery_count=row.restarts) for cluster, row in wanted]
    return RequestId.of(records)


@checks_arguments
def cancel(
    name: str | None = None,
    job_ids: Sequence[int] | None = None,
    all: bool = False,
    all_users: bool = False,
    *,
    controller: str | None = None,
) -> RequestId:
    """Cancel managed jobs: those of a name, those given, or all that have not ended. The result: their numbers.

    Raises:
        UnknownCluster: there is no such job.
    """
    return RequestId.of(managed_api.cancel(job_ids, name, all=all or all_users, controller=controller))


@checks_arguments
def tail_logs(
    name: str | None = None,
    job_id: int | None = None,
    follow: bool = True,
    controller: Any = False,
    refresh: bool = False,
    tail: int | None = None,
    output_stream: Any = None,
    *,
    preload_content: bool = True,
) -> int | Iterator[str]:
    """Write a managed job's log, the newest job's by default; as ``sky.tail_logs``.

    Args:
        name, job_id: the job.
        follow: wait for the end, over every attempt.
        controller: the infra of its controller; True and False, SkyPilot's, are this machine.
        tail, output_stream, preload_content: as in ``sky.tail_logs``.
        refresh: SkyPilot's, without effect.

    Raises:
        UnknownCluster: there is no such job.
    """
    job = managed_api.job(job_id, name, controller if isinstance(controller, str) else None)
    if not preload_content:
        return job_lines(job, follow, tail or 0)
    return job.follow(writer("jobs.tail_logs", output_stream), follow=follow, tail=tail or 0).exit_code


@checks_arguments
def download_logs(
    name: str | None = None, job_id: int | None = None, refresh: bool = False, *, controller: str | None = None
) -> dict[int, str]:
    """Copy the log files of a managed job to ``./sky_logs``, by default of the newest; its folder.

    Raises:
        UnknownCluster: there is no such job.
    """
    job = managed_api.job(job_id, name, controller)
    return {job.id: str(api.sync_down_logs(job.cluster, job.id))}
