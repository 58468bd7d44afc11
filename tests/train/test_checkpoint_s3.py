"""Checkpoints on an object store: a true S3-protocol server, a slow one and one that fails."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import leaks
import ranks
import small
from atoll.core.errors import CheckpointError, ConfigError
from atoll.train.checkpoint import claim
from atoll.train.checkpoint.manifest import Manifest
from atoll.train.checkpoint.store import open_store
from checkpoints import checkpointer, load, plain, sharded, whole_steps
from object_store import ObjectStore

ROOT = "s3://bucket/runs/one"
SHARED = "runs/one/"


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with leaks.keep():
        server = ObjectStore()
    yield server
    server.close()


@pytest.fixture
def store(server: ObjectStore) -> Iterator[ObjectStore]:
    server.clear()
    yield server
    server.gate = lambda method, path: None


def save_and_load(root: str, steps: list[int], **options: Any) -> tuple[int | None, list[int], list[str]]:
    """Save some steps, load the newest in full, and say what there is."""
    notes: list[str] = []
    saver = checkpointer(root, notes, **options)
    for step in steps:
        saver.save(step, sharded(float(step), 1000), {"step": step, "keep": step == 2})
        saver.wait()
    newest = None
    if saver.latest() is not None:
        tensors = sharded(0.0, 1000)
        newest = saver.load_newest(tensors)["step"]
        assert all(tensor.to_local().eq(newest + i).all() for i, tensor in enumerate(tensors.values()))
    saver.close()
    return newest, whole_steps(saver), notes


def test_save_load_and_retention(store):
    for outcome in ranks.run(2, save_and_load, ROOT, [1, 2, 3, 4], keep=2, env=store.environment):
        assert outcome == (4, [2, 3, 4], [])
    files = [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    assert store.names(SHARED) == [f"step-0000000{step}/{name}" for step in (2, 3, 4) for name in files]
    # Another world size reads it.
    assert ranks.run(1, save_and_load, ROOT, [], env=store.environment) == [(4, [2, 3, 4], [])]
    # The manifest came last, and only one went before its files.
    puts = [path for method, path in store.requests if method == "PUT" and "step-00000004" in path]
    assert puts[-1].endswith("manifest.json")


def test_a_step_that_is_saved_again_replaces_the_one_before(store):
    """Also one that a version before has written again, into a folder of its own."""
    ranks.run(2, save_and_load, ROOT, [1], env=store.environment)
    folder = f"{SHARED}step-00000001/"
    found = Manifest.decode(store.get(f"{folder}manifest.json"))
    for name in found.files:
        store.put(f"{folder}again-1/{name}", store.get(f"{folder}{name}"))
        store.delete(f"{folder}{name}")
    files = {f"again-1/{name}": entry for name, entry in found.files.items()}
    store.put(f"{folder}manifest.json", dataclasses.replace(found, files=files, folder="again-1").encode())
    assert ranks.run(1, save_and_load, ROOT, [], env=store.environment) == [(1, [1], [])]
    assert ranks.run(1, save_and_load, ROOT, [1], env=store.environment) == [(1, [1], [])]
    assert [name.removeprefix(folder) for name in store.names(folder)] == [".metadata", "__0_0.distcp", "manifest.json"]


@pytest.mark.long
def test_damage(store):
    ranks.run(1, save_and_load, ROOT, [1, 2, 3], env=store.environment)
    store.delete(f"{SHARED}step-00000003/__0_0.distcp")
    data = bytearray(store.get(f"{SHARED}step-00000002/__0_0.distcp"))
    data[1000] ^= 1
    store.put(f"{SHARED}step-00000002/__0_0.distcp", bytes(data))
    ((newest, steps, notes),) = ranks.run(1, save_and_load, ROOT, [], env=store.environment)
    assert newest == 1
    assert steps == [1, 2], notes  # by their sizes
    assert "step 2: __0_0.distcp has crc32" in notes[0]
    assert "step 3: __0_0.distcp is missing" in notes[0]
    store.delete(f"{SHARED}step-00000001/manifest.json")
    with pytest.raises(
        ranks.RankFailed, match=r"no checkpoint in s3://bucket/runs/one is whole: step 1: manifest.json is"
    ):
        ranks.run(1, save_and_load, ROOT, [], env=store.environment)


@pytest.mark.parametrize("number", [5, pytest.param(2, marks=pytest.mark.long)])
def test_killed_in_a_save(store, number):
    """In its request of that number to write something. What it left is no damage: it never was a checkpoint."""
    ranks.run(1, save_and_load, ROOT, [1], env=store.environment)
    reached, over = threading.Event(), threading.Event()
    puts: list[str] = []

    def gate(method: str, path: str) -> str | None:
        puts.extend([path] if method == "PUT" else [])
        if len(puts) < number:
            return None
        reached.set()
        over.wait(60)
        return "drop"

    store.gate = gate
    gang = ranks.start(2, save_and_load, ROOT, [2], env=store.environment, patient=True)
    assert reached.wait(60)
    for pid in gang.pids:
        os.kill(pid, signal.SIGKILL)
    assert gang.outcomes() == [("died", -9)] * 2
    over.set()
    store.gate = lambda method, path: None
    left = store.names(f"{SHARED}step-00000002/")
    assert ".saving" in left
    assert "manifest.json" not in left

    assert ranks.run(1, sweep_save, ROOT, env=store.environment) == [[(1, [1], []), (2, [1, 2], [])]]
    assert len(store.names(f"{SHARED}step-00000002/")) == 3


def sweep_save(root: str) -> list[Any]:
    return [save_and_load(root, []), save_and_load(root, [2])]


def test_a_first_save_that_was_killed_is_a_fresh_start(store):
    store.put(f"{SHARED}step-00000001/.saving", b"")
    store.put(f"{SHARED}step-00000001/__0_0.distcp", b"half")
    assert ranks.run(1, save_and_load, ROOT, [], env=store.environment) == [(None, [], [])]
    assert store.names() == []


@pytest.mark.long
def test_a_slow_server(store):
    store.gate = lambda method, path: 0.04
    assert ranks.run(1, save_and_load, ROOT, [1], env=store.environment)[0] == (1, [1], [])
    # Not a request for every little read: one of each kind for every file.
    gets = [path for method, path in store.requests if method == "GET" and "list-type" not in path]
    assert len(gets) < 15, gets


@pytest.mark.parametrize("how", ["drop", pytest.param("503", marks=pytest.mark.long)])
def test_a_server_that_fails_for_a_while(store, how):
    refused: dict[tuple[str, str], int] = {}

    def gate(method: str, path: str) -> str | None:
        """The first time that something is listed or written, it fails."""
        if method != "PUT" and "list-type" not in path:
            return None
        refused[method, path] = refused.get((method, path), 0) + 1
        return how if refused[method, path] == 1 else None

    store.gate = gate
    assert ranks.run(1, save_and_load, ROOT, [1], env=store.environment)[0] == (1, [1], [])
    assert len(refused) > 5
    assert all(times > 1 for times in refused.values())


def fail_to_save(root: str) -> tuple[str, str, list[int]]:
    """The error of saving step 2 while writing fails; then what there is."""
    notes: list[str] = []
    saver = checkpointer(root, notes)
    told = ""
    try:
        saver.save(2, sharded(2.0, 1000), {})
        saver.wait()
    except CheckpointError as error:
        told = str(error)
    dist.barrier()
    return told, "".join(notes), whole_steps(saver)


@pytest.mark.parametrize(
    ("how", "cause"),
    [("503", "busy"), ("drop", "Connection was closed before we received a valid response")],
)
@pytest.mark.long
def test_a_server_that_fails_for_good(store, how, cause):
    ranks.run(1, save_and_load, ROOT, [1], env=store.environment)
    store.gate = lambda method, path: how if method == "PUT" and "__1_0" in path else None
    environment = {**store.environment, "AWS_MAX_ATTEMPTS": "2"}
    outcomes = ranks.run(2, fail_to_save, ROOT, env=environment)
    for told, notes, steps in outcomes:
        assert told.startswith("saving step 2 to s3://bucket/runs/one/step-00000002 failed on rank 1: ")
        assert cause in told
        assert told == outcomes[0][0]
        assert notes == ""
        assert steps == [1]
    assert not store.names(f"{SHARED}step-00000002/")
    store.gate = lambda method, path: None
    assert ranks.run(1, save_and_load, ROOT, [2], env=store.environment)[0] == (2, [1, 2], [])


def open_nothing(root: str) -> tuple[str, float]:
    started = time.monotonic()
    try:
        checkpointer(root).latest()
    except (CheckpointError, ConfigError) as error:
        return str(error), time.monotonic() - started
    return "", 0.0


def test_no_server(store):
    environment = {**store.environment, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "2"}
    for told, took_s in ranks.run(2, open_nothing, ROOT, env=environment):
        assert told.startswith("cleaning up s3://bucket/runs/one failed on rank 0: ")
        assert "127.0.0.1:9" in told
        assert took_s < 60


@pytest.mark.long
def test_no_bucket(store):
    (told, _), _ = ranks.run(2, open_nothing, "s3://nosuch/run", env=store.environment)
    assert told.startswith("cleaning up s3://nosuch/run failed on rank 0: FileNotFoundError: ")
    assert "bucket does not exist" in told


def test_a_protocol_that_nobody_speaks():
    with pytest.raises(ConfigError, match="checkpoints at s4://bucket/run: Protocol not known: s4; expected a folder"):
        checkpointer("s4://bucket/run")


def test_any_other_file_system_of_fsspec(tmp_path):
    """One that has true folders."""
    saver = checkpointer(f"local://{tmp_path}/run", keep=2)
    for step in (1, 2, 3, 3):
        saver.save(step, plain(float(step)), {"step": step, "keep": False})
        saver.wait()
    into = plain(0.0)
    assert saver.latest().step == 3
    assert load(saver, 3, into)["step"] == 3
    assert torch.equal(into["weight"], plain(3.0)["weight"])
    assert whole_steps(saver) == [2, 3]


# ---------------------------------------------------------------------------------------------------- one writer
def claimed(root: str, name: str, notes: list[str]) -> Any:
    return open_store(root).claim(name, "--checkpoint.path PLACE", notes.append)


def claim_twice(root: str, beat_s: float) -> dict[str, Any]:
    """One writer at a time; who gives its place back, or dies, makes room; who was passed over saves nothing."""
    claim.BEAT_S = beat_s
    found: dict[str, Any] = {"notes": []}
    first = claimed(root, "run one", found["notes"])
    try:
        claimed(root, "run two", found["notes"])
    except ConfigError as error:
        found["alive"] = str(error)
    first.close()
    second = claimed(root, "run three", found["notes"])
    second._over.set()  # it dies without a word
    second._thread.join()
    third = claimed(root, "run four", found["notes"])
    saver = checkpointer(root, guard=second.check)
    try:
        saver.save(1, plain(), {})
        saver.wait()
    except CheckpointError as error:
        found["passed over"] = str(error)
    found["saved"] = sorted(open_store(root).listing())
    second.close()
    third.check()
    third.close()
    fifth = claimed(root, "run five", found["notes"])
    fifth._over.set()  # it stands still, while others come and go
    fifth._thread.join()
    fifth._remote.rm_file(fifth._path)
    try:
        fifth.check()
    except OSError as error:
        found["gone"] = str(error)
    fifth.close()
    saver.close()
    return found


def check_claims(found: dict[str, Any], root: str) -> None:
    about = r"pid \d+ on \S+, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.search(rf"^'{root}' is in use by {about} \(run one\): .*--checkpoint.path PLACE", found["alive"])
    assert re.search(rf"was taken over by {about} \(run four\)", found["passed over"])
    assert found["saved"] == []
    assert "was taken over by a run that has ended since" in found["gone"]
    assert [re.findall(r"\(run \w+\)", note) for note in found["notes"]] == [["(run one)"], ["(run three)"]]


@pytest.mark.long
def test_one_writer_a_prefix(store):
    (found,) = ranks.run(1, claim_twice, ROOT, 0.2, env=store.environment)
    check_claims(found, ROOT)
    assert [name for name in store.names("runs/one/") if name.startswith(".writer")] == []


@pytest.mark.long
def test_of_writers_at_once_one_stays_where_writes_are_conditional(store):
    outcomes = ranks.run(4, claim_at_once, ROOT, env=store.environment)
    assert sorted(each is None for each in outcomes) == [False, False, False, True], outcomes
    assert all(each is None or "is in use by pid" in each for each in outcomes)


def claim_at_once(root: str) -> str | None:
    dist.barrier()
    refusal, held = None, None
    try:
        held = claimed(root, f"rank {dist.get_rank()}", [])
    except ConfigError as error:
        refusal = str(error)
    dist.barrier()
    if held is not None:
        held.close()
    return refusal


@pytest.mark.long
def test_one_writer_also_where_the_store_knows_no_conditional_writes(store):
    """Such a store answers that it does not implement the header."""
    (found,) = ranks.run(1, without_conditions, ROOT, env=store.environment)
    check_claims(found, ROOT)


def without_conditions(root: str) -> dict[str, Any]:
    import s3fs

    real = s3fs.S3FileSystem.pipe_file

    def refusing(self: Any, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        if mode == "create":
            raise NotImplementedError("IfNoneMatch")
        return real(self, path, value, **options)

    s3fs.S3FileSystem.pipe_file = refusing
    return claim_twice(root, 0.2)


def train_where_another_does(folder: str) -> str:
    held = claimed(ROOT, "run one", []) if dist.get_rank() == 0 else None
    tree = small.tree(Path(folder), checkpoint__path=ROOT, train__steps=1, schedule__warmup=0)
    try:
        small.train(tree)
    except ConfigError as error:
        return str(error)
    finally:
        if held is not None:
            held.close()
    return "it trained"


@pytest.mark.long
def test_a_run_is_refused_where_another_keeps_its_checkpoints(store, tmp_path):
    small.tree(tmp_path)
    for said in ranks.run(2, train_where_another_does, str(tmp_path), env=store.environment, timeout=120):
        assert re.search(rf"'{ROOT}' is in use by pid .* \(run one\)", said)
    assert store.names("runs/one/") == []
