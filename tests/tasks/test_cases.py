"""How jobs end, through the real command: failures are named, and nothing of a job is left."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.agent.test_command import memory_limit
from tests.cli.test_cluster_commands import Atoll, atoll, free_port, home, start, task_file
from tests.pools import eventually, with_marker

from atoll.providers.local_node import isolation
from atoll.tasks import clusters

__all__ = ["atoll", "home", "memory_limit"]


@pytest.fixture(params=["namespaces", "shared"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With nodes that have namespaces of their own, and with nodes that share the machine's."""
    way: str = request.param
    if way == "shared":
        monkeypatch.setenv("ATOLL_PID_NAMESPACE", "0")
    elif isolation().refused is not None:
        pytest.skip(f"nodes share the machine's processes here: {isolation().refused}")
    return way


def row_of(atoll: Atoll, name: str, job_id: int = 1) -> dict[str, object]:
    """A job as ``queue -o json`` shows it."""
    rows = json.loads(atoll("queue", name, "--all", "-o", "json")[1])
    return next(row for row in rows if row["job_id"] == job_id)


def wait_for_log(atoll: Atoll, name: str, text: str, times: int = 1) -> None:
    eventually(lambda: atoll("logs", name, "--no-follow")[1].count(text) >= times, f"{text!r} in the log", 60)


def sleeps() -> str:
    """A command line that nobody else has."""
    return f"sleep 7{random.randrange(10**6):06}"


# ---------------------------------------------------------------------------------------------------- who failed
def test_three_nodes_of_which_the_last_fails(atoll: Atoll) -> None:
    sleeping = sleeps()
    script = f"[ $SKYPILOT_NODE_RANK = 2 ] || exec {sleeping}; sleep 0.3; echo dying; date +%s.%N > ~/died; exit 1"
    code, out, _ = atoll("launch", "-c", "t", "--num-nodes", "3", script)
    assert code == 100
    assert "failed (status: FAILED): rank 2 on worker2 exited with code 1. Its last lines:\n    dying\n" in out
    assert "The others were stopped by the launcher" in out
    assert "rank 0" not in out.partition("✗")[2]
    row = row_of(atoll, "t")
    died = float((clusters.node_home("t", 2) / "died").read_text())
    assert 0 <= float(str(row["end_at"])) - died < 10, "2 s on an idle machine"
    eventually(lambda: not with_marker(sleeping.split()[1]), "the others have gone")


def test_a_shell_that_kills_itself(atoll: Atoll) -> None:
    code, out, _ = atoll("launch", "-c", "t", "--nodes", "2", "[ $SKYPILOT_NODE_RANK = 0 ] || kill -9 $$; sleep 60")
    assert code == 100
    assert "rank 1 on worker1 was killed by SIGKILL" in out


def test_setup_that_fails_on_one_node(atoll: Atoll, tmp_path: Path) -> None:
    task = task_file(
        tmp_path / "task.yaml",
        "num_nodes: 2\nsetup: echo on $SKYPILOT_SETUP_NODE_RANK; exit $((4 * SKYPILOT_SETUP_NODE_RANK))\nrun: echo no",
    )
    code, out, _ = atoll("launch", "-c", "t", task)
    assert code == 100
    assert re.search(r"status: FAILED_SETUP\): .*worker1.* code 4", out)
    assert "no\n" not in out
    assert "on 1" in atoll("logs", "t", "--tail", "100")[1]
    # It is run again next time, since it has not succeeded.
    assert "on 1" in atoll("launch", "-c", "t", "--fast", task)[1]


def test_setup_alone(atoll: Atoll, tmp_path: Path) -> None:
    task = task_file(tmp_path / "task.yaml", "setup: echo only this")
    code, out, _ = atoll("launch", "-c", "t", task)
    assert code == 0
    assert re.search(r"^\(setup pid=\d+\) only this$", out, re.M)


@pytest.mark.long
def test_the_last_command_decides_unless_strict(atoll: Atoll) -> None:
    script = "false; echo after"
    assert atoll("launch", "-c", "t", script)[0] == 0
    code, out, _ = atoll("exec", "t", "--strict", script)
    assert code == 100
    assert "after" not in out
    code, out, _ = atoll("exec", "t", "true; (exit 7)")
    assert code == 100
    assert "exited with code 7" in out


def test_memory_that_ran_out_is_told_apart(atoll: Atoll, memory_limit: Callable[[int], str]) -> None:
    procs = memory_limit(64 << 20)
    hog = f"echo $$ > {procs}; exec {sys.executable} -c 'x = bytearray(1 << 30); print(len(x))'"
    code, out, _ = atoll("launch", "-c", "t", hog)
    assert code == 100
    assert "memory" in out.partition("✗")[2]


# ------------------------------------------------------------------------------------------------ nothing is left
@pytest.mark.long
def test_cancel_reaches_those_that_hide(atoll: Atoll, both_ways: str) -> None:
    away, bare, forked = sleeps(), sleeps(), sleeps()
    script = f"setsid {away} & env -i setsid bash -c '({forked} &) ; exec {bare}' & echo begun; wait"
    assert atoll("launch", "-c", "t", "--nodes", "2", "-d", script)[0] == 0
    words = [each.split()[1] for each in (away, bare, forked)]
    eventually(lambda: all(len(with_marker(word)) >= 2 for word in words), "all of them on both nodes", 40)
    assert atoll("cancel", "t", "1")[0] == 0
    assert atoll("logs", "t")[0] == 103
    eventually(lambda: not any(with_marker(word) for word in words), "nothing of it left")


@pytest.mark.long
def test_a_killed_torchrun_leaves_no_worker(atoll: Atoll, both_ways: str) -> None:
    word = sleeps().split()[1]
    script = (
        f"printf '%s\\n' 'import time' 'print(\"working\", flush=True)' 'time.sleep({word})' > worker.py; "
        f"{sys.executable} -m torch.distributed.run --master_port {free_port()} --nproc_per_node 2 worker.py {word} & "
        "agent=$!; wait $agent"
    )
    atoll("launch", "-c", "t", "-d", script)
    wait_for_log(atoll, "t", "working", 2)
    agent = next(pid for pid in with_marker(word) if "torch.distributed.run" in _command(pid))
    os.kill(agent, signal.SIGKILL)
    assert atoll("logs", "t")[0] == 100
    assert "exited with code 137" in str(row_of(atoll, "t")["reason"])
    eventually(lambda: not with_marker(word), "no worker left")


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.long
def test_pkill_hits_nobody_else(atoll: Atoll, both_ways: str) -> None:
    """Neither its own shell, nor its peer, nor another cluster; in a cluster that is called so itself."""
    sleeping = sleeps()
    word = sleeping.split()[1]
    atoll("launch", "-c", "other", "-d", f"exec -a torchrun {sleeping}")
    eventually(lambda: with_marker(word), "it sleeps", 40)
    script = (
        "pkill -f torchrun || true; echo first; exec -a torchrun sleep 600 & mine=$!; "
        "until grep -aq ^torchrun /proc/$mine/cmdline; do sleep 0.02; done; echo ready; "
        "until [ -e ~/go ]; do sleep 0.02; done; [ $SKYPILOT_NODE_RANK = 0 ] && pkill -f torchrun || kill -9 $mine; "
        "wait $mine; echo ended with $?"
    )
    atoll("launch", "-c", "torchrun", "-d", "--num-nodes", "2", script)
    wait_for_log(atoll, "torchrun", "ready", 2)
    for node, end in enumerate(("ended with 143", "ended with 137")):
        (clusters.node_home("torchrun", node) / "go").touch()
        wait_for_log(atoll, "torchrun", end)
    code, out, _ = atoll("logs", "torchrun")
    assert code == 0
    assert out.count("first") == 2
    assert re.search(r"^\(head, .* ended with 143$", out, re.M)
    assert re.search(r"^\(worker1, .* ended with 137$", out, re.M)
    assert with_marker(word)
    assert row_of(atoll, "other")["status"] == "RUNNING"


# ------------------------------------------------------------------------------------------- ports, order, restarts
def _serve(port: int, for_s: float) -> str:
    code = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); print('bound', flush=True)"
    return f'master_port={port}; : torchrun --master_port={port}; {sys.executable} -c "{code}; time.sleep({for_s})"'


def test_two_clusters_with_one_port_side_by_side(atoll: Atoll) -> None:
    port = free_port()
    assert atoll("launch", "-c", "one", "-d", _serve(port, 60))[0] == 0
    wait_for_log(atoll, "one", "bound")
    if "nodes share ports" in atoll("logs", "one", "--no-follow")[1]:
        pytest.skip("no network namespace with a way out can be had here")
    assert atoll("launch", "-c", "two", _serve(port, 0.1))[0] == 0
    assert row_of(atoll, "one")["status"] == "RUNNING"


@pytest.mark.long
def test_two_clusters_with_one_port_take_turns(atoll: Atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_NETWORK_NAMESPACE", "0")
    port = free_port()
    atoll("launch", "-c", "one", "-d", _serve(port, 60))
    wait_for_log(atoll, "one", "bound")
    second = start("launch", "-c", "two", _serve(port, 0.1))
    waits = f"waiting for port {port}, held by job 1 of cluster one"
    eventually(lambda: clusters.find("two") is not None, "it is made", 40)
    wait_for_log(atoll, "two", waits)
    assert row_of(atoll, "two")["status"] == "PENDING"
    atoll("cancel", "one", "1")
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 0
    assert waits in out
    assert "bound" in out


# -------------------------------------------------------------------------------------------- terminals, supervisors
@pytest.mark.long
def test_a_terminal_that_closes(atoll: Atoll) -> None:
    """Its master side goes, and the kernel hangs up on the whole session."""
    ours, theirs = os.openpty()
    launched = start(
        "launch", "-c", "t", "echo begun; sleep 1; echo ended", stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=_controlling,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"begun" not in shown:
        shown += os.read(ours, 4096)
    os.close(ours)
    launched.wait(60)
    code, out, _ = atoll("logs", "t")
    assert code == 0
    assert "ended" in out


def _controlling() -> None:
    import fcntl
    import termios

    fcntl.ioctl(1, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize(
    "first", ["queue", *(pytest.param(name, marks=pytest.mark.long) for name in ("logs", "status"))]
)
def test_a_killed_supervisor_is_noticed(atoll: Atoll, first: str) -> None:
    sleeping = sleeps()
    word = sleeping.split()[1]
    atoll("launch", "-c", "t", "--nodes", "2", "-d", f"echo begun; {sleeping}")
    eventually(lambda: len(with_marker(word)) >= 2, "both sleep", 40)
    folder = clusters.folder_of("t")
    os.kill(int((folder / "supervisor.lock").read_text()), signal.SIGKILL)
    eventually(lambda: not with_marker(word), "its nodes released")
    code, out, _ = atoll(first, "t")
    if first == "queue":
        assert "FAILED_DRIVER" in out
    elif first == "logs":
        assert code == 100
        assert "its supervisor was killed" in out
    else:
        assert "running" not in out
    assert row_of(atoll, "t")["status"] == "FAILED_DRIVER"
    assert atoll("logs", "t")[0] == 100
    code, out, _ = atoll("launch", "-c", "t", "--nodes", "2", "echo works again")
    assert code == 0
    assert out.count("works again") == 2
