"""The other end of a named pool: starts its server where there is none, and makes calls through it."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from atoll.core import events
from atoll.core.errors import AtollError, ConfigError, PoolClosed, ProvisionError, UsageError
from atoll.core.paths import atoll_home
from atoll.core.validation import command_line
from atoll.functions.named.config import PoolConfig
from atoll.functions.named.protocol import GO, request_parts
from atoll.functions.named.registry import END_S, connect, folder_of, locked, process_of
from atoll.gang import messages as m
from atoll.gang.call import Call, Failure
from atoll.gang.hangs import suspicion
from atoll.gang.log_router import LogRouter
from atoll.gang.members import GangSpec
from atoll.gang.notifier import Notifier
from atoll.wire import frames
from atoll.wire.codec import dumps, loads
from atoll.wire.exceptions import packed, unpacked
from atoll.wire.frames import Frame, Parser, WireError, close_all, pack, receive, send_all
from atoll.wire.payloads import Arena

_ANSWER_S = 10.0  # a server that is alive answers at once
_TRIES = 5  # it may be ending at the moment somebody attaches
# How to start a gang, and what an image puts in front of every process's own import path.
ToStart = Callable[[], tuple[GangSpec, Sequence[str]]]


class Attached:
    """A named pool as this process uses it: carries calls to the server, and what comes of them back."""

    def __init__(
        self,
        name: str,
        config: PoolConfig,
        to_start: ToStart,
        idle_s: float,
        logs: Callable[[Callable[[int], int], int], LogRouter],
        on_event: Callable[[events.Event], object] | None,
    ) -> None:
        started = time.monotonic()
        self.name = name
        self.arena = Arena()
        self._wants_events = on_event is not None
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._detaching: dict[Call, threading.Event] = {}
        self._lock = threading.RLock()
        self._send_lock = threading.Lock()
        self._outbox: deque[tuple[bytes, Sequence[int]]] = deque()
        self._closing = False
        self._gone = "went away"
        self._pid = os.getpid()
        self._parser = Parser()
        greeting = self._attach(config, to_start, idle_s)
        self.pool_id: str = greeting["pool_id"]
        self.python: str = greeting["python"]
        self.extra_path: tuple[str, ...] = tuple(greeting["extra_path"])
        self.node_of: list[int] = greeting["node_of"]
        self.log_dir: str = greeting["log_dir"]
        self.world_size = len(self.node_of)
        self.audience = Notifier(logs(self.node_of.__getitem__, self.world_size), on_event)
        self._reader = threading.Thread(target=self._read, name=f"atoll-{name}", daemon=True)
        self._reader.start()
        took, nodes = time.monotonic() - started, len(set(self.node_of))
        self.audience.event(
            events.PoolStarted(pool_id=self.pool_id, nodes=nodes, world_size=self.world_size, took_s=took)
        )

    def _attach(self, config: PoolConfig, to_start: ToStart, idle_s: float) -> dict[str, Any]:
        for _ in range(_TRIES):
            self._sock = _connect_or_start(self.name, config, to_start, idle_s)
            try:
                greeting = self._greet(config)
            except BaseException:  # also Ctrl-C
                self._sock.close()
                raise
            if greeting is not None:
                return greeting
            self._sock.close()
            time.sleep(0.05)
        raise PoolClosed(f"pool {self.name!r} ended {_TRIES} times while this process attached; see `atoll pools ls`")

    def _greet(self, config: PoolConfig) -> dict[str, Any] | None:
        """What the server says of itself; None where it ended just now."""
        meta = {"version": frames.VERSION, "given": config.given, "events": self._wants_events}
        received: list[Frame] = []
        self._sock.settimeout(_ANSWER_S)
        try:
            send_all(self._sock, pack(frames.ATTACH, meta=meta))
            while not received:
                data, fds = receive(self._sock)
                if not data:
                    return None
                received = [raw.parsed() for raw in self._parser.feed(data, fds)]
        except TimeoutError:
            raise PoolClosed(
                f"pool {self.name!r} did not answer within {_ANSWER_S:g} s; its server is {process_of(self.name)}"
            ) from None
        except OSError:
            return None
        frame = received[0]
        if frame.kind == frames.REFUSED:
            raise ConfigError(
                f"pool {self.name!r} is up and differs: {frame.meta['why']}. Use another name, leave the setting out, "
                f"or end it with `{command_line('atoll', 'pools', 'down', self.name)}`"
            )
        if frame.meta["pool_id"] == os.environ.get("ATOLL_POOL_ID"):
            raise UsageError(
                f"this task runs in pool {self.name!r} itself: a task that waited for its own pool could wait for "
                f"ever. Dispatch from the driver"
            )
        return frame.meta

    # -- what ComputePool asks for ----------------------------------------------------------------------------------

    def handle(self, event: m.CallerEvent) -> None:
        """Have the server do what a caller wants."""
        call = event.call
        match event:
            case m.Submit():
                self._add(call)
                self._submit(call, detach=False)
            case m.Cancel(error=error):
                record = None if isinstance(error, CancelledError) else packed(error)
                self._send(pack(frames.CANCEL, 0, call.number, None, [pickle.dumps(record)]))
            case m.StreamCredit(rank=rank, num=num):
                self._send(pack(frames.CREDIT, rank, call.number, {"num": num}))
            case m.StreamClosed(rank=rank):
                self._send(pack(frames.CLOSE, rank, call.number))

    def read_answer(self, call: Call, timeout_s: float | None) -> float | None:
        """The reader does it; returns the seconds that are left."""
        return timeout_s

    def submit_detached(self, call: Call) -> str:
        """Send a call that outlives this process; returns its id once the server has it."""
        self._detaching[call] = accepted = threading.Event()
        try:
            self._add(call)
            self._submit(call, detach=True)
            if not accepted.wait(END_S):  # also where the reader found the server gone
                raise PoolClosed(f"pool {self.name!r} did not answer within {END_S:g} s; see `atoll pools ls`")
        finally:
            del self._detaching[call]
        if call.done:
            raise call.error or PoolClosed(f"pool {self.name!r} went away")
        return call.request.job_id

    def _add(self, call: Call) -> None:
        with self._lock:
            if self._closing:
                call.request.release(self.arena)
                raise PoolClosed(f"pool {self.name!r} went away")
            call.number = next(self._numbers)
            self._calls[call.number] = call

    def _submit(self, call: Call, *, detach: bool) -> None:
        data, fds = request_parts(call.request)
        self._send(pack(frames.SUBMIT, 0, call.number, {"detach": detach}, [data], len(fds)), fds)

    def stop(self) -> None:
        """Leave the pool; it stays up."""
        if os.getpid() != self._pid:  # a forked child's copy: the connection is its parent's
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._reader is not threading.current_thread():
            self._reader.join(5.0)
        self._sock.close()
        self.arena.close()
        self.audience.close()

    def _send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send, or leave it to the thread that is sending: a stream that the garbage collector closes may come here in
        the middle of another frame of the same thread."""
        self._outbox.append((data, fds))
        while self._outbox and self._send_lock.acquire(blocking=False):
            try:
                while self._outbox:
                    send_all(self._sock, *self._outbox.popleft())
            except BaseException as error:  # in the middle of a frame, by Ctrl-C say: the rest would make no sense
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                if not isinstance(error, OSError):  # of a server that is gone or stands still the reader tells
                    raise
            finally:
                self._send_lock.release()

    # -- what the server says ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._read_frames()
        finally:
            with self._lock:
                ours = self._closing
                self._closing = True
                left, self._calls = list(self._calls.values()), {}
            why = "this process left the pool before the call finished" if ours else f"pool {self.name!r} {self._gone}"
            for call in left:
                self._end(call, call.results, call.failures, PoolClosed(why), kept=True)
            self._parser.close()

    def _read_frames(self) -> None:
        has_asked = False
        while True:
            while self.audience.is_full():
                pass
            try:
                data, fds = receive(self._sock)
                received = self._parser.feed(data, fds) if data else []
            except TimeoutError:
                if has_asked and self._calls:
                    self._gone = f"has not answered for {_ANSWER_S:g} s; its server is {process_of(self.name)}"
                    return
                if has_asked := bool(self._calls):
                    self._send(pack(frames.PING))
                continue
            except (OSError, WireError):
                return
            has_asked = False
            if not data:
                return
            for raw in received:
                self._on_frame(raw.parsed())

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == frames.LOG:
            self.audience.log(None, frame.rank, bool(frame.flags), bytes(frame.rest))
            return
        if frame.kind == frames.EVENT:
            self._event(loads(frame.rest))
            return
        call = self._calls.get(frame.call)
        if call is None:
            close_all(frame.fds)
            return
        match frame.kind:
            case frames.ACCEPTED:
                self._accepted(call, frame)
            case frames.RESULT:
                self.audience.flush(frame.rank)
                self._notes(frame)
                call.results[frame.rank] = frame
            case frames.ERROR:
                self._notes(frame)
                call.failures.append(Failure(frame.rank, self.node_of[frame.rank], frame=frame))
            case frames.VALUE | frames.STREAM | frames.REPORT:
                try:
                    call.sink.frame(frame, frame.rank, self.node_of[frame.rank])
                except Exception as error:  # noqa: BLE001 - what a report's pickle runs here is the user's
                    self.handle(m.Cancel(call, error))
            case frames.DONE:
                self._done(call, frame)

    def _notes(self, frame: Frame) -> None:
        for line in frame.meta.get("notes", ()):
            self.audience.note(line, frame.rank)

    def _event(self, event: events.Event) -> None:
        match event:  # what a gang in this process would have said itself
            case events.CallRetried(attempt=attempt, reason=reason):
                self.audience.note(f"{reason}; starting again, retry {attempt}")
            case events.HangSuspected():
                self.audience.note(suspicion(event))
        self.audience.event(event)

    def _accepted(self, call: Call, frame: Frame) -> None:
        if frame.meta.get("detached"):
            self._calls.pop(call.number, None)
            call.request.release(None)
            self._detaching[call].set()
            return
        call.begin(call.number, tuple(frame.meta["ranks"]), time.monotonic())
        call.sink.started(call.ranks)

    def _done(self, call: Call, frame: Frame) -> None:
        self._calls.pop(call.number, None)
        ends, error = pickle.loads(frame.rest)
        failures = [Failure(rank, node, error=unpacked(record)) for rank, node, record in ends]
        self.audience.flush()
        self._end(call, call.results, [*failures, *call.failures], unpacked(error), kept=frame.meta["kept"])

    def _end(
        self, call: Call, results: dict[int, Frame], failures: list[Failure], error: BaseException | None, *, kept: bool
    ) -> None:
        call.done, call.error = True, error
        call.request.release(None if kept or failures or error is not None else self.arena)
        call.sink.done(results, failures, error)
        if (detaching := self._detaching.get(call)) is not None:
            detaching.set()


def _connect_or_start(name: str, config: PoolConfig, to_start: ToStart, idle_s: float) -> socket.socket:
    sock = connect(name)
    if sock is not None:
        return sock
    with locked(name):  # two processes that want the pool at once start it once
        sock = connect(name)
        if sock is not None:
            return sock
        spec, extra_path = to_start()
        folder = folder_of(name)
        shutil.rmtree(folder, ignore_errors=True)  # a server that was killed could not
        folder.parent.mkdir(exist_ok=True, mode=0o700)
        folder.mkdir(mode=0o700)
        log = Path(spec.log_dir) / "server.log"
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        wanted = {"name": name, "folder": str(folder), "log": str(log), "idle_s": idle_s}
        wanted |= {"config": config, "spec": dumps(spec).head, "extra_path": list(extra_path)}
        try:
            _start_server(wanted)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        sock = connect(name)
    if sock is None:
        raise ProvisionError(f"pool {name!r} started and ended at once; its log is {log}")
    return sock


def _start_server(wanted: dict[str, Any]) -> None:
    entries: list[object] = list(sys.path)  # None and worse have been seen there
    path = [os.path.abspath(entry) for entry in entries if isinstance(entry, str)]
    boot = f"import sys; sys.path[:] = {path!r}; from atoll.functions.named.server import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", boot],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        env={**os.environ, "ATOLL_HOME": str(atoll_home())},
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin as asking, process.stdout as answer:
        try:
            payload = pickle.dumps(wanted)
            with contextlib.suppress(BrokenPipeError):
                asking.write(len(payload).to_bytes(8) + payload)
                asking.flush()
            told = answer.read()
            error = unpacked(pickle.loads(told)) if told else None
            if told and error is None:
                asking.write(GO)
                asking.flush()
        except BaseException:  # also Ctrl-C: a server that isn't told to go on ends itself and what it has started
            with contextlib.suppress(OSError):
                asking.close()
            _await_end(answer.fileno())
            raise
        finally:
            process.wait()  # the server itself is its child, and nobody's here
    if error is not None:
        raise (
            error
            if isinstance(error, AtollError)
            else ProvisionError(f"pool {wanted['name']!r} could not be started: {type(error).__name__}: {error}")
        )
    if not told:
        raise ProvisionError(f"the server of pool {wanted['name']!r} ended while it started; see {wanted['log']}")


def _await_end(fd: int) -> None:
    """Until the server has closed its end, but not for ever."""
    deadline = time.monotonic() + END_S
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not os.read(fd, 1 << 16):
            return
