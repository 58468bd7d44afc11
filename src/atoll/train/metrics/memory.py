"""How much memory a rank has needed at most."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch

_HIGH_WATER = re.compile(r"^VmHWM:\s*(\d+) kB$", re.M)


def peak_memory_bytes(device: torch.device) -> int:
    """The most bytes this process has held so far: tensors on a GPU, resident memory on CPU.

    On a GPU that is what tensors took, not the allocator's reserve, so that it can be held against an estimate.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        found = _HIGH_WATER.search(Path("/proc/self/status").read_text())
    except OSError:  # no Linux
        found = None
    if found is not None:
        # Better than getrusage, which starts a new program at the peak of the one that it was forked from.
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
