"""``instance_info()``: where the running call is, inside a pool and outside."""

from __future__ import annotations

from atoll.core.context import InstanceInfo, Peer, current

__all__ = ["InstanceInfo", "Peer", "instance_info"]


def instance_info() -> InstanceInfo:
    """Where the running call is: node, ranks, world size, head address, peers, accelerators.

    Outside a pool it describes a world of size 1, so that ``info.is_head`` is true in a plain run.
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
