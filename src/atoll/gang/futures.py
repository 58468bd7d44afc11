"""A call as its caller sees it: a future, a list of results by rank, or a stream of values."""

from __future__ import annotations

import _thread
import contextlib
import functools
import pickle
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, Protocol, TypeVar

from atoll.core import events
from atoll.core.errors import AtollError, RemoteError, SerializationError
from atoll.gang import messages as m
from atoll.gang.call import Call, Failure, Request, Sink
from atoll.gang.notifier import Audience
from atoll.wire import frames
from atoll.wire.codec import loads
from atoll.wire.frames import Frame, close_all
from atoll.wire.payloads import decode_parts

R = TypeVar("R")
_CREDIT_EVERY = 8
_SMALL_BYTES = 4096
_RUNNING, _FINISHED = "RUNNING", "FINISHED"  # as concurrent.futures calls it


class Backend(Protocol):
    """What carries calls out: a gang in this process, or the server of a named pool."""

    world_size: int

    @property
    def audience(self) -> Audience: ...
    def handle(self, event: m.CallerEvent) -> None: ...
    def read_answer(self, call: Call, timeout_s: float | None) -> float | None: ...


class RankResults(list[R], Generic[R]):
    """What a broadcast returned, ordered by global rank.

    Attributes:
        metrics: every ``sky.report`` of the call, in order of arrival.
        checkpoint: path of the last checkpoint reported, or None; with ``sharded=True`` it is one rank's part only.
        job_id: id of the call.
    """

    def __init__(
        self,
        values: Sequence[R],
        nodes: Sequence[int],
        metrics: list[dict[str, Any]],
        checkpoint: str | None,
        job_id: str,
    ) -> None:
        super().__init__(values)
        self._nodes = list(nodes)
        self.metrics = metrics
        self.checkpoint = checkpoint
        self.job_id = job_id

    def by_node(self) -> dict[int, list[R]]:
        """The results of each node, by node index, ordered by local rank."""
        grouped: dict[int, list[R]] = {}
        for node, value in zip(self._nodes, self, strict=True):
            grouped.setdefault(node, []).append(value)
        return grouped


class CallFuture(Future[R], Generic[R]):
    """A ``concurrent.futures.Future`` that can also be cancelled while it runs.

    ``metrics`` holds every ``sky.report`` so far, ``checkpoint`` the path of the last checkpoint reported,
    ``job_id`` the id of the call. Callbacks are called in a thread of the pool's; what ranks printed is shown before
    ``result`` returns, unless nobody takes it.
    """

    def __init__(
        self,
        backend: Backend,
        request: Request,
        node_of: Sequence[int],
    ) -> None:
        super().__init__()
        sink = _FutureSink()
        sink.held, sink.future, sink.audience, sink.job_id = self, weakref.ref(self), backend.audience, request.job_id
        self.reports: list[Report] = []
        self.checkpoint: str | None = None
        self.job_id = request.job_id
        self.call = Call(request, sink)
        self._backend = backend
        self._node_of = node_of
        self._streams: dict[int, Stream[Any]] = {}
        self._streamed = False  # its value is streams: it has one long before the call ends
        self._decoded: tuple[Any, BaseException | None] | None = None
        self._decode_lock = threading.Lock()
        self._state = _RUNNING  # nobody else knows of it yet

    # -- the caller's side ----------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> R:
        """The value, or for a broadcast the list of values by rank; raises what the call raised."""
        if not self.call.done:
            timeout = self._backend.read_answer(self.call, timeout)
        raw: Any = self._result if self._state == _FINISHED else super().result(timeout)
        audience = self._backend.audience
        if audience.num_put != audience.num_done:
            audience.catch_up()
        if type(raw) is memoryview and self._decoded is None:  # one rank's, with nothing beside it
            with self._decode_lock:
                try:
                    self._decoded = pickle.loads(raw), None
                except Exception:  # noqa: BLE001 - whatever the pickle runs
                    pass  # _outcome says so
        value, error = self._decoded or self._outcome(raw)
        if error is not None:
            try:
                raise error
            finally:
                del error
        result: R = value
        return result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, or None."""
        error = self._outcome(super().result(timeout))[1]
        self._backend.audience.catch_up()
        return error

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every ``sky.report`` so far, with the rank it came from."""
        return [report.metrics for report in list(self.reports)]

    def when_done(self, action: Callable[[Future[R]], object]) -> None:
        """Call a function of Atoll as soon as the call has ended; with the pool's lock held, so it must not block."""
        super().add_done_callback(action)

    def add_done_callback(self, fn: Callable[[Future[R]], object]) -> None:
        """Call it with this future when the call has ended, in a thread of the pool's: the caller may hold a lock."""
        audience = self._backend.audience
        super().add_done_callback(lambda future: audience.call(fn, future))

    def cancel(self) -> bool:
        """Stop the call, also while it runs or streams; False if it had ended."""
        if self.done() and (self.call.done or not self._streamed):
            return False
        self.fail(CancelledError())
        return True

    def fail(self, error: BaseException) -> None:
        """Stop the call, which ends with this error."""
        self._backend.handle(m.Cancel(self.call, error))

    @property
    def place(self) -> tuple[int, int]:
        """Rank and node that a call on one rank went to."""
        rank = self.call.ranks[0]
        return rank, self._node_of[rank]

    def cancelled(self) -> bool:
        """Was it cancelled?"""
        return super().cancelled() or (self.done() and isinstance(self.exception(), CancelledError))

    def _outcome(self, raw: Any) -> tuple[Any, BaseException | None]:
        """Unpickle once, in the thread that asks: what it imports or runs must not hold up the reader."""
        with self._decode_lock:
            if self._decoded is None:
                if type(raw) is memoryview:
                    try:
                        self._decoded = loads(raw), None
                    except Exception as problem:  # noqa: BLE001 - whatever the pickle runs
                        self._decoded = None, unloadable(problem, "the result")
                else:
                    self._decoded = raw() if callable(raw) else (raw, None)
            return self._decoded

    # -- the reader's side, see _FutureSink -------------------------------------------------------------------------

    def settle_streams(self, ended: dict[int, Frame]) -> None:
        """Every rank has begun to stream or returned: the future's value is the streams."""
        if self.done() or not self._streams:
            return
        ranks = self.call.ranks
        if any(rank not in self._streams and rank not in ended for rank in ranks):
            return
        self._streamed = True
        streams, self._streams = self._streams, {}
        self.settle({**streams, **{rank: Received.of(ended.pop(rank)) for rank in ranks if rank not in streams}})

    def settle(self, parts: dict[int, Any]) -> None:
        """Complete with what the ranks sent; payloads are read on first use, see ``_outcome``."""
        # Not a word of `self` in here: a future that holds itself would keep its values until a garbage collection.
        ranks, whole, job_id = self.call.ranks, self.call.whole_gang, self.job_id
        nodes, reports, checkpoint = [self._node_of[rank] for rank in ranks], self.reports, self.checkpoint

        def decode() -> tuple[Any, BaseException | None]:
            try:
                values = [part.load() if isinstance(part, Received) else part for part in map(parts.get, ranks)]
                metrics = [report.metrics for report in reports]
            except Exception as problem:  # noqa: BLE001 - whatever the pickle runs: say which result it was
                parts.clear()
                return None, unloadable(problem, "the result")
            parts.clear()
            return (RankResults(values, nodes, metrics, checkpoint, job_id) if whole else values[0]), None

        self.set_result(decode)  # type: ignore[arg-type]  # decoded on first use, see _outcome


class Received:
    """A payload as it arrived, its descriptor mapped at once, its pickle not yet read."""

    def __init__(self, head: memoryview | bytes, buffers: Sequence[Any]) -> None:
        self.head = head
        self.buffers = buffers

    @classmethod
    def of(cls, frame: Frame) -> Received:
        """The payload of a frame; takes its descriptor over."""
        head, buffers, _ = decode_parts(frame.meta["payload"], frame.rest, frame.fds)
        return cls(head, buffers)

    def load(self) -> Any:
        """The value."""
        return loads(self.head, self.buffers)


class Report:
    """What a rank reported; unpickled by whoever asks first, as that may run the user's code."""

    def __init__(self, received: Received, rank: int) -> None:
        self._received = received
        self._rank = rank

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """What it gave to ``sky.report``."""
        values: dict[str, Any] = self._received.load()
        return values

    @property
    def metrics(self) -> dict[str, Any]:
        """That, with the rank it came from."""
        return {**self.values, "rank": self._rank}


class _FutureSink(Sink):
    """Hears a call's frames and completes its future."""

    # The gang holds the call while it runs, and so its future; but a future that has its value lives on with its owner
    # alone: dropping a stream has to end it.
    held: CallFuture[Any] | None
    future: Callable[[], CallFuture[Any] | None]
    audience: Audience
    job_id: str
    inboxes: dict[int, Inbox] | None = None

    def frame(self, frame: Frame, rank: int, node: int) -> None:
        """A stream began, or a value or report came."""
        future = self.future()
        if frame.kind == frames.VALUE and self.inboxes is not None:
            self.inboxes[rank].put(None if "end" in frame.meta else Received.of(frame))
        elif frame.kind == frames.STREAM and future is not None:
            stream: Stream[Any] = Stream(future._backend, future.call, rank)
            self.inboxes = {**(self.inboxes or {}), rank: stream.inbox}
            future._streams[rank] = stream
            future.settle_streams(future.call.results)
            self._release(future)
        elif frame.kind == frames.REPORT:
            self._reported(Received.of(frame), frame.meta.get("checkpoint"), rank, node)

    def returned(self, results: dict[int, Frame]) -> None:
        """A rank returned while others stream: that may be the last one the streams waited for."""
        future = self.future()
        if future is not None:
            future.settle_streams(results)
            self._release(future)

    def done(self, results: dict[int, Frame], failures: list[Failure], error: BaseException | None) -> None:
        """Complete the future and end its streams."""
        future = self.future()
        if error is None and not failures and not self.inboxes and len(results) == 1 and future is not None:
            (frame,) = results.values()
            # All of it is in the frame. A larger one would be kept beside its value.
            if len(frame.meta["payload"]) == 1 and len(frame.rest) <= _SMALL_BYTES and not future.call.whole_gang:
                results.clear()
                future.set_result(frame.rest)
                self.held = None
                return
        fault = Fault.of(failures, error) if failures or error is not None else None
        if future is not None and not future.done():
            if fault is not None:
                future.set_result(lambda: (None, fault.error()))
            elif self.inboxes:
                future.settle_streams(results)
            else:
                future.settle({rank: Received.of(results.pop(rank)) for rank in future.call.ranks})
            self._release(future)
        for frame in results.values():
            close_all(frame.fds)
        for inbox in (self.inboxes or {}).values():
            inbox.put(fault)

    def _reported(self, received: Received, checkpoint: str | None, rank: int, node: int) -> None:
        report, future = Report(received, rank), self.future()
        if future is not None:
            future.reports.append(report)
            future.checkpoint = checkpoint or future.checkpoint
        self.audience.call(self._load, report)
        if self.audience.wants_events:
            self.audience.event(
                lambda: events.MetricsReported(
                    job_id=self.job_id, rank=rank, node=node, metrics=report.values, checkpoint=checkpoint
                )
            )

    def _load(self, report: Report) -> None:
        """Unpickle a report; one that can't be ends the call."""
        try:
            _ = report.values
        except BaseException as error:  # noqa: BLE001 - what a report's pickle runs is the user's
            if (future := self.future()) is not None:
                future.fail(error)

    def _release(self, future: CallFuture[Any]) -> None:
        if future.done():
            self.held = None


class Fault:
    """Why a call failed; the exception is rebuilt when somebody asks for it."""

    def __init__(self, first: BaseException | None, parts: list[tuple[int, int, Received]]) -> None:
        self.first = first
        self.parts = parts

    @classmethod
    def of(cls, failures: list[Failure], error: BaseException | None) -> Fault:
        """Why a call failed; takes the frames' descriptors over."""
        deaths = [failure.error for failure in failures if failure.error is not None]
        parts = [(f.rank, f.node, Received.of(f.frame)) for f in failures if f.frame is not None]
        return cls(error or (deaths[0] if deaths else None), parts)

    def error(self) -> BaseException:
        """The exception: a lost process before what it made others raise, else the first that was raised."""
        others = self.parts
        if self.first is not None:
            main = self.first
        else:
            main = _rebuild(*self.parts[0])
            others = self.parts[1:]
        if others and not isinstance(main, CancelledError):
            for rank, node, part in others:
                other = _rebuild(rank, node, part)
                text = str(other).partition("\n")[0]
                with contextlib.suppress(Exception):
                    main.add_note(f"rank {rank} raised too: {type(other).__name__}: {text}")
        return main


def _rebuild(rank: int, node: int, part: Received) -> BaseException:
    from atoll.wire.exceptions import unpack_exception

    try:
        return unpack_exception(part.head, part.buffers, rank=rank, node=node)
    except Exception as problem:  # noqa: BLE001 - an exception that can't even be named is still a failure
        return RemoteError("an exception", str(problem), rank=rank, node=node, remote_traceback="")


def unloadable(problem: Exception, what: str) -> AtollError:
    error = SerializationError(f"{what} arrived but could not be loaded here: {type(problem).__name__}: {problem}")
    error.__cause__ = problem
    return error


def _close_soon(backend: Backend, call: Call, rank: int) -> None:
    # The collector may run this in a thread that holds the very locks that sending needs.
    _thread.start_new_thread(backend.handle, (m.StreamClosed(call, rank),))


# What a stream's rank sent and nobody has taken yet: values, then None or what ended it.
Inbox = queue.SimpleQueue[Received | Fault | None]


class Stream(Iterator[R], Generic[R]):
    """Values of a generator function as they are produced. Closing it, or dropping it, closes the generator.

    The rank runs at most a few values ahead. An exception arrives after the values before it; silence is not an
    end: it waits as long as the generator does.
    """

    def __init__(self, backend: Backend, call: Call, rank: int) -> None:
        self.inbox: Inbox = queue.SimpleQueue()
        self._owed = 0
        self._over = False
        self._backend = backend
        self._call = call
        self._rank = rank
        self._finalizer = weakref.finalize(self, _close_soon, backend, call, rank)
        self._finalizer.atexit = False

    def __iter__(self) -> Stream[R]:
        return self

    def __next__(self) -> R:
        if self._over:
            raise StopIteration
        item = self.inbox.get()
        if isinstance(item, Received):
            self._owed += 1
            if self._owed >= _CREDIT_EVERY:
                self._backend.handle(m.StreamCredit(self._call, self._rank, self._owed))
                self._owed = 0
            value: R = item.load()
            return value
        self._over = True
        self._finalizer.detach()
        if item is not None:
            raise item.error()
        raise StopIteration

    def close(self) -> None:
        """Stop early: the remote generator is closed, and what it produced since is dropped."""
        self._over = True
        if self._finalizer.detach() is not None:
            self._backend.handle(m.StreamClosed(self._call, self._rank))

    def __enter__(self) -> Stream[R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
