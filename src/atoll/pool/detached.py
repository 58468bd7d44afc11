"""Results of detached calls: written by the keeper, read by any later process."""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll.core.errors import CallTimeout, ConfigError, PoolClosed
from atoll.core.paths import atoll_home, write_atomic
from atoll.pool.calls import Fault, RankResults, Received
from atoll.pool.job import Failure, Job, Request
from atoll.wire import frames
from atoll.wire.exceptions import pack_exception, unpack_exception
from atoll.wire.frames import Frame

_POLL_S = (0.01, 0.25)


class StoreSink:
    """Collects a detached call's frames and writes its outcome when it ends."""

    def __init__(self, request: Request, node_of: Sequence[int], forget: Callable[[Job], None]) -> None:
        self.job: Job | None = None
        self.grant: Callable[[int], None] = lambda rank: None
        self._request = request
        self._node_of = node_of
        self._forget = forget
        self._reports: list[tuple[int, Raw]] = []
        self._checkpoint: str | None = None
        self._streams: dict[int, list[Raw]] = {}

    def started(self, ranks: tuple[int, ...]) -> None:
        """Nothing to keep yet."""

    def frame(self, frame: Frame, rank: int, node: int) -> None:
        """Keep a report or a streamed value."""
        if frame.kind == frames.REPORT:
            self._reports.append((rank, _raw(Received.of(frame))))
            self._checkpoint = frame.meta.get("checkpoint") or self._checkpoint
        elif frame.kind == frames.STREAM:
            self._streams[rank] = []
        else:
            self._streams[rank].append(_raw(Received.of(frame)))
            self.grant(rank)  # nobody consumes it now, so it may go on

    def done(self, results: dict[int, Frame], failures: list[Failure], error: BaseException | None) -> None:
        """Write how it ended."""
        fault = Fault.of(failures, error)
        state = {
            "whole_gang": self._request.whole_gang,
            "job_id": self._request.job_id,
            "ranks": [(rank, self._node_of[rank]) for rank in sorted(results)],
            "results": {rank: _raw(Received.of(frame)) for rank, frame in results.items()},
            "streams": self._streams,
            "reports": self._reports,
            "checkpoint": self._checkpoint,
            "error": _raw_error(fault.first),
            "raised": [(rank, node, _raw(part)) for rank, node, part in fault.parts],
        }
        write_atomic(folder_of(self._request.job_id) / "outcome", pickle.dumps(state))
        if self.job is not None:
            self._forget(self.job)


Raw = tuple[bytes, list[bytes]]


def _raw(part: Received) -> Raw:
    return bytes(part.head), [bytes(buffer) for buffer in part.buffers]


def _received(raw: Raw) -> Received:
    return Received(raw[0], [bytearray(buffer) for buffer in raw[1]])


def _raw_error(error: BaseException | None) -> Raw | None:
    if error is None:
        return None
    payload = pack_exception(error)
    return payload.head, [bytes(buffer) for buffer in payload.buffers]


def _load(state: dict[str, Any]) -> Any:
    """The value a stored outcome stands for; raises what the call raised."""
    if state["error"] is not None or state["raised"]:
        first = None
        if state["error"] is not None:
            first = unpack_exception(*state["error"], rank=0, node=0)
            first.__cause__ = None  # made by Atoll, not on a rank
        raise Fault(first, [(rank, node, _received(raw)) for rank, node, raw in state["raised"]]).error()
    streams = state["streams"]
    values = [
        [_received(raw).load() for raw in streams[rank]] if rank in streams else _received(state["results"][rank]).load()
        for rank, _ in state["ranks"]
    ]
    if not state["whole_gang"]:
        return values[0]
    metrics = [{**_received(raw).load(), "rank": rank} for rank, raw in state["reports"]]
    nodes = [node for _, node in state["ranks"]]
    return RankResults(values, nodes, metrics, state["checkpoint"], state["job_id"])


def folder_of(job_id: str) -> Path:
    """Where a call's files are."""
    return atoll_home() / "jobs" / job_id


def begin(request: Request, pool: str, pid: int) -> None:
    """Note that a detached call exists and who runs it."""
    folder = folder_of(request.job_id)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    about = {"name": request.name, "pool": pool, "pid": pid, "start_ticks": start_ticks(pid), "time": time.time()}
    write_atomic(folder / "job.json", json.dumps(about).encode())


def result(job_id: str, timeout: float | None = None) -> Any:
    """The result of a call that was submitted with ``detach=True``; waits for it, and raises what it raised.

    Args:
        job_id: what ``submit`` returned.
        timeout: seconds to wait; None waits as long as the call runs.

    Raises:
        ConfigError: no such call.
        CallTimeout: it has not ended by then; it goes on.
        PoolClosed: its pool went away before it ended.
    """
    if not isinstance(job_id, str) or not job_id.isalnum() or not (folder_of(job_id) / "job.json").exists():
        raise ConfigError(f"no detached call {job_id!r} under {atoll_home()}: expected what submit(..., detach=True) gave")
    folder = folder_of(job_id)
    about = json.loads((folder / "job.json").read_text())
    started, wait_s = time.monotonic(), _POLL_S[0]
    while not (folder / "outcome").exists():
        alive = start_ticks(about["pid"]) == about["start_ticks"]
        if not alive and not (folder / "outcome").exists():
            raise PoolClosed(f"pool {about['pool']!r} ended before {about['name']} ({job_id}) did")
        if timeout is not None and time.monotonic() - started >= timeout:
            raise CallTimeout(timeout, [])
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _POLL_S[1])
    return _load(pickle.loads((folder / "outcome").read_bytes()))


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; tells it from a later one with the same number."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
        if fields[0] not in (b"Z", b"X"):
            return int(fields[19])
    return None
