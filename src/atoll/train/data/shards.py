"""Token shards: a prepared data set in files that are memory-mapped.

A data set is a folder::

    tokens-00000.bin …  tokens of the documents, one after the other, little-endian uint16 or uint32
    documents.npy       int64, num_documents + 1: where each document starts; the last is the number of tokens
    meta.json           sizes of all of the above, and where the tokens came from

``meta.json`` is written last: a folder without one is no data set.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError
from atoll.core.paths import fsync_folder, write_atomic

FORMAT_VERSION = 2
FILE_TOKENS = 1 << 29  # tokens a file: 1 GiB of uint16

_META, _DOCUMENTS = "meta.json", "documents.npy"
_PIECE_TOKENS = 1 << 22


class TokenShards:
    """A prepared data set, read by token position.

    Attributes:
        offsets: int64 [num_documents + 1], where each document starts; the last is ``num_tokens``.
        meta: the folders' ``meta.json``, in order.
    """

    def __init__(self, folders: list[Path], meta: list[dict[str, Any]]) -> None:
        """Use ``open``."""
        self.folders = folders
        self.meta = meta
        self.num_tokens: int = sum(each["num_tokens"] for each in meta)
        self.largest_token = max(each["largest_token"] for each in meta)
        self.num_documents: int = sum(each["num_documents"] for each in meta)
        self._tokens: list[NDArray[Any]] = []
        self._starts = [0]  # of each file, over all tokens
        for folder, each in zip(folders, meta, strict=True):
            for file in each["files"]:
                self._tokens.append(np.asarray(np.memmap(folder / file["name"], each["dtype"], "r")))
                self._starts.append(self._starts[-1] + file["num_tokens"])
        self.offsets = self._join_offsets()

    @classmethod
    def open(cls, *folders: str | os.PathLike[str]) -> TokenShards:
        """Map the data set in a folder; several folders are read as one, one after the other.

        Raises:
            ConfigError: a folder is no data set, or a file of it is missing or has another size than it was written
                with.
        """
        paths = [Path(folder) for folder in folders]
        for path in paths:
            wrong = damage(path)
            if wrong:
                raise ConfigError(f"{path} is not a complete data set: {wrong}. Remove the folder; it is made again")
        return cls(paths, [json.loads((path / _META).read_bytes()) for path in paths])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens ``start`` to ``stop`` (left out) as a fresh int64 array, over file borders where needed.

        Raises:
            IndexError: the range is not within the data set.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of a data set of {self.num_tokens}")
        out = np.empty(stop - start, dtype=np.int64)
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        at = start
        while at < stop:
            first, last = self._starts[index : index + 2]
            end = min(stop, last)
            out[at - start : end - start] = self._tokens[index][at - first : end - first]
            at, index = end, index + 1
        return out

    def document(self, index: int) -> NDArray[np.int64]:
        """Tokens of one document."""
        return self.read(int(self.offsets[index]), int(self.offsets[index + 1]))

    @property
    def fingerprint(self) -> str:
        """Digest of the tokens and document borders: equal data sets have equal ones, on every machine."""
        return hashlib.sha256("".join(each["content"] for each in self.meta).encode()).hexdigest()[:32]

    def close(self) -> None:
        """Unmap the files. Nothing can be read afterwards."""
        self._tokens = []
        self.offsets = np.zeros(1, dtype=np.int64)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join_offsets(self) -> NDArray[np.int64]:
        parts = [np.asarray(np.load(folder / _DOCUMENTS, mmap_mode="r")) for folder in self.folders]
        if len(parts) == 1:
            return parts[0]  # as it lies in the file: large data sets have many documents
        firsts = np.cumsum([0, *(each["num_tokens"] for each in self.meta)])
        joined = [part[:-1] + first for part, first in zip(parts, firsts, strict=False)]
        return np.concatenate([*joined, firsts[-1:]])


def damage(folder: Path) -> str | None:
    """What is wrong with the data set in ``folder``: a missing, cut or overlong file. None: nothing is."""
    try:
        meta = json.loads((folder / _META).read_bytes())
        if meta["version"] != FORMAT_VERSION:
            return f"it has version {meta['version']} of the format, and this is {FORMAT_VERSION}"
        item_bytes = np.dtype(meta["dtype"]).itemsize
        expected = {file["name"]: file["num_tokens"] * item_bytes for file in meta["files"]}
        expected[_DOCUMENTS] = meta["documents_bytes"]
    except FileNotFoundError:
        return f"{_META} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{_META} cannot be read"
    for name, size in expected.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found:,} bytes, and was written with {size:,}"
    return None


class ShardWriter:
    """Writes a data set into a folder, document by document; without ``finish`` it is none."""

    def __init__(self, folder: str | os.PathLike[str], *, vocab_size: int, file_tokens: int = FILE_TOKENS) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self.num_tokens = 0
        self.num_documents = 0
        self.largest_token = 0
        self._file_tokens = file_tokens
        self._files: list[dict[str, Any]] = []
        self._open: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._offsets = array("q")  # 8 bytes a document

    def add(self, tokens: NDArray[Any]) -> None:
        """Append one document."""
        self._offsets.append(self.num_tokens)
        self._digest.update(len(tokens).to_bytes(8, "little"))
        self.num_documents += 1
        for start in range(0, len(tokens), _PIECE_TOKENS):  # so that a mapped document is never copied whole
            piece = tokens[start : start + _PIECE_TOKENS].astype(self.dtype)
            self.largest_token = max(self.largest_token, int(piece.max()))
            self._digest.update(piece.tobytes())
            self._append(piece)

    def finish(self, **about: Any) -> None:
        """Make what was added durable; ``about`` goes into ``meta.json``."""
        self._offsets.append(self.num_tokens)
        self._end_file()
        documents = self.folder / _DOCUMENTS
        with documents.open("wb") as file:
            np.save(file, np.frombuffer(self._offsets, dtype="<i8"))
            file.flush()
            os.fsync(file.fileno())
        meta = {
            "version": FORMAT_VERSION,
            "dtype": self.dtype.name,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "largest_token": self.largest_token,
            "files": self._files,
            "documents_bytes": documents.stat().st_size,
            "content": self._digest.hexdigest(),
            **about,
        }
        fsync_folder(self.folder)
        write_atomic(self.folder / _META, json.dumps(meta, indent=1).encode(), mode=0o644)

    def close(self) -> None:
        """Let go of the open file, finished or not."""
        if self._open is not None:
            self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, tokens: NDArray[Any]) -> None:
        while len(tokens):
            if self._open is None:
                self._files.append({"name": f"tokens-{len(self._files):05d}.bin", "num_tokens": 0})
                self._open = (self.folder / self._files[-1]["name"]).open("wb")
            file = self._files[-1]
            part = tokens[: self._file_tokens - file["num_tokens"]]
            self._open.write(part.tobytes())
            file["num_tokens"] += len(part)
            self.num_tokens += len(part)
            tokens = tokens[len(part) :]
            if file["num_tokens"] == self._file_tokens:
                self._end_file()

    def _end_file(self) -> None:
        if self._open is not None:
            with self._open as file:
                file.flush()
                os.fsync(file.fileno())
            self._open = None
