"""The agent by itself, spoken to over its channel, and what it finds and kills processes with."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pools import SOURCE_ROOT, descriptors, environ, eventually, with_marker

import leaks
from atoll.agent.node import _LOG_BACKLOG_BYTES
from atoll.agent.process_tree import OomCounter, SharedMemory, kill_tree, tree
from atoll.agent.rank_io import Output
from atoll.gang.members import _BOOT
from atoll.providers.local_node import agent_command
from atoll.wire import frames
from atoll.wire.frames import Frame, Parser, pack, receive, send_all

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]


class Agent:
    """A running agent and our end of its channel."""

    def __init__(self, tmp_path: Path, *, driver: int | None = None, prefix: tuple[str, ...] = ()) -> None:
        self.tmp = tmp_path / "node"
        self.tag = f"test{os.getpid()}x{time.monotonic_ns()}"
        self.channel, theirs = socket.socketpair()
        pidfd = os.pidfd_open(driver or os.getpid())
        self.process = subprocess.Popen(
            [*prefix, *agent_command(), str(theirs.fileno()), str(pidfd)],
            pass_fds=(theirs.fileno(), pidfd),
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        theirs.close()
        os.close(pidfd)
        self.parser = Parser()
        self.got: list[Frame] = []

    def send(self, kind: int, rank: int = 0, call: int = 0, meta: dict[str, Any] | None = None) -> None:
        send_all(self.channel, pack(kind, rank, call, meta))

    def set_up(self, program: str, ranks: int = 1, **more: Any) -> None:
        """Start ranks that run this program instead of the worker; what they say and print goes through the agent."""
        setup = {"node": 0, "tag": self.tag, "tmp_dir": str(self.tmp)}
        self.send(frames.SETUP, meta={**setup, **{name: more.pop(name) for name in ("ttl_s",) if name in more}})
        env = {"PATH": os.defpath, leaks.TAG: os.environ[leaks.TAG]}
        argv = [sys.executable, "-S", "-c", program]
        self._start = {"argv": argv, "env": env, "cwd": str(self.tmp.parent), "channel": True, **more}
        for rank in range(ranks):
            self.spawn(rank)

    def spawn(self, rank: int) -> None:
        self.send(frames.START, rank, meta=self._start)

    def next(self, kind: int, seconds: float = 60.0) -> Frame:
        """The next frame of a kind; others are kept."""
        self.channel.settimeout(seconds)
        while True:
            for at, frame in enumerate(self.got):
                if frame.kind == kind:
                    return self.got.pop(at)
            data, fds = receive(self.channel)
            if not data:
                raise EOFError
            self.got += [raw.parsed() for raw in self.parser.feed(data, fds)]

    def ended(self) -> bool:
        return self.process.poll() is not None and not self.tmp.exists() and not self.ranks()

    def ranks(self) -> list[int]:
        return [pid for pid in leaks.descendants() if environ(pid).get("ATOLL_RANK_TAG", "").startswith(self.tag)]

    def close(self) -> None:
        self.channel.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    started = Agent(tmp_path)
    with contextlib.closing(started):
        yield started


ECHO = """
import socket, struct
sock = socket.socket(fileno=3)
while True:
    data = sock.recv(65536)
    if not data:
        break
    length, kind, flags, fds, rank, call = struct.unpack_from("<IBBHIQ", data)
    body = data[20:20 + length]
    sock.sendall(struct.pack("<IBBHIQ", len(body), 21, 0, 0, rank, call) + body)
"""


def test_it_says_what_it_speaks(agent: Agent) -> None:
    hello = agent.next(frames.AGENT)
    assert hello.meta["version"] == frames.VERSION
    assert hello.meta["pid"] == agent.process.pid


def test_it_relays_frames_both_ways(agent: Agent) -> None:
    agent.set_up(ECHO, ranks=3)
    for rank in (2, 0, 1):
        agent.send(frames.CALL, rank, 77, {"for": rank})
    seen = {frame.rank: frame.meta["for"] for frame in (agent.next(frames.RESULT) for _ in range(3))}
    assert seen == {0: 0, 1: 1, 2: 2}


def test_a_call_for_a_rank_that_is_gone_is_dropped(agent: Agent) -> None:
    agent.set_up("import os; os._exit(9)")
    assert agent.next(frames.EXIT).meta["exit_code"] == 9
    fd = os.memfd_create("test")
    send_all(agent.channel, pack(frames.CALL, 0, 1, num_fds=1), [fd])
    os.close(fd)
    agent.send(frames.KILL, 0)
    agent.send(frames.CANCEL, 0, 1)
    agent.spawn(0)
    assert agent.next(frames.EXIT).meta["exit_code"] == 9
    assert not any("memfd:test" in target for target in descriptors(agent.process.pid))


def test_an_interpreter_that_is_not_there(agent: Agent) -> None:
    agent.set_up("", argv=["/no/such/python"])
    exit_ = agent.next(frames.EXIT)
    assert exit_.meta["exit_code"] == 127
    assert "/no/such/python" in exit_.meta["tail"][0]
    before = len(descriptors(agent.process.pid))
    for _ in range(20):
        agent.spawn(0)
        agent.next(frames.EXIT)
    eventually(lambda: len(descriptors(agent.process.pid)) <= before, "no more descriptors than before")


def test_many_deaths_leave_no_descriptor_and_no_zombie(agent: Agent) -> None:
    agent.set_up("import os, sys; os.system('true &'); print('x'); sys.exit(2)")
    agent.next(frames.EXIT)

    def fds() -> int:
        return len(descriptors(agent.process.pid))

    eventually(lambda: fds() < 16, "a rank's descriptors closed")
    few = fds()  # or a few more: it may be in the middle of closing them
    for _ in range(20):
        agent.spawn(0)
        agent.next(frames.EXIT)
    eventually(lambda: fds() <= few, "no more descriptors than before")
    eventually(lambda: not _children(agent.process.pid), "no child, dead or alive")


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_output_is_relayed_and_drained_at_death(agent: Agent) -> None:
    agent.set_up("import os; os.write(1, b'o' * 60_000); os.write(2, b'e\\n' * 3); os._exit(1)")
    exit_ = agent.next(frames.EXIT)
    logs = [frame for frame in agent.got if frame.kind == frames.LOG]
    assert b"".join(bytes(frame.rest) for frame in logs if not frame.flags) == b"o" * 60_000
    assert b"".join(bytes(frame.rest) for frame in logs if frame.flags) == b"e\n" * 3
    assert exit_.meta["tail"] == ["e"] * 3


def test_a_driver_that_does_not_read_bounds_the_agents_memory(agent: Agent, tmp_path: Path) -> None:
    """Ranks are made to wait, not the agent to swell."""
    out = tmp_path / "written"
    program = f"import os\nfile = os.open({str(out)!r}, os.O_CREAT | os.O_WRONLY)\n"
    agent.set_up(program + "while True: os.write(file, b'x' * os.write(1, b'x' * 65536))")
    agent.next(frames.AGENT)

    def peak() -> int:
        status = Path(f"/proc/{agent.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10

    eventually(lambda: out.exists() and out.stat().st_size > _LOG_BACKLOG_BYTES, "it is held up", 60)
    size, seen = -1, out.stat().st_size
    while size != seen:  # until the rank has stopped writing
        size = seen
        time.sleep(0.5)
        seen = out.stat().st_size
    assert peak() < 100 << 20
    for _ in range(50):  # reading on lets it write on
        agent.next(frames.LOG)
        agent.got.clear()
    while out.stat().st_size == size:
        agent.next(frames.LOG)
        agent.got.clear()


def test_stacks_are_asked_of_the_ranks_of_a_call(agent: Agent) -> None:
    program = "import os, time\n"
    program += """assert os.read(4, 64) == b"?"\nos.write(4, b'{"stack": "here", "groups": {}}')\ntime.sleep(600)\n"""
    agent.set_up(program, ranks=2)
    seen: list[dict[str, Any]] = []

    def stack() -> str | None:
        agent.send(frames.STACKS, 0, 5, {"ranks": [1]})
        ranks = agent.next(frames.STACKS).meta["ranks"]
        assert list(ranks) == ["1"]
        seen.append(ranks["1"])
        return ranks["1"].get("stack")

    assert eventually(stack, "an answer in time, which on a busy machine takes several questions") == "here"
    agent.send(frames.STACKS, 0, 5, {"ranks": [1]})  # it answers no more: what can be seen from outside is told
    assert "stack" not in agent.next(frames.STACKS).meta["ranks"]["1"]
    assert seen[-1]["state"] in ("S", "R")
    assert seen[-1]["cpu_s"] >= 0


# ---------------------------------------------------------------------------------------------------------- its end
SITS = """
import subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(300)", {marker!r}]
subprocess.Popen(sleep, start_new_session=True, env={{}})
open({ready!r}, "w").close()
time.sleep(300)
"""


def sit(agent: Agent, tmp_path: Path) -> str:
    marker = f"marker-{agent.tag}"
    agent.set_up(SITS.format(marker=marker, ready=str(tmp_path / "ready")))
    eventually(lambda: (tmp_path / "ready").exists() and with_marker(marker), "a rank with a child", 60)
    return marker


def test_it_ends_when_the_channel_closes(agent: Agent, tmp_path: Path) -> None:
    marker = sit(agent, tmp_path)
    agent.channel.close()
    eventually(lambda: agent.ended() and not with_marker(marker), "nothing left")


def test_it_ends_when_the_driver_dies_though_the_channel_is_held(tmp_path: Path) -> None:
    driver = subprocess.Popen(SLEEP)
    agent = Agent(tmp_path, driver=driver.pid)
    with contextlib.closing(agent):
        marker = sit(agent, tmp_path)
        driver.kill()
        driver.wait()
        eventually(lambda: agent.ended() and not with_marker(marker), "nothing left")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_ends_on_a_signal(agent: Agent, tmp_path: Path, number: int) -> None:
    marker = sit(agent, tmp_path)
    agent.process.send_signal(number)
    eventually(lambda: agent.ended() and not with_marker(marker), "nothing left")


def test_it_ends_on_garbage(agent: Agent, tmp_path: Path) -> None:
    marker = sit(agent, tmp_path)
    agent.channel.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    eventually(lambda: agent.ended() and not with_marker(marker), "nothing left")


def test_it_ends_after_its_ttl_and_says_so(agent: Agent) -> None:
    agent.set_up("import time; time.sleep(300)", ttl_s=0.5)
    agent.next(frames.AGENT)
    assert "ttl of 0.5 s" in agent.next(frames.AGENT).meta["ended"]
    eventually(agent.ended, "nothing left")


def test_ranks_that_ignore_the_goodbye_are_killed(agent: Agent, tmp_path: Path) -> None:
    program = """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
open({ready!r}, "w").close()
time.sleep(300)
"""
    agent.set_up(program.format(ready=str(tmp_path / "ready")))
    eventually((tmp_path / "ready").exists, "a rank", 60)
    agent.send(frames.SHUTDOWN, meta={"busy": []})
    eventually(agent.ended, "nothing left")


def test_a_killed_agent_takes_its_ranks_along(agent: Agent, tmp_path: Path) -> None:
    """A worker asks the kernel for that as its first act."""
    worker = _BOOT.format(root=SOURCE_ROOT, module="atoll.worker.call_loop")
    setup = {
        "rank": 0, "local_rank": 0, "node": 0, "addr": "127.0.0.1", "head_addr": "127.0.0.1", "world_size": 1,
        "local_world_size": 1, "total_nodes": 1, "peers": ["127.0.0.1"], "accelerator": None, "accelerators": 0,
        "simulated": False, "pool_id": agent.tag, "path": [p for p in sys.path if p],
    }  # fmt: skip
    agent.set_up("", argv=[sys.executable, "-c", worker], env={"ATOLL_SETUP": json.dumps(setup)})
    pid = agent.next(frames.STARTED).meta["pid"]
    agent.next(frames.HELLO)
    assert leaks.is_running(pid)
    agent.process.kill()
    eventually(lambda: not leaks.is_running(pid), "a rank that died with its agent")
    agent.tmp.rmdir()


# -------------------------------------------------------------------------------------------------- finding processes
def test_a_tree_is_found_by_parents_session_and_tag() -> None:
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    tag = f"ATOLL_RANK_TAG={marker}"
    code = f"""
import os, subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(300)", {marker!r}]
subprocess.Popen(sleep, env={{}})                              # a child
subprocess.Popen(sleep, env={{}}, start_new_session=True)      # that left the session
subprocess.Popen(["/bin/sh", "-c", '"$@" & exit 0', "sh", *sleep], env={{}})   # orphaned, in the session
subprocess.Popen(["/bin/sh", "-c", '"$@" & exit 0', "sh", *sleep], start_new_session=True)   # orphaned, tagged
time.sleep(300)
"""
    root = subprocess.Popen(
        [sys.executable, "-S", "-c", code], start_new_session=True, env={"ATOLL_RANK_TAG": marker, "PATH": os.defpath}
    )
    try:
        # The root and four sleepers, once the shells between them are gone.
        eventually(
            lambda: len(with_marker(marker)) == 5 and set(with_marker(marker)) <= set(tree(root.pid, tag)), "5", 60
        )
        found = tree(root.pid, tag)
        assert found[0] == root.pid
        assert os.getpid() not in found
        # By the tag alone: what keeps it.
        assert root.pid in tree(None, tag)
    finally:
        kill_tree(root.pid, tag)
        root.wait()
    eventually(lambda: not with_marker(marker), "nothing left")


FORKS = """
import os, time
for _ in range(40):
    if os.fork():
        time.sleep(300)
"""


def test_a_tree_that_keeps_forking_is_killed() -> None:
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    root = subprocess.Popen(
        [sys.executable, "-S", "-c", f"# {marker}\n" + FORKS],
        start_new_session=True,
        env={"ATOLL_RANK_TAG": marker},
    )
    eventually(lambda: len(with_marker(marker)) > 3, "it forks", 60)
    kill_tree(root.pid, f"ATOLL_RANK_TAG={marker}")
    root.wait()
    eventually(lambda: not with_marker(marker), "nothing left")


def test_shared_memory_of_a_killed_process_is_removed() -> None:
    name = f"psm_test{os.getpid()}"
    path = Path("/dev/shm", name)
    code = (
        f"import mmap, os\nfd = os.open({str(path)!r}, os.O_RDWR | os.O_CREAT)\nos.ftruncate(fd, 4096)\n"
        "m = mmap.mmap(fd, 4096)\nprint('ready', flush=True)\nimport time\ntime.sleep(300)"
    )
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        memory = SharedMemory()
        memory.note(process.pid)
        assert memory.names == {name}
        kill_tree(process.pid, "ATOLL_RANK_TAG=nobody")
    assert not path.exists()


def test_the_kernels_count_of_memory_kills_is_readable() -> None:
    counter = OomCounter()
    assert not counter.rose()
    counter.tick()
    assert not counter.rose()


def test_draining_takes_what_is_there_and_no_more(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    output = Output(reader, str(tmp_path / "log"), False)
    os.write(writer, b"a" * 1000)
    got = []
    for data in output.drain():
        got.append(data)
        os.write(writer, b"b" * 1000)  # somebody goes on writing
    assert got == [b"a" * 1000]
    assert output.read() == b"b" * 1000
    assert output.read() is None
    os.close(writer)
    assert output.read() == b""
    assert list(output.drain()) == []
    output.close()
