"""How long logs, checkpoints and detached results are kept."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path

from atoll.core.paths import is_locked
from atoll.worker.folder_locks import is_held

_KEEP_LOGS = 50
_KEEP_JOBS_S = 14 * 86400.0
_FRESH_S = 3600.0  # logs of the last hour are kept, too


def prune_logs(folder: Path) -> None:
    """Keep the logs of the last pools only, and of those that are up."""
    with contextlib.suppress(OSError):
        entries = [(_last_written(entry), entry) for entry in folder.iterdir()]
        for written, entry in sorted(entries)[:-_KEEP_LOGS]:
            if time.time() - written > _FRESH_S and not is_held(entry):
                shutil.rmtree(entry, ignore_errors=True)


def prune_jobs(folder: Path) -> None:
    """Drop checkpoints and results of calls that ended, and that nobody has touched for a long while."""
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            touched = max(map(_last_written, (entry, *entry.glob("*/"), *entry.glob("*/*/"))))
            if time.time() - touched > _KEEP_JOBS_S and not _is_running(entry):
                shutil.rmtree(entry, ignore_errors=True)


def _is_running(job: Path) -> bool:
    """Does a rank hold the call's folder, or a server the log of a detached call's pool?"""
    with contextlib.suppress(FileNotFoundError):
        if is_locked(json.loads((job / "job.json").read_bytes())["log"]) and not (job / "outcome").exists():
            return True
    return is_held(job)


def _last_written(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return max(entry.stat().st_mtime for entry in (folder, *folder.iterdir()))
    return 0.0
