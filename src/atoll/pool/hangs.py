"""Reading rank stacks: who waits in a collective, and who never came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Files and functions in which a rank waits for the others.
_WAITS = ("torch/distributed/", "torch/nn/parallel/distributed.py", "_engine_run_backward", "jax/_src/distributed.py")
_MACHINERY = ("atoll/pool/worker/", "atoll/wire/", '"<string>"')


def summary(dump: str, main_thread: int) -> str:
    """The main thread's frames out of a faulthandler dump, most recent call first, without the worker's own."""
    lines: list[str] = []
    inside = False
    marker = f"0x{main_thread:016x}"
    for line in dump.splitlines():
        if "hread 0x" in line:
            inside = marker in line
        elif inside and line.startswith("  "):
            lines.append(line)
    own = [line for line in lines if not any(part in line for part in _MACHINERY)]
    return "\n".join(own or lines)


def hung_for(silent: Mapping[int, float], stacks: Mapping[int, str]) -> float:
    """Seconds that the call as a whole makes no progress, of how long each of its running ranks has made none.

    A rank that waits for one that works is in no trouble: those that don't wait count. Where all wait, nobody will
    ever come, and it is so since the last of them got there.
    """
    working = [quiet for rank, quiet in silent.items() if not _waits(stacks[rank])]
    return max(working) if working else min(silent.values(), default=0.0)


def _waits(stack: str) -> bool:
    return any(part in stack for part in _WAITS)


def hung(stacks: Mapping[int, str], ended: Sequence[int]) -> tuple[list[int], list[int]]:
    """Ranks that did not arrive, and ranks that wait in a collective.

    Where all that still run wait, those that returned are the ones that will never come.
    """
    waiting = [rank for rank, stack in sorted(stacks.items()) if _waits(stack)]
    missing = [rank for rank in sorted(stacks) if rank not in waiting]
    return missing or list(ended) or waiting, waiting
