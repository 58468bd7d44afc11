"""Functions, classes and named objects that travel by value, and the module that a rank keeps them in.

What the receiver can't import (``__main__``, a notebook, a test module) cloudpickle rebuilds there. In a rank the
rebuilt objects also get the name that they have in the driver: ``sys.modules`` holds a ``ScriptModule`` for each module
they come from. So plain pickle finds them: ``torch.save``, the workers of a DataLoader, ``all_gather_object``.

Within a call, all that comes from one module shares one namespace, whether it came with the function or with the
arguments. The next call starts with the driver's values again; definitions stay.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

from atoll.core.errors import SerializationError
from atoll.wire.torch_tensors import same

Name = tuple[str, str]
"""Module and qualified name."""

_is_rank = False
_namespaces: dict[str, dict[str, Any]] = {}  # of the running call, by module
_functions: dict[Name, types.FunctionType] = {}  # of the running call


class ScriptModule(types.ModuleType):
    """A module that is the driver's: it holds what calls brought of it."""

    def __repr__(self) -> str:
        return f"<module {self.__name__!r}, the driver's: a rank has what its calls use of it>"

    def __getattr__(self, name: str) -> Any:
        top = self.__name__.partition(".")[0]
        hint = "" if top == "__main__" else f": Image(includes=[{top!r}]) brings all of it"
        raise AttributeError(f"{self!r} has no {name!r} here{hint}", name=name, obj=self)


def keep_definitions(spec: Any) -> None:
    """Have this process, a rank, keep what arrives by value under its own name; ``spec`` is for its ``__main__``."""
    global _is_rank
    _is_rank = True
    sys.modules["__main__"] = ScriptModule("__main__")
    sys.modules["__main__"].__spec__ = spec


def begin_call() -> None:
    """Forget the namespaces of the call before."""
    _namespaces.clear()
    _functions.clear()


def script_module(name: str) -> types.ModuleType:
    """The module of that name, made with its packages where this process has none."""
    if name not in sys.modules:
        import cloudpickle

        package, _, _ = name.rpartition(".")
        if package and importlib.machinery.PathFinder.find_spec(name.partition(".")[0]) is None:
            script_module(package)
        sys.modules[name] = ScriptModule(name)
        cloudpickle.register_pickle_by_value(sys.modules[name])
    return sys.modules[name]


def _define(name: Name | None, obj: Any) -> None:
    """Put an object that arrived where plain pickle looks for it."""
    if not _is_rank or name is None or not isinstance(holder := script_module(name[0]), ScriptModule):
        return
    *outer, last = name[1].split(".")
    target: Any = holder
    for part in outer:
        if not hasattr(target, part):
            setattr(target, part, types.SimpleNamespace())  # only the inner class came
        target = getattr(target, part)
    setattr(target, last, obj)


def script_name(obj: Any) -> Name | None:
    """The name under which plain pickle finds ``obj`` in this process, or None."""
    module, qualname = obj.__module__, getattr(obj, "__qualname__", None) or obj.__name__
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return (module, qualname) if getattr(found, "__atoll_function__", found) is obj else None


# --- functions -------------------------------------------------------------------------------------------------------


class _Namespace:
    """Stands in a payload for the globals of a module's functions."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def __reduce__(self) -> tuple[Any, ...]:
        return namespace, (self.names,)


def namespace(names: dict[str, Any]) -> dict[str, Any]:
    """Used in payloads: the globals of functions from the module that ``names`` tells."""
    if not _is_rank:
        return names
    if names["__name__"] == "__main__" and "__file__" in names:
        sys.modules["__main__"].__file__ = names["__file__"]
    return _namespaces.setdefault(names["__name__"], names)


def reduce_function(pickler: Any, function: Any) -> Any:
    """The reduction of a function; NotImplemented where it travels by name."""
    reduced = pickler.by_cloudpickle(function)
    if reduced is NotImplemented:
        return reduced
    maker, (code, names, *more), *rest = reduced
    module = sys.modules.get(names.get("__name__"))
    if module is not None and vars(module) is function.__globals__:
        names = pickler.namespaces.setdefault(id(names), _Namespace(names))
    args = (code, names, *more)
    if "." not in function.__qualname__ and (name := script_name(function)) is not None:
        return (make_function, (*name, maker, args), *rest)
    return (maker, args, *rest)


def make_function(module: str, qualname: str, maker: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Used in payloads: the function of that name, the one of this call where it came with another payload."""
    known, code = _functions.get((module, qualname)), args[0]
    if known is not None and known.__code__ == code and not code.co_freevars:
        return known
    function = maker(*args)
    if _is_rank:
        _functions[module, qualname] = function
        _define((module, qualname), function)
    return function


# --- classes ---------------------------------------------------------------------------------------------------------

# Classes sent by value come back as the very class they were sent from, and cloudpickle would then write the state
# that travelled over the original: methods replaced by copies, class attributes reset. Only classes that were made
# here from a payload take state from a payload.
_native_classes: weakref.WeakSet[type] = weakref.WeakSet()
_made_classes: weakref.WeakSet[type] = weakref.WeakSet()


def reduce_class(pickler: Any, cls: Any) -> Any:
    """The reduction of a class; NotImplemented where it travels by name."""
    reduced = pickler.by_cloudpickle(cls)
    if type(reduced) is not tuple or len(reduced) != 6:
        return reduced
    if cls not in _made_classes:
        _native_classes.add(cls)
    return (*reduced[:5], functools.partial(set_class_state, reduced[5], script_name(cls), cls.__qualname__))


def set_class_state(
    setter: Callable[[type, Any], Any], name: Name | None, qualname: str, cls: type, state: Any
) -> None:
    """Used in payloads: fill a class that was sent by value, unless it was defined in this process."""
    if cls not in _native_classes:
        _made_classes.add(cls)
        setter(cls, state)
        cls.__qualname__ = qualname
        _define(name, cls)


# --- what pickle knows by name only ----------------------------------------------------------------------------------


def reduce_named(pickler: Any, obj: Any) -> Any:
    """The reduction of an object that may be known by its name alone, such as a NewType or a cached function."""
    if type(obj) in pickler.dispatch_table:
        return NotImplemented
    reduced = obj.__reduce_ex__(5)
    if type(reduced) is not str or not isinstance(getattr(obj, "__module__", None), str):
        return reduced
    from cloudpickle import cloudpickle

    found = cloudpickle._lookup_module_and_qualname(obj, reduced)
    if found is not None and found[0].__name__ not in cloudpickle.list_registry_pickle_by_value():
        return reduced
    by_value = _BY_VALUE.get((type(obj).__module__, type(obj).__qualname__))
    if by_value is None:
        raise SerializationError(
            f"it is known only by its name, {reduced!r} of module {obj.__module__!r}, which ranks can't import. Move "
            "its definition into a file of its own beside the script and import it from there (on other machines "
            "Image(includes=[...]) brings that file), or create it inside the function"
        )
    return by_value(pickler, obj)


def _reduce_cached(pickler: Any, cached: Any) -> Any:
    """``functools.cache``: made around a function that is filled afterwards, for it may call itself."""
    maker, args, state, setter = same, (cached.__wrapped__,), None, None
    if isinstance(cached.__wrapped__, types.FunctionType):
        reduced = reduce_function(pickler, cached.__wrapped__)
        if reduced is not NotImplemented:
            maker, args, state, _, _, setter = reduced
    own = {name: value for name, value in vars(cached).items() if name not in ("__wrapped__", "cache_parameters")}
    name = script_name(cached) if "." not in cached.__qualname__ else None  # a method's class holds it
    fill = functools.partial(fill_cached, setter, name)
    return make_cached, (cached.cache_parameters(), maker, args), (state, own), None, None, fill


def make_cached(parameters: dict[str, Any], maker: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Used in payloads: a cached function with an empty cache."""
    return functools.lru_cache(**parameters)(maker(*args))


def fill_cached(setter: Callable[[Any, Any], Any] | None, name: Name | None, cached: Any, state: Any) -> None:
    """Used in payloads: give the function inside what it needs."""
    function, own = state
    if setter is not None:
        setter(cached.__wrapped__, function)
    vars(cached).update(own)
    _define(name, cached)


def _reduce_type_like(pickler: Any, obj: Any, *args: Any, **options: Any) -> Any:
    from cloudpickle import cloudpickle

    made = (cloudpickle._get_or_create_tracker_id(obj), type(obj), (obj.__name__, *args), options)
    return make_type_like, made, obj.__module__, None, None, functools.partial(fill_type_like, script_name(obj))


def make_type_like(tracker_id: str, kind: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Used in payloads: a NewType, ParamSpec or the like; the one that is here, if it came before."""
    from cloudpickle import cloudpickle

    return cloudpickle._lookup_class_or_track(tracker_id, kind(*args, **options))


def fill_type_like(name: Name | None, obj: Any, module: str) -> None:
    """Used in payloads: name the module it comes from."""
    if isinstance(obj, typing.NewType):
        obj.__module__ = module
    _define(name, obj)


def _reduce_param_spec(pickler: Any, obj: Any) -> Any:
    variance = {"covariant": obj.__covariant__, "contravariant": obj.__contravariant__}
    return _reduce_type_like(pickler, obj, bound=obj.__bound__, **variance)


_BY_VALUE: dict[Name, Callable[[Any, Any], Any]] = {
    ("functools", "_lru_cache_wrapper"): _reduce_cached,
    ("typing", "NewType"): lambda pickler, obj: _reduce_type_like(pickler, obj, obj.__supertype__),
    ("typing", "ParamSpec"): _reduce_param_spec,
    ("typing", "TypeVarTuple"): _reduce_type_like,
    ("typing", "TypeAliasType"): lambda pickler, obj: _reduce_type_like(
        pickler, obj, obj.__value__, type_params=obj.__type_params__
    ),
}


# --- containers of the standard library that plain pickle refuses ---------------------------------------------------


def reduce_cached_property(pickler: Any, obj: Any) -> Any:
    """A ``functools.cached_property``, whose lock (Python 3.11) is made anew."""
    return make_cached_property, (type(obj),), {name: value for name, value in vars(obj).items() if name != "lock"}


def make_cached_property(kind: Any) -> Any:
    """Used in payloads: an empty one."""
    made = kind.__new__(kind)
    made.lock = threading.RLock()
    return made


def reduce_weak_dict(pickler: Any, obj: Any) -> Any:
    """A dictionary of weak references, as ``functools.singledispatch`` holds one; what nobody else holds goes."""
    return type(obj), (), None, None, iter(list(obj.items()))
