"""Somebody at a terminal: programs that ask, and hosts that let nobody in without asking."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path

from testbed.hosts import Host


def talk(command: list[str], answers: dict[str, str], seconds: float = 20.0) -> str:
    """Run a program on a terminal of its own, and type the answer to each question, once, when it is seen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], command)
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
        os.waitpid(pid, 0)
    return said.decode(errors="replace")


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
        "sshd=$(cat /run/sshd.pid); kill $sshd; while kill -0 $sshd 2>/dev/null; do sleep 0.01; done; /usr/sbin/sshd"
    )
