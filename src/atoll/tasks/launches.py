"""From a task to jobs on a cluster: the cluster is made, reused or resized, files are copied, jobs are submitted."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets as random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.core.errors import AtollError, ConfigError
from atoll.core.secrets import is_secret
from atoll.core.validation import command_line
from atoll.images.interpreters import user_path
from atoll.providers import registry
from atoll.providers.base import DEFAULT
from atoll.tasks import clusters, lifecycle, record
from atoll.tasks.jobs import Job
from atoll.tasks.lifecycle import Say, silent
from atoll.tasks.placing import Decision, Wish, accelerators_text, decide
from atoll.tasks.spec import ClusterSpec, ClusterStatus

if TYPE_CHECKING:
    from atoll.tasks.task import Task

Progress = Callable[[int, int], None]  # bytes done, bytes in all

# What an interpreter, a compiler or a network behind a proxy needs of the caller's environment to be the same there.
_INHERITED = (
    "PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "LANG",
    "LC_ALL",
    "TZ",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How tasks are started, beside what they say themselves.

    Attributes:
        as_it_is: as ``atoll exec`` does it: on a cluster that is up and large enough, without setup and file_mounts.
        infra: ``local`` or ``ssh/NAME``; None: where the cluster is, or what the task says, or local.
        simulate: may accelerators that the machine lacks be simulated?
        setup: run the task's setup; ``fast``: unless the cluster is set up already.
        strict: scripts end at the first command that fails (``set -e``).
        idle_minutes: stop the cluster after so many idle minutes; ``down``: take it down instead.
        variants: one job for each, with the variables that it sets; ``parallel``: so many of them at once.
        say: called with each line for the user.
        progress: called with bytes copied to the nodes and bytes in all.
    """

    as_it_is: bool = False
    infra: str | None = None
    simulate: bool = True
    setup: bool = True
    fast: bool = False
    strict: bool = False
    idle_minutes: int | None = None
    down: bool = False
    variants: Sequence[Mapping[str, str]] = ()
    parallel: int = 1
    say: Say = silent
    progress: Progress | None = None


def plan(tasks: Sequence[Task], name: str, options: Options) -> list[Decision]:
    """What ``start_jobs`` would use of a cluster, or make of it, for each task; changes nothing.

    Raises:
        UnknownCluster, ConfigError: as ``start_jobs``.
    """
    _refresh(name, options)
    decisions = _decide(tasks, name, options)
    for task in tasks:
        workdir, mounts = _files([task], options)
        if workdir is not None or mounts:
            from atoll.tasks.sync.task_files import check_sources

            check_sources(workdir, mounts)
    return decisions


def told(tasks: Sequence[Task], decisions: Sequence[Decision]) -> list[str]:
    """What the user is told before tasks start: where they run, and what is otherwise than they ask for."""
    lines = []
    for number, (task, decision) in enumerate(zip(tasks, decisions, strict=True), 1):
        if len(tasks) > 1:
            lines.append(f"Task {number} of {len(tasks)}: {task.name or 'unnamed'}")
        lines += [_place_text(task, decision), *decision.lines, *task.notes_for(decision.cluster.infra)]
    return lines


def _place_text(task: Task, decision: Decision) -> str:
    cluster = decision.cluster
    what = accelerators_text(decision.accelerator, decision.num_accelerators)
    if cluster.num_accelerators > decision.num_accelerators:
        used = what if decision.num_accelerators else "none"
        what = f"{used} of its {accelerators_text(cluster.accelerator, cluster.num_accelerators)}"
    if cluster.num_accelerators:
        what += " a node" + (", simulated" if cluster.simulated else "")
    nodes = f"{task.num_nodes} node" + ("s" if task.num_nodes > 1 else "")
    if task.num_nodes < cluster.num_nodes:
        nodes += f" of {cluster.num_nodes}"
    return f"Cluster {cluster.name} on {cluster.infra}: {nodes}, {what}"


def why_apart(tasks: Sequence[Task], options: Options) -> str | None:
    """Why tasks can't be submitted at once, each to start when the one before has succeeded; None where they can.

    Files are on the nodes before the first of them runs, and all run on the cluster as it is then.
    """
    workdirs = [each for each in (task.resolved_workdir() for task in tasks) if each is not None]
    if any(each != workdirs[0] for each in workdirs):
        return "they have different workdirs"
    mounts: dict[str, object] = {}
    for task in tasks if not options.as_it_is else ():
        for target, source in task.resolved_mounts().items():
            if mounts.setdefault(target, source) != source:
                return f"they mount different things at {target}"
    kinds = {each.accelerators[0][0] for each in (_wish(task, options) for task in tasks) if each.accelerators}
    return f"they ask for different accelerators ({', '.join(sorted(kinds))})" if len(kinds) > 1 else None


def start_jobs(tasks: Sequence[Task], name: str, options: Options, earlier: Sequence[Job] | None = None) -> list[Job]:
    """Start one job a task, or one a variant of the only task, on a cluster; it is made, reused or resized for them.

    Args:
        tasks: of several, each starts when the one before has succeeded (``why_apart`` says whether they can).
        name: of the cluster.
        options: how.
        earlier: jobs of the pipeline that ``tasks`` go on with; None where there is none.

    Raises:
        UnknownCluster: there is no such cluster, and it is to be used as it is.
        ConfigError: a task, the name or the infra can't work, or the cluster is too small and busy.
        ProvisionError: a node can't be used or written to, or no supervisor could be started.
    """
    _check_variants(tasks, options)
    _refresh(name, options)
    jobs: list[Job] = []
    with (
        clusters.locked(name, "exec" if options.as_it_is else "launch", options.say),
        clusters.hosts_asked(name, at_once=not options.as_it_is),
    ):
        before = clusters.find(name)
        decisions = _decide(tasks, name, options)
        for line in told(tasks, decisions):
            options.say(line)
        cluster = decisions[-1].cluster
        try:
            if not options.as_it_is:
                cluster = clusters.make_ready(cluster, options.say)
                if (
                    cluster != before or not cluster.allocation.shares_machine
                ):  # a head whose home is this one's writes to the same file
                    clusters.save(cluster, before)
                _set_autostop(cluster, tasks, options)
            _ship(cluster, tasks, options)
            _submit(cluster, tasks, decisions, options, earlier, jobs)
        except BaseException:
            if jobs:  # not all that were asked for
                with contextlib.suppress(AtollError):
                    clusters.control_of(cluster).cancel([job.id for job in jobs])
            elif before is None or before.status is ClusterStatus.DOWN:
                _take_back(name, before, options.say)
            raise
    return jobs


def _take_back(name: str, before: ClusterSpec | None, say: Say) -> None:
    try:
        lifecycle.take_back(name, before)
    except (AtollError, OSError) as error:  # why the launch failed is what has to be seen
        say(f"cluster {name}: {error}; {record.removes(name)}")


def variants_of(sweep: Sequence[str]) -> list[dict[str, str]]:
    """The product of every ``KEY=a,b`` of a sweep, the last key changing fastest.

    Raises:
        ConfigError: one that is not of this form, or a key given twice.
    """
    axes: dict[str, list[str]] = {}
    for text in sweep:
        key, equals, values = text.partition("=")
        if not equals or not key.isidentifier() or not values:
            raise ConfigError(f"--sweep {text!r}: expected KEY=value,value as in --sweep LR=0.1,0.01")
        if key in axes:
            raise ConfigError(f"--sweep {key} is given twice: put all its values into one, as in --sweep {key}=a,b")
        axes[key] = values.split(",")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()) if values]


def _check_variants(tasks: Sequence[Task], options: Options) -> None:
    for name in options.variants[0] if options.variants else ():
        if name in tasks[0].secrets or is_secret(name):
            raise ConfigError(
                f"--sweep {name}: a secret can't be swept, its values would stand in the table of results"
            )


def _refresh(name: str, options: Options) -> None:
    have = clusters.load(name, to_run=True) if options.as_it_is else clusters.find(name)
    if have is not None:
        lifecycle.refresh(have)


def _decide(tasks: Sequence[Task], name: str, options: Options) -> list[Decision]:
    """For each task, what the cluster is for it and those before."""
    have = clusters.up_or_stopped(name) if options.as_it_is else clusters.find(name)
    if options.as_it_is and have is not None and have.status is ClusterStatus.STOPPED:
        raise ConfigError(f"cluster {name} is stopped; `{command_line('atoll', 'start', name)}` takes it up again")
    busy = [] if have is None or options.as_it_is else clusters.unfinished(have)
    decisions = []
    for task in tasks:
        decision = decide(name, have, _wish(task, options), busy)
        if options.as_it_is and decision.changed:
            missing = decision.lines[0].partition(": ")[2]
            raise ConfigError(
                f"cluster {name} has less than the task asks for ({missing}): "
                f"`{command_line('atoll', 'launch', '-c', name, 'TASK')}` resizes it"
            )
        have = decision.cluster
        decisions.append(decision)
    return decisions


def _wish(task: Task, options: Options) -> Wish:
    said = task.resources.infra or ""  # a task written for a cloud runs here too, with a note
    infra = options.infra or (said if registry.is_known(said) else None)
    choices = task.resources.choices()
    able = [each for each in choices if each.infra in (None, infra or DEFAULT)] or choices[:1]
    return Wish(
        num_nodes=task.num_nodes,
        infra=infra,
        accelerators=tuple((kind.name, kind.num_accelerators) for each in able for kind in each.requested[:1]),
        cpus=able[0].cpus,
        memory=able[0].memory,
        simulate=options.simulate,
    )


def _set_autostop(cluster: ClusterSpec, tasks: Sequence[Task], options: Options) -> None:
    said = next((task.resources.autostop for task in tasks if task.resources.autostop is not None), None)
    if options.idle_minutes is not None or options.down:
        lifecycle.set_autostop(cluster, options.idle_minutes or 0, down=options.down)
    elif said is not None:
        lifecycle.set_autostop(cluster, said.idle_minutes, down=said.down)


def _files(tasks: Sequence[Task], options: Options) -> tuple[str | dict[str, str] | None, dict[str, Any]]:
    """The workdir and the mounts of tasks that can be together."""
    workdirs = [each for each in (task.resolved_workdir() for task in tasks) if each is not None]
    mounts = {} if options.as_it_is else {at: what for task in tasks for at, what in task.resolved_mounts().items()}
    return workdirs[0] if workdirs else None, mounts


def _ship(cluster: ClusterSpec, tasks: Sequence[Task], options: Options) -> None:
    workdir, mounts = _files(tasks, options)
    if workdir is not None or mounts:
        from atoll.tasks.sync.task_files import ship

        ship(cluster, workdir, mounts, say=options.say, progress=options.progress)


def _submit(
    cluster: ClusterSpec,
    tasks: Sequence[Task],
    decisions: Sequence[Decision],
    options: Options,
    earlier: Sequence[Job] | None,
    jobs: list[Job],
) -> None:
    """Add the jobs to the cluster, and to ``jobs``."""
    control = clusters.control_of(cluster)
    base_env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    base_env["PATH"] = user_path()
    setup = options.setup and not options.as_it_is and not (options.fast and _is_set_up(control.cluster()))
    most = cluster.allocation.max_restarts
    group = f"sweep-{random.token_hex(2)}" if options.variants else None
    in_pipeline = len(tasks) > 1 or earlier is not None
    task_ids = [job.row().task_id for job in earlier or ()]
    for task, decision in zip(tasks, decisions, strict=True):
        spec, secrets = task.job(infra=cluster.infra)
        spec = dataclasses.replace(
            spec,
            setup=spec.setup if setup else None,
            accelerator=decision.accelerator,
            num_accelerators=decision.num_accelerators,
            simulated=cluster.simulated,  # what the job sees as ATOLL_SIMULATED, with no GPU asked for too
            restarts=dataclasses.replace(spec.restarts, on_lost_nodes=most),
            strict=options.strict,
            base_env=base_env if cluster.allocation.shares_machine else {},  # other machines have paths of their own
        )
        if in_pipeline:
            env = {**spec.env, "SKYPILOT_TASK_IDS": "\n".join(task_ids)}
            spec = dataclasses.replace(spec, env=env, after=jobs[-1].id if jobs else None)
        for rank, labels in enumerate(options.variants or [{}]):
            one = dataclasses.replace(
                spec,
                env={**spec.env, **labels},
                labels=labels,
                group=group,
                rank_in_group=rank,
                num_in_group=max(1, len(options.variants)),
                parallel=options.parallel,
            )
            jobs.append(Job(cluster.name, control.submit(one, secrets)))
        if task is not tasks[-1]:
            task_ids.append(jobs[-1].row().task_id)


def _is_set_up(cluster: ClusterSpec) -> bool:
    """Has a setup succeeded on each of its nodes?"""
    return set(range(cluster.num_nodes)) <= set(cluster.setup_done)
