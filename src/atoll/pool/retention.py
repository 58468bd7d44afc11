"""How long logs, checkpoints and detached results are kept."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from atoll.core.paths import is_locked

_KEEP_LOGS = 50
_KEEP_JOBS_S = 14 * 86400.0
_FRESH_S = 3600.0  # a pool that wrote in the last hour is taken to be up


def prune_logs(folder: Path) -> None:
    """Keep the logs of the last pools only, and of those that may still be up."""
    with contextlib.suppress(OSError):
        entries = [(_last_written(entry), entry) for entry in folder.iterdir()]
        for written, entry in sorted(entries)[:-_KEEP_LOGS]:
            if time.time() - written > _FRESH_S and not is_locked(entry / "keeper.log"):
                shutil.rmtree(entry, ignore_errors=True)


def prune_jobs(folder: Path) -> None:
    """Drop checkpoints and results of calls that nobody has touched for a long while."""
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if time.time() - max(map(_last_written, (entry, *entry.glob("*/"), *entry.glob("*/*/")))) > _KEEP_JOBS_S:
                shutil.rmtree(entry, ignore_errors=True)


def _last_written(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return max(entry.stat().st_mtime for entry in (folder, *folder.iterdir()))
    return 0.0
