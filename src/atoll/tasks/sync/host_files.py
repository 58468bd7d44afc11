"""What runs on ssh hosts for a cluster's files: its programs, and the removal of what was sent."""

from __future__ import annotations

import posixpath
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atoll.core.errors import ProvisionError
from atoll.providers import registry
from atoll.providers.base import WORKDIR
from atoll.tasks.client import tell
from atoll.tasks.nodes import node_of
from atoll.tasks.spec import ClusterSpec
from atoll.tasks.sync.receive import lock_file, state_file

_REMOVE_S = 300.0


# Several hosts may do it at once in a home that they share.
_REMOVE = """rm -rf -- "$1" "$2" "$3" 2>/dev/null || rm -rf -- "$1" "$2" "$3" || exit 1
[ "$(readlink "$4")" != "$1" ] || rm -f -- "$4"; rmdir -- "$(dirname "$1")" 2>/dev/null; exit 0"""


def remove_files(cluster: ClusterSpec, first: int = 0) -> None:
    """Remove the workdir from every host, unless its place is the user's own choice or is shared by runs.

    Tells where that fails. ``first`` is the number of the first of those hosts.
    """
    allocation, is_shared = cluster.allocation, cluster.allocation.files == "shared"
    if allocation.workdir or allocation.files_in or (is_shared and first):
        return

    def remove(node: int) -> None:
        name = allocation.nodes[node].name
        try:
            remote = registry.of(allocation).desk(allocation) if is_shared else node_of(cluster, node)
            try:
                workdir = remote.plan.workdir
                beside = (str(each(Path(workdir))) for each in (state_file, lock_file))
                paths = (workdir, *beside, posixpath.join(remote.plan.home, WORKDIR))
                remote.check(shlex.join(["sh", "-c", _REMOVE, "sh", *paths]), limit_s=_REMOVE_S)
            finally:
                remote.close()
        except ProvisionError as error:
            tell(f"the workdir of cluster {cluster.name} stays on {name}, remove it by hand: {error}")

    with ThreadPoolExecutor(cluster.num_nodes) as threads:
        list(threads.map(remove, range(first, 1 if is_shared else cluster.num_nodes)))
    registry.close_idle()


def workdir_on(cluster: ClusterSpec, node: int) -> str:
    """Where the workdir lies on one of a cluster's hosts; ``~/sky_workdir`` is that of its latest launch, of any.

    Raises:
        ProvisionError: the host can't be asked.
    """
    remote = node_of(cluster, node)
    remote.close()
    return remote.plan.workdir
