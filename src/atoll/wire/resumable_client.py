"""The driver's end of a node that is reached through a command, ``ssh`` say. Standard library only."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Callable

from atoll.core.errors import ProvisionError
from atoll.wire.frames import WireError
from atoll.wire.resumable_protocol import HELLO, REFUSED, VERSION, Greeter, greeting
from atoll.wire.resumable_stream import Link, Relay

_FIRST_S = 30.0  # what the first connection may take until the host greets,
_AGAIN_S = 10.0  # and a later one
_RETRY_S = 0.25  # between two attempts, doubled each time
_RETRY_MOST_S = 2.0
_FLUSH_S = 0.5  # what was said before the end gets this long to go out
_END_S = 2.0  # and the host this long to end its agent
_TAIL_BYTES = 4000


class _Connection:
    """One run of the command."""

    def __init__(self, process: subprocess.Popen[bytes], is_noise: Callable[[str], bool]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self._is_noise = is_noise
        self.link = Link(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
        self.stderr = -1
        if process.stderr is not None:
            self.stderr = os.dup(process.stderr.fileno())
            os.set_blocking(self.stderr, False)
        self.said = b""
        self.greeter = Greeter(skip_noise=True)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()

    def read_stderr(self) -> bool:
        """Whether there may be more."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.stderr, 1 << 16)
            self.said = (self.said + data)[-_TAIL_BYTES:]
            return bool(data)
        return True

    def explain(self, otherwise: str) -> str:
        """What the command said last, or else this."""
        if self.stderr >= 0:
            self.read_stderr()
        lines = self.said.decode(errors="replace").strip().splitlines()
        return "\n".join(line for line in lines if not self._is_noise(line)) or otherwise

    def end(self, wait_s: float = 0.0) -> None:
        """Close its channel, and end it by force unless it ends by itself in time."""
        self.link.close()
        if self.stderr >= 0:
            os.close(self.stderr)
            self.stderr = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)
        if self.process.returncode is None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)


class LinkedChannel(Relay):
    """A channel to the agent of a host: ``socket`` speaks frames with descriptors, whatever happens to the link.

    Args:
        connect: starts the command whose stdin and stdout are the link, and returns at once; told whether it is the
            first time. Its ``OSError`` or ``ProvisionError`` counts as an attempt that failed.
        grace_s: seconds without a link after which the host counts as lost.
        on_silence: told how many seconds nothing was heard, once for each silence, and 0 when it is over. Called in the
            relay's thread.
        name: the host, for messages.
        is_noise: tells lines of the command's standard error that are no reason for anything.

    Attributes:
        socket: the gang's end.
        reason: why the host was lost, or its agent ended; None where nothing is known.
        is_over: after ``stop``: the host has said that everything there has ended.
    """

    def __init__(
        self,
        connect: Callable[[bool], subprocess.Popen[bytes]],
        *,
        grace_s: float,
        name: str,
        on_silence: Callable[[float], object] = lambda seconds: None,
        is_noise: Callable[[str], bool] = lambda line: False,
    ) -> None:
        self.socket, theirs = socket.socketpair()
        super().__init__(theirs)
        self.reason: str | None = None
        self.is_over = False
        self._connect = connect
        self._grace_s = grace_s
        self._name = name
        self._on_silence = on_silence
        self._is_noise = is_noise
        self._token = secrets.token_hex(16)
        self._current: _Connection | None = None  # the one in use, or being made
        self._retired: list[_Connection] = []
        self._last: _Connection | None = None  # the one that the host ended
        self._problem = ""  # with the last attempt
        self._retry_s = _RETRY_S
        self._ending = False
        self._peer_ended = False
        self._done = False
        self._force = False
        self._began = threading.Event()
        self._stopping = threading.Lock()
        self._failed: str | None = None
        self._thread = threading.Thread(target=self._serve, name=f"atoll-link-{name}", daemon=True)

    # -- called by the driver -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the first connection; returns once the host has greeted.

        Raises:
            ProvisionError: the command ended, was refused or said nothing in time; the message has its stderr.
        """
        self._thread.start()
        self._began.wait()
        if self._failed is not None:
            self.stop()
            raise ProvisionError(f"{self._name}: {self._failed}")

    def stop(self) -> None:
        """End the host's agent and the command, which is killed after two seconds. Safe to call twice."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # who reads it at this moment sees its end
        self.socket.close()
        if threading.current_thread() is self._thread:  # a callback's: it ends when that returns
            return
        with self._stopping:  # who starts it may find that it was stopped, and stop it too
            if self._thread.ident is None:
                if not self._done:
                    self._done = True
                    self._serve()
                return
            self._thread.join(_END_S)
            if self._thread.is_alive():
                self._force = True
                self.loop.wake()
                self._thread.join()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            if not self._done:
                self._attempt()
            while not self._done and not self._force:
                self.loop.turn()
        finally:
            self._began.set()
            self.link = None  # it belongs to a connection
            self.close()
            # After a clean end the command is about to end too.
            patience_s = _FLUSH_S if self._ending and not self._force else 0.0
            for connection in (*self._retired, *([self._current] if self._current else [])):
                connection.end(patience_s)
            # The session closes its links last, and who waits for that over there ends well.
            self.is_over = self._last is not None and self._last.process.returncode == 0

    @property
    def _first(self) -> bool:
        return not self._began.is_set()

    def _attempt(self) -> None:
        try:
            connection = _Connection(self._connect(self._first), self._is_noise)
        except (OSError, ProvisionError) as error:
            self._attempt_failed(str(error))
            return
        self._current = connection
        hello = {"version": VERSION, "token": self._token, "received": self.received}
        with contextlib.suppress(OSError):  # it ended already, and its stderr says why
            os.write(connection.link.write_fd, greeting(HELLO, hello))
        self.loop.watch(connection.link.read_fd, lambda *_: self._read_greeting(connection))
        if connection.stderr >= 0:
            self.loop.watch(connection.stderr, lambda *_: self._read_stderr(connection))
        limit_s = _FIRST_S if self._first else _AGAIN_S
        why = f"no answer within {limit_s:g} s"
        if self._first:
            why += ": does something in ~/.bashrc there read standard input?"
        self.loop.after(limit_s, lambda: self._drop(connection, why), "greeting")

    def _read_stderr(self, connection: _Connection) -> None:
        if not connection.read_stderr():
            self.loop.unwatch(connection.stderr)

    def _read_greeting(self, connection: _Connection) -> None:
        try:
            data = os.read(connection.link.read_fd, 1 << 16)
            if not data:
                self._drop(connection, "the connection ended before the host answered")
                return
            said = connection.greeter.feed(data)
        except BlockingIOError:
            return
        except (OSError, WireError) as error:
            self._drop(connection, str(error))
            return
        if said is not None:
            self._greeted(connection, *said)

    def _greeted(self, connection: _Connection, kind: int, meta: dict[str, object]) -> None:
        self.loop.cancel("greeting")
        received, version = meta.get("received"), meta.get("version")
        if kind == REFUSED:
            self._lose(str(meta.get("reason")))
        elif version != VERSION:
            self._lose(f"it speaks version {version} of the link, and this side {VERSION}: install the same Atoll")
        else:
            self._use(connection, received if isinstance(received, int) else -1)

    def _use(self, connection: _Connection, received: int) -> None:
        self._retry_s = _RETRY_S
        self.loop.cancel("grace")
        connection.said = b""  # a banner, say: no reason for what comes later
        # Only now: an old one that is closed earlier may look, over there, as if this process had ended.
        for old in self._retired:
            old.end()
        self._retired.clear()
        try:
            self.adopt(connection.link, received, connection.greeter.rest)
        except WireError as error:
            self._lose(str(error))
        self._began.set()

    def _drop(self, connection: _Connection, reason: str) -> None:
        """This attempt came to nothing."""
        self.loop.cancel("greeting")
        self.loop.unwatch(connection.link.read_fd)
        self._retire(connection)
        self._attempt_failed(connection.explain(reason))

    def _retire(self, connection: _Connection) -> None:
        if connection.stderr >= 0:
            self.loop.unwatch(connection.stderr)
        self._current = None
        self._retired.append(connection)

    def _attempt_failed(self, problem: str) -> None:
        self._problem = problem
        if self._first:
            self._lose(problem)
        else:
            self.loop.after(self._retry_s, self._attempt, "attempt")
            self._retry_s = min(2 * self._retry_s, _RETRY_MOST_S)

    # -- what the relay tells ---------------------------------------------------------------------------------------

    def link_lost(self, link: Link, reason: str) -> None:
        """Make another."""
        connection = self._current
        if connection is None:
            return
        self._problem = connection.explain(reason or "the connection broke")
        self._retire(connection)
        if self._ending and (self._peer_ended or self.all_passed_on):
            self._last = connection
            self._done = True
            return
        self.loop.after(self._grace_s, self._grace_is_over, "grace")
        self._attempt()

    def _grace_is_over(self) -> None:
        self._lose(f"no connection to {self._name} for {self._grace_s:g} s: {self._problem}")

    def local_ended(self) -> None:
        """The driver is through with the node."""
        self._end_link()

    def peer_ended(self, reason: str) -> None:
        """The agent ended, and everything it said was passed on."""
        self.reason = self.reason or reason or None
        self._peer_ended = True
        self.close_local()
        self._end_link()

    def _end_link(self) -> None:
        if self._ending:
            return
        self._ending = True
        self.say_end("")
        self.loop.after(_END_S, self._finish, "end")
        # Where a file that takes long is in the way, the end of the stream says as much.
        self.loop.after(_FLUSH_S, self.end_writing, "flush")

    def _finish(self) -> None:
        self._done = True

    def _lose(self, reason: str) -> None:
        if self._first:
            self._failed = reason
        elif not self._ending:
            self.reason = reason
        self.close_local()
        self._done = True

    def silence(self, seconds: float) -> None:
        """Tell."""
        if not self._first and not self._ending:
            self._on_silence(seconds)
