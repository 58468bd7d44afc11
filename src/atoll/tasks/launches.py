"""From a task to jobs on a cluster: the cluster is made, reused or resized, files are copied, jobs are submitted."""

from __future__ import annotations

import dataclasses
import itertools
import os
import secrets as random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.errors import ConfigError
from atoll.pool.interpreters import user_path
from atoll.tasks import clusters
from atoll.tasks.clusters import Decision, Wish
from atoll.tasks.jobs import Job
from atoll.tasks.placing import accelerators_text
from atoll.tasks.spec import ClusterSpec, ClusterStatus

if TYPE_CHECKING:
    from atoll.tasks.task import Task

Say = Callable[[str], None]
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


def silent(text: str) -> None:
    """Whoever calls from Python asks for lines where they want them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a task is launched, beside what the task itself says.

    Attributes:
        infra: ``local`` or ``ssh/NAME``; None: where the cluster is, or what the task says, or local.
        simulate: may accelerators that the machine lacks be simulated?
        setup: run the task's setup, on a cluster where it may have run already too.
        files: copy file_mounts, and not just the workdir.
        strict: scripts end at the first command that fails (``set -e``).
        idle_minutes: stop the cluster after so many idle minutes; ``down``: take it down instead.
        say: called with each line for the user.
        progress: called with bytes copied to the nodes and bytes in all.
    """

    infra: str | None = None
    simulate: bool = True
    setup: bool = True
    files: bool = True
    strict: bool = False
    idle_minutes: int | None = None
    down: bool = False
    say: Say = silent
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One job of a sweep: the variables that it sets."""

    labels: Mapping[str, str]


def is_set_up(name: str | None) -> bool:
    """Is there a cluster of this name that is up, and has a setup succeeded on each of its nodes?"""
    have = None if name is None else clusters.find(name)
    if have is None or have.status is not ClusterStatus.UP:
        return False
    return set(range(have.num_nodes)) <= set(clusters.control_of(have).cluster().setup_done)


def plan(task: Task, name: str, options: Options) -> Decision:
    """What ``launch`` would do with the cluster; changes nothing.

    Raises:
        ConfigError: as ``launch``.
    """
    _refresh(name)
    decision = _decide(task, name, options)
    _check_sources(task, options)
    return decision


def plan_exec(task: Task, name: str, options: Options) -> Decision:
    """What ``exec`` would use of the cluster; changes nothing.

    Raises:
        UnknownCluster, ConfigError: as ``exec_jobs``.
    """
    clusters.refresh(clusters.load(name, to_run=True))
    decision = _to_exec(task, name, options)
    _check_sources(task, dataclasses.replace(options, files=False))
    return decision


def _to_exec(task: Task, name: str, options: Options) -> Decision:
    cluster = clusters.load(name)
    if cluster.status is not ClusterStatus.UP:
        raise ConfigError(f"cluster {name} is {cluster.status}; `atoll launch -c {name} TASK` takes it up again")
    decision = clusters.decide(name, cluster, _wish(task, options))
    if decision.changed:
        missing = decision.lines[0].partition(": ")[2]
        raise ConfigError(
            f"cluster {name} has less than the task asks for ({missing}): `atoll launch -c {name} TASK` resizes it"
        )
    return decision


def _check_sources(task: Task, options: Options) -> None:
    workdir, mounts = task.resolved_workdir(), task.resolved_mounts() if options.files else {}
    if workdir is not None or mounts:
        from atoll.tasks.shipping import check_sources

        check_sources(workdir, mounts, task.variables)


def _refresh(name: str) -> None:
    have = clusters.find(name)
    if have is not None:
        clusters.refresh(have)


def told(task: Task, decision: Decision) -> list[str]:
    """What the user is told before a task starts: where it runs, and what is otherwise than it asks for."""
    cluster = decision.cluster
    what = accelerators_text(decision.accelerator, decision.num_accelerators)
    if decision.num_accelerators:
        what += " a node" + (", simulated" if cluster.simulated else "")
    nodes = f"{task.num_nodes} node" + ("s" if task.num_nodes > 1 else "")
    if task.num_nodes < cluster.num_nodes:
        nodes += f" of {cluster.num_nodes}"
    place = f"Cluster {cluster.name} on {cluster.infra}: {nodes}, {what}"
    return [place, *decision.lines, *task.notes_for(cluster.infra)]


def _decide(task: Task, name: str, options: Options) -> Decision:
    have = clusters.find(name)
    busy = [] if have is None else clusters.unfinished(have)
    return clusters.decide(name, have, _wish(task, options), busy)


def launch_jobs(
    task: Task, name: str, options: Options, variants: Sequence[Variant] = (Variant({}),), parallel: int = 1
) -> list[Job]:
    """Start one job a variant on a cluster, which is made, reused or resized for it.

    Raises:
        ConfigError: the task, the name or the infra can't work, or the cluster is too small and busy.
        ProvisionError: a node can't be used or written to, or no supervisor could be started.
    """
    _check_variants(task, variants)
    _refresh(name)
    jobs: list[Job] = []
    with clusters.locked(name, lambda: options.say(f"waiting for another launch on cluster {name}")):
        before = clusters.find(name)
        decision = _decide(task, name, options)
        for line in told(task, decision):
            options.say(line)
        try:
            cluster = clusters.make_ready(decision.cluster, options.say)
            if decision.changed or cluster != decision.cluster:
                clusters.save(cluster, before)
            _set_autostop(cluster, task, options)
            _ship(cluster, task, options)
            _submit(cluster, task, decision, options, variants, parallel, jobs)
        except BaseException:
            if not jobs and (before is None or before.status is ClusterStatus.DOWN):
                clusters.take_back(name, before)
            raise
    return jobs


def exec_jobs(
    task: Task, name: str, options: Options, variants: Sequence[Variant] = (Variant({}),), parallel: int = 1
) -> list[Job]:
    """Start one job a variant on a cluster that is up.

    Raises:
        UnknownCluster: there is no such cluster.
        ConfigError: it is not up, or has less than the task asks for.
        ProvisionError: as ``launch_jobs``.
    """
    _check_variants(task, variants)
    clusters.refresh(clusters.load(name, to_run=True))
    with clusters.locked(name, lambda: options.say(f"waiting for another launch on cluster {name}")):
        decision = _to_exec(task, name, options)
        cluster = clusters.load(name)
        for line in task.notes:
            options.say(line)
        options = dataclasses.replace(options, setup=False, files=False)
        _ship(cluster, task, options)
        jobs: list[Job] = []
        _submit(cluster, task, decision, options, variants, parallel, jobs)
        return jobs


def variants_of(sweep: Sequence[str]) -> list[Variant]:
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
    return [Variant(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def _check_variants(task: Task, variants: Sequence[Variant]) -> None:
    from atoll.tasks.variables import is_secret_name

    for name in variants[0].labels:
        if name in task.secrets or is_secret_name(name):
            raise ConfigError(
                f"--sweep {name}: a secret can't be swept, its values would stand in the table of results"
            )


def _wish(task: Task, options: Options) -> Wish:
    said = task.resources.infra or ""  # a task written for a cloud runs here too, with a note
    infra = options.infra or (said if said.partition("/")[0] in ("local", "ssh") else None)
    choices = task.resources.choices()
    able = [each for each in choices if each.infra in (None, infra or "local")] or choices[:1]
    return Wish(
        num_nodes=task.num_nodes,
        infra=infra,
        accelerators=tuple((kind.name, kind.num_accelerators) for each in able for kind in each.accelerators[:1]),
        cpus=able[0].cpus,
        memory=able[0].memory,
        simulate=options.simulate,
    )


def _set_autostop(cluster: ClusterSpec, task: Task, options: Options) -> None:
    said = task.resources.autostop
    if options.idle_minutes is not None or options.down:
        clusters.set_autostop(cluster, options.idle_minutes or 0, down=options.down)
    elif said is not None:
        clusters.set_autostop(cluster, said.idle_minutes, down=said.down)


def _ship(cluster: ClusterSpec, task: Task, options: Options) -> None:
    workdir, mounts = task.resolved_workdir(), task.resolved_mounts() if options.files else {}
    if workdir is not None or mounts:
        from atoll.tasks.shipping import ship

        ship(cluster, workdir, mounts, task.variables, say=options.say, progress=options.progress)


def _submit(
    cluster: ClusterSpec,
    task: Task,
    decision: Decision,
    options: Options,
    variants: Sequence[Variant],
    parallel: int,
    jobs: list[Job],
) -> None:
    """Add one job a variant to the cluster, and to ``jobs``."""
    spec, secrets = task.job(infra=cluster.infra)
    base_env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    base_env["PATH"] = user_path()
    spec = dataclasses.replace(
        spec,
        setup=spec.setup if options.setup else None,
        accelerator=decision.accelerator,
        num_accelerators=decision.num_accelerators,
        simulated=cluster.simulated and decision.num_accelerators > 0,
        strict=options.strict,
        base_env={} if cluster.hosts else base_env,  # other machines have paths of their own
    )
    control = clusters.control_of(cluster)
    group = f"sweep-{random.token_hex(2)}" if variants[0].labels else None
    for rank, variant in enumerate(variants):
        one = dataclasses.replace(
            spec,
            env={**spec.env, **variant.labels},
            labels=variant.labels,
            group=group,
            rank_in_group=rank,
            num_in_group=len(variants),
            parallel=parallel,
        )
        jobs.append(Job(cluster.name, control.submit(one, secrets)))
