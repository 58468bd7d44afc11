"""The other end of a named pool: starts its keeper where there is none, and makes calls through it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from atoll.core import events
from atoll.core.errors import AtollError, ConfigError, PoolClosed, ProvisionError, UsageError
from atoll.core.paths import atoll_home
from atoll.pool.gang import GangSpec
from atoll.pool.job import Failure, Job
from atoll.pool.keeper import in_folder, request_to_meta
from atoll.pool.logs import LogRouter
from atoll.wire import frames
from atoll.wire.codec import dumps, loads
from atoll.wire.exceptions import unpack_exception
from atoll.wire.frames import Frame, Parser, WireError, pack, receive, send_all
from atoll.wire.segments import Arena

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> str:
    """A pool's name, or ``ConfigError``."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"name={name!r}: expected letters, digits, '.', '_' and '-', at most 64, as in 'my-pool'")
    return name


def folder_of(name: str) -> Path:
    """Where a named pool's socket is."""
    return atoll_home() / "pools" / check_name(name)


def named_pools() -> list[dict[str, Any]]:
    """What is known of each named pool that is up."""
    found = []
    for path in sorted((atoll_home() / "pools").glob("*/pool.json")):
        with contextlib.suppress(OSError, ValueError):
            about = json.loads(path.read_text())
            sock = connect(about["name"])
            if sock is not None:
                sock.close()
                found.append(about)
    return found


def connect(name: str) -> socket.socket | None:
    """A connection to the pool's keeper, or None where there is none."""
    folder = folder_of(name)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with in_folder(folder) as path:
            sock.connect(path)
    except OSError:
        sock.close()
        return None
    return sock


def end_pool(name: str) -> bool:
    """End a named pool for everybody; False where there is none."""
    sock = connect(name)
    if sock is None:
        return False
    with sock:
        send_all(sock, pack(frames.DOWN))
        sock.settimeout(15.0)
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                pass
    return True


class Attached:
    """A named pool as this process uses it: carries calls to the keeper, and what comes of them back."""

    def __init__(
        self,
        name: str,
        wishes: dict[str, Any],
        spec: Callable[[], GangSpec],
        idle_s: float,
        logs: Callable[[Callable[[int], int], int], LogRouter],
        on_event: Callable[[events.Event], object] | None,
    ) -> None:
        self.name = name
        self.arena = Arena()
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._lock = threading.RLock()
        self._send_lock = threading.Lock()
        self._closing = False
        self._sock = _connect_or_start(name, wishes, spec, idle_s)
        self._parser = Parser()
        greeting = self._greet(wishes)
        self.pool_id: str = greeting["pool_id"]
        self.node_of: list[int] = greeting["node_of"]
        self.log_dir: str = greeting["log_dir"]
        self.world_size = len(self.node_of)
        self._logs = logs(self.node_of.__getitem__, self.world_size)
        self._reader = threading.Thread(target=self._read, name=f"atoll-{name}", daemon=True)
        self._reader.start()

    def _greet(self, wishes: dict[str, Any]) -> dict[str, Any]:
        send_all(self._sock, pack(frames.ATTACH, meta={"version": frames.VERSION, "wishes": wishes}))
        received: list[Frame] = []
        while not received:
            data, fds = receive(self._sock)
            if not data:
                raise PoolClosed(f"pool {self.name!r} ended just now; try again")
            received = [raw.parsed() for raw in self._parser.feed(data, fds)]
        frame = received[0]
        if frame.kind == frames.REFUSED:
            self._sock.close()
            raise ConfigError(
                f"pool {self.name!r} is up and differs: {frame.meta['why']}. Use another name, leave the setting out, "
                f"or end it with `atoll pools down {self.name}`"
            )
        if frame.meta["pool_id"] == os.environ.get("ATOLL_POOL_ID"):
            self._sock.close()
            raise UsageError(
                f"this task runs in pool {self.name!r} itself: a task that waited for its own pool could wait for ever. "
                f"Dispatch from the driver"
            )
        return frame.meta

    # -- what ComputePool asks for ----------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Send a call to the keeper."""
        with self._lock:
            if self._closing:
                raise PoolClosed(f"pool {self.name!r} went away")
            job.number = next(self._numbers)
            self._jobs[job.number] = job
        self._submit(job, detach=False)

    def submit_detached(self, job: Job) -> str:
        """Send a call that outlives this process; returns its id once the keeper has it."""
        accepted = threading.Event()
        job.timers.append(accepted.set)
        with self._lock:
            job.number = next(self._numbers)
            self._jobs[job.number] = job
        self._submit(job, detach=True)
        while not accepted.wait(0.5):
            if self._closing:
                raise PoolClosed(f"pool {self.name!r} went away")
        return job.request.job_id

    def _submit(self, job: Job, *, detach: bool) -> None:
        meta, parts, fds = request_to_meta(job.request, detach=detach)
        self._send(pack(frames.SUBMIT, 0, job.number, meta, parts, len(fds)), fds)

    def cancel(self, job: Job, error: BaseException) -> None:
        """Ask the keeper to stop a call."""
        rest = [] if isinstance(error, CancelledError) else [dumps(error).head]
        self._send(pack(frames.CANCEL, 0, job.number, None, rest))

    def credit(self, job: Job, rank: int, num: int) -> None:
        """Let a streaming rank produce that many values more."""
        self._send(pack(frames.CREDIT, rank, job.number, {"n": num}))

    def close_stream(self, job: Job, rank: int) -> None:
        """The consumer wants no more."""
        self._send(pack(frames.CLOSE, rank, job.number))

    def stop(self) -> None:
        """Leave the pool; it stays up."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._reader is not threading.current_thread():
            self._reader.join(5.0)
        self._sock.close()
        self.arena.close()

    def _send(self, data: bytes, fds: list[int] | None = None) -> None:
        with self._send_lock, contextlib.suppress(OSError):  # the reader notices a keeper that is gone
            send_all(self._sock, data, fds or [])

    # -- what the keeper says ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._read_frames()
        finally:
            with self._lock:
                ours = self._closing
                self._closing = True
                left, self._jobs = list(self._jobs.values()), {}
            why = "this process left the pool before the call finished" if ours else f"pool {self.name!r} went away"
            for job in left:
                self._end(job, {}, [], PoolClosed(why), kept=True)
            self._parser.close()

    def _read_frames(self) -> None:
        while True:
            try:
                data, fds = receive(self._sock)
                received = self._parser.feed(data, fds) if data else []
            except (OSError, WireError):
                return
            if not data:
                return
            for raw in received:
                self._on_frame(raw.parsed())

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == frames.LOG:
            self._logs.feed(frame.rank, bool(frame.flags), bytes(frame.rest))
            return
        if frame.kind == frames.EVENT:
            if self._on_event is not None:
                with contextlib.suppress(Exception):
                    self._on_event(loads(frame.rest))
            return
        job = self._jobs.get(frame.call)
        if job is None:
            for fd in frame.fds:
                os.close(fd)
            return
        match frame.kind:
            case frames.ACCEPTED:
                self._accepted(job, frame)
            case frames.RESULT:
                self._logs.flush(frame.rank)
                job.results[frame.rank] = frame
            case frames.ERROR:
                job.failures.append(Failure(frame.rank, self.node_of[frame.rank], frame=frame))
            case frames.VALUE | frames.STREAM | frames.REPORT:
                job.sink.frame(frame, frame.rank, self.node_of[frame.rank])
            case frames.DONE:
                self._done(job, frame)

    def _accepted(self, job: Job, frame: Frame) -> None:
        for told in job.timers:
            told()
        if frame.meta.get("detached"):
            self._jobs.pop(job.number, None)
            return
        job.begin(job.number, tuple(frame.meta["ranks"]))
        job.sink.started(job.ranks)

    def _done(self, job: Job, frame: Frame) -> None:
        self._jobs.pop(job.number, None)
        ends, error = pickle.loads(frame.rest)
        failures = [Failure(rank, node, error=_unpacked(packed)) for rank, node, packed in ends]
        self._logs.flush()
        self._end(job, job.results, [*failures, *job.failures], _unpacked(error), kept=frame.meta["kept"])

    def _end(
        self, job: Job, results: dict[int, Frame], failures: list[Failure], error: BaseException | None, *, kept: bool
    ) -> None:
        job.done = True
        for encoded in (job.request.arguments, job.request.function.encoded):
            segment, encoded.segment = encoded.segment, None
            if segment is not None and (kept or failures or error is not None):
                segment.close()
            elif segment is not None:
                self.arena.give_back(segment)
        job.sink.done(results, failures, error)


def _unpacked(packed: tuple[bytes, list[bytes]] | None) -> BaseException | None:
    if packed is None:
        return None
    error = unpack_exception(*packed, rank=0, node=0)
    error.__cause__ = None  # made by Atoll in the keeper, not on a rank
    return error


def _connect_or_start(
    name: str, wishes: dict[str, Any], spec: Callable[[], GangSpec], idle_s: float
) -> socket.socket:
    folder = folder_of(name)
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder.parent / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes that want the pool at once start it once
        sock = connect(name)
        if sock is not None:
            return sock
        folder.mkdir(mode=0o700, exist_ok=True)
        for stale in ("sock", "pool.json"):
            with contextlib.suppress(OSError):
                (folder / stale).unlink()
        _start_keeper(name, folder, wishes, spec(), idle_s)
        sock = connect(name)
    if sock is None:
        raise ProvisionError(f"pool {name!r} started and ended at once; its log is {folder / 'keeper.log'}")
    return sock


def _start_keeper(name: str, folder: Path, wishes: dict[str, Any], spec: GangSpec, idle_s: float) -> None:
    boot = f"import sys; sys.path[:] = {sys.path!r}; from atoll.pool.keeper import main; main()"
    wanted = {"name": name, "folder": str(folder), "wishes": wishes, "idle_s": idle_s, "spec": dumps(spec).head}
    process = subprocess.Popen(
        [sys.executable, "-c", boot],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with process.stdin, process.stdout:
            process.stdin.write(pickle.dumps(wanted))
            process.stdin.close()
            told = process.stdout.read()
        process.wait()  # the keeper itself is its child, and nobody's here
    except BaseException:
        process.kill()
        process.wait()
        raise
    if not told:
        raise ProvisionError(f"the keeper of pool {name!r} ended while it started; its log is {folder / 'keeper.log'}")
    error = _unpacked(pickle.loads(told))
    if error is not None:
        raise error if isinstance(error, AtollError) else ProvisionError(f"pool {name!r} could not be started: {error}")
