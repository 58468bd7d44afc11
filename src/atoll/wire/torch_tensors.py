"""How torch tensors travel: metadata in the pickle stream, their memory as a raw buffer beside it.

What comes out is what ``torch.save`` would keep (``.grad`` and backward hooks are left behind), with these choices:

- Tensors over one storage stay over one storage: tied weights, a tensor and its view. Only the bytes that the sent
  tensors cover travel, so a slice of a huge tensor costs what the slice costs.
- A strided view that uses less than a quarter of the bytes it spans is sent as a contiguous copy, unless another
  tensor of the payload shares its storage.
- A tensor with an autograd graph arrives detached, with ``requires_grad=False``, and a note says so.
- A tensor on a GPU arrives on the CPU, and a note says so. Meta tensors stay meta.

torch is imported by the functions that need it; on the sending side it always is already.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from atoll.core.errors import SerializationError

_ALIGN = 16  # bytes; the largest element size, so that offsets into a cut-out stay whole for every dtype
_SMALL_BYTES = 16 * 1024
_SPARSE_VIEW = 4

_HOST_DEVICES = frozenset({"cpu"})
_CARD_DEVICES = frozenset({"cuda", "mps", "xpu", "hpu", "npu"})


class Span:
    """The part ``[lo, hi)`` of a storage, in bytes, that a payload carries. Holding the storage keeps its key valid."""

    __slots__ = ("hi", "lo", "storage")

    def __init__(self, storage: Any, lo: int, hi: int) -> None:
        self.storage = storage
        self.lo = lo
        self.hi = hi

    def __reduce__(self) -> tuple[Any, ...]:
        # The pickler memoises this object, so a storage travels once however many tensors lie on it.
        return rebuild_storage, (pickle.PickleBuffer(storage_bytes(self.storage, self.lo, self.hi)),)


class TensorReducer:
    """Reduces the tensors of one payload.

    A payload is pickled again where two tensors turn out to need different parts of one storage (``grew``): ``plan``
    carries what was learnt from one pass to the next.
    """

    def __init__(self, plan: dict[int, Span], note: Callable[[str], None], last_pass: bool) -> None:
        self.plan = plan
        self.note = note
        self.last_pass = last_pass
        self.grew = False
        self.spans: dict[int, Span] = {}
        self.copied: dict[int, Span] = {}

    def reduce(self, obj: Any) -> Any:
        """The pickle reduction of a tensor or storage; NotImplemented leaves it to torch's own."""
        import torch

        if not isinstance(obj, torch.Tensor):
            return self._storage(obj)
        with torch._C.DisableTorchFunctionSubclass():
            return self._tensor(obj)

    def _tensor(self, obj: Any) -> Any:
        import torch

        kind = type(obj)
        is_parameter = kind is torch.nn.Parameter
        if not is_parameter and kind is not torch.Tensor and not _is_thin_subclass(kind):
            return NotImplemented  # wrapper subclasses and those with a reduction of their own: theirs holds tensors
        if obj.is_quantized or obj.is_nested or _is_named(obj) or obj.device.type not in _KNOWN_DEVICES:
            return NotImplemented
        keeps_grad = obj.requires_grad
        if keeps_grad and not obj.is_leaf:
            self.note("a tensor with an autograd graph arrives detached, with requires_grad=False")
            keeps_grad = False
        if obj.device.type in _CARD_DEVICES:
            self.note(f"{obj.device.type.upper()} tensors were returned as CPU tensors")
        state = dict(obj.__dict__) or None
        plain = obj.detach() if kind is torch.Tensor else obj.detach().as_subclass(torch.Tensor)
        rebuild, args = self._data(plain)
        if kind is torch.Tensor and state is None and not keeps_grad:
            return rebuild, args
        # The data travels as an object of its own, which the outer object then wraps.
        return (wrap_tensor, (kind, keeps_grad, rebuild, args), state, None, None, set_attributes)

    def _data(self, plain: Any) -> tuple[Any, tuple[Any, ...]]:
        """Reduce a plain strided, sparse or meta tensor without gradient."""
        import torch

        if plain.layout == torch.sparse_coo:
            return rebuild_sparse_coo, (plain._indices(), plain._values(), tuple(plain.shape), plain.is_coalesced())
        for layouts, names in (
            ((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices")),
            ((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices")),
        ):
            if plain.layout in layouts:
                indices = [getattr(plain, name)() for name in names]
                return rebuild_sparse_compressed, (plain.layout, *indices, plain.values(), tuple(plain.shape))
        if plain.layout != torch.strided:
            plain = plain.to_dense()  # mkldnn
        if plain.device.type == "meta" or plain.numel() == 0:
            device = "meta" if plain.device.type == "meta" else "cpu"
            return rebuild_empty, (plain.dtype, tuple(plain.shape), tuple(plain.stride()), device)
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        span, plain = self._span_of(plain)
        item = plain.element_size()
        offset = (plain.storage_offset() * item - span.lo) // item
        return rebuild_tensor, (span, plain.dtype, offset, tuple(plain.shape), tuple(plain.stride()))

    def _span_of(self, plain: Any) -> tuple[Span, Any]:
        """The part of the storage to send for a tensor, and the tensor (a compact copy of it where that is better)."""
        storage = plain.untyped_storage()
        key = storage._cdata
        item = plain.element_size()
        lo = plain.storage_offset() * item
        spread = (1 + sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True))) * item
        alone = key not in self.plan and key not in self.spans and key not in self.copied
        if alone and spread > max(_SMALL_BYTES, _SPARSE_VIEW * plain.numel() * item):
            self.copied[key] = Span(storage, lo, lo + spread)
            plain = plain.contiguous()
            whole = plain.untyped_storage()
            return self._span(whole, 0, whole.nbytes()), plain
        return self._span(storage, lo, lo + spread), plain

    def _span(self, storage: Any, lo: int, hi: int) -> Span:
        """The span of a storage that covers ``[lo, hi)``, the same object for every tensor on that storage."""
        key = storage._cdata
        size = storage.nbytes()
        copied = self.copied.get(key)
        if copied is not None:
            # A compact copy of another tensor on this storage went out already: they have to stay together.
            self._widen(copied, lo, hi)
        span = self.spans.get(key)
        if span is None:
            planned = self.plan.get(key)
            if planned is not None:
                lo, hi = min(lo, planned.lo), max(hi, planned.hi)
            lo -= lo % _ALIGN
            if size <= 2 * (hi - lo):
                lo, hi = 0, size
            span = self.spans[key] = Span(storage, lo, hi)
        elif lo < span.lo or hi > span.hi:
            self._widen(span, lo, hi)
            span = Span(storage, lo - lo % _ALIGN, hi)  # right by itself, should this be the last pass
        return span

    def _widen(self, span: Span, lo: int, hi: int) -> None:
        key = span.storage._cdata
        planned = self.plan.setdefault(key, Span(span.storage, span.lo, span.hi))
        planned.lo = min(planned.lo, span.lo, lo)
        planned.hi = max(planned.hi, span.hi, hi)
        self.grew = not self.last_pass

    def _storage(self, obj: Any) -> Any:
        """A bare storage, which torch's own reductions contain: the same spans, so that it stays tied to tensors."""
        import torch

        if isinstance(obj, torch.UntypedStorage):
            untyped, wrap = obj, None
        else:
            untyped, wrap = obj._untyped_storage, obj.dtype
        if untyped.device.type not in _KNOWN_DEVICES or untyped.device.type == "meta":
            return NotImplemented
        if untyped.device.type in _CARD_DEVICES:
            self.note(f"{untyped.device.type.upper()} tensors were returned as CPU tensors")
        return rebuild_bare_storage, (self._span(untyped, 0, untyped.nbytes()), wrap)


_KNOWN_DEVICES = _HOST_DEVICES | _CARD_DEVICES | {"meta"}


def _is_thin_subclass(kind: type) -> bool:
    """A subclass that adds Python only: no dispatch of its own, no reduction of its own."""
    import torch

    base = torch.Tensor
    names = ("__reduce_ex__", "__reduce__", "__torch_dispatch__", "__getstate__", "__setstate__")
    return all(getattr(kind, name, None) == getattr(base, name, None) for name in names)


def _is_named(obj: Any) -> bool:
    has_names = getattr(obj, "has_names", None)  # gone from torch together with named tensors
    return has_names is not None and bool(has_names())


def storage_bytes(storage: Any, lo: int, hi: int) -> memoryview:
    """Bytes ``[lo, hi)`` of a storage as a flat view; of a CPU storage without a copy."""
    import torch

    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, lo, (hi - lo,), (1,)).cpu()
    if flat.numel() == 0:
        return memoryview(bytearray())
    try:
        array: Any = flat.numpy()
        return memoryview(array)
    except RuntimeError:  # torch without NumPy: a view by address, which keeps the tensor alive
        import ctypes

        view = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
        view._owner = flat  # type: ignore[attr-defined]  # ctypes arrays take attributes
        return memoryview(view).cast("B")


def rebuild_storage(data: Any) -> Any:
    """Used in payloads: an untyped CPU storage over received bytes, copied only where they are read-only or few."""
    import torch

    view = memoryview(data)
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    if view.nbytes < _SMALL_BYTES:
        return torch.frombuffer(bytearray(view), dtype=torch.uint8).clone().untyped_storage()
    if view.readonly:
        return torch.frombuffer(bytearray(view), dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def rebuild_bare_storage(storage: Any, dtype: Any) -> Any:
    """Used in payloads: a storage that travels by itself, typed where it was."""
    import torch

    if dtype is None:
        return storage
    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=storage, dtype=dtype, _internal=True)


def rebuild_tensor(storage: Any, dtype: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """Used in payloads: a CPU tensor over a received storage; ``offset`` and ``stride`` count elements."""
    import torch

    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)


def rebuild_empty(dtype: Any, shape: tuple[int, ...], stride: tuple[int, ...], device: str) -> Any:
    """Used in payloads: a tensor without data (no elements, or on the meta device)."""
    import torch

    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def rebuild_sparse_coo(indices: Any, values: Any, shape: tuple[int, ...], coalesced: bool) -> Any:
    """Used in payloads: a sparse COO tensor."""
    import torch

    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=coalesced)


def rebuild_sparse_compressed(layout: Any, compressed: Any, plain: Any, values: Any, shape: tuple[int, ...]) -> Any:
    """Used in payloads: a sparse CSR, CSC, BSR or BSC tensor."""
    import torch

    return torch.sparse_compressed_tensor(compressed, plain, values, shape, layout=layout, check_invariants=False)


def wrap_tensor(kind: Any, requires_grad: bool, rebuild: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Used in payloads: a tensor that needs gradients, a Parameter, or a subclass of Tensor."""
    import torch

    data = rebuild(*args)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(data, requires_grad)
    if kind is not torch.Tensor:
        data = data.as_subclass(kind)
    return data.requires_grad_() if requires_grad else data


def set_attributes(obj: Any, state: dict[str, Any]) -> None:
    """Used in payloads: the Python attributes that somebody put on a tensor."""
    obj.__dict__.update(state)


# --- what the pickler does with torch objects, by the name of a class in their MRO ---------------------------------


def same(obj: Any) -> Any:
    """Used in payloads: stands for an object that travels as another one, such as a wrapper as what it wraps."""
    return obj


def _reduce_tensor(pickler: Any, obj: Any) -> Any:
    if pickler.tensors is None:
        pickler.tensors = TensorReducer(pickler.plan, pickler.note, pickler.last_pass)
    return pickler.tensors.reduce(obj)


def _reduce_ddp(pickler: Any, obj: Any) -> Any:
    pickler.note("a DistributedDataParallel module arrives as the module inside it")
    return same, (obj.module,)


def _reduce_compiled_module(pickler: Any, obj: Any) -> Any:
    pickler.note("a module compiled with torch.compile arrives as the original module")
    return same, (obj._orig_mod,)


def _refuse_sharded_tensor(pickler: Any, obj: Any) -> Any:
    raise SerializationError(
        "this rank holds only its shard of a DTensor. Call .full_tensor() on every rank and send the result; "
        "for a whole model use torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
    )


def _refuse_sharded_module(pickler: Any, obj: Any) -> Any:
    raise SerializationError(
        "this rank holds only its shard of an FSDP module. Send its full state dict instead: "
        "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), called on every rank"
    )


TORCH_HANDLERS: dict[str, Callable[[Any, Any], Any]] = {
    "DTensor": _refuse_sharded_tensor,
    "Tensor": _reduce_tensor,
    "UntypedStorage": _reduce_tensor,
    "TypedStorage": _reduce_tensor,
    "DistributedDataParallel": _reduce_ddp,
    "OptimizedModule": _reduce_compiled_module,
    "FSDPModule": _refuse_sharded_module,
    "FullyShardedDataParallel": _refuse_sharded_module,
}
