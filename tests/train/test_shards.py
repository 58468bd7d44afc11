"""Token shards: what was written comes back, over file borders and folders, and a torn one is known."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.core.errors import ConfigError
from atoll.train.data.shards import ShardWriter, TokenShards, damage


def write(folder: Path, documents: list[list[int]], vocab_size: int = 300, file_tokens: int = 7) -> Path:
    with ShardWriter(folder, vocab_size=vocab_size, file_tokens=file_tokens) as writer:
        for document in documents:
            writer.add(np.array(document, dtype=np.int64))
        writer.finish(source="test")
    return folder


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 299), max_size=20), max_size=8), st.data())
def test_any_range_comes_back(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], data) -> None:
    folder = write(tmp_path_factory.mktemp("shards"), documents)
    flat = [token for document in documents for token in document]
    with TokenShards.open(folder) as shards:
        assert (shards.num_tokens, shards.num_documents) == (len(flat), len(documents))
        start = data.draw(st.integers(0, len(flat)))
        stop = data.draw(st.integers(start, len(flat)))
        assert shards.read(start, stop).tolist() == flat[start:stop]
        assert [shards.document(index).tolist() for index in range(len(documents))] == documents
        assert shards.offsets.tolist() == np.load(folder / "documents.npy").tolist()
        assert shards.read(0, len(flat)).dtype == np.int64


def test_the_files_are_little_endian_and_as_wide_as_the_vocabulary_needs(tmp_path: Path) -> None:
    write(tmp_path / "narrow", [[1, 65535]], vocab_size=65536)
    write(tmp_path / "wide", [[1, 65536]], vocab_size=65537)
    assert (tmp_path / "narrow/tokens-00000.bin").read_bytes() == bytes([1, 0, 255, 255])
    assert (tmp_path / "wide/tokens-00000.bin").read_bytes() == bytes([1, 0, 0, 0, 0, 0, 1, 0])
    meta = json.loads((tmp_path / "wide/meta.json").read_bytes())
    assert (meta["dtype"], meta["num_tokens"], meta["num_documents"]) == ("uint32", 2, 1)


def test_several_folders_read_as_one(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", [[1, 2, 3], [4]]), write(tmp_path / "b", [[5, 6], [7, 8, 9]])
    with TokenShards.open(first, second) as shards:
        assert shards.offsets.tolist() == [0, 3, 4, 6, 9]
        assert shards.read(2, 8).tolist() == [3, 4, 5, 6, 7, 8]


def test_the_fingerprint_is_that_of_tokens_and_borders(tmp_path: Path) -> None:
    with (
        TokenShards.open(write(tmp_path / "a", [[1, 2], [3]])) as one,
        TokenShards.open(write(tmp_path / "b", [[1, 2], [3]], file_tokens=2)) as cut_elsewhere,
        TokenShards.open(write(tmp_path / "c", [[1], [2, 3]])) as other_borders,
    ):
        assert one.fingerprint == cut_elsewhere.fingerprint != other_borders.fingerprint


def test_close_leaves_no_descriptor_and_arrays_live_on(tmp_path: Path) -> None:
    folder = write(tmp_path, [list(range(100))])
    before = len(os.listdir("/proc/self/fd"))
    shards = TokenShards.open(folder)
    tokens = shards.read(0, 100)
    shards.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert tokens.tolist() == list(range(100))


def test_a_range_outside_is_refused(tmp_path: Path) -> None:
    with TokenShards.open(write(tmp_path, [[1, 2, 3]])) as shards:
        for start, stop in ((0, 4), (-1, 2), (2, 1)):
            with pytest.raises(IndexError, match="of a data set of 3"):
                shards.read(start, stop)


@pytest.mark.parametrize("name", ["tokens-00001.bin", "documents.npy", "meta.json"])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_torn_file_is_known(tmp_path: Path, name: str, how: str) -> None:
    folder = write(tmp_path, [list(range(20))])
    assert damage(folder) is None
    if how == "cut":
        os.truncate(folder / name, (folder / name).stat().st_size - 2)
    else:
        (folder / name).unlink()
    assert name in str(damage(folder))
    with pytest.raises(ConfigError, match=f"not a complete data set: {name}"):
        TokenShards.open(folder)


def test_an_unfinished_folder_is_no_data_set(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, vocab_size=10) as writer:
        writer.add(np.array([1, 2, 3]))
    assert damage(tmp_path) == "meta.json is missing"
