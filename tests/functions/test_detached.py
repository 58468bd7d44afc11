"""Detached calls: they outlive the process that made them, and any later process has their outcome."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.pools import OwnError, descriptors, double, eventually, script, start_script

import atoll as sky
import leaks
from atoll.core.errors import RemoteTraceback
from atoll.functions.named.registry import named_pools
from atoll.functions.retention import prune_jobs

NAME = "crew"


@sky.compute
def touch_and_sleep(path: str, seconds: float) -> str:
    Path(path).touch()
    time.sleep(seconds)
    return "slept"


@sky.compute
def touch_and_wait(path: str, gate: str) -> str:
    Path(path).touch()
    while not Path(gate).exists():
        time.sleep(0.01)
    return "waited"


def run(folder: Path, text: str) -> str:
    """What a driver of its own prints."""
    folder.mkdir(exist_ok=True)
    head = "import os, sys, time\nimport atoll as sky\n"
    process = start_script(script(folder, head + textwrap.dedent(text)), folder / "tmp")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def test_values(home: Path) -> None:
    @sky.compute
    def report(x: int) -> int:
        sky.report({"x": x})
        return x

    with sky.ComputePool(name=NAME, nodes=2) as pool:
        one = pool.submit(double, 3, detach=True)
        every = pool.submit(double, 4, detach=True, everywhere=True)
        reported = pool.submit(report, 5, detach=True, everywhere=True)
    assert isinstance(one, str)
    for _ in range(2):  # as often as one likes
        assert sky.result(one, timeout=60) == (6, 0)
    results = sky.result(every, timeout=60)
    assert results == [(8, 0), (8, 1)]
    assert results.by_node() == {0: [(8, 0)], 1: [(8, 1)]}
    assert results.job_id == every
    assert sorted((row["rank"], row["x"]) for row in sky.result(reported, timeout=60).metrics) == [(0, 5), (1, 5)]


def test_a_call_that_runs_for_weeks_is_not_pruned(home: Path, tmp_path: Path) -> None:
    with sky.ComputePool(name=NAME) as pool:
        job = pool.submit(touch_and_wait, str(tmp_path / "began"), str(tmp_path / "gate"), detach=True)
    eventually((tmp_path / "began").exists, "the call runs", 60)

    def prune_as_in_15_days() -> None:
        for path in [home / "jobs" / job, *(home / "jobs" / job).rglob("*")]:
            os.utime(path, (time.time() - 15 * 86400,) * 2)
        prune_jobs(home / "jobs")

    prune_as_in_15_days()
    (tmp_path / "gate").touch()
    assert sky.result(job, timeout=60) == "waited"
    prune_as_in_15_days()
    with pytest.raises(sky.ConfigError, match="no detached call"):
        sky.result(job)


def test_another_process_has_the_result(home: Path, tmp_path: Path) -> None:
    made = run(
        tmp_path / "a",
        """
        class Thing:
            def __init__(self, x): self.x = x
        @sky.compute
        def make(x):
            time.sleep(0.5)
            return Thing(x)
        with sky.ComputePool(name="crew", idle=1) as pool:
            print(pool.submit(make, 5, detach=True))
        """,
    ).strip()
    assert run(tmp_path / "b", f"print(sky.result({made!r}).x)") == "5\n"
    eventually(lambda: named_pools() == [], "the pool ends when idle", 60)
    assert sky.result(made).x == 5  # also after it


def test_streams_become_lists(home: Path) -> None:
    @sky.compute
    def count(num: int) -> Iterator[int]:
        yield from range(num)

    with sky.ComputePool(name=NAME, nodes=2) as pool:
        one = pool.submit(count, 100, detach=True)
        every = pool.submit(count, 3, detach=True, everywhere=True)
        none = pool.submit(count, 0, detach=True)
    assert sky.result(one, timeout=60) == list(range(100))
    assert sky.result(every, timeout=60) == [[0, 1, 2], [0, 1, 2]]
    assert sky.result(none, timeout=60) == []


def test_failures(home: Path) -> None:
    @sky.compute
    def fail() -> None:
        raise OwnError(7, "why")

    @sky.compute
    def die() -> None:
        print("my last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    @sky.compute(timeout=0.2)
    def slow() -> None:
        time.sleep(60)

    with sky.ComputePool(name=NAME, nodes=2) as pool:
        failed, died = pool.submit(fail, detach=True), pool.submit(die, detach=True)
        late = pool.submit(slow, detach=True)
        broadcast = pool.submit(fail, detach=True, everywhere=True)
    for _ in range(2):
        with pytest.raises(OwnError, match="7: why") as caught:
            sky.result(failed, timeout=60)
        assert caught.value.code == 7
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert ", in fail" in caught.value.__cause__.text
    with pytest.raises(OwnError):
        sky.result(broadcast, timeout=60)
    with pytest.raises(sky.WorkerDied) as dead:
        sky.result(died, timeout=60)
    assert dead.value.signal == signal.SIGKILL
    assert "my last words" in dead.value.log_tail
    with pytest.raises(sky.CallTimeout) as out_of_time:
        sky.result(late, timeout=60)
    assert out_of_time.value.timeout_s == 0.2


def test_waiting_has_a_limit(home: Path, tmp_path: Path) -> None:
    with sky.ComputePool(name=NAME) as pool:
        job = pool.submit(touch_and_wait, str(tmp_path / "runs"), str(tmp_path / "gate"), detach=True)
        with pytest.raises(sky.CallTimeout, match=r"touch_and_wait \(.*timeout=0.1 s; the call continues"):
            sky.result(job, timeout=0.1)
        (tmp_path / "gate").touch()
        assert sky.result(job) == "waited"


@pytest.mark.parametrize("job_id", ["abc123", "", "../../etc", "a/b"])
def test_unknown_ids(home: Path, job_id: str) -> None:
    with pytest.raises(sky.ConfigError, match="no detached call"):
        sky.result(job_id)


@pytest.mark.parametrize("job_id", [None, 7])
def test_an_id_of_another_type(home: Path, job_id: Any) -> None:
    with pytest.raises(sky.UsageError, match=r"result\(\): job_id=.*: expected str"):
        sky.result(job_id)


def test_only_on_a_named_pool() -> None:
    with sky.ComputePool() as pool, pytest.raises(sky.ConfigError, match="name"):
        pool.submit(double, 1, detach=True)


def test_a_pool_that_is_ended_first(home: Path, tmp_path: Path) -> None:
    with sky.ComputePool(name=NAME) as pool:
        running = pool.submit(touch_and_sleep, str(tmp_path / "runs"), 60.0, detach=True)
        queued = pool.submit(double, 1, detach=True)
        eventually((tmp_path / "runs").exists, "the call runs", 60)
        pool.down()
    for job in (running, queued):
        with pytest.raises(sky.PoolClosed):
            sky.result(job)


def test_a_keeper_that_is_killed_first(home: Path, tmp_path: Path) -> None:
    with sky.ComputePool(name=NAME) as pool:
        done = pool.submit(double, 1, detach=True)
        assert sky.result(done, timeout=60) == (2, 0)
        job = pool.submit(touch_and_sleep, str(tmp_path / "runs"), 60.0, detach=True)
        eventually((tmp_path / "runs").exists, "the call runs", 60)
        (about,) = named_pools()
        family = [about["pid"], *leaks.descendants(about["pid"])]
        os.kill(about["pid"], signal.SIGKILL)
        with pytest.raises(sky.PoolClosed, match=f"'crew' ended before touch_and_sleep .{job}. did"):
            sky.result(job)
        assert sky.result(done) == (2, 0)
        eventually(lambda: not any(map(leaks.is_running, family)), "nothing survives")


def test_large_arguments_and_results(home: Path) -> None:
    @sky.compute
    def grow(array: Any) -> Any:
        return np.concatenate([array, array])

    def num_memory_files() -> int:
        return sum("memfd" in target for target in descriptors("self"))

    with sky.ComputePool(name=NAME) as pool:
        before = num_memory_files()
        jobs = [pool.submit(grow, np.arange(7_000_000), detach=True) for _ in range(2)]
        eventually(lambda: num_memory_files() == before, "what was sent away is not held here")
    for job in jobs:
        result = sky.result(job, timeout=60)
        assert result.nbytes == 112_000_000
        assert result[7_000_001] == 1
        result[0] = 5  # it is the caller's own


def test_what_cannot_be_loaded_here(home: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "elsewhere.py").write_text("class Thing: pass\ndef make():\n    return Thing()\n")
    job = run(
        tmp_path / "a",
        """
        import elsewhere
        with sky.ComputePool(name="crew") as pool:
            print(pool.submit(elsewhere.make, detach=True))
        """,
    ).strip()
    with pytest.raises(sky.SerializationError, match=f"the result of {job}.*elsewhere"):
        sky.result(job, timeout=60)


def test_a_task_may_wait_for_a_detached_call(home: Path) -> None:
    """Also from inside a PID namespace, where the keeper can't be seen."""

    @sky.compute
    def fetch(job: str) -> Any:
        return sky.result(job, timeout=60)

    @sky.compute
    def slow() -> str:
        time.sleep(0.5)
        return "slept"

    with sky.ComputePool(name=NAME) as pool, sky.ComputePool() as other:
        assert fetch(pool.submit(slow, detach=True)) >> other == "slept"


def test_the_disk_is_full(home: Path) -> None:
    with sky.ComputePool(name=NAME) as pool:
        (home / "jobs").mkdir(exist_ok=True)
        kept = home / "kept"
        (home / "jobs").rename(kept)
        (home / "jobs").touch()  # no folder can be made below it
        with pytest.raises(OSError, match="jobs"):
            pool.submit(double, 1, detach=True)
        (home / "jobs").unlink()
        assert double(1) >> pool == (2, 0)
