"""Results of detached calls: written by the server, read by any later process."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, CallTimeout, ConfigError, PoolClosed
from atoll.core.paths import atoll_home, is_locked, write_atomic
from atoll.core.validation import checks_arguments
from atoll.gang.call import Call, Failure, Request, Sink
from atoll.gang.futures import Fault, RankResults, Received, unloadable
from atoll.wire import frames
from atoll.wire.exceptions import Packed, packed, unpacked
from atoll.wire.frames import Frame

_POLL_S = (0.01, 0.25)


class StoreSink(Sink):
    """Collects a detached call's frames and writes its outcome when it ends."""

    def __init__(self, request: Request, node_of: Sequence[int], forget: Callable[[Call], None]) -> None:
        self.call: Call | None = None
        self.grant: Callable[[int], None] = lambda rank: None
        self._request = request
        self._node_of = node_of
        self._forget = forget
        self._reports: list[tuple[int, Packed]] = []
        self._checkpoint: str | None = None
        self._streams: dict[int, list[Packed]] = {}
        self._writer: threading.Thread | None = None

    def frame(self, frame: Frame, rank: int, node: int) -> None:
        """Keep a report or a streamed value."""
        if frame.kind == frames.REPORT:
            self._reports.append((rank, _raw(Received.of(frame))))
            self._checkpoint = frame.meta.get("checkpoint") or self._checkpoint
        elif frame.kind == frames.STREAM:
            self._streams[rank] = []
        elif "end" not in frame.meta:
            self._streams[rank].append(_raw(Received.of(frame)))
            self.grant(rank)  # nobody consumes it now, so it may go on

    def done(self, results: dict[int, Frame], failures: list[Failure], error: BaseException | None) -> None:
        """Write how it ended, in a thread of its own: the disk must not hold up other calls."""
        parts = {rank: Received.of(frame) for rank, frame in results.items()}
        fault = Fault.of(failures, error)
        self._writer = threading.Thread(target=self._write, args=(parts, fault), name="atoll-outcome")
        self._writer.start()

    def join(self) -> None:
        """Wait until the outcome is on disk."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, parts: dict[int, Received], fault: Fault) -> None:
        try:
            write_atomic(folder_of(self._request.job_id) / "outcome", pickle.dumps(self._state(parts, fault)))
        except OSError as problem:  # a full disk: an outcome that says so may still fit
            print(f"the outcome of {self._request.job_id} could not be written: {problem}", file=sys.stderr)
            lost = Fault(AtollError(f"{self._request.name} ended, but its outcome could not be written: {problem}"), [])
            with contextlib.suppress(OSError):
                write_atomic(folder_of(self._request.job_id) / "outcome", pickle.dumps(self._state({}, lost)))
        finally:
            if self.call is not None:
                self._forget(self.call)

    def _state(self, parts: dict[int, Received], fault: Fault) -> dict[str, Any]:
        return {
            "whole_gang": self._request.whole_gang,
            "job_id": self._request.job_id,
            "ranks": [(rank, self._node_of[rank]) for rank in sorted(parts)],
            "results": {rank: _raw(part) for rank, part in parts.items()},
            "streams": self._streams,
            "reports": self._reports,
            "checkpoint": self._checkpoint,
            "error": packed(fault.first),
            "raised": [(rank, node, _raw(part)) for rank, node, part in fault.parts],
        }


def _raw(part: Received) -> Packed:
    return bytes(part.head), [bytes(buffer) for buffer in part.buffers]


def _received(raw: Packed) -> Received:
    return Received(raw[0], [bytearray(buffer) for buffer in raw[1]])


def _load(state: dict[str, Any]) -> Any:
    """The value a stored outcome stands for; raises what the call raised."""
    if state["error"] is not None or state["raised"]:
        raised = [(rank, node, _received(raw)) for rank, node, raw in state["raised"]]
        raise Fault(unpacked(state["error"]), raised).error()
    streams, results = state["streams"], state["results"]
    try:
        values = [
            [_received(raw).load() for raw in streams[rank]] if rank in streams else _received(results[rank]).load()
            for rank, _ in state["ranks"]
        ]
    except Exception as problem:  # whatever the pickle runs: say which result it was
        raise unloadable(problem, f"the result of {state['job_id']}") from problem
    if not state["whole_gang"]:
        return values[0]
    metrics = [{**_received(raw).load(), "rank": rank} for rank, raw in state["reports"]]
    nodes = [node for _, node in state["ranks"]]
    return RankResults(values, nodes, metrics, state["checkpoint"], state["job_id"])


def folder_of(job_id: str) -> Path:
    """Where a call's files are."""
    return atoll_home() / "jobs" / job_id


def begin(request: Request, pool: str, log: str) -> None:
    """Note that a detached call exists, and the log that its pool's server holds locked as long as it runs.

    Raises:
        OSError: it could not be written; then nothing is left.
    """
    folder = folder_of(request.job_id)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    about = {"name": request.name, "pool": pool, "log": log, "time": time.time()}
    try:
        write_atomic(folder / "job.json", json.dumps(about).encode())
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def exists(job_id: str) -> bool:
    """Is there a detached call with this id?"""
    return job_id.isalnum() and len(job_id) < 100 and (folder_of(job_id) / "job.json").exists()


@checks_arguments
def result(job_id: str, timeout: float | None = None) -> Any:
    """The result of a call that was submitted with ``detach=True``; waits for it, and raises what it raised.

    Args:
        job_id: what ``submit`` returned.
        timeout: seconds to wait; None waits as long as the call runs.

    Raises:
        ConfigError: no such call.
        SerializationError: its value can't be loaded in this process.
        CallTimeout: it has not ended by then; the call continues.
        PoolClosed: its pool ended before the call did.
    """
    if not exists(job_id):
        raise ConfigError(
            f"no detached call {job_id!r} under {atoll_home()}: expected the id that submit(..., detach=True) returned"
        )
    folder = folder_of(job_id)
    about = json.loads((folder / "job.json").read_text())
    started, wait_s = time.monotonic(), _POLL_S[0]
    while not (folder / "outcome").exists():
        alive = is_locked(about["log"])
        if not alive and not (folder / "outcome").exists():
            raise PoolClosed(f"pool {about['pool']!r} ended before {about['name']} ({job_id}) did; see {about['log']}")
        if timeout is not None and time.monotonic() - started >= timeout:
            late = CallTimeout(timeout, [])
            late.args = (f"{about['name']} ({job_id}) did not end within timeout={timeout:g} s; the call continues",)
            raise late
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _POLL_S[1])
    return _load(pickle.loads((folder / "outcome").read_bytes()))
