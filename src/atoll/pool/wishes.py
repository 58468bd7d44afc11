"""What two users of a named pool must agree on, as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from atoll.core.hints import digest_credentials, shown_variable
from atoll.pool.image import Image
from atoll.providers.local import Local

if TYPE_CHECKING:
    from atoll.pool.compute_pool import ComputePool

# What is left at its default asks for nothing.
_DEFAULTS = {
    "provider": repr(Local()),
    "nodes": "1",
    "accelerator": "None",
    "workers_per_node": "auto",
    "image": str(Image()),
    "pip": "None",
    "env": "",
    "ttl": "None",
    "hang_timeout": "None",
}


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
    }
    return {key: digest_credentials(str(value)) for key, value in wishes.items() if str(value) != _DEFAULTS[key]}


def difference(has: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """In what a pool that is up differs from what is wanted; nothing where it does not."""
    there = {**_DEFAULTS, **has}
    differing = [(key, there.get(key), value) for key, value in wanted.items() if there.get(key) != value]
    return "; ".join(f"it has {key}={has}, and {key}={value} was asked for" for key, has, value in differing)
