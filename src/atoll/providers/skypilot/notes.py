"""What is noted of a cluster on this machine, beside its record: a launch that is killed may have none yet.

And where the entries for ssh lie.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.core.paths import write_atomic
from atoll.providers.base import Allocation
from atoll.providers.skypilot import environment

_FRESH_S = 45.0  # what SkyPilot said of a cluster is believed for so long


def path_of(allocation: Allocation) -> Path:
    """The file of a cluster."""
    return environment.folder() / "clusters" / f"{allocation.settings['name']}.json"


def read(allocation: Allocation) -> dict[str, Any]:
    """What is noted; nothing where that is damaged, too."""
    try:
        return dict(json.loads(path_of(allocation).read_bytes()))
    except (OSError, ValueError):
        return {}


def write(allocation: Allocation, more: Mapping[str, Any]) -> None:
    """Note more."""
    path = path_of(allocation)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(path, json.dumps({**read(allocation), **more}).encode())


def begun_request(allocation: Allocation) -> dict[str, Any] | None:
    """The request of a launch of the same name that was killed, unless it was written down in a record meanwhile."""
    known = read(allocation)
    return {name: known[name] for name in ("request", "guard")} if known.get("request") else None


def is_fresh(allocation: Allocation) -> bool:
    """Has SkyPilot been asked just now whether the machines are there?"""
    return time.time() - float(read(allocation).get("seen_s", 0.0)) < _FRESH_S


def ssh_folder() -> Path:
    """Where the entries for ssh lie, a file for each cluster."""
    return environment.folder() / "ssh"


def ssh_config() -> Path:
    """The ssh config that has the entries of every cluster."""
    path = ssh_folder() / "config"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            write_atomic(path, f'Include "{ssh_folder()}/*.conf"\n'.encode())
    return path
