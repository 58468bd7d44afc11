"""Clusters of ssh hosts as the client sees them: which hosts, are they well, who supervises, what goes there."""

from __future__ import annotations

import dataclasses
import posixpath
import shlex
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.hints import command_line
from atoll.core.paths import atoll_home
from atoll.gang.host_checks import check_hosts, forget, passed_lately, remember
from atoll.providers.remote import RemotePlan
from atoll.providers.ssh import bundle
from atoll.providers.ssh.connection import Connection, connections
from atoll.providers.ssh.errors import resolved
from atoll.providers.ssh.hosts import HERE, Target, find_group
from atoll.providers.ssh.provider import AcceleratorsLacking
from atoll.tasks import history, record, remains
from atoll.tasks.control import LocalControl
from atoll.tasks.remote_control import ProgramControl, tell, what_then
from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec, ClusterStatus
from atoll.tasks.ssh_nodes import check_size, plans_of, provider_of
from atoll.tasks.sync.host_files import program, remove_files

Say = Callable[[str], object]
_HOP_S = 20.0
_PATIENCE_S = 300.0  # a connection to the head that was there may be gone for so long
_REMOVE_S = 300.0
_HEADS = "heads"  # in the record: hosts on which there is, or was, a folder of the cluster's, and how to log in


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
    """Look at the hosts before a job, decide where its supervisor runs, and bring the record and past jobs there.

    Args:
        from_here: it runs on this machine.

    Raises:
        ProvisionError: something would make the ranks fail; one line for each such thing.
    """
    provider, plans = provider_of(cluster), plans_of(cluster)
    targets = provider.targets()[: cluster.num_nodes]
    ssh = {**cluster.ssh, "addresses": [plan.addr for plan in plans], "bundle": plans[0].bundles[0].digest}
    ssh["owner"] = remains.owner_of(_folder_here(cluster.name))
    cluster = dataclasses.replace(cluster, ssh=ssh)
    before = _before(cluster.name)
    inside, why_not = _checked(targets, plans, say, from_here=from_here)
    if why_not is not None:
        if not from_here:
            say(f"the supervisor runs on this machine, because {why_not}. Keep this machine awake while jobs run")
        cluster = dataclasses.replace(cluster, supervised_from="here")
    else:
        head = plans[0]
        ssh["folder"] = posixpath.join(head.folder, "clusters", cluster.name)
        cluster = dataclasses.replace(cluster, supervised_from=head.host, ssh=ssh)
        if before is not None and before.supervised_from == "here" and (job := _unfinished(before)) is not None:
            say(f"the supervisor stays on this machine until job {job.id} and those after it have ended")
            cluster = dataclasses.replace(cluster, supervised_from="here")
        else:
            say(f"the supervisor runs on {head.host}: this machine may sleep or leave meanwhile")
    cluster = _with_heads(cluster, before)
    moves = before is not None and before.supervised_from != cluster.supervised_from
    if before is not None and moves:
        _bring_history(before, cluster, say)
    if cluster.supervised_from != "here":
        own = {key: value for key, value in cluster.ssh.items() if key != _HEADS}
        there = {**own, "key": None, "jump": None, "names": [plan.host for plan in plans]}
        anew = before is None or moves or before.status is ClusterStatus.DOWN
        record_there = dataclasses.replace(cluster, hosts=(HERE, *inside), ssh=there, supervised_from="here")
        _tell_ended(cluster, control(cluster).create(record_there, anew=anew), say)
    return cluster


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


def _bring_history(before: ClusterSpec, cluster: ClusterSpec, say: Say) -> None:
    """Past jobs, their numbers and logs go along where the supervisor has moved; what is where they were stays."""
    if (job := _unfinished(before)) is not None:
        raise ConfigError(
            f"cluster {cluster.name}: job {job.id} has not ended, and is supervised from {_shown(before)}; the next "
            f"one would be from {_shown(cluster)}. Wait for it, or "
            f"`{command_line('atoll', 'cancel', cluster.name, job.id)}`"
        )
    folder = _folder_here(cluster.name)
    try:
        with tempfile.TemporaryFile(dir=folder) as tar:
            try:
                source = _control_at(before)
                _tell_ended(before, source.end(), say)
                source.pack((history.STORE, history.JOBS), tar)
            except LookupError:  # somebody removed it there
                return
            except ProvisionError as error:
                why = _why(error, before.name)
                say(f"{why}. Its jobs so far, and their logs, stay there; numbers go on without them")
                return
            tar.seek(0)
            ended, num_files, aside = _control_at(cluster).take(tar)
    except (OSError, sqlite3.Error) as error:
        raise ProvisionError(
            f"past jobs of cluster {cluster.name} can't be brought to {_shown(cluster)}: this machine: "
            f"{history.trouble(error, folder)}"
        ) from None
    _tell_ended(cluster, ended, say)
    if num_files:
        say("its past jobs and their logs move there with it")
    if aside is not None:
        say(f"jobs of an earlier cluster {cluster.name} were there: they are in {aside} now")


def _shown(cluster: ClusterSpec) -> str:
    """The machine that its supervisor runs on."""
    return "this machine" if cluster.supervised_from == "here" else cluster.supervised_from


def _unfinished(cluster: ClusterSpec) -> JobRow | None:
    """The newest job that has not ended, of a cluster that is up and whose supervisor can be asked."""
    if cluster.status is not ClusterStatus.UP:
        return None
    try:
        return next((row for row in _control_at(cluster).queue() if not row.status.ended), None)
    except ProvisionError:
        return None


def _control_at(cluster: ClusterSpec) -> LocalControl | ProgramControl:
    return LocalControl(_folder_here(cluster.name)) if cluster.supervised_from == "here" else control(cluster)


def _folder_here(name: str) -> Path:
    return atoll_home() / "clusters" / name


def _with_heads(cluster: ClusterSpec, before: ClusterSpec | None) -> ClusterSpec:
    """With every head on which there is something of it, also in its record, before anything is written there."""
    if not (heads := _heads_of(*([before] if before is not None else []), cluster)):
        return cluster
    if before is not None:
        record.change(_folder_here(cluster.name), ssh={**before.ssh, _HEADS: heads})
    return dataclasses.replace(cluster, ssh={**cluster.ssh, _HEADS: heads})


def _heads_of(*records: ClusterSpec) -> list[dict[str, Any]]:
    heads: dict[str, dict[str, Any]] = {}
    for each in records:
        heads |= {head["host"]: head for head in each.ssh.get(_HEADS, ())}
        if each.supervised_from != "here":
            settings = {name: each.ssh.get(name) for name in ("key", "jump", "python")}
            heads[each.hosts[0]] = {"host": each.hosts[0], **settings}
    return [*heads.values()]


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


def _why(error: AtollError, cluster_name: str) -> str:
    """What is wrong, without the next step that ``control`` puts behind it."""
    return str(error).removesuffix(f". {what_then(cluster_name)}")


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


def remove_records(cluster: ClusterSpec, *, without: str | None) -> None:
    """Remove what heads keep of a cluster that is down: its record, jobs and logs. Tells of those where that fails.

    ``without``: a head that can't be reached, which has been told of.
    """
    for head in _heads_of(cluster):
        host = head["host"]
        if host == without:
            continue
        each = dataclasses.replace(cluster, hosts=(host,), num_nodes=1, supervised_from=host, ssh=head)
        folder = f"~/.atoll/clusters/{cluster.name}"
        try:
            connection, plan = _head(each)
            folder = posixpath.join(plan.folder, "clusters", each.name)
            control(each).end()
            answer = connection.run(f"rm -rf -- {shlex.quote(folder)}", limit_s=_REMOVE_S)
            if answer.returncode != 0:
                raise ProvisionError(_last_words(answer))
        except AtollError as error:
            why = _why(error, cluster.name).removeprefix(f"{host}: ")
            tell(f"{host}: {why}. So {folder} stays there, and jobs go on if any run")


def give_up(cluster: ClusterSpec, error: ProvisionError, *, for_good: bool) -> None:
    """Clean up after a cluster whose head can't be asked to, as far as that goes, and say what stays.

    ``for_good``: its record goes, so that this can't be done again.
    """
    folder = cluster.ssh.get("folder") or f"~/.atoll/clusters/{cluster.name}"
    why = _why(error, cluster.name).removeprefix(f"{cluster.supervised_from}: ")
    downs = command_line("atoll", "down", cluster.name)
    again = "" if for_good else f"; once it can be reached, `{downs}` again ends and removes that"
    tell(
        f"{cluster.supervised_from}: {why}. So jobs go on there as long as it runs, and {folder} stays there (jobs, "
        f"logs, workdir){again}"
    )
    left, lines = remains.end_on_hosts(cluster, _folder_here(cluster.name), first=1)
    for line in (*(f"not even SIGKILL ends {each}" for each in left), *lines):
        tell(line)
    remove_files(cluster, first=1)
