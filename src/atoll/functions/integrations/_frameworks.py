"""What a framework decorator asks for, and how a rank gets it: once for each call, before the framework's first use."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from atoll.core.context import current
from atoll.core.errors import ConfigError, UsageError
from atoll.core.validation import nearest
from atoll.functions.serialize import importable, name_of
from atoll.wire import frames

# Name of the decorator -> the extra that brings what it needs.
EXTRAS = {
    "torch": "train",
    "transformers": "transformers",
    "accelerate": "transformers",
    "jax": "jax",
    "keras": "keras",
    "tensorflow": "tensorflow",
}
_KERAS_BACKENDS = ("jax", "torch", "tensorflow")
# These can be set up only before their first use in a process, and not a second time: it ends with the call.
ONCE_A_PROCESS = ("jax", "keras", "tensorflow")


@dataclass(frozen=True, slots=True)
class Framework:
    """What a decorator asks for.

    Attributes:
        name: of the decorator.
        backend: of torch's collectives, or Keras' own; None for the default.
        timeout: seconds a collective of torch may take.
    """

    name: str
    backend: str | None = None
    timeout: float | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.name, self.backend, self.timeout)


def _rebuild(name: str, backend: str | None, timeout: float | None) -> Framework:
    """Sets the framework up where this is a rank: the function's globals, which may hold its arrays, come after."""
    framework = Framework(name, backend, timeout)
    if current() is not None and name in ONCE_A_PROCESS:
        set_up(framework)
    return framework


class Integrated:
    """A function with a framework set up around it. Runs on the rank."""

    def __init__(self, framework: Framework, function: Callable[..., Any]) -> None:
        self.framework = framework
        self.function = function
        self.__atoll_fresh__ = framework.name in ONCE_A_PROCESS
        functools.update_wrapper(cast("Any", self), function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            set_up(self.framework)
        return self.function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        bind = getattr(self.function, "__get__", None)
        if bind is None or instance is None:
            return self
        return Integrated(self.framework, bind(instance, owner))

    def __reduce__(self) -> tuple[Any, ...]:
        # In this order: the framework is set up when it is rebuilt.
        return Integrated, (self.framework, importable(self.function) or self.function)


def integrate(framework: Framework, function: Callable[..., Any]) -> Integrated:
    """Put a framework around a function.

    Raises:
        UsageError: it has one already.
    """
    if isinstance(function, Integrated):
        raise UsageError(
            f"{name_of(function.function)} has two integrations, {function.framework.name} and {framework.name}: they "
            f"would both set up the processes of a call; keep one"
        )
    return Integrated(framework, function)


_done: Framework | None = None  # what this process was set up for


def set_up(framework: Framework) -> None:
    """Set a framework up in this rank, for the running call. Does nothing the second time.

    Raises:
        ConfigError: it is not installed, was used before in this process, or can't have what is asked for.
    """
    global _done
    ctx = current()
    assert ctx is not None
    if framework.name not in ONCE_A_PROCESS:
        _need(framework.name)
        from atoll.functions.integrations._torch import set_up as set_up_torch

        set_up_torch(framework.backend, framework.timeout, for_trainer=framework.name != "torch")
        return
    if _done == framework:
        return
    if _done is not None:
        raise ConfigError(
            f"this call set up {_done.name} and then {framework.name}: a process can be set up for one framework; call "
            f"functions of one integration only, each in a call of its own"
        )
    from atoll.worker.process_group import disarm

    backend = framework.backend or os.environ.get("KERAS_BACKEND") or "jax"  # of Keras
    backend = check_keras_backend("KERAS_BACKEND", backend)
    _need(framework.name, *([backend] if framework.name == "keras" else []))
    worker = disarm()
    # What was set up can't be undone: a fresh process takes the next call. It must not leave the others early, since
    # they lose what rank 0 serves, or are ended by the framework as soon as one of them is gone.
    worker.spent = True
    if ctx.world_size > 1:
        worker.before_result.append(lambda: cast("None", worker.agree(frames.RETURNED)))
    match framework.name:
        case "jax":
            from atoll.functions.integrations._jax import join

            join(ctx, worker)
        case "tensorflow":
            from atoll.functions.integrations._tensorflow import set_up as set_up_tensorflow

            set_up_tensorflow(ctx, worker)
        case _:
            from atoll.functions.integrations._keras import set_up as set_up_keras

            set_up_keras(backend, ctx, worker)
    _done = framework


def check_keras_backend(what: str, value: object) -> str:
    """A backend as Keras spells it.

    Raises:
        ConfigError: Keras lacks it, or trains with it in one process only.
    """
    name = str(value).lower()
    if name not in _KERAS_BACKENDS:
        hint = nearest(str(value), _KERAS_BACKENDS) or ": it is none that trains over several ranks."
        raise ConfigError(f"{what}={value!r}{hint} Expected {', '.join(map(repr, _KERAS_BACKENDS))}")
    return name


def _need(decorator: str, *others: str) -> None:
    for name in (decorator, *others):
        if importlib.util.find_spec(name) is None:
            extra = EXTRAS[name if name in EXTRAS else decorator]
            raise ConfigError(
                f"@sky.integrations.{decorator} needs {name}, which is not installed where the ranks run: pip install "
                f'"atoll[{extra}]" there, or give the pool pip=["{name}"]'
            )
