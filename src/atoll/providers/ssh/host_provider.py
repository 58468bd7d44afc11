"""Nodes on machines that run a shell command for us: planned by what they say of themselves, agents started there."""

from __future__ import annotations

import abc
import dataclasses
import functools
import posixpath
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from atoll.core.errors import AtollError, ProvisionError
from atoll.providers.accelerators import refuse_misspelt
from atoll.providers.base import (
    WORKDIR,
    AcceleratorsLacking,
    AllocatedNode,
    Allocation,
    Boot,
    NodePlan,
    NodeRequest,
    Plan,
    Provider,
    Session,
)
from atoll.providers.bundle import atoll_bundle
from atoll.providers.gpus import Gpu
from atoll.providers.ssh import facts
from atoll.providers.ssh.connection import connections, on_each
from atoll.providers.ssh.host_node import SSHNode, node_plan, start_agent
from atoll.providers.ssh.hosts import HERE, Facts, Target
from atoll.providers.ssh.remote import Host
from atoll.providers.ssh.scp import copy, copy_line

_END_S = 10.0  # to end what hangs; a host that can't be reached is not waited for longer
_ANSWER_S = 20.0
_PATIENCE_S = 3.0


class HostProvider(Provider):
    """A provider whose nodes are machines that are logged in to. It says which, and how they are reached.

    Attributes:
        grace_s: how long a connection may be lost before its node counts as lost, in seconds.
        shared_workdir: where a task's workdir goes there, where the user has said so.
    """

    is_elsewhere: ClassVar[bool] = True
    grace_s: float

    @property
    def shared_workdir(self) -> str | None:
        """Nobody has said so."""
        return None

    def targets_of(self, allocation: Allocation | None) -> tuple[Target, ...]:
        """How the nodes of an allocation are reached, head first; without one, those that there are."""
        return tuple(self.target(node.reach) for node in allocation.nodes) if allocation is not None else ()

    def shared_marker(self, allocation: Allocation | None) -> str:
        """The name of a file beside the bundles that every node has to see; empty where nodes need share nothing."""
        return ""

    def not_shared(self, nodes: Sequence[str], place: str) -> ProvisionError:
        """What to raise where nodes do not see that file in their state folder, ``place``."""
        return ProvisionError(f"{', '.join(nodes)}: {place} is not shared")

    @abc.abstractmethod
    def target(self, reach: str) -> Target:
        """How a node is reached, of which its allocation keeps that text."""

    def _allocation(self, request: NodeRequest, planned: Sequence[NodePlan], code: str) -> Allocation:
        """What a request gets without further ado: those that were planned."""
        raise ProvisionError(f"{self.name} has no nodes before they are allocated")

    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        """Ask the hosts, all at once, and plan one node on each.

        Raises:
            ConfigError: more nodes than hosts.
            AcceleratorsLacking: a host lacks the accelerators.
            ProvisionError: a host can't be used; the message says why and what to do.
        """
        self.check(request)
        found = self.targets_of(allocation)
        code = atoll_bundle(allocation.code if allocation is not None else "")
        marker = self.shared_marker(allocation)
        digests = [(code.digest, code.name), *([(marker, marker)] if marker else [])]
        ask = functools.partial(facts.ask, digests=digests, folder=self.shared_workdir)
        try:
            with connections.used(found[: request.num_nodes]) as logins:
                said = on_each(logins, ask)
        except ProvisionError as error:
            raise ProvisionError(where_to_type(error, found)) from None
        if apart := [host for host in said if marker and marker not in host.bundles]:
            raise self.not_shared([str(host.target) for host in apart], apart[0].place)
        kind, counts = _chosen(said, request)
        within = (allocation.files_in if allocation is not None else request.files_in) or f"clusters/{request.id}"
        planned = []
        for at, (host, gpus, num) in enumerate(zip(said, *counts, strict=True)):
            plan = node_plan(host, at, code, num_ranks=request.num_ranks(num), grace_s=self.grace_s)
            known = allocation.nodes[at] if allocation is not None else AllocatedNode(name=plan.host, address=plan.addr)
            planned.append(
                dataclasses.replace(
                    plan,
                    accelerator=gpus[0].name if gpus else None,
                    num_accelerators=num,
                    gpus=gpus,
                    addr=known.address or plan.addr,
                    reach=known.reach or plan.reach,
                    host=known.name,
                    workdir=self.shared_workdir or posixpath.join(plan.folder, within, WORKDIR),
                )
            )
        lines = [f"{each.target}: {each.gpu_problem}; it is used without GPUs" for each in said if each.gpu_problem]
        least = min(counts[1])
        if kind is None and least != max(counts[1]):
            lines.append(
                f"nodes differ in their GPUs ({', '.join(map(str, counts[1]))}): each counts as having {least}"
            )
        names = {plan.accelerator for plan in planned}
        kind = kind or (names.pop() if len(names) == 1 and least else None)
        given = allocation or self._allocation(request, planned, code.digest)
        has_gpu = any(plan.num_accelerators for plan in planned)
        return Plan(self.name, tuple(planned), False, has_gpu, tuple(lines), kind, least, given)

    def open(self, allocation: Allocation, request: NodeRequest, folder: Path, owner: str) -> Session:
        """Ask the hosts what they have now."""
        return _Session(self, allocation, request)

    def launch_agents(self, allocation: Allocation, nodes: Sequence[NodePlan], boot: Boot) -> Iterator[SSHNode]:
        """Bring the code to hosts that lack it, and start their agents, one after the other.

        Raises:
            ProvisionError: a host can't be reached, or its agent does not start.
        """
        for node in nodes:
            try:
                started = start_agent(self._target(node), node, boot.owner, boot.starting)
            except AtollError as error:
                raise ProvisionError(where_to_type(error, self.targets_of(allocation)), node=node.node) from error
            yield started

    def remote(self, plan: NodePlan) -> Host:
        """The host of a node."""
        return Host(self._target(plan), plan)

    def _target(self, plan: NodePlan) -> Target:
        return self.target(plan.reach)

    def end_orphans(self, allocation: Allocation, owner: str, first: int = 0) -> tuple[list[str], list[str]]:
        """End what earlier drivers of an owner left on the hosts, all at once."""
        cluster = allocation.id

        def end(at: int) -> tuple[list[str], list[str]]:
            one = dataclasses.replace(allocation, nodes=allocation.nodes[at : at + 1])
            try:
                plan = self.of(one).plan(NodeRequest(id=cluster, accelerators=None), one).nodes[0]
                return self._end_on(plan, owner, _ANSWER_S), []
            except ProvisionError as error:
                name = allocation.nodes[at].name
                why = str(error).removeprefix(f"{one.head.reach}: ").removesuffix(".")
                return [], [f"{name}: {why}. So it is not known whether processes of cluster {cluster} hang there"]

        try:
            with ThreadPoolExecutor(max(1, len(allocation.nodes) - first)) as threads:
                found = list(threads.map(end, range(first, len(allocation.nodes))))
        finally:
            connections.close_idle()
        return [each for left, _ in found for each in left], [line for _, lines in found for line in lines]

    def login_command(
        self, allocation: Allocation, node: int, options: Sequence[str], command: Sequence[str]
    ) -> list[str]:
        """The user's own ssh."""
        target = self.targets_of(allocation)[node]
        return ["ssh", *target.options, *options, target.host, *command]

    def copy(self, allocation: Allocation, node: int, path: str, here: str, *, up: bool) -> str:
        """With scp."""
        return copy(self.targets_of(allocation)[node], path, here, up=up)

    def copy_line(self, plan: NodePlan, path: str, into: str) -> str:
        """An ``scp`` command."""
        return copy_line(self._target(plan), path, into)

    def _end_on(self, plan: NodePlan, owner: str, limit_s: float) -> list[str]:
        """End what an owner left on a host; returns what does not end, with the host."""
        with self.remote(plan) as host:
            left = host.python("agent.orphans", owner, f"{_PATIENCE_S:g}", limit_s=limit_s)
        return [f"{each} on {plan.host}" for each in left]


class _Session(Session):
    """Hosts while a supervisor lives."""

    def launch_agents(self, nodes: Sequence[NodePlan], boot: Boot) -> Iterator[SSHNode]:
        """As the provider's; what hangs as a node stops is ended by another login."""
        provider = self.provider
        assert isinstance(provider, HostProvider)
        for plan, node in zip(nodes, provider.launch_agents(self.allocation, nodes, boot), strict=True):
            node.end_hung = functools.partial(provider._end_on, plan, node.owner, _END_S)
            yield node

    def close(self) -> None:
        """Log out."""
        connections.close_idle()


def _chosen(said: Sequence[Facts], request: NodeRequest) -> tuple[str | None, tuple[list[tuple[Gpu, ...]], list[int]]]:
    """The kind of accelerator that all hosts have, and of each host the GPUs to lease from and how many are used."""
    if not request.accelerators:
        gpus = [host.gpus for host in said]
        return None, (gpus, [len(each) if request.accelerators is None else 0 for each in gpus])
    lacking = None
    for name, count in request.accelerators:
        fitting = [tuple(gpu for gpu in host.gpus if gpu.name == name) for host in said]
        short = next((host for host, gpus in zip(said, fitting, strict=True) if len(gpus) < count), None)
        if short is None:
            return name, (fitting, [count] * len(said))
        lacking = short
    assert lacking is not None
    refuse_misspelt(name for name, _ in request.accelerators)
    have = ", ".join(gpu.name for gpu in lacking.gpus) or lacking.gpu_problem or "no GPU"
    asked = " or ".join(f"{name}:{count}" for name, count in request.accelerators)
    raise AcceleratorsLacking(asked, f"can't be had on {lacking.target}: it has {have}")


def where_to_type(error: AtollError, found: Sequence[Target]) -> str:
    """What an error says; of a login from a head to another of its hosts also on which machine its remedy helps."""
    if found[0].host != HERE or "`ssh" not in str(error):
        return str(error)
    return f"{error}. Type that on {socket.gethostname()}, where the supervisor logs in from"
