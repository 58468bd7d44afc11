"""What an infra has for a cluster, and what a cluster has less of than is asked for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from atoll.core.errors import ConfigError
from atoll.tasks.spec import ClusterSpec

Accelerators = tuple[str, int]  # of each node: name and how many


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


def fits(cluster: ClusterSpec, wanted: Accelerators) -> bool:
    """Has every node of the cluster these accelerators?"""
    return cluster.accelerator == wanted[0] and cluster.num_accelerators >= wanted[1]


def accelerators_text(accelerator: str | None, num: int) -> str:
    """``L4:2``, or ``no accelerator``."""
    return f"{accelerator}:{num}" if accelerator and num else "no accelerator"


def missing(
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
        if larger(old, new) != old:
            changes.append(f"{old} → {new} {what}" if old else f"{new} {what}")
    return changes


def larger(old: str | None, new: str | None) -> str | None:
    """Of two amounts such as ``8+`` and ``32GB``, the larger; a ratio (``4x``) is none and changes nothing."""
    if new is None or new.endswith("x"):
        return old
    return new if old is None or _amount(new) > _amount(old) else old


def _amount(text: str) -> float:
    found = re.match(r"\s*\d+(\.\d+)?", text)
    return float(found[0]) if found else 0.0
