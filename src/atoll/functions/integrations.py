"""Framework decorators: ``@sky.integrations.torch`` and ``@sky.integrations.transformers``.

They stand above or below ``@sky.compute``, bare or called. Outside a pool the function just runs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from atoll.core.context import current
from atoll.core.errors import ConfigError, UsageError
from atoll.core.validation import check_seconds, nearest, suggests_keywords
from atoll.functions.compute import ComputeFunction
from atoll.functions.serialize import importable, name_of

__all__ = ["torch", "transformers"]

F = TypeVar("F")
_BACKENDS = ("nccl", "gloo", "mpi", "ucc", "xccl")
_LATER = ("jax", "keras", "tensorflow")


class Integrated:
    """A function with the framework set up around it. Runs on the rank."""

    def __init__(
        self, function: Callable[..., Any], framework: str, backend: str | None, timeout: float | None
    ) -> None:
        self.function = function
        self.framework = framework
        self.backend = backend
        self.timeout = timeout
        functools.update_wrapper(cast("Any", self), function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return self.function(*args, **kwargs)
        from atoll.worker.process_group import disarm, explicit

        disarm()  # the group asked for here is the only one to make
        import torch

        if self.framework == "transformers" and not torch.cuda.is_available():
            # On CPU ranks the Trainer silently assumes world size 1 unless told otherwise.
            os.environ["ACCELERATE_USE_CPU"] = "true"
        explicit(self.backend, self.timeout)
        return self.function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        bind = getattr(self.function, "__get__", None)
        if bind is None or instance is None:
            return self
        return Integrated(bind(instance, owner), self.framework, self.backend, self.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        inner = importable(self.function) or self.function
        return Integrated, (inner, self.framework, self.backend, self.timeout)


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
    return _decorator("torch", function, backend, timeout)


@suggests_keywords
def transformers(function: Any = None, /, *, backend: str | None = None) -> Any:
    """The same as ``torch``, and the Hugging Face ``Trainer`` sees every rank, on CPU too."""
    return _decorator("transformers", function, backend, None)


def _decorator(framework: str, function: Any, backend: str | None, timeout: float | None) -> Any:
    if isinstance(function, str):
        raise UsageError(f"write @sky.integrations.{framework}(backend={function!r}), with the name of the argument")
    backend, timeout = _backend(backend), check_seconds("timeout", timeout)
    if function is None:
        return lambda decorated: _wrap(framework, decorated, backend, timeout)
    return _wrap(framework, function, backend, timeout)


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
        hint = f": {name} comes with a later version" if name in _LATER else nearest(name, __all__)
        raise AttributeError(f"sky.integrations has no {name!r}{hint}")


def _wrap(framework: str, function: Any, backend: str | None, timeout: float | None) -> Any:
    raw = function.__atoll_function__ if isinstance(function, ComputeFunction) else function
    if not callable(raw):
        raise UsageError(f"@sky.integrations.{framework} needs a function, not {type(raw).__name__}")
    if isinstance(raw, Integrated):
        raise UsageError(
            f"{name_of(raw.function)} has two integrations, {raw.framework} and {framework}: they would both make a "
            f"process group; keep one"
        )
    wrapped = Integrated(raw, framework, backend, timeout)
    if isinstance(function, ComputeFunction):
        return ComputeFunction(wrapped, function.__atoll_options__)
    return wrapped
