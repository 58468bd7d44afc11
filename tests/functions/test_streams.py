"""Generator functions: values as they are produced, backpressure, and both ends ending early."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

import atoll as sky
from atoll.worker.streams import WINDOW

pytestmark = pytest.mark.leaks_per_module
Until = Callable[[Callable[[], object]], None]


@sky.compute
def endless(folder: Path) -> Iterator[int]:
    """Counts; writes how far it is and that its finally block ran."""
    number = 0
    try:
        while True:
            (folder / "at").write_text(str(number))
            yield number
            number += 1
    finally:
        (folder / "closed").write_text(str(number))


def test_values_arrive_before_the_generator_ends(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def steps() -> Iterator[str]:
        for name in ("a", "b", "c"):
            yield name
            while not (tmp_path / name).exists():
                time.sleep(0.01)

    stream = steps() >> pool
    for name in ("a", "b", "c"):
        assert next(stream) == name, "the generator goes on only when this has arrived"
        (tmp_path / name).touch()
    assert list(stream) == []
    with pytest.raises(StopIteration):
        next(stream)


def test_a_rank_is_never_further_ahead_than_the_window(pool: sky.ComputePool, tmp_path: Path, until: Until) -> None:
    stream = endless(tmp_path) >> pool

    def at() -> int:
        return int((tmp_path / "at").read_text() or 0)

    until((tmp_path / "at").exists)
    until(lambda: at() == WINDOW - 1)
    for taken in range(1, 60):
        assert next(stream) == taken - 1
        assert at() < taken + WINDOW
    time.sleep(0.2)
    assert at() < 59 + WINDOW
    stream.close()
    until((tmp_path / "closed").exists)


def test_an_exception_comes_after_the_values_before_it(pool: sky.ComputePool) -> None:
    @sky.compute
    def fail_at(n: int) -> Iterator[int]:
        yield from range(n)
        raise ArithmeticError("midway")

    for n in (0, 3, 100):
        seen: list[int] = []
        with pytest.raises(ArithmeticError, match="midway") as caught:
            seen.extend(fail_at(n) >> pool)
        assert seen == list(range(n))
        assert isinstance(caught.value.__cause__, sky.RemoteTraceback)


def test_a_rank_that_dies_midway_ends_the_stream(pool: sky.ComputePool) -> None:
    @sky.compute
    def die() -> Iterator[int]:
        import os

        yield 1
        os._exit(3)

    stream = die() >> pool
    assert next(stream) == 1
    with pytest.raises(sky.WorkerDied, match="exited with code 3"):
        next(stream)


def test_closing_closes_the_remote_generator(pool: sky.ComputePool, tmp_path: Path, until: Until) -> None:
    stream = endless(tmp_path) >> pool
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    stream.close()
    until((tmp_path / "closed").exists)
    assert list(stream) == []
    stream.close()


def test_leaving_the_block_closes(pool: sky.ComputePool, tmp_path: Path, until: Until) -> None:
    with endless(tmp_path) >> pool as stream:
        assert next(stream) == 0
    until((tmp_path / "closed").exists)


def test_dropping_the_iterator_closes(pool: sky.ComputePool, tmp_path: Path, until: Until) -> None:
    for value in endless(tmp_path) >> pool:
        if value == 5:
            break
    until((tmp_path / "closed").exists)


def test_dropping_a_broadcast_closes_every_generator(pool: sky.ComputePool, tmp_path: Path, until: Until) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()

    @sky.compute
    def each() -> Iterator[int]:
        yield from endless.local(folders[sky.instance_info().rank])

    streams = each() @ pool
    assert [next(stream) for stream in streams] == [0, 0]
    del streams
    gc.collect()
    until(lambda: all((folder / "closed").exists() for folder in folders))
    assert pool.run(lambda: 1) == [1, 1]


def test_silence_is_not_an_end(pool: sky.ComputePool) -> None:
    @sky.compute
    def quiet() -> Iterator[int]:
        yield 1
        time.sleep(2.5)
        yield 2

    assert list(quiet() >> pool) == [1, 2]


def test_a_function_that_returns_a_generator_streams(pool: sky.ComputePool) -> None:
    @sky.compute
    def squares(n: int) -> Iterator[int]:
        return (i * i for i in range(n))

    assert list(squares(4) >> pool) == [0, 1, 4, 9]


def test_an_async_generator_streams(pool: sky.ComputePool) -> None:
    @sky.compute
    async def ticks(n: int) -> AsyncIterator[int]:
        import asyncio

        for i in range(n):
            await asyncio.sleep(0)
            yield i

    assert list(ticks(20) >> pool) == list(range(20))


def test_two_streams_at_once(pool: sky.ComputePool) -> None:
    @sky.compute
    def tagged(tag: str, n: int) -> Iterator[tuple[str, int]]:
        for i in range(n):
            yield tag, i

    first, second = tagged("a", 60) >> pool, tagged("b", 60) >> pool
    assert list(zip(first, second, strict=True)) == [(("a", i), ("b", i)) for i in range(60)]
    first, second = (tagged("c", 3) & tagged("d", 3)) >> pool
    assert (list(second), list(first)) == ([("d", i) for i in range(3)], [("c", i) for i in range(3)])


def test_a_broadcast_gives_one_stream_per_rank(pool: sky.ComputePool) -> None:
    @sky.compute
    def mine(n: int) -> Iterator[tuple[int, int]]:
        for i in range(n):
            yield sky.instance_info().rank, i

    streams = mine(40) @ pool
    assert [list(stream) for stream in streams] == [[(rank, i) for i in range(40)] for rank in (0, 1)]
    assert list((mine(2) @ pool).by_node()) == [0, 1]


def test_ranks_that_stream_and_ranks_that_return(pool: sky.ComputePool) -> None:
    @sky.compute
    def either() -> Any:
        return (i for i in range(3)) if sky.instance_info().rank else "no stream"

    value, stream = either() @ pool
    assert value == "no stream"
    assert list(stream) == [0, 1, 2]


def test_large_values_stream(pool: sky.ComputePool) -> None:
    import numpy as np

    @sky.compute
    def arrays() -> Iterator[Any]:
        import numpy as np

        for i in range(20):
            yield np.full(100_000, i)

    for i, array in enumerate(arrays() >> pool):
        assert np.all(array == i)
        array += 1  # it is ours to write to


def test_a_value_that_cannot_travel_is_named(pool: sky.ComputePool) -> None:
    @sky.compute
    def locks() -> Iterator[Any]:
        import threading

        yield 1
        yield [threading.Lock()]

    stream = locks() >> pool
    assert next(stream) == 1
    with pytest.raises(sky.SerializationError, match=r"a streamed value → \[0\] \(a _thread.lock\)"):
        next(stream)


def test_reports_of_a_stream_reach_the_pool_after_its_future_is_gone(tmp_path: Path) -> None:
    heard: list[Any] = []

    @sky.compute
    def train() -> Iterator[int]:
        for step in range(3):
            sky.report({"step": step})
            yield step

    with sky.ComputePool(logs="quiet", on_event=heard.append) as pool:
        assert list(train() >> pool) == [0, 1, 2]
    reported = [event.metrics for event in heard if isinstance(event, sky.events.MetricsReported)]
    assert reported == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_the_pool_goes_down_under_a_stream(tmp_path: Path) -> None:
    pool = sky.ComputePool(nodes=2, logs="quiet").up()
    stream = endless(tmp_path) >> pool
    assert next(stream) == 0
    pool.down()
    with pytest.raises(sky.PoolClosed, match="shut down"):
        list(stream)


def test_cancelling_the_future_ends_its_stream(pool: sky.ComputePool, tmp_path: Path, until: Until) -> None:
    future = pool.submit(endless, tmp_path)
    stream = future.result()
    assert next(stream) == 0
    assert future.cancel()
    with pytest.raises(CancelledError):
        list(stream)
    until((tmp_path / "closed").exists)
    assert not future.cancel()


def test_a_stream_beside_a_failing_call_is_ended(pool: sky.ComputePool, tmp_path: Path, until: Until) -> None:
    @sky.compute
    def fail() -> None:
        while not (tmp_path / "at").exists():
            time.sleep(0.01)
        raise LookupError("beside")

    with pytest.raises(LookupError, match="beside"):
        (endless(tmp_path) & fail()) >> pool
    until((tmp_path / "closed").exists)
    assert pool.run(lambda: 1) == [1, 1]


def test_one_rank_returns_while_another_streams_more_than_its_window(pool: sky.ComputePool) -> None:
    @sky.compute
    def uneven() -> Any:
        if sky.instance_info().rank == 0:
            return "done"
        return (number for number in range(50))

    first, second = uneven() @ pool
    assert first == "done"
    assert list(second) == list(range(50))
