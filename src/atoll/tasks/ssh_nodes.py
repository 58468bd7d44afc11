"""A cluster's nodes on hosts reached with ``ssh``, from the head host itself or from the user's machine.

Standard library only. ``cluster.hosts`` are spelt as ``ssh`` takes them; ``.`` is the machine the supervisor runs on.
"""

from __future__ import annotations

import contextlib
import posixpath
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.providers.accelerators import AcceleratorSpec
from atoll.providers.gpus import Gpu, visible_gpus
from atoll.providers.remote import RemotePlan
from atoll.providers.ssh.bundle import use_packed
from atoll.providers.ssh.connection import connections
from atoll.providers.ssh.hosts import Target
from atoll.providers.ssh.provider import SSH, AcceleratorsLacking, SSHNode, start_agent, where_to_type
from atoll.tasks import remains
from atoll.tasks.nodes import StartedNode
from atoll.tasks.spec import ClusterSpec
from atoll.wire import frames

_END_S = 10.0  # to end what hangs; a host that can't be reached is not waited for longer
_OF_POOLS = "OMP_NUM_THREADS"  # a plan shares the cores between a pool's ranks; a task's processes say it themselves

_SUPERVISOR = secrets.token_hex(4)  # this process, among those that supervise a cluster one after the other


def provider_of(cluster: ClusterSpec) -> SSH:
    """The provider behind a cluster's hosts."""
    given = cluster.ssh
    return SSH(
        hosts=cluster.hosts,
        key=given.get("key"),
        jump=given.get("jump"),
        python=given.get("python"),
        grace_s=given.get("grace_s") or 30.0,
    )


def plans_of(cluster: ClusterSpec) -> list[RemotePlan]:
    """Ask the hosts about themselves; every one gets the share of GPUs that the cluster says.

    Raises:
        AcceleratorsLacking: a host lacks the accelerators.
        ProvisionError: a host can't be used.
    """
    wanted = None
    if cluster.accelerator is not None and cluster.num_accelerators:
        wanted = AcceleratorSpec(cluster.accelerator, cluster.num_accelerators)
    folder = cluster.ssh.get("workdir")
    provider = provider_of(cluster)
    try:
        plan = provider.plan(nodes=cluster.num_nodes, accelerator=wanted, workers_per_node=1, folder=folder)
    except AcceleratorsLacking as error:
        asked = f"{cluster.accelerator}:{cluster.num_accelerators}"
        raise AcceleratorsLacking(error.why, f"{asked} {error.why}") from None
    found = [node for node in plan.nodes if isinstance(node, RemotePlan)]
    addresses = cluster.ssh.get("addresses") or [node.addr for node in found]
    names = cluster.ssh.get("names") or [node.host for node in found]  # as the user calls them
    return [replace(node, addr=addr, host=name) for node, addr, name in zip(found, addresses, names, strict=False)]


def workdir_of(cluster: ClusterSpec, plan: RemotePlan) -> str:
    """Where a task's workdir lies on a host: as config.toml says, or in the host's state folder."""
    within = cluster.ssh.get("files_in") or posixpath.join("clusters", cluster.name)
    return str(cluster.ssh.get("workdir") or posixpath.join(plan.folder, within, "sky_workdir"))


class SSHNodes:
    """Agents on hosts, started anew for every job.

    Args:
        cluster: its hosts and how they are reached.
        folder: the cluster's folder.
    """

    def __init__(self, cluster: ClusterSpec, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._targets = provider_of(cluster).targets()
        self._plans: list[RemotePlan] = []
        # What the cluster's earlier supervisors left on a host ends before our agent starts there.
        self._owner = f"{remains.owner_on_hosts(cluster, folder)}.{_SUPERVISOR}"
        self.addresses: tuple[str, ...] = tuple(cluster.ssh.get("addresses") or ())
        self.shared_networks: tuple[str, ...] = ()

    def open(self) -> list[str]:
        """Ask the hosts about themselves.

        Raises:
            ProvisionError: one can't be reached, or can't be used.
        """
        if digest := self._cluster.ssh.get("bundle"):
            use_packed(digest)
        self._plans = plans_of(self._cluster)
        remains.note_driver(self._folder, self._owner)
        self.addresses = self.shared_networks = tuple(plan.addr for plan in self._plans)
        return []

    def start(
        self, job_id: int, node: int, attempt: int, visible: Sequence[str] = (), readable: Sequence[str] = ()
    ) -> StartedNode:
        """Start one host's agent and send it SETUP.

        Raises:
            ProvisionError: it could not be started.
        """
        plan, target = self._plans[node], self._targets[node]
        try:
            handle = start_agent(target, plan, self._owner)
        except AtollError as error:
            raise ProvisionError(where_to_type(error, self._targets), node=node) from error
        tag = secrets.token_hex(4)
        tmp = f"{plan.tmp}/atoll-{tag}-n{node}"
        setup = {"node": node, "tag": tag, "env": {}, "cwd": "/", "log_dir": None, "tmp_dir": tmp, "ranks": []}
        try:
            frames.send_all(handle.channel, frames.pack(frames.SETUP, meta={**setup, "task": True}))
        except (OSError, AtollError) as error:
            reason = handle.reason or str(error)
            handle.stop()
            raise ProvisionError(reason, node=node) from error
        base = {name: value for name, value in plan.base_env.items() if name != _OF_POOLS}
        env = {**base, "HOME": plan.home, "TMPDIR": tmp}
        workdir = workdir_of(self._cluster, plan)
        return StartedNode(_TaskNode(handle, target, plan), plan.addr, plan.home, workdir, tmp, env, plan.cores)

    def gpus(self, node: int, _count: int, visible: str | None) -> tuple[Gpu, ...]:
        """The host's, of the cluster's kind where it has one."""
        found = self._plans[node].gpus
        return found if visible is None else visible_gpus(found, visible)

    def fault_of(self, _job_id: int) -> str | None:
        """A host's network is its own."""
        return None

    def close(self) -> None:
        """Log out."""
        connections.close_idle()


class _TaskNode:
    """An agent on a host that is ended by force where it does not say that it has ended."""

    def __init__(self, node: SSHNode, target: Target, plan: RemotePlan) -> None:
        self._node = node
        self._target = target
        self._plan = plan
        self._stopped = False
        self.channel: socket.socket = node.channel

    @property
    def reason(self) -> str | None:
        """Why it was lost."""
        return self._node.reason

    def listen(self, on_silence: Callable[[float, str], object]) -> None:
        """As ``SSHNode.listen``."""
        self._node.listen(on_silence)

    def stop(self) -> None:
        """End the agent and all it runs."""
        if self._stopped:
            return
        self._stopped = True
        self._node.stop()
        if not self._node.is_over:  # it hangs, is stopped, or can't be reached
            with contextlib.suppress(ProvisionError):  # the next job's start, or the cluster's end, tells
                remains.end_on(self._target, self._plan, self._node.owner, _END_S)


def check_size(cluster: ClusterSpec, num_hosts: int) -> None:
    """Are there hosts enough?

    Raises:
        ConfigError: there are not.
    """
    if cluster.num_nodes > num_hosts:
        raise ConfigError(
            f"--num-nodes {cluster.num_nodes}: {cluster.infra} has {num_hosts} host{'s' if num_hosts != 1 else ''}; "
            f"ask for fewer, or declare more in config.toml under ATOLL_HOME"
        )
