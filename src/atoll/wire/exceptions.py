"""How exceptions travel: as their own type where it can be had, and never at the price of losing the failure.

``pack_exception`` writes one record for every exception of the chain (causes, contexts, members of groups), and inside
a record each argument and attribute as a pickle of its own. So what cannot be pickled here, or rebuilt there, costs
that one part and leaves a note; it never keeps the exception from arriving.

An exception is rebuilt by ``cls.__new__(cls, *args)``, the ``__init__`` of the builtin exception below it (which fills
``errno``, ``code`` and the like) and its attributes. The class's own ``__init__`` is not called: its signature need not
match ``args``. A class that defines ``__reduce__`` decides for itself.

What ``unpack_exception`` returns prints like this: the remote traceback as text, then the exception as raised here.
Its ``__cause__`` is a ``RemoteTraceback``. The cause it had on the rank is that RemoteTraceback's ``__cause__``;
where it had none and its context was not suppressed, the context is the RemoteTraceback's ``__context__``.
The exception's own ``__context__`` is what it was on the rank.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.core.errors import RemoteError, RemoteTraceback
from atoll.wire import codec, pickle_errors
from atoll.wire.codec import Payload

_MAX_DEPTH = 64
_MAX_RECORDS = 1000
_MAX_TEXT = 1024 * 1024
_MAX_MESSAGE = 64 * 1024

# Kept by the record itself, or meaningless in another process. `obj` of an AttributeError is only there for spelling
# suggestions and may be anything, such as a whole module or model.
_OWN_FIELDS = frozenset(
    {"args", "obj", "exceptions", "message", "__cause__", "__context__", "__suppress_context__", "__traceback__"}
    | {"__dict__", "__notes__", "__weakref__"}
)

_ATOLL = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MACHINERY = tuple(os.path.join(_ATOLL, *part) + os.sep for part in (("pool",), ("wire",), ("functions",), ("core",)))
_STDLIB = os.path.dirname(os.path.abspath(traceback.__file__)) + os.sep

Piece = tuple[bytes, int, int]
"""A pickled part: its head, and the range of the payload's buffers that belong to it."""

Packed = tuple[bytes, list[bytes]]


@dataclass(slots=True)
class _Record:
    """One exception as plain builtin values and pickled pieces; travels as a tuple of its fields."""

    type_name: str
    message: str
    text: str = ""
    cls: Piece | None = None
    whole: Piece | None = None
    args: list[tuple[Piece | None, str]] = field(default_factory=list)
    extra: list[tuple[Piece | None, str]] = field(default_factory=list)
    fields: list[tuple[str, Piece]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cause: int | None = None
    context: int | None = None
    suppress: bool = False
    members: list[int] | None = None
    group_message: str = ""

    def astuple(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


# --- packing -------------------------------------------------------------------------------------------------------


def pack_exception(exc: BaseException) -> Payload:
    """Serialise an exception with its traceback, notes and chain.

    Never raises: what cannot travel is left out and named in a note, down to the bare type name and message.
    """
    packer = _Packer()
    try:
        packer.add(exc, 0)
        packer.records[0].text = remote_traceback(exc)
        table = [record.astuple() for record in packer.records]
        return Payload([pickle.dumps(table, protocol=5)], packer.buffers, packer.notes)
    except Exception:  # noqa: BLE001 - whatever went wrong, the driver has to hear of the failure it was about
        bare = _Record(_type_name(exc), _message(exc), text=f"{_type_name(exc)}: {_message(exc)}")
        return Payload([pickle.dumps([bare.astuple()], protocol=5)], [], [])


class _Packer:
    """Collects the records of one chain; record 0 is the exception itself."""

    def __init__(self) -> None:
        self.records: list[_Record] = []
        self.buffers: list[memoryview] = []
        self.notes: list[str] = []
        self.index: dict[int, int] = {}
        self.open: set[int] = set()

    def add(self, exc: BaseException, depth: int) -> int | None:
        """The index of the record for ``exc``; None for a link that would close a cycle or goes too deep."""
        known = self.index.get(id(exc))
        if known is not None:
            return None if id(exc) in self.open else known
        if depth > _MAX_DEPTH or len(self.records) >= _MAX_RECORDS:
            return None
        record = _Record(_type_name(exc), _message(exc))
        index = self.index[id(exc)] = len(self.records)
        self.records.append(record)
        self.open.add(id(exc))
        record.notes = _notes(exc)
        try:
            self._fill(record, exc)
        except Exception as problem:  # noqa: BLE001 - a hostile exception class; its links below still travel
            record.notes.append(f"its attributes could not travel ({type(problem).__name__})")
        if depth:
            record.text = _formatted(exc, chain=False)[-_MAX_TEXT:]
        record.suppress = bool(exc.__suppress_context__)
        record.cause = self._link(record, exc.__cause__, depth)
        record.context = self._link(record, exc.__context__, depth)
        if isinstance(exc, BaseExceptionGroup):
            record.group_message = exc.message
            links = [self._link(record, member, depth) for member in exc.exceptions]
            record.members = [link for link in links if link is not None]
        self.open.discard(id(exc))
        return index

    def _link(self, record: _Record, exc: BaseException | None, depth: int) -> int | None:
        if exc is None:
            return None
        link = self.add(exc, depth + 1)
        if link is None and id(exc) not in self.open:
            record.notes.append(f"an exception chained below it was left out: {_type_name(exc)}: {_message(exc)[:200]}")
        return link

    def _fill(self, record: _Record, exc: BaseException) -> None:
        cls = type(exc)
        record.cls = self._piece(cls)
        if record.cls is None:
            return
        if _reduces_itself(cls):
            record.whole = self._piece(exc)
        if not isinstance(exc, BaseExceptionGroup):
            args, extra = _arguments(exc)
            record.args = [self._argument(record, position, value) for position, value in enumerate(args)]
            record.extra = [self._argument(record, len(args) + i, value) for i, value in enumerate(extra)]
        for name, value in _fields(exc).items():
            if value is exc:
                continue
            piece = self._piece(value)
            if piece is None:
                kind = pickle_errors.type_name(type(value))
                record.notes.append(f"its attribute '{name}' ({kind}) could not travel and was left out")
            else:
                record.fields.append((name, piece))

    def _argument(self, record: _Record, position: int, value: object) -> tuple[Piece | None, str]:
        piece = self._piece(value)
        if piece is None:
            kind = pickle_errors.type_name(type(value))
            record.notes.append(f"args[{position}] ({kind}) could not travel; its repr stands in for it")
        plain = type(value) in (str, int, float, bool, type(None))
        return piece, "" if plain else pickle_errors.brief(value)

    def _piece(self, value: object) -> Piece | None:
        try:
            payload = codec.dumps(value)
        except Exception:  # noqa: BLE001 - reduction code of any object; the caller says what was left out
            return None
        start = len(self.buffers)
        self.buffers += payload.buffers
        self.notes += [line for line in payload.notes if line not in self.notes]
        return payload.head, start, len(self.buffers)


def _arguments(exc: BaseException) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """``exc.args``, and what the builtin base wants to be constructed with beyond them (OSError: the file names)."""
    args: tuple[Any, ...] = BaseException.__dict__["args"].__get__(exc)
    wanted: Any = _builtin_base(type(exc)).__reduce__(exc)[1]
    same = isinstance(wanted, tuple) and all(a is b for a, b in zip(args, wanted, strict=False))
    return args, wanted[len(args) :] if same else ()


def _fields(exc: BaseException) -> dict[str, Any]:
    """Every attribute an exception holds: of its ``__dict__``, of ``__slots__`` and of builtin exceptions."""
    fields: dict[str, Any] = {}
    for base in type(exc).__mro__:
        for name, member in base.__dict__.items():
            if name in _OWN_FIELDS or not isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType):
                continue
            try:
                value = member.__get__(exc)
            except AttributeError:  # a slot or member without value
                continue
            if value is not None:
                fields.setdefault(name, value)
    fields.update((k, v) for k, v in object.__getattribute__(exc, "__dict__").items() if k != "__notes__")
    return fields


def _notes(exc: BaseException) -> list[str]:
    notes = object.__getattribute__(exc, "__dict__").get("__notes__")
    return [note for note in notes if type(note) is str] if isinstance(notes, list | tuple) else []


def _builtin_base(cls: type[BaseException]) -> type[BaseException]:
    for base in cls.__mro__:
        if base.__module__ == "builtins":
            return base
    return BaseException


def _reduces_itself(cls: type) -> bool:
    """Whether a class above the builtin exceptions says itself how it is pickled."""
    if cls in copyreg.dispatch_table:
        return True
    for base in cls.__mro__:
        if base.__module__ == "builtins":
            return False
        if any(name in base.__dict__ for name in ("__reduce__", "__reduce_ex__")):
            return True
    return False


def _type_name(exc: BaseException) -> str:
    return pickle_errors.type_name(type(exc))


def _message(exc: BaseException) -> str:
    text = pickle_errors.message_of(exc)
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."


# --- the traceback as text -----------------------------------------------------------------------------------------


def remote_traceback(exc: BaseException) -> str:
    """The full traceback with chains and groups, without the worker's own frames at the front of each stack."""
    text = _formatted(exc, chain=True)
    if len(text) > _MAX_TEXT:
        text = f"... {len(text) - _MAX_TEXT} characters left out\n" + text[-_MAX_TEXT:]
    return text


def _formatted(exc: BaseException, *, chain: bool) -> str:
    try:
        shown = traceback.TracebackException(type(exc), exc, exc.__traceback__)
        _strip(shown, set())
        return "".join(shown.format(chain=chain))
    except Exception:  # noqa: BLE001 - a hostile exception must not keep its failure from being reported
        return f"{_type_name(exc)}: {_message(exc)}"


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
    _strip(shown.__cause__, seen)
    _strip(shown.__context__, seen)
    for member in shown.exceptions or ():
        _strip(member, seen)


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
    records = [_Record(*values) for values in codec.loads(head)]
    unpacker = _Unpacker(records, buffers, rank, node)
    exc = unpacker.build(0)
    cause, context, suppressed = exc.__cause__, exc.__context__, exc.__suppress_context__
    shown = RemoteTraceback(records[0].text, rank, node)
    if cause is not None:
        shown.__cause__ = cause
    elif not suppressed:
        shown.__context__ = context
    _set(exc, "__cause__", shown)
    return exc


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


class _Unpacker:
    def __init__(self, records: list[_Record], buffers: Sequence[Any], rank: int, node: int) -> None:
        self.records = records
        self.buffers = buffers
        self.rank = rank
        self.node = node
        self.built: dict[int, BaseException] = {}

    def build(self, index: int) -> BaseException:
        """The exception of a record, with the chain below it. Links form no cycle: packing left those out."""
        if index in self.built:
            return self.built[index]
        record = self.records[index]
        exc = self._instance(record)
        if record.notes:
            _set(exc, "__notes__", list(record.notes))
        if record.context is not None:
            _set(exc, "__context__", self.build(record.context))
        if record.cause is not None:
            _set(exc, "__cause__", self.build(record.cause))
        _set(exc, "__suppress_context__", record.suppress)
        self.built[index] = exc
        return exc

    def _instance(self, record: _Record) -> BaseException:
        if record.whole is not None:
            try:
                whole = self._load(record.whole)
                if isinstance(whole, BaseException):
                    return whole
            except Exception as problem:  # noqa: BLE001 - the class's own reduction failed here; its parts may still do
                record.notes.append(f"its own __reduce__ failed here ({type(problem).__name__}: {problem})")
        members = None if record.members is None else [self.build(member) for member in record.members]
        try:
            if record.cls is None:
                raise LookupError("its class could not be pickled")
            return self._from_parts(record, self._load(record.cls), members)
        except Exception as problem:  # noqa: BLE001 - classes are imported and their __new__ runs: anything can happen
            if members:
                record.notes.append(f"it was a {record.type_name} there ({type(problem).__name__}: {problem})")
                return BaseExceptionGroup(record.group_message, members)
            why = f"it could not be rebuilt as {record.type_name} here: {type(problem).__name__}: {problem}"
            record.notes.append(why)
            return RemoteError(
                record.type_name, record.message, rank=self.rank, node=self.node, remote_traceback=record.text
            )

    def _from_parts(
        self, record: _Record, cls: type[BaseException], members: list[BaseException] | None
    ) -> BaseException:
        fields: dict[str, Any] = {}
        for name, piece in record.fields:
            try:
                fields[name] = self._load(piece)
            except Exception as problem:  # noqa: BLE001 - this attribute's class cannot be had here; the exception still can
                record.notes.append(
                    f"its attribute '{name}' could not be rebuilt ({type(problem).__name__}: {problem})"
                )
        if members is not None:
            exc = cls.__new__(cls, record.group_message, members)
            if not isinstance(exc, BaseException):
                raise TypeError(f"{record.type_name}.__new__ returned a {type(exc).__name__}")
            restore_fields(exc, (None, fields))
            return exc
        args = [self._argument(record, *entry) for entry in record.args]
        extra = [self._argument(record, *entry) for entry in record.extra]
        exc = new_exception(cls, tuple(args + extra))
        restore_fields(exc, (tuple(args), fields))
        return exc

    def _argument(self, record: _Record, piece: Piece | None, shown: str) -> Any:
        if piece is None:
            return shown
        try:
            return self._load(piece)
        except Exception as problem:  # noqa: BLE001 - as for attributes; the repr from the rank stands in for it
            record.notes.append(f"an argument could not be rebuilt ({type(problem).__name__}: {problem})")
            return shown

    def _load(self, piece: Piece) -> Any:
        head, start, stop = piece
        return codec.loads(head, self.buffers[start:stop])


# --- exceptions as values ------------------------------------------------------------------------------------------


def reduce_exception(exc: BaseException) -> Any:
    """Pickle reduction of an exception that is a value, returned or an attribute: rebuilt as above, without chain."""
    if _reduces_itself(type(exc)):
        return NotImplemented
    args, extra = _arguments(exc)
    fields = _fields(exc)
    notes = _notes(exc)
    if notes:
        fields["__notes__"] = notes
    kept = None if isinstance(exc, BaseExceptionGroup) else args
    return new_exception, (type(exc), (*args, *extra)), (kept, fields), None, None, restore_fields


def new_exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Used in payloads: an instance whose class's own ``__init__`` has not run, but the builtin one below it has."""
    exc = cls.__new__(cls, *args)
    if not isinstance(exc, BaseException):
        raise TypeError(f"{cls.__qualname__}.__new__ returned a {type(exc).__name__}, which is no exception")
    try:
        _builtin_base(cls).__init__(exc, *args)
    except (TypeError, ValueError):  # arguments it cannot take (a stand-in for one that was lost): fields fill the rest
        BaseException.__init__(exc, *args)
    return exc


def restore_fields(exc: BaseException, state: tuple[tuple[Any, ...] | None, dict[str, Any]]) -> None:
    """Used in payloads: put back ``args`` (unless None) and the attributes of an exception."""
    args, fields = state
    if args is not None:
        BaseException.__dict__["args"].__set__(exc, args)
    for name, value in fields.items():
        _set(exc, name, value)


def _set(exc: BaseException, name: str, value: Any) -> None:
    """Set an attribute past a ``__setattr__`` or read-only property of the class (a frozen dataclass, say)."""
    try:
        object.__setattr__(exc, name, value)
    except (AttributeError, TypeError):
        object.__getattribute__(exc, "__dict__")[name] = value
