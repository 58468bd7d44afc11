"""Clusters of ssh hosts as the client sees them: which hosts, are they well, who supervises, what goes there."""

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

from atoll.core.errors import ConfigError, ProvisionError
from atoll.core.paths import atoll_home
from atoll.pool.hosts_check import check_hosts
from atoll.providers.remote import RemotePlan
from atoll.providers.ssh import bundle
from atoll.providers.ssh.connection import Connection, connections
from atoll.providers.ssh.errors import resolved
from atoll.providers.ssh.facts import python_command
from atoll.providers.ssh.hosts import HERE, Target, find_group
from atoll.tasks.remote_control import ProgramControl, tell
from atoll.tasks.spec import WORKDIR, ClusterSpec
from atoll.tasks.ssh_nodes import check_size, plans_of, provider_of, workdir_of
from atoll.tasks.survey import Survey, survey
from atoll.tasks.tarball import MOUNTS, entries_from, lock_file, state_file
from atoll.tasks.workdir import changed, write_tar

Say = Callable[[str], object]
Progress = Callable[[int, int], None]
_BOOT = "import os, sys; sys.path.insert(0, {code!r}); os.environ['ATOLL_HOME'] = {home!r}; {then}"
_HOP_S = 20.0
_PATIENCE_S = 300.0  # a connection to the head that was there may be gone for so long
_REMOVE_S = 300.0
_TRANSFER_S = 24 * 3600.0


def place(cluster: ClusterSpec, accelerators: Sequence[tuple[str, int]]) -> tuple[ClusterSpec, tuple[str, ...]]:
    """The cluster with its hosts, and the first kind of accelerator that all of them have.

    Raises:
        ConfigError: an unknown group, too few hosts, or none of the accelerators.
        ProvisionError: a host can't be used.
    """
    group = find_group(cluster.infra.partition("/")[2])
    check_size(cluster, len(group.targets))
    chosen = group.targets[: cluster.num_nodes]
    one = chosen[0]
    ssh = {"key": one.key, "jump": one.jump, "python": one.python, "grace_s": group.grace_s, "workdir": group.workdir}
    hosts = tuple(map(str, chosen))
    cluster = dataclasses.replace(cluster, hosts=hosts, ssh=ssh, simulated=False, notes=())
    kinds: list[tuple[str | None, int]] = [*accelerators] or [(None, 0)]
    for at, (name, num) in enumerate(kinds):
        cluster = dataclasses.replace(cluster, accelerator=name, num_accelerators=num)
        try:
            plans_of(cluster)
        except ConfigError as error:
            if at + 1 == len(kinds):
                raise ConfigError(f"{error}. --gpus none asks for no accelerator") if name else error from None
        else:
            break
    return cluster, ()


def make_ready(cluster: ClusterSpec, say: Say, *, from_here: bool) -> ClusterSpec:
    """Look at the hosts before a job, decide where its supervisor runs, and write the record there.

    Args:
        from_here: it runs on this machine.

    Raises:
        ProvisionError: something would make the ranks fail; one line for each such thing.
    """
    provider, plans = provider_of(cluster), plans_of(cluster)
    targets = provider.targets()[: cluster.num_nodes]
    check_hosts(targets, plans, say, folder=posixpath.dirname(workdir_of(cluster, plans[0])))
    ssh = {**cluster.ssh, "addresses": [plan.addr for plan in plans], "bundle": plans[0].bundles[0].digest}
    cluster = dataclasses.replace(cluster, ssh=ssh)
    if from_here:
        return dataclasses.replace(cluster, supervised_from="here")
    inside, why_not = _from_head(targets, plans)
    before, now = cluster.supervised_from, "here" if why_not is not None else plans[0].host
    if before != now and (before != "here" or (atoll_home() / "clusters" / cluster.name / "jobs.db").exists()):
        was_on = "this machine" if before == "here" else before
        say(f"its supervisor moves: jobs are counted from 1 again, and the logs of those so far stay on {was_on}")
    if why_not is not None:
        say(f"the supervisor runs on this machine, because {why_not}. Keep this machine awake while jobs run")
        return dataclasses.replace(cluster, supervised_from="here")
    head = plans[0]
    ssh["folder"] = posixpath.join(head.folder, "clusters", cluster.name)
    cluster = dataclasses.replace(cluster, supervised_from=head.host, ssh=ssh)
    say(f"the supervisor runs on {head.host}: this machine may sleep or leave meanwhile")
    there = {**ssh, "key": None, "jump": None, "names": [plan.host for plan in plans]}
    record = dataclasses.replace(cluster, hosts=(HERE, *inside), ssh=there, supervised_from="here")
    control(cluster).create(record)
    return cluster


def _from_head(targets: Sequence[Target], plans: Sequence[RemotePlan]) -> tuple[list[str], str | None]:
    """How the head reaches each other host, and why it can't, if so."""
    program = "ssh"
    names = []
    for target, plan in zip(targets[1:], plans[1:], strict=True):
        found = resolved(target, program)
        port = found.get("port", "22")
        names.append(f"{found.get('user', '')}@{plan.addr}" + (f":{port}" if port != "22" else ""))
    head = connections.hold(targets[0])
    try:
        with ThreadPoolExecutor(max(1, len(names))) as threads:
            reached = list(threads.map(lambda name: _hop(head, name), names))
    finally:
        connections.release(targets[0])
    for name, said in zip(names, reached, strict=True):
        if said is not None:
            return [], f"{targets[0]} can't log in to {name} ({said}{_remedy(said, name)})"
    return names, None


def _remedy(said: str, name: str) -> str:
    """What to type on the head, where that helps."""
    host, _, port = name.partition(":")
    words = f"-p {port} {host}" if port else host
    if "Permission denied" in said:
        return f"; there: `ssh-copy-id {words}`"
    return f"; there: `ssh {words}` once" if "Host key verification failed" in said else ""


def _hop(head: Connection, name: str) -> str | None:
    host, _, port = name.partition(":")
    options = "-o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=5"
    # Its own failure must not look like a failure of the login to the head.
    answer = head.run(f"ssh {options} -p {port or 22} {host} true </dev/null || exit 1", limit_s=_HOP_S)
    if answer.returncode == 0:
        return None
    lines = answer.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].strip().rstrip(".") if lines else f"exit code {answer.returncode}"


# ---------------------------------------------------------------------------------------------- the head's control
_heads: dict[tuple[str, str], tuple[Connection, RemotePlan]] = {}


def _head(cluster: ClusterSpec) -> tuple[Connection, RemotePlan]:
    """The login to the head, with Atoll's code there; asked once in a process."""
    key = (cluster.name, cluster.hosts[0])
    if key not in _heads:
        plan = plans_of(dataclasses.replace(cluster, num_nodes=1, accelerator=None, num_accelerators=0))[0]
        connection = connections.hold(provider_of(cluster).targets()[0])
        bundle.put(connection, plan, plan.bundles[0])
        _heads[key] = connection, plan
    return _heads[key]


def control(cluster: ClusterSpec) -> ProgramControl:
    """Who answers for a cluster that is supervised from its head.

    Raises:
        ProvisionError: the head can't be reached.
    """
    connection, plan = _head(cluster)

    def command(operation: str) -> Sequence[str]:
        then = "from atoll.tasks.control import main; sys.exit(main(sys.argv[1:]))"
        code = _BOOT.format(code=plan.import_path[0], home=plan.folder, then=then)
        return connection.argv(python_command(plan.python, code, operation))

    return ProgramControl(command, cluster.name, _PATIENCE_S)


# ---------------------------------------------------------------------------------------------- files
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
        host = _Files(targets[at], plans[at], workdir_of(cluster, plans[at]))
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
    for line in (*seen.notes, f"{seen.num_files} files ({size}) of {source} go to {dest} on each host"):
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


def remove_files(cluster: ClusterSpec) -> None:
    """Remove the workdir from every host, unless its place is the user's own choice or is shared by runs.

    Tells where that fails.
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
            answer = connections.get(target).run(shlex.join(["sh", "-c", _REMOVE, "sh", *paths]), limit_s=_REMOVE_S)
            if answer.returncode != 0:
                raise ProvisionError(f"{target}: {answer.stderr.decode(errors='replace').strip()}")
        except ProvisionError as error:
            tell(f"the workdir of cluster {cluster.name} stays on {target}, remove it by hand: {error}")

    with ThreadPoolExecutor(cluster.num_nodes) as threads:
        list(threads.map(remove, range(cluster.num_nodes)))
    connections.close_idle()


def remove_record(cluster: ClusterSpec) -> None:
    """Remove what the head keeps of a cluster that is down: its record, jobs and logs.

    Raises:
        ProvisionError: the head can't be reached, or does not let us.
    """
    connection, plan = _head(cluster)
    folder = posixpath.join(plan.folder, "clusters", cluster.name)
    answer = connection.run(f"rm -rf -- {shlex.quote(folder)}", limit_s=_REMOVE_S)
    if answer.returncode != 0:
        said = answer.stderr.decode(errors="replace").strip().splitlines()
        raise ProvisionError(f"{plan.host}: {said[-1] if said else folder + ' could not be removed'}")


def tell_what_stays(cluster: ClusterSpec) -> None:
    """Say what is left on hosts of a cluster whose head can't be asked to remove it."""
    folder = cluster.ssh.get("folder") or f"~/.atoll/clusters/{cluster.name}"
    tell(f"{cluster.supervised_from}: {folder} stays there (jobs, logs, workdir), because it can't be reached")
    if len(cluster.hosts) > 1 and not cluster.ssh.get("workdir"):
        others = ", ".join(cluster.hosts[1 : cluster.num_nodes])
        tell(f"{others}: {folder}/sky_workdir stays there")


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

    def __init__(self, target: Target, plan: RemotePlan, workdir: str) -> None:
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
            said = self._run("expose", f"{self._plan.home}/sky_workdir", self._workdir)
            if said is not None:
                lines.append(f"{self._plan.host}: ~/{WORKDIR} is something else, or can't be made: see {self._workdir}")
        for target, mount in found.items():
            at, link = self._place(target)
            self.put(mount, at, progress)
            lines += self._expose(link, at)
        for target in empty:
            at, link = self._place(target)
            self._connection.run(f"mkdir -p {shlex.quote(at)}")
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
        return json.loads(answer.stdout)

    def _check(self, done: subprocess.Popen[bytes] | subprocess.CompletedProcess[bytes], said: bytes) -> None:
        if done.returncode != 0:
            lines = said.decode(errors="replace").strip().splitlines()
            raise ProvisionError(f"{self._plan.host}: {lines[-1] if lines else f'exit code {done.returncode}'}")

    def _command(self, operation: str, *arguments: str) -> str:
        then = "from atoll.tasks.tarball import main; sys.exit(main(sys.argv[1:]))"
        code = _BOOT.format(code=self._plan.import_path[0], home=self._plan.folder, then=then)
        return python_command(self._plan.python, code, operation, *arguments)

    def _place(self, target: str) -> tuple[str, str | None]:
        parts = PurePosixPath(target).parts
        if parts[0] == "~":
            return posixpath.join(self._plan.home, *parts[1:]), None
        if not target.startswith("/"):
            return posixpath.join(self._workdir, target), None
        inside = any(PurePosixPath(target).is_relative_to(each) for each in (self._plan.home, "/tmp"))
        return (target, None) if inside else (posixpath.join(self._plan.home, MOUNTS, target.lstrip("/")), target)
