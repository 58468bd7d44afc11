"""How exceptions travel: as their own type where it can be had, and never at the price of losing the failure.

``pack_exception`` writes one record for every exception of the chain (causes, contexts, members of groups): names and
text as builtin values, and the exception itself as a pickle of its own. One that cannot be pickled goes without its
attributes, one that cannot be rebuilt arrives as a RemoteError with the text; neither keeps the others from arriving.

What ``unpack_exception`` returns prints like this: the remote traceback as text, then the exception as raised here.
Its ``__cause__`` is a ``RemoteTraceback``. The cause it had on the rank is that RemoteTraceback's ``__cause__``;
where it had none and its context was not suppressed, the context is the RemoteTraceback's ``__context__``.
The exception's own ``__context__`` is what it was on the rank.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from atoll.core.errors import RemoteError, RemoteTraceback
from atoll.wire import codec
from atoll.wire.codec import Payload
from atoll.wire.exception_values import arguments_of, fields_of, new_exception, notes_of, restore_fields, set_attribute
from atoll.wire.pickle_errors import brief, message_of, type_name

_MAX_DEPTH = 64
_PLAIN = (str, int, float, bool, type(None))
_MAX_TEXT = 1024 * 1024

_ATOLL = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MACHINERY = tuple(
    os.path.join(_ATOLL, package) + os.sep for package in ("functions", "gang", "agent", "worker", "wire", "core")
)
_STDLIB = os.path.dirname(os.path.abspath(traceback.__file__)) + os.sep

Packed = tuple[bytes, list[bytes]]


class _Record(NamedTuple):
    """One exception; travels as a plain tuple, so that a class that is missing there keeps nothing shut.

    ``pickled`` is the head of a payload and the range of buffers that belong to it: of the exception, or of a group's
    class and attributes, as ``members`` are records.
    """

    type_name: str
    message: str
    text: str
    pickled: tuple[bytes, int, int] | None
    notes: list[str]
    cause: tuple[Any, ...] | None
    context: tuple[Any, ...] | None
    suppress: bool
    members: list[tuple[Any, ...]] | None


# --- packing -------------------------------------------------------------------------------------------------------


def pack_exception(exc: BaseException) -> Payload:
    """Serialise an exception with its traceback, notes and chain.

    Never raises: what cannot travel is left out and named in a note, down to the bare type name and message.
    """
    chain = Payload([], [], [])
    try:
        record = _pack(exc, 0, chain, {})
        return Payload([pickle.dumps(record, protocol=5)], chain.buffers, chain.notes)
    except Exception:  # noqa: BLE001 - whatever went wrong, the driver has to hear of the failure it was about
        name, message = type_name(type(exc)), message_of(exc)
        bare = _Record(name, message, f"{name}: {message}", None, [], None, None, False, None)
        return Payload([pickle.dumps(tuple(bare), protocol=5)], [], [])


def _pack(
    exc: BaseException | None, depth: int, chain: Payload, known: dict[int, tuple[Any, ...] | None]
) -> tuple[Any, ...] | None:
    """The record of an exception and of all below it; None for a link that would close a cycle or goes too deep.

    Buffers and notes are added to ``chain``; ``known`` has what was packed, and None for what is being packed.
    """
    if exc is None or id(exc) in known or depth > _MAX_DEPTH:
        return None if exc is None else known.get(id(exc))
    known[id(exc)] = None
    notes = notes_of(exc)
    pickled = _pickle(exc, chain, notes)

    def link(other: BaseException | None) -> tuple[Any, ...] | None:
        record = _pack(other, depth + 1, chain, known)
        if other is not None and id(other) not in known:
            notes.append(f"an exception chained below it was left out: {type_name(type(other))}")
        return record

    group = exc if isinstance(exc, BaseExceptionGroup) else None
    record = _Record(
        type_name(type(exc)),
        group.message if group else message_of(exc),
        remote_traceback(exc, chain=depth == 0),
        pickled,
        notes,
        link(exc.__cause__),
        link(exc.__context__),
        exc.__suppress_context__,
        [record for member in group.exceptions if (record := link(member))] if group else None,
    )
    known[id(exc)] = tuple(record)
    return known[id(exc)]


def _pickle(exc: BaseException, chain: Payload, notes: list[str]) -> tuple[bytes, int, int] | None:
    """The exception with all that it holds, else without attributes and with text for arguments, else nothing."""

    def piece(value: object) -> tuple[bytes, int, int]:
        payload = codec.dumps(value)
        start = len(chain.buffers)
        chain.buffers += payload.buffers
        chain.notes += [line for line in payload.notes if line not in chain.notes]
        return payload.head, start, len(chain.buffers)

    group = exc if isinstance(exc, BaseExceptionGroup) else None
    try:
        return piece((type(exc), group.message, fields_of(exc)) if group else exc)
    except Exception as problem:  # noqa: BLE001 - reduction code of any object runs here
        notes.append(f"its attributes could not be sent and were left out: {problem}")
    try:
        args, extra = arguments_of(exc)
        shown = tuple(arg if type(arg) in _PLAIN else brief(arg) for arg in (*args, *extra))
        return piece((type(exc), group.message, {}) if group else _Bare(type(exc), shown))
    except Exception as problem:  # noqa: BLE001 - nor can its class; it arrives as a RemoteError
        notes.append(f"its class could not be sent: {problem}")
    return None


class _Bare:
    """Stands in a payload for an exception of this class that holds nothing but ``args``."""

    def __init__(self, cls: type[BaseException], args: tuple[Any, ...]) -> None:
        self.reduced = new_exception, (cls, args)

    def __reduce__(self) -> Any:
        return self.reduced


# --- the traceback as text -----------------------------------------------------------------------------------------


def remote_traceback(exc: BaseException, *, chain: bool = True) -> str:
    """The traceback with chains and groups, without the worker's own frames at the front of each stack."""
    try:
        shown = traceback.TracebackException(type(exc), exc, exc.__traceback__)
        _strip(shown, set())
        text = "".join(shown.format(chain=chain))
    except Exception:  # noqa: BLE001 - a hostile exception must not keep its failure from being reported
        text = f"{type_name(type(exc))}: {message_of(exc)}"
    left_out = len(text) - _MAX_TEXT
    return f"... {left_out} characters left out\n" + text[-_MAX_TEXT:] if left_out > 0 else text


def _strip(shown: traceback.TracebackException | None, seen: set[int]) -> None:
    """Drop the frames of Atoll's worker from the front of every stack, with standard library frames between them."""
    if shown is None or id(shown) in seen:
        return
    seen.add(id(shown))
    if shown.stack:
        own = 0
        for position, frame in enumerate(shown.stack):
            if frame.filename.startswith(_MACHINERY):
                own = position + 1
            elif not frame.filename.startswith((_STDLIB, "<frozen ")) or "site-packages" in frame.filename:
                break
        del shown.stack[: min(own, len(shown.stack) - 1)]  # of a failure within Atoll itself the last frame stays
    for other in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        _strip(other, seen)


# --- unpacking -----------------------------------------------------------------------------------------------------


def unpack_exception(head: bytes | memoryview, buffers: Sequence[Any], *, rank: int, node: int) -> BaseException:
    """Rebuild what ``pack_exception`` made, ready to be raised.

    Args:
        head, buffers: the payload.
        rank: global rank that raised.
        node: index of that rank's node.

    Returns:
        The exception as its own type, or a RemoteError where its class cannot be had here. Its ``__cause__`` is a
        RemoteTraceback; see the module's docstring for the chain below it.
    """
    built: dict[int, BaseException] = {}

    def build(values: tuple[Any, ...]) -> BaseException:
        """The exception of a record, with the chain below it. Links form no cycle: packing left those out."""
        if id(values) in built:
            return built[id(values)]
        record = _Record(*values)
        members = None if record.members is None else [build(member) for member in record.members]
        exc = built[id(values)] = _rebuild(record, buffers, members, rank, node)
        if record.notes:
            set_attribute(exc, "__notes__", record.notes)
        for name, linked in (("__context__", record.context), ("__cause__", record.cause)):
            if linked is not None:
                set_attribute(exc, name, build(linked))
        set_attribute(exc, "__suppress_context__", record.suppress)
        return exc

    first = codec.loads(head)
    exc = build(first)
    shown = RemoteTraceback(_Record(*first).text, rank, node)
    if exc.__cause__ is not None:
        shown.__cause__ = exc.__cause__
    elif not exc.__suppress_context__:
        shown.__context__ = exc.__context__
    set_attribute(exc, "__cause__", shown)
    return exc


def _rebuild(
    record: _Record, buffers: Sequence[Any], members: list[BaseException] | None, rank: int, node: int
) -> BaseException:
    try:
        if record.pickled is None:
            raise LookupError("it could not be pickled")
        head, start, stop = record.pickled
        value = codec.loads(head, buffers[start:stop])
        if members is None:
            if isinstance(value, BaseException):
                return value
            raise TypeError(f"it was rebuilt as a {type(value).__name__}")
        cls, message, fields = value
        group: BaseException = cls.__new__(cls, message, members)
        restore_fields(group, (None, fields))
        return group
    except Exception as problem:  # noqa: BLE001 - classes are imported and their __new__ runs: anything can happen
        record.notes.append(f"it could not be rebuilt as {record.type_name} here: {type(problem).__name__}: {problem}")
        if members:
            return BaseExceptionGroup(record.message, members)
        return RemoteError(record.type_name, record.message, rank=rank, node=node, remote_traceback=record.text)


def packed(exc: BaseException | None) -> Packed | None:
    """What ``pack_exception`` makes, as plain bytes to put into another message; None for None."""
    if exc is None:
        return None
    payload = pack_exception(exc)
    return payload.head, [bytes(buffer) for buffer in payload.buffers]


def unpacked(record: Packed | None) -> BaseException | None:
    """What ``packed`` took, where no rank raised it: a remote traceback would mislead, so there is no cause."""
    if record is None:
        return None
    exc = unpack_exception(*record, rank=0, node=0)
    exc.__cause__ = None
    return exc
