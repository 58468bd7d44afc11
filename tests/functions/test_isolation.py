"""What one task sets does not reach the next."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import atoll as sky

pytestmark = pytest.mark.leaks_per_module


def test_environment_cwd_path_and_umask(pool: sky.ComputePool, tmp_path: Path) -> None:
    def look() -> Any:
        mask = os.umask(0)
        os.umask(mask)
        return dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv), mask

    def soil() -> None:
        os.environ["MINE"] = "1"
        os.environ["HOME"] = "/nowhere"
        del os.environ["PATH"]
        os.chdir(tmp_path)
        os.umask(0o777)
        sys.path.insert(0, "/nowhere")
        sys.argv.append("--mine")

    def without_ports(seen: Any) -> Any:
        ports = ("MASTER_PORT", "JAX_COORDINATOR_ADDRESS")
        return [({k: v for k, v in env.items() if k not in ports}, *rest) for env, *rest in seen]

    before = pool.run(look)
    pool.run(soil)
    assert without_ports(pool.run(look)) == without_ports(before)
    assert before[0][1] == os.getcwd()

    def soil_and_fail() -> None:
        soil()
        raise ValueError("after soiling")

    with pytest.raises(ValueError, match="after soiling"):
        pool.run(soil_and_fail)
    assert without_ports(pool.run(look)) == without_ports(before)


def test_a_cwd_that_was_removed(pool: sky.ComputePool, tmp_path: Path) -> None:
    def strand() -> None:
        folder = tmp_path / "gone"
        folder.mkdir()
        os.chdir(folder)
        folder.rmdir()

    pool.run_one(strand)
    assert pool.run(os.getcwd) == [os.getcwd()] * 2


def test_variables_the_driver_sets_are_those_of_the_start(pool: sky.ComputePool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SET_AFTER_THE_POOL_CAME_UP", "1")
        assert pool.run(lambda: os.environ.get("SET_AFTER_THE_POOL_CAME_UP")) == [None, None]


def test_seeds_and_random_numbers(pool: sky.ComputePool) -> None:
    def seed() -> None:
        import numpy as np
        import torch

        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    def draw() -> tuple[float, float, float]:
        import numpy as np
        import torch

        return random.random(), float(np.random.rand()), float(torch.rand(1))

    drawn = []
    for _ in range(3):
        pool.run(seed)
        drawn += pool.run(draw)
        drawn += pool.run(draw)
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(numbers), "each call and rank draws numbers of its own"


def test_defaults_of_torch(pool: sky.ComputePool) -> None:
    def look() -> Any:
        import torch

        return (
            str(torch.get_default_dtype()),
            str(torch.tensor(1.0).device),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            torch.is_anomaly_enabled(),
        )

    def soil() -> None:
        import torch

        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(torch.get_num_threads() + 3)
        torch.autograd.set_detect_anomaly(True)

    before = pool.run(look)
    assert before[0][:4] == ("torch.float32", "cpu", True, False)
    pool.run(soil)
    assert pool.run(look) == before


def test_signal_handlers_and_alarms(pool: sky.ComputePool) -> None:
    def soil() -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)

    def look() -> list[str]:
        import time

        time.sleep(0.3)  # an alarm left behind would end the process here
        return [repr(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD)]

    before = pool.run(look)
    pool.run(soil)
    assert pool.run(look) == before


def test_a_ranks_modules_stay_loaded(pool: sky.ComputePool) -> None:
    def stamp(value: int | None) -> Any:
        import colorsys

        if value is not None:
            colorsys.stamp = value  # type: ignore[attr-defined]
        return getattr(colorsys, "stamp", None)

    pool.run(stamp, 7)
    assert pool.run(stamp, None) == [7, 7], "warm ranks: what was imported once is there"
