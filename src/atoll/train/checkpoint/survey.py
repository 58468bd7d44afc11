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
from atoll.train.checkpoint.files import Reader
from atoll.train.checkpoint.manifest import Manifest, Part, hex_of, join_checksums
from atoll.train.checkpoint.store import Store

INDEX = ".metadata"  # DCP's, of tensors


@dataclass(slots=True)
class Survey:
    """The steps there are in ``root``: whole ones by number, and what is wrong with the others."""

    root: str
    whole: dict[int, Manifest] = field(default_factory=dict)
    torn: dict[int, str] = field(default_factory=dict)

    def newest(self) -> Manifest | None:
        """The newest whole step; None where there is no step at all.

        Raises:
            CheckpointError: there are some, and none is whole.
        """
        if self.torn and not self.whole:
            raise CheckpointError(
                f"no checkpoint in {self.root} is whole: {self.damage}; repair one, or use a new folder"
            )
        return self.whole[max(self.whole)] if self.whole else None

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
        if only not in (None, step):
            continue
        try:
            if manifests.NAME not in sizes:
                raise ValueError(f"{manifests.NAME} is missing")
            found.whole[step] = Manifest.decode(store.read(step, manifests.NAME))
            if (wrong := found.whole[step].problem(sizes)) is not None:
                found.mark_torn(step, wrong)
        except ValueError as error:
            found.torn[step] = str(error)
    return found


def rot(
    store: Store, manifest: Manifest, names: Iterable[str], read: Mapping[str, Collection[Part]] | None = None
) -> str | None:
    """The first of these files that is not what was written, in a clause; None: all are. Raises ``OSError``.

    Args:
        read: parts that were read already, by name; the rest of the files is read here.
    """
    files = store.files()
    for name in names:
        entry, path = manifest.files[name], f"{store.path(manifest.step)}/{name}"
        position = checksum = 0
        for part in sorted({*(read or {}).get(name, ()), Part(entry.num_bytes, 0, 0)}):
            if part.offset > position:
                between = files.checksum(path, position, part.offset)
                checksum = join_checksums(checksum, between, part.offset - position)
            checksum = join_checksums(checksum, part.checksum, part.num_bytes)
            position = part.offset + part.num_bytes
        if hex_of(checksum) != entry.checksum:
            return f"{name} has {manifests.ALGORITHM} {hex_of(checksum)} instead of {entry.checksum}"
    return None


def reader_of(store: Store, manifest: Manifest, index: Metadata) -> Reader:
    """DCP's reader of a checkpoint's tensors, whose index was read."""
    return Reader(store.files(), f"{store.path(manifest.step)}/{manifest.folder}".rstrip("/"), index)


def read_index(store: Store, manifest: Manifest) -> Metadata:
    """DCP's index of tensors: a pickle, so it is compared with the manifest before it is opened.

    Raises:
        CheckpointError: it is not what was written.
        OSError: the storage fails.
    """
    name = manifest.inside(INDEX)
    data = store.read(manifest.step, name)
    if (wrong := rot(store, manifest, [name], {name: [Part(0, len(data), zlib.crc32(data))]})) is not None:
        raise CheckpointError(f"step {manifest.step} in {store.root} is damaged: {wrong}")
    return cast(Metadata, pickle.loads(data))
