"""The thread in which a pool shows what its ranks print, and calls ``logs=``, ``on_event=`` and done-callbacks.

Calls go on whatever becomes of it: no lock of the pool's is held there, and who waits for it does so only as long as
it moves.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from atoll.core import events
from atoll.gang.call import Call
from atoll.gang.log_router import LogRouter

_BACKLOG_BYTES = 8 << 20  # with more than this waiting, ranks wait before they print on,
_STALL_S = 1.0  # unless nothing was shown for so long: then what they print is dropped, and their files have it
_EVENT_BYTES = 512
_SLICE_S = 0.02
_LEAVE_S = 2.0


class Audience(Protocol):
    """Who hears what happens in a gang. It is told with the gang's lock held, so nothing here may block.

    Attributes:
        num_put, num_done: of what it heard; where they are equal ``catch_up`` has nothing to wait for.
    """

    wants_events: bool
    num_put: int
    num_done: int

    def log(self, call: Call | None, rank: int, is_stderr: bool, data: bytes) -> None: ...
    def flush(self, rank: int | None = None) -> None: ...
    def note(self, text: str, rank: int | None = None) -> None: ...
    def event(self, event: events.Event | Callable[[], events.Event]) -> None: ...
    def call(self, function: Callable[..., object], *args: Any) -> None: ...
    def is_full(self) -> bool: ...
    def catch_up(self) -> None: ...
    def close(self) -> None: ...


class Notifier:
    """The audience of a pool in this process."""

    def __init__(self, logs: LogRouter, on_event: Callable[[events.Event], object] | None) -> None:
        self.wants_events = on_event is not None
        self._logs = logs
        self._on_event = on_event
        logs.moved = self._moved
        self._queue: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...], int] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self.num_put = self.num_done = self._waiting_bytes = self._dropped_bytes = 0
        self._moved_s = 0.0
        self._is_closed = False
        self._spoke: set[int] = set()  # ranks that wrote since the last flush
        self._thread: threading.Thread | None = None

    def log(self, call: Call | None, rank: int, is_stderr: bool, data: bytes) -> None:
        """Show bytes that a rank wrote."""
        if not self._logs.is_quiet:
            self._spoke.add(rank)
            self._put(self._logs.feed, (rank, is_stderr, data), len(data))

    def flush(self, rank: int | None = None) -> None:
        """Show a last line without an end, too: a call ended or a rank died."""
        spoke = self._spoke if rank is None else self._spoke & {rank}
        if spoke:  # seldom: this thread is not woken for a call that prints nothing
            self._spoke = self._spoke - spoke
            self._put(self._logs.flush, (rank,))

    def note(self, text: str, rank: int | None = None) -> None:
        """Show a line of Atoll's own."""
        self._put(self._logs.note, (text, rank))

    def event(self, event: events.Event | Callable[[], events.Event]) -> None:
        """Call ``on_event`` with an event, or with what makes it, where that runs the user's code."""
        if self._on_event is not None:
            on_event = self._on_event
            self._put(lambda: on_event(event() if callable(event) else event), (), _EVENT_BYTES)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call code of the user's; in this thread where the pool is down."""
        if self._is_closed:
            function(*args)
        else:
            self._put(function, args)

    def _put(self, function: Callable[..., object], args: tuple[Any, ...], num_bytes: int = 0) -> None:
        """Queue a call. One that is counted in bytes is dropped where too many wait and nothing moves."""
        with self._changed:
            if num_bytes and self._waiting_bytes > _BACKLOG_BYTES and self._is_stalled():
                self._dropped_bytes += num_bytes
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="atoll-notifier", daemon=True)
                self._thread.start()
            if self.num_done == self.num_put:
                self._moved_s = time.monotonic()
            self.num_put += 1
            self._waiting_bytes += num_bytes
            self._queue.put((function, args, num_bytes))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            function, args, num_bytes = item
            del item
            try:
                function(*args)
            except BaseException as error:  # noqa: BLE001 - the user's code: its failure is no reason to stop the pool
                self._logs.note(f"a callback raised {type(error).__name__}: {error}")
            del function, args
            with self._changed:
                self.num_done += 1
                self._waiting_bytes -= num_bytes
                self._moved_s = time.monotonic()
                dropped, self._dropped_bytes = self._dropped_bytes, 0
                self._changed.notify_all()
            if dropped:
                self._logs.note(
                    f"{dropped:,} bytes of output and events were not shown: nothing read them for {_STALL_S:g} s. The "
                    f"files in the pool's log_dir have all output"
                )

    def _moved(self) -> None:
        self._moved_s = time.monotonic()

    def _is_stalled(self) -> bool:
        return self.num_done < self.num_put and time.monotonic() - self._moved_s > _STALL_S

    def is_full(self) -> bool:
        """Does too much wait, though it moves? Waits a moment for that to change."""
        if self._waiting_bytes <= _BACKLOG_BYTES:
            return False
        with self._changed:
            if self._waiting_bytes > _BACKLOG_BYTES and not self._is_stalled():
                self._changed.wait(_SLICE_S)
                return True
            return False

    def catch_up(self) -> None:
        """Wait until what has come so far is shown, as long as that moves."""
        if self.num_done == self.num_put or threading.current_thread() is self._thread:
            return
        with self._changed:
            upto = self.num_put
            while self.num_done < upto and not self._is_stalled():
                self._changed.wait(_STALL_S / 4)

    def close(self) -> None:
        """Show what there is, as long as that moves, and end the thread."""
        self.catch_up()
        self._logs.close()  # a write that waits for a reader gives up
        self._is_closed = True
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_S)
