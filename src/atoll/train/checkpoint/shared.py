"""Whether all hosts see the same folder: asked at the start, because the first save is too late to learn it."""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path

import torch.distributed as dist

from atoll.core.errors import CheckpointError, ConfigError
from atoll.train.checkpoint.team import Team

_LEFT_S = 3600.0
_PATIENCE_S = 15.0  # an NFS client may go by a cached listing for some seconds


def check_shared(root: str, group: dist.ProcessGroup | None) -> None:
    """Refuse a folder that some rank does not see, or can't write to. Collective. URLs are not looked at.

    Args:
        root: where checkpoints will lie; it is made if need be.

    Raises:
        ConfigError: the folder is not shared, or not writable; the message names rank, host and path.
    """
    if "://" in root and not root.startswith("file://"):
        return
    folder = Path(root.removeprefix("file://")).absolute()
    team = Team(group)
    token = secrets.token_hex(16)
    name = f".shared-{token[:8]}"
    try:
        name, token = team.lead(f"making the folder {folder}", lambda: _put(folder, name, token))
    except CheckpointError as error:
        raise ConfigError(f"{error}; choose a folder that can be written, with [train] output_dir") from None
    try:
        verdicts = team.agree(f"looking into {folder}", lambda: _look(folder, name, token))
    finally:
        if team.rank == 0:
            (folder / name).unlink(missing_ok=True)
    wrong = [f"rank {rank} on host {host} {verdict}" for rank, (host, verdict) in enumerate(verdicts) if verdict]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise ConfigError(
            f"checkpoints need a place that every rank can write, and {folder} is none: {'; '.join(wrong[:3])}{more}. "
            "Use a folder that all hosts mount (NFS, Lustre, …) or an object store: [checkpoint] path = "
            '"s3://bucket/run"'
        )


def _put(folder: Path, name: str, token: str) -> tuple[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".shared-*"):  # of a run that was killed here
        if left.stat().st_mtime < time.time() - _LEFT_S:
            left.unlink(missing_ok=True)
    (folder / name).write_text(token)
    return name, token


def _look(folder: Path, name: str, token: str) -> tuple[str, str | None]:
    """The host's name, and what is wrong with its view of the folder."""
    host = socket.gethostname()
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            seen = (folder / name).read_text() == token
        except OSError:
            seen = False
        if seen:
            return host, None if os.access(folder, os.W_OK | os.X_OK) else "can't write to it"
        # A folder that isn't even there is no stale listing.
        if time.monotonic() > deadline or not folder.is_dir():
            return host, "does not see what rank 0 wrote there"
        time.sleep(0.2)
