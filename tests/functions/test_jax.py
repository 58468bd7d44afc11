"""JAX over every rank: joined before the function's first line, and anew for the next call."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import atoll as sky
from atoll.core.context import CallContext, Peer, set_current
from atoll.functions.integrations._devices import own_devices
from atoll.functions.integrations._frameworks import Framework, set_up

pytestmark = pytest.mark.leaks_per_module


@sky.integrations.jax
@sky.compute
def everything(mine: Any) -> dict[str, Any]:
    """The three ways to compute over all devices, on an argument that is a JAX array already."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    def sums(x: Any) -> Any:
        return jax.lax.psum(x, "i")

    by_pmap = jax.pmap(sums, axis_name="i")(jnp.full((1, 2), jax.process_index() + 1.0))
    mesh = jax.make_mesh((jax.device_count(),), ("i",))
    rows = NamedSharding(mesh, PartitionSpec("i"))
    x = jax.make_array_from_process_local_data(rows, jnp.full((3, 2), jax.process_index() + 1.0))
    by_jit = jax.jit(lambda x: x.sum(axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
    by_map = jax.shard_map(sums, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec())(x)
    return {
        "argument": mine,
        "devices": (jax.device_count(), jax.local_device_count(), jax.process_index(), jax.process_count()),
        "pmap": by_pmap[0].tolist(),
        "jit": by_jit.tolist(),
        "shard_map": by_map.tolist(),
        "pid": os.getpid(),
    }


def test_every_way_to_compute_over_two_nodes_and_again_after_another_use() -> None:
    import jax.numpy as jnp

    def undecorated() -> tuple[int, str | None]:
        import jax

        return jax.device_count(), os.environ.get("JAX_PLATFORMS")

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        pids = []
        for _ in range(2):
            first, second = everything(jnp.arange(2.0)) @ pool
            assert [each["devices"] for each in (first, second)] == [(2, 1, 0, 2), (2, 1, 1, 2)]
            for each in (first, second):
                assert each["argument"].tolist() == [0.0, 1.0]
                assert each["pmap"] == [3.0, 3.0]
                assert each["jit"] == [9.0, 9.0]
                assert each["shard_map"] == [[3.0, 3.0]] * 3
            pids.append(first["pid"])
            # A process that the decorator set up takes no other call, and one that used JAX by itself no decorated one.
            assert pool.run(undecorated) == [(1, os.environ.get("JAX_PLATFORMS"))] * 2
        assert pids[0] != pids[1]


@pytest.mark.long
def test_over_one_rank_and_in_a_map() -> None:
    @sky.compute
    @sky.integrations.jax()
    def place(item: int) -> tuple[int, int, int]:
        import jax

        return item, jax.process_count(), jax.device_count()

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        assert place(7) >> pool == (7, 1, 1)
        assert list(pool.map(place, range(4), chunksize=2)) == [(item, 1, 1) for item in range(4)]
        assert place.local(1) == (1, 1, 1)


@pytest.mark.long
def test_a_stream_is_read_to_its_end_before_ranks_part() -> None:
    @sky.integrations.jax
    @sky.compute
    def steps() -> Any:
        import jax
        import jax.numpy as jnp

        for step in range(3):
            yield float(jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(jnp.full((1,), step))[0])

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        assert [list(stream) for stream in steps() @ pool] == [[0.0, 2.0, 4.0]] * 2


@pytest.mark.long
def test_one_that_returns_early_serves_the_others_to_their_end() -> None:
    @sky.integrations.jax
    @sky.compute
    def uneven() -> float:
        import jax

        assert jax.process_count() == 2
        if sky.instance_info().rank == 1:  # rank 0 has the coordinator, and nothing more to do
            time.sleep(3)
        return time.monotonic()

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        first, second = uneven() @ pool
        assert second - first > 2.0


@pytest.mark.long
def test_one_that_returned_is_not_taken_for_one_that_waits_in_a_collective() -> None:
    @sky.integrations.jax
    @sky.compute
    def uneven() -> int:
        return sum(range(3 * 10**8)) if sky.instance_info().rank == 1 else 0  # one line, for seconds

    with sky.ComputePool(nodes=2, hang_timeout=1, logs="quiet") as pool:
        assert (uneven() @ pool)[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_comes_while_the_other_rank_would_wait_for_ever(failing: int, tmp_path: Path) -> None:
    @sky.integrations.jax
    @sky.compute
    def uneven() -> None:
        import jax
        import jax.numpy as jnp

        if sky.instance_info().rank == failing:
            (tmp_path / "raised").write_text(str(time.monotonic()))
            raise LookupError("mine")
        jax.block_until_ready(jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(jnp.ones(1)))

    import jax.numpy as jnp

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        with pytest.raises(LookupError, match="mine"):
            uneven() @ pool
        assert time.monotonic() - float((tmp_path / "raised").read_text()) < 5.0
        assert [each["pmap"] for each in everything(jnp.ones(1)) @ pool] == [[3.0, 3.0]] * 2


def test_the_variables_of_every_broadcast_are_true(pool: sky.ComputePool) -> None:
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_COUNT")

    def variables() -> tuple[list[str], sky.InstanceInfo]:
        return [os.environ[name] for name in names], sky.instance_info()

    for rank, (found, info) in enumerate(pool.run(variables)):
        assert found == [f"{info.head_addr}:{info.head_port + 1}", "2", str(rank), "1"]
    found, info = pool.run_one(variables)
    assert found == [f"{info.head_addr}:{info.head_port + 1}", "1", "0", "1"]
    with sky.ComputePool(nodes=2, accelerator="A100:2", workers_per_node=1, logs="quiet") as simulated:
        assert [found[3] for found, _ in simulated.run(variables)] == ["2", "2"]


@pytest.mark.long
def test_a_function_that_joins_them_itself() -> None:
    def by_hand() -> int:
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            num_processes=int(os.environ["JAX_NUM_PROCESSES"]), process_id=int(os.environ["JAX_PROCESS_ID"])
        )
        count = jax.device_count()
        jax.distributed.shutdown()
        return count

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        assert pool.run(by_hand) == [2, 2]


# -- what a rank is told ----------------------------------------------------------------------------------------------
def context(**changes: Any) -> CallContext:
    given: dict[str, Any] = {
        "node": 0, "total_nodes": 1, "rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1,
        "head_addr": "127.0.0.1", "head_port": 1, "peers": (Peer(0, "127.0.0.1"),), "accelerator": None,
        "accelerators": 0, "job_id": "1", "seed": 1,
    }  # fmt: skip
    return CallContext(**(given | changes))


@pytest.mark.parametrize(("framework", "extra"), [("jax", "jax"), ("keras", "keras"), ("tensorflow", "tensorflow")])
def test_a_framework_that_is_missing(framework: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, framework, None)
    set_current(context())
    try:
        with pytest.raises(sky.ConfigError, match=rf"needs {framework}, .* pip install \"atoll\[{extra}\]\""):
            set_up(Framework(framework))
    finally:
        set_current(None)


def test_keras_backends_are_taken_in_any_case() -> None:
    assert sky.integrations.keras(backend="JAX")(len).framework.backend == "jax"
    with pytest.raises(sky.ConfigError, match=r"backend='Tourch': did you mean 'torch'"):
        sky.integrations.keras(backend="Tourch")


def test_a_slice_is_used_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_MIG", "3g.40gb")
    assert own_devices(context(accelerators=2, local_rank=1), 2) == [0]
    assert own_devices(context(accelerators=2, simulated=True, world_size=2), 2) is None
    with pytest.raises(sky.ConfigError, match=r"jobs of their own.*pool\.map"):
        own_devices(context(accelerators=2, world_size=2), 2)


def test_each_rank_gets_its_part_of_the_nodes_gpus() -> None:
    assert own_devices(context(accelerators=8, local_rank=3), 8) == [3]
    assert own_devices(context(accelerators=8, local_rank=1), 2) == [4, 5, 6, 7]
    assert own_devices(context(accelerators=8, simulated=True), 8) is None
    assert own_devices(context(), 2) is None
    with pytest.raises(sky.ConfigError, match="4 ranks share 2 GPUs of node 0"):
        own_devices(context(accelerators=2), 4)
