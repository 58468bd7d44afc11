"""JAX over every rank of a call."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

from atoll.core.context import CallContext
from atoll.core.errors import ConfigError
from atoll.functions.integrations._devices import own_devices
from atoll.worker.channel import DriverChannel


def join(ctx: CallContext, worker: DriverChannel) -> None:
    """``jax.distributed`` over the ranks of the call, over one too; every rank has its own GPUs, or a CPU device."""
    devices = own_devices(ctx, worker.setup["local_world_size"])
    if devices is None:
        _check_host_name(ctx)
        os.environ["JAX_PLATFORMS"] = "cpu"  # also where a GPU is there and was not asked for
        os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    jax: Any = importlib.import_module("jax")

    address = os.environ["JAX_COORDINATOR_ADDRESS"]
    if devices is None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=ctx.world_size,
            process_id=ctx.rank,
            local_device_ids=devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=address,
        )
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise ConfigError(
            f"JAX was used on rank {ctx.rank} before its devices were joined with those of the others: dispatch the "
            f"decorated function itself, f(...) @ pool, which gets processes that have not used it"
        ) from error


def _check_host_name(ctx: CallContext) -> None:
    """JAX's Gloo tells the other ranks the address that the name of its host resolves to."""
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError:
        found = "no address"
    if not ctx.head_addr.startswith("127.") and ctx.total_nodes > 1 and (found.startswith("127.") or " " in found):
        addr = next(peer.addr for peer in ctx.peers if peer.node == ctx.node)
        raise ConfigError(
            f"node {ctx.node}, {name!r}, resolves its own name to {found}, and JAX on CPU has the others connect to "
            f"that: make it resolve to {addr}, with the line `{addr} {name}` at the top of its /etc/hosts"
        )
