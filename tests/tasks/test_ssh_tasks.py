"""Tasks on hosts of the testbed, with the commands that people type."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.fixtures import MakeBed
from testbed.hosts import Testbed

pytestmark = pytest.mark.serial
ATOLL = str(Path(sys.executable).parent / "atoll")


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
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"python": sys.executable, **settings}.items()]
    hosts = json.dumps([host.name for host in bed.hosts])
    Path(os.environ["ATOLL_HOME"], "config.toml").write_text("\n".join(["[ssh.lab]", f"hosts = {hosts}", *lines, ""]))


def trust(bed: Testbed) -> None:
    """Every host's user may log in to every other host, as labs have it; their home is shared."""
    there = bed.folder / "home" / "sky" / ".ssh"
    there.mkdir(exist_ok=True)
    for name in ("id_ed25519", "known_hosts"):
        shutil.copy(bed.home / ".ssh" / name, there / name)
    bed.hosts[0].run("chown -R sky:sky /home/sky/.ssh && chmod 700 /home/sky/.ssh && chmod 600 /home/sky/.ssh/*")


def atoll(*words: str, code: int = 0, cwd: Path | None = None, timeout: float = 60) -> str:
    done = subprocess.run([ATOLL, *words], capture_output=True, text=True, timeout=timeout, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def eventually(condition: object, what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]  # any callable
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def test_the_same_command_runs_on_hosts_with_only_the_infra_changed(lab, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "data.txt").write_text("from here\n")
    task = tmp_path / "task.yaml"
    task.write_text(
        "name: both\nworkdir: work\nnum_nodes: 2\nenvs: {WORD: yes-really}\n"
        "setup: echo set up on $(hostname)\n"
        "run: |\n  echo $WORD $(cat data.txt) $(hostname) $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES\n"
        "  echo \"$SKYPILOT_NODE_IPS\"; cd ~/sky_workdir && ls\n"
    )
    here = atoll("launch", "-c", "here", str(task), cwd=tmp_path)
    there = atoll("launch", "-c", "there", "--infra", "ssh/lab", str(task), cwd=tmp_path)
    assert "yes-really from here here-head 0 of 2" in here
    for rank, host in enumerate(("h1", "h2")):
        assert f"yes-really from here {host} {rank} of 2" in there
        assert f"set up on {host}" in there
    assert "preflight: 2 hosts are well" in there
    assert "✓ Job finished (status: SUCCEEDED)." in there
    assert "yes-really" in atoll("logs", "there")
    assert json.loads(atoll("queue", "there", "-o", "json"))[0]["status"] == "SUCCEEDED"
    atoll("down", "there", "here")


def test_a_failing_rank_is_named_and_the_others_end(lab):
    said = atoll(
        "launch", "-c", "f", "--infra", "ssh/lab", "--num-nodes", "2",
        "test $SKYPILOT_NODE_RANK = 0 && exec sleep 300; echo my last words; exit 3", code=100,
    )  # fmt: skip
    assert "rank 1 on worker1 exited with code 3" in said
    assert "my last words" in said


def test_a_head_that_can_log_in_to_the_others_supervises_and_this_machine_may_leave(lab):
    trust(lab)
    said = atoll(
        "launch", "-d", "-c", "away", "--infra", "ssh/lab", "--num-nodes", "2",
        "for i in 1 2 3 4 5 6; do echo tick $i; sleep 1; done",
    )  # fmt: skip
    assert "the supervisor runs on h1: this machine may sleep or leave" in said
    subprocess.run(["ssh", "-O", "exit", "h1"], capture_output=True)
    assert json.loads(atoll("queue", "away", "-o", "json"))[0]["status"] in ("INIT", "RUNNING")
    shown = atoll("logs", "away")
    assert shown.count("tick 6") == 2
    assert "SUCCEEDED" in shown
    said = atoll(
        "launch", "-c", "away", "--infra", "ssh/lab", "--num-nodes", "2",
        "test $SKYPILOT_NODE_RANK = 0 && exec sleep 300; sleep 1; kill -9 $$", code=100,
    )  # fmt: skip
    assert "rank 1 on worker1 was killed by SIGKILL" in said
    started = time.monotonic()
    atoll("launch", "-d", "-c", "away", "--num-nodes", "2", "setsid sleep 1000 & sleep 1000")
    eventually(lambda: "RUNNING" in atoll("queue", "away"), "it runs")
    atoll("cancel", "away", "-y", "-a")
    eventually(lambda: "CANCELLED" in atoll("queue", "away"), "it is cancelled")
    assert "away" in atoll("status")
    atoll("down", "-y", "away")
    assert time.monotonic() - started < 60
    assert "tick 6" in atoll("logs", "away", "1")
