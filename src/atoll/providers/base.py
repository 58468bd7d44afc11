"""The seam between Atoll and the places where nodes come from: a request in, an allocation out, agents on its nodes.

A provider is a class with these methods, found by ``registry``; ``Provider`` has those that few need to write anew.
The path of a launch: ``registry.resolve(infra)`` → ``plan`` (asks what is there) → ``provision`` → ``poll`` until the
allocation is ready → ``open`` → ``launch_agents`` for every attempt → ``release``. Whether a node lives is decided by
its agent's channel alone; what ``poll`` says of it explains an end, and gives the addresses of the next attempt.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import posixpath
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, Protocol

from atoll.core.errors import ConfigError, ProvisionError
from atoll.providers.gpus import Gpu, visible_gpus

Report = Callable[[str], object]
"""Is told each line that the user should know."""

Starting = Callable[[Callable[[], None]], None]
"""Is given what makes a start that is on its way fail soon, from another thread; what it was given last counts."""

Accelerators = tuple[str, int]
"""Of each node: name and how many."""

DEFAULT = "local"  # the infra where none is named
WORKDIR = "sky_workdir"
TARGETS = "mounts.json"  # beside a home: paths at which its jobs see files that lie in the home

OWN_MACHINES: Mapping[str, str] = {
    "use_spot": "your own machines are not spot machines",
    "instance_type": "your own machines have no instance types",
    "disk_size": "the disk is the machine's own",
    "disk_tier": "the disk is the machine's own",
    "local_disk": "the disk is the machine's own",
    "network_tier": "the network is the machine's own",
    "image_id": "scripts run on the machine's own system, not in an image",
    "max_hourly_cost": "your machines have no price",
    "priority": "jobs start in the order in which they were submitted",
    "priority_class": "jobs start in the order in which they were submitted",
    "labels": "nothing is rented that could be labelled",
    "accelerator_args": "accelerators are used as they are",
    "ports": "no port is opened: the machine's own firewall decides who can connect",
    "volumes": "only clouds have volumes",
    "hooks": "no cloud stops the machine",
}
"""What tasks can ask of resources in vain where the machines are there already, and why."""


class AcceleratorsLacking(ConfigError):
    """A provider lacks the requested accelerators: ``reason`` follows their name, however they were requested.

    ``can_simulate``: they would be simulated, were that not refused.
    """

    def __init__(self, requested: str, reason: str, *, can_simulate: bool = False) -> None:
        step = ", request fewer, or let Local(simulate=True) run it on CPU" if can_simulate else " to use what is there"
        super().__init__(f"accelerator={requested} {reason}; leave accelerator= out{step}")
        self.requested, self.reason, self.can_simulate = requested, reason, can_simulate


# ------------------------------------------------------------------------------------------------ what is asked for
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequest:
    """What a cluster, a job or a pool asks of a provider.

    Attributes:
        id: name of the cluster or pool: the same id gets the same allocation.
        infra: as the registry knows it, or None: where the cluster is, for a new one this machine.
        num_nodes: nodes that are wanted.
        accelerators: kinds that would do, of each node, the preferred one first. Empty for none; None takes what is
            there.
        in_order: the first of those kinds that can be had is taken, else the cheapest.
        cpus, memory: of each node, as text (``8+``, ``32GB``), or None.
        resources: what else is asked of each node, by the keys of a task file (``use_spot``, ``instance_type``,
            ``disk_size``, ``image_id``, …), as JSON values. A provider honours a key, or names it in ``lacks``.
        workers_per_node: processes of each node; ``"auto"`` and ``"gpu"`` are one for each accelerator.
        simulate: may accelerators that are lacking be simulated, where the provider can?
        supervised_here: its driver lives in this machine's process, whatever the provider would choose.
        recheck: look also at hosts that were found well lately.
        files_in: where a job's files go below the state folder of a host; ``clusters/ID`` where empty.
        owner: as its allocation's: what was submitted for it before has it too.
    """

    id: str = ""
    infra: str | None = None
    num_nodes: int = 1
    accelerators: tuple[Accelerators, ...] | None = ()
    in_order: bool = False
    cpus: str | None = None
    memory: str | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    workers_per_node: int | str = 1
    simulate: bool = True
    supervised_here: bool = False
    recheck: bool = True
    files_in: str = ""
    owner: str = ""

    def num_ranks(self, num_accelerators: int) -> int:
        """Processes of a node with so many accelerators."""
        return self.workers_per_node if isinstance(self.workers_per_node, int) else max(1, num_accelerators)


class AllocationState(enum.StrEnum):
    """Where an allocation is in its life."""

    PENDING = "PENDING"
    READY = "READY"
    STOPPED = "STOPPED"  # its machines are switched off, their disks are kept
    LOST = "LOST"
    RELEASED = "RELEASED"


GONE = frozenset({AllocationState.LOST, AllocationState.RELEASED})  # for good


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedNode:
    """One node of an allocation.

    Attributes:
        name: what it is called in messages.
        address: at which other nodes reach it; empty until that is known.
        reach: what the provider reaches it by.
    """

    name: str
    address: str = ""
    reach: str = ""


Site = Literal["client", "head", "allocation"]
FilesTarget = Literal["homes", "hosts", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a provider has given: plain data, kept in the cluster's record. By default this machine.

    Attributes:
        infra: what the registry resolves.
        id: of the request.
        state: pending, ready, lost or released; ``reason``: why it is not ready, as a clause.
        nodes: head first.
        shares_machine: its nodes are on this very machine, which they share, with the caller's environment.
        site: where its supervisor runs: with the client, on the head, or in the allocation. Decided once.
        files: where a job's files are put: in homes on this machine, on each host, or once in a shared folder.
        files_in: below a host's state folder; ``workdir`` is used instead where the user has declared one.
        python: the interpreter of jobs, as a shell there finds it; empty: the caller's.
        max_restarts: how often a job is started again after a node was lost.
        replaces_nodes: others are given for nodes that are lost or taken (``Provider.renew``), and jobs go on there.
        owner: what its agents are known by, there and in ``/proc``.
        folder: of its record, at a site elsewhere.
        code: digest of the Atoll that drives it.
        since_s: when its machines were rented, in seconds since 1970, later where they were stopped meanwhile; 0 where
            nothing is rented.
        hourly_cost: of all its machines, in US dollars; None where it is not known, or nothing is rented.
        settings: the provider's own; nobody else reads them.
    """

    infra: str = DEFAULT
    id: str = ""
    state: AllocationState = AllocationState.READY
    reason: str = ""
    nodes: tuple[AllocatedNode, ...] = ()
    shares_machine: bool = True
    site: Site = "client"
    files: FilesTarget = "homes"
    files_in: str = ""
    workdir: str | None = None
    python: str = ""
    max_restarts: int = 3
    replaces_nodes: bool = False
    owner: str = ""
    folder: str = ""
    code: str = ""
    since_s: float = 0.0
    hourly_cost: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> AllocatedNode:
        """Its first node."""
        return self.nodes[0]

    @property
    def supervised_here(self) -> bool:
        """Does its supervisor run on the machine that keeps this record?"""
        return self.site == "client"

    @property
    def is_rented(self) -> bool:
        """Does somebody pay for it as long as it is there?"""
        return self.since_s > 0

    @property
    def spent(self) -> float | None:
        """What it has cost so far, in US dollars; None where that is not known."""
        return None if self.hourly_cost is None else self.hourly_cost * (time.time() - self.since_s) / 3600

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Allocation:
        """From what ``to_json`` gave.

        Raises:
            ValueError: it is something else.
        """
        try:
            values = dict(data)  # type: ignore[call-overload]
            values["state"] = AllocationState(values["state"])
            values["nodes"] = tuple(AllocatedNode(**node) for node in values["nodes"])
            found = cls(**values)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"allocation: invalid value {str(data)[:40]!r} ({error})") from None
        texts = [*(text for node in found.nodes for text in dataclasses.astuple(node)), found.infra, found.site]
        if not all(isinstance(text, str) for text in texts) or not isinstance(found.settings, dict):
            raise ValueError("allocation: it has values of other types")
        return found


@dataclass(frozen=True, slots=True)
class Notice:
    """The nodes of an allocation are about to be taken: why, as a clause, and how long processes have to save."""

    reason: str
    save_s: float


class AllocationReleased(ProvisionError):
    """Somebody has given an allocation back: who wanted its nodes wants them no more."""


# ------------------------------------------------------------------------------------------------ what is started
@dataclass(frozen=True, slots=True)
class Bundle:
    """A zip file of Python code that goes to hosts; ``digest`` is the SHA-256 of its bytes and names it there."""

    path: Path
    digest: str

    @property
    def name(self) -> str:
        """Its file name."""
        return f"{self.digest[:24]}.zip"


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node before its agent starts. Paths are those of its machine.

    Attributes:
        node: its index.
        addr: address other nodes reach it at.
        num_ranks: processes it will run.
        accelerator: name of its accelerator, or None.
        num_accelerators: how many of them its ranks see.
        gpus: those that its agent may lease ``num_accelerators`` of, the preferred ones first; empty where there are
            none, or they are simulated.
        env: variables its ranks get.
        place: what its provider's session has prepared for it; nobody else reads it.
        is_elsewhere: it is on another machine, or reached as if it were: memory and files are not shared with it.
        host: what to call it in messages.
        reach: what the provider reaches it by.
        python, python_version: its interpreter, and that one's version, e.g. ``(3, 12, 1)``.
        home, workdir: where ranks start, and where a job's files lie.
        folder, tmp: folders of the user's that can be written to: one that stays, and one for temporary files.
        cores: that its ranks share.
        base_env: environment of a command there.
        bundles: code that ranks import from, Atoll's first; ``present`` are digests of those that are there.
        packages: folders of packages that its ranks import from before the interpreter's own.
        wrapper: what comes before the command of each process of a job, so that it runs in a container.
        grace_s: how long a lost connection may last, in seconds.
        seen: what a preflight judges of it, as ``Facts.seen``.
    """

    node: int
    addr: str
    num_ranks: int
    accelerator: str | None = None
    num_accelerators: int = 0
    gpus: tuple[Gpu, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    place: Any = None
    is_elsewhere: bool = False
    host: str = ""
    reach: str = ""
    python: str = "python3"
    python_version: tuple[int, ...] = ()
    home: str = "/"
    workdir: str = ""
    folder: str = "/tmp"
    tmp: str = "/tmp"
    cores: int = 1
    base_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    bundles: tuple[Bundle, ...] = ()
    present: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    grace_s: float = 0.0
    seen: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def bundle_path(self, bundle: Bundle) -> str:
        """Where a bundle lies there."""
        return posixpath.join(self.folder, "bundle", bundle.name)

    @property
    def minor(self) -> str:
        """``3.12`` of 3.12.1."""
        return ".".join(map(str, self.python_version[:2]))

    @property
    def import_path(self) -> list[str]:
        """What comes first in a rank's ``sys.path``."""
        return [*(self.bundle_path(bundle) for bundle in self.bundles), *self.packages]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a node is rented as, and what that costs.

    Attributes:
        infra: where exactly, such as ``aws/us-east-1``.
        instance_type: the machine's.
        use_spot: is it a spot machine?
        price, spot_price: of one node for an hour in US dollars, on demand and as a spot machine; None: not known, or
            not to be had.
        missing: what has to be set up before it can be rented, as a clause; empty where nothing is.
    """

    infra: str
    instance_type: str = ""
    use_spot: bool = False
    price: float | None = None
    spot_price: float | None = None
    missing: str = ""

    @property
    def hourly_cost(self) -> float | None:
        """Of one node as it is rented, in US dollars."""
        return self.spot_price if self.use_spot else self.price

    def __str__(self) -> str:
        shown = [f"{how}${price:.2f}/h" for price, how in self._prices() if price is not None]
        others = f" ({', '.join(shown[1:])})" if shown[1:] else ""
        return f"{self.infra}: {self.instance_type or 'machines'}, {shown[0] if shown else 'price unknown'}{others}"

    def _prices(self) -> list[tuple[float | None, str]]:
        """What it is rented for first, and the other one."""
        both = [(self.price, "on demand " if self.use_spot else ""), (self.spot_price, "spot ")]
        return both[::-1] if self.use_spot else both


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request would get, or has got. ``lines`` are for the user: each thing that differs from what was asked.

    ``accelerator`` and ``num_accelerators`` are what every node has of the chosen kind; ``offer`` what it is rented as,
    None of machines that are there already.
    """

    provider: str
    nodes: tuple[NodePlan, ...]
    simulated: bool = False
    has_gpu: bool = False
    lines: tuple[str, ...] = ()
    accelerator: str | None = None
    num_accelerators: int = 0
    allocation: Allocation = field(default_factory=Allocation)
    offer: Offer | None = None

    @property
    def hourly_cost(self) -> float | None:
        """Of all nodes, in US dollars; None where it is not known, or nothing is rented."""
        each = None if self.offer is None else self.offer.hourly_cost
        return None if each is None else each * len(self.nodes)

    @property
    def world_size(self) -> int:
        """Ranks of the whole pool."""
        return sum(node.num_ranks for node in self.nodes)

    @property
    def is_elsewhere(self) -> bool:
        """Are its nodes on other machines?"""
        return any(node.is_elsewhere for node in self.nodes)

    def __str__(self) -> str:
        rows = [f"{len(self.nodes)} nodes on {self.provider}, {self.world_size} ranks"]
        for node in self.nodes:
            what = f"{node.num_accelerators} × {node.accelerator}" if node.accelerator else "CPU"
            if self.simulated and node.accelerator:
                what += " (simulated)"
            rows.append(f"  node {node.node}  {node.addr}  {node.num_ranks} ranks  {what}")
        if self.offer is not None:
            rows.append(f"  {self.offer}")
            rows += [f"  ${self.hourly_cost:.2f}/h in all"] if self.hourly_cost is not None else []
            rows += [f"  it can't be started yet: {self.offer.missing}"] if self.offer.missing else []
        return "\n".join([*rows, *self.lines])


# ------------------------------------------------------------------------------------------------------ agents
@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """How agents are started.

    Attributes:
        agent: the command of an agent on this machine; the provider's own where empty.
        owner: ``CLUSTER.DRIVER``: agents of the cluster's earlier drivers on the node are ended first; empty for pools.
        tag: names the node's temporary files, ``atoll-TAG-nNODE`` in its ``tmp``.
        starting: see ``Starting``.
        job, attempt: that it is for; ``visible``: paths that the job's processes need though they may lie below
            ``/tmp``, ``readable``: such paths that they only read.
    """

    agent: tuple[str, ...] = ()
    owner: str = ""
    tag: str = ""
    starting: Starting = lambda stop: None
    job: int = 0
    attempt: int = 0
    visible: Sequence[str] = ()
    readable: Sequence[str] = ()

    def tmp(self, plan: NodePlan) -> str:
        """The folder of a node's temporary files."""
        return f"{plan.tmp}/atoll-{self.tag}-n{plan.node}"  # no name of the user's: see `pkill -f`


class Node(Protocol):
    """A node whose agent was started: a channel to it, and a way to end it by force."""

    channel: socket.socket

    @property
    def reason(self) -> str | None:
        """Why it was lost, as a clause, where the provider knows."""

    def listen(self, on_silence: Callable[[float, str], object]) -> None:
        """From now on, tell when the node has not been heard for so many seconds (0: it is again), and a line of it."""

    def stop(self) -> None:
        """Release the node. Safe to call twice, and on a node that is gone already."""


class Remote(Protocol):
    """A node's machine, for what is done there besides running agents. Everything raises ``ProvisionError``."""

    plan: NodePlan

    def run(self, command: str, data: bytes = b"", *, limit_s: float = ...) -> subprocess.CompletedProcess[bytes]:
        """Run a shell command there."""

    def check(self, command: str, data: bytes = b"", *, limit_s: float = ...) -> bytes:
        """Run a shell command there that has to succeed; returns what it printed."""

    def python(self, module: str, *arguments: str, limit_s: float = ...) -> Any:
        """Run a module of Atoll there, whose code is brought first; what it prints, which is JSON."""

    def open(self, module: str, *arguments: str, stderr: int | IO[bytes] = ...) -> subprocess.Popen[bytes]:
        """The same, talked to by pipes; the caller ends it."""

    def argv(self, module: str, *arguments: str) -> list[str]:
        """The argument list of this machine that runs a module of Atoll there, whose code was brought before."""

    def is_lost(self, code: int, said: bytes) -> bool:
        """Did the way there break, by the exit code and standard error of what ran through it?"""

    def bring_code(self) -> None:
        """Bring Atoll's code there, where it is lacking."""

    def abort(self) -> None:
        """Have what runs there through this fail, from another thread."""

    def close(self) -> None:
        """It is not needed any more. Safe to call twice."""


class Session:
    """An allocation in use by one driver, a supervisor or a pool: what its agents share while the driver lives.

    Attributes:
        lines: for the user, of what nodes share with others.
        shared_networks: of each node, the name of the network whose ports its jobs share with other clusters; empty
            where they share none.
    """

    def __init__(self, provider: Provider, allocation: Allocation, request: NodeRequest) -> None:
        self.provider = provider
        self._request = request
        self.refresh(allocation)
        self.lines: list[str] = []
        self.shared_networks: tuple[str, ...] = tuple(node.addr for node in self.plan.nodes)

    def refresh(self, allocation: Allocation) -> None:
        """Go by this allocation from now on, and ask its nodes what they have."""
        self.allocation = allocation
        self.plan = self.provider.plan(self._request, allocation)

    def launch_agents(self, nodes: Sequence[NodePlan], boot: Boot) -> Iterator[Node]:
        """As the provider's; may be called from several threads at once."""
        return self.provider.launch_agents(self.allocation, nodes, boot)

    def gpus(self, node: int, count: int, visible: str | None) -> tuple[Gpu, ...]:
        """The GPUs that a job may lease ``count`` of, bounded by its ``CUDA_VISIBLE_DEVICES``, ``visible``."""
        found = self.plan.nodes[node].gpus
        return found if visible is None else visible_gpus(found, visible)

    def fault_of(self, job_id: int) -> str | None:
        """What a job's nodes have lost that they don't stop for, as a clause; asked often while it runs."""
        return None

    def close(self) -> None:
        """Give up what it shares. Nodes that still run are the driver's to stop."""


class Provider(abc.ABC):
    """A place where nodes come from. A new one says ``kind``, ``plan`` and ``launch_agents``, and what else differs.

    Attributes:
        kind: what its infras begin with; ``form``: how one is written, and ``expected`` says it in words. What may be
            left out is in brackets.
        undeclared: how to declare one, where none is.
        lacks: settings of a task's resources that it can't honour, and why.
        gives_slices: MIG slices can be requested of it, as ``mig`` of a request's resources: the profiles of a node.
        is_elsewhere: its nodes are on other machines.
        poll_s: pending allocations are polled so often in the end, in seconds.
        ends_with_driver: nodes of a process, a pool's say, are released where it is killed, as they cost something.
    """

    kind: ClassVar[str]
    form: ClassVar[str]
    expected: ClassVar[str] = "an infra of its kind"
    undeclared: ClassVar[str] = ""
    lacks: ClassVar[Mapping[str, str]] = OWN_MACHINES
    gives_slices: ClassVar[bool] = False
    is_elsewhere: ClassVar[bool] = False
    poll_s: ClassVar[float] = 5.0
    ends_with_driver: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return self.kind

    @property
    def infra(self) -> str:
        """What the registry resolves to it."""
        return self.kind

    @property
    def num_nodes(self) -> int:
        """How many nodes a pool gets that does not say how many."""
        return 1

    @classmethod
    def declared(cls) -> list[str]:
        """Infras of it that the user can name without further ado."""
        return [cls.form]

    @classmethod
    def has_form(cls, name: str) -> bool:
        """Is ``KIND/NAME`` written as its infras are? An empty name means none."""
        return "[/" in cls.form or ("/" in cls.form) == bool(name)

    @classmethod
    def resolve(cls, name: str) -> Provider:
        """The provider behind ``KIND/NAME``; a ``ConfigError`` where there is none."""
        return cls()

    @classmethod
    def of(cls, allocation: Allocation) -> Provider:
        """The provider that has given an allocation, whatever the user's settings say now."""
        return cls.resolve(allocation.infra.partition("/")[2])

    def validate(self, request: NodeRequest) -> list[str]:
        """One line for each thing of a request that can't be had however long one waits; asks nobody."""
        return []

    def check(self, request: NodeRequest) -> None:
        """Refuse what ``validate`` finds, as a ``ConfigError``."""
        if lines := self.validate(request):
            raise ConfigError("\n".join(lines))

    @abc.abstractmethod
    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        """Say what would be started for a request; on an allocation, its nodes as they are now.

        Raises:
            ConfigError: what can't be had; ``AcceleratorsLacking`` of accelerators.
            ProvisionError: a node can't be used.
        """

    def provision(self, request: NodeRequest, report: Report, have: Allocation | None = None) -> Allocation:
        """Get the nodes; may return before they are there, as PENDING. The same id gets the same allocation.

        ``have`` is what that id has got before, of a cluster that is up: looked at again, or made larger.

        Raises:
            ConfigError, ProvisionError: as ``plan``, or something would make the ranks fail.
        """
        return self.plan(request).allocation

    def poll(self, allocation: Allocation, *, max_age_s: float = 0.0) -> Allocation:
        """The allocation as it is now, or was so many seconds ago: its state, and its nodes' addresses.

        Who asks again and again says how old an answer may be, so that others' answers may do.
        """
        return allocation

    def notice(self, allocation: Allocation) -> Notice | None:
        """Whether its nodes are about to be taken; asked often where its supervisor runs, so it must not wait."""
        return None

    def renew(self, allocation: Allocation) -> Allocation:
        """Give its nodes back and get others for it, where it ``replaces_nodes``; RELEASED, if somebody ended it.

        Its supervisor may end with its nodes.
        """
        raise ProvisionError(f"{self.name} gives no other nodes")

    def may_supervise(self, allocation: Allocation) -> bool:
        """May a supervisor that runs on this machine start the jobs of an allocation that is to be supervised here?"""
        return True

    def restart(self, allocation: Allocation) -> Allocation:
        """Start a stopped allocation; may return before its nodes are there, as PENDING."""
        return allocation

    def keep(self, allocation: Allocation) -> bool:
        """Have nodes that would end themselves stay for another while, and say whether they had to be told.

        Whoever looks after a cluster asks for it every few seconds.
        """
        return False

    def at_site(self, allocation: Allocation) -> Allocation:
        """The allocation as the machine sees it that its supervisor runs on."""
        return dataclasses.replace(allocation, site="client")

    def address(self, allocation: Allocation) -> str:
        """Where others reach its head, other clusters say."""
        return allocation.head.address

    def open(self, allocation: Allocation, request: NodeRequest, folder: Path, owner: str) -> Session:
        """The supervisor of the cluster in ``folder`` begins to use it; its agents are known by ``owner``."""
        return Session(self, allocation, request)

    @abc.abstractmethod
    def launch_agents(self, allocation: Allocation, nodes: Sequence[NodePlan], boot: Boot) -> Iterator[Node]:
        """Start the agents of these nodes, one after the other or all at once; ``ProvisionError`` where one fails."""

    def remote(self, plan: NodePlan) -> Remote:
        """The machine of a node elsewhere."""
        raise ProvisionError(f"{self.name} runs nothing on {plan.host or 'its nodes'} but agents")

    def machine(self, allocation: Allocation, node: int) -> Remote:
        """The machine of one node of an allocation elsewhere, whatever the others do."""
        one = dataclasses.replace(allocation, nodes=allocation.nodes[node : node + 1])
        request = NodeRequest(id=allocation.id, accelerators=None, files_in=allocation.files_in)
        provider = self.of(one)
        return provider.remote(dataclasses.replace(provider.plan(request, one).nodes[0], node=node))

    def desk(self, allocation: Allocation) -> Remote:
        """The machine that answers for a cluster that is supervised elsewhere: its head."""
        return self.machine(allocation, 0)

    def examine(self) -> Iterator[tuple[bool, str]]:
        """What can be used, and what is missing with how to get it: whether it is well, and a line."""
        yield True, f"{self.infra} is known"

    def gpu_rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        """A row for each GPU that jobs can use, as ``atoll gpus`` shows it; and lines about why there are none."""
        return [], [f"GPUs of {self.infra} are known once a cluster is there"]

    def login_command(
        self, allocation: Allocation, node: int, options: Sequence[str], command: Sequence[str]
    ) -> list[str]:
        """What a person would type for a shell on a node elsewhere; ``options`` are ssh's."""
        raise ConfigError(f"logging in to nodes is not possible on {allocation.infra}")

    def copy(self, allocation: Allocation, node: int, path: str, here: str, *, up: bool) -> str:
        """Copy a path of a node elsewhere to ``here``, or ``up`` from there; why that failed, else nothing."""
        raise ConfigError(f"nothing can be copied to nodes of {allocation.infra}, or from there")

    def copy_line(self, plan: NodePlan, path: str, into: str) -> str:
        """What a person types to copy a folder from a node elsewhere into one here."""
        return f"copy {path} from {plan.host} into {into}"

    def end_orphans(self, allocation: Allocation, owner: str, first: int = 0) -> tuple[list[str], list[str]]:
        """End what earlier drivers left on nodes, from ``first`` on: what does not end, and a line for each error."""
        return [], []

    def release(self, allocation: Allocation, *, keep_disks: bool) -> Allocation:
        """Give the nodes back; ``keep_disks``: their files stay, for a later start. Returns what it is now."""
        return dataclasses.replace(allocation, state=AllocationState.RELEASED) if not keep_disks else allocation
