# ruff: noqa: PLW0108 - each lambda is what is sent
"""A user's script with one of each ordinary thing; every one is used inside a rank. Prints a line of JSON for each."""

from __future__ import annotations

import abc
import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import itertools
import json
import logging
import operator
import random
import re
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, ParamSpec, Protocol, TypedDict, TypeVar

import numpy as np
import torch

import atoll as sky


class Color(enum.Enum):
    RED = 1


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Text(enum.StrEnum):
    X = "x"


class Point(NamedTuple):
    a: int
    b: str = "x"


Old = collections.namedtuple("Old", "x y")


class Typed(TypedDict):
    a: int


@dataclasses.dataclass(slots=True)
class Slotted:
    a: int = 1


@dataclasses.dataclass(frozen=True, order=True)
class Frozen:
    a: int
    b: list[int] = dataclasses.field(default_factory=list)


class Shape(Protocol):
    def area(self) -> int: ...


T = TypeVar("T")
P = ParamSpec("P")


class Box(Generic[T]):
    def __init__(self, x: T) -> None:
        self.x = x


@functools.singledispatch
def kind(x: Any) -> str:
    return "object"


@kind.register
def _(x: int) -> str:
    return "int"


@kind.register
def _(x: list) -> str:  # type: ignore[type-arg]
    return "of " + kind(x[0])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class Sub(Net):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


class Abstract(abc.ABC):
    @abc.abstractmethod
    def f(self) -> int: ...


class Concrete(Abstract):
    def f(self) -> int:
        return 5


class Meta(type):
    def __new__(cls, name: str, bases: Any, body: Any) -> Any:
        return super().__new__(cls, name, bases, {**body, "added": 7})


class OfMeta(metaclass=Meta):
    added: int


class Answer:
    def __get__(self, owner: Any, kind: Any = None) -> int:
        return 42


class Described:
    answer = Answer()


def plus(a: int, b: int) -> int:
    return a + b


plus_one = functools.partial(plus, 1)


def again(function: Callable[P, int]) -> Callable[P, int]:
    @functools.wraps(function)
    def wrapped(*args: P.args, **options: P.kwargs) -> int:
        return function(*args, **options) + 1

    return wrapped


@again
def decorated(x: int) -> int:
    return x


@functools.lru_cache(maxsize=16)
def fib(n: int) -> int:
    return n if n < 2 else fib(n - 1) + fib(n - 2)


@functools.cache
def doubled(x: int) -> int:
    return 2 * x


def with_cached_inside() -> int:
    @functools.cache
    def inner(n: int) -> int:
        return 1 if n < 2 else n * inner(n - 1)

    return sum(POOL.run_one(lambda: inner(4)) for _ in range(2))


class Many:
    @functools.cached_property
    def cached(self) -> int:
        return 9

    @property
    def plain(self) -> int:
        return 8

    @staticmethod
    def static() -> int:
        return 1

    @classmethod
    def named(cls) -> str:
        return cls.__name__

    @functools.lru_cache  # noqa: B019
    def remembered(self) -> int:
        return 4

    partial = functools.partialmethod(plus, 3)

    @functools.singledispatchmethod
    def dispatched(self, x: Any) -> str:
        return "object"

    @dispatched.register
    def _(self, x: int) -> str:
        return "int"

    def all(self) -> list[Any]:
        return [self.cached, self.plain, self.static(), self.named(), self.remembered(), self.dispatched(1)]


UserId = NewType("UserId", int)


def annotated(x: UserId) -> UserId:
    return UserId(x)


Alias = dict[str, list[int]]
Mode = Literal["a", "b"]
Marked = Annotated[int, "m"]


def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)


def even(n: int) -> bool:
    return True if n == 0 else odd(n - 1)


def odd(n: int) -> bool:
    return False if n == 0 else even(n - 1)


class OwnError(Exception):
    def __init__(self, a: str, b: str) -> None:
        super().__init__(f"{a}{b}")
        self.a = a


class Slots:
    __slots__ = ("__weakref__", "a")

    def __init__(self) -> None:
        self.a = 3


class Single:
    _instance: Any = None

    def __new__(cls) -> Any:
        cls._instance = cls._instance or super().__new__(cls)
        return cls._instance


class Outer:
    class Inner:
        value = 3


class Guarded:
    lock = threading.Lock()


class Constant:
    """A value that pickle knows by its name only, as sentinels often are."""

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING = Constant()

registry: dict[str, Any] = {}


def registered(function: Any) -> Any:
    registry[function.__name__] = function
    return function


@registered
def one() -> int:
    return 1


@contextlib.contextmanager
def context() -> Iterator[int]:
    yield 5


@torch.no_grad()
def without_grad(x: Any) -> Any:
    return x * 2


def values() -> Iterator[int]:
    yield from range(3)


log = logging.getLogger("own.log")
pattern = re.compile("a+")
single = Single()
counter = itertools.count(4)
numpy_rng = np.random.default_rng(0)
torch_rng = torch.Generator().manual_seed(1)
python_rng = random.Random(3)
defaults: dict[str, int] = collections.defaultdict(lambda: 5)
path = Path(__file__)
stdout = sys.stdout
proxy = types.MappingProxyType({"a": 1})
space = types.SimpleNamespace(a=1)
first = operator.itemgetter(0)
weights = torch.nn.Parameter(torch.ones(2))
weak_set: weakref.WeakSet[Any] = weakref.WeakSet()
weak_values: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
weak_keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary({Net: 1})
lock = threading.Lock()
local = threading.local()
variable = contextvars.ContextVar("variable", default=3)
open_file = open(__file__)  # noqa: SIM115
generator = values()
reference = weakref.ref(Net)

TRAVEL: dict[str, Callable[[], Any]] = {
    "Enum": lambda: Color.RED is Color(1),
    "IntFlag": lambda: Bits.A | Bits.B,
    "StrEnum": lambda: Text.X,
    "NamedTuple": lambda: Point(1),
    "namedtuple": lambda: Old(1, 2),
    "TypedDict": lambda: Typed(a=1),
    "dataclass with slots": lambda: Slotted(),
    "frozen dataclass": lambda: Frozen(1),
    "Protocol": lambda: Shape.__name__,
    "Generic": lambda: Box[int](3).x,
    "TypeVar": lambda: T.__name__,
    "ParamSpec": lambda: P.__name__,
    "singledispatch": lambda: (kind(1), kind("a"), kind([2])),
    "logger": lambda: log.name,
    "pattern": lambda: bool(pattern.match("aa")),
    "Module": lambda: Net()(torch.ones(2)).shape,
    "super": lambda: Sub()(torch.ones(2)).shape,
    "ABC": lambda: Concrete().f(),
    "metaclass": lambda: OfMeta.added,
    "descriptor": lambda: Described().answer,
    "partial": lambda: plus_one(2),
    "wraps": lambda: decorated(1),
    "lru_cache that calls itself": lambda: (fib(10), fib.cache_parameters()["maxsize"], fib.__name__),
    "cache": lambda: (doubled(2), doubled.cache_info().misses),
    "methods of all kinds": lambda: Many().all(),
    "NewType": lambda: annotated(UserId(3)),
    "get_type_hints": lambda: typing.get_type_hints(annotated)["x"].__name__,
    "aliases": lambda: (Alias, Mode, Marked),
    "recursion": lambda: factorial(5),
    "mutual recursion": lambda: even(4),
    "exception": lambda: OwnError("a", "b").a,
    "slots": lambda: Slots().a,
    "singleton": lambda: single is Single(),
    "registry": lambda: registry["one"](),
    "inner class": lambda: (Outer.Inner.value, Outer.Inner.__qualname__),
    "count": lambda: next(counter),
    "numpy generator": lambda: numpy_rng.random(),
    "torch generator": lambda: torch.rand(1, generator=torch_rng),
    "Random": lambda: python_rng.random(),
    "defaultdict": lambda: defaults["x"],
    "Path": lambda: path.name,
    "stdout": lambda: stdout.write(""),
    "MappingProxyType": lambda: proxy["a"],
    "SimpleNamespace": lambda: space.a,
    "contextmanager": lambda: context().__enter__(),
    "generator function": lambda: list(values()),
    "itemgetter": lambda: first([1]),
    "Parameter": lambda: weights.requires_grad,
    "no_grad": lambda: without_grad(torch.ones(1)),
    "WeakSet": lambda: len(weak_set),
    "WeakValueDictionary": lambda: len(weak_values),
    "WeakKeyDictionary": lambda: weak_keys[Net],
}
# What belongs to one process: each names itself, and the way out.
REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "lock": ("global 'lock' .*Create the lock inside the function", lambda: lock.locked()),
    "lock of a class": (r"global 'Guarded' .*\.lock .*inside the function", lambda: Guarded.lock),
    "threading.local": ("global 'local' .*inside the function", lambda: local),
    "ContextVar": ("global 'variable' .*inside the function", lambda: variable),
    "open file": ("global 'open_file' .*Pass the path", lambda: open_file),
    "generator": ("global 'generator' .*Pass a list", lambda: generator),
    "weakref": ("global 'reference' .*inside the function", lambda: reference),
    "a value known by name": ("global 'NOTHING' .*file of its own", lambda: NOTHING),
}


def attempt(function: Callable[[], Any]) -> str:
    return repr(function())


def main() -> None:
    for name, function in TRAVEL.items():
        try:
            there = POOL.run_one(attempt, function)  # first: the driver's generators move on here
        except Exception as error:
            there = repr(error)
        print(json.dumps({"check": name, "ok": there == attempt(function), "got": there}), flush=True)
    print(json.dumps({"check": "cache inside a function", "ok": with_cached_inside() == 48, "got": ""}), flush=True)
    for name, (expected, function) in REFUSED.items():
        try:
            got = POOL.run_one(attempt, function)
            ok = False
        except sky.SerializationError as error:
            got = str(error)
            ok = re.search(expected, got) is not None
        except Exception as error:
            ok, got = False, repr(error)
        print(json.dumps({"check": name, "ok": ok, "got": got}), flush=True)


if __name__ == "__main__":
    with sky.ComputePool(logs="quiet") as POOL:
        main()
