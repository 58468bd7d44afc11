"""Managed jobs from where they are launched: a controller's cluster is found or made, and given the task.

The controller is the supervisor of a cluster that is called ``atoll-jobs``, on this machine unless another infra is
named. Each of its jobs runs on clusters of its own (``managed``); its queue, logs and cancel are those of any cluster.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ProvisionError, UsageError
from atoll.core.paths import atoll_home
from atoll.core.validation import checks_arguments, command_line
from atoll.providers import registry
from atoll.providers.base import DEFAULT, NodeRequest
from atoll.tasks import api, controllers, placing
from atoll.tasks.clusters import UnknownCluster
from atoll.tasks.jobs import Job
from atoll.tasks.launches import launch as launch_jobs
from atoll.tasks.lifecycle import Say, silent
from atoll.tasks.managed import ManagedSpec
from atoll.tasks.requests import JobRequest, Options, task_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.tasks.rows import JobRow
    from atoll.tasks.spec import ClusterSpec, JobSpec
    from atoll.tasks.task import Task


@checks_arguments
def launch(
    tasks: Task | list[Task],
    name: str | None = None,
    *,
    infra: str | None = None,
    controller: str | None = None,
    num_jobs: int | None = None,
    simulate: bool = True,
    strict: bool = False,
    on_line: Say = silent,
) -> list[Job]:
    """Start a managed job: its task gets a cluster of its own, another one where that is lost, and none is left.

    Args:
        tasks: a ``sky.Task``; of several, each starts when the one before has succeeded.
        name: of the job, in place of the task's.
        infra: where it runs, in place of what the task says.
        controller: the infra whose machine looks after the job; this machine by default.
        num_jobs: so many jobs of the same task, which ``SKYPILOT_JOB_RANK`` tells apart.
        simulate: run on CPU what requests accelerators that a local node lacks.
        strict: a script ends at its first command that fails.
        on_line: called with each line for the user.

    Returns:
        a job for each task, or ``num_jobs`` of them; they outlive this process.

    Raises:
        ConfigError: a task, the name or an infra can't work.
    """
    each_of: list[Any] = tasks if isinstance(tasks, list) and tasks else [tasks]
    for each in each_of:
        api.check_task("jobs.launch", each)
    if num_jobs is not None and num_jobs < 1:
        raise UsageError(f"num_jobs={num_jobs}: expected at least 1")
    if num_jobs is not None and len(each_of) > 1:
        raise UsageError(f"num_jobs={num_jobs} with a pipeline of {len(each_of)} tasks: launch one task with it")
    options = Options(
        command="jobs launch",
        infra=infra,
        simulate=simulate,
        strict=strict,
        announce=False,
        variants=[{}] * num_jobs if num_jobs is not None else [],
        parallel=num_jobs or 1,
        say=on_line,
    )
    with contextlib.ExitStack() as stack:
        requests = [_managed(task, name, controller, options, stack) for task in each_of]
        return launch_jobs(requests, controllers.of(controller), replace(options, infra=controller))


def _managed(
    task: Task, name: str | None, controller: str | None, options: Options, stack: contextlib.ExitStack
) -> JobRequest:
    """The request of a managed job. Its files are copied to the controller's cluster: they stay as they are now."""
    request = task_request(task, options)
    # A place that tells before it takes its nodes, or gives others for them, is asked to: the task recovers from that.
    asked = {"job_recovery": {"max_restarts_on_errors": 0}}
    every = [request.resources, *request.others]
    if not request.in_order:
        with registry.kept():
            every = placing.cheapest_first("", every)
    choices = tuple(replace(each, resources={**asked, **each.resources}) for each in every)
    if controllers.of(controller) == controllers.HERE:
        for infra in dict.fromkeys(each.infra or DEFAULT for each in choices):
            registry.resolve(infra)  # raises
            for line in request.notes(infra):
                options.say(line)
        with contextlib.suppress(ProvisionError), registry.kept():  # what can't be had now may be had later
            placing.decide_any(controllers.HERE, None, choices)
    from atoll.tasks.sync.git import fetch_git
    from atoll.tasks.sync.mounts import resolve_mounts
    from atoll.tasks.sync.task_files import workdir_folder

    files = f"job-{secrets.token_hex(6)}"
    mounts: dict[str, Any] = {}
    if isinstance(request.workdir, str):
        mounts[f"{files}/workdir"] = str(workdir_folder(request.workdir))
    elif request.workdir is not None:
        checkout = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=atoll_home())), "workdir")
        commit = fetch_git(request.workdir["url"], request.workdir.get("ref"), checkout)
        options.say(f"workdir is commit {commit[:12]} of its repository")
        mounts[f"{files}/workdir"] = str(checkout)
    copied: dict[str, str | None] = {}
    for number, mount in enumerate(resolve_mounts(request.mounts, workdir=request.workdir is not None)):
        copied[mount.target] = mount.source
        if mount.source is not None and not mount.is_url:
            copied[mount.target] = f"mount{number}"
            mounts[f"{files}/mount{number}"] = mount.source
    managed = ManagedSpec(choices, files, request.workdir is not None, copied)

    def make(cluster: ClusterSpec) -> tuple[JobSpec, Mapping[str, str]]:
        spec, hidden = request.make(replace(cluster, infra=choices[0].infra or DEFAULT))
        return replace(spec, name=name or spec.name, managed=managed.to_json()), hidden

    return JobRequest(resources=NodeRequest(infra=controller), make=make, mounts=mounts, name=name or task.name)


def _known(infra: str | None) -> str:
    """The cluster of a controller that was used.

    Raises:
        UnknownCluster: no job was launched from there.
    """
    if (name := controllers.of(infra)) not in controllers.used():
        starts = command_line("atoll", "jobs", "launch", *(["--controller", infra] if infra else []), "TASK")
        raise UnknownCluster(f"no managed job was launched from {infra or DEFAULT} yet; `{starts}` starts one")
    return name


@checks_arguments
def queue(controller: str | None = None, *, skip_finished: bool = False) -> list[tuple[str, JobRow]]:
    """Managed jobs, the newest first, each with its controller's cluster; by default of every controller.

    Raises:
        UnknownCluster: no job was launched from there.
    """
    names = controllers.used() if controller is None else [_known(controller)]
    return [(name, row) for name in names for row in api.queue(name, skip_finished=skip_finished)]


@checks_arguments
def job(job_id: int | None = None, name: str | None = None, controller: str | None = None) -> Job:
    """A managed job by its number or name, the newest by default.

    Raises:
        UnknownCluster: there is none.
    """
    if name is None:
        return api.job(_known(controller), job_id)
    found = next((Job(at, row.id) for at, row in queue(controller) if row.name == name), None)
    if found is None:
        raise UnknownCluster(
            f"no managed job is called {name!r}; `{command_line('atoll', 'jobs', 'queue')}` lists them"
        )
    return found


@checks_arguments
def cancel(
    job_ids: Sequence[int] | None = None, name: str | None = None, *, all: bool = False, controller: str | None = None
) -> list[int]:
    """Cancel managed jobs: those given, those of a name, or ``all`` that have not ended. Returns their numbers.

    Raises:
        UnknownCluster: there is no such job.
    """
    at = _known(controller)
    if name is not None:
        job_ids = [row.id for row in api.queue(at, skip_finished=True) if row.name == name]
        if not job_ids:
            job(name=name, controller=controller)  # raises
            return []
    if not job_ids and not all:
        raise UsageError("cancel() needs the numbers of jobs, a name, or all=True")
    return api.cancel(at, job_ids, all=all)
