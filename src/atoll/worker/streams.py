"""Streaming a generator's values: as they are produced, no further ahead than the consumer allows."""

from __future__ import annotations

import types
from typing import Any

from atoll.wire import frames
from atoll.wire.codec import dumps
from atoll.worker.channel import DriverChannel

WINDOW = 16  # values a rank may be ahead of its consumer


def is_stream(result: Any) -> bool:
    """A generator, or an iterator made by one: something whose values come one by one."""
    return isinstance(result, (types.GeneratorType, types.AsyncGeneratorType))


def send_stream(worker: DriverChannel, values: Any) -> None:
    """Send every value; wait while the consumer is behind; close the generator if it stops early."""
    if isinstance(values, types.AsyncGeneratorType):
        values = _drive(values)
    worker.send(frames.STREAM)
    credit = WINDOW
    try:
        while True:
            while credit == 0 or worker.frame_waiting():
                frame = worker.next_frame()
                if frame.call != worker.call:
                    continue
                if frame.kind == frames.CLOSE:
                    return
                if frame.kind == frames.CREDIT:
                    credit += frame.meta["num"]
            try:
                value = next(values)
            except StopIteration:
                # Whoever reads one rank's stream after another's must not wait for the whole call to end.
                worker.send(frames.VALUE, {"end": 1})
                return
            worker.send(frames.VALUE, payload=dumps(value, what="a streamed value"))
            del value
            credit -= 1
    finally:
        values.close()


def _drive(values: Any) -> Any:
    """An async generator's values as a plain generator."""
    import asyncio

    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(values))
            except StopAsyncIteration:
                return
    finally:
        loop.run_until_complete(values.aclose())
        loop.close()
