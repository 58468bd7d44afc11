"""Nodes on this machine: each an agent of its own, in its own PID namespace where the kernel allows."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.core.errors import ConfigError
from atoll.core.hints import suggests_fields
from atoll.providers.accelerators import AcceleratorSpec
from atoll.providers.base import NodePlan, Plan
from atoll.providers.gpus import Gpu, local_gpus

# The agent needs to find its interpreter's libraries; the user's variables go to ranks, not through its environment.
_AGENT_ENV = ("PATH", "LD_LIBRARY_PATH")


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
        if not isinstance(self.simulate, bool):
            raise ConfigError(f"Local(simulate={self.simulate!r}): expected True or False")

    @property
    def name(self) -> str:
        """``local``."""
        return "local"

    def plan(self, *, nodes: int, accelerator: AcceleratorSpec | None, workers_per_node: int | str) -> Plan:
        """Share this machine's GPUs between the nodes, or simulate what it lacks."""
        gpus = local_gpus()
        if accelerator is None:
            shares = _shares(gpus, nodes)
            name = gpus[0].name if gpus else None
            return self._plan(shares, name, nodes, workers_per_node, False, ())
        wanted = accelerator.count * nodes
        matching = tuple(gpu for gpu in gpus if gpu.name == accelerator.name)
        if len(matching) >= wanted:
            return self._plan(
                _cut(matching, nodes, accelerator.count), accelerator.name, nodes, workers_per_node, False, ()
            )
        have = f"this machine has {_counted(gpus)}"
        asked = f"{nodes} × {accelerator.name}:{accelerator.count}"
        if not self.simulate:
            raise ConfigError(
                f"accelerator={asked} can't be had: {have}. Leave accelerator out, ask for less, or let "
                f"Local(simulate=True) run it on CPU"
            )
        if len(gpus) >= wanted:
            line = f"{asked} was asked for; {have}, which are used instead"
            return self._plan(
                _cut(gpus, nodes, accelerator.count), gpus[0].name, nodes, workers_per_node, False, (line,)
            )
        line = f"{asked} simulated on CPU: {have}"
        none: list[tuple[Gpu, ...]] = [()] * nodes
        return self._plan(none, accelerator.name, nodes, workers_per_node, True, (line,), accelerator.count)

    def _plan(
        self,
        shares: list[tuple[Gpu, ...]],
        name: str | None,
        nodes: int,
        workers_per_node: int | str,
        simulated: bool,
        lines: tuple[str, ...],
        count: int = 0,
    ) -> Plan:
        planned = []
        for node, share in enumerate(shares):
            num = count if simulated else len(share)
            ranks = workers_per_node if isinstance(workers_per_node, int) else max(1, num)
            env = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid or str(gpu.index) for gpu in share)}
            if not share and not simulated:
                env = {}
            if simulated:
                env["ATOLL_SIMULATED"] = "1"
            planned.append(NodePlan(node, f"127.0.0.{node % 254 + 1}", ranks, name if num else None, num, env))
        return Plan(self.name, tuple(planned), simulated, any(shares), lines)

    def start(self, node: NodePlan, agent: Sequence[str]) -> LocalNode:
        """Start the node's agent; its channel is one end of a socket pair, so nothing listens anywhere."""
        ours, theirs = socket.socketpair()
        pidfd = os.pidfd_open(os.getpid())
        try:
            process = subprocess.Popen(
                [*_namespace(), *agent, str(theirs.fileno()), str(pidfd)],
                pass_fds=(theirs.fileno(), pidfd),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={name: os.environ[name] for name in _AGENT_ENV if name in os.environ},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(pidfd)
            theirs.close()
        return LocalNode(ours, process)


class LocalNode:
    """A running agent on this machine."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.channel = channel
        self.process = process

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


def _namespace() -> tuple[str, ...]:
    """The command that gives an agent its own PID namespace, or nothing where the kernel refuses one.

    In a namespace the kernel itself kills everything below an agent that dies; elsewhere the agent is a subreaper
    and finds its processes in ``/proc``. ``ATOLL_PID_NAMESPACE=0`` chooses that by hand.
    """
    return () if os.environ.get("ATOLL_PID_NAMESPACE") == "0" else _probed()


@functools.cache
def _probed() -> tuple[str, ...]:
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    # Mounts made on the machine later on, by an automounter say, still show up inside.
    base = (unshare, "--pid", "--mount-proc", "--propagation", "slave", "--fork", "--kill-child=SIGKILL")
    for command in (base, (*base, "--user", "--map-current-user")):
        probe = subprocess.run([*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if probe.returncode == 0:
            return command
    return ()


def _shares(gpus: tuple[Gpu, ...], nodes: int) -> list[tuple[Gpu, ...]]:
    """Each node's part: equal blocks; with fewer GPUs than nodes, nodes share them."""
    if not gpus:
        return [()] * nodes
    if len(gpus) < nodes:
        return [(gpus[node % len(gpus)],) for node in range(nodes)]
    return _cut(gpus, nodes, len(gpus) // nodes)


def _cut(gpus: tuple[Gpu, ...], nodes: int, count: int) -> list[tuple[Gpu, ...]]:
    return [gpus[node * count : (node + 1) * count] for node in range(nodes)]


def _counted(gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return "no GPU"
    names = {gpu.name: sum(other.name == gpu.name for other in gpus) for gpu in gpus}
    return ", ".join(f"{num} × {name}" for name, num in names.items())
