"""What client, supervisor and runner agree on, as plain data: a job, a cluster, and how they are named.

Standard library only: the supervisor runs on a head node that has nothing but a Python.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.exit_codes import ExitCode
from atoll.core.validation import MOST_ACCELERATORS, MOST_NODES, MOST_PROCESSES, MOST_TRIES, check_whole
from atoll.providers.base import DEFAULT, Allocation, NodeRequest

_NAME = re.compile(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*")
LONGEST_NAME = 63  # it becomes part of host names


class JobStatus(enum.StrEnum):
    """Where a job stands; the names are SkyPilot's."""

    PENDING = "PENDING"  # waits for nodes, accelerators, a port, or its turn in a sweep
    INIT = "INIT"  # its nodes are starting
    SETTING_UP = "SETTING_UP"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"  # between a failure and the restart that answers it
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    FAILED_DRIVER = "FAILED_DRIVER"  # the supervisor died, or nodes could not be had
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        """Will it never change again?"""
        return self in _ENDED

    @property
    def exit_code(self) -> int:
        """What ``launch``, ``exec`` and ``logs`` exit with when the job stands like this."""
        if self is JobStatus.SUCCEEDED:
            return ExitCode.OK
        if self is JobStatus.CANCELLED:
            return ExitCode.CANCELLED
        return ExitCode.FAILED if self.ended else ExitCode.NOT_FINISHED


_ENDED = frozenset(
    {
        JobStatus.SUCCEEDED,
        JobStatus.FAILED,
        JobStatus.FAILED_SETUP,
        JobStatus.FAILED_DRIVER,
        JobStatus.CANCELLED,
    }
)


class ClusterStatus(enum.StrEnum):
    """Where a cluster stands."""

    INIT = "INIT"  # a launch waits for its nodes; no record says so
    UP = "UP"
    STOPPED = "STOPPED"  # its files are kept, `atoll start` or `launch` restarts it
    DOWN = "DOWN"  # its nodes' files are gone, its jobs' logs are kept


@dataclass(frozen=True, slots=True)
class Restarts:
    """When a failed job is started again, at the same task id.

    Attributes:
        on_errors: how often after a process failed (``max_restarts_on_errors``).
        on_exit_codes: exit codes after which it is started again without counting.
        on_lost_nodes: how often after a node was lost.
    """

    on_errors: int = 0
    on_exit_codes: tuple[int, ...] = ()
    on_lost_nodes: int = 3


_VALUES = ("env", "base_env")  # of a job, what no record holds


def _short(spec: Any) -> str:
    """A spec with what differs from the defaults, without the values of variables."""
    said = []
    for each in dataclasses.fields(spec):
        value, default = getattr(spec, each.name), each.default
        default = each.default_factory() if callable(each.default_factory) else default
        if each.name not in _VALUES and value != default:
            said.append(f"{each.name}={str(value) if isinstance(value, enum.Enum) else value!r}")
    return f"{type(spec).__name__}({', '.join(said)})"


@dataclass(frozen=True, slots=True, repr=False)
class JobSpec:
    """One job: what its nodes run. Plain JSON values only. Values of variables travel apart (``store.put_variables``).

    Attributes:
        name: of the task, or None.
        num_nodes: how many of the cluster's nodes take part.
        setup, run: text of a bash script, or None. ``setup`` runs on every node of the cluster, then ``run`` on the
            job's.
        command: instead of ``run``, what each process executes (``atoll run``): an argument list.
        num_processes: processes a node (only with ``command``); each gets torchrun's variables.
        run_id: torchrun's ``--rdzv-id`` for ``TORCHELASTIC_RUN_ID``.
        master_port: where rank 0 listens (only with ``command``); a free port by default.
        env: the user's variables, as text.
        secret_names: variables that were declared or given as secrets: logs hide their values, whatever they are.
        accelerator, num_accelerators: of each node; ``SKYPILOT_NUM_GPUS_PER_NODE``.
        simulated: the machine lacks them, the ranks run on CPU.
        ports: ports that the scripts fix, so that two jobs that share a network wait for each other.
        restarts: when it is started again.
        strict: scripts run with ``set -e``.
        workdir: was a workdir shipped? Then it is the current folder.
        inherit_env: the nodes get the caller's whole environment (``atoll run`` on local nodes), not just PATH and
            what else makes an interpreter work.
        base_env: what nodes get of the caller's environment.
        cwd: current folder of the processes instead of the workdir (``atoll run`` on local nodes).
        group: what the jobs of a sweep share, or None; ``rank_in_group``, ``num_in_group`` and ``parallel`` (how many
            at once) belong to it.
        labels: what a sweep set, for its table: ``{"lr": "0.1"}``.
        after: the job before it in a pipeline: it starts once that has succeeded.
        timeout_s: the job may run for so long.
        owner_pid: a process of this machine; the job is cancelled when that ends (``atoll run``).
        grace_s: seconds between the signal that ends its processes and SIGKILL, whatever ends them; None: few.
        save_s: the same after a cancel alone, for processes that save; None: as ``grace_s``.
        key: made by who submits it; of several jobs with the same key only the first is added.
        task_id: ``SKYPILOT_TASK_ID``, where it is not made for this job.
        managed: of a job that its supervisor has run on clusters of its own, again where those are lost: what
            ``managed.ManagedSpec`` says of it, as JSON values.
    """

    name: str | None = None
    num_nodes: int = 1
    setup: str | None = None
    run: str | None = None
    command: tuple[str, ...] | None = None
    num_processes: int = 1
    run_id: str | None = None
    master_port: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secret_names: tuple[str, ...] = ()
    accelerator: str | None = None
    num_accelerators: int = 0
    simulated: bool = False
    ports: tuple[int, ...] = ()
    restarts: Restarts = field(default_factory=Restarts)
    strict: bool = False
    workdir: bool = False
    inherit_env: bool = False
    base_env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    group: str | None = None
    rank_in_group: int = 0
    num_in_group: int = 1
    parallel: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    after: int | None = None
    timeout_s: float | None = None
    owner_pid: int | None = None
    grace_s: float | None = None
    save_s: float | None = None
    key: str | None = None
    task_id: str | None = None
    managed: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return _short(self)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, without the values of variables."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in _VALUES}

    def variables(self) -> dict[str, dict[str, str]]:
        """The values that ``to_json`` leaves out."""
        return {name: dict(getattr(self, name)) for name in _VALUES}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobSpec:
        """From what ``to_json`` gave, of this version or an older one."""
        known = {each.name for each in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        values["restarts"] = _restarts(values.get("restarts") or {})
        for key in ("secret_names", "ports"):
            values[key] = tuple(values.get(key) or ())
        if values.get("command") is not None:
            values["command"] = tuple(values["command"])
        spec = cls(**values)
        for name, low, high in _JOB_BOUNDS:
            check_whole(name, getattr(spec, name), low, high)
        return spec


_JOB_BOUNDS = (
    ("num_nodes", 1, MOST_NODES),
    ("num_processes", 1, MOST_PROCESSES),
    ("num_accelerators", 0, MOST_ACCELERATORS),
    ("rank_in_group", 0, MOST_TRIES),
    ("num_in_group", 1, MOST_TRIES),
    ("parallel", 1, MOST_TRIES),
)


def _restarts(data: Mapping[str, Any]) -> Restarts:
    return Restarts(**{**data, "on_exit_codes": tuple(data.get("on_exit_codes") or ())})


@dataclass(frozen=True, slots=True, repr=False)
class ClusterSpec:
    """A cluster as its record says it: ``cluster.json`` in its folder.

    Attributes:
        name: what people call it.
        infra: ``local``, ``ssh/NAME`` or ``slurm/NAME``.
        num_nodes: nodes it has.
        accelerator, num_accelerators: of each node, or None and 0.
        simulated: they are not there.
        cpus, memory_gb: what was asked for each node, as text; ``resources`` what else, as ``NodeRequest`` has it.
        allocation: what the provider has given: its nodes, and where the supervisor runs.
        status: up, stopped or down.
        created_s: when it was made, or started after a stop; in seconds since 1970.
        setup_done: nodes whose setup has succeeded at least once.
        autostop_minutes: idle minutes after which it is stopped, or None; ``autodown``: taken down instead.
        autostop_set_s: when that was set: the minutes before it don't count.
        max_cost: what its rented nodes may cost in all, in US dollars, before it is taken down; None for no limit.
        notes: lines said when it was made (what is simulated, what an infra can't honour).
    """

    name: str
    infra: str = DEFAULT
    num_nodes: int = 1
    accelerator: str | None = None
    num_accelerators: int = 0
    simulated: bool = False
    cpus: str | None = None
    memory_gb: str | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    allocation: Allocation = field(default_factory=Allocation)
    status: ClusterStatus = ClusterStatus.UP
    created_s: float = 0.0
    setup_done: tuple[int, ...] = ()
    autostop_minutes: int | None = None
    autostop_set_s: float = 0.0
    autodown: bool = False
    max_cost: float | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return _short(self)

    @property
    def is_awaited(self) -> bool:
        """Has it had no nodes yet?"""
        return not self.allocation.shares_machine and not self.allocation.nodes

    @property
    def is_there(self) -> bool:
        """Has it nodes, or had it until it was stopped?"""
        return self.status is not ClusterStatus.DOWN and not self.is_awaited

    def request(self) -> NodeRequest:
        """What it asks of its provider."""
        wanted = ((self.accelerator, self.num_accelerators),) if self.accelerator and self.num_accelerators else ()
        return NodeRequest(
            id=self.name,
            infra=self.infra,
            num_nodes=self.num_nodes,
            accelerators=wanted,
            cpus=self.cpus,
            memory=self.memory_gb,
            resources=self.resources,
            files_in=self.allocation.files_in,
        )

    @property
    def is_spent(self) -> bool:
        """Has it cost what it may?"""
        return self.max_cost is not None and (self.allocation.spent or 0.0) >= self.max_cost

    @property
    def is_set_up(self) -> bool:
        """Has a setup succeeded on each of its nodes?"""
        return set(range(self.num_nodes)) <= set(self.setup_done)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ClusterSpec:
        """From what ``to_json`` gave, of this version or an older one.

        Raises:
            ConfigError: it is something else.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"expected an object, not {data!r:.40}")
        known = {each.name for each in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        for key, type_name in _RECORD_TYPES.items():
            if key in values and not isinstance(values[key], type_name):
                raise ConfigError(f"{key}: invalid value {values[key]!r:.40}")
        if not is_name(values.get("name", "")):
            raise ConfigError("it has no name")
        if "allocation" in values:  # those of this machine had none
            values["allocation"] = Allocation.from_json(values["allocation"])
        for key in ("setup_done", "notes"):
            values[key] = tuple(values.get(key) or ())
        values["status"] = ClusterStatus(values.get("status", "UP"))
        return cls(**values)


_TEXT, _LIST = (str, type(None)), (list, tuple, type(None))
_RECORD_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("name", "infra", "status"), str),
    **dict.fromkeys(("accelerator", "cpus", "memory_gb"), _TEXT),
    **dict.fromkeys(("num_nodes", "num_accelerators"), int),
    **dict.fromkeys(("simulated", "autodown"), bool),
    "resources": dict,
    **dict.fromkeys(("setup_done", "notes"), _LIST),
    **dict.fromkeys(("created_s", "autostop_set_s"), (int, float)),
    "autostop_minutes": (int, type(None)),
    "max_cost": (int, float, type(None)),
}


def is_name(name: str) -> bool:
    """May a cluster, task or group be called so?"""
    return len(name) <= LONGEST_NAME and _NAME.fullmatch(name) is not None


def node_name(node: int) -> str:
    """``head``, ``worker1``, ``worker2``, …: a node's name in its cluster."""
    return "head" if node == 0 else f"worker{node}"


def is_none(accelerators: str | None) -> bool:
    """Does ``--gpus`` ask for none?"""
    return accelerators is not None and accelerators.strip().lower() in ("", "0", "none")
