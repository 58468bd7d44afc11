"""Folders that a process keeps from being removed while it runs, by locks: they end with it, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys

IMAGE_MARKER = "image.json"
_RUNNING = ".running"


def hold_images() -> None:
    """Keep the images that this process runs with, as long as it lives, and note that they were used."""
    packages = [os.path.dirname(entry) for entry in sys.path if os.path.basename(entry) == "site-packages"]
    for folder in {*packages, sys.prefix}:
        with contextlib.suppress(OSError):  # no image, or another user's
            marker = os.open(os.path.join(folder, IMAGE_MARKER), os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(marker, fcntl.LOCK_SH)
            os.utime(marker)


def hold_folder(folder: str) -> int:
    """Keep the folder of a call or of a pool's logs as long as the descriptor that this returns is open."""
    descriptor = os.open(os.path.join(folder, _RUNNING), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def is_held(folder: str | os.PathLike[str]) -> bool:
    """Does a process hold it?"""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, _RUNNING), "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
