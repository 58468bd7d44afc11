"""``@sky.compute``, pending calls and the operators that dispatch them."""

from __future__ import annotations

import functools
import queue
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar, cast, overload

from atoll.core.errors import NeverDispatched, UsageError
from atoll.core.validation import MOST_TRIES, check_seconds, check_truth, check_whole, suggests_keywords
from atoll.functions.compute_pool import ComputePool
from atoll.functions.serialize import importable, name_of
from atoll.gang.futures import CallFuture, RankResults

P = ParamSpec("P")
R = TypeVar("R")
_PARTS = ("function", "args", "kwargs", "where")


@dataclass(frozen=True, slots=True)
class Options:
    """What ``@sky.compute(...)`` was given; None uses the pool's."""

    retries: int | None = None
    timeout: float | None = None


class ComputeFunction(Generic[P, R]):
    """A function made by ``@sky.compute``: calling it gives a ``Pending`` call, ``.local(...)`` runs it here."""

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        self.__atoll_function__ = function
        self.__atoll_options__ = options
        functools.update_wrapper(cast("Any", self), function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """A pending call; dispatch it with ``@ pool`` or ``>> pool``."""
        frame = sys._getframe(1)
        return Pending(self, args, kwargs, (frame.f_code.co_filename, frame.f_lineno))

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now, outside any pool."""
        return self.__atoll_function__(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> ComputeFunction[..., R]:
        bind = getattr(self.__atoll_function__, "__get__", None)
        if bind is None:
            return self
        bound = bind(instance, owner)
        return self if bound is self.__atoll_function__ else ComputeFunction(bound, self.__atoll_options__)

    def __repr__(self) -> str:
        return f"<compute function {name_of(self.__atoll_function__)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raw = self.__atoll_function__
        return ComputeFunction, (importable(raw) or raw, self.__atoll_options__)


@overload
def compute(function: Callable[P, R], /) -> ComputeFunction[P, R]: ...
@overload
def compute(
    *, retries: int | None = None, timeout: float | None = None
) -> Callable[[Callable[P, R]], ComputeFunction[P, R]]: ...
@suggests_keywords
def compute(function: Any = None, /, *, retries: int | None = None, timeout: float | None = None) -> Any:
    """Make a function dispatchable: ``f(x) @ pool`` runs it on every rank, ``f(x) >> pool`` on one.

    Bare or called. Works on functions, methods, lambdas, partials and generator functions (which stream).

    Args:
        retries: maximum number of restarts of a call that lost a rank; the pool's by default.
        timeout: seconds the call may take; the pool's by default, which sets no limit.

    Raises:
        ConfigError: an argument that can't work.
    """
    if retries is not None:
        check_whole("retries", retries, 0, MOST_TRIES)
    check_seconds("timeout", timeout)
    options = Options(retries, timeout)
    if function is None:
        return lambda decorated: _decorate(decorated, options)
    return _decorate(function, options)


def _decorate(function: Any, options: Options) -> Any:
    if isinstance(function, ComputeFunction):
        return ComputeFunction(function.__atoll_function__, options)
    if isinstance(function, (staticmethod, classmethod)):  # either order means the same
        return type(function)(_decorate(function.__func__, options))
    if not callable(function):
        raise UsageError(f"@sky.compute needs a function, not {type(function).__name__} {function!r}")
    return ComputeFunction(function, options)


def _refusal(operator: str, *, reflected: bool = False) -> Callable[[Any, object], NoReturn]:
    """An operator confused with ``@`` or ``>>``; the error shows the right form."""

    def refuse(self: _Dispatched, other: object) -> NoReturn:
        left, right = (other, self) if reflected else (self, other)
        raise self._refused(
            f"`{_side(left)} {operator} {_side(right)}` dispatches nothing: write `{_call(self)} >> pool` for one "
            f"rank, or `{_call(self)} @ pool` for every rank"
        )

    return refuse


class _Dispatched(ABC):
    """What goes on the left of ``@ pool`` and ``>> pool``."""

    __array_ufunc__ = None
    __or__, __ror__ = _refusal("|"), _refusal("|", reflected=True)
    __lshift__, __rlshift__ = _refusal("<<"), _refusal("<<", reflected=True)
    # Also for `pool > f(1)`, which Python asks the right side the other way.
    __gt__, __lt__, __ge__, __le__ = _refusal(">"), _refusal("<"), _refusal(">="), _refusal("<=")

    @abstractmethod
    def _mark_used(self) -> None:
        """Don't warn on top that it was never dispatched."""

    def _refused(self, message: str) -> UsageError:
        self._mark_used()
        return UsageError(message)

    def __rand__(self, other: object) -> NoReturn:
        raise self._refused(_precedence(other, self))

    def __rmatmul__(self, left: object) -> NoReturn:
        raise self._refused(_wrong_side(left, "@", self))

    def __rrshift__(self, left: object) -> NoReturn:
        raise self._refused(_wrong_side(left, ">>", self))


class Pending(_Dispatched, Generic[R]):
    """A call that has not been dispatched: ``@ pool`` runs it on every rank, ``>> pool`` on one rank."""

    __atoll_pending__ = True

    def __init__(
        self, function: ComputeFunction[..., R], args: tuple[Any, ...], kwargs: dict[str, Any], where: tuple[str, int]
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.where = where
        self._used = False

    if not TYPE_CHECKING:  # a type checker should go on to refuse unknown attributes

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_") or name in _PARTS:  # asked for by a protocol, or before there is a call
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self._used = True
            raise AttributeError(_no_attribute(self, name))

    def __matmul__(self, pool: ComputePool) -> RankResults[R]:
        """Run on every rank; the results, ordered by global rank."""
        target = self._target(pool, "@")
        self._used = True
        results: RankResults[R] = target.run(cast("Any", self.function), *self.args, **self.kwargs)
        return results

    def __rshift__(self, pool: ComputePool) -> R:
        """Run on one rank, with world size 1; returns the result."""
        if type(pool) is not ComputePool:
            pool = self._target(pool, ">>")
        self._used = True
        function: Any = self.function
        result: R = pool.run_one(function, *self.args, **self.kwargs)
        return result

    def __and__(self, other: Pending[Any]) -> Group:
        """Put two calls side by side: ``(a() & b()) >> pool``."""
        return Group([self]) & other

    def submit(self, pool: ComputePool) -> CallFuture[R]:
        """Start the call on one rank in the background; the same as ``pool.submit(function, ...)``."""
        self._used = True
        return self._start(pool)

    def _mark_used(self) -> None:
        self._used = True

    def _start(self, pool: ComputePool) -> CallFuture[R]:
        future: CallFuture[R] = pool.submit_call(self.function, self.args, self.kwargs, whole_gang=False)
        return future

    def _target(self, pool: object, operator: str) -> ComputePool:
        if isinstance(pool, ComputePool):
            return pool
        raise self._refused(
            f"`{self} {operator} {type(pool).__name__}`: the right side has to be a ComputePool, "
            f"as in `{self} {operator} pool`"
        )

    def __bool__(self) -> NoReturn:
        raise self._refused(f"{self} has not run yet, so it is neither true nor false: dispatch it, `{self} >> pool`")

    def __iter__(self) -> Iterator[NoReturn]:
        raise self._refused(f"{self} has not run yet, so it has no items: dispatch it, `{self} >> pool`")

    def __repr__(self) -> str:
        return f"{name_of(self.function.__atoll_function__)}(...)"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # A notebook keeps what a cell ends with, so no warning would ever come: it is said where the result would be.
        self._used = True
        printer.text(f"{self} has not run: dispatch it, `{self} @ pool` for every rank or `{self} >> pool` for one")

    def __del__(self) -> None:
        if not getattr(self, "_used", True) and not sys.is_finalizing():
            warnings.warn_explicit(
                f"{self} was never dispatched: write `{self} @ pool` for every rank, or `{self} >> pool` for one",
                NeverDispatched,
                *self.where,
            )


class Group(_Dispatched):
    """Several calls to run side by side, each on one rank with world size 1: ``group >> pool``."""

    def __init__(self, calls: list[Pending[Any]], *, stream: bool = False) -> None:
        self.calls = calls
        self.stream = stream

    def __and__(self, other: Any) -> Group:
        """Add a call."""
        if isinstance(other, Pending):
            return Group([*self.calls, other], stream=self.stream)
        if isinstance(other, Group):
            return Group([*self.calls, *other.calls], stream=self.stream)
        raise self._refused(_precedence(self, other))

    def __rshift__(self, pool: ComputePool) -> Any:
        """Run the calls side by side; their results in call order, or as they complete with ``stream=True``."""
        futures = self._submit(pool, ">>")
        return _as_completed(futures) if self.stream else pool.wait(futures)

    def __matmul__(self, pool: ComputePool) -> list[RankResults[Any]]:
        """Run each call on every rank, one after the other; a list with the results of each."""
        self._mark_used()
        return [call @ pool for call in self.calls]

    def _mark_used(self) -> None:
        for call in self.calls:
            call._used = True

    def _submit(self, pool: ComputePool, operator: str) -> list[CallFuture[Any]]:
        self._mark_used()
        for call in self.calls:
            call._target(pool, operator)
        return [call._start(pool) for call in self.calls]

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.calls))


@suggests_keywords
def gather(*calls: Pending[Any] | Group, stream: bool = False) -> Group:
    """Put calls side by side: ``sky.gather(*calls) >> pool`` gives their results in call order.

    Args:
        calls: pending calls; those beyond the number of ranks wait their turn.
        stream: give an iterator of results as they complete.

    Raises:
        UsageError: an argument is not a pending call.
        ConfigError: ``stream`` is neither True nor False.
    """
    stream = check_truth("stream", stream)
    group: list[Pending[Any]] = []
    given = cast("tuple[object, ...]", calls)
    for index, call in enumerate(given):
        if not isinstance(call, (Pending, Group)):
            for pending in given:
                if isinstance(pending, (Pending, Group)):
                    pending._mark_used()
            raise UsageError(
                f"gather takes pending calls, and argument {index} is {type(call).__name__}: "
                f"is its function decorated with @sky.compute, and not dispatched yet?"
            )
        group += call.calls if isinstance(call, Group) else [call]
    return Group(group, stream=stream)


def _as_completed(futures: list[CallFuture[Any]]) -> Iterator[Any]:
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    left = dict.fromkeys(futures)  # a result is let go once it was taken
    del futures
    for future in left:
        future.when_done(ended.put)
    try:
        while left:
            future = ended.get()
            del left[future]
            yield future.result()
    finally:
        for future in reversed(left):  # those that wait first: none of them is to start
            future.cancel()


def _no_attribute(call: Pending[Any], name: str) -> str:
    if name == "local":
        return f"{call} is a pending call: {str(call).removesuffix('(...)')}.local(...) runs it here"
    if name in ("result", "done", "cancel"):
        return f"{call} is a pending call: `{call} >> pool` gives its result, `{call}.submit(pool).{name}()` continues"
    return f"{call} is a pending call, which has no {name!r}; dispatch it first: `{call} >> pool`"


def _side(value: object) -> str:
    return "pool" if isinstance(value, ComputePool) else _call(value) if isinstance(value, _Dispatched) else "..."


def _call(value: object) -> str:
    return f"({value})" if isinstance(value, Group) else str(value)


def _wrong_side(left: object, operator: str, call: object) -> str:
    what = "pool" if isinstance(left, ComputePool) else type(left).__name__
    return (
        f"`{what} {operator} {_call(call)}`: the call goes on the left, the pool on the right, "
        f"`{_call(call)} {operator} pool`"
    )


def _precedence(left: object, right: object) -> str:
    """`a() & b() >> pool` means `a() & (b() >> pool)`: say so, with the right form."""
    pending, value = (left, right) if isinstance(left, (Pending, Group)) else (right, left)
    return (
        f"`&` joins pending calls, and one side is {type(value).__name__}, a result. Python reads `a() & b() >> pool` "
        f"as `a() & (b() >> pool)`: write `({pending} & ...) >> pool`, or `sky.gather({pending}, ...) >> pool`; for "
        f"every rank, `({pending} & ...) @ pool`"
    )
