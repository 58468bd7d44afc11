"""Sources: every format and place that documents come from, and what is said where they are missing or broken."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

import leaks
from atoll.core.errors import ConfigError
from atoll.train.data.sources import open_source
from atoll.train.recipe.schema import DataSection

AUSTEN = Path(__file__).parents[2] / "examples/austen/data"
TEXTS = ["Emma Woodhouse,\nhandsome, clever,", "and rich — with a comfortable home", "“and”"]


def read(path: Any, **keys: Any) -> list[Any]:
    found: list[Any] = []
    parts: list[str] = []
    for content, ends in open_source(DataSection(**keys), path if isinstance(path, list) else str(path)).pieces():
        if not isinstance(content, str):
            found.append(content.tolist())
            continue
        parts.append(content)
        if ends:
            found.append("".join(parts))
            parts = []
    return found


def note(path: Any, **keys: Any) -> str:
    return open_source(DataSection(**keys), path if isinstance(path, list) else str(path)).note


def refused(path: Any, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path, **keys)
    return str(caught.value)


def jsonl(texts: list[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": number, key: text}).encode() + b"\n" for number, text in enumerate(texts))


def parquet(path: Path, texts: list[str | None], key: str = "text", **columns: list[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({key: pyarrow.array(texts, pyarrow.string()), **columns}), path)
    return path


# --------------------------------------------------------------------------------------------------------- text
def test_a_folder_of_texts_is_one_document_a_file_in_the_order_of_names() -> None:
    texts = read(AUSTEN)
    assert texts == [path.read_bytes().decode() for path in sorted(AUSTEN.glob("*.txt"))]
    assert note(AUSTEN) == "data: 6 text files, 4.0 MB, one document per file"


def test_folders_go_deep_and_leave_hidden_files_out(tmp_path: Path) -> None:
    for name in ("b/z.txt", "a.txt", "b/c/d.txt", ".hidden.txt", ".git/config.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.txt", "b/z.txt", "b/c/d.txt"]
    assert read(tmp_path / "**/*.txt") == ["a.txt", "b/c/d.txt", "b/z.txt"]
    assert read([str(tmp_path / "b/z.txt"), str(tmp_path / "a.txt")]) == ["b/z.txt", "a.txt"]
    twice = [str(tmp_path / "a.txt"), str(tmp_path / "*.txt")]
    assert read(twice) == ["a.txt"]
    assert "a.txt (found twice)" in note(twice)


def test_a_line_can_end_documents(tmp_path: Path) -> None:
    path = tmp_path / "fortunes"
    path.write_bytes("one\n%\ntwo %\nthree\r\n%\r\nfünf\n".encode())
    assert read(path, document_end="%") == ["one\n", "two %\nthree\r\n", "fünf\n"]
    assert "documents end at lines '%'" in note(path, document_end="%")


def test_text_is_utf8_or_the_byte_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfAnne")
    assert read(path) == ["Anne"]
    path.write_bytes(b"Fanny \xe9t\xe9")
    assert "a.txt is not UTF-8: byte 6 is 0xe9" in refused(path)
    path.write_bytes(b"\xef\xbb\xbfFanny \xe9t\xe9")
    assert "byte 9 is 0xe9" in refused(path)
    path.write_bytes(b"one\n%\ntwo\n%\nFanny \xe9t\xe9")
    assert "byte 18 is 0xe9" in refused(path, document_end="%")
    path.write_bytes("Anne".encode("utf-16"))
    assert "a.txt is not UTF-8: byte 0 is 0xff" in refused(path)
    path.write_bytes(b"Anne\0Elliot")
    assert "a zero byte at byte 4" in refused(path)


# ------------------------------------------------------------------------------------------------- JSON, Parquet
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "no_extension"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" * (name == "a.jsonl") + jsonl(TEXTS) + b'\n{"text": null}\n')
    assert read(path) == [*TEXTS, ""]
    assert "1 JSONL file" in note(path)


def test_one_json_array(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": text} for text in TEXTS], indent=2))
    assert read(path) == TEXTS


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "cut', "a.jsonl:2 is not valid JSON"),
        ('["text"]', "a.jsonl:2: expected an object"),
        ('{"text": 7}', "a.jsonl:2: 'text' holds 7, expected text"),
        ('{"text": "\\ud800"}', "a.jsonl:2: 'text' holds half of a surrogate pair at character 0"),
        ('{"Text": "a", "id": 1}', "a.jsonl:2: no key 'text'; the keys are 'Text', 'id'; text is under 'Text'"),
        ('{"body": "a", "id": 1}', "set [data] text_key = 'body'"),
        ('{"id": 1}', "no key holds text"),
        ('{"messages": [], "source": "a"}', "chat rows ('messages')"),
        ('{"conversations": []}', "chat rows ('conversations')"),
    ],
)
def test_json_lines_that_cannot_be_read(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    assert said in refused(path)


def test_chat_rows_are_read_where_they_have_the_text_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [], "text": "plain"}\n')
    assert read(path) == ["plain"]


def test_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [*TEXTS, None], key="content", number=[1, 2, 3, 4])
    assert read(path, text_key="content") == [*TEXTS, ""]
    assert "no key 'text'; the keys are 'content', 'number'; text is under 'content'" in refused(path)
    assert "row 0: 'number' holds 1, expected text" in refused(path, text_key="number")
    (tmp_path / "other").write_bytes(path.read_bytes())
    assert read(tmp_path / "other", text_key="content") == [*TEXTS, ""]
    (tmp_path / "cut.parquet").write_bytes(path.read_bytes()[:-20])
    assert "cut.parquet is not a complete Parquet file" in refused(tmp_path / "cut.parquet")


# -------------------------------------------------------------------------------------------------- compression
@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
@pytest.mark.parametrize("format", ["text", "jsonl", "parquet", "bin"])
def test_every_format_compressed(tmp_path: Path, compress: Any, format: str) -> None:
    plain = {
        "text": TEXTS[0].encode(),
        "jsonl": jsonl(TEXTS),
        "parquet": parquet(tmp_path / "a.parquet", TEXTS).read_bytes(),
        "bin": np.array([1, 2, 3], dtype="<u2").tobytes(),
    }[format]
    ending = {"text": ".txt", "jsonl": ".jsonl", "parquet": ".parquet", "bin": ".bin"}[format]
    suffix = ".gz" if compress is gzip.compress else ".zst"
    path = tmp_path / f"data{ending}{suffix}"
    half = len(plain) // 2
    # Two members, one after the other, as `cat a.gz b.gz` makes them.
    path.write_bytes(compress(plain[:half]) + compress(plain[half:]))
    assert read(path) == {"text": TEXTS[:1], "bin": [[1, 2, 3]]}.get(format, TEXTS)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_broken_compression_is_told(tmp_path: Path, suffix: str) -> None:
    whole = (gzip.compress if suffix == ".gz" else zstandard.compress)(jsonl(TEXTS * 2000))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(whole[: len(whole) // 2])
    assert f"a.jsonl{suffix} cannot be read" in refused(path)
    (tmp_path / f"a.txt{suffix}").write_bytes(whole[:-4])
    assert f"a.txt{suffix} cannot be read" in refused(tmp_path / f"a.txt{suffix}")
    path.write_bytes(whole[:40] + bytes(byte ^ 0x5A for byte in whole[40:90]) + whole[90:])
    assert f"a.jsonl{suffix}" in refused(path)
    path.write_bytes(jsonl(TEXTS))
    assert f"a.jsonl{suffix} cannot be read" in refused(path)


# ------------------------------------------------------------------------------------------------------- tokens
def header(magic: int, count: int, version: int = 1) -> bytes:
    return np.array([magic, version, count] + [0] * 253, dtype="<i4").tobytes()


def read_bin(path: Path, eos_id: int | None = None, vocab_size: int | None = None, **keys: Any) -> list[list[int]]:
    found = open_source(DataSection(**keys), str(path)).pieces(eos_id=eos_id, vocab_size=vocab_size)
    return [np.asarray(each).tolist() for each, _ in found]


def test_token_files_with_and_without_header(tmp_path: Path) -> None:
    tokens = [5, 6, 9, 7, 9, 8]
    path = tmp_path / "a.bin"
    path.write_bytes(np.array(tokens, dtype="<u2").tobytes())
    assert read_bin(path) == [tokens]
    assert read_bin(path, eos_id=9) == [[5, 6, 9], [7, 9], [8]]
    assert read_bin(path, eos_id=9, vocab_size=10) == [[5, 6, 9], [7, 9], [8]]
    path.write_bytes(np.array([70_000, 9], dtype="<u4").tobytes())
    assert read_bin(path, bin_dtype="uint32") == [[70_000, 9]]
    path.write_bytes(header(20240520, 6) + np.array(tokens, dtype="<u2").tobytes())
    assert read_bin(path, eos_id=9) == [[5, 6, 9], [7, 9], [8]]
    path.write_bytes(header(20240801, 2, version=7) + np.array([128_000, 3], dtype="<u4").tobytes())
    assert read_bin(path) == [[128_000, 3]]
    (tmp_path / "no_extension").write_bytes(path.read_bytes())
    assert read_bin(tmp_path / "no_extension") == [[128_000, 3]]


def test_tokens_that_look_like_a_compressed_file_are_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x1f\x8b\x08\x00")
    assert read_bin(tmp_path / "a.bin") == [[0x8B1F, 8]]


def test_token_files_that_cannot_be_right(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(header(20240520, 6) + b"\1\0" * 5)
    with pytest.raises(ConfigError, match="its header says 6 tokens of 2 bytes, and 10 bytes follow"):
        read_bin(path)
    path.write_bytes(b"\1\0\2")
    with pytest.raises(ConfigError, match="3 bytes, no whole number of uint16"):
        read_bin(path)
    path.write_bytes(b"\1\0\2\0\7\0")
    with pytest.raises(ConfigError, match="token 2 is 7, and the tokenizer has 7"):
        read_bin(path, vocab_size=7)


# ---------------------------------------------------------------------------------------- which files, which format
def test_a_readme_beside_data_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    assert read(tmp_path) == TEXTS
    assert "left out: README.md, dataset_infos.json" in note(tmp_path)
    assert read([str(tmp_path / "README.md"), str(tmp_path / "a.jsonl")]) == ["about", *TEXTS]
    assert read(tmp_path, format="text") == ["about"]


def test_parquet_of_another_encoding(tmp_path: Path) -> None:
    latin = pyarrow.array(["caf\u00e9".encode("latin-1")], pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 1, latin.buffers())  # no writer of others checks either
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    assert refused(tmp_path / "a.parquet").endswith(r"a.parquet: 'text' holds b'caf\xe9', which is not UTF-8")


def test_a_folder_of_two_formats_asks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    parquet(tmp_path / "b.parquet", ["column"])
    assert "several formats: 1 JSONL file (a.jsonl) and 1 Parquet file" in refused(tmp_path)
    assert read(tmp_path, format="parquet") == ["column"]


def test_pipes_devices_and_broken_links_are_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "c.txt").symlink_to("gone.txt")
    wrong = "a pipe, a device or a broken link"
    for path in (tmp_path, tmp_path / "*.txt"):
        assert read(path) == ["a"]
        assert f"left out: b.txt ({wrong}), c.txt ({wrong})" in note(path)
    for each in (tmp_path / "b.txt", tmp_path / "c.txt", Path("/dev/null")):
        assert refused(each).endswith(f"{str(each)!r} is {wrong}: expected a file")
    (tmp_path / "a.txt").unlink()
    assert f"the folder holds no files but b.txt ({wrong}), c.txt ({wrong})" in refused(tmp_path)


def test_links_are_followed_and_nothing_is_read_twice_through_one(tmp_path: Path) -> None:
    (tmp_path / "d/deep").mkdir(parents=True)
    (tmp_path / "d/a.txt").write_text("a")
    (tmp_path / "d/deep/b.txt").write_text("b")
    (tmp_path / "d/deep/up").symlink_to("..")
    assert read(tmp_path / "d") == ["a", "b"]
    assert read(tmp_path / "d/**/*.txt") == ["a", "b"]
    (tmp_path / "link").symlink_to("d")
    (tmp_path / "link.txt").symlink_to("d/a.txt")
    assert read(tmp_path / "link") == ["a", "b"]
    assert read([str(tmp_path / "d"), str(tmp_path / "link")]) == ["a", "b"]
    assert read(tmp_path / "link.txt") == ["a"]


def test_names_are_taken_as_they_are(tmp_path: Path) -> None:
    for name in ("two words.jsonl", "part[1].jsonl", "which?.jsonl", "Großes Fest.JSONL"):
        (tmp_path / name).write_bytes(b"[" * (name == "which?.jsonl") + b'{"text": "a"}' + b"]" * ("?" in name))
        assert read(tmp_path / name) == ["a"]
        assert "1 JSONL file," in note(tmp_path / name)


def test_a_folder_that_may_not_be_read_is_said() -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # the folders of pytest are closed to others
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "a.txt").write_text("a")
        (folder / "closed").mkdir()
        (folder / "closed/b.txt").write_text("b")
        assert read(folder) == ["a", "b"]  # and all that it imports is there: another user may not find it
        (folder / "closed").chmod(0)
        try:
            if user == 0:  # who may read everything
                os.seteuid(65534)
            assert read(folder) == ["a"]
            assert "left out: closed (Permission denied)" in note(folder)
            assert "closed may not be read: check its permissions" in refused(folder / "closed")
            assert "holds no files but closed (Permission denied)" in refused(folder / "closed", format="text")
        finally:
            os.seteuid(user)
            (folder / "closed").chmod(0o755)


def test_rows_that_are_too_deep(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": ' + "[" * 100_000)
    assert "a.jsonl:2 is not valid JSON: maximum recursion depth" in refused(tmp_path / "a.jsonl")
    (tmp_path / "c").write_text("[" * 100_000)
    assert read(tmp_path / "c") == ["[" * 100_000]


@pytest.mark.parametrize("path", ["hf://", "hf:///", "hf://datasets/", "hf://@main"])
def test_the_hub_without_a_name(path: str) -> None:
    assert f"{path!r} is not a data set: expected hf://owner/name" in refused(path)


def test_a_document_may_end_at_a_line_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\ntwo")
    assert read(tmp_path / "a.txt", document_end=os.fsdecode(b"\xff")) == ["one\n", "two"]


def test_what_is_missing_or_no_data_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "emma.txt").write_text("Emma")
    (tmp_path / "picture").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "nothing").mkdir()
    assert f"did you mean '{tmp_path / 'emma.txt'}'" in refused(tmp_path / "ema.txt")
    assert "does not exist" in refused(tmp_path / "*.csv") or "nothing matches" in refused(tmp_path / "*.csv")
    assert "the folder holds no files" in refused(tmp_path / "nothing")
    assert "none of its 1 files is text or a known format" in refused(tmp_path / "picture")
    assert "empty list" in refused([])
    monkeypatch.chdir(tmp_path)
    assert f"looked for in {tmp_path}" in refused("ema.txt")
    assert read("emma.txt") == ["Emma"]
    assert "nosuch" in refused("nosuch://place/a.txt")


# ----------------------------------------------------------------------------------------------------- elsewhere
@pytest.fixture(scope="session")
def fsspec_in_process() -> None:
    """fsspec runs all of its clients in one thread that it keeps for the life of the process."""
    with leaks.keep():
        import fsspec.asyn

        fsspec.asyn.get_loop()


@pytest.fixture
def web(tmp_path: Path, fsspec_in_process: None) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    folder = tmp_path / "www"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        _close_sessions()
        server.shutdown()
        server.server_close()
        thread.join()


def _close_sessions() -> None:
    """fsspec keeps a connection open for each file system it has made; these belong to one test's server."""
    import asyncio

    import fsspec.asyn
    from fsspec.implementations.http import HTTPFileSystem

    for system in list(HTTPFileSystem._cache.values()):
        if getattr(system, "_session", None) is not None:
            asyncio.run_coroutine_threadsafe(system._session.close(), fsspec.asyn.get_loop()).result(10)
    HTTPFileSystem.clear_instance_cache()


def test_http(web: str, tmp_path: Path) -> None:
    (tmp_path / "www/a.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS)))
    parquet(tmp_path / "www/b.parquet", TEXTS)
    assert read(f"{web}/a.jsonl.gz") == TEXTS
    assert read(f"{web}/b.parquet") == TEXTS
    assert "does not exist" in refused(f"{web}/missing.txt")
    before = open_source(DataSection(), f"{web}/a.jsonl.gz").identity()
    assert open_source(DataSection(), f"{web}/a.jsonl.gz").identity() == before


class _Plain(BaseHTTPRequestHandler):
    """Sends whole files only, and tells neither time nor ETag."""

    content: ClassVar[dict[str, bytes]] = {}

    def do_HEAD(self) -> None:
        self._head()

    def do_GET(self) -> None:
        with contextlib.suppress(ConnectionError):  # the reader has hung up, as it wanted only a part
            self.wfile.write(self._head())

    def _head(self) -> bytes:
        data = self.content[self.path]
        self.send_response(200)
        if self.path.startswith("/honest"):
            self.send_header("Accept-Ranges", "none")
        if not self.path.startswith("/sizeless"):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        return data

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""


def test_a_server_that_sends_no_parts(fsspec_in_process: None, tmp_path: Path) -> None:
    large = [f"{number}" * 1000 for number in range(4000)]  # more than is asked for at a time
    _Plain.content = {"/a.jsonl": jsonl(large), "/sizeless.jsonl": jsonl(TEXTS)}
    _Plain.content |= {"/honest.jsonl": jsonl(TEXTS), "/honest.txt": b"1"}
    _Plain.content["/b.parquet"] = parquet(tmp_path / "b.parquet", TEXTS).read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Plain)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    web = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        assert read(f"{web}/a.jsonl") == large
        assert read(f"{web}/b.parquet") == TEXTS
        assert read(f"{web}/sizeless.jsonl") == TEXTS
        assert read(f"{web}/honest.jsonl") == TEXTS
        assert read(f"{web}/honest.txt") == ["1"]
        (first,) = open_source(DataSection(), f"{web}/a.jsonl").identity()
        assert first[2].startswith("sha256 ")
    finally:
        _close_sessions()
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_that_is_not_there(fsspec_in_process: None) -> None:
    try:
        assert "http://127.0.0.1:9/a.txt" in refused("http://127.0.0.1:9/a.txt")
    finally:
        _close_sessions()


def test_memory(fsspec_in_process: None) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe({"/books/a.txt": b"one", "/books/deep/b.txt": b"two"})
    try:
        assert read("memory://books") == ["one", "two"]
        assert read("memory://books/*.txt") == ["one"]
        assert read("memory://books/a.txt") == ["one"]
        assert "does not exist" in refused("memory://books/c.txt")
        first = open_source(DataSection(), "memory://books/a.txt").identity()
        memory.pipe("/books/a.txt", b"new")
        assert open_source(DataSection(), "memory://books/a.txt").identity() != first
    finally:
        memory.rm("/books", recursive=True)


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A server that speaks the S3 protocol, in this process."""
    with leaks.keep():
        import fsspec
        from moto.server import ThreadedMotoServer

        patch = pytest.MonkeyPatch()
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
        system = fsspec.filesystem("s3")
        system.mkdir("novels")
    yield system
    system.clear_instance_cache()
    server.stop()
    patch.undo()


def test_s3(s3: Any, tmp_path: Path) -> None:
    s3.pipe("novels/part/a.txt", TEXTS[0].encode())
    s3.pipe("novels/part/b.txt.gz", gzip.compress(TEXTS[1].encode()))
    s3.pipe("novels/c.parquet", parquet(tmp_path / "c.parquet", TEXTS).read_bytes())
    assert read("s3://novels/part") == TEXTS[:2]
    assert read("s3://novels/part/*.txt") == TEXTS[:1]
    assert read("s3://novels/c.parquet") == TEXTS
    assert "does not exist" in refused("s3://novels/missing.txt")
    assert "s3://nobucket" in refused("s3://nobucket/a.txt")
    source = open_source(DataSection(), "s3://novels/part")
    assert source.note == f"data: 2 text files, {source.total / 1e6:,.1f} MB, one document per file"
    first = source.identity()
    s3.pipe("novels/part/a.txt", b"other text")
    assert open_source(DataSection(), "s3://novels/part").identity() != first


# -------------------------------------------------------------------------------------------------- Hugging Face
@pytest.mark.parametrize("dictionary", [True, False])
def test_a_data_set_saved_to_disk(tmp_path: Path, dictionary: bool, capfd: pytest.CaptureFixture[str]) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": TEXTS, "number": [1, 2, 3], "title": TEXTS})
    folder = tmp_path / "saved"
    (datasets.DatasetDict(train=rows, test=rows.select([1])) if dictionary else rows).save_to_disk(folder)
    assert read(folder) == TEXTS
    assert "Hugging Face data set" in note(folder)
    assert "text is under 'text', 'title'" in refused(folder, text_key="texts")
    assert "'number' holds 1, expected text" in refused(folder, text_key="number")
    if dictionary:
        assert read(folder, split="test") == [TEXTS[1]]
        assert "has no split 'tset': did you mean 'test'?" in refused(folder, split="tset")


@pytest.mark.parametrize("streaming", [True, False])
def test_a_data_set_by_its_loader(tmp_path: Path, streaming: bool, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.jsonl").write_bytes(jsonl(TEXTS))
    (tmp_path / "set/test.jsonl").write_bytes(jsonl(TEXTS[:1]))
    keys = {"format": "hf", "streaming": streaming}
    assert read(tmp_path / "set", **keys) == TEXTS
    assert read(tmp_path / "set", split="test", **keys) == TEXTS[:1]
    assert "no key 'body'" in refused(tmp_path / "set", text_key="body", **keys)
    assert "nosuch" in refused(tmp_path / "set", split="nosuch", **keys)


def test_a_data_set_that_is_not_on_this_machine_is_told_offline() -> None:
    assert "hf://nobody/nothing" in refused("hf://nobody/nothing")
    assert "cannot stand in a list of files" in refused(["hf://nobody/nothing", str(AUSTEN)])


def test_a_file_without_an_ending_is_known_by_its_whole_first_record(tmp_path: Path) -> None:
    """One longer than what is looked at first; its neighbours are shorter."""
    rows = ["long " * 40_000, "short"]
    for name, row in zip(("part-0", "part-1"), rows, strict=True):
        (tmp_path / name).write_text(json.dumps({"text": row}) + "\n")
    assert read(tmp_path) == rows
    assert "format detected from the content of: 2 JSONL files (part-0, part-1)" in note(tmp_path)
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "part-1").read_bytes())
    assert read(tmp_path / "marked") == ["short"]


def test_formats_are_never_mixed_without_being_told(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_text(json.dumps({"text": "a"}) + "\n")
    (tmp_path / "part-1").write_text("no JSON")
    message = "several formats: 1 JSONL file (part-0) and 1 text file (part-1): set [data] format"
    assert message in refused(tmp_path)
    assert message in refused([str(tmp_path / "part-0"), str(tmp_path / "part-1")])
    assert message in refused(tmp_path / "part-*")
    named = tmp_path / "a.txt"
    named.write_text("named")
    assert "several formats" in refused([str(named), str(tmp_path / "part-0")])
    (tmp_path / "weak").mkdir()
    (tmp_path / "weak" / "README.md").write_text("about")
    (tmp_path / "weak" / "rows.json").write_text(json.dumps({"text": "a"}) + "\n")
    assert "several formats: 1 text file (README.md) and 1 JSONL file (rows.json)" in refused(tmp_path / "weak")
