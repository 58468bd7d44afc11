"""What a launch gets: a cluster that is made, reused, taken up again or resized, with what its infra has for it."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.core.errors import ConfigError
from atoll.core.validation import command_line
from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec, ClusterStatus

Accelerators = tuple[str, int]  # of each node: name and how many
_MOST_LOCAL_NODES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a launch asks of its cluster.

    Attributes:
        num_nodes: nodes of the job.
        infra: ``local``, ``ssh/NAME``, or None: where the cluster is, for a new one local.
        accelerators: kinds that would do, the preferred one first; empty for none.
        cpus, memory: of each node, as text (``8+``, ``32GB``), or None.
        simulate: may what the machine lacks be simulated?
    """

    num_nodes: int = 1
    infra: str | None = None
    accelerators: tuple[Accelerators, ...] = ()
    cpus: str | None = None
    memory: str | None = None
    simulate: bool = True


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
    infra = wish.infra or (have.infra if have is not None else "local")
    if infra == "local" and wish.num_nodes > _MOST_LOCAL_NODES:
        raise ConfigError(
            f"{wish.num_nodes} nodes on this machine alone: expected {_MOST_LOCAL_NODES} at most; "
            f"for more, run on hosts with --infra ssh/NAME"
        )
    if have is None or have.status is ClusterStatus.DOWN:
        return _new(name, have, wish)
    if wish.infra is not None and wish.infra != have.infra:
        raise ConfigError(
            f"cluster {name} is on {have.infra}, --infra {wish.infra} was asked for: use another name (-c), "
            f"or `{command_line('atoll', 'down', name)}` first"
        )
    chosen = next((kind for kind in wish.accelerators if _fits(have, kind)), None)
    if chosen is not None and have.simulated and not wish.simulate:
        place(have, (chosen,), simulate=False)  # refuses
    wanted = chosen or next(iter(wish.accelerators), None)
    changes = _missing(
        have,
        num_nodes=wish.num_nodes,
        accelerators=None if chosen else wanted,
        cpus=wish.cpus,
        memory=wish.memory,
    )
    stopped = have.status is ClusterStatus.STOPPED
    if not changes:
        lines = [f"cluster {name} was stopped and is taken up again"] if stopped else []
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
        infra=wish.infra or "local",
        num_nodes=wish.num_nodes,
        cpus=wish.cpus,
        memory_gb=wish.memory,
        created_s=time.time(),
    )
    cluster = place(made, wish.accelerators, wish.simulate)
    lines = list(cluster.notes)
    if have is not None:
        lines.insert(0, f"cluster {name} was down and is made anew; its old jobs' logs are kept")
    mine = (cluster.accelerator, cluster.num_accelerators) if cluster.accelerator else None
    return _decision(cluster, mine, lines)


# ------------------------------------------------------------------------------------------------- what infras have
def place(cluster: ClusterSpec, accelerators: Sequence[Accelerators], simulate: bool) -> ClusterSpec:
    """The cluster with what its infra has for it; its notes say what differs from what was asked.

    Raises:
        ConfigError: an infra that is not known, or accelerators that it doesn't have.
    """
    if cluster.infra.startswith("ssh/"):
        from atoll.tasks import ssh_clusters

        placed, lines = ssh_clusters.place(cluster, accelerators)
        return dataclasses.replace(placed, notes=lines)
    if cluster.infra != "local":
        raise ConfigError(f"--infra {cluster.infra}: this version runs tasks on local and ssh/NAME")
    if not accelerators:
        return dataclasses.replace(cluster, accelerator=None, num_accelerators=0, simulated=False, notes=())
    from atoll.providers.accelerators import AcceleratorSpec
    from atoll.providers.gpus import local_gpus
    from atoll.providers.local import Local

    gpus = [gpu.name for gpu in local_gpus()]
    nodes = cluster.num_nodes
    name, num = next((kind for kind in accelerators if gpus.count(kind[0]) >= kind[1] * nodes), accelerators[0])
    if not simulate and gpus.count(name) < num * nodes:
        raise ConfigError(
            f"{nodes} × {accelerators_text(name, num)} can't be had: this machine has {', '.join(gpus) or 'no GPU'}. "
            f"Leave --no-simulate out to run on CPU instead, or ask for less (--gpus none: for none)"
        )
    try:
        plan = Local().plan(nodes=nodes, accelerator=AcceleratorSpec(name, num), workers_per_node=1)
        simulated, lines = plan.simulated, plan.lines
    except ConfigError:  # a card that the catalog doesn't list, so none that is here
        simulated, lines = True, (f"{nodes} × {accelerators_text(name, num)} simulated on CPU: this machine has none",)
    return dataclasses.replace(cluster, accelerator=name, num_accelerators=num, simulated=simulated, notes=lines)


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
        changes.append(f"{before} → {accelerators_text(*accelerators)} a node")
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
