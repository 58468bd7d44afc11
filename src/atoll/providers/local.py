"""Nodes on this machine: each an agent of its own, in its own PID namespace where the kernel allows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from atoll.agent import orphans
from atoll.agent.leases import holders
from atoll.core.errors import ConfigError, death_reason
from atoll.core.validation import check_truth, suggests_fields
from atoll.providers.base import (
    AcceleratorsLacking,
    AllocatedNode,
    Allocation,
    Boot,
    NodePlace,
    NodePlan,
    NodeRequest,
    Plan,
    Provider,
    Session,
    gpu_row,
)
from atoll.providers.gpus import VISIBLE, Gpu, bound_text, gpu_report, local_gpus
from atoll.providers.network import Network, NetworkUnavailable, address_of, entering, reason_unavailable

# The agent needs to find its interpreter's libraries; the user's variables go to ranks, not through its environment.
_AGENT_ENV = ("PATH", "LD_LIBRARY_PATH")
_NAMESPACES = ("pid", "mnt", "uts", "net")
_MOST_NODES = 1000
_TOOLS = {"bash": "tasks' scripts need it", "git": "a workdir's .gitignore needs it", "ssh": "ssh hosts need it"}
_LONGEST_HOSTNAME = 63  # that the kernel takes
_SOURCE_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = f"import sys; sys.path.insert(0, {_SOURCE_ROOT!r}); from atoll.agent.node import main; main()"
_REASON_S = 1.0  # a channel ends before its agent can be asked how that ended: what is below it ends in between
_END_S = 2.0  # an agent whose channel is closed gets this long to end its ranks and remove its files


@suggests_fields
@dataclass(frozen=True, slots=True)
class Local(Provider):
    """Nodes on this machine; the default provider.

    Args:
        simulate: run on CPU what asks for accelerators the machine lacks, and say so in one line. With False
            such a pool is refused.

    Raises:
        ConfigError: ``simulate`` is neither True nor False.
    """

    kind: ClassVar[str] = "local"
    form: ClassVar[str] = "local"
    expected: ClassVar[str] = "local alone: it is this machine"

    simulate: bool = True

    def __post_init__(self) -> None:
        check_truth("simulate", self.simulate)

    @classmethod
    def resolve(cls, name: str) -> Local:
        """This machine; it has no parts that have names."""
        if name:
            raise ConfigError(f"--infra local/{name}: expected {cls.expected}")
        return cls()

    def validate(self, request: NodeRequest) -> list[str]:
        """Its addresses are used up at some point."""
        if request.num_nodes <= _MOST_NODES:
            return []
        return [
            f"{request.num_nodes} nodes on this machine alone: expected {_MOST_NODES} at most; "
            f"for more, run on hosts with --infra ssh/NAME"
        ]

    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        """Share this machine's GPUs between the nodes, or simulate what it lacks."""
        self.check(request)
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
        name, count = request.accelerators[0]
        asked = f"{nodes} × {name}:{count}"
        if not (self.simulate and request.simulate):
            raise AcceleratorsLacking(asked, f"can't be had: {have}", can_simulate=True)
        if len(gpus) >= count * nodes:
            line = f"{asked} was requested; {have}, which are used instead"
            found = self._plan(request, gpus, count, gpus[0].name, (line,))
            return dataclasses.replace(found, accelerator=name)
        return self._plan(request, (), count, name, (f"{asked} simulated on CPU: {have}",), simulated=True)

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
        if reason_unavailable() is None and _first_granted(("--net",))[0]:
            return address_of(allocation.id)
        return _address(0)

    def open(self, allocation: Allocation, request: NodeRequest, folder: Path, owner: str) -> Session:
        """Nodes for tasks: with homes below the cluster's folder, and a network of their own where that can be had."""
        from atoll.providers.local_session import LocalSession

        return LocalSession(self, allocation, request, folder)

    def launch_agents(self, allocation: Allocation, nodes: Sequence[NodePlan], boot: Boot) -> Iterator[LocalNode]:
        """Start agents one by one, which takes milliseconds."""
        return (self._launch(node, boot) for node in nodes)

    def _launch(self, node: NodePlan, boot: Boot) -> LocalNode:
        """Start one; its channel is one end of a socket pair, so nothing listens anywhere."""
        ours, theirs = socket.socketpair()
        pidfd = os.pidfd_open(os.getpid())
        env = {name: os.environ[name] for name in _AGENT_ENV if name in os.environ}
        if boot.owner:
            env[orphans.VARIABLE] = boot.owner
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as given:
            failed.callback(ours.close)
            given.callback(theirs.close)
            given.callback(os.close, pidfd)
            proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
            given.callback(os.close, proc)
            said = None
            if node.place is None:
                prefix = _namespace()
            else:
                own = isolation().command
                prefix = (*(entering(node.place.network) if node.place.network and own else ()), *own)
                env["ATOLL_PLACE"] = _placed(node.place)
                said = failed.enter_context(open(os.memfd_create("atoll-agent"), "r+b"))
            process = subprocess.Popen(
                [*prefix, *(boot.agent or agent_command()), str(theirs.fileno()), str(pidfd), str(proc)],
                pass_fds=(theirs.fileno(), pidfd, proc),
                stdin=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
                env=env,
            )
            failed.pop_all()
        return LocalNode(ours, process, said)


PROVIDER = Local


def agent_command() -> list[str]:
    """How an agent is started on this machine. It needs nothing but the standard library."""
    return [sys.executable, "-I", "-S", "-c", _BOOT]


def _address(node: int) -> str:
    return f"127.0.{node // 254}.{node % 254 + 1}"


def _hostname(cluster: str, node: int) -> str:
    role = "-head" if node == 0 else f"-worker{node}"
    return cluster[: _LONGEST_HOSTNAME - len(role)] + role


class LocalNode:
    """A running agent on this machine. What a task's agent says on its standard error is in the file ``said``."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes], said: BinaryIO | None) -> None:
        self.channel = channel
        self.process = process
        self._said = said

    def listen(self, on_silence: Callable[[float, str], object]) -> None:
        """It is never silent: its channel ends with its agent."""

    @property
    def reason(self) -> str | None:
        """How its agent ended, or None while that lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(_REASON_S)
            if code < 0:
                return f"its agent was {death_reason(None, -code, False)}"
            last = self._last_line()
            return f"its agent {death_reason(code, None, False)}" + (f" ({last})" if last else "")
        return None

    def _last_line(self) -> str:
        if self._said is None or self._said.closed:
            return ""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def stop(self) -> None:
        """End the agent by force, and with it everything in its namespace."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)  # who reads it at this moment sees its end
        self.channel.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._said is not None:
            self._said.close()


@dataclass(frozen=True, slots=True)
class Isolation:
    """How a node's agent gets namespaces of its own.

    Attributes:
        command: what its command starts with; empty where it gets none.
        refused: why something stays shared, or None where nothing does.
    """

    command: tuple[str, ...]
    refused: str | None


def isolation() -> Isolation:
    """What this kernel gives a task's node: its own processes, host name and mounts, or the last two, or nothing."""
    if os.environ.get("ATOLL_PID_NAMESPACE") == "0":
        return Isolation((), "ATOLL_PID_NAMESPACE=0")
    return _probed_isolation()


@functools.cache
def _probed_isolation() -> Isolation:
    # The agent mounts and names the host itself, for which it keeps its rights over its own user namespace.
    whole, said = _first_granted((*_OWN_PROCESSES, "--uts"), "--keep-caps")
    if whole:
        return Isolation(whole, None)
    part, _ = _first_granted(("--mount", "--propagation", "slave", "--uts"), "--keep-caps")
    return Isolation(part, said)


def _namespace() -> tuple[str, ...]:
    """The command that gives an agent its own PID namespace, or nothing where the kernel refuses one.

    In a namespace the kernel itself kills everything below an agent that dies; elsewhere the agent is a subreaper
    and finds its processes in ``/proc``. ``ATOLL_PID_NAMESPACE=0`` chooses that by hand.
    """
    return () if os.environ.get("ATOLL_PID_NAMESPACE") == "0" else _probed()


@functools.cache
def _probed() -> tuple[str, ...]:
    return _first_granted(_OWN_PROCESSES)[0]


# Mounts made on the machine later on, by an automounter say, still show up inside.
_OWN_PROCESSES = ("--pid", "--mount-proc", "--propagation", "slave", "--fork", "--kill-child=SIGKILL")
# As another user than root, a user namespace gives the right to make the others.
_AS_USER = ("--user", "--map-current-user")


def _first_granted(options: tuple[str, ...], *as_user: str) -> tuple[tuple[str, ...], str]:
    """The ``unshare`` command with these options, for root or for a user; or nothing, and what the kernel said."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return (), "unshare is not installed; it is part of util-linux"
    said = ""
    for command in ((unshare, *options), (unshare, *options, *_AS_USER, *as_user)):
        probe = subprocess.run(
            [*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        if probe.returncode == 0:
            return command, ""
        said = probe.stderr.strip()
    return (), said or "unshare failed"


def _placed(place: NodePlace) -> str:
    """What an agent is told of its place. With it go our namespaces: those that differ from them are its own."""
    outside = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in _NAMESPACES}
    return json.dumps({**dataclasses.asdict(place), "outside": outside, "refused": isolation().refused})


def in_turn(gpus: tuple[Gpu, ...], node: int, count: int) -> tuple[Gpu, ...]:
    """The GPUs with a node's own share first: neighbours stay together, and nodes start out with different ones."""
    own = node * count % len(gpus) if gpus else 0
    return (*gpus[own:], *gpus[:own])


def _counted(gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return "no GPU"
    names = {gpu.name: sum(other.name == gpu.name for other in gpus) for gpu in gpus}
    return ", ".join(f"{num} × {name}" for name, num in names.items())
