"""``scp`` to hosts whose login shell prints something: it runs ssh through this program, which leaves that out."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from atoll.core.validation import command_line
from atoll.providers.ssh.hosts import Target
from atoll.wire.command_output import MARK, marked

_BLOCK_BYTES = 1 << 16
_SFTP = re.compile(rb"(?=\0\0..\x02\0\0\0\x03)", re.DOTALL)  # what its server says first: length, VERSION, 3
_OTHERS = re.compile(rb"(?<=" + MARK + rb")")


@contextlib.contextmanager
def quiet_ssh() -> Iterator[str]:
    """The path for ``scp -S``, while this lasts."""
    ssh = shutil.which("ssh") or "ssh"
    with tempfile.TemporaryDirectory(prefix="atoll-scp-") as folder:
        program = Path(folder, "ssh")
        words = shlex.join([sys.executable, "-P", "-m", __name__, ssh])
        program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        program.chmod(0o700)
        yield str(program)


def copy(target: Target, path: str, here: str, *, up: bool) -> str:
    """Copy a path of a host to ``here``, or ``up`` from there; why that failed, else nothing."""
    there = f"{target.host}:{path}"
    with quiet_ssh() as program:
        ends = (here, there) if up else (there, here)
        command = ["scp", "-r", "-p", "-S", program, *_options(target), *ends]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    said = [line for line in lines if line.startswith("scp: ") and "Connection closed" not in line] or lines
    return said[-1].removeprefix("scp: ")


def copy_line(target: Target, path: str, into: str) -> str:
    """What a person types to copy a folder from a host into one here."""
    return command_line("scp", "-r", *_options(target), f"{target.host}:{path}", into)


def _options(target: Target) -> list[str]:
    return ["-P" if each == "-p" else each for each in target.options]


def main(arguments: Sequence[str]) -> int:
    """Be ssh with these arguments, ssh's path before them, without what came before the server's first words."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    *words, last = arguments  # a command for the shell, which an older scp has, or the name of a subsystem
    is_sftp = "-s" in words
    process = subprocess.Popen([*words, last if is_sftp else marked(last)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    begins, came, has_begun = _SFTP if is_sftp else _OTHERS, b"", False
    while block := os.read(process.stdout.fileno(), _BLOCK_BYTES):
        came += block
        if not has_begun and (found := begins.search(came)):
            has_begun, came = True, came[found.start() :]
        if has_begun:
            with contextlib.suppress(BrokenPipeError):  # scp is done, and the shell there prints as it ends
                _write(came)
            came = b""
    return process.wait()


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
