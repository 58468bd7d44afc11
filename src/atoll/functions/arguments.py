"""Checks of what ``ComputePool`` is given: each message names the value, what is expected and the next step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import cast

from atoll.core import events
from atoll.core.errors import ConfigError
from atoll.core.secrets import redact
from atoll.core.validation import MOST_PROCESSES
from atoll.images.image import Image
from atoll.providers.base import Provider
from atoll.providers.local import Local


def provider(value: object) -> Provider:
    """A provider; this machine where None."""
    if value is None:
        return Local()
    if isinstance(value, type):
        raise ConfigError(f"provider={value.__name__} is a class: call it, as in sky.{value.__name__}()")
    if callable(getattr(value, "plan", None)) and callable(getattr(value, "start", None)):
        return cast("Provider", value)
    step = f"; nodes are given as nodes={value!r}" if isinstance(value, int) and not isinstance(value, bool) else ""
    raise ConfigError(f"provider={value!r}: expected a provider such as sky.Local(){step}")


def image(value: object) -> Image:
    """An image; an empty one where None."""
    if value is None:
        return Image()
    if isinstance(value, Image):
        return value
    if isinstance(value, type):
        raise ConfigError(f"image={value.__name__} is a class: call it, as in sky.{value.__name__}(pip=['torch'])")
    wanted = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else ["torch"]
    raise ConfigError(redact(f"image={value!r}: expected an Image; packages are given as sky.Image(pip={wanted!r})"))


def callback(value: Callable[[events.Event], object] | None) -> Callable[[events.Event], object] | None:
    """The user's callback, made so that what it raises is said and stops nothing."""
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


def workers(value: object) -> int | str:
    """Ranks of each node, or how to choose them."""
    if isinstance(value, str) and value in ("auto", "gpu"):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_PROCESSES:
        raise ConfigError(
            f"workers_per_node={value!r}: expected 'auto', 'gpu' or a whole number from 1 to {MOST_PROCESSES}"
        )
    return value
