"""Exceptions as values of a payload: an instance with its arguments, attributes and notes, without its chain.

It is rebuilt by ``cls.__new__(cls, *args)``, the ``__init__`` of the builtin exception below it (which fills ``errno``,
``code`` and the like) and its attributes. The class's own ``__init__`` is not called: its signature need not match
``args``. A class that defines ``__reduce__`` decides for itself.
"""

from __future__ import annotations

import copyreg
import types
from typing import Any

# Kept by the record itself, or meaningless in another process. `obj` of an AttributeError is only there for spelling
# suggestions and may be anything, such as a whole module or model.
_OWN_FIELDS = frozenset(
    {"args", "obj", "exceptions", "message", "__cause__", "__context__", "__suppress_context__", "__traceback__"}
    | {"__dict__", "__notes__", "__weakref__"}
)


def reduce_exception(exc: BaseException) -> Any:
    """Pickle reduction of an exception, without its chain."""
    if _reduces_itself(type(exc)):
        return NotImplemented
    args, extra = arguments_of(exc)
    fields = fields_of(exc)
    if notes := notes_of(exc):
        fields["__notes__"] = notes
    kept = None if isinstance(exc, BaseExceptionGroup) else args
    return new_exception, (type(exc), (*args, *extra)), (kept, fields), None, None, restore_fields


def new_exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Used in payloads: an instance whose class's own ``__init__`` has not run, but the builtin one below it has."""
    exc = cls.__new__(cls, *args)
    if not isinstance(exc, BaseException):
        raise TypeError(f"{cls.__qualname__}.__new__ returned a {type(exc).__name__}, which is not an exception")
    try:
        _builtin_base(cls).__init__(exc, *args)
    except (TypeError, ValueError):  # arguments it cannot take, such as text that stands for a value
        BaseException.__init__(exc, *args)
    return exc


def restore_fields(exc: BaseException, state: tuple[tuple[Any, ...] | None, dict[str, Any]]) -> None:
    """Used in payloads: put back ``args`` (unless None) and the attributes of an exception."""
    args, fields = state
    if args is not None:
        BaseException.__dict__["args"].__set__(exc, args)
    for name, value in fields.items():
        set_attribute(exc, name, value)


def set_attribute(exc: BaseException, name: str, value: Any) -> None:
    """Set an attribute past a ``__setattr__`` or read-only property of the class (a frozen dataclass, say)."""
    try:
        object.__setattr__(exc, name, value)
    except (AttributeError, TypeError):
        object.__getattribute__(exc, "__dict__")[name] = value


def arguments_of(exc: BaseException) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """``exc.args``, and what the builtin base wants to be constructed with beyond them (OSError: the file names)."""
    args: tuple[Any, ...] = BaseException.__dict__["args"].__get__(exc)
    wanted: Any = _builtin_base(type(exc)).__reduce__(exc)[1]
    same = isinstance(wanted, tuple) and all(a is b for a, b in zip(args, wanted, strict=False))
    return args, wanted[len(args) :] if same else ()


def fields_of(exc: BaseException) -> dict[str, Any]:
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


def notes_of(exc: BaseException) -> list[str]:
    """The notes of an exception that are text."""
    notes = object.__getattribute__(exc, "__dict__").get("__notes__")
    return [note for note in notes if type(note) is str] if isinstance(notes, list | tuple) else []


def _builtin_base(cls: type[BaseException]) -> type[BaseException]:
    return next((base for base in cls.__mro__ if base.__module__ == "builtins"), BaseException)


def _reduces_itself(cls: type) -> bool:
    """Whether a class above the builtin exceptions says itself how it is pickled."""
    own = cls.__mro__[: cls.__mro__.index(_builtin_base(cls))]
    return cls in copyreg.dispatch_table or any({"__reduce__", "__reduce_ex__"} & base.__dict__.keys() for base in own)
