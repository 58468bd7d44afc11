"""``pool.map``: items in chunks that adapt to how long they take, results in order or as they complete."""

from __future__ import annotations

import queue
import reprlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, cast

from atoll.core.errors import UsageError
from atoll.core.validation import check_truth, check_whole
from atoll.functions.serialize import importable, name_of, unwrap
from atoll.gang.futures import CallFuture
from atoll.worker.chunk import Chunk, ChunkResult

_CHUNK_S = 0.01  # a chunk should take about this long: dispatch then costs little, and results still come soon
_LARGEST = 256
_AHEAD = 2  # chunks a rank has running or waiting

Submit = Callable[[Callable[..., Any], tuple[Any, ...]], CallFuture[Any]]


def zip_items(name: str, iterables: tuple[object, ...]) -> Iterator[tuple[Any, ...]]:
    """The arguments of each call of the function ``name``.

    Raises:
        UsageError: one of ``iterables`` isn't one.
    """
    for value in iterables:
        if not hasattr(type(value), "__iter__") and not hasattr(type(value), "__getitem__"):
            shown = reprlib.repr(value)
            raise UsageError(
                f"map takes iterables of items, and {shown} is {type(value).__name__}: write "
                f"pool.map({name}, [{shown}]) for one item, or pool.run_one({name}, {shown})"
            )
    return zip(*cast("tuple[Iterable[Any], ...]", iterables), strict=False)


class Mapped(Iterator[Any]):
    """Results of a map. The first chunks are under way when it is made; ``close()`` cancels what is left."""

    def __init__(
        self,
        submit: Submit,
        function: Callable[..., Any],
        items: Iterator[tuple[Any, ...]],
        num_ranks: int,
        ordered: bool,
        chunksize: int | None,
    ) -> None:
        if chunksize is not None:
            check_whole("chunksize", chunksize, 1, sys.maxsize)
        self._ordered = check_truth("ordered", ordered)
        raw = unwrap(function)
        self._name = name_of(raw)
        self._chunk = Chunk(importable(raw) or raw, self._name)
        self._submit = submit
        self._items = items
        self._fixed = chunksize
        self._size = chunksize or 1
        self._window = _AHEAD * num_ranks
        self._running: deque[CallFuture[Any]] = deque()
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()  # used where order does not count
        self._ready: deque[Any] = deque()
        self._failure: BaseException | None = None
        self._refill()

    def __iter__(self) -> Mapped:
        return self

    def __repr__(self) -> str:
        return f"<results of map over {self._name}: iterate over it>"

    def __next__(self) -> Any:
        while not self._ready:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                self.close()
                raise failure
            if not self._running:
                raise StopIteration
            self._take(self._next_done())
        return self._ready.popleft()

    def close(self) -> None:
        """Drop what was not taken and cancel what still runs."""
        self._items = iter(())
        self._ready.clear()
        while self._running:
            self._running.pop().cancel()

    def _next_done(self) -> CallFuture[Any]:
        if self._ordered:
            return self._running.popleft()
        future: CallFuture[Any] = self._ended.get()
        self._running.remove(future)
        return future

    def _take(self, future: CallFuture[Any]) -> None:
        try:
            result: ChunkResult = future.result()
        except BaseException:
            self._running.append(future)
            self.close()
            raise
        self._ready.extend(result.values)
        if result.failure is not None:
            from atoll.wire.exceptions import unpack_exception

            rank, node = future.place
            head, buffers = result.failure
            self._failure = unpack_exception(head, buffers, rank=rank, node=node)
            return
        if self._fixed is None and result.values:
            each = result.took_s / len(result.values)
            wanted = int(_CHUNK_S / each) if each * _LARGEST > _CHUNK_S else _LARGEST
            self._size = max(1, min(wanted, 4 * self._size))
        self._refill()

    def _refill(self) -> None:
        while len(self._running) < self._window:
            items = list(islice(self._items, self._size))
            if not items:
                return
            self._running.append(self._submit(self._chunk, (items,)))
            if not self._ordered:
                self._running[-1].when_done(self._ended.put)
