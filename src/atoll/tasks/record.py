"""A cluster's record, ``cluster.json`` in its folder, as supervisor and clients change it. Standard library only."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pwd
import tempfile
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.paths import write_atomic
from atoll.tasks.spec import ClusterSpec

RECORD = "cluster.json"


def load(folder: Path) -> ClusterSpec:
    """The record of the cluster in ``folder``.

    Raises:
        LookupError: there is none.
        ConfigError: its file can't be read.
    """
    path = folder / RECORD
    try:
        cluster = ClusterSpec.from_json(json.loads(path.read_bytes()))
        if cluster.name != folder.name:
            raise ValueError(f"it is of a cluster {cluster.name}")
        return cluster
    except FileNotFoundError:
        raise LookupError(f"no cluster {folder.name!r}") from None
    except (ValueError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove the file, then launch the cluster again") from None


def save(folder: Path, cluster: ClusterSpec) -> None:
    """Write the record, so that it is never seen half written."""
    write_atomic(folder / RECORD, json.dumps(cluster.to_json(), indent=1).encode())


def change(folder: Path, **fields: Any) -> ClusterSpec:
    """Change some fields of the record; one process at a time.

    Raises:
        LookupError: there is no such cluster.
        ConfigError: its file can't be read.
    """
    lock = os.open(folder / "record.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = dataclasses.replace(load(folder), **fields)
        save(folder, cluster)
    finally:
        os.close(lock)
    return cluster


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
