"""What goes to the disks of ssh hosts, and what is removed from them: workdirs, mounts, folders."""

from __future__ import annotations

import dataclasses
import posixpath
import shlex
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from atoll.core.errors import ProvisionError
from atoll.providers.remote import RemotePlan
from atoll.providers.ssh import bundle
from atoll.providers.ssh.connection import connections
from atoll.providers.ssh.facts import python_command
from atoll.providers.ssh.hosts import Target
from atoll.providers.ssh.output import parsed, skip_login_text
from atoll.tasks.remote_control import tell
from atoll.tasks.spec import WORKDIR, ClusterSpec
from atoll.tasks.ssh_nodes import plans_of, provider_of, workdir_of
from atoll.tasks.sync.mounts import Mount
from atoll.tasks.sync.receive import lock_file, state_file
from atoll.tasks.sync.select import Selection, select
from atoll.tasks.sync.send import Progress, send

Say = Callable[[str], object]
_PROGRAM = (
    "import os, sys; sys.path.insert(0, {code!r}); os.environ['ATOLL_HOME'] = {home!r}; "
    "from atoll.tasks.{module} import main; sys.exit(main(sys.argv[1:]))"
)
_REMOVE_S = 300.0


def program(plan: RemotePlan, module: str, *arguments: str) -> str:
    """The shell command that runs one of ``atoll.tasks``' programs on a host."""
    code = _PROGRAM.format(code=plan.import_path[0], home=plan.folder, module=module)
    return python_command(plan.python, code, *arguments)


def send_folder(
    source: Path, targets: Sequence[Target], plans: Sequence[RemotePlan], dest: str, *, leave_out: str, say: Say
) -> None:
    """Send a folder of this machine to the same place on every host, only what is not there yet.

    Args:
        source: the folder.
        dest: where it goes, on each.
        leave_out: a path in it that is not sent.
        say: called with a line for each thing the user should know.

    Raises:
        ConfigError: something in it can't be read.
        ProvisionError: a host can't be written to.
    """
    selection = select(source)
    entries = [entry for entry in selection.entries if not PurePosixPath(entry.path).is_relative_to(leave_out)]
    selection = dataclasses.replace(selection, entries=tuple(entries))
    num_files = sum(entry.kind != "folder" for entry in entries)
    size = f"{sum(entry.size for entry in entries) / 1000:,.0f} kB"
    files = f"{num_files} file{'s' if num_files != 1 else ''} ({size})"
    for line in (*selection.notes, f"copying {files} of {source} to {dest} on each host"):
        say(line)

    def send_to(target: Target, plan: RemotePlan) -> None:
        with HostDisk(target, plan, dest) as disk:
            disk.put(selection, dest, None, None)

    with ThreadPoolExecutor(len(plans)) as threads:
        list(threads.map(send_to, targets, plans))


# Several hosts may do it at once in a home that they share.
_REMOVE = """rm -rf -- "$1" "$2" "$3" 2>/dev/null || rm -rf -- "$1" "$2" "$3" || exit 1
[ "$(readlink "$4")" != "$1" ] || rm -f -- "$4"; rmdir -- "$(dirname "$1")" 2>/dev/null; exit 0"""


def remove_files(cluster: ClusterSpec, first: int = 0) -> None:
    """Remove the workdir from every host, unless its place is the user's own choice or is shared by runs.

    Tells where that fails. ``first`` is the number of the first of those hosts.
    """
    if cluster.ssh.get("workdir") or cluster.ssh.get("files_in"):
        return

    def remove(node: int) -> None:
        target = provider_of(cluster).targets()[node]
        try:
            plan = _plan_of(cluster, node)
            workdir = workdir_of(cluster, plan)
            beside = (str(each(Path(workdir))) for each in (state_file, lock_file))
            paths = (workdir, *beside, posixpath.join(plan.home, WORKDIR))
            with connections.used([target]) as (login,):
                answer = login.run(shlex.join(["sh", "-c", _REMOVE, "sh", *paths]), limit_s=_REMOVE_S)
            if answer.returncode != 0:
                raise ProvisionError(f"{target}: {answer.stderr.decode(errors='replace').strip()}")
        except ProvisionError as error:
            tell(f"the workdir of cluster {cluster.name} stays on {target}, remove it by hand: {error}")

    with ThreadPoolExecutor(cluster.num_nodes) as threads:
        list(threads.map(remove, range(first, cluster.num_nodes)))
    connections.close_idle()


def workdir_on(cluster: ClusterSpec, node: int) -> str:
    """Where the workdir lies on one of a cluster's hosts; ``~/sky_workdir`` is that of its latest launch, of any.

    Raises:
        ProvisionError: the host can't be asked.
    """
    try:
        return workdir_of(cluster, _plan_of(cluster, node))
    finally:
        connections.close_idle()


def _plan_of(cluster: ClusterSpec, node: int) -> RemotePlan:
    own = {key: value for key, value in cluster.ssh.items() if key != "addresses"}
    only = dataclasses.replace(cluster, hosts=cluster.hosts[node : node + 1], num_nodes=1, accelerator=None, ssh=own)
    return plans_of(only)[0]


def host_disks(cluster: ClusterSpec) -> list[HostDisk]:
    """The disks of a cluster's hosts; each is used in a ``with`` block."""
    plans, targets = plans_of(cluster), provider_of(cluster).targets()
    is_run = bool(cluster.ssh.get("files_in"))
    return [
        HostDisk(target, plan, workdir_of(cluster, plan), is_run=is_run)
        for target, plan in zip(targets, plans, strict=False)
    ]


class HostDisk:
    """The disk of an ssh host.

    Attributes:
        home, workdir: folders there.
        workdir_link: where scripts look for the workdir, or None. A run's script starts in it: that link may be one
            that a cluster's job goes by.
        seen: further folders in which jobs see what is put.
    """

    seen = ("/tmp",)

    def __init__(self, target: Target, plan: RemotePlan, workdir: str, *, is_run: bool = False) -> None:
        self.home, self.workdir = plan.home, workdir
        self.workdir_link = None if is_run else posixpath.join(plan.home, WORKDIR)
        self._target = target
        self._plan = plan

    def __enter__(self) -> HostDisk:
        self._connection = connections.hold(self._target)
        try:
            bundle.put(self._connection, self._plan, self._plan.bundles[0])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        connections.release(self._target)

    def put(self, source: Selection | Mount, dest: str, link: str | None, progress: Progress | None) -> list[str]:
        """Make a folder there what was selected here, and link it where jobs are to see it; lines for the user."""
        assert isinstance(source, Selection), "what a URL names is fetched before"
        host, lines = self._plan.host, []
        with tempfile.TemporaryFile() as stderr:
            links = () if link is None else (link,)
            process = self._connection.open(program(self._plan, "sync.receive", dest, *links), stderr)
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
