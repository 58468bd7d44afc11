"""Torch, JAX and Keras over GPUs of one machine, joined by NCCL: one set of results on whichever layout.

``pytest -m gpu tests/gpu/test_frameworks.py`` on a machine with at least two GPUs and CUDA builds of torch and JAX.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.functions.test_jax import everything
from tests.functions.test_keras import digits, one_step, train

import atoll as sky
from atoll.providers.gpus import local_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.serial, pytest.mark.timeout(300)]

# What switches parts of NCCL and of torch's symmetric memory off on a machine has to hold in its ranks too.
SWITCHES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = local_gpus()
    if len(found) < 2:
        pytest.skip(f"2 GPUs are needed, and this machine has {len(found)}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpu.uuid for gpu in found[:2]))


@pytest.fixture
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sky.ComputePool]:
    """Two ranks, on as many nodes as the test says."""
    nccl = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p"}
    with sky.ComputePool(nodes=request.param, logs="quiet", env=nccl) as pool:
        assert pool.world_size == 2
        yield pool


def check_nccl(folder: Path) -> None:
    """The ranks' NCCL met, and went from GPU to GPU, not through sockets."""
    said = "".join(path.read_text() for path in folder.glob("nccl.*"))
    assert " via P2P" in said
    assert " via NET" not in said


def switches() -> list[str | None]:
    return [os.environ.get(name) for name in SWITCHES]


@sky.integrations.jax
@sky.compute
def everything_and_where() -> dict[str, Any]:
    import jax

    (device,) = jax.local_devices()
    gpu = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[device.local_hardware_id]
    return {**everything.local(np.arange(2.0)), "where": (device.platform, gpu), "switches": switches()}


@pytest.mark.parametrize("pool", [1, 2], indirect=True)
def test_jax_over_two_gpus_and_a_call_after_a_call(pool: sky.ComputePool, tmp_path: Path) -> None:
    pids = set()
    for _ in range(2):
        results = everything_and_where() @ pool
        for rank, each in enumerate(results):
            assert each["devices"] == (2, 1, rank, 2)
            assert each["argument"].tolist() == [0.0, 1.0]
            assert each["pmap"] == [3.0, 3.0]
            assert each["jit"] == [9.0, 9.0]
            assert each["shard_map"] == [[3.0, 3.0]] * 3
            assert each["switches"] == switches()
            pids.add((rank if pool.nodes == 2 else 0, each["pid"]))
        gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        assert sorted(each["where"] for each in results) == sorted(("gpu", gpu) for gpu in gpus)
    assert len(pids) == 4, "each call has processes of its own"
    check_nccl(tmp_path)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_torch_over_two_gpus_between_calls_of_jax(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.integrations.torch(backend="nccl")
    @sky.compute
    def reduce() -> tuple[str, list[float], list[str | None]]:
        import torch
        import torch.distributed as dist

        x = torch.full((3,), dist.get_rank() + 1.0, device="cuda")
        dist.all_reduce(x)
        return dist.get_backend(), x.tolist(), switches()

    assert reduce() @ pool == [("nccl", [3.0] * 3, switches())] * 2
    assert [each["pmap"] for each in everything(None) @ pool] == [[3.0, 3.0]] * 2
    assert reduce() @ pool == [("nccl", [3.0] * 3, switches())] * 2
    check_nccl(tmp_path)


def train_and_step(x: Any, y: Any) -> tuple[dict[str, Any], list[Any]]:
    return train(x, y), one_step(x[:256], y[:256], False)


@pytest.mark.parametrize(("backend", "pool"), [("torch", 1), ("jax", 2)], indirect=["pool"])
def test_keras_trains_one_model_over_two_gpus(backend: str, pool: sky.ComputePool, tmp_path: Path) -> None:
    x, y = digits()
    decorated = sky.integrations.keras(backend=backend)
    (first, stepped), (second, stepped_too) = pool.run(decorated(train_and_step), x, y)
    assert (first["samples"], second["samples"]) == (899, 898)
    assert first["backend"] == second["backend"] == backend
    assert first["weights"] == second["weights"]
    assert first["history"] == second["history"]
    assert min(first["accuracy"], second["accuracy"]) > 0.85
    check_nccl(tmp_path)

    alone = pool.run_one(decorated(one_step), x[:256], y[:256], False)
    for one, other, expected in zip(stepped, stepped_too, alone, strict=True):
        assert (one == other).all()
        np.testing.assert_allclose(one, expected, atol=1e-4)  # matrices may be multiplied in TF32 there
