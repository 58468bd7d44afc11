"""Checks of arguments, and what their messages are made of: the nearest known name, bounds, a command line to paste."""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from atoll.core.errors import ConfigError, UsageError
from atoll.core.secrets import redact

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Other names of keyword arguments, such as those of the command line.
_OTHER_NAMES = {
    "accelerators": "accelerator",
    "gpus": "accelerator",
    "infra": "provider",
    "nproc": "workers_per_node",
    "nproc_per_node": "workers_per_node",
    "num_nodes": "nodes",
}
_TEN_YEARS_S = 10 * 365.25 * 86400.0
# The most of what is counted anywhere: more is a typing mistake, or a damaged file.
MOST_NODES = 4096
MOST_PROCESSES = 4096  # of a node
MOST_ACCELERATORS = 1024  # of a node
MOST_TRIES = 1_000_000  # again, after a failure
MOST_MINUTES = 100 * 366 * 24 * 60
_STARTED_BY = {
    ".py": ("a script", "run"),
    ".toml": ("a recipe", "train"),
    ".yaml": ("a task file", "launch"),
    ".yml": ("a task file", "launch"),
}
_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # between them: bytes of a command line that are not UTF-8
_LONGEST_SHOWN = 60  # characters of a value in a message
_VARIABLE_ARGUMENTS = 0x04  # inspect.CO_VARARGS, without what importing inspect costs


def suggests_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Has an unknown keyword argument raise ``UsageError`` with the nearest known one; keeps signature and text."""
    return _checked(function, lambda args, kwargs: None)


def suggests_fields(cls: type[T]) -> type[T]:
    """``suggests_keywords`` for the ``__init__`` that a dataclass generates; stands above ``@dataclass``."""
    type.__setattr__(cls, "__init__", suggests_keywords(vars(cls)["__init__"]))
    return cls


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """The same, and a value that is not what its annotation says raises ``UsageError`` before the function sees it.

    Of annotations it knows unions of classes and of what ``_KINDS`` names; anything else is not looked at.
    """
    code, kinds = function.__code__, function.__annotations__
    num_named = code.co_argcount
    names = code.co_varnames[:num_named]
    rest = code.co_varnames[num_named + code.co_kwonlyargcount] if code.co_flags & _VARIABLE_ARGUMENTS else ""

    def check(args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        spread = [(rest, value) for value in args[num_named:]] if rest else []
        for name, value in (*zip(names, args, strict=False), *spread, *kwargs.items()):
            kind = kinds.get(name, "object")
            if not _matches(value, kind, function.__globals__):
                where = function.__qualname__.removesuffix(".__init__")
                raise UsageError(f"{where}(): {name}={_short(value)}: expected {kind.replace(' | ', ' or ')}")

    return _checked(function, check)


def _checked(
    function: Callable[P, R], check: Callable[[tuple[object, ...], Mapping[str, object]], None]
) -> Callable[P, R]:
    code = function.__code__  # a plain function, which every use of this decorates
    names = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for unknown in [name for name in kwargs if name not in names]:
            name = _OTHER_NAMES.get(unknown, "")
            if name not in names:
                known = [each for each in names if each != "self"]
                others = [other for other, name in _OTHER_NAMES.items() if name in names]
                hint = nearest(unknown, [*known, *others]) or f": it takes {', '.join(known)}"
                where = function.__qualname__.removesuffix(".__init__")
                raise UsageError(f"{where}() has no argument {unknown!r}{hint}")
            if kwargs.setdefault(name, kwargs[unknown]) != kwargs.pop(unknown):
                raise ConfigError(f"{unknown}= and {name}= are two names of one setting; give one")
        check(args, kwargs)
        try:
            return function(*args, **kwargs)
        except (ConfigError, UsageError) as error:  # the caller's mistake: our frames say nothing about it
            raise error.with_traceback(None)  # noqa: B904 - it is the same error

    return checked


def _matches(value: object, annotation: str, names: Mapping[str, Any]) -> bool:
    """Is a value what an annotation's text says, as far as that is understood?"""
    return any(_is_one(value, each, names) for each in re.split(r" \| (?![^\[]*\])", annotation))


def _is_one(value: object, kind: str, names: Mapping[str, Any]) -> bool:
    name, _, items = kind.removesuffix("]").partition("[")
    if (known := _KINDS.get(name)) is not None:
        return known(value) and (name != "Sequence" or all(_matches(item, items, names) for item in value))  # type: ignore[attr-defined]
    if names.get(name, Any) is Any:  # that, imported for the type checker alone, or of the standard library
        return True
    kinds = getattr(names[name], "__args__", None) if type(names[name]).__name__ == "UnionType" else (names[name],)
    origins = [getattr(each, "__origin__", each) for each in kinds or ()]
    return any(not isinstance(each, type) or isinstance(value, each) for each in origins)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "None": lambda value: value is None,
    "bool": lambda value: type(value).__name__ in ("bool", "bool_"),  # NumPy's too
    "int": lambda value: hasattr(type(value), "__index__") and not isinstance(value, bool),
    "float": lambda value: hasattr(type(value), "__float__") and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "Path": lambda value: hasattr(type(value), "__fspath__"),
    "os.PathLike": lambda value: hasattr(type(value), "__fspath__"),
    "Callable": callable,
    "Mapping": lambda value: hasattr(type(value), "keys") and hasattr(type(value), "__getitem__"),
    "Iterable": lambda value: hasattr(type(value), "__iter__") and not isinstance(value, (str, bytes)),
    "Sequence": lambda value: isinstance(value, Sequence) and not isinstance(value, (str, bytes)),
}


def check_whole(name: str, value: object, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={_short(value)}: expected a whole number from {low} to {high}")
    return value


def check_truth(name: str, value: object) -> bool:
    """A truth value: the text ``"false"`` would count as true.

    Raises:
        ConfigError: it is something else.
    """
    if not _KINDS["bool"](value):
        raise ConfigError(f"{name}={_short(value)}: expected True or False")
    return bool(value)


def check_seconds(name: str, value: object) -> float | None:
    """A duration in seconds, or None.

    Raises:
        ConfigError: not a number, or not in (0, 10 years].
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _TEN_YEARS_S:
        raise ConfigError(f"{name}={value!r}: expected seconds, more than 0, or None (finite, at most 10 years)")
    return float(value)


def command_line(*words: object) -> str:
    """A command as a person pastes it into a shell: every word that needs it is quoted. Every message uses this."""
    return shlex.join(map(str, words))


def check_kind_of_file(path: str, command: str) -> None:
    """Is a file what ``atoll COMMAND`` starts, by its suffix? Files of other suffixes may be anything.

    Raises:
        ConfigError: it is what another command starts.
    """
    suffix = os.path.splitext(path)[1].lower()
    kind, its_command = _STARTED_BY.get(suffix, ("", command))
    if its_command != command and os.path.isfile(path):
        raise ConfigError(f"{path} is {kind}: {command_line('atoll', its_command, path)}")


def nearest(name: str, known: Iterable[str], folder: str = "") -> str:
    """``: did you mean 'nodes'?``, or nothing where no known name is near; files are named with their folder."""
    import difflib  # only where something went wrong: it is slow to import

    names = list(known)
    near = difflib.get_close_matches(name, names)
    # Of several as near, the one that is listed first.
    best = max(names, key=lambda each: (each in near, difflib.SequenceMatcher(None, each, name).ratio()), default="")
    return f": did you mean {os.path.join(folder, best)!r}?" if near else ""


def _short(value: object) -> str:
    shown = redact(repr(value))
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}…"


def unsendable(text: str) -> str | None:
    """What of ``text`` no program could be given, as a clause; None where all of it can be."""
    if "\0" in text:
        return "a zero character, which can't be passed to a program"
    half = _HALF.search(text)
    if half is not None:
        return f"\\u{ord(half[0]):04x}, which is half a character: write the whole one itself"
    return None
