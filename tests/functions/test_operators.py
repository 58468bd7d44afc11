"""``@``, ``>>``, ``&``, gather, futures, and what people type by mistake."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import atoll as sky

pytestmark = pytest.mark.leaks_per_module
SOURCE_ROOT = str(Path(sky.__file__).resolve().parents[1])


@sky.compute
def whoami_slowly(tag: int) -> tuple[Any, int, int, int]:
    time.sleep(0.02)
    info = sky.instance_info()
    return tag, info.rank, info.world_size, info.node


@sky.compute
def whoami(tag: Any = None) -> tuple[Any, int, int, int]:
    info = sky.instance_info()
    return tag, info.rank, info.world_size, info.node


def plain(value: Any = None) -> Any:
    return value


# -- what they mean ---------------------------------------------------------------------------------------------------
def test_broadcast_is_ordered_by_rank_and_grouped_by_node() -> None:
    with sky.ComputePool(nodes=2, workers_per_node=2, logs="quiet") as pool:
        results = whoami("x") @ pool
        assert results == [("x", rank, 4, rank // 2) for rank in range(4)]
        assert {node: [value[1] for value in values] for node, values in results.by_node().items()} == {
            0: [0, 1],
            1: [2, 3],
        }
        assert isinstance(results, list)
        assert results.metrics == []
        assert results == pool.run(whoami, "x") == pool.run(whoami.local, "x")


def test_one_rank_is_a_world_of_one(pool: sky.ComputePool) -> None:
    assert (whoami(1) >> pool)[:3] == (1, 0, 1)
    assert pool.run_one(whoami, 2)[:3] == (2, 0, 1)


def test_twelve_calls_side_by_side(pool: sky.ComputePool) -> None:
    a, b, c = whoami_slowly(0), whoami_slowly(1), whoami_slowly(2)
    group = a & b & c
    for tag in range(3, 12):
        group = group & whoami_slowly(tag)
    results = group >> pool
    assert [result[:3] for result in results] == [(tag, 0, 1) for tag in range(12)]
    assert {result[3] for result in results} == {0, 1}, "both nodes took part"
    assert [r[0] for r in ((whoami(1) & whoami(2)) & (whoami(3) & whoami(4))) >> pool] == [1, 2, 3, 4]


def test_calls_of_a_group_run_at_the_same_time(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def meet(me: str, other: str) -> str:
        (tmp_path / me).touch()
        while not (tmp_path / other).exists():
            time.sleep(0.01)
        return me

    assert (meet("a", "b") & meet("b", "a")) >> pool == ["a", "b"]


def test_gather_in_order_and_as_they_complete(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def first() -> str:
        while not (tmp_path / "second").exists():
            time.sleep(0.01)
        return "first"

    @sky.compute
    def second() -> str:
        return "second"

    @sky.compute
    def mark() -> None:
        (tmp_path / "second").touch()

    stream = sky.gather(first(), second(), stream=True) >> pool
    assert next(stream) == "second"
    mark.local()
    assert list(stream) == ["first"]
    assert sky.gather(first(), second()) >> pool == ["first", "second"]
    assert sky.gather() >> pool == []
    assert list(sky.gather(*(whoami(i) for i in range(5)), stream=False) >> pool)[4][0] == 4


def work_of(iterate: Callable[[], object]) -> int:
    """How many functions this thread calls meanwhile, C's included."""
    num = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        iterate()
    finally:
        sys.setprofile(None)
    return num


@pytest.mark.parametrize("how", ["gather", "stream", "map", "map as they end"])
def test_what_many_calls_cost_grows_as_their_number(pool: sky.ComputePool, how: str) -> None:
    @sky.compute
    def nap(_: int) -> None:  # so that results are taken one by one
        time.sleep(0.002)

    def calls(num: int) -> Any:
        if how.startswith("map"):
            return pool.map(nap, range(num), ordered=how == "map", chunksize=1)
        return sky.gather(*map(nap, range(num)), stream=how == "stream") >> pool

    few, many = (work_of(lambda num=num: list(calls(num))) for num in (40, 320))
    assert many < 8 * 1.6 * few


def test_a_group_on_every_rank(pool: sky.ComputePool) -> None:
    both = (whoami("a") & whoami("b")) @ pool
    assert [[(tag, rank, world) for tag, rank, world, _ in results] for results in both] == [
        [("a", 0, 2), ("a", 1, 2)],
        [("b", 0, 2), ("b", 1, 2)],
    ]


def test_a_failing_call_of_a_group_cancels_the_others(pool: sky.ComputePool) -> None:
    @sky.compute
    def fail() -> None:
        raise LookupError("mine")

    @sky.compute
    def forever() -> None:
        while True:
            time.sleep(0.02)

    with pytest.raises(LookupError, match="mine"):
        (fail() & forever()) >> pool
    assert [r[1] for r in whoami() @ pool] == [0, 1]


# -- what they refuse -------------------------------------------------------------------------------------------------
def refused(*words: str) -> Any:
    """The misuse is refused by a message with all these words in it."""

    class Check:
        def __enter__(self) -> None:
            self._raises = pytest.raises(sky.UsageError)
            self._info = self._raises.__enter__()

        def __exit__(self, *error: Any) -> bool:
            caught = bool(self._raises.__exit__(*error))
            for word in words:
                assert word in str(self._info.value)
            return caught

    return Check()


def test_precedence_of_and(pool: sky.ComputePool) -> None:
    with refused("(whoami(...) & ...) >> pool", "sky.gather(whoami(...), ...) >> pool", "`a() & (b() >> pool)`"):
        whoami() & whoami() >> pool
    with refused("(whoami(...) & ...) @ pool"):
        whoami() & whoami() @ pool
    with refused("(whoami(...) & whoami(...) & ...) >> pool"):
        whoami() & whoami() & whoami() >> pool
    for value in (None, 3, [1], {"a"}):
        with refused(type(value).__name__):
            value & whoami()


def test_an_undecorated_call_on_the_left(pool: sky.ComputePool) -> None:
    import numpy as np
    import torch

    for value in (None, 3, [1, 2], (), {}, "text", 1.5, np.ones(3), np.float64(2), torch.ones(2), torch.tensor(3)):
        with refused(type(value).__name__, "@ pool", "@sky.compute"):
            plain(value) @ pool
        with refused(type(value).__name__, ">> pool", "@sky.compute"):
            plain(value) >> pool


def test_a_list_of_pending_calls_on_the_left(pool: sky.ComputePool) -> None:
    calls = [whoami(), whoami()]
    with refused("sky.gather(*calls) >> pool"):
        calls >> pool
    with refused("sky.gather(*calls) @ pool"):
        calls @ pool
    sky.gather(*calls) >> pool


def test_a_function_that_was_not_called(pool: sky.ComputePool) -> None:
    with refused("without calling it", "whoami(...) @ pool"):
        whoami @ pool
    with refused("without calling it", "whoami(...) >> pool"):
        whoami >> pool
    with refused("@sky.compute", "plain(...) @ pool"):
        plain @ pool
    with refused("argument 1 is int", "@sky.compute"):
        sky.gather(whoami(), 3) >> pool


def test_the_pool_on_the_wrong_side(pool: sky.ComputePool) -> None:
    with refused("`pool @ whoami(...)`", "`whoami(...) @ pool`"):
        pool @ whoami()
    with refused("`pool >> whoami(...)`", "`whoami(...) >> pool`"):
        pool >> whoami()
    with refused("`whoami(...) @ str`", "`whoami(...) @ pool`"):
        whoami() @ "pool"
    with refused("`whoami(...) >> int`"):
        whoami() >> 3
    with refused("right side has to be a ComputePool"):
        (whoami() & whoami()) >> "pool"
    with refused("right side has to be a ComputePool"):
        (whoami() & whoami()) @ None


def test_a_pending_call_used_as_a_value() -> None:
    with refused("has not run yet", "neither true nor false"):
        bool(whoami())
    with refused("has not run yet", "no items"):
        list(whoami())  # type: ignore[call-overload]
    with refused("has not run yet"):
        _a, _b = whoami()  # type: ignore[misc]


def test_a_pool_that_is_down() -> None:
    pool = sky.ComputePool(logs="quiet")
    dispatches: list[Callable[[], Any]] = [
        lambda: whoami() @ pool,
        lambda: whoami() >> pool,
        lambda: pool.map(plain, [1]),
        lambda: pool.world_size,
    ]
    for dispatch in dispatches:
        with pytest.raises(sky.PoolClosed, match=r"not up.*pool.up\(\)"):
            dispatch()
    with pool:
        assert whoami(1) @ pool == [(1, 0, 1, 0)]
    with pytest.raises(sky.PoolClosed, match="not up"):
        whoami() @ pool


def test_a_pool_cannot_travel(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.UsageError, match="can't travel to a rank"):
        sky.compute(lambda: pool)() >> pool


@pytest.mark.parametrize("upper", ["jax", "keras", "tensorflow", "transformers"])
@pytest.mark.parametrize("lower", ["jax", "keras", "torch"])
def test_two_decorators_of_frameworks_are_both_named(upper: str, lower: str) -> None:
    one = getattr(sky.integrations, lower)(sky.compute(len))
    with refused("two integrations", lower, upper):
        getattr(sky.integrations, upper)(one)


def test_two_integrations_are_refused() -> None:
    with refused("two integrations", "torch", "transformers"):

        @sky.integrations.torch
        @sky.compute
        @sky.integrations.transformers
        def train() -> None: ...


def test_shifted_and_matrix_values_still_work() -> None:
    assert 8 >> 1 == 4, "the operators of other types are theirs"


# -- calls nobody dispatched ------------------------------------------------------------------------------------------
def test_a_call_that_was_never_dispatched_warns_with_its_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whoami()  # line of the warning
        gc.collect()
    lines = Path(__file__).read_text().splitlines()
    here = [w for w in caught if w.category is sky.NeverDispatched and w.filename == __file__]
    (warning,) = [w for w in here if "whoami()  # line of the warning" in lines[w.lineno - 1]]
    assert "whoami(...) was never dispatched" in str(warning.message)


def test_no_warning_for_what_was_dispatched_or_refused(pool: sky.ComputePool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whoami() @ pool
        whoami() >> pool
        (whoami() & whoami()) >> pool
        sky.gather(whoami(), stream=True) >> pool
        whoami().submit(pool).result()
        with pytest.raises(sky.UsageError):
            whoami() @ 3
        with pytest.raises(sky.SerializationError):
            whoami(threading.Lock()) @ pool
        gc.collect()


def test_warnings_of_a_script_and_none_at_exit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    lines = [
        "import atoll as sky",
        "f = sky.compute(abs)",
        "f(1)",
        "kept = f(2)",
        "cycle = [f(3)]",
        "cycle.append(cycle)",
    ]
    script.write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": SOURCE_ROOT}, capture_output=True, text=True
    )
    assert done.stderr.count("NeverDispatched") == 1
    assert f"{script}:3: NeverDispatched: abs(...) was never dispatched" in done.stderr


def test_a_notebook_says_what_a_pending_call_is() -> None:
    pretty = pytest.importorskip("IPython.lib.pretty")
    call = whoami()
    assert pretty.pretty(call).startswith("whoami(...) has not run: dispatch it, `whoami(...) @ pool`")
    assert repr(whoami) == "<compute function whoami>"


# -- futures ----------------------------------------------------------------------------------------------------------
def spin(started: Path) -> None:
    started.touch()
    while True:
        pass


def sleep_in_c(started: Path) -> None:
    started.touch()
    time.sleep(1000)


def wait_for_lock(started: Path) -> None:
    lock = threading.Lock()
    lock.acquire()
    started.touch()
    lock.acquire()


def hold_the_gil(started: Path) -> None:
    import ctypes

    started.touch()
    ctypes.PyDLL(None).sleep(1000)


def refuse_to_stop(started: Path) -> None:
    started.touch()
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue


@pytest.mark.parametrize("function", [spin, sleep_in_c, wait_for_lock, hold_the_gil, refuse_to_stop])
def test_a_running_call_is_cancelled(
    pool: sky.ComputePool, tmp_path: Path, until: Any, function: Callable[[Path], None]
) -> None:
    started = tmp_path / "started"
    future = pool.submit(function, started)
    until(started.exists)
    assert future.running()
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(timeout=5)
    assert future.cancelled()
    assert future.done()
    assert not future.cancel()
    assert [r[1:3] for r in whoami() @ pool] == [(0, 2), (1, 2)]


def test_a_broadcast_and_a_queued_call_are_cancelled(pool: sky.ComputePool, tmp_path: Path, until: Any) -> None:
    def wait(folder: Path) -> None:
        (folder / str(sky.instance_info().rank)).touch()
        while True:
            time.sleep(0.02)

    running = pool.submit(wait, tmp_path, everywhere=True)
    ran = tmp_path / "ran"
    queued = pool.submit(ran.touch)
    after = pool.submit(plain, 5)
    until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    assert queued.cancel()
    with pytest.raises(CancelledError):
        queued.result(timeout=5)
    assert running.cancel()
    with pytest.raises(CancelledError):
        running.result(timeout=5)
    assert after.result(timeout=60) == 5
    assert not ran.exists()


def test_timeouts_of_function_and_pool() -> None:
    @sky.compute(timeout=0.3)
    def slow() -> None:
        time.sleep(1000)

    @sky.compute
    def slower() -> None:
        time.sleep(1000)

    @sky.compute(timeout=60)
    def rank() -> int:
        return sky.instance_info().rank

    with sky.ComputePool(nodes=2, timeout=0.5, logs="quiet") as pool:
        with pytest.raises(sky.CallTimeout, match=r"timeout=0.3 s: ranks 0 and 1 still running") as caught:
            slow() @ pool
        assert caught.value.ranks == (0, 1)
        with pytest.raises(TimeoutError, match=r"timeout=0.5 s"):
            slower() >> pool
        assert rank() @ pool == [0, 1]


def test_metrics_arrive_while_the_call_runs(pool: sky.ComputePool, tmp_path: Path, until: Any) -> None:
    gate = tmp_path / "gate"

    def train() -> str:
        sky.report({"loss": 2.0})
        while not gate.exists():
            time.sleep(0.01)
        sky.report({"loss": 1.0})
        return "done"

    future = pool.submit(train)
    until(lambda: future.metrics)
    assert not future.done()
    assert [m["loss"] for m in future.metrics] == [2.0]
    gate.touch()
    assert future.result() == "done"
    assert [m["loss"] for m in future.metrics] == [2.0, 1.0]


def test_futures_are_concurrent_futures(pool: sky.ComputePool) -> None:
    futures = [pool.submit(plain, i) for i in range(10)]
    assert {f.result() for f in concurrent.futures.as_completed(futures)} == set(range(10))
    done, pending = concurrent.futures.wait(futures)
    assert (len(done), len(pending)) == (10, 0)
    called: list[int] = []
    event = threading.Event()
    future = pool.submit(plain, 7)
    future.add_done_callback(lambda f: (called.append(f.result()), event.set()))
    assert event.wait(60)
    assert called == [7]
    failed = pool.submit(lambda: 1 / 0)
    assert isinstance(failed.exception(timeout=60), ZeroDivisionError)
    assert not failed.cancelled()
    every = pool.submit(whoami, "e", everywhere=True).result()
    assert [r[1] for r in every] == [0, 1]


# -- threads ----------------------------------------------------------------------------------------------------------
def test_broadcasts_of_two_threads_do_not_cross(pool: sky.ComputePool) -> None:
    wrong: list[Any] = []

    def rounds(name: str) -> None:
        for number in range(50):
            results = whoami((name, number)) @ pool
            if [r[:3] for r in results] != [((name, number), 0, 2), ((name, number), 1, 2)]:
                wrong.append(results)

    threads = [threading.Thread(target=rounds, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_calls_from_eight_threads(pool: sky.ComputePool) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        results = list(executor.map(lambda i: whoami(i) >> pool, range(80)))
    assert [r[:3] for r in results] == [(i, 0, 1) for i in range(80)]
