"""What images left under ``ATOLL_HOME/images``: folders of packages and environments, and when each was last used.

Whoever runs with one holds a lock on its marker, so that none is removed under a rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from atoll.core.paths import atoll_home
from atoll.worker.folder_locks import IMAGE_MARKER

KEEP_S = 30 * 86400.0
KEEP_BYTES = 64 << 30
_STARTING_S = 600.0  # one that was asked for just now may be about to be used


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """One folder; ``packages`` are ``name==version``, none for a bare environment of another Python."""

    folder: Path
    python: str
    packages: tuple[str, ...]
    size_bytes: int
    used_s: float

    @property
    def in_use(self) -> bool:
        """Does a rank run with it, or is one about to?"""
        if time.time() - self.used_s < _STARTING_S:
            return True
        try:
            with open(self.folder / IMAGE_MARKER, "rb+") as marker:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:  # removed meanwhile
            return False
        except BlockingIOError:
            return True
        return False


def built_images() -> list[BuiltImage]:
    """Every image that was built on this machine, the one used last first."""
    found = []
    for marker in (atoll_home() / "images").glob(f"*/{IMAGE_MARKER}"):
        with contextlib.suppress(FileNotFoundError):
            about, folder = json.loads(marker.read_bytes()), marker.parent
            size = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
            found.append(BuiltImage(folder, about["version"], tuple(about["packages"]), size, marker.stat().st_mtime))
    return sorted(found, key=lambda image: image.used_s, reverse=True)


def prune_images(older_s: float = KEEP_S, keep_bytes: int = KEEP_BYTES) -> list[BuiltImage]:
    """Remove images that nobody has used for so long, and the longest unused ones beyond a size; those in use stay.

    Plans that are as old go, too. Returns what was removed.
    """
    store, removed, total = atoll_home() / "images", [], 0
    for image in built_images():
        total += image.size_bytes
        if (time.time() - image.used_s > older_s or total > keep_bytes) and not image.in_use:
            total -= image.size_bytes
            with contextlib.suppress(OSError):  # somebody else was quicker
                os.rename(image.folder, store / f".gone-{image.folder.name}")
                removed.append(image)
    for aside in store.glob(".gone-*"):  # also what an interrupted one left
        shutil.rmtree(aside, ignore_errors=True)
    for path in store.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > older_s:
                path.unlink()
    return removed
