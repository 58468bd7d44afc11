"""Tasks on hosts of the testbed, with the commands that people type."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tasks.test_secrets import GIVEN, LAUNCHED, arrived, holding, plant, say

from atoll.tasks import clusters
from testbed.hosts import Testbed
from testbed.terminal import log_out, only_by_password, talk

pytestmark = pytest.mark.timeout(300)  # many commands each, on a machine that may be busy
ATOLL = str(Path(sys.executable).parent / "atoll")
PYTHON = os.path.realpath(sys.executable)  # not of an environment that has torch, which a preflight would try


@pytest.fixture
def either(request: pytest.FixtureRequest, lab: Testbed) -> Testbed:
    """The same two hosts, supervised from here and from the head."""
    if request.param != "here":
        trust(lab)
    return lab


HERE, HEAD = "here", "on the head"


@pytest.fixture
def lab(bed: Testbed) -> Iterator[Testbed]:
    """Two hosts, declared as ``ssh/lab``; afterwards nothing of ours runs on any that is alive."""
    declare(bed)
    yield bed
    for host in bed.hosts:
        if host.pids():
            eventually(lambda host=host: not host.command_lines(), f"nothing runs on {host.name}")


def declare(bed: Testbed, **settings: object) -> None:
    """``[ssh.lab]`` with all hosts, in config.toml."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"python": PYTHON, **settings}.items()]
    hosts = json.dumps([host.name for host in bed.hosts])
    Path(os.environ["ATOLL_HOME"], "config.toml").write_text("\n".join(["[ssh.lab]", f"hosts = {hosts}", *lines, ""]))


def trust(bed: Testbed) -> None:
    """Every host's user may log in to every other host, as labs have it; their home is shared."""
    there = bed.folder / "home" / "sky" / ".ssh"
    there.mkdir(exist_ok=True)
    for name in ("id_ed25519", "known_hosts"):
        shutil.copy(bed.home / ".ssh" / name, there / name)
    bed.hosts[0].run("chown -R sky:sky /home/sky/.ssh && chmod 700 /home/sky/.ssh && chmod 600 /home/sky/.ssh/*")


def atoll(*words: str, code: int = 0, cwd: Path | None = None, timeout: float = 100) -> str:
    done = subprocess.run([ATOLL, *words], capture_output=True, text=True, timeout=timeout, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def eventually(condition: object, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]  # any callable
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def questions(bed: Testbed) -> Path:
    """A file that gets the name of a host whenever it is asked about itself from here."""
    asked, ssh = bed.folder / "asked", bed.folder / "bin" / "ssh"
    asked.touch()
    log = f'case "$*" in *"-- h1 "*nvidia-smi*) echo h1 >> {asked};; *"-- h2 "*nvidia-smi*) echo h2 >> {asked};; esac'
    ssh.write_text(ssh.read_text().replace("exec ", f"{log}\nexec ", 1))
    return asked


def test_the_same_command_runs_on_hosts_with_only_the_infra_changed(lab, tmp_path):
    declare(lab, python=sys.executable)
    trust(lab)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "data.txt").write_text("from here\n")
    (tmp_path / "mounted").write_text("a mounted file\n")
    task = tmp_path / "task.yaml"
    task.write_text(
        "name: both\nworkdir: work\nnum_nodes: 2\nenvs: {WORD: yes-really}\nfile_mounts: {~/mounted: mounted}\n"
        "setup: echo set up on $(hostname)\n"
        "run: |\n  echo $WORD $(cat data.txt) $(hostname) $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES\n"
        '  echo "$SKYPILOT_NODE_IPS"; cd ~/sky_workdir && ls\n'
    )
    here = atoll("launch", "-c", "here", str(task), cwd=tmp_path)
    asked = questions(lab)
    there = atoll("launch", "-c", "there", "--infra", "ssh/lab", str(task), cwd=tmp_path)
    assert sorted(asked.read_text().split()) == ["h1", "h2"]  # about themselves, each once
    assert "yes-really from here here-head 0 of 2" in here
    for rank, host in enumerate(("h1", "h2")):
        assert f"yes-really from here {host} {rank} of 2" in there
        assert f"set up on {host}" in there
    assert "preflight: 2 hosts OK, over eth0, all-reduce of 4 MiB" in there
    assert "✓ Job finished (status: SUCCEEDED)." in there
    assert "yes-really" in atoll("logs", "there")
    (tmp_path / "work" / "data.txt").write_text("later\n")
    later = atoll("exec", "there", "--num-nodes", "2", "--workdir", "work", "cat data.txt ~/mounted", cwd=tmp_path)
    assert later.count(") later\n") == later.count(") a mounted file\n") == 2
    assert atoll("ssh", "there/worker1", "--", "hostname").endswith("h2\n")
    assert json.loads(atoll("queue", "there", "-o", "json"))[0]["status"] == "SUCCEEDED"
    atoll("down", "there", "here")


def test_a_failing_rank_is_named_and_the_others_end(lab):
    said = atoll(
        "launch", "-c", "f", "--infra", "ssh/lab", "--num-nodes", "2",
        "test $SKYPILOT_NODE_RANK = 0 && exec sleep 300; echo my last words; exit 3", code=100,
    )  # fmt: skip
    assert "rank 1 on worker1 exited with code 3" in said
    assert "my last words" in said


@pytest.mark.long
def test_a_head_that_can_log_in_to_the_others_supervises_and_this_machine_may_leave(lab):
    trust(lab)
    said = atoll(
        "launch", "-d", "-c", "away", "--infra", "ssh/lab", "--num-nodes", "2",
        "until [ -e ~/go ]; do sleep 0.1; done; echo gone on",
    )  # fmt: skip
    assert "the supervisor runs on h1: this machine may sleep or disconnect" in said
    subprocess.run(["ssh", "-O", "exit", "h1"], capture_output=True)
    assert json.loads(atoll("queue", "away", "-o", "json"))[0]["status"] in ("PENDING", "INIT", "RUNNING")
    lab.hosts[0].run("touch /home/sky/go")
    shown = atoll("logs", "away")
    assert shown.count("gone on") == 2
    assert "SUCCEEDED" in shown
    said = atoll(
        "launch", "-c", "away", "--infra", "ssh/lab", "--num-nodes", "2",
        "test $SKYPILOT_NODE_RANK = 0 && exec sleep 300; sleep 1; kill -9 $$", code=100,
    )  # fmt: skip
    assert "rank 1 on worker1 was killed by SIGKILL" in said
    atoll("launch", "-d", "-c", "away", "--num-nodes", "2", "setsid sleep 1000 & sleep 1000")
    eventually(lambda: "RUNNING" in atoll("queue", "away"), "it runs")
    atoll("cancel", "away", "-y", "-a")
    eventually(lambda: "CANCELLED" in atoll("queue", "away"), "it is cancelled")
    assert "away" in atoll("status")
    atoll("down", "-y", "away", timeout=60)
    assert "gone on" in atoll("logs", "away", "1")


@pytest.mark.long
def test_a_supervisor_stays_where_its_cluster_was_made(lab: Testbed) -> None:
    """The head can no longer log in to the other host; so the cluster has to be made anew, and is supervised here."""
    trust(lab)
    known = lab.folder / "home" / "sky" / ".ssh" / "known_hosts"
    two = ["launch", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2"]
    atoll(*two, "true")
    known.rename(known.with_name("kept"))
    said = atoll(*two, "true", code=100)  # it could a moment ago, so nobody looked again
    assert "its host key is not known" in said
    assert "`ssh sky@10.77.0.12` once" in said
    assert "Type that on h1" in said
    said = atoll(*two, "true", code=100)
    assert "cluster c is supervised from h1, which can't continue: h1 can't log in to sky@10.77.0.12 (Host key" in said
    assert "A supervisor does not move: fix that, or `atoll down c` and launch it again" in said
    atoll("down", "c")
    said = atoll(*two, "true")
    assert "the supervisor runs on this machine, because h1 can't log in to sky@10.77.0.12" in said
    assert "earlier jobs of cluster c and their logs stay on h1; job numbers start again at 1" in said
    assert [row["job_id"] for row in json.loads(atoll("queue", "c", "-o", "json"))] == [1]
    known.with_name("kept").rename(known)
    assert "the supervisor runs on this machine. Keep it awake while jobs run" in atoll(*two, "true")
    atoll("down", "c")
    assert "the supervisor runs on h1" in atoll(*two, "true")
    assert [row["job_id"] for row in json.loads(atoll("queue", "c", "-o", "json"))] == [3, 2, 1]
    assert "is down and forgotten" in atoll("down", "--purge", "c")
    assert lab.hosts[0].run("ls /home/sky/.atoll/clusters 2>/dev/null || true") == ""


@pytest.mark.long
def test_looking_at_a_copy_of_the_state_folder_ends_nothing(lab: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor's lock is free, and its records name the hosts and what runs there."""
    home = Path(os.environ["ATOLL_HOME"])
    atoll("launch", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", "-d", "exec sleep 1000")
    for host in lab.hosts:
        eventually(lambda host=host: "sleep 1000" in host.command_lines(), "the job runs")
    before = [lab.hosts[0].run("pgrep -fx 'sleep 1000'"), lab.hosts[1].run("pgrep -fx 'sleep 1000'")]
    copy = home.with_name(f"{home.name}c")  # as short
    shutil.copytree(home, copy, ignore=shutil.ignore_patterns("socket", "ssh"))
    with contextlib.ExitStack() as ends, monkeypatch.context() as other:
        ends.callback(shutil.rmtree, copy, ignore_errors=True)
        other.setenv("ATOLL_HOME", str(copy))
        assert "FAILED_DRIVER" in atoll("queue", "c")
        assert "Cluster c is down" in atoll("down", "c")
    assert [row["status"] for row in json.loads(atoll("queue", "c", "-o", "json"))] == ["RUNNING"]
    log = atoll("logs", "c", "1", "--no-follow", code=101)
    assert "restart" not in log.lower(), log
    assert [lab.hosts[0].run("pgrep -fx 'sleep 1000'"), lab.hosts[1].run("pgrep -fx 'sleep 1000'")] == before
    atoll("down", "c")


@pytest.mark.long
def test_a_mount_that_may_not_be_where_it_is_wanted_is_told_of(lab, tmp_path):
    task = tmp_path / "task.yaml"
    task.write_text(
        "file_mounts:\n  /ckpt: {name: my-bucket, mode: MOUNT}\n  ~/mine: {name: other-bucket}\n"
        "run: ls -d ~/mine ~/.atoll-mounts/ckpt\n"
    )
    said = atoll("launch", "-c", "m", "--infra", "ssh/lab", str(task), cwd=tmp_path)
    assert "h1: /ckpt could not be made (Permission denied): it is at /home/sky/.atoll-mounts/ckpt" in said
    assert ") /home/sky/mine" in said
    assert "0 of 0 MB" not in said
    atoll("down", "m")
    task.write_text(f"file_mounts: {{~/mine/in/file: {task}}}\nrun: 'true'\n")
    lab.hosts[0].run("touch /home/sky/mine/in", user="sky")
    assert "/home/sky/mine/in" in atoll("launch", "-c", "n", "--infra", "ssh/lab", str(task), code=100)
    assert "no cluster 'n'" in atoll("logs", "n", code=102)
    assert lab.hosts[0].run("ls /home/sky/.atoll/clusters") == "m\n"
    (lab.folder / "home" / "sky" / ".bashrc").write_text("read answer\n")
    said = refused("launch", "-c", "n", "--infra", "ssh/lab", "true")
    assert "arrived damaged: does something in ~/.bashrc there read standard input?" in said


# `make test` has what is common of it: test_the_same_command_runs_on_hosts_with_only_the_infra_changed.
@pytest.mark.long
@pytest.mark.parametrize("either", [HERE, HEAD], indirect=True)
def test_the_life_of_a_cluster_of_hosts(either: Testbed, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "deep").mkdir(parents=True)
    (work / "deep" / "tool.sh").write_text("#!/bin/sh\necho the tool on $(hostname)\n")
    (work / "deep" / "tool.sh").chmod(0o755)
    (work / "gone").touch()
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "file").write_text("mounted\n")
    start_file = either.folder / "home" / "sky" / ".bashrc"  # nothing that it prints is in anybody's way
    start_file.write_text("echo welcome; echo oops >&2; printf 'no end of line: '; export FROM_BASHRC=seen\n")
    task = tmp_path / "task.yaml"
    task.write_text(
        "workdir: work\nfile_mounts: {~/extra: extra, /tmp/one: extra/file}\n"
        "run: ./deep/tool.sh; cat ~/extra/file /tmp/one; echo $FROM_BASHRC; ls; echo made > made.txt\n"
    )
    said = atoll("launch", "-c", "c", "--infra", "ssh/lab", str(task), cwd=tmp_path)
    assert ") the tool on h1\n" in said
    assert said.count(") mounted\n") == 2
    assert ") seen\n" in said
    assert "ssh/lab has 2 hosts; request fewer" in refused(
        "launch", "-c", "c", "--num-nodes", "3", str(task), cwd=tmp_path
    )
    (work / "gone").unlink()
    (work / "deep" / "tool.sh").write_text("#!/bin/sh\necho another tool on $(hostname)\n")
    assert "sky_logs/c/1" in atoll("logs", "c", "1", "--sync-down", cwd=tmp_path)
    copied = tmp_path / "sky_logs" / "c" / "1" / "run.log"
    assert ") the tool on h1\n" in copied.read_text()
    assert copied.stat().st_mode & 0o77 == 0
    larger = ("launch", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", str(task))
    if not (either.folder / "home" / "sky" / ".ssh" / "id_ed25519").exists():
        assert "A supervisor does not move" in atoll(*larger, code=100, cwd=tmp_path)
        atoll("down", "c")
        said = atoll(*larger, cwd=tmp_path)
        jobs = [1]
    else:
        said = atoll(*larger, cwd=tmp_path)
        assert "cluster c is resized: 1 → 2 nodes" in said
        jobs = [2, 1]
    assert [row["job_id"] for row in json.loads(atoll("queue", "c", "-o", "json"))] == jobs
    for host in ("h1", "h2"):
        assert f") another tool on {host}\n" in said
    assert "gone\n" not in said
    assert ") made\n" in atoll("exec", "c", "cat made.txt")  # what a job made stays
    assert ") h2\n" in atoll("exec", "c", "--num-nodes", "2", "hostname")
    assert atoll("ssh", "c/worker1", "--", "hostname").endswith(": h2\noops\n")
    start_file.write_text(start_file.read_text() + "trap 'echo and as it ends' EXIT\n")
    atoll("cp", "c:sky_workdir/made.txt", str(tmp_path))
    assert (tmp_path / "made.txt").read_text() == "made\n"
    atoll("cp", str(tmp_path / "made.txt"), "c/worker1:brought.txt")
    assert either.hosts[1].run("cat /home/sky/brought.txt") == "made\n"
    assert "welcome" not in atoll("logs", "c", "1", "--no-follow")
    atoll("exec", "-d", "c", "exec sleep 1000")
    atoll("cancel", "c", "-y", "-a")
    atoll("autostop", "c", "-i", "60")
    assert "UP" in atoll("status", "c", "--refresh")
    atoll("stop", "c", "-y")
    assert "atoll start c" in refused("exec", "c", "true")
    atoll("start", "c", "-y")
    assert "made.txt\n" in atoll("exec", "c", "cat ~/sky_workdir/made.txt; ls")
    place = "/home/sky/.atoll/clusters/c"
    assert "made.txt" in either.hosts[0].run(f"ls {place}/sky_workdir")
    atoll("down", "c", "-y")
    left = either.hosts[0].run(f"ls -A {place} 2>/dev/null || true; ls -A /home/sky")
    assert "sky_workdir" not in left
    assert "tool on h1\n" in atoll("logs", "c", "1")
    assert "cluster c is down" in refused("exec", "c", "true")


@pytest.mark.long
def test_a_password_is_typed_once_a_host_and_a_launch(lab: Testbed, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from here\n")
    for host in lab.hosts:
        only_by_password(host, "open sesame")
    words = ["launch", "-c", "c", "--infra", "ssh/lab", "--num-nodes", "2", "--workdir", str(tmp_path), "cat file"]
    asked = [f"sky@{host.addr}'s password: " for host in lab.hosts]
    said = talk([ATOLL, *words], dict.fromkeys(asked, "open sesame\n"), 120)
    assert [said.count(question) for question in asked] == [1, 1], said
    assert said.count("from here") == 2, said
    assert ") h2\n" in atoll("exec", "c", "--num-nodes", "2", "hostname")  # through the same logins
    atoll("down", "c")
    log_out(Path(os.environ["ATOLL_HOME"]))
    assert "or run this in a terminal" in refused(*words)


def refused(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run([ATOLL, *words], capture_output=True, text=True, timeout=100, cwd=cwd)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("either", [pytest.param(HERE, marks=pytest.mark.long), HEAD], indirect=True)
@pytest.mark.parametrize("end", [pytest.param("finished", marks=pytest.mark.long), "killed"])
def test_jobs_leave_no_value(
    either: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, end: str
) -> None:
    plant(monkeypatch)
    places = [either.folder / "home", Path(os.environ["ATOLL_HOME"]), Path(tempfile.gettempdir())]
    task, head = tmp_path / "task.yaml", either.hosts[0]
    script = say(LAUNCHED).replace("> up", "> up-$SKYPILOT_NODE_RANK")
    task.write_text(json.dumps({"num_nodes": 2, "run": f"cd; rm -f up-$SKYPILOT_NODE_RANK; {script}"}))
    folder = clusters.folder_of("c") if "here" in request.node.name else either.folder / "home/sky/.atoll/clusters/c"
    for number, words in enumerate((["launch", "-c", "c", "--infra", "ssh/lab"], ["exec", "c"]), 1):
        head.run("rm -f /home/sky/go /home/sky/up-*")
        atoll(*words, "-d", "--env", "HF_TOKEN", *GIVEN, str(task))
        log = folder / "jobs" / str(number) / "run.log"
        eventually(lambda log=log: log.exists() and log.read_text().count("production") == 2, "both nodes run it")
        assert holding(*places) == []
        for host in either.hosts:
            lines = "\n".join(host.command_lines())
            assert "run.sh" in lines
            assert "planted" not in lines
        if end == "killed":
            pid = int((folder / "supervisor.lock").read_text())
            os.kill(pid, signal.SIGKILL) if "here" in request.node.name else head.run(f"kill -9 {pid}")
        head.run("touch /home/sky/go")
        arrived(atoll("logs", "c", code=0 if end == "finished" else 100), LAUNCHED)
        assert holding(*places) == []
    if end == "finished":
        (tmp_path / "go").touch()
        run = (
            "run",
            "--infra",
            "ssh/lab",
            "--nodes",
            "2",
            *GIVEN,
            "--env",
            "HF_TOKEN",
            "--",
            "bash",
            "-c",
            say(LAUNCHED),
        )
        arrived(atoll(*run, cwd=tmp_path), LAUNCHED)
        assert holding(*places) == []
