"""Clusters of ssh hosts as the client sees them: which hosts, are they well, who supervises, what goes there."""

from __future__ import annotations

import dataclasses
import posixpath
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.paths import atoll_home
from atoll.core.validation import command_line
from atoll.gang.host_checks import check_hosts, forget, passed_lately, remember
from atoll.providers.remote import RemotePlan
from atoll.providers.ssh import bundle
from atoll.providers.ssh.connection import Connection, connections
from atoll.providers.ssh.errors import resolved
from atoll.providers.ssh.hosts import HERE, Target, find_group
from atoll.providers.ssh.provider import AcceleratorsLacking
from atoll.tasks import record, remains
from atoll.tasks.remote_control import ProgramControl, what_then
from atoll.tasks.spec import ClusterSpec, ClusterStatus
from atoll.tasks.ssh_nodes import check_size, plans_of, provider_of
from atoll.tasks.supervisor_client import tell
from atoll.tasks.sync.host_files import program, remove_files

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
        except AcceleratorsLacking as error:
            if at + 1 == len(kinds):
                asked = " or ".join(f"{name}:{num}" for name, num in kinds)
                raise ConfigError(f"{asked} {error.why}; --gpus none asks for none") from None
        else:
            break
    return cluster, ()


def make_ready(cluster: ClusterSpec, say: Say, *, from_here: bool) -> ClusterSpec:
    """Checks the hosts before a job, and brings the cluster's record to the head if its supervisor runs there.

    Where it runs is decided when the cluster is made, and stays: on the head if that can log in to the other hosts,
    else on this machine.

    Args:
        from_here: it runs on this machine.

    Raises:
        ProvisionError: something would make the ranks fail; one line for each such thing. Or its head has changed, or
            can't log in to the other hosts any more.
    """
    provider, plans = provider_of(cluster), plans_of(cluster)
    targets = provider.targets()[: cluster.num_nodes]
    ssh = {**cluster.ssh, "addresses": [plan.addr for plan in plans], "bundle": plans[0].bundles[0].digest}
    ssh["owner"] = remains.owner_of(_folder_here(cluster.name))
    before = _before(cluster.name)
    is_new = before is None or before.status is ClusterStatus.DOWN
    stays_here = before is not None and not is_new and before.supervised_from == "here"
    inside, why_not = _checked(targets, plans, say, from_here=from_here or stays_here)
    site = "here" if why_not is not None else plans[0].host
    if before is not None and not is_new:
        _check_site(before, plans[0].host, why_not)
        site = before.supervised_from
    if stays_here:
        say("the supervisor runs on this machine. Keep it awake while jobs run")
    elif site != "here":
        say(f"the supervisor runs on {site}: this machine may sleep or leave meanwhile")
        ssh["folder"] = posixpath.join(plans[0].folder, "clusters", cluster.name)
    elif not from_here:
        say(f"the supervisor runs on this machine, because {why_not}. Keep this machine awake while jobs run")
    cluster = dataclasses.replace(cluster, ssh=ssh, supervised_from=site)
    if before is not None and is_new and before.supervised_from != site:
        say(f"earlier jobs of cluster {cluster.name} and their logs stay on {_shown(before)}; numbers begin anew")
    if site != "here":
        there = {**ssh, "key": None, "jump": None, "names": [plan.host for plan in plans]}
        record_there = dataclasses.replace(cluster, hosts=(HERE, *inside), ssh=there, supervised_from="here")
        _tell_ended(cluster, control(cluster).create(record_there, anew=is_new), say)
    return cluster


def _check_site(cluster: ClusterSpec, head: str, why_not: str | None) -> None:
    """Refuses a cluster whose supervisor would have to move.

    Raises:
        ProvisionError: it would.
    """
    site = cluster.supervised_from
    if site == "here" or (site == head and why_not is None):
        return
    why = why_not if site == head else f"{head} is its head now"
    downs = command_line("atoll", "down", cluster.name)
    raise ProvisionError(
        f"cluster {cluster.name} is supervised from {site}, which can't go on: {why}. A supervisor does not move: "
        f"mend that, or `{downs}` and launch it again"
    )


def _before(name: str) -> ClusterSpec | None:
    try:
        return record.load(_folder_here(name))
    except LookupError:
        return None


def _tell_ended(cluster: ClusterSpec, job_ids: Sequence[int], say: Say) -> None:
    if job_ids:
        which = f"job{'s' * (len(job_ids) > 1)} {', '.join(map(str, sorted(job_ids)))}"
        verb = "were" if len(job_ids) > 1 else "was"
        say(f"{which} of cluster {cluster.name} still ran on {_shown(cluster)} and {verb} ended")


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


def _shown(cluster: ClusterSpec) -> str:
    """The machine that its supervisor runs on."""
    return "this machine" if cluster.supervised_from == "here" else cluster.supervised_from


def _folder_here(name: str) -> Path:
    return atoll_home() / "clusters" / name


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
    words = ["-p", port, host] if port else [host]
    if "Permission denied" in said:
        return f"; there: `{command_line('ssh-copy-id', *words)}`"
    return f"; there: `{command_line('ssh', *words)}` once" if "Host key verification failed" in said else ""


def _hop(head: Connection, name: str) -> str | None:
    host, _, port = name.partition(":")
    options = "-o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=5"
    # Its own failure must not look like a failure of the login to the head.
    answer = head.run(f"ssh {options} -p {port or 22} {shlex.quote(host)} true </dev/null || exit 1", limit_s=_HOP_S)
    if answer.returncode == 0:
        return None
    return _last_words(answer).rstrip(".")


def _last_words(answer: subprocess.CompletedProcess[bytes]) -> str:
    """The last line that a command on a host wrote to standard error, else its exit code."""
    lines = answer.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else f"exit code {answer.returncode}"


# ---------------------------------------------------------------------------------------------- the head's control
_heads: dict[tuple[str, Target], tuple[Connection, RemotePlan]] = {}


def _head(cluster: ClusterSpec) -> tuple[Connection, RemotePlan]:
    """The login to the head, with Atoll's code there; asked once in a process."""
    key = (cluster.name, provider_of(cluster).targets()[0])
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

    # The head may be unable to log in to another host now.
    return ProgramControl(command, cluster.name, plan.host, _PATIENCE_S, lambda: forget("hops"))


def remove_record(cluster: ClusterSpec) -> None:
    """Removes what the head keeps of a cluster that is down: its record, jobs and logs. Tells where that fails."""
    folder = cluster.ssh.get("folder") or f"~/.atoll/clusters/{cluster.name}"
    try:
        connection, _ = _head(cluster)
        control(cluster).end()
        answer = connection.run(f"rm -rf -- {shlex.quote(folder)}", limit_s=_REMOVE_S)
        if answer.returncode != 0:
            raise ProvisionError(_last_words(answer))
    except AtollError as error:
        _tell_left(cluster, error, f"{folder} stays there, and jobs go on if any run")


def clean_without_head(cluster: ClusterSpec, error: ProvisionError, *, for_good: bool) -> None:
    """Cleans up after a cluster whose head can't be asked to, as far as that goes, and says what stays.

    ``for_good``: its record goes, so that this can't be done again.
    """
    folder = cluster.ssh.get("folder") or f"~/.atoll/clusters/{cluster.name}"
    downs = command_line("atoll", "down", cluster.name)
    again = "" if for_good else f"; once it can be reached, `{downs}` again ends and removes that"
    stays = f"jobs go on there as long as it runs, and {folder} stays there (jobs, logs, workdir){again}"
    _tell_left(cluster, error, stays)
    left, lines = remains.end_on_hosts(cluster, _folder_here(cluster.name), first=1)
    for line in (*(f"not even SIGKILL ends {each}" for each in left), *lines):
        tell(line)
    remove_files(cluster, first=1)


def _tell_left(cluster: ClusterSpec, error: AtollError, what: str) -> None:
    site = cluster.supervised_from
    why = str(error).removesuffix(f". {what_then(cluster.name)}").removeprefix(f"{site}: ")
    tell(f"{site}: {why}. So {what}")
