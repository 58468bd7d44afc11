"""What ``LocalControl`` does, where a cluster's supervisor runs on another machine: through the program there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets as random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from signal import SIGTERM
from typing import IO, Any

from atoll.core.errors import AtollError, ProvisionError
from atoll.core.validation import command_line
from atoll.tasks.control import LocalControl
from atoll.tasks.protocol import (
    Damaged,
    Message,
    NothingLeft,
    Parser,
    check_hello,
    decode,
    error_from,
    handle_reply,
    remote,
    request,
    wait_readable,
)
from atoll.tasks.rows import EventRow, JobRow
from atoll.tasks.spec import ClusterSpec, JobSpec, JobStatus
from atoll.tasks.supervisor_client import OnEvent, Write, tell
from atoll.wire.command_output import MARK, never_began, unreadable

_BLOCK_BYTES = 1 << 20
_NO_CONNECTION = 255  # ssh's own exit code
_ANSWER_S = 120.0  # cancelled jobs end within 30, and a network file system may take its time
_RETRY_S, _RETRY_MOST_S = 0.5, 5.0
_MAY_REPEAT = ("submit", "job", "events", "position_of_tail", "follow")  # asked again where the connection is lost
_LONG = ("follow",)


class ProgramControl:
    """``LocalControl`` on whatever machine the command runs its program.

    Args:
        command: gives the argument list that runs an operation, as ``Connection.argv`` does.
        cluster: name of the cluster.
        host: what to call that machine in messages, where that is not this one.
        patience_s: where the connection is lost, it is made again for so long before a log or a job is given up.
        on_driver_failed: called when its newest job, or one that was asked for, turns out to have failed like that.
    """

    def __init__(
        self,
        command: Callable[[str], Sequence[str]],
        cluster: str,
        host: str = "",
        patience_s: float = 0.0,
        on_driver_failed: Callable[[], object] = lambda: None,
    ) -> None:
        self._command = command
        self._cluster = cluster
        self._head = f"the head of cluster {cluster}" + (f" ({host})" if host else "")
        self._patience_s = patience_s
        self._on_driver_failed = on_driver_failed

    create = remote(LocalControl.create)
    cluster = remote(LocalControl.cluster)
    end = remote(LocalControl.end)
    events = remote(LocalControl.events)
    position_of_tail = remote(LocalControl.position_of_tail)
    _submit = remote(LocalControl.submit)
    _cancel = remote(LocalControl.cancel)
    _queue = remote(LocalControl.queue)
    _job = remote(LocalControl.job)
    _follow = remote(LocalControl.follow)
    _remove_nodes = remote(LocalControl.remove_nodes)

    def submit(self, spec: JobSpec, secrets: Mapping[str, str]) -> int:
        """Adds a job, once however often the connection is lost meanwhile; returns its number."""
        return self._submit(dataclasses.replace(spec, key=spec.key or random.token_hex(8)), secrets)

    def cancel(self, job_ids: Sequence[int] | None, number: int = SIGTERM) -> list[int]:
        """Asks for the end of jobs, whose processes get the signal ``number``."""
        with contextlib.suppress(NothingLeft):
            return self._cancel(job_ids, number)
        return []

    def change(self, **fields: Any) -> ClusterSpec:
        """Changes fields of the record."""
        changed: ClusterSpec = self.call("change", (), fields)
        return changed

    def remove_nodes(self) -> list[str]:
        """Cancels the jobs, and removes the nodes' files; a line for each host on which something may still run."""
        with contextlib.suppress(NothingLeft):
            return self._remove_nodes()
        return []

    def queue(self) -> list[JobRow]:
        """Every job, newest first."""
        try:
            rows = self._queue()
        except NothingLeft as error:
            tell(f"note: {error}")
            return []
        for row in rows[:1]:
            self._noted(row.status)
        return rows

    def job(self, job_id: int | None) -> JobRow:
        """One job; None is the newest."""
        row = self._job(job_id)
        self._noted(row.status)
        return row

    def follow(
        self,
        job_id: int,
        write: Write,
        on_event: OnEvent | None = None,
        *,
        follow: bool = True,
        tail: int = 0,
        rank: int | None = None,
    ) -> JobStatus:
        """Writes a job's log, until the job has ended. Where the connection is lost it goes on at the same byte."""
        start = self.position_of_tail(job_id, tail, rank) if tail else 0
        seen_bytes = last_event = 0

        def count(data: bytes) -> None:
            nonlocal seen_bytes
            write(data)
            seen_bytes += len(data)

        def note(event: EventRow) -> None:
            nonlocal last_event
            last_event = event.seq
            if on_event is not None:
                on_event(event)

        lost = _Lost(self._cluster, self._head, self._patience_s)
        told = None if on_event is None else note
        while True:
            where = {"follow": follow, "rank": rank, "start": start, "skip_bytes": seen_bytes, "after": last_event}
            try:
                status: JobStatus = self._ask("follow", (job_id, count, told), where, lost)
                return self._noted(status)
            except _ConnectionLost as error:
                lost.wait(error.said)

    def _noted(self, status: JobStatus) -> JobStatus:
        if status is JobStatus.FAILED_DRIVER:
            self._on_driver_failed()
        return status

    def call(self, operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Asks for something, again where the connection is lost and that may be."""
        lost = _Lost(self._cluster, self._head, self._patience_s if operation in _MAY_REPEAT else 0.0)
        while True:
            try:
                return self._ask(operation, args, kwargs, lost)
            except _ConnectionLost as error:
                lost.wait(error.said)

    def _ask(self, operation: str, args: Sequence[Any], kwargs: Mapping[str, Any], lost: _Lost) -> Any:
        """The answer to one request.

        Raises:
            _ConnectionLost: the connection is.
        """
        data, callbacks = request(operation, args, kwargs, cluster=self._cluster)
        with tempfile.TemporaryFile() as said, self._started(operation, data, said) as process:
            try:
                for message in self._messages(process, said, None if operation in _LONG else _ANSWER_S):
                    lost.is_over()
                    if isinstance(message, dict) and "version" in message:
                        check_hello(message, self._head)
                    elif (answer := handle_reply(message, callbacks, self._note)) is not None:
                        if "error" in answer:
                            raise error_from(answer, self._head)
                        return decode(answer["value"])
            except TimeoutError:
                raise ProvisionError(
                    f"cluster {self._cluster}: {operation}: its head did not answer within {_ANSWER_S:.0f} s. Is its "
                    f"disk full, or its home on a server that is gone?"
                ) from None
            code = process.wait()
            said.seek(0)
            errors = said.read()
            if code == _NO_CONNECTION:
                raise _ConnectionLost(errors)
            text = errors.decode(errors="replace").strip()[-2000:]
            raise AtollError(f"cluster {self._cluster} can't be asked (exit code {code}): {text}")

    def _note(self, line: str) -> None:
        tell(f"note: {self._head}: {line}")

    def _messages(self, process: subprocess.Popen[bytes], said: IO[bytes], limit_s: float | None) -> Iterator[Message]:
        """What the program sends, behind whatever start files of the login there print; until it ends.

        Raises:
            TimeoutError: it has not ended within the limit.
        """
        assert process.stdout is not None
        fd = process.stdout.fileno()
        deadline = None if limit_s is None else time.monotonic() + limit_s
        parser, printed, began = Parser(), b"", False
        while True:
            if deadline is not None and not wait_readable(fd, deadline - time.monotonic()):
                raise TimeoutError
            if not (data := os.read(fd, _BLOCK_BYTES)):
                break
            if not began:
                printed, mark, data = (printed + data).partition(MARK)
                if not (began := bool(mark)):
                    continue
            try:
                yield from parser.feed(data)
            except Damaged:
                raise unreadable(self._head, data) from None
        if not began and process.wait() != _NO_CONNECTION:
            said.seek(0)
            raise never_began(self._head, printed, said.read())

    @contextlib.contextmanager
    def _started(self, operation: str, data: bytes, said: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
        """The program, with what it is asked; it has ended afterwards. What it starts over there notices that."""
        pipe = subprocess.PIPE
        command = [*self._command(operation)]
        # Ctrl-C is this process's to handle: a program that it ended too would look like a lost connection.
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, start_new_session=True)
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # where it failed, it says why
                process.stdin.write(data)
            process.stdin = None
            yield process
        finally:
            process.kill()
            process.stdout.close()
            process.wait()


class _ConnectionLost(Exception):
    """The connection to the head is lost; ``said`` is what ssh wrote."""

    def __init__(self, said: bytes) -> None:
        super().__init__(said)
        self.said = said


class _Lost:
    """Patience with a connection that is lost: says so, waits a little more each time, and gives up in the end."""

    def __init__(self, cluster: str, head: str, patience_s: float) -> None:
        self._cluster = cluster
        self._head = head
        self._patience_s = patience_s
        self._since: float | None = None
        self._pause_s = _RETRY_S

    def wait(self, said: bytes) -> None:
        """It could not be made once more.

        Raises:
            ProvisionError: it has been so for too long.
        """
        text = said.decode(errors="replace").strip()
        if self._since is None:
            self._since = time.monotonic()
            if self._patience_s > 0:
                why = f" ({text.splitlines()[-1]})" if text else ""
                tell(f"the connection to {self._head} is lost{why}; trying again")
        if time.monotonic() - self._since >= self._patience_s:
            raise ProvisionError(_unreachable(self._cluster, self._head, text))
        time.sleep(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, _RETRY_MOST_S)

    def is_over(self) -> None:
        """It is there again."""
        if self._since is not None:
            tell(f"{self._head} answers again")
        self._since, self._pause_s = None, _RETRY_S


def _unreachable(cluster: str, head: str, said: str) -> str:
    why = f": {said.splitlines()[-1]}" if said else ""
    return f"{head} can't be reached{why}. {what_then(cluster)}"


def what_then(cluster: str) -> str:
    """What becomes of the jobs of a cluster whose head can't be reached, and what to do."""
    return (
        f"Its jobs continue there as long as it runs: `{command_line('atoll', 'logs', cluster)}` shows them once it "
        f"can be reached. If it is gone for good: `{command_line('atoll', 'down', cluster)}`"
    )
