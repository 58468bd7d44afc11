"""Nodes of a cluster on this machine: 127.0.0.1, 127.0.0.2, …, each with what of its own the kernel gives.

Standard library only, as everything that a supervisor needs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from atoll.core.errors import ProvisionError
from atoll.providers.base import (
    TARGETS,
    WORKDIR,
    Allocation,
    Boot,
    Node,
    NodePlan,
    NodeRequest,
    Provider,
    Session,
)
from atoll.providers.gpus import VISIBLE, Gpu, in_turn, machine_gpus
from atoll.providers.local_node import SOURCE_ROOT, NodePlace, isolation
from atoll.providers.network import Network, NetworkUnavailable


class LocalSession(Session):
    """The nodes of one cluster while its supervisor lives; ``folder`` is the cluster's, homes are made below it."""

    def __init__(self, provider: Provider, allocation: Allocation, request: NodeRequest, folder: Path) -> None:
        self._folder = folder.absolute()
        super().__init__(provider, allocation, request)
        self._network: Network | None = None
        self._worn: list[Network] = []  # something behind them ended, and jobs may still be in them
        self._networks: dict[int, tuple[int, Network]] = {}  # by job: its attempt, whose nodes must share one
        self._lock = threading.Lock()
        self.shared_networks = ("machine",) * len(self.plan.nodes)
        own = isolation()
        if own.refused is not None:
            shared = "processes" if own.command else "processes, host name and /tmp"
            self.lines.append(
                f"nodes share {shared} with this machine ({own.refused}): pkill and pgrep are kept to a node's own "
                f"processes, killall is not"
            )
        try:
            self._network = Network.start(self.allocation.id)
            self.shared_networks = ()
        except NetworkUnavailable as error:
            self.lines.append(f"nodes share ports with this machine, and jobs that fix the same one wait: {error}")

    def refresh(self, allocation: Allocation) -> None:
        """Each node has a home below the cluster's folder."""
        super().refresh(allocation)
        self.allocation = self.plan.allocation  # whose nodes have names, in a record that an older version wrote too
        self.plan = dataclasses.replace(self.plan, nodes=tuple(map(self._planned, self.plan.nodes)))

    def _planned(self, plan: NodePlan) -> NodePlan:
        home = self._folder / "nodes" / str(plan.node) / "home"
        env = {"NCCL_HOSTID": _machine_id()}
        if plan.env:
            env |= {**plan.env, VISIBLE: ""}
        return dataclasses.replace(
            plan,
            home=str(home),
            workdir=str(home / WORKDIR),
            tmp=tempfile.gettempdir(),
            cores=len(os.sched_getaffinity(0)),
            base_env=env,
        )

    def launch_agents(self, nodes: Sequence[NodePlan], boot: Boot) -> Iterator[Node]:
        """Start agents with namespaces of their own; may be called from several threads at once."""
        return (self._launch(plan, boot) for plan in nodes)

    def _launch(self, plan: NodePlan, boot: Boot) -> Node:
        try:
            network, notes = self._network_for(boot.job, boot.attempt)
        except NetworkUnavailable as error:
            raise ProvisionError(str(error)) from error
        environments = [*boot.visible, *filter(None, map(_environment, boot.readable))]
        tmp = boot.tmp(plan)
        home = Path(plan.home)
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.mkdir(tmp, 0o700)
        try:
            names = self.allocation.nodes
            place = NodePlace(
                hostname=names[plan.node].name,
                home=str(home),
                tmp=tmp,
                peers=tuple((node.address, node.name) for node in names),
                network=None if network is None else network.path,
                resolv_conf=None if network is None else network.resolv_conf,
                visible=tuple(environments),
                readable=(SOURCE_ROOT, *boot.readable, *filter(None, map(_base, environments))),
                mounts=_mounts_of(home),
                notes=notes,
            )
            (agent,) = self.provider.launch_agents(self.allocation, [dataclasses.replace(plan, place=place)], boot)
        except BaseException:
            shutil.rmtree(tmp, ignore_errors=True)
            raise
        return agent

    def gpus(self, node: int, count: int, visible: str | None) -> tuple[Gpu, ...]:
        """The machine's, those of the cluster's kind where it has some; none where they are simulated."""
        if self.plan.simulated:
            return ()
        found, kind = machine_gpus(visible).gpus, self.plan.accelerator
        if any(gpu.name == kind for gpu in machine_gpus(None).gpus):
            found = tuple(gpu for gpu in found if gpu.name == kind)
        return in_turn(found, node, count)

    def close(self) -> None:
        """Close the cluster's network. Nodes that still run are the driver's to stop."""
        for network in (self._network, *self._worn):
            if network is not None:
                network.close()
        self._network = None
        self._worn.clear()

    def fault_of(self, job_id: int) -> str | None:
        """That a process behind the job's network has ended."""
        _, network = self._networks.get(job_id, (0, None))
        fault = None if network is None else network.fault
        return fault and f"{fault}: this job's nodes can no longer reach other networks, only each other"

    def _network_for(self, job_id: int, attempt: int) -> tuple[Network | None, tuple[str, ...]]:
        """The network of a job's attempt, and a line where it had to be made anew."""
        with self._lock:
            known = self._networks.get(job_id)
            if self._network is None or (known is not None and known[0] == attempt):
                return known[1] if known is not None else None, ()
            notes = []
            if (fault := self._network.fault) is not None:
                try:
                    fresh = Network.start(self.allocation.id)
                except NetworkUnavailable as error:
                    raise NetworkUnavailable(f"its cluster's network is gone ({fault}), and {error}") from error
                self._worn.append(self._network)
                self._network = fresh
                notes.append(
                    f"the cluster's network was created again: {fault}; jobs that still run in the old one can't "
                    f"reach this one, and may not reach other networks"
                )
            self._networks[job_id] = attempt, self._network
            return self._network, tuple(notes)


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


@functools.cache
def _machine_id() -> str:
    """What NCCL tells machines apart by: one value for all nodes here, or they would talk over sockets."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
