"""Which devices of its node a rank uses."""

from __future__ import annotations

import os

from atoll.agent.rank_io import MIG_VARIABLE
from atoll.core.context import CallContext
from atoll.core.errors import ConfigError


def own_devices(ctx: CallContext, local_world_size: int) -> list[int] | None:
    """Which GPUs of its node a rank uses, by index: each an equal part of them. None on CPU.

    Raises:
        ConfigError: there are more ranks than GPUs, or each has a slice of one.
    """
    if not ctx.accelerators or ctx.simulated:
        return None
    if MIG_VARIABLE in os.environ:  # which sees its slice alone
        if ctx.world_size > 1:
            raise ConfigError(
                "slices of a GPU are jobs of their own, and this framework can't join them: dispatch a call for each, "
                "f(...) >> pool or pool.map(f, items), or leave mig out of the pool's accelerator"
            )
        return [0]
    num_each = ctx.accelerators // local_world_size
    if num_each == 0:
        raise ConfigError(
            f"{local_world_size} ranks share {ctx.accelerators} GPUs of node {ctx.node}, and each needs its own: leave "
            f"workers_per_node out, or make it at most {ctx.accelerators}"
        )
    return list(range(ctx.local_rank * num_each, (ctx.local_rank + 1) * num_each))
