"""Pools of MIG slices, on a fake nvidia-smi: one rank on each, which sees that one alone. No card is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import atoll as sky
from atoll.providers import mig
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


# -- slices that are made ---------------------------------------------------------------------------------------------
@pytest.fixture
def machine(give_gpus: GiveGpus, tmp_path: Path) -> Callable[..., Path]:
    """Gives the machine cards; returns the folder of its ``nvidia-smi``."""

    def give(num: int = 1, slices: list[str] | None = None) -> Path:
        give_gpus(num, A100, slices=slices or [])
        return tmp_path / "gpus"

    return give


def profiles(folder: Path) -> list[str]:
    """Of the slices that there are; a GPU instance without its compute instance counts."""
    lines = (folder / "gpus.csv").read_text().splitlines()
    return sorted(line.split(",")[1] for line in lines if line.startswith(("MIG-", "GI,")))


MAKING = sky.Local(make_slices=True)


@pytest.mark.parametrize(("profile", "num"), [("7g.80gb", 1), ("3g.40gb", 2), ("2g.20gb", 3), ("1g.10gb", 7)])
def test_slices_are_made_for_a_pool_and_removed_after_it(
    profile: str, num: int, machine: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = machine()
    with sky.ComputePool(MAKING, accelerator=sky.NVIDIA.A100(mig=profile)) as pool:
        assert profiles(folder) == [profile] * num
        seen = pool.run(visible)
        assert len(set(seen)) == num
        assert all(each.startswith("MIG-") for each in seen)
    assert profiles(folder) == []
    assert f"made MIG slices {', '.join([profile] * num)}" in capfd.readouterr().err
    assert "-mig " not in (folder / "mig.log").read_text(), "the card's mode is its administrator's"


def test_slices_that_are_there_come_first_and_stay(machine: Callable[..., Path]) -> None:
    folder = machine(2, ["2g.20gb", "1g.10gb"])  # of the second card
    there = (folder / "gpus.csv").read_text().splitlines()[2:]
    mixed = sky.NVIDIA.A100(mig=["3g.40gb", "2g.20gb", "1g.10gb"])
    with sky.ComputePool(MAKING, accelerator=mixed, logs="quiet") as pool:
        assert profiles(folder) == ["1g.10gb", "2g.20gb", "3g.40gb"]
        assert {line.split(",")[0] for line in there} < set(pool.run(visible))
        with pytest.raises(sky.ConfigError, match=r"used by the maker of slices .* GPU 1: its slice"):
            sky.ComputePool(MAKING, accelerator=sky.NVIDIA.A100(mig=["2g.20gb"]), logs="quiet").up()
    assert profiles(folder) == ["1g.10gb", "2g.20gb"]


def test_no_card_is_touched_that_somebody_uses(machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = machine(1, ["1g.10gb"])
    card, mine = (line.split(",") for line in (folder / "gpus.csv").read_text().splitlines())
    pool = sky.ComputePool(MAKING, accelerator=sky.NVIDIA.A100(mig=["3g.40gb"]), logs="quiet")
    for uuid in (card[1].strip(), mine[0]):
        (folder / "apps.csv").write_text(f"{uuid}, 4711\n")
        with pytest.raises(sky.ConfigError, match=r"no 3g\.40gb on GPU 0: it is used by process 4711"):
            pool.up()
    (folder / "apps.csv").unlink()
    holding = sky.ComputePool(accelerator=sky.NVIDIA.A100(mig=["1g.10gb"]), logs="quiet")
    with holding, pytest.raises(sky.ConfigError, match=r"its slice MIG-\S+ is used by pool"):
        pool.up()
    (folder / "mig_mode").write_text("Disabled\n")
    with pytest.raises(sky.ConfigError, match=r"its MIG mode is Disabled .* nvidia-smi -i 0 -mig 1"):
        pool.up()
    (folder / "mig_mode").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(sky.ConfigError, match=r"only root makes slices \(make_slices=True\)"):
            pool.up()
    assert not (folder / "mig.log").exists()


def test_what_was_made_is_removed_where_not_all_of_it_fits(machine: Callable[..., Path]) -> None:
    folder = machine(1, ["4g.40gb"])
    with pytest.raises(sky.ConfigError, match=r"no 3g\.40gb on GPU 0: Failed to create .*: Insufficient Resources"):
        sky.ComputePool(MAKING, accelerator=sky.NVIDIA.A100(mig=["3g.40gb"] * 2), logs="quiet").up()
    assert profiles(folder) == ["4g.40gb"]
    assert "-cgi 3g.40gb" in (folder / "mig.log").read_text()


def test_slices_whose_maker_was_killed_are_named(
    machine: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = machine()
    with sky.ComputePool(MAKING, accelerator=sky.NVIDIA.A100(mig=["1g.10gb"]), logs="quiet") as pool:
        (maker,) = mig._makers.values()
        maker.kill()
        assert pool.run(visible)[0].startswith("MIG-")
    assert profiles(folder) == ["1g.10gb"]
    assert "has ended (exit code -9). `nvidia-smi -L` lists those left" in capfd.readouterr().err


def test_slices_of_a_killed_driver_are_removed_once_nobody_uses_their_card(
    machine: Callable[..., Path], until: Any
) -> None:
    folder = machine()
    script = """
        import sys, time, atoll as sky
        spec = sky.NVIDIA.A100(mig="3g.40gb")
        with sky.ComputePool(sky.Local(make_slices=True), accelerator=spec) as pool:
            print("up", flush=True)
            time.sleep(100)
    """
    command = [sys.executable, "-c", "if True:" + script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
        assert profiles(folder) == ["3g.40gb"] * 2
        uuid = (folder / "gpus.csv").read_text().splitlines()[1].split(",")[0]
        (folder / "apps.csv").write_text(f"{uuid}, 4711\n")
        driver.send_signal(signal.SIGKILL)
    time.sleep(2)  # longer than ranks take to end
    assert profiles(folder) == ["3g.40gb"] * 2
    (folder / "apps.csv").unlink()
    until(lambda: profiles(folder) == [])
