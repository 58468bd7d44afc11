"""``SSH``: nodes on hosts that the user can log in to. Nothing has to be installed there but Python."""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.validation import check_seconds, command_line, suggests_fields
from atoll.providers.base import (
    AllocatedNode,
    Allocation,
    NodePlan,
    NodeRequest,
    Plan,
    Report,
)
from atoll.providers.gpus import gpu_row
from atoll.providers.ssh import facts, preflight, site
from atoll.providers.ssh.connection import connections, on_each
from atoll.providers.ssh.host_provider import HostProvider
from atoll.providers.ssh.hosts import GRACE_S, HERE, Group, Target, declared_groups, find_group, targets


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """What an allocation's record says of its hosts: how to log in, and how the head reaches the others."""

    key: str | None = None
    jump: str | None = None
    python: str | None = None
    grace_s: float = GRACE_S
    from_head: Sequence[str] = ()


@suggests_fields
@dataclass(frozen=True, slots=True)
class SSH(HostProvider):
    """Nodes on hosts reached with the user's own ``ssh``: one per host; the first is the head.

    Args:
        hosts: ``"gpu-1"``, ``"user@a"``, ``"b:2222"``, or ``"gpu-*"`` for the Hosts of ``~/.ssh/config`` it fits.
        key: path of a private key; None leaves it to ssh.
        jump: a jump host, as ``ssh -J`` takes it.
        python: the interpreter there; ``python3`` by default. It needs the minor version of this one.
        grace_s: how long a connection may be lost before its node counts as lost, in seconds.

    Raises:
        ConfigError: a value that cannot work.
    """

    kind: ClassVar[str] = "ssh"
    form: ClassVar[str] = "ssh/NAME"
    expected: ClassVar[str] = "ssh/NAME, with a NAME of ~/.ssh/config or of [ssh.NAME] in config.toml"
    undeclared: ClassVar[str] = (
        'no ssh hosts are declared: [ssh.lab] hosts = ["user@gpu-1"] in config.toml under ATOLL_HOME'
    )

    hosts: Sequence[str] | str
    key: str | None = None
    jump: str | None = None
    python: str | None = None
    grace_s: float = GRACE_S
    _group: Group = field(default=Group("", ()), init=False, repr=False)  # what config.toml says of them

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
    def infra(self) -> str:
        """``ssh/NAME`` where they are a group's."""
        return f"ssh/{self._group.name}" if self._group.name else self.kind

    @property
    def num_nodes(self) -> int:
        """How many nodes a pool gets that does not say how many."""
        return len(self.targets())

    @classmethod
    def declared(cls) -> list[str]:
        """Groups of ``config.toml``."""
        return [f"ssh/{name}" for name in declared_groups()]

    @classmethod
    def resolve(cls, name: str) -> SSH:
        """The hosts of a group, or a Host of the user's ssh config."""
        if not name:
            raise ConfigError(f"--infra ssh: expected {cls.expected}")
        group = find_group(name)
        one = group.targets[0]
        hosts = tuple(map(str, group.targets))
        return cls(hosts, one.key, one.jump, one.python, group.grace_s)._of_group(group)

    def _of_group(self, group: Group) -> SSH:
        object.__setattr__(self, "_group", group)
        return self

    @classmethod
    def of(cls, allocation: Allocation) -> SSH:
        """Its hosts as they were when it was made."""
        known = _Settings(**allocation.settings)
        made = cls([node.reach for node in allocation.nodes], known.key, known.jump, known.python, known.grace_s)
        name = allocation.infra.partition("/")[2]
        return made._of_group(Group(name, made.targets(), made.grace_s, allocation.workdir, allocation.max_restarts))

    @property
    def shared_workdir(self) -> str | None:
        """What ``config.toml`` says."""
        return self._group.workdir

    def targets_of(self, allocation: Allocation | None) -> tuple[Target, ...]:
        """Its hosts."""
        return self.targets()

    def target(self, reach: str) -> Target:
        """A host in any spelling."""
        (found,) = targets([reach], key=self.key, jump=self.jump, python=self.python)
        return found

    def targets(self) -> tuple[Target, ...]:
        """Its hosts, with patterns filled in from the ssh config as it is now."""
        return targets(self.hosts, key=self.key, jump=self.jump, python=self.python)

    def validate(self, request: NodeRequest) -> list[str]:
        """A host runs one node."""
        num_hosts, num_nodes = len(self.targets()), request.num_nodes
        if num_nodes <= num_hosts:
            return []
        if not self._group.name:
            return [f"nodes={num_nodes}: SSH(hosts={list(self.hosts)!r}) has {num_hosts}; name more hosts"]
        return [
            f"--num-nodes {num_nodes}: {self.infra} has {num_hosts} host{'s' if num_hosts != 1 else ''}; request "
            f"fewer, or declare more in config.toml under ATOLL_HOME"
        ]

    def _allocation(self, request: NodeRequest, planned: Sequence[NodePlan], code: str) -> Allocation:
        settings = _Settings(key=self.key, jump=self.jump, python=self.python, grace_s=self.grace_s)
        return Allocation(
            infra=self.infra,
            id=request.id,
            shares_machine=False,
            files="hosts",
            nodes=tuple(AllocatedNode(name=node.host, address=node.addr, reach=node.reach) for node in planned),
            files_in=request.files_in,
            workdir=self._group.workdir,
            python=self.python or "python3",
            max_restarts=self._group.max_restarts_on_lost_nodes,
            code=code,
            settings=dataclasses.asdict(settings),
        )

    def provision(self, request: NodeRequest, report: Report, have: Allocation | None = None) -> Allocation:
        """Look at the hosts, and decide where the supervisor runs: on the head if that can log in to the others.

        Raises:
            ProvisionError: something would make the ranks fail; one line for each such thing. Or the head of a cluster
                that is there has changed, or can't log in to the other hosts any more.
        """
        plan = self.plan(request)
        found, head = self.targets()[: request.num_nodes], plan.nodes[0]
        stays_here = request.supervised_here or (have is not None and have.supervised_here)
        if stays_here:
            preflight.check_hosts(found, plan.nodes, report, again=request.recheck)
            if not request.supervised_here:
                report("the supervisor runs on this machine. Keep it awake while jobs run")
            return plan.allocation
        if not request.recheck and have is not None and self._are_well(plan, have):
            preflight.check_hosts(found, plan.nodes, report, again=False)
            inside, why_not = have.settings["from_head"], None
        else:
            inside, why_not = site.check_with_head(found, plan.nodes, report)
        if have is not None and (why_not is not None or have.head.name != head.host):
            why = why_not if have.head.name == head.host else f"{head.host} is its head now"
            raise ProvisionError(
                f"cluster {request.id} is supervised from {have.head.name}, which can't continue: {why}. A supervisor "
                f"does not move: fix that, or `{command_line('atoll', 'down', request.id)}` and launch it again"
            )
        if why_not is not None:
            report(f"the supervisor runs on this machine, because {why_not}. Keep this machine awake while jobs run")
            return plan.allocation
        report(f"the supervisor runs on {head.host}: this machine may sleep or disconnect in the meantime")
        return dataclasses.replace(
            plan.allocation,
            site="head",
            folder=posixpath.join(head.folder, "clusters", request.id),
            settings={**plan.allocation.settings, "from_head": inside},
        )

    def _are_well(self, plan: Plan, have: Allocation) -> bool:
        """Were the hosts of an allocation found well lately, and its head able to log in to the others?"""
        lately = all(preflight.passed_lately(check, plan.nodes) for check in ("well", "hops"))
        return lately and have.nodes == plan.allocation.nodes

    def at_site(self, allocation: Allocation) -> Allocation:
        """The allocation as its head sees it, which reaches itself without ssh."""
        inside = _Settings(**allocation.settings).from_head
        nodes = [
            dataclasses.replace(node, reach=reach)
            for node, reach in zip(allocation.nodes, (HERE, *inside), strict=True)
        ]
        settings = {**allocation.settings, "key": None, "jump": None, "from_head": ()}
        return dataclasses.replace(allocation, site="client", nodes=tuple(nodes), settings=settings)

    def examine(self) -> Iterator[tuple[bool, str]]:
        """What each host says of itself, and then what the preflight before a job finds."""
        found = self.targets()

        def look(target: Target) -> tuple[bool, str]:
            try:
                with connections.used([target]) as (login,):
                    host = facts.ask(login, ())
            except AtollError as error:
                return False, str(error)
            cards = ", ".join(gpu.name for gpu in host.gpus) or host.gpu_problem or "no GPU"
            version = ".".join(map(str, host.python))
            return True, f"{target}: Python {version}, {host.cpus} cores, {cards}, reached at {host.addr}"

        try:
            with ThreadPoolExecutor(len(found)) as threads:
                looked = list(threads.map(look, found))
            yield from looked
            if not all(ok for ok, _ in looked):
                return
            said: list[str] = []
            try:
                plan = self.plan(NodeRequest(id="check", num_nodes=len(found)))
                preflight.check_hosts(found, plan.nodes, said.append)
                refused = []
            except AtollError as error:
                refused = [(False, str(error))]
            yield from [*((True, line) for line in said), *refused]
        finally:
            connections.close_idle()

    def gpu_rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The hosts'."""
        try:
            with connections.used(self.targets()) as logins:
                said = on_each(logins, lambda connection: facts.ask(connection, ()))
        finally:
            connections.close_idle()
        lines = [f"{host.target}: {host.gpu_problem or 'no GPU'}" for host in said if not host.gpus]
        return [{"host": str(host.target), **gpu_row(gpu)} for host in said for gpu in host.gpus], lines


PROVIDER = SSH
