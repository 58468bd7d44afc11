"""Leases with real cards. ``pytest -m gpu tests/gpu/test_leases.py`` on a machine with at least two free GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import atoll as sky
from atoll.providers.gpus import local_gpus
from atoll.tasks.control import LocalControl
from atoll.tasks.spec import JobStatus
from local_cluster import LocalCluster

pytestmark = [pytest.mark.gpu, pytest.mark.serial, pytest.mark.timeout(300)]

# What CUDA itself says, not the variable.
SEE = (
    "import torch; uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]; "
    "x = torch.ones(1 << 20, device='cuda').sum().item(); print('sees', *uuids, 'sum', x, flush=True)"
)
RUN = f'{sys.executable} -c "{SEE}"; sleep 600'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    yield tmp_path
    for folder in tmp_path.glob("clusters/*"):
        cluster = LocalCluster(folder, LocalControl(folder))
        cluster.control.cancel(None)
        cluster.wait_until_idle()


def seen(cluster: LocalCluster, job: int) -> list[str]:
    """UUIDs of the cards that a job's process sees, without their beginning."""
    cluster.wait_for(job, "sum 1048576")
    (line,) = (line for line in cluster.log(job).splitlines() if "sees " in line)
    return [each.removeprefix("GPU-") for each in line.split("sees ")[1].split(" sum ")[0].split()]


def test_two_jobs_two_clusters_and_a_pool_compute_on_different_cards(home: Path) -> None:
    gpus = local_gpus()
    assert len(gpus) >= 2, f"at least 2 GPUs are needed, this machine has {len(gpus)}"
    name, all_of_them = gpus[0].name, {gpu.uuid.removeprefix("GPU-") for gpu in gpus}
    gpu = {"accelerator": name, "num_accelerators": 1, "env": dict(os.environ)}

    one = LocalCluster.make(home, "one", accelerator=name, num_accelerators=2)
    jobs = [one.submit(RUN, **gpu) for _ in range(2)]
    (first,), (second,) = (seen(one, job) for job in jobs)
    assert first != second
    assert {first, second} <= all_of_them
    one.control.cancel([jobs[1]])

    two = LocalCluster.make(home, "two", accelerator=name, num_accelerators=1)
    (other,) = seen(two, two.submit(RUN, **gpu))
    assert other != first
    two.control.cancel(None)
    two.wait_until_idle()

    def see() -> list[str]:
        import torch

        return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]

    with sky.ComputePool(accelerator=f"{name}:{len(gpus) - 1}") as pool:
        assert pool.world_size == len(gpus) - 1
        for rank in pool.run(see):
            assert {uuid.removeprefix("GPU-") for uuid in rank} == all_of_them - {first}
        with pytest.raises(sky.ProvisionError, match=r"is held by job 1 of cluster one \(pid"):
            sky.ComputePool(accelerator=name).up()


def test_the_shells_devices_bound_a_run(home: Path) -> None:
    gpus = local_gpus()
    assert len(gpus) >= 2, f"at least 2 GPUs are needed, this machine has {len(gpus)}"
    for visible, expected in (("1", gpus[1].uuid), (gpus[0].uuid, gpus[0].uuid)):
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        command = [sys.executable, "-m", "atoll", "run", "--no-python", sys.executable, "-c", SEE]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == JobStatus.SUCCEEDED.exit_code, done.stdout + done.stderr
        assert f"sees {expected.removeprefix('GPU-')} sum" in done.stdout.replace("GPU-", "")
