"""What a launch gets: a cluster that is made, reused, taken up again or resized, with what its infra has for it."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.core.errors import ConfigError
from atoll.core.validation import command_line
from atoll.providers.base import DEFAULT, AcceleratorsLacking, NodeRequest, wait_until_ready
from atoll.providers.registry import resolve
from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec, ClusterStatus

Say = Callable[[str], object]
Accelerators = tuple[str, int]  # of each node: name and how many


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a launch asks of its cluster.

    Attributes:
        num_nodes: nodes of the job.
        infra: as the registry knows it, or None: where the cluster is, for a new one this machine.
        accelerators: kinds that would do, the preferred one first; empty for none; None takes what is there.
        cpus, memory: of each node, as text (``8+``, ``32GB``), or None.
        simulate: may what the machine lacks be simulated?
        files_in: where its files go below the state folder of a host.
    """

    num_nodes: int = 1
    infra: str | None = None
    accelerators: tuple[Accelerators, ...] | None = ()
    cpus: str | None = None
    memory: str | None = None
    simulate: bool = True
    files_in: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a launch gets.

    Attributes:
        cluster: the record as it should be.
        accelerator, num_accelerators: what the job uses of each node.
        lines: what the user is told about it.
        changed: does the record have to be written?
    """

    cluster: ClusterSpec
    accelerator: str | None
    num_accelerators: int
    lines: tuple[str, ...]
    changed: bool


def decide(name: str, have: ClusterSpec | None, wish: Wish, busy: Sequence[JobRow] = ()) -> Decision:
    """Make, reuse, take up again or resize a cluster for a wish.

    Args:
        name: of the cluster.
        have: its record, or None.
        busy: its jobs that have not ended.

    Raises:
        ConfigError: an unknown infra, another infra than it is on, a resize while jobs run, accelerators that can't
            be had without simulation.
    """
    if have is None or have.status is ClusterStatus.DOWN:
        return _new(name, have, wish)
    if wish.infra is not None and wish.infra != have.infra:
        raise ConfigError(
            f"cluster {name} is on {have.infra}, not on {wish.infra} (--infra): use another name (-c), "
            f"or `{command_line('atoll', 'down', name)}` first"
        )
    chosen = next((kind for kind in wish.accelerators or () if _fits(have, kind)), None)
    if chosen is not None and have.simulated and not wish.simulate:
        place(have, (chosen,), simulate=False)  # refuses
    wanted = chosen or next(iter(wish.accelerators or ()), None)
    changes = _missing(
        have,
        num_nodes=wish.num_nodes,
        accelerators=None if chosen else wanted,
        cpus=wish.cpus,
        memory=wish.memory,
    )
    stopped = have.status is ClusterStatus.STOPPED
    if not changes:
        lines = [f"cluster {name} was stopped and is restarted"] if stopped else []
        return _decision(dataclasses.replace(have, status=ClusterStatus.UP), wanted, lines, changed=stopped)
    if busy:
        ids, first = ", ".join(str(job.id) for job in busy), (name, busy[0].id)
        raise ConfigError(
            f"cluster {name} can't be resized ({', '.join(changes)}) while job {ids} is on it. Wait for it "
            f"({command_line('atoll', 'logs', *first)}), cancel it ({command_line('atoll', 'cancel', *first)}), or use "
            f"another name (-c)"
        )
    kept = ((have.accelerator, have.num_accelerators),) if have.accelerator else ()
    grown = dataclasses.replace(
        have,
        num_nodes=max(have.num_nodes, wish.num_nodes),
        cpus=_larger(have.cpus, wish.cpus),
        memory_gb=_larger(have.memory_gb, wish.memory),
        status=ClusterStatus.UP,
    )
    cluster = place(grown, kept if wanted is None or chosen else wish.accelerators, wish.simulate)
    if wanted is not None and chosen is None:
        wanted = (cluster.accelerator or wanted[0], cluster.num_accelerators)
    notes = () if wanted is None else cluster.notes  # of accelerators that this job doesn't use
    return _decision(cluster, wanted, [f"cluster {name} is resized: {', '.join(changes)}", *notes])


def _decision(
    cluster: ClusterSpec, accelerators: Accelerators | None, lines: Sequence[str], *, changed: bool = True
) -> Decision:
    accelerator, num = accelerators or (None, 0)
    return Decision(cluster, accelerator, num, tuple(lines), changed)


def _new(name: str, have: ClusterSpec | None, wish: Wish) -> Decision:
    made = ClusterSpec(
        name=name,
        infra=wish.infra or DEFAULT,
        num_nodes=wish.num_nodes,
        cpus=wish.cpus,
        memory_gb=wish.memory,
        created_s=time.time(),
    )
    cluster = place(made, wish.accelerators, wish.simulate, wish.files_in)
    lines = list(cluster.notes)
    if have is not None:
        lines.insert(0, f"cluster {name} was down and is created again; its old jobs' logs are kept")
    mine = (cluster.accelerator, cluster.num_accelerators) if cluster.accelerator else None
    return _decision(cluster, mine, lines)


# ---------------------------------------------------------------------------------------------- what providers have
def place(
    cluster: ClusterSpec, accelerators: Sequence[Accelerators] | None, simulate: bool, files_in: str = ""
) -> ClusterSpec:
    """The cluster with what its infra has for it; its notes say what differs from what was asked.

    Raises:
        ConfigError: an infra that is not known, or accelerators that it doesn't have.
        ProvisionError: a node can't be used.
    """
    request = NodeRequest(
        id=cluster.name,
        num_nodes=cluster.num_nodes,
        accelerators=None if accelerators is None else tuple(accelerators),
        simulate=simulate,
        files_in=files_in or cluster.allocation.files_in,
    )
    try:
        plan = resolve(cluster.infra).plan(request)
    except AcceleratorsLacking as error:
        step = ". Drop --no-simulate to run on CPU instead, or request fewer (--gpus none for none)"
        raise ConfigError(
            f"{error.asked} {error.why}{step if error.can_simulate else '; --gpus none requests none'}"
        ) from None
    return dataclasses.replace(
        cluster,
        accelerator=plan.accelerator if plan.num_accelerators else None,
        num_accelerators=plan.num_accelerators,
        simulated=plan.simulated,
        notes=plan.lines,
        allocation=plan.allocation,
    )


def provision(cluster: ClusterSpec, before: ClusterSpec | None, owner: str, say: Say, *, here: bool) -> ClusterSpec:
    """Get a cluster its nodes, waiting while they are pending, and check them before a job.

    Args:
        cluster: as it was decided.
        before: its record so far, or None.
        owner: what its agents are known by.
        say: called with a line for each thing the user should know.
        here: its supervisor runs on this machine, because its jobs end with a process here.

    Raises:
        ProvisionError: a node can't be had or used.
    """
    provider = resolve(cluster.infra)
    have = None if before is None or before.status is ClusterStatus.DOWN else before.allocation
    request = dataclasses.replace(cluster.request(), supervised_here=here)
    allocation = wait_until_ready(provider, provider.provision(request, say, have), say)
    return dataclasses.replace(cluster, allocation=dataclasses.replace(allocation, owner=owner))


def _fits(cluster: ClusterSpec, wanted: Accelerators) -> bool:
    """Has every node of the cluster these accelerators?"""
    return cluster.accelerator == wanted[0] and cluster.num_accelerators >= wanted[1]


def accelerators_text(accelerator: str | None, num: int) -> str:
    """``L4:2``, or ``no accelerator``."""
    return f"{accelerator}:{num}" if accelerator and num else "no accelerator"


def _missing(
    have: ClusterSpec, *, num_nodes: int, accelerators: Accelerators | None, cpus: str | None, memory: str | None
) -> list[str]:
    """What a cluster has less of than is asked for, in words."""
    changes = []
    if num_nodes > have.num_nodes:
        changes.append(f"{have.num_nodes} → {num_nodes} nodes")
    if accelerators is not None:
        before = accelerators_text(have.accelerator, have.num_accelerators)
        changes.append(f"{before} → {accelerators_text(*accelerators)} per node")
    for what, old, new in (("CPUs", have.cpus, cpus), ("memory", have.memory_gb, memory)):
        if _larger(old, new) != old:
            changes.append(f"{old} → {new} {what}" if old else f"{new} {what}")
    return changes


def _larger(old: str | None, new: str | None) -> str | None:
    """Of two amounts such as ``8+`` and ``32GB``, the larger; a ratio (``4x``) is none and changes nothing."""
    if new is None or new.endswith("x"):
        return old
    return new if old is None or _amount(new) > _amount(old) else old


def _amount(text: str) -> float:
    found = re.match(r"\s*\d+(\.\d+)?", text)
    return float(found[0]) if found else 0.0
