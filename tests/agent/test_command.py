"""Processes of a task: started, heard, ended and told apart by an agent, in both ways a node shares a machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.pools import eventually, no_swap, parent
from tests.talking import BASE_ENV, TaskNode

from atoll.agent.child import _SAYS_KILLED
from atoll.wire import frames


@pytest.fixture
def node(mode: str) -> Iterator[TaskNode]:
    """A running node, in each mode."""
    with contextlib.closing(TaskNode()) as started:
        yield started
    assert not os.path.exists(started.tmp)


def test_it_says_what_is_the_nodes_own(node: TaskNode, mode: str) -> None:
    place = node.hello["place"]
    own = mode == "namespace"
    assert {place[part] for part in ("pid_namespace", "hostname", "tmp")} == {own}
    assert not place["network"]
    assert bool(place["notes"]) is not own
    assert (node.hello["pid"] == 1) is own


def test_a_script_runs_from_a_file_with_just_its_environment(node: TaskNode, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    script = 'pwd; echo "$0"; echo "$COLOUR"; ps -o args= -p $$; env | wc -l; echo loud >&2; cat'
    said = node.run(script, cwd=str(folder), env={"COLOUR": "blue"})
    pwd, name, colour, command, count, loud = said.splitlines()
    assert pwd == str(folder)
    assert name.endswith("/atoll-0/run.sh")
    assert command == f"bash {name}"
    assert (colour, loud) == ("blue", "loud")
    # What was given, two tags, and what bash adds: PWD, SHLVL, OLDPWD or _.
    assert int(count) <= len(BASE_ENV) + 1 + 2 + 4


@pytest.mark.parametrize(
    ("script", "code", "killer"),
    [("exit 3", 3, None), ("false; true", 0, None), ("kill -9 $$", None, 9), ("kill -SEGV $$", None, signal.SIGSEGV)],
)
def test_its_end_is_told(node: TaskNode, script: str, code: int | None, killer: int | None) -> None:
    node.start(f"echo last words\n{script}")
    frame = node.next(frames.EXIT)
    assert (frame.meta["exit_code"], frame.meta["signal"]) == (code, killer)
    assert frame.meta["tail"] == ["last words"]
    assert not frame.meta["oom"]
    assert not frame.meta["killed"]


@pytest.mark.parametrize(
    ("argv", "cwd", "said"),
    [
        (["no-such-program"], "/", "no such program"),
        (["bash"], "/proc/nowhere", "/proc/nowhere"),
        (["/etc/hostname"], "/", "/etc/hostname"),
    ],
)
def test_what_cannot_be_started_is_told(node: TaskNode, argv: list[str], cwd: str, said: str) -> None:
    node.send(frames.START, 5, {"argv": argv, "env": BASE_ENV, "cwd": cwd})
    frame = node.next(frames.EXIT, 5)
    assert frame.meta["exit_code"] == 127
    assert said in frame.meta["tail"][0]
    assert node.run("echo fine") == "fine\n"


def test_several_run_side_by_side(node: TaskNode) -> None:
    for number in range(4):
        node.start(f"sleep 0.{4 - number}; echo I am {number}; exit {number}", number)
    assert [node.end(number) for number in range(4)] == [(n, None, f"I am {n}\n") for n in range(4)]


LEAVES = """
setsid sleep 301 &
(setsid bash -c 'sleep 301 & exit 0' &)
nohup sleep 301 >/dev/null 2>&1 &
echo ready
"""


def test_what_a_script_leaves_behind_ends_with_it(node: TaskNode) -> None:
    gate = os.path.join(node.tmp, "gate")
    os.mkfifo(gate)
    node.start(f"{LEAVES} cat {gate}; exit 4")
    eventually(lambda: len(node.pids()) == 5, "the script, what it waits for, and three that it leaves", 60)
    Path(gate).write_text("go on\n")
    assert node.end()[0] == 4
    assert node.pids() == []


def test_terminate_reaches_the_whole_tree_and_lets_it_finish(node: TaskNode) -> None:
    child = "trap 'sleep 0.5; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    node.start(f"bash -c {child!r}")
    assert node.line() == "ready"
    node.terminate()
    # The script itself is gone at once: its end is told when all has ended.
    code, killer, said = node.end()
    assert (code, killer) == (None, signal.SIGTERM)
    assert said.endswith("saved\n")
    assert node.pids() == []


def test_terminate_by_number_leaves_others_alone(node: TaskNode) -> None:
    for number in (0, 1):
        node.start("echo up; sleep 300", number)
        node.line(number)
    node.terminate(1)
    assert node.end(1)[1] == signal.SIGTERM
    eventually(lambda: len(node.pids()) == 2, "the other script and its child", 60)
    node.send(frames.KILL, 0)
    frame = node.next(frames.EXIT, 0)
    assert (frame.meta["signal"], frame.meta["killed"]) == (signal.SIGKILL, True)


def test_kill_ends_what_ignores_terminate(node: TaskNode) -> None:
    node.start(f"trap '' TERM; {LEAVES} sleep 300")
    node.line()
    node.terminate()
    time.sleep(0.2)
    assert node.pids()
    node.send(frames.KILL, frames.EVERY)
    assert node.end()[1] == signal.SIGKILL
    assert node.pids() == []


def test_a_grandchild_that_outlives_the_goodbye_is_killed(node: TaskNode) -> None:
    node.start("(trap '' TERM; echo ready; sleep 300) & wait")
    node.line()
    node.terminate()
    with pytest.raises(TimeoutError):
        node.next(frames.EXIT, seconds=0.3)
    node.send(frames.KILL, 0)
    assert node.end()[1] == signal.SIGTERM
    assert node.pids() == []


def agent_in(node: TaskNode) -> int:
    """Host pid of a node's agent."""

    def climb() -> int | None:
        with contextlib.suppress(OSError, IndexError):  # the shell that it began at was about to end
            pid = node.pids()[0]
            while pid > 1 and Path(f"/proc/{pid}/comm").read_text() != "atoll-agent\n":
                pid = parent(pid)
            return pid if pid > 1 else None
        return None

    return eventually(climb, "the agent above a node's processes")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_its_agent_outlives_signals(node: TaskNode, number: int) -> None:
    node.start("echo up; sleep 300")
    node.line()
    os.kill(agent_in(node), number)
    assert node.run("echo still here", 1) == "still here\n"


def test_nothing_outlives_its_agent(mode: str) -> None:
    with contextlib.closing(TaskNode()) as node:
        node.start(LEAVES + "sleep 300" if mode == "namespace" else "echo up; exec sleep 300")
        node.line()
        os.kill(agent_in(node), signal.SIGKILL)
        eventually(lambda: not node.pids(), "a node that died with its agent")
        # In a namespace it is unshare(1) that is asked, and some versions of it pass a SIGKILL on as a failure.
        reason = eventually(lambda: node.handle.reason, "its own end")
        assert reason.startswith(("its agent was killed by SIGKILL", "its agent exited with code 1"))


def test_nothing_outlives_a_closed_channel(node: TaskNode) -> None:
    node.start(LEAVES + "trap '' TERM; sleep 300")
    node.line()
    node.handle.stop()
    assert node.pids() == []
    assert not os.path.exists(node.tmp)


def test_its_command_line_says_nothing_of_the_user(node: TaskNode) -> None:
    node.start("echo up; sleep 300")
    node.line()
    agent = agent_in(node)
    assert Path(f"/proc/{agent}/cmdline").read_bytes().strip(b"\0") == b"atoll-agent"
    assert Path(f"/proc/{agent}/comm").read_text() == "atoll-agent\n"


PRINTS = """
import hashlib, os, sys
block = os.urandom(1 << 16)
digest = hashlib.sha256()
for _ in range(1600):
    os.write(1, block)
    digest.update(block)
os.write(1, digest.hexdigest().encode())
"""


def test_much_output_comes_whole(node: TaskNode) -> None:
    node.send(frames.START, 0, {"argv": [sys._base_executable, "-c", PRINTS], "env": BASE_ENV, "cwd": "/"})
    node.next(frames.STARTED)
    got = bytearray()
    while len(got) < (100 << 20) + 64:
        got += node.next(frames.LOG).rest
    assert node.end() == (0, None, "")
    assert hashlib.sha256(got[:-64]).hexdigest() == got[-64:].decode()


def test_a_driver_that_does_not_read_holds_up_who_prints_and_nothing_is_lost(node: TaskNode) -> None:
    node.start("head -c 30000000 /dev/zero; echo; echo end")
    time.sleep(0.5)
    assert node.pids(), "30 MB went somewhere"
    code, _, said = node.end()
    assert code == 0
    assert len(said) == 30000000 + len("\nend\n")


def test_the_first_line_comes_at_once(node: TaskNode) -> None:
    node.start("while read -t 1 line || true; do echo tick; sleep 0.2; done")
    for _ in range(3):  # it never ends: nothing would come of a buffer that is handed on when full
        assert "tick" in node.line()


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("run.sh: line 3:    12 Killed                  python train.py", True),
        ("  exitcode  : -9 (pid: 1234)", True),
        ("Signal 9 (SIGKILL) received by PID 1234", True),
        ("DataLoader worker (pid 12) is killed by signal: Killed. ", True),
        ("ValueError: skilled workers", False),
        ("exitcode: -95", False),
    ],
)
def test_lines_that_say_killed_are_known(line: str, is_one: bool) -> None:
    assert bool(_SAYS_KILLED.search(line)) is is_one


@pytest.mark.serial  # the kernel counts such kills for the whole machine: who is killed meanwhile would be counted in
def test_memory_that_ran_out_is_told_apart(node: TaskNode, memory_limit: Callable[[int], str]) -> None:
    """In a cgroup of its own, so that nobody else is hurt; of a script itself, and of a child that a shell reports."""
    procs = memory_limit(64 << 20)
    hog = "python3 -c 'x = bytearray(1 << 30); print(len(x))'"
    node.start(f"echo $$ > {procs}\nexec {hog}")
    frame = node.next(frames.EXIT)
    assert (frame.meta["signal"], frame.meta["oom"]) == (signal.SIGKILL, True)
    node.start(f"echo $$ > {procs}\n{hog}\nsleep 1.5\nexit 1", 1)
    frame = node.next(frames.EXIT, 1)
    assert (frame.meta["exit_code"], frame.meta["oom"]) == (1, True)
    # And a plain failure, soon after, is none.
    node.start("exit 1", 2)
    assert not node.next(frames.EXIT, 2).meta["oom"]


@pytest.fixture
def memory_limit() -> Iterator[Callable[[int], str]]:
    """Makes a cgroup with so many bytes; returns the file that takes its processes."""
    made: list[Path] = []

    def make(limit: int) -> str:
        for root, setting in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
                              (Path("/sys/fs/cgroup"), "memory.max")):  # fmt: skip
            if (root / "cgroup.procs").exists() and os.access(root, os.W_OK):
                group = root / f"atoll-test-{os.getpid()}-{time.monotonic_ns()}"
                with contextlib.suppress(OSError):
                    group.mkdir()
                    made.append(group)
                    (group / setting).write_text(str(limit))
                    no_swap(group, limit)
                    return str(group / "cgroup.procs")
        pytest.skip("no cgroup can be made here: memory that runs out is tested where one can")

    yield make
    for group in made:
        eventually(lambda procs=group / "cgroup.procs": not procs.read_text().strip(), "an empty cgroup")
        group.rmdir()
