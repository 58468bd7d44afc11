"""How a cluster is asked over a stream: its supervisor over a Unix socket, the program on its head through a login.

The stream is opened with the first request and kept for the next ones. Standard library only.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.agent.process_tree import is_stopped
from atoll.core.errors import AtollError
from atoll.tasks import supervisor
from atoll.tasks.protocol import (
    PREAMBLE,
    check_hello,
    decode,
    error_from,
    handle_reply,
    request,
)
from atoll.tasks.rows import EventRow, JobRow
from atoll.tasks.spec import JobStatus
from atoll.tasks.store import Store
from atoll.wire import frames
from atoll.wire.command_output import MARK, never_began, unreadable

Write = Callable[[bytes], object]
OnEvent = Callable[[EventRow], object]

_LOOK_S = 1.0  # whoever hears nothing for so long looks why
_HELLO_S = 60.0  # a program is started within this time, on a busy machine
_IDLE_S = 15.0  # a supervisor that does nothing about a new job for so long is named
_BLOCK_BYTES = 1 << 20


def tell(line: str) -> None:
    """Prints a line to standard error; the answer on standard output stays whole."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class StreamLost(AtollError):
    """The stream ended before the answer came; the message is what was heard last."""


class SocketStream:
    """A Unix socket of a supervisor on this machine, which is started where none runs."""

    def __init__(self, folder: Path) -> None:
        self._name = folder.name
        self._socket = supervisor.reach(folder)
        self.fileno, self.close = self._socket.fileno, self._socket.close

    def send(self, data: bytes) -> None:
        """Writes all of it."""
        with contextlib.suppress(ConnectionError):  # which is read as well
            self._socket.sendall(data)

    def receive(self) -> bytes:
        """What has come."""
        with contextlib.suppress(ConnectionError):
            if data := self._socket.recv(_BLOCK_BYTES):
                return data
        raise StreamLost(f"the supervisor of cluster {self._name} ended")


class ProgramStream:
    """Input and output of a program that is started through a login, behind what start files there print.

    ``command`` gives its argument list; ``is_lost`` tells by its exit code and standard error whether the way there
    broke.
    """

    def __init__(self, command: Callable[[], Sequence[str]], whose: str, is_lost: Callable[[int, bytes], bool]) -> None:
        self._whose = whose
        self._is_lost = is_lost
        self._printed, self._began, self._last = b"", False, b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        # Ctrl-C is this process's to handle: a program that it ended too would look like a lost connection.
        self._process = subprocess.Popen(
            command(),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.fileno = self._output.fileno
        self.send(PREAMBLE)

    def send(self, data: bytes) -> None:
        """Writes all of it."""
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):  # where the program failed, it says why
            while view:
                view = view[self._input.write(view) :]

    def receive(self) -> bytes:
        """What has come."""
        if not (data := self._output.read(_BLOCK_BYTES)):
            raise self._end()
        if not self._began:
            self._printed, mark, data = (self._printed + data).partition(MARK)
            self._began = bool(mark)
        self._last = data
        return data

    def close(self) -> None:
        """Ends the program here; what it started over there notices that."""
        self._process.kill()
        for each in (self._input, self._output, self._errors):
            each.close()
        self._process.wait()

    def _end(self) -> AtollError:
        """Why the program has ended."""
        self._input.close()
        code = self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read()
        text = errors.decode(errors="replace").strip()[-2000:]
        if self._is_lost(code, errors):
            return StreamLost(text)
        if not self._began:
            return never_began(self._whose, self._printed, errors)
        if code == 0:
            return unreadable(self._whose, self._last)
        return AtollError(f"{self._whose} can't be asked (exit code {code}): {text}")


class _OpenStream:
    """An open stream; ``close`` ends it, also when its client is gone."""

    def __init__(self, stream: SocketStream | ProgramStream, client: Client) -> None:
        self.stream = stream
        self.parser = frames.Parser()
        self.heard = False  # since the last request
        # Not by __del__: of a reference cycle a socket may be collected first, and warn.
        self.close = weakref.finalize(client, stream.close)


class Client:
    """Asks over streams that are kept for further requests; each thread has one for itself while it asks.

    Args:
        connect: opens a stream.
        whose: who answers, in messages.
        where: is named where an error is of a file or a process there.
        note: is called with a line for whoever waits.
    """

    def __init__(
        self,
        connect: Callable[[], SocketStream | ProgramStream],
        whose: str,
        where: str = "",
        note: Callable[[str], object] = tell,
    ) -> None:
        self._connect = connect
        self._whose = whose
        self._where = where
        self._note = note
        self._idle: list[_OpenStream] = []

    def ask(
        self,
        operation: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        on_silence: Callable[[float], object],
        *,
        on_hello: Callable[[], object] = lambda: None,
        hang_up: int | None = None,
        limit_s: float | None = None,
    ) -> Any:
        """The answer to one request, which may arrive twice. Callables among the arguments are called back meanwhile.

        Args:
            operation, args, kwargs: a method of whoever answers, and what it is called with.
            on_silence: called each second that brings nothing, with the seconds since the request; may raise.
            on_hello: called when a stream was opened.
            hang_up: a descriptor whose hang-up ends the wait.
            limit_s: the wait ends after so many seconds.

        Raises:
            StreamLost: the stream ended before the answer.
            BrokenPipeError: ``hang_up`` was hung up.
            TimeoutError: the limit is over.
        """
        line, is_new = (self._idle.pop(), False) if self._idle else (_OpenStream(self._connect(), self), True)
        try:
            if is_new:
                self._hear_hello(line, on_silence, hang_up, limit_s)
                on_hello()
            messages = self._messages(line, on_silence, hang_up, limit_s)
            data, callbacks = request(operation, args, kwargs)
            line.heard = False
            line.stream.send(data)
            answer = next(each.meta for each in messages if handle_reply(each, callbacks, self._note))
        except StreamLost:
            line.close()
            if is_new or line.heard:
                raise
            return self.ask(operation, args, kwargs, on_silence, on_hello=on_hello, hang_up=hang_up, limit_s=limit_s)
        except BaseException:  # what comes of this request must not be taken for another one's answer
            line.close()
            raise
        self._idle.append(line)
        if "error" in answer:
            raise error_from(answer, self._where)
        return decode(answer["value"])

    def _hear_hello(
        self, line: _OpenStream, on_silence: Callable[[float], object], hang_up: int | None, limit_s: float | None
    ) -> None:
        """Whoever answers says so in time: where nothing can be started, the way there may be silent for ever."""
        longest_s = _HELLO_S if limit_s is None else min(_HELLO_S, limit_s)
        try:
            check_hello(next(self._messages(line, on_silence, hang_up, longest_s)), self._whose)
        except TimeoutError:
            if longest_s < _HELLO_S:
                raise
            raise StreamLost(f"{self._whose} did not answer within {_HELLO_S:.0f} s") from None

    def _messages(
        self, line: _OpenStream, on_silence: Callable[[float], object], hang_up: int | None, limit_s: float | None
    ) -> Iterator[frames.Frame]:
        """What comes until the stream ends, which raises."""
        stream, began = line.stream, time.monotonic()
        reader = select.poll()
        reader.register(stream.fileno(), select.POLLIN)
        if hang_up is not None:
            reader.register(hang_up, 0)  # hang-ups are always told
        while True:
            waited_s = time.monotonic() - began
            left_s = _LOOK_S if limit_s is None else min(_LOOK_S, max(0.0, limit_s - waited_s))
            ready = [fd for fd, _ in reader.poll(left_s * 1000)]
            if hang_up is not None and hang_up in ready:
                raise BrokenPipeError
            if stream.fileno() in ready:
                data = stream.receive()
                try:
                    messages = [each.parsed() for each in line.parser.feed(data)]
                except frames.WireError:
                    raise unreadable(self._whose, data) from None
                line.heard |= bool(messages)
                yield from messages
            elif limit_s is not None and waited_s >= limit_s:
                raise TimeoutError
            else:
                on_silence(waited_s)


# ---------------------------------------------------------------------------------------------- while one waits
def state_of_supervisor(folder: Path) -> str:
    """Says why a supervisor may not do what it should, and what to do."""
    if (stopped := stopped_supervisor(folder)) is not None:
        return stopped
    return f"its supervisor is process {supervisor.pid_of(folder)}, see {folder / supervisor.LOG}"


def stopped_supervisor(folder: Path) -> str | None:
    """Says that a cluster's supervisor is stopped by a signal or a debugger, where it is."""
    pid = supervisor.pid_of(folder)
    is_one = pid is not None and is_stopped(pid)
    return f"its supervisor, process {pid}, is stopped: kill -CONT {pid}" if is_one else None


class StallReporter:
    """Notes, for whoever follows a job, why nothing happens."""

    def __init__(self, folder: Path, job: JobRow, note: Callable[[str], object]) -> None:
        self._folder = folder
        self._job = job
        self._note = note
        self._found: str | None = None  # at the last look
        self._noted: str | None = None

    def look(self, waited_s: float) -> None:
        """Notes once what is found at two looks in a row: it may be over in an instant."""
        why = stopped_supervisor(self._folder)
        if why is None and (line := supervisor.last_line(self._folder)):  # it may go on: this is no more than told
            self._note_again(f"its supervisor reports, in {self._folder / supervisor.LOG}: {line}")
            return
        waits = self._job.status is JobStatus.PENDING and not self._job.reason
        if why is None and waits and waited_s > _IDLE_S:
            with Store(self._folder) as store:
                self._job = store.job(self._job.id)
            if self._job.status is JobStatus.PENDING and not self._job.reason:
                why = state_of_supervisor(self._folder)
        self._note_again(None if why is None else f"it can't be followed: {why}")

    def _note_again(self, why: str | None) -> None:
        if why is not None and why == self._found != self._noted:
            self._noted = why
            self._note(f"job {self._job.id}: {why}")
        self._found = why
