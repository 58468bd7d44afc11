"""A cluster's record, ``cluster.json`` in its folder, as supervisor and clients change it. Standard library only."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pwd
import tempfile
import time
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, ConfigError
from atoll.core.paths import atoll_home, write_atomic
from atoll.core.validation import MOST_ACCELERATORS, MOST_MINUTES, MOST_NODES, command_line
from atoll.providers import registry
from atoll.providers.base import AllocationState
from atoll.tasks.spec import ClusterSpec

RECORD = "cluster.json"
_BUSY_S = 20.0  # other processes' changes take milliseconds
_BOUNDS = (
    ("num_nodes", 1, MOST_NODES),
    ("num_accelerators", 0, MOST_ACCELERATORS),
    ("created_s", 0, 1 << 36),  # some 2000 years from now
    ("autostop_minutes", 0, MOST_MINUTES),
    ("autostop_set_s", 0, 1 << 36),
)


def folder_of(name: str) -> Path:
    """The folder of a cluster's record, jobs and local nodes."""
    return atoll_home() / "clusters" / name


def load(folder: Path) -> ClusterSpec:
    """The record of the cluster in ``folder``.

    Raises:
        LookupError: there is none.
        ConfigError: its file can't be read.
    """
    path = folder / RECORD
    try:
        cluster = ClusterSpec.from_json(json.loads(path.read_bytes()))
        if (flaw := _flaw(cluster, folder)) is not None:
            raise ValueError(flaw)
        return cluster
    except FileNotFoundError:
        raise LookupError(f"no cluster {folder.name!r}") from None
    except (ValueError, IsADirectoryError, NotADirectoryError) as error:
        raise ConfigError(f"{path} is damaged ({error}): {removes(folder.name)}") from None


def _flaw(cluster: ClusterSpec, folder: Path) -> str | None:
    """What can't be in a record whose values have the right types, if anything."""
    if cluster.name != folder.name:
        return f"it is of a cluster {cluster.name}"
    for field, least, most in _BOUNDS:
        value = getattr(cluster, field)
        if value is not None and not least <= value <= most:  # NaN isn't, either
            return f"{field}: invalid value {value!r:.40}"
    if not registry.fits(cluster.infra, cluster.allocation.infra):
        return f"infra: {cluster.infra!r:.40} and its allocation's {cluster.allocation.infra!r:.40} differ"
    if not registry.is_known(cluster.infra):
        return f"infra: invalid value {cluster.infra!r:.40}"
    has_nodes = cluster.allocation.state is AllocationState.READY and not cluster.allocation.shares_machine
    if has_nodes and len(cluster.allocation.nodes) < cluster.num_nodes:
        return f"it has {cluster.num_nodes} nodes, and {len(cluster.allocation.nodes)} of them are known"
    return None


def removes(name: str) -> str:
    """What to type where a cluster's files are damaged or in the way."""
    return f"`{command_line('atoll', 'down', '--purge', name)}` removes what is left of cluster {name}, its logs too"


def save(folder: Path, cluster: ClusterSpec) -> None:
    """Write the record, so that it is never seen half written."""
    write_atomic(folder / RECORD, json.dumps(cluster.to_json(), indent=1).encode())


def change(folder: Path, **fields: Any) -> ClusterSpec:
    """Change some fields of the record; one process at a time.

    Raises:
        LookupError: there is no such cluster.
        ConfigError: its file can't be read.
        AtollError: another process does not come to an end with it.
    """
    lock = open_lock(folder / "record.lock")
    try:
        if not take_lock(lock, _BUSY_S):
            raise AtollError(f"{folder / RECORD} was held by another process for {_BUSY_S:.0f} s: try again")
        cluster = dataclasses.replace(load(folder), **fields)
        save(folder, cluster)
    finally:
        os.close(lock)
    return cluster


def open_lock(path: Path) -> int:
    """A descriptor of a file in a cluster's folder that is there to be locked.

    Raises:
        FileNotFoundError: the folder is not there.
        ConfigError: something that is no file is called so.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (IsADirectoryError, NotADirectoryError) as error:
        raise ConfigError(f"{path} can't be locked ({error.strerror}): {removes(path.parent.name)}") from None


def take_lock(lock: int, patience_s: float) -> bool:
    """Get the lock that a descriptor is for, if nobody else keeps it for longer than that.

    Whoever only looks whether it is held has it for an instant.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)


def check_owner(folder: Path) -> None:
    """See to it that a cluster's files are its user's: what root left there its supervisor could not read.

    Raises:
        ConfigError: we are somebody else.
    """
    try:
        owner = os.stat(folder).st_uid
        if owner == os.geteuid():
            return
        with tempfile.TemporaryFile(dir=folder) as file:
            if os.fstat(file.fileno()).st_uid == owner:  # a file system on which everything is somebody's
                return
    except FileNotFoundError:
        return
    except PermissionError:
        pass
    try:
        user = pwd.getpwuid(owner).pw_name
    except KeyError:
        user = f"user id {owner}"
    raise ConfigError(f"cluster {folder.name} belongs to {user}: run as them, or use another ATOLL_HOME")
