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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from atoll.core.errors import ConfigError, death_reason
from atoll.core.validation import check_truth, suggests_fields
from atoll.providers.accelerators import AcceleratorSpec
from atoll.providers.base import NodePlace, NodePlan, Plan
from atoll.providers.gpus import VISIBLE, Gpu, bound_text, local_gpus

# The agent needs to find its interpreter's libraries; the user's variables go to ranks, not through its environment.
_AGENT_ENV = ("PATH", "LD_LIBRARY_PATH")
_NAMESPACES = ("pid", "mnt", "uts", "net")
_REASON_S = 1.0  # a channel ends before its agent can be asked how that ended: what is below it ends in between
_END_S = 2.0  # an agent whose channel is closed gets this long to end its ranks and remove its files


@suggests_fields
@dataclass(frozen=True, slots=True)
class Local:
    """Nodes on this machine; the default provider.

    Args:
        simulate: run on CPU what asks for accelerators the machine lacks, and say so in one line. With False
            such a pool is refused.

    Raises:
        ConfigError: ``simulate`` is neither True nor False.
    """

    simulate: bool = True

    def __post_init__(self) -> None:
        check_truth("simulate", self.simulate)

    @property
    def name(self) -> str:
        """``local``."""
        return "local"

    def plan(self, *, nodes: int, accelerator: AcceleratorSpec | None, workers_per_node: int | str) -> Plan:
        """Share this machine's GPUs between the nodes, or simulate what it lacks."""
        gpus = local_gpus()
        have = f"this machine has {_counted(gpus)}{bound_text(os.environ.get(VISIBLE))}"
        if accelerator is None:
            each = len(gpus) // nodes
            lines = (f"{have} for {nodes} nodes, which run on CPU; nodes={len(gpus)} uses it",)
            name = gpus[0].name if gpus else None
            return self._plan(gpus, each, name, nodes, workers_per_node, () if each or not gpus else lines)
        wanted = accelerator.count * nodes
        matching = tuple(gpu for gpu in gpus if gpu.name == accelerator.name)
        if len(matching) >= wanted:
            return self._plan(matching, accelerator.count, accelerator.name, nodes, workers_per_node)
        asked = f"{nodes} × {accelerator.name}:{accelerator.count}"
        if not self.simulate:
            raise ConfigError(
                f"accelerator={asked} can't be had: {have}. Leave accelerator out, ask for less, or let "
                f"Local(simulate=True) run it on CPU"
            )
        if len(gpus) >= wanted:
            line = f"{asked} was asked for; {have}, which are used instead"
            return self._plan(gpus, accelerator.count, gpus[0].name, nodes, workers_per_node, (line,))
        line = f"{asked} simulated on CPU: {have}"
        return self._plan((), accelerator.count, accelerator.name, nodes, workers_per_node, (line,), simulated=True)

    def _plan(
        self,
        gpus: tuple[Gpu, ...],
        count: int,
        name: str | None,
        nodes: int,
        workers_per_node: int | str,
        lines: tuple[str, ...] = (),
        *,
        simulated: bool = False,
    ) -> Plan:
        ranks = workers_per_node if isinstance(workers_per_node, int) else max(1, count)
        env = {"ATOLL_SIMULATED": "1"} if simulated else {}
        if simulated or (gpus and not count):
            env[VISIBLE] = ""
        planned = []
        for node in range(nodes):
            may = in_turn(gpus, node, count) if count else ()
            addr = f"127.0.0.{node % 254 + 1}"
            planned.append(NodePlan(node, addr, ranks, name if count else None, count, may, env))
        return Plan(self.name, tuple(planned), simulated, bool(gpus and count), lines)

    def start(self, node: NodePlan, agent: Sequence[str], env: Mapping[str, str] | None = None) -> LocalNode:
        """Start the node's agent; its channel is one end of a socket pair, so nothing listens anywhere.

        ``env`` are more variables for the agent itself.
        """
        ours, theirs = socket.socketpair()
        pidfd = os.pidfd_open(os.getpid())
        env = {**{name: os.environ[name] for name in _AGENT_ENV if name in os.environ}, **(env or {})}
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
                prefix = _into(node.place.network) + isolation().command
                env["ATOLL_PLACE"] = _placed(node.place)
                said = failed.enter_context(open(os.memfd_create("atoll-agent"), "r+b"))
            process = subprocess.Popen(
                [*prefix, *agent, str(theirs.fileno()), str(pidfd), str(proc)],
                pass_fds=(theirs.fileno(), pidfd, proc),
                stdin=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
                env=env,
            )
            failed.pop_all()
        return LocalNode(ours, process, said)


class LocalNode:
    """A running agent on this machine. What a task's agent says on its standard error is in the file ``said``."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes], said: BinaryIO | None) -> None:
        self.channel = channel
        self.process = process
        self._said = said

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
        return (), "there is no unshare program; it comes with util-linux"
    said = ""
    for command in ((unshare, *options), (unshare, *options, *_AS_USER, *as_user)):
        probe = subprocess.run(
            [*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        if probe.returncode == 0:
            return command, ""
        said = probe.stderr.strip()
    return (), said or "unshare failed"


def _into(network: str | None) -> tuple[str, ...]:
    """The command that enters a network namespace, and the user namespace that owns it where that isn't ours."""
    if network is None or not isolation().command:
        return ()
    user = os.path.join(os.path.dirname(network), "user")
    if os.readlink(user) == os.readlink("/proc/self/ns/user"):
        return ("nsenter", f"--net={network}")
    return ("nsenter", f"--user={user}", f"--net={network}", "--preserve-credentials")


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
