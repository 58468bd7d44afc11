"""What two users of a named pool must agree on, as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from atoll.core.secrets import digest_credentials, shown_variable

if TYPE_CHECKING:
    from atoll.functions.compute_pool import ComputePool

IDLE_S = 600.0


def wishes_of(pool: ComputePool) -> dict[str, str]:
    """What a pool's settings ask for; values of variables that are secret, as digests."""
    variables = {**(pool.image.env or {}), **pool.env}
    wishes = {
        "provider": repr(pool.provider) if hasattr(pool.provider, "__dataclass_fields__") else pool.provider.name,
        "nodes": pool.nodes,
        "accelerator": pool.accelerator,
        "workers_per_node": pool.workers_per_node,
        "image": dataclasses.replace(pool.image, env=None),
        "pip": pool.pip,
        "env": ", ".join(f"{key}={shown_variable(key, str(value))}" for key, value in sorted(variables.items())),
        "ttl": pool.ttl,
        "hang_timeout": pool.hang_timeout,
        "idle": pool.idle if pool.idle is not None else IDLE_S,
    }
    return {key: digest_credentials(str(value)) for key, value in wishes.items()}


def difference(has: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """In what a pool that is up differs from what was asked for; nothing where it does not."""
    differing = [(key, has.get(key), value) for key, value in wanted.items() if has.get(key) != value]
    return "; ".join(f"it has {key}={has}, and {key}={value} was asked for" for key, has, value in differing)
