"""What earlier jobs of a cluster left running, on this machine and on its hosts: whose it is, and its end.

Agents end when their supervisor does, unless they are stopped, or hang. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import sys
from pathlib import Path

from atoll.agent import orphans
from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.providers import registry
from atoll.tasks import record
from atoll.tasks.spec import ClusterSpec

_ID = "id"  # in ATOLL_HOME: no other state folder has the same
_PATIENCE_S = 3.0
_DRIVER = "driver"  # in a cluster's folder: the owner of what its last supervisor started on hosts


def owner_of(folder: Path) -> str:
    """What agents of the cluster in this folder are known by: the same when it is made anew, and no other cluster's.

    Neither one of the same name in a copy of ATOLL_HOME, nor of another user, nor of another machine that shares it.

    Raises:
        ConfigError: the state folder's id can't be read or made.
    """
    home = folder.absolute().parent.parent
    parts = (_id_of(home), os.path.realpath(home), os.uname().nodename, str(os.getuid()), folder.name)
    return hashlib.blake2b("\0".join(parts).encode(errors="surrogateescape"), digest_size=12).hexdigest()


def owner_on_nodes(cluster: ClusterSpec, folder: Path) -> str:
    """``owner_of`` for agents on its nodes: where this is the head, they are known by what the client is known by.

    What the record says is believed only in the folder that it was written for: a copy of one has an owner of its own.
    """
    its, written_for = cluster.allocation.owner, cluster.allocation.folder
    if its and written_for and os.path.realpath(folder) == os.path.realpath(written_for):
        return its
    return owner_of(folder)


def _id_of(home: Path) -> str:
    path = home / _ID
    try:
        with contextlib.suppress(FileNotFoundError):
            if own := path.read_text(errors="replace"):
                return own
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not (own := os.pread(fd, 64, 0).decode(errors="replace")):  # else somebody was faster
                own = secrets.token_hex(16)
                os.pwrite(fd, own.encode(), 0)
                with contextlib.suppress(OSError):
                    os.fchmod(fd, 0o644)  # whoever uses the folder next, if root was the first
            return own
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be used: {error.strerror or error}. Remove it, once no jobs run: a new one is made, which "
            f"does not know of processes that were left before"
        ) from None


def end_here(folder: Path) -> list[str]:
    """End what nodes on this machine left. For whoever holds the supervisor's lock. Returns what does not end."""
    if not os.path.lexists(folder.absolute().parent.parent / _ID):  # nothing was ever started
        return []
    return [f"{each} on {os.uname().nodename}" for each in orphans.end(owner_of(folder), patience_s=_PATIENCE_S)]


def end_all(folder: Path) -> list[str]:
    """End what the cluster left, here or on its hosts. For whoever holds the supervisor's lock.

    Returns:
        a line for each host that could not be asked.

    Raises:
        AtollError: something can't be ended.
    """
    try:
        cluster = record.load(folder)
    except LookupError:
        return []
    try:
        left, lines = end_on_nodes(cluster, folder)
    except ConfigError as error:
        return [f"{error}. So it is not known whether processes of cluster {cluster.name} hang there"]
    if left:
        raise AtollError(f"cluster {cluster.name}: not even SIGKILL ends {', '.join(left)}: {ADVICE}")
    return lines


ADVICE = "it waits for a disk or a device that does not answer, or is frozen; it has to end before another job starts"


def end_on_nodes(cluster: ClusterSpec, folder: Path, first: int = 0, driver: str = "") -> tuple[list[str], list[str]]:
    """End what a cluster left on its nodes.

    Args:
        cluster: which.
        folder: the cluster's.
        first: the number of the first of those nodes.
        driver: only what this owner left.

    Returns:
        what does not end, with its machine; and a line for each machine that could not be asked.
    """
    allocation = cluster.allocation
    if allocation.shares_machine:
        return end_here(folder), []
    owner = owner_on_nodes(cluster, folder)
    if allocation.owner != owner:  # no job of it has been started yet, or another folder's are
        return [], []
    if driver and driver.partition(".")[0] != owner:
        return [], []
    try:
        return registry.of(allocation).end_orphans(allocation, driver or owner, first)
    except ProvisionError as error:
        return [], [f"cluster {cluster.name}: {error}"]


def note_driver(folder: Path, owner: str) -> None:
    """Write down what this supervisor's agents on hosts are known by, for when it is no more."""
    (folder / _DRIVER).write_text(owner)


def end_left_on_hosts(folder: Path) -> None:
    """End what the last supervisor left on hosts. For the next one, in a thread, so that nobody waits for them.

    What can't be done there is in the supervisor's log, and tried again before the next job.
    """
    try:
        owner = (folder / _DRIVER).read_text()
        left, lines = end_on_nodes(record.load(folder), folder, driver=owner)
    except FileNotFoundError:
        return
    except (AtollError, LookupError, OSError) as error:
        left, lines = [], [str(error)]
    for line in (*(f"not even SIGKILL ends {each}" for each in left), *lines):
        sys.stderr.write(f"{line}\n")
