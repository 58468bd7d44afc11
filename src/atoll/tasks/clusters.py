"""Clusters' records: made, reused, resized, stopped, taken down; and where their files lie."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import fnmatch
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.hints import nearest
from atoll.core.paths import atoll_home
from atoll.tasks import record
from atoll.tasks.placing import Accelerators, fits, larger, missing, place
from atoll.tasks.spec import LONGEST_NAME, ClusterSpec, ClusterStatus, is_name, node_name

if TYPE_CHECKING:
    from atoll.tasks.control import Control
    from atoll.tasks.store import JobRow

_LOCK = "launch.lock"
_MOST_LOCAL_NODES = 1000
# Fields that `decide` may change of a cluster that is there.
_DECIDED = (
    *("num_nodes", "accelerator", "num_accelerators", "simulated", "cpus", "memory_gb", "status", "notes"),
    *("hosts", "ssh", "supervised_from"),
)


class UnknownCluster(ConfigError, LookupError):
    """No cluster, or no job, of that name; the message says the nearest one or how to make it."""


# ------------------------------------------------------------------------------------------------------- names
def check_name(name: str) -> str:
    """A cluster's name.

    Raises:
        ConfigError: it cannot be one.
    """
    if not is_name(name):
        raise ConfigError(
            f"cluster name {name!r}: expected letters and digits with '.', '_' or '-' between them, "
            f"at most {LONGEST_NAME}, as in -c my-cluster"
        )
    return name


def fresh_name() -> str:
    """A name for a cluster that the user didn't name: ``atoll-3f0a-user``."""
    name = f"atoll-{secrets.token_hex(2)}-{re.sub('[^a-zA-Z0-9]+', '', user_name()) or 'user'}"
    return name[:LONGEST_NAME]


def user_name() -> str:
    """Whose jobs these are."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        return f"uid{os.getuid()}"


def folder_of(name: str) -> Path:
    """The folder of a cluster's record, jobs and local nodes."""
    return atoll_home() / "clusters" / check_name(name)


def node_home(name: str, node: int) -> Path:
    """HOME of a local node."""
    return folder_of(name) / "nodes" / str(node) / "home"


def all_names() -> list[str]:
    """Every cluster that has a record, by name."""
    records = (atoll_home() / "clusters").glob(f"*/{record.RECORD}")
    return sorted(path.parent.name for path in records if is_name(path.parent.name))


def matching(patterns: Sequence[str]) -> list[str]:
    """Names of clusters that are not down, from names and globs (``train-*``).

    Raises:
        UnknownCluster: a name or a pattern that no cluster has.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        if any(sign in pattern for sign in "*?["):
            hits = [each for each in fnmatch.filter(all_names(), pattern) if not _is_down(each)]
            if not hits:
                raise UnknownCluster(f"no cluster matches {pattern!r}; `atoll status` lists them")
            found.update(dict.fromkeys(hits))
        else:
            if check_name(pattern) not in all_names():
                load(pattern)  # raises
            found[pattern] = None
    return list(found)


def _is_down(name: str) -> bool:
    try:
        return load(name).status is ClusterStatus.DOWN
    except ConfigError:  # damaged: whoever wants it is told so
        return False


# ----------------------------------------------------------------------------------------------------- records
def load(name: str, *, to_run: bool = False) -> ClusterSpec:
    """A cluster's record; ``to_run``: for somebody who wants to run a task on it.

    Raises:
        UnknownCluster: there is none.
        ConfigError: its file can't be read.
    """
    found = find(name)
    if found is None:
        makes = f"`atoll launch -c {name} TASK` makes it" if to_run else "`atoll status` lists those that there are"
        hint = nearest(name, all_names()) or f"; {makes}"
        raise UnknownCluster(f"no cluster {name!r}{hint}")
    return found


def find(name: str) -> ClusterSpec | None:
    """A cluster's record, or None where there is none.

    Raises:
        ConfigError: no cluster can be called so, or its file can't be read.
    """
    try:
        return record.load(folder_of(name))
    except LookupError:
        return None


def save(spec: ClusterSpec, have: ClusterSpec | None = None) -> None:
    """Write what was decided of a cluster; ``have`` is its record so far, None for a new one."""
    if have is None or have.status is ClusterStatus.DOWN:
        record.save(folder_of(spec.name), spec)
    else:  # the supervisor writes the other fields
        record.change(folder_of(spec.name), **{name: getattr(spec, name) for name in _DECIDED})


@contextlib.contextmanager
def locked(name: str, waiting: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """One launch at a time changes a cluster and copies to its nodes; ``waiting`` is called if another one does.

    Yields:
        the cluster's folder, made where it did not exist.
    """
    folder = folder_of(name)
    record.check_owner(folder)
    descriptor = _open_lock(folder)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        while os.fstat(descriptor).st_nlink == 0:  # who had it before us made no cluster of it
            os.close(descriptor)
            descriptor = _open_lock(folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            _remove_empty(folder)
    finally:
        os.close(descriptor)


def _remove_empty(folder: Path) -> None:
    """Leave nothing of a launch that was refused. For whoever holds the lock."""
    with contextlib.suppress(FileNotFoundError):
        if os.listdir(folder) == [_LOCK]:
            (folder / _LOCK).unlink()
            with contextlib.suppress(OSError):  # somebody else begins
                folder.rmdir()


def _open_lock(folder: Path) -> int:
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the folder went away just now
            return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def change(cluster: ClusterSpec, **fields: Any) -> ClusterSpec:
    """Change fields of a record, here and where the cluster is supervised from. Jobs end where it is not up then."""
    if cluster.supervised_from == "here":
        return control_of(cluster).change(**fields)
    with contextlib.suppress(LookupError):  # somebody removed it there
        control_of(cluster).change(**fields)
    return record.change(folder_of(cluster.name), **fields)


def control_of(spec: ClusterSpec) -> Control:
    """Who answers for the cluster's jobs: this machine, or the head that supervises them.

    Raises:
        ProvisionError: the head can't be reached.
    """
    if spec.supervised_from != "here":
        from atoll.tasks import ssh_clusters

        return ssh_clusters.control(spec)
    from atoll.tasks.control import LocalControl

    return LocalControl(folder_of(spec.name))


def make_ready(cluster: ClusterSpec, say: Callable[[str], None], *, from_here: bool = False) -> ClusterSpec:
    """Look at a cluster's hosts before a job, and decide where it is supervised from; nothing to do for local nodes.

    Args:
        from_here: this machine supervises it, because its jobs end with a process here.

    Raises:
        ProvisionError: a host can't be used.
    """
    if not cluster.hosts:
        return cluster
    from atoll.tasks import ssh_clusters

    return ssh_clusters.make_ready(cluster, say, from_here=from_here)


def unfinished(cluster: ClusterSpec) -> list[JobRow]:
    """Jobs of a cluster that have not ended, the newest first."""
    if cluster.status is not ClusterStatus.UP:
        return []
    if cluster.supervised_from != "here":
        return [row for row in control_of(cluster).queue() if not row.status.ended]
    from atoll.tasks.store import Store

    with Store(folder_of(cluster.name)) as store:  # not all of a thousand past jobs
        return store.jobs(unfinished=True)


# --------------------------------------------------------------------------------------- made, reused or resized
@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a launch asks of its cluster.

    Attributes:
        num_nodes: nodes of the job.
        infra: ``local``, ``ssh/NAME``, or None: where the cluster is, for a new one local.
        accelerators: kinds that would do, the preferred one first; empty for none.
        cpus, memory: of each node, as text (``8+``, ``32GB``), or None.
        simulate: may what the machine lacks be simulated?
    """

    num_nodes: int = 1
    infra: str | None = None
    accelerators: tuple[Accelerators, ...] = ()
    cpus: str | None = None
    memory: str | None = None
    simulate: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """What a launch gets.

    Attributes:
        cluster: the record as it should be.
        accelerator, num_accelerators: what the job uses of each node.
        lines: what the user is told about it.
        changed: does the record have to be written?
    """

    cluster: ClusterSpec
    accelerator: str | None
    num_accelerators: int
    lines: tuple[str, ...]
    changed: bool


def decide(name: str, have: ClusterSpec | None, wish: Wish, busy: Sequence[JobRow] = ()) -> Decision:
    """Make, reuse, take up again or resize a cluster for a wish.

    Args:
        name: of the cluster.
        have: its record, or None.
        busy: its jobs that have not ended.

    Raises:
        ConfigError: an unknown infra, another infra than it is on, a resize while jobs run, accelerators that can't
            be had without simulation.
    """
    infra = wish.infra or (have.infra if have is not None else "local")
    if infra == "local" and wish.num_nodes > _MOST_LOCAL_NODES:
        raise ConfigError(
            f"{wish.num_nodes} nodes on this machine alone: expected {_MOST_LOCAL_NODES} at most; "
            f"for more, run on hosts with --infra ssh/NAME"
        )
    if have is None or have.status is ClusterStatus.DOWN:
        return _new(name, have, wish)
    if wish.infra is not None and wish.infra != have.infra:
        raise ConfigError(
            f"cluster {name} is on {have.infra}, --infra {wish.infra} was asked for: use another name (-c), "
            f"or `atoll down {name}` first"
        )
    chosen = next((kind for kind in wish.accelerators if fits(have, kind)), None)
    if chosen is not None and have.simulated and not wish.simulate:
        place(have, (chosen,), simulate=False)  # refuses
    wanted = chosen or next(iter(wish.accelerators), None)
    changes = missing(
        have,
        num_nodes=wish.num_nodes,
        accelerators=None if chosen else wanted,
        cpus=wish.cpus,
        memory=wish.memory,
    )
    stopped = have.status is ClusterStatus.STOPPED
    if not changes:
        lines = [f"cluster {name} was stopped and is taken up again"] if stopped else []
        return _decision(dataclasses.replace(have, status=ClusterStatus.UP), wanted, lines, changed=stopped)
    if busy:
        ids = ", ".join(str(job.id) for job in busy)
        raise ConfigError(
            f"cluster {name} can't be resized ({', '.join(changes)}) while job {ids} is on it. Wait for it "
            f"(atoll logs {name} {busy[0].id}), cancel it (atoll cancel {name} {busy[0].id}), or use another name (-c)"
        )
    kept = ((have.accelerator, have.num_accelerators),) if have.accelerator else ()
    grown = dataclasses.replace(
        have,
        num_nodes=max(have.num_nodes, wish.num_nodes),
        cpus=larger(have.cpus, wish.cpus),
        memory_gb=larger(have.memory_gb, wish.memory),
        status=ClusterStatus.UP,
    )
    cluster = place(grown, kept if wanted is None or chosen else wish.accelerators, wish.simulate)
    if wanted is not None and chosen is None:
        wanted = (cluster.accelerator or wanted[0], cluster.num_accelerators)
    return _decision(cluster, wanted, [f"cluster {name} is resized: {', '.join(changes)}", *cluster.notes])


def _decision(
    cluster: ClusterSpec, accelerators: Accelerators | None, lines: Sequence[str], *, changed: bool = True
) -> Decision:
    accelerator, num = accelerators or (None, 0)
    return Decision(cluster, accelerator, num, tuple(lines), changed)


def _new(name: str, have: ClusterSpec | None, wish: Wish) -> Decision:
    made = ClusterSpec(
        name=check_name(name),
        infra=wish.infra or "local",
        num_nodes=wish.num_nodes,
        cpus=wish.cpus,
        memory_gb=wish.memory,
        created_s=time.time(),
    )
    cluster = place(made, wish.accelerators, wish.simulate)
    lines = list(cluster.notes)
    if have is not None:
        lines.insert(0, f"cluster {name} was down and is made anew; its old jobs' logs are kept")
    mine = (cluster.accelerator, cluster.num_accelerators) if cluster.accelerator else None
    return _decision(cluster, mine, lines)


# ------------------------------------------------------------------------------------- stopped, down, autostopped
def stop(name: str) -> list[int]:
    """Stop a cluster: its jobs end, its nodes' files are kept. Returns the jobs that were ended.

    Raises:
        UnknownCluster: there is none, or it is down.
    """
    with locked(up_or_stopped(name).name):
        return _end(load(name), ClusterStatus.STOPPED)


def start(name: str) -> ClusterSpec:
    """Take up a stopped cluster again.

    Raises:
        UnknownCluster: there is none, or it is down.
    """
    with locked(up_or_stopped(name).name):
        return change(load(name), status=ClusterStatus.UP)


def down(name: str, *, purge: bool = False) -> list[int]:
    """Take a cluster down: its jobs end, its nodes' files go, its jobs' logs are kept. Returns the jobs ended.

    Args:
        name: the cluster.
        purge: do so also where the head that supervises it can't be reached, and leave what is there.

    Raises:
        UnknownCluster: there is none.
        ProvisionError: its head can't be reached.
    """
    from atoll.tasks import ssh_clusters

    with locked(load(name).name) as folder:
        cluster = load(name)
        try:
            ended = _end(cluster, ClusterStatus.DOWN)
            if purge and cluster.supervised_from != "here":
                ssh_clusters.remove_record(cluster)
            return ended
        except ProvisionError as error:
            if cluster.supervised_from == "here":
                raise
            if not purge:
                raise ProvisionError(
                    f"{error}. If this host, the head of cluster {name}, is gone for good: `atoll down --purge {name}`"
                ) from None
            ssh_clusters.tell_what_stays(cluster)
            record.change(folder, status=ClusterStatus.DOWN)
            return []


def forget(name: str) -> None:
    """Remove what is left of a cluster that is down: its record and the logs of its jobs."""
    from atoll.tasks.control import remove_tree

    with locked(name) as folder:
        remove_tree(folder)


def purge(name: str, say: Callable[[str], None]) -> list[int]:
    """``down``, then ``forget``, whatever of the cluster is damaged; ``say`` is told what could not be ended.

    Returns:
        the jobs that were ended.

    Raises:
        UnknownCluster: nothing is there.
    """
    from atoll.tasks import supervisor

    folder = folder_of(name)
    if not os.path.lexists(folder):
        load(name)  # raises
    record.check_owner(folder)
    ended: list[int] = []
    try:
        ended = down(name, purge=True)
    except (AtollError, OSError) as error:  # what is damaged can't be ended in order
        say(f"cluster {name}: {error}; what was left of it is removed")
        supervisor.kill(folder)
    if folder.is_dir() and not folder.is_symlink():
        forget(name)
    else:
        folder.unlink(missing_ok=True)
    return ended


def left(patterns: Sequence[str]) -> list[str]:
    """``matching``, and also names of which nothing but a damaged rest is there: what ``purge`` takes."""
    rests = [each for each in patterns if is_name(each) and os.path.lexists(folder_of(each))]
    return [*rests, *matching([each for each in patterns if each not in rests])]


def take_back(name: str, before: ClusterSpec | None) -> None:
    """Leave nothing of a cluster that was made for a job which then could not be submitted. Its lock is held.

    Args:
        before: its record before that, of a cluster that was down; None where there was none.
    """
    from atoll.tasks.control import remove_tree

    folder, made = folder_of(name), find(name)
    if made is None:
        return
    with contextlib.suppress(AtollError, OSError):  # what stopped the launch may stop this, too
        _end(made, ClusterStatus.DOWN)
    if before is not None:
        record.save(folder, before)
        return
    for each in folder.iterdir():
        if each.name != _LOCK:
            remove_tree(each) if each.is_dir() else each.unlink()


def _end(cluster: ClusterSpec, status: ClusterStatus) -> list[int]:
    """End its jobs, then have it stopped or down; the jobs that were ended."""
    control = control_of(cluster)
    try:
        ended = control.cancel(None)
    except AtollError:  # on a full disk it takes the room that the nodes' files have
        if status is not ClusterStatus.DOWN or cluster.supervised_from != "here":
            raise
        control.remove_nodes()
        ended = control.cancel(None)
    if status is ClusterStatus.DOWN:
        control.remove_nodes()
        if cluster.hosts:
            from atoll.tasks import ssh_clusters

            ssh_clusters.remove_files(cluster)
        change(cluster, status=status, setup_done=(), autostop_minutes=None, autodown=False)
    else:
        change(cluster, status=status)
    return ended


def up_or_stopped(name: str) -> ClusterSpec:
    """The record of a cluster that is not down.

    Raises:
        UnknownCluster: there is none, or it is down.
    """
    cluster = load(name)
    if cluster.status is ClusterStatus.DOWN:
        raise UnknownCluster(f"cluster {name} is down; `atoll launch -c {name} TASK` makes it anew")
    return cluster


def refresh(cluster: ClusterSpec, *, ask: bool = False) -> ClusterSpec:
    """Bring a record in line with what is: jobs whose supervisor died have failed, an autostop that is due happens.

    A local cluster between jobs is a folder, so whoever looks at it next does its autostop.

    Args:
        ask: ask a head that supervises it, too.
    """
    if cluster.status is not ClusterStatus.UP:
        return cluster
    if cluster.supervised_from == "here":
        from atoll.tasks.supervisor import reconcile

        reconcile(folder_of(cluster.name))
    elif not ask:
        return cluster
    if not _is_due(cluster):
        return cluster
    with locked(cluster.name):  # a launch may have come first
        cluster = load(cluster.name)
        if _is_due(cluster):
            _end(cluster, ClusterStatus.DOWN if cluster.autodown else ClusterStatus.STOPPED)
    return load(cluster.name)


def _is_due(cluster: ClusterSpec) -> bool:
    """Has it been idle for as long as its autostop says?"""
    if cluster.status is not ClusterStatus.UP or cluster.autostop_minutes is None:
        return False
    jobs = control_of(cluster).queue()
    if any(not job.status.ended for job in jobs):
        return False
    idle_s = time.time() - max([cluster.created_s, *(job.ended_s or 0.0 for job in jobs)])
    return idle_s >= 60 * cluster.autostop_minutes


def set_autostop(cluster: ClusterSpec, idle_minutes: int, *, down: bool) -> ClusterSpec:
    """Have a cluster stopped, or taken ``down``, after so many idle minutes; a negative number: never."""
    minutes = idle_minutes if idle_minutes >= 0 else None
    return change(cluster, autostop_minutes=minutes, autodown=down and minutes is not None)


# --------------------------------------------------------------------------------------------------------- nodes
def head_address(cluster: ClusterSpec) -> str:
    """The address of the head, as other nodes reach it."""
    addresses = cluster.ssh.get("addresses") or cluster.hosts
    return str(addresses[0]) if addresses else "127.0.0.1"


def node_of(cluster: ClusterSpec, name: str) -> int:
    """The index of the node called ``head``, ``worker1``, …

    Raises:
        ConfigError: the cluster has no such node.
    """
    names = [node_name(node) for node in range(cluster.num_nodes)]
    if name not in names:
        has = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if len(names) > 2 else " and ".join(names)
        raise ConfigError(f"cluster {cluster.name} has no node {name!r}{nearest(name, names) or f'; it has {has}'}")
    return names.index(name)
