"""What Slurm says of jobs and partitions, and what that means in plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.providers.accelerators import canonical_gpu_name

_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "RESV_DEL_HOLD", "SUSPENDED", "STOPPED"})
# What Slurm answers where a job waits, in plain words; other reasons are shown as they are.
_REASONS = {
    "Resources": "its nodes are busy",
    "Priority": "other jobs come first",
    "None": "Slurm has not looked at it yet",
    "BeginTime": "Slurm begins a job that was queued again about two minutes later",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Nodes_required_for_job_are_DOWN": "nodes that it needs are down, drained or reserved",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows",
    "PartitionTimeLimit": "it asks for more time than its partition allows",
    "PartitionDown": "its partition is down",
    "JobHeldUser": "it is held (`scontrol release` lets it go)",
    "JobHeldAdmin": "an administrator holds it",
    "QOSMaxJobsPerUserLimit": "the quality of service allows no more jobs of yours",
    "AssocGrpGRES": "your account has used its share of GPUs",
}
_ENDS = {
    "PREEMPTED": "it was preempted",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "OUT_OF_MEMORY": "it ran out of memory",
    "DEADLINE": "its deadline was reached",
    "COMPLETING": "it is ending",
}
_NO_OUTPUT = "0:53"  # the exit code of a job whose output file could not be made


@dataclass(frozen=True, slots=True)
class JobNow:
    """A job as ``scontrol show job`` tells it, and the names of the nodes that it has.

    Attributes:
        is_known: does Slurm still know it?
        state, reason: in Slurm's words.
        restarts: how often it was queued again.
        limit: its time limit, ``0:30:00``.
        has_gpus: has it asked for GPUs?
        output: the file of its output; ``has_output``: could that be made?
        comment: what we have given it as one.
        nodes: names.
    """

    is_known: bool = False
    state: str = ""
    reason: str = "None"
    restarts: int = 0
    limit: str = ""
    has_gpus: bool = False
    output: str = ""
    has_output: bool = True
    comment: str = ""
    nodes: tuple[str, ...] = ()

    @classmethod
    def parse_all(cls, text: str) -> dict[str, JobNow]:
        """By number, of lines of ``scontrol -o show job``, each with a line for each of the job's nodes behind it."""
        found: list[list[str]] = []
        for line in text.splitlines():
            if line.startswith("JobId="):
                found.append([])
            found[-1].append(line)
        return {job[0].split()[0].partition("=")[2]: cls._parse(*job) for job in found}

    @classmethod
    def _parse(cls, first: str, *names: str) -> JobNow:
        said = dict(word.partition("=")[::2] for word in first.split())
        restarts = said.get("Restarts", "")
        return cls(
            is_known=True,
            state=said.get("JobState", ""),
            reason=said.get("Reason", "None"),
            restarts=int(restarts) if restarts.isdigit() else 0,
            limit=re.sub(r"^0(?=\d:)", "", said.get("TimeLimit", "")),
            has_gpus=any("gpu" in said.get(key, "") for key in ("TresPerNode", "TresPerJob", "TresPerTask", "TRES")),
            output=said.get("StdOut", ""),
            has_output=said.get("ExitCode", "") != _NO_OUTPUT,
            comment=said.get("Comment", ""),
            nodes=names,
        )

    def waits(self, restarts: int) -> bool:
        """Does it wait for nodes? ``restarts``: how often it had been queued again when it was last looked at."""
        return self.state in _WAITING or (self.state == "COMPLETING" and self.restarts > restarts)

    @property
    def why_it_waits(self) -> str:
        """As a clause, with the nodes that are not available where Slurm names them."""
        known = _REASONS.get(self.reason.partition(",")[0])
        if known is None:
            return f"Slurm says {self.reason}"
        nodes = re.search(r"UnavailableNodes:([^\s,]\S*)", self.reason)
        return f"{known}: {nodes[1]}" if nodes else known

    @property
    def is_cancelled(self) -> bool:
        """Did somebody cancel it? One that is ending so has no other reason."""
        return self.state == "CANCELLED" or (self.state == "COMPLETING" and self.reason == "None")

    @property
    def why_it_ended(self) -> str:
        """As a clause; empty where Slurm's word says nothing."""
        if self.state == "TIMEOUT" or self.reason == "TimeLimit":
            return f"its time limit of {self.limit} was reached"
        if self.is_cancelled:
            return "it was cancelled (scancel)"
        return _ENDS.get(self.state, "")


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of each node of a request: as the user calls them, as Slurm does, how many, and their share of cores."""

    name: str
    gres: str
    count: int
    cores: int


@dataclass(frozen=True, slots=True)
class PartitionNodes:
    """Nodes of one kind of a partition."""

    partition: str
    is_up: bool
    num_nodes: int
    cores: int
    memory_gb: float
    gpus: Mapping[str, int]  # how many of each node, by the type that Slurm calls them; "" where it has none
    limit: str

    @classmethod
    def parse(cls, line: str) -> PartitionNodes:
        """Of a line of sinfo."""
        name, up, num, cores, memory, gres, limit = line.strip().split("|")
        numbers = [int(re.match(r"\d+", each)[0]) for each in (num, cores, memory)]  # type: ignore[index]  # sinfo's
        return cls(name, up == "up", numbers[0], numbers[1], numbers[2] / 1024, _gpus(gres), limit)

    def __str__(self) -> str:
        cards = ", ".join(f"{num} × {kind or 'GPU'}" for kind, num in self.gpus.items()) or "no GPU"
        limit = "no time limit" if self.limit == "infinite" else f"at most {self.limit}"
        return (
            f"partition {self.partition}: {self.num_nodes} nodes, each with {self.cores} cores, "
            f"{self.memory_gb:.0f} GB, {cards}; {limit}"
        )


GPUS_FORMAT = "PartitionName:|,Available:|,Nodes:|,Gres:|,GresUsed:|,StateLong:|"  # of sinfo, for ``free_gpus``


def free_gpus(text: str) -> list[dict[str, Any]]:
    """A row for each partition and kind of GPU: how many it has, and how many of those a job could get now."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in text.splitlines():
        partition, up, num, gres, used, state, *_ = [word.strip() for word in line.split("|")]
        for kind, count in _gpus(gres).items() if up == "up" else ():
            new = {"partition": partition, "name": kind or "GPU", "count": 0, "free": 0}
            row = rows.setdefault((partition, kind), new)
            row["count"] += int(num) * count
            if state.rstrip("~#%") in ("idle", "mixed"):
                row["free"] += int(num) * (count - _gpus(used).get(kind, 0))
    return list(rows.values())


def _gpus(gres: str) -> dict[str, int]:
    """How many a node has, or of them are used, by type; "" where Slurm says none."""
    gpus: dict[str, int] = {}
    for kind, count in re.findall(r"gpu(?::([A-Za-z][\w.-]*))?:(\d+)", gres):
        gpus[kind] = gpus.get(kind, 0) + int(count)
    return gpus


def is_kind(gres: str, name: str) -> bool:
    """May a GPU that Slurm calls so be what was asked for? Where it says no kind, its nodes are believed to have it."""
    if not gres:
        return True
    spellings = (gres, canonical_gpu_name(gres.replace("_", " ")), name)
    plain, known, wanted = (re.sub(r"[^a-z0-9]", "", each.lower()) for each in spellings)
    return wanted in (plain, known) or re.sub(r"\d+gb$", "", wanted) == plain
