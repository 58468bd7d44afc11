"""Payloads: everything that travels comes back equal, and everything that cannot is refused by name."""

from __future__ import annotations

import collections
import functools
import gc
import io
import math
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import SerializationError, UsageError
from atoll.wire import pickle_errors
from atoll.wire.codec import INLINE_BYTES, Payload, dumps, loads

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [
    *FLOATS,
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


def received(payload: Payload) -> list[memoryview]:
    """The buffers as the other side has them: writable memory of its own."""
    return [memoryview(bytearray(buffer)) for buffer in payload.buffers]


def trip(obj: Any) -> Any:
    payload = dumps(obj)
    return loads(payload.head, received(payload))


def in_other_process(script: str, data: bytes) -> bytes:
    """Run a script file (whose ``__main__`` is its own) that reads a payload from stdin and writes one."""
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, timeout=110)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


CALL_IT = textwrap.dedent(
    """
    import pickle, sys
    from atoll.wire.codec import dumps, loads
    head, buffers = pickle.loads(sys.stdin.buffer.read())
    function, args = loads(head, [bytearray(b) for b in buffers])
    payload = dumps(function(*args))
    sys.stdout.buffer.write(pickle.dumps((payload.head, [bytes(b) for b in payload.buffers])))
    """
)


def call_elsewhere(function: Any, *args: Any) -> Any:
    payload = dumps((function, args))
    sent = pickle.dumps((payload.head, [bytes(b) for b in payload.buffers]))
    head, buffers = pickle.loads(in_other_process(CALL_IT, sent))
    return loads(head, [bytearray(b) for b in buffers])


# --- builtins ------------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner) | st.sets(scalars)
    ),
    max_leaves=30,
)


@given(values)
@settings(deadline=None)
def test_builtin_values_come_back_equal(value: Any) -> None:
    back = trip(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("value", [b"x" * 300_000, bytearray(b"y" * 300_000), "z" * 300_000, list(range(10_000))])
def test_large_builtin_values_come_back_equal(value: Any) -> None:
    back = trip(value)
    assert back == value
    assert type(back) is type(value)


def test_a_list_that_holds_itself_travels() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    back = trip(loop)
    assert back[1] is back


def test_num_bytes_counts_head_and_buffers() -> None:
    payload = dumps(np.zeros(100_000))
    assert payload.num_bytes == len(payload.head) + 800_000
    assert [buffer.format for buffer in payload.buffers] == ["B"]
    assert len(payload.head) < 1000


def test_importing_the_codec_imports_no_framework() -> None:
    script = "import sys, atoll.wire.codec as c, atoll.wire.exceptions; c.loads(c.dumps(((1,), {'a': b'x'})).head)\n"
    script += "print([m for m in ('torch', 'numpy', 'cloudpickle') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "view",
    [
        memoryview(b"abcdef"),
        memoryview(bytearray(100_000)),
        memoryview(np.arange(24, dtype=np.int32).reshape(2, 3, 4)),
        memoryview(np.float64(3.5)),
        memoryview(b""),
    ],
    ids=["bytes", "large", "three dimensions", "no dimension", "empty"],
)
def test_memoryviews_stay_memoryviews(view: memoryview) -> None:
    back = trip(view)
    assert type(back) is memoryview
    assert back == view
    assert (back.format, back.shape, back.readonly) == (view.format, view.shape, view.readonly)


def test_a_strided_memoryview_comes_as_its_bytes() -> None:
    assert bytes(trip(memoryview(b"abcdef")[::2])) == b"ace"


# --- NumPy ---------------------------------------------------------------------------------------------------------

array_dtypes = st.sampled_from(["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", ">i4", "S5", "U3", "M8[s]"])
shapes = st.sampled_from([(), (0,), (3,), (7, 5), (0, 4), (2, 3, 4), (5000,), (70, 90)])


def some_array(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return (np.arange(math.prod(shape)) % 7).astype("i8").reshape(shape).astype(dtype)


@given(array_dtypes, shapes, st.sampled_from(["C", "F", "strided", "reversed", "transposed"]))
@settings(deadline=None, max_examples=150)
def test_arrays_come_back_equal_and_writable(dtype: str, shape: tuple[int, ...], layout: str) -> None:
    array = some_array(dtype, shape)
    if layout == "F":
        array = np.asfortranarray(array)
    elif layout == "transposed":
        array = array.T
    elif layout != "C" and array.ndim:
        array = array[::2] if layout == "strided" else array[::-1]
    back = trip(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


@pytest.mark.parametrize("count", [10, 100_000])
def test_structured_arrays_and_object_arrays(count: int) -> None:
    records = np.zeros(count, dtype=[("id", "i4"), ("xy", "f8", (2,))])
    records["id"] = np.arange(count)
    assert (trip(records) == records).all()
    assert trip(records).flags.writeable
    objects = np.array([{"a": 1}, None, "x"] * 5, dtype=object)
    assert trip(objects).tolist() == objects.tolist()


def test_a_large_array_is_not_copied_on_either_side() -> None:
    array = np.arange(100_000)
    payload = dumps({"x": array})
    assert np.shares_memory(np.frombuffer(payload.buffers[0], np.uint8), array)
    buffers = received(payload)
    back = loads(payload.head, buffers)["x"]
    assert np.shares_memory(np.frombuffer(buffers[0], np.uint8), back)


@pytest.mark.long
def test_nothing_of_a_payload_waits_for_the_garbage_collector() -> None:
    """What was sent is freed at once; and CPython crashes where it collects a PickleBuffer over a memoryview."""
    gc.collect()
    gc.disable()
    try:
        array, tensor = np.zeros(100_000), torch.zeros(100_000)
        gone = [weakref.ref(array), weakref.ref(tensor)]
        payload = dumps((array, tensor, len))
        with pytest.raises(SerializationError):
            dumps((array, tensor, threading.Lock()))
        del array, tensor, payload
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_a_large_strided_array_goes_out_of_band() -> None:
    array = np.arange(100_000)[::2]
    payload = dumps(array)
    assert [buffer.nbytes for buffer in payload.buffers] == [array.nbytes]


def test_an_array_on_a_read_only_buffer_is_read_only() -> None:
    payload = dumps(np.arange(100_000))
    back = loads(payload.head, [bytes(buffer) for buffer in payload.buffers])
    assert not back.flags.writeable


def test_small_arrays_stay_in_the_head() -> None:
    assert dumps(np.zeros(INLINE_BYTES // 8 - 1)).buffers == []
    assert len(dumps(np.zeros(INLINE_BYTES // 8)).buffers) == 1


def test_data_frames() -> None:
    frame = pd.DataFrame({"a": np.arange(20_000), "b": ["x", "y"] * 10_000, "c": np.arange(20_000) / 3})
    pd.testing.assert_frame_equal(trip(frame), frame)


# --- tensors -------------------------------------------------------------------------------------------------------


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().flatten().view(torch.uint8) for t in (a, b) if t.numel()]
    return a.dtype == b.dtype and a.shape == b.shape and (not raw or torch.equal(*raw))


@given(
    st.sampled_from(DTYPES),
    st.sampled_from([(), (0,), (3,), (4, 6), (40, 300), (2, 0, 3), (6, 50, 60)]),
    st.sampled_from(["plain", "offset", "strided", "transposed", "expanded"]),
    st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_tensors_come_back_bit_equal(dtype: torch.dtype, shape: tuple[int, ...], layout: str, read_only: bool) -> None:
    tensor = (torch.arange(math.prod(shape)) % 5).reshape(shape).to(dtype)
    if layout == "expanded":
        tensor = tensor.unsqueeze(0).expand(4, *shape)
    elif tensor.ndim and tensor.shape[0] > 1:
        if layout == "offset":
            tensor = tensor[1:]
        elif layout == "strided":
            tensor = tensor[::2]
        elif layout == "transposed":
            tensor = tensor.transpose(0, -1)
    payload = dumps(tensor)
    buffers = [bytes(b) for b in payload.buffers] if read_only else received(payload)
    back = loads(payload.head, buffers)
    assert same_bits(back, tensor)
    assert back.stride() == tensor.stride()
    assert not back.requires_grad
    back.zero_() if layout != "expanded" else back.clone()
    assert payload.notes == []


def test_a_large_tensor_is_not_copied_on_either_side() -> None:
    tensor = torch.arange(100_000)
    payload = dumps(tensor)
    payload.buffers[0][0] = 7
    assert tensor[0] == 7
    buffers = received(payload)
    back = loads(payload.head, buffers)
    back[1] = -1
    assert bytes(buffers[0][8:16]) == b"\xff" * 8


def test_a_tensor_and_its_view_stay_tied_in_either_order() -> None:
    base = torch.arange(50_000)
    for pair in ((base, base[10:20]), (base[10:20], base), (base[10:20], base[15:40_000:7])):
        first, second = trip(pair)
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        assert torch.equal(first, pair[0])
        assert torch.equal(second, pair[1])
    small, whole = trip((base[10:20], base))
    small[0] = -5
    assert whole[10] == -5


def test_views_of_different_dtypes_stay_tied() -> None:
    base = torch.arange(8_000, dtype=torch.uint8)
    odd = base[3:40]
    wide = base[80:160].view(torch.int64)
    odd_back, wide_back = trip((odd, wide))
    assert torch.equal(odd_back, odd)
    assert torch.equal(wide_back, wide)
    assert odd_back.untyped_storage().data_ptr() == wide_back.untyped_storage().data_ptr()


def test_a_slice_of_a_huge_tensor_costs_the_slice() -> None:
    huge = torch.arange(1_000_000)
    assert dumps(huge[500_000:500_010]).num_bytes < 2_000
    assert torch.equal(trip(huge[500_000:500_010]), huge[500_000:500_010])
    column = huge.view(1000, 1000)[:, 3]
    assert dumps(column).num_bytes < 10_000
    assert torch.equal(trip(column), column)
    first, second = trip((column, huge.view(1000, 1000)[:, 4]))
    assert torch.equal(first, column)
    assert torch.equal(second, column + 1)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_parameters_keep_type_gradient_flag_and_attributes_but_not_grad() -> None:
    parameter = torch.nn.Parameter(torch.randn(30, 400))
    parameter.tag = "frozen later"
    parameter.grad = torch.ones_like(parameter)
    frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
    leaf = torch.randn(5, requires_grad=True)
    back, frozen_back, leaf_back = trip((parameter, frozen, leaf))
    assert type(back) is torch.nn.Parameter
    assert torch.equal(back, parameter)
    assert back.requires_grad
    assert back.tag == "frozen later"
    assert back.grad is None
    assert type(frozen_back) is torch.nn.Parameter
    assert not frozen_back.requires_grad
    assert leaf_back.requires_grad
    assert leaf_back.is_leaf


def test_a_tensor_with_a_graph_arrives_detached_and_says_so() -> None:
    loss = (torch.randn(4, requires_grad=True) * 2).sum()
    payload = dumps([loss, loss * 2])
    back = loads(payload.head, received(payload))
    assert not back[0].requires_grad
    assert back[0].item() == loss.item()
    assert payload.notes == ["a tensor with an autograd graph arrives detached, with requires_grad=False"]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("size", [4, 300])
def test_sparse_tensors(size: int) -> None:
    dense = torch.eye(size) * 3
    coo = dense.to_sparse()
    back = trip(coo)
    assert back.layout == torch.sparse_coo
    assert back.is_coalesced() == coo.is_coalesced()
    assert torch.equal(back.to_dense(), dense)
    for compressed in (dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((2, 2))):
        back = trip(compressed)
        assert back.layout == compressed.layout
        assert torch.equal(back.to_dense(), dense)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_meta_conjugate_and_subclass_tensors() -> None:
    quantized = torch.quantize_per_tensor(torch.randn(100, 100), 0.1, 3, torch.qint8)
    back = trip(quantized)
    assert torch.equal(back.int_repr(), quantized.int_repr())
    assert back.q_scale() == quantized.q_scale()
    meta = torch.empty(5, 6, device="meta", dtype=torch.bfloat16).t()
    back = trip(meta)
    assert (back.device.type, back.shape, back.stride(), back.dtype) == ("meta", meta.shape, meta.stride(), meta.dtype)
    lazily = torch.randn(5, dtype=torch.complex64).conj()
    assert torch.equal(trip(lazily), lazily)

    class Named(torch.Tensor):
        pass

    named = torch.randn(3, 4).as_subclass(Named)
    named.label = "rows"
    back = trip(named)
    assert type(back) is Named
    assert back.label == "rows"
    assert torch.equal(back, named)


def test_dtypes_devices_and_storages() -> None:
    assert trip([torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])]) == [
        torch.bfloat16,
        torch.device("cuda:1"),
        torch.Size([2, 3]),
    ]
    tensor = torch.arange(10_000)
    back, storage = trip((tensor, tensor.untyped_storage()))
    assert storage.nbytes() == 80_000
    assert storage.data_ptr() == back.untyped_storage().data_ptr()


class Net(torch.nn.Module):
    """Tied weights, a buffer and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_forward_hook(double_output)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)) * self.scale


def double_output(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_modules_come_back_usable() -> None:
    net = Net().eval()
    back = trip(net)
    tokens = torch.arange(10)
    assert torch.equal(back(tokens), net(tokens))
    assert not back.training
    assert back.head.weight is back.embed.weight
    assert back.state_dict().keys() == net.state_dict().keys()
    assert len(list(back.parameters())) == 1
    back(tokens).sum().backward()
    assert back.embed.weight.grad is not None


def test_flattened_recurrent_weights_stay_on_one_storage() -> None:
    flat = torch.randn(300)
    net = torch.nn.Module()
    net.a = torch.nn.Parameter(flat[:100])
    net.b = torch.nn.Parameter(flat[100:])
    back = trip(net)
    assert back.a.untyped_storage().data_ptr() == back.b.untyped_storage().data_ptr()
    assert torch.equal(back.b, net.b)


def test_optimizers_keep_their_state() -> None:
    net = torch.nn.Linear(20, 30)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net(torch.randn(3, 20)).sum().backward()
    optimizer.step()
    schedule.step()
    net_back, optimizer_back, schedule_back = trip((net, optimizer, schedule))
    assert optimizer_back.param_groups[0]["params"][0] is net_back.weight
    assert torch.equal(optimizer_back.state[net_back.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])
    assert schedule_back.optimizer is optimizer_back


@pytest.mark.usefixtures("torch_in_process")
def test_ddp_modules_arrive_as_the_module_inside(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 4))
        payload = dumps({"model": wrapped})
        back = loads(payload.head, received(payload))["model"]
        assert type(back) is torch.nn.Linear
        assert torch.equal(back.weight, wrapped.module.weight)
        assert payload.notes == ["a DistributedDataParallel module arrives as the module inside it"]
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        sharded = distribute_tensor(torch.randn(4), init_device_mesh("cpu", (1,)))
        with pytest.raises(SerializationError, match=r"the value → \['w'\] .*DTensor.*full_tensor\(\)"):
            dumps({"w": sharded})
    finally:
        torch.distributed.destroy_process_group()


def test_compiled_modules_and_functions_arrive_as_the_original() -> None:
    module = torch.nn.Linear(3, 4)
    payload = dumps(torch.compile(module))
    back = loads(payload.head, received(payload))
    assert type(back) is torch.nn.Linear
    assert payload.notes == ["a module compiled with torch.compile arrives as the original module"]

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    payload = dumps(torch.compile(double))
    assert loads(payload.head)(torch.tensor(3)) == 6
    assert payload.notes == ["a function compiled with torch.compile arrives as the original function"]


@pytest.mark.gpu
def test_cuda_tensors_arrive_on_the_cpu_with_one_line() -> None:
    # In a process of its own: what CUDA opens stays open as long as a process lives.
    script = """
import torch
from atoll.wire.codec import dumps, loads
net = torch.nn.LSTM(8, 16, num_layers=2).cuda()
base = torch.arange(100_000, device="cuda")
payload = dumps((net, base, base[5:10]))
net_back, base_back, view_back = loads(payload.head, [bytearray(buffer) for buffer in payload.buffers])
assert payload.notes == ["CUDA tensors were returned as CPU tensors"], payload.notes
assert {p.device.type for p in net_back.parameters()} == {"cpu"}
for mine, theirs in zip(net.parameters(), net_back.parameters(), strict=True):
    assert torch.equal(mine.cpu(), theirs)
view_back[0] = -1
assert base_back[5] == -1
assert net_back(torch.randn(3, 2, 8))[0].shape == (3, 2, 16)
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


# --- functions and classes -----------------------------------------------------------------------------------------


def test_functions_travel_by_value_to_a_process_that_cannot_import_them() -> None:
    factor = 3
    scale = np.arange(20_000)

    def scaled(x: Any) -> Any:
        return x * factor + scale

    np.testing.assert_array_equal(call_elsewhere(scaled, scale), scale * 4)
    assert call_elsewhere(functools.partial(lambda a, b: a - b, 10), 3) == 7


def test_a_local_class_comes_back_as_itself_and_unchanged() -> None:
    class Counter:
        step = 1

        def __init__(self) -> None:
            self.n = 0

        def add(self) -> Counter:
            type(self).step = 100
            self.n += 1
            return self

    method = Counter.add
    back = call_elsewhere(lambda c: c.add(), Counter())
    assert type(back) is Counter
    assert back.n == 1
    assert Counter.step == 1
    assert Counter.add is method


@pytest.mark.long
def test_a_class_of_main_comes_back_as_itself(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import pickle, subprocess, sys
            import torch
            from atoll.wire.codec import dumps, loads

            class Model(torch.nn.Linear):
                pass

            def make(size):
                return Model(size, 2)

            payload = dumps((make, (3,)))
            sent = pickle.dumps((payload.head, []))
            done = subprocess.run([sys.executable, "-c", {CALL_IT!r}], input=sent, capture_output=True)
            assert done.returncode == 0, done.stderr.decode()
            head, buffers = pickle.loads(done.stdout)
            model = loads(head, buffers)
            assert type(model) is Model, type(model)
            print(tuple(model(torch.zeros(5, 3)).shape))
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == "(5, 2)", done.stderr


def test_a_class_missing_on_the_other_side_raises_there() -> None:
    module = type(sys)("atoll_test_vanishing")
    exec("class Thing: pass", module.__dict__)
    sys.modules["atoll_test_vanishing"] = module
    try:
        payload = dumps(module.Thing())
    finally:
        del sys.modules["atoll_test_vanishing"]
    with pytest.raises(ModuleNotFoundError, match="atoll_test_vanishing"):
        loads(payload.head)


# --- refusals ------------------------------------------------------------------------------------------------------


class Config:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def method(self) -> None:
        """Bound to an instance, it carries the instance."""


Pair = collections.namedtuple("Pair", "left right")


def refused(obj: Any, **options: Any) -> str:
    with pytest.raises(SerializationError) as caught:
        dumps(obj, **options)
    return str(caught.value)


def test_the_message_has_path_type_and_next_step() -> None:
    cfg = {"opts": Config(lock=threading.Lock())}
    message = refused(cfg, what="argument 'cfg'")
    assert message.startswith("argument 'cfg' → ['opts'] → .lock (a _thread.lock) can't be sent to another process")
    assert message.endswith("Create the lock inside the function")


def test_paths_start_at_the_named_roots() -> None:
    cfg = [Pair(1, (x for x in [1]))]
    message = refused(((cfg,), {}), what="the arguments of f", roots=lambda: [("argument 'cfg'", cfg)])
    assert message.startswith("argument 'cfg' → [0] → .right (a generator) can't be sent")


def test_open_files_sockets_and_threads_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("x")
    for mode in ("r", "rb", "w"):
        with open(tmp_path / "data.txt", mode) as file:
            message = refused([file], what="argument 'f'")
            assert "argument 'f' → [0] (an open file" in message
            assert "data.txt" in message
            assert "Pass the path and open it inside the function" in message
    with socket.socket() as plug:
        assert "(a socket.socket)" in refused(plug)
    assert "the value → .worker (a threading.Thread)" in refused(Config(worker=threading.Thread()))
    assert trip(Config(out=io.StringIO("kept"))).out.getvalue() == "kept"


def test_what_a_function_uses_is_named() -> None:
    lock = threading.Lock()

    def locked() -> None:
        with lock:
            pass

    message = refused(locked, what="function locked()")
    assert "variable 'lock' that" in message
    assert "(a _thread.lock)" in message
    assert ".keywords → ['k']" in refused(functools.partial(print, k=lock))
    assert ".__self__ → .lock" in refused(Config(lock=lock).method)


def test_usage_errors_keep_their_type_and_say_where() -> None:
    class Pool:
        def __reduce__(self) -> Any:
            raise UsageError("a pool cannot be sent to its own ranks")

    with pytest.raises(UsageError, match="a pool cannot be sent") as caught:
        dumps({"pool": Pool()}, what="argument 'x'")
    assert caught.value.__notes__[0].startswith("found at argument 'x' → ['pool'] (a ")
    assert caught.value.__cause__ is None


def test_too_deep_structures_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    try:
        assert "nested too deeply" in refused(deep, what="argument 'tree'")
    finally:
        while deep:  # taken apart by hand: freeing it in one go would recurse as deeply
            deep = deep.pop()


def test_a_culprit_that_no_reference_leads_to_is_still_named() -> None:
    class Hiding:
        def __reduce__(self) -> Any:
            return Config, (), {"lock": threading.Lock()}

        def __repr__(self) -> str:
            raise RuntimeError("hostile")

    message = refused({Hiding(): 1}, what="argument 'x'")
    assert message.startswith("argument 'x', somewhere inside it a _thread.lock, can't be sent")


def test_any_error_of_an_objects_own_reduction_is_reported() -> None:
    class Broken:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError("oops")

        def __getattribute__(self, name: str) -> Any:
            if name in ("__dict__", "__slots__"):
                raise RuntimeError("hostile")
            return object.__getattribute__(self, name)

    message = refused([1, Broken()])
    assert "the value → [1] (a " in message
    assert "ZeroDivisionError: oops" in message


def test_the_search_is_bounded() -> None:
    wide = [[i] for i in range(300_000)]
    assert pickle_errors.find_path(object(), [("x", wide)]) is None
