"""``Slurm``: nodes of a Slurm cluster, held by one job for as long as a cluster or a pool lives.

``sbatch`` submits a job that runs a keeper on each node (``agent.keeper``). Everything else runs in steps of that job,
started with ``srun --overlap`` on the login node, or by the supervisor, which lives in the job itself, on its first
node. So a login node may end what runs there, and be out of reach: the jobs of a cluster go on. That a node is lost
ends neither job nor steps (``--no-kill``); our agents notice it.
"""

from __future__ import annotations

import dataclasses
import os
import posixpath
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.agent import keeper
from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.validation import check_seconds, command_line, nearest, suggests_fields
from atoll.providers.accelerators import refuse_misspelt
from atoll.providers.base import (
    OWN_MACHINES,
    WORKDIR,
    AcceleratorsLacking,
    AllocatedNode,
    Allocation,
    AllocationState,
    Bundle,
    NodePlan,
    NodeRequest,
    Notice,
    Plan,
    Remote,
    Report,
)
from atoll.providers.bundle import atoll_bundle
from atoll.providers.slurm import containers, queue
from atoll.providers.slurm.answers import GPUS_FORMAT, Gpus, JobNow, PartitionNodes, free_gpus, is_kind
from atoll.providers.slurm.submission import check_options, resource_options, script, seconds_of, task_options
from atoll.providers.ssh import facts
from atoll.providers.ssh.connection import connections
from atoll.providers.ssh.host_node import node_plan
from atoll.providers.ssh.host_provider import HostProvider
from atoll.providers.ssh.hosts import (
    GRACE_S,
    HERE,
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
_LOGIN_GRACE_S = 120.0  # a login node is restarted, or a laptop moves to another network
_RENEW_S = 20.0  # of the notice: to write down what was saved, and to have the job queued again
_HERE_NAME = "here"  # slurm/here: the Slurm of this machine, or the job that this process is in
_MARKER = f"shared-{secrets.token_hex(6)}"  # a file that this process makes: who sees it shares the folder
_JOB = "SLURM_JOB_ID"  # of an allocation that the caller has


def _node(job: str, name: str) -> AllocatedNode:
    return AllocatedNode(name=name, reach=f"{job}/{name}")


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
        grace_s: how long a connection may be lost before its node counts as lost, in seconds. 0 is two minutes where
            a login node is in between, and 30 seconds among the job's own nodes.
        requeue: where the time limit is near, or a node is lost, jobs of a cluster save, Slurm gives other nodes, and
            they go on there; so it is for tasks that say ``job_recovery``.
        notice_s: how long before the time limit that is, in seconds; Slurm may say it up to a minute earlier.

    Raises:
        ConfigError: a value that cannot work.
    """

    kind: ClassVar[str] = "slurm"
    poll_s: ClassVar[float] = 10.0  # a busy controller answers many; see ``queue``
    ends_with_driver: ClassVar[bool] = True
    form: ClassVar[str] = "slurm/NAME"
    expected: ClassVar[str] = (
        "slurm/NAME, with a NAME of [slurm.NAME] in config.toml or of ~/.ssh/config (the login node), or slurm/here"
    )
    lacks: ClassVar[Mapping[str, str]] = {
        **{key: why for key, why in OWN_MACHINES.items() if key != "image_id"},
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
    grace_s: float = 0.0
    requeue: bool = False
    notice_s: float = 120.0
    declared_as: str = dataclasses.field(default="", repr=False)
    held: bool = dataclasses.field(default=False, repr=False)  # the nodes are of a job that the caller has

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.type == "str | None" and not isinstance(value, str | None):
                raise ConfigError(f"Slurm({each.name}={value!r}): expected text or None")
            if isinstance(value, str) and each.name != "declared_as" and (not value.strip() or "\n" in value):
                raise ConfigError(f"Slurm({each.name}={value!r}): expected a text in one line, or None")
        if isinstance(self.sbatch, str) or not all(isinstance(each, str) for each in self.sbatch):
            raise ConfigError(f"Slurm(sbatch={self.sbatch!r}): expected a list of options, such as ['--exclusive']")
        if self.grace_s:
            check_seconds("Slurm(grace_s=)", self.grace_s)
        if not self.grace_s:
            object.__setattr__(self, "grace_s", GRACE_S if self.login is None else _LOGIN_GRACE_S)
        check_seconds("Slurm(notice_s=)", self.notice_s)
        if not isinstance(self.requeue, bool):
            raise ConfigError(f"Slurm(requeue={self.requeue!r}): expected true or false")
        check_options(self.sbatch, "Slurm(sbatch=)")
        object.__setattr__(self, "sbatch", tuple(self.sbatch))
        if self.login is not None:
            targets([self.login])

    @property
    def infra(self) -> str:
        """``slurm/NAME``, or ``slurm/NAME/PARTITION``."""
        return f"slurm/{self.declared_as or self.login or _HERE_NAME}"

    @property
    def num_nodes(self) -> int:
        """Of an allocation that the caller has, all."""
        return int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if self._own_job else 1

    @property
    def _own_job(self) -> str:
        """The job that this process is in, or whose shell it is, where its nodes are to be taken."""
        return os.environ.get(_JOB, "") if self.held else ""

    @classmethod
    def here(cls) -> Slurm:
        """The nodes of the job that this process is in (``salloc``, ``sbatch``), as they are; they stay the job's.

        Raises:
            ConfigError: it is in none.
        """
        if not os.environ.get(_JOB):
            raise ConfigError(
                "Slurm.here(): this process is in no Slurm job: start it in `salloc --nodes 2` or a script for sbatch, "
                "or have nodes got for you with Slurm(partition=…)"
            )
        return cls(declared_as=_HERE_NAME, held=True)

    @classmethod
    def declared(cls) -> list[str]:
        """Sections of ``config.toml``."""
        return [f"slurm/{name}" for name in declared("slurm")]

    @classmethod
    def resolve(cls, name: str) -> Slurm:
        """A section of ``config.toml``, a login node of the user's ssh config, or this machine."""
        sections = declared("slurm")
        whole, (name, _, partition) = name, name.partition("/")
        if name in sections:
            known = [each.name for each in dataclasses.fields(cls) if each.name not in ("declared_as", "held")]
            section = check_keys(f"slurm.{name}", sections[name], known)
            section = {**section, **({"partition": partition} if partition else {})}
            try:
                return cls(**section, declared_as=whole)
            except ConfigError as error:
                raise ConfigError(f"config.toml: [slurm.{name}]: {error}") from None
        if name in (_HERE_NAME, ""):
            is_held = not partition and bool(os.environ.get(_JOB))
            return cls(partition=partition or None, declared_as=whole or _HERE_NAME, held=is_held)
        if name in config_hosts():
            return cls(login=name, partition=partition or None, declared_as=whole)
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

    def _ask(self, *words: str, data: bytes = b"", name: str = "") -> str:
        """Run a command of Slurm's on the login node; what it printed. ``name``: of a script, for messages.

        Raises:
            ProvisionError: it failed, or is not there.
        """
        with connections.used([self._login()]) as (login,):
            answer = login.run(shlex.join(["sh", "-c", _CALL, "sh", *words]), data, limit_s=_ANSWER_S)
        if answer.returncode == 0:
            return answer.stdout.decode(errors="replace")
        name = name or words[0]
        said = last_words(answer.stderr, answer.returncode).removeprefix(f"{name}: error: ")
        where = "this machine" if self.login is None else self.login
        if answer.returncode == 127:
            raise ProvisionError(f"{self.infra}: {where} has no {name}: is it a login node of a Slurm cluster?")
        raise ProvisionError(f"{self.infra}: {name} failed on {where}: {said}")

    def _partitions(self) -> list[PartitionNodes]:
        """What the partition has, or all partitions that are up, one line for each kind of node."""
        words = ["sinfo", "--noheader", "--format=%R|%a|%D|%c|%m|%G|%l"]
        words += self._of_partition()
        found = [PartitionNodes.parse(line) for line in self._ask(*words).splitlines() if line.count("|") == 6]
        if not found:
            names = sorted({line.partition("|")[0] for line in self._ask("sinfo", "-h", "-o", "%R|").splitlines()})
            hint = nearest(self.partition or "", names) or f": it has {', '.join(names) or 'none'}"
            raise ConfigError(f"{self.infra}: no partition {self.partition!r}{hint}")
        return [each for each in found if each.is_up]

    def _of_partition(self) -> list[str]:
        return [f"--partition={self.partition}"] if self.partition is not None else []

    # -- planning ---------------------------------------------------------------------------------------------------

    def target(self, reach: str) -> Target:
        """``JOB/NODE``: a step on that node."""
        job, _, node = reach.partition("/")
        return dataclasses.replace(self._login(), step=(job, node), is_kept=not self.held)

    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        """What Slurm could give; on an allocation, its nodes as they are now."""
        if allocation is None and self._own_job:
            allocation = self._take(request)
        if allocation is not None and allocation.nodes:
            if not allocation.settings["gpus"]:  # those that are seen there are others'
                request = dataclasses.replace(request, accelerators=())
            found = HostProvider.plan(self, request, allocation)
            if not (image := allocation.settings.get("image")):
                return found
            nodes = tuple(self._in_container(node, *image) for node in found.nodes)
            return dataclasses.replace(found, nodes=nodes)
        self._image(request)
        task_options(request)
        gpus = self._choose(request)
        name, count = (gpus.name, gpus.count) if gpus is not None else (None, 0)
        nodes = tuple(
            NodePlan(node, "", request.num_ranks(count), name, count, is_elsewhere=True, host=f"node {node}")
            for node in range(request.num_nodes)
        )
        given = self._pending(request, 0)
        return Plan(self.name, nodes, False, bool(count), (), name, count, given)

    def _image(self, request: NodeRequest) -> tuple[str, str] | None:
        """The image of a request, and what runs it."""
        if (image_id := request.resources.get("image_id")) is None:
            return None
        tool = self._ask("sh", "-c", containers.FIND).strip().rpartition("\n")[2]
        return containers.image_of(image_id, tool, self.infra), tool

    def _in_container(self, node: NodePlan, image: str, tool: str) -> NodePlan:
        job, _, name = node.reach.partition("/")
        step = ["srun", f"--jobid={job}", f"--nodelist={name}", "--nodes=1", "--ntasks=1", "--quiet", "--unbuffered"]
        step += [*STEP_OPTIONS.split(), "--input=none"]
        return dataclasses.replace(node, wrapper=containers.wrapper(image, tool, node, step))

    def _choose(self, request: NodeRequest) -> Gpus | None:
        """The accelerators of each node, the first of the requested kinds that can be had; None where none are."""
        have = self._partitions()
        enough = [each for each in have if each.num_nodes >= request.num_nodes]
        if not enough and not request.accelerators:
            most = max((each.num_nodes for each in have), default=0)
            raise ConfigError(f"--num-nodes {request.num_nodes}: {self.infra} has {most} nodes of one kind at most")
        for name, count in request.accelerators or ():
            for each in enough:
                for gres, num in each.gpus.items():
                    if num >= count and is_kind(gres, name):
                        shares = [other.cores * count // other.gpus[gres] for other in have if other.gpus.get(gres)]
                        return Gpus(name, gres, count, max(1, min(shares)))
        if not request.accelerators:
            return None
        refuse_misspelt(name for name, _ in request.accelerators)
        asked = " or ".join(f"{name}:{count}" for name, count in request.accelerators)
        shown = sorted(
            {f"{each.num_nodes} × {kind or 'gpu'}:{num}" for each in have for kind, num in each.gpus.items()}
        )
        there = f"can't be had on {self.infra}: it has {', '.join(shown) or 'no GPU'}"
        raise AcceleratorsLacking(f"{request.num_nodes} × {asked}", there)

    def _take(self, request: NodeRequest) -> Allocation:
        """Nodes of the job that this process is in.

        Raises:
            ConfigError: it has too few, or no GPUs where some are asked for.
            ProvisionError: it is over.
        """
        job = self._own_job
        now = self._show(job)
        if now.state != "RUNNING" or not now.nodes:
            why = now.why_it_ended or f"Slurm says {now.state}" if now.is_known else "Slurm does not know it"
            raise ProvisionError(f"{self.infra}: job {job} ({_JOB}) has no nodes to take: {why}")
        if request.num_nodes > len(now.nodes):
            raise ConfigError(f"--num-nodes {request.num_nodes}: Slurm job {job} has {len(now.nodes)}")
        if request.accelerators and not now.has_gpus:
            asked = " or ".join(f"{name}:{count}" for name, count in request.accelerators)
            raise AcceleratorsLacking(asked, f"can't be had: Slurm job {job} has no GPU (salloc --gres=gpu:…)")
        code = atoll_bundle()
        _, marker = self._prepare(code)
        taken = self._pending(request, int(now.has_gpus), job, code.digest, marker)
        nodes = tuple(_node(job, name) for name in now.nodes[: request.num_nodes])
        ready = AllocationState.READY
        return dataclasses.replace(taken, state=ready, site="client", replaces_nodes=False, nodes=nodes)

    def _prepare(self, code: Bundle) -> tuple[str, str]:
        """Make a folder for the job's files on the login node, and a file that its nodes have to see; both."""
        with connections.used([self._login()]) as (login,):
            place = facts.ask(login, [(code.digest, code.name)]).place
            folder, seen = posixpath.join(place, "slurm"), posixpath.join(place, "bundle", _MARKER)
            login.run(f"mkdir -p {shlex.quote(folder)} && : > {shlex.quote(seen)}", limit_s=_ANSWER_S)
        return place, _MARKER

    def shared_marker(self, allocation: Allocation | None) -> str:
        """What ``_prepare`` made."""
        return str(allocation.settings.get("marker", "")) if allocation is not None else ""

    def not_shared(self, nodes: Sequence[str], place: str) -> ProvisionError:
        """With what to do."""
        login = self.login or "this machine"
        return ProvisionError(
            f"{', '.join(nodes)} can't see {place} of {login}, where code, workdirs and logs lie: in ~/.bashrc of "
            f"{login}, `export ATOLL_HOME=FOLDER` with a folder that all of them share"
        )

    def _pending(
        self, request: NodeRequest, num_gpus: int, job: str = "", code: str = "", marker: str = ""
    ) -> Allocation:
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
            replaces_nodes=self._requeues(request),
            settings={
                **settings,
                "sbatch": list(self.sbatch),
                "job": job,
                "gpus": num_gpus,
                "restarts": 0,
                "marker": marker,
                "image": self._image(request),
            },
        )

    def _requeues(self, request: NodeRequest) -> bool:
        """Do jobs go on where the time limit is near? What is supervised elsewhere would not hear of that in time."""
        if request.supervised_here or not (self.requeue or "job_recovery" in request.resources):
            return False
        limit_s = seconds_of(self.time or "")
        if limit_s is not None and limit_s <= self.notice_s:
            raise ConfigError(
                f"{self.infra}: time = {self.time!r} is no longer than notice_s = {self.notice_s:g}, so each attempt "
                "would be told of its limit as it begins: give it more time, or lower notice_s"
            )
        return True

    # -- the job ----------------------------------------------------------------------------------------------------

    def provision(self, request: NodeRequest, report: Report, have: Allocation | None = None) -> Allocation:
        """Submit a job that holds the nodes, unless that was done.

        Raises:
            ConfigError, ProvisionError: Slurm refuses it, or it can't be made larger.
        """
        there = (AllocationState.READY, AllocationState.PENDING)
        # One that has waited for its nodes so far, in a launch that was killed, is found by its owner.
        if have is not None and have.nodes and (now := self.poll(have)).state in there:
            if request.num_nodes > len(now.nodes):
                raise ConfigError(
                    f"cluster {request.id} has {len(now.nodes)} nodes, and a Slurm job can't be made larger: "
                    f"`{command_line('atoll', 'down', request.id)}`, then launch it again"
                )
            return now
        if self._own_job:
            return self._take(request)
        name = f"atoll-{request.id}" if request.id else "atoll-pool"
        code = atoll_bundle()
        place, marker = self._prepare(code)
        folder = posixpath.join(place, "slurm")
        gpus = self._choose(request)
        words = ["sbatch", "--parsable", "--no-kill", f"--job-name={name}", f"--comment={request.owner}"]
        words += [f"--output={folder}/%j.out", f"--nodes={request.num_nodes}", "--ntasks-per-node=1"]
        if self._requeues(request):
            words += ["--requeue", "--open-mode=append", f"--signal=B:USR1@{max(1, int(self.notice_s))}"]
        else:
            words.append("--no-requeue")
        further = [*self.sbatch, *task_options(request)]
        words += resource_options(request, gpus, further)
        for option in ("partition", "account", "qos", "time", "constraint", "reservation"):
            if (value := getattr(self, option)) is not None:
                words.append(f"--{option}={value}")
        job = self._submitted(request.owner)
        if job is None:
            data = script(self.python or "python3", folder).encode()
            job = self._ask(*words, *further, data=data).split(";")[0].strip().splitlines()[-1]
            report(f"Slurm job {job} was submitted ({name})")
        allocation = self._pending(request, 0 if gpus is None else gpus.count, job, code.digest, marker)
        folder = posixpath.join(place, "clusters", request.id) if not request.supervised_here else ""
        return self.poll(dataclasses.replace(allocation, folder=folder))

    def _submitted(self, owner: str) -> str | None:
        """The job that a launch has submitted which was killed before it could write that down."""
        there = ("PENDING", "CONFIGURING", "RUNNING")
        jobs = self._jobs().items()
        return next((job for job, now in jobs if owner and now.comment == owner and now.state in there), None)

    def poll(self, allocation: Allocation, *, max_age_s: float = 0.0) -> Allocation:
        """Its job's state, and once that runs its nodes."""
        return self._as_now(allocation, self._show(allocation.settings["job"], max_age_s))

    def _as_now(self, allocation: Allocation, now: JobNow) -> Allocation:
        job, restarts = allocation.settings["job"], allocation.settings.get("restarts", 0)
        if now.is_known and now.waits(restarts):
            reason = f"job {job}: {now.why_it_waits}"
            return dataclasses.replace(allocation, state=AllocationState.PENDING, reason=reason)
        if now.state != "RUNNING" or not now.nodes:
            reason = f"Slurm job {job} has ended: {self._why_it_ended(now)}"
            state = AllocationState.RELEASED if now.is_cancelled else AllocationState.LOST
            return dataclasses.replace(allocation, state=state, reason=reason)
        nodes = allocation.nodes
        if now.restarts > restarts or not nodes:
            nodes = tuple(_node(job, name) for name in now.nodes)
            allocation = dataclasses.replace(allocation, settings={**allocation.settings, "restarts": now.restarts})
        # One that Slurm has taken out of the job since, as it was lost, stays: what is started there says so.
        return dataclasses.replace(allocation, state=AllocationState.READY, reason="", nodes=nodes)

    def _why_it_ended(self, now: JobNow) -> str:
        if not now.is_known:
            return "Slurm knows it no more"
        if why := now.why_it_ended:
            return why
        if not now.has_output:
            return str(self.not_shared(["its nodes"], posixpath.dirname(posixpath.dirname(now.output))))
        said = self._tail(now.output)
        return f"Slurm says {now.state}" + (f"; its output ends with {said!r}" if said else "")

    def may_supervise(self, allocation: Allocation) -> bool:
        """In the job alone; once that is over, or its first node lost for good, wherever its files are."""
        if not allocation.settings.get("in_job") or keeper.VARIABLE in os.environ:
            return True
        job = self._show(allocation.settings["job"])
        now = self._as_now(allocation, job)
        if now.state is AllocationState.READY:
            return now.head.name not in job.nodes and not now.replaces_nodes
        return now.state is not AllocationState.PENDING

    def notice(self, allocation: Allocation) -> Notice | None:
        """The job's script has heard that the time limit is near, and left a file beside the keeper's socket."""
        folder = os.environ.get(keeper.VARIABLE)
        if not folder or not allocation.replaces_nodes or not os.path.exists(os.path.join(folder, keeper.NOTICE)):
            return None
        save_s = max(self.notice_s - _RENEW_S, self.notice_s / 2)
        return Notice(f"the time limit of Slurm job {allocation.settings['job']} is near", save_s)

    def renew(self, allocation: Allocation) -> Allocation:
        """Have Slurm queue the job again, with healthy nodes; not one that was cancelled, which has lost them too."""
        if (now := self.poll(allocation)).state is AllocationState.RELEASED:
            return now
        try:
            self._ask("scontrol", "requeue", str(allocation.settings["job"]))
        except ProvisionError:  # perhaps the end of the job reached its process before the answer did
            if self.poll(allocation).state is not AllocationState.PENDING:
                raise
        return dataclasses.replace(allocation, state=AllocationState.PENDING)

    def _show(self, job: str, max_age_s: float = 0.0) -> JobNow:
        """A job as it is now, or was so many seconds ago."""
        known = self._jobs(max_age_s).get(job)
        return known or (self._jobs() if max_age_s else {}).get(job, JobNow())

    def _jobs(self, max_age_s: float = 0.0) -> dict[str, JobNow]:
        login = self._login()
        cluster = " ".join([*login.options, login.host])
        return queue.jobs_at(cluster, lambda: self._ask("sh", "-c", queue.COMMAND, name="scontrol"), max_age_s)

    def _tail(self, path: str) -> str:
        """The last line of a file on the login node."""
        try:
            return self._ask("tail", "-n", "1", path).strip()[-300:]
        except ProvisionError:
            return ""

    def at_site(self, allocation: Allocation) -> Allocation:
        """The allocation as its supervisor sees it, which is in the job: srun is there."""
        settings = {**allocation.settings, "login": None, "key": None, "jump": None, "in_job": True}
        settings["grace_s"] = min(self.grace_s, GRACE_S)
        return dataclasses.replace(allocation, site="client", settings=settings)

    def desk(self, allocation: Allocation) -> Remote:
        """Its first node; once its job has ended, or lost that, the login node, which sees the same files."""
        job = self._show(allocation.settings["job"])
        now = self._as_now(allocation, job)
        if now.nodes and now.head.name in job.nodes:
            return HostProvider.desk(self, now)
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
        """Cancel the job, unless the caller had it: a stopped cluster holds no nodes, and `launch` gets it others."""
        if (job := str(allocation.settings.get("job", ""))) and not allocation.settings.get("held"):
            try:
                self._ask("scancel", job)
            except ProvisionError as error:
                if "Invalid job id" not in str(error):
                    raise
        return dataclasses.replace(allocation, state=AllocationState.RELEASED)

    # -- for people -------------------------------------------------------------------------------------------------

    def examine(self) -> Iterator[tuple[bool, str]]:
        """What its partitions have, the nodes of the job that this process is in, and whether Atoll can start there."""
        if job := self._own_job:
            now = self._show(job)
            cards = "" if now.has_gpus else "; it has no GPU (salloc --gres=gpu:…)"
            yield bool(now.nodes), f"you are in Slurm job {job}, whose nodes are used: {', '.join(now.nodes)}{cards}"
        for each in self._partitions():
            yield True, str(each)
        for line in self._ask("sinfo", "--noheader", "--list-reasons", "--format=%N|%T|%E").splitlines():
            names, state, reason = line.strip().split("|", 2)
            yield True, f"without {names}, which is {state.rstrip('*')}: {reason}"
        try:
            with connections.used([self._login()]) as (login,):
                facts.ask(login, ())
        except AtollError as error:  # no Python there, say
            yield False, str(error)

    def gpu_rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        """By partition and kind: Slurm tells counts, not cards."""
        self._partitions()  # is there such a partition?
        rows = free_gpus(self._ask("sinfo", "--noheader", f"--Format={GPUS_FORMAT}", *self._of_partition()))
        return rows, [] if rows else [f"no GPU in {self.infra}"]

    def login_command(
        self, allocation: Allocation, node: int, options: Sequence[str], command: Sequence[str]
    ) -> list[str]:
        """A step through the login node; with a terminal, where this process has one or a shell is wanted."""
        job, _, name = allocation.nodes[node].reach.partition("/")
        words = ["srun", f"--jobid={job}", f"--nodelist={name}", "--nodes=1", "--ntasks=1", "--overlap"]
        terminal = not command or sys.stdin.isatty()
        words += ["--pty"] if terminal else []
        words += ["sh", "-c", " ".join(command)] if command else ["bash", "-l"]  # as ssh: the shell there reads it
        login = self._login()
        if login.host == HERE:
            return words
        # Ports are forwarded by the login node, whose own loopback interface is not meant.
        options = [each.replace(":127.0.0.1:", f":{name}:") for each in options]
        return ["ssh", *login.options, *(["-t"] if terminal else []), *options, login.host, shlex.join(words)]

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
