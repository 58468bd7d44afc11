"""Checks of what a ``ComputePool`` and its methods are given: each message names the value and the next step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import cast

from atoll.core import events
from atoll.core.errors import ConfigError
from atoll.core.secrets import redact
from atoll.core.validation import MOST_PROCESSES
from atoll.functions.serialize import name_of
from atoll.images.image import Image
from atoll.providers.accelerators import AcceleratorSpec
from atoll.providers.base import DEFAULT, Provider
from atoll.providers.registry import is_known, resolve


def check_provider(value: object) -> Provider:
    """A provider; this machine where None."""
    if value is None:
        return resolve(DEFAULT)
    if isinstance(value, type):
        raise ConfigError(f"provider={value.__name__} is a class: call it, as in sky.{value.__name__}()")
    if callable(getattr(value, "plan", None)) and callable(getattr(value, "provision", None)):
        return cast("Provider", value)
    if isinstance(value, str) and is_known(value):
        return resolve(value)
    step = f"; nodes are given as nodes={value!r}" if isinstance(value, int) and not isinstance(value, bool) else ""
    raise ConfigError(f"provider={value!r}: expected sky.Local(), sky.SSH(hosts), sky.Slurm() or 'ssh/NAME'{step}")


def check_image(value: object) -> Image:
    """An image; an empty one where None."""
    if value is None:
        return Image()
    if isinstance(value, Image):
        return value
    if isinstance(value, type):
        raise ConfigError(f"image={value.__name__} is a class: call it, as in sky.{value.__name__}(pip=['torch'])")
    wanted = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else ["torch"]
    raise ConfigError(redact(f"image={value!r}: expected an Image; packages are given as sky.Image(pip={wanted!r})"))


def check_workers(value: object) -> int | str:
    """Ranks of each node, or how to choose them."""
    if isinstance(value, str) and value in ("auto", "gpu"):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_PROCESSES:
        raise ConfigError(
            f"workers_per_node={value!r}: expected 'auto', 'gpu' or a whole number from 1 to {MOST_PROCESSES}"
        )
    return value


def check_mig(accelerator: AcceleratorSpec, provider: Provider, workers_per_node: object) -> None:
    """Refuse slices where a provider gives none, or another number of ranks than there are slices."""
    if not provider.gives_slices:
        raise ConfigError(
            f"accelerator={accelerator}: {provider.name} gives whole cards only; leave mig out, or use slices of this "
            f"machine's with sky.Local()"
        )
    num_slices = len(accelerator.slices()) * accelerator.count
    if workers_per_node not in (None, "auto", "gpu", num_slices):
        raise ConfigError(
            f"workers_per_node={workers_per_node!r} with {num_slices} slices of each node: every slice has one rank; "
            f"leave workers_per_node out"
        )


def safe_callback(value: Callable[[events.Event], object] | None) -> Callable[[events.Event], object] | None:
    """The user's ``on_event``; what it raises is printed and stops nothing."""
    if value is None:
        return None
    if not callable(value):
        raise ConfigError(f"on_event={value!r}: expected a function that takes an event, or None")

    def call(event: events.Event) -> None:
        try:
            value(event)
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raises, sys.exit() too
            print(f"atoll: on_event raised {type(error).__name__}: {error}", file=sys.stderr)

    return call


def not_a_call(other: object, operator: str) -> str:
    """What to say of ``other @ pool``."""
    if isinstance(other, (list, tuple)) and other and all(hasattr(item, "__atoll_pending__") for item in other):
        return (
            f"several calls run side by side as `sky.gather(*calls) {operator} pool`, not as a {type(other).__name__}"
        )
    if callable(other):
        name = name_of(other)
        step = "" if hasattr(other, "__atoll_function__") else "decorate it with @sky.compute, and "
        return (
            f"`{name} {operator} pool` names the function without calling it: {step}write `{name}(...) {operator} pool`"
        )
    return (
        f"{type(other).__name__} on the left of `{operator} pool` is a value, not a pending call: the function ran "
        f"here. Did you forget @sky.compute? Or write pool.run(function, ...)"
    )


def not_a_function(value: object) -> str:
    """What to say of ``pool.submit(value, ...)``."""
    if hasattr(value, "__atoll_pending__"):
        value._used = True  # type: ignore[attr-defined]  # refused, so no warning on top that it was never dispatched
        return (
            f"{value} is a pending call: write `{value} >> pool`, or give function and arguments apart, as in "
            f"pool.submit({str(value).removesuffix('(...)')}, ...)"
        )
    return f"expected a function and its arguments, not {type(value).__name__}: pool.submit(function, ...)"
