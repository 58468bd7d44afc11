"""Which job of a cluster may start now, and what each of the others waits for. No I/O; standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec

TURN = "waiting for its turn"  # such a job has a place in the queue


@dataclass(frozen=True, slots=True)
class Turn:
    """What one pending job may do: start, or wait for what ``why`` says."""

    job: JobRow
    why: str | None


def turns(cluster: ClusterSpec, pending: Sequence[JobRow], running: Iterable[JobRow]) -> list[Turn]:
    """For each pending job, oldest first, whether it may start beside those that run and those before it.

    Jobs without accelerators start at once, and so do those of other sweeps; those with accelerators keep their order,
    so that a large one is not passed by small ones for ever. Only the first of these is told which jobs it waits for:
    that changes with each job that ends, and each change of a reason is an event of the job that waits.
    """
    going = list(running)
    in_group = Counter(job.spec.group for job in going)
    found = []
    queued = False
    for job in pending:
        why = None
        if job.spec.group is not None and in_group[job.spec.group] >= job.spec.parallel:
            why = f"{TURN} in the sweep, {job.spec.parallel} at once"
        elif job.spec.num_accelerators and queued:
            why = f"{TURN}: jobs before it wait for accelerators"
        elif job.spec.num_accelerators:
            why = _no_accelerators(cluster, job, going)
            queued = why is not None
        if why is None:
            going.append(job)
            in_group[job.spec.group] += 1
        found.append(Turn(job, why))
    return found


def _no_accelerators(cluster: ClusterSpec, job: JobRow, going: Sequence[JobRow]) -> str | None:
    holders = [other for other in going if other.spec.num_accelerators]
    taken = sum(other.spec.num_accelerators for other in holders)
    if not holders or taken + job.spec.num_accelerators <= cluster.num_accelerators:
        return None
    what = f"{job.spec.num_accelerators} × {job.spec.accelerator or 'accelerator'} a node"
    return f"waiting for {what}: {_jobs([other.id for other in holders])} has {taken} of {cluster.num_accelerators}"


def _jobs(ids: Sequence[int]) -> str:
    return f"job{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
