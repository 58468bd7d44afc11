"""How much memory a rank has needed at most."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """The most bytes this process has held so far: tensors on a GPU, resident memory on CPU.

    On a GPU that is what tensors took, not the allocator's reserve, so that it can be held against an estimate.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Better than getrusage, which starts a new program at the peak of the one that it was forked from.
    found = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return 1024 * (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
