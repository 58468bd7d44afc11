"""A provider in one file: every node is a process of this machine in a folder of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import atoll
from atoll.core.errors import ConfigError
from atoll.core.paths import atoll_home
from atoll.providers.base import AllocatedNode, Allocation, Boot, NodePlan, NodeRequest, Plan, Provider

_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from atoll.agent.node import main; main()"


class Agent:
    """A process that runs a node's agent."""

    def __init__(self, name: str) -> None:
        self.channel, theirs = socket.socketpair()
        fds = (theirs.fileno(), os.pidfd_open(os.getpid()), os.open("/proc", os.O_RDONLY | os.O_DIRECTORY))
        source = str(Path(atoll.__file__).parents[1])
        command = [sys.executable, "-I", "-S", "-c", _BOOT, source, *map(str, fds)]
        self._name = name
        self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        for fd in fds[1:]:
            os.close(fd)

    def listen(self, on_silence: Callable[[float, str], object]) -> None:
        """It is never silent."""

    @property
    def reason(self) -> str | None:
        """How it ended."""
        return None if self._process.poll() is None else f"{self._name} ended with {self._process.returncode}"

    def stop(self) -> None:
        """End it; its agent ends what it runs."""
        self.channel.close()
        self._process.wait()


class Folders(Provider):
    """``folders/N``: at most N nodes."""

    kind: ClassVar[str] = "folders"
    form: ClassVar[str] = "folders/N"

    def __init__(self, most: int = 4) -> None:
        self.most = most

    @classmethod
    def resolve(cls, name: str) -> Folders:
        if not name.isdigit():
            raise ConfigError(f"folders/{name}: expected a number of nodes, as in folders/4")
        return cls(int(name))

    @property
    def infra(self) -> str:
        return f"folders/{self.most}"

    def validate(self, request: NodeRequest) -> list[str]:
        return [f"{self.infra} has {self.most} nodes"] if request.num_nodes > self.most else []

    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        self.check(request)
        root = atoll_home() / "folders" / request.id
        names = [f"folder{node}" for node in range(request.num_nodes)]
        nodes = tuple(
            NodePlan(
                at,
                f"127.0.0.{at + 1}",
                request.num_ranks(0),
                host=name,
                home=str(root),
                workdir=str(root),
                tmp=tempfile.gettempdir(),
            )
            for at, name in enumerate(names)
        )
        given = Allocation(
            infra=self.infra,
            id=request.id,
            nodes=tuple(AllocatedNode(name=node.host, address=node.addr) for node in nodes),
        )
        return Plan(self.name, nodes, allocation=allocation or given)

    def launch_agents(self, allocation: Allocation, nodes: Sequence[NodePlan], boot: Boot) -> Iterator[Agent]:
        for node in nodes:
            if boot.job:  # a task's node: its folders are made here
                Path(node.home).mkdir(parents=True, exist_ok=True)
                Path(boot.tmp(node)).mkdir()
            yield Agent(node.host)


PROVIDER = Folders
