"""How documents lie in files: text, JSONL, Parquet and token files, each read one document at a time."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest
from atoll.train.data.source_files import SourceFile

Tokens = NDArray[Any]
Position = Callable[[int], None]  # told the raw bytes read so far

# The first of 256 int32 in front of the tokens of llm.c and of those that took its files over, and what follows.
BIN_HEADERS = {20240520: "<u2", 20240801: "<u4"}
_HEADER_BYTES = 1024
_CHAT_KEYS = ("messages", "conversations")
_SCAN_TOKENS = 1 << 24
_START_BYTES = 1 << 16
BLOCK_BYTES = 1 << 23  # of text that is held at a time; smaller files are read in one


@dataclass
class LongText:
    """A document too long to be held: its text in blocks of whole lines, read as they are asked for."""

    blocks: Iterator[str]


def read_text(file: SourceFile, document_end: str | None, at: Position) -> Iterator[str | LongText]:
    """The whole file, or the parts between lines that equal ``document_end``.

    A ``LongText`` is to be read through before the next document is asked for.

    Raises:
        ConfigError: it is not UTF-8, or holds zero bytes; the message has the byte's position.
    """
    with file.open() as (content, raw):
        if document_end is None:
            blocks = _blocks_of_lines(content, raw, file, at)
            first = next(blocks, "")
            second = next(blocks, None)
            yield first if second is None else LongText(itertools.chain((first, second), blocks))
            return
        end = document_end.encode(errors="surrogateescape")  # an argument that is no UTF-8
        start, size = 0, 0
        lines: list[bytes] = []
        for line in content:
            if line.rstrip(b"\r\n") == end:
                at(raw.tell())
                yield _decode(b"".join(lines), file, start)
                lines, start, size = [], start + size + len(line), 0
            else:
                lines.append(line)
                size += len(line)
        at(raw.tell())
        yield _decode(b"".join(lines), file, start)


def _blocks_of_lines(content: IO[bytes], raw: IO[bytes], file: SourceFile, at: Position) -> Iterator[str]:
    offset, waiting = 0, b""
    data = content.read(BLOCK_BYTES)
    while data:
        at(raw.tell())
        following = content.read(BLOCK_BYTES)
        end = data.rfind(b"\n") + 1 if following else len(data)
        if end:  # else a line is longer than this: it is held whole
            block = waiting + data[:end]
            yield _decode(block, file, offset)
            offset, waiting = offset + len(block), b""
        waiting += data[end:]
        data = following


def _decode(data: bytes, file: SourceFile, offset: int) -> str:
    if offset == 0 and data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{file.name} is UTF-16: convert it, with iconv -f UTF-16 -t UTF-8")
    zero = data.find(b"\0")
    if zero >= 0:
        raise ConfigError(
            f"{file.name} is not text: a zero byte at byte {offset + zero:,}. Set [data] format if it is data"
        )
    try:
        return data.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        skipped = 3 if offset == 0 and data.startswith(b"\xef\xbb\xbf") else 0
        where = offset + skipped + error.start
        raise ConfigError(
            f"{file.name} is not UTF-8: byte {where:,} is 0x{data[skipped + error.start]:02x} ({error.reason}). "
            "Convert the file, with iconv -f <its encoding> -t UTF-8"
        ) from None


def read_jsonl(file: SourceFile, text_key: str, at: Position) -> Iterator[str]:
    """One document for each JSON object: one on each line, or the elements of one array.

    Raises:
        ConfigError: a line is no JSON object, or has no text under ``text_key``; the message has file and line.
    """
    with file.open() as (content, raw):
        for number, line in enumerate(content, 1):
            row = line.strip().removeprefix(b"\xef\xbb\xbf")
            if not row:
                continue
            where = f"{file.name}:{number}"
            if number == 1 and row.startswith(b"["):
                yield from _json_array(row + content.read(), where, text_key)
                at(raw.tell())
                return
            yield text_of(_json(row, where), text_key, where)
            at(raw.tell())


def _json_array(data: bytes, where: str, text_key: str) -> Iterator[str]:
    rows = _json(data, where)
    for index, row in enumerate(rows):
        yield text_of(row, text_key, f"{where}, element {index}")


def _json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 at byte {error.start} of the line") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply to be read: flatten it, or take the line out") from None


def text_of(row: Any, text_key: str, where: str) -> str:
    """The text of a row; none (null) is an empty one.

    Raises:
        ConfigError: the row is no object, has no such key, or something else than text under it.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected an object like {{{json.dumps(text_key)}: …}}, found {_kind(row)}")
    if text_key not in row:
        raise missing_key(list(row), [key for key in row if isinstance(row[key], str)], text_key, where)
    text = row[text_key]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {text_key!r} holds {_kind(text)}, expected text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: {text_key!r} holds half of a surrogate pair at character {error.start}") from None
    return text


def missing_key(keys: list[Any], text_keys: list[Any], text_key: str, where: str) -> ConfigError:
    """The error for rows that lack ``text_key``: says which keys there are, and which of them hold text."""
    chat = next((key for key in _CHAT_KEYS if key in keys), None)
    holders = "no key holds text" if not text_keys else f"text is under {', '.join(map(repr, text_keys))}"
    if chat is not None:
        return ConfigError(
            f"{where}: these are chat rows ({chat!r}), made for fine-tuning on dialogues, and objective = 'pretrain' "
            f"reads plain text; {holders}"
            + (f": set [data] text_key = {text_keys[0]!r} to train on it" if text_keys else "")
        )
    best = str(text_keys[0]) if text_keys else None
    hint = nearest(text_key, map(str, keys)) or (f": set [data] text_key = {best!r}" if best else "")
    return ConfigError(f"{where}: no key {text_key!r}; the keys are {', '.join(map(repr, keys))}; {holders}{hint}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), f"a number ({value!r})" if isinstance(value, (int, float)) else type(value).__name__)


def read_parquet(file: SourceFile, text_key: str, at: Position) -> Iterator[str]:
    """The column ``text_key``, row by row; no other column is read.

    Raises:
        ConfigError: it is no Parquet file, is cut, or has no such column of text.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{file.name}: Parquet files need pyarrow: pip install pyarrow") from None
    with file.open() as (content, raw):
        seekable = content if content is raw and file.is_seekable else _spooled(content)
        try:
            with seekable, pyarrow.parquet.ParquetFile(seekable, pre_buffer=False) as table:
                schema = table.schema_arrow
                if text_key not in schema.names:
                    texts = [each.name for each in schema if _is_text(each.type)]
                    raise missing_key(list(schema.names), texts, text_key, file.name)
                if schema.names.count(text_key) > 1:
                    raise ConfigError(
                        f"{file.name}: two columns are named {text_key!r}: rename one, and write it again"
                    )
                if not _is_text(schema.field(text_key).type):
                    raise ConfigError(
                        f"{file.name}: column {text_key!r} holds {schema.field(text_key).type}, expected text"
                    )
                done = 0
                for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
                    done += batch.num_rows
                    yield from (text or "" for text in batch.column(0).to_pylist())
                    at(int((file.num_bytes or 0) * done / max(1, table.metadata.num_rows)))
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(f"{file.name} is not a complete Parquet file: {str(error).splitlines()[0]}") from None


def _is_text(kind: Any) -> bool:
    import pyarrow.types as kinds

    inner = kind.value_type if kinds.is_dictionary(kind) else kind
    return bool(kinds.is_string(inner) or kinds.is_large_string(inner) or kinds.is_string_view(inner))


def _spooled(content: IO[bytes]) -> IO[bytes]:
    """A seekable copy of a stream."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    shutil.copyfileobj(content, copy)
    copy.seek(0)
    return copy


def read_bin(
    file: SourceFile, dtype: str, eos_id: int | None, vocab_size: int | None, at: Position
) -> Iterator[Tokens]:
    """Documents of a token file: each ends with ``eos_id``; without one the file is one document.

    Args:
        dtype: of the tokens where the file has no header.
        vocab_size: tokens must be less.

    Raises:
        ConfigError: the size is no whole number of tokens, is not what the header says, or a token is too large.
    """
    tokens = _bin_tokens(file, dtype)
    item_bytes = tokens.dtype.itemsize
    start = 0
    for first in range(0, len(tokens), _SCAN_TOKENS):
        block = tokens[first : first + _SCAN_TOKENS]
        if vocab_size is not None and int(block.max()) >= vocab_size:
            at_token = first + int(np.argmax(block >= vocab_size))
            raise ConfigError(
                f"{file.name}: token {at_token:,} is {int(tokens[at_token])}, and the tokenizer has {vocab_size}: "
                "the file was made with another one, or [data] bin_dtype is wrong"
            )
        if eos_id is not None:
            for end in np.flatnonzero(block == eos_id) + (first + 1):
                yield tokens[start : int(end)]
                start = int(end)
        at(first * item_bytes)
    if start < len(tokens):
        yield tokens[start:]
    at(file.num_bytes or 0)


def _bin_tokens(file: SourceFile, dtype: str) -> Tokens:
    if file.is_local and not file.is_compressed():
        data: Tokens = np.memmap(file.path, dtype=np.uint8, mode="r") if file.num_bytes else np.empty(0, np.uint8)
    else:
        with file.open() as (content, _):
            data = np.frombuffer(content.read(), dtype=np.uint8)
    magic, _, count = _header(data)
    if magic in BIN_HEADERS:
        kind, body = np.dtype(BIN_HEADERS[magic]), data[_HEADER_BYTES:]
        if len(body) != count * kind.itemsize:
            raise ConfigError(
                f"{file.name} is cut or overlong: its header says {count:,} tokens of {kind.itemsize} bytes, "
                f"and {len(body):,} bytes follow"
            )
        return body.view(kind)
    kind = np.dtype(dtype).newbyteorder("<")
    if len(data) % kind.itemsize:
        raise ConfigError(
            f"{file.name} has {len(data):,} bytes, no whole number of {dtype} tokens: cut, or of another bin_dtype"
        )
    return data.view(kind)


def bin_token_bytes(file: SourceFile, dtype: str) -> int:
    """Bytes a token has in a token file, by its header or else by ``dtype``."""
    with file.open() as (content, _):
        magic, _, _ = _header(np.frombuffer(content.read(_HEADER_BYTES), dtype=np.uint8))
    return np.dtype(BIN_HEADERS.get(magic, dtype)).itemsize


def _header(data: Tokens) -> tuple[int, int, int]:
    if len(data) < _HEADER_BYTES:
        return 0, 0, 0
    magic, version, count = (int(each) for each in data[:12].view("<i4"))
    return magic, version, count


def looks_like(content: IO[bytes]) -> str:
    """The format of a file by its first record, however long that is; ``"unknown"`` where it is no text.

    A JSONL file is known by its first line, an object.
    """
    start = content.read(_START_BYTES)
    if start.startswith(b"PAR1"):
        return "parquet"
    if len(start) >= _HEADER_BYTES and int.from_bytes(start[:4], "little") in BIN_HEADERS:
        return "bin"
    if b"\0" in start[:4096] and not start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "unknown"
    first = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not first.startswith(b"{"):
        return "text"
    if b"\n" not in first:
        first += content.readline()
    try:
        return "jsonl" if isinstance(json.loads(first.partition(b"\n")[0]), dict) else "text"
    except ValueError:
        return "text"
    except RecursionError:  # reading it tells the place
        return "jsonl"
