"""Looks after a cluster inside the job that holds its nodes: an autostop that is due gives them back.

Elsewhere whoever looks at an idle cluster does that; nodes that cost something can't wait for somebody to look.
Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.tasks import clusters, lifecycle, record, supervisor
from atoll.tasks.control import LocalControl
from atoll.tasks.spec import ClusterStatus
from atoll.tasks.store import Store

_LOOK_S = 20.0
_RESTART_S = 1.0  # one that ends at once, again and again, costs little
_LAUNCH_S = 1800.0  # from a launch to its first job packages are installed and files copied


def guard(folder_name: str) -> None:
    """Entry: start a supervisor again where one ends before its managed jobs do, unless another process does."""
    folder = Path(folder_name)
    if not record.take_lock(record.open_lock(folder / "guard.lock"), 0.0):
        return
    while True:
        lock = supervisor.open_lock(folder)
        fcntl.flock(lock, fcntl.LOCK_SH)  # once none runs any more
        os.close(lock)
        with Store(folder) as store:
            if not any(job.spec.managed is not None for job in store.jobs(unfinished=True)):
                return
        time.sleep(_RESTART_S)
        LocalControl(folder).resume()


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
