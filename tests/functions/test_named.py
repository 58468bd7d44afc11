"""Named pools: what works on a pool works on a named one, other processes attach, and nothing outlives its reason."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.pools import (
    OwnError,
    descriptors,
    double,
    eventually,
    own_processes,
    script,
    start_script,
    up_with_ttl,
)

import atoll as sky
import leaks
from atoll.core import events
from atoll.core.errors import RemoteTraceback
from atoll.core.paths import short_path
from atoll.functions.named import client as attached
from atoll.functions.named.registry import folder_of, named_pools
from atoll.gang.log_router import LogLine
from atoll.providers.base import Allocation, Boot, Node, NodePlan, NodeRequest, Plan, Provider

NAME = "crew"


@sky.compute
def pid() -> int:
    with open("/proc/self/stat") as own, open("/proc/sys/kernel/random/boot_id") as boot:
        return hash((own.read().split()[21], boot.read(), os.readlink("/proc/self/ns/pid"), os.getpid()))


@sky.compute
def touch_and_sleep(path: str, seconds: float) -> None:
    Path(path).touch()
    time.sleep(seconds)


@sky.compute
def touch_and_wait(path: str, gate: str) -> None:
    Path(path).touch()
    while not Path(gate).exists():
        time.sleep(0.01)


def start(folder: Path, text: str, **options: Any) -> subprocess.Popen[str]:
    """A client: a process of its own that runs this script."""
    folder.mkdir(exist_ok=True)
    head = "import os, sys, time\nimport atoll as sky\n"
    return start_script(script(folder, head + textwrap.dedent(text)), folder / "tmp", **options)


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed; it has to end well."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def keeper() -> int:
    (about,) = named_pools()
    return int(about["pid"])


def family() -> list[int]:
    """The keeper and all that it runs."""
    return [keeper(), *leaks.descendants(keeper())]


def all_gone(pids: Sequence[int]) -> bool:
    return not any(leaks.is_running(pid) for pid in pids)


def memory_files(pid: int | str) -> set[int]:
    """Inodes of the memory files it holds open."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd" in os.readlink(entry):
                found.add(entry.stat().st_ino)
    return found


def maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


# --------------------------------------------------------------------------------------- the same as on an unnamed pool
@dataclass
class Crew:
    """A pool of two nodes, and what it said."""

    pool: sky.ComputePool
    lines: list[LogLine]
    events: list[events.Event]

    def of_call(self, kind: type[events.Event], job_id: str) -> list[Any]:
        own = [event for event in list(self.events) if isinstance(event, kind)]
        return [event for event in own if getattr(event, "job_id", None) == job_id]


@pytest.fixture(scope="class", params=["unnamed", "named"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    lines: list[LogLine] = []
    told: list[events.Event] = []
    name = "same-cases" if request.param == "named" else None
    with sky.ComputePool(nodes=2, name=name, logs=lines.append, on_event=told.append) as pool:
        yield Crew(pool, lines, told)
        pool.down()


@pytest.mark.leaks_per_module
class TestSameOnBoth:
    """Each case runs on an unnamed pool and on a named one."""

    def test_broadcast_and_single(self, crew: Crew) -> None:
        assert double(3) @ crew.pool == [(6, 0), (6, 1)]
        assert double(4) >> crew.pool == (8, 0)
        assert (double(1) & double(2)) >> crew.pool == [(2, 0), (4, 0)]
        assert crew.pool.world_size == 2
        assert crew.pool.log_dir.is_dir()

    def test_exception(self, crew: Crew) -> None:
        @sky.compute
        def fail() -> None:
            try:
                {}["absent"]
            except KeyError as error:
                raise OwnError(7, "why") from error

        with pytest.raises(OwnError, match="7: why") as caught:
            fail() >> crew.pool
        assert caught.value.code == 7
        cause = caught.value.__cause__
        assert isinstance(cause, RemoteTraceback)
        assert "absent" in cause.text
        assert isinstance(cause.__cause__, KeyError)

    def test_both_ranks_raise(self, crew: Crew) -> None:
        @sky.compute
        def fail() -> None:
            raise OwnError(sky.instance_info().rank, "both")

        def both_are_told() -> bool:
            with pytest.raises(OwnError) as caught:
                fail() @ crew.pool
            said = f"rank {1 - caught.value.code} raised too: OwnError"
            return any(said in note for note in getattr(caught.value, "__notes__", []))

        # On a busy machine one may come after it was told to stop.
        eventually(both_are_told, "the other's error is mentioned")

    def test_death(self, crew: Crew) -> None:
        @sky.compute
        def die() -> None:
            print("my last words", flush=True)
            if sky.instance_info().rank == 1:
                os._exit(3)
            time.sleep(60)

        with pytest.raises(sky.WorkerDied) as caught:
            die() @ crew.pool
        died = caught.value
        assert (died.rank, died.node, died.exit_code, died.signal, died.oom) == (1, 1, 3, None, False)
        assert "my last words" in died.log_tail
        assert double(1) @ crew.pool == [(2, 0), (2, 1)]
        assert any(isinstance(event, events.RankDied) and event.rank == 1 for event in crew.events)

    def test_stream(self, crew: Crew) -> None:
        @sky.compute
        def count(num: int, fail: bool) -> Iterator[int]:
            yield from range(num)
            if fail:
                raise OwnError(num, "midway")

        assert list(count(50, False) >> crew.pool) == list(range(50))
        assert [list(stream) for stream in count(5, False) @ crew.pool] == [list(range(5))] * 2
        seen = []
        with pytest.raises(OwnError, match="midway"):  # noqa: PT012 - the values come first
            for value in count(20, True) >> crew.pool:
                seen.append(value)
        assert seen == list(range(20))

    def test_stream_waits_for_its_reader_and_closes(self, crew: Crew, tmp_path: Path) -> None:
        @sky.compute
        def endless(path: str) -> Iterator[int]:
            number = 0
            try:
                while True:
                    Path(path, "produced").write_text(str(number))
                    yield number
                    number += 1
            finally:
                Path(path, "closed").touch()

        stream = endless(str(tmp_path)) >> crew.pool
        assert [next(stream) for _ in range(3)] == [0, 1, 2]
        time.sleep(0.3)
        assert int((tmp_path / "produced").read_text() or 0) < 200  # it may just be written
        stream.close()
        eventually((tmp_path / "closed").exists, "the generator is closed")
        assert double(1) @ crew.pool == [(2, 0), (2, 1)]

    def test_reports(self, crew: Crew, tmp_path: Path) -> None:
        @sky.compute
        def report(folder: str) -> None:
            is_head = sky.instance_info().is_head
            if is_head:  # both ranks see one folder: the other would empty the file while it is copied
                Path(folder, "model").write_text("weights")
            sky.report({"loss": 0.5}, checkpoint=folder if is_head else None)

        (tmp_path / "ckpt").mkdir()
        results = report(str(tmp_path / "ckpt")) @ crew.pool
        assert sorted(row["rank"] for row in results.metrics) == [0, 1]
        assert all(row["loss"] == 0.5 for row in results.metrics)
        assert results.checkpoint is not None
        assert Path(results.checkpoint, "model").read_text() == "weights"
        told = crew.of_call(events.MetricsReported, results.job_id)
        assert sorted(event.rank for event in told) == [0, 1]

    def test_a_report_that_cannot_be_loaded_here(self, crew: Crew) -> None:
        def only_on_a_rank() -> str:
            if "ATOLL_POOL_ID" not in os.environ:
                raise OwnError(9, "not in the driver")
            return "value"

        class Odd:
            def __reduce__(self) -> Any:
                return only_on_a_rank, ()

        @sky.compute
        def report() -> None:
            sky.report({"odd": Odd()})
            time.sleep(60)

        with pytest.raises(OwnError, match="not in the driver"):
            report() @ crew.pool
        assert double(1) @ crew.pool == [(2, 0), (2, 1)]

    def test_logs(self, crew: Crew) -> None:
        @sky.compute
        def say(word: str) -> None:
            print(word, "from", sky.instance_info().rank)
            os.write(2, b"no end of line")

        crew.lines.clear()
        say("hello") @ crew.pool
        wanted = {(rank, rank, "stdout", f"hello from {rank}") for rank in (0, 1)}
        wanted |= {(rank, rank, "stderr", "no end of line") for rank in (0, 1)}
        shown = lambda: {(line.rank, line.node, line.stream, line.text) for line in list(crew.lines)}  # noqa: E731
        eventually(lambda: shown() == wanted, "every line once")
        assert len(crew.lines) == 4

    def test_events(self, crew: Crew) -> None:
        future = crew.pool.submit(double, 2)
        assert future.result() == (4, 0)
        started = crew.of_call(events.CallStarted, future.job_id)
        finished = eventually(lambda: crew.of_call(events.CallFinished, future.job_id), "the end is told")
        assert [event.ranks for event in started] == [(0,)]
        assert sum(isinstance(event, events.PoolStarted) for event in crew.events) == 1
        assert [event.error for event in finished] == [None]

    def test_retries(self, crew: Crew, tmp_path: Path) -> None:
        @sky.compute(retries=1)
        def die_once(path: str) -> str:
            if sky.instance_info().rank == 1 and not os.path.exists(path):
                Path(path).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return "survived"

        results = die_once(str(tmp_path / "died")) @ crew.pool
        assert results == ["survived", "survived"]
        (retried,) = crew.of_call(events.CallRetried, results.job_id)
        assert retried.attempt == 1

    def test_timeout(self, crew: Crew) -> None:
        @sky.compute(timeout=0.3)
        def slow() -> None:
            time.sleep(60)

        with pytest.raises(sky.CallTimeout) as caught:
            slow() @ crew.pool
        assert caught.value.timeout_s == 0.3
        assert caught.value.ranks == (0, 1)

    def test_cancel(self, crew: Crew, tmp_path: Path) -> None:
        future = crew.pool.submit(touch_and_sleep, str(tmp_path / "runs"), 60.0, everywhere=True)
        eventually((tmp_path / "runs").exists, "the call runs", 60)
        queued = crew.pool.submit(double, 1, everywhere=True)
        assert queued.cancel()
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result(15)
        with pytest.raises(CancelledError):
            queued.result(15)
        assert double(1) @ crew.pool == [(2, 0), (2, 1)]

    def test_map_and_gather(self, crew: Crew) -> None:
        def square(x: int) -> int:
            return x * x

        assert list(crew.pool.map(square, range(100))) == [x * x for x in range(100)]
        assert sorted(crew.pool.map(square, range(20), ordered=False)) == [x * x for x in range(20)]
        assert [value for value, _ in sky.gather(*(double(x) for x in range(5))) >> crew.pool] == [0, 2, 4, 6, 8]

    def test_threads_do_not_cross(self, crew: Crew) -> None:
        wrong: list[object] = []

        def many(tag: int) -> None:
            for number in range(15):
                value = tag * 1000 + number
                results = double(value) @ crew.pool
                if results != [(2 * value, 0), (2 * value, 1)]:
                    wrong.append((value, results))

        threads = [threading.Thread(target=many, args=(tag,)) for tag in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_what_cannot_travel(self, crew: Crew) -> None:
        with pytest.raises(sky.SerializationError, match="argument 'x'"):
            double(threading.Lock()) >> crew.pool
        assert double(1) >> crew.pool == (2, 0)

    def test_large_arrays_reuse_memory(self, crew: Crew) -> None:
        @sky.compute
        def first(array: Any) -> tuple[float, bool]:
            array[0] += 1.0
            return float(array[0]), array.flags.writeable

        array = np.ones(25_000_000)  # 200 MB
        assert first(array) @ crew.pool == [(2.0, True)] * 2
        memory = memory_files("self")
        num_open = len(descriptors("self"))
        assert len(memory) == 1
        for _ in range(20):
            assert first(array) @ crew.pool == [(2.0, True)] * 2
        assert memory_files("self") == memory  # the very same
        eventually(lambda: len(descriptors("self")) <= num_open, "no more descriptors than before")
        if crew.pool.name is not None:
            end = keeper()
            eventually(lambda: not memory_files(end), "the keeper holds none")
            eventually(lambda: not any("memfd" in line for line in maps(end)), "and maps none")

    def test_large_results(self, crew: Crew) -> None:
        @sky.compute
        def fill(num: int) -> Any:
            return np.full(num, sky.instance_info().rank + 1.0)

        first, second = fill(5_000_000) @ crew.pool
        assert (first.sum(), second.sum()) == (5e6, 1e7)
        first[0] = 3.0
        assert first[0] == 3.0

    def test_same_processes_all_along(self, crew: Crew) -> None:
        assert pid() @ crew.pool == pid() @ crew.pool


@pytest.mark.parametrize("name", [pytest.param(None, marks=pytest.mark.long), NAME])
def test_hang_timeout(home: Path, name: str | None) -> None:
    @sky.compute
    def hang() -> None:
        if sky.instance_info().rank == 1:
            time.sleep(60)

    with sky.ComputePool(nodes=2, name=name, hang_timeout=1.0) as pool:
        with pytest.raises(sky.HangError) as caught:
            hang() @ pool
        assert caught.value.missing == (1,)
        assert "time.sleep(60)" in caught.value.stacks[1] or "in hang" in caught.value.stacks[1]
        assert double(1) >> pool == (2, 0)
        pool.down()


# ---------------------------------------------------------------------------------------------------- several processes
WHO = """
    @sky.compute
    def pid():
        with open("/proc/self/stat") as own:
            return os.readlink("/proc/self/ns/pid"), own.read().split()[21], os.getpid()
"""


def test_stays_warm_for_another_process(home: Path, tmp_path: Path) -> None:
    text = (
        WHO
        + """
    with sky.ComputePool(name="crew", nodes=2) as pool:
        print(pid() @ pool)
    """
    )
    first = finish(start(tmp_path / "a", text))
    before = keeper()
    second = finish(start(tmp_path / "b", text.replace(", nodes=2", "")))  # the name alone takes what is up
    assert first == second
    assert keeper() == before
    with sky.ComputePool(name=NAME) as pool:
        assert pool.world_size == 2
    with sky.ComputePool(name=NAME) as pool:  # and again by the same process
        assert double(2) @ pool == [(4, 0), (4, 1)]


def test_two_that_start_at_once_share_one(home: Path, tmp_path: Path) -> None:
    text = (
        WHO
        + """
    with sky.ComputePool(name="crew", nodes=2) as pool:
        print(pool.id, pid() @ pool)
    """
    )
    clients = [start(tmp_path / str(number), text) for number in range(3)]
    said = {finish(client) for client in clients}
    assert len(said) == 1
    assert len(named_pools()) == 1


@pytest.mark.long
def test_clients_at_once_do_not_cross(home: Path, tmp_path: Path) -> None:
    text = """
    tag = int(sys.argv[1]) if len(sys.argv) > 1 else int(os.environ["TAG"])
    @sky.compute
    def echo(x):
        print("said by", x[0], flush=True)
        return x, sky.instance_info().rank
    told = []
    with sky.ComputePool(name="crew", nodes=2, on_event=told.append) as pool:
        mine = set()
        for i in range(30):
            results = echo((tag, i)) @ pool
            assert results == [((tag, i), 0), ((tag, i), 1)], results
            future = pool.submit(echo, (tag, -i))
            assert future.result() == ((tag, -i), 0)
            mine |= {results.job_id, future.job_id}
        jobs = {event.job_id for event in told if hasattr(event, "job_id")}
        assert jobs <= mine, jobs - mine
        assert len(jobs) >= 59
    """
    with sky.ComputePool(name=NAME, nodes=2):
        clients = [start(tmp_path / str(tag), text, env={"TAG": str(tag)}) for tag in (1, 2)]
        for tag, client in zip((1, 2), clients, strict=True):
            lines = finish(client).splitlines()
            assert len(lines) == 90
            assert all(line in (f"[rank 0] said by {tag}", f"[rank 1] said by {tag}") for line in lines)


def test_differing_settings_are_refused(home: Path) -> None:
    with sky.ComputePool(name=NAME, nodes=2, env={"FLAG": 1, "HF_TOKEN": "hf_verysecret"}):
        with pytest.raises(sky.ConfigError, match=r"nodes=2.*nodes=3.*atoll pools down crew"):
            sky.ComputePool(name=NAME, nodes=3).up()
        with pytest.raises(sky.ConfigError, match="ttl=None, and ttl=100") as caught:
            sky.ComputePool(name=NAME, ttl=100, env={"FLAG": 2, "HF_TOKEN": "hf_other"}).up()
        assert "FLAG=1" in str(caught.value)
        assert "FLAG=2" in str(caught.value)
        assert "hf_" not in str(caught.value)
        assert "hf_" not in json.dumps(named_pools())
        with sky.ComputePool(name=NAME, env={"FLAG": "1", "HF_TOKEN": "hf_verysecret"}) as same:
            assert same.world_size == 2


@pytest.mark.long
def test_a_keeper_that_stands_still_is_told_of(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sky.ComputePool(name=NAME) as pool:
        assert double(1) >> pool == (2, 0)
        monkeypatch.setattr(attached, "_ANSWER_S", 1.0)
        backend = pool._backend
        assert isinstance(backend, attached.Attached)
        backend._sock.settimeout(1.0)
        waiting = keeper()
        job = pool.submit(time.sleep, 4)  # silent for longer than that: the keeper is asked, and answers
        assert job.result(60) is None
        job = pool.submit(time.sleep, 60)
        os.kill(waiting, signal.SIGSTOP)
        try:
            with pytest.raises(sky.PoolClosed, match=rf"has not answered for 1 s; its server is .*{waiting}"):
                job.result(60)
        finally:
            os.kill(waiting, signal.SIGCONT)


def test_a_setting_that_was_given_counts_also_where_it_is_the_default(home: Path) -> None:
    provider = sky.Local(simulate=False)
    with sky.ComputePool(provider, name=NAME, nodes=2, workers_per_node=2, env={"FLAG": 1}, pip=[]):
        for given in ({"nodes": 1}, {"env": {}}, {"provider": sky.Local()}, {"workers_per_node": "auto"}, {"idle": 60}):
            (key,) = given
            with pytest.raises(sky.ConfigError, match=rf"is up and differs: it has {key}="):
                sky.ComputePool(name=NAME, **given).up()
        with sky.ComputePool(name=NAME) as same:
            assert same.world_size == 4
        with sky.ComputePool(name=NAME, image=sky.Image(), nodes=2) as same:
            assert same.world_size == 4


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 65, "sp ace", 7])
def test_wrong_names(name: Any) -> None:
    with pytest.raises(sky.ConfigError, match="name="):
        sky.ComputePool(name=name)


def test_idle_needs_a_name() -> None:
    with pytest.raises(sky.ConfigError, match="idle"):
        sky.ComputePool(idle=5)


@pytest.mark.long
def test_imports_see_the_path_and_folder_of_the_attaching_process(home: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        text = f"""
        import {name}
        with sky.ComputePool(name="crew") as pool:
            print(pool.run_one({name}.answer))
        """
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(f"def answer():\n    return 'from {name}'\n")
        assert finish(start(tmp_path / name, text)) == f"from {name}\n"
    assert len(named_pools()) == 1


# ---------------------------------------------------------------------------------------------------------- how it ends
def test_ends_when_idle_and_not_before(home: Path, tmp_path: Path) -> None:
    with sky.ComputePool(name=NAME, idle=0.4) as pool:
        pids = family()
        time.sleep(1.2)
        assert double(1) >> pool == (2, 0)  # an attached process keeps it up, whatever it does
        job = pool.submit(touch_and_wait, str(tmp_path / "runs"), str(tmp_path / "gate"), detach=True)
    eventually((tmp_path / "runs").exists, "the detached call runs", 60)
    time.sleep(0.8)
    assert not all_gone(pids)  # so does a detached call
    (tmp_path / "gate").touch()
    assert sky.result(job, timeout=60) is None
    eventually(lambda: all_gone(pids), "it ends by itself")
    assert named_pools() == []
    assert os.listdir(home / "pools") == []


def test_down_ends_it_for_everybody(home: Path, tmp_path: Path) -> None:
    with sky.ComputePool(name=NAME) as pool:
        running = pool.submit(touch_and_sleep, str(tmp_path / "runs"), 60.0)
        eventually((tmp_path / "runs").exists, "the call runs", 60)
        own, *ranks = family()
        sky.ComputePool(name=NAME).down()  # never attached
        assert all_gone(ranks)
        eventually(lambda: all_gone([own]), "the keeper ends")
        assert os.listdir(home / "pools") == []
        with pytest.raises(sky.PoolClosed):
            running.result(15)
        with pytest.raises(sky.PoolClosed):
            double(1) >> pool
        with pytest.raises(sky.PoolClosed):
            pool.submit(double, np.ones(1_000_000), detach=True)
    sky.ComputePool(name=NAME).down()  # where there is none


def test_the_name_is_free_at_once(home: Path) -> None:
    for nodes in (1, 2, 1):
        with sky.ComputePool(name=NAME, nodes=nodes) as pool:
            assert len(double(1) @ pool) == nodes
            pool.down()


def test_ttl(home: Path) -> None:
    with up_with_ttl(name=NAME) as pool:
        pids = own_processes()  # the keeper and all that it runs
        with pytest.raises(sky.PoolClosed, match="ttl"):
            touch_and_sleep(os.devnull, 60.0) >> pool
        eventually(lambda: all_gone(pids), "it ends")


@sky.compute
def attach_to_own() -> None:
    with sky.ComputePool(name=NAME) as pool:
        double(1) >> pool


def test_a_task_cannot_attach_to_its_own_pool(home: Path) -> None:
    with sky.ComputePool(name=NAME) as pool:
        with pytest.raises(sky.UsageError, match="'crew' itself"):
            attach_to_own() >> pool
        assert double(1) >> pool == (2, 0)


# -------------------------------------------------------------------------------------------- processes that are killed
SLEEP = """
    @sky.compute
    def sleep(path):
        open(path, "w").close()
        time.sleep(60)
    with sky.ComputePool(name="crew") as pool:
        sleep(os.environ["MARK"]) @ pool
"""


def test_a_killed_client_takes_its_call_along(home: Path, tmp_path: Path) -> None:
    with sky.ComputePool(name=NAME, nodes=2) as pool:
        client = start(tmp_path / "a", SLEEP, env={"MARK": str(tmp_path / "runs")})
        eventually((tmp_path / "runs").exists, "the call runs", 60)
        client.kill()
        client.communicate()
        assert pool.submit(double, 1, everywhere=True).result(30) == [(2, 0), (2, 1)]


@pytest.mark.long
def test_a_client_that_stops_reading_blocks_nobody(home: Path, tmp_path: Path) -> None:
    text = """
    @sky.compute
    def flood(path):
        open(path, "w").close()
        for i in range(100_000):
            print("x" * 100)
        return bytes(10_000_000)
    with sky.ComputePool(name="crew") as pool:
        pool.submit(flood, os.environ["MARK"]).result()
    """
    with sky.ComputePool(name=NAME, nodes=2) as pool:
        client = start(tmp_path / "a", text, env={"MARK": str(tmp_path / "runs")}, stdout=subprocess.DEVNULL)
        eventually((tmp_path / "runs").exists, "the call runs", 60)
        client.send_signal(signal.SIGSTOP)
        try:
            for _ in range(3):
                assert pool.submit(double, 1, everywhere=True).result(30) == [(2, 0), (2, 1)]
        finally:
            client.send_signal(signal.SIGCONT)
        finish(client)


@pytest.mark.parametrize("round_", [0, *(pytest.param(again, marks=pytest.mark.long) for again in (1, 2))])
def test_a_killed_keeper(home: Path, tmp_path: Path, round_: int) -> None:
    with sky.ComputePool(name=NAME, nodes=2) as pool:
        assert double(1) @ pool == [(2, 0), (2, 1)]
        future = pool.submit(touch_and_sleep, str(tmp_path / "runs"), 60.0, everywhere=True)
        eventually((tmp_path / "runs").exists, "the call runs", 60)
        pids = family()
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(sky.PoolClosed, match="crew"):
            future.result(5)
        eventually(lambda: all_gone(pids), "no rank and no agent survives")
        with pytest.raises(sky.PoolClosed):
            double(1) >> pool
    assert folder_of(NAME).exists()
    if round_ == 0:
        assert named_pools() == []  # clears what it left
        assert not folder_of(NAME).exists()
    with sky.ComputePool(name=NAME) as pool:
        assert double(1) @ pool == [(2, 0)]


# ------------------------------------------------------------------------------------------ starts that come to nothing
class Failing(Provider):
    """A provider whose second node can't be had."""

    kind = form = "failing"

    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        return sky.Local().plan(request)

    def launch_agents(self, allocation: Allocation, nodes: Sequence[NodePlan], boot: Boot) -> Iterator[Node]:
        if nodes[0].node == 1:
            raise OSError("no machine left")
        return sky.Local().launch_agents(allocation, nodes, boot)


def nothing_left(home: Path) -> None:
    assert named_pools() == []
    assert not (home / "pools").exists() or os.listdir(home / "pools") == []
    eventually(lambda: not own_processes(), "no process is left")


def bad_image() -> sky.ComputePool:
    return sky.ComputePool(name=NAME, pip=["/nowhere/package-1.0-py3-none-any.whl"])


def failing_provider() -> sky.ComputePool:
    return sky.ComputePool(Failing(), nodes=2, name=NAME)


def broken_rank() -> sky.ComputePool:
    return sky.ComputePool(name=NAME, env={"PYTHONHOME": "/nowhere"})


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        pytest.param(bad_image, sky.AtollError, "/nowhere/package", marks=pytest.mark.long),
        (failing_provider, sky.ProvisionError, "node 1 of 2 could not be started on failing: no machine left"),
        pytest.param(broken_rank, sky.ProvisionError, "could not be started", marks=pytest.mark.long),
    ],
)
def test_a_start_that_fails(home: Path, make: Callable[[], sky.ComputePool], kind: type[Exception], match: str) -> None:
    before = sorted(descriptors("self"))
    with pytest.raises(kind, match=match):
        make().up()
    nothing_left(home)
    eventually(lambda: sorted(descriptors("self")) == before, "no descriptor is left")
    with sky.ComputePool(name=NAME) as pool:
        assert double(1) >> pool == (2, 0)


SLOW_START = """
    from atoll.providers.base import Provider
    class Slow(Provider):
        kind = form = "slow"
        def plan(self, request, allocation=None):
            return sky.Local().plan(request)
        def launch_agents(self, allocation, nodes, boot):
            if nodes[0].node == 1:
                open(os.environ["MARK"], "w").close()
                import time
                time.sleep(60)
            return sky.Local().launch_agents(allocation, nodes, boot)
    sky.ComputePool(Slow(), nodes=2, name="crew").up()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.long
def test_a_client_that_leaves_while_the_pool_starts(home: Path, tmp_path: Path, number: signal.Signals) -> None:
    client = start(
        tmp_path / "a",
        SLOW_START.replace("os.environ", "__import__('os').environ"),
        env={"MARK": str(tmp_path / "starts")},
    )
    eventually((tmp_path / "starts").exists, "its second node starts", 60)
    client.send_signal(number)
    client.communicate(timeout=60)
    assert client.returncode != 0
    eventually(lambda: not own_processes(), "no process is left")
    eventually(lambda: os.listdir(home / "pools") == [], "no state is left")
    with sky.ComputePool(name=NAME) as pool:
        assert double(1) >> pool == (2, 0)


# -------------------------------------------------------------------------------------------------- what others can see
def test_nobody_else_gets_in(home: Path) -> None:
    previous = os.umask(0)
    try:
        with sky.ComputePool(name=NAME):
            folder = folder_of(NAME)
            for path in (home, home / "pools", folder, home / "locks"):
                assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
            assert stat.S_IMODE((folder / "pool.json").stat().st_mode) == 0o600
    finally:
        os.umask(previous)


@pytest.mark.long
def test_a_very_long_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("d" * 120) / ("e" * 120)
    monkeypatch.setenv("ATOLL_HOME", str(long))
    with sky.ComputePool(name=NAME) as pool:
        assert double(1) >> pool == (2, 0)
        assert [about["name"] for about in named_pools()] == [NAME]
        pool.down()


def test_the_keeper_holds_nothing_of_who_started_it(home: Path, tmp_path: Path) -> None:
    secret = tmp_path / "open-in-the-starter"
    secret.touch()
    text = f"""
    held = open({str(secret)!r})
    os.set_inheritable(held.fileno(), True)
    with sky.ComputePool(name="crew") as pool:
        pass
    """
    finish(start(tmp_path / "a", text))
    held = descriptors(keeper())
    assert str(secret) not in held

    def pipes() -> int:
        return sum(each.startswith("pipe:") for each in descriptors(keeper()))

    # Those of its start are closed by a thread, a moment later. What its rank prints comes through two.
    eventually(lambda: pipes() == 2, "no pipe of its start is left")
    assert os.readlink(f"/proc/{keeper()}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{keeper()}/fd/1").endswith("server.log")
    assert os.readlink(f"/proc/{keeper()}/cwd") == "/"
    assert os.getsid(keeper()) != os.getsid(0)


def test_strange_bytes_end_their_client_only(home: Path) -> None:
    from atoll.wire import frames

    with sky.ComputePool(name=NAME) as pool:
        for data in (b"GET / HTTP/1.1\r\n\r\n" * 3, frames.pack(frames.SUBMIT, 0, 1, {"no": "sense"})):
            with socket.socket(socket.AF_UNIX) as stranger, short_path(folder_of(NAME), "sock") as path:
                stranger.connect(path)
                stranger.settimeout(30)
                stranger.sendall(data)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        assert double(1) >> pool == (2, 0)
