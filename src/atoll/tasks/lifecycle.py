"""How clusters end: stopped and started again, taken down, forgotten, by hand or by their autostop."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.validation import MOST_MINUTES, checks_arguments, command_line
from atoll.providers import registry
from atoll.providers.base import GONE, AllocationState
from atoll.providers.upkeep import wait_until_ready
from atoll.tasks import clusters, record, supervisor
from atoll.tasks.client import tell
from atoll.tasks.nodes import with_nodes_now
from atoll.tasks.spec import ClusterSpec, ClusterStatus, is_name

Say = Callable[[str], None]


def silent(text: str) -> None:
    """Whoever calls from Python asks for lines where they want them."""


@checks_arguments
def stop(cluster_name: str, *, on_line: Say = silent) -> list[int]:
    """Stop a cluster: ends its jobs, keeps its nodes' files. Returns the jobs that were ended.

    Args:
        cluster_name: the cluster.
        on_line: called with a line that says what this waits for.

    Raises:
        UnknownCluster: there is none, or it is down.
    """
    with clusters.locked(clusters.up_or_stopped(cluster_name).name, "stop", on_line):
        return _end(clusters.up_or_stopped(cluster_name), ClusterStatus.STOPPED)


@checks_arguments
def start(cluster_name: str, *, on_line: Say = silent) -> ClusterSpec:
    """Restart a stopped cluster.

    Args:
        cluster_name: the cluster.
        on_line: called with a line that says what this waits for.

    Raises:
        UnknownCluster: there is none, or it is down.
        ConfigError: it gave its nodes back when it was stopped.
    """
    with clusters.locked(clusters.up_or_stopped(cluster_name).name, "start", on_line):
        cluster = clusters.up_or_stopped(cluster_name)
        if cluster.allocation.state is AllocationState.RELEASED:
            gets = command_line("atoll", "launch", "-c", cluster_name, "TASK")
            raise ConfigError(f"cluster {cluster_name} gave its nodes back when it was stopped: `{gets}` gets others")
        # It has been idle from now on only, and an autostop after its last job has done what it was for.
        fields: dict[str, Any] = {"created_s": time.time(), "autostop_minutes": cluster.autostop_minutes or None}
        provider = registry.of(cluster.allocation)
        allocation = wait_until_ready(provider, provider.restart(cluster.allocation), on_line)
        if allocation != cluster.allocation:
            cluster = record.change(clusters.folder_of(cluster_name), allocation=allocation)
        started = clusters.change(cluster, status=ClusterStatus.UP, **fields)
        if allocation.is_rented:
            supervisor.watch(clusters.folder_of(cluster_name), alone=True)
        return started


@checks_arguments
def down(cluster_name: str, *, purge: bool = False, on_line: Say = silent) -> list[int]:
    """What ``sky.down`` does; returns the jobs ended."""
    from atoll.tasks import remote_control
    from atoll.tasks.control import remove_tree

    if (awaited := clusters.load(cluster_name)).is_awaited:  # a launch that waits for its nodes sees it, and ends
        _release(awaited, ClusterStatus.DOWN)
    with clusters.locked(cluster_name, "down", on_line) as folder, registry.kept():
        if awaited.is_awaited and clusters.find(cluster_name) is None:
            return []
        cluster = clusters.load(cluster_name)
        if awaited.is_awaited and not cluster.allocation.nodes:  # the launch that waited was killed
            remove_tree(folder)
            return []
        try:
            ended = clusters.control_of(cluster).end() if purge else []
            ended += [job for job in _end(cluster, ClusterStatus.DOWN) if job not in ended]
        except ProvisionError as error:
            if cluster.allocation.supervised_here:
                raise
            remote_control.clean_up_without_head(cluster, error, for_good=purge)
            _release(cluster, ClusterStatus.DOWN)
            record.change(folder, status=ClusterStatus.DOWN, autostop_minutes=None, autodown=False)
            return []
        if purge and not cluster.allocation.supervised_here:
            remote_control.remove_record(cluster)
        return ended


def forget(name: str, *, on_line: Say = silent) -> None:
    """Remove what is left of a cluster that is down: its record and the logs of its jobs."""
    from atoll.tasks.control import remove_tree

    lock = clusters.folder_of(name) / clusters.LOCK
    if lock.is_dir():  # nobody can have that
        remove_tree(lock)
    with clusters.locked(name, "down", on_line) as folder:
        remove_tree(folder)


def purge(name: str, say: Say, *, on_line: Say = silent) -> list[int]:
    """``down``, then ``forget``, whatever of the cluster is damaged.

    Args:
        name: of the cluster.
        say: is told what could not be ended.
        on_line: called with a line that says what this waits for.

    Returns:
        the jobs that were ended.

    Raises:
        UnknownCluster: nothing is there.
    """
    folder = clusters.folder_of(name)
    if not os.path.lexists(folder):
        clusters.load(name)  # raises
    record.check_owner(folder)
    ended: list[int] = []
    try:
        ended = down(name, purge=True, on_line=on_line)
    except (AtollError, OSError) as error:  # what is damaged can't be ended in order
        what = str(error).partition("`atoll down --purge")[0].rstrip(" .:")  # that is being done
        say(f"cluster {name}: {what}; what was left of it is removed")
        if not supervisor.kill(folder):
            say(
                f"cluster {name}: its supervisor, process {supervisor.pid_of(folder)}, "
                "can't be killed and is still running"
            )
    if folder.is_dir() and not folder.is_symlink():
        forget(name, on_line=on_line)
    else:
        folder.unlink(missing_ok=True)
    return ended


def left(patterns: Sequence[str]) -> list[str]:
    """``matching``, and also names of which nothing but a damaged rest is there: what ``purge`` takes."""
    rests = [each for each in patterns if is_name(each) and os.path.lexists(clusters.folder_of(each))]
    return [*rests, *clusters.matching([each for each in patterns if each not in rests])]


def rollback_cluster(name: str, before: ClusterSpec | None) -> None:
    """Remove a cluster that was created for a job whose submission failed. The caller holds the launch lock.

    Args:
        before: its record before that, of a cluster that was down; None where there was none.
    """
    from atoll.tasks.control import remove_tree

    folder, made = clusters.folder_of(name), clusters.find(name)
    if made is None:
        return
    if before is not None and before.is_awaited:
        before = None
    with contextlib.suppress(AtollError, OSError):  # what stopped the launch may stop this, too
        _end(made, ClusterStatus.DOWN)
    if not made.allocation.shares_machine:
        with contextlib.suppress(AtollError, OSError):
            _release(made, ClusterStatus.DOWN)
    at = None if before is None or before.allocation.supervised_here else before.allocation.nodes[:1]
    if not made.allocation.supervised_here and made.allocation.nodes[:1] not in (at, ()):
        from atoll.tasks import remote_control

        remote_control.remove_record(made)
    if before is not None:
        record.save(folder, before)
    else:
        remove_tree(folder)


def _end(cluster: ClusterSpec, status: ClusterStatus) -> list[int]:
    """End its jobs, then have it stopped or down; the jobs that were ended. Whatever happens, its nodes go back."""
    try:
        return _end_jobs(cluster, status)
    except AtollError as error:
        if status is not ClusterStatus.DOWN or not cluster.allocation.is_rented:
            raise
        tell(f"cluster {cluster.name}: {error}. Its machines are given back, with what runs there")
        folder = clusters.folder_of(cluster.name)
        supervisor.kill(folder)
        record.change(folder, status=status, setup_done=(), autostop_minutes=None, autodown=False)
        return []
    finally:
        _release(cluster, status)


def _end_jobs(cluster: ClusterSpec, status: ClusterStatus) -> list[int]:
    control = clusters.control_of(cluster)
    if status is ClusterStatus.DOWN:
        from atoll.tasks.sync.host_files import remove_files

        ended, lines = control.remove_nodes()
        for line in lines:
            tell(line)
        if cluster.allocation.files != "homes" and not cluster.allocation.is_rented:
            remove_files(cluster)
        clusters.change(cluster, status=status, setup_done=(), autostop_minutes=None, autodown=False)
    else:
        ended = control.cancel(None)
        clusters.change(cluster, status=status)
    return ended


def _release(cluster: ClusterSpec, status: ClusterStatus) -> None:
    """Give the nodes of a cluster back that is stopped or down now."""
    keep_disks = status is not ClusterStatus.DOWN
    released = registry.of(cluster.allocation).release(cluster.allocation, keep_disks=keep_disks)
    if released != cluster.allocation:
        record.change(clusters.folder_of(cluster.name), allocation=released)


def refresh(cluster: ClusterSpec, *, ask: bool = False, max_age_s: float = 0.0) -> ClusterSpec:
    """Bring a record in line with what is: jobs whose supervisor died have failed, an autostop that is due happens.

    A local cluster between jobs is a folder, so whoever looks at it next does its autostop. Looking never waits: a
    cluster that another command is busy with is not idle.

    Args:
        ask: ask a head that supervises it, too.
        max_age_s: how old what its provider says may be, in seconds.
    """
    if cluster.status is not ClusterStatus.UP:
        return cluster
    cluster = with_nodes_now(cluster, clusters.folder_of(cluster.name), max_age_s=max_age_s)
    now = cluster.allocation
    if now.state is AllocationState.STOPPED:
        tell(f"cluster {cluster.name} is stopped: {now.reason}")
        return record.change(clusters.folder_of(cluster.name), status=ClusterStatus.STOPPED, allocation=now)
    if now.state in GONE:
        ended = {"status": ClusterStatus.DOWN, "setup_done": (), "autostop_minutes": None, "autodown": False}
        tell(f"cluster {cluster.name} is down: {now.reason}")
        return record.change(clusters.folder_of(cluster.name), **ended, notes=(now.reason,))
    if now.state is AllocationState.PENDING:
        return cluster
    if cluster.allocation.supervised_here:
        from atoll.tasks.control import LocalControl

        LocalControl(clusters.folder_of(cluster.name)).resume()
    elif not ask:
        return cluster
    if not _is_due(cluster):
        return cluster
    with clusters.locked_if_free(cluster.name, "autostop") as free:
        if free and _is_due(cluster := clusters.load(cluster.name)):  # a launch may have come first
            _end(cluster, ClusterStatus.DOWN if cluster.autodown else ClusterStatus.STOPPED)
    return clusters.load(cluster.name)


def _is_due(cluster: ClusterSpec) -> bool:
    """Has it been idle for as long as its autostop says?"""
    if cluster.status is not ClusterStatus.UP or cluster.autostop_minutes is None:
        return False
    jobs = clusters.control_of(cluster).queue()
    if any(not job.status.ended for job in jobs):
        return False
    idle_s = time.time() - max([cluster.created_s, cluster.autostop_set_s, *(job.ended_s or 0.0 for job in jobs)])
    return idle_s >= 60 * cluster.autostop_minutes


def set_autostop(cluster: ClusterSpec, idle_minutes: int, *, down: bool) -> ClusterSpec:
    """Stop a cluster, or remove it (``down``), after this many idle minutes; never if negative.

    Raises:
        ConfigError: it is more than can be waited for.
    """
    return clusters.change(cluster, **autostop_fields(idle_minutes, down=down))


def autostop_fields(idle_minutes: int, *, down: bool) -> dict[str, Any]:
    """The fields of a cluster's record that say when it is stopped."""
    if idle_minutes > MOST_MINUTES:
        raise ConfigError(f"autostop after {idle_minutes} idle minutes: expected {MOST_MINUTES} at most; -1 is never")
    minutes = idle_minutes if idle_minutes >= 0 else None
    return {"autostop_minutes": minutes, "autostop_set_s": time.time(), "autodown": down and minutes is not None}
