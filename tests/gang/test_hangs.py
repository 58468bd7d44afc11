"""A hang is proved, and its culprit named with the stacks; slow ranks are left alone, and nobody feels the looking."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from tests.gang.test_state import call_of
from tests.pools import assert_usable

import atoll as sky
from atoll.core import events
from atoll.gang.call import Call
from atoll.gang.hangs import Evidence, evidence
from atoll.gang.progress import Sight, own_frames


@sky.compute
def stuck_before_a_collective(how: str) -> None:
    import itertools
    import os
    import signal
    import threading
    import time

    import torch
    import torch.distributed as dist

    def the_culprit() -> None:
        if how == "sleeps":
            time.sleep(600)
        elif how == "holds the GIL":
            sum(itertools.repeat(1))  # C code that never lets go
        else:
            while True:
                pass

    dist.all_reduce(torch.ones(1))  # all of them have met
    if how == "is stopped inside":
        if sky.instance_info().rank == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        else:
            time.sleep(1)
    elif sky.instance_info().rank == 1:
        the_culprit()
    dist.all_reduce(torch.ones(1))


LATE = "rank 0 entered a collective that rank 1 did not"


@pytest.mark.parametrize(
    ("how", "proof", "stack"),
    [
        pytest.param("sleeps", LATE, "the_culprit", marks=pytest.mark.long),
        ("is stopped inside", "rank 1 stopped by a signal", "stopped by a signal (pid "),
        pytest.param("loops", LATE, "the_culprit", marks=pytest.mark.long),
        pytest.param("holds the GIL", LATE, "native code holds the GIL", marks=pytest.mark.long),
    ],
)
def test_the_rank_that_holds_up_a_collective_is_named(how: str, proof: str, stack: str) -> None:
    seen: list[events.Event] = []
    with sky.ComputePool(nodes=2, hang_timeout=3, on_event=seen.append, logs="quiet") as pool:
        with pytest.raises(sky.HangError) as caught:
            stuck_before_a_collective(how) @ pool
        error = caught.value
        assert (error.missing, error.waiting) == ((1,), (0,)), error
        assert error.why.startswith(proof)
        assert proof in str(error)
        assert "rank 1 did not arrive, rank 0 waiting in a collective" in str(error)
        assert "all_reduce" in error.stacks[0]
        assert stack in error.stacks[1]
        assert isinstance(error, TimeoutError)
        (warning,) = [event for event in seen if isinstance(event, events.HangSuspected)]
        assert 1.5 <= warning.silent_s < 3
        assert (warning.ranks, warning.why.startswith(proof)) == ((1,), True)
        assert_usable(pool)


@sky.compute
def idle(rank: int) -> None:
    import time

    if sky.instance_info().rank == rank or rank < 0:
        time.sleep(600)


def test_no_cpu_time_over_the_whole_window_is_a_hang() -> None:
    with sky.ComputePool(nodes=2, hang_timeout=1, logs="quiet") as pool:
        with pytest.raises(sky.HangError) as caught:
            idle(-1) @ pool
        assert caught.value.missing == ()
        assert "the rank that holds the others up is not known" in str(caught.value)
        assert "no CPU time was used by ranks 0 and 1" in str(caught.value)
        assert "in idle" in caught.value.stacks[0]
        with pytest.raises(sky.HangError) as caught:
            idle(1) @ pool
        assert caught.value.missing == (1,)
        assert_usable(pool)


@sky.compute
def silent_work(how: str, seconds: float) -> str:
    import time

    end = time.monotonic() + seconds
    if how == "collectives":  # rank 0 waits in one nearly all the time, for a rank that is nearly always on one line
        import torch
        import torch.distributed as dist

        go_on = torch.ones(1)
        while go_on:
            if sky.instance_info().rank == 1:
                sum(range(10_000_000))
                go_on *= time.monotonic() < end
            dist.broadcast(go_on, 1)
            dist.all_reduce(torch.ones(1))
    elif how == "one line":
        while time.monotonic() < end:
            sum(range(10_000_000))
    elif sky.instance_info().rank == 1 or how == "every rank prints":
        while time.monotonic() < end:
            time.sleep(0.1)
            if how == "report":
                sky.report({"left": end - time.monotonic()})
            else:
                print(".", end="", flush=True)
    return how


@pytest.mark.long
def test_slow_is_no_hang() -> None:
    seen: list[events.Event] = []
    ways = ["prints", "report", "every rank prints", "one line", "collectives"]
    with ExitStack() as pools:  # at the same time: each of them takes as long as a hang would
        calls = []
        for how in ways:
            pool = sky.ComputePool(nodes=2, hang_timeout=2, on_event=seen.append, logs="quiet")
            calls.append(pools.enter_context(pool).submit(silent_work, how, 6.0, everywhere=True))
        assert [call.result(120) for call in calls] == [[how, how] for how in ways]
    # On one line for the whole limit: that may be said, and no more.
    assert all("may be fine" in event.why for event in seen if isinstance(event, events.HangSuspected))


@sky.compute
def sleeps_in_c() -> list[int]:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return [libc.sleep(2), libc.poll(None, 0, 2000), libc.usleep(900_000)]


@pytest.mark.long
def test_nobody_feels_the_looking() -> None:
    with sky.ComputePool(nodes=1, hang_timeout=6) as pool:  # looked at every 0.3 s
        assert pool.run(sleeps_in_c) == [[0, 0, 0]], "no sleep was cut short, and poll got no EINTR"


# ------------------------------------------------------------------------------------------------------- what proves it
STACK = """\
  File "/home/u/train.py", line 7 in step
  File "/x/atoll/worker/call_loop.py", line 200 in _call
  File "<string>", line 1 in <module>"""


def test_own_frames_are_without_the_workers() -> None:
    assert own_frames(STACK) == '  File "/home/u/train.py", line 7 in step'
    assert own_frames("") == ""


WAITS = '  File "/x/torch/distributed/distributed_c10d.py", line 1 in barrier'
WORKS = '  File "/home/u/train.py", line 7 in step'


def sight(stack: str, entered: int = 0, **more: Any) -> Sight:
    """A rank that has not moved since 0 and used CPU time until 9, in a group of three."""
    groups = {"0": (entered, 3)} if entered else {}
    return Sight(**{"quiet_since": 0.0, "idle_since": 9.0, "idle_cpu_s": 0.0, "stack": stack, "groups": groups} | more)


def call_on(*ranks: int) -> Call:
    call = call_of()
    call.begin(1, ranks, 0.0)
    return call


def found(*sights: Sight, call: Call | None = None) -> Evidence | None:
    return evidence(call or call_on(0, 1, 2), dict(enumerate(sights)), 5.0)


def test_what_proves_a_hang() -> None:
    waits, late = sight(WAITS, 4), sight(WORKS, 3)
    assert found(waits, late, waits) == Evidence((1,), "ranks 0 and 2 entered a collective that rank 1 did not")
    assert found(waits, sight(WORKS), waits) == Evidence((1,), "ranks 0 and 2 entered a collective that rank 1 did not")
    assert found(waits, sight(WORKS, 3, quiet_since=6.0), waits) is None, "it moves"
    assert found(waits, waits, waits) is None, "all have entered it: nothing shows that it does not go on"
    assert found(*[sight(WAITS, 4, idle_since=1.0)] * 3) == Evidence((), "no CPU time was used by ranks 0, 1 and 2")
    assert found(sight(WORKS, 4), late, sight(WORKS, 4)) is None, "none waits for it: they were let go on"
    assert found(waits, sight(WAITS, 4, idle_since=1.0, state="T"), waits) == Evidence(
        (1,), "rank 1 stopped by a signal; `kill -CONT 0` continues it"
    )
    assert found(waits, sight(WAITS, 4, idle_since=6.0, state="T"), waits) is None, "only just"
    assert found(sight(WORKS), sight(WORKS), sight(WORKS)) is None, "the same line is no proof"
    call = call_on(0, 1, 2)
    call.wants_group = {0: "", 2: ""}
    assert found(sight(WAITS), sight(WORKS), sight(WAITS), call=call) == Evidence(
        (1,), "ranks 0 and 2 entered a collective that rank 1 did not"
    )
    call = call_on(0, 1, 2)
    call.ended = {2}
    idle = sight(WAITS, 4, idle_since=1.0)
    assert found(idle, idle, call=call) == Evidence(
        (2,), "no CPU time was used by ranks 0 and 1; rank 2 returned, and the others wait for them"
    )


def test_a_looks_worth_of_cpu_time_is_none_and_work_is_some() -> None:
    seen = {"pid": 7, "state": "S", "wchan": "futex", "stack": STACK, "groups": {}}
    rank = Sight(0.0, 0.0, 1.0)
    for second in range(10):
        rank.update({**seen, "cpu_s": 1.0 + 0.01 * (second // 2)}, float(second))
    assert (rank.idle_since, rank.quiet_since) == (0.0, 0.0)
    rank.update({**seen, "cpu_s": 2.0}, 10.0)
    assert rank.idle_since == 10.0
    rank.update({**seen, "state": "T", "cpu_s": 2.0}, 11.0)
    assert "stopped by a signal" in rank.text(11.0)
    rank.update({"pid": 7, "state": "R", "wchan": "0", "cpu_s": 2.0}, 12.0)  # it gave no answer
    assert (rank.idle_since, rank.quiet_since) == (12.0, 0.0)
    assert "native code holds the GIL" in rank.text(12.0)
