"""``atoll launch`` and the commands around it, on real local clusters: what they print, exit codes, what stays."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.pools import SOURCE_ROOT, eventually

import atoll as sky
import leaks
from atoll.cli.task_flags import as_typed
from atoll.providers.network import address_of
from atoll.tasks import clusters, control, lifecycle, supervisor
from atoll.tasks.control import remove_tree
from atoll.tasks.spec import ClusterSpec, ClusterStatus
from command_here import Atoll, atoll

__all__ = ["atoll"]
RUN = "from atoll.cli.main import main; main()"
COMMANDS = ["launch", "exec", "logs", "queue", "cancel", "status", "stop", "start", "down", "autostop", "ssh", "cp"]
LISTS = "`atoll queue t` lists those there are"
HINT = "(Ctrl-C to exit log streaming; job will not be killed)"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder for one test, on a machine without GPUs; clusters that it leaves up are taken down."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "home"
    for name in clusters.all_names():
        lifecycle.down(name)


def start(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments],
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE_ROOT},
        **streams,
    )


def ssh(*arguments: str) -> tuple[int, str]:
    """``atoll ssh`` becomes the shell that it starts: never in this process. Gives exit code and output."""
    process = start("ssh", *arguments)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def free_port() -> int:
    """One that nobody has, and that nobody gets meanwhile who asks for any: those come from a range above."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def task_file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def contents(folder: Path) -> dict[Path, bytes]:
    """What the files below a folder hold, less those that go away meanwhile, as SQLite's do when a supervisor ends."""
    found = {}
    for at, _, names in os.walk(folder):
        for path in (Path(at, name) for name in names):
            if path.is_file():
                with contextlib.suppress(FileNotFoundError):
                    found[path] = path.read_bytes()
    return found


# -------------------------------------------------------------------------------------------------------- words
@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example(atoll: Atoll, command: str) -> None:
    code, out, err = atoll(command, "--help")
    assert (code, err) == (0, "")
    assert re.search(rf"^ +atoll {command} (-c )?t", out, re.M) is not None or f"  atoll {command}\n" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["launch"], 2, "Missing argument"),
        (["launch", "-c", "a/b", "echo"], 2, "cluster name 'a/b'"),
        (["launch", "-c", "t", "absent.yaml"], 2, "absent.yaml"),
        (["launch", "-c", "t", "--numnode", "2", "echo"], 2, "did you mean '--num-nodes'?"),
        (["launch", "-c", "t", "--infra", "locla", "echo"], 2, "did you mean 'local'"),
        (["launch", "-c", "t", "--gpus", "L4:x", "echo"], 2, "L4:x"),
        (["launch", "-c", "t", "--gpus", "L4", "--no-simulate", "echo"], 2, "this machine has no GPU"),
        (["launch", "-c", "t", "--env", "NOT_SET_HERE", "echo"], 2, "NOT_SET_HERE is not set"),
        (["launch", "-c", "t", "--sweep", "LR", "echo"], 2, "expected KEY=value,value"),
        (["launch", "-c", "t", "-o", "xml", "echo"], 2, "xml"),
        (["exec", "absent", "echo"], 102, "`atoll launch -c absent TASK` makes it"),
        (["logs", "absent"], 102, "no cluster 'absent'"),
        (["queue", "absent"], 102, "no cluster 'absent'"),
        (["cancel", "absent", "1"], 102, "no cluster 'absent'"),
        (["status", "absent"], 102, "no cluster 'absent'"),
        (["status", "--ip"], 2, "name of one cluster"),
        (["stop", "absent"], 102, "no cluster 'absent'"),
        (["start", "absent"], 102, "no cluster 'absent'"),
        (["down", "absent*"], 102, "no cluster matches"),
        (["down"], 2, "--all"),
        (["launch", "-c", "t", "--cpus", "9" * 400, "echo"], 2, "--cpus"),
        (["launch", "-c", "t", "--memory", "9" * 400, "echo"], 2, "--memory"),
        (["launch", "-c", "t", "-i", "9" * 30, "echo"], 2, "idle minutes: expected"),
        (["autostop", "absent"], 102, "no cluster 'absent'"),
        (["ssh", "absent"], 102, "no cluster 'absent'"),
        (["cp", "absent:a", "."], 102, "no cluster 'absent'"),
        (["cp", "a", "b"], 2, "one of the two on a node"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(atoll: Atoll, home: Path, arguments: list[str], code: int, said: str) -> None:
    got, out, err = atoll(*arguments)
    assert got == code
    assert said in out + err
    assert not list(home.glob("clusters/*"))


def test_a_state_folder_that_cannot_be(atoll: Atoll, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "file/home"))
    code, out, err = atoll("launch", "-c", "t", "echo")
    assert (code, out) == (2, "")
    assert "file/home: it, or a part of it, is a file; expected a folder" in err
    monkeypatch.setenv("ATOLL_HOME", "/proc/home")
    code, out, err = atoll("launch", "-c", "t", "echo")
    assert (code, out) == (2, "")
    assert "ATOLL_HOME=/proc/home: No such file or directory; set it to a folder that can be written to" in err
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))


def test_nothing_yet(atoll: Atoll) -> None:
    assert atoll("status") == (0, "no cluster is up; `atoll launch -c my-cluster TASK` makes one\n", "")
    assert atoll("status", "-o", "json") == (0, "[]\n", "")
    assert atoll("queue", "-o", "json") == (0, "[]\n", "")
    assert atoll("down", "--all") == (0, "no cluster is up\n", "")


# ------------------------------------------------------------------------------------------------ launch and logs
def test_launch_shows_the_job_and_exits_as_it_did(atoll: Atoll) -> None:
    code, out, err = atoll("launch", "-c", "t", "--num_nodes", "2", "--gpus", "L4:2", "echo hi $SKYPILOT_NODE_RANK")
    lines = [line for line in out.splitlines() if "nodes share" not in line]  # where there are no namespaces
    assert (code, err) == (0, "")
    assert lines[:5] == [
        "Cluster t on local: 2 nodes, L4:2 per node, simulated",
        "2 × L4:2 simulated on CPU: this machine has no GPU that CUDA_VISIBLE_DEVICES='' leaves",
        "Job submitted, ID: 1",
        "├── Waiting for task resources on 2 nodes.",
        f"└── Job started. Streaming logs... {HINT}",
    ]
    shown = sorted(re.sub(r"pid=\d+", "pid=P", line) for line in lines[5:7])
    assert shown == ["(head, rank=0, pid=P) hi 0", "(worker1, rank=1, pid=P, ip=127.0.0.2) hi 1"]
    assert lines[7:] == [
        "✓ Job finished (status: SUCCEEDED).",
        "Job ID: 1. Next: atoll exec t TASK, atoll ssh t, atoll down t",
    ]

    code, out, _ = atoll("launch", "-c", "t", "--num-nodes", "1", "-n", "one", "echo bad; exit 3")
    assert code == 100
    assert out.startswith(
        "Cluster t on local: 1 node of 2, L4:2 per node, simulated; the task uses no accelerator\n"
        "Job submitted, ID: 2\n"
    )
    assert "exited with code 3" in out
    assert re.search(r"^\(one, pid=\d+\) bad$", out, re.M)


@pytest.mark.parametrize("number", ["9" * 25, str(2**63), "0"])
def test_numbers_that_no_job_has(atoll: Atoll, number: str) -> None:
    with clusters.locked("t", "launch", print):
        clusters.save(ClusterSpec("t"))
    for words in (("logs", "t", number), ("logs", "t", number, "--status"), ("logs", "t", number, "-s")):
        assert (atoll(*words)[0], atoll(*words)[2]) == (102, f"atoll: cluster t has no job {number}; {LISTS}\n")
    assert atoll("cancel", "t", number)[0] == 102
    with pytest.raises(sky.UnknownCluster, match="no job"):
        sky.Job("t", int(number)).logs()


def test_logs_of_a_job_that_has_ended(atoll: Atoll) -> None:
    atoll("launch", "-c", "t", "--nodes", "2", "for i in 1 2 3; do echo line $i; done; exit $SKYPILOT_NODE_RANK")
    code, out, err = atoll("logs", "t")
    assert (code, err) == (100, "")
    assert out.count("line 2") >= 2
    code, out, _ = atoll("logs", "t", "1", "--no-follow", "--rank", "1")
    assert code == 100
    assert {line.partition(") ")[2] for line in out.splitlines()} == {"line 1", "line 2", "line 3"}
    assert len(atoll("logs", "t", "--tail", "2")[1].splitlines()) == 2
    code, out, _ = atoll("logs", "t", "--status")
    assert (code, out) == (100, "Job 1: FAILED, rank 1 on worker1 exited with code 1\n")
    assert atoll("logs", "t", "7")[0] == 102
    assert atoll("logs", "t", "--rank", "2")[0] == 2
    code, out, _ = atoll("logs", "t", "-o", "json")
    assert code == 100
    assert json.loads(out)["exit_code"] == 1
    assert "line 3" in json.loads(out)["log"]
    assert atoll("logs", "t", "--sync-down")[1] == "logs of job 1 of cluster t: sky_logs/t/1\n"
    assert "line 3" in Path("sky_logs/t/1/run.log").read_text()


def test_detached_jobs_are_followed_and_cancelled(atoll: Atoll) -> None:
    code, out, _ = atoll("launch", "-c", "t", "-d", "-o", "json", "echo begun; sleep 60")
    assert code == 0
    assert json.loads(out)["job_id"] == 1
    eventually(lambda: "begun" in atoll("logs", "t", "--no-follow")[1], "it runs", 30)
    assert atoll("logs", "t", "--status") == (101, "Job 1: RUNNING\n", "")
    assert atoll("logs", "t", "--no-follow", "--tail", "5")[0] == 101
    rows = json.loads(atoll("queue", "t", "-o", "json")[1])
    assert [(row["cluster"], row["job_id"], row["status"]) for row in rows] == [("t", 1, "RUNNING")]
    assert json.loads(atoll("status", "-o", "json")[1])[0]["num_unfinished_jobs"] == 1
    assert "1 running" in atoll("status")[1]
    following = start("logs", "t")
    code, out, _ = atoll("cancel", "t", "1")
    assert (code, out) == (0, "Job 1 of cluster t is being cancelled\n")
    out, _ = following.communicate(timeout=60)
    assert following.returncode == 103
    assert "begun" in out
    assert atoll("cancel", "t", "1")[1] == "Job 1 of cluster t had ended already: CANCELLED\n"
    assert atoll("cancel", "t")[1] == "no unfinished jobs on cluster t\n"
    assert atoll("cancel", "t", "9")[0] == 102


def test_ctrl_c_only_detaches(atoll: Atoll) -> None:
    launched = start("launch", "-c", "t", "echo begun; sleep 60")
    assert launched.stdout is not None
    shown = ""
    while "begun" not in shown:
        shown += launched.stdout.readline()
    for _ in range(3):  # in impatience
        launched.send_signal(signal.SIGINT)
        time.sleep(0.02)
    out, err = launched.communicate(timeout=60)
    assert (launched.returncode, err) == (101, "")
    assert "Job 1 is still running. Its log: atoll logs t 1; to cancel it: atoll cancel t 1" in out
    assert atoll("logs", "t", "--status")[0] == 101


@pytest.mark.long  # tests/tasks/test_cases.py closes one
def test_a_job_outlives_its_terminal(atoll: Atoll) -> None:
    launched = start("launch", "-c", "t", "echo begun; sleep 1; echo ended")
    assert launched.stdout is not None
    while "begun" not in launched.stdout.readline():
        pass
    launched.send_signal(signal.SIGHUP)
    launched.communicate(timeout=60)
    assert launched.returncode == -signal.SIGHUP
    code, out, _ = atoll("logs", "t")
    assert code == 0
    assert "ended" in out


@pytest.mark.long
def test_a_reader_that_has_seen_enough(atoll: Atoll) -> None:
    atoll("launch", "-c", "t", "seq 100000")
    logs = start("logs", "t")
    assert logs.stdout is not None
    assert logs.stderr is not None
    logs.stdout.readline()
    logs.stdout.close()
    assert logs.stderr.read() == ""
    logs.stderr.close()
    assert logs.wait(60) == 141
    for words, said in (
        (("queue",), ""),
        (("launch", "-c", "u", "true"), "atoll: standard output is closed: nothing was started on cluster u\n"),
        (("launch", "-o", "json", "-d", "-c", "t", "sleep 60"), "to cancel it: atoll cancel t 2\n"),
    ):
        ours, theirs = os.pipe()
        os.close(ours)
        process = start(*words, stdout=theirs)
        os.close(theirs)
        err = process.communicate(timeout=60)[1]
        assert err.endswith(said) if said else not err
        assert process.returncode == 141, words
    assert clusters.all_names() == ["t"]


@pytest.mark.parametrize("colour", [True, False])
def test_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch, colour: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    if colour:
        monkeypatch.delenv("NO_COLOR")
    ours, theirs = pty.openpty()
    process = start("launch", "-c", "t", "echo hi; exit 2", stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            seen += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait(60) == 100
    assert (re.search(rb"\033\[36m\(task, pid=\d+\) \033\[0mhi", seen) is not None) == colour
    assert (b"\033[31m\xe2\x9c\x97 Job 1 failed" in seen) == colour
    assert (re.search(rb"\033\[\d*m", seen) is not None) == colour


# ------------------------------------------------------------------------------------------ clusters and their life
def test_a_cluster_grows_when_idle_and_says_so(atoll: Atoll) -> None:
    atoll("launch", "-c", "t", "echo")
    code, out, _ = atoll("launch", "-c", "t", "--num-nodes", "3", "--gpus", "L4:2", "--cpus", "8+", "true")
    assert code == 0
    assert "cluster t is resized: 1 → 3 nodes, no accelerator → L4:2 per node, 8+ CPUs" in out
    out = atoll("launch", "-c", "t", "--num-nodes", "4", "--dryrun", "true")[1]
    assert out.splitlines()[:-1] == [
        "Cluster t on local: 4 nodes, L4:2 per node, simulated; the task uses no accelerator",
        "cluster t is resized: 3 → 4 nodes",
    ]
    atoll("launch", "-c", "t", "-d", "sleep 60")
    code, _, err = atoll("launch", "-c", "t", "--num-nodes", "4", "true")
    assert code == 2
    assert "can't be resized (3 → 4 nodes) while job 3 is on it" in err
    assert "atoll cancel t 3" in err
    code, _, err = atoll("exec", "t", "--num-nodes", "4", "true")
    assert code == 2
    assert "has less than the task needs (3 → 4 nodes): `atoll launch -c t TASK` resizes it" in err
    code, out, _ = atoll("exec", "t", "--num-nodes", "2", "echo beside it")
    assert code == 0
    assert out.count("beside it") == 2


def test_stop_start_and_down(atoll: Atoll, home: Path) -> None:
    atoll("launch", "-c", "t-1", "echo kept > ~/file")
    atoll("launch", "-c", "t-2", "-d", "sleep 60")
    assert atoll("status", "t-1", "--ip")[:2] in [(0, "127.0.0.1\n"), (0, f"{address_of('t-1')}\n")]
    code, out, _ = atoll("stop", "t-*", "-o", "json")
    assert code == 0
    assert [(row["status"], row["cancelled_jobs"]) for row in json.loads(out)] == [("STOPPED", []), ("STOPPED", [1])]
    assert re.findall(r"STOPPED", atoll("status")[1]) == ["STOPPED"] * 2
    code, _, err = atoll("exec", "t-1", "true")
    assert code == 2
    assert "cluster t-1 is stopped; `atoll start t-1` restarts it" in err
    assert atoll("start", "t-1")[1] == "Cluster t-1 is up; `atoll exec {name} TASK` runs on it\n".format(name="t-1")
    assert "kept" in atoll("exec", "t-1", "cat ~/file")[1]
    code, out, _ = atoll("launch", "-c", "t-2", "true")
    assert "cluster t-2 was stopped and is restarted" in out
    assert atoll("down", "t-1", "absent")[0] == 102
    assert atoll("down", "t-1", "t-2", "-y")[0] == 0
    assert atoll("down", "t-1")[1].startswith("Cluster t-1 is down already; its jobs' logs are kept")
    assert atoll("down", "t-1", "--all")[0] == 2  # one of them was not meant
    assert "no cluster is up" in atoll("status")[1]
    assert [row["status"] for row in json.loads(atoll("status", "-a", "-o", "json")[1])] == ["DOWN", "DOWN"]
    assert not (home / "clusters/t-1/nodes").exists()
    assert "kept" in atoll("logs", "t-1")[1]
    assert atoll("stop", "t-1")[0] == 102
    assert atoll("down", "t-2", "--purge")[1] == "Cluster t-2 is down and forgotten\n"
    assert not (home / "clusters/t-2").exists()
    assert atoll("logs", "t-2")[0] == 102
    assert "created again" in atoll("launch", "-c", "t-1", "true")[1]


def test_autostop(atoll: Atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    atoll("launch", "-c", "t", "true")
    code, out, _ = atoll("autostop", "t", "-i", "30")
    assert (code, out) == (0, "Cluster t is set to be stopped after 30 idle minutes\n")
    assert "30m" in atoll("status")[1]
    atoll("autostop", "t", "--cancel")
    assert json.loads(atoll("status", "t", "-o", "json")[1])[0]["autostop_minutes"] is None
    atoll("launch", "-c", "t", "-d", "sleep 60")
    atoll("autostop", "t", "-i", "0", "--down")
    assert json.loads(atoll("status", "t", "-o", "json")[1])[0]["status"] == "UP"  # not while a job goes on
    atoll("cancel", "t")
    eventually(lambda: "no cluster is up" in atoll("status")[1], "it is down", 30)
    # The minutes before it was set do not count.
    atoll("launch", "-c", "t", "true")
    now = time.time()
    for hours, status in ((1, ClusterStatus.UP), (2, ClusterStatus.STOPPED)):
        with monkeypatch.context() as patch:
            patch.setattr("atoll.tasks.lifecycle.time.time", lambda hours=hours: now + 3600 * hours)
            if hours == 1:
                lifecycle.set_autostop(clusters.load("t"), 30, down=False)
            assert lifecycle.refresh(clusters.load("t")).status is status
    # What is restarted has been idle from then on only.
    atoll("launch", "-c", "t", "-i", "0", "true")
    stopped = clusters.load("t")
    atoll("start", "t")
    started = json.loads(atoll("status", "t", "-o", "json")[1])[0]
    assert (stopped.status, started["status"], started["autostop_minutes"]) == ("STOPPED", "UP", None)
    assert started["launched_at"] > stopped.created_s
    code, out, _ = atoll("launch", "-c", "u", "--down", "true")
    assert code == 0
    assert out.endswith("Job ID: 1. Cluster u is DOWN now\n")


def test_without_a_name_a_cluster_gets_one(atoll: Atoll) -> None:
    code, out, _ = atoll("launch", "-d", "true")
    assert code == 0
    assert re.match(r"Cluster atoll-[0-9a-f]{4}-\w+ on local: 1 node", out)


def test_two_launches_at_once_on_one_name(atoll: Atoll) -> None:
    both = [start("launch", "-c", "t", "--num-nodes", "2", "echo hi") for _ in range(2)]
    assert [(each.communicate(timeout=60), each.returncode)[1] for each in both] == [0, 0]
    rows = json.loads(atoll("queue", "t", "-o", "json")[1])
    assert [(row["job_id"], row["status"]) for row in rows] == [(2, "SUCCEEDED"), (1, "SUCCEEDED")]


def test_a_job_without_gpus_on_a_simulated_cluster_says_the_same_everywhere(atoll: Atoll) -> None:
    assert atoll("launch", "-c", "t", "--gpus", "L4:1", "true")[0] == 0
    assert "it sees 1." in atoll("exec", "t", "echo it sees $ATOLL_SIMULATED.")[1]
    assert [row["simulated"] for row in json.loads(atoll("queue", "t", "-o", "json")[1])] == [True, True]


def test_dryrun_does_nothing(atoll: Atoll, home: Path) -> None:
    code, out, err = atoll(
        "launch", "--dryrun", "-c", "t", "--nodes", "2", "--use-spot", "-r", "--disk-tier", "low", "hi"
    )
    assert (code, err) == (0, "--retry-until-up has no effect\n")
    assert out.splitlines()[0] == "Cluster t on local: 2 nodes, no accelerator"
    assert "resources.use_spot has no effect on local" in out
    assert "resources.disk_tier has no effect on local" in out
    assert out.splitlines()[-1] == "nothing was started (--dryrun)"
    assert not list(home.glob("clusters/*"))


# ----------------------------------------------------------------------------------------------------- task files
def test_files_and_setup(atoll: Atoll, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run(["git", "init", "-q", work], check=True)
    (work / ".gitignore").write_text("dataset/*\n")
    (work / "dataset").mkdir()
    (work / "dataset/large").write_text("not copied")
    (work / "script.sh").write_text("echo from the workdir")
    (tmp_path / "notes.txt").write_text("mounted")
    task = task_file(
        tmp_path / "task.yaml",
        f"""
name: files
workdir: {work}
file_mounts: {{~/notes.txt: {tmp_path}/notes.txt}}
setup: echo setting up
run: bash script.sh; cat ~/notes.txt; ls; pwd
""",
    )
    code, out, _ = atoll("launch", "-c", "t", "--num-nodes", "2", task)
    assert code == 0
    assert [out.count(text) for text in ("setting up", "from the workdir", "mounted")] == [2, 2, 2]
    assert out.count("sky_workdir") == 2
    assert "dataset" not in out
    (work / "script.sh").write_text("echo changed")
    (tmp_path / "notes.txt").write_text("changed too")
    code, out, _ = atoll("exec", "t", task)
    assert [out.count(text) for text in ("setting up", "changed\n", "mounted")] == [0, 1, 1]
    assert "setting up" not in atoll("launch", "-c", "t", "--fast", task)[1]
    assert "setting up" not in atoll("launch", "-c", "t", "--no-setup", task)[1]
    assert "setting up" in atoll("launch", "-c", "t", task)[1]


def test_a_pipeline_stops_at_its_first_failure(atoll: Atoll, tmp_path: Path) -> None:
    steps = ["name: a\nrun: echo first", "name: b\nrun: 'echo second: $SKYPILOT_TASK_IDS; exit 1'", "run: echo third"]
    task = task_file(tmp_path / "pipeline.yaml", "\n---\n".join(steps))
    code, out, _ = atoll("launch", "-c", "t", task)
    assert code == 100
    assert "Task 2 of 3: b" in out
    assert re.search(r"second: sky-[\d-]+_t_1", out)
    assert "the pipeline ends here: 1 of its tasks" in out
    assert "third" not in out
    rows = json.loads(atoll("queue", "t", "-o", "json")[1])
    assert [(row["status"], row["after"], row["group"]) for row in rows] == [
        ("CANCELLED", 2, None),
        ("FAILED", 1, None),
        ("SUCCEEDED", None, None),
    ]
    code, out, _ = atoll("launch", "-c", "u", "--down", task)
    assert out.count("made anew") == 0
    assert out.endswith("Job IDs: 1, 2, 3. Cluster u is DOWN now\n")


def test_a_pipeline_goes_on_without_whoever_launched_it(atoll: Atoll, tmp_path: Path) -> None:
    steps = ["name: a\nrun: while [ ! -e go ]; do sleep 0.05; done", "run: echo second", "run: sleep 60"]
    task = task_file(tmp_path / "pipeline.yaml", "\n---\n".join(steps))
    code, out, _ = atoll("launch", "-c", "t", "-d", task)
    assert code == 0
    assert out.endswith("Jobs submitted, IDs: 1-3\nTo see them: atoll queue t; to cancel them: atoll cancel t 1 2 3\n")
    eventually(lambda: atoll("logs", "t", "1", "--status")[1] == "Job 1: RUNNING\n", "the first one runs", 30)
    assert re.search("PENDING +waiting for job 2, which comes before it, to succeed\n", atoll("queue", "t")[1])
    (clusters.node_home("t", 0) / "sky_workdir/go").touch()
    eventually(lambda: atoll("logs", "t", "3", "--status")[1] == "Job 3: RUNNING\n", "the last one runs", 30)
    assert "second" in atoll("logs", "t", "2")[1]
    # What is before the newest in its pipeline and has not ended is cancelled with it.
    (clusters.node_home("t", 0) / "sky_workdir/go").unlink()
    atoll("launch", "-c", "t", "-d", task)
    assert atoll("cancel", "t")[1].splitlines() == [f"Job {job} of cluster t is being cancelled" for job in (4, 5, 6)]
    assert atoll("logs", "t", "3", "--status")[0] == 101


def test_down_tells_what_nobody_could_look_for(atoll: Atoll, home: Path) -> None:
    assert atoll("launch", "-c", "t", "true")[0] == 0
    (home / "id").unlink()
    (home / "id").mkdir()
    code, out, err = atoll("down", "t")
    assert (code, out.partition(";")[0]) == (0, "Cluster t is down")
    assert f"{home / 'id'} can't be used: Is a directory. Remove it" in err
    assert "it is not known whether processes of cluster t hang there" in err


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["echo $RANK; echo 'a  b'"], "7\na  b\n"),  # one word is the line itself
        (["echo", "$RANK", "&&", "echo", "b"], "7\nb\n"),
        (["bash", "-c", 'echo node $RANK; echo "$0"', "a  b"], "node 7\na  b\n"),
        (["printf", "%s,", "(", "a\nb", "it's", '"', "`", "a;b", "\\", "", "x"], "(,a\nb,it's,\",`,a;b,\\,,x,"),
    ],
)
def test_words_of_a_command_arrive_as_they_were_typed(words: list[str], printed: str) -> None:
    done = subprocess.run(["bash", "-c", as_typed(words)], capture_output=True, text=True, env={"RANK": "7"})
    assert (done.stdout, done.stderr) == (printed, "")


def test_tasks_of_a_pipeline_that_need_different_files_run_one_by_one(atoll: Atoll, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        task_file(tmp_path / name / "file", f"{name}\n")
    steps = [f"workdir: {tmp_path}/{name}\nrun: cat file; echo $SKYPILOT_TASK_IDS" for name in ("one", "two")]
    task = task_file(tmp_path / "pipeline.yaml", "\n---\n".join(steps))
    code, _, err = atoll("launch", "-c", "t", "-d", task)
    assert code == 2
    assert "a pipeline of 2 tasks that can't be submitted at once: they have different workdirs" in err
    code, out, _ = atoll("launch", "-c", "t", task)
    assert (code, out.count("one\n"), out.count("two\n")) == (0, 1, 1)
    assert re.search(r"\) sky-[\d-]+_t_1 sky-[\d-]+_t_2\n", out)


def test_a_sweep(atoll: Atoll) -> None:
    script = """echo '{"loss": '$LR'}'; test $STEPS != 2; echo $SKYPILOT_JOB_RANK of $SKYPILOT_NUM_JOBS"""
    arguments = ("-c", "t", "--sweep", "LR=0.1,0.2", "--sweep", "STEPS=1,3", "--parallel", "2", script)
    code, out, _ = atoll("launch", *arguments)
    assert code == 0
    table = out[out.index("JOB ") :].splitlines()
    assert table[0].split() == ["JOB", "LR", "STEPS", "STATUS", "EXIT", "SECONDS", "RESULT"]
    assert [line.split()[1:4] for line in table[1:-1]] == [
        [lr, steps, "SUCCEEDED"] for lr in ("0.1", "0.2") for steps in ("1", "3")
    ]
    assert table[1].split()[-1] == "loss=0.1"
    assert "3 of 4" in atoll("logs", "t", "4")[1]
    code, out, _ = atoll("exec", "t", "--sweep", "STEPS=1,2", "-o", "json", "exit $((STEPS - 1))")
    assert code == 100
    rows = json.loads(out)
    assert [(row["labels"], row["status"], row["exit_code"]) for row in rows] == [
        ({"STEPS": "1"}, "SUCCEEDED", 0),
        ({"STEPS": "2"}, "FAILED", 1),
    ]


def test_secrets_never_show(atoll: Atoll, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cret-of-the-test"
    monkeypatch.setenv("HF_TOKEN", secret)
    task = task_file(
        tmp_path / "task.yaml", "envs: {MY_KEY: }\nrun: |\n  echo length ${#HF_TOKEN} ${#MY_KEY} ${#SIGN}\n"
    )
    said = [
        atoll(
            "launch", "-c", "t", "--env", "HF_TOKEN", "--env", f"MY_KEY={secret}", "--secret", f"SIGN={secret}", task
        ),
        atoll("queue", "t", "-o", "json"),
        atoll("logs", "t", "-o", "json"),
        atoll("status", "-o", "json"),
    ]
    assert "length 18 18 18" in said[0][1]
    assert secret not in repr(said)
    code, _, err = atoll("exec", "t", "--sweep", "MY_KEY=a,b", "true")
    assert code == 2
    assert "a secret can't be swept" in err
    files = contents(home / "clusters")
    assert any(path.name == "jobs.db" for path in files)
    assert [path for path, held in files.items() if secret.encode() in held] == []


# -------------------------------------------------------------------------------------------------- nodes and Python
def test_ssh_and_cp(atoll: Atoll, tmp_path: Path) -> None:
    atoll("launch", "-c", "t", "--num-nodes", "2", "echo $SKYPILOT_NODE_RANK > ~/rank")
    assert ssh("t/worker1", "--", "sh", "-c", "cat rank; exit 5") == (5, "1\n")
    assert atoll("ssh", "t/worker2")[0] == 2
    assert atoll("ssh", "t", "-L", "80:80:80:80")[0] == 2
    assert atoll("cp", "t/worker1:rank", "here")[0] == 0
    assert Path("here").read_text() == "1\n"
    Path("folder/inner").mkdir(parents=True)
    Path("folder/inner/file").write_text("content")
    assert atoll("cp", "folder", "t:copies/")[0] == 0
    assert atoll("cp", "t:copies/folder", "back")[1] == "t:copies/folder → back: 1 file\n"
    assert Path("back/inner/file").read_text() == "content"
    code, _, err = atoll("cp", "t:absent", ".")
    assert code == 2
    assert "t:absent: there is no such file" in err


def test_ctrl_c_belongs_to_the_shell(atoll: Atoll) -> None:
    atoll("launch", "-c", "t", "true")
    shell = start("ssh", "t", "--", "sh", "-c", "echo begun; exec sleep 60", start_new_session=True)
    assert shell.stdout is not None
    assert shell.stdout.readline() == "begun\n"
    os.killpg(shell.pid, signal.SIGINT)
    out, err = shell.communicate(timeout=60)
    assert (shell.returncode, out, err) == (-signal.SIGINT, "", "")


def test_ssh_beside_a_running_job(atoll: Atoll) -> None:
    inside, outside = free_port(), free_port()
    server = f"echo served > page; {sys.executable} -m http.server {inside} --bind 127.0.0.1"
    atoll("launch", "-c", "t", "-d", server)
    get = f"from urllib.request import urlopen; print(urlopen('http://127.0.0.1:{inside}/page').read().decode())"
    seen = f'{sys.executable} -c "{get}" 2>/dev/null'

    def answers() -> bool:
        return "served" in ssh("t", "--", "sh", "-c", seen)[1]

    eventually(answers, "its server answers inside", 40)
    assert "SKYPILOT_TASK_ID=sky-" in ssh("t", "--", "env")[1]
    shell = start("ssh", "t", "-L", f"{outside}:{inside}", "--", "sleep", "60", start_new_session=True)
    try:

        def forwarded() -> bool:
            try:
                return urllib.request.urlopen(f"http://127.0.0.1:{outside}/page", timeout=5).read() == b"served\n"
            except OSError:
                return False

        eventually(forwarded, "its server answers here", 40)
    finally:
        atoll("cancel", "t", "--all")
        lifecycle.down("t")
        os.killpg(shell.pid, signal.SIGHUP)  # as when its terminal is closed
        shell.communicate(timeout=60)


def test_from_python(tmp_path: Path) -> None:
    task = sky.Task(name="api", run="echo $GREETING; exit $CODE", envs={"GREETING": "hello", "CODE": 0})
    lines: list[str] = []
    job = sky.launch(task, "t", on_line=lines.append)
    assert lines == ["Cluster t on local: 1 node, no accelerator"]
    assert (job.wait(60), job.status, job.exit_code) == (sky.JobStatus.SUCCEEDED, sky.JobStatus.SUCCEEDED, 0)
    assert "hello" in job.logs()
    failed = sky.exec(sky.Task(run="exit 7"), "t")
    assert (failed.wait(), failed.exit_code) == (sky.JobStatus.FAILED, 7)
    slow = sky.exec(sky.Task(run="sleep 60"), "t")
    assert not slow.wait(0.05).ended
    slow.cancel()
    assert slow.wait(60) is sky.JobStatus.CANCELLED
    assert [row.id for row in sky.get(sky.queue("t"))] == [3, 2, 1]
    chunks: list[bytes] = []
    assert sky.tail_logs("t", 2, output_stream=chunks.append) == 100
    assert b"exited with code 7" in b"".join(chunks)
    assert [each.name for each in sky.get(sky.status())] == ["t"]
    with pytest.raises(sky.ConfigError, match="no cluster 'tt'"):
        sky.exec(task, "tt")
    sky.autostop("t", 10)
    assert sky.get(sky.status("t"))[0].autostop_minutes == 10
    sky.stop("t")
    sky.start("t")
    sky.down("t")
    assert sky.get(sky.status()) == []


# ------------------------------------------------------------------------------------- what one of them can't spoil
@pytest.fixture
def three(atoll: Atoll, home: Path) -> Iterator[Path]:
    """Clusters a, b and c, whose supervisors have closed their files; whatever a test damages is removed."""
    for name in "abc":
        assert atoll("launch", "-d", "-c", name, "true")[0] == 0
    for name in "abc":
        assert atoll("logs", name)[0] == 0
        pid = supervisor.pid_of(home / "clusters" / name)
        assert pid is not None
        eventually(lambda pid=pid: not leaks.is_running(pid), f"the supervisor of {name} has gone", 30)
    yield home / "clusters"
    for name in clusters.all_names():
        lifecycle.purge(name, lambda line: None)


@pytest.mark.parametrize("file", ["cluster.json", "jobs.db"])
def test_a_damaged_cluster_spoils_no_other(atoll: Atoll, three: Path, file: str) -> None:
    for each in (three / "b").glob(f"{file}-*"):
        each.unlink()
    (three / "b" / file).write_bytes(b"\0rubbish" * 2000)
    code, out, err = atoll("status")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["NAME", "c", "a", "b"]
    assert "DAMAGED" in out
    assert len(err.splitlines()) == 1
    assert "atoll down --purge b" in err
    assert [row["name"] for row in json.loads(atoll("status", "-o", "json")[1])] == ["c", "a", "b"]
    assert atoll("status", "b")[0] == 100
    code, out, err = atoll("queue")
    assert (code, out.count("SUCCEEDED"), len(err.splitlines())) == (0, 2, 1)
    code, out, err = atoll("down", "a", "b", "c")
    assert code == 100
    assert "Cluster a is down" in out
    assert "Cluster c is down" in out
    assert atoll("down", "--purge", "b")[0] == 0
    assert not (three / "b").exists()


def test_down_tells_of_each(atoll: Atoll, three: Path) -> None:
    code, out, err = atoll("down", "a", "nope", "b")
    assert code == 102
    assert [line.split(";")[0] for line in out.splitlines()] == ["Cluster a is down", "Cluster b is down"]
    assert err.splitlines() == ["atoll: no cluster 'nope'; `atoll status --all` lists all clusters"]
    (three / "c/cluster.json").unlink()
    assert atoll("down", "c")[0] == 102
    assert atoll("down", "--purge", "c", "nope")[0] == 102
    assert not (three / "c").exists()


def test_purge_of_a_damaged_cluster_ends_its_job(atoll: Atoll, three: Path) -> None:
    atoll("exec", "a", "-d", "echo $$ > ~/pid; exec sleep 600")
    eventually((three / "a/nodes/0/home/pid").exists, "the job runs", 30)
    (three / "a/cluster.json").write_text("{")
    assert atoll("down", "--purge", "a")[0] == 0
    assert not (three / "a").exists()


def test_purge_of_a_folder_that_lies_elsewhere(atoll: Atoll, three: Path, tmp_path: Path) -> None:
    (three / "a").rename(tmp_path / "moved")
    (three / "a").symlink_to(tmp_path / "moved")
    assert atoll("down", "--purge", "a")[0] == 0
    assert not os.path.lexists(three / "a")
    (three / "b/cluster.json").unlink()
    (three / "d").symlink_to(tmp_path / "nowhere")
    assert atoll("down", "--purge", "d")[0] == 0
    assert not os.path.lexists(three / "d")


def test_files_that_go_away_while_a_folder_is_removed(tmp_path: Path) -> None:
    """As those of a store do, which its supervisor closes at that time."""
    for number in range(2000):
        (tmp_path / f"folder/{number % 20}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"folder/{number % 20}/{number}").touch()
    with ThreadPoolExecutor(2) as threads:
        for removed in [threads.submit(remove_tree, tmp_path / "folder") for _ in range(2)]:
            removed.result()
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--workdir", "absent", "echo"],
        ["absent.yaml"],
        ["task.yaml"],
    ],
)
def test_a_launch_that_starts_nothing_leaves_nothing(atoll: Atoll, home: Path, words: list[str]) -> None:
    task_file(Path("task.yaml"), "file_mounts:\n  ~/data: ./absent\nrun: echo\n")
    assert atoll("launch", "-c", "t", "--dryrun", *words)[0] == 2
    assert atoll("launch", "-c", "t", *words)[0] == 2
    assert not list(home.glob("clusters/*"))
    atoll("launch", "-c", "t", "true")
    assert atoll("launch", "-c", "t", *words)[0] == 2
    assert clusters.load("t").status == "UP"
    atoll("down", "t")
    assert atoll("launch", "-c", "t", *words)[0] == 2
    assert clusters.load("t").status == "DOWN"
    assert atoll("logs", "t")[0] == 0


def test_ctrl_c_before_the_job_is_there(home: Path) -> None:
    with clusters.locked("t", "launch", print):
        process = start("launch", "-c", "t", "echo", "hi")
        assert process.stdout is not None
        assert process.stdout.readline() == f"waiting for another command on cluster t: launch, process {os.getpid()}\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "nothing was started" in out + err
    assert not list(home.glob("clusters/*"))


# -------------------------------------------------------------------------------------- while a launch is under way
def test_what_changes_a_cluster_waits_and_says_so(home: Path) -> None:
    for name in ("t", "u"):
        with clusters.locked(name, "launch", print):
            clusters.save(ClusterSpec(name))
    with clusters.locked("t", "launch", print):
        alone = [("start", "t"), ("stop", "t"), ("down", "t"), ("down", "--purge", "t")]
        processes = [start(*words) for words in [*alone, ("stop", "u", "t")]]
        line = f"waiting for another command on cluster t: launch, process {os.getpid()}\n"
        for process in processes:
            assert process.stderr is not None
            assert process.stderr.readline() == line
        assert processes[-1].stdout is not None
        assert processes[-1].stdout.readline().startswith("Cluster u is stopped")  # it waits for no other
        for process in processes:
            process.send_signal(signal.SIGINT)
        for process in processes:
            out, err = process.communicate(timeout=60)
            # One that comes while the line is being written has it written again.
            said = "\natoll: interrupted: the same command again finishes it\n"
            assert (out, err.replace(line, ""), process.returncode) == ("", said, 130)
    assert clusters.load("t").status == "UP"


def test_status_lists_the_newest_first_and_hides_clusters_of_run(atoll: Atoll, home: Path) -> None:
    for number, name in enumerate(("old", "run-0123ab", "new")):
        with clusters.locked(name, "launch", print):
            clusters.save(ClusterSpec(name, created_s=time.time() + number))
    lines = atoll("status")[1].splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["new", "old"]
    assert lines[-1] == "1 of `atoll run`: atoll status --all"
    assert [row["name"] for row in json.loads(atoll("status", "--all", "-o", "json")[1])] == [
        "new",
        "run-0123ab",
        "old",
    ]


def test_looking_waits_for_nobody(atoll: Atoll) -> None:
    assert atoll("launch", "-c", "t", "echo hi")[0] == 0
    assert atoll("autostop", "t", "-i", "0")[0] == 0
    with clusters.locked("t", "launch", print):  # a cluster that is copied to is not idle
        for words in (
            ("status",),
            ("status", "t"),
            ("queue",),
            ("queue", "t"),
            ("logs", "t"),
            ("logs", "t", "--status"),
        ):
            code, out, err = atoll(*words)
            assert (code, err) == (0, ""), words
            assert "STOPPED" not in out
    assert "STOPPED" in atoll("status")[1]


def test_a_job_is_named_once_though_its_supervisor_had_to_be_killed(
    atoll: Atoll, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_END_S", 0.3)
    atoll("launch", "-d", "-c", "t", "sleep 600")
    eventually(lambda: "RUNNING" in atoll("queue", "t")[1], "the job runs", 30)
    pid = supervisor.pid_of(home / "clusters/t")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert atoll("down", "--purge", "t")[1] == "Cluster t is down and forgotten (job 1 was cancelled)\n"


# ---------------------------------------------------------------------------------------------------- surroundings
def test_output_that_is_closed_or_knows_ascii_only(atoll: Atoll) -> None:
    code = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c '{RUN}' launch -c t 'echo hi' >&-"],
        env={**os.environ, "PYTHONPATH": SOURCE_ROOT},
        stderr=subprocess.PIPE,
        timeout=60,
    )
    assert (code.returncode, code.stderr) == (0, b"")
    with open("/dev/full", "w") as full:
        process = start("status", stdout=full)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("atoll: No space left on device\n", 100)
    ascii_only = {**os.environ, "PYTHONPATH": SOURCE_ROOT, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "atoll", "launch", "-c", "t", "--nodes", "2", "echo hi"]
    done = subprocess.run(words, env=ascii_only, capture_output=True, timeout=60)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert b"SUCCEEDED" in done.stdout


def test_a_folder_that_was_removed(atoll: Atoll, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, err = atoll("run", "--", "echo", "x")
    assert code == 2
    assert "current folder is gone" in err
    monkeypatch.chdir(tmp_path)


# -------------------------------------------------------------------------------------------- words for newcomers
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["launch", "x.py"], 2, "atoll run x.py, or atoll launch --workdir . python x.py"),
        (["launch", "--dryrun", "python", "x.py"], 0, "x.py is in this folder, which is not sent to the nodes"),
        (["launch", "--dryrun", "--gpus", "0", "true"], 0, "no accelerator"),
        (["launch", "--dryrun", "--gpus", "", "true"], 0, "no accelerator"),
        (["launch", "--dryrun", "--gpus", "L4", "--gpus", "L4:2", "true"], 0, "the last one counts, --gpus L4:2"),
        (["launch", "--dryrun", "--gpus", "L4:0.5", "true"], 0, "L4:0.5: a job has whole accelerators"),
        (["launch", "--dryrun", "--gpus", "L4:5000", "true"], 2, "at most 1024 accelerators"),
        (["launch", "--dryrun", "--gpus", "L44", "true"], 2, "'L44' is not known: did you mean L4?"),
        (["launch", "--dryrun", "--num-nodes", "1001", "true"], 2, "1001 nodes on this machine alone"),
        (["run", "--nodes", "1001", "x.py"], 2, "1001 nodes on this machine alone"),
        (["run", "--gpus", "none", "--nproc", "2", "--", "true"], 0, "--nproc-per-node 2 has no effect"),
        (["run", "--", "x.py"], 2, "leave the -- out"),
        (["run", "--no-python", "./x.py"], 2, "./x.py is not executable"),
        (["run", "--infra", "ssh/lab", "../y.py"], 2, "outside the workdir"),
        (["jobs", "logs", "7"], 102, "no managed job was launched from local yet"),
        (["jobs", "cancel"], 2, "give numbers of jobs, --name or --all"),
        (["jobs", "launch", "--infra", "locl", "x"], 2, "did you mean 'local'"),
        (["serve", "--help"], 2, "not in this version"),
        (["show-gpus", "-a"], 2, "`atoll gpus`"),
        (["logs", "-f", "absent"], 102, "`atoll status --all` lists"),
        (["logs", "run-*"], 102, "no cluster 'run-*'; `atoll status --all` lists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_newcomers_are_told(
    atoll: Atoll, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "y.py").touch()
    (tmp_path / "here/x.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    got, out, err = atoll(*arguments)
    assert (got, said in " ".join((out + err).split())) == (code, True), out + err


def test_help_has_no_cut_sentences(atoll: Atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in atoll("--help")[1].partition("\n")[2]


def test_exec_and_ssh_take_a_script_as_one_word(atoll: Atoll) -> None:
    atoll("launch", "-c", "t", "true")
    code, out, _ = atoll("exec", "t", "--dryrun", "false")
    assert (code, out.splitlines()[-1]) == (0, "nothing was started (--dryrun)")
    assert atoll("exec", "t", "--dryrun", "--num-nodes", "3", "false")[0] == 2
    assert len(sky.get(sky.queue("t"))) == 1
    assert ssh("t", "--", "echo a | wc -c") == (0, "2\n")


def test_python_is_told_what_a_task_is(tmp_path: Path) -> None:
    with pytest.raises(sky.UsageError, match=r"sky\.Task\.from_yaml\('task\.yaml'\)"):
        sky.launch("task.yaml")
    with pytest.raises(sky.ConfigError, match=r"sky\.Resources"):
        sky.Task(resources=1)
    with pytest.raises(sky.ConfigError, match="zero character"):
        sky.Task(run="a\0b")
    job = sky.launch(sky.Task(run="true", secrets={"API_TOKEN": "hidden-value"}), "t")
    job.wait(60)
    said = f"{sky.get(sky.queue('t'))} {sky.get(sky.status())}"
    assert "base_env" not in said
    assert "hidden-value" not in said
    assert "PATH" not in said


def test_the_traceback_of_a_single_rank_is_shown_once(atoll: Atoll, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("raise SystemExit('only-' + 'once')")
    code, out, err = atoll("run", "x.py")
    assert code == 100
    assert (out + err).count("only-once") == 1
