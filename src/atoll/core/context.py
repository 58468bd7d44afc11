"""What a running call knows about itself: set by the worker on a rank, absent elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Peer:
    """One node of the pool as the others see it.

    Attributes:
        node: index of the node.
        addr: address the other nodes reach it at.
    """

    node: int
    addr: str


@dataclass(frozen=True, slots=True)
class CallContext:
    """Where a call runs. ``seed`` is the same on every rank of a call and differs between calls."""

    job_id: str
    node: int
    total_nodes: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    head_addr: str
    head_port: int
    peers: tuple[Peer, ...]
    accelerator: str | None
    accelerators: int
    seed: int
    simulated: bool = False
    pool_id: str = ""
    checkpoint_dir: str | None = None
    send_report: Callable[[dict[str, Any], str | None], None] | None = field(default=None, compare=False)


_current: CallContext | None = None


def current() -> CallContext | None:
    """The context of the call running in this process, or None outside a pool."""
    return _current


def set_current(context: CallContext | None) -> None:
    """Set by the worker around each call."""
    global _current
    _current = context
