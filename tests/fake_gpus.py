"""GPUs that a fake ``nvidia-smi`` tells of, on this machine and on hosts of the testbed; each test's are its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.agent import leases
from testbed.hosts import NVIDIA_SMI, rows


@pytest.fixture
def give_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Gives this machine so many GPUs, and none else: ``give_gpus(2)``; returns their UUIDs."""
    folder = tmp_path / "gpus"
    given: list[str] = []

    def give(num: int, name: str = "NVIDIA L4", *, slices: int | list[str] = 0, more: str | None = None) -> list[str]:
        profiles = ["1g.10gb"] * slices if isinstance(slices, int) else slices
        uuids, text = rows(num, name)
        if more is not None:
            uuids.append(f"GPU-{uuid.uuid4()}")
            text += f"{num}, {uuids[-1]}, {more}, 81559, 0, 580.95\n"
        parts = [f"MIG-{uuid.uuid4()}" for _ in profiles]
        folder.mkdir()
        for program in (NVIDIA_SMI, NVIDIA_SMI.with_name("nvidia-smi-mig")):
            shutil.copy(program, folder)
        lines = [f"{part},{profile}\n" for part, profile in zip(parts, profiles, strict=True)]
        (folder / "gpus.csv").write_text(text + "".join(lines))
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        given.extend((*uuids, *parts))
        return [*uuids, *parts]

    yield give
    made = folder / "made.log"
    for each in (*given, *(made.read_text().splitlines() if made.exists() else ())):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(leases.FOLDER, each))
