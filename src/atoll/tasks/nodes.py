"""Where a job's nodes come from: started anew for every job and attempt, so that ending one ends all it ran.

Standard library only, as everything that a supervisor on a head node needs.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from atoll.agent.orphans import VARIABLE
from atoll.agent.process_tree import kill_tree
from atoll.core.errors import ConfigError, ProvisionError
from atoll.gang.members import agent_command, sweep_stale
from atoll.providers.base import Node, NodePlace, NodePlan
from atoll.providers.gpus import VISIBLE, Gpu, machine_gpus
from atoll.providers.local import Local, in_turn, isolation
from atoll.providers.network import Network, NetworkUnavailable
from atoll.tasks import remains
from atoll.tasks.spec import LONGEST_NAME, WORKDIR, ClusterSpec, node_name
from atoll.wire import frames

TARGETS = "mounts.json"  # beside a node's home: paths at which its jobs see files that lie in the home
_SOURCE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass
class StartedNode:
    """A node whose agent runs and has its SETUP; what it answers comes on ``handle.channel``.

    Attributes:
        handle: its channel, why it was lost, and how to end it.
        addr: the address other nodes reach it at.
        home: its ``HOME``; ``workdir`` is the folder in it that a task's files are copied to.
        tmp: its folder for temporary files. The agent gives processes what it is called inside as ``TMPDIR``.
        env: what the place adds to the environment of its processes: ``HOME``, ``TMPDIR``, ``NCCL_HOSTID``,
            ``ATOLL_SIMULATED``.
        cores: of its machine.
    """

    handle: Node
    addr: str
    home: str
    workdir: str
    tmp: str
    env: dict[str, str]
    cores: int


class NodeSource(Protocol):
    """The nodes of one cluster.

    Attributes:
        addresses: of all nodes, head first.
        shared_networks: of each node, the name of the network whose ports its jobs share with other clusters; empty
            where they share none.
    """

    addresses: tuple[str, ...]
    shared_networks: tuple[str, ...]

    def open(self) -> list[str]:
        """Make ready, once in a supervisor's life; returns what to tell the user, one line each."""

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

    def gpus(self, node: int, count: int, visible: str | None) -> tuple[Gpu, ...]:
        """The GPUs that a job which wants ``count`` of a node may lease some of, the preferred ones first.

        ``visible`` is the job's ``CUDA_VISIBLE_DEVICES``, which bounds them.
        """

    def fault_of(self, job_id: int) -> str | None:
        """What a job's nodes have lost that they don't stop for, as a clause; asked often while it runs."""

    def close(self) -> None:
        """Give up what ``open`` made. Nodes that still run are the caller's to stop."""


class LocalNodes:
    """Nodes on this machine: 127.0.0.1, 127.0.0.2, …, each with what of its own the kernel gives.

    Args:
        cluster: how many there are and what accelerators they have.
        folder: the cluster's folder; homes are made below it.
    """

    def __init__(self, cluster: ClusterSpec, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder.absolute()
        self._network: Network | None = None
        self._worn: list[Network] = []  # something behind them ended, and jobs may still be in them
        self._networks: dict[int, tuple[int, Network]] = {}  # by job: its attempt, whose nodes must share one
        self._lock = threading.Lock()
        self.addresses = tuple(_address(node) for node in range(cluster.num_nodes))
        self.shared_networks: tuple[str, ...] = ("machine",) * cluster.num_nodes

    def open(self) -> list[str]:
        """End what earlier jobs left, start the network; a line for each thing that nodes share with the machine.

        Raises:
            ProvisionError: something of an earlier job can't be ended.
        """
        if left := remains.end_here(self._folder):
            raise ProvisionError(f"not even SIGKILL ends what an earlier job left: {', '.join(left)}: {remains.ADVICE}")
        sweep_stale(tempfile.gettempdir())
        lines = []
        own = isolation()
        if own.refused is not None:
            shared = "processes" if own.command else "processes, host name and /tmp"
            lines.append(
                f"nodes share {shared} with this machine ({own.refused}): pkill and pgrep are kept to a node's own "
                f"processes, killall is not"
            )
        try:
            self._network = Network.start()
            self.shared_networks = ()
        except NetworkUnavailable as error:
            lines.append(f"nodes share ports with this machine, and jobs that fix the same one wait: {error}")
        return lines

    def start(
        self, job_id: int, node: int, attempt: int, visible: Sequence[str] = (), readable: Sequence[str] = ()
    ) -> StartedNode:
        """Start one node's agent and send it SETUP. Blocks; may be called from several threads at once.

        Raises:
            ProvisionError: it could not be started.
        """
        plan = NodePlan(node, self.addresses[node], 1)
        try:
            network, notes = self._network_for(job_id, attempt)
        except NetworkUnavailable as error:
            raise ProvisionError(str(error), node=node) from error
        environments = [*visible, *filter(None, map(_environment, readable))]
        tag = secrets.token_hex(4)
        tmp = os.path.join(tempfile.gettempdir(), f"atoll-{tag}-n{node}")  # no name of the user's: see `pkill -f`
        try:
            home = self._folder / "nodes" / str(node) / "home"
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.mkdir(tmp, 0o700)
            place = NodePlace(
                hostname=self._hostname(node),
                home=str(home),
                tmp=tmp,
                peers=tuple((addr, self._hostname(at)) for at, addr in enumerate(self.addresses)),
                network=None if network is None else network.path,
                resolv_conf=None if network is None else network.resolv_conf,
                visible=tuple(environments),
                readable=(_SOURCE_ROOT, *readable, *filter(None, map(_base, environments))),
                mounts=_mounts_of(home),
                notes=notes,
            )
            owner = {VARIABLE: f"{remains.owner_of(self._folder)}.{tag}"}
            agent = Local().start(replace(plan, place=place), agent_command(_SOURCE_ROOT), owner)
            handle = _TaskNode(agent, tag, node, tmp)
        except (OSError, ConfigError) as error:
            shutil.rmtree(tmp, ignore_errors=True)
            raise ProvisionError(str(error), node=node) from error
        setup = {"node": node, "tag": tag, "env": {}, "cwd": "/", "log_dir": None, "tmp_dir": tmp, "ranks": []}
        try:
            frames.send_all(handle.channel, frames.pack(frames.SETUP, meta={**setup, "task": True}))
        except OSError as error:
            reason = handle.reason or str(error)
            handle.stop()
            raise ProvisionError(reason, node=node) from error
        env = {"HOME": str(home), "TMPDIR": tmp, "NCCL_HOSTID": _machine_id()}
        if self._cluster.simulated:
            env |= {"ATOLL_SIMULATED": "1", VISIBLE: ""}
        cores = len(os.sched_getaffinity(0))
        return StartedNode(handle, plan.addr, str(home), str(home / WORKDIR), tmp, env, cores)

    def gpus(self, node: int, count: int, visible: str | None) -> tuple[Gpu, ...]:
        """The machine's, those of the cluster's kind where it has some; none where they are simulated."""
        if self._cluster.simulated:
            return ()
        found, kind = machine_gpus(visible).gpus, self._cluster.accelerator
        if any(gpu.name == kind for gpu in machine_gpus(None).gpus):
            found = tuple(gpu for gpu in found if gpu.name == kind)
        return in_turn(found, node, count)

    def close(self) -> None:
        """Close the cluster's network. Nodes that still run are the caller's to stop."""
        for network in (self._network, *self._worn):
            if network is not None:
                network.close()
        self._network = None
        self._worn.clear()

    def fault_of(self, job_id: int) -> str | None:
        """That a process behind the job's network has ended."""
        _, network = self._networks.get(job_id, (0, None))
        fault = None if network is None else network.fault
        return fault and f"{fault}: this job's nodes have no way out of their network any more, and reach each other"

    def _network_for(self, job_id: int, attempt: int) -> tuple[Network | None, tuple[str, ...]]:
        """The network of a job's attempt, and a line where it had to be made anew."""
        with self._lock:
            known = self._networks.get(job_id)
            if self._network is None or (known is not None and known[0] == attempt):
                return known[1] if known is not None else None, ()
            notes = []
            if (fault := self._network.fault) is not None:
                try:
                    fresh = Network.start()
                except NetworkUnavailable as error:
                    raise NetworkUnavailable(f"its cluster's network is gone ({fault}), and {error}") from error
                self._worn.append(self._network)
                self._network = fresh
                notes.append(
                    f"the cluster's network was made anew: {fault}; jobs that still run in the old one may have no way "
                    f"out, and don't reach this one"
                )
            self._networks[job_id] = attempt, self._network
            return self._network, tuple(notes)

    def _hostname(self, node: int) -> str:
        role = f"-{node_name(node)}"
        return self._cluster.name[: LONGEST_NAME - len(role)] + role  # the kernel takes no longer ones


class _TaskNode:
    """An agent on this machine that is cleaned up after, should it have been killed itself."""

    def __init__(self, node: Node, tag: str, number: int, tmp: str) -> None:
        self._node = node
        self._tag = f"ATOLL_POOL_TAG={tag}.{number}"
        self._tmp = tmp
        self.channel: socket.socket = node.channel

    @property
    def reason(self) -> str | None:
        """Why it was lost."""
        return self._node.reason

    def stop(self) -> None:
        """End the agent and all it runs, and remove its temporary files."""
        self._node.stop()
        if os.path.exists(self._tmp):  # the agent removes it last: it was killed
            kill_tree(None, self._tag)
            shutil.rmtree(self._tmp, ignore_errors=True)


def _environment(folder: str) -> str | None:
    """The root of the Python environment whose programs lie in a folder: setups install into it."""
    for spelling in (os.path.abspath(folder), os.path.realpath(folder)):
        root, name = os.path.split(spelling)
        if name == "bin" and any(os.path.exists(os.path.join(root, each)) for each in ("pyvenv.cfg", "conda-meta")):
            return root
    return None


def _base(environment: str) -> str | None:
    """The root of the Python that a virtual environment was made with."""
    try:
        lines = Path(environment, "pyvenv.cfg").read_text(errors="replace").splitlines()
    except OSError:
        return None
    homes = [value.strip() for key, _, value in (line.partition("=") for line in lines) if key.strip() == "home"]
    return os.path.dirname(homes[0]) if homes and os.path.basename(homes[0]) == "bin" else None


def _mounts_of(home: Path) -> tuple[tuple[str, str], ...]:
    try:
        known = json.loads((home.parent / TARGETS).read_text())
    except FileNotFoundError:
        return ()
    return tuple((known[target], target) for target in sorted(known))  # the outer ones first


def _address(node: int) -> str:
    return f"127.0.{node // 254}.{node % 254 + 1}"


@functools.cache
def _machine_id() -> str:
    """What NCCL tells machines apart by: one value for all nodes here, or they would talk over sockets."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
