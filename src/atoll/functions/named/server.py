"""The process behind a named pool: holds the gang, serves the processes that attach, and outlives them.

It listens on a Unix socket in a folder that only the user can enter, and ends when it has been idle for long enough,
when it is told to, or when its gang can't go on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, BinaryIO

from atoll.agent.keeper import is_ours
from atoll.core import events
from atoll.core.errors import AtollError, PoolClosed
from atoll.core.paths import short_path, write_atomic
from atoll.functions.named import detached
from atoll.functions.named.config import PoolConfig
from atoll.functions.named.protocol import GO, request_from
from atoll.functions.named.registry import SOCKET
from atoll.gang import messages as m
from atoll.gang.call import Call, Failure, Sink
from atoll.gang.gang import Gang
from atoll.gang.members import GangSpec
from atoll.wire import frames
from atoll.wire.channel import Channel
from atoll.wire.codec import dumps, loads
from atoll.wire.event_loop import EventLoop
from atoll.wire.exceptions import packed, unpacked
from atoll.wire.frames import Frame, RawFrame, WireError, pack

_BACKLOG_BYTES = 64 << 20  # log output waiting for a client that doesn't read; more is dropped, the files have it
_LAST_WORDS_S = 0.5  # a pool that ends gives its clients this long to take how their calls ended
# What reading a frame may raise that another version of Atoll sent, or no Atoll at all.
_NOT_OURS = (WireError, LookupError, TypeError, ValueError, AttributeError, ImportError, EOFError, pickle.PickleError)


class Client(Channel):
    """A process that is attached. What it does not read waits here, so that a slow one blocks nobody."""

    def __init__(
        self,
        sock: socket.socket,
        loop: EventLoop,
        frame: Callable[[Client, RawFrame], object],
        ended: Callable[[Client], object],
    ) -> None:
        # The server's loop and the gang's threads both send.
        super().__init__(sock, loop, lambda raw: frame(self, raw), lambda _error: ended(self), threading.RLock())
        self.calls: dict[int, Call] = {}
        self.attached = False
        self.wants_events = False

    def send(self, data: bytes | memoryview, fds: Sequence[int] = (), *, droppable: bool = False) -> None:
        """Queue a frame; owns its descriptors."""
        if not droppable or self.num_bytes <= _BACKLOG_BYTES:
            super().send(data, fds)

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            super().close()
            self.sock.close()


class ClientSink(Sink):
    """Passes what a call says on to the client that asked for it."""

    hears_start = True

    def __init__(self, client: Client, number: int) -> None:
        self.client = client
        self.number = number
        self.call: Call | None = None  # set before the gang has it

    def started(self, ranks: tuple[int, ...]) -> None:
        """Tell which ranks run it."""
        self.client.send(pack(frames.ACCEPTED, 0, self.number, {"ranks": list(ranks)}))

    def frame(self, frame: Frame, rank: int, node: int) -> None:
        """Pass a frame on under the client's own number."""
        data = pack(frame.kind, rank, self.number, frame.meta, [frame.rest], len(frame.fds), frame.flags)
        self.client.send(data, frame.fds)

    def done(self, results: dict[int, Frame], failures: list[Failure], error: BaseException | None) -> None:
        """Pass every result on, then how it ended."""
        for rank, frame in results.items():
            self.frame(frame, rank, 0)
        for failure in failures:
            if failure.frame is not None:
                self.frame(failure.frame, failure.rank, failure.node)
        ends = [(f.rank, f.node, packed(f.error)) for f in failures if f.error is not None]
        payload = pickle.dumps((ends, packed(error)))
        meta = {"kept": bool(self.call is None or self.call.kept), "failed": [f.rank for f in failures]}
        self.client.calls.pop(self.number, None)
        self.client.send(pack(frames.DONE, 0, self.number, meta, [payload]))


class Clients:
    """The audience of a server's gang: what happens goes to the clients it concerns, each of which has a queue."""

    wants_events = True
    num_put = num_done = 0

    def __init__(self, clients: set[Client]) -> None:
        self._clients = clients

    def log(self, call: Call | None, rank: int, is_stderr: bool, data: bytes) -> None:
        """Output goes to the client whose call the rank runs; files have all of it."""
        sink = call.sink if call is not None else None
        if isinstance(sink, ClientSink):
            sink.client.send(pack(frames.LOG, rank, 0, None, [data], flags=int(is_stderr)), droppable=True)

    def event(self, event: events.Event | Callable[[], events.Event]) -> None:
        """What happens to a call goes to the client that made it, what happens to the pool to all that listen."""
        always = isinstance(event, events.CallRetried | events.HangSuspected)  # told to the user without on_event too
        listening = [client for client in list(self._clients) if client.wants_events or always]
        job_id = getattr(event, "job_id", None)
        if job_id is not None:
            listening = [c for c in listening if any(j.request.job_id == job_id for j in list(c.calls.values()))]
        if listening:
            data = pack(frames.EVENT, rest=[dumps(event).head])
            for client in listening:
                client.send(data, droppable=True)

    def flush(self, rank: int | None = None) -> None:
        """Clients know themselves when a call has ended."""

    def note(self, text: str, rank: int | None = None) -> None:
        """Clients get the events that it tells of."""

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """There is no code of a user's here."""

    def is_full(self) -> bool:
        """Each client's queue has its own bound."""
        return False

    def catch_up(self) -> None:
        """Nobody waits here for a client."""

    def close(self) -> None:
        """The server closes its clients."""


class Server:
    """Serves one gang."""

    def __init__(self, folder: Path, spec: GangSpec, wanted: dict[str, Any]) -> None:
        self.folder = folder
        self.log: str = wanted["log"]
        self.config: PoolConfig = wanted["config"]
        self.idle_s: float = wanted["idle_s"]
        self.name: str = wanted["name"]
        self.extra_path: list[str] = wanted["extra_path"]
        self.node_of = [node.node for node in spec.plan.nodes for _ in range(node.num_ranks)]
        self.clients: set[Client] = set()
        self.detached: dict[Call, detached.StoreSink] = {}
        self._ending = False
        self._quiet_since = time.monotonic()
        self.gang = Gang(spec, Clients(self.clients))
        self._loop = EventLoop()

    def start(self) -> None:
        """Bring the gang up, then listen."""
        self.gang.start()
        about = {"pid": os.getpid(), "pool_id": self.gang.spec.pool_id, "world_size": self.gang.world_size}
        about |= {"name": self.name, "started": time.time(), "idle_s": self.idle_s, "settings": self.config.given}
        write_atomic(self.folder / "pool.json", json.dumps(about).encode())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(self.folder, SOCKET) as path:
            self._listener.bind(path)
        self._listener.listen(64)
        self._loop.watch(self._listener.fileno(), lambda _readable, _writable: self._accept())
        self._quiet_since = time.monotonic()

    def serve(self) -> None:
        """Until idle for long enough, told to end, or the gang breaks."""
        try:
            while not self._ending and self.gang.usable:
                self._loop.turn(min(0.5, self.idle_s / 4))
                if self.detached or any(client.attached for client in self.clients):
                    self._quiet_since = time.monotonic()
                elif time.monotonic() - self._quiet_since > self.idle_s:
                    return
        finally:
            self._close()

    def end(self, *_: object) -> None:
        """Leave the loop at its next turn."""
        self._ending = True

    def _close(self) -> None:
        # Moved away in one step and while it still answers: who finds nothing here makes a folder of his own, which
        # is never this one.
        gone = self.folder.with_name(f".{self.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self.folder.rename(gone)
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        shutil.rmtree(gone, ignore_errors=True)
        self.gang.stop()
        for sink in list(self.detached.values()):
            sink.join()
        deadline = time.monotonic() + _LAST_WORDS_S
        while any(client.num_bytes for client in self.clients) and (left := deadline - time.monotonic()) > 0:
            self._loop.turn(left)
        for client in self.clients:
            client.close()
        self._loop.close()

    # -- clients --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it went away meanwhile, or there is no descriptor left for it
            return
        if not is_ours(sock):
            sock.close()
            return
        self.clients.add(Client(sock, self._loop, self._on_frame, self._gone))

    def _on_frame(self, client: Client, raw: RawFrame) -> None:
        try:
            self._handle(client, raw.parsed())
        except _NOT_OURS as error:  # another Atoll's: not this pool's end
            print(f"a client sent what is no frame of ours: {type(error).__name__}: {error}", file=sys.stderr)
            self._gone(client)

    def _gone(self, client: Client) -> None:
        self.clients.discard(client)
        for call in list(client.calls.values()):
            self.gang.handle(m.Cancel(call, PoolClosed("the process that made the call went away")))
        client.close()

    def _handle(self, client: Client, frame: Frame) -> None:
        call = client.calls.get(frame.call)
        match frame.kind:
            case frames.ATTACH:
                client.send(self._greeting(client, frame.meta))
            case frames.SUBMIT:
                self._submit(client, frame)
            case frames.CANCEL if call is not None:
                self.gang.handle(m.Cancel(call, unpacked(pickle.loads(frame.rest)) or CancelledError()))
            case frames.CREDIT if call is not None:
                self.gang.handle(m.StreamCredit(call, frame.rank, frame.meta["num"]))
            case frames.CLOSE if call is not None:
                self.gang.handle(m.StreamClosed(call, frame.rank))
            case frames.PING:
                client.send(pack(frames.PING))
            case frames.DOWN:
                self._ending = True

    def _greeting(self, client: Client, meta: dict[str, Any]) -> bytes:
        if meta.get("version") != frames.VERSION:
            return pack(frames.REFUSED, meta={"why": f"it speaks wire version {frames.VERSION}, this Atoll another"})
        if why := PoolConfig({}, meta["given"]).mismatch(self.config.settings):
            return pack(frames.REFUSED, meta={"why": why})
        client.attached, client.wants_events = True, meta["events"]
        spec = self.gang.spec
        about = {"pool_id": spec.pool_id, "node_of": self.node_of, "log_dir": spec.log_dir, "pid": os.getpid()}
        return pack(frames.ATTACHED, meta=about | {"python": spec.python, "extra_path": self.extra_path})

    def _submit(self, client: Client, frame: Frame) -> None:
        request = request_from(frame)
        if frame.meta["detach"]:
            sink = detached.StoreSink(request, self.node_of, self._forget_detached)
            call = Call(request, sink)
            sink.call = call
            sink.grant = lambda rank: self.gang.handle(m.StreamCredit(call, rank, 1))
            try:
                detached.begin(request, self.name, self.log)
            except OSError as error:
                request.release(None)
                client.send(pack(frames.DONE, 0, frame.call, {"kept": True}, [pickle.dumps(([], packed(error)))]))
                return
            self.detached[call] = sink
            client.send(pack(frames.ACCEPTED, 0, frame.call, {"ranks": [], "detached": True}))
        else:
            passing = ClientSink(client, frame.call)
            call = passing.call = Call(request, passing)
            client.calls[frame.call] = call
        self.gang.handle(m.Submit(call))

    def _forget_detached(self, call: Call) -> None:
        self.detached.pop(call, None)


def main() -> None:
    """Entry: reads what to keep from standard input, says on standard output how the start went, then serves.

    Standard input stays open meanwhile: if it ends before ``GO`` came, the process that asked is gone and so is its
    wish, and nothing is left.
    """
    if os.fork():  # the process that asked collects this one at once, and never the server
        os._exit(0)
    asked, report = os.dup(0), os.fdopen(os.dup(1), "wb")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = pickle.loads(sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8))))
    log = _own_streams(wanted["log"])
    server: Server | None = None
    try:
        go = threading.Event()
        threading.Thread(target=_await_go, args=(asked, go), name="atoll-go", daemon=True).start()
        server = Server(Path(wanted["folder"]), loads(wanted["spec"]), wanted)
        server.start()
        _answer(report, None)
        go.wait()
        signal.signal(signal.SIGTERM, server.end)
        signal.signal(signal.SIGINT, server.end)
    except BaseException as error:  # noqa: BLE001 - the process that asked raises it
        if server is not None:
            server.gang.stop()
        shutil.rmtree(wanted["folder"], ignore_errors=True)
        if not isinstance(error, AtollError | KeyboardInterrupt):
            traceback.print_exception(error)
        _answer(report, error)
        return
    server.serve()
    os.close(log)


def _own_streams(path: str) -> int:
    """Nothing of the starter's stays open; what is said goes to the log, which is locked as long as this runs."""
    for flags, number in ((os.O_RDONLY, 0), (os.O_WRONLY | os.O_APPEND | os.O_CREAT, 1)):
        fd = os.open(os.devnull if number == 0 else path, flags | os.O_CLOEXEC, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.dup2(1, 2)
    log = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a file of its own: what children inherit must not hold the lock
    fcntl.flock(log, fcntl.LOCK_EX)
    return log


def _await_go(asked: int, go: threading.Event) -> None:
    try:
        if os.read(asked, 1) == GO:
            go.set()
        else:
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.close(asked)


def _answer(report: BinaryIO, error: BaseException | None) -> None:
    with contextlib.suppress(OSError):  # who asked may be gone
        report.write(pickle.dumps(packed(error)))
    with contextlib.suppress(OSError):
        report.close()
