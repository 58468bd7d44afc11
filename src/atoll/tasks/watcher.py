"""Looks after a cluster inside the job that holds its nodes: an autostop that is due gives them back.

Elsewhere whoever looks at an idle cluster does that; nodes that cost something can't wait for somebody to look.
Standard library only.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.tasks import clusters, lifecycle, record
from atoll.tasks.spec import ClusterStatus

_LOOK_S = 20.0
_LAUNCH_S = 1800.0  # from a launch to its first job packages are installed and files copied


def main(folder_name: str) -> None:
    """Entry: look until the cluster is not up any more, unless another process does."""
    folder = Path(folder_name)
    if not record.take_lock(record.open_lock(folder / "watcher.lock"), 0.0):
        return
    while _is_up(folder):
        time.sleep(_LOOK_S)


def _is_up(folder: Path) -> bool:
    try:
        cluster = record.load(folder)
        if time.time() < cluster.created_s + _LAUNCH_S and not clusters.control_of(cluster).queue():
            return cluster.status is ClusterStatus.UP
        return ClusterStatus.UP == cluster.status == lifecycle.refresh(cluster).status
    except LookupError:
        return False
    except (AtollError, OSError) as error:  # the controller is busy, a disk is full: looked at again
        os.write(2, f"watcher: {error}\n".encode(errors="replace"))
        return True
