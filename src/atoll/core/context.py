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
class InstanceInfo:
    """Where this process stands in the call it runs.

    Attributes:
        node: index of this node, 0 to ``total_nodes - 1``.
        total_nodes: nodes in the pool.
        rank: global rank, 0 to ``world_size - 1``; 0 in a call dispatched with ``>>``.
        local_rank: index of this process on its node; its GPU is ``cuda:{local_rank}``.
        world_size: processes in this call: 1 in a call dispatched with ``>>``.
        local_world_size: processes of this call on this node.
        is_head: True on exactly one process of a call, its rank 0.
        head_addr, head_port: where rank 0 listens (``MASTER_ADDR``, ``MASTER_PORT``).
        peers: every node of the pool with its address, by node index.
        accelerator: name of this node's accelerator, such as ``"A100"``, or None on CPU.
        accelerators: how many of them this node has.
        job_id: id of the call, the same on all its ranks.
        simulated: True if the requested accelerator is simulated on CPU.
    """

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
    job_id: str
    simulated: bool = False

    @property
    def is_head(self) -> bool:
        """True on exactly one process of a call: its rank 0."""
        return self.rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext(InstanceInfo):
    """What the worker knows beyond that. ``seed`` is the same on every rank of a call and differs between calls."""

    seed: int
    pool_id: str = ""
    checkpoint_dir: str | None = None
    send_report: Callable[[dict[str, Any], str | None], None] | None = field(default=None, compare=False)


_current: CallContext | None = None
_make_current: Callable[[], CallContext] | None = None


def current() -> CallContext | None:
    """The context of the call running in this process, or None outside a pool."""
    global _current, _make_current
    make = _make_current
    if make is not None:
        _current, _make_current = make(), None
    return _current


def set_current(context: CallContext | None, make: Callable[[], CallContext] | None = None) -> None:
    """Set by the worker around each call: the context, or how to make it once the call looks at it."""
    global _current, _make_current
    _current, _make_current = context, make
