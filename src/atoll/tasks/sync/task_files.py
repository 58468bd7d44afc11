"""What a task brings along is put on every node of its cluster: its workdir and its file_mounts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import ConfigError
from atoll.core.paths import current_folder
from atoll.tasks import clusters
from atoll.tasks.spec import WORKDIR, ClusterSpec

if TYPE_CHECKING:
    from atoll.tasks.sync.mounts import Mount

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_CHECKOUT = "checkout"  # below the cluster's folder: the work tree of a git workdir


def ship(
    cluster: ClusterSpec,
    workdir: str | Mapping[str, str] | None,
    mounts: Mapping[str, object],
    *,
    say: Callable[[str], None],
    progress: Progress | None,
) -> None:
    """Copy to the home of every node of a cluster.

    Args:
        cluster: whose lock the caller holds.
        workdir: a folder, a git repository as ``{"url": …, "ref": …}``, or None.
        mounts: ``file_mounts``, with their variables replaced: target on the node to source.
        say: called with a line for each thing the user should know.
        progress: called with bytes copied so far and bytes to copy.

    Raises:
        ConfigError: a source can't be read.
        ProvisionError: a node can't be written to.
    """
    from atoll.tasks.sync.mounts import fetch_mount, resolve_mounts

    source = None if workdir is None else _source(cluster, workdir, say)
    resolved = resolve_mounts(mounts, workdir=workdir is not None)
    if cluster.hosts or cluster.num_nodes > 1:  # what comes from elsewhere comes once
        cache = clusters.folder_of(cluster.name) / "nodes" / "mounts"
        resolved = [fetch_mount(mount, cache, progress) for mount in resolved]
    if not cluster.hosts:
        _to_local_nodes(cluster, source, resolved, say, progress)
        return
    from atoll.tasks.sync import host_files

    paths = {mount.target: None if mount.source is None else Path(mount.source) for mount in resolved}
    host_files.ship(cluster, source, paths, say, progress)


def check_sources(workdir: str | Mapping[str, str] | None, mounts: Mapping[str, object]) -> None:
    """Is there what ``ship`` would copy? Asks nobody: git repositories and buckets are taken as they are.

    Raises:
        ConfigError: a source can't be read.
    """
    from atoll.tasks.sync.git import check_git
    from atoll.tasks.sync.mounts import resolve_mounts

    if isinstance(workdir, str):
        _folder(workdir)
    elif workdir is not None:
        check_git(workdir["url"], workdir.get("ref"))
    resolve_mounts(mounts, workdir=workdir is not None)


def _folder(workdir: str) -> Path:
    source = Path(current_folder(), Path(workdir).expanduser())
    if not source.is_dir():
        raise ConfigError(f"workdir {workdir}: expected a folder, or a git repository as {{url: …, ref: …}}")
    return source


def _source(cluster: ClusterSpec, workdir: str | Mapping[str, str], say: Callable[[str], None]) -> Path:
    """The folder of this machine that is to be every node's workdir."""
    if isinstance(workdir, str):
        return _folder(workdir)
    from atoll.tasks.sync.git import fetch_git

    source = clusters.folder_of(cluster.name) / _CHECKOUT
    commit = fetch_git(workdir["url"], workdir.get("ref"), source)
    say(f"workdir is commit {commit[:12]} of its repository")
    return source


def _to_local_nodes(
    cluster: ClusterSpec,
    source: Path | None,
    mounts: Sequence[Mount],
    say: Callable[[str], None],
    progress: Progress | None,
) -> None:
    from atoll.tasks.sync.mounts import apply_mount
    from atoll.tasks.sync.select import survey
    from atoll.tasks.sync.send import mirror

    seen = None if source is None else survey(source)
    there = {each.target: survey(Path(each.source)) for each in mounts if each.source is not None and not each.is_url}
    for node in range(cluster.num_nodes):
        home = clusters.node_home(cluster.name, node)
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        counted = None if progress is None else _counted(progress, node, cluster.num_nodes)
        lines = [] if seen is None else list(mirror(seen, home / WORKDIR, counted).notes)
        for mount in mounts:
            lines += apply_mount(mount, home, counted, there.get(mount.target))
        for line in lines if node == 0 else ():
            say(line)


def _counted(progress: Progress, number: int, num_nodes: int) -> Progress:
    """Progress over all nodes, each of which gets about as much."""
    return lambda done, total: progress(number * total + done, num_nodes * total)
