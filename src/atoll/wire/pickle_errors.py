"""Saying what cannot travel, and where it sits: the path from what was sent to the object that is at fault."""

from __future__ import annotations

import collections
import functools
import io
import time
import types
from collections.abc import Iterator
from typing import Any

from atoll.core.errors import SerializationError

PLAIN_SCALARS = frozenset({type(None), bool, int, float})

_SEARCH_S = 2.0
_SEARCH_OBJECTS = 200_000
_SEARCH_DEPTH = 40
_SEARCH_BREADTH = 10_000

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
            f"{what} cannot travel between processes: its objects are nested too deeply for pickle. "
            "Flatten it (for example a list with indices instead of linked objects), or raise sys.setrecursionlimit"
        )
    where = locate(culprit, starts)
    if isinstance(exc, SerializationError):
        reason = str(exc)
    else:
        reason = f"{type(exc).__name__}: {message_of(exc)}".rstrip(".") + f". {_next_step(culprit)}"
    return SerializationError(f"{where} cannot travel between processes: {reason}")


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

    It only follows references and runs no object's pickling code. Bounded in time, depth, breadth and number.
    """
    deadline = time.monotonic() + _SEARCH_S
    trail: list[tuple[object, str, int, int]] = [(obj, label, -1, 0) for label, obj in starts]
    seen = {id(obj) for _, obj in starts}
    for position in range(_SEARCH_OBJECTS):
        if position >= len(trail):
            return None
        obj, _, _, depth = trail[position]
        if obj is target:
            return _spell(trail, position)
        if time.monotonic() > deadline:
            return None
        if depth >= _SEARCH_DEPTH:
            continue
        for count, (label, child) in enumerate(_safe_children(obj)):
            if child is target:
                trail.append((child, label, position, depth + 1))
                return _spell(trail, len(trail) - 1)
            if count >= _SEARCH_BREADTH:
                break
            if type(child) not in PLAIN_SCALARS and id(child) not in seen:
                seen.add(id(child))
                trail.append((child, label, position, depth + 1))
    return None


def _spell(trail: list[tuple[object, str, int, int]], position: int) -> str:
    steps: list[str] = []
    while position >= 0:
        _, label, position, _ = trail[position]
        steps.append(label)
    return " → ".join(reversed(steps))


def _safe_children(obj: object) -> Iterator[tuple[str, object]]:
    try:
        yield from _children(obj)
    except Exception:  # noqa: BLE001 - the search reads objects of any kind; one that cannot be read is just not searched
        return


def _children(obj: Any) -> Iterator[tuple[str, object]]:
    """What pickling ``obj`` would reach next, each with the way it is written."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{brief(key)}]", value
            yield f"key {brief(key)}", key
    elif isinstance(obj, list | tuple | set | frozenset | collections.deque):
        fields = getattr(obj, "_fields", None)
        for index, value in enumerate(obj):
            yield (f".{fields[index]}" if fields else f"[{index}]"), value
    if isinstance(obj, types.FunctionType):
        yield from _function_children(obj)
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
        yield ".__func__", obj.__func__
    elif isinstance(obj, functools.partial):
        yield ".func", obj.func
        yield ".args", obj.args
        yield ".keywords", obj.keywords
    elif isinstance(obj, type):
        if obj.__module__ == "__main__" or "<locals>" in obj.__qualname__:
            for name, value in vars(obj).items():
                yield f".{name}", value
        return
    elif isinstance(obj, staticmethod | classmethod):
        yield ".__func__", obj.__func__
    elif isinstance(obj, BaseException):
        yield ".args", obj.args
    elif isinstance(obj, types.ModuleType):
        return
    for name, value in list(getattr(obj, "__dict__", {}).items()):
        yield f".{name}", value
    for base in type(obj).__mro__:
        for name, member in list(vars(base).items()):
            if isinstance(member, types.MemberDescriptorType) and not name.startswith("__"):
                try:
                    yield f".{name}", member.__get__(obj)
                except AttributeError:
                    continue
    yield f"its class {type(obj).__qualname__}", type(obj)


def _function_children(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    name = function.__qualname__
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"variable '{variable}' that {name}() uses", cell.cell_contents
        except ValueError:  # an empty cell
            continue
    yield f"defaults of {name}()", function.__defaults__
    yield f"defaults of {name}()", function.__kwdefaults__
    for variable in _global_names(function.__code__):
        if variable in function.__globals__:
            yield f"global '{variable}' that {name}() uses", function.__globals__[variable]


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


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
    """``str(exc)`` of any exception."""
    try:
        return str(exc)
    except BaseException:  # noqa: BLE001 - as above, a hostile __str__ must not hide the error that is being explained
        return "<its message cannot be shown>"
