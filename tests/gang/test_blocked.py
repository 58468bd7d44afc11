"""Who stands still holds up nobody else: a paused reader of standard output, code in callbacks, a stopped agent."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.pools import agent_pid, assert_usable, eventually, rank_pid, script, start_script

import atoll as sky
from atoll.core import events
from atoll.gang.log_router import LogLine, LogRouter
from atoll.gang.notifier import Notifier

PAUSED = """
import os, signal, sys, threading, time
import atoll as sky

def flood(num_bytes):
    line = b"x" * 99 + b"\\n"
    for _ in range(num_bytes // 100):
        os.write(1, line)
    return "printed"

def say(text):
    print(text, file=sys.stderr, flush=True)

def main():
    with sky.ComputePool(name={name!r}) as pool:
        say(pool.run_one(int))
        say(pool.run_one(flood, 24 << 20))  # more than is kept for a reader that pauses
        try:
            sky.compute(timeout=1)(time.sleep)(60) >> pool
        except sky.CallTimeout as error:
            say("timed out")
        say(str(os.path.getsize(pool.log_dir / "rank0.out")))
        if {name!r}:
            pool.down()
    say("left")

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("name", [None, pytest.param("paused", marks=pytest.mark.long)])
def test_a_paused_reader_of_standard_output_holds_up_no_call(tmp_path: Path, name: str | None) -> None:
    path = script(tmp_path, PAUSED.format(name=name))
    with start_script(path, tmp_path / "tmp", env={"ATOLL_HOME": str(tmp_path / "home")}) as driver:
        assert driver.stdout is not None
        assert driver.stderr is not None
        said = [driver.stderr.readline().strip() for _ in range(4)]
        assert said == ["0", "printed", "timed out", str((24 << 20) // 100 * 100)], said
        shown = driver.stdout.read()  # only now somebody reads
        rest = driver.stderr.read()
        assert driver.wait(60) == 0
    assert rest.strip().endswith("left"), rest
    assert set(shown.splitlines()[:-1]) == {"[rank 0] " + "x" * 99}


def test_what_is_not_taken_is_bounded_and_told() -> None:
    taken: list[LogLine] = []
    gate = threading.Event()

    def take(line: LogLine) -> None:
        gate.wait()
        taken.append(line)

    told: list[str] = []
    router = LogRouter(take, lambda rank: 0, 1)
    router.note = lambda text, rank=None: told.append(text)  # type: ignore[method-assign]
    notifier = Notifier(router, None)
    block = b"y" * (1 << 16) + b"\n"
    for _ in range(150):  # 9.4 MiB
        notifier.log(None, 0, False, block)
    assert notifier.is_full(), "who brings more waits as long as it may move"
    eventually(lambda: not notifier.is_full(), "it is seen to stand still")
    for _ in range(50):
        notifier.log(None, 0, False, block)
    gate.set()
    notifier.close()
    assert (len(taken), len(told)) == (150, 1)
    assert f"{50 * len(block):,} bytes of output and events were not shown" in told[0]


def test_a_lock_of_the_users_around_submit_and_in_callbacks() -> None:
    mine, heard = threading.Lock(), []

    def callback(what: object) -> None:
        with mine:
            heard.append(type(what))

    def speak() -> None:
        print("something")
        sky.report({"loss": 1.0})

    with sky.ComputePool(nodes=2, logs=callback, on_event=callback) as pool:
        for _ in range(20):
            with mine:
                futures = [pool.submit(speak) for _ in range(4)]
                for future in futures:
                    future.add_done_callback(callback)
                time.sleep(0.01)  # ranks print and return meanwhile
                pool.submit(int)
            assert [future.result(60) for future in futures] == [None] * 4
    counted = {kind.__name__: heard.count(kind) for kind in set(heard)}
    assert (counted["LogLine"], counted["CallFuture"], counted["MetricsReported"]) == (80, 80, 80)


def test_a_callback_that_never_returns_holds_up_no_call() -> None:
    gate = threading.Event()

    def stay(event: events.Event) -> None:
        if isinstance(event, events.CallStarted):
            gate.wait()

    with sky.ComputePool(nodes=1, on_event=stay, logs="quiet") as pool:
        started = time.monotonic()
        assert [pool.run_one(int) for _ in range(3)] == [0, 0, 0]
        with pytest.raises(sky.CallTimeout):
            sky.compute(timeout=0.5)(time.sleep)(60) >> pool
        assert time.monotonic() - started < 3 * 6, "a call waits a second for what it printed to be shown"
        gate.set()


def test_a_stopped_node_and_an_argument_larger_than_its_socket() -> None:
    with sky.ComputePool(nodes=1, workers_per_node=4, logs="quiet") as pool:
        assert pool.run(len, b"") == [0] * 4
        stopped = [agent_pid(pool, 0), *(rank_pid(pool, rank) for rank in range(4))]
        os.kill(stopped[0], signal.SIGSTOP)
        try:
            assert pool.run(len, b"x") == [1] * 4, "calls go on without their agent"
            for pid in stopped[1:]:
                os.kill(pid, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(sky.CallTimeout):
                sky.compute(timeout=1)(len)(b"x" * 110_000) @ pool
            assert time.monotonic() - started < 3 * 2
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):  # the agent, which goes on first, has ended this rank
                    os.kill(pid, signal.SIGCONT)
        assert_usable(pool)
