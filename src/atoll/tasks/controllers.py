"""The clusters whose supervisors control managed jobs: which one it is for an infra, and how its jobs are asked for."""

from __future__ import annotations

from atoll.providers import registry
from atoll.tasks import clusters

HERE = "atoll-jobs"  # the cluster of the one on this machine; others have their infra behind it


def of(infra: str | None) -> str:
    """The cluster whose supervisor controls the jobs that are launched from an infra."""
    return HERE if infra is None or registry.is_here(infra) else f"{HERE}-{infra.replace('/', '-')}"


def infra_of(cluster: str) -> str | None:
    """The infra of a controller's cluster; None of any other cluster."""
    return clusters.load(cluster).infra if cluster in used() else None


def words_of(cluster: str) -> tuple[list[str], list[str]]:
    """What stands before and behind the verb of a command about the jobs of a cluster, or of a controller's."""
    if (infra := infra_of(cluster)) is None:
        return ["atoll"], [cluster]
    return ["atoll", "jobs"], [] if cluster == HERE else ["--controller", infra]


def used() -> list[str]:
    """The clusters of all controllers that were used from here."""
    return [each for each in clusters.all_names() if each == HERE or each.startswith(f"{HERE}-")]
