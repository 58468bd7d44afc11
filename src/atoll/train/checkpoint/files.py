"""The files that DCP writes and reads: checksummed while they are written, synced to the disk, on any file system."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization

from atoll.train.checkpoint.manifest import FileEntry, Part, hex_of

_PIECE_BYTES = 1 << 22
_AHEAD_BYTES = 1 << 23  # of an object that is read
_MAX_THREADS, _BYTES_OF_THREAD = 4, 1 << 28


class Relay(contextlib.ContextDecorator):
    """Turns whatever a file system raises into an ``OSError`` that can travel to the other ranks.

    An object store's client raises its own types, and some of those can't be pickled: then the rank that fails could
    not tell the others, which would wait for it.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if isinstance(error, Exception) and type(error).__module__ != "builtins":
            raise OSError(f"{type(error).__name__}: {error}") from error


class Remote:
    """A file system of fsspec whose methods raise ``OSError`` and nothing else that is not Python's own."""

    def __init__(self, remote: Any) -> None:
        self._remote = remote

    def __getattr__(self, name: str) -> Any:
        return Relay()(getattr(self._remote, name))

    def put(self, path: str, data: bytes) -> None:
        """Write an object."""
        try:
            self.pipe_file(path, data)
        except FileNotFoundError:
            # It has true folders. None is made elsewhere: s3fs would look at the bucket, which may be forbidden.
            self.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.pipe_file(path, data)


class _Sink(io.IOBase):
    """A file being written: counts and checksums what goes through, and remembers why a write failed.

    The serialiser above reports "failed writing central directory" where the disk was full; the first error is the
    one to tell.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.num_bytes = 0
        self.checksum = 0
        self.failure: Exception | None = None

    def write(self, data: Any) -> int:
        try:
            self._raw.write(data)
        except Exception as error:
            self.failure = self.failure or error
            raise
        self.checksum = zlib.crc32(data, self.checksum)
        size = memoryview(data).nbytes
        self.num_bytes += size
        return size

    def tell(self) -> int:
        return self.num_bytes


class Files(FileSystem):
    """What DCP's reader and writer see of a folder or an object store.

    Attributes:
        entries: what was written through it, by path.
    """

    def __init__(self, remote: Remote | None) -> None:
        self._remote = remote
        self.entries: dict[str, FileEntry] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        path = os.fspath(path)
        if "w" not in mode:
            with self.open(path) as raw:
                yield raw
            return
        raw = self.open(path, "wb")
        sink = _Sink(raw)
        try:
            # torch.save's own checksum holds the interpreter's lock, which the training step wants meanwhile.
            with serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # made at its import
                yield sink
        except BaseException:
            with contextlib.suppress(Exception):  # what went wrong first is what is told
                if self._remote is not None:
                    raw.discard()  # it must not go on uploading
                    raw.closed = True
                raw.close()
            if sink.failure is not None:
                raise sink.failure from None
            raise
        with raw:
            if self._remote is None:
                raw.flush()
                os.fsync(raw.fileno())
        self.entries[path] = FileEntry(sink.num_bytes, hex_of(sink.checksum))

    def open(self, path: str, mode: str = "rb") -> Any:
        """The file itself."""
        if self._remote is None:
            return open(path, mode)
        if "w" in mode:
            return self._remote.open(path, mode)
        return self._remote.open(path, mode, block_size=_AHEAD_BYTES, cache_type="readahead")

    @Relay()
    def checksum(self, path: str, start: int, stop: int) -> int:
        """The checksum of a range of a file; raises ``OSError`` where it can't be read."""
        checksum = 0
        with self.open(path) as raw:
            raw.seek(start)
            while piece := raw.read(min(_PIECE_BYTES, stop - raw.tell())):
                checksum = zlib.crc32(piece, checksum)
        return checksum

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        old, new = os.fspath(path), os.fspath(new_path)
        if self._remote is None:
            Path(old).rename(new)
        else:
            self._remote.mv(old, new)
        self.entries[new] = self.entries.pop(old)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Nothing: rank 0 has made it, and a rank that doesn't see it must fail rather than make one of its own."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Never: what is written is written into a place that was empty."""
        return False


class Writer(FileSystemWriter):
    """DCP's writer over ``Files``, from host memory: one file a rank, or several threads with one each."""

    def __init__(self, files: Files, folder: str) -> None:
        # No copy ahead: the tensors are on the host, and the loader it would need makes a CUDA context on GPU 0 when
        # it is used in a thread. ``Files`` syncs: DCP syncs every disk of the machine where a file has no descriptor.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.fs = files  # DCP's own writers for other file systems set it the same way
        self.path = folder

    @Relay()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # DCP's own threads lose their errors.
        files = _dealt(plan.items, {item.index: cast(Tensor, planner.resolve_data(item)).nbytes for item in plan.items})
        prefix = plan.storage_data.prefix
        names = [prefix] if len(files) == 1 else [f"{prefix}{number}_" for number in range(len(files))]
        parts = [
            replace(plan, items=items, storage_data=replace(plan.storage_data, prefix=name))
            for items, name in zip(files, names, strict=True)
        ]
        # In torch 2.11 the setting in ``create_stream`` is one for all threads: here it is restored after the last.
        own = serialization.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
        with own, ThreadPoolExecutor(len(parts)) as pool:
            written = list(pool.map(lambda part: super(Writer, self).write_data(part, planner).wait(), parts))
        done: Future[list[WriteResult]] = Future()
        done.set_result(list(chain.from_iterable(written)))
        return done

    finish = Relay()(FileSystemWriter.finish)


def _dealt(items: list[WriteItem], sizes: Mapping[MetadataIndex, int]) -> list[list[WriteItem]]:
    """The items of each thread, about as many bytes each."""
    loads = [0] * num_threads(sum(sizes.values()))
    files: list[list[WriteItem]] = [[] for _ in loads]
    for item in sorted(items, key=lambda item: -sizes[item.index]):
        least = loads.index(min(loads))
        files[least].append(item)
        loads[least] += sizes[item.index]
    return [items for items in files if items] or [[]]


def num_threads(num_bytes: int) -> int:
    """Threads that a rank touches or writes so much with: at most its share of the cores. Each makes about 1 GB/s."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MAX_THREADS, cores, num_bytes // _BYTES_OF_THREAD))


class Reader(FileSystemReader):
    """DCP's reader over ``Files``: every tensor in one read, in the order they lie in, checksummed meanwhile.

    Args:
        index: the checkpoint's, read and compared already.

    Attributes:
        parts: what was read, by file name.
    """

    def __init__(self, files: Files, folder: str, index: Metadata) -> None:
        super().__init__(folder)
        self.fs = files
        self.path = folder
        self.parts: defaultdict[str, list[Part]] = defaultdict(list)
        self._index = index

    read_data = Relay()(FileSystemReader.read_data)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._index

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        plan.items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
        return plan

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        file.seek(sinfo.offset)
        data = file.read(sinfo.length)
        self.parts[sinfo.relative_path].append(Part(sinfo.offset, len(data), zlib.crc32(data)))
        return io.BytesIO(data)
