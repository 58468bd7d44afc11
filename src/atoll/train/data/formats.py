"""How documents lie in files: text, JSONL, Parquet and token files, each read one document at a time."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest

Tokens = NDArray[Any]
Piece = tuple[str | Tokens, bool]
"""Text or tokens of a document, and whether it ends there."""

# The first of 256 int32 in front of the tokens of llm.c and of those that took its files over, and what follows.
BIN_HEADERS = {20240520: "<u2", 20240801: "<u4"}
HEADER_BYTES = 1024
BLOCK_BYTES = 1 << 23  # of a text file that are held at a time
_CHAT_KEYS = {"messages", "conversations"}
_SCAN_TOKENS = 1 << 24
_START_BYTES = 1 << 16


def read_text(content: IO[bytes], name: str, document_end: str | None) -> Iterator[Piece]:
    """The whole file, or the documents between lines that equal ``document_end``, in blocks of whole lines.

    Raises:
        ConfigError: it is not UTF-8, or holds zero bytes; the message has the byte's position.
    """
    end = None if document_end is None else document_end.encode(errors="surrogateescape")  # an argument may be no UTF-8
    lines: list[bytes] = []
    start, size = 0, 0
    for line in content:
        is_end = line.rstrip(b"\r\n") == end
        if not is_end:
            lines.append(line)
            size += len(line)
        if is_end or size >= BLOCK_BYTES:
            yield _decode(b"".join(lines), name, start), is_end
            start, lines, size = start + size + (len(line) if is_end else 0), [], 0
    yield _decode(b"".join(lines), name, start), True


def _decode(data: bytes, name: str, start: int) -> str:
    if start == 0 and data.startswith(codecs.BOM_UTF8):
        start = len(codecs.BOM_UTF8)
        data = data[start:]
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8: byte {start + error.start:,} is 0x{data[error.start]:02x} ({error.reason}). "
            "Convert the file, with iconv -f <its encoding> -t UTF-8"
        ) from None
    if "\0" in text:
        where = start + data.index(b"\0")
        raise ConfigError(f"{name} is not text: a zero byte at byte {where:,}. Set [data] format if it is data")
    return text


def read_jsonl(content: IO[bytes], name: str, text_key: str) -> Iterator[str]:
    """One document for each JSON object: one on each line, or the elements of one array.

    Raises:
        ConfigError: a line is no JSON object, or has no text under ``text_key``; the message has file and line.
    """
    for number, line in enumerate(content, 1):
        row = line.strip().removeprefix(codecs.BOM_UTF8)
        if number == 1 and row.startswith(b"["):
            for index, element in enumerate(_json(row + content.read(), name)):
                yield text_of(element, text_key, f"{name}, element {index}")
            return
        if row:
            where = f"{name}:{number}"
            yield text_of(_json(row, where), text_key, where)


def _json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise ConfigError(f"{where} is not valid JSON: {error}") from None


def text_of(row: Any, text_key: str, where: str) -> str:
    """The text of a row; none (null) is an empty one.

    Raises:
        ConfigError: the row is no object, has no such key, or something else than text under it.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected an object like {{{json.dumps(text_key)}: …}}, found {row!s:.40}")
    if text_key not in row:
        raise missing_key(list(row), [key for key in row if isinstance(row[key], str)], text_key, where)
    text = row[text_key]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {text_key!r} holds {text!s:.40}, expected text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: {text_key!r} holds half of a surrogate pair at character {error.start}") from None
    return text


def missing_key(keys: list[str], text_keys: list[str], text_key: str, where: str) -> ConfigError:
    """The error for rows that lack ``text_key``: says which keys there are, and which of them hold text."""
    holders = f"text is under {', '.join(map(repr, text_keys))}" if text_keys else "no key holds text"
    hint = nearest(text_key, keys) or (f": set [data] text_key = {text_keys[0]!r}" if text_keys else "")
    if chat := _CHAT_KEYS.intersection(keys):
        hint += f" (chat rows ({chat.pop()!r}) are for fine-tuning on dialogues; objective = 'pretrain' reads text)"
    return ConfigError(f"{where}: no key {text_key!r}; the keys are {', '.join(map(repr, keys))}; {holders}{hint}")


def read_parquet(content: IO[bytes], name: str, text_key: str) -> Iterator[str]:
    """The column ``text_key``, row by row; no other column is read.

    Raises:
        ConfigError: it is no Parquet file, is cut, or has no such column of text.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f'{name}: Parquet files need pyarrow: pip install "atoll[data]"') from None
    try:
        with pyarrow.parquet.ParquetFile(content, pre_buffer=False) as table:
            columns = {each.name: str(each.type) for each in table.schema_arrow}
            if text_key not in columns:
                texts = [column for column, kind in columns.items() if kind in ("string", "large_string")]
                raise missing_key(list(columns), texts, text_key, name)
            number = 0
            for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    yield text_of({text_key: text}, text_key, f"{name}, row {number}")
                    number += 1
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: {text_key!r} holds {error.object[:40]!r}, which is not UTF-8") from None
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{name} is not a complete Parquet file: {str(error).splitlines()[0]}") from None


def bin_dtype(start: bytes, dtype: str) -> np.dtype[Any]:
    """Type of the tokens in a token file that starts so: what its header says, or else ``dtype``."""
    return np.dtype(BIN_HEADERS.get(_magic(start), dtype)).newbyteorder("<")


def _magic(start: bytes) -> int:
    return int.from_bytes(start[:4], "little") if len(start) >= HEADER_BYTES else 0


def read_bin(
    data: NDArray[np.uint8], name: str, dtype: str, eos_id: int | None, vocab_size: int | None
) -> Iterator[Tokens]:
    """Documents of a token file: each ends with ``eos_id``; without one the file is one document.

    Args:
        dtype: of the tokens where the file has no header.
        vocab_size: tokens must be less.

    Raises:
        ConfigError: the size is no whole number of tokens, is not what the header says, or a token is too large.
    """
    header = data[:HEADER_BYTES].tobytes()
    kind = bin_dtype(header, dtype)
    if _magic(header) in BIN_HEADERS:
        count, data = int.from_bytes(header[8:12], "little"), data[HEADER_BYTES:]
        if len(data) != count * kind.itemsize:
            raise ConfigError(
                f"{name} is cut or overlong: its header says {count:,} tokens of {kind.itemsize} bytes, "
                f"and {len(data):,} bytes follow"
            )
    if len(data) % kind.itemsize:
        raise ConfigError(
            f"{name} has {len(data):,} bytes, no whole number of {kind} tokens: cut, or of another bin_dtype"
        )
    tokens: Tokens = data.view(kind)
    start = 0
    for first in range(0, len(tokens), _SCAN_TOKENS):
        block = tokens[first : first + _SCAN_TOKENS]
        if vocab_size is not None and int(block.max()) >= vocab_size:
            place = first + int(np.argmax(block >= vocab_size))
            raise ConfigError(
                f"{name}: token {place:,} is {int(tokens[place])}, and the tokenizer has {vocab_size}: "
                "the file was made with another one, or [data] bin_dtype is wrong"
            )
        if eos_id is not None:
            for end in np.flatnonzero(block == eos_id) + (first + 1):
                yield tokens[start : int(end)]
                start = int(end)
    if start < len(tokens):
        yield tokens[start:]


def looks_like(content: IO[bytes]) -> str:
    """The format of a file by its first record, however long that is; ``"unknown"`` where it is no text.

    A JSONL file is known by its first line, an object.
    """
    start = content.read(_START_BYTES)
    if start.startswith(b"PAR1"):
        return "parquet"
    if _magic(start) in BIN_HEADERS:
        return "bin"
    if b"\0" in start[:4096]:
        return "unknown"
    first = start.removeprefix(codecs.BOM_UTF8).lstrip()
    if not first.startswith(b"{"):
        return "text"
    if b"\n" not in first:
        first += content.readline()
    try:
        return "jsonl" if isinstance(json.loads(first.partition(b"\n")[0]), dict) else "text"
    except (ValueError, RecursionError):
        return "text"
