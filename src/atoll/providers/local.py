"""Nodes on this machine: each an agent of its own, in its own PID namespace where the kernel allows."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from atoll.agent.leases import holders
from atoll.agent.rank_io import MIG_VARIABLE
from atoll.core.errors import ConfigError
from atoll.core.validation import check_truth, suggests_fields
from atoll.providers.accelerators import refuse_misspelt
from atoll.providers.base import (
    AcceleratorsLacking,
    AllocatedNode,
    Allocation,
    Boot,
    NodePlan,
    NodeRequest,
    Plan,
    Provider,
    Report,
    Session,
)
from atoll.providers.gpus import (
    VISIBLE,
    Gpu,
    bound_text,
    gpu_report,
    gpu_row,
    in_turn,
    lease_wish,
    local_gpus,
    local_slices,
)
from atoll.providers.local_node import LocalNode, first_granted, isolation, start_agent
from atoll.providers.local_session import LocalSession
from atoll.providers.mig import make_slices, remove_slices
from atoll.providers.network import Network, NetworkUnavailable, address_of, reason_unavailable

_MOST_NODES = 1000
_TOOLS = {"bash": "tasks' scripts need it", "git": "a workdir's .gitignore needs it", "ssh": "ssh hosts need it"}
_LONGEST_HOSTNAME = 63  # that the kernel takes


@suggests_fields
@dataclass(frozen=True, slots=True)
class Local(Provider):
    """Nodes on this machine; the default provider.

    Args:
        simulate: run on CPU what requests accelerators the machine lacks, and print one line about it. False refuses
            such a pool.
        make_slices: make the MIG slices that a pool requests and that are not there, on cards that nobody uses and
            whose MIG mode is on, and remove them after the pool. Needs root.

    Raises:
        ConfigError: a value that is neither True nor False.
    """

    kind: ClassVar[str] = "local"
    form: ClassVar[str] = "local"
    expected: ClassVar[str] = "local alone: it is this machine"
    gives_slices: ClassVar[bool] = True

    simulate: bool = True
    make_slices: bool = False

    def __post_init__(self) -> None:
        check_truth("simulate", self.simulate)
        check_truth("make_slices", self.make_slices)

    @classmethod
    def resolve(cls, name: str) -> Local:
        """This machine; it has no parts that have names."""
        if name:
            raise ConfigError(f"--infra local/{name}: expected {cls.expected}")
        return cls()

    def validate(self, request: NodeRequest) -> list[str]:
        """Its loopback addresses are limited."""
        if request.num_nodes <= _MOST_NODES:
            return []
        return [
            f"{request.num_nodes} nodes on this machine alone: expected {_MOST_NODES} at most; "
            f"for more, run on hosts with --infra ssh/NAME"
        ]

    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        """Share this machine's GPUs between the nodes, or simulate what it lacks."""
        self.check(request)
        if (profiles := request.resources.get("mig")) is not None:
            return self._plan_slices(request, profiles)
        nodes, gpus = request.num_nodes, local_gpus()
        have = f"this machine has {_counted(gpus)}{bound_text(os.environ.get(VISIBLE))}"
        if request.accelerators is None:
            each = len(gpus) // nodes
            lines = (f"{have} for {nodes} nodes, which run on CPU; nodes={len(gpus)} uses it",)
            name = gpus[0].name if gpus else None
            return self._plan(request, gpus, each, name, () if each or not gpus else lines)
        if not request.accelerators:
            return self._plan(request, (), 0, None)
        if allocation is not None and "simulated" in allocation.settings:  # as it was decided then
            name, count = request.accelerators[0]
            return self._plan(request, gpus, count, name, simulated=allocation.settings["simulated"])
        for name, count in request.accelerators:
            matching = tuple(gpu for gpu in gpus if gpu.name == name)
            if len(matching) >= count * nodes:
                return self._plan(request, matching, count, name)
        refuse_misspelt(name for name, _ in request.accelerators)
        name, count = request.accelerators[0]
        asked = f"{nodes} × {name}:{count}"
        if not (self.simulate and request.simulate):
            raise AcceleratorsLacking(asked, f"can't be had: {have}", can_simulate=True)
        if len(gpus) >= count * nodes:
            line = f"{asked} was requested; {have}, which are used instead"
            found = self._plan(request, gpus, count, gpus[0].name, (line,))
            return dataclasses.replace(found, accelerator=name)
        return self._plan(request, (), count, name, (f"{asked} simulated on CPU: {have}",), simulated=True)

    def _plan_slices(self, request: NodeRequest, profiles: Sequence[str]) -> Plan:
        """Share the MIG slices that there are, or simulate those of a card."""
        ((name, count),) = request.accelerators or ()
        asked = _asked_slices(request)
        left = _slices_of(name)
        taken: list[tuple[Gpu, ...]] = []
        for _ in range(request.num_nodes):
            found = [left.pop(at) for each in profiles if (at := _index(left, each)) is not None]
            taken.append(tuple(found))
        if all(len(each) == count for each in taken):
            # One profile alone: any of its slices will do, so that those which others hold can be passed over.
            same = tuple(gpu for gpu in _slices_of(name) if gpu.mig == profiles[0])
            plan = self._plan(request, same, count, name)
            nodes = (
                plan.nodes
                if len({*profiles}) == 1
                else tuple(dataclasses.replace(node, gpus=gpus) for node, gpus in zip(plan.nodes, taken, strict=True))
            )
        elif any(gpu.name == name for gpu in local_gpus()) or not (self.simulate and request.simulate):
            there = ", ".join(gpu.mig for gpu in _slices_of(name)) or "none"
            raise AcceleratorsLacking(
                asked,
                f"can't be had: the slices of this machine are {there}. Where nobody uses the card, its administrator "
                f"makes them: nvidia-smi -i 0 -mig 1; nvidia-smi mig -i 0 -cgi {','.join(profiles)} -C. "
                f"sky.Local(make_slices=True), as root, makes slices for a pool and removes them",
            )
        else:
            line = f"{asked} simulated on CPU: this machine has no {name}"
            plan = self._plan(request, (), count, name, (line,), simulated=True)
            nodes = plan.nodes
        env = {MIG_VARIABLE: ",".join(profiles)}
        return dataclasses.replace(plan, nodes=tuple(dataclasses.replace(n, env={**n.env, **env}) for n in nodes))

    def _plan(
        self,
        request: NodeRequest,
        gpus: tuple[Gpu, ...],
        count: int,
        name: str | None,
        lines: tuple[str, ...] = (),
        *,
        simulated: bool = False,
    ) -> Plan:
        env = {"ATOLL_SIMULATED": "1"} if simulated else {}
        if simulated or (gpus and not count):
            env[VISIBLE] = ""
        name = name if count else None
        ranks = request.num_ranks(count)
        planned = tuple(
            NodePlan(node, _address(node), ranks, name, count, in_turn(gpus, node, count) if count else (), env)
            for node in range(request.num_nodes)
        )
        allocation = Allocation(
            infra=self.infra,
            id=request.id,
            nodes=tuple(AllocatedNode(name=_hostname(request.id, at.node), address=at.addr) for at in planned),
            settings={"simulated": simulated},
        )
        return Plan(self.name, planned, simulated, bool(gpus and count), lines, name, count, allocation)

    def provision(self, request: NodeRequest, report: Report, have: Allocation | None = None) -> Allocation:
        """Make the MIG slices that are missing, where that was asked for."""
        profiles = request.resources.get("mig")
        if self.make_slices and profiles:
            self._make_slices(request, Counter([*profiles] * request.num_nodes), report)
        try:
            return self.plan(request).allocation
        except BaseException:
            remove_slices(request.id)
            raise

    def _make_slices(self, request: NodeRequest, wanted: Counter[str], report: Report) -> None:
        ((name, _),) = request.accelerators or ()
        free = [gpu for gpu in _slices_of(name) if not holders([gpu.device])]
        missing = [*(wanted - Counter(gpu.mig for gpu in free)).elements()]
        cards = [(gpu.index, gpu.uuid) for gpu in local_gpus() if gpu.name == name and not gpu.mig]
        if not missing or not cards:
            return
        if os.geteuid() != 0:
            why = "only root makes slices (make_slices=True), and this is another user"
        else:
            holder = lease_wish((), 0, f"the maker of slices for pool {request.id}")["holder"]
            why = make_slices(request.id, cards, missing, holder) or ""
        if why:
            raise AcceleratorsLacking(_asked_slices(request), f"can't be had: {why}")
        report(f"made MIG slices {', '.join(missing)}, which are removed after the pool")

    def release(self, allocation: Allocation, *, keep_disks: bool) -> Allocation:
        """Remove the MIG slices that were made for it."""
        remove_slices(allocation.id)
        return Provider.release(self, allocation, keep_disks=keep_disks)

    def examine(self) -> Iterator[tuple[bool, str]]:
        """Tools, namespaces, networks, GPUs."""
        for tool, why in _TOOLS.items():
            if shutil.which(tool) is None:
                yield False, f"{tool} is missing, and {why}: apt-get install {tool}"
        own = isolation()
        if own.refused is None:
            yield True, "nodes have their own processes, host name and /tmp"
        else:
            shared = "processes" if own.command else "processes, host name and /tmp"
            yield True, f"nodes share {shared} with this machine: {own.refused}"
        try:
            Network.start("(check)").close()
            yield True, "clusters are network-isolated: two can use the same port, and they reach each other"
        except NetworkUnavailable as error:
            yield (
                True,
                f"clusters share this machine's network, so jobs with the same port wait for each other: {error}",
            )
        report = gpu_report()
        names = ", ".join(f"{gpu.name} ({gpu.memory_gb:.0f} GB)" for gpu in report.gpus)
        yield True, f"GPUs: {names}" if names else f"no GPU ({report.reason}); they are simulated"

    def gpu_rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        """This machine's, and who holds them."""
        report = gpu_report()
        held = holders(gpu.device for gpu in report.gpus)
        rows = [gpu_row(gpu, held_by=held.get(gpu.device)) for gpu in report.gpus]
        return rows, [] if rows else [f"no GPU: {report.reason}"]

    def address(self, allocation: Allocation) -> str:
        """Its own on the clusters' bridge; the head's where clusters share this machine's network."""
        if reason_unavailable() is None and first_granted(("--net",))[0]:
            return address_of(allocation.id)
        return _address(0)

    def open(self, allocation: Allocation, request: NodeRequest, folder: Path, owner: str) -> Session:
        """Nodes for tasks: with homes below the cluster's folder, and a network of their own where that can be had."""
        return LocalSession(self, allocation, request, folder)

    def launch_agents(self, allocation: Allocation, nodes: Sequence[NodePlan], boot: Boot) -> Iterator[LocalNode]:
        """Start agents one by one, which takes milliseconds."""
        return (start_agent(boot, node.place, f"ATOLL_POOL_TAG={boot.tag}.{node.node}") for node in nodes)


PROVIDER = Local


def _address(node: int) -> str:
    return f"127.0.{node // 254}.{node % 254 + 1}"


def _asked_slices(request: NodeRequest) -> str:
    ((name, _),) = request.accelerators or ()
    return f"{request.num_nodes} × {name} with slices {', '.join(request.resources['mig'])}"


def _slices_of(name: str) -> list[Gpu]:
    """MIG slices of this machine's cards of a name, those that nobody holds first."""
    slices = [gpu for gpu in local_slices() if gpu.name == name]
    held = holders(gpu.device for gpu in slices)
    return sorted(slices, key=lambda gpu: gpu.device in held)


def _index(gpus: Sequence[Gpu], profile: str) -> int | None:
    return next((at for at, gpu in enumerate(gpus) if gpu.mig == profile), None)


def _hostname(cluster: str, node: int) -> str:
    role = "-head" if node == 0 else f"-worker{node}"
    return cluster[: _LONGEST_HOSTNAME - len(role)] + role


def _counted(gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return "no GPU"
    names = {gpu.name: sum(other.name == gpu.name for other in gpus) for gpu in gpus}
    return ", ".join(f"{num} × {name}" for name, num in names.items())
