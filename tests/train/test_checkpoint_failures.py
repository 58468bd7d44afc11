"""Whatever ends a save, the last good checkpoint stays, every rank hears why, and the next save works."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

import ranks
from atoll.core.errors import CheckpointError
from atoll.train.checkpoint.checkpointer import Checkpointer
from checkpoints import checkpointer, load, plain, sharded, whole_steps

NUM = 100_000  # numbers in each of eight tensors: 3 MB


# --------------------------------------------------------------------------------------------------------- kill -9
def save_twice(root: str, signals: str, stop_at: int | None) -> str:
    """Check and load the newest, save it as the next step and say so, then begin another; killed somewhere there.

    ``stop_at``: where the ranks of that save agree for that time, they stand still until those that live may go on.
    """
    saver = checkpointer(root, keep=2)
    found = saver.latest()
    newest = 0 if found is None else found.step
    tensors = sharded(0.0, NUM)
    parts = [tensor.to_local() for tensor in tensors.values()]
    if newest:
        assert load(saver, newest, tensors)["step"] == newest
        assert all(part.eq(newest + i).all() for i, part in enumerate(parts))
    for step in (newest + 1, newest + 2):
        for i, part in enumerate(parts):
            part.fill_(step + i)
        if stop_at is not None and step == newest + 2:
            stand_still(saver, stop_at, Path(signals), step)
        (Path(signals) / f"began-{step}-{dist.get_rank()}").touch()
        try:
            saver.save(step, tensors, {"step": step, "keep": False})
            for part in parts:
                part.fill_(-1)
            saver.wait()
        except CheckpointError as error:
            return str(error)
    return "saved"


def stand_still(saver: Checkpointer, number: int, signals: Path, step: int) -> None:
    agree, calls = saver._team.agree, itertools.count(1)

    def standing(what: str, work: Callable[[], Any]) -> list[Any]:
        if next(calls) == number:
            (signals / f"stands-{step}-{dist.get_rank()}").touch()
            wait_for(signals / f"go-{step}")
        return agree(what, work)

    saver._team.agree = standing  # type: ignore[method-assign]  # there is no other place between its messages


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.001)


@pytest.mark.parametrize("num_trials", [3, pytest.param(30, marks=pytest.mark.long)])
def test_kill_at_random_points_of_a_save(tmp_path, num_trials):
    """Both ranks at once, or one of them: then the other hears of it and stops by itself."""
    generator = random.Random(5)
    root, signals = tmp_path / "checkpoints", tmp_path / "signals"
    signals.mkdir()
    promised = 0
    for trial in range(num_trials):
        # Every other one surely while it is written: of the four times that ranks agree in a save, the last commits it.
        stop_at = generator.randint(1, 3) if trial % 2 else None
        with contextlib.closing(ranks.start(2, save_twice, str(root), str(signals), stop_at, patient=True)) as gang:
            wait_for(signals / f"began-{promised + 2}-0")  # so the one before is complete
            if stop_at is None:
                time.sleep(generator.uniform(0, 0.06))
            else:
                wait_for(signals / f"stands-{promised + 2}-0")
                wait_for(signals / f"stands-{promised + 2}-1")
            for pid in [gang.pids, gang.pids[:1], gang.pids[1:]][trial // 2 % 3]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            (signals / f"go-{promised + 2}").touch()
            outcomes = gang.outcomes(60)
        for kind, value in outcomes:
            expected = kind == "returned" and (value == "saved" or "because one died or hangs" in value)
            assert expected or (kind, value) == ("died", -signal.SIGKILL), value
        folders = os.listdir(root)
        assert f"step-{promised + 1:08d}" in folders
        complete = f"step-{promised + 2:08d}" in folders
        assert not (complete and stop_at is not None)
        promised += 2 if complete else 1
    saver = checkpointer(root)
    assert saver.latest().step == promised
    tensors = {f"t{i}": torch.zeros(NUM) for i in range(8)}
    load(saver, promised, tensors)
    assert all(tensor.eq(promised + i).all() for i, tensor in enumerate(tensors.values()))
    assert not [name for name in os.listdir(root) if name.startswith(".")]


# ------------------------------------------------------------------------------------------------------- full disks
def fill(root: str, limit: dict[int, int]) -> tuple[str, list[str], list[int], str]:
    """Save, save where this rank's files may not get so long, save again."""
    notes: list[str] = []
    saver = checkpointer(root, notes)
    saver.save(1, sharded(1.0, 50_000), {})
    saver.wait()
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() in limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit[dist.get_rank()], usual[1]))
    saver.save(2, sharded(2.0, 50_000), {})
    told = ""
    try:
        saver.wait()
    except CheckpointError as error:
        told = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    dist.barrier()
    names = sorted(os.listdir(root))
    dist.barrier()
    saver.save(3, sharded(3.0, 50_000), {})
    saver.wait()
    tensors = sharded(0.0, 50_000)
    load(saver, 1, tensors)
    assert all(tensor.to_local().eq(1 + i).all() for i, tensor in enumerate(tensors.values()))
    return told, names, whole_steps(saver), "".join(notes)


@pytest.mark.parametrize(
    ("limit", "who"),
    [
        ({1: 300_000}, "rank 1"),
        pytest.param({0: 300_000}, "rank 0", marks=pytest.mark.long),
        pytest.param({0: 1, 1: 1}, "ranks 0, 1", marks=pytest.mark.long),
    ],
)
def test_a_file_that_can_not_grow(tmp_path, limit, who):
    outcomes = ranks.run(2, fill, str(tmp_path), limit)
    first = outcomes[0][0]
    assert first == (f"saving step 2 to {tmp_path}/step-00000002 failed on {who}: OSError: [Errno 27] File too large")
    for told, names, steps, notes in outcomes:
        assert told == first
        assert names == ["step-00000001"]
        assert steps == [1, 3]
        assert notes == ""


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"mounting a small disk takes root: {done.stderr.decode()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def save_big(root: str, spare: str) -> list[str]:
    saver = checkpointer(root)
    saver.save(1, sharded(1.0, 50_000), {})
    saver.wait()
    told = []
    try:
        saver.save(2, sharded(2.0, 600_000), {})
        saver.wait()
    except CheckpointError as error:
        told.append(str(error))
    dist.barrier()
    told += sorted(os.listdir(root))
    saver.save(3, sharded(3.0, 50_000), {})
    saver.wait()
    assert saver.latest().step == 3
    return told


def test_a_disk_that_fills_in_the_middle(tmp_path):
    with small_disk(tmp_path, "8m"):
        for told, *names in ranks.run(2, save_big, str(tmp_path), ""):
            assert told.startswith(f"saving step 2 to {tmp_path}/step-00000002 failed on rank")
            assert "[Errno 28] No space left on device" in told
            assert names == ["step-00000001"]


# --------------------------------------------------------------------------------------------------- other failures
def save_a_bad_tensor(root: str) -> tuple[str, str]:
    saver = checkpointer(root)
    bad = {"t": torch.empty(3, device="meta" if dist.get_rank() == 1 else "cpu")}
    saver.save(1, bad, {})
    told = ""
    try:
        while saver.poll() is None:
            time.sleep(0.01)
    except CheckpointError as error:
        told = str(error)
    saver.save(2, plain(), {})
    saver.wait()
    return told, str(saver.latest().step)


def test_a_copy_that_fails_on_one_rank(tmp_path):
    outcomes = ranks.run(2, save_a_bad_tensor, str(tmp_path))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0].startswith(
        "copying the tensors of step 1 to host memory failed on rank 1: NotImplementedError"
    )
    assert outcomes[0][1] == "2"


def test_a_root_that_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    saver = checkpointer(tmp_path / "file" / "checkpoints")
    assert saver.latest() is None
    saver.save(1, plain(), {})
    with pytest.raises(CheckpointError, match=r"file/checkpoints/step-00000001 failed on rank 0: NotADirectoryError"):
        saver.wait()
    assert saver.wait() is None
    saver.save(2, plain(), {})
    saver.close()


def test_an_old_checkpoint_that_can_not_be_removed_is_only_a_note(tmp_path, monkeypatch):
    notes: list[str] = []
    saver = checkpointer(tmp_path, notes, keep=1)
    saver.save(1, plain(), {"keep": False})
    saver.wait()
    # A mount point can't be renamed; so can't one that is immutable. Here the folder is gone between look and rename.
    remove = saver._store.remove
    monkeypatch.setattr(
        saver._store, "remove", lambda step: ((tmp_path / "step-00000001").rename(tmp_path / "x"), remove(step))
    )
    saver.save(2, plain(), {})
    assert saver.wait().step == 2
    assert notes == [
        f"old checkpoints in {tmp_path} can't be removed: FileNotFoundError: [Errno 2] No such file or directory: "
        f"'{tmp_path}/step-00000001' -> " + notes[0].rpartition(" -> ")[2]
    ]


def save_alone(root: str) -> str:
    """Rank 0 saves twice; rank 1 stays until that is over, but does nothing."""
    saver = checkpointer(root)
    saver._timeout_s = 1.0  # from now on: the ranks may need longer than that to meet
    _set_pg_timeout(timedelta(seconds=1), saver._team.group)
    over = Path(root) / "over"
    if dist.get_rank() == 1:
        wait_for(over)
        return ""
    told = []
    for _ in range(2):
        try:
            saver.save(1, plain(), {})
            saver.wait()
        except CheckpointError as error:
            told.append(str(error))
    over.touch()
    saver.close()
    return told[0]


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_asked(tmp_path):
    told = ranks.run(2, save_alone, str(tmp_path), timeout=40)[0]
    assert "step 1" in told
    assert "hangs" in told


def test_a_failure_nobody_asked_about_is_noted_at_the_end(tmp_path):
    (tmp_path / "file").write_text("")
    notes: list[str] = []
    saver = checkpointer(tmp_path / "file", notes)
    saver.save(1, plain(), {})
    saver.close()
    assert len(notes) == 1
    assert "step-00000001 failed on rank 0" in notes[0]
