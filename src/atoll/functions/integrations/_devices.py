"""Which devices of its node a rank uses."""

from __future__ import annotations

from atoll.core.context import CallContext
from atoll.core.errors import ConfigError


def own_devices(ctx: CallContext, local_world_size: int) -> list[int] | None:
    """Which GPUs of its node a rank uses, by index: each an equal part of them. None on CPU.

    Raises:
        ConfigError: there are more ranks than GPUs.
    """
    if not ctx.accelerators or ctx.simulated:
        return None
    num_each = ctx.accelerators // local_world_size
    if num_each == 0:
        raise ConfigError(
            f"{local_world_size} ranks share {ctx.accelerators} GPUs of node {ctx.node}, and each needs its own: leave "
            f"workers_per_node out, or make it at most {ctx.accelerators}"
        )
    return list(range(ctx.local_rank * num_each, (ctx.local_rank + 1) * num_each))
