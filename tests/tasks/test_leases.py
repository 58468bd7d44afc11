"""GPUs are handed out: who has one has it alone, over jobs, clusters, pools, users and state folders of one machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import atoll as sky
import leaks
from atoll.agent import leases
from atoll.providers.base import NodeRequest
from atoll.providers.gpus import local_gpus
from atoll.tasks.spec import JobStatus
from fake_gpus import give_gpus
from local_cluster import LocalCluster, descendants, until

__all__ = ["give_gpus"]

SUCCEEDED = JobStatus.SUCCEEDED
GPU = {"accelerator": "L4", "num_accelerators": 1}
FREE_S = 5.0  # a lease survives its owner by no more
TELL = "echo sees $CUDA_VISIBLE_DEVICES of $SKYPILOT_NUM_GPUS_PER_NODE;"
GiveGpus = Callable[..., list[str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder for one test; the supervisors of its clusters have ended afterwards."""
    folder = tmp_path / "home"
    monkeypatch.setenv("ATOLL_HOME", str(folder))
    yield folder
    for cluster in folder.glob("clusters/*"):
        there = LocalCluster(cluster, sky.tasks.control.LocalControl(cluster))  # type: ignore[attr-defined]
        there.control.cancel(None)
        there.wait_until_idle()


def seen(log: str) -> list[str]:
    """What processes saw of GPUs, by line."""
    return re.findall(r"sees (\S*) ?of \d", log)


def holding(cluster: LocalCluster, **spec: object) -> tuple[int, str]:
    """A job that has its GPUs until it is cancelled, and what it sees."""
    job = cluster.submit(f"{TELL} sleep 600", **{**GPU, **spec})
    cluster.wait_for(job, "sees ")
    return job, seen(cluster.log(job))[0]


# ---------------------------------------------------------------------------------------------------- the lock itself
def test_a_lease_is_one_owners_and_ends_with_it(give_gpus: GiveGpus) -> None:
    gpus = give_gpus(3)
    one, other = leases.Leases(), leases.Leases()
    assert one.lease(gpus, 2, "one") == {}
    assert one.gpus == gpus[:2]
    assert other.lease(gpus, 2, "other") == {gpus[0]: "one", gpus[1]: "one"}
    assert other.gpus == []
    assert leases.holders(gpus) == {gpus[0]: "one", gpus[1]: "one"}
    assert other.lease(gpus, 1, "other") == {}
    assert other.gpus == gpus[2:]
    one.release()
    assert leases.holders(gpus) == {gpus[2]: "other"}
    other.release()


def test_users_share_the_files(give_gpus: GiveGpus) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    gpus = give_gpus(1)
    mine = leases.Leases()
    assert mine.lease(gpus, 1, "root\x1b[31m") == {}
    code = f"{Path(leases.__file__).read_text()}\nos.setuid(65534)\nprint(Leases().lease({gpus!r}, 1, 'nobody'))"

    def nobody() -> str:
        return subprocess.run([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout

    assert nobody() == f"{{{gpus[0]!r}: 'root[31m'}}\n"
    mine.release()
    assert nobody() == "{}\n"


# ---------------------------------------------------------------------------------------------------- jobs and clusters
def test_two_jobs_of_a_node_see_different_gpus_and_one_without_sees_none(home: Path, give_gpus: GiveGpus) -> None:
    gpus = give_gpus(2)
    cluster = LocalCluster.make(home, accelerator="L4", num_accelerators=2)
    _, first = holding(cluster)
    _, second = holding(cluster, env={"CUDA_VISIBLE_DEVICES": ",".join(gpus)})  # bounds it, and is not what it gets
    assert {first, second} == set(gpus)
    log = cluster.run(TELL)[1]
    assert seen(log) == [""]
    assert "this job requests no GPU and sees none: pass --gpus L4:1 for one" in log


def test_a_run_that_waits_says_for_what_and_other_cards_are_no_answer(
    home: Path, give_gpus: GiveGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = give_gpus(1, more="NVIDIA A100-SXM4-80GB")
    with sky.ComputePool(accelerator="L4", logs="quiet") as pool:
        words = [
            sys.executable,
            "-m",
            "atoll",
            "run",
            "--gpus",
            "L4:1",
            "--no-python",
            "sh",
            "-c",
            "echo $CUDA_VISIBLE_DEVICES",
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        run = subprocess.Popen(words, **pipes)  # type: ignore[call-overload]
        line = next(line for line in run.stderr if "Waiting for GPUs" in line)
        assert f"1 of 1 GPUs requested, 0 free: GPU 0 (L4) is held by pool {pool.id}" in line
    out, err = run.communicate(timeout=60)
    assert gpus[0] in out, err
    cluster = LocalCluster.make(home, **GPU)
    status, log = cluster.run(TELL, base_env={"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "1"}, **GPU)
    assert status is JobStatus.FAILED_DRIVER
    assert "1 × L4:1 can't be had: this machine has 0 of them that CUDA_VISIBLE_DEVICES='1' leaves" in log


def test_nodes_are_packed(home: Path, give_gpus: GiveGpus) -> None:
    gpus = give_gpus(2)
    cluster = LocalCluster.make(home, num_nodes=2, accelerator="L4", num_accelerators=1)
    tell = f"{TELL} echo at $SKYPILOT_NODE_IPS=$SKYPILOT_NODE_RANK; sleep 600"
    jobs = [cluster.submit(tell, **GPU) for _ in range(2)]
    for job, at in zip(jobs, ("127.0.0.1=0", "127.0.0.2=0"), strict=True):
        cluster.wait_for(job, f"at {at}")
    assert [seen(cluster.log(job)) for job in jobs] == [[gpu] for gpu in gpus]
    both = cluster.submit(TELL, num_nodes=2, **GPU)
    cluster.wait_for(both, "waiting for 1 × L4 on 2 nodes: jobs 1, 2 have 2 of the cluster's 2")
    for job in jobs:
        cluster.control.cancel([job])
    status, log = cluster.follow(both)
    assert (status, sorted(seen(log))) == (SUCCEEDED, sorted(gpus))


def test_a_sweep_of_one_gpu_jobs_fills_a_node_of_eight(home: Path, give_gpus: GiveGpus) -> None:
    gpus = give_gpus(8)
    cluster = LocalCluster.make(home, accelerator="L4", num_accelerators=8)
    sweep = {"group": "sweep", "num_in_group": 10, "parallel": 10, **GPU}
    jobs = [cluster.submit(f"{TELL} sleep 600", rank_in_group=rank, **sweep) for rank in range(10)]
    for job in jobs[:8]:
        cluster.wait_for(job, "sees ")
    assert sorted(seen(cluster.log(job))[0] for job in jobs[:8]) == sorted(gpus)
    held = "jobs 1, 2, 3, 4, 5, 6, 7, 8 have 8 of the cluster's 8"
    reasons = [cluster.control.job(job).reason for job in jobs[8:]]
    assert reasons == [
        f"waiting for 1 × L4 on 1 node: {held}",
        "waiting for its turn: jobs before it wait for accelerators",
    ]
    free = seen(cluster.log(jobs[3]))[0]
    cluster.control.cancel([jobs[3]])
    cluster.wait_for(jobs[8], f"sees {free} of 1")


def test_clusters_and_pools_of_a_machine_share_its_gpus(
    home: Path, give_gpus: GiveGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = give_gpus(2)
    mine = LocalCluster.make(home, "mine", accelerator="L4", num_accelerators=1)
    theirs = LocalCluster.make(home / "of-another", "theirs", accelerator="L4", num_accelerators=2)
    job, first = holding(mine)
    with sky.ComputePool(accelerator="L4:1", logs="quiet") as pool:
        (second,) = pool.run(os.getenv, "CUDA_VISIBLE_DEVICES")
        assert {first, second} == set(gpus)
        waits = theirs.submit(TELL, accelerator="L4", num_accelerators=2)
        theirs.wait_for(waits, "Waiting for GPUs. head: 2 of 2 GPUs requested, 0 free: ")
        log = theirs.log(waits)
        assert f"(L4) is held by job {job} of cluster mine (pid {mine.supervisor_pid()} on " in log
        assert f"(L4) is held by pool {pool.id} (pid {os.getpid()} on " in log
        with pytest.raises(sky.ProvisionError, match="GPUs requested, 0 free: GPU 0") as caught:
            sky.ComputePool(accelerator="L4:1", logs="quiet").up()
        assert f"held by pool {pool.id} (pid {os.getpid()}" in str(caught.value)
    mine.control.cancel([job])
    status, log = theirs.follow(waits)
    assert (status, seen(log)) == (SUCCEEDED, [",".join(gpus)])
    theirs.wait_until_idle()


@pytest.mark.parametrize("owner", ["the supervisor", "the agent", "the pool's process"])
def test_a_lease_ends_with_its_owner(home: Path, give_gpus: GiveGpus, owner: str) -> None:
    gpus = give_gpus(1)
    if owner == "the pool's process":
        code = "import atoll as sky; p = sky.ComputePool(accelerator='L4').up(); print('up', flush=True); input()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        driver = subprocess.Popen([sys.executable, "-c", code], **pipes)  # type: ignore[call-overload]
        assert driver.stdout.readline() == b"up\n"
        killed = driver.pid
    else:
        cluster = LocalCluster.make(home, **GPU)
        holding(cluster)
        killed = cluster.supervisor_pid()
        if owner == "the agent":
            (killed,) = (pid for pid in descendants(killed) if leaks._command(pid).startswith("atoll-agent"))
    assert leases.holders(gpus)
    os.kill(killed, signal.SIGKILL)
    died = time.monotonic()
    until(lambda: not leases.holders(gpus), "its GPU is free", 3 * FREE_S)
    assert time.monotonic() - died < FREE_S
    if owner == "the pool's process":
        driver.communicate()
    else:
        cluster.control.cancel(None)
        until(lambda: all(row.status.ended for row in cluster.control.queue()), "the job has ended")


# ---------------------------------------------------------------------------------------------------- the shell's words
def test_the_callers_devices_bound_what_is_leased(
    home: Path, give_gpus: GiveGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = give_gpus(4)
    for visible, expected in (("3,1", [gpus[3], gpus[1]]), (gpus[2], [gpus[2]])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with sky.ComputePool(logs="quiet") as pool:
            assert pool.world_size == len(expected)
            assert set(pool.run(os.getenv, "CUDA_VISIBLE_DEVICES")) == {",".join(expected)}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # mistyped
    (line,) = sky.Local().plan(NodeRequest(accelerators=(("L4", 1),), workers_per_node="auto")).lines
    assert line == "1 × L4:1 simulated on CPU: this machine has no GPU that CUDA_VISIBLE_DEVICES='7' leaves"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with sky.ComputePool(logs="quiet") as pool:
        assert pool.run(os.getenv, "CUDA_VISIBLE_DEVICES") == [""]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with sky.ComputePool(accelerator="L4", env={"CUDA_VISIBLE_DEVICES": "2"}, logs="quiet") as pool:
        assert pool.run(os.getenv, "CUDA_VISIBLE_DEVICES") == [gpus[2]]
    with pytest.raises(sky.ProvisionError, match="CUDA_VISIBLE_DEVICES='2' leaves 1 of its GPUs, and 2 are requested"):
        sky.ComputePool(accelerator="L4:2", env={"CUDA_VISIBLE_DEVICES": "2"}, logs="quiet").up()


def test_slices_of_a_card_are_leased_by_their_own_name(give_gpus: GiveGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, one, two = give_gpus(1, "NVIDIA A100-SXM4-80GB", slices=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{two},{one}")
    assert [(gpu.uuid, gpu.name) for gpu in local_gpus()] == [(two, "A100"), (one, "A100")]
    with sky.ComputePool(accelerator="A100:2", logs="quiet") as pool:
        assert pool.run(os.getenv, "CUDA_VISIBLE_DEVICES") == [f"{two},{one}"] * 2


def atoll(*words: str) -> str:
    """What a command that succeeds prints."""
    done = subprocess.run([sys.executable, "-m", "atoll", *words], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_commands_honour_the_callers_devices(home: Path, give_gpus: GiveGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = give_gpus(3)
    words = ("--no-python", "sh", "-c", "echo sees $CUDA_VISIBLE_DEVICES of $WORLD_SIZE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert seen(atoll("run", *words)) == [f"{gpus[2]},{gpus[0]}"] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus[1])
    assert seen(atoll("launch", "-c", "c", "--gpus", "L4:1", TELL)) == [gpus[1]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the supervisor may be the one that the first launch started
    assert seen(atoll("exec", "c", "--gpus", "L4:1", TELL)) == [gpus[0]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert seen(atoll("run", *words)) == [""]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    cluster = LocalCluster.make(home, "held", **GPU)
    holding(cluster, env={"CUDA_VISIBLE_DEVICES": "1"})
    rows = json.loads(atoll("gpus", "-o", "json"))
    assert [row["held_by"] is not None for row in rows] == [False, True, False]
    assert "job 1 of cluster held (pid " in rows[1]["held_by"]
