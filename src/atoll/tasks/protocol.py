"""Messages between a cluster's supervisor and those who ask it, over any stream: a Unix socket, or a relay's stdio.

Frames of ``wire.frames``: whoever answers begins with ``{"version": N}``. A request ``{"op": NAME, "args": [...],
"kwargs": {...}}`` is answered with any number of ``{"callback": N, "value": ...}``, of LOG frames for callback 0 and of
``{"note": LINE}``, then with ``{"value": ...}`` or ``{"error": KIND, "message": ...}``. Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import select
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.tasks.rows import EventRow, JobRow
from atoll.tasks.spec import ClusterSpec, JobSpec, JobStatus
from atoll.wire import frames
from atoll.wire.frames import Frame, WireError

VERSION = 2
# What a program's input begins with: whatever reads a line of it before, such as a start file, leaves less.
PREAMBLE = b"\natoll\n"


class NothingLeft(AtollError, LookupError):
    """The cluster's folder was removed from the machine that supervises it."""


_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (NothingLeft, ConfigError, ProvisionError, LookupError, AtollError)
}


def error_message(error: Exception) -> bytes:
    """The answer that raises the same kind of error for whoever asked."""
    kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), "AtollError")
    return answer(error=kind, message=str(error))


def error_from(message: Mapping[str, Any], where: str = "") -> Exception:
    """The error that an answer stands for; ``where`` is named where it is of a file or a process there."""
    kind = _ERRORS.get(str(message["error"]), AtollError)
    prefix = f"{where}: " if where and kind is AtollError else ""
    return kind(f"{prefix}{message['message']}")


def answer(**fields: Any) -> bytes:
    """A message to whoever asks, as bytes."""
    return frames.pack(frames.ANSWER, meta=fields)


# ------------------------------------------------------------------------------------------------------- values
_TYPES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {  # to JSON values, and from them
    "JobRow": (JobRow.to_json, JobRow.from_json),
    "ClusterSpec": (ClusterSpec.to_json, ClusterSpec.from_json),
    "JobSpec": (lambda spec: {**spec.to_json(), **spec.variables()}, JobSpec.from_json),
    "JobStatus": (str, JobStatus),
    "EventRow": (dataclasses.asdict, lambda data: EventRow(**data)),
}


def encode(value: Any) -> Any:
    """A value as JSON has it; records are known again by their type."""
    name = type(value).__name__
    if name in _TYPES:
        return {f"@{name}": _TYPES[name][0](value)}
    if isinstance(value, Mapping):
        return {key: encode(each) for key, each in value.items()}
    return [encode(each) for each in value] if isinstance(value, (list, tuple)) else value


def decode(value: Any) -> Any:
    """The value that ``encode`` was given; tuples have become lists."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    name = next(iter(value))[1:] if len(value) == 1 else ""
    if name in _TYPES and f"@{name}" in value:
        return _TYPES[name][1](value[f"@{name}"])
    return {key: decode(each) for key, each in value.items()}


# ------------------------------------------------------------------------------------------------------- calls
def request(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, list[Any]]:
    """A request as bytes, and the callables among its arguments."""
    callbacks: list[Any] = []

    def stand_in(value: Any) -> Any:
        if callable(value):
            callbacks.append(value)
            return {"@callback": len(callbacks) - 1}
        return encode(value)

    message = {
        "op": operation,
        "args": [stand_in(each) for each in args],
        "kwargs": {name: stand_in(each) for name, each in kwargs.items()},
    }
    return frames.pack(frames.ASK, meta=message), callbacks


def arguments(message: Mapping[str, Any], send: Callable[[bytes], object]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a request; its callables send what they are called with.

    Raises:
        WireError: it is no request.
    """

    def call_back(number: int, what: Any) -> None:
        is_log = isinstance(what, bytes) and not number
        send(frames.pack(frames.LOG, rest=[what]) if is_log else answer(callback=number, value=encode(what)))

    def value(each: Any) -> Any:
        if isinstance(each, dict) and each.keys() == {"@callback"}:
            return functools.partial(call_back, each["@callback"])
        return decode(each)

    try:
        kwargs = {name: value(each) for name, each in message["kwargs"].items()}
        return [value(each) for each in message["args"]], kwargs
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WireError(f"a request can't be read: {type(error).__name__}: {error}") from None


def handle_reply(frame: Frame, callbacks: Sequence[Any], note: Callable[[str], object]) -> bool:
    """Hands on one message of an answer; is it the last?"""
    message = frame.meta
    if frame.kind == frames.LOG:
        callbacks[0](bytes(frame.rest))
    elif "callback" in message:
        callbacks[message["callback"]](decode(message["value"]))
    elif "note" in message:
        note(message["note"])
    else:
        return "value" in message or "error" in message
    return False


def wait_readable(fd: int, limit_s: float) -> bool:
    """Can it be read within this time?"""
    reader = select.poll()
    reader.register(fd, select.POLLIN)
    return bool(reader.poll(max(0.0, limit_s) * 1000))


def check_hello(hello: Frame, whose: str) -> None:
    """Refuses another version.

    Raises:
        AtollError: it is one.
    """
    version = hello.meta.get("version")
    if version != VERSION:
        whose += f", process {hello.meta['pid']}," if "pid" in hello.meta else ""
        raise AtollError(
            f"{whose} speaks version {version} of Atoll's protocol, and this Atoll speaks {VERSION}: use the Atoll "
            f"that started its jobs, or end them"
        )
