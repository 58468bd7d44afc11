"""``instance_info()`` and the variables of a rank: true on every broadcast, a world of one with ``>>``."""

from __future__ import annotations

import os
from typing import Any

import pytest

import atoll as sky

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@sky.compute
def look() -> tuple[Any, dict[str, str]]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    return sky.instance_info(), {name: os.environ[name] for name in names}


def test_outside_a_pool_the_world_is_this_process() -> None:
    info, before = sky.instance_info(), dict(os.environ)
    assert (info.node, info.total_nodes, info.rank, info.local_rank) == (0, 1, 0, 0)
    assert (info.world_size, info.local_world_size, info.is_head) == (1, 1, True)
    assert [(peer.node, peer.addr) for peer in info.peers] == [(0, "127.0.0.1")]
    assert (info.head_addr, info.accelerator, info.accelerators, info.job_id) == ("127.0.0.1", None, 0, "local")
    assert not info.simulated
    assert dict(os.environ) == before


def test_every_field_on_two_nodes_of_two_ranks() -> None:
    with sky.ComputePool(nodes=2, workers_per_node=2, logs="quiet") as pool:
        first, second = look() @ pool, look() @ pool
        for results in (first, second):
            infos = [info for info, _ in results]
            assert [i.rank for i in infos] == [0, 1, 2, 3]
            assert [i.node for i in infos] == [0, 0, 1, 1]
            assert [i.local_rank for i in infos] == [0, 1, 0, 1]
            assert {(i.total_nodes, i.world_size, i.local_world_size) for i in infos} == {(2, 4, 2)}
            assert [i.is_head for i in infos] == [True, False, False, False]
            assert len({(i.job_id, i.head_addr, i.head_port) for i in infos}) == 1
            assert infos[0].head_addr == "127.0.0.1"
            assert infos[0].head_port > 0
            assert [(p.node, p.addr) for p in infos[0].peers] == [(0, "127.0.0.1"), (1, "127.0.0.2")]
            assert len({i.peers for i in infos}) == 1
            assert {(i.accelerator, i.accelerators) for i in infos} == {(None, 0)} or infos[0].accelerator
            for info, env in results:
                assert env == {
                    "RANK": str(info.rank),
                    "LOCAL_RANK": str(info.local_rank),
                    "WORLD_SIZE": "4",
                    "LOCAL_WORLD_SIZE": "2",
                    "NODE_RANK": str(info.node),
                    "MASTER_ADDR": info.head_addr,
                    "MASTER_PORT": str(info.head_port),
                }
        assert first[0][0].job_id != second[0][0].job_id

        singles = (look() & look() & look() & look()) >> pool
        assert [(i.rank, i.world_size, i.local_world_size, i.is_head) for i, _ in singles] == [(0, 1, 1, True)] * 4
        assert {i.node for i, _ in singles} <= {0, 1}
        for info, env in singles:
            assert info.total_nodes == 2
            assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("0", "1", "1")
            assert env["NODE_RANK"] == str(info.node)
            assert env["MASTER_ADDR"] == info.head_addr == f"127.0.0.{info.node + 1}"
        third = look() @ pool
        assert [(i.rank, env["RANK"], env["WORLD_SIZE"]) for i, env in third] == [(r, str(r), "4") for r in range(4)]


def test_simulated_accelerators_are_told() -> None:
    with sky.ComputePool(nodes=2, accelerator="A100:2", logs="quiet") as pool:
        infos = [info for info, _ in look() @ pool]
        assert [i.rank for i in infos] == [0, 1, 2, 3]
        assert {(i.accelerator, i.accelerators) for i in infos} == {("A100", 2)}
        simulated = pool.run(lambda: os.environ.get("ATOLL_SIMULATED"))
        assert simulated == (["1"] * 4 if infos[0].simulated else [None] * 4)


def test_a_user_may_change_the_variables_for_one_call(pool: sky.ComputePool) -> None:
    def change() -> None:
        os.environ["RANK"] = os.environ["WORLD_SIZE"] = "99"
        del os.environ["MASTER_ADDR"]

    pool.run(change)
    assert [(env["RANK"], env["WORLD_SIZE"]) for _, env in look() @ pool] == [("0", "2"), ("1", "2")]
    assert set(NAMES) == set((look() >> pool)[1])


pytestmark = pytest.mark.leaks_per_module
