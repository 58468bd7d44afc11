"""``Slurm``: nodes of a Slurm cluster, held by one job for as long as a cluster or a pool lives.

``sbatch`` submits a job that runs a keeper on each node (``agent.keeper``). Everything else runs in steps of that job,
started with ``srun --overlap`` on the login node, or by the supervisor, which lives in the job itself, on its first
node. So a login node may end what runs there, and be out of reach: the jobs of a cluster go on. That a node is lost
ends neither job nor steps (``--no-kill``); our agents notice it.
"""

from __future__ import annotations

import dataclasses
import inspect
import posixpath
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.agent import keeper
from atoll.core.errors import ConfigError, ProvisionError
from atoll.core.validation import check_seconds, command_line, nearest, suggests_fields
from atoll.providers.accelerators import canonical_gpu_name, refuse_misspelt
from atoll.providers.base import (
    OWN_MACHINES,
    WORKDIR,
    AcceleratorsLacking,
    AllocatedNode,
    Allocation,
    AllocationState,
    NodePlan,
    NodeRequest,
    Plan,
    Remote,
    Report,
)
from atoll.providers.bundle import atoll_bundle
from atoll.providers.ssh import facts
from atoll.providers.ssh.connection import connections
from atoll.providers.ssh.host_node import node_plan
from atoll.providers.ssh.host_provider import HostProvider
from atoll.providers.ssh.hosts import (
    GRACE_S,
    HERE,
    KEEPER_FOLDER,
    STEP_OPTIONS,
    Target,
    check_keys,
    config_hosts,
    declared,
    targets,
)
from atoll.providers.ssh.remote import Host, last_words
from atoll.providers.ssh.scp import copy, copy_line

_ANSWER_S = 30.0  # of a busy controller
# A job in which nothing has run for so long is cancelled: whoever submitted it was killed. Packages may be installed
# before a pool's agents start; in a cluster's the watcher runs, from its launch to its end.
_UNUSED_S = 900.0
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "RESV_DEL_HOLD", "SUSPENDED", "STOPPED"})
_HERE_NAME = "here"  # slurm/here: the Slurm of this machine
# What Slurm answers where a job waits, in plain words; other reasons are shown as they are.
_REASONS = {
    "Resources": "its nodes are busy",
    "Priority": "other jobs come first",
    "None": "Slurm has not looked at it yet",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "QOSMaxJobsPerUserLimit": "the quality of service allows no more jobs of yours",
    "AssocGrpGRES": "your account has used its share of GPUs",
}
_ENDS = {
    "TIMEOUT": "its time limit was reached",
    "TimeLimit": "its time limit was reached",
    "CANCELLED": "it was cancelled (scancel)",
    "PREEMPTED": "it was preempted",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "OUT_OF_MEMORY": "it ran out of memory",
    "DEADLINE": "its deadline was reached",
    "COMPLETING": "it is ending",
}
_KEEP = """#!/bin/sh
exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \\
    --kill-on-bad-exit=0 --input=none {options} {python} -I -S -c {keeper} "{folder}$SLURM_JOB_ID" {unused_s:g}
"""


@suggests_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm(HostProvider):
    """Nodes of a Slurm cluster, got with ``sbatch``.

    Args:
        login: the login node, as ``ssh`` takes it; None where this machine has ``sbatch``.
        partition, account, qos, time, constraint, reservation: as ``sbatch`` takes them; ``time`` is a text such as
            ``"2:00:00"``, after which Slurm ends the job. None leaves it to the cluster's defaults.
        sbatch: further options of ``sbatch``, such as ``["--exclusive"]``.
        python: the interpreter on the nodes; ``python3`` by default.
        key, jump: how to log in, as for ``SSH``.
        grace_s: how long a connection may be lost before its node counts as lost, in seconds.

    Raises:
        ConfigError: a value that cannot work.
    """

    kind: ClassVar[str] = "slurm"
    form: ClassVar[str] = "slurm/NAME"
    expected: ClassVar[str] = (
        "slurm/NAME, with a NAME of [slurm.NAME] in config.toml or of ~/.ssh/config (the login node), or slurm/here"
    )
    lacks: ClassVar[Mapping[str, str]] = {
        **OWN_MACHINES,
        "use_spot": "Slurm has no spot machines: preemptible ones are a partition or a quality of service",
        "instance_type": "nodes are chosen by partition and constraint",
        "max_hourly_cost": "Slurm knows no price",
        "priority": "Slurm decides which job comes first",
    }
    undeclared: ClassVar[str] = (
        'no Slurm cluster is declared: [slurm.lab] login = "user@login" in config.toml under ATOLL_HOME'
    )

    login: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    sbatch: Sequence[str] = ()
    python: str | None = None
    key: str | None = None
    jump: str | None = None
    grace_s: float = GRACE_S
    declared_as: str = dataclasses.field(default="", repr=False)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name not in ("sbatch", "grace_s", "declared_as") and not isinstance(value, str | None):
                raise ConfigError(f"Slurm({each.name}={value!r}): expected text or None")
            if isinstance(value, str) and each.name != "declared_as" and (not value.strip() or "\n" in value):
                raise ConfigError(f"Slurm({each.name}={value!r}): expected a text in one line, or None")
        if isinstance(self.sbatch, str) or not all(isinstance(each, str) for each in self.sbatch):
            raise ConfigError(f"Slurm(sbatch={self.sbatch!r}): expected a list of options, such as ['--exclusive']")
        check_seconds("Slurm(grace_s=)", self.grace_s)
        object.__setattr__(self, "sbatch", tuple(self.sbatch))
        if self.login is not None:
            targets([self.login])

    @property
    def infra(self) -> str:
        """``slurm/NAME``."""
        return f"slurm/{self.declared_as or _HERE_NAME}"

    @classmethod
    def declared(cls) -> list[str]:
        """Sections of ``config.toml``."""
        return [f"slurm/{name}" for name in declared("slurm")]

    @classmethod
    def resolve(cls, name: str) -> Slurm:
        """A section of ``config.toml``, a login node of the user's ssh config, or this machine."""
        sections = declared("slurm")
        if name in sections:
            known = [each.name for each in dataclasses.fields(cls) if each.name != "declared_as"]
            section = check_keys(f"slurm.{name}", sections[name], known)
            try:
                return cls(**section, declared_as=name)
            except ConfigError as error:
                raise ConfigError(f"config.toml: [slurm.{name}]: {error}") from None
        if name in (_HERE_NAME, ""):
            return cls(declared_as=_HERE_NAME)
        if name in config_hosts():
            return cls(login=name, declared_as=name)
        hint = nearest(name, [*sections, *config_hosts(), _HERE_NAME])
        raise ConfigError(f"--infra slurm/{name}: no such Slurm cluster{hint or '.'} Expected {cls.expected}")

    @classmethod
    def of(cls, allocation: Allocation) -> Slurm:
        """As it was when the job was submitted."""
        names = {each.name for each in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in allocation.settings.items() if name in names})

    # -- what Slurm is asked ----------------------------------------------------------------------------------------

    def _login(self) -> Target:
        if self.login is None:
            return Target(HERE, python=self.python)
        (found,) = targets([self.login], key=self.key, jump=self.jump, python=self.python)
        return found

    def _ask(self, *words: str, data: bytes = b"") -> str:
        """Run a command of Slurm's on the login node; what it printed.

        Raises:
            ProvisionError: it failed, or is not there.
        """
        with connections.used([self._login()]) as (login,):
            answer = login.run(shlex.join(["sh", "-c", _CALL, "sh", *words]), data, limit_s=_ANSWER_S)
        if answer.returncode == 0:
            return answer.stdout.decode(errors="replace")
        said = last_words(answer.stderr, answer.returncode).removeprefix(f"{words[0]}: error: ")
        where = "this machine" if self.login is None else self.login
        if answer.returncode == 127:
            raise ProvisionError(f"{self.infra}: {where} has no {words[0]}: is it a login node of a Slurm cluster?")
        raise ProvisionError(f"{self.infra}: {words[0]} failed on {where}: {said}")

    def _partitions(self) -> list[_Nodes]:
        """What the partition has, or all partitions that are up, one line for each kind of node."""
        words = ["sinfo", "--noheader", "--format=%R|%a|%D|%c|%m|%G|%l"]
        words += [f"--partition={self.partition}"] if self.partition is not None else []
        found = [_Nodes.parse(line) for line in self._ask(*words).splitlines() if line.count("|") == 6]
        if not found:
            names = sorted({line.partition("|")[0] for line in self._ask("sinfo", "-h", "-o", "%R|").splitlines()})
            hint = nearest(self.partition or "", names) or f": it has {', '.join(names) or 'none'}"
            raise ConfigError(f"{self.infra}: no partition {self.partition!r}{hint}")
        return [each for each in found if each.is_up]

    # -- planning ---------------------------------------------------------------------------------------------------

    def target(self, reach: str) -> Target:
        """``JOB/NODE``: a step on that node."""
        job, _, node = reach.partition("/")
        return dataclasses.replace(self._login(), step=(job, node))

    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        """What Slurm could give; on an allocation, its nodes as they are now."""
        if allocation is not None and allocation.nodes:
            if not allocation.settings["gpus"]:  # those that are seen there are others'
                request = dataclasses.replace(request, accelerators=())
            return HostProvider.plan(self, request, allocation)
        gpus = self._choose(request)
        name, count = (gpus.name, gpus.count) if gpus is not None else (None, 0)
        nodes = tuple(
            NodePlan(node, "", request.num_ranks(count), name, count, is_elsewhere=True, host=f"node {node}")
            for node in range(request.num_nodes)
        )
        given = self._pending(request, 0)
        return Plan(self.name, nodes, False, bool(count), (), name, count, given)

    def _choose(self, request: NodeRequest) -> _Gpus | None:
        """The accelerators of each node, the first of the requested kinds that can be had; None where none are."""
        have = self._partitions()
        enough = [each for each in have if each.num_nodes >= request.num_nodes]
        if not enough and not request.accelerators:
            most = max((each.num_nodes for each in have), default=0)
            raise ConfigError(f"--num-nodes {request.num_nodes}: {self.infra} has {most} nodes of one kind at most")
        for name, count in request.accelerators or ():
            for each in enough:
                for gres, num in each.gpus.items():
                    if num >= count and _is_kind(gres, name):
                        shares = [other.cores * count // other.gpus[gres] for other in have if other.gpus.get(gres)]
                        return _Gpus(name, gres, count, max(1, min(shares)))
        if not request.accelerators:
            return None
        refuse_misspelt(name for name, _ in request.accelerators)
        asked = " or ".join(f"{name}:{count}" for name, count in request.accelerators)
        shown = sorted({f"{gres or 'gpu'}:{num}" for each in have for gres, num in each.gpus.items()})
        raise AcceleratorsLacking(
            f"{request.num_nodes} × {asked}", f"can't be had on {self.infra}: nodes have {', '.join(shown) or 'no GPU'}"
        )

    def _pending(self, request: NodeRequest, num_gpus: int, job: str = "", code: str = "") -> Allocation:
        settings = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return Allocation(
            infra=self.infra,
            id=request.id,
            state=AllocationState.PENDING,
            shares_machine=False,
            site="client" if request.supervised_here else "head",
            files="shared",
            files_in=request.files_in,
            python=self.python or "python3",
            code=code,
            settings={**settings, "sbatch": list(self.sbatch), "job": job, "gpus": num_gpus},
        )

    # -- the job ----------------------------------------------------------------------------------------------------

    def provision(self, request: NodeRequest, report: Report, have: Allocation | None = None) -> Allocation:
        """Submit a job that holds the nodes, unless that was done.

        Raises:
            ConfigError, ProvisionError: Slurm refuses it, or it can't be made larger.
        """
        if have is not None and (now := self.poll(have)).state in (AllocationState.READY, AllocationState.PENDING):
            if request.num_nodes > len(now.nodes):
                raise ConfigError(
                    f"cluster {request.id} has {len(now.nodes)} nodes, and a Slurm job can't be made larger: "
                    f"`{command_line('atoll', 'down', request.id)}`, then launch it again"
                )
            return now
        name = f"atoll-{request.id}" if request.id else "atoll-pool"
        code = atoll_bundle()
        with connections.used([self._login()]) as (login,):
            known = facts.ask(login, [(code.digest, code.name)])
            folder = posixpath.join(known.place, "slurm")
            login.run(f"mkdir -p {shlex.quote(folder)}", limit_s=_ANSWER_S)
        script = _KEEP.format(
            options=STEP_OPTIONS,
            python=shlex.quote(self.python or "python3"),
            keeper=shlex.quote(inspect.getsource(keeper)),
            folder=KEEPER_FOLDER,
            unused_s=_UNUSED_S,
        )
        words = [
            "sbatch",
            "--parsable",
            "--no-kill",
            "--no-requeue",
            f"--job-name={name}",
            f"--comment={request.owner}",
        ]
        words += [f"--output={folder}/%j.out", f"--nodes={request.num_nodes}", "--ntasks-per-node=1"]
        gpus = self._choose(request)
        words += self._resources(request, gpus)
        for option in ("partition", "account", "qos", "time", "constraint", "reservation"):
            if (value := getattr(self, option)) is not None:
                words.append(f"--{option}={value}")
        job = self._submitted(request.owner)
        if job is None:
            job = self._ask(*words, *self.sbatch, data=script.encode()).split(";")[0].strip().splitlines()[-1]
            report(f"Slurm job {job} was submitted ({name})")
        allocation = self._pending(request, 0 if gpus is None else gpus.count, job, code.digest)
        folder = posixpath.join(known.place, "clusters", request.id) if not request.supervised_here else ""
        return self.poll(dataclasses.replace(allocation, folder=folder))

    def _submitted(self, owner: str) -> str | None:
        """The job that a launch has submitted which was killed before it could write that down."""
        jobs = self._ask("squeue", "--me", "--noheader", "--states=PENDING,CONFIGURING,RUNNING", "--format=%i|%k")
        found = [
            job for job, _, comment in (line.partition("|") for line in jobs.split()) if owner and comment == owner
        ]
        return found[-1] if found else None

    def _resources(self, request: NodeRequest, gpus: _Gpus | None) -> list[str]:
        """Options for what is asked of each node; GPUs get their share of the node's cores."""
        words: list[str] = []
        if gpus is not None:
            words.append(f"--gres=gpu:{gpus.gres}:{gpus.count}" if gpus.gres else f"--gres=gpu:{gpus.count}")
        cpus = re.match(r"\d+", request.cpus or "")
        if cpus:
            words.append(f"--cpus-per-task={cpus[0]}")
        elif gpus is not None and not any(word.startswith(("-c", "--cpus", "--exclusive")) for word in self.sbatch):
            words.append(f"--cpus-per-task={gpus.cores}")
        memory = re.match(r"(\d+)", request.memory or "")
        return [*words, f"--mem={memory[1]}G"] if memory else words

    def poll(self, allocation: Allocation) -> Allocation:
        """Its job's state, and once that runs its nodes."""
        job = str(allocation.settings.get("job", ""))
        known, names = self._show(job)
        if not known:
            return self._lost(allocation, "Slurm knows it no more")
        state, reason = known.get("JobState", ""), known.get("Reason", "None")
        if state in _WAITING:
            why = _REASONS.get(reason, f"Slurm says {reason}")
            return dataclasses.replace(allocation, state=AllocationState.PENDING, reason=f"job {job}: {why}")
        if state != "RUNNING" or not names:
            end = _ENDS.get(reason) or _ENDS.get(state)
            if end is None:
                said = self._tail(known.get("StdOut", ""))
                end = f"Slurm says {state}" + (f"; its output ends with {said!r}" if said else "")
            return self._lost(allocation, end)
        # One that Slurm has taken out of the job since, as it was lost, stays: what is started there says so.
        nodes = allocation.nodes or tuple(AllocatedNode(name=name, reach=f"{job}/{name}") for name in names)
        return dataclasses.replace(allocation, state=AllocationState.READY, reason="", nodes=nodes)

    def _show(self, job: str) -> tuple[dict[str, str], list[str]]:
        """What Slurm says of a job, nothing where it knows it no more; and the nodes that it runs on."""
        try:
            first, *names = self._ask("sh", "-c", _POLL, "sh", job).splitlines()
        except ProvisionError as error:
            if "Invalid job id" not in str(error):
                raise
            return {}, []
        return dict(word.partition("=")[::2] for word in first.split()), names

    def _lost(self, allocation: Allocation, why: str) -> Allocation:
        reason = f"Slurm job {allocation.settings['job']} has ended: {why}"
        return dataclasses.replace(allocation, state=AllocationState.LOST, reason=reason)

    def _tail(self, path: str) -> str:
        """The last line of a file on the login node."""
        try:
            return self._ask("tail", "-n", "1", path).strip()[-300:]
        except ProvisionError:
            return ""

    def at_site(self, allocation: Allocation) -> Allocation:
        """The allocation as its supervisor sees it, which is in the job: srun is there."""
        settings = {**allocation.settings, "login": None, "key": None, "jump": None}
        return dataclasses.replace(allocation, site="client", settings=settings)

    def desk(self, allocation: Allocation) -> Remote:
        """Its first node; once its job has ended, or lost that, the login node, which sees the same files."""
        _, names = self._show(str(allocation.settings.get("job", "")))
        if allocation.nodes and allocation.head.name in names:
            return HostProvider.desk(self, allocation)
        code = atoll_bundle(allocation.code)
        login = self._login()
        with connections.used([login]) as (connection,):
            known = facts.ask(connection, [(code.digest, code.name)])
        plan = node_plan(known, 0, code, num_ranks=1, grace_s=self.grace_s)
        workdir = posixpath.join(plan.folder, allocation.files_in or f"clusters/{allocation.id}", WORKDIR)
        return Host(login, dataclasses.replace(plan, workdir=workdir))

    def end_orphans(self, allocation: Allocation, owner: str, first: int = 0) -> tuple[list[str], list[str]]:
        """As on hosts; where the job has ended nothing is left."""
        if self.poll(allocation).state is not AllocationState.READY:
            return [], []
        return HostProvider.end_orphans(self, allocation, owner, first)

    def release(self, allocation: Allocation, *, keep_disks: bool) -> Allocation:
        """Cancel the job: a stopped cluster holds no nodes, and gets others when it is started."""
        if job := str(allocation.settings.get("job", "")):
            try:
                self._ask("scancel", job)
            except ProvisionError as error:
                if "Invalid job id" not in str(error):
                    raise
        return dataclasses.replace(allocation, state=AllocationState.RELEASED)

    # -- for people -------------------------------------------------------------------------------------------------

    def examine(self) -> Iterator[tuple[bool, str]]:
        """What its partitions have."""
        for each in self._partitions():
            yield True, str(each)

    def gpu_rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Slurm tells kinds and counts, not cards."""
        return [], [str(each) for each in self._partitions() if each.gpus] or [f"no GPU in {self.infra}"]

    def login_command(
        self, allocation: Allocation, node: int, options: Sequence[str], command: Sequence[str]
    ) -> list[str]:
        """A step with a terminal, through the login node."""
        job, _, name = allocation.nodes[node].reach.partition("/")
        words = ["srun", f"--jobid={job}", f"--nodelist={name}", "--nodes=1", "--ntasks=1", "--overlap"]
        words += ["--pty", *(command or ["bash", "-l"])]
        login = self._login()
        if login.host == HERE:
            return words
        return ["ssh", *login.options, "-t", *options, login.host, shlex.join(words)]

    def copy(self, allocation: Allocation, node: int, path: str, here: str, *, up: bool) -> str:
        """Through the login node: what it sees, every node sees."""
        login = self._login()
        if login.host != HERE:
            return copy(login, path, here, up=up)
        ends = (here, path) if up else (path, here)
        done = subprocess.run(["cp", "-r", *ends], stderr=subprocess.PIPE)
        return "" if done.returncode == 0 else last_words(done.stderr, done.returncode)

    def copy_line(self, plan: NodePlan, path: str, into: str) -> str:
        """An ``scp`` command, or ``cp`` on the login node itself."""
        login = self._login()
        return command_line("cp", "-r", path, into) if login.host == HERE else copy_line(login, path, into)


PROVIDER = Slurm

_CALL = '"$@"; code=$?; [ $code -lt 255 ] || code=1; exit $code'  # 255 would look like ssh's own failure
_POLL = """scontrol -o show job "$1" || exit; nodes=$(squeue -h -j "$1" -t RUNNING -o %N 2>/dev/null)
[ -z "$nodes" ] || scontrol show hostnames "$nodes" """


@dataclass(frozen=True, slots=True)
class _Gpus:
    """GPUs of each node of a request: as the user calls them, as Slurm does, how many, and their share of cores."""

    name: str
    gres: str
    count: int
    cores: int


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes of one kind of a partition."""

    partition: str
    is_up: bool
    num_nodes: int
    cores: int
    memory_gb: float
    gpus: Mapping[str, int]  # how many of each node, by the type that Slurm calls them; "" where it has none
    limit: str

    @classmethod
    def parse(cls, line: str) -> _Nodes:
        """Of a line of sinfo."""
        name, up, num, cores, memory, gres, limit = line.strip().split("|")
        gpus: dict[str, int] = {}
        for kind, count in re.findall(r"gpu(?::([A-Za-z][\w.-]*))?:(\d+)", gres):
            gpus[kind] = gpus.get(kind, 0) + int(count)
        numbers = [int(re.match(r"\d+", each)[0]) for each in (num, cores, memory)]  # type: ignore[index]  # sinfo's
        return cls(name, up == "up", numbers[0], numbers[1], numbers[2] / 1024, gpus, limit)

    def __str__(self) -> str:
        cards = ", ".join(f"{num} × {kind or 'GPU'}" for kind, num in self.gpus.items()) or "no GPU"
        limit = "no time limit" if self.limit == "infinite" else f"at most {self.limit}"
        return (
            f"partition {self.partition}: {self.num_nodes} nodes, each with {self.cores} cores, "
            f"{self.memory_gb:.0f} GB, {cards}; {limit}"
        )


def _is_kind(gres: str, name: str) -> bool:
    """May a GPU that Slurm calls so be what was asked for? Where it says no kind, its nodes are believed to have it."""
    if not gres:
        return True
    spellings = (gres, canonical_gpu_name(gres.replace("_", " ")), name)
    plain, known, wanted = (re.sub(r"[^a-z0-9]", "", each.lower()) for each in spellings)
    return wanted in (plain, known) or re.sub(r"\d+gb$", "", wanted) == plain
