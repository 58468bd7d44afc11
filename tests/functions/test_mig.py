"""Pools of MIG slices, on a fake nvidia-smi: one rank on each, which sees that one alone. No card is touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import atoll as sky
from fake_gpus import give_gpus

__all__ = ["give_gpus"]

GiveGpus = Callable[..., list[str]]
A100 = "NVIDIA A100-SXM4-80GB"


def place() -> dict[str, Any]:
    import torch.distributed as dist

    info = sky.instance_info()
    return {
        "rank": (info.rank, info.local_rank, info.world_size),
        "sees": os.environ["CUDA_VISIBLE_DEVICES"],
        "profile": os.environ["ATOLL_MIG"],
        "group": dist.is_initialized(),
    }


@pytest.mark.long  # the ranks load torch
def test_each_slice_has_a_rank_that_sees_it_alone_and_is_a_job_of_its_own(give_gpus: GiveGpus) -> None:
    _, one, two = give_gpus(1, A100, slices=["3g.40gb", "3g.40gb"])
    with sky.ComputePool(accelerator=sky.Accelerator.NVIDIA.A100(mig="3g.40gb"), logs="quiet") as pool:
        found = pool.run(place)
        assert [each["rank"] for each in found] == [(0, 0, 2), (1, 1, 2)]
        assert [each["sees"] for each in found] == [one, two]
        assert [each["profile"] for each in found] == ["3g.40gb"] * 2
        assert [each["group"] for each in found] == [False, False]

        def group(backend: str | None) -> tuple[str, float]:
            import torch
            import torch.distributed as dist

            value = torch.ones(1)
            dist.all_reduce(value)
            return dist.get_backend(), float(value)

        # One that is asked for is made by Gloo, which needs nothing of the card.
        assert pool.run(sky.integrations.torch(group), None) == [("gloo", 2.0)] * 2
        with pytest.raises(sky.ConfigError, match="NCCL takes two slices of a GPU for the same device"):
            pool.run(sky.integrations.torch(backend="nccl")(group), None)

        def by_hand() -> None:
            import torch.distributed as dist

            dist.init_process_group("nccl")

        with pytest.raises(sky.ConfigError, match="NCCL takes two slices"):
            pool.run(by_hand)


def visible() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_pools_share_the_slices_of_a_card(give_gpus: GiveGpus) -> None:
    slices = give_gpus(1, A100, slices=["2g.20gb", "2g.20gb", "2g.20gb", "1g.10gb"])[1:]
    with pytest.raises(
        sky.ConfigError, match=r"slices of this machine are 2g.20gb, 2g.20gb, 2g.20gb, 1g.10gb.* -cgi 3g"
    ):
        sky.ComputePool(accelerator=sky.NVIDIA.A100(mig="3g.40gb")).up()
    mixed = sky.NVIDIA.A100(mig=["1g.10gb", "2g.20gb"])
    with sky.ComputePool(accelerator=mixed, logs="quiet") as pool:
        assert set(pool.run(visible)) == {slices[0], slices[3]}
        rest = sky.NVIDIA.A100(mig=["2g.20gb"])
        with sky.ComputePool(accelerator=rest, logs="quiet") as other:
            assert other.run(visible)[0] in slices[1:3], "what another pool holds is passed over"
    with sky.ComputePool(accelerator=sky.NVIDIA.A100(mig="2g.20gb"), logs="quiet") as pool:
        assert sorted(pool.run(visible)) == sorted(slices[:3])


@pytest.mark.parametrize(("profile", "num"), [("3g.40gb", 2), ("2g.20gb", 3), ("1g.10gb", 7)])
def test_slices_of_a_card_that_is_not_here_are_simulated(
    profile: str, num: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with sky.ComputePool(accelerator=sky.Accelerator.NVIDIA.H100(mig=profile)) as pool:
        assert len(pool.run(visible)) == num
        assert pool.run(os.getenv, "ATOLL_MIG") == [profile] * num
    assert f"1 × H100 with slices {', '.join([profile] * num)} simulated on CPU" in capfd.readouterr().err


def test_what_cannot_be_had_is_refused(give_gpus: GiveGpus) -> None:
    spec = sky.NVIDIA.A100(mig="3g.40gb")
    with pytest.raises(sky.ConfigError, match="workers_per_node=3 with 2 slices of each node"):
        sky.ComputePool(accelerator=spec, workers_per_node=3)
    with pytest.raises(sky.ConfigError, match=r"gives whole cards only; leave mig out, .* sky.Local\(\)"):
        sky.ComputePool(sky.SSH("box"), accelerator=spec)
    with pytest.raises(sky.ConfigError, match="slices of this machine are none"):
        sky.ComputePool(sky.Local(simulate=False), accelerator=spec).up()
