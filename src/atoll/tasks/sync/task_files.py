"""What a task brings along is put on every node of its cluster: its workdir and its file_mounts."""

from __future__ import annotations

import dataclasses
import json
import posixpath
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from atoll.core.errors import ConfigError, ProvisionError
from atoll.core.paths import current_folder, write_atomic
from atoll.providers import registry
from atoll.providers.base import TARGETS, WORKDIR, Remote
from atoll.tasks import clusters
from atoll.tasks.nodes import plan_of
from atoll.tasks.spec import ClusterSpec
from atoll.tasks.sync.git import check_git, fetch_git
from atoll.tasks.sync.mounts import Mount, download, place, resolve_mounts
from atoll.tasks.sync.select import Selection, select
from atoll.tasks.sync.send import Progress, mirror, send
from atoll.wire.command_output import parsed, skip_login_text


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
    sources: list[tuple[str | None, Selection | Mount]] = []  # by target; None is the workdir
    if workdir is not None:
        found = select(_source(cluster, workdir, say))
        kept = [each for each in found.entries if not excluded or not PurePosixPath(each.path).is_relative_to(excluded)]
        sources.append((None, dataclasses.replace(found, entries=tuple(kept))))
        for line in found.notes:
            say(line)
    comes_once = cluster.allocation.files != "homes" or cluster.num_nodes > 1
    for mount in resolve_mounts(mounts, workdir=workdir is not None):
        if mount.source is None:
            say(f"{mount.key}: an empty folder that stays on its node: it has no source")
            sources.append((mount.target, Selection(Path(), ())))
        elif mount.is_url and not comes_once:
            sources.append((mount.target, mount))
        else:
            found = select(_fetched(cluster, mount, progress) if mount.is_url else Path(mount.source))
            sources.append((mount.target, found))
            for line in found.notes:
                say(f"{mount.key}: {line}")

    def put(disk: LocalDisk | HostDisk, counted: Progress | None) -> list[str]:
        lines = []
        with disk:
            for target, source in sources:
                dest, link = disk.workdir, disk.workdir_link
                if target is not None:
                    dest, link = place(target, disk.home, disk.workdir, disk.seen)
                lines += disk.put(source, dest, link, counted)
        return lines

    teller: list[HostDisk] = []  # all get the same at once: the first that does tells how far it is

    def put_on_host(disk: HostDisk) -> list[str]:
        def count(done: int, total: int) -> None:
            if not teller:  # in a home that they share, the others find it there
                teller.append(disk)
            if progress is not None and teller[0] is disk:
                progress(done, total)

        return put(disk, count)

    if cluster.allocation.files != "homes":
        provider, is_run = registry.of(cluster.allocation), bool(cluster.allocation.files_in)
        plans = plan_of(cluster).nodes[: 1 if cluster.allocation.files == "shared" else None]
        disks = [HostDisk(provider.remote(plan), plan.workdir, is_run=is_run) for plan in plans]
        with ThreadPoolExecutor(cluster.num_nodes) as threads:
            every = list(threads.map(put_on_host, disks))
    else:
        homes = [clusters.node_home(cluster.name, node) for node in range(cluster.num_nodes)]
        every = [put(LocalDisk(home), _counted(progress, node, len(homes))) for node, home in enumerate(homes)]
    for line in dict.fromkeys(line for lines in every for line in lines):
        say(line)


class LocalDisk:
    """The disk of a node of this machine: a folder that is its home."""

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


class HostDisk:
    """The disk of an ssh host.

    Attributes:
        home, workdir: folders there.
        workdir_link: where scripts look for the workdir, or None. A run's script starts in it: that link may be one
            that a cluster's job goes by.
        seen: further folders in which jobs see what is put.
    """

    seen = ("/tmp",)

    def __init__(self, remote: Remote, workdir: str, *, is_run: bool = False) -> None:
        self.home, self.workdir = remote.plan.home, workdir
        self.workdir_link = None if is_run else posixpath.join(remote.plan.home, WORKDIR)
        self._remote = remote

    def __enter__(self) -> HostDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._remote.close()

    def put(self, source: Selection | Mount, dest: str, link: str | None, progress: Progress | None) -> list[str]:
        """Make a folder there what was selected here, and link it where jobs are to see it; lines for the user."""
        assert isinstance(source, Selection), "a URL is fetched before this"
        host, lines = self._remote.plan.host, []
        with tempfile.TemporaryFile() as stderr:
            links = () if link is None else (link,)
            process = self._remote.open("tasks.sync.receive", dest, *links, stderr=stderr)
            assert process.stdin is not None
            assert process.stdout is not None

            def answer() -> Any:
                line = process.stdout.readline() if process.stdout is not None else b""
                if not line:
                    raise BrokenPipeError
                return parsed(host, line)

            with process.stdout:
                try:
                    with process.stdin:
                        skip_login_text(process.stdout)
                        lines = send(source, process.stdin, answer, progress)
                    said = answer()
                    lines += [] if said is None else [f"{host}: {said}"]
                except BrokenPipeError:
                    pass  # it ended, and says why
                process.stdout.read()
                process.wait()
            stderr.seek(0)
            if process.returncode != 0:
                shown = stderr.read().decode(errors="replace").strip().splitlines()
                raise ProvisionError(f"{host}: {shown[-1] if shown else f'exit code {process.returncode}'}")
        return lines


def check_sources(workdir: str | Mapping[str, str] | None, mounts: Mapping[str, Any]) -> None:
    """Is there what ``ship`` would copy? Asks nobody: git repositories and buckets are taken as they are.

    Raises:
        ConfigError: a source can't be read.
    """
    if isinstance(workdir, str):
        workdir_folder(workdir)
    elif workdir is not None:
        check_git(workdir["url"], workdir.get("ref"))
    resolve_mounts(mounts, workdir=workdir is not None)


def workdir_folder(workdir: str) -> Path:
    """The folder of this machine that a task calls its workdir.

    Raises:
        ConfigError: there is none.
    """
    source = Path(current_folder(), Path(workdir).expanduser())
    if not source.is_dir():
        raise ConfigError(f"workdir {workdir}: expected a folder, or a git repository as {{url: …, ref: …}}")
    return source


def _source(cluster: ClusterSpec, workdir: str | Mapping[str, str], say: Callable[[str], None]) -> Path:
    """The folder of this machine that is to be every node's workdir."""
    if isinstance(workdir, str):
        return workdir_folder(workdir)
    source = clusters.folder_of(cluster.name) / "checkout"
    commit = fetch_git(workdir["url"], workdir.get("ref"), source)
    say(f"workdir is commit {commit[:12]} of its repository")
    return source


def _fetched(cluster: ClusterSpec, mount: Mount, progress: Progress | None) -> Path:
    """What a mount's URL names, brought to this machine."""
    parts = (part for part in PurePosixPath(mount.target).parts if part not in ("~", "/"))
    at = clusters.folder_of(cluster.name).joinpath("nodes", "mounts", *parts)
    download(mount, at, progress)
    return at


def _counted(progress: Progress | None, number: int, num_nodes: int) -> Progress | None:
    """Progress over all nodes, each of which gets about as much."""
    return progress and (lambda done, total: progress(number * total + done, num_nodes * total))
