"""The channel of a rank to its driver, as the rank's own modules use it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from atoll.wire import frames
from atoll.wire.codec import Payload
from atoll.wire.frames import Frame, Parser, close_all, pack, send_all
from atoll.wire.payloads import Arena


class Cancelled(BaseException):
    """Raised in the main thread of a rank whose call was cancelled or whose gang is being stopped."""


class DriverChannel:
    """Frames to and from the driver, and what of the running call others need.

    Attributes:
        setup: what the rank was started with.
        call: the number of the call it runs, 0 between calls; ``broadcast`` says whether all ranks run it.
        spent: something half-done in this process can't be undone: a fresh one has to take over.
        before_result: run when the function has returned, before its result is sent; not where it raised.
        at_end: run after the result is on its way, newest first.
        port_socket: holds the port that rank 0 of a call serves a store on; the next one is held for JAX.
    """

    def __init__(self, sock: socket.socket, setup: dict[str, Any]) -> None:
        self.setup = setup
        self.call = 0
        self.broadcast = self.spent = False
        self.before_result: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self.port_socket, self._jax_socket = _reserve_ports(setup["addr"])
        self.port: int = self.port_socket.getsockname()[1]
        self._sock = sock
        self._parser = Parser()
        self._frames: deque[Frame] = deque()
        self._send_lock = threading.Lock()
        self._sending = self._cancel_pending = False
        self._arena = Arena()

    def next_frame(self) -> Frame:
        """The next frame for this rank; waits for it. Ends the process when the agent is gone."""
        while not self._frames:
            frames_ = self._parser.receive(self._sock)
            if frames_ is None:
                os._exit(0)
            self._frames += frames_
        return self._frames.popleft()

    def agree(self, offer: str = "") -> list[str] | None:
        """Wait until every rank of the call asks this; what each offers, by rank. None if one returned without asking.

        Empty where nobody offers anything.
        """
        self.send(frames.WANT_GROUP, {"offer": offer} if offer else None)
        while True:
            frame = self.next_frame()
            if frame.kind == frames.GROUP and frame.call == self.call:
                return frame.meta.get("offers", []) if frame.meta["go"] else None

    def frame_waiting(self) -> bool:
        """Is there a frame to read just now?"""
        if self._frames:
            return True
        with contextlib.suppress(BlockingIOError):
            return bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        return False

    def send(
        self, kind: int, meta: dict[str, Any] | None = None, payload: Payload | None = None, *, flags: int = 0
    ) -> None:
        """Send a frame of the running call. Safe from any thread."""
        if payload is None:
            self._send(pack(kind, self.setup["rank"], self.call, meta, flags=flags))
        else:
            self._send(*self.encode(kind, payload, meta))

    def encode(self, kind: int, payload: Payload, meta: dict[str, Any] | None = None) -> tuple[bytearray, list[int]]:
        """A frame of the running call, and the descriptors to send beside it."""
        encoded = self._arena.encode(payload)
        meta = {"payload": encoded.table, **(meta or {})}
        if payload.notes:
            meta["notes"] = payload.notes
        fds = [encoded.segment.fd] if encoded.segment else []
        return bytearray(pack(kind, self.setup["rank"], self.call, meta, encoded.inline, len(fds))), fds

    def _send(self, data: bytes | bytearray, fds: Sequence[int] = ()) -> None:
        try:
            with self._send_lock:
                self._sending = True
                send_all(self._sock, data, fds)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)
        finally:
            self._sending = False
            close_all(fds)
        if self._cancel_pending and self.call and threading.current_thread() is threading.main_thread():
            self._cancel_pending = False
            raise Cancelled


def _reserve_ports(addr: str) -> tuple[socket.socket, socket.socket]:
    """Two neighbouring ports of our own, bound but not listening: nobody can connect before a store is made on one.

    gRPC, which JAX's coordinator is made of, may bind the second one as well.
    """
    while True:
        first, second = (socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(2))
        first.bind((addr, 0))
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            second.bind((addr, first.getsockname()[1] + 1))
        except (OSError, OverflowError):  # it is taken, or there is none
            first.close()
            second.close()
        else:
            return first, second
