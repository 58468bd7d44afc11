"""Exceptions come back as their own type with everything they held, or at worst as a RemoteError; never not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import RemoteError, RemoteTraceback, WorkerDied
from atoll.wire import exceptions
from atoll.wire.codec import Payload, dumps, loads
from atoll.wire.exceptions import pack_exception, unpack_exception


def raised(fail: Callable[[], object]) -> BaseException:
    try:
        fail()
    except BaseException as exc:
        return exc
    raise AssertionError("it did not raise")


def unpack(payload: Payload, rank: int = 3, node: int = 1) -> Any:
    buffers = [memoryview(bytearray(buffer)) for buffer in payload.buffers]
    return unpack_exception(payload.head, buffers, rank=rank, node=node)


def trip(exc: BaseException) -> Any:
    return unpack(pack_exception(exc))


def throw(exc: BaseException) -> Callable[[], object]:
    def fail() -> None:
        raise exc

    return fail


def notes(exc: BaseException) -> str:
    return "\n".join(getattr(exc, "__notes__", []))


class TwoArguments(Exception):
    calls = 0

    def __init__(self, code: int, detail: str) -> None:
        type(self).calls += 1
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class WithSlots(ValueError):
    __slots__ = ("__hidden", "where")

    def __init__(self, where: str) -> None:
        super().__init__("slots")
        self.where = where
        self.__hidden = where * 2

    def hidden(self) -> str:
        return self.__hidden


class RequestLike(OSError):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.response = kwargs.pop("response", None)
        self.request = kwargs.pop("request", None)
        super().__init__(*args, **kwargs)


class OwnReduce(Exception):
    def __init__(self, *, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __reduce__(self) -> Any:
        return make_own, (self.name,)


def make_own(name: str) -> OwnReduce:
    return OwnReduce(name=name)


class BadReduce(Exception):
    def __reduce__(self) -> Any:
        return json.loads, ("{not json",)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Hostile(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt

    def __repr__(self) -> str:
        raise ZeroDivisionError

    def __setattr__(self, name: str, value: Any) -> None:
        raise RuntimeError("no attributes")


class OwnGroup(ExceptionGroup):
    def __new__(cls, members: list[Exception], tag: str) -> OwnGroup:
        return super().__new__(cls, f"{tag} failed", members)

    def __init__(self, members: list[Exception], tag: str) -> None:
        self.tag = tag


class PickyNew(Exception):
    def __new__(cls, a: int, b: int) -> PickyNew:
        return super().__new__(cls, a)

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)


# --- types and fields ----------------------------------------------------------------------------------------------


def test_an_init_with_two_arguments_is_not_called_again() -> None:
    exc = raised(throw(TwoArguments(7, "disk full")))
    before = TwoArguments.calls
    back = trip(exc)
    assert type(back) is TwoArguments
    assert TwoArguments.calls == before
    assert (back.args, back.code, back.detail, str(back)) == (exc.args, 7, "disk full", "7: disk full")


BUILTIN: list[tuple[Callable[[], object], tuple[str, ...]]] = [
    (lambda: os.listdir("/nowhere/at/all"), ("errno", "strerror", "filename")),
    (lambda: os.rename("/nowhere/a", "/nowhere/b"), ("errno", "filename", "filename2")),
    (lambda: b"\xff\xfe".decode("utf-8"), ("encoding", "object", "start", "end", "reason")),
    ("\ud800".encode, ("encoding", "object", "start", "end", "reason")),
    (lambda: __import__("nowhere_at_all"), ("name", "path", "msg")),
    (lambda: compile("x = (1,\ny", "cell.py", "exec"), ("msg", "filename", "lineno", "offset", "text", "end_lineno")),
    (throw(StopIteration(5)), ("value",)),
    (lambda: {}["key"], ()),
    (lambda: sys.exit(3), ("code",)),
    (throw(KeyboardInterrupt()), ()),
    (lambda: 1 / 0, ()),
    (lambda: [].nothing, ("name",)),
    (lambda: json.loads("{x"), ("msg", "doc", "pos", "lineno", "colno")),
    (lambda: subprocess.run(["false"], check=True), ("returncode", "cmd")),
    (throw(WorkerDied(rank=1, node=0, signal=9, log_tail=["bye"])), ("rank", "node", "signal", "log_tail", "reason")),
]


@pytest.mark.parametrize(("fail", "fields"), BUILTIN)
def test_exceptions_keep_type_arguments_and_fields(fail: Callable[[], object], fields: tuple[str, ...]) -> None:
    exc = raised(fail)
    back = trip(exc)
    assert type(back) is type(exc)
    assert back.args == exc.args
    assert str(back) == str(exc)
    for name in fields:
        assert getattr(back, name) == getattr(exc, name), name


def test_slots_and_frozen_dataclasses() -> None:
    back = trip(raised(throw(WithSlots("gpu"))))
    assert (type(back), back.where, back.hidden()) == (WithSlots, "gpu", "gpugpu")
    frozen = Frozen(4)
    back = trip(frozen)
    assert (type(back), back.code) == (Frozen, 4)


def test_request_like_exceptions_keep_what_they_were_given() -> None:
    back = trip(raised(throw(RequestLike(5, "gone", "file", response={"status": 404}))))
    assert type(back) is RequestLike
    assert (back.errno, back.filename, back.response) == (5, "file", {"status": 404})


def test_one_that_holds_what_cannot_travel_comes_as_its_type_without_that() -> None:
    exc = ValueError("bad", 3, threading.Lock())
    exc.array = np.arange(50_000)
    exc.add_note("while loading")
    back = trip(exc)
    assert type(back) is ValueError
    assert back.args[:2] == ("bad", 3)
    assert back.args[2].startswith("<unlocked _thread.lock")
    assert not hasattr(back, "array")
    assert back.__notes__[0] == "while loading"
    assert back.__notes__[1].startswith("its attributes could not be sent and were left out: the value")
    assert "a _thread.lock" in back.__notes__[1]


def test_arrays_of_an_exception_travel() -> None:
    exc = ValueError("bad")
    exc.array = np.arange(50_000)
    assert (trip(exc).array == exc.array).all()


def test_a_reduction_of_its_own_is_used_and_may_fail() -> None:
    back = trip(OwnReduce(name="x"))
    assert (type(back), back.name) == (OwnReduce, "x")
    back = trip(BadReduce("a", 2))
    assert type(back) is RemoteError
    assert f"could not be rebuilt as {BadReduce.__module__}.BadReduce here: JSONDecodeError" in notes(back)


def test_an_exception_that_holds_itself() -> None:
    exc = ValueError("loop")
    exc.me = exc
    exc.others = [exc]
    back = trip(exc)
    assert type(back) is ValueError
    assert type(back.others[0]) is ValueError


def test_a_local_exception_class_is_caught_by_the_drivers_class() -> None:
    class Local(Exception):
        pass

    back = trip(raised(throw(Local("here"))))
    assert type(back) is Local


def test_hostile_exceptions_travel() -> None:
    exc = raised(throw(Hostile("a", 1)))
    back = trip(exc)
    assert type(back) is Hostile
    assert back.args == ("a", 1)
    assert "Hostile" in back.__cause__.text


def test_a_class_that_cannot_be_had_here_becomes_a_remote_error() -> None:
    module = type(sys)("atoll_test_gone")
    exec("class Gone(Exception): pass", module.__dict__)
    sys.modules["atoll_test_gone"] = module
    try:
        payload = pack_exception(raised(throw(module.Gone("only there"))))
    finally:
        del sys.modules["atoll_test_gone"]
    back = unpack(payload, rank=5, node=2)
    assert type(back) is RemoteError
    assert (back.type_name, back.rank, back.node) == ("atoll_test_gone.Gone", 5, 2)
    assert "rank 5 (node 2) raised atoll_test_gone.Gone: only there" in str(back)
    assert "Traceback" in back.remote_traceback
    assert isinstance(back.__cause__, RemoteTraceback)
    assert "ModuleNotFoundError" in notes(back)


def test_a_new_that_refuses_becomes_a_remote_error() -> None:
    back = trip(PickyNew(1, 2))
    assert type(back) is RemoteError
    assert "PickyNew" in back.type_name


# --- chains and groups ---------------------------------------------------------------------------------------------


def test_causes_contexts_and_suppression_are_kept() -> None:
    def with_cause() -> None:
        try:
            raise KeyError("inner")
        except KeyError as exc:
            raise TwoArguments(1, "outer") from exc

    back = trip(raised(with_cause))
    shown = back.__cause__
    assert type(shown) is RemoteTraceback
    assert (shown.rank, shown.node) == (3, 1)
    assert type(shown.__cause__) is KeyError
    assert shown.__cause__.args == ("inner",)

    def with_context() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904 - the context is what is tested

    back = trip(raised(with_context))
    assert back.__cause__.__cause__ is None
    assert type(back.__cause__.__context__) is KeyError
    assert back.__context__ is back.__cause__.__context__

    def suppressed() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second") from None

    back = trip(raised(suppressed))
    assert back.__cause__.__cause__ is None
    assert back.__cause__.__context__ is None
    assert "first" not in "".join(traceback.format_exception(back))


def test_what_is_printed_has_the_remote_traceback_once_and_the_exception_last() -> None:
    back = trip(raised(with_chain_of(2)))
    printed = "".join(traceback.format_exception(back))
    assert "rank 3 (node 1)" in printed
    assert "in fail" in printed
    assert printed.rstrip().endswith("ValueError: level 1")


def with_chain_of(length: int) -> Callable[[], object]:
    def fail() -> None:
        previous: BaseException | None = None
        for level in range(length):
            exc = ValueError(f"level {level}")
            exc.__cause__ = previous
            previous = exc
        assert previous is not None
        raise previous

    return fail


def test_cycles_and_very_long_chains_end() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__context__, second.__context__ = second, first
    back = trip(first)
    assert type(back.__context__) is KeyError
    assert back.__context__.__context__ is None
    back = trip(raised(with_chain_of(500)))
    depth, exc = 0, back.__cause__.__cause__
    while exc is not None:
        depth, last, exc = depth + 1, exc, exc.__cause__
    assert 20 < depth < 200
    assert "left out" in notes(last)


def test_groups_keep_their_members_nested_and_mixed() -> None:
    exc = raised(
        throw(
            BaseExceptionGroup(
                "all", [TwoArguments(1, "a"), ExceptionGroup("inner", [KeyError("k")]), KeyboardInterrupt()]
            )
        )
    )
    exc.add_note("two ranks")
    back = trip(exc)
    assert type(back) is BaseExceptionGroup
    assert back.message == "all"
    assert [type(member) for member in back.exceptions] == [TwoArguments, ExceptionGroup, KeyboardInterrupt]
    assert back.exceptions[0].code == 1
    assert type(back.exceptions[1].exceptions[0]) is KeyError
    assert back.__notes__ == ["two ranks"]
    matching, rest = back.split(KeyError)
    assert len(matching.exceptions) == 1
    assert len(rest.exceptions) == 2


def test_a_group_class_that_cannot_be_rebuilt_stays_a_group() -> None:
    back = trip(OwnGroup([ValueError("v")], "load"))
    assert type(back) is ExceptionGroup
    assert back.message == "load failed"
    assert type(back.exceptions[0]) is ValueError
    assert "OwnGroup" in notes(back)


def test_a_cause_that_cannot_be_rebuilt_does_not_keep_the_outer_from_arriving() -> None:
    exc = ValueError("outer")
    exc.__cause__ = PickyNew(1, 2)
    back = trip(exc)
    assert type(back) is ValueError
    assert type(back.__cause__.__cause__) is RemoteError


# --- the traceback text --------------------------------------------------------------------------------------------


def test_the_text_has_source_lines_chains_and_groups() -> None:
    def inner() -> None:
        raise KeyError("deep")  # the marked line

    def outer() -> None:
        try:
            inner()
        except KeyError as exc:
            raise ExceptionGroup("several", [ValueError("v")]) from exc

    text = trip(raised(outer)).__cause__.text
    assert "the marked line" in text
    assert "direct cause" in text
    assert "ExceptionGroup: several (1 sub-exception)" in text
    assert "ValueError: v" in text


def test_frames_of_the_worker_are_removed_from_the_front() -> None:
    """A worker's frames are those of files in atoll/worker; the standard library's between them go as well."""
    source = textwrap.dedent(
        """
        import contextlib

        @contextlib.contextmanager
        def around():
            yield

        @around()
        def call(function):
            return function()
        """
    )
    where = Path(exceptions.__file__).parent.parent / "worker" / "imaginary.py"
    worker: dict[str, Any] = {}
    exec(compile(source, str(where), "exec"), worker)

    def user() -> None:
        json.loads("{x")

    text = exceptions.remote_traceback(raised(lambda: worker["call"](user)))
    assert "imaginary.py" in text  # the test's own frame stands before the worker's here

    exc = raised(lambda: worker["call"](user))
    assert exc.__traceback__ is not None
    # As in a rank: the worker's frame comes first.
    at_worker = exc.__traceback__
    while at_worker.tb_frame.f_code.co_filename == __file__:
        assert at_worker.tb_next is not None
        at_worker = at_worker.tb_next
    text = exceptions.remote_traceback(exc.with_traceback(at_worker))
    assert "imaginary.py" not in text
    assert "contextlib" not in text
    assert "in user" in text
    assert "json" in text


def test_a_failure_in_the_worker_itself_keeps_its_last_frame() -> None:
    exc = raised(lambda: loads(b"not a pickle"))
    assert exc.__traceback__ is not None
    at_codec = exc.__traceback__
    while not at_codec.tb_frame.f_code.co_filename.endswith("codec.py"):
        assert at_codec.tb_next is not None
        at_codec = at_codec.tb_next
    assert "codec.py" in exceptions.remote_traceback(exc.with_traceback(at_codec))


def test_a_recursion_error_travels() -> None:
    def endless() -> None:
        endless()

    back = trip(raised(endless))
    assert type(back) is RecursionError
    assert "Previous line repeated" in back.__cause__.text


# --- exceptions as values, and in another process -----------------------------------------------------------------


def test_an_exception_may_be_an_ordinary_value() -> None:
    exc = TwoArguments(3, "returned")
    exc.add_note("a note")
    back, same = loads(dumps([exc, exc]).head)
    assert type(back) is TwoArguments
    assert same is back
    assert (back.code, back.detail, back.__notes__) == (3, "returned", ["a note"])
    group = loads(dumps(ExceptionGroup("g", [exc])).head)
    assert group.exceptions[0].code == 3
    error = loads(dumps(raised(lambda: os.listdir("/nowhere/at/all"))).head)
    assert (type(error), error.filename) == (FileNotFoundError, "/nowhere/at/all")


def test_an_exception_of_main_raised_in_another_process_is_caught_by_its_class(tmp_path: Path) -> None:
    rank = textwrap.dedent(
        """
        import pickle, sys
        from atoll.wire.codec import loads
        from atoll.wire.exceptions import pack_exception
        head, buffers = pickle.loads(sys.stdin.buffer.read())
        try:
            loads(head, buffers)()
        except BaseException as exc:
            payload = pack_exception(exc)
        sys.stdout.buffer.write(pickle.dumps((payload.head, [bytes(b) for b in payload.buffers])))
        """
    )
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import pickle, subprocess, sys
            from atoll.wire.codec import dumps
            from atoll.wire.exceptions import unpack_exception

            class MyError(Exception):
                def __init__(self, code, detail):
                    super().__init__(detail)
                    self.code = code

            def train():
                try:
                    raise MyError(1, "inside")
                except MyError as exc:
                    raise MyError(2, "outside") from exc

            sent = pickle.dumps((dumps(train).head, []))
            done = subprocess.run([sys.executable, "-c", {rank!r}], input=sent, capture_output=True)
            assert done.returncode == 0, done.stderr.decode()
            head, buffers = pickle.loads(done.stdout)
            try:
                raise unpack_exception(head, buffers, rank=1, node=0)
            except MyError as exc:
                cause = exc.__cause__
                print(exc, exc.code, type(cause).__name__, cause.rank, type(cause.__cause__) is MyError)
                assert 'raise MyError(2, "outside") from exc' in cause.text, cause.text
                assert "wire" not in cause.text, cause.text
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == "outside 2 RemoteTraceback 1 True", done.stderr


def test_packing_leaves_the_exception_as_it_was() -> None:
    exc = raised(with_chain_of(3))
    exc.lock = threading.Lock()
    tb, cause = exc.__traceback__, exc.__cause__
    pack_exception(exc)
    assert exc.__traceback__ is tb
    assert exc.__cause__ is cause
    assert not hasattr(exc, "__notes__")


def test_a_payload_head_holds_only_builtin_values_outside_its_pieces() -> None:
    """The table opens without importing anything, so that a class missing here cannot keep it shut."""

    class NoGlobals(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"{module}.{name}")

    payload = pack_exception(raised(throw(TwoArguments(1, "x"))))
    with contextlib.closing(io.BytesIO(payload.head)) as file:
        assert NoGlobals(file).load()


def test_a_function_sent_by_value_keeps_its_file_in_tracebacks():
    def fails():
        return 1 / 0

    payload = dumps(fails)
    try:
        loads(payload.head, payload.buffers)()
    except ZeroDivisionError as error:
        text = exceptions.remote_traceback(error)
    assert __file__ in text
    assert "return 1 / 0" in text, "the line can be read where the file is"
    assert dumps(fails).head == payload.head, "equal functions have equal payloads"
