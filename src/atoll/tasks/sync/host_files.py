"""What goes to the disks of ssh hosts, and what is removed from them: workdirs, mounts, folders."""

from __future__ import annotations

import dataclasses
import json
import posixpath
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from atoll.core.errors import ProvisionError
from atoll.providers.remote import RemotePlan
from atoll.providers.ssh import bundle
from atoll.providers.ssh.connection import connections
from atoll.providers.ssh.facts import python_command
from atoll.providers.ssh.hosts import Target
from atoll.providers.ssh.output import parsed
from atoll.tasks.remote_control import tell
from atoll.tasks.spec import WORKDIR, ClusterSpec
from atoll.tasks.ssh_nodes import plans_of, provider_of, workdir_of
from atoll.tasks.sync.receive import MOUNTS, entries_from, lock_file, state_file
from atoll.tasks.sync.select import Survey, survey
from atoll.tasks.sync.send import changed, write_tar

Say = Callable[[str], object]
Progress = Callable[[int, int], None]  # bytes sent, bytes in all
_PROGRAM = (
    "import os, sys; sys.path.insert(0, {code!r}); os.environ['ATOLL_HOME'] = {home!r}; "
    "from atoll.tasks.{module} import main; sys.exit(main(sys.argv[1:]))"
)
_REMOVE_S = 300.0
_TRANSFER_S = 24 * 3600.0


def program(plan: RemotePlan, module: str, *arguments: str) -> str:
    """The shell command that runs one of ``atoll.tasks``' programs on a host."""
    code = _PROGRAM.format(code=plan.import_path[0], home=plan.folder, module=module)
    return python_command(plan.python, code, *arguments)


def ship(
    cluster: ClusterSpec, source: Path | None, mounts: Mapping[str, Path | None], say: Say, progress: Progress | None
) -> None:
    """Send a workdir and mounts to every host, only what is not there yet, all hosts at once.

    Args:
        cluster: its hosts.
        source: the workdir here, or None.
        mounts: target on the host to a file or folder here, or None for an empty folder.
        say: called with a line for each thing the user should know.
        progress: called with bytes sent and bytes in all.

    Raises:
        ConfigError: a source can't be read.
        ProvisionError: a host can't be written to.
    """
    plans = plans_of(cluster)
    targets = provider_of(cluster).targets()[: cluster.num_nodes]
    seen = survey(source) if source is not None else None
    found = {target: survey(path) for target, path in mounts.items() if path is not None}
    for line in seen.notes if seen is not None else ():
        say(line)

    def send(at: int) -> list[str]:
        is_run = bool(cluster.ssh.get("files_in"))
        host = _Files(targets[at], plans[at], workdir_of(cluster, plans[at]), is_run=is_run)
        counted = progress if at == 0 else None  # all get the same: one tells
        try:
            return host.send(seen, found, [target for target, path in mounts.items() if path is None], counted)
        finally:
            host.close()

    with ThreadPoolExecutor(len(plans)) as threads:
        for lines in threads.map(send, range(len(plans))):
            for line in lines:
                say(line)


def send_folder(
    source: Path, targets: Sequence[Target], plans: Sequence[RemotePlan], dest: str, *, leave_out: str, say: Say
) -> None:
    """Send a folder of this machine to the same place on every host, only what is not there yet.

    Args:
        source: the folder.
        dest: where it goes, on each.
        leave_out: a path in it that does not travel.
        say: called with a line for each thing the user should know.

    Raises:
        ConfigError: something in it can't be read.
        ProvisionError: a host can't be written to.
    """
    seen = survey(source)
    entries = [entry for entry in seen.entries if not PurePosixPath(entry.path).is_relative_to(leave_out)]
    seen = dataclasses.replace(seen, entries=tuple(entries))
    size = f"{seen.num_bytes / 1000:,.0f} kB"
    files = f"{seen.num_files} file{'s' if seen.num_files != 1 else ''} ({size})"
    for line in (*seen.notes, f"copying {files} of {source} to {dest} on each host"):
        say(line)

    def send(target: Target, plan: RemotePlan) -> None:
        host = _Files(target, plan, dest)
        try:
            host.put(seen, dest, None)
        finally:
            host.close()

    send(targets[0], plans[0])  # where a home is shared, the others lack nothing then
    with ThreadPoolExecutor(len(plans)) as threads:
        for _ in threads.map(send, targets[1:], plans[1:]):
            pass


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


class _Files:
    """Puts files on one host."""

    def __init__(self, target: Target, plan: RemotePlan, workdir: str, *, is_run: bool = False) -> None:
        self._is_run = is_run
        self._target = target
        self._plan = plan
        self._connection = connections.hold(target)
        self._workdir = workdir
        bundle.put(self._connection, plan, plan.bundles[0])

    def close(self) -> None:
        connections.release(self._target)

    def send(
        self, seen: Survey | None, found: Mapping[str, Survey], empty: Sequence[str], progress: Progress | None
    ) -> list[str]:
        lines = []
        if seen is not None:
            self.put(seen, self._workdir, progress)
            # A run's script starts in its workdir; the link may be one that a cluster's job goes by.
            link = None if self._is_run else posixpath.join(self._plan.home, WORKDIR)
            lines += self._expose(link, self._workdir)
        for target, mount in found.items():
            at, link = self._place(target)
            self.put(mount, at, progress)
            lines += self._expose(link, at)
        for target in empty:
            at, link = self._place(target)
            made = self._connection.run(f"mkdir -p -- {shlex.quote(at)}")
            self._check(made, made.stderr)
            lines += self._expose(link, at)
        return lines

    def _expose(self, link: str | None, at: str) -> list[str]:
        """Have it seen where the task wants it; a line where that is not permitted."""
        said = None if link is None else self._run("expose", link, at)
        return [] if said is None else [f"{self._plan.host}: {said}"]

    def put(self, seen: Survey, dest: str, progress: Progress | None) -> None:
        """Make a folder there what is seen here."""
        there = entries_from(json.dumps(self._run("manifest", dest)))
        todo = changed(seen, there)
        with tempfile.TemporaryFile() as said:
            process = self._connection.open(self._command("apply", dest), said)
            assert process.stdin is not None
            try:
                with process.stdin:
                    write_tar(seen, todo, process.stdin, progress)
            except BrokenPipeError:
                pass  # it says why
            finally:
                assert process.stdout is not None
                with process.stdout:
                    process.stdout.read()
                process.wait()
            said.seek(0)
            self._check(process, said.read())

    def _run(self, operation: str, *arguments: str) -> Any:
        answer = self._connection.run(self._command(operation, *arguments), limit_s=_TRANSFER_S)
        self._check(answer, answer.stderr)
        return parsed(self._plan.host, answer.stdout)

    def _check(self, done: subprocess.Popen[bytes] | subprocess.CompletedProcess[bytes], said: bytes) -> None:
        if done.returncode != 0:
            lines = said.decode(errors="replace").strip().splitlines()
            raise ProvisionError(f"{self._plan.host}: {lines[-1] if lines else f'exit code {done.returncode}'}")

    def _command(self, operation: str, *arguments: str) -> str:
        return program(self._plan, "sync.receive", operation, *arguments)

    def _place(self, target: str) -> tuple[str, str | None]:
        parts = PurePosixPath(target).parts
        if parts[0] == "~":
            return posixpath.join(self._plan.home, *parts[1:]), None
        if not target.startswith("/"):
            return posixpath.join(self._workdir, target), None
        inside = any(PurePosixPath(target).is_relative_to(each) for each in (self._plan.home, "/tmp"))
        return (target, None) if inside else (posixpath.join(self._plan.home, MOUNTS, target.lstrip("/")), target)
