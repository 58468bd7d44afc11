"""Token shards: a prepared data set in files that are memory-mapped.

A data set is a folder::

    tokens-00000.bin …   tokens of the documents, one after the other, little-endian uint16 or uint32
    trained-00000.bin …  only where some tokens are never trained: one byte a token, 1 if it is (as prompts are not)
    documents.npy        int64, num_documents + 1: where each document starts; the last is the number of tokens
    meta.json            sizes of all of the above, and where the tokens came from

``meta.json`` is written last: a folder without one is no data set.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError
from atoll.core.paths import fsync_folder, write_atomic

FORMAT_VERSION = 2
FILE_TOKENS = 1 << 29  # tokens a file: 1 GiB of uint16

_META, _DOCUMENTS = "meta.json", "documents.npy"


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
        self.num_tokens = sum(each["num_tokens"] for each in meta)
        self.largest_token = max(each["largest_token"] for each in meta)
        self.num_documents = sum(each["num_documents"] for each in meta)
        self._maps: list[mmap.mmap] = []
        self._tokens: list[NDArray[Any]] = []
        self._trained: list[NDArray[Any] | None] = []  # of each file; None: all tokens are
        self._starts = [0]  # of each file, over all tokens
        try:
            for folder, each in zip(folders, meta, strict=True):
                for file in each["files"]:
                    self._tokens.append(self._map(folder / file["name"], np.dtype(each["dtype"]), 0))
                    mask = self._map(folder / _mask_name(file["name"]), np.dtype(bool), 0) if _masked(each) else None
                    self._trained.append(mask)
                    self._starts.append(self._starts[-1] + file["num_tokens"])
            self.offsets = self._join_offsets()
        except BaseException:
            self.close()
            raise

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
        out = np.empty(max(0, stop - start), dtype=np.int64)
        for place, index, part in self._pieces(start, stop):
            out[place] = self._tokens[index][part]
        return out

    def trained(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the tokens ``start`` to ``stop`` (left out) may be trained.

        Raises:
            IndexError: as ``read``.
        """
        out = np.ones(max(0, stop - start), dtype=bool)
        for place, index, part in self._pieces(start, stop):
            mask = self._trained[index]
            if mask is not None:
                out[place] = mask[part]
        return out

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[slice, int, slice]]:
        """The files that a range lies in: its part of the range, the file's number, and its part of the file."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of a data set of {self.num_tokens}")
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        at = start
        while at < stop:
            first, last = self._starts[index : index + 2]
            end = min(stop, last)
            yield slice(at - start, end - start), index, slice(at - first, end - first)
            at, index = end, index + 1

    def document(self, index: int) -> NDArray[np.int64]:
        """Tokens of one document."""
        return self.read(int(self.offsets[index]), int(self.offsets[index + 1]))

    @property
    def fingerprint(self) -> str:
        """Digest of the tokens and document borders: equal data sets have equal ones, on every machine."""
        return hashlib.sha256("".join(each["content"] for each in self.meta).encode()).hexdigest()[:32]

    def close(self) -> None:
        """Unmap the files. Nothing can be read afterwards."""
        self._tokens, self._trained = [], []
        self.offsets = np.zeros(1, dtype=np.int64)
        while self._maps:
            self._maps.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _map(self, path: Path, dtype: np.dtype[Any], skip_bytes: int) -> NDArray[Any]:
        if path.stat().st_size == skip_bytes:  # an empty file cannot be mapped
            return np.empty(0, dtype=dtype)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps.append(mapped)
        return np.frombuffer(mapped, dtype=dtype, offset=skip_bytes)

    def _join_offsets(self) -> NDArray[np.int64]:
        parts: list[NDArray[np.int64]] = []
        first = 0
        for folder, each in zip(self.folders, self.meta, strict=True):
            header = (folder / _DOCUMENTS).stat().st_size - 8 * (each["num_documents"] + 1)
            part = self._map(folder / _DOCUMENTS, np.dtype("<i8"), header)
            if len(self.folders) == 1:
                return part  # of a single folder, as it lies in the file: large data sets have many documents
            parts.append(part[:-1] + first)
            first += each["num_tokens"]
        return np.concatenate([*parts, np.array([first], dtype=np.int64)])


def damage(folder: Path) -> str | None:
    """What is wrong with the data set in ``folder``: a missing, cut or overlong file. None: nothing is."""
    try:
        meta = json.loads((folder / _META).read_bytes())
        if meta["version"] != FORMAT_VERSION:
            return f"it has version {meta['version']} of the format, and this is {FORMAT_VERSION}"
        item_bytes = np.dtype(meta["dtype"]).itemsize
        expected = {file["name"]: file["num_tokens"] * item_bytes for file in meta["files"]}
        if _masked(meta):
            expected |= {_mask_name(file["name"]): file["num_tokens"] for file in meta["files"]}
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


def _masked(meta: dict[str, Any]) -> bool:
    return "num_trained" in meta


def _mask_name(tokens_name: str) -> str:
    return tokens_name.replace("tokens", "trained")


class ShardWriter:
    """Writes a data set into a folder, document by document; without ``finish`` it is none.

    Args:
        masked: some tokens are never trained, as ``add`` is told; of a document the first never is.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        vocab_size: int,
        masked: bool = False,
        file_tokens: int = FILE_TOKENS,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self.num_tokens = 0
        self.num_documents = 0
        self.largest_token = 0
        self._file_tokens = file_tokens
        self._files: list[dict[str, Any]] = []
        self._open: list[BinaryIO] = []  # the file of tokens, and that of the mask
        self._num_trained = 0 if masked else None
        self._digest = hashlib.sha256()
        self._offsets = array("q")  # 8 bytes a document

    def add(self, tokens: NDArray[Any], trained: NDArray[np.bool_] | None = None) -> None:
        """Append one document; ``trained`` says of each token whether it may be, None of all that they may."""
        self._offsets.append(self.num_tokens)
        self._digest.update(len(tokens).to_bytes(8, "little"))
        self.num_documents += 1
        mapped = getattr(tokens, "_mmap", None)  # of a np.memmap, and of what was cut from one
        for start in range(0, len(tokens), 1 << 22):  # in pieces, so that a mapped document is never copied whole
            piece = tokens[start : start + (1 << 22)].astype(self.dtype)
            self.largest_token = max(self.largest_token, int(piece.max()))
            self._digest.update(piece.tobytes())
            mask = None
            if self._num_trained is not None:
                mask = np.ones(len(piece), dtype=bool)
                if trained is not None:
                    mask &= trained[start : start + len(piece)]
                mask[:1] &= start > 0
                self._num_trained += int(mask.sum())
                self._digest.update(mask.tobytes())
            self._append(piece, mask)
            if mapped is not None:  # nor held by this process
                mapped.madvise(mmap.MADV_DONTNEED)

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
            **({} if self._num_trained is None else {"num_trained": self._num_trained}),
            **about,
        }
        fsync_folder(self.folder)
        write_atomic(self.folder / _META, json.dumps(meta, indent=1).encode(), mode=0o644)

    def close(self) -> None:
        """Let go of the open files, finished or not."""
        for file in self._open:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, tokens: NDArray[Any], mask: NDArray[np.bool_] | None) -> None:
        while len(tokens):
            if not self._open:
                name = f"tokens-{len(self._files):05d}.bin"
                names = [name] if mask is None else [name, _mask_name(name)]
                self._open = [(self.folder / each).open("wb") for each in names]
                self._files.append({"name": name, "num_tokens": 0})
            file = self._files[-1]
            room = self._file_tokens - file["num_tokens"]
            for part, to in zip((tokens, mask), self._open, strict=False):
                assert part is not None
                to.write(part[:room].tobytes())
            file["num_tokens"] += len(tokens[:room])
            self.num_tokens += len(tokens[:room])
            tokens, mask = tokens[room:], None if mask is None else mask[room:]
            if file["num_tokens"] == self._file_tokens:
                self._end_file()

    def _end_file(self) -> None:
        while self._open:
            with self._open.pop() as file:
                file.flush()
                os.fsync(file.fileno())
