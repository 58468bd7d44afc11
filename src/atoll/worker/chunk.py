"""Several items of a ``map`` in one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple


class ChunkResult(NamedTuple):
    """What became of a chunk: values in order, what the item after them raised (packed), and seconds taken."""

    values: list[Any]
    failure: tuple[bytes, list[bytes]] | None
    took_s: float


class Chunk:
    """Runs a function on each of several items, up to the first that raises."""

    def __init__(self, function: Any, name: str) -> None:
        self.function: Callable[..., Any] = function
        self.__qualname__ = name
        self.__atoll_fresh__: bool = getattr(function, "__atoll_fresh__", False)

    def __call__(self, items: list[tuple[Any, ...]]) -> ChunkResult:
        started = time.perf_counter()
        values: list[Any] = []
        failure = None
        for item in items:
            try:
                values.append(self.function(*item))
            except Exception as error:  # noqa: BLE001 - it goes back beside the values before it
                from atoll.wire.exceptions import packed

                failure = packed(error)
                break
        return ChunkResult(values, failure, time.perf_counter() - started)
