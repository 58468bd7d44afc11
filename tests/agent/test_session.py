"""A node behind a command: links that break, freeze and are replaced, drivers that die, and what is left of it all.

The *cable* stands for ssh and sshd: it runs the link process in a session of its own and copies bytes. Killed, both
sides see broken pipes and the link process an sshd that is gone; stopped, nobody sees anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pools import SOURCE_ROOT, eventually, parent, start_script, with_marker

import leaks
from atoll.agent import orphans
from atoll.agent.session import _namespace
from atoll.core.errors import ProvisionError
from atoll.providers.local_node import agent_command
from atoll.wire import frames
from atoll.wire.frames import Parser, RawFrame, pack, receive, send_all
from atoll.wire.resumable_client import LinkedChannel
from atoll.wire.resumable_protocol import HELLO, REFUSED, VERSION, Greeter, greeting

BOOT = f"import sys; sys.path.insert(0, {SOURCE_ROOT!r}); "
LINK = [sys.executable, "-I", "-S", "-c", BOOT + "from atoll.agent.session import main; main()"]

CABLE = """
import os, subprocess, sys, threading, time
rate = float(sys.argv[1])
far = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
os.write(1, b"Last login: yesterday\\n")

def pump(source, sink):
    try:
        while data := os.read(source, 1 << 16):
            view = memoryview(data)
            while view:
                view = view[os.write(sink, view):]
            if rate:
                time.sleep(len(data) / rate)
    except OSError:
        pass
    os.close(sink)

up = threading.Thread(target=pump, args=(0, far.stdin.fileno()), daemon=True)
up.start()
pump(far.stdout.fileno(), 1)
os._exit(far.wait())
"""

# An agent that sends everything back, and a process below it that would not end by itself.
ECHO = (
    BOOT
    + """
import os, socket, subprocess
from atoll.wire.frames import Parser, receive, send_all
below = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)", sys.argv[1]])
sock, parser = socket.socket(fileno=int(sys.argv[2])), Parser()
while (received := receive(sock))[0]:
    for frame in parser.feed(*received):
        if frame.kind == 5:
            print("as it was told", flush=True)
            os._exit(3)
        send_all(sock, frame.data, frame.fds)
        for fd in frame.fds:
            os.close(fd)
below.kill()
"""
)


class Host:
    """Where the link process runs, and how to get there."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / ("a-long-name-" * 12) / "session"
        self.marker = f"m{os.getpid()}x{time.monotonic_ns()}"
        self.argv = [sys.executable, "-S", "-c", ECHO, self.marker]
        self.grace_s = 5.0
        self.rate = 0.0
        self.cables: list[subprocess.Popen[bytes]] = []
        self.down = False
        self.pid_namespace = False

    def command(self, first: bool) -> list[str]:
        agent = json.dumps({"argv": self.argv, "pid_namespace": self.pid_namespace})
        return [
            *LINK,
            *(["start", str(self.folder), str(self.grace_s), agent] if first else ["attach", str(self.folder)]),
        ]

    def connect(self, first: bool) -> subprocess.Popen[bytes]:
        if self.down:
            raise OSError("no route to host")
        pipe = subprocess.PIPE
        cable = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CABLE, str(self.rate), *self.command(first)],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        )
        self.cables.append(cable)
        return cable

    def cut(self) -> None:
        self.cables[-1].kill()

    def processes(self) -> list[int]:
        """The session, its agent, and what is below that; not the cables, and what they run."""
        cables = {pid for cable in self.cables for pid in (cable.pid, *leaks.descendants(cable.pid))}
        return [pid for pid in with_marker(self.marker) if pid not in cables]

    def gone(self) -> bool:
        return not self.processes() and not self.folder.exists()


class Driver(LinkedChannel):
    """A channel, and what it told."""

    def __init__(self, host: Host, **options: Any) -> None:
        self.events: list[tuple[str, Any]] = []
        super().__init__(
            host.connect,
            grace_s=host.grace_s,
            name="h1",
            on_silence=lambda seconds: self.events.append(("silent", seconds) if seconds else ("back", None)),
        )
        self.frames = Parser()
        self.got: list[RawFrame] = []

    def send(self, number: int, data: bytes = b"", files: tuple[int, ...] = (), kind: int = frames.CALL) -> None:
        send_all(self.socket, pack(kind, 0, number, None, [data], len(files)), files)

    def next(self, seconds: float = 60.0) -> RawFrame:
        self.socket.settimeout(seconds)
        while not self.got:
            try:
                data, fds = receive(self.socket)
            except ConnectionResetError:  # closed before it had read everything
                data, fds = b"", []
            if not data:
                raise EOFError(self.reason)
            self.got += self.frames.feed(data, fds)
        return self.got.pop(0)

    def answers(self, number: int) -> bool:
        self.send(number)
        return self.next().call == number


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    for cable in made.cables:
        with contextlib.suppress(ProcessLookupError):
            cable.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def linked(host: Host) -> Iterator[Driver]:
    driver = Driver(host)
    try:
        driver.start()
        yield driver
    finally:
        driver.stop()
    eventually(host.gone, "everything on the host ends")


def memory_file(content: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, content)
    return fd


def digest(fd: int) -> int:
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    return zlib.crc32(content)


# ---------------------------------------------------------------------------------------------- links that break
def test_frames_and_files_go_there_and_back_and_nothing_is_left(host: Host) -> None:
    with linked(host) as driver:
        assert host.folder.stat().st_mode & 0o777 == 0o700
        big = os.urandom(1 << 20) * 20
        fd = memory_file(big)
        driver.send(1, b"inline", (fd, fd))
        os.close(fd)
        back = driver.next()
        assert bytes(back.parsed().rest) == b"inline"
        assert [digest(fd) for fd in back.fds] == [zlib.crc32(big)] * 2
        started = time.monotonic()
    assert time.monotonic() - started < 15
    assert driver.reason is None
    assert driver.events == []
    assert all(cable.poll() is not None for cable in host.cables)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_everything_arrives_once_and_in_order_while_the_cable_is_cut(host: Host, seed: int) -> None:
    host.rate = 60e6
    host.grace_s = 60  # cut before they are greeted, links are made again more and more slowly
    sent: list[tuple[int, int, list[int]]] = []
    halt = threading.Event()

    def send() -> None:
        chance = random.Random(seed)
        pieces = [chance.randbytes(chance.randint(0, 100_000)) for _ in range(20)]
        number = 0
        while not halt.is_set() or number < 200:
            number += 1
            data = chance.choice(pieces) + number.to_bytes(4, "big")
            files = [chance.choice(pieces) * chance.choice((0, 1, 1, 20)) for _ in range(chance.choice((0, 0, 1, 2)))]
            fds = tuple(map(memory_file, files))
            for _ in range(2 if fds else 1):  # as to two ranks of a node
                sent.append((number, zlib.crc32(data), [zlib.crc32(file) for file in files]))
                driver.send(number, data, fds)
            for fd in fds:
                os.close(fd)
        driver.send(0)

    def cut() -> None:
        moments = random.Random(seed)
        for number in range(8):
            eventually(lambda number=number: len(host.cables) > number, "another link is made", 60)
            time.sleep(moments.uniform(0.02, 0.4))  # some before it is greeted
            host.cut()
        halt.set()

    with linked(host) as driver:
        threads = [threading.Thread(target=send), threading.Thread(target=cut)]
        for thread in threads:
            thread.start()
        got: list[tuple[int, int, list[int]]] = []
        while (back := driver.next()).call:
            got.append((back.call, zlib.crc32(back.parsed().rest), [digest(fd) for fd in back.fds]))
        for thread in threads:
            thread.join()
        assert got == sent
        assert len(host.cables) == 9
        assert driver.reason is None


@pytest.mark.long
def test_a_silent_link_is_told_and_replaced(host: Host) -> None:
    with linked(host) as driver:
        assert driver.answers(1)
        host.cables[0].send_signal(signal.SIGSTOP)
        driver.send(2, b"x" * 3_000_000)  # more than fits into the pipes
        assert driver.next().call == 2  # over another link
        assert [name for name, _ in driver.events] == ["silent", "back"]
        assert 4 <= driver.events[0][1] < 12
        assert len(host.cables) == 2
        assert host.cables[0].poll() is not None
        assert driver.silent_s < 3


@pytest.mark.long
def test_a_host_that_is_frozen_whole_is_told_and_goes_on(host: Host) -> None:
    host.grace_s = 20
    with linked(host) as driver:
        frozen = [*host.processes(), *leaks.descendants(host.cables[0].pid)]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        eventually(lambda: driver.events, "it says that the host is silent")
        time.sleep(3)  # the link is given up, another is asked for
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        assert driver.answers(1)
        assert [name for name, _ in driver.events] == ["silent", "back"]


def test_garbage_ends_that_link_only(host: Host) -> None:
    with linked(host) as driver:
        assert driver.answers(1)
        fd = os.open(f"/proc/{host.cables[0].pid}/fd/1", os.O_WRONLY)  # as if the host had said it
        os.write(fd, b"garbage" * 20)
        os.close(fd)
        eventually(lambda: len(host.cables) == 2, "another link is made", 60)
        assert driver.answers(2)


def test_a_throttled_link_carries_large_files_both_ways_and_stays(host: Host) -> None:
    host.rate = 8e6
    with linked(host) as driver:
        content = os.urandom(4 << 20)
        fd = memory_file(content)
        for number in range(4):
            driver.send(number, b"", (fd,))
        os.close(fd)
        assert [digest(driver.next().fds[0]) for _ in range(4)] == [zlib.crc32(content)] * 4
        assert len(host.cables) == 1


# ------------------------------------------------------------------------------------------------ ends of one side
def test_after_the_grace_period_the_host_is_lost_and_everything_on_it_ends(host: Host) -> None:
    host.grace_s = 1.0
    driver = Driver(host)
    driver.start()
    try:
        assert driver.answers(1)
        host.down = True
        host.cut()
        with pytest.raises(EOFError, match=r"no connection to h1 for 1 s: no route to host"):
            driver.next()
        eventually(host.gone, "the agent ends, and what is below it")
    finally:
        driver.stop()


def test_within_the_grace_period_nothing_ends(host: Host) -> None:
    host.grace_s = 30
    with linked(host) as driver:
        assert driver.answers(1)
        eventually(lambda: len(host.processes()) == 3, "session, agent and what it runs", 60)
        before = host.processes()
        host.down = True
        host.cut()
        time.sleep(1)
        host.down = False
        assert driver.answers(2)
        assert set(host.processes()) == set(before)


DRIVER = """
import subprocess, sys, time
sys.path.insert(0, {root!r})
from atoll.wire.resumable_client import LinkedChannel
pipe = subprocess.PIPE
channel = LinkedChannel(
    lambda first: subprocess.Popen({command!r}, stdin=pipe, stdout=pipe, stderr=pipe), grace_s=30, name="h1"
)
channel.start()
print("started", flush=True)
{then}
time.sleep(300)
"""


@pytest.mark.parametrize(
    "then",
    [
        "",
        "import os; fd = os.memfd_create('x'); os.ftruncate(fd, 1 << 30); "
        "from atoll.wire.frames import pack, send_all; send_all(channel.socket, pack(10, num_fds=1), [fd])",
    ],
    ids=["idle", "in the middle of a file"],
)
def test_a_driver_that_is_killed_takes_the_agent_with_it(host: Host, tmp_path: Path, then: str) -> None:
    host.grace_s = 60
    cable = [sys.executable, "-I", "-S", "-c", CABLE, "20e6" if then else "0", *host.command(True)]
    path = tmp_path / "driver.py"
    path.write_text(DRIVER.format(root=SOURCE_ROOT, command=cable, then=then))
    process = start_script(path, tmp_path / "t")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        assert eventually(host.processes, "the agent runs", 60)
        time.sleep(0.3)
        process.kill()
        eventually(host.gone, "the agent ends")
    finally:
        process.kill()
        process.communicate()


def test_stop_in_the_middle_of_a_long_file_is_quick(host: Host) -> None:
    host.rate = 5e6
    with linked(host) as driver:
        fd = os.memfd_create("zeros")
        os.ftruncate(fd, 1 << 30)
        driver.send(1, b"", (fd,))
        os.close(fd)
        time.sleep(0.3)
        started = time.monotonic()
        driver.stop()
        assert time.monotonic() - started < 15  # the file would take minutes
        eventually(host.gone, "the agent ends")


def test_the_last_words_of_an_agent_arrive_and_then_its_end(host: Host) -> None:
    host.grace_s = 30
    with linked(host) as driver:
        for number in range(30):
            driver.send(number, b"x" * 50_000)
        driver.send(0, kind=frames.SHUTDOWN)
        host.cut()
        assert [driver.next().call for _ in range(30)] == list(range(30))
        with pytest.raises(EOFError, match="its agent ended with exit code 3: as it was told"):
            driver.next()


@pytest.mark.parametrize("namespace", [True, False])
def test_it_starts_the_real_agent_in_a_namespace_where_it_may(host: Host, namespace: bool) -> None:
    host.argv, host.pid_namespace = agent_command(), namespace
    with linked(host) as driver:
        meta = driver.next().parsed().meta
        assert (meta["pid"] == 1) == (namespace and os.geteuid() == 0 and bool(_namespace()))


def test_a_killed_agent_takes_what_is_below_it_along(host: Host) -> None:
    with linked(host) as driver:
        assert driver.answers(1)
        [agent] = [pid for pid in host.processes() if os.getsid(pid) == pid]
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(EOFError, match="its agent ended with signal 9"):
            driver.next()
        eventually(host.gone, "what is below it ends too")


def test_a_killed_session_is_gone_at_once(host: Host) -> None:
    driver = Driver(host)
    driver.start()
    try:
        assert driver.answers(1)
        [agent] = [pid for pid in host.processes() if os.getsid(pid) == pid]
        session = parent(agent)
        os.kill(session, signal.SIGKILL)
        with pytest.raises(EOFError, match="the agent is gone: the host was restarted"):
            driver.next()
    finally:
        driver.stop()
    eventually(host.gone, "its agent ends, and the folder is removed")


def test_what_is_stopped_ends_before_a_later_drivers_agent_starts(host: Host) -> None:
    cluster = f"c{host.marker}"
    driver = Driver(host)
    host.folder = host.folder.with_name(f"atoll-link-{cluster}.one.1")
    driver.start()
    assert driver.answers(1)
    driver.stop()
    assert driver.is_over
    eventually(host.gone, "all of it ends")
    driver = Driver(host)
    driver.start()
    assert driver.answers(1)
    left = host.processes()
    for pid in left:
        os.kill(pid, signal.SIGSTOP)
    driver.stop()
    assert not driver.is_over
    first, host.folder = host.folder, host.folder.with_name(f"atoll-link-{cluster}.two.1")
    with linked(host) as later:
        assert later.answers(1)
        assert not any(map(leaks.is_running, left))
        assert not first.exists()
        assert orphans.end(cluster, but=f"{cluster}.two") == []
        assert later.answers(2)
        assert orphans.end(f"{cluster}.two.1", patience_s=10) == []
        with pytest.raises(EOFError):
            later.next()


# ----------------------------------------------------------------------------------------------------- refusals
def ask(command: list[str], hello: bytes) -> tuple[int, dict[str, Any]]:
    """What the host answers."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(hello)
        process.stdin.flush()
        greeter = Greeter(skip_noise=False)
        said = None
        while said is None:
            said = greeter.feed(os.read(process.stdout.fileno(), 4096))
        process.stdin.close()
        process.stdout.read()
        process.wait(30)
    return said


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (greeting(HELLO, {"version": VERSION, "token": "0" * 32, "received": 0}), "another driver"),
        (greeting(HELLO, {"version": VERSION, "received": 0}), "did not greet"),
        (greeting(HELLO, {"version": 99, "token": "0" * 32, "received": 0}), "the driver 99"),
        (b"GET / HTTP/1.1\r\n\r\n", "did not greet"),
    ],
    ids=["token", "no token", "version", "noise"],
)
def test_a_stranger_is_refused_and_harms_nothing(host: Host, hello: bytes, reason: str) -> None:
    with linked(host) as driver:
        kind, meta = ask(host.command(False), hello)
        assert kind == REFUSED
        assert reason in meta["reason"]
        assert driver.answers(1)
        assert len(host.cables) == 1


def test_the_first_greeting_is_checked_too(host: Host) -> None:
    kind, meta = ask(host.command(True), greeting(HELLO, {"version": 99, "token": "0" * 32, "received": 0}))
    assert (kind, "the driver 99" in meta["reason"]) == (REFUSED, True)
    eventually(host.gone, "the session ends")


def refused(host: Host) -> str:
    driver = Driver(host)
    with pytest.raises(ProvisionError) as caught:
        driver.start()
    eventually(host.gone, "nothing is left on the host")
    return str(caught.value)


def test_start_says_what_the_command_said(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["sh", "-c", "echo ssh: connect to host h1 port 22: Connection refused >&2; exit 255"]
    monkeypatch.setattr(host, "command", lambda first: words)
    assert refused(host) == "h1: ssh: connect to host h1 port 22: Connection refused"
    host.down = True
    assert refused(host) == "h1: no route to host"


def test_start_says_what_is_wrong_with_the_agent_or_the_folder(host: Host) -> None:
    host.argv = ["/nowhere/python"]
    assert "h1: the agent could not be started: [Errno 2]" in refused(host)
    host.folder = Path("/proc/nowhere/session")
    assert "the session's folder /proc/nowhere/session can't be made: No such file" in refused(host)


def test_the_socket_is_for_this_user_only(host: Host) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with linked(host) as driver:
        with socket.socket(socket.AF_UNIX) as sock:
            fd = os.open(host.folder, os.O_PATH)
            os.seteuid(65534)
            try:
                with pytest.raises(PermissionError):
                    sock.connect(f"/proc/self/fd/{fd}/link.sock")
            finally:
                os.seteuid(0)
                os.close(fd)
        assert driver.answers(1)
