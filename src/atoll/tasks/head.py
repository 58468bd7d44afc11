"""The machine that supervises a cluster elsewhere, as the client asks it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.core.errors import AtollError, ProvisionError
from atoll.core.paths import atoll_home
from atoll.core.validation import command_line
from atoll.providers import registry
from atoll.providers.base import Remote
from atoll.tasks import remains
from atoll.tasks.nodes import node_of
from atoll.tasks.remote_control import ProgramControl, what_then
from atoll.tasks.spec import ClusterSpec
from atoll.tasks.supervisor_client import tell
from atoll.tasks.sync.host_files import remove_files

_PATIENCE_S = 300.0  # a connection to the head that was there may be gone for so long
_REMOVE_S = 300.0


def _folder_here(name: str) -> Path:
    return atoll_home() / "clusters" / name


_heads: dict[str, Remote] = {}  # by how it is reached: a login serves all commands of a process


def _head(cluster: ClusterSpec) -> Remote:
    """The login to the head, with Atoll's code there."""
    allocation = cluster.allocation
    key = json.dumps([cluster.name, allocation.head.reach, allocation.settings, allocation.code], sort_keys=True)
    if key not in _heads:
        remote = node_of(cluster, 0)
        remote.bring_code()
        _heads[key] = remote
    return _heads[key]


def control(cluster: ClusterSpec) -> ProgramControl:
    """Who answers for a cluster that is supervised from its head.

    Raises:
        ProvisionError: the head can't be reached.
    """
    try:
        head = _head(cluster)
    except ProvisionError as error:
        raise ProvisionError(f"{error}. {what_then(cluster.name)}") from None
    # The head may be unable to log in to another host now.
    provider = registry.of(cluster.allocation)
    command: Callable[[str], Sequence[str]] = lambda operation: head.argv("tasks.control", operation)  # noqa: E731
    return ProgramControl(command, cluster.name, head.plan.host, _PATIENCE_S, provider.forget_checks)


def remove_record(cluster: ClusterSpec) -> None:
    """Removes what the head keeps of a cluster that is down: its record, jobs and logs. Tells where that fails."""
    folder = cluster.allocation.folder or f"~/.atoll/clusters/{cluster.name}"
    try:
        control(cluster).end()
        _head(cluster).check(f"rm -rf -- {shlex.quote(folder)}", limit_s=_REMOVE_S)
    except AtollError as error:
        _tell_left(cluster, error, f"{folder} stays there, and running jobs continue")


def clean_without_head(cluster: ClusterSpec, error: ProvisionError, *, for_good: bool) -> None:
    """Cleans up after a cluster whose head can't be asked to, as far as that goes, and says what stays.

    ``for_good``: its record goes, so that this can't be done again.
    """
    folder = cluster.allocation.folder or f"~/.atoll/clusters/{cluster.name}"
    downs = command_line("atoll", "down", cluster.name)
    again = "" if for_good else f"; once it can be reached, `{downs}` again ends and removes that"
    stays = f"jobs continue there as long as it runs, and {folder} stays there (jobs, logs, workdir){again}"
    _tell_left(cluster, error, stays)
    left, lines = remains.end_on_nodes(cluster, _folder_here(cluster.name), first=1)
    for line in (*(f"not even SIGKILL ends {each}" for each in left), *lines):
        tell(line)
    remove_files(cluster, first=1)


def _tell_left(cluster: ClusterSpec, error: AtollError, what: str) -> None:
    site = cluster.allocation.head.name
    why = str(error).removesuffix(f". {what_then(cluster.name)}").removeprefix(f"{site}: ")
    tell(f"{site}: {why}. So {what}")
