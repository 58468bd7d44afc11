"""What messages need to be of help: the nearest known name, plain checks of values, and nothing that is secret."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from atoll.core.errors import ConfigError, UsageError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_TEN_YEARS_S = 10 * 365.25 * 86400.0
# The most of what is counted anywhere: more is a typing mistake, or a damaged file.
MOST_NODES = 4096
MOST_PROCESSES = 4096  # of a node
MOST_ACCELERATORS = 1024  # of a node
MOST_TRIES = 1_000_000  # again, after a failure
MOST_MINUTES = 100 * 366 * 24 * 60
_LONGEST_SHOWN = 60  # characters of a value in a message
_VARIABLE_ARGUMENTS = 0x04  # inspect.CO_VARARGS
_VARIABLE_KEYWORDS = 0x08  # inspect.CO_VARKEYWORDS, without what importing inspect costs
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]+@")
_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # of a URL; a user alone is no secret
_SECRET_NAME = re.compile(
    r"(?:.*(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)|PGPASS|(?:.*_)?(?:PAT|PASS))S?(?:_?\d+)?", re.I
)
# What providers' tokens begin with, whatever the variable is called.
_TOKEN = re.compile(
    r"(?:gh[opsu]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-|AKIA|AIza|eyJ|npm_|pypi-|https://hooks\.slack\.com/)[\w./+=-]{12,}"
)
_PARTS = re.compile(r"[^\s\-_.:,;@/|\"'{}()\[\]]+")
_WORD = re.compile(r"(?=.{1,24}$)(?:(?:[A-Z]+|[A-Z]?[a-z]+(?:[A-Z][a-z]{2,})*)\d{0,4}|\d+[A-Za-z]{0,3})")
_PATH = re.compile(r"(?:~|\.{0,2})(?:/[\w.@ -]+)+/?")
_SHORTEST_SECRET = 8


def suggests_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Have an unknown keyword argument raise ``UsageError`` with the nearest known one.

    Signature and text stay those of the function. Those that take any keyword are left as they are.
    """
    return _checked(function, lambda args, kwargs: None)


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """The same, and a value that is not what its annotation says raises ``UsageError`` before the function sees it.

    Of annotations it knows unions of classes, ``None``, ``bool``, ``int``, ``float``, ``str``, ``os.PathLike``,
    ``Callable``, ``Mapping``, ``Iterable`` and ``Sequence`` with its items; anything else is not looked at.
    """
    code, kinds = function.__code__, function.__annotations__
    num_named = code.co_argcount
    names = code.co_varnames[:num_named]
    rest = code.co_varnames[num_named + code.co_kwonlyargcount] if code.co_flags & _VARIABLE_ARGUMENTS else ""

    def check(args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        spread = [(rest, value) for value in args[num_named:]] if rest else []
        for name, value in (*zip(names, args, strict=False), *spread, *kwargs.items()):
            kind = kinds.get(name, "object")
            if not _is_of(value, kind, function.__globals__):
                where = function.__qualname__.removesuffix(".__init__")
                raise UsageError(f"{where}(): {name}={_short(value)}: expected {kind.replace(' | ', ' or ')}")

    return _checked(function, check)


def _short(value: object) -> str:
    shown = redact(repr(value))
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}…"


def _is_of(value: object, kind: str, names: Mapping[str, Any]) -> bool:
    """Is a value what an annotation's text says, as far as that is understood?"""
    return any(_is_one(value, each, names) for each in re.split(r" \| (?![^\[]*\])", kind))


def _is_one(value: object, kind: str, names: Mapping[str, Any]) -> bool:
    name, _, items = kind.removesuffix("]").partition("[")
    if name in ("Any", "object"):
        return True
    if (known := _KINDS.get(name)) is not None:
        return known(value) and (name != "Sequence" or all(_is_of(item, items, names) for item in value))  # type: ignore[attr-defined]
    if name not in names:  # imported for the type checker alone, or of the standard library
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


def _checked(
    function: Callable[P, R], check: Callable[[tuple[object, ...], Mapping[str, object]], None]
) -> Callable[P, R]:
    code = function.__code__  # a plain function, which every use of this decorates
    if code.co_flags & _VARIABLE_KEYWORDS:
        return function
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    by_position, by_name = named[: code.co_posonlyargcount], frozenset(named[code.co_posonlyargcount :])

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= by_name:
            unknown = next(name for name in kwargs if name not in by_name)
            raise UsageError(_unknown_keyword(function.__qualname__, unknown, named, by_position))
        check(args, kwargs)
        return function(*args, **kwargs)

    return checked


def suggests_fields(cls: type[T]) -> type[T]:
    """``suggests_keywords`` for the ``__init__`` that a dataclass generates; stands above ``@dataclass``."""
    type.__setattr__(cls, "__init__", suggests_keywords(vars(cls)["__init__"]))
    return cls


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


def _unknown_keyword(where: str, unknown: str, named: Iterable[str], by_position: Iterable[str]) -> str:
    call = f"{where.removesuffix('.__init__')}()"
    if unknown in by_position:
        return f"{call} takes {unknown!r} by position: leave {unknown}= out"
    names = [name for name in named if name != "self" and name not in by_position]
    hint = nearest(unknown, names)
    return f"{call} has no argument {unknown!r}{hint or ': it takes ' + ', '.join(names)}"


def command_line(*words: object) -> str:
    """A command as a person pastes it into a shell: every word that needs it is quoted. Every message uses this."""
    return shlex.join(map(str, words))


def nearest(name: str, known: Iterable[str], folder: str = "") -> str:
    """``: did you mean 'nodes'?``, or nothing where no known name is near; files are named with their folder."""
    import difflib  # only where something went wrong: it is slow to import

    names = list(known)
    near = difflib.get_close_matches(name, names)
    # Of several as near, the one that is listed first.
    best = max(names, key=lambda each: (each in near, difflib.SequenceMatcher(None, each, name).ratio()), default="")
    return f": did you mean {os.path.join(folder, best)!r}?" if near else ""


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


def current_folder() -> str:
    """The folder this process works in.

    Raises:
        ConfigError: it was removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current folder is gone: it was removed after this process went into it, and ranks start there. "
            "Go to one that exists, with cd or os.chdir(...)"
        ) from None


def redact(text: str) -> str:
    """``text`` with user and password of every URL in it replaced by ``****``."""
    return _CREDENTIALS.sub("****@", text)


def digest_credentials(text: str) -> str:
    """``text`` with user and password of every URL in it as a digest, which still tells two apart."""
    return _CREDENTIALS.sub(lambda found: f"{_digest(found[0])}@", text)


def is_secret(name: str, value: str = "") -> bool:
    """Is this variable one that no record shows: by its name (``HF_TOKEN``), as a token, as a URL with a password?"""
    return any((_SECRET_NAME.fullmatch(name), _TOKEN.fullmatch(value), _PASSWORD.search(value)))


def secret_parts(name: str, value: str) -> set[str]:
    """What logs hide of a variable that nobody declared a secret: nothing where its value is made of ordinary words.

    ``DEPLOY_KEY=production`` hides nothing, ``DEPLOY_KEY=x7Kq9…`` its value, a URL with a password both.
    """
    if (found := _PASSWORD.search(value)) is not None:
        password = found[0][3:-1].partition(":")[2]
        return {value, password} if _looks_generated(password) else {value}
    if _TOKEN.fullmatch(value) or (_SECRET_NAME.fullmatch(name) and _looks_generated(value)):
        return {value}
    return set()


def _looks_generated(value: str) -> bool:
    """Has this text the length and the variety of a key? Words, numbers, names of models and paths have not."""
    if len(value) < _SHORTEST_SECRET or _PATH.fullmatch(value):
        return False
    odd = "".join(part for part in _PARTS.findall(value) if not _WORD.fullmatch(part))
    return len(odd) >= 6 and len(set(odd)) >= 5


def shown_variable(name: str, value: str) -> str:
    """A variable's value for messages and lists; a secret's digest, which still tells two apart."""
    return _digest(value) if is_secret(name, value) else value


def _digest(secret: str) -> str:
    return f"<secret {hashlib.sha256(secret.encode()).hexdigest()[:8]}>"
