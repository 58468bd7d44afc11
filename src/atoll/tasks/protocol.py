"""Messages between a cluster's supervisor and those who ask it, over any stream: a Unix socket, or a relay's stdio.

A message is ``length u32 | kind u8 | body``, of kind JSON or DATA (bytes of a log). Whoever answers begins with
``{"version": N}``. A request is ``{"op": NAME, "args": [...], "kwargs": {...}}`` and is answered with any number of
``{"callback": N, "value": ...}``, of DATA for callback 0 and of ``{"note": LINE}``, then with ``{"value": ...}`` or
``{"error": KIND, "message": ...}``. A method of the class that answers is declared for those who ask by
``remote(method)``: its signature is the only one. Standard library only.
"""

from __future__ import annotations

import functools
import json
import select
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.tasks.rows import EventRow, JobRow
from atoll.tasks.spec import ClusterSpec, JobSpec, JobStatus

VERSION = 1
_HEADER = struct.Struct("!IB")
_JSON, _DATA = 0, 1
_MOST_BYTES = 1 << 26  # a request holds a job's variables at most, and an answer a cluster's jobs

Message = dict[str, Any] | bytes
P = ParamSpec("P")
R = TypeVar("R")


class NothingLeft(AtollError, LookupError):
    """The cluster's folder was removed from the machine that supervises it."""


class Damaged(AtollError):
    """What came is not a message."""


_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (NothingLeft, ConfigError, ProvisionError, LookupError, AtollError)
}


def error_message(error: Exception) -> dict[str, str]:
    """The answer that raises the same kind of error for whoever asked."""
    kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), "AtollError")
    return {"error": kind, "message": str(error)}


def error_from(message: Mapping[str, Any], where: str = "") -> Exception:
    """The error that an answer stands for; ``where`` is named where it is of a file or a process there."""
    kind = _ERRORS.get(str(message["error"]), AtollError)
    prefix = f"{where}: " if where and kind is AtollError else ""
    return kind(f"{prefix}{message['message']}")


def pack(message: Message) -> bytes:
    """One message as bytes."""
    if isinstance(message, bytes):
        return _HEADER.pack(len(message), _DATA) + message
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(len(body), _JSON) + body


class Parser:
    """Cuts a stream of bytes into messages. No I/O."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Adds what was received; returns every message that is whole now.

        Raises:
            Damaged: it is not a message.
        """
        self._data += data
        found: list[Message] = []
        at = 0
        while len(self._data) - at >= _HEADER.size:
            length, kind = _HEADER.unpack_from(self._data, at)
            if kind not in (_JSON, _DATA) or length > _MOST_BYTES:
                raise Damaged(f"{bytes(self._data[at : at + 40])!r} is not a message")
            if len(self._data) < (end := at + _HEADER.size + length):
                break
            body = bytes(self._data[at + _HEADER.size : end])
            found.append(body if kind == _DATA else _object(body))
            at = end
        del self._data[:at]
        return found


def _object(body: bytes) -> dict[str, Any]:
    try:
        if isinstance(message := json.loads(body), dict):
            return message
    except ValueError:
        pass
    raise Damaged(f"{body[:40]!r} is not a message")


# ------------------------------------------------------------------------------------------------------- values
def encode(value: Any) -> Any:
    """A value as JSON has it; records are known again by their type."""
    match value:
        case JobRow() | ClusterSpec():
            return {f"@{type(value).__name__}": value.to_json()}
        case JobStatus():
            return {"@JobStatus": value.value}
        case JobSpec():
            return {"@JobSpec": {**value.to_json(), **value.variables()}}
        case EventRow():
            names = ("seq", "time_s", "kind", "text", "node", "rank", "data")
            return {"@EventRow": {name: getattr(value, name) for name in names}}
        case Mapping():
            return {key: encode(each) for key, each in value.items()}
        case list() | tuple():
            return [encode(each) for each in value]
    return value


def decode(value: Any) -> Any:
    """The value that ``encode`` was given; tuples have become lists."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((name, data),) = value.items()
        match name:
            case "@JobRow":
                return JobRow.from_json(data)
            case "@ClusterSpec":
                return ClusterSpec.from_json(data)
            case "@JobSpec":
                return JobSpec.from_json(data)
            case "@JobStatus":
                return JobStatus(data)
            case "@EventRow":
                return EventRow(**data)
    return {key: decode(each) for key, each in value.items()}


# ------------------------------------------------------------------------------------------------------- calls
class Caller(Protocol):
    """Whoever asks."""

    def call(self, operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The answer to one request."""


def remote(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of another class, asked for over a stream. Callables among its arguments are called back."""

    @functools.wraps(method)
    def ask(self: Caller, /, *args: P.args, **kwargs: P.kwargs) -> R:
        answer: R = self.call(method.__name__, args, kwargs)
        return answer

    return ask


def request(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any], **more: Any) -> tuple[bytes, list[Any]]:
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
    return pack({**message, **more}), callbacks


def arguments(message: Mapping[str, Any], send: Callable[[Message], object]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a request; its callables send what they are called with.

    Raises:
        Damaged: it is no request.
    """

    def value(each: Any) -> Any:
        if isinstance(each, dict) and each.keys() == {"@callback"}:
            number = each["@callback"]
            return lambda what: send(
                what if isinstance(what, bytes) and not number else {"callback": number, "value": encode(what)}
            )
        return decode(each)

    try:
        kwargs = {name: value(each) for name, each in message["kwargs"].items()}
        return [value(each) for each in message["args"]], kwargs
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"a request can't be read: {type(error).__name__}: {error}") from None


def handle_reply(message: Message, callbacks: Sequence[Any], note: Callable[[str], object]) -> dict[str, Any] | None:
    """Hands on one message of an answer; returns it where it is the last."""
    if isinstance(message, bytes):
        callbacks[0](message)
    elif "callback" in message:
        callbacks[message["callback"]](decode(message["value"]))
    elif "note" in message:
        note(message["note"])
    elif "value" in message or "error" in message:
        return message
    return None


def wait_readable(fd: int, limit_s: float) -> bool:
    """Can it be read within this time?"""
    reader = select.poll()
    reader.register(fd, select.POLLIN)
    return bool(reader.poll(max(0.0, limit_s) * 1000))


def check_hello(message: Message, whose: str) -> None:
    """Refuses another version.

    Raises:
        AtollError: it is one.
    """
    version = message.get("version") if isinstance(message, dict) else None
    if version != VERSION:
        raise AtollError(
            f"{whose} speaks version {version} of Atoll's protocol, and this Atoll speaks {VERSION}: use the Atoll "
            f"that started its jobs, or end them"
        )
