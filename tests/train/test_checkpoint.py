"""A checkpoint is the state at the call, on any mesh afterwards, and one atomic thing."""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import ranks
from atoll.core.errors import CheckpointError, ConfigError
from atoll.train.checkpoint import files
from atoll.train.checkpoint.checkpointer import doomed, optimizer_tensors
from atoll.train.checkpoint.claim import FolderClaim, check_shared
from atoll.train.checkpoint.manifest import Manifest, join_checksums
from atoll.train.optim.build import build_optimizer
from atoll.train.recipe.schema import OptimizerSection
from atoll.train.saved import find_checkpoint
from checkpoints import checkpointer, load, net, plain, replicated, sharded, train, whole, whole_steps


# ------------------------------------------------------------------------------------------------- one process
def test_round_trip_of_every_kind_of_tensor_in_one_process(tmp_path):
    state = {
        "float32": torch.randn(5, 7),
        "bfloat16": torch.randn(33).bfloat16(),
        "float64": torch.randn(2, 3, 4, dtype=torch.float64),
        "int64": torch.tensor([1 << 60, -5]),
        "bool": torch.tensor([True, False, True]),
        "float8": torch.randn(16).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "part of a larger one": torch.arange(1000.0)[10:20],
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    meta = {"cursor": 12345678901, "recipe": {"train": {"lr": 1e-3}}, "text": "Straße"}
    saver = checkpointer(tmp_path / "checkpoints")
    assert saver.latest() is None
    assert saver.poll() is None
    began = time.monotonic()
    saver.save(7, state, meta, metric=2.5)
    held_s = time.monotonic() - began
    saved = saver.wait()
    took_s = time.monotonic() - began
    assert (saved.step, saved.path) == (7, str(tmp_path / "checkpoints" / "step-00000007"))
    assert 0 < saved.stall_s <= held_s
    assert 0 < saved.took_s <= took_s
    assert saver.poll() is None
    assert whole_steps(saver) == [7]

    again = checkpointer(tmp_path / "checkpoints")
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    into["strided"] = torch.zeros(3, 4).t()
    found = again.latest()
    assert (found.step, found.meta, found.metric) == (7, meta, 2.5)
    assert load(again, 7, into) == meta
    for name, tensor in state.items():
        assert torch.equal(into[name].view(torch.uint8) if name == "float8" else into[name],
                           tensor.view(torch.uint8) if name == "float8" else tensor), name  # fmt: skip
    saver.close()
    again.close()


def test_layout_on_disk(tmp_path):
    saver = checkpointer(tmp_path)
    saver.save(100, plain(), {"tokens": 5}, metric=1.25)
    saver.wait()
    assert sorted(os.listdir(tmp_path)) == ["step-00000100"]
    folder = tmp_path / "step-00000100"
    assert sorted(os.listdir(folder)) == [".metadata", "__0_0.distcp", "manifest.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["version"], manifest["step"], manifest["meta"]) == (1, 100, {"tokens": 5})
    assert (manifest["world_size"], manifest["metric"]) == (1, 1.25)
    assert manifest["files"]["__0_0.distcp"]["bytes"] == (folder / "__0_0.distcp").stat().st_size
    # DCP itself reads it.
    into = plain(0.0)
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(into, checkpoint_id=folder)
    assert torch.equal(into["weight"], plain()["weight"])


def test_several_threads_write_a_part_each(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "num_threads", lambda num_bytes: 3)
    saver = checkpointer(tmp_path)
    saver.save(1, plain(2.0), {})
    saver.wait()
    parts = sorted(path.name for path in (tmp_path / "step-00000001").glob("*.distcp"))
    assert parts == ["__0_0_0.distcp", "__0_1_0.distcp"]  # of two tensors
    into = plain(0.0)
    saver.load_newest(into)
    assert all(torch.equal(tensor, plain(2.0)[name]) for name, tensor in into.items())
    (tmp_path / "step-00000001" / parts[1]).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"__0_1_0.distcp has 0 bytes"):
        saver.load_newest(into)


def test_a_part_that_fails_fails_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "num_threads", lambda num_bytes: 2)
    opened = files.Files.open

    def refuse(self, path, mode="rb"):
        if path.endswith("__0_1_0.distcp"):
            raise OSError(28, "No space left on device")
        return opened(self, path, mode)

    monkeypatch.setattr(files.Files, "open", refuse)
    saver = checkpointer(tmp_path)
    saver.save(1, plain(), {})
    with pytest.raises(CheckpointError, match="No space left on device"):
        saver.wait()
    assert not (tmp_path / "step-00000001").exists()


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    saver = checkpointer(tmp_path)
    state, cursor = plain(1.0, num=3_000_000), {"cursor": [1]}
    for step in (1, 2):  # the second uses the memory of the first
        saver.save(step, state, cursor)
        for tensor in state.values():
            tensor.mul_(2)
        cursor["cursor"].append(step)
    saver.wait()
    for step, value in ((1, 1.0), (2, 2.0)):
        into = plain(0.0, num=3_000_000)
        meta = load(saver, step, into)
        assert torch.equal(into["weight"], plain(value, num=3_000_000)["weight"])
        assert len(meta["cursor"]) == step
    saver.close()


def test_every_finished_save_is_told_once(tmp_path):
    saver = checkpointer(tmp_path)
    saver.save(1, plain(), {})
    deadline = time.monotonic() + 30
    while (saved := saver.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert saved.step == 1
    assert saver.poll() is None
    assert saver.wait() is None
    saver.save(2, plain(), {})
    assert saver.wait().step == 2
    assert saver.wait() is None
    synchronous = checkpointer(tmp_path, asynchronous=False)
    synchronous.save(4, plain(), {})
    assert (tmp_path / "step-00000004").exists()
    assert synchronous.poll().step == 4


def test_saving_a_step_again_replaces_it(tmp_path):
    saver = checkpointer(tmp_path)
    saver.save(1, plain(1.0), {"try": 1})
    saver.save(1, plain(2.0), {"try": 2})
    saver.wait()
    into = plain(0.0)
    assert load(saver, 1, into) == {"try": 2}
    assert torch.equal(into["weight"], plain(2.0)["weight"])
    assert os.listdir(tmp_path) == ["step-00000001"]


# ------------------------------------------------------------------------------------------------------- damage
def saved_steps(root: Path, *steps: int) -> None:
    saver = checkpointer(root)
    for step in steps:
        saver.save(step, plain(float(step)), {"step": step})
    saver.wait()
    saver.close()


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


DAMAGE = {
    "no manifest": (lambda step: (step / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (lambda step: os.truncate(step / "manifest.json", 100), "manifest.json can't be read"),
    "empty manifest": (lambda step: os.truncate(step / "manifest.json", 0), "manifest.json can't be read"),
    "rot in the manifest": (
        lambda step: change(step / "manifest.json", '"step": 2', '"step": 3'),
        "manifest.json does not have the checksum",
    ),
    "a manifest of a later version": (
        lambda step: change(step / "manifest.json", '"version": 1', '"version": 9'),
        "has version 9, this Atoll reads up to 1",
    ),
    "a shard too short": (lambda step: os.truncate(step / "__0_0.distcp", 500), "__0_0.distcp has 500 bytes instead"),
    "no shard": (lambda step: (step / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "no index": (lambda step: (step / ".metadata").unlink(), ".metadata is missing"),
    "rot in a shard": (lambda step: flip_a_byte(step / "__0_0.distcp"), "__0_0.distcp has crc32 "),
    "rot in the index": (lambda step: flip_a_byte(step / ".metadata"), ".metadata has crc32 "),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_step_is_passed_over_with_a_note(tmp_path, damage):
    saved_steps(tmp_path, 1, 2)
    harm, told = DAMAGE[damage]
    harm(tmp_path / "step-00000002")
    notes: list[str] = []
    saver = checkpointer(tmp_path, notes)
    into = plain(0.0)
    assert saver.load_newest(into) == {"step": 1}
    assert torch.equal(into["weight"], plain(1.0)["weight"])
    assert len(notes) == 1
    assert notes[0].startswith(f"damaged checkpoints in {tmp_path} are passed over: step 2: ")
    assert told in notes[0]
    # The run goes on, and gets there again.
    saver.save(2, plain(20.0), {"step": 2})
    saver.wait()
    assert saver.latest().step == 2
    load(saver, 2, into)
    assert torch.equal(into["weight"], plain(20.0)["weight"])


def test_where_all_are_damaged_the_run_does_not_start_afresh(tmp_path):
    saved_steps(tmp_path, 1, 2)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    flip_a_byte(tmp_path / "step-00000002" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: step 1: .* is missing; step 2: .* crc32"):
        checkpointer(tmp_path).load_newest(plain())


def bytes_read() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def test_resuming_reads_each_byte_once(tmp_path):
    saver = checkpointer(tmp_path)
    state = {f"t{i}": torch.randn(1000 * i, 100) for i in range(1, 8)} | {"empty": torch.empty(0, 4)}
    saver.save(1, state, {})
    saver.wait()
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    again = checkpointer(tmp_path)
    before = bytes_read()
    assert again.latest().step == 1
    again.load_newest(into)
    assert size <= bytes_read() - before < 1.02 * size
    assert all(torch.equal(into[name], state[name]) for name in state)


def test_another_model_is_refused_by_name(tmp_path):
    saved_steps(tmp_path, 1)
    saver = checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match="another model or optimizer: it lacks more; it has bias, which this run"):
        load(saver, 1, {"weight": torch.zeros(1000), "more": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"it has weight of shape \[1000\] instead of \[10, 100\]"):
        load(saver, 1, {"weight": torch.zeros(10, 100), "bias": torch.zeros(3)})


# ---------------------------------------------------------------------------------------------------- leftovers
def test_what_dead_runs_left_is_swept_by_the_next_writer_only(tmp_path):
    saved_steps(tmp_path, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.aaaaaaaa.trash")  # died while it was removed
    (tmp_path / ".step-00000003.cccccccc.tmp").mkdir()
    (tmp_path / ".step-00000003.cccccccc.tmp" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".step-00000000.dddddddd.trash").mkdir()
    (tmp_path / ".mine").mkdir()
    (tmp_path / "notes.txt").write_text("the user's")
    before = sorted(os.listdir(tmp_path))
    reader = find_checkpoint(str(tmp_path))
    assert reader is not None
    assert reader.manifest.step == 1
    assert sorted(os.listdir(tmp_path)) == before
    assert checkpointer(tmp_path).latest().step == 1
    assert sorted(os.listdir(tmp_path)) == [".mine", "notes.txt", "step-00000001"]


# ---------------------------------------------------------------------------------------------------- retention
def test_retention_against_its_words():
    """Every rule by itself, then a run of saves in which each rule protects some step."""
    some = dict.fromkeys((100, 200, 300, 400))
    assert doomed(some, [], saved=400, keep=2, keep_best=False) == [100, 200]
    assert doomed(some, list(some), saved=400, keep=2, keep_best=False) == []
    assert doomed(some, [200, 400], saved=400, keep=1, keep_best=False) == [100, 300]
    rated = {100: 3.0, 200: 1.0, 300: float("nan"), 400: 1.0, 500: None, 600: 2.0}
    assert doomed(rated, [], saved=600, keep=1, keep_best=True) == [100, 200, 300, 500]
    # A run that went back to an older step: what it saves stays, whatever newer ones there are.
    assert doomed({100: None, 150: None, 200: None, 300: None}, [], saved=150, keep=2, keep_best=False) == [100]
    generator = random.Random(0)
    for _ in range(200):
        keep, every = generator.randint(1, 4), generator.choice([None, 3, 5])
        there: dict[int, float | None] = {}
        for step in range(1, 30):
            there[step] = generator.choice([None, generator.random()])
            kept = [each for each in there if every and each % every == 0]
            gone = doomed(there, kept, saved=step, keep=keep, keep_best=True)
            for old in gone:
                rating = there.pop(old)
                assert old not in sorted([*there, *gone])[-keep:]
                assert every is None or old % every
                assert rating is None or any(other is not None and other <= rating for other in there.values())
            assert step in there


def test_retention_of_real_saves(tmp_path):
    saver = checkpointer(tmp_path, keep=2, keep_best=True)
    for step, metric in zip(range(1, 9), (5.0, 3.0, 1.0, 2.0, 4.0, 6.0, 7.0, 8.0), strict=True):
        saver.save(step, plain(), {"keep": step % 4 == 0}, metric=metric)
        saver.wait()
        assert step in whole_steps(saver)
    assert whole_steps(saver) == [3, 4, 7, 8]
    assert len(os.listdir(tmp_path)) == 4
    # The ratings, and what stays for good, are in the manifests: a new run knows them.
    again = checkpointer(tmp_path, keep=1, keep_best=True)
    again.save(9, plain(), {"keep": False})
    again.wait()
    assert whole_steps(again) == [3, 4, 8, 9]


# ------------------------------------------------------------------------------------------------- several ranks
def save_net(root: str, shape: dict[str, int]) -> dict[str, torch.Tensor]:
    model = net(**shape)
    optimizer = build_optimizer(dict(model.named_parameters()), OptimizerSection(), seed=0)
    train(model, optimizer, range(3))
    tensors = state_of(model, optimizer)
    before = whole(tensors)
    saver = checkpointer(root)
    saver.save(3, tensors, {"cursor": 3})
    train(model, optimizer, range(3, 4))  # at once
    saver.wait()
    saver.close()
    return before


def load_nets(root: str, shapes: list[dict[str, int]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for shape in shapes:
        model = net(**shape)
        optimizer = build_optimizer(dict(model.named_parameters()), OptimizerSection(), seed=0)
        saver = checkpointer(root)
        assert saver.latest().step == 3
        tensors = state_of(model, optimizer)
        assert load(saver, 3, tensors) == {"cursor": 3}
        saver.close()
        found.append(whole(tensors))
    return found


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": parameter for parameter, name in names.items()}
    return {**tensors, **optimizer_tensors(optimizer, names)}


MESHES: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"shard": 2}, {"tensor": 2}],
    4: [{"shard": 4}, {"shard": 2, "tensor": 2}, {"replicate": 2, "shard": 2}],
}


@pytest.mark.parametrize(
    ("world", "shape"),
    [
        pytest.param(1, {}, marks=pytest.mark.long),
        pytest.param(2, {"shard": 2}, marks=pytest.mark.long),
        pytest.param(2, {"tensor": 2}, marks=pytest.mark.long),
        pytest.param(4, {"shard": 4}, marks=pytest.mark.long),
        (4, {"shard": 2, "tensor": 2}),
        pytest.param(4, {"replicate": 2, "shard": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_load_on_every_mesh(tmp_path, world, shape):
    before = ranks.run(world, save_net, str(tmp_path), shape)[0]
    assert len(before) == 4 + 3 * 4
    for other_world, other_shapes in MESHES.items():
        for found in ranks.run(other_world, load_nets, str(tmp_path), other_shapes):
            for after in found:
                assert after.keys() == before.keys()
                assert all(torch.equal(after[name], before[name]) for name in before)


def save_parts(root: str) -> list[str]:
    """What ranks hold apart, together and by halves."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    whole_one = torch.arange(40.0).view(5, 8)
    state = {
        f"stage{rank}.weight": torch.full((10,), float(rank)),  # as pipeline stages have them
        "replicated": torch.arange(100.0),
        "replicated_dtensor": replicated(torch.arange(7.0)),
        "uneven": distribute_tensor(torch.arange(3.0), init_device_mesh("cpu", (4,)), [Shard(0)]),
        "columns": distribute_tensor(whole_one, mesh, [Replicate(), Shard(1)]),
        "blocks": distribute_tensor(whole_one, mesh, [Shard(0), Shard(1)]),
        "scalar": torch.tensor(5, dtype=torch.int64),
    }
    saver = checkpointer(root)
    saver.save(1, state, {"rank": rank})
    saver.wait()
    fresh = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert load(saver, 1, fresh) == {"rank": 0}
    for name, tensor in whole(state).items():
        assert torch.equal(whole(fresh)[name], tensor), name
    if rank == 1:
        del state["stage1.weight"]
    try:
        load(saver, 1, state)
    except CheckpointError as error:
        return [str(error)]
    return []


def test_ranks_hold_different_parts(tmp_path):
    told = ranks.run(4, save_parts, str(tmp_path))
    assert all("it has stage1.weight, which this run has not" in text for (text,) in told)
    into = {
        **{f"stage{rank}.weight": torch.zeros(10) for rank in range(4)},
        "replicated": torch.zeros(100),
        "replicated_dtensor": torch.zeros(7),
        "uneven": torch.zeros(3),
        "columns": torch.zeros(5, 8),
        "blocks": torch.zeros(5, 8),
        "scalar": torch.zeros((), dtype=torch.int64),
    }
    load(checkpointer(tmp_path), 1, into)
    assert torch.equal(into["uneven"], torch.arange(3.0))
    assert torch.equal(into["blocks"], torch.arange(40.0).view(5, 8))
    assert torch.equal(into["stage3.weight"], torch.full((10,), 3.0))
    # What all hold whole is written once.
    total = sum(file.stat().st_size for file in tmp_path.rglob("*.distcp"))
    assert total < 30_000


def look_for_damage(root: str) -> list[str]:
    notes: list[str] = []
    saver = checkpointer(root, notes)
    tensors = sharded(0.0, 1000)
    saver.load_newest(tensors)
    assert all(tensor.to_local().eq(1 + i).all() for i, tensor in enumerate(tensors.values()))
    return notes


def save_two(root: str) -> None:
    saver = checkpointer(root)
    for step in (1, 2):
        saver.save(step, sharded(float(step), 1000), {})
    saver.wait()


def test_rot_that_one_rank_finds_all_ranks_hear_of(tmp_path):
    ranks.run(2, save_two, str(tmp_path))
    flip_a_byte(tmp_path / "step-00000002" / "__1_0.distcp")
    (note,), none = ranks.run(2, look_for_damage, str(tmp_path))
    assert "__1_0.distcp has crc32" in note
    assert none == []


# --------------------------------------------------------------------------------------------------- the manifest
def test_checksums_of_parts_are_joined():
    data = random.Random(1).randbytes(5000)
    for cut in (0, 1, 7, 256, 4999, 5000):
        first, second = zlib.crc32(data[:cut]), zlib.crc32(data[cut:])
        assert join_checksums(first, second, 5000 - cut) == zlib.crc32(data)


def test_the_manifest_is_one_thing():
    made = Manifest(3, {"a": [1, None]}, {}, 2, 12.5, float("inf"), "again-1")
    data = made.encode()
    assert Manifest.decode(data) == made
    for cut in range(len(data)):
        with pytest.raises(ValueError, match=r"manifest\.json"):
            Manifest.decode(data[:cut])


# ---------------------------------------------------------------------------------------------------- shared folders
def look_at_folders(folders: list[str]) -> str:
    folder = folders[dist.get_rank()]
    held = None
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True)
        held = FolderClaim(Path(folder), "a run", "--checkpoint.path PLACE")
    try:
        check_shared(folder, dist.group.WORLD)
    except ConfigError as error:
        return str(error)
    finally:
        if held is not None:
            held.close()
    return ""


def test_hosts_without_a_shared_folder_are_refused(tmp_path):
    shared, missing = str(tmp_path / "new" / "shared"), tmp_path / "missing"
    assert ranks.run(2, look_at_folders, [shared, shared]) == ["", ""]
    assert os.listdir(shared) == []
    told = ranks.run(3, look_at_folders, [f"{shared}-2", f"{shared}-2", str(missing)])
    assert told[0] == told[1]
    assert "rank 2 on host" in told[2]
    assert f"rank 2 on host {os.uname().nodename} does not see what rank 0 wrote there" in told[0]
    assert "NFS" in told[0]
    assert "s3://" in told[0]
    assert not missing.exists()
    check_shared("s3://bucket/run", None)
