"""``SSH``: nodes on hosts that the user can log in to. Nothing has to be installed there but Python."""

from __future__ import annotations

import dataclasses
import functools
import json
import posixpath
import secrets
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.validation import check_seconds, suggests_fields
from atoll.providers.accelerators import AcceleratorSpec
from atoll.providers.base import NodePlan, Plan
from atoll.providers.gpus import Gpu
from atoll.providers.remote import RemotePlan, Starting
from atoll.providers.ssh import bundle, facts
from atoll.providers.ssh.connection import Connection, connections, on_each
from atoll.providers.ssh.facts import Facts, python_command
from atoll.providers.ssh.hosts import GRACE_S, HERE, Target, targets
from atoll.wire.resumable_client import LinkedChannel

_BOOT = "import sys; sys.path.insert(0, {bundle!r}); from atoll.agent.{module} import main; main()"


class AcceleratorsLacking(ConfigError):
    """A host lacks the accelerators that were asked for.

    Attributes:
        why: what is said after their name, however they were asked for.
    """

    def __init__(self, why: str, said: str) -> None:
        super().__init__(said)
        self.why = why


@suggests_fields
@dataclass(frozen=True, slots=True)
class SSH:
    """Nodes on hosts reached with the user's own ``ssh``: one a host, the first is the head.

    Args:
        hosts: ``"gpu-1"``, ``"user@a"``, ``"b:2222"``, or ``"gpu-*"`` for the Hosts of ``~/.ssh/config`` it fits.
        key: path of a private key; None leaves it to ssh.
        jump: a jump host, as ``ssh -J`` takes it.
        python: the interpreter there; ``python3`` by default. It needs the minor version of this one.
        grace_s: how long a connection may be lost before its node counts as lost, in seconds.

    Raises:
        ConfigError: a value that cannot work.
    """

    hosts: Sequence[str] | str
    key: str | None = None
    jump: str | None = None
    python: str | None = None
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        hosts = (self.hosts,) if isinstance(self.hosts, str) else self.hosts
        if not isinstance(hosts, (list, tuple)):
            raise ConfigError(f"SSH(hosts={hosts!r}): expected a list of hosts, such as ['gpu-1', 'user@gpu-2']")
        if not hosts:
            raise ConfigError("SSH(hosts=[]): expected at least one host, such as SSH(hosts=['gpu-1', 'user@gpu-2'])")
        for name in ("key", "jump", "python"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"SSH({name}={value!r}): expected text or None")
        check_seconds("SSH(grace_s=)", self.grace_s)
        object.__setattr__(self, "hosts", tuple(hosts))
        self.targets()

    @property
    def name(self) -> str:
        """``ssh``."""
        return "ssh"

    @property
    def num_nodes(self) -> int:
        """How many nodes a pool gets that does not say how many."""
        return len(self.targets())

    def targets(self) -> tuple[Target, ...]:
        """Its hosts, with patterns filled in from the ssh config as it is now."""
        return targets(self.hosts, key=self.key, jump=self.jump, python=self.python)

    def plan(
        self,
        *,
        nodes: int,
        accelerator: AcceleratorSpec | None,
        workers_per_node: int | str,
        folder: str | None = None,
    ) -> Plan:
        """Ask the hosts, all at once, and plan one node on each.

        Args:
            folder: where ranks will work there, for its disk's free space; their homes by default.

        Raises:
            ConfigError: more nodes than hosts.
            AcceleratorsLacking: a host lacks the accelerators.
            ProvisionError: a host can't be used; the message says why and what to do.
        """
        found = self.targets()
        if nodes > len(found):
            raise ConfigError(f"nodes={nodes}: SSH(hosts={list(self.hosts)!r}) has {len(found)}; name more hosts")
        code = bundle.atoll_bundle()
        ask = functools.partial(facts.ask, digests=[(code.digest, code.name)], folder=folder)
        try:
            with connections.used(found[:nodes]) as logins:
                said = on_each(logins, ask)
        except ProvisionError as error:
            raise ProvisionError(where_to_type(error, found)) from None
        planned = [self._node(node, each, accelerator, workers_per_node) for node, each in enumerate(said)]
        lines = tuple(
            f"{each.target}: {each.gpu_problem}; it is used without GPUs" for each in said if each.gpu_problem
        )
        return Plan(self.name, tuple(planned), has_gpu=any(plan.num_accelerators for plan in planned), lines=lines)

    def _node(
        self, node: int, host: Facts, accelerator: AcceleratorSpec | None, workers_per_node: int | str
    ) -> RemotePlan:
        gpus = _fitting(host, accelerator)
        count = len(gpus) if accelerator is None else accelerator.count
        ranks = workers_per_node if isinstance(workers_per_node, int) else max(1, count)
        plan = remote_plan(host, node, num_ranks=ranks, grace_s=self.grace_s)
        name = gpus[0].name if gpus else None
        return dataclasses.replace(plan, accelerator=name, num_accelerators=count, gpus=gpus)

    def start(self, node: NodePlan, agent: Sequence[str]) -> SSHNode:
        """As ``start_remote``; ``agent`` is for this machine only."""
        return self.start_remote(node, lambda stop: None)

    def start_remote(self, node: NodePlan, starting: Starting) -> SSHNode:
        """Bring the code to the host where it lacks it, and start its agent.

        Raises:
            ProvisionError: the host can't be reached, or the agent does not start.
        """
        if not isinstance(node, RemotePlan):
            raise ProvisionError(f"node {node.node} was not planned by this provider")
        return start_agent(self.targets()[node.node], node, starting=starting)


def where_to_type(error: AtollError, found: Sequence[Target]) -> str:
    """What an error says; of a login from a head to another of its hosts also on which machine its remedy helps."""
    if found[0].host != HERE or "`ssh" not in str(error):
        return str(error)
    return f"{error}. That is to be typed on {socket.gethostname()}, from where the supervisor logs in"


def _fitting(host: Facts, accelerator: AcceleratorSpec | None) -> tuple[Gpu, ...]:
    if accelerator is None:
        return host.gpus
    fitting = tuple(gpu for gpu in host.gpus if gpu.name == accelerator.name)
    if len(fitting) < accelerator.count:
        have = ", ".join(gpu.name for gpu in host.gpus) or host.gpu_problem or "no GPU"
        why = f"can't be had on {host.target}: it has {have}"
        asked = f"accelerator={accelerator.name}:{accelerator.count}"
        raise AcceleratorsLacking(why, f"{asked} {why}; leave accelerator= out to use what is there")
    return fitting


def remote_plan(host: Facts, node: int, *, num_ranks: int, grace_s: float) -> RemotePlan:
    """A node on a host, without accelerators; its ranks share the cores, and find programs beside their Python."""
    programs, path = posixpath.dirname(host.executable), host.env.get("PATH", "")
    if programs not in path.split(":"):
        path = f"{programs}:{path}" if path else programs
    return RemotePlan(
        node=node,
        addr=host.addr,
        num_ranks=num_ranks,
        host=str(host.target),
        python=host.executable,
        python_version=host.python,
        home=host.home,
        folder=host.place,
        tmp=host.tmp,
        cores=host.cpus,
        base_env={"OMP_NUM_THREADS": str(max(1, host.cpus // num_ranks)), **host.env, "PATH": path},
        bundles=(bundle.atoll_bundle(),),
        present=host.bundles,
        grace_s=grace_s,
        seen=host.seen,
    )


def start_agent(target: Target, plan: RemotePlan, owner: str = "", starting: Starting = lambda stop: None) -> SSHNode:
    """Start an agent on a host, with the code it needs brought there first; returns once the host has answered.

    Args:
        target: the host.
        plan: what was planned there.
        owner: ``CLUSTER.DRIVER``: agents there of the cluster's earlier drivers are ended first.
        starting: is given what makes the start fail soon, from another thread; what it was given last counts.

    Raises:
        ProvisionError: the host can't be reached, its disk is full, or the agent does not start.
    """
    connection = connections.hold(target)
    try:
        starting(connection.abort)
        for each in plan.bundles:
            bundle.put(connection, plan, each)
        node = SSHNode(connection, plan, owner)
        starting(node.end)
        node.start()
    except BaseException:
        connections.release(target)
        raise
    return node


class SSHNode:
    """A running agent on a host."""

    def __init__(self, connection: Connection, plan: RemotePlan, owner: str = "") -> None:
        self._on_silence: Callable[[float, str], object] = lambda silent_s, line: None
        self._connection = connection
        self._plan = plan
        name = f"{owner}.{secrets.token_hex(8)}" if owner else secrets.token_hex(8)
        self._folder = f"{plan.tmp}/atoll-link-{name}"  # never on a shared disk: it holds a socket
        self._stopped = False
        self._link = LinkedChannel(
            self._connect,
            grace_s=plan.grace_s,
            name=plan.host,
            on_silence=self._silence,
        )
        self.channel: socket.socket = self._link.socket

    def start(self) -> None:
        """Start it, and wait for its answer.

        Raises:
            ProvisionError: there was none.
        """
        self._link.start()

    def listen(self, on_silence: Callable[[float, str], object]) -> None:
        """From now on, tell when the host has not been heard for so many seconds (0: it is again), and a line of it."""
        self._on_silence = on_silence

    def _connect(self, first: bool) -> subprocess.Popen[bytes]:
        plan = self._plan
        code = plan.import_path[0]
        arguments = ["attach", self._folder]
        if first:
            boot = _BOOT.format(bundle=code, module="node")
            agent = {"argv": [plan.python, "-I", "-S", "-c", boot], "pid_namespace": True}
            arguments = ["start", self._folder, f"{plan.grace_s:g}", json.dumps(agent)]
        if self._connection.target.host == HERE:
            arguments.append("here")
        boot = _BOOT.format(bundle=code, module="session")
        return self._connection.open(python_command(plan.python, boot, *arguments))

    def _silence(self, seconds: float) -> None:
        who = f"{self._plan.host} (node {self._plan.node})"
        if seconds:
            line = (
                f"{who} has not been heard for {seconds:.0f} s: frozen, cut off or switched off? "
                f"It counts as lost after {self._plan.grace_s:g} s"
            )
        else:
            line = f"{who} answers again"
        self._on_silence(seconds, line)

    @property
    def reason(self) -> str | None:
        """Why the host was lost."""
        return self._link.reason

    @property
    def owner(self) -> str:
        """What names its link, and all that runs over there for it."""
        return posixpath.basename(self._folder).removeprefix("atoll-link-")

    @property
    def is_over(self) -> bool:
        """Once it was stopped: did the host say that everything there has ended?"""
        return self._link.is_over

    def end(self) -> None:
        """End the agent."""
        self._link.stop()

    def stop(self) -> None:
        """End the agent, and log out where nobody else uses the login."""
        if self._stopped:
            return
        self._stopped = True
        self.end()
        connections.release(self._connection.target)
