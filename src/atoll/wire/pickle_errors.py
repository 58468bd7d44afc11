"""Saying what cannot travel, and where it sits: the path from what was sent to the object that is at fault."""

from __future__ import annotations

import functools
import inspect
import io
import types
from collections.abc import Iterator
from typing import Any

from atoll.core.errors import SerializationError

PLAIN_SCALARS = frozenset({type(None), bool, int, float})
_SEARCH_OBJECTS = 50_000
_MAX_MESSAGE = 64 * 1024

_INSTEAD = {
    "generator": "Pass a list of its values, or create the generator inside the function",
    "coroutine": "Await it first, or create it inside the function",
    "async_generator": "Create it inside the function",
    "_thread.lock": "Create the lock inside the function",
    "_thread.RLock": "Create the lock inside the function",
    "socket.socket": "Open the connection inside the function",
    "frame": "Pass the values it holds",
    "traceback": "Pass traceback.format_exception(...) instead",
    "module": "Import it inside the function",
}


def refusal(exc: Exception, culprit: object, starts: list[tuple[str, object]]) -> SerializationError:
    """The error to raise for a failed ``dumps``; never fails itself."""
    what = starts[-1][0]
    if isinstance(exc, RecursionError) or isinstance(exc.__cause__, RecursionError):
        return SerializationError(
            f"{what} can't be sent to another process: its objects are nested too deeply for pickle. "
            "Flatten it (for example a list with indices instead of linked objects), or raise sys.setrecursionlimit"
        )
    where = locate(culprit, starts)
    if isinstance(exc, SerializationError):
        reason = str(exc)
    else:
        reason = f"{type(exc).__name__}: {message_of(exc)}".rstrip(".") + f". {_next_step(culprit)}"
    return SerializationError(f"{where} can't be sent to another process: {reason}")


def _next_step(culprit: object) -> str:
    if isinstance(culprit, io.IOBase):
        return "Pass the path and open it inside the function"
    for base in type(culprit).__mro__:
        step = _INSTEAD.get(type_name(base))
        if step is not None:
            return step
    return "Create it inside the function, or leave it out of what is sent (a class does so in __getstate__)"


def locate(culprit: object, starts: list[tuple[str, object]]) -> str:
    """Where an object sits: ``argument 'cfg' → ['opts'] → .lock (a _thread.lock)``."""
    what = starts[-1][0]
    if culprit is None:
        return what
    name = f"class {type_name(culprit)}" if isinstance(culprit, type) else article(type_name(type(culprit)))
    if isinstance(culprit, io.IOBase):
        name = f"an open file, {brief(getattr(culprit, 'name', None), 400)}, {name}"
    path = find_path(culprit, starts)
    return f"{what}, somewhere inside it {name}," if path is None else f"{path} ({name})"


def find_path(target: object, starts: list[tuple[str, object]]) -> str | None:
    """The shortest way from one of the named starts to ``target``; None where a bounded search finds none.

    It only follows references and runs no object's pickling code.
    """
    trail = [(obj, label, -1) for label, obj in starts]
    seen = {id(obj) for _, obj in starts}
    for position, (obj, _, _) in enumerate(trail):  # grows while it is walked
        if obj is target:
            steps: list[str] = []
            at = position
            while at >= 0:
                _, step, at = trail[at]
                steps.append(step)
            return " → ".join(reversed(steps))
        try:
            for label, child in _children(obj):
                if type(child) not in PLAIN_SCALARS and id(child) not in seen and len(trail) < _SEARCH_OBJECTS:
                    seen.add(id(child))
                    trail.append((child, label, position))
        except Exception:  # noqa: BLE001 - objects of any kind are read here; one that cannot be read is not searched
            continue
    return None


def _children(obj: Any) -> Iterator[tuple[str, object]]:
    """What pickling ``obj`` would reach next, each with the way it is written."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{brief(key)}]", value
    elif isinstance(obj, list | tuple | set | frozenset):
        names = getattr(obj, "_fields", None)
        for index, value in enumerate(obj):
            yield (f".{names[index]}" if names else f"[{index}]"), value
    elif isinstance(obj, types.FunctionType):
        name, uses = obj.__qualname__, inspect.getclosurevars(obj)
        yield from ((f"variable '{each}' that {name}() uses", value) for each, value in uses.nonlocals.items())
        yield from ((f"global '{each}' that {name}() uses", value) for each, value in uses.globals.items())
        yield f"defaults of {name}()", (*(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values())
    elif isinstance(obj, types.ModuleType):
        return
    if isinstance(obj, types.MethodType | functools.partial):
        for name in ("__self__", "__func__", "func", "args", "keywords"):
            if hasattr(obj, name):
                yield f".{name}", getattr(obj, name)
    elif isinstance(obj, BaseException):
        yield ".args", obj.args
    for name, value in list(getattr(obj, "__dict__", {}).items()):
        yield f".{name}", value
    for base in type(obj).__mro__:
        for name, member in list(vars(base).items()):
            if isinstance(member, types.MemberDescriptorType) and hasattr(obj, name):
                yield f".{name}", getattr(obj, name)


def type_name(kind: type) -> str:
    """``_thread.lock``, ``list``: the name of a type as a user would write it."""
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def article(noun: str) -> str:
    """``a list``, ``an int``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def brief(value: object, length: int = 60) -> str:
    """``repr(value)``, cut to a length, of any object."""
    try:
        text = repr(value)
    except BaseException:  # noqa: BLE001 - a hostile __repr__, sys.exit() in it included, must not hide the error that is being explained
        text = f"<{type(value).__qualname__}>"
    return text if len(text) <= length else text[: length - 3] + "..."


def message_of(exc: BaseException) -> str:
    """``str(exc)`` of any exception, cut where nobody reads on."""
    try:
        text = str(exc)
    except BaseException:  # noqa: BLE001 - as above, a hostile __str__ must not hide the error that is being explained
        return "<its message cannot be shown>"
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."
