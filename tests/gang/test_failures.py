"""A rank that raises ends the call for all, and what it raised comes back as itself."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.pools import assert_usable, eventually

import atoll as sky
from atoll.core.errors import RemoteTraceback


class TwoArgumentsError(Exception):
    """Plain pickle can't rebuild it: it is called with one argument."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"{place}: {code}")
        self.code = code
        self.place = place


class HoldsLockError(Exception):
    """Plain pickle can't even write it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


@sky.compute
def fail(how: str) -> None:
    if how == "two arguments":
        raise TwoArgumentsError(7, "here")
    if how == "lock":
        raise HoldsLockError("held")
    if how == "key":
        {}["absent"]
    if how == "cause":
        try:
            int("x")
        except ValueError as error:
            raise RuntimeError("outer") from error
    if how == "context":
        try:
            int("x")
        except ValueError:
            raise RuntimeError("while handling") from None
    if how == "group":
        raise ExceptionGroup("several", [ValueError("one"), ExceptionGroup("inner", [KeyError("two")])])
    if how == "local class":

        class LocalError(Exception):
            pass

        raise LocalError("made inside")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "generator exit":
        raise GeneratorExit
    if how == "stop":
        raise StopIteration(3)
    if how == "unpicklable state":
        error = OSError(2, "No such thing", "/nowhere")
        error.sock = socket.socket()  # type: ignore[attr-defined]
        raise error


@pytest.fixture(scope="module")
def shared() -> Any:
    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        yield pool


class TestTypes:
    """End to end; what the codec does in detail is tested in tests/wire."""

    pytestmark = pytest.mark.leaks_per_module

    def raised(self, pool: sky.ComputePool, how: str) -> BaseException:
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - the type is what the test looks at
            fail(how) >> pool
        error = caught.value
        assert not isinstance(error, sky.RemoteError), error
        return error

    def test_two_arguments(self, shared: sky.ComputePool) -> None:
        error = self.raised(shared, "two arguments")
        assert type(error) is TwoArgumentsError
        assert (error.code, error.place, str(error)) == (7, "here", "here: 7")

    def test_lock(self, shared: sky.ComputePool) -> None:
        error = self.raised(shared, "lock")
        assert type(error) is HoldsLockError
        assert str(error) == "held"

    def test_remote_traceback_is_the_cause(self, shared: sky.ComputePool) -> None:
        error = self.raised(shared, "key")
        assert type(error) is KeyError
        assert error.args == ("absent",)
        cause = error.__cause__
        assert isinstance(cause, RemoteTraceback)
        assert cause.rank == 0
        assert "in fail" in cause.text
        assert "KeyError: 'absent'" in cause.text
        assert "atoll/worker" not in cause.text

    def test_cause_chain(self, shared: sky.ComputePool) -> None:
        error = self.raised(shared, "cause")
        assert type(error) is RuntimeError
        text, seen = "", error.__cause__
        while seen is not None:
            text += f"{type(seen).__name__}: {seen}\n"
            seen = seen.__cause__
        assert "invalid literal for int()" in text
        assert "direct cause" in text

    def test_group(self, shared: sky.ComputePool) -> None:
        error = self.raised(shared, "group")
        assert isinstance(error, ExceptionGroup)
        assert [type(e) for e in error.exceptions] == [ValueError, ExceptionGroup]
        inner = error.exceptions[1]
        assert isinstance(inner, ExceptionGroup)
        assert type(inner.exceptions[0]) is KeyError

    def test_class_made_inside_the_function(self, shared: sky.ComputePool) -> None:
        with pytest.raises(Exception, match="made inside") as caught:
            fail("local class") >> shared
        assert "LocalError" in type(caught.value).__name__ or "LocalError" in str(caught.value)

    @pytest.mark.parametrize(
        ("how", "kind"),
        [("interrupt", KeyboardInterrupt), ("generator exit", GeneratorExit), ("stop", StopIteration)],
    )
    def test_kinds_that_python_itself_uses(self, shared: sky.ComputePool, how: str, kind: type[BaseException]) -> None:
        assert type(self.raised(shared, how)) is kind
        assert_usable(shared)

    def test_state_that_cannot_travel(self, shared: sky.ComputePool) -> None:
        error = self.raised(shared, "unpicklable state")
        assert isinstance(error, FileNotFoundError)
        assert (error.errno, error.filename) == (2, "/nowhere")

    def test_returned_exception_is_a_value(self, shared: sky.ComputePool) -> None:
        value = shared.run_one(lambda: ValueError("a value"))
        assert type(value) is ValueError
        assert value.args == ("a value",)


# ------------------------------------------------------------------------------------------ one raises, the others wait
@sky.compute
def one_raises(where_others_sit: str) -> None:
    import itertools
    import os
    import socket
    import time

    if sky.instance_info().rank == 1:
        raise ValueError("rank 1 gives up")
    if where_others_sit == "sleep":
        time.sleep(60)
    elif where_others_sit == "socket":
        a, _b = socket.socketpair()
        a.recv(1)
    elif where_others_sit == "gil":
        sum(itertools.repeat(1))  # C code that never lets go of the GIL
    elif where_others_sit == "loop":
        while True:
            pass
    elif where_others_sit == "swallows":
        while True:
            try:
                time.sleep(60)
            except BaseException:  # it takes more than an exception to stop it
                continue
    elif where_others_sit == "child":
        os.system("sleep 60")
    elif where_others_sit == "barrier":
        import torch.distributed as dist

        dist.barrier()


@pytest.mark.parametrize("place", ["sleep", "socket", "gil", "loop", "swallows", "child"])
def test_one_rank_raises_while_the_other_sits(pool: sky.ComputePool, place: str) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 gives up") as caught:
        one_raises(place) @ pool
    assert time.monotonic() - began < 5.0  # a second is promised; the machine may be busy, and the other sits 60
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert caught.value.__cause__.rank == 1
    assert_usable(pool)


@sky.compute
def import_torch() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


@pytest.mark.long
def test_one_rank_raises_while_the_other_is_in_a_barrier() -> None:
    with sky.ComputePool(nodes=2) as pool:
        assert import_torch() @ pool == [True, True]
        with pytest.raises(ValueError, match="rank 1 gives up"):
            one_raises("barrier") @ pool
        assert_usable(pool)
        assert import_torch() @ pool == [True, True]


@sky.compute
def all_raise() -> None:
    import time

    rank = sky.instance_info().rank
    time.sleep(0.03 * rank)
    raise ValueError(f"from rank {rank}")


def test_all_ranks_raise(pool: sky.ComputePool) -> None:
    def both_are_told() -> bool:
        with pytest.raises(ValueError, match=r"from rank [01]") as caught:
            all_raise() @ pool
        other = 1 - int(str(caught.value)[-1])  # on a busy machine either may come first,
        said = f"rank {other} raised too: ValueError: from rank {other}"
        return any(said in note for note in getattr(caught.value, "__notes__", []))  # or after it was told to stop

    eventually(both_are_told, "the other's error is mentioned")
    assert_usable(pool)


@sky.compute
def finally_runs(path: str) -> None:
    import pathlib
    import time

    file = pathlib.Path(path)
    if sky.instance_info().rank == 1:
        while not file.exists():
            time.sleep(0.01)
        raise ValueError("stop")
    try:
        file.write_text("working")
        time.sleep(60)
    finally:
        file.write_text("cleaned up")


def test_a_stopped_rank_runs_its_finally_blocks_and_stays_warm(pool: sky.ComputePool, tmp_path: Any) -> None:
    names = (tmp_path / f"f{number}" for number in itertools.count())

    def is_warm() -> bool:
        pids = pool.run(lambda: __import__("os").getpid())
        file = next(names)
        with pytest.raises(ValueError, match="stop"):
            finally_runs(str(file)) @ pool
        same = pool.run(lambda: __import__("os").getpid()) == pids
        assert file.read_text() == "cleaned up" or not same
        return same

    # One that a busy machine does not let come to it within a third of a second is killed.
    eventually(is_warm, "a rank that was stopped and lives on")


def test_failures_of_calls_side_by_side_stay_apart(pool: sky.ComputePool) -> None:
    good = pool.submit(lambda: 1)
    bad = pool.submit(lambda: 1 / 0)
    assert good.result() == 1
    with pytest.raises(ZeroDivisionError):
        bad.result()


def test_two_threads_broadcast_at_once(pool: sky.ComputePool) -> None:
    @sky.compute
    def tagged(tag: int) -> tuple[int, int]:
        return tag, sky.instance_info().rank

    with ThreadPoolExecutor(4) as threads:
        futures = {tag: threads.submit(lambda tag=tag: tagged(tag) @ pool) for tag in range(40)}
    for tag, future in futures.items():
        assert future.result() == [(tag, 0), (tag, 1)]


# --------------------------------------------------------------------------------------------------- own pool, nested
def test_a_task_that_dispatches_to_its_own_pool_is_refused(pool: sky.ComputePool) -> None:
    @sky.compute
    def inner() -> int:
        return 1

    @sky.compute
    def outer() -> Any:
        return inner() >> pool

    with pytest.raises((sky.UsageError, sky.SerializationError), match=r"pool"):
        outer() >> pool
    assert_usable(pool)


def test_a_task_may_have_a_pool_of_its_own(pool: sky.ComputePool) -> None:
    @sky.compute
    def outer() -> list[int]:
        @sky.compute
        def inner() -> int:
            return sky.instance_info().rank

        with sky.ComputePool(nodes=2) as own:
            return list(inner() @ own)

    assert outer() @ pool == [[0, 1], [0, 1]]


def test_two_pools_side_by_side(pool: sky.ComputePool) -> None:
    with sky.ComputePool(nodes=2) as other:
        with pytest.raises(ValueError, match="rank 1 gives up"):
            one_raises("sleep") @ other
        assert_usable(pool)
        assert_usable(other)
        assert pool.id != other.id


@pytest.mark.serial
def test_port_29500_taken_and_two_groups_at_once() -> None:
    @sky.compute
    def total() -> float:
        import torch
        import torch.distributed as dist

        value = torch.ones(1) * (sky.instance_info().rank + 1)
        dist.all_reduce(value)
        return float(value)

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("0.0.0.0", 29500))
        taken.listen()
        with sky.ComputePool(nodes=2) as one, sky.ComputePool(nodes=2) as two:
            futures = [pool.submit(total, everywhere=True) for pool in (one, two)]
            assert [future.result() for future in futures] == [[3.0, 3.0], [3.0, 3.0]]


# ------------------------------------------------------------------------------------------------ nothing piles up
def test_a_thousand_calls_leave_no_descriptor() -> None:
    def fds() -> int:
        import os

        return len(os.listdir("/proc/self/fd"))

    def big(block: bytes) -> bytes:
        return block

    with sky.ComputePool(nodes=1) as pool:
        block = bytes(1 << 18)
        pool.run_one(big, block)
        before = fds(), pool.run_one(fds)
        for _ in range(1000):
            pool.run_one(len, b"x")
        for _ in range(100):
            assert len(pool.run_one(big, block)) == len(block)
        for _ in range(20):
            with pytest.raises(ZeroDivisionError):
                pool.run_one(lambda block: 1 / 0, block)
        # The arena keeps a few files warm on purpose.
        eventually(lambda: fds() <= before[0] + 2, "no more descriptors in the driver")
        eventually(lambda: pool.run_one(fds) <= before[1] + 2, "nor in the rank")
        assert len(pool._backend.state._timers) < 10  # type: ignore[union-attr]


def test_memory_kept_by_a_rank_is_never_handed_out_again() -> None:
    def keep(block: Any) -> int:
        import builtins

        kept = builtins.__dict__.setdefault("kept_by_test", [])
        kept.append(block)
        return len(kept)

    def look() -> list[int]:
        import builtins

        return [int(block[-1]) for block in builtins.__dict__["kept_by_test"]]

    import numpy as np

    with sky.ComputePool(nodes=1) as pool:
        for number in range(6):
            pool.run_one(keep, np.full(1 << 20, number, dtype=np.uint8))
            pool.run_one(len, np.full(1 << 20, 99, dtype=np.uint8))
        assert pool.run_one(look) == list(range(6))


def test_memory_of_a_functions_closure_is_never_handed_out_again() -> None:
    import numpy as np

    def keeper(block: Any) -> Any:
        def keep() -> None:
            import builtins

            builtins.__dict__["closure_of_test"] = block

        return keep

    def look() -> int:
        import builtins

        return int(builtins.__dict__["closure_of_test"][-1])

    with sky.ComputePool(nodes=1) as pool:
        pool.run_one(keeper(np.full(1 << 20, 5, dtype=np.uint8)))
        for _ in range(3):
            pool.run_one(len, np.full(1 << 20, 99, dtype=np.uint8))
        assert pool.run_one(look) == 5
