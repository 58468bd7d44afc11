"""What is launched, as ``launches.launch`` takes it: requests made of tasks or of a command line, and how."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ConfigError
from atoll.core.paths import user_name
from atoll.core.secrets import is_secret
from atoll.providers import registry
from atoll.providers.accelerators import AcceleratorSpec
from atoll.providers.base import Accelerators, NodeRequest
from atoll.tasks.lifecycle import Say, silent
from atoll.tasks.spec import ClusterSpec, JobSpec, is_none

if TYPE_CHECKING:
    from atoll.tasks.task import Task

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job that is to be launched: what it needs, and how it is made for the cluster that it gets.

    Attributes:
        resources: nodes, and what is asked of each; ``others`` would do as well: the cheapest of them all is taken, or
            where it is ``in_order`` the first that can be had.
        workdir, mounts: what is copied to every node; ``excluded`` is a folder in the workdir that is not.
        packages: requirements that its Python has on hosts; installed where they are missing.
        make: the job for a cluster, and its secrets apart.
        notes: lines about what an infra can't honour.
        autostop: idle minutes, and whether the cluster goes down instead of being stopped; None where not said.
        name: of the task, or None.
    """

    resources: NodeRequest
    others: tuple[NodeRequest, ...] = ()
    in_order: bool = False
    make: Callable[[ClusterSpec], tuple[JobSpec, Mapping[str, str]]]
    workdir: str | Mapping[str, str] | None = None
    excluded: str | None = None
    mounts: Mapping[str, Any] = field(default_factory=dict)
    packages: Sequence[str] = ()
    notes: Callable[[str], list[str]] = lambda infra: []
    autostop: tuple[int, bool] | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How jobs are launched, beside what they say themselves.

    Attributes:
        command: the word that others who wait for the cluster are told.
        as_it_is: on a cluster that is up and large enough, without setup and file_mounts (``atoll exec``).
        infra: ``local``, ``ssh/NAME`` or ``slurm/NAME``; None: where the cluster is, or what the task says, or local.
        simulate: may accelerators that the machine lacks be simulated?
        setup: run the task's setup; ``fast``: unless the cluster is set up already.
        strict: scripts end at the first command that fails (``set -e``).
        idle_minutes: stop the cluster after so many idle minutes; ``down``: take it down instead.
        max_cost: take it down once its rented nodes have cost so many US dollars.
        variants: one job for each, with the variables that it sets; ``parallel``: so many of them at once.
        from_here: this machine supervises the jobs, because they end with a process here.
        announce: tell where the jobs run.
        say: called with each line for the user.
        progress: called with bytes copied to the nodes and bytes in all.
        given_up: asked while nodes are pending; where it is true the launch fails.
    """

    command: str = "launch"
    as_it_is: bool = False
    infra: str | None = None
    simulate: bool = True
    setup: bool = True
    fast: bool = False
    strict: bool = False
    idle_minutes: int | None = None
    down: bool = False
    max_cost: float | None = None
    variants: Sequence[Mapping[str, str]] = ()
    parallel: int = 1
    from_here: bool = False
    announce: bool = True
    say: Say = silent
    progress: Progress | None = None
    given_up: Callable[[], bool] = lambda: False


def reason_not_together(requests: Sequence[JobRequest]) -> str | None:
    """Why requests can't be submitted at once, each to start when the one before has succeeded; None where they can.

    Files are on the nodes before the first of them runs, and all run on the cluster as it is then.
    """
    workdirs = [each.workdir for each in requests if each.workdir is not None]
    if any(each != workdirs[0] for each in workdirs):
        return "they have different workdirs"
    mounts: dict[str, object] = {}
    for target, source in (pair for each in requests for pair in each.mounts.items()):
        if mounts.setdefault(target, source) != source:
            return f"they mount different things at {target}"
    kinds = {each.resources.accelerators[0][0] for each in requests if each.resources.accelerators}
    return f"they request different accelerators ({', '.join(sorted(kinds))})" if len(kinds) > 1 else None


def variants_of(sweep: Sequence[str]) -> list[dict[str, str]]:
    """The product of every ``KEY=a,b`` of a sweep, the last key changing fastest.

    Raises:
        ConfigError: one that is not of this form, a secret, or a key given twice.
    """
    axes: dict[str, list[str]] = {}
    for text in sweep:
        key, equals, values = text.partition("=")
        if not equals or not key.isidentifier() or not values:
            raise ConfigError(f"--sweep {text!r}: expected KEY=value,value as in --sweep LR=0.1,0.01")
        if key in axes:
            raise ConfigError(f"--sweep {key} is given twice: put all its values into one, as in --sweep {key}=a,b")
        if is_secret(key):
            raise _swept_secret(key)
        axes[key] = values.split(",")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()) if values]


def _swept_secret(name: str) -> ConfigError:
    return ConfigError(f"--sweep {name}: a secret can't be swept, its values would be in the table of results")


def task_request(task: Task, options: Options) -> JobRequest:
    """The request of a task."""
    for name in options.variants[0] if options.variants else ():
        if name in task.secrets:
            raise _swept_secret(name)
    first, *others = _alternatives(task, options)
    autostop = task.resources.autostop

    def make(cluster: ClusterSpec) -> tuple[JobSpec, Mapping[str, str]]:
        spec, secrets = task.job(infra=cluster.infra)
        restarts = replace(spec.restarts, on_lost_nodes=cluster.allocation.max_restarts)
        return replace(spec, restarts=restarts, strict=options.strict), secrets

    return JobRequest(
        resources=first,
        others=tuple(others),
        in_order=task.resources.ordered is not None,
        make=make,
        workdir=task.resolved_workdir(),
        mounts={} if options.as_it_is else task.resolved_mounts(),
        notes=task.notes_for,
        autostop=None if autostop is None else (autostop.idle_minutes, autostop.down),
        name=task.name,
    )


def _alternatives(task: Task, options: Options) -> list[NodeRequest]:
    """What would do for a task, the preferred first. Choices that differ in their accelerators alone are one."""
    infra, choices = options.infra, task.resources.choices()
    able = choices
    if infra is not None:  # it may say less than the task, or more
        able = [each for each in choices if registry.fits(each.infra, infra) or registry.fits(infra, each.infra or "")]
    found: dict[tuple[str | None, str], NodeRequest] = {}
    for each in able or choices[:1]:
        is_closer = infra is None or (each.infra is not None and registry.fits(infra, each.infra))
        place = each.infra if is_closer else infra
        key = place, repr((each.cpus, each.memory, each.others))
        request = found.get(key) or NodeRequest(
            num_nodes=task.num_nodes,
            infra=place,
            in_order=isinstance(task.resources.accelerators, list),
            cpus=each.cpus,
            memory=each.memory,
            resources={**each.others, **({"config": task.config} if task.config else {})},
            simulate=options.simulate,
        )
        kinds = tuple((kind.name, kind.num_accelerators) for kind in each.requested)
        found[key] = replace(request, accelerators=(*(request.accelerators or ()), *kinds))
    return list(found.values())


def accelerators_of(gpus: str | None) -> tuple[Accelerators, ...]:
    """The kinds of accelerators that ``--gpus`` asks for.

    Raises:
        ConfigError: it can't be read.
    """
    asked = None if is_none(gpus) else AcceleratorSpec.parse(gpus)
    return () if asked is None else ((asked.name, asked.count),)


def kept_files_in(folder: Path) -> str:
    """Where hosts keep a folder's copy between runs: one place for each folder of each user and machine.

    Raises:
        ConfigError: it is a whole home or disk.
    """
    if folder in (Path.home(), Path("/")):
        raise ConfigError(
            f"{folder} would be copied to the hosts as a whole: start in your project's folder, or name it (--workdir)"
        )
    who = f"{user_name()}@{socket.gethostname()}:{os.path.realpath(folder)}"
    name = re.sub(r"[^\w.-]+", "-", folder.name) or "workdir"
    return f"runs/{name}-{hashlib.sha256(who.encode()).hexdigest()[:8]}"
