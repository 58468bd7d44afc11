"""What a gang keeps for ranks on other machines: memory files of one use, and their output here."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import BinaryIO

from atoll.wire.payloads import Arena, Segment


class OneUseArena(Arena):
    """Memory files as large as their payload: over a connection every byte of them is sent."""

    def give_back(self, segment: Segment) -> None:
        """It is not used again."""
        segment.close()


class RankFiles:
    """What ranks on other machines print, kept here as local agents keep it: ``rank{N}.out`` and ``rank{N}.err``."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._files: dict[tuple[int, bool], BinaryIO] = {}

    def write(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Add what a rank printed. A full disk must not stop training."""
        with contextlib.suppress(OSError):
            file = self._files.get((rank, is_stderr))
            if file is None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = self._folder / f"rank{rank}.{'err' if is_stderr else 'out'}"
                file = self._files[rank, is_stderr] = path.open("ab", buffering=0)
            file.write(data)

    def close(self) -> None:
        """Close them all."""
        for file in self._files.values():
            file.close()
