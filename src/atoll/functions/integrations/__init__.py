"""Framework decorators: ``@sky.integrations.torch``, ``.transformers``, ``.accelerate``, ``.jax``, ``.keras`` and
``.tensorflow``.

They stand above or below ``@sky.compute``, bare or called. Outside a pool the function just runs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from atoll.core.errors import ConfigError, UsageError
from atoll.core.validation import check_seconds, nearest, suggests_keywords
from atoll.functions.compute import ComputeFunction
from atoll.functions.integrations._frameworks import Framework, check_keras_backend, integrate

__all__ = ["accelerate", "jax", "keras", "tensorflow", "torch", "transformers"]

_BACKENDS = ("nccl", "gloo", "mpi", "ucc", "xccl")


@suggests_keywords
def torch(function: Any = None, /, *, backend: str | None = None, timeout: float | None = None) -> Any:
    """Make the torch process group before the function starts and leave it after, also over one rank.

    Args:
        backend: ``"nccl"``, ``"gloo"``, another that torch has, one for each device as in
            ``"cpu:gloo,cuda:nccl"``, or None for NCCL where each rank has its own GPU, else Gloo.
        timeout: seconds a collective may take; torch's default where None.

    Raises:
        ConfigError: an argument that can't work; on the rank, ``backend="nccl"`` without a GPU for each rank, where
            they are not simulated.
    """
    return _decorator(Framework("torch", _backend(backend), check_seconds("timeout", timeout)), function)


@suggests_keywords
def transformers(function: Any = None, /, *, backend: str | None = None) -> Any:
    """The same as ``torch``, and the Hugging Face ``Trainer`` sees every rank, on CPU too."""
    return _decorator(Framework("transformers", _backend(backend)), function)


@suggests_keywords
def accelerate(function: Any = None, /, *, backend: str | None = None) -> Any:
    """The same as ``torch``, and ``accelerate.Accelerator()`` has every rank, on CPU too."""
    return _decorator(Framework("accelerate", _backend(backend)), function)


@suggests_keywords
def jax(function: Any = None, /) -> Any:
    """Initialise ``jax.distributed`` over all ranks before the function starts, also over one rank.

    ``jax.devices()`` is every rank's devices: its own GPUs, or one CPU device a rank, joined by Gloo.
    ``jax.local_devices()`` is its own. A rank is a new process for each call, since JAX can't be set up twice.

    Raises:
        ConfigError: on the rank, where JAX is not installed, or several ranks would share a GPU.
    """
    return _decorator(Framework("jax"), function)


@suggests_keywords
def keras(function: Any = None, /, *, backend: str | None = None) -> Any:
    """Train one Keras model over all ranks: ``model.fit`` on each rank's part ends with the same weights everywhere.

    Keras 3 is loaded with the backend, and all ranks get one seed. On JAX, ``keras.distribution.DataParallel`` is set
    over all devices. On torch and TensorFlow every rank steps by itself and gradients are averaged in the optimizer's
    ``apply``, batch statistics and logs at the end of each epoch. A batch is that of one rank. ``fit`` drops samples
    that some ranks have and others lack, and says so. A rank is a new process for each call.

    Args:
        backend: ``"jax"``, ``"torch"`` or ``"tensorflow"``; None takes ``KERAS_BACKEND``, and JAX where that is not
            set.

    Raises:
        ConfigError: a backend that Keras lacks; on the rank, where Keras or the backend is not installed, or where
            ``fit`` is given what has no equal number of steps on every rank.
    """
    if backend is not None:
        backend = check_keras_backend("backend", backend)
    return _decorator(Framework("keras", backend), function)


@suggests_keywords
def tensorflow(function: Any = None, /) -> Any:
    """Make a ``MultiWorkerMirroredStrategy`` over all ranks before the function starts: ``sky.strategy()`` gives it.

    ``TF_CONFIG`` names every rank. For custom training loops and ``tf_keras``; Keras 3 trains with
    ``@sky.integrations.keras(backend="tensorflow")``. On CPU only. A rank is a new process for each call.

    Raises:
        ConfigError: on the rank, where TensorFlow is not installed, or ranks have GPUs.
    """
    return _decorator(Framework("tensorflow"), function)


def _decorator(framework: Framework, function: Any) -> Any:
    if isinstance(function, str):
        has_backend = framework.name not in ("jax", "tensorflow")
        hint = f"(backend={function!r}), with the name of the argument" if has_backend else "()"
        raise UsageError(f"write @sky.integrations.{framework.name}{hint}")
    if function is None:
        return lambda decorated: _wrap(framework, decorated)
    return _wrap(framework, function)


def _backend(value: object) -> str | None:
    """A backend as torch spells it; one of its names, or several as ``cpu:gloo,cuda:nccl``."""
    if value is None:
        return None
    # Others come with packages that add to torch's own list, which is only there where torch is loaded.
    distributed = sys.modules.get("torch.distributed")
    known = (*_BACKENDS, *getattr(getattr(distributed, "Backend", None), "backend_list", ()))
    if isinstance(value, str):
        parts = value.lower().split(",")
        names = [name for part in parts for device, _, name in [part.rpartition(":")] if device or len(parts) == 1]
        unknown = [name for name in names if name not in known]
        if not unknown and len(names) == len(parts):
            return value.lower()
        hint = nearest(unknown[0], known) if unknown else ""
    else:
        hint = ""
    raise ConfigError(
        f"backend={value!r}{hint or ': not known.'} Expected {', '.join(map(repr, _BACKENDS))}, one for each device as "
        f"in 'cpu:gloo,cuda:nccl', or None"
    )


if not TYPE_CHECKING:  # a type checker should go on to refuse these

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(f"sky.integrations has no {name!r}{nearest(name, __all__)}")


def _wrap(framework: Framework, function: Any) -> Any:
    raw = function.__atoll_function__ if isinstance(function, ComputeFunction) else function
    if not callable(raw):
        raise UsageError(f"@sky.integrations.{framework.name} needs a function, not {type(raw).__name__}")
    integrated = integrate(framework, raw)
    if isinstance(function, ComputeFunction):
        return ComputeFunction(integrated, function.__atoll_options__)
    return integrated
