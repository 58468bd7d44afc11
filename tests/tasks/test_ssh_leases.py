"""GPUs of ssh hosts are handed out as this machine's are: over jobs, clusters of several state folders, and pools."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import atoll as sky
from atoll.agent.process_tree import command_line
from local_cluster import until
from testbed.fixtures import MakeBed
from testbed.hosts import Host

pytestmark = pytest.mark.timeout(300)  # many commands, on a machine that may be busy
TELL = "echo sees $CUDA_VISIBLE_DEVICES of $SKYPILOT_NUM_GPUS_PER_NODE;"
FREE_S = 5.0  # a lease survives its owner by no more


def atoll(*words: str, home: Path | None = None) -> str:
    env = {**os.environ, **({} if home is None else {"ATOLL_HOME": str(home)})}
    done = subprocess.run([sys.executable, "-m", "atoll", *words], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def said(host: Host, cluster: str, job: int, text: str) -> list[str]:
    """Waits until a job's log has some text; what the job saw of GPUs. Its supervisor runs on the host."""
    log = ""

    def look() -> bool:
        nonlocal log
        log = host.run(f"cat /home/sky/.atoll/clusters/{cluster}/jobs/{job}/run.log || true")
        return text in log

    until(look, f"{text!r} in the log of job {job} of {cluster}")
    return re.findall(r"sees (\S*) of", log)


def is_free(host: Host, gpu: str) -> bool:
    return host.run(f"flock -n -s /dev/shm/atoll-gpus/{gpu} echo free || true") == "free\n"


@pytest.mark.long
def test_jobs_clusters_and_pools_share_the_gpus_of_a_host(make_bed: MakeBed) -> None:
    (host,) = make_bed(1).hosts
    gpus = host.give_gpus(2)
    mine = Path(os.environ["ATOLL_HOME"])
    other = mine / "of-another"
    other.mkdir()
    for home in (mine, other):
        python = json.dumps(os.path.realpath(sys.executable))
        (home / "config.toml").write_text(f'[ssh.lab]\nhosts = ["{host.name}"]\npython = {python}\n')
    hold, on_host = f"{TELL} sleep 600", ("--infra", "ssh/lab")
    atoll("launch", "-d", "-c", "pair", *on_host, "--gpus", "L4:2", "true")
    for _ in range(2):
        atoll("exec", "-d", "pair", "--gpus", "L4:1", hold)
    first, second = (said(host, "pair", job, "sees ")[0] for job in (2, 3))
    assert {first, second} == set(gpus)

    atoll("launch", "-d", "-c", "theirs", *on_host, "--gpus", "L4:1", hold, home=other)
    said(host, "theirs", 1, "1 of 2 GPUs requested, 0 free: GPU 0 (L4) is held by job ")
    pool = sky.ComputePool(sky.SSH(hosts=[host.name], python=sys.executable), accelerator="L4", logs="quiet")
    with pytest.raises(sky.ProvisionError, match=r"0 free: .*is held by job 3 of cluster pair \(pid \d+ on h1, user"):
        pool.up()
    atoll("cancel", "-y", "pair", "2")
    assert said(host, "theirs", 1, "sees ") == [first]
    atoll("cancel", "-y", "pair", "3")
    with pool:
        assert pool.run(os.getenv, "CUDA_VISIBLE_DEVICES") == [second]

    supervisors = [pid for pid in host.pids() if b"tasks.dispatcher" in command_line(pid)]
    assert supervisors
    assert not is_free(host, first)
    for pid in supervisors:
        os.kill(pid, 9)
    died = time.monotonic()
    until(lambda: is_free(host, first), "the GPU of a supervisor that was killed is free", 3 * FREE_S)
    assert time.monotonic() - died < FREE_S
    atoll("down", "-y", "theirs", home=other)
    atoll("down", "-y", "pair")
