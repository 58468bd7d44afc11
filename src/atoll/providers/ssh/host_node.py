"""A node on a host: what is planned there, and its agent once that runs."""

from __future__ import annotations

import contextlib
import json
import posixpath
import secrets
import socket
import subprocess
from collections.abc import Callable

from atoll.core.errors import ProvisionError
from atoll.providers.base import Bundle, NodePlan, Starting
from atoll.providers.ssh.connection import Connection, connections
from atoll.providers.ssh.facts import python_command
from atoll.providers.ssh.hosts import HERE, Facts, Target
from atoll.providers.ssh.remote import put
from atoll.wire.resumable_client import LinkedChannel

_BOOT = "import sys; sys.path.insert(0, {bundle!r}); from atoll.agent.{module} import main; main()"


def node_plan(host: Facts, node: int, code: Bundle, *, num_ranks: int, grace_s: float) -> NodePlan:
    """A node on a host, without accelerators; its ranks share the cores, and find programs beside their Python."""
    programs, path = posixpath.dirname(host.executable), host.env.get("PATH", "")
    if programs not in path.split(":"):
        path = f"{programs}:{path}" if path else programs
    return NodePlan(
        node=node,
        is_elsewhere=True,
        reach=str(host.target),
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
        bundles=(code,),
        present=host.bundles,
        grace_s=grace_s,
        seen=host.seen,
    )


def start_agent(target: Target, plan: NodePlan, owner: str = "", starting: Starting = lambda stop: None) -> SSHNode:
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
            put(connection, plan, each)
        node = SSHNode(connection, plan, owner)
        starting(node.end)
        node.start()
    except BaseException:
        connections.release(target)
        raise
    return node


class SSHNode:
    """A running agent on a host."""

    def __init__(self, connection: Connection, plan: NodePlan, owner: str = "") -> None:
        self._on_silence: Callable[[float, str], object] = lambda silent_s, line: None
        self._connection = connection
        self._plan = plan
        name = f"{owner}.{secrets.token_hex(8)}" if owner else secrets.token_hex(8)
        self._folder = f"{plan.tmp}/atoll-link-{name}"  # never on a shared disk: it holds a socket
        self._stopped = False
        self.end_hung: Callable[[], object] | None = None
        self._link = LinkedChannel(
            self._connect,
            grace_s=plan.grace_s,
            name=plan.host,
            on_silence=self._silence,
            is_noise=connection.target.is_noise,
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
        if self.end_hung is not None and not self.is_over:  # it hangs, is stopped, or can't be reached
            with contextlib.suppress(ProvisionError):  # the next job's start, or the cluster's end, tells
                self.end_hung()
