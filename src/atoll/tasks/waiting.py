"""Launches that wait for their nodes: what they wait for, so that other commands can tell while there is no cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from atoll.core.paths import atoll_home, write_atomic
from atoll.tasks import clusters
from atoll.tasks.spec import ClusterSpec, is_name

FILE = "waiting.json"  # in the cluster's folder, as long as the launch that holds its lock waits


@dataclass(frozen=True, slots=True)
class WaitingLaunch:
    """A launch that has no nodes yet.

    Attributes:
        name: of the cluster that it makes.
        infra, num_nodes, accelerator, num_accelerators, simulated: as of a ``ClusterSpec``.
        reason: what its provider said last, in Slurm's or the cloud's own words.
        since_s: when it began, in seconds since 1970.
    """

    name: str
    infra: str
    num_nodes: int
    accelerator: str | None
    num_accelerators: int
    simulated: bool
    reason: str
    since_s: float


@contextlib.contextmanager
def told(cluster: ClusterSpec, say: Callable[[str], object]) -> Iterator[Callable[[str], None]]:
    """Keeps what a provider says while it gets the nodes of a cluster, and says it on. The launch lock is held."""
    path, since_s = clusters.folder_of(cluster.name) / FILE, time.time()
    kept = {name: getattr(cluster, name) for name in _OF_CLUSTER}

    def tell(line: str) -> None:
        launch = WaitingLaunch(**kept, reason=line, since_s=since_s)
        write_atomic(path, json.dumps(dataclasses.asdict(launch)).encode())
        say(line)

    try:
        yield tell
    finally:
        path.unlink(missing_ok=True)


_OF_CLUSTER = ("name", "infra", "num_nodes", "accelerator", "num_accelerators", "simulated")


def launches(name: str | None = None) -> list[WaitingLaunch]:
    """Those of this user that wait for their nodes now, by name; only that of cluster ``name`` where it is given."""
    found = []
    for path in sorted((atoll_home() / "clusters").glob(f"{name or '*'}/{FILE}")):
        if not is_name(path.parent.name):
            continue
        with clusters.locked_if_free(path.parent.name, "status") as is_stale:  # whoever wrote it was killed
            if is_stale:
                path.unlink(missing_ok=True)
                continue
        with contextlib.suppress(OSError, ValueError, TypeError):  # its nodes have come just now
            found.append(WaitingLaunch(**json.loads(path.read_bytes())))
    return found
