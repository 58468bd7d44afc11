"""Where documents come from: files of several formats and Hugging Face data sets, as one stream of documents."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from atoll.core.errors import ConfigError
from atoll.core.secrets import redact
from atoll.train.data import formats
from atoll.train.data.formats import Piece
from atoll.train.data.hub_rows import PREFIX, HubRows, is_saved_dataset
from atoll.train.data.source_files import SourceFile, find_files, is_url
from atoll.train.recipe.schema import DataSection

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


def open_source(section: DataSection, paths: str | Sequence[str]) -> Source:
    """Find what is behind ``paths`` and in which format it is, without reading it.

    Raises:
        ConfigError: nothing is there, or it is no data.
    """
    asked = [paths] if isinstance(paths, str) else list(paths)
    if not asked:
        raise ConfigError("[data] path is an empty list: name at least one file")
    of_hub = [path for path in asked if _is_hub(section, path)]
    if not of_hub:
        return Files(section, asked)
    if len(asked) == 1:
        return HubRows(section, asked[0])
    raise ConfigError(
        f"[data] path: {of_hub[0]!r} is a Hugging Face data set and cannot stand in a list of files; "
        "make it a part of a mixture: path = [{path = …, weight = 1}, …]"
    )


def _is_hub(section: DataSection, path: str) -> bool:
    if path.startswith(PREFIX) or section.format == "hf":
        return True
    return section.format == "auto" and not is_url(path) and is_saved_dataset(Path(path).expanduser())


class Files:
    """Documents of files, in the order of the list and sorted by name within a folder or glob.

    Attributes:
        total: how far ``done`` goes; None where that is not known.
        names: of the files, without secrets.
        is_tokens: whether the documents are tokens already.
    """

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
        if self._sniffed:
            _check_one_format(self.name, self.files)
        sizes = [file.num_bytes for file, _ in self.files]
        self.total = None if None in sizes else sum(size or 0 for size in sizes)
        self.done = 0
        self.names = [file.name for file, _ in self.files]
        self.is_tokens = all(kind == "bin" for _, kind in self.files)

    @property
    def note(self) -> str:
        """``data: 6 text files, 4.0 MB, one document per file``."""
        counts = Counter(kind for _, kind in self.files)
        found = " and ".join(f"{n} {_NAMES[kind]} file{'s' if n > 1 else ''}" for kind, n in counts.items())
        size = "" if self.total is None else f", {self.total / 1e6:,.1f} MB"
        end = self._section.document_end
        per = {
            "text": "one document per file" if end is None else f"documents end at lines {end!r}",
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
        """JSON that changes when the content does: path, size, time or ETag of every file, and its format."""
        return [(file.path, file.num_bytes, file.stamp, kind) for file, kind in self.files]

    def token_bytes(self) -> int:
        """Bytes of the widest tokens in the files; 0 where none holds tokens."""
        sizes = [0]
        for file in (file for file, kind in self.files if kind == "bin"):
            with file.open() as (content, _):
                start = content.read(formats.HEADER_BYTES)
            sizes.append(formats.bin_dtype(start, self._section.bin_dtype).itemsize)
        return max(sizes)

    def pieces(self, *, eos_id: int | None = None, vocab_size: int | None = None) -> Iterator[Piece]:
        """Every document of every file, a long text in several pieces.

        Both arguments are for token files only: where a document ends, and the limit of its tokens.
        """
        self.done = before = 0
        for file, kind in self.files:
            if kind == "bin":
                dtype = self._section.bin_dtype
                for tokens in formats.read_bin(file.read(), file.name, dtype, eos_id, vocab_size):
                    yield tokens, True
                    self.done += tokens.nbytes
            else:
                with file.open(seekable=kind == "parquet") as (content, raw):
                    for piece in self._read(kind, content, file.name):
                        self.done = before + raw.tell()
                        yield piece
            before += file.num_bytes or 0
            self.done = before

    def _read(self, kind: str, content: IO[bytes], name: str) -> Iterator[Piece]:
        if kind == "text":
            return formats.read_text(content, name, self._section.document_end)
        read = formats.read_jsonl if kind == "jsonl" else formats.read_parquet
        return ((text, True) for text in read(content, name, self._section.text_key))

    def _with_format(self, path: str, files: list[SourceFile]) -> list[tuple[SourceFile, str]]:
        """Each file with its format; of a folder only those that are data."""
        asked: str = self._section.format
        if asked != "auto":
            fitting = [file for file in files if _by_extension(file) == asked]
            data = [(file, asked) for file in fitting or files]
        else:
            strong = [file for file in files if _by_extension(file) and file.endings[0] not in _WEAK_EXTENSIONS]
            known = [(file, _by_extension(file) or _looks_like(file)) for file in strong or files]
            data = [(file, kind) for file, kind in known if kind != "unknown"]
            if not data:
                raise ConfigError(
                    f"[data] path = {redact(path)!r}: none of its {len(files)} files is text or a known format (text, "
                    "JSONL, Parquet, .bin): set [data] format"
                )
            _check_one_format(redact(path), data)
        kept = {file.path for file, _ in data}
        self._skipped += [Path(file.name).name for file in files if file.path not in kept]
        return data


def _check_one_format(path: str, files: Sequence[tuple[SourceFile, str]]) -> None:
    if len({kind for _, kind in files}) > 1:
        raise ConfigError(f"[data] path = {path!r} has several formats: {_by_kind(files)}: set [data] format")


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
    return _BY_EXTENSION.get(file.endings[0])


def _looks_like(file: SourceFile) -> str:
    with file.open() as (content, _):
        return formats.looks_like(content)


Source = Files | HubRows
