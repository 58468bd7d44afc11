"""What Slurm said last of all jobs of the user: one answer for every cluster, pool and process that wants to know."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator

from atoll.core.errors import ProvisionError
from atoll.core.paths import atoll_home, write_atomic
from atoll.providers.slurm.answers import JobNow

# Jobs of the user alone, each followed by the names of the nodes that it has. One question to Slurm's controller. On a
# login node that can start nothing more it fails: no answer would mean that there are no jobs.
COMMAND = r"""jobs=$(scontrol --all -o show job) && me=$(id -u) || exit
case "$jobs" in *JobId=*|"No jobs "*) ;; *) echo "its answer tells no jobs: '$jobs'" >&2; exit 1 ;; esac
mine=$(printf '%s\n' "$jobs" | grep -e " UserId=[^ ]*($me) "); [ $? -le 1 ] || exit
[ -z "$mine" ] || printf '%s\n' "$mine" | while read -r job; do
printf '%s\n' "$job"; case "$job" in *" JobState=RUNNING "*)
nodes="${job##* NodeList=}"; nodes="${nodes%% *}"
case "$nodes" in *[[,]*) scontrol show hostnames "$nodes" || exit ;; *) printf '%s\n' "$nodes" ;; esac ;; esac; done"""
_WAIT_S = 40.0  # for the answer of somebody else, who may have been stopped meanwhile, with Ctrl-Z say


def jobs_at(login: str, ask: Callable[[], str], max_age_s: float) -> dict[str, JobNow]:
    """Jobs by their number, as Slurm told them at most so long ago, in seconds, whoever asked; 0: after this call.

    Args:
        login: names the cluster, by how it is reached.
        ask: runs ``COMMAND`` there.

    Raises:
        ProvisionError: Slurm can't be asked.
    """
    oldest_s = time.time() - max_age_s
    folder = atoll_home() / "slurm"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"jobs-{hashlib.blake2b(login.encode(), digest_size=6).hexdigest()}"
    with _alone(f"{path}.lock"):  # whoever waits here gets the answer of who asks
        said = None
        with contextlib.suppress(OSError, ValueError):
            said = json.loads(path.read_bytes())
        if said is None or not oldest_s <= said["at_s"] <= time.time():
            said = {"at_s": time.time(), "jobs": "", "error": ""}
            try:
                said["jobs"] = ask()
            except ProvisionError as error:
                said["error"] = str(error)
            with contextlib.suppress(OSError):  # a full disk
                write_atomic(path, json.dumps(said).encode())
    if said["error"]:
        raise ProvisionError(said["error"])
    return JobNow.parse_all(said["jobs"])


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """Alone where that is possible: else some questions are asked twice."""
    with contextlib.ExitStack() as held:
        # A full disk, another user's file, a file system without locks.
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            held.callback(os.close, lock)
            until_s = time.monotonic() + _WAIT_S
            while time.monotonic() < until_s:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.05)
        yield
