"""What a provider is: it plans nodes, starts each, and can release each at any time."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from atoll.providers.accelerators import AcceleratorSpec
from atoll.providers.gpus import Gpu


@dataclass(frozen=True, slots=True)
class NodePlace:
    """What a task's node should have for itself. What the kernel refuses is shared, and the agent says so.

    Attributes:
        hostname: its host name, which resolves to its address inside.
        home: its ``HOME``.
        tmp: an existing folder that only this node uses; its agent removes it. A folder in it is seen as ``/tmp``
            where a mount namespace can be had, else it is just ``TMPDIR``.
        peers: address and host name of every node of the cluster, for ``/etc/hosts``.
        network: path of a network namespace, or None: the machine's own.
        resolv_conf: text of ``/etc/resolv.conf`` in that namespace, or None: as on the machine.
        visible: paths that stay visible though they lie below ``/tmp``, as ``home`` does; with ``/tmp``, all of it.
        readable: such paths that can't be written to.
        mounts: what is seen elsewhere, too: path of a file or folder, and where; nothing is made there outside.
        notes: lines that the agent is to repeat among its own.
    """

    hostname: str
    home: str
    tmp: str
    peers: tuple[tuple[str, str], ...]
    network: str | None = None
    resolv_conf: str | None = None
    visible: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node before it starts.

    Attributes:
        node: its index.
        addr: address other nodes reach it at.
        num_ranks: processes it will run.
        accelerator: name of its accelerator, or None.
        num_accelerators: how many of them its ranks see.
        gpus: those that its agent may lease ``num_accelerators`` of, the preferred ones first; empty where there are
            none, or they are simulated.
        env: variables its ranks get.
        place: what it should have for itself, where it runs a task.
    """

    node: int
    addr: str
    num_ranks: int
    accelerator: str | None = None
    num_accelerators: int = 0
    gpus: tuple[Gpu, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    place: NodePlace | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a pool would start. ``lines`` are for the user: each thing that differs from what was asked."""

    provider: str
    nodes: tuple[NodePlan, ...]
    simulated: bool = False
    has_gpu: bool = False
    lines: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the whole pool."""
        return sum(node.num_ranks for node in self.nodes)

    def __str__(self) -> str:
        rows = [f"{len(self.nodes)} nodes on {self.provider}, {self.world_size} ranks"]
        for node in self.nodes:
            what = f"{node.num_accelerators} × {node.accelerator}" if node.accelerator else "CPU"
            if self.simulated and node.accelerator:
                what += " (simulated)"
            rows.append(f"  node {node.node}  {node.addr}  {node.num_ranks} ranks  {what}")
        return "\n".join([*rows, *self.lines])


class Node(Protocol):
    """A node that was started: a channel to its agent, and a way to end it by force."""

    channel: socket.socket

    @property
    def reason(self) -> str | None:
        """Why it was lost, as a clause, where the provider knows."""

    def stop(self) -> None:
        """Release the node. Safe to call twice, and on a node that is gone already."""


class Provider(Protocol):
    """A place where nodes come from."""

    @property
    def name(self) -> str:
        """What to call it in messages."""

    def plan(self, *, nodes: int, accelerator: AcceleratorSpec | None, workers_per_node: int | str) -> Plan:
        """Say what would be started; raises ``ConfigError`` for what can't be had."""

    def start(self, node: NodePlan, agent: Sequence[str]) -> Node:
        """Start one node running the agent; the command takes two more arguments: channel and driver pidfd."""
