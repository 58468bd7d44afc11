"""How the supervisor is asked, by those on its machine: over its socket; it is started where none runs.

Standard library only.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.agent.process_tree import state
from atoll.core.errors import AtollError
from atoll.tasks import supervisor
from atoll.tasks.protocol import (
    Damaged,
    Message,
    Parser,
    check_hello,
    decode,
    error_from,
    handle_reply,
    remote,
    request,
)
from atoll.tasks.rows import EventRow, JobRow
from atoll.tasks.service import Jobs
from atoll.tasks.spec import JobStatus
from atoll.tasks.store import Store

Write = Callable[[bytes], object]
OnEvent = Callable[[EventRow], object]

_SILENT_S = 1.0  # whoever is told nothing for so long looks why
_IDLE_S = 15.0  # a supervisor that does nothing about a new job for so long is named
_ANSWER_S = 60.0
_TRIES = 5
_READ_BYTES = 1 << 20


def tell(line: str) -> None:
    """A line for whoever waits; the answer itself has to stay whole."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def state_of_supervisor(folder: Path) -> str:
    """Says why a supervisor may not do what it should, and what to do."""
    if (stopped := stopped_supervisor(folder)) is not None:
        return stopped
    return f"its supervisor is process {supervisor.pid_of(folder)}, see {folder / supervisor.LOG}"


def stopped_supervisor(folder: Path) -> str | None:
    """Says that a cluster's supervisor is stopped by a signal or a debugger, where it is."""
    pid = supervisor.pid_of(folder)
    is_stopped = pid is not None and state(pid) in (b"T", b"t")
    return f"its supervisor, process {pid}, is stopped: kill -CONT {pid}" if is_stopped else None


class Hindrance:
    """Notes, for whoever follows a job, why nothing happens."""

    def __init__(self, folder: Path, job: JobRow, note: Callable[[str], object]) -> None:
        self._folder = folder
        self._job = job
        self._note = note
        self._began = time.monotonic()
        self._found: str | None = None  # at the last look
        self._noted: str | None = None

    def look(self) -> None:
        """Notes once what is found at two looks in a row: it may be over in an instant."""
        why = stopped_supervisor(self._folder)
        if why is None and (line := supervisor.last_line(self._folder)):
            why = f"its supervisor reports, in {self._folder / supervisor.LOG}: {line}"
        waits = self._job.status is JobStatus.PENDING and not self._job.reason
        if why is None and waits and time.monotonic() - self._began > _IDLE_S:
            with Store(self._folder) as store:
                self._job = store.job(self._job.id)
            if self._job.status is JobStatus.PENDING and not self._job.reason:
                why = state_of_supervisor(self._folder)
        if why is not None and why == self._found != self._noted:
            self._noted = why
            self._note(f"job {self._job.id} can't be followed: {why}")
        self._found = why


class SupervisorEnded(AtollError):
    """The supervisor has ended."""


class SupervisorClient:
    """The supervisor as those on its machine ask it; started where none runs. Its connection is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sock: socket.socket | None = None
        self._parser = Parser()

    add = remote(Jobs.add)
    cancel = remote(Jobs.cancel)

    def follow(
        self,
        args: tuple[int, Write, OnEvent | None],
        how: Mapping[str, Any],
        hindrance: Hindrance,
        hang_up: int | None,
    ) -> JobStatus:
        """Hands on a job's log and events until it has ended, as ``service`` does; returns its status.

        Raises:
            SupervisorEnded: the supervisor has.
            BrokenPipeError: ``hang_up`` was.
        """
        self._connect(hindrance, hang_up)
        status: JobStatus = self._ask("follow", args, how, hindrance, hang_up)
        return status

    def call(self, operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Asks for something that may be asked twice: a supervisor that ends at that moment has not done it."""
        for _ in range(_TRIES):
            with contextlib.suppress(SupervisorEnded):
                self._connect()
                return self._ask(operation, args, kwargs)
        raise AtollError(f"supervisors of cluster {self._folder.name} end before they answer; see {self._log}")

    @property
    def _log(self) -> Path:
        return self._folder / supervisor.LOG

    def _connect(self, hindrance: Hindrance | None = None, hang_up: int | None = None) -> None:
        """Reaches the supervisor, and hears which version it is before anything is asked."""
        if self._sock is not None:
            return
        self._sock, self._parser = supervisor.reach(self._folder), Parser()
        # Not by __del__: of a reference cycle the socket may be collected first, and warn.
        self._close_socket = weakref.finalize(self, self._sock.close)
        try:
            hello = next(self._messages(hindrance, hang_up))
            pid = hello.get("pid") if isinstance(hello, dict) else None
            check_hello(hello, f"the supervisor of cluster {self._folder.name}, process {pid},")
        except BaseException:
            self._close()
            raise

    def _ask(
        self,
        operation: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        hindrance: Hindrance | None = None,
        hang_up: int | None = None,
    ) -> Any:
        assert self._sock is not None
        data, callbacks = request(operation, args, kwargs)
        try:
            with self._ending():
                self._sock.sendall(data)
            for message in self._messages(hindrance, hang_up):
                if (answer := handle_reply(message, callbacks, tell)) is not None:
                    if "error" in answer:
                        raise error_from(answer)
                    return decode(answer["value"])
        except BaseException:  # what comes of that request must not be taken for another one's answer
            self._close()
            raise

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionError, Damaged):
            raise SupervisorEnded(f"the supervisor of cluster {self._folder.name} ended") from None

    def _messages(self, hindrance: Hindrance | None, hang_up: int | None) -> Iterator[Message]:
        """What the supervisor sends; raises ``SupervisorEnded`` where that ends."""
        assert self._sock is not None
        reader = select.poll()
        reader.register(self._sock, select.POLLIN)
        if hang_up is not None:
            reader.register(hang_up, 0)  # hang-ups are always told
        deadline = time.monotonic() + _ANSWER_S
        while True:
            ready = [fd for fd, _ in reader.poll(_SILENT_S * 1000)]
            if hang_up is not None and hang_up in ready:
                raise BrokenPipeError
            if self._sock.fileno() in ready:
                with self._ending():
                    data = self._sock.recv(_READ_BYTES)
                    if not data:
                        raise ConnectionResetError
                    messages = self._parser.feed(data)
                yield from messages
            elif hindrance is not None:
                hindrance.look()
            elif (stopped := stopped_supervisor(self._folder)) is not None or time.monotonic() > deadline:
                raise AtollError(
                    f"cluster {self._folder.name} does not answer; {stopped or state_of_supervisor(self._folder)}"
                )

    def _close(self) -> None:
        self._close_socket()
        self._sock = None
