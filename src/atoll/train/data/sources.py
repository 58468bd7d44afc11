"""Where documents come from: files of several formats and Hugging Face data sets, as one stream of documents."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from atoll.core.errors import ConfigError
from atoll.core.secrets import redact
from atoll.train.data import formats
from atoll.train.data.hub_rows import PREFIX, HubRows, is_saved_dataset
from atoll.train.data.source_files import SourceFile, find_files, is_url
from atoll.train.recipe.schema import DataSection

Document = str | formats.LongText | NDArray[Any]  # text, or tokens as they are

_BY_EXTENSION = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".bin": "bin",
}
# In a folder these are data where nothing else is, and about the data where something else is (README.md, info.json).
_WEAK_EXTENSIONS = {".txt", ".text", ".md", ".json"}
_NAMES = {"text": "text", "jsonl": "JSONL", "parquet": "Parquet", "bin": "token"}


class Source(Protocol):
    """Documents to read.

    Attributes:
        total: how far it goes; None where that is not known.
        is_tokens: whether the documents are tokens already.
    """

    name: str
    unit: str
    done: int
    total: int | None
    is_tokens: bool

    @property
    def note(self) -> str:
        """One line on what was found."""

    def identity(self) -> list[Any]:
        """JSON that changes when the content does."""

    def token_bytes(self) -> int:
        """Bytes of the widest tokens in files; 0 where none holds tokens."""

    def documents(self, *, eos_id: int | None = None, vocab_size: int | None = None) -> Iterator[Document]:
        """Every document in order. Both arguments are for token files only: where a document ends, and the limit."""


def open_source(section: DataSection, paths: str | Sequence[str]) -> Source:
    """Find what is behind ``paths`` and in which format it is, without reading it.

    Raises:
        ConfigError: nothing is there, or it is no data.
    """
    asked = [paths] if isinstance(paths, str) else list(paths)
    if not asked:
        raise ConfigError("[data] path is an empty list: name at least one file")
    if len(asked) == 1 and _is_hub(section, asked[0]):
        return HubRows(section, asked[0])
    for path in asked:
        if _is_hub(section, path):
            raise ConfigError(
                f"[data] path: {path!r} is a Hugging Face data set and cannot stand in a list of files; "
                "make it a part of a mixture: path = [{path = …, weight = 1}, …]"
            )
    return Files(section, asked)


def _is_hub(section: DataSection, path: str) -> bool:
    if path.startswith(PREFIX):
        return True
    if is_url(path):
        return False
    return section.format == "hf" or (section.format == "auto" and is_saved_dataset(Path(path).expanduser()))


class Files:
    """Documents of files, in the order of the list and sorted by name within a folder or glob."""

    unit: str = "bytes"

    def __init__(self, section: DataSection, asked: Sequence[str]) -> None:
        self._section = section
        self.name = ", ".join(redact(each) for each in asked)
        self._skipped: list[str] = []
        self.files: list[tuple[SourceFile, str]] = []
        seen: set[tuple[str, str]] = set()
        real = functools.cache(os.path.realpath)  # through a link to a folder a file has two names
        for path in asked:
            for file, kind in self._with_format(path, find_files(path, self._skipped)):
                folder, name = os.path.split(file.path)
                place = real(folder) if file.is_local else folder, name
                if place in seen:
                    self._skipped.append(f"{file.name} (found twice)")
                else:
                    seen.add(place)
                    self.files.append((file, kind))
        self._sniffed = [
            (file, kind) for file, kind in self.files if section.format == "auto" and not _by_extension(file)
        ]
        if self._sniffed and len({kind for _, kind in self.files}) > 1:
            raise ConfigError(
                f"[data] path = {self.name!r} has several formats: {_by_kind(self.files)}: set [data] format"
            )
        sizes = [file.num_bytes for file, _ in self.files]
        self.total = None if None in sizes else sum(size or 0 for size in sizes)
        self.done = 0
        self.is_tokens = all(kind == "bin" for _, kind in self.files)

    @property
    def note(self) -> str:
        """``data: 6 text files, 4.0 MB, one document per file``."""
        counts = Counter(kind for _, kind in self.files)
        found = " and ".join(f"{n} {_NAMES[kind]} file{'s' if n > 1 else ''}" for kind, n in counts.items())
        size = "" if self.total is None else f", {self.total / 1e6:,.1f} MB"
        per = {
            "text": "one document per file"
            if self._section.document_end is None
            else f"documents end at lines {self._section.document_end!r}",
            "jsonl": f"one document a line, under {self._section.text_key!r}",
            "parquet": f"one document a row, in column {self._section.text_key!r}",
            "bin": "tokens as they are",
        }
        line = f"data: {found}{size}, {'; '.join(per[kind] for kind in counts)}"
        if self._sniffed:
            line += f"; format detected from the content of: {_by_kind(self._sniffed)}"
        if self._skipped:
            more = "" if len(self._skipped) <= 3 else f" and {len(self._skipped) - 3} more"
            line += f"; left out: {', '.join(self._skipped[:3])}{more}"
        return line

    def identity(self) -> list[Any]:
        """Path, size, time or ETag of every file, and its format."""
        return [(file.path, file.num_bytes, file.stamp, kind) for file, kind in self.files]

    def token_bytes(self) -> int:
        """Bytes of the widest tokens in the files; 0 where none holds tokens."""
        dtype = self._section.bin_dtype
        return max((formats.bin_token_bytes(file, dtype) for file, kind in self.files if kind == "bin"), default=0)

    def documents(self, *, eos_id: int | None = None, vocab_size: int | None = None) -> Iterator[Document]:
        """Every document of every file."""
        section = self._section
        before = 0

        def at(position: int) -> None:
            self.done = before + position

        for file, kind in self.files:
            if kind == "text":
                yield from formats.read_text(file, section.document_end, at)
            elif kind == "jsonl":
                yield from formats.read_jsonl(file, section.text_key, at)
            elif kind == "parquet":
                yield from formats.read_parquet(file, section.text_key, at)
            else:
                yield from formats.read_bin(file, section.bin_dtype, eos_id, vocab_size, at)
            before += file.num_bytes or 0

    def _with_format(self, path: str, files: list[SourceFile]) -> list[tuple[SourceFile, str]]:
        """Each file with its format; of a folder only those that are data."""
        asked = self._section.format
        is_named = len(files) == 1 and (is_url(path) or Path(path).expanduser().is_file())
        if is_named:
            return [(files[0], _sniff(files[0]) if asked == "auto" else asked)]
        if asked != "auto":
            fitting = [file for file in files if _by_extension(file) == asked]
            self._leave_out(files, fitting or files)
            return [(file, asked) for file in fitting or files]
        strong = [file for file in files if file.extensions and file.extensions[0] not in _WEAK_EXTENSIONS]
        strong = [file for file in strong if _by_extension(file) is not None]
        known = [(file, _by_extension(file) or _looks_like(file)) for file in strong or files]
        data = [(file, kind) for file, kind in known if kind != "unknown"]
        if not data:
            raise ConfigError(
                f"[data] path = {redact(path)!r}: none of its {len(files)} files is text or a known format"
            )
        if len({kind for _, kind in data}) > 1:
            raise ConfigError(
                f"[data] path = {redact(path)!r} has several formats: {_by_kind(data)}: set [data] format"
            )
        self._leave_out(files, [file for file, _ in data])
        return data

    def _leave_out(self, files: list[SourceFile], kept: list[SourceFile]) -> None:
        names = {file.path for file in kept}
        self._skipped += [Path(file.name).name for file in files if file.path not in names]


def _by_kind(files: Sequence[tuple[SourceFile, str]]) -> str:
    """``2 JSONL files (a, b) and 1 text file (c)``."""
    names: dict[str, list[str]] = {}
    for file, kind in files:
        names.setdefault(kind, []).append(Path(file.name).name)
    return " and ".join(
        f"{len(each)} {_NAMES[kind]} file{'s' if len(each) > 1 else ''} "
        f"({', '.join(each[:3])}{', ...' if len(each) > 3 else ''})"
        for kind, each in names.items()
    )


def _by_extension(file: SourceFile) -> str | None:
    return _BY_EXTENSION.get(file.extensions[0]) if file.extensions else None


def _looks_like(file: SourceFile) -> str:
    with file.open() as (content, _):
        return formats.looks_like(content)


def _sniff(file: SourceFile) -> str:
    kind = _by_extension(file) or _looks_like(file)
    if kind == "unknown":
        raise ConfigError(
            f"{file.name} is neither text nor a known format (text, JSONL, Parquet, .bin): set [data] format"
        )
    return kind
