"""Carries frames, with their descriptors, between a local socket and a byte stream that may break and be replaced.

Both ends of an ssh connection run one: the driver in a thread, the host in its link process. Everything arrives
exactly once and in order, however often the link is replaced. One thread, no locks. Standard library only.

Neither side ever stops reading its link, so two that send much at the same time can't block each other: what is on
its way is bounded by the sender, who takes no more from its local socket while too much is not yet passed on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections import deque
from typing import Final

from atoll.wire.event_loop import READ, WRITE, EventLoop
from atoll.wire.frames import Parser, WireError, close_all, receive, send_some
from atoll.wire.resumable_protocol import END, PING, Arrived, RecordReceiver, RecordSender

_TICK_S: Final = 1.0
_PING_S: Final = 2.0
_QUIET_S: Final = 4.0  # two pings did not come
_SILENT_S: Final = 6.0  # the link is given up
_PIPE_BYTES: Final = 1 << 20
_ACK_BYTES: Final = 1 << 20  # passed on since the last acknowledgement: time for another


class Link:
    """Both directions of a byte stream, pipes or a socket. Owns the descriptors."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
            with contextlib.suppress(OSError):  # a socket, or more than this user may have
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def end_writing(self) -> None:
        """The other side sees the end of the stream."""
        if self.write_fd >= 0:
            if stat.S_ISSOCK(os.fstat(self.write_fd).st_mode):  # others may hold the same one, even for reading
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.write_fd)) as sock:
                    sock.shutdown(socket.SHUT_WR)
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        """Close both directions. Safe to call twice."""
        for fd in (self.read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)
        self.read_fd = self.write_fd = -1


class Relay:
    """One end. A subclass makes links and decides what their loss means.

    Attributes:
        loop: whatever else the subclass waits for goes here.
        link: the one in use, or None.
    """

    def __init__(self, local: socket.socket) -> None:
        self.loop = EventLoop()
        self.link: Link | None = None
        self._local: socket.socket | None = local
        local.setblocking(False)
        self._parser = Parser()
        self._sender = RecordSender()
        self._receiver = RecordReceiver()
        self._arrived: deque[Arrived] = deque()
        self._sent_bytes = 0  # of the first record in ``_arrived``
        self._passed_on_bytes = 0  # since the other side was told
        self._heard_s = time.monotonic()
        self._pinged_s = 0.0
        self._quiet = False
        self.loop.watch(local.fileno(), self._local_ready)
        self.loop.after(_TICK_S, self._tick, "tick")

    @property
    def silent_s(self) -> float:
        """Seconds since anything was heard of the other side."""
        return time.monotonic() - self._heard_s

    # -- what the subclass does -----------------------------------------------------------------------------------

    def link_lost(self, link: Link, reason: str) -> None:
        """The link is of no more use; it is this method's to close."""

    def local_ended(self) -> None:
        """Whoever held the other end of the local socket closed it."""

    def peer_ended(self, reason: str) -> None:
        """The other side has nothing more to say, and everything it said was passed on."""

    def silence(self, seconds: float) -> None:
        """Nothing has been heard for so long, or with 0 something was again."""

    # -- the link -------------------------------------------------------------------------------------------------

    @property
    def received(self) -> int:
        """Number of the last record that arrived whole: what a greeting tells."""
        return self._receiver.received

    def adopt(self, link: Link, received: int, rest: bytes = b"", greeting: bytes = b"") -> None:
        """Go on over this link.

        Args:
            link: where both sides have greeted each other, but for ``greeting``.
            received: what the other side says it has.
            rest: what was read behind its greeting.
            greeting: what to write first.

        Raises:
            WireError: what it says can't be.
        """
        self._sender.rewind(received)
        self._sender.greeting = greeting
        self._sender.ping_due = True
        self._receiver.rewind(rest)
        self.link = link
        self.heard()
        self.loop.watch(link.read_fd, self._link_readable)
        try:
            self._take_records()
        except WireError as error:
            self.give_up(str(error))
        self.flush()

    def give_up(self, reason: str) -> None:
        """This link is of no more use."""
        link, self.link = self.link, None
        if link is not None:
            self.loop.unwatch(link.read_fd)
            self.loop.unwatch(link.write_fd)
            self.link_lost(link, reason)

    def flush(self) -> None:
        """Write what the link takes, now and whenever it takes more."""
        link = self.link
        if link is None or link.write_fd < 0:
            return
        try:
            done = self._sender.write(link.write_fd)
        except OSError:
            self.end_writing()
            return
        if done:
            self.loop.unwatch(link.write_fd)
        else:
            self.loop.watch(link.write_fd, self._link_ready, WRITE)

    def end_writing(self) -> None:
        """Write nothing more. What is written to us still counts, and then comes the end of the stream."""
        if self.link is not None and self.link.write_fd >= 0:
            self.loop.unwatch(self.link.write_fd)
            self.link.end_writing()

    def say_end(self, reason: str) -> None:
        """Tell the other side that nothing comes any more, once it has everything so far."""
        self._sender.end(reason)
        self.flush()

    @property
    def all_passed_on(self) -> bool:
        """Did the other side pass on everything that it was sent?"""
        return self._sender.empty

    def _link_ready(self, _readable: bool, _writable: bool) -> None:
        self.flush()

    def _link_readable(self, _readable: bool, _writable: bool) -> None:
        link = self.link
        if link is None:
            return
        try:
            if not self._receiver.read(link.read_fd):
                self.give_up("")
                return
            self.heard()
            self._take_records()
        except BlockingIOError:
            return
        except (OSError, WireError) as error:
            self.give_up(str(error))

    def heard(self) -> None:
        """The other side lives."""
        self._heard_s = time.monotonic()
        if self._quiet:
            self._quiet = False
            self.silence(0.0)

    def _take_records(self) -> None:
        try:
            for record in self._receiver.cut():
                if record.kind == PING:
                    self._sender.acknowledge(record.number)
                    self._watch_local()
                else:
                    self._arrived.append(record)
        finally:
            self._deliver()

    # -- the local socket -----------------------------------------------------------------------------------------

    def _local_ready(self, readable: bool, writable: bool) -> None:
        if writable:
            self._deliver()
        if not readable or self._local is None:
            return
        try:
            data, fds = receive(self._local)
            received = self._parser.feed(data, fds)
        except BlockingIOError:
            return
        except (OSError, WireError):
            data, received = b"", []
        if not data:
            self.close_local()
            self.local_ended()
            return
        self._sender.add(received)
        self.flush()
        self._watch_local()

    def _watch_local(self) -> None:
        if self._local is not None:
            mask = (0 if self._sender.full else READ) | (WRITE if self._arrived else 0)
            self.loop.watch(self._local.fileno(), self._local_ready, mask)

    def _deliver(self) -> None:
        """Pass on what has arrived, as far as the local socket takes it."""
        ended: Arrived | None = None
        urgent = False
        while self._arrived and self._pass_on(self._arrived[0]):
            record = self._arrived.popleft()
            self._passed_on_bytes += len(record.data)
            urgent = urgent or bool(record.fds) or record.kind == END
            ended = record if record.kind == END else None
        self._sender.passed_on = self._arrived[0].number - 1 if self._arrived else self._receiver.received
        if urgent or self._passed_on_bytes > _ACK_BYTES:
            self._passed_on_bytes = 0
            self._sender.ping_due = True
            self.flush()
        self._watch_local()
        if ended is not None:
            self.peer_ended(ended.data.decode(errors="replace"))

    def _pass_on(self, record: Arrived) -> bool:
        """Whether the whole record is out, or nobody is there to take it."""
        if record.kind == END:
            return True
        view = memoryview(record.data)
        try:
            while self._local is not None and self._sent_bytes < len(view):
                fds = () if self._sent_bytes else record.fds
                self._sent_bytes += send_some(self._local, view[self._sent_bytes :], fds)
        except BlockingIOError:
            return False
        except OSError:
            pass  # it is closed; reading it will say so
        self._sent_bytes = 0
        close_all(record.fds)
        return True

    def close_local(self) -> None:
        """Whoever holds the other end sees its end."""
        if self._local is not None:
            self.loop.unwatch(self._local.fileno())
            self._local.close()
            self._local = None

    # -- time -----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.loop.after(_TICK_S, self._tick, "tick")
        silent = self.silent_s
        if silent >= _QUIET_S and not self._quiet:
            self._quiet = True
            self.silence(silent)
        if self.link is None:
            return
        if silent >= _SILENT_S:
            self.give_up(f"nothing was heard for {silent:.0f} s")
            return
        now = time.monotonic()
        if now - self._pinged_s >= _PING_S - _TICK_S / 2:
            self._pinged_s = now
            self._sender.ping_due = True
            self.flush()

    def close(self) -> None:
        """Let go of everything."""
        self.close_local()
        if self.link is not None:
            self.link.close()
            self.link = None
        for record in self._arrived:
            close_all(record.fds)
        self._arrived.clear()
        self._parser.close()
        self._sender.close()
        self._receiver.close()
        self.loop.close()
