"""Pools under test, in both ways a local node keeps its processes together, and the host's view of their processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll as sky
import leaks
from atoll.functions.named.registry import end_pool, named_pools

SOURCE_ROOT = str(Path(sky.__file__).resolve().parents[1])
NAMESPACE, SUBREAPER = "namespace", "subreaper"


def namespaces_work() -> bool:
    """Does this kernel give us PID namespaces?"""
    from atoll.providers.local_node import _probed

    return bool(_probed())


@pytest.fixture(params=[NAMESPACE, SUBREAPER])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How nodes keep their processes together: a PID namespace, or a subreaper that walks ``/proc``."""
    if request.param == NAMESPACE and not namespaces_work():
        pytest.skip("this kernel refuses PID namespaces (Docker, AppArmor): the subreaper's tests cover this machine")
    monkeypatch.setenv("ATOLL_PID_NAMESPACE", "1" if request.param == NAMESPACE else "0")
    return str(request.param)


@pytest.fixture
def pool() -> Iterator[sky.ComputePool]:
    """Two nodes of one rank."""
    with sky.ComputePool(nodes=2) as started:
        yield started


def up_with_ttl(**options: Any) -> sky.ComputePool:
    """A pool that ends by itself after a second; where the machine is too busy to start one in that, after more."""
    for ttl in (1.0, 5.0, 25.0):
        with contextlib.suppress(sky.PoolClosed, sky.ProvisionError):
            return sky.ComputePool(ttl=ttl, **options).up()
    pytest.fail("no pool comes up within 25 s")


@sky.compute
def ranks_answer() -> int:
    return sky.instance_info().rank


def assert_usable(pool: sky.ComputePool) -> None:
    """A broadcast and a single call work."""
    assert ranks_answer() @ pool == list(range(pool.world_size))
    assert ranks_answer() >> pool == 0


# --------------------------------------------------------------------------------------------------- named pools
class OwnError(Exception):
    """No class that a driver could import."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


@sky.compute
def double(x: Any) -> tuple[Any, int]:
    """Twice the argument, and the rank that doubled it."""
    return 2 * x, sky.instance_info().rank


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder for one test; pools that it leaves up are ended."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    for pool in named_pools():
        end_pool(pool["name"])
    pools = tmp_path / "home" / "pools"
    eventually(lambda: not pools.exists() or os.listdir(pools) == [], "no state of a pool")


# ------------------------------------------------------------------------------------- processes as the host sees them
def environ(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty where it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(item.decode(errors="replace").partition("=")[::2] for item in raw.split(b"\0") if b"=" in item)


def command(pid: int) -> list[str]:
    """Its argv; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def parent(pid: int) -> int:
    """Its parent's pid."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def rank_pid(pool: sky.ComputePool, rank: int) -> int:
    """Host pid of a rank's process; one that is being replaced is waited for."""

    def find() -> int | None:
        for pid in leaks.descendants():
            mine = environ(pid).get("ATOLL_RANK_TAG") == f"{pool.id}.{rank}"
            if mine and "atoll.worker.call_loop" in " ".join(command(pid)):
                return pid
        return None

    return int(eventually(find, f"a process of rank {rank} in pool {pool.id}", 60))


def agent_pid(pool: sky.ComputePool, rank: int) -> int:
    """Host pid of the agent that a rank belongs to."""
    return parent(rank_pid(pool, rank))


def of_pool(pool_id: str) -> list[int]:
    """Running processes that carry a pool's id in their environment."""
    return [pid for pid in all_pids() if environ(pid).get("ATOLL_POOL_ID") == pool_id and leaks.is_running(pid)]


def with_marker(marker: str) -> list[int]:
    """Running processes with this word in their command line."""
    return [pid for pid in all_pids() if any(marker in word for word in command(pid)) and leaks.is_running(pid)]


def own_processes() -> list[int]:
    """Running descendants of this test process, less what the session keeps and the trackers that Python does."""
    own = set(leaks.descendants()) - leaks.kept_processes()
    return [pid for pid in own if "resource_tracker" not in " ".join(command(pid))]


def descriptors(pid: int | str) -> list[str]:
    """What a process holds open; a descriptor that it closes meanwhile is none, and one that is gone has none."""
    found = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(os.readlink(entry))
    return found


def eventually(condition: Callable[[], Any], what: str, seconds: float = 15.0) -> Any:
    """Wait until it holds; three times the promise that nothing is left after five seconds, for a busy machine.

    For what has to start first, give it longer: that costs nothing where all is well.
    """
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)
    return result


def read_terminal(ours: int) -> str:
    """All that was written to a terminal whose other ends are closed; a terminal hands it on bit by bit."""
    text = b""
    with contextlib.suppress(OSError):  # EIO: that was all
        while data := os.read(ours, 1 << 16):
            text += data
    os.close(ours)
    return text.decode(errors="replace")


def no_swap(group: Path, limit: int) -> None:
    """Have a memory cgroup kill at its limit, also on a machine that would swap instead."""
    for name, text in (("memory.memsw.limit_in_bytes", str(limit)), ("memory.swap.max", "0")):
        if (group / name).exists():  # the kernel may not count swap
            (group / name).write_text(text)


# --------------------------------------------------------------------------------------------------- drivers as scripts
def script(folder: Path, text: str) -> Path:
    """A driver's script."""
    path = folder / "driver.py"
    path.write_text(text)
    return path


def start_script(path: Path, tmp: Path, *, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Run a driver of its own, in its own session, with its own TMPDIR."""
    tmp.mkdir(exist_ok=True)
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": SOURCE_ROOT, "TMPDIR": str(tmp), **(env or {})},
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        **options,
    )
