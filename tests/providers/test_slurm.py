"""Slurm, its own daemons on hosts of the testbed: tasks, runs and pools with only the infra changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.pools import eventually

import atoll as sky
from atoll.agent import keeper
from atoll.core.errors import ConfigError
from atoll.providers import registry
from atoll.providers.slurm import _is_kind
from testbed.fixtures import MakeBed
from testbed.hosts import USER, Testbed
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


@pytest.fixture
def slurm(make_bed: MakeBed) -> Testbed:
    """The login node and controller h1, and two nodes with two GPUs each."""
    lacking = slurm_missing()
    if lacking is not None:
        pytest.skip(lacking)
    bed = make_bed(3)
    start_slurm(bed)
    Path(os.environ["ATOLL_HOME"], "config.toml").write_text('[slurm.lab]\nlogin = "h1"\ngrace_s = 5.0\n')
    return bed


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
    assert "h3" in atoll("ssh", "demo/worker1", "--", "hostname")
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
    config = Path(os.environ["ATOLL_HOME"], "config.toml")
    config.write_text(f"{config.read_text()}python = {json.dumps(sys.executable)}\n")
    (tmp_path / "words.txt").write_text("the tide comes in and goes out\n\n" * 200)
    (tmp_path / "tiny.toml").write_text(TINY)
    command = ("train", "tiny.toml", "--infra", "slurm/lab", "--nodes", "2")
    assert "finished: 4 of 4 steps" in atoll(*command, cwd=tmp_path)
    assert queue(slurm) == []
    said = atoll(*command, "--train.steps", "6", cwd=tmp_path)
    assert "resumed at step 4" in said
    assert "scp -r h1:/home/sky/.atoll/runs/" in said
    assert "finished: 6 of 6 steps" in said


@pytest.mark.long
def test_what_slurm_refuses_is_one_line(slurm: Testbed) -> None:
    config = Path(os.environ["ATOLL_HOME"], "config.toml")
    on_lab = ("launch", "-c", "no", "--infra", "slurm/lab")
    assert "nodes have L4:2" in atoll(*on_lab, "--gpus", "H100:2", "true", code=2)
    assert "2 nodes of one kind at most" in atoll(*on_lab, "--num-nodes", "9", "true", code=2)
    assert "partition debug: 2 nodes, each with 8 cores" in atoll("check", "slurm/lab")
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
    assert _is_kind(gres, name) is fits


def test_a_keeper_starts_what_outlives_the_command_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "k"
    with subprocess.Popen([sys.executable, "-I", "-S", keeper.__file__, str(folder), "1"]) as process:
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
    command = [sys.executable, "-I", "-S", keeper.__file__, str(tmp_path / "k"), "0.1"]
    assert subprocess.run(command, timeout=30, env=env).returncode == 0
    assert (tmp_path / "cancelled").read_text() == "17\n"


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
    config = Path(os.environ["ATOLL_HOME"], "config.toml")
    config.write_text(f'{config.read_text()}time = "1"\n')
    said = atoll("launch", "-c", "c", "--infra", "slurm/lab", "echo begun; sleep 600", code=103, timeout_s=150)
    assert "its nodes are taken back" in said
    assert "its time limit was reached" in said + atoll("status")
    assert "is down" in atoll("exec", "c", "true", code=102)
    assert "begun" in atoll("logs", "c", "1", code=103)


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
