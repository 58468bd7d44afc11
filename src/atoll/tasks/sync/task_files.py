"""What a task brings along is put on every node of its cluster: its workdir and its file_mounts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ConfigError
from atoll.core.paths import current_folder, write_atomic
from atoll.providers.base import WORKDIR
from atoll.tasks import clusters
from atoll.tasks.spec import ClusterSpec

if TYPE_CHECKING:
    from atoll.tasks.sync.host_disks import HostDisk
    from atoll.tasks.sync.mounts import Mount
    from atoll.tasks.sync.select import Selection
    from atoll.tasks.sync.send import Progress


def ship(
    cluster: ClusterSpec,
    workdir: str | Mapping[str, str] | None,
    mounts: Mapping[str, Any],
    *,
    say: Callable[[str], None],
    progress: Progress | None,
    excluded: str | None = None,
) -> None:
    """Copy to every node of a cluster, only what is not there yet.

    Args:
        cluster: whose lock the caller holds.
        workdir: a folder, a git repository as ``{"url": …, "ref": …}``, or None.
        mounts: ``file_mounts``, with their variables replaced: target on the node to source.
        say: called with a line for each thing the user should know.
        progress: called with bytes copied so far and bytes to copy.
        excluded: a folder in the workdir that is not copied.

    Raises:
        ConfigError: a source can't be read.
        ProvisionError: a node can't be written to.
    """
    from atoll.tasks.sync.mounts import place, resolve_mounts
    from atoll.tasks.sync.select import Selection, select

    workdir_there = None if workdir is None else select(_source(cluster, workdir, say))
    if workdir_there is not None and excluded is not None:
        kept = tuple(each for each in workdir_there.entries if not PurePosixPath(each.path).is_relative_to(excluded))
        workdir_there = replace(workdir_there, entries=kept)
    resolved = resolve_mounts(mounts, workdir=workdir is not None)
    if cluster.allocation.files != "homes" or cluster.num_nodes > 1:  # what comes from elsewhere comes once
        cache = clusters.folder_of(cluster.name) / "nodes" / "mounts"
        resolved = [_fetched(mount, cache, progress) for mount in resolved]
    sources: list[tuple[Mount, Selection | Mount]] = []
    for line in workdir_there.notes if workdir_there is not None else ():
        say(line)
    for mount in resolved:
        if mount.source is None:
            found: Selection | Mount = Selection(
                Path(), (), ("an empty folder that stays on its node: it has no source",)
            )
        else:
            found = mount if mount.is_url else select(Path(mount.source))
        sources.append((mount, found))
        for line in found.notes if isinstance(found, Selection) else ():
            say(f"{mount.key}: {line}")

    def put(disk: LocalDisk | HostDisk, counted: Progress | None) -> list[str]:
        lines = []
        with disk:
            if workdir_there is not None:
                lines += disk.put(workdir_there, disk.workdir, disk.workdir_link, counted)
            for mount, found in sources:
                dest, link = place(mount.target, disk.home, disk.workdir, disk.seen)
                lines += disk.put(found, dest, link, counted)
        return lines

    if cluster.allocation.files != "homes":  # all get the same at once: one tells how far it is
        from atoll.tasks.sync.host_disks import host_disks

        with ThreadPoolExecutor(cluster.num_nodes) as threads:
            every = list(threads.map(put, host_disks(cluster), [progress] + [None] * (cluster.num_nodes - 1)))
    else:
        homes = [clusters.node_home(cluster.name, node) for node in range(cluster.num_nodes)]
        every = [put(LocalDisk(home), _counted(progress, node, len(homes))) for node, home in enumerate(homes)]
    for line in dict.fromkeys(line for lines in every for line in lines):
        say(line)


class LocalDisk:
    """The disk of a node of this machine: a folder that is its home (``host_disks.HostDisk``)."""

    workdir_link = None
    seen = ()

    def __init__(self, home: Path) -> None:
        self.home, self.workdir = str(home), str(home / WORKDIR)

    def __enter__(self) -> LocalDisk:
        Path(self.home).mkdir(mode=0o700, parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""

    def put(self, source: Selection | Mount, dest: str, link: str | None, progress: Progress | None) -> list[str]:
        """Make ``dest`` what was selected, or what a mount's URL names; lines for the user.

        ``link`` is noted for the node's agent, which mounts it: of the machine itself nothing is changed.
        """
        from atoll.providers.base import TARGETS
        from atoll.tasks.sync.mounts import Mount, download
        from atoll.tasks.sync.send import mirror

        lines: list[str] = []
        if isinstance(source, Mount):
            download(source, Path(dest), progress)
        else:
            lines = mirror(source, Path(dest), progress)
        noted = Path(self.home).parent / TARGETS
        known = json.loads(noted.read_text()) if noted.exists() else {}
        if link is not None and link not in known:
            write_atomic(noted, json.dumps({**known, link: dest}).encode())
        return lines


def check_sources(workdir: str | Mapping[str, str] | None, mounts: Mapping[str, Any]) -> None:
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

    source = clusters.folder_of(cluster.name) / "checkout"
    commit = fetch_git(workdir["url"], workdir.get("ref"), source)
    say(f"workdir is commit {commit[:12]} of its repository")
    return source


def _fetched(mount: Mount, cache: Path, progress: Progress | None) -> Mount:
    """The mount with a source on this machine."""
    from atoll.tasks.sync.mounts import download

    if not mount.is_url:
        return mount
    at = cache.joinpath(*(part for part in PurePosixPath(mount.target).parts if part not in ("~", "/")))
    download(mount, at, progress)
    return dataclasses.replace(mount, source=str(at))


def _counted(progress: Progress | None, number: int, num_nodes: int) -> Progress | None:
    """Progress over all nodes, each of which gets about as much."""
    return progress and (lambda done, total: progress(number * total + done, num_nodes * total))
