"""What lists say of clusters and jobs, as JSON values: ``-o json``, the Python SDK and the dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.providers.base import AllocationState
from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobStatus
from atoll.tasks.waiting import WaitingLaunch


def resources_text(num_nodes: int, accelerator: str | None, num: int, simulated: bool) -> str:
    """``2x (L4:4, simulated)``, or ``1x (CPU)``."""
    what = f"{accelerator}:{num}" + (", simulated" if simulated else "") if accelerator and num else "CPU"
    return f"{num_nodes}x ({what})"


def cluster_row(cluster: ClusterSpec, unfinished: Sequence[JobRow] | None) -> dict[str, Any]:
    """What ``atoll status -o json`` says of a cluster."""
    return {
        "name": cluster.name,
        "status": status_text(cluster),
        **fields(cluster, "infra", "num_nodes", "accelerator", "num_accelerators", "simulated", "cpus"),
        "memory": cluster.memory_gb,
        **fields(cluster, "autostop_minutes", "autodown"),
        "launched_at": cluster.created_s,
        "supervised_from": "here" if cluster.allocation.supervised_here else _head_name(cluster),
        "num_unfinished_jobs": None if unfinished is None else len(unfinished),
        "notes": list(cluster.notes),
    }


def waiting_row(launch: WaitingLaunch) -> dict[str, Any]:
    """What ``atoll status -o json`` says of a cluster that has no nodes yet."""
    return {
        "name": launch.name,
        "status": ClusterStatus.INIT.value,
        **fields(launch, "infra", "num_nodes", "accelerator", "num_accelerators", "simulated", "reason"),
        "launched_at": launch.since_s,
    }


def _head_name(cluster: ClusterSpec) -> str | None:
    return cluster.allocation.head.name if cluster.allocation.nodes else None


def status_text(cluster: ClusterSpec) -> str:
    """Where a cluster stands; ``INIT``, as SkyPilot has it, while its nodes have still to come."""
    waits = cluster.status is ClusterStatus.UP and cluster.allocation.state is AllocationState.PENDING
    return "INIT" if waits else cluster.status.value


def job_row(row: JobRow) -> dict[str, Any]:
    """What ``atoll queue -o json`` says of a job; never the values of its variables."""
    return {
        "job_id": row.id,
        "job_name": row.name,
        **fields(row, "task_id", "user"),
        "status": row.status.value,
        "reason": row.reason,
        "exit_code": 0 if row.status is JobStatus.SUCCEEDED else row.exit_code,
        "submitted_at": row.submitted_s,
        "start_at": row.started_s,
        "end_at": row.ended_s,
        "restarts": row.restarts,
        **fields(row.spec, "num_nodes", "accelerator", "num_accelerators", "simulated", "group"),
        "labels": dict(row.spec.labels),
        "after": row.spec.after,
    }


def fields(record: object, *names: str) -> dict[str, Any]:
    """These attributes of a record."""
    return {name: getattr(record, name) for name in names}
