"""Where a job's nodes come from: started anew for every job and attempt, so that ending one ends all it ran.

Standard library only, as everything that a supervisor on a head node needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import AtollError, ProvisionError
from atoll.gang.members import sweep_stale
from atoll.providers import registry
from atoll.providers.base import GONE, Allocation, AllocationState, Boot, Node, NodePlan, Notice, Plan, Remote
from atoll.providers.gpus import Gpu
from atoll.providers.upkeep import wait_until_ready
from atoll.tasks import reaper, record
from atoll.tasks.spec import ClusterSpec
from atoll.wire import frames

_OF_POOLS = "OMP_NUM_THREADS"  # a plan shares the cores between a pool's ranks; a task's processes say it themselves
_SUPERVISOR = secrets.token_hex(4)  # this process, among those that supervise a cluster one after the other


@dataclass(frozen=True, slots=True)
class StartedNode:
    """A node whose agent runs and has its SETUP.

    Attributes:
        plan: what is known of it; ``plan.workdir`` is where a task's files are copied to.
        handle: its channel, on which it answers, why it was lost, and how to end it.
        tmp: its folder for temporary files. The agent gives processes what it is called inside as ``TMPDIR``.
        env: what the place adds to the environment of its processes.
    """

    plan: NodePlan
    handle: Node
    tmp: str
    env: dict[str, str]


class ClusterNodes:
    """The nodes of a cluster's allocation, whichever provider has given it; ``folder`` is the cluster's.

    Attributes:
        addresses: of all nodes, head first, as they were when it was last asked.
        shared_networks: of each node, the name of the network whose ports its jobs share with other clusters; empty
            where they share none.
    """

    def __init__(self, cluster: ClusterSpec, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._provider = registry.of(cluster.allocation)
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[int, tuple[str, ...]]] = {}  # by job: its attempt, and the addresses of that
        self._owner = f"{reaper.owner_on_nodes(cluster, folder)}.{_SUPERVISOR}"
        self.addresses = tuple(node.address for node in cluster.allocation.nodes)
        self.shared_networks: tuple[str, ...] = ()

    def open(self) -> list[str]:
        """Ask for the nodes, once in a supervisor's life, and end what earlier jobs left where that is here.

        Returns:
            what to tell the user, one line each.

        Raises:
            ProvisionError: one can't be used, or something of an earlier job can't be ended.
        """
        allocation = self._cluster.allocation
        if allocation.shares_machine:
            if left := reaper.end_here(self._folder):
                raise ProvisionError(
                    f"not even SIGKILL ends what an earlier job left: {', '.join(left)}: {reaper.ADVICE}"
                )
            sweep_stale(tempfile.gettempdir())
        else:  # what earlier supervisors left there ends before our agent starts
            reaper.note_driver(self._folder, self._owner)
        request = self._cluster.request()
        self._session = self._provider.open(allocation, request, self._folder, self._owner)
        self.addresses = tuple(node.addr for node in self._session.plan.nodes)
        self.shared_networks = self._session.shared_networks
        return self._session.lines

    def ask(
        self, job_id: int, attempt: int, report: Callable[[str], object], given_up: Callable[[], bool]
    ) -> tuple[str, ...]:
        """Ask for the nodes as they are now, once an attempt; waits while they are pending, and reports why.

        Returns:
            their addresses, which the whole attempt goes by.

        Raises:
            ProvisionError: they are lost, or the attempt is ``given_up``.
        """
        with self._lock:
            known = self._asked.get(job_id)
            if known is None or known[0] != attempt:
                before = self._session.allocation
                now = wait_until_ready(self._provider, self._provider.poll(before), report, given_up)
                if now != before:
                    self._session.refresh(now)
                    self.addresses = tuple(node.addr for node in self._session.plan.nodes)
                if attempt > 1 and not now.shares_machine:
                    report(f"attempt {attempt} runs on {', '.join(node.name for node in now.nodes)}")
                known = self._asked[job_id] = attempt, self.addresses
            return known[1]

    def start(
        self, job_id: int, node: int, attempt: int, visible: Sequence[str] = (), readable: Sequence[str] = ()
    ) -> StartedNode:
        """Start one node's agent and send it SETUP. Blocks; may be called from several threads at once.

        Args:
            job_id: the job it is for.
            node: which node of the cluster.
            attempt: of the job, counted from 0.
            visible: paths that the job's processes need though they may lie below ``/tmp``.
            readable: such paths that they only read.

        Raises:
            ProvisionError: it could not be started.
        """
        plan = self._session.plan.nodes[node]
        tag = secrets.token_hex(4)
        boot = Boot(owner=self._owner, tag=tag, job=job_id, attempt=attempt, visible=visible, readable=readable)
        tmp = boot.tmp(plan)
        handle: Node | None = None
        try:
            (handle,) = self._session.launch_agents([plan], boot)
            setup = {"node": node, "tag": tag, "tmp_dir": tmp, "task": True}
            frames.send_all(handle.channel, frames.pack(frames.SETUP, meta=setup))
        except (AtollError, OSError) as error:
            reason = str(error)
            if handle is not None:
                reason = handle.reason or reason
                handle.stop()
            with contextlib.suppress(AtollError, OSError):
                now = self._provider.poll(self._session.allocation)
                reason = now.reason if now.state in GONE else reason
            raise ProvisionError(reason, node=node) from error
        base = {name: value for name, value in plan.base_env.items() if name != _OF_POOLS}
        return StartedNode(plan, handle, tmp, {**base, "HOME": plan.home, "TMPDIR": tmp})

    def gpus(self, node: int, count: int, visible: str | None) -> tuple[Gpu, ...]:
        """As the session's: of the cluster's kind where the node has some."""
        return self._session.gpus(node, count, visible)

    def notice(self) -> Notice | None:
        """Whether the nodes are about to be taken."""
        return self._provider.notice(self._session.allocation)

    def renew(self) -> Allocation:
        """Have them replaced by others, and the allocation as it is then.

        Raises:
            ProvisionError: the provider can't.
        """
        return self._provider.renew(self._session.allocation)

    def fault_of(self, job_id: int) -> str | None:
        """What the session knows of it."""
        return self._session.fault_of(job_id)

    def close(self) -> None:
        """End the session."""
        self._session.close()


def with_nodes_now(cluster: ClusterSpec, folder: Path, *, max_age_s: float = 0.0) -> ClusterSpec:
    """The record of a cluster in ``folder`` that is up, with the nodes that its allocation has now.

    ``max_age_s`` is as for ``Provider.poll``. Its state is not written down: the caller sees to one that is not ready.

    Raises:
        ProvisionError: nobody can be asked.
    """
    allocation = registry.of(cluster.allocation).poll(cluster.allocation, max_age_s=max_age_s)
    if allocation.nodes != cluster.allocation.nodes and allocation.state is AllocationState.READY:
        return record.change(folder, allocation=allocation)
    return dataclasses.replace(cluster, allocation=allocation)


def plan_of(cluster: ClusterSpec) -> Plan:
    """The nodes of a cluster as they are now.

    Raises:
        ProvisionError: one can't be used.
    """
    return registry.of(cluster.allocation).plan(cluster.request(), cluster.allocation)


def node_of(cluster: ClusterSpec, node: int) -> Remote:
    """The machine of one node of a cluster that is elsewhere.

    Raises:
        ProvisionError: it can't be used.
    """
    return registry.of(cluster.allocation).machine(cluster.allocation, node)
