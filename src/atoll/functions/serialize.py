"""Making a function and its arguments ready to send.

A function that a rank can import by name travels by name, so that it runs the code in the file as it is then.
Everything else travels by value: functions of ``__main__``, of notebooks and test modules, lambdas, closures.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import inspect
import itertools
import pickle
import sys
import threading
import weakref
import zipimport
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from atoll.gang.call import Shipped
from atoll.wire.codec import Payload, dumps, is_plain
from atoll.wire.payloads import Arena, Encoded

_CACHEABLE_BYTES = 1 << 20
_STANDARD_LOADERS = (
    importlib.machinery.SourceFileLoader,
    importlib.machinery.SourcelessFileLoader,
    importlib.machinery.ExtensionFileLoader,
    importlib.machinery.BuiltinImporter,
    importlib.machinery.FrozenImporter,
    zipimport.zipimporter,
)
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_unique = itertools.count()
_NOTHING = pickle.dumps(((), {}), protocol=5)
_INLINE_BYTES = 1 << 16
_NO_ARGUMENTS = Encoded({"head": len(_NOTHING)}, [_NOTHING])
# By identity: an edited function is another one.
_pure: weakref.WeakKeyDictionary[Any, PureFunction] = weakref.WeakKeyDictionary()


class ByName:
    """Stands in a payload for what ``maker(*args)`` gives when it is loaded, such as a function that is imported."""

    def __init__(self, maker: Callable[..., Any], *args: object) -> None:
        self._reduced = maker, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def resolve(module: str, qualname: str) -> Callable[..., Any]:
    """The function of that name, imported, without what decorators put around it."""
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return unwrap(found)


def unwrap(function: Any) -> Callable[..., Any]:
    """What ``@sky.compute`` was put on; anything else as it is."""
    raw: Callable[..., Any] = getattr(function, "__atoll_function__", function)
    return raw


def serialize_call(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arena: Arena, modules: ByValueModules
) -> tuple[Shipped, Encoded]:
    """Make a function and its arguments ready to send.

    Raises:
        SerializationError: something can't travel; names it.
    """
    pure = _pure.get(function) if type(function) is FunctionType else None
    if (
        pure is not None
        and pure.state == (function.__code__, function.__defaults__, function.__kwdefaults__)
        and function.__globals__.keys().isdisjoint(pure.names)
        and not function.__dict__
    ):
        if not args and not kwargs:
            return pure.shipped, _NO_ARGUMENTS
        if is_plain((args, kwargs)):
            head = pickle.dumps((args, kwargs), protocol=5)
            if len(head) <= _INLINE_BYTES:
                return pure.shipped, Encoded({"head": len(head)}, [head])
    with modules.by_value():
        arguments = pack_arguments(function, args, kwargs)  # before anything is laid out that has to be released
        away = modules.are_remote and modules.covers(getattr(function, "__module__", None))
        return ship(function, arena, by_value=away), encode(arguments, arena)


@dataclass(slots=True)
class PureFunction:
    """A function that holds nothing a call could change, ready to send, with what it was made of.

    It is serialised again where that differs, or where a global that it names has been defined since.
    """

    shipped: Shipped
    state: tuple[CodeType, Any, Any]
    names: frozenset[str]


def ship(function: Callable[..., Any], arena: Arena, *, by_value: bool = False) -> Shipped:
    """Make a function ready to send; raises ``SerializationError`` naming what in it can't travel.

    ``by_value``: not by its name, though a rank on this machine could import it.
    """
    if by_value:
        return _shipped(dumps(function, what=f"the function {name_of(function)}"), arena, pure=False)
    if not isinstance(function, FunctionType) or not _is_pure(function):
        return _shipped(_payload(function), arena, pure=False)
    shipped = _shipped(_payload(function), arena, pure=True)
    state = (function.__code__, function.__defaults__, function.__kwdefaults__)
    _pure[function] = PureFunction(shipped, state, frozenset(_names(function.__code__)))
    return shipped


def _shipped(payload: Payload, arena: Arena, *, pure: bool) -> Shipped:
    cacheable = not payload.buffers and len(payload.head) <= _CACHEABLE_BYTES
    digest = hashlib.blake2b(payload.head, digest_size=12).hexdigest() if cacheable else f"#{next(_unique)}"
    # In line: what may be sent again, to a rank that is new, must not lie in a file that goes with its first call.
    encoded = Encoded({"head": payload.head_bytes}, [payload.head]) if cacheable else encode(payload, arena)
    return Shipped(digest, encoded, cacheable, pure and cacheable)


def encode(payload: Payload, arena: Arena) -> Encoded:
    """Lay a payload out for sending, as it is now: its call may wait while the caller writes to the same arrays."""
    encoded = arena.encode(payload)
    encoded.inline = [bytes(part) for part in encoded.inline]
    return encoded


def pack_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Payload:
    """Pickle a call's arguments; a failure names the one that can't travel."""
    return dumps(
        (tuple(args), dict(kwargs)),
        what=f"the arguments of {name_of(function)}",
        roots=lambda: [
            (f"argument {name!r} of {name_of(function)}", value) for name, value in _named(function, args, kwargs)
        ],
    )


def name_of(function: Any) -> str:
    """What to call a function in messages."""
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name.replace("<locals>.", "")


def _payload(function: Callable[..., Any]) -> Payload:
    what = f"the function {name_of(function)}"
    if isinstance(function, MethodType):
        by_name = importable(function.__func__)
        return dumps(ByName(MethodType, by_name, function.__self__) if by_name else function, what=what)
    return dumps(importable(function) or function, what=what)


def _is_pure(function: FunctionType) -> bool:
    """Does it hold nothing that could differ between two calls? Then it is pickled and rebuilt once.

    A function that can be imported is never pure: the file may be edited.
    """
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return (
        not function.__closure__
        and not function.__dict__.keys() - {"__wrapped__"}
        and all(type(value) in _SCALARS for value in defaults)
        and not _uses_globals(function.__code__, function.__globals__)  # a global may be defined after the first call
        and importable(function) is None
    )


def _uses_globals(code: CodeType, names: Mapping[str, Any]) -> bool:
    return any(name in names for name in _names(code))


def _names(code: CodeType) -> Iterator[str]:
    """Names that code looks up, and code within it."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


def importable(function: Any) -> ByName | None:
    """The function's name, if a rank would find the same function under it."""
    module_name = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if not module_name or not qualname or module_name == "__main__" or "<" in qualname:
        return None
    module = sys.modules.get(module_name)
    if module is None or not isinstance(function, FunctionType) or not module_importable(module):
        return None
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return ByName(resolve, module_name, qualname) if unwrap(found) is function else None


def module_importable(module: ModuleType) -> bool:
    """Would ``import`` on a rank find this module, and by the ordinary machinery?"""
    spec = getattr(module, "__spec__", None)
    if spec is None:
        return False
    if "site-packages" in (spec.origin or ""):
        return True
    return _is_standard(spec.loader) and _on_path(module.__name__, spec.origin)


def _is_standard(loader: object) -> bool:
    # Built-in and frozen modules (`os` is one) have the loader's class itself.
    return isinstance(loader, _STANDARD_LOADERS) or loader in _STANDARD_LOADERS


@functools.lru_cache(1024)
def _on_path(name: str, origin: str | None) -> bool:
    if origin in (None, "built-in", "frozen"):
        return True
    parent, _, _ = name.rpartition(".")
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    try:
        found = importlib.machinery.PathFinder.find_spec(name, path)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin == origin


class ByValueModules:
    """Modules that ranks can't import, such as test modules under pytest: what they define travels by value."""

    are_remote = False  # ranks are on other machines, which have none of the user's modules
    _lock = threading.RLock()  # what is registered with cloudpickle holds for the whole process

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}
        self._num_modules = 0
        self._names: list[str] = []

    def covers(self, name: str | None) -> bool:
        """Does this module travel by value?"""
        if name is None:
            return False
        if name not in self._known:
            self._known[name] = self._is_covered(name, sys.modules.get(name))
        return self._known[name]

    def _is_covered(self, name: str, module: ModuleType | None) -> bool:
        spec = getattr(module, "__spec__", None)
        if name == "__main__" or spec is None or module is None or not getattr(module, "__file__", None):
            return False
        return not _is_standard(spec.loader) and not module_importable(module)

    @contextlib.contextmanager
    def by_value(self) -> Iterator[None]:
        """While this lasts, cloudpickle sends what they define; the user's own use of it is as before."""
        import cloudpickle

        with self._lock:
            already = cloudpickle.list_registry_pickle_by_value()
            mine = [name for name in self._found() if name not in already]
            for name in mine:
                cloudpickle.register_pickle_by_value(sys.modules[name])
            try:
                yield
            finally:
                for name in mine:
                    cloudpickle.unregister_pickle_by_value(sys.modules[name])

    def _found(self) -> list[str]:
        if len(sys.modules) != self._num_modules:  # looked at again only where something was imported
            self._num_modules = len(sys.modules)
            self._names = [name for name in list(sys.modules) if self.covers(name)]
        self._names = [name for name in self._names if isinstance(sys.modules.get(name), ModuleType)]
        return self._names


def _named(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return [*((str(index), value) for index, value in enumerate(args)), *kwargs.items()]
    return list(bound.arguments.items())
