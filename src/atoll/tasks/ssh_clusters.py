"""Clusters of ssh hosts as the client sees them: which hosts, are they well, who supervises, what goes there."""

from __future__ import annotations

import dataclasses
import posixpath
import shlex
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atoll.core.errors import ConfigError, ProvisionError
from atoll.core.paths import atoll_home
from atoll.pool.hosts_check import check_hosts, passed_lately, remember
from atoll.providers.remote import RemotePlan
from atoll.providers.ssh import bundle
from atoll.providers.ssh.connection import Connection, connections
from atoll.providers.ssh.errors import resolved
from atoll.providers.ssh.hosts import HERE, Target, find_group
from atoll.tasks import history, record
from atoll.tasks.remote_control import ProgramControl, tell, what_then
from atoll.tasks.spec import ClusterSpec
from atoll.tasks.ssh_files import program, remove_files
from atoll.tasks.ssh_nodes import check_size, plans_of, provider_of

Say = Callable[[str], object]
_HOP_S = 20.0
_PATIENCE_S = 300.0  # a connection to the head that was there may be gone for so long
_REMOVE_S = 300.0


def ask(cluster: ClusterSpec) -> None:
    """Ask all hosts of a cluster about themselves; for ``connections.kept``, which remembers it.

    Raises:
        ProvisionError: one can't be used.
    """
    plans_of(dataclasses.replace(cluster, accelerator=None, num_accelerators=0))


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
    of_group = {name: getattr(group, name) for name in ("grace_s", "workdir", "max_restarts_on_lost_nodes")}
    ssh = {"key": one.key, "jump": one.jump, "python": one.python, **of_group}
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
    """Look at the hosts before a job, decide where its supervisor runs, and bring the record and past jobs there.

    Args:
        from_here: it runs on this machine.

    Raises:
        ProvisionError: something would make the ranks fail; one line for each such thing.
    """
    provider, plans = provider_of(cluster), plans_of(cluster)
    targets = provider.targets()[: cluster.num_nodes]
    ssh = {**cluster.ssh, "addresses": [plan.addr for plan in plans], "bundle": plans[0].bundles[0].digest}
    cluster = dataclasses.replace(cluster, ssh=ssh)
    inside, why_not = _checked(targets, plans, say, from_here=from_here)
    if why_not is not None:
        if not from_here:
            say(f"the supervisor runs on this machine, because {why_not}. Keep this machine awake while jobs run")
        cluster = dataclasses.replace(cluster, supervised_from="here")
    else:
        head = plans[0]
        ssh["folder"] = posixpath.join(head.folder, "clusters", cluster.name)
        cluster = dataclasses.replace(cluster, supervised_from=head.host, ssh=ssh)
        say(f"the supervisor runs on {head.host}: this machine may sleep or leave meanwhile")
        there = {**ssh, "key": None, "jump": None, "names": [plan.host for plan in plans]}
        control(cluster).create(dataclasses.replace(cluster, hosts=(HERE, *inside), ssh=there, supervised_from="here"))
    _bring_history(cluster, say)
    return cluster


def _checked(
    targets: Sequence[Target], plans: Sequence[RemotePlan], say: Say, *, from_here: bool
) -> tuple[list[str], str | None]:
    """Look at the hosts; how the head reaches each other one, and why no supervisor can run there, if so."""
    if from_here:
        check_hosts(targets, plans, say)
        return [], "it was asked for"
    head = connections.hold(targets[0])
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(_from_head, head, targets, plans)
        try:
            check_hosts(targets, plans, say)
            return asked.result()
        except BaseException:
            head.abort()
            raise
        finally:
            connections.release(targets[0])


def _bring_history(cluster: ClusterSpec, say: Say) -> None:
    """Past jobs, their numbers and logs go along where the supervisor has moved."""
    folder = _folder_here(cluster)
    try:
        before = record.load(folder)
    except LookupError:
        return
    if before.supervised_from == cluster.supervised_from:
        return
    with tempfile.TemporaryFile() as tar:
        try:
            if before.supervised_from == "here":
                history.pack(folder, (history.STORE, history.JOBS), tar)
            else:
                control(before).pack((history.STORE, history.JOBS), tar)
        except LookupError:  # somebody removed it there
            return
        except ProvisionError as error:
            say(f"{error}. Jobs are counted from 1 again, and the logs of those so far stay there")
            return
        tar.seek(0)
        here = cluster.supervised_from == "here"
        num_files = history.unpack(tar, folder) if here else control(cluster).unpack(tar)
    if before.supervised_from == "here":
        history.remove(folder)
    else:
        control(before).remove_history()
    if num_files:
        say("its past jobs and their logs move there with it")


def _folder_here(cluster: ClusterSpec) -> Path:
    return atoll_home() / "clusters" / cluster.name


def _from_head(
    head: Connection, targets: Sequence[Target], plans: Sequence[RemotePlan]
) -> tuple[list[str], str | None]:
    """How the head reaches each other host, and why it can't, if so."""
    with ThreadPoolExecutor(len(targets)) as threads:
        names = list(threads.map(_name_there, targets[1:], plans[1:]))
        if passed_lately("hops", plans):
            return names, None
        reached = list(threads.map(lambda name: _hop(head, name), names))
    for name, said in zip(names, reached, strict=True):
        if said is not None:
            return [], f"{targets[0]} can't log in to {name} ({said}{_remedy(said, name)})"
    remember("hops", plans)
    return names, None


def _name_there(target: Target, plan: RemotePlan) -> str:
    """What the head calls another host."""
    found = resolved(target, "ssh")
    port = found.get("port", "22")
    return f"{found.get('user', '')}@{plan.addr}" + (f":{port}" if port != "22" else "")


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
    try:
        connection, plan = _head(cluster)
    except ProvisionError as error:
        raise ProvisionError(f"{error}. {what_then(cluster.name)}") from None

    def command(operation: str) -> Sequence[str]:
        return connection.argv(program(plan, "control", operation))

    return ProgramControl(command, cluster.name, plan.host, _PATIENCE_S)


def fetch_logs(cluster: ClusterSpec, job_id: int, dest: Path) -> None:
    """Copy the folder of a job from the head that supervises its cluster.

    Raises:
        ProvisionError: the head can't be reached.
    """
    name = f"{history.JOBS}/{job_id}"
    with tempfile.TemporaryFile() as tar:
        control(cluster).pack([name], tar)
        tar.seek(0)
        history.unpack(tar, dest, name)


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


def give_up(cluster: ClusterSpec, error: ProvisionError, *, for_good: bool) -> None:
    """Clean up after a cluster whose head can't be asked to, as far as that goes, and say what stays.

    ``for_good``: its record goes, so that this can't be done again.
    """
    folder = cluster.ssh.get("folder") or f"~/.atoll/clusters/{cluster.name}"
    why = str(error).removesuffix(f". {what_then(cluster.name)}").removeprefix(f"{cluster.supervised_from}: ")
    again = "" if for_good else f"; once it can be reached, `atoll down {cluster.name}` again ends and removes that"
    tell(
        f"{cluster.supervised_from}: {why}. So jobs go on there as long as it runs, and {folder} stays there (jobs, "
        f"logs, workdir){again}"
    )
    remove_files(cluster, first=1)
