"""Arguments and results: large arrays, tensors, modules, exceptions as values, and what cannot travel."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

import atoll as sky

pytestmark = pytest.mark.leaks_per_module


def resident_bytes() -> int:
    """Anonymous and file memory of this process, what is shared counted in full."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024


# -- large arrays -----------------------------------------------------------------------------------------------------
def test_a_large_array_is_writable_and_not_shared(pool: sky.ComputePool) -> None:
    import numpy as np

    def write(array: Any) -> Any:
        rank = sky.instance_info().rank
        before = array[:3].tolist()
        array[:] = rank + 10.0
        return before, array.flags.writeable, float(array.sum()), array[-2:]

    data = np.ones(25_000_000)  # 200 MB
    for rank, (before, writable, total, tail) in enumerate(pool.run(write, data)):
        assert (before, writable) == ([1.0, 1.0, 1.0], True)
        assert total == (rank + 10.0) * data.size
        tail += 1
    assert data[0] == data[-1] == 1.0, "the driver's own is untouched"


def test_the_same_array_twice_is_one_array(pool: sky.ComputePool) -> None:
    import numpy as np

    def same(a: Any, b: Any, inside: Any) -> bool:
        a[0] = 7
        return bool(b[0] == 7 and inside[0][0] == 7)

    data = np.zeros(1_000_000)
    assert pool.run(same, data, data, [data]) == [True, True]


def test_the_second_call_uses_the_same_memory(pool: sky.ComputePool) -> None:
    import numpy as np

    def first(array: Any) -> float:
        return float(array[0])

    data = np.ones(12_500_000)  # 100 MB
    pool.run(first, data)
    gc.collect()
    before = resident_bytes()
    for number in range(5):
        data[0] = number
        assert pool.run(first, data) == [number, number]
    assert resident_bytes() - before < data.nbytes // 2


@pytest.mark.long
def test_results_are_freed_when_they_are_dropped(pool: sky.ComputePool) -> None:
    def make() -> Any:
        import numpy as np

        return np.ones(12_500_000)

    gc.collect()
    gc.disable()  # no cycle may hold a result
    try:
        pool.run_one(make)[0] += 1
        before = resident_bytes()
        for _ in range(5):
            result = pool.run_one(make)
            result += 1
            del result
        assert resident_bytes() - before < 150_000_000
    finally:
        gc.enable()


def test_an_argument_a_rank_keeps_is_not_overwritten(pool: sky.ComputePool) -> None:
    import numpy as np

    def keep(array: Any) -> None:
        sys.kept = array  # type: ignore[attr-defined]

    def look(other: Any) -> tuple[float, float, float]:
        kept = sys.kept  # type: ignore[attr-defined]
        return float(kept.min()), float(kept.max()), float(other[0])

    pool.run(keep, np.full(1_000_000, 1.0))
    for number in (2.0, 3.0):
        assert pool.run(look, np.full(1_000_000, number)) == [(1.0, 1.0, number)] * 2


def test_an_exceptions_hold_on_an_argument_is_not_overwritten(pool: sky.ComputePool) -> None:
    import numpy as np

    def fail(array: Any) -> None:
        try:
            raise ValueError("kept")
        except ValueError as error:
            sys.kept = error  # type: ignore[attr-defined]  # its traceback holds the frame, the frame the array
            raise

    def look(other: Any) -> float:
        trace = sys.kept.__traceback__  # type: ignore[attr-defined]
        while trace.tb_next is not None:
            trace = trace.tb_next
        return float(trace.tb_frame.f_locals["array"].max())

    with pytest.raises(ValueError, match="kept"):
        pool.run(fail, np.full(1_000_000, 1.0))
    assert pool.run(look, np.full(1_000_000, 5.0)) == [1.0, 1.0]


def test_arrays_of_every_size_and_layout(pool: sky.ComputePool) -> None:
    import numpy as np

    arrays = [
        *(np.arange(n, dtype=np.float32) for n in (0, 1, 4095, 4096, 40_000, 300_000)),
        np.arange(600_000).reshape(600, 1000).T,
        np.arange(600_000)[::3],
        np.asfortranarray(np.arange(90_000).reshape(300, 300)),
        np.array(["a", None, {"b": 1}], dtype=object),
        np.array(5),
    ]
    for back in pool.run(lambda values: values, arrays):
        for sent, received in zip(arrays, back, strict=True):
            assert received.dtype == sent.dtype
            assert np.array_equal(received, sent)
            assert received.flags.writeable


def test_large_bytes_and_strings(pool: sky.ComputePool) -> None:
    values = (b"x" * 3_000_000, "ü" * 1_000_000, bytearray(b"y" * 500_000))
    assert pool.run_one(lambda *v: v, *values) == values


# -- the user's own cloudpickle ---------------------------------------------------------------------------------------
class OfThisModule:
    pass


def test_cloudpickle_is_left_as_it_was(pool: sky.ComputePool) -> None:
    import cloudpickle

    before = set(cloudpickle.list_registry_pickle_by_value())
    assert isinstance(pool.run_one(lambda x: x, OfThisModule()), OfThisModule)
    assert set(cloudpickle.list_registry_pickle_by_value()) == before
    assert len(cloudpickle.dumps(OfThisModule)) < 100, "by its name, as this process can import it"


# -- functions that ranks keep ----------------------------------------------------------------------------------------
def test_a_large_function_goes_to_ranks_that_lack_it_and_to_a_second_pool(pool: sky.ComputePool) -> None:
    def length(data: bytes = bytes(300_000)) -> int:
        return len(data)

    assert pool.run_one(length) == 300_000
    assert pool.run(length) == [300_000] * 2, "the other rank sees it for the first time"
    with sky.ComputePool(logs="quiet") as second:
        assert second.run(length) == [300_000]


@pytest.mark.long
def test_a_rank_keeps_a_bounded_number_of_functions(pool: sky.ComputePool) -> None:
    def make(i: int) -> Any:
        data = i.to_bytes(2, "big") * 200_000
        return lambda: int.from_bytes(data[:2], "big")

    functions = [make(i) for i in range(90)]
    resident = resident_bytes
    for function in functions[:5]:
        pool.run(function)
    before = pool.run(resident)
    for _ in range(2):  # the second time most of them have to be sent again
        assert [pool.run(function) for function in functions] == [[i, i] for i in range(90)]
    for i in range(90, 300):
        assert pool.run(make(i)) == [i, i]
    assert max(after - first for first, after in zip(before, pool.run(resident), strict=True)) < 60_000_000


# -- torch ------------------------------------------------------------------------------------------------------------


def test_a_function_whose_first_call_was_cancelled_is_there_for_the_next(pool: sky.ComputePool) -> None:
    for value in range(30):
        function = eval(f"lambda: {value}")
        first = pool.submit(function, everywhere=True)
        first.cancel()
        with contextlib.suppress(CancelledError):  # it may have been done
            first.result()
        assert pool.run(function) == [value] * pool.world_size


def test_tensors_and_modules_there_and_back(pool: sky.ComputePool) -> None:
    import torch

    def use(model: Any, x: Any, weights: Any) -> Any:
        import torch

        with torch.no_grad():
            model.weight += 1
        y = model(x)
        y.sum().backward()
        return model, y, weights, model.weight.grad

    model = torch.nn.Linear(3, 2)
    tied = torch.ones(200_000)
    x = torch.ones(4, 3, requires_grad=True)
    back, y, weights, grad = pool.run_one(use, model, x, {"a": tied, "b": tied})
    assert torch.equal(back.weight, model.weight + 1)
    assert torch.equal(grad, torch.full((2, 3), 4.0))
    assert y.shape == (4, 2)
    weights["a"][0] = 9
    assert weights["b"][0] == 9, "tensors that shared memory share it again"
    optimizer = torch.optim.SGD(back.parameters(), lr=0.1)
    back(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_a_module_of_the_test_trains_on_and_comes_back(pool: sky.ComputePool) -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.layer(x).relu()

    net = Net()
    back = pool.run_one(lambda n: n, net)
    assert type(back) is Net
    assert torch.equal(back(torch.ones(1, 2)), net(torch.ones(1, 2)))


# -- exceptions as values, and odd results ----------------------------------------------------------------------------
def test_an_exception_may_be_a_value(pool: sky.ComputePool) -> None:
    def give() -> Exception:
        return ValueError("a value", 3)

    for value in pool.run(give):
        assert type(value) is ValueError
        assert value.args == ("a value", 3)
    assert type(pool.run_one(lambda e: e, KeyError("there"))) is KeyError


def test_classes_and_functions_are_values(pool: sky.ComputePool) -> None:
    class Local:
        pass

    assert pool.run_one(lambda c: c, Local) is Local
    assert pool.run_one(lambda: lambda x: x + 1)(2) == 3
    assert pool.run_one(lambda: Path) is Path


# -- what cannot travel -----------------------------------------------------------------------------------------------
def test_an_argument_that_cannot_travel_is_named(pool: sky.ComputePool) -> None:
    def train(model: Any, options: Any = None) -> None: ...

    with pytest.raises(sky.SerializationError, match=r"argument 'options' of .*train → \['lock'\] \(a _thread.lock\)"):
        pool.run(train, 1, options={"lock": threading.Lock()})
    with pytest.raises(sky.SerializationError, match=r"argument 'model' of .*train"), open(__file__) as file:
        pool.run(train, file)
    assert pool.run(train, 1) == [None, None]


def test_a_function_that_cannot_travel_names_what_it_uses(pool: sky.ComputePool) -> None:
    lock = threading.Lock()

    def guarded() -> None:
        with lock:
            pass

    with pytest.raises(sky.SerializationError, match=r"function .*guarded → variable 'lock' that .*guarded\(\) uses"):
        pool.run(guarded)


def test_a_result_that_cannot_travel_is_named(pool: sky.ComputePool) -> None:
    def give() -> Any:
        return {"model": [threading.Lock()]}

    with pytest.raises(sky.SerializationError, match=r"the result → \['model'\] → \[0\] \(a _thread.lock\)"):
        pool.run(give)
    assert pool.run(lambda: 1) == [1, 1]


def test_a_result_whose_class_is_not_there_says_so(pool: sky.ComputePool, tmp_path: Path) -> None:
    (tmp_path / "only_on_ranks.py").write_text("class Thing:\n    pass\n")

    def give() -> Any:
        sys.path.insert(0, str(tmp_path))
        import only_on_ranks  # type: ignore[import-not-found]

        return only_on_ranks.Thing()

    with pytest.raises(sky.SerializationError, match=r"could not be loaded here.*No module named 'only_on_ranks'"):
        pool.run(give)
    with pytest.raises(sky.SerializationError, match="only_on_ranks"):
        pool.submit(give).result()
    assert pool.run(lambda: 1) == [1, 1]


def test_an_argument_that_a_rank_cannot_load_says_so(pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            return explode, ()

    def explode() -> None:
        raise RuntimeError("cannot be rebuilt")

    with pytest.raises(RuntimeError, match="cannot be rebuilt"):
        pool.run(lambda x: x, Stubborn())
    assert pool.run(lambda: 1) == [1, 1]
