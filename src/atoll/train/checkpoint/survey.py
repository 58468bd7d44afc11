"""Which steps of a store are whole, and what is wrong with the others."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from torch.distributed.checkpoint.metadata import Metadata

from atoll.core.errors import CheckpointError
from atoll.train.checkpoint import manifest as manifests
from atoll.train.checkpoint.files import Files
from atoll.train.checkpoint.manifest import Manifest, Part, hex_of, join_checksums
from atoll.train.checkpoint.store import Store

INDEX = ".metadata"  # DCP's, of tensors


@dataclass(slots=True)
class Survey:
    """The steps there are in ``root``: whole ones by number, and what is wrong with the others."""

    root: str
    whole: dict[int, Manifest] = field(default_factory=dict)
    torn: dict[int, str] = field(default_factory=dict)

    def newest(self) -> int | None:
        """The newest whole step; None where there is no step at all.

        Raises:
            CheckpointError: there are some, and none is whole.
        """
        if self.torn and not self.whole:
            raise CheckpointError(
                f"no checkpoint in {self.root} is whole: {self.damage}; repair one, or use a new folder"
            )
        return max(self.whole, default=None)

    def mark_torn(self, step: int, wrong: str) -> None:
        """A whole step was found to be none by reading it."""
        if self.whole.pop(step, None) is not None:
            self.torn[step] = wrong

    @property
    def damage(self) -> str:
        """What is wrong with the torn ones, in a line."""
        return "; ".join(f"step {step}: {wrong}" for step, wrong in sorted(self.torn.items()))


def survey(store: Store, only: int | None = None) -> Survey:
    """Look at all steps, or at one; raises ``OSError`` where the storage fails."""
    found = Survey(store.root)
    for step, sizes in store.listing().items():
        if only in (None, step):
            try:
                found.whole[step] = _examine(store, step, sizes)
            except ValueError as error:
                found.torn[step] = str(error)
    return found


def _examine(store: Store, step: int, sizes: Mapping[str, int]) -> Manifest:
    if manifests.NAME not in sizes:
        raise ValueError(f"{manifests.NAME} is missing")
    found = Manifest.decode(store.read(step, manifests.NAME))
    if (wrong := manifests.problem(sizes, found)) is not None:
        raise ValueError(wrong)
    return found


def rot(
    store: Store,
    step: int,
    manifest: Manifest,
    names: Iterable[str],
    read: Mapping[str, Collection[Part]] | None = None,
) -> str | None:
    """The first of these files that is not what was written, in a clause; None: all are. Raises ``OSError``.

    Args:
        read: parts that were read already, by name; the rest of the files is read here.
    """
    files = store.files()
    for name in names:
        entry = manifest.files.get(name)
        if entry is None:
            return f"its {manifests.NAME} does not list {name}"
        path, parts = f"{store.path(step)}/{name}", (read or {}).get(name, ())
        checksum = hex_of(_checksum(files, path, entry.num_bytes, parts))
        if checksum != entry.checksum:
            return f"{name} has {manifests.ALGORITHM} {checksum} instead of {entry.checksum}"
    return None


def _checksum(files: Files, path: str, num_bytes: int, parts: Collection[Part]) -> int:
    position = checksum = 0
    for part in sorted({*parts, Part(num_bytes, 0, 0)}):
        if part.offset > position:
            between = files.checksum(path, position, part.offset)
            checksum = join_checksums(checksum, between, part.offset - position)
        checksum = join_checksums(checksum, part.checksum, part.num_bytes)
        position = part.offset + part.num_bytes
    return checksum


def read_index(store: Store, step: int, manifest: Manifest) -> Metadata:
    """DCP's index of tensors: a pickle, so it is compared with the manifest before it is opened.

    Raises:
        CheckpointError: it is not what was written.
        OSError: the storage fails.
    """
    name = manifest.inside(INDEX)
    data = store.read(step, name)
    if (wrong := rot(store, step, manifest, [name], {name: [Part(0, len(data), zlib.crc32(data))]})) is not None:
        raise CheckpointError(f"step {step} in {store.root} is damaged: {wrong}")
    return cast(Metadata, pickle.loads(data))
