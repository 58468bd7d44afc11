"""A rank or a node that dies ends the call, says how it died, and is replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pools import (
    SUBREAPER,
    agent_pid,
    assert_usable,
    environ,
    eventually,
    no_swap,
    rank_pid,
    with_marker,
)

import atoll as sky
import leaks
from atoll.core import events


@sky.compute
def die(how: str, rank: int = 1) -> None:
    import ctypes
    import os
    import resource
    import signal
    import sys
    import time

    print("started", flush=True)
    if sky.instance_info().rank != rank:
        time.sleep(60)
    # Of 1, not 0: where a program takes the dumps (Ubuntu's apport) 0 does not keep it from being started.
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (1 if most else 0, most))
    print(f"about to {how}", file=sys.stderr)
    if how == "sys.exit 3":
        sys.exit(3)
    elif how == "sys.exit message":
        sys.exit("no more of this")
    elif how == "sys.exit nothing":
        sys.exit()
    elif how == "_exit 3":
        os._exit(3)
    elif how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "abort":
        os.abort()
    elif how == "close the channel":
        os.close(3)
        time.sleep(60)
    elif how == "close the channel and return":
        os.close(3)
    elif how == "close everything":
        os.closerange(3, 4096)
        time.sleep(60)
    elif how == "write garbage":
        os.write(3, b"\xff" * 1000)
        time.sleep(60)
    elif how == "write a frame of garbage":  # a sound header, then no JSON
        import struct

        os.write(3, struct.pack("<IBBHIQ", 8, 22, 0, 0, rank, 1) + b"\x04\0\0\0{{{{")
        time.sleep(60)
    elif how == "write another rank's frame":
        import struct

        os.write(3, struct.pack("<IBBHIQ", 4, 22, 0, 0, 0, 1) + b"\0\0\0\0")
        time.sleep(60)
    elif how == "write half a frame and descriptors":
        import struct

        os.write(3, struct.pack("<IBBHIQ", 4, 21, 0, 9, rank, 1) + b"\0\0\0\0")
        time.sleep(60)


DEATHS = [
    # how, exit code, signal
    ("sys.exit 3", 3, None),
    ("sys.exit message", 1, None),
    ("sys.exit nothing", 0, None),
    ("_exit 3", 3, None),
    ("SIGKILL", None, signal.SIGKILL),
    ("SIGTERM", None, signal.SIGTERM),
    ("segfault", None, signal.SIGSEGV),
    ("abort", None, signal.SIGABRT),
]
IN_MAKE_TEST = {"sys.exit message", "_exit 3", "SIGKILL", "segfault"}


@pytest.fixture
def pool(mode: str) -> Iterator[sky.ComputePool]:
    """Two nodes of one rank, in each mode."""
    with sky.ComputePool(nodes=2) as started:
        yield started


@pytest.mark.parametrize(
    ("how", "exit_code", "number"),
    [pytest.param(*case, id=case[0], marks=[pytest.mark.long] * (case[0] not in IN_MAKE_TEST)) for case in DEATHS],
)
def test_a_rank_dies(pool: sky.ComputePool, how: str, exit_code: int | None, number: int | None) -> None:
    began = time.monotonic()
    with pytest.raises(sky.WorkerDied) as caught:
        die(how) @ pool
    assert time.monotonic() - began < 5.0  # a second is promised; the machine may be busy, and the other sleeps 60
    died = caught.value
    assert (died.rank, died.node, died.exit_code, died.signal, died.oom) == (1, 1, exit_code, number, False)
    assert f"about to {how}" in "\n".join(died.log_tail)
    if how == "sys.exit message":
        assert "no more of this" in died.log_tail
    assert "rank 1 (node 1) died" in str(died)
    assert_usable(pool)


@pytest.mark.parametrize(
    "how",
    [
        "close the channel",
        pytest.param("close the channel and return", marks=pytest.mark.long),
        pytest.param("close everything", marks=pytest.mark.long),
        "write garbage",
        pytest.param("write a frame of garbage", marks=pytest.mark.long),
        pytest.param("write another rank's frame", marks=pytest.mark.long),
        "write half a frame and descriptors",
    ],
)
def test_a_rank_breaks_its_channel(pool: sky.ComputePool, how: str) -> None:
    with pytest.raises(sky.WorkerDied) as caught:
        die(how) @ pool
    assert (caught.value.rank, caught.value.node, caught.value.oom) == (1, 1, False)
    if "return" not in how:
        assert "channel" in caught.value.reason
    assert_usable(pool)


def test_a_world_of_one_dies(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.WorkerDied) as caught:
        die("_exit 3", rank=0) >> pool
    assert caught.value.exit_code == 3
    assert_usable(pool)


@pytest.mark.long
def test_every_rank_dies_at_once(mode: str) -> None:
    @sky.compute
    def die_all() -> None:
        import os

        os._exit(9)

    with sky.ComputePool(nodes=2, workers_per_node=2) as pool:
        for _ in range(3):
            with pytest.raises(sky.WorkerDied) as caught:
                die_all() @ pool
            assert caught.value.exit_code == 9
        assert_usable(pool)


@pytest.mark.long
def test_a_rank_is_killed_while_idle(mode: str) -> None:
    seen: list[events.Event] = []
    with sky.ComputePool(nodes=2, on_event=seen.append) as pool:
        first = rank_pid(pool, 1)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: [e for e in seen if isinstance(e, events.RankStarted) and e.restarts == 1], "a new one", 60)
        died = next(e for e in seen if isinstance(e, events.RankDied))
        assert (died.rank, died.node) == (1, 1)
        assert "SIGKILL" in died.reason
        assert rank_pid(pool, 1) != first
        assert_usable(pool)


def test_a_call_right_after_a_kill_is_not_lost(pool: sky.ComputePool) -> None:
    """It is sent to a rank that is gone already, or to its successor: it ends either way."""
    for _ in range(3):
        os.kill(rank_pid(pool, 1), signal.SIGKILL)
        with contextlib.suppress(sky.WorkerDied):
            pool.run(lambda: None)
    assert_usable(pool)


def test_retries_start_the_whole_gang_again(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(retries=2)
    def flaky(folder: str) -> int:
        import os
        import pathlib

        rank = sky.instance_info().rank
        with (pathlib.Path(folder) / f"rank{rank}").open("a") as log:
            log.write("x")
        if rank == 1 and (pathlib.Path(folder) / "rank1").stat().st_size < 3:
            os._exit(1)
        return rank

    assert flaky(str(tmp_path)) @ pool == [0, 1]
    assert (tmp_path / "rank1").read_text() == "xxx"
    with pytest.raises(sky.WorkerDied):
        die("_exit 3", rank=0) >> pool
    assert_usable(pool)


# ------------------------------------------------------------------------------------------------------- memory
MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 200 MiB."""
    if os.geteuid() != 0 or not (MEMORY / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and a writable cgroup v1 memory controller to have the kernel kill one rank")
    group = MEMORY / f"atoll-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    (group / "memory.limit_in_bytes").write_text(str(200 << 20))
    no_swap(group, 200 << 20)
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (MEMORY / "cgroup.procs").write_text(pid)
    eventually(lambda: not (group / "cgroup.procs").read_text().strip(), "an empty cgroup")
    group.rmdir()


@sky.compute
def fill_memory() -> int:
    import time

    if sky.instance_info().rank == 0:
        time.sleep(60)
    blocks = []
    for _ in range(100):
        blocks.append(bytearray(b"x") * (16 << 20))
    return len(blocks)


@pytest.mark.serial  # the kernel counts such kills for the whole machine: who is killed meanwhile would be counted in
def test_out_of_memory(pool: sky.ComputePool, small_cgroup: Path) -> None:
    (small_cgroup / "cgroup.procs").write_text(str(rank_pid(pool, 1)))
    with pytest.raises(sky.WorkerDied) as caught:
        fill_memory() @ pool
    assert (caught.value.rank, caught.value.signal, caught.value.oom) == (1, signal.SIGKILL, True)
    assert "memory" in str(caught.value)
    # A kill that has nothing to do with memory, soon after one that had.
    with pytest.raises(sky.WorkerDied) as caught:
        die("SIGKILL") @ pool
    assert (caught.value.signal, caught.value.oom) == (signal.SIGKILL, False)
    assert_usable(pool)


# --------------------------------------------------------------------------------------------------- whole trees
@sky.compute
def leave_children(marker: str, then: str) -> None:
    import os
    import subprocess
    import sys
    import time

    if sky.instance_info().rank == 1:
        sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(300)", marker]
        subprocess.Popen(sleeper)
        subprocess.Popen(sleeper, env={})
        subprocess.Popen(["setsid", *sleeper])
        if os.fork() == 0:
            subprocess.Popen(sleeper, start_new_session=True)
            os._exit(0)
        time.sleep(0.5)
        if then == "die":
            os._exit(4)
        raise ValueError("enough")
    time.sleep(60)


@pytest.mark.long
def test_a_dead_ranks_children_are_killed(pool: sky.ComputePool) -> None:
    marker = f"marker-{pool.id}"
    with pytest.raises(sky.WorkerDied):
        leave_children(marker, "die") @ pool
    eventually(lambda: not with_marker(marker), "no child of the dead rank")
    assert_usable(pool)


# --------------------------------------------------------------------------------------------------------- nodes
def test_an_agent_is_killed_while_idle(pool: sky.ComputePool) -> None:
    lost = agent_pid(pool, 1)
    os.kill(lost, signal.SIGKILL)
    eventually(lambda: not leaks.is_running(lost), "a dead agent")
    for _ in range(3):  # the first may meet the node before its loss was noticed
        with contextlib.suppress(sky.NodeLost):
            assert_usable(pool)
            break
    assert_usable(pool)
    assert agent_pid(pool, 1) != lost


def test_an_agent_is_killed_during_a_call(pool: sky.ComputePool, mode: str) -> None:
    marker = f"marker-{pool.id}"

    @sky.compute
    def wait(marker: str) -> None:
        import subprocess
        import sys
        import time

        subprocess.Popen(["setsid", sys.executable, "-S", "-c", "import time; time.sleep(300)", marker])
        time.sleep(60)

    future = pool.submit(wait, marker, everywhere=True)
    eventually(lambda: len(with_marker(marker)) >= 2, "children of both ranks", 60)
    os.kill(agent_pid(pool, 1), signal.SIGKILL)
    with pytest.raises(sky.NodeLost) as caught:
        future.result(30)
    assert caught.value.node == 1
    assert_usable(pool)
    if mode == SUBREAPER:  # the other node's sleeper lives on: it belongs to a rank that was only stopped
        left = [pid for pid in with_marker(marker) if environ(pid).get("ATOLL_POOL_TAG", "").endswith(".1")]
        assert not left


def test_ranks_that_die_at_start(mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(sky.ProvisionError) as caught,
        sky.ComputePool(nodes=2, env={"PYTHONHOME": "/nowhere/at/all"}),
    ):
        pass
    assert "could not be started" in str(caught.value)
    assert "encodings" in str(caught.value) or "PYTHONHOME" in str(caught.value)


def test_a_rank_that_can_not_come_back_ends_the_pool(mode: str, tmp_path: Path) -> None:
    """The interpreter disappears while the pool is up: the next calls fail with a reason instead of waiting."""
    fake = tmp_path / "lib"
    fake.mkdir()
    with sky.ComputePool(nodes=1, env={"PYTHONPATH": str(fake)}) as pool:
        early = "import os, sys\nprint('no start today', file=sys.stderr)\nos._exit(7)\n"
        (fake / "sitecustomize.py").write_text(early)
        with pytest.raises((sky.WorkerDied, sky.ProvisionError)):
            pool.run(lambda: __import__("os")._exit(1))
        with pytest.raises(sky.ProvisionError, match="no start today"):
            pool.run(lambda: None)


@pytest.mark.long
def test_sigterm_to_the_agent_ends_its_ranks(pool: sky.ComputePool) -> None:
    agent = agent_pid(pool, 0)
    os.kill(agent, signal.SIGTERM)
    future = pool.submit(lambda: None, everywhere=True)
    with contextlib.suppress(sky.NodeLost, sky.WorkerDied):
        future.result(30)
    eventually(lambda: not leaks.is_running(agent), "it ends")
    for _ in range(3):  # the call may have come through before, and the next meet the node before its loss was noticed
        with contextlib.suppress(sky.NodeLost, sky.WorkerDied):
            assert_usable(pool)
            break
    assert_usable(pool)


def test_this_python_is_the_ranks_python(pool: sky.ComputePool) -> None:
    assert pool.run(lambda: __import__("sys").executable) == [sys.executable] * 2
