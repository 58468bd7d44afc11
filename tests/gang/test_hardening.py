"""What testers broke: each case was a hang, a leak or a wrong answer once."""

from __future__ import annotations

import multiprocessing.shared_memory
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from tests.pools import agent_pid, descriptors, rank_pid, script, start_script

import atoll as sky
from atoll.gang.members import sweep_stale


def run_script(text: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **env},
    )


def test_a_forked_child_cannot_use_its_parents_pool() -> None:
    done = run_script("""
        import os, time
        import atoll as sky
        def tagged(tag): return tag
        with sky.ComputePool(nodes=2) as pool:
            pool.run(tagged, 0)
            child = os.fork()
            if child == 0:
                try:
                    pool.submit(tagged, "CHILD", everywhere=True)
                except sky.PoolClosed as error:
                    assert "forked" in str(error)
                    os._exit(7)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            if os.fork() == 0:
                raise SystemExit(0)  # runs the child's exit handlers
            os.wait()
            assert pool.run(tagged, "parent") == ["parent", "parent"]
        print("fine")
    """)
    assert done.stdout.endswith("fine\n"), done.stderr


@pytest.mark.parametrize("how", ["return", "kill", "exit"])
def test_shared_memory_of_a_task_is_gone_with_its_pool(how: str) -> None:
    def keep(how: str) -> str:
        memory = multiprocessing.shared_memory.SharedMemory(create=True, size=1000)
        Path(os.environ["NAME_FILE"]).write_text(memory.name)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(1)
        sys.modules["kept"] = memory  # type: ignore[assignment]  # held, or tests beside this one take it for a leak
        return memory.name

    name_file = Path(os.environ["TMPDIR"]) / f"shm-{how}"
    with sky.ComputePool(logs="quiet", env={"NAME_FILE": str(name_file)}) as pool:
        if how == "return":
            pool.run(keep, how)
        else:
            with pytest.raises(sky.WorkerDied):
                pool.run(keep, how)
    name = name_file.read_text()
    name_file.unlink()
    assert not Path("/dev/shm", name).exists()


def test_exit_handlers_that_take_long_do_not_hold_the_error_up() -> None:
    def leave() -> None:
        import atexit

        atexit.register(time.sleep, 30)
        sys.exit(3)

    with sky.ComputePool(logs="quiet") as pool:
        started = time.monotonic()
        with pytest.raises(sky.WorkerDied) as caught:
            pool.run(leave)
        assert time.monotonic() - started < 10.0
    assert caught.value.exit_code == 3


def test_a_callback_may_wait_for_a_call(tmp_path: Path) -> None:
    heard: list[object] = []
    done = threading.Event()

    def nested(_future: object) -> None:
        heard.extend(pool.run(int))
        done.set()

    def until_it_may(gate: Path) -> None:
        while not gate.exists():
            time.sleep(0.01)

    with sky.ComputePool(logs="quiet") as pool:
        pool.submit(until_it_may, tmp_path / "gate").add_done_callback(nested)
        (tmp_path / "gate").touch()  # a callback of one that is done already would run in this thread
        assert done.wait(60)
        assert heard == [0]
        assert pool.run_one(int) == 0


def test_a_callback_that_exits_stops_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with sky.ComputePool(on_event=lambda event: sys.exit(3)) as pool:
        assert pool.run_one(int) == 0
    assert "on_event raised SystemExit" in capfd.readouterr().err


def test_an_exception_in_the_waiting_thread_cancels_the_call() -> None:
    def too_late(*_: object) -> None:
        raise LookupError("from a signal handler")

    before = signal.signal(signal.SIGALRM, too_late)
    try:
        with sky.ComputePool(logs="quiet") as pool:
            pool.run_one(int)
            with pytest.raises(LookupError):  # noqa: PT012 - the signal may come sooner than the call is made
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                pool.run_one(time.sleep, 60)
            started = time.monotonic()
            assert pool.run_one(int) == 0
            assert time.monotonic() - started < 30.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.long
def test_unread_results_hold_no_descriptors() -> None:
    done = run_script("""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        import numpy as np
        import atoll as sky
        def block(i): return np.full(1 << 17, i)
        with sky.ComputePool(nodes=2) as pool:
            futures = [pool.submit(block, i) for i in range(300)]
            assert [int(future.result()[0]) for future in futures] == list(range(300))
        print("fine")
    """)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.long
def test_calls_that_wait_with_large_arguments_leave_descriptors_for_others() -> None:
    done = run_script("""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        import time
        import numpy as np
        import atoll as sky
        def first(array):
            time.sleep(0.002)
            return int(array[0])
        with sky.ComputePool() as pool:
            futures = [pool.submit(first, np.full(1 << 15, i)) for i in range(300)]
            assert [future.result() for future in futures] == list(range(300))
            assert list(pool.map(first, [np.full(1 << 15, i) for i in range(100)])) == list(range(100))
        print("fine")
    """)
    assert done.stdout == "fine\n", done.stderr


def test_large_results_that_are_kept_hold_no_descriptors() -> None:
    done = run_script("""
        import os, resource
        import numpy as np
        import atoll as sky
        def block(i): return np.full(1 << 19, i)
        with sky.ComputePool() as pool:
            kept = [pool.run_one(block, 0)]
            few = len(os.listdir("/proc/self/fd")) + 16
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
            kept += [pool.run_one(block, i) for i in range(1, 40)]
        for i, array in enumerate(kept):
            assert array.flags.writeable and array[0] == array[-1] == i
            array[:] = -1
        maps = open("/proc/self/maps").read().count("memfd:atoll")
        del kept, array
        assert open("/proc/self/maps").read().count("memfd:atoll") < maps - 30, "their memory is given back"
        print("fine")
    """)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("leave", ["exception", "pool"])
def test_a_stream_that_is_left_behind_runs_its_finally(leave: str, tmp_path: Path) -> None:
    mark = tmp_path / "closed"

    @sky.compute
    def numbers(path: str):  # type: ignore[no-untyped-def]
        try:
            yield from range(1000)
        finally:
            Path(path).write_text("closed")

    def use() -> None:
        with sky.ComputePool(logs="quiet") as pool:
            stream = numbers(str(mark)) >> pool
            assert next(stream) == 0
            if leave == "exception":
                for _ in stream:
                    raise LookupError
        assert mark.exists()  # the stream is still held here
        raise LookupError

    with pytest.raises(LookupError):
        use()
    assert mark.exists()


def test_folders_of_killed_agents_are_swept(tmp_path: Path) -> None:
    old, young, used = (tmp_path / f"atoll-0000000{n}-n0" for n in range(3))
    for folder in (old, young, used):
        folder.mkdir()
        (folder / "left").write_text("x")
    long_ago = time.time() - 3600
    os.utime(old, (long_ago, long_ago))
    os.utime(used, (long_ago, long_ago))
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import fcntl, os; fcntl.flock(os.open({str(used)!r}, os.O_RDONLY), 2); print(1, flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder.stdin, holder.stdout:
        holder.stdout.readline()
        sweep_stale(str(tmp_path))
        assert [folder.exists() for folder in (old, young, used)] == [False, True, True]
    holder.wait()


def test_a_relative_home_is_the_same_for_everybody(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import atoll as sky
        with sky.ComputePool(name="relative", idle=30) as pool:
            job = pool.submit(int, "7", detach=True)
            assert sky.result(job, timeout=60) == 7
            pool.down()
        print("fine")
    """)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "ATOLL_HOME": "here"},
    )
    assert done.stdout == "fine\n", done.stderr
    assert (tmp_path / "here" / "jobs").is_dir()


LIMITED = """
import os, resource
import atoll as sky

def limit():
    import resource
    return resource.getrlimit(resource.RLIMIT_NOFILE)

def main():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, hard))
    with sky.ComputePool(workers_per_node=10, logs="quiet") as pool:
        print(pool.run(limit) == [(48, hard)] * 10)

if __name__ == "__main__":
    main()
"""


def test_a_node_has_more_ranks_than_its_limit_of_descriptors_would_take(tmp_path: Path) -> None:
    with start_script(script(tmp_path, LIMITED), tmp_path / "tmp") as driver:
        out, err = driver.communicate(timeout=120)
    assert out == "True\n", err


def test_a_rank_costs_its_agent_two_descriptors() -> None:
    with sky.ComputePool(workers_per_node=2, logs="quiet") as few:
        two = len(descriptors(agent_pid(few, 0)))
    with sky.ComputePool(workers_per_node=6, logs="quiet") as many:
        six = len(descriptors(agent_pid(many, 0)))
    assert six - two == 4 * 2


def test_the_pid_of_a_rank_is_the_one_that_this_machine_knows() -> None:
    seen: list[sky.events.RankStarted] = []

    def note(event: object) -> None:
        if isinstance(event, sky.events.RankStarted):
            seen.append(event)

    with sky.ComputePool(nodes=2, on_event=note, logs="quiet") as pool:
        pool.run(int)
        assert {event.rank: event.pid for event in seen} == {rank: rank_pid(pool, rank) for rank in (0, 1)}
