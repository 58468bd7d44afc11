"""TensorFlow over every rank of a call: ``TF_CONFIG``, and the strategy that has to be made before anything else."""

from __future__ import annotations

import importlib
import json
import os
import socket
from typing import Any

from atoll.core.context import CallContext, current
from atoll.core.errors import ConfigError, UsageError
from atoll.functions.integrations._devices import own_devices
from atoll.worker.channel import DriverChannel

_strategy: Any = None


def strategy() -> Any:
    """The ``tf.distribute.MultiWorkerMirroredStrategy`` over all ranks of the running call.

    It is there in functions with ``@sky.integrations.tensorflow()``, which make their model and variables in
    ``sky.strategy().scope()``. Outside a pool it is TensorFlow's default strategy, so that the same code runs.

    Raises:
        UsageError: the function has no such decorator.
    """
    if _strategy is not None:
        return _strategy
    if current() is None:
        return importlib.import_module("tensorflow").distribute.get_strategy()
    raise UsageError(
        "sky.strategy() needs the strategy made before the function starts: put @sky.integrations.tensorflow() above it"
    )


def set_up(ctx: CallContext, worker: DriverChannel) -> None:
    """Join the ranks, and keep the strategy for the function."""
    global _strategy
    _strategy = join(ctx, worker)


def join(ctx: CallContext, worker: DriverChannel) -> Any:
    """Make the strategy over the ranks of the call, with ``TF_CONFIG`` from what each says of itself.

    Raises:
        ConfigError: the ranks have GPUs.
    """
    if own_devices(ctx, worker.setup["local_world_size"]) is not None:
        raise ConfigError(
            f"TensorFlow runs on CPU only here, and the ranks of node {ctx.node} have GPUs: use "
            f"@sky.integrations.keras(backend='jax') on them, or start the pool with CUDA_VISIBLE_DEVICES= empty"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reserved:
        reserved.bind(("", 0))  # TensorFlow listens at every address, and shares its port with nobody
        own = f"{worker.setup['addr']}:{reserved.getsockname()[1]}"
        workers = [own] if ctx.world_size == 1 else worker.agree(own)
        if workers is None:
            raise ConfigError("another rank ended before TensorFlow could join them")
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": ctx.rank}}
        )
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # it reports every step of joining as a warning
        tensorflow: Any = importlib.import_module("tensorflow")
    return tensorflow.distribute.MultiWorkerMirroredStrategy()
