"""Folders that a rank keeps from being removed while it runs, by locks: they end with it, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys

IMAGE_MARKER = "image.json"
JOB_MARKER = ".running"


def hold_images() -> None:
    """Keep the images that this process runs with, as long as it lives, and note that they were used."""
    packages = [os.path.dirname(entry) for entry in sys.path if os.path.basename(entry) == "site-packages"]
    for folder in {*packages, sys.prefix}:
        with contextlib.suppress(OSError):  # no image, or another user's
            marker = os.open(os.path.join(folder, IMAGE_MARKER), os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(marker, fcntl.LOCK_SH)
            os.utime(marker)


def hold_job(folder: str) -> int:
    """Keep a call's folder as long as the descriptor that this returns is open."""
    descriptor = os.open(os.path.join(folder, JOB_MARKER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor
