"""Looks after a cluster inside the job that holds its nodes: an autostop that is due gives them back.

And of one whose process elsewhere may be killed, as `atoll run` on Slurm; and of one whose nodes are rented: it has
them stay as long as the cluster is up, and takes them down once they have cost what they may. Elsewhere whoever looks
at an idle cluster does its autostop; nodes that cost something can't wait for somebody to look.
Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.providers import registry
from atoll.tasks import clusters, lifecycle, record, supervisor
from atoll.tasks.control import LocalControl
from atoll.tasks.spec import ClusterSpec, ClusterStatus
from atoll.tasks.store import Store

_LOOK_S = 30.0
_RESTART_S = 1.0  # one that ends at once, again and again, costs little
_STEP_S = 0.5  # until it notices that the cluster is not up any more
_SAVE_S = 900.0  # for jobs that save
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
        until = time.monotonic() + _LOOK_S
        while time.monotonic() < until and _says_up(folder):
            time.sleep(_STEP_S)


def _says_up(folder: Path) -> bool:
    try:
        return record.load(folder).status is ClusterStatus.UP
    except (LookupError, AtollError, OSError):
        return False


def _is_up(folder: Path) -> bool:
    try:
        cluster = record.load(folder)
        if cluster.status is ClusterStatus.UP and cluster.allocation.is_rented:
            registry.of(cluster.allocation).keep(cluster.allocation)
            if cluster.is_spent:
                _end_spent(cluster)
                return False
        if time.time() < cluster.created_s + _LAUNCH_S and not clusters.control_of(cluster).queue():
            return cluster.status is ClusterStatus.UP
        return ClusterStatus.UP == cluster.status == lifecycle.refresh(cluster, max_age_s=_LOOK_S / 3).status
    except LookupError:
        return False
    except (AtollError, OSError) as error:  # the controller is busy, a disk is full: looked at again
        os.write(2, f"watcher: {error}\n".encode(errors="replace"))
        return True


def _end_spent(cluster: ClusterSpec) -> None:
    """Take down a cluster that has cost what it may; its jobs get SIGTERM first, and time to save."""
    why = f"${cluster.allocation.spent:.2f} were spent of --max-cost {cluster.max_cost:g}, so it was taken down"
    os.write(2, f"watcher: {why}\n".encode())
    control = clusters.control_of(cluster)
    for job_id in control.cancel(None):
        control.wait(job_id, _SAVE_S)
    lifecycle.down(cluster.name)
    record.change(clusters.folder_of(cluster.name), notes=(why,))
