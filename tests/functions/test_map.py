"""``pool.map``: order, laziness, exceptions in their place, and ending early."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll as sky

pytestmark = pytest.mark.leaks_per_module


@sky.compute
def square(x: int) -> int:
    return x * x


def test_in_the_order_of_the_items(pool: sky.ComputePool) -> None:
    assert list(pool.map(square, range(1000))) == [i * i for i in range(1000)]
    assert list(pool.map(lambda x: -x, [3, 1, 2])) == [-3, -1, -2]
    assert list(pool.map(square, [])) == []
    assert list(pool.map(square, range(10), chunksize=3)) == [i * i for i in range(10)]


def test_every_call_is_a_world_of_one_and_both_ranks_work(pool: sky.ComputePool, tmp_path: Path) -> None:
    def meet(item: int) -> tuple[int, int, int, str]:
        info = sky.instance_info()
        (tmp_path / str(info.node)).touch()
        while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
            time.sleep(0.01)
        return info.node, info.rank, info.world_size, os.environ["WORLD_SIZE"]

    results = list(pool.map(meet, range(6)))
    assert {node for node, *_ in results} == {0, 1}
    assert {tuple(rest) for _, *rest in results} == {(0, 1, "1")}


def test_several_iterables_end_with_the_shortest(pool: sky.ComputePool) -> None:
    assert list(pool.map(lambda a, b: (a, b), itertools.count(), "xyz")) == [(0, "x"), (1, "y"), (2, "z")]
    with pytest.raises(sky.UsageError, match="at least one iterable"):
        pool.map(square)


def test_as_they_complete(pool: sky.ComputePool, tmp_path: Path) -> None:
    def work(item: int) -> int:
        while item == 0 and not (tmp_path / "go").exists():
            time.sleep(0.01)
        return item

    results = pool.map(work, range(20), ordered=False, chunksize=1)
    first = next(results)
    assert first != 0, "the first item still waits"
    (tmp_path / "go").touch()
    assert sorted([first, *results]) == list(range(20))


def test_an_endless_input_is_read_lazily(pool: sky.ComputePool) -> None:
    read = 0

    def numbers() -> Iterator[int]:
        nonlocal read
        while True:
            yield read
            read += 1

    results = pool.map(square, numbers())
    assert read < 100
    assert list(itertools.islice(results, 200)) == [i * i for i in range(200)]
    assert read < 3000
    results.close()  # type: ignore[attr-defined]
    assert list(results) == []


@pytest.mark.parametrize("chunksize", [None, 1, 7])
def test_an_exception_comes_at_its_place(pool: sky.ComputePool, chunksize: int | None) -> None:
    def work(x: int) -> int:
        if x == 42:
            raise LookupError(f"item {x}")
        return x

    seen: list[int] = []
    with pytest.raises(LookupError, match="item 42") as caught:
        seen.extend(pool.map(work, itertools.count(), chunksize=chunksize))
    assert seen == list(range(42))
    assert isinstance(caught.value.__cause__, sky.RemoteTraceback)
    assert pool.run(lambda: 1) == [1, 1]


def test_an_exception_of_the_input_comes_through(pool: sky.ComputePool) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the input broke")

    with pytest.raises(OSError, match="the input broke"):
        list(pool.map(square, items()))
    assert pool.run(lambda: 1) == [1, 1]


def test_a_rank_that_dies_ends_the_map(pool: sky.ComputePool) -> None:
    def work(x: int) -> int:
        if x == 3:
            os._exit(7)
        return x

    with pytest.raises(sky.WorkerDied, match="exited with code 7"):
        list(pool.map(work, range(10), chunksize=1))
    assert pool.run(lambda: 1) == [1, 1]


def test_close_cancels_what_runs(pool: sky.ComputePool, tmp_path: Path, until: Any) -> None:
    def work(x: int) -> int:
        if x == 0:
            return 0
        (tmp_path / str(x)).touch()
        while True:
            time.sleep(0.02)

    results = pool.map(work, itertools.count(), chunksize=1)
    assert next(results) == 0
    until(lambda: (tmp_path / "1").exists() and (tmp_path / "2").exists())
    results.close()  # type: ignore[attr-defined]
    assert pool.run(lambda: 1) == [1, 1]
    assert not (tmp_path / "7").exists()


def test_maps_of_two_threads(pool: sky.ComputePool) -> None:
    results: dict[int, list[int]] = {}

    def run(offset: int) -> None:
        results[offset] = list(pool.map(square, range(offset, offset + 300)))

    threads = [threading.Thread(target=run, args=(offset,)) for offset in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {offset: [i * i for i in range(offset, offset + 300)] for offset in (0, 1000)}


def test_large_arrays_through_map(pool: sky.ComputePool) -> None:
    import numpy as np

    arrays = (np.full(50_000, i) for i in range(30))
    assert [int(a[0]) for a in pool.map(lambda a: a + 1, arrays)] == list(range(1, 31))


@pytest.mark.parametrize("bad", [0, -1])
def test_a_chunk_size_that_cannot_work_is_refused(pool: sky.ComputePool, bad: int) -> None:
    with pytest.raises(sky.ConfigError, match=f"chunksize={bad}"):
        pool.map(square, [1], chunksize=bad)
