"""Clusters: their names and records, where their files lie, and who answers for their jobs."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.agent.process_tree import is_stopped
from atoll.core.errors import ConfigError, ProvisionError
from atoll.core.paths import atoll_home, sweep_temporary, user_name
from atoll.core.validation import command_line, nearest
from atoll.providers import registry
from atoll.tasks import record
from atoll.tasks.spec import LONGEST_NAME, ClusterSpec, ClusterStatus, is_name, node_name

if TYPE_CHECKING:
    from atoll.tasks.control import LocalControl
    from atoll.tasks.remote_control import RemoteControl
    from atoll.tasks.rows import JobRow

LOCK = "launch.lock"
_SILENT_S = 1.0  # most commands are done with a cluster sooner
# Fields that `decide` may change of a cluster that is there.
_DECIDED = (
    *("num_nodes", "accelerator", "num_accelerators", "simulated", "cpus", "memory_gb", "status", "notes"),
    "allocation",
)


class UnknownCluster(ConfigError, LookupError):
    """No cluster, or no job, of that name; the message says the nearest one or how to make it."""


class ClusterNotUp(ConfigError):
    """The cluster is stopped; the message says how to start it."""


# ------------------------------------------------------------------------------------------------------- names
def check_name(name: str) -> str:
    """A cluster's name.

    Raises:
        ConfigError: it cannot be one.
    """
    if is_name(name):
        return name
    cluster, slash, node = name.partition("/")
    if slash and is_name(cluster) and cluster in all_names():
        raise ConfigError(f"{name!r} is a node: this command needs its cluster, {cluster} ({node!r} is for ssh and cp)")
    raise ConfigError(
        f"cluster name {name!r}: expected letters and digits with '.', '_' or '-' between them, "
        f"at most {LONGEST_NAME}, as in my-cluster"
    )


def fresh_name() -> str:
    """A name for a cluster that the user didn't name: ``atoll-3f0a-user``."""
    user, taken = re.sub("[^a-zA-Z0-9]+", "", user_name()) or "user", all_names()
    while (name := f"atoll-{secrets.token_hex(2)}-{user}"[:LONGEST_NAME]) in taken:
        pass
    return name


def folder_of(name: str) -> Path:
    """The folder of a cluster's record, jobs and local nodes."""
    return record.folder_of(check_name(name))


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
                raise UnknownCluster(
                    f"no cluster matches {pattern!r}; `atoll status --all` lists all clusters, also those that are down"
                )
            found.update(dict.fromkeys(hits))
        else:
            if pattern not in all_names():
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
    found = find(name) if to_run or "/" in name or is_name(name) else None
    if found is None:
        makes = f"`{_launches(name)}` makes it" if to_run else "`atoll status --all` lists all clusters"
        hint = nearest(name, all_names()) or f"; {makes}"
        raise UnknownCluster(f"no cluster {name!r}{hint}")
    return found


def up_or_stopped(name: str) -> ClusterSpec:
    """The record of a cluster that is not down.

    Raises:
        UnknownCluster: there is none, or it is down.
    """
    cluster = load(name)
    if cluster.status is ClusterStatus.DOWN:
        raise UnknownCluster(f"cluster {name} is down; `{_launches(name)}` creates it again")
    return cluster


def _launches(name: str) -> str:
    return command_line("atoll", "launch", "-c", name, "TASK")


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
def locked(name: str, what: str, say: Callable[[str], None]) -> Iterator[Path]:
    """One process at a time changes a cluster and copies to its nodes; this one waits for it.

    Args:
        name: of the cluster.
        what: is done, in a word: others that wait are told.
        say: is told whom this waits for, once that has taken a second. Raising ends the wait.

    Yields:
        the cluster's folder, made where it did not exist.

    Raises:
        ConfigError: it is somebody else's, or damaged.
    """
    folder = folder_of(name)
    with _locked(folder, what, say):
        yield folder


def locked_if_free(name: str, what: str) -> contextlib.AbstractContextManager[bool]:
    """``locked`` for whoever only looks and never waits; yields whether it is."""
    return _locked(folder_of(name), what, None)


@contextlib.contextmanager
def _locked(folder: Path, what: str, say: Callable[[str], None] | None) -> Iterator[bool]:
    """Holds a cluster's lock, in which it is written what for; where nobody is told whom it waits for, only if free."""
    record.check_owner(folder)
    descriptor = _take_lock(folder, say)
    if descriptor is None:
        yield False
        return
    try:
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{what} {os.getpid()}".encode(), 0)
        sweep_temporary(folder / record.RECORD)
        try:
            yield True
        finally:
            _remove_empty(folder)
    finally:
        os.close(descriptor)


def _take_lock(folder: Path, say: Callable[[str], None] | None) -> int | None:
    """A descriptor that holds a cluster's lock; None where somebody has it and nobody is to be told."""
    while True:
        descriptor = _open_lock(folder)
        try:
            is_taken = record.take_lock(descriptor, 0.0 if say is None else _SILENT_S)
            if not is_taken and say is not None:
                say(f"waiting for another command on cluster {folder.name}{_holder(descriptor)}")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            elif not is_taken:
                os.close(descriptor)
                return None
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # who had it before us made no cluster of it


def _holder(descriptor: int) -> str:
    """Who has a cluster's lock, in words that follow others; nothing where that is not known."""
    words = os.pread(descriptor, 100, 0).decode(errors="replace").split()
    if len(words) != 2 or not all(word.isascii() and word.isalnum() for word in words):
        return ""
    what, pid = words
    stopped = f", which is stopped (kill -CONT {pid})" if pid.isdigit() and is_stopped(int(pid)) else ""
    return f": {what}, process {pid}{stopped}"


def _remove_empty(folder: Path) -> None:
    """Leave nothing of a launch that was refused. For whoever holds the lock."""
    with contextlib.suppress(FileNotFoundError):
        if os.listdir(folder) == [LOCK]:
            (folder / LOCK).unlink()
            with contextlib.suppress(OSError):  # somebody else begins
                folder.rmdir()


def _open_lock(folder: Path) -> int:
    while True:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise ConfigError(f"{folder} is not a folder: {record.removes(folder.name)}") from None
        with contextlib.suppress(FileNotFoundError):  # the folder went away just now
            return record.open_lock(folder / LOCK)


def change(cluster: ClusterSpec, **fields: Any) -> ClusterSpec:
    """Change fields of a record, here and where the cluster is supervised from. Jobs end where it is not up then."""
    if cluster.allocation.supervised_here:
        return control_of(cluster).change(**fields)
    with contextlib.suppress(LookupError):  # somebody removed it there
        control_of(cluster).change(**fields)
    return record.change(folder_of(cluster.name), **fields)


def control_of(spec: ClusterSpec) -> LocalControl | RemoteControl:
    """Who answers for the cluster's jobs: this machine, or the head that supervises them.

    Raises:
        ProvisionError: the head can't be reached, or has still to come.
    """
    if spec.is_awaited:
        why = spec.allocation.reason or "its nodes are not there yet"
        raise ProvisionError(f"cluster {spec.name} has no jobs yet: waiting for {spec.infra}: {why}")
    if not spec.allocation.supervised_here:
        from atoll.tasks import remote_control

        return remote_control.control(spec)
    from atoll.tasks.control import LocalControl

    return LocalControl(folder_of(spec.name))


def unfinished(cluster: ClusterSpec) -> list[JobRow]:
    """Jobs of a cluster that have not ended, the newest first."""
    if cluster.status is not ClusterStatus.UP or cluster.is_awaited:
        return []
    if not cluster.allocation.supervised_here:
        return [row for row in control_of(cluster).queue() if not row.status.ended]
    from atoll.tasks.store import Store

    with Store(folder_of(cluster.name)) as store:  # not all of a thousand past jobs
        return store.jobs(unfinished=True)


# --------------------------------------------------------------------------------------------------------- nodes
def head_address(cluster: ClusterSpec) -> str:
    """The address of the head, as other clusters reach it."""
    return registry.of(cluster.allocation).address(cluster.allocation)


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
