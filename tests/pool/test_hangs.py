"""Ranks that make no progress are reported by name with their stacks; slow ones that do are left alone."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from tests.pool.conftest import assert_usable

import atoll as sky
from atoll.core import events
from atoll.pool.hangs import hung, hung_for, summary


@sky.compute
def stuck(how: str) -> None:
    import itertools
    import time

    def the_culprit() -> None:
        if how == "sleep":
            time.sleep(60)
        elif how == "gil":
            sum(itertools.repeat(1))  # C code that never lets go
        elif how == "loop":
            while True:
                pass

    if sky.instance_info().rank == 1:
        the_culprit()
    else:
        sky_barrier(how)


def sky_barrier(how: str) -> None:
    """What rank 0 does meanwhile: it is done, or waits where ranks wait for each other."""
    if how != "sleep":
        return
    import torch.distributed as dist

    dist.barrier()


@pytest.mark.parametrize("how", ["gil", "loop"])
def test_a_rank_hangs(how: str) -> None:
    with sky.ComputePool(nodes=2, hang_timeout=1) as pool:
        with pytest.raises(sky.HangError) as caught:
            stuck(how) @ pool
        error = caught.value
        assert error.missing == (1,)
        assert error.hang_timeout_s == 1
        assert "the_culprit" in error.stacks[1]
        assert "rank 1 did not arrive" in str(error)
        assert isinstance(error, TimeoutError)
        assert_usable(pool)


def test_a_rank_never_comes_to_the_barrier() -> None:
    @sky.compute
    def warm() -> None:
        import torch  # noqa: F401

    seen: list[events.Event] = []
    with sky.ComputePool(nodes=2, hang_timeout=3, on_event=seen.append) as pool:
        for _ in range(5):  # a slow import is no hang, but on a busy machine it may look like one
            try:
                warm() @ pool
                break
            except sky.HangError:
                continue
        seen.clear()
        with pytest.raises(sky.HangError) as caught:
            stuck("sleep") @ pool
        error = caught.value
        assert error.missing == (1,)
        assert error.waiting == (0,)
        assert set(error.stacks) == {0, 1}
        assert "barrier" in error.stacks[0]
        assert "the_culprit" in error.stacks[1]
        warnings = [event for event in seen if isinstance(event, events.HangSuspected)]
        assert len(warnings) == 1
        assert 1 in warnings[0].ranks
        assert 1.5 <= warnings[0].silent_s < 3
        assert "the_culprit" in warnings[0].stacks[1]
        assert_usable(pool)


@sky.compute
def slow(how: str, seconds: float) -> str:
    import sys
    import time

    end = time.monotonic() + seconds

    def dive(depth: int) -> None:
        if depth:
            dive(depth - 1)
        else:
            time.sleep(0.03)

    if sky.instance_info().rank == 1 or how == "every rank prints":
        while time.monotonic() < end:
            if how == "stack":
                for depth in range(10):  # so many that it is hardly ever met twice at the same one
                    dive(depth)
                continue
            time.sleep(0.1)
            if how == "report":
                sky.report({"left": end - time.monotonic()})
            else:
                print(".", end="", flush=True, file=sys.stderr)
    return how


def test_slow_is_no_hang() -> None:
    seen: list[events.Event] = []
    ways = ["prints", "report", "stack", "every rank prints"]
    with ExitStack() as pools:  # at the same time: each of them takes as long as a hang would
        calls = []
        for how in ways:
            pool = sky.ComputePool(nodes=2, hang_timeout=2, on_event=seen.append, logs="quiet")
            calls.append(pools.enter_context(pool).submit(slow, how, 3.0, everywhere=True))
        assert [call.result(60) for call in calls] == [[how, how] for how in ways]
    assert not any(isinstance(event, events.HangSuspected) for event in seen)


def test_idle_is_no_hang() -> None:
    import time

    with sky.ComputePool(nodes=1, hang_timeout=1) as pool:
        assert_usable(pool)
        time.sleep(1.5)
        assert_usable(pool)


def test_a_stream_that_nobody_reads_is_no_failure_of_its_rank() -> None:
    def values() -> object:
        yield from range(3)

    with sky.ComputePool(nodes=1, hang_timeout=5) as pool:
        assert list(pool.run_one(values)) == [0, 1, 2]


# ------------------------------------------------------------------------------------------------- reading stacks
DUMP = """Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select

Current thread 0x00007f0000000001 (most recent call first):
  File "/home/u/train.py", line 7 in step
  File "/x/atoll/pool/worker/main.py", line 200 in _call
  File "<string>", line 1 in <module>
"""


def test_summary_is_the_main_threads_own_frames() -> None:
    assert summary(DUMP, 0x00007F0000000001) == '  File "/home/u/train.py", line 7 in step'
    assert summary("", 1) == ""


WAITS = '  File "/x/torch/distributed/distributed_c10d.py", line 1 in barrier'
WORKS = '  File "/home/u/train.py", line 7 in step'


def test_who_hangs() -> None:
    assert hung({0: WAITS, 1: WORKS, 2: WAITS}, []) == ([1], [0, 2])
    assert hung({0: WAITS, 2: WAITS}, [1]) == ([1], [0, 2])
    assert hung({0: WAITS, 1: WAITS}, []) == ([0, 1], [0, 1])


def test_how_long_it_hangs() -> None:
    # Rank 0 waits for a rank that works: that is rank 0's job.
    assert hung_for({0: 100.0, 1: 0.5}, {0: WAITS, 1: WORKS}) == 0.5
    # One of those that work has stopped.
    assert hung_for({0: 9.0, 1: 0.5, 2: 4.0}, {0: WAITS, 1: WORKS, 2: WORKS}) == 4.0
    # All wait: since the last of them came.
    assert hung_for({0: 100.0, 1: 2.0}, {0: WAITS, 1: WAITS}) == 2.0
    assert hung_for({}, {}) == 0.0
