"""Preparing data: tokens and borders, what is held out, and a cache that many processes share and some die in."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import ConfigError
from atoll.train.corpus import open_corpus
from atoll.train.data import formats
from atoll.train.data import prepare as module
from atoll.train.data import tokenizer as tokenizer_module
from atoll.train.data.prepare import Prepared, is_held_out, prepare
from atoll.train.data.shards import TokenShards
from atoll.train.data.tokenizer import ByteTokenizer, train_bpe
from atoll.train.events import Progress
from atoll.train.recipe.load import load_recipe, require_complete
from atoll.train.recipe.schema import DataSection

AUSTEN = Path(__file__).parents[2] / "examples/austen/data"
EOS = 257


class Told:
    """What was reported."""

    def __init__(self) -> None:
        self.progress: list[Progress] = []
        self.notes: list[str] = []


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def ready(tmp_path: Path, told: Told) -> Iterator[Any]:
    """Calls ``prepare`` with a cache in ``tmp_path`` and closes what it opened."""
    opened: list[Prepared] = []

    def call(path: Any, *, seq_len: int = 4, **keys: Any) -> Prepared:
        keys = {"tokenizer": "bytes", "cache": str(tmp_path / "cache"), **keys}
        section = DataSection(path=path if isinstance(path, list) else str(path), **keys)
        opened.append(prepare(section, seq_len=seq_len, progress=told.progress.append, note=told.notes.append))
        return opened[-1]

    yield call
    for each in opened:
        each.close()


def lines(folder: Path, count: int, name: str = "a.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"text": f"document {index}"}) + "\n" for index in range(count)))
    return folder / name


def texts(shards: TokenShards) -> list[str]:
    return [bytes(shards.document(index)[:-1].tolist()).decode() for index in range(shards.num_documents)]


# ------------------------------------------------------------------------------------------------- what comes out
def test_documents_are_bytes_and_an_end(ready: Any, told: Told, tmp_path: Path) -> None:
    prepared = ready(lines(tmp_path / "d", 3))
    ((shards, weight),) = prepared.train
    assert weight == 1.0
    assert prepared.validation is None
    assert shards.document(1).tolist() == [*b"document 1", EOS]
    assert texts(shards) == [f"document {index}" for index in range(3)]
    assert told.notes[0].startswith("data: 1 JSONL file, 0.0 MB, one document a line")
    assert "33 tokens in 3 documents" in told.notes[-1]
    assert told.progress[-1].done == told.progress[-1].total


def test_empty_documents_are_left_out_and_counted(ready: Any, told: Told, tmp_path: Path) -> None:
    path = lines(tmp_path / "d", 2)
    path.write_text('{"text": ""}\n' + path.read_text() + '{"text": null}\n')
    assert texts(ready(path).train[0][0]) == ["document 0", "document 1"]
    assert any("2 empty documents of" in line for line in told.notes)


@pytest.mark.long
def test_learnt_tokens_give_the_text_back_and_are_those_of_the_library(ready: Any) -> None:
    prepared = ready(AUSTEN, tokenizer="bpe:512")
    ((shards, _),) = prepared.train
    tokenizer = prepared.tokenizer
    for index, path in enumerate(sorted(AUSTEN.glob("*.txt"))[:2]):
        text = path.read_bytes().decode()
        document = shards.document(index).tolist()
        assert document[-1] == tokenizer.eos_id
        assert document[:-1] == tokenizer._engine.encode_batch([text], add_special_tokens=False)[0].ids
        assert tokenizer.decode(document) == text


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:512"])
def test_a_long_text_is_read_in_blocks_and_gives_the_same_tokens(
    ready: Any, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a compressed file, and where the end of each document is held out."""
    folder = tmp_path / "d"
    folder.mkdir()
    text = "\ufeff" + next(AUSTEN.glob("*.txt")).read_bytes().decode()[:120_000] + "\n\nno end"
    (folder / "a.txt").write_text(text, newline="")
    (folder / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    if tokenizer != "bytes":
        train_bpe([text], 512).save(tmp_path / "bpe")
        tokenizer = str(tmp_path / "bpe")
    whole = ready(folder, tokenizer=tokenizer, validation=0.1)
    lengths: list[int] = []
    kind = type(whole.tokenizer)
    real = kind.encode_arrays

    def watched(self: Any, texts: list[str], **options: Any) -> Any:
        lengths.extend(map(len, texts))
        return real(self, texts, **options)

    monkeypatch.setattr(kind, "encode_arrays", watched)
    monkeypatch.setattr(formats, "BLOCK_BYTES", 5_000)
    monkeypatch.setattr(tokenizer_module, "_PIECE_CHARACTERS", 8_000)
    again = ready(folder, tokenizer=tokenizer, validation=0.1, cache=str(tmp_path / "other"))
    assert again.train[0][0].fingerprint == whole.train[0][0].fingerprint
    assert again.validation is not None
    assert whole.validation is not None
    assert again.validation.fingerprint == whole.validation.fingerprint
    assert max(lengths) < 20_000
    assert sum(lengths) == 2 * (len(text) - 1)


def test_a_tokenizer_that_asks_for_it_begins_documents_with_bos(
    tmp_path: Path, ready: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "adds_bos", True)
    assert ready(lines(tmp_path / "d", 2)).train[0][0].document(1).tolist() == [256, *b"document 1", EOS]


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(ready: Any, tmp_path: Path, workers: int) -> None:
    path = lines(tmp_path / "d", 300)
    one = ready(path, tokenizer="bpe:300").train[0][0].fingerprint
    assert ready(path, tokenizer="bpe:300", workers=workers, cache=str(tmp_path / "b")).train[0][0].fingerprint == one


def test_small_batches_change_nothing(ready: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path / "d", 100)
    whole = ready(path).train[0][0].fingerprint
    monkeypatch.setattr(module, "_BATCH_PIECES", 7)
    assert ready(path, cache=str(tmp_path / "b")).train[0][0].fingerprint == whole


def test_a_mixture_keeps_its_parts_and_weights(ready: Any, tmp_path: Path) -> None:
    parts = [
        {"path": str(lines(tmp_path / "d", 30, "a.jsonl")), "weight": 3},
        {"path": [str(lines(tmp_path / "d", 40, "b.jsonl"))], "weight": 1},
    ]
    prepared = ready(parts, validation=0.2)
    assert [(shards.num_documents > 20, weight) for shards, weight in prepared.train] == [(True, 3.0), (True, 1.0)]
    held = prepared.validation.num_documents
    assert held + sum(shards.num_documents for shards, _ in prepared.train) == 70
    expected = [f"document {i}" for n in (30, 40) for i in range(n) if is_held_out(i, 0.2)]
    assert texts(prepared.validation) == expected


def test_token_files_need_no_tokenizer_and_are_checked_against_one(ready: Any, told: Told, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(np.array([1, 2, EOS, 3, 4, EOS, 5, 6], dtype="<u2").tobytes())
    alone = ready(path, tokenizer=None)
    assert alone.tokenizer is None
    assert alone.train[0][0].offsets.tolist() == [0, 8]
    assert any("each token file is one document" in line for line in told.notes)
    assert ready(path).train[0][0].offsets.tolist() == [0, 3, 6, 8]
    wide = np.array([20240801, 7, 5, *[0] * 253, 128_000, 1, 2, 3, 128_001], dtype="<u4")
    (tmp_path / "wide.bin").write_bytes(wide.tobytes())
    assert ready(tmp_path / "wide.bin", tokenizer=None).train[0][0].read(0, 5).tolist() == [128_000, 1, 2, 3, 128_001]
    path.write_bytes(np.array([1, 2, 300, 4, 5, 6], dtype="<u2").tobytes())
    with pytest.raises(ConfigError, match="token 2 is 300, and the tokenizer has 260"):
        ready(path)
    recipe = load_recipe("llama3_debug", ["--model.vocab_size", "300", "--data.path", str(path)]).recipe
    with pytest.raises(ConfigError, match=r"has the token 300, and \[model\] vocab_size = 300"):
        open_corpus(recipe, ready(path, tokenizer=None))


@pytest.mark.parametrize(
    ("data", "is_complete"),
    [
        ({"path": "a.bin"}, True),
        ({"path": ["a.BIN.gz", "b.bin.zst"]}, True),
        ({"path": [{"path": "a.bin"}, {"path": ["b.bin", "c.bin"]}]}, True),
        ({"path": "folder", "format": "bin"}, True),
        ({"path": "folder"}, False),
        ({"path": ["a.bin", "b.txt"]}, False),
    ],
)
def test_training_on_token_files_needs_no_tokenizer(data: dict[str, Any], is_complete: bool) -> None:
    recipe = load_recipe({"data": data, "train": {"steps": 1}}, env={}).recipe
    with contextlib.nullcontext() if is_complete else pytest.raises(ConfigError, match=r"tokenizer is not set.*bin"):
        require_complete(recipe)


# --------------------------------------------------------------------------------------------------- held-out text
def test_whole_documents_are_held_out_by_their_number_alone(ready: Any, tmp_path: Path) -> None:
    prepared = ready(lines(tmp_path / "d", 1000), validation=0.1)
    held, kept = texts(prepared.validation), texts(prepared.train[0][0])
    assert held == [f"document {index}" for index in range(1000) if is_held_out(index, 0.1)]
    assert sorted(held + kept) == sorted(f"document {index}" for index in range(1000))
    assert 70 <= len(held) <= 130
    more = ready(lines(tmp_path / "d", 1100), validation=0.1)
    assert texts(more.validation)[: len(held)] == held


def test_something_is_always_held_out(ready: Any, tmp_path: Path) -> None:
    prepared = ready(lines(tmp_path / "d", module.FEW_DOCUMENTS), validation=0.0001)
    assert prepared.validation.num_documents == 1


def test_of_few_documents_the_ends_are_held_out_and_that_is_said(ready: Any, told: Told) -> None:
    for _ in range(2):  # the second time from the cache
        told.notes.clear()
        prepared = ready(AUSTEN, validation=0.01)
        assert any("the last 1.0% of each is held out" in line for line in told.notes)
    train, held = prepared.train[0][0], prepared.validation
    for index, path in enumerate(sorted(AUSTEN.glob("*.txt"))):
        whole = [*train.document(index).tolist(), *held.document(index).tolist()]
        assert whole == [*path.read_bytes(), EOS]
    assert held.num_tokens == pytest.approx(0.01 * (held.num_tokens + train.num_tokens), rel=1e-3)


def test_validation_from_paths_of_its_own(ready: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "d", 5)
    prepared = ready(path, validation=str(lines(tmp_path / "d", 2, "v.jsonl")))
    assert texts(prepared.validation) == ["document 0", "document 1"]
    assert prepared.train[0][0].num_documents == 5


def test_too_little_held_out_is_a_note(ready: Any, told: Told, tmp_path: Path) -> None:
    prepared = ready(lines(tmp_path / "d", 30), seq_len=100, validation=0.05)
    assert prepared.validation is None
    assert any("no validation" in line and "seq_len = 100" in line for line in told.notes)


# ------------------------------------------------------------------------------------------------------- refusals
def test_data_that_cannot_work_is_told(ready: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "d", 3)
    with pytest.raises(ConfigError, match="has 33 tokens to train on, less than one sequence: seq_len = 33 needs 34"):
        ready(path, seq_len=33)
    with pytest.raises(ConfigError, match=r"\[data\] path is missing"):
        prepare(DataSection(), seq_len=4, progress=lambda _: None, note=lambda _: None)
    with pytest.raises(ConfigError, match=r"\[data\] tokenizer is missing"):
        ready(path, tokenizer=None)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ConfigError, match=r"empty\.jsonl has 0 tokens to train on, less than one sequence"):
        ready(tmp_path / "empty.jsonl")
    (tmp_path / "zero.txt").write_text("")
    with pytest.raises(ConfigError, match="has 0 tokens to train on"):
        ready(tmp_path / "zero.txt")


def test_a_fraction_that_leaves_too_little_to_train_on_is_named(ready: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"3 tokens to train on, as \[data\] validation = 0\.9 holds out the rest"):
        ready(lines(tmp_path / "d", 3), validation=0.9)


def test_validating_on_what_is_trained_on_is_said(ready: Any, told: Told, tmp_path: Path) -> None:
    path = lines(tmp_path / "d", 3)
    ready(path, validation=str(lines(tmp_path / "v", 3)))
    assert "trained on too" not in "".join(told.notes)
    ready(path, validation=str(tmp_path / "d"))
    assert any(f"{path} of [data] validation is trained on too" in each for each in told.notes)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_broken_file_is_told_through_the_threads_and_leaves_nothing(
    ready: Any, tmp_path: Path, tokenizer: str
) -> None:
    path = lines(tmp_path / "d", 5000)
    with path.open("a") as file:
        file.write('{"text": "cut\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:5001 is not valid JSON"):
        ready(path, tokenizer=tokenizer)
    assert [each.suffix for each in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_told(ready: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be used: .*set \[data\] cache"):
        ready(lines(tmp_path / "d", 3), cache=str(tmp_path / "file/cache"))


# ------------------------------------------------------------------------------------------------------ the cache
def built(cache: Path) -> set[tuple[str, int]]:
    """Finished data sets, by name and inode: one that was made again has another."""
    return {(each.name, each.stat().st_ino) for each in cache.iterdir() if each.is_dir()}


def test_the_cache_is_used_until_content_or_options_change(ready: Any, told: Told, tmp_path: Path) -> None:
    path, cache = lines(tmp_path / "d", 50), tmp_path / "cache"
    ready(path)
    first = built(cache)
    told.progress.clear()
    ready(path)
    assert built(cache) == first
    assert told.progress == []
    ready(path, shuffle=False, workers=2)
    assert built(cache) == first
    ready(path, validation=0.1)
    assert len(built(cache)) == 2
    ready(path, tokenizer="bpe:300")
    assert len(built(cache)) == 4  # the tokenizer, and its tokens
    lines(tmp_path / "d", 51)
    assert ready(path).train[0][0].num_documents == 51
    assert len(built(cache)) == 5


def test_the_cache_lies_in_atoll_home_where_the_recipe_says_nothing(
    ready: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    ready(lines(tmp_path / "d", 3), cache=None)
    assert len(built(tmp_path / "home/data")) == 1


def test_a_damaged_cache_is_made_again_and_said(ready: Any, told: Told, tmp_path: Path) -> None:
    path = lines(tmp_path / "d", 50)
    ready(path).close()
    (tokens,) = (tmp_path / "cache").glob("*/train/tokens-00000.bin")
    whole = tokens.read_bytes()
    os.truncate(tokens, len(whole) - 2)
    prepared = ready(path)
    assert tokens.read_bytes() == whole
    assert prepared.train[0][0].num_documents == 50
    assert any("is damaged (tokens-00000.bin has" in line for line in told.notes)


_PREPARE = """
import json, os, resource, sys, time
from pathlib import Path
from atoll.train.data import formats, prepare
from atoll.train.recipe.schema import DataSection
path, cache, stands, most_bytes, tokenizer = sys.argv[1:]
if int(most_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(most_bytes),) * 2)
if stands == "True":  # a long build: stand still after some documents
    reading = formats.read_jsonl
    def slow(*arguments):
        for number, each in enumerate(reading(*arguments)):
            if number == 200:
                Path(cache, "standing").touch()
                while not Path(cache, "go").exists():
                    time.sleep(0.01)
            yield each
    formats.read_jsonl = slow
prepare._BATCH_PIECES = 50
said = []
def report(event):
    if event.phase.startswith("waiting"):
        Path(cache, "waiting.part").write_text(event.phase)
        os.replace(Path(cache, "waiting.part"), Path(cache, "waiting"))
        said.append(event.phase)
prepared = prepare.prepare(
    DataSection(path=path, cache=cache, tokenizer=tokenizer), seq_len=4, progress=report, note=lambda line: None
)
print(json.dumps([prepared.train[0][0].fingerprint, prepared.train[0][0].num_documents, said]))
"""


class Runs:
    """Other processes that prepare the same data; none outlives the test."""

    def __init__(self, path: Path, cache: Path) -> None:
        self.path, self.cache = path, cache
        cache.mkdir(exist_ok=True)
        self.all: list[subprocess.Popen[str]] = []

    def start(self, *, stands: bool = False, most_bytes: int = 0, tokenizer: str = "bytes") -> subprocess.Popen[str]:
        """One that ``stands`` waits half-way for a file ``go``; none that it writes gets larger than ``most_bytes``."""
        about = [self.path, self.cache, stands, most_bytes, tokenizer]
        command = [sys.executable, "-c", _PREPARE, *map(str, about)]
        self.all.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return self.all[-1]

    def result(self, run: subprocess.Popen[str]) -> list[Any]:
        out, err = run.communicate(timeout=60)
        assert run.returncode == 0, err
        result: list[Any] = json.loads(out)
        return result

    def wait_for(self, name: str) -> str:
        deadline = time.monotonic() + 60
        while not (self.cache / name).exists():
            assert time.monotonic() < deadline, f"no {name} within 60 s"
            assert all(each.poll() is None for each in self.all), self.all[0].communicate()
            time.sleep(0.01)
        return (self.cache / name).read_text()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(lines(tmp_path / "d", 500), tmp_path / "cache")
    yield runs
    for each in runs.all:
        each.kill()
        each.communicate()


@pytest.mark.long
def test_several_processes_at_once_make_it_once(runs: Runs, tmp_path: Path) -> None:
    (one, *others) = [runs.result(run) for run in [runs.start(tokenizer="bpe:300") for _ in range(4)]]
    assert [each[:2] for each in others] == [one[:2]] * 3
    assert one[1] == 500
    assert len(built(tmp_path / "cache")) == 2
    assert not list((tmp_path / "cache").glob(".*.tmp"))


def test_the_others_wait_and_say_for_whom(runs: Runs) -> None:
    builder = runs.start(stands=True)
    runs.wait_for("standing")
    waiter = runs.start()
    waiting = runs.wait_for("waiting")
    (runs.cache / "go").touch()
    assert waiting == f"waiting for pid {builder.pid} on host {os.uname().nodename} to prepare the data"
    assert runs.result(waiter)[:2] == runs.result(builder)[:2]


def test_a_builder_that_is_killed_half_way_is_replaced(runs: Runs, tmp_path: Path) -> None:
    builder = runs.start(stands=True)
    runs.wait_for("standing")
    waiter = runs.start()
    runs.wait_for("waiting")
    assert list((tmp_path / "cache").glob(".*.tmp"))
    os.kill(builder.pid, signal.SIGKILL)
    assert runs.result(waiter)[1] == 500
    assert not list((tmp_path / "cache").glob(".*.tmp"))
    assert len(built(tmp_path / "cache")) == 1


def test_ctrl_c_leaves_nothing_half_done(runs: Runs, tmp_path: Path) -> None:
    builder = runs.start(stands=True)
    runs.wait_for("standing")
    builder.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in builder.communicate(timeout=60)[1]
    assert built(tmp_path / "cache") == set()


def test_threads_of_one_process_at_once(ready: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "d", 200)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(ready(path).train[0][0].fingerprint)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(built(tmp_path / "cache")) == 1


@pytest.mark.parametrize("by", ["disk", "limit"])
def test_a_disk_that_fills_is_told_and_cleared(runs: Runs, by: str) -> None:
    """A small file system where this user may mount one, and the limit on a file's size, which everybody has."""
    with runs.path.open("w") as file:
        file.writelines(json.dumps({"text": "x" * 4000}) + "\n" for _ in range(500))
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(runs.cache)]
    mounted = by == "disk" and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        run = runs.start(most_bytes=0 if mounted else 256 << 10)
        err = run.communicate(timeout=60)[1]
        left = sorted(each.name for each in runs.cache.iterdir() if each.suffix != ".lock")
    finally:
        if mounted:
            subprocess.run(["umount", str(runs.cache)], check=True)
    why = "No space left on device" if mounted else "File too large"
    assert f"the data cache {runs.cache} cannot be used: {why}. Make room, or set [data] cache" in err
    assert left == []
