"""Slurm, its own daemons on hosts of the testbed: tasks, runs and pools with only the infra changed."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.examples.test_austen import RECIPE, ROOT, SMALL
from tests.gang.test_death import small_cgroup  # noqa: F401 - a fixture
from tests.pools import eventually

import atoll as sky
from atoll.agent import keeper
from atoll.core.errors import ConfigError, ProvisionError
from atoll.providers import registry
from atoll.providers.base import Allocation, AllocationState, NodeRequest
from atoll.providers.slurm import queue as slurm_queue
from atoll.providers.slurm.answers import JobNow, free_gpus, is_kind
from atoll.providers.slurm.submission import seconds_of
from atoll.providers.upkeep import wait_until_ready
from atoll.tasks import api, clusters, placing
from atoll.tasks.spec import ClusterSpec
from testbed.fixtures import MakeBed
from testbed.hosts import USER, Host, Testbed
from testbed.slurm import slurm_missing, start_slurm

TINY = """
name = "tiny"
model = {layers = 1, dim = 16, heads = 2, kv_heads = 2, hidden_dim = 32, max_seq_len = 32}
data = {path = "words.txt", tokenizer = "bytes", document_end = ""}
train = {steps = 4, seq_len = 16, global_batch = 4, micro_batch = 2}
schedule = {kind = "constant", warmup = 1}
checkpoint = {every = 2}
metrics = {plot = false}
"""
pytestmark = pytest.mark.timeout(300)  # many commands, on a machine that may be busy
ATOLL = str(Path(sys.executable).with_name("atoll"))


def make_slurm(make_bed: MakeBed, num_hosts: int = 3, **how: bool) -> Testbed:
    """The login node and controller h1, and others with two GPUs each; ``slurm/lab`` is known."""
    lacking = slurm_missing()
    if lacking is not None:
        pytest.skip(lacking)
    bed = make_bed(num_hosts, **how)
    start_slurm(bed)
    configure()
    return bed


def configure(*lines: str, login: str = "h1") -> None:
    """Declare the cluster, with further settings."""
    usual = (
        "[slurm.lab]",
        f'login = "{login}"',
        *([] if any("grace_s" in line for line in lines) else ["grace_s = 5.0"]),
    )
    Path(os.environ["ATOLL_HOME"], "config.toml").write_text("\n".join((*usual, *lines)) + "\n")


@pytest.fixture
def slurm(make_bed: MakeBed) -> Testbed:
    """With two nodes."""
    return make_slurm(make_bed)


def atoll(*words: str, code: int = 0, cwd: Path | None = None, timeout_s: float = 90.0) -> str:
    """What a command prints, standard error behind its output; it has to end with that exit code."""
    done = subprocess.run([ATOLL, *words], capture_output=True, text=True, timeout=timeout_s, cwd=cwd)
    print(done.stdout, done.stderr)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def queue(bed: Testbed) -> list[str]:
    """Names of the jobs that Slurm runs or has waiting."""
    said = bed.hosts[0].run("squeue -h -t PENDING,RUNNING -o %j", user=USER)
    return said.split()


def test_the_life_of_a_cluster(slurm: Testbed, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("shipped\n")
    (tmp_path / "task.yaml").write_text(
        "num_nodes: 2\nworkdir: .\nresources:\n  accelerators: L4:2\n"
        "run: cat note.txt; echo rank $SKYPILOT_NODE_RANK on $(hostname) sees $CUDA_VISIBLE_DEVICES\n"
    )
    said = atoll("launch", "-c", "demo", "--infra", "slurm/lab", "task.yaml", cwd=tmp_path)
    assert said.count("shipped") == 2
    assert "rank 0 on h2 sees GPU-" in said
    assert "rank 1 on h3 sees GPU-" in said
    assert queue(slurm) == ["atoll-demo"]
    assert "again" in atoll("exec", "demo", "echo again")
    assert atoll("ssh", "demo/worker1", "--", "hostname | tr h H; exit 3", code=3).startswith("H3\n")
    assert atoll("ssh", "demo", "--", "printf", "%s.", "a b") == "a b."
    held = clusters.load("demo").allocation
    assert "6006:h3:6006" in registry.of(held).login_command(held, 1, ["-L", "6006:127.0.0.1:6006"], [])
    assert "SUCCEEDED" in atoll("queue", "demo")
    atoll("down", "demo")
    assert queue(slurm) == []
    assert "shipped" in atoll("logs", "demo", "1")
    for host in slurm.hosts[1:]:
        eventually(lambda host=host: not [line for line in host.command_lines() if "atoll" in line], "nothing is left")


def test_a_script_and_a_pool(slurm: Testbed, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    )
    said = atoll("run", "--infra", "slurm/lab", "--nodes", "2", "--nproc", "2", "script.py", cwd=tmp_path)
    assert "rank 3 of 4" in said
    assert queue(slurm) == []

    def where(number: int) -> tuple[str, int]:
        return os.uname().nodename, number * int(os.environ["WORLD_SIZE"])

    with sky.ComputePool(provider="slurm/lab", nodes=2, logs="quiet") as pool:
        assert len(queue(slurm)) == 1
        assert sky.compute(where)(21) @ pool == [("h2", 42), ("h3", 42)]
        assert sky.compute(where)(21) >> pool == ("h2", 21)
    eventually(lambda: queue(slurm) == [], "the pool's job is cancelled")


@pytest.mark.long
def test_a_node_lost_a_job_cancelled_and_a_login_node_swept(slurm: Testbed) -> None:
    login, _, worker = slurm.hosts
    atoll("launch", "-d", "-c", "long", "--infra", "slurm/lab", "--num-nodes", "2", "echo begun; sleep 600")
    eventually(lambda: "begun" in atoll("logs", "long", "--no-follow", code=101), "the job runs")
    # Whatever runs on the login node may be ended: the supervisor is in the job.
    login.run(f"pkill -9 -u {USER} || true")
    assert "RUNNING" in atoll("queue", "long")
    worker.power_off()
    said = atoll("logs", "long", code=100)
    assert "h3" in said
    login.run("scancel -u sky")
    eventually(lambda: not login.run("squeue -h"), "Slurm has ended the job", 30.0)
    assert "it was cancelled (scancel)" in atoll("status")
    assert "begun" in atoll("logs", "long", "1", code=100)
    atoll("launch", "-c", "long", "--infra", "slurm/lab", "echo anew")
    atoll("down", "long")


@pytest.mark.long
def test_an_idle_cluster_gives_its_nodes_back_and_a_job_that_waits_says_why(slurm: Testbed) -> None:
    atoll("launch", "-d", "-c", "idle", "--infra", "slurm/lab", "--num-nodes", "2", "-i", "0", "--down", "sleep 1")
    whole = ("--infra", "slurm/lab", "--gpus", "L4:2", "--num-nodes", "2")
    assert "its nodes are busy" in atoll("launch", "-c", "late", *whole, "echo late")
    assert queue(slurm) == ["atoll-late"]
    command = [ATOLL, "launch", "-c", "stuck", *whole, "true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert any("its nodes are busy" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    eventually(lambda: queue(slurm) == ["atoll-late"], "what waited is cancelled")
    atoll("down", "late")


@pytest.mark.long
def test_a_recipe_trains_and_resumes_in_another_job(slurm: Testbed, tmp_path: Path) -> None:
    configure(f"python = {json.dumps(sys.executable)}")
    (tmp_path / "words.txt").write_text("the tide comes in and goes out\n\n" * 200)
    (tmp_path / "tiny.toml").write_text(TINY)
    command = ("train", "tiny.toml", "--infra", "slurm/lab", "--nodes", "2")
    assert "finished: 4 of 4 steps" in atoll(*command, cwd=tmp_path)
    assert queue(slurm) == []
    said = atoll(*command, "--train.steps", "6", cwd=tmp_path)
    assert "resumed at step 4" in said
    assert "scp -r h1:/home/sky/.atoll/runs/" in said
    assert "finished: 6 of 6 steps" in said
    said = atoll(*command, "--train.output_dir", "/tmp/alone", cwd=tmp_path, code=100)
    assert "/tmp/alone/checkpoints is none: rank 1 on host h3 does not see what rank 0 wrote there" in said
    assert "Traceback" not in said


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A command while it runs."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def queued_again_at_once(login: Host) -> Iterator[None]:
    """While this lasts, a job that Slurm queues again does not wait the two minutes until its old credentials end."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(1.0):
            for job in login.run("squeue -h -t PENDING -o '%r|%i'").split():
                if job.startswith("BeginTime|"):
                    login.run(f"scontrol update JobId={job.partition('|')[2]} StartTime=now")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_austen_recipe_crosses_allocations_and_no_step_is_lost(slurm: Testbed, tmp_path: Path) -> None:
    configure(f"python = {json.dumps(sys.executable)}", 'time = "2"', "requeue = true", "notice_s = 45")
    shutil.copytree(ROOT / "examples/austen", tmp_path / "examples/austen")
    command = ("train", RECIPE, "--infra", "slurm/lab", "--nodes", "2", *SMALL)
    with queued_again_at_once(slurm.hosts[0]):
        for steps in (100, 600, 3600):  # until one lasts longer than an allocation, on a fast machine
            said = atoll(*command, "--train.steps", str(steps), cwd=tmp_path, timeout_s=550.0)
            if "Attempt 2. " in said:
                break
    assert "is near; stopping the job." in said
    assert "Attempt 2. " in said
    assert "attempt 2 runs on h2, h3" in said
    assert f"finished: {steps} of {steps} steps" in said
    assert queue(slurm) == []
    (metrics,) = slurm.folder.glob("home/sky/.atoll/runs/**/metrics.jsonl")
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [*range(1, steps + 1)]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_lost_node_is_replaced(make_bed: MakeBed) -> None:
    bed = make_slurm(make_bed, 4)
    login, _, lost, _ = bed.hosts
    (Path(os.environ["ATOLL_HOME"]) / "task.yaml").write_text(
        "num_nodes: 2\nresources: {infra: slurm/lab, job_recovery: {max_restarts_on_errors: 1}}\n"
        "run: |\n  echo $SKYPILOT_TASK_ID on $(hostname); touch ~/begun.$(hostname); "
        "until [ -e ~/begun.h4 ]; do sleep 1; done\n"
    )
    command = [ATOLL, "launch", "-c", "c", os.path.join(os.environ["ATOLL_HOME"], "task.yaml")]
    with queued_again_at_once(login), running(command) as process:
        home = bed.folder / "home/sky"
        eventually(lambda: (home / "begun.h3").exists() and (home / "begun.h2").exists(), "it runs", 60.0)
        lost.power_off()
        said, _ = process.communicate(timeout=270)
    print(said)
    assert process.returncode == 0
    assert "It goes on as attempt 2 on other nodes: worker1 was lost: " in said
    assert "attempt 2 runs on h2, h4" in said
    assert len({word for word in said.split() if word.startswith("sky-20")}) == 1, "one task id"
    atoll("down", "c")


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 5400), ("1:30", 90), ("1:30:00", 5400), ("1-12", 129600), ("1-12:30", 131400), ("1-0:0:5", 86405),
     ("UNLIMITED", None), ("", None)],
)  # fmt: skip
def test_seconds_of_a_limit(limit: str, seconds: float | None) -> None:
    assert seconds_of(limit) == seconds


@pytest.mark.parametrize(
    ("state", "why", "expected"),
    [("COMPLETING", "None", AllocationState.RELEASED), ("CANCELLED", "None", AllocationState.RELEASED),
     ("RUNNING", "None", AllocationState.PENDING), ("NODE_FAIL", "NodeDown", AllocationState.PENDING)],
)  # fmt: skip
def test_a_job_that_was_cancelled_is_not_queued_again(
    state: str, why: str, expected: AllocationState, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    now = JobNow(is_known=True, state=state, reason=why, output="out", nodes=("h1",))
    monkeypatch.setattr(sky.Slurm, "_jobs", lambda *_: {"7": now})
    monkeypatch.setattr(sky.Slurm, "_ask", lambda _, *words: asked.append(words) or "")
    found = sky.Slurm(login="gate", requeue=True).renew(Allocation(infra="slurm/gate", settings={"job": "7"}))
    assert found.state is expected
    assert (("scontrol", "requeue", "7") in asked) == (expected is AllocationState.PENDING)


@pytest.mark.long
def test_a_job_that_waits_to_go_on_is_seen_and_cancelled(slurm: Testbed) -> None:
    configure('time = "1"', "requeue = true", "notice_s = 30")
    command = [ATOLL, "launch", "-c", "c", "--infra", "slurm/lab", "echo begun; sleep 600"]
    with running(command) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "waiting for nodes of cluster c" in line:
                break
        said = atoll("queue", "c")
        assert "PENDING" in said
        assert "waiting for other nodes: the time limit of Slurm job 1 is near" in said
        assert "begun" in atoll("logs", "c", "--no-follow", code=101)
        atoll("cancel", "c")
        assert process.wait(60) == 103
    atoll("down", "c")
    assert queue(slurm) == []

    atoll("launch", "-d", "-c", "d", "--infra", "slurm/lab", "sleep 600")
    eventually(lambda: "RUNNING" in atoll("queue", "d"), "it runs", 30.0)
    slurm.hosts[0].run("scancel -u sky")
    eventually(lambda: "it was cancelled (scancel)" in atoll("status"), "the cluster is down", 30.0)
    eventually(lambda: "CANCELLED" in atoll("queue", "d"), "the job has ended so", 30.0)


@pytest.mark.long
def test_a_launch_that_waits_is_taken_down_and_a_drained_node_is_told(slurm: Testbed) -> None:
    login = slurm.hosts[0]
    atoll("launch", "-d", "-c", "first", "--infra", "slurm/lab", "--num-nodes", "2", "sleep 600")
    login.run("scontrol update NodeName=h3 State=DRAIN Reason=fan")
    assert "RUNNING" in atoll("queue", "first")  # what runs there goes on
    assert "without h3, which is draining: fan" in atoll("check", "slurm/lab")
    atoll("down", "first")
    command = [ATOLL, "launch", "-c", "second", "--infra", "slurm/lab", "--num-nodes", "2", "true"]
    with running(command) as process:
        assert process.stdout is not None
        assert any("job 2: " in line and "drained" in line for line in process.stdout)
        shown = atoll("status")
        assert "INIT" in shown
        assert "drained" in shown
        atoll("down", "second")
        assert process.wait(60) == 100
        assert "it was cancelled (scancel)" in process.stdout.read()
    assert queue(slurm) == []
    assert "no cluster is up" in atoll("status")
    with running(command) as process:  # and where the launch was killed
        assert process.stdout is not None
        assert any("drained" in line for line in process.stdout)
        process.kill()
        process.wait()
    assert "INIT" in atoll("status")
    atoll("down", "second")
    assert queue(slurm) == []


@pytest.mark.long
def test_all_ranks_killed_at_once_and_two_users_on_one_node(slurm: Testbed, tmp_path: Path) -> None:
    for host in slurm.hosts:
        host.run("echo lake:x:2001:2001::/home/lake:/bin/bash >> /etc/passwd; echo lake:x:2001: >> /etc/group")
    slurm.hosts[0].run("mkdir -p /home/lake; chown 2001:2001 /home/lake")
    launch = "launch -d -c c --infra slurm/here --num-nodes 2 --gpus L4:1 'echo sees $CUDA_VISIBLE_DEVICES; sleep 600'"
    slurm.hosts[0].run(f"cd; {ATOLL} {launch}", user="lake", timeout_s=120)
    atoll("launch", "-d", "-c", "c", "--infra", "slurm/lab", "--num-nodes", "2", "--gpus", "L4:1", "echo on; sleep 987")
    eventually(lambda: atoll("logs", "c", "--no-follow", code=101).count(") on") == 2, "it runs", 60.0)
    killers = [
        threading.Thread(target=host.run, args=("pkill -9 -f '^sleep 987' || true",)) for host in slurm.hosts[1:]
    ]
    for killer in killers:
        killer.start()
    said = atoll("logs", "c", code=100)
    assert "Traceback" not in said
    assert "137" in said
    (row,) = json.loads(atoll("queue", "c", "-o", "json"))
    assert row["exit_code"] == 137
    other = slurm.hosts[0].run(f"cd; {ATOLL} queue c; {ATOLL} logs c --no-follow || true; {ATOLL} down c", user="lake")
    assert "RUNNING" in other
    assert other.count("sees GPU-") == 2
    atoll("down", "c")


@pytest.mark.long
def test_nodes_that_do_not_share_the_home_are_refused_at_start(make_bed: MakeBed) -> None:
    bed = make_slurm(make_bed, 2, shared_home=False)
    launch = ("launch", "-c", "c", "--infra", "slurm/lab", "true")
    for _ in range(2):  # without Atoll's folders there, and with its own
        said = atoll(*launch, code=100)
        assert "can't see /home/sky/.atoll of h1, where code, workdirs and logs lie: in " in said
        assert "continue" not in said
        assert "Traceback" not in said
        assert queue(bed) == []
        bed.hosts[1].run("mkdir -p ~/.atoll/slurm", user=USER)


@pytest.mark.long
def test_what_a_task_asks_of_sbatch(slurm: Testbed, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(
        "resources: {infra: slurm/lab/debug, cpus: 2}\n"
        'config: {slurm: {sbatch_options: {time: "7", exclusive: null, comment: "of mine"}}}\nrun: hostname\n'
    )
    said = atoll("launch", "-c", "c", "task.yaml", cwd=tmp_path)
    assert "Cluster c on slurm/lab/debug: 1 node" in said
    assert "no effect" not in said
    shown = slurm.hosts[0].run("scontrol -o show job")
    assert "TimeLimit=00:07:00" in shown
    assert "OverSubscribe=NO" in shown
    assert "Partition=debug" in shown
    assert "again" in atoll("exec", "c", "echo again")
    atoll("down", "c")
    for option, why in (("array: 1-3", "a sweep runs inside one"), ("output: x", "`atoll logs CLUSTER` shows")):
        (tmp_path / "task.yaml").write_text(f"config: {{slurm: {{sbatch_options: {{{option}}}}}}}\nrun: hostname\n")
        said = atoll("launch", "-c", "c", "--infra", "slurm/lab", "task.yaml", cwd=tmp_path, code=2)
        assert f"can't be given: {why}" in said
    assert "no partition 'nightly'" in atoll("launch", "-c", "c", "--infra", "slurm/lab/nightly", "true", code=2)


@pytest.mark.long
@pytest.mark.parametrize("infra", ["local", "slurm/lab"])
def test_a_sweep_of_six_packs_its_jobs_on_the_gpus_that_are_there(slurm: Testbed, infra: str) -> None:
    atoll("launch", "-c", "box", "--infra", infra, "--gpus", "L4:2", "--num-nodes", "2", "true")
    run = 'echo "LR $LR on $(hostname) sees $CUDA_VISIBLE_DEVICES"; sleep 2'
    said = atoll("exec", "box", "--gpus", "L4:1", "--sweep", "LR=1,2,3,4,5,6", "--parallel", "6", run)
    assert said.count("): SUCCEEDED") == 6
    seen = [atoll("logs", "box", str(job)) for job in range(2, 8)]
    assert all(f"LR {number} on " in log for number, log in enumerate(seen, 1))
    if infra != "local":  # where GPUs are simulated
        gpus = Counter(word for log in seen for word in log.split() if word.startswith("GPU-"))
        assert len(gpus) == 4
    rows = json.loads(atoll("queue", "box", "-o", "json"))
    spans = [(row["start_at"], row["end_at"]) for row in rows[:-1]]
    assert max(sum(begun <= at < ended for begun, ended in spans) for at, _ in spans) == 4
    atoll("down", "box")


@pytest.mark.long
def test_inside_an_allocation_its_nodes_are_taken_as_they_are(slurm: Testbed) -> None:
    login = slurm.hosts[0]
    home = slurm.folder / "home/sky/project"
    login.run("mkdir ~/project", user=USER)
    (home / "pool.py").write_text(
        "import os\nimport atoll as sky\n\n\ndef where():\n    return os.uname().nodename\n\n\n"
        "if __name__ == '__main__':\n"
        "    with sky.ComputePool(provider=sky.Slurm.here(), logs='quiet') as pool:\n"
        "        print('pool', sky.compute(where)() @ pool)\n"
    )
    (home / "words.txt").write_text("the tide comes in and goes out\n\n" * 200)
    (home / "tiny.toml").write_text(TINY)
    (home / "job.sh").write_text(
        "#!/bin/sh\nexport OMP_NUM_THREADS=1 ATOLL_HOME=$HOME/other; exec 2>&1\n"
        f"{sys.executable} pool.py\n"
        f"{ATOLL} launch -c c --infra slurm/here --nodes 2 'echo task on $(hostname)'\n"
        f"{ATOLL} launch -c d --infra slurm/here --gpus L4:1 true\n"
        f"{ATOLL} down c\n"
        f"{ATOLL} run --infra slurm/here --nodes 2 --nproc 1 tell.py\n"
        f"srun {sys.executable} -m atoll.train tiny.toml --train.micro_batch 1\n"
        "at=$(scontrol show hostnames | head -n 1):29400\n"
        f"srun --ntasks 2 --ntasks-per-node 1 {Path(ATOLL).with_name('torchrun')} --nnodes 2 --nproc-per-node 2 "
        "--rdzv-backend c10d --rdzv-endpoint $at tell.py\n"
        "echo still $(squeue -h -o %j)\n"
    )
    (home / "tell.py").write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    login.run(
        "cd ~/project; sbatch --wait --nodes=2 --ntasks-per-node=2 --output=out.txt job.sh || true",
        user=USER,
        timeout_s=250,
    )
    said = (home / "out.txt").read_text()
    print(said)
    assert "pool ['h2', 'h3']" in said
    assert ") task on h3" in said
    assert "can't be had: Slurm job 1 has no GPU (salloc --gres=gpu:…)" in said
    assert "rank 1 of 2" in said
    assert "finished: 4 of 4 steps" in said
    assert "DDP 4 · CPU" in said
    assert "rank 3 of 4" in said
    assert "still job.sh" in said
    for host in slurm.hosts[1:]:
        eventually(lambda host=host: not [line for line in host.command_lines() if "atoll" in line], "nothing is left")


@pytest.mark.long
@pytest.mark.parametrize("terminal", ["-T", "-tt"])
def test_salloc_over_ssh_with_and_without_a_terminal(slurm: Testbed, terminal: str) -> None:
    home = slurm.folder / "home/sky"
    (home / "project").mkdir()
    (home / "project/tell.py").write_text(
        "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    )
    (home / "project/sal.sh").write_text(f"{ATOLL} run --infra slurm/here --nodes 2 --nproc gpu --gpus L4:2 tell.py\n")
    slurm.hosts[0].run("chown -R sky: /home/sky/project")
    command = ["ssh", terminal, "h1", "cd project; salloc --nodes 2 --gres=gpu:2 bash sal.sh"]
    atoll("launch", "-c", "holder", "--infra", "slurm/lab", "--gpus", "L4:2", "true")
    with running(command) as process:  # for as long as a cluster has them, there are no nodes, and salloc says so
        eventually(lambda: "interactive" in queue(slurm), "it waits")
        atoll("down", "holder")
        said, _ = process.communicate(timeout=90)
    assert process.returncode == 0, said
    assert "queued and waiting for resources" in said
    assert "rank 3 of 4" in said
    eventually(lambda: queue(slurm) == [], "its nodes are free")


@pytest.mark.long
@pytest.mark.parametrize("what", ["pool", "run"])
def test_nodes_of_a_process_that_is_killed_are_given_back(slurm: Testbed, tmp_path: Path, what: str) -> None:
    configure("grace_s = 120")
    (tmp_path / "rank.py").write_text("import time\n\n\nprint('begun', flush=True)\ntime.sleep(600)\n")
    (tmp_path / "pool.py").write_text(
        "import time\nimport atoll as sky\n\n\ndef begun():\n    print('begun', flush=True)\n    time.sleep(600)\n\n\n"
        "with sky.ComputePool(provider='slurm/lab', nodes=2) as pool:\n    sky.compute(begun)() @ pool\n"
    )
    on_both = [ATOLL, "run", "--infra", "slurm/lab", "--nodes", "2", "--workdir", str(tmp_path), "rank.py"]
    with running([sys.executable, str(tmp_path / "pool.py")] if what == "pool" else on_both) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "begun" in line:
                break
        assert len(queue(slurm)) == 1
        process.kill()
        eventually(lambda: queue(slurm) == [], "the job is cancelled", 15 if what == "pool" else 60)
        for host in slurm.hosts[1:]:
            eventually(lambda host=host: not [line for line in host.command_lines() if "atoll" in line], "it ends", 15)


@pytest.mark.long
def test_what_slurm_refuses_is_one_line(slurm: Testbed) -> None:
    config = Path(os.environ["ATOLL_HOME"], "config.toml")
    on_lab = ("launch", "-c", "no", "--infra", "slurm/lab")
    assert "it has 2 × L4:2" in atoll(*on_lab, "--gpus", "H100:2", "true", code=2)
    assert "2 nodes of one kind at most" in atoll(*on_lab, "--num-nodes", "9", "true", code=2)
    managed = ("jobs", "launch", "--infra", "slurm/lab")
    assert "it has 2 × L4:2" in atoll(*managed, "--gpus", "L4:4", "true", code=2)
    assert "2 nodes of one kind at most" in atoll(*managed, "--num-nodes", "9", "true", code=2)
    assert "no managed job" in atoll("jobs", "queue")
    assert "it has 2 × L4:2" in atoll(*on_lab, "--num-nodes", "3", "--gpus", "L4:2", "true", code=2)
    assert "partition debug: 2 nodes, each with 8 cores" in atoll("check", "slurm/lab")
    assert "no partition 'debog': did you mean 'debug'?" in atoll("gpus", "slurm/lab/debog", code=2)
    on_login = ["salloc", "--nodes=1", "--gres=gpu:1", ATOLL]
    said = slurm.hosts[0].run(shlex.join([*on_login, "check", "slurm/here"]), user=USER)
    assert "slurm/here: you are in Slurm job 1, whose nodes are used: h2\n" in said
    (row,) = json.loads(slurm.hosts[0].run(shlex.join([*on_login, "gpus", "slurm/here", "-o", "json"]), user=USER))
    assert row == {"partition": "debug", "name": "L4", "count": 4, "free": 3}
    config.write_text('[slurm.lab]\nlogin = "h1"\npython = "~/no/python"\n')
    assert "✗ slurm/lab: h1: has no ~/no/python" in atoll("check", "slurm/lab", code=100)
    config.write_text('[slurm.lab]\nlogin = "h1"\npartition = "debgu"\n')
    assert "no partition 'debgu': did you mean 'debug'" in atoll(*on_lab, "true", code=2)
    config.write_text('[slurm.lab]\nlogin = "h1"\ntime = "soon"\n')
    assert "sbatch failed on h1: Invalid --time specification" in atoll(*on_lab, "true", code=100)
    config.write_text('[slurm.lab]\nlogin = "h2"\nqueue = "debug"\n')
    assert "[slurm.lab] has no key 'queue'" in atoll(*on_lab, "true", code=2)
    slurm.hosts[0].run("pkill -9 slurmctld")
    config.write_text('[slurm.lab]\nlogin = "h1"\n')
    assert "sinfo failed on h1: " in atoll(*on_lab, "true", code=100)
    assert "no cluster is up" in atoll("status")


def test_clusters_are_found_by_section_login_node_or_here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "config").write_text("Host gate\n")
    monkeypatch.setenv("HOME", str(home))
    (home / "config.toml").write_text('[slurm.lab]\nlogin = "me@gate"\ntime = "1:00"\nsbatch = ["--exclusive"]\n')
    assert registry.declared() == ["local", "slurm/lab"]
    made = registry.resolve("slurm/lab")
    assert made == sky.Slurm(login="me@gate", time="1:00", sbatch=["--exclusive"], declared_as="lab")
    assert registry.resolve("slurm/gate") == sky.Slurm(login="gate", declared_as="gate")
    assert registry.resolve("slurm/here").infra == "slurm/here"
    with pytest.raises(ConfigError, match="no such Slurm cluster: did you mean 'gate'"):
        registry.resolve("slurm/gata")
    for wrong, said in (
        ("login = 3", "login=3.: expected text"),
        ('sbatch = "--exclusive"', "expected a list of options"),
        ("grace_s = -1", "grace_s"),
        ('login = "-oProxyCommand=x"', "is not a host"),
    ):
        (home / "config.toml").write_text(f"[slurm.lab]\n{wrong}\n")
        with pytest.raises(ConfigError, match=said):
            registry.resolve("slurm/lab")


@pytest.mark.parametrize(
    ("gres", "name", "fits"),
    [
        ("L4", "L4", True),
        ("a100", "A100", True),
        ("nvidia_h100_80gb_hbm3", "H100", True),
        ("a100_80gb", "A100-80GB", True),
        ("", "H100", True),
        ("L40S", "L4", False),
        ("a10", "A100", False),
        ("v100", "A100", False),
    ],
)
def test_kinds_of_gpus_as_slurm_spells_them(gres: str, name: str, fits: bool) -> None:
    assert is_kind(gres, name) is fits


def test_free_gpus_are_those_that_a_job_could_get_now() -> None:
    lines = (
        "gpu|up|2|gpu:a100:8(S:0-1)|gpu:a100:3(IDX:0-2)|mixed|",
        "gpu|up|1|gpu:a100:8(S:0-1)|gpu:a100:0(IDX:N/A)|drained|",
        "gpu|up|3|gpu:a100:8(S:0-1)|gpu:a100:0(IDX:N/A)|idle~|",
        "gpu|up|1|gpu:a100:8(S:0-1)|gpu:a100:0(IDX:N/A)|idle*|",
        "gpu|up|4|(null)|gpu:0|idle|",
        "old|up|1|gpu:2,gpu:v100:4|gpu:1,gpu:v100:4(IDX:0-3)|mixed|",
        "off|down|1|gpu:2|gpu:0|idle|",
    )
    assert [tuple(row.values()) for row in free_gpus("\n".join(lines))] == [
        ("gpu", "a100", 56, 34),
        ("old", "GPU", 2, 1),
        ("old", "v100", 4, 0),
    ]


def test_a_keeper_starts_what_outlives_the_command_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "k"
    command = [sys.executable, "-I", "-S", keeper.__file__, str(folder), "1", str(tmp_path / "again")]
    with subprocess.Popen(command) as process:
        assert not keeper.spawn(["/bin/true"], {}, {})
        monkeypatch.setenv(keeper.VARIABLE, str(folder))
        out = tmp_path / "out"
        script = 'echo "$GIVEN" >&7; exec sleep 600'
        with out.open("wb") as file:
            assert keeper.spawn(
                ["/bin/sh", "-c", script], {7: file.fileno()}, {"GIVEN": "here", "PATH": "/bin:/usr/bin"}
            )
        eventually(lambda: out.read_text() == "here\n", "it writes")
        child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        with pytest.raises(OSError, match="No such file"):
            keeper.spawn(["/no/such/program"], {}, {})
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    assert not Path(f"/proc/{child}").exists()
    assert not folder.exists()


def test_a_keeper_without_work_cancels_its_job(tmp_path: Path) -> None:
    scancel = tmp_path / "scancel"
    scancel.write_text("#!/bin/sh\necho $1 > ${0%/*}/cancelled\n")
    scancel.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17", "SLURM_PROCID": "0"}
    command = [sys.executable, "-I", "-S", keeper.__file__, str(tmp_path / "k"), "0.1", str(tmp_path / "again")]
    assert subprocess.run(command, timeout=30, env=env).returncode == 0
    assert (tmp_path / "cancelled").read_text() == "17\n"


def test_a_keeper_starts_again_what_is_to_outlive_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "k", tmp_path / "out"
    command = [sys.executable, "-I", "-S", keeper.__file__, str(folder), "60", str(tmp_path / "again")]
    env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "17", "SLURM_PROCID": "0"}
    monkeypatch.setenv(keeper.VARIABLE, str(folder))
    for restart in ({}, {"SLURM_RESTART_COUNT": "1"}):
        with subprocess.Popen(command, env={**env, **restart}) as process:
            eventually((folder / "keeper.sock").is_socket, "it listens")
            if not restart:
                assert keeper.spawn(["/bin/sh", "-c", "echo $WHAT"], {}, {"WHAT": "begun"}, again_log=str(out))
                assert keeper.spawn(["/bin/sh", "-c", "echo once"], {}, {})
            else:
                eventually(lambda: out.exists() and out.read_text() == "begun\n", "it is started again")
            process.terminate()
            assert process.wait(15) == 0


@pytest.mark.long
def test_a_launch_that_was_killed_is_continued_with_the_same_job(slurm: Testbed) -> None:
    whole = ("--infra", "slurm/lab", "--gpus", "L4:2", "--num-nodes", "2")
    atoll("launch", "-d", "-c", "first", *whole, "true")
    command = [ATOLL, "launch", "-c", "second", *whole, "echo came"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert any("its nodes are busy" in line for line in process.stdout)
        process.kill()
    assert sorted(queue(slurm)) == ["atoll-first", "atoll-second"]
    atoll("down", "first")
    said = atoll(*command[1:])
    assert "came" in said
    assert "was submitted" not in said
    assert queue(slurm) == ["atoll-second"]
    atoll("down", "second")
    atoll("down", "second")
    assert queue(slurm) == []


@pytest.mark.long
def test_a_head_that_is_lost_and_a_controller_that_restarts(slurm: Testbed) -> None:
    login, head, _ = slurm.hosts
    ticks = "for number in $(seq 600); do echo tick $number; sleep 1; done"
    atoll("launch", "-d", "-c", "c", "--infra", "slurm/lab", "--num-nodes", "2", ticks)
    eventually(lambda: "tick 2" in atoll("logs", "c", "--no-follow", code=101), "the job runs")
    login.run("pkill slurmctld; sleep 1; slurmctld")

    def answers() -> bool:  # until its nodes have registered it starts no step
        return "RUNNING" in subprocess.run([ATOLL, "queue", "c"], capture_output=True, text=True, timeout=60).stdout

    eventually(answers, "the controller is back", 60.0)
    head.power_off()
    eventually(lambda: login.run("squeue -h -o %N").strip() == "h3", "Slurm has taken it out of the job", 60.0)
    said = atoll("logs", "c", "--no-follow", code=100)  # of the files that it shared
    assert "tick 2" in said
    assert "FAILED_DRIVER" in said
    atoll("down", "c")
    assert queue(slurm) == []


@pytest.mark.long
def test_a_short_cut_of_the_login_node_ends_nothing_and_a_time_limit_is_told(slurm: Testbed) -> None:
    login = slurm.hosts[0]

    def slowly() -> int:
        time.sleep(8)
        return 7

    with sky.ComputePool(provider="slurm/lab", nodes=2, logs="quiet") as pool:
        future = pool.submit(slowly, everywhere=True)
        time.sleep(1)
        login.cut()
        time.sleep(4)
        login.heal()
        assert future.result(60) == [7, 7]
    configure('time = "1"')
    said = atoll("launch", "-c", "c", "--infra", "slurm/lab", "echo begun; sleep 600", code=100, timeout_s=150)
    assert "failed (status: FAILED): Slurm job 2 has ended: its time limit of 0:01:00 was reached." in said
    down = "cluster c is down: Slurm job 2 has ended: its time limit of 0:01:00 was reached"
    eventually(lambda: down in said + atoll("status"), "the cluster is down")
    assert "is down" in atoll("exec", "c", "true", code=102)
    assert "begun" in atoll("logs", "c", "1", code=100)


@pytest.mark.long
def test_a_login_node_cut_off_for_a_minute_ends_neither_pool_nor_job(make_bed: MakeBed) -> None:
    bed = make_slurm(make_bed, 4)  # h1 is the controller, too: without it for so long Slurm gives its nodes up
    configure("grace_s = 150", login="h4")
    login = bed.hosts[3]

    def slowly() -> int:
        time.sleep(80)
        return 7

    atoll("launch", "-d", "-c", "c", "--infra", "slurm/lab", "for i in $(seq 90); do echo tick $i; sleep 1; done")
    with sky.ComputePool(provider="slurm/lab", nodes=2, logs="quiet") as pool, running([ATOLL, "logs", "c"]) as process:
        future = pool.submit(slowly, everywhere=True)
        time.sleep(5)
        login.cut()
        time.sleep(60)
        login.heal()
        assert future.result(120) == [7, 7]
        said, _ = process.communicate(timeout=120)
    ticks = [line.rpartition("tick ")[2] for line in said.splitlines() if "tick " in line]
    assert ticks == [str(number) for number in range(1, 91)], "no line twice, none lost"
    assert process.returncode == 0
    atoll("down", "c")
    eventually(lambda: queue(bed) == [], "the jobs are cancelled")


@pytest.mark.long
@pytest.mark.serial  # the kernel counts such kills for the whole machine
def test_a_step_that_is_killed_for_memory_is_named_so(slurm: Testbed, small_cgroup: Path) -> None:  # noqa: F811
    grow = "import time; time.sleep(8); blocks = [bytearray(b'x') * (16 << 20) for _ in range(100)]"
    atoll("launch", "-d", "-c", "c", "--infra", "slurm/lab", f'exec python3 -c "{grow}"')

    def found() -> list[int]:
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in slurm.hosts[1].pids()}
        return [pid for pid, line in lines.items() if line.startswith(b"python3\0-c\0import time; time.sleep(8)")]

    (pid,) = eventually(found, "it runs", 60.0)
    (small_cgroup / "cgroup.procs").write_text(str(pid))
    said = atoll("logs", "c", code=100)
    assert "was killed for memory (the kernel's OOM killer)" in said
    atoll("down", "c")


@pytest.mark.long
def test_on_the_login_node_itself_with_spaces_stopped_and_started(slurm: Testbed) -> None:
    words = (
        "cd; mkdir 'a b'; cd 'a b'; echo data > 'f g.txt'; export ATOLL_HOME=/home/sky/other; exec 2>&1",
        f"{ATOLL} launch -c c --infra slurm/here --num-nodes 2 --workdir . \"cat 'f g.txt'; hostname\"",
        f"{ATOLL} stop c; {ATOLL} start c; {ATOLL} launch -c c 'echo afresh'; {ATOLL} down c",
    )
    said = slurm.hosts[0].run("; ".join(words), user=USER, timeout_s=120)
    assert said.count(") data\n") == 2
    assert "cluster c gave its nodes back when it was stopped: `atoll launch -c c TASK` gets others" in said
    assert ") afresh\n" in said
    assert queue(slurm) == []


@pytest.fixture
def short_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With room for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="ah-") as folder:
        monkeypatch.setenv("ATOLL_HOME", folder)
        yield
        registry.close_idle()


def test_one_question_to_slurm_is_for_all_clusters(
    short_home: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    line = f"JobId=%s JobName=a UserId=me({os.getuid()}) GroupId=me(1) JobState=%s Reason=None NodeList=%s TRES=cpu=1"
    lines = [line % (1, "RUNNING", "h[2-3]"), line % (2, "PENDING", ""), line % (3, "RUNNING", "h4")]
    lines.append(line.replace(f"({os.getuid()})", "(77)") % (4, "RUNNING", "h5"))
    script = "#!/bin/sh\n[ $2 = hostnames ] && { echo $3; exit; }\necho >> ${0%/*}/asked\ncat ${0%/*}/jobs\n"
    scontrol.write_text(script)
    scontrol.chmod(0o755)
    (tmp_path / "jobs").write_text("\n".join(lines))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slurm = registry.resolve("slurm/here")
    jobs = [Allocation(infra="slurm/here", settings={"job": str(number)}) for number in range(1, 5)]

    def asked() -> int:
        return (tmp_path / "asked").read_text().count("\n")

    def of_another_process(job: str) -> subprocess.Popen[str]:
        code = (
            "import sys; from atoll.providers import registry; from atoll.providers.base import Allocation; "
            "print(registry.resolve('slurm/here').poll(Allocation(settings={'job': sys.argv[1]}), max_age_s=10).state)"
        )
        return subprocess.Popen([sys.executable, "-c", code, job], stdout=subprocess.PIPE, text=True)

    others = [of_another_process(job) for job in "123123"]
    assert [each.communicate()[0].strip() for each in others] == ["READY", "PENDING", "READY"] * 2
    assert asked() == 1
    assert [slurm.poll(each, max_age_s=10).state for each in jobs[:3] * 5] == ["READY", "PENDING", "READY"] * 5
    assert asked() == 1
    assert [each.name for each in slurm.poll(jobs[0], max_age_s=10).nodes] == ["h[2-3]"]
    assert slurm.poll(jobs[3], max_age_s=10).state == "LOST"  # another user's, and not among what was told
    assert asked() == 2
    slurm.poll(jobs[0])  # why it ended, say: now
    assert asked() == 3
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho >> ${0%/*}/asked; echo slurm_load_jobs error: no >&2; exit 1\n")
    for age_s in (0.0, 10.0, 10.0):
        with pytest.raises(sky.ProvisionError, match="scontrol failed on this machine: slurm_load_jobs error: no"):
            slurm.poll(jobs[0], max_age_s=age_s)
    assert asked() == 4


_RUNS = f"JobId=1 JobName=a UserId=me({os.getuid()}) JobState=RUNNING NodeList=h[2-3] TRES=cpu=1"


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, *, nodes: str = "echo h2; echo h3") -> sky.Slurm:
    """A Slurm on this machine with a job whose nodes are told so."""
    folder.mkdir(exist_ok=True)
    (folder / "scontrol").write_text(f"#!/bin/sh\n[ $2 = hostnames ] && {{ {nodes}; exit; }}\necho '{_RUNS}'\n")
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return registry.resolve("slurm/here")  # type: ignore[return-value]


_ONE = Allocation(infra="slurm/here", settings={"job": "1"})


@pytest.mark.parametrize("broken", ["id", "grep", "scontrol"])
def test_a_login_node_that_can_start_nothing_more_does_not_say_that_there_are_no_jobs(
    short_home: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    slurm = fake_slurm(tmp_path / "bin", monkeypatch, nodes="exit 137" if broken == "scontrol" else "echo h2")
    if broken != "scontrol":
        (tmp_path / "bin" / broken).write_text("#!/bin/sh\nexit 137\n")
        (tmp_path / "bin" / broken).chmod(0o755)
    with pytest.raises(ProvisionError, match="failed on this machine"):
        slurm.poll(_ONE)


@pytest.mark.parametrize("said", ["", "module: command not found"])
def test_an_answer_that_tells_no_jobs_changes_nothing(
    short_home: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    slurm = fake_slurm(tmp_path / "bin", monkeypatch)
    spec = ClusterSpec(name="c", infra="slurm/here", allocation=dataclasses.replace(slurm.poll(_ONE), id="c"))
    clusters.folder_of("c").mkdir(parents=True)
    clusters.save(spec)
    (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/sh\necho '{said}'\n")
    (cluster,) = api.status(on_error=pytest.fail)
    assert cluster.status == "UP"
    why = f"slurm/here: scontrol failed on this machine: its answer tells no jobs: '{said}'"
    assert f"cluster c is shown as it was known last: {why}" in capfd.readouterr().err
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho No jobs in the system\n")
    assert api.status() == []


def test_who_asks_slurm_and_is_stopped_or_another_user_holds_up_nobody(
    short_home: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = fake_slurm(tmp_path / "bin", monkeypatch)
    slurm.poll(_ONE)
    (lock,) = Path(os.environ["ATOLL_HOME"], "slurm").glob("*.lock")
    monkeypatch.setattr(slurm_queue, "_WAIT_S", 0.5)
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a command does that Ctrl-Z has stopped
        assert slurm.poll(_ONE).state == "READY"
    lock.unlink()
    lock.mkdir()  # can't be opened, as that of root after `sudo atoll`
    assert [each.name for each in slurm.poll(_ONE).nodes] == ["h2", "h3"]


def test_names_of_single_nodes_are_no_question(
    short_home: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "_RUNS", _RUNS.replace("h[2-3]", "h4"))
    assert fake_slurm(tmp_path / "bin", monkeypatch, nodes="exit 1").poll(_ONE).nodes[0].name == "h4"


def test_nodes_that_come_soon_are_noticed_soon(
    short_home: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that was got while nothing was there yet is not taken again: nodes that were free waited 13 s."""
    job = f"JobId=1 JobName=a UserId=me({os.getuid()}) GroupId=me(1) JobState=$state Reason=None NodeList=h2 TRES=cpu=1"
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\n[ $2 = hostnames ] && { echo $3; exit; }\n"
        "echo >> ${0%/*}/asked; state=PENDING; [ $(grep -c '' ${0%/*}/asked) -lt 4 ] || state=RUNNING\n"
        f'echo "{job}"\n'
    )
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pending = Allocation(infra="slurm/here", settings={"job": "1"}, state=AllocationState.PENDING)
    began_s = time.monotonic()
    ready = wait_until_ready(registry.resolve("slurm/here"), pending, [].append)
    assert [node.name for node in ready.nodes] == ["h2"]
    assert time.monotonic() - began_s < 6
    assert (tmp_path / "asked").read_text().count("\n") == 4


def test_of_alternatives_one_that_can_not_be_asked_now_may_be_had_later(short_home: None) -> None:
    many, lost = NodeRequest(accelerators=(("H100", 8),), simulate=False), NodeRequest(infra="slurm/here")
    with pytest.raises(ConfigError, match=r"(?s)none of the task's alternatives.*H100:8 can't.*H100:8 can't"):
        placing.decide_any("c", None, [many, many])
    with pytest.raises(ProvisionError, match=r"(?s)none of the task's alternatives.*H100:8 can't.*slurm/here: "):
        placing.decide_any("c", None, [many, lost])
