"""What a cluster's supervisor answers on its Unix socket: jobs are added and cancelled, logs and events pushed.

A log's file is the queue of whoever follows it: a client that does not read costs no memory and holds nobody up. It
is sent what it has not read once it reads again. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from atoll.core.errors import AtollError
from atoll.tasks.logs import RUN_LOG, Follower, only_rank
from atoll.tasks.protocol import VERSION, answer, arguments, encode, error_message
from atoll.tasks.rows import EventRow
from atoll.tasks.spec import JobSpec, JobStatus
from atoll.wire.channel import Channel
from atoll.wire.event_loop import EventLoop
from atoll.wire.frames import RawFrame, WireError

SOCKET = "socket"  # in a cluster's folder
OPERATIONS = ("add", "cancel", "follow")
_BLOCKS = 8  # of a log, for one client before others get their turn


class Jobs(Protocol):
    """What the service asks of the supervisor."""

    def add(self, spec: JobSpec, secrets: Mapping[str, str], user: str) -> int:
        """Adds a job, once for its key; returns its number."""

    def cancel(self, job_ids: list[int] | None, number: int) -> list[int]:
        """Ends these jobs, or all; returns those that had not ended."""

    def status(self, job_id: int) -> JobStatus:
        """Where a job stands."""

    def events(self, job_id: int, after: int) -> list[EventRow]:
        """What happened to a job since an event."""

    @property
    def num_records(self) -> int:
        """How often something was recorded, of any job."""


def at_socket(folder: Path, call: Callable[[str], object]) -> None:
    """Calls with a path of the folder's socket that is short enough for the kernel, wherever the folder lies."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(f"/proc/self/fd/{fd}/{SOCKET}")
    finally:
        os.close(fd)


class Service:
    """The supervisor's end of all connections.

    Args:
        folder: of the cluster. Its supervisor's lock is held.
        jobs: the supervisor.
        loop: its loop.
        first: the connection of whoever started it.
    """

    def __init__(self, folder: Path, jobs: Jobs, loop: EventLoop, first: socket.socket) -> None:
        self._folder = folder
        self._jobs = jobs
        self._loop = loop
        self._clients: set[_Client] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with contextlib.suppress(FileNotFoundError):  # of a supervisor that was killed
            os.unlink(folder / SOCKET)
        at_socket(folder, self._listener.bind)
        os.chmod(folder / SOCKET, 0o600)
        self._listener.listen(128)
        loop.watch(self._listener.fileno(), self._accept)
        self._first: _Client | None = self._add(first)

    @property
    def awaits_first(self) -> bool:
        """Has whoever started the supervisor not asked for anything yet?"""
        return self._first is not None and not self._first.asked and self._first in self._clients

    def push(self) -> None:
        """Sends what is new to those who follow a job."""
        for client in [each for each in self._clients if each.followed is not None]:
            client.push()

    def close(self, *, unlink: bool) -> None:
        """Ends all connections. Whoever still waits for an answer asks the next supervisor."""
        self._loop.unwatch(self._listener.fileno())
        if unlink:
            with contextlib.suppress(OSError):
                os.unlink(self._folder / SOCKET)
        self._listener.close()
        for client in list(self._clients):
            client.close()

    def _accept(self, _readable: bool, _writable: bool) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            self._add(self._listener.accept()[0])

    def _add(self, sock: socket.socket) -> _Client:
        client = _Client(sock, self._jobs, self._loop, self._folder, self._clients)
        self._clients.add(client)
        client.send(answer(version=VERSION, pid=os.getpid()))
        return client


class _Client:
    """One connection."""

    def __init__(self, sock: socket.socket, jobs: Jobs, loop: EventLoop, folder: Path, clients: set[_Client]) -> None:
        self.asked = False
        self.followed: _Followed | None = None
        self._jobs = jobs
        self._folder = folder
        self._clients = clients
        self._channel = Channel(sock, loop, self._answer, lambda error: self.close())
        self.send = self._channel.send  # now, or when the client reads

    def push(self) -> None:
        """Sends what is new of the job that it follows."""
        for _ in range(_BLOCKS):
            if self.followed is None or self._channel.num_bytes:  # else it has to read first
                return
            if not self.followed.send_next(self.send):
                self.followed = None
            elif not self.followed.has_more:
                return

    def close(self) -> None:
        """Ends it."""
        if self in self._clients:
            self._clients.discard(self)
            self._channel.close()
            if self.followed is not None:
                self.followed.close()
            self._channel.sock.close()

    def _answer(self, frame: RawFrame) -> None:
        self.asked = True
        try:
            message = frame.parsed().meta
            args, kwargs = arguments(message, self.send)
            operation = message.get("op")
            if operation == "follow":
                self.followed = _Followed(self._folder, self._jobs, *args, **kwargs)
                self.push()
            elif operation in OPERATIONS:
                self.send(answer(value=getattr(self._jobs, str(operation))(*args, **kwargs)))
            else:
                raise WireError(f"operation {operation!r} is not known")
        except (AtollError, WireError, LookupError, OSError, TypeError, ValueError) as error:
            self.send(error_message(error))


class _Followed:
    """A job whose log and events a client gets as they come.

    Args:
        folder: of the cluster.
        jobs: the supervisor.
        job_id: of the job.
        write: gets the log's bytes, where they are asked for.
        on_event: gets events, where they are asked for.
        start, skip_bytes: where in the log it begins, as ``Follower.skip`` has it.
        rank: only lines of this rank, which is one of ``several`` or the only one.
        after: the number of the last event that is known.
    """

    def __init__(
        self,
        folder: Path,
        jobs: Jobs,
        job_id: int,
        write: Callable[[bytes], object] | None,
        on_event: Callable[[EventRow], object] | None,
        *,
        start: int = 0,
        skip_bytes: int = 0,
        rank: int | None = None,
        several: bool = False,
        after: int = 0,
    ) -> None:
        only: re.Pattern[bytes] | None = None if rank is None else only_rank(rank, several=several)
        self.has_more = True
        self._job_id = job_id
        self._jobs = jobs
        self._on_event = on_event
        self._after = after
        self._num_records = -1
        self._follower: Follower | None = None
        if write is not None:
            self._follower = Follower(folder / "jobs" / str(job_id) / RUN_LOG, write, only)
            self._follower.skip(start, skip_bytes)

    def send_next(self, send: Callable[[bytes], object]) -> bool:
        """Sends a block of the log, or else events, or else that it has ended; False then."""
        status = self._jobs.status(self._job_id)  # before the look at the log: what led to it is there by then
        self.has_more = self._follower is not None and self._follower.step()
        if self.has_more:
            return True
        if self._on_event is not None and self._num_records != self._jobs.num_records:
            self._num_records = self._jobs.num_records
            for event in self._jobs.events(self._job_id, self._after):
                self._after = event.seq
                self._on_event(event)
        if status.ended:
            self.close()
            send(answer(value=encode(status)))
            return False
        return True

    def close(self) -> None:
        """Gives up its file."""
        if self._follower is not None:
            self._follower.close()
