"""Past jobs move with the supervisor from head to head: none is lost, whatever fails, and nothing runs on unseen."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core.errors import AtollError
from atoll.tasks import control, supervisor
from atoll.tasks.spec import JobStatus
from local_cluster import LocalCluster, stop, until
from testbed.fixtures import MakeBed

ATOLL = str(Path(sys.executable).parent / "atoll")
PYTHON = os.path.realpath(sys.executable)
FOLDER = "/home/sky/.atoll/clusters/c"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    return tmp_path


def declare(*hosts: str) -> None:
    config = Path(os.environ["ATOLL_HOME"], "config.toml")
    config.write_text(f"[ssh.lab]\nhosts = {json.dumps(hosts)}\npython = {json.dumps(PYTHON)}\n")


def atoll(*words: str, code: int = 0) -> str:
    done = subprocess.run([ATOLL, *words], capture_output=True, text=True, timeout=100)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert "Traceback" not in said, said
    return said


def launch(*words: str, code: int = 0) -> str:
    return atoll("launch", "-c", "c", "--infra", "ssh/lab", *words, code=code)


def numbers() -> list[int]:
    return [row["job_id"] for row in json.loads(atoll("queue", "c", "-o", "json"))]


@pytest.mark.timeout(300)  # many commands, on a machine that may be busy
def test_jobs_of_a_cluster_that_goes_from_head_to_head(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(2, shared_home=False)
    second = bed.hosts[1]
    declare("h1")
    launch("echo said by 1")
    atoll("down", "c")
    declare("sky@h1")  # the same head
    launch("true")
    assert numbers() == [2, 1]
    atoll("down", "c")

    declare("h2")
    second.run("touch /home/sky/file", user="sky")
    task = tmp_path / "task.yaml"
    task.write_text(f"file_mounts: {{~/file/in: {task}}}\nrun: 'true'\n")
    assert "its past jobs and their logs" in launch(str(task), code=100)  # which fails later
    assert numbers() == [2, 1]
    second.run(f"mount -t tmpfs -o size=16k,mode=777 none {FOLDER}")
    said = launch("true", code=100)
    assert re.search(rf"\(h2\): {FOLDER}.*: No space left on device: free some space there", said), said
    second.run(f"umount {FOLDER}")
    launch("-d", "exec sleep 1000")
    assert atoll("logs", "c", "1").count("said by 1\n") == 1
    until(lambda: "sleep 1000" in second.command_lines(), "job 3 runs")

    second.run("nft 'add table inet f; add chain inet f i { type filter hook input priority 0; }; "
               "add rule inet f i tcp dport 22 reject with tcp reset'")  # fmt: skip
    assert f"{FOLDER} stays there" in atoll("down", "c")
    declare("sky@h1")
    said = launch("true")
    assert "h2: refuses connections" in said
    assert "stay there; numbers go on without them" in said
    second.run("nft delete table inet f")
    atoll("down", "c")
    declare("h2")
    said = launch("pgrep -fx 'sleep 1000' || echo alone")
    assert "job 3 of cluster c still ran on h2 and was ended" in said
    assert re.search(rf"jobs of an earlier cluster c were there: they are in {FOLDER}/jobs-[-0-9]+ now", said)
    assert ") alone\n" in said
    assert numbers() == [4, 3, 2, 1]

    # Nobody can end it in order.
    launch("-d", "exec sleep 1000")
    until(lambda: "sleep 1000" in second.command_lines(), "job 5 runs")
    second.run(f"rm {FOLDER}/jobs.db*")
    assert "is down and forgotten" in atoll("down", "--purge", "c")
    for host in bed.hosts:
        assert host.run("ls /home/sky/.atoll/clusters 2>/dev/null || true") == ""
        until(lambda host=host: not host.command_lines(), f"nothing runs on {host.name}")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_client_killed_on_the_way_and_a_full_disk_here(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(2, shared_home=False)
    second = bed.hosts[1]
    declare("h1")
    launch("head -c 1500000 /dev/urandom | base64 -w 100; echo said by 1")
    atoll("down", "c")
    declare("h2")

    # Jobs pass through a file of this machine, whose disk is full.
    here = Path(os.environ["ATOLL_HOME"], "clusters", "c")
    kept = shutil.copytree(here, tmp_path / "kept")
    full = f"mount -t tmpfs -o size=256k,mode=700 none {here} && cp -a {kept}/. {here} && exec {ATOLL} launch -c c"
    full += " --infra ssh/lab true"
    done = subprocess.run(["unshare", "-m", "sh", "-c", full], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "past jobs of cluster c can't be brought to h2: this machine: " in done.stderr, done.stderr
    assert "No space left on device: free some space there" in done.stderr
    assert "Traceback" not in done.stderr

    # The client dies while they arrive.
    second.slow(8)
    client = subprocess.Popen([ATOLL, "launch", "-c", "c", "--infra", "ssh/lab", "true"], stdout=subprocess.DEVNULL)
    try:
        until(lambda: ".arriving" in second.run(f"ls -A {FOLDER} || true"), "jobs arrive", within_s=60)
    finally:
        client.kill()
        client.wait(10)
    second.slow(10_000)
    until(lambda: not second.command_lines(), "nothing runs on h2", within_s=30)
    launch("true")
    assert numbers() == [2, 1]
    assert "said by 1" in atoll("logs", "--tail", "2", "c", "1")
    assert ".arriving" not in second.run(f"ls -A {FOLDER}")


def test_a_supervisor_whose_store_was_removed_ends_its_jobs(home: Path) -> None:
    cluster = LocalCluster.make(home)
    job = cluster.submit("exec sleep 1000")
    cluster.wait_for_status(job, JobStatus.RUNNING)
    for path in cluster.folder.glob("jobs.db*"):
        path.unlink()
    cluster.wait_until_idle()
    assert "was removed or replaced" in cluster.log(job)
    assert cluster.control.queue() == []


def test_a_supervisor_that_does_not_end_is_killed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_END_S", 0.5)
    cluster = LocalCluster.make(home)
    job = cluster.submit("exec sleep 1000")
    cluster.wait_for_status(job, JobStatus.RUNNING)
    stop(cluster.supervisor_pid())
    with pytest.raises(AtollError, match="is stopped: kill -CONT"):
        cluster.control.remove_nodes()
    assert cluster.control.end() == [job]
    assert not supervisor.is_running(cluster.folder)
    assert cluster.control.job(job).status.ended
