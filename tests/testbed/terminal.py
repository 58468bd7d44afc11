"""Somebody at a terminal: programs that ask, and hosts that let nobody in without asking."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from testbed.hosts import Host


def talk(command: list[str], answers: dict[str, str], seconds: float = 60.0) -> str:
    """Run a program on a terminal of its own, and type the answer to each question, once, when it is seen."""
    terminal, theirs = os.openpty()
    # setsid makes it the controlling one, where ssh asks; no fork() of ours, as pytest may have other threads.
    process = subprocess.Popen(["setsid", "--ctty", *command], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said, left = b"", dict(answers)
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(terminal, 4096)
            except OSError:  # everybody on it has ended
                break
            if not data:
                break
            said += data
            for question in [each for each in left if each.encode() in said]:
                os.write(terminal, left.pop(question).encode())
    finally:
        os.close(terminal)
        process.wait()
    return said.decode(errors="replace")


@contextlib.contextmanager
def interrupted_when(it_is_time: Callable[[], object], ends_in_s: float = 10.0) -> Iterator[None]:
    """Ctrl-C once something is the case; what runs inside has to end soon after that."""
    pressed_s: list[float] = []

    def press() -> None:
        deadline = time.monotonic() + 60
        while not it_is_time():
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        pressed_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        ended_s = time.monotonic()
        thread.join()
        assert pressed_s, "that was never the case"
        assert ended_s - pressed_s[0] < ends_in_s


def log_out(home: Path) -> None:
    """End the logins that are kept below an ``ATOLL_HOME``, as they do by themselves after a while."""
    for path in (home / "ssh").iterdir():
        if path.is_socket():
            subprocess.run(["ssh", "-o", f"ControlPath={path}", "-O", "exit", "h1"], capture_output=True, check=True)


def only_by_password(host: Host, password: str) -> None:
    """From now on its sshd takes no key, and asks for a password."""
    hashed = subprocess.run(["openssl", "passwd", "-6", password], capture_output=True, text=True, check=True).stdout
    host.run(
        f"sed -i 's|^sky:[^:]*|sky:{hashed.strip()}|' /etc/shadow; : > /etc/ssh/authorized_keys; "
        "sed -i 's/^PasswordAuthentication no/PasswordAuthentication yes/' /etc/ssh/sshd_config; "
        # It says its pid only after it listens, and is back from its start before it does.
        "sshd=$(pgrep -ox sshd); kill $sshd; while kill -0 $sshd 2>/dev/null; do sleep 0.01; done; /usr/sbin/sshd; "
        "until grep -q ' 00000000:0016 00000000:0000 0A ' /proc/net/tcp; do sleep 0.01; done"
    )
