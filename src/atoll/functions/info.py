"""``instance_info()``: where the running call is, inside a pool and outside."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.context import Peer, current

__all__ = ["InstanceInfo", "Peer", "instance_info"]


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
        simulated: True where the accelerator was asked for but is not there, and ranks run on CPU.
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


def instance_info() -> InstanceInfo:
    """Where the running call is: node, ranks, world size, head address, peers, accelerators.

    Outside a pool it describes a world of one, so that ``info.is_head`` is true in a plain run.
    """
    ctx = current()
    if ctx is None:
        return InstanceInfo(
            node=0,
            total_nodes=1,
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            head_addr="127.0.0.1",
            head_port=0,
            peers=(Peer(0, "127.0.0.1"),),
            accelerator=None,
            accelerators=0,
            job_id="local",
        )
    return InstanceInfo(**{name: getattr(ctx, name) for name in InstanceInfo.__dataclass_fields__})
