"""A task's node under test: its agent, spoken to over its channel, in both ways a node shares a machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import leaks
from atoll.providers.base import Boot
from atoll.providers.local_node import NodePlace, start_agent
from atoll.wire import frames
from atoll.wire.frames import EVERY, Frame, Parser, close_all, pack, receive, send_all

BASE_ENV = {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", leaks.TAG: os.environ.get(leaks.TAG, "")}


class Talk:
    """Our end of a channel to an agent."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self._parser = Parser()
        self._got: list[Frame] = []

    def next(self, kind: int, number: int | None = None, seconds: float = 60.0) -> Frame:
        """The next frame of a kind, of one process if a number is given; others are kept. EOFError at the end."""
        deadline = time.monotonic() + seconds
        while True:
            for at, frame in enumerate(self._got):
                if frame.kind == kind and number in (None, frame.rank):
                    return self._got.pop(at)
            self.channel.settimeout(max(0.01, deadline - time.monotonic()))
            data, fds = receive(self.channel)
            if not data:
                raise EOFError(f"the channel ended before {frames.name_of(kind)} came")
            self._got += [raw.parsed() for raw in self._parser.feed(data, fds)]

    def send(self, kind: int, number: int = 0, meta: dict[str, Any] | None = None, call: int = 0) -> None:
        """One frame to the other side."""
        self.channel.settimeout(60)
        send_all(self.channel, pack(kind, number, call, meta))

    def close(self) -> None:
        """Close descriptors of frames that nobody asked for."""
        for frame in self._got:
            close_all(frame.fds)
        self._parser.close()

    def start(self, script: str, number: int = 0, *, cwd: str = "/", env: dict[str, str] | None = None) -> int:
        """Run a script by bash, from a file; returns its pid as the node sees it."""
        what = {"argv": ["bash"], "env": {**BASE_ENV, **(env or {})}, "cwd": cwd}
        self.send(frames.START, number, {**what, "script": {"name": "run.sh", "text": script}})
        return int(self.next(frames.STARTED, number).meta["pid"])

    def output(self, number: int = 0) -> str:
        """All that has come from a process and was not asked for yet."""
        mine = [each for each in self._got if each.kind == frames.LOG and each.rank == number]
        self._got = [each for each in self._got if each not in mine]
        return b"".join(bytes(each.rest) for each in mine).decode()

    def line(self, number: int = 0) -> str:
        """The next output of a process, which is one line where it prints and then waits."""
        return bytes(self.next(frames.LOG, number).rest).decode().rstrip("\n")

    def end(self, number: int = 0, seconds: float = 60.0) -> tuple[int | None, int | None, str]:
        """Exit code, signal and output of a process that ends."""
        frame = self.next(frames.EXIT, number, seconds)
        return frame.meta["exit_code"], frame.meta["signal"], self.output(number)

    def run(self, script: str, number: int = 0, **more: Any) -> str:
        """Output of a script that succeeds."""
        self.start(script, number, **more)
        code, killer, said = self.end(number)
        assert (code, killer) == (0, None), said
        return said


class TaskNode(Talk):
    """A started node without accelerators."""

    def __init__(self, name: str = "head", number: int = 0, *, peers: int = 2, **place: Any) -> None:
        self.tag = secrets.token_hex(4)
        self.tmp = os.path.join(tempfile.gettempdir(), f"atoll-{self.tag}-n{number}")
        os.mkdir(self.tmp, 0o700)
        self.addr = f"127.0.0.{number + 1}"
        hosts = tuple((f"127.0.0.{at + 1}", name if at == number else f"peer{at}") for at in range(peers))
        self.place = NodePlace(hostname=name, home=self.tmp, tmp=self.tmp, peers=hosts, **place)
        self.handle = start_agent(Boot(), self.place, f"ATOLL_POOL_TAG={self.tag}.{number}")
        super().__init__(self.handle.channel)
        self.send(frames.SETUP, meta={"node": number, "tag": self.tag, "tmp_dir": self.tmp, "task": True})
        self.hello: dict[str, Any] = self.next(frames.AGENT).meta

    def terminate(self, number: int = EVERY) -> None:
        self.send(frames.TERM, number, {"signal": signal.SIGTERM, "whole": True})

    def pids(self) -> list[int]:
        """Running processes of the node, as the host sees them; the agent itself is none of them."""
        tag = f"ATOLL_POOL_TAG={self.tag}.".encode()
        found = []
        for pid in leaks.descendants():
            with contextlib.suppress(OSError):
                if tag in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def close(self) -> None:
        self.handle.stop()
        shutil.rmtree(self.tmp, ignore_errors=True)
