"""Starting a pool: what fails on the way is named, and what had started is released."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.pools import (
    agent_pid,
    assert_usable,
    command,
    descriptors,
    eventually,
    of_pool,
    own_processes,
    rank_pid,
)

import atoll as sky
import leaks
from atoll.core import events
from atoll.functions import compute_pool
from atoll.gang.members import GangSpec
from atoll.providers.base import Allocation, Boot, Node, NodePlan, NodeRequest, Plan, Provider
from atoll.wire import frames


class Wrapped(Provider):
    """A provider around ``Local`` that fails as told, and counts what it started and released."""

    kind = form = "wrapped"

    def __init__(self) -> None:
        self.local = sky.Local()
        self.started: list[Node] = []

    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        return self.local.plan(request, allocation)

    def launch_agents(self, allocation: Allocation, nodes: Sequence[NodePlan], boot: Boot) -> Iterator[Node]:
        for node in nodes:
            self.started.append(self.launch(allocation, node, boot))
            yield self.started[-1]

    def launch(self, allocation: Allocation, node: NodePlan, boot: Boot) -> Node:
        (handle,) = self.local.launch_agents(allocation, [node], boot)
        return handle

    def assert_released(self) -> None:
        for handle in self.started:
            assert handle.process.returncode is not None  # type: ignore[attr-defined]
            assert handle.channel.fileno() == -1


class FailsAt(Wrapped):
    def __init__(self, node: int) -> None:
        super().__init__()
        self.bad = node

    def launch(self, allocation: Allocation, node: NodePlan, boot: Boot) -> Node:
        if node.node == self.bad:
            raise OSError("out of machines")
        return super().launch(allocation, node, boot)


class Replaced(Wrapped):
    """One node's agent is another program."""

    def __init__(self, node: int, program: str) -> None:
        super().__init__()
        self.bad = node
        self.program = program

    def launch(self, allocation: Allocation, node: NodePlan, boot: Boot) -> Node:
        other = dataclasses.replace(boot, agent=(sys.executable, "-c", self.program))
        return super().launch(allocation, node, other if node.node == self.bad else boot)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """``hasty(2)``: pools started from now on wait two seconds for their ranks."""

    def wait_for(seconds: float) -> None:
        def short(*args: Any, **kwargs: Any) -> GangSpec:
            return GangSpec(*args, **{**kwargs, "start_timeout_s": seconds})

        monkeypatch.setattr(compute_pool, "GangSpec", short)

    return wait_for


def test_a_node_that_can_not_be_started() -> None:
    bad = 2
    provider = FailsAt(bad)
    with pytest.raises(sky.ProvisionError, match=rf"node {bad} of 4 .*wrapped.*out of machines") as caught:
        sky.ComputePool(provider, nodes=4).up()
    assert caught.value.node == bad
    assert len(provider.started) == bad
    provider.assert_released()
    eventually(lambda: not own_processes(), "no process")


def test_a_node_that_never_says_hello(mode: str, hasty: Callable[[float], None]) -> None:
    for limit in (1, 5, 25):  # the others have to come up in that, on a busy machine too
        provider = Replaced(1, "import time; time.sleep(300)")
        hasty(limit)
        with pytest.raises(sky.ProvisionError, match=rf" did not come up within {limit} s") as caught:
            sky.ComputePool(provider, nodes=3).up()
        provider.assert_released()
        eventually(lambda: not own_processes(), "no process")
        if str(caught.value).startswith("rank 1 did"):
            return
    pytest.fail(str(caught.value))


def test_a_node_whose_agent_ends_at_once() -> None:
    provider = Replaced(1, "raise SystemExit(1)")
    with pytest.raises(sky.ProvisionError, match="node 1") as caught:
        sky.ComputePool(provider, nodes=2).up()
    assert caught.value.node == 1
    provider.assert_released()


OTHER_VERSION = """
import os, socket, struct, sys, time
channel = socket.socket(fileno=int(sys.argv[1]))
text = b'{"version": 999, "pid": 1}'
channel.sendall(struct.pack("<IBBHIQ", 4 + len(text), 30, 0, 0, 0, 0) + struct.pack("<I", len(text)) + text)
while channel.recv(4096):
    pass
"""


def test_a_node_of_another_version() -> None:
    provider = Replaced(1, OTHER_VERSION)
    with pytest.raises(sky.ProvisionError, match=rf"node 1 .*version 999.*{frames.VERSION}.*same Atoll") as caught:
        sky.ComputePool(provider, nodes=2).up()
    assert caught.value.node == 1
    provider.assert_released()


@pytest.mark.parametrize("said", ["b'Last login: yesterday, from somewhere\\n' * 9", "bytes(64)", "os.urandom(999)"])
def test_a_node_that_talks_nonsense(said: str) -> None:
    program = (
        f"import os, socket, sys\nchannel = socket.socket(fileno=int(sys.argv[1]))\nchannel.sendall({said})\n"
        "while channel.recv(4096): pass\n"
    )
    provider = Replaced(0, program)
    with pytest.raises(sky.ProvisionError, match="node 0 ended while it started"):
        sky.ComputePool(provider, nodes=2).up()
    provider.assert_released()


def test_ctrl_c_while_it_starts() -> None:
    """KeyboardInterrupt out of ``up`` releases everything."""
    provider = Replaced(
        1, "import socket, sys\nchannel = socket.socket(fileno=int(sys.argv[1]))\nwhile channel.recv(65536): pass"
    )
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        eventually(lambda: len(provider.started) == 2, "two agents", 60)
        time.sleep(0.3)  # one of its ranks comes up
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - from wherever it may come
        thread.start()
        sky.ComputePool(provider, nodes=2).up()
    thread.join()
    provider.assert_released()


def test_a_lost_node_that_can_not_be_started_again() -> None:
    provider = FailsAt(-1)
    with sky.ComputePool(provider, nodes=2) as pool:
        provider.bad = 1
        os.kill(agent_pid(pool, 1), 9)
        with pytest.raises((sky.PoolClosed, sky.NodeLost)):
            pool.run(time.sleep, 30)
        with pytest.raises(sky.PoolClosed, match="out of machines"):
            pool.run(time.sleep, 30)


def test_world_size_is_what_runs() -> None:
    def about() -> tuple[int, ...]:
        info = sky.instance_info()
        return info.rank, info.node, info.local_rank, info.world_size, info.total_nodes

    with sky.ComputePool(nodes=3, workers_per_node=2) as pool:
        infos = pool.run(about)
    assert infos == [(rank, rank // 2, rank % 2, 6, 3) for rank in range(6)]


# --------------------------------------------------------------------------------------------------- environment
def test_variables_reach_the_process_before_its_first_import(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nSEEN = os.environ.get('MY_SETTING')\n")
    env = {"PYTHONPATH": str(tmp_path), "MY_SETTING": "early"}
    with sky.ComputePool(nodes=1, env=env) as pool:
        assert pool.run_one(lambda: __import__("sitecustomize").SEEN) == "early"


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> str | None:
        import os

        return os.environ.get("OMP_NUM_THREADS")

    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS")
    with sky.ComputePool(nodes=2) as pool:
        assert pool.run(threads) == [str(max(1, cores // 2))] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with sky.ComputePool(nodes=1) as pool:
        assert pool.run(threads) == ["7"]
    with sky.ComputePool(nodes=1, env={"OMP_NUM_THREADS": 3}) as pool:
        assert pool.run(threads) == ["3"]


def test_no_secret_shows_in_ps() -> None:
    with sky.ComputePool(nodes=1, env={"HF_TOKEN": "hf_very_secret"}) as pool:
        assert pool.run_one(lambda: __import__("os").environ["HF_TOKEN"]) == "hf_very_secret"
        for pid in leaks.descendants():
            assert "hf_very_secret" not in " ".join(command(pid))
        rank = rank_pid(pool, 0)
        assert os.stat(f"/proc/{rank}/environ").st_mode & 0o077 == 0


def test_ranks_have_a_folder_of_their_own_for_temporary_files(mode: str) -> None:
    def make() -> str:
        import tempfile

        return tempfile.mkstemp()[1]

    with sky.ComputePool(nodes=2) as pool:
        paths = pool.run(make)
        assert all(os.path.exists(path) for path in paths)
        assert len({os.path.dirname(path) for path in paths}) == 2
    assert not any(os.path.exists(path) for path in paths)


def test_the_users_tmpdir_is_the_users(tmp_path: Path) -> None:
    with sky.ComputePool(nodes=1, env={"TMPDIR": str(tmp_path)}) as pool:
        assert pool.run_one(lambda: __import__("tempfile").gettempdir()) == str(tmp_path)


def test_nothing_listens_and_nothing_is_inherited(mode: str) -> None:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.set_inheritable(True)
        with sky.ComputePool(nodes=1) as pool:
            pids = [*leaks.descendants()]
            assert [port for pid in pids for port in leaks.listening_ports(pid)] == []
            links = pool.run_one(lambda: sorted(int(fd) for fd in __import__("os").listdir("/proc/self/fd")))
            inode = os.readlink(f"/proc/self/fd/{own.fileno()}")
            assert inode not in [target for pid in pids for target in descriptors(pid)]
            assert {0, 1, 2, 3, 4, 5} <= set(links)


def test_events_in_order() -> None:
    seen: list[events.Event] = []
    with sky.ComputePool(nodes=2, on_event=seen.append) as pool:
        pool.run(lambda: None)
    names = [type(event).__name__ for event in seen]
    assert sorted(names[:2]) == ["RankStarted", "RankStarted"]
    assert names[2:] == ["PoolStarted", "CallStarted", "CallFinished", "PoolStopped"]


def test_an_event_callback_that_raises_stops_nothing() -> None:
    def broken(event: events.Event) -> None:
        raise ValueError("mine")

    with sky.ComputePool(nodes=1, on_event=broken, logs="quiet") as pool:
        assert_usable(pool)


# ---------------------------------------------------------------------------------------------------- many ranks
@pytest.mark.long
def test_sixty_four_ranks(mode: str) -> None:
    def pss_bytes(pid: int) -> int:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
        raise LookupError(pid)

    with sky.ComputePool(nodes=8, workers_per_node=8) as pool:
        assert pool.run(lambda: sky.instance_info().rank) == list(range(64))
        ranks = [pid for pid in of_pool(pool.id) if "worker.call_loop" in " ".join(command(pid))]
        assert len(ranks) == 64
        mean = sum(map(pss_bytes, ranks)) / 64
        assert mean <= 1.3 * 15e6
        pool_id = pool.id
    eventually(lambda: not of_pool(pool_id), "nothing left")
