"""Which job of a cluster may start now, and where; what each of the others waits for. No I/O; standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec

TURN = "waiting for its turn"  # such a job has a place in the queue


@dataclass(frozen=True, slots=True)
class Turn:
    """What one pending job may do: start on these nodes of the cluster, or wait for what ``why`` says."""

    job: JobRow
    why: str | None
    nodes: tuple[int, ...] = ()


def turns(
    cluster: ClusterSpec, pending: Sequence[JobRow], running: Iterable[tuple[JobRow, Sequence[int]]]
) -> list[Turn]:
    """For each pending job, oldest first, whether and where it may start beside those that run and those before it.

    A job gets the nodes that run the fewest jobs and have enough accelerators free. Jobs without accelerators start at
    once, and so do those of other sweeps; those with accelerators keep their order, so that a large one is not passed
    by small ones for ever. Only the first of these is told which jobs it waits for: that changes with each job that
    ends, and each change of a reason is an event of the job that waits.
    """
    slots = _Slots(cluster)
    for job, nodes in running:
        slots.add(job, nodes)
    found = []
    queued = False
    for job in pending:
        why, nodes = None, ()
        if job.spec.group is not None and slots.in_group[job.spec.group] >= job.spec.parallel:
            why = f"{TURN} in the sweep, {job.spec.parallel} at once"
        elif job.spec.num_accelerators and queued:
            why = f"{TURN}: jobs before it wait for accelerators"
        else:
            nodes = slots.find(job)
            if len(nodes) < job.spec.num_nodes <= cluster.num_nodes:
                why, queued = slots.shortage(job), True
        if why is None:
            slots.add(job, nodes)
        found.append(Turn(job, why, tuple(nodes)))
    return found


class _Slots:
    """The nodes of a cluster and what is used of each."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._cluster = cluster
        self._num_jobs = [0] * cluster.num_nodes
        self._num_used = [0] * cluster.num_nodes  # accelerators
        self._holders: list[int] = []
        self.in_group: Counter[str | None] = Counter()

    def add(self, job: JobRow, nodes: Iterable[int]) -> None:
        """Counts a job that runs on these nodes."""
        self.in_group[job.spec.group] += 1
        if job.spec.num_accelerators:
            self._holders.append(job.id)
        for node in nodes:
            self._num_jobs[node] += 1
            self._num_used[node] += job.spec.num_accelerators

    def find(self, job: JobRow) -> list[int]:
        """The nodes that a job gets; fewer than it asks for where too few have enough accelerators free."""
        wanted, most = job.spec.num_accelerators, self._cluster.num_accelerators
        nodes = range(self._cluster.num_nodes)
        fitting = [node for node in nodes if not self._num_used[node] or self._num_used[node] + wanted <= most]
        return sorted(sorted(fitting if wanted else nodes, key=self._num_jobs.__getitem__)[: job.spec.num_nodes])

    def shortage(self, job: JobRow) -> str:
        """What a job waits for that finds too few nodes."""
        spec, have = job.spec, self._cluster.num_accelerators * self._cluster.num_nodes
        nodes = f"on {spec.num_nodes} node{'s' if spec.num_nodes != 1 else ''}"
        verb = "have" if len(self._holders) > 1 else "has"
        return (
            f"waiting for {spec.num_accelerators} × {spec.accelerator or 'accelerator'} {nodes}: "
            f"{_jobs(self._holders)} {verb} {sum(self._num_used)} of the cluster's {have}"
        )


def _jobs(ids: Sequence[int]) -> str:
    return f"job{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
