"""How torch tensors travel: metadata in the pickle stream, their memory as a raw buffer beside it.

What comes out is what ``torch.save`` would keep (``.grad`` and backward hooks are left behind), with these choices:

- Tensors over one storage stay over one storage: tied weights, a tensor and its view.
- A tensor that uses less than half of its storage is sent alone, unless another tensor of the payload shares it: so a
  slice of a huge tensor costs what the slice costs.
- A tensor with an autograd graph arrives detached, with ``requires_grad=False``, and a note says so.
- A tensor on a GPU arrives on the CPU, and a note says so. Meta tensors stay meta.

Parameters, subclasses and tensors with attributes are left to torch's own reductions, which end at tensors and storages
that are reduced here. torch is imported by the functions that need it; on the sending side it always is already.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from atoll.core.errors import SerializationError

_SMALL_BYTES = 16 * 1024
_CARD_DEVICES = frozenset({"cuda", "mps", "xpu", "hpu", "npu"})
_KNOWN_DEVICES = _CARD_DEVICES | {"cpu", "meta"}


class _Memory:
    """Bytes of a storage. The pickler memoises this object, so a storage travels once however many tensors lie on it.

    Holding the storage keeps its key valid.
    """

    def __init__(self, storage: Any, flat: Any) -> None:
        self.storage = storage
        self.flat = flat

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_storage, (pickle.PickleBuffer(_bytes_of(self.flat)),)


class TensorReducer:
    """Reduces the tensors of one payload.

    ``shared`` has the storages that several tensors turned out to use after one of them had been sent alone; where it
    grows, the payload is pickled once more.
    """

    def __init__(self, shared: dict[int, Any], note: Callable[[str], None]) -> None:
        self.shared = shared
        self.note = note
        self.sent: dict[int, _Memory] = {}
        self.alone: dict[int, Any] = {}

    def reduce(self, obj: Any) -> Any:
        """The pickle reduction of a tensor or storage; NotImplemented leaves it to torch's own."""
        import torch

        if not isinstance(obj, torch.Tensor):
            return self._storage(obj)
        has_graph = obj.requires_grad and not obj.is_leaf
        if type(obj) is not torch.Tensor or (not has_graph and (obj.requires_grad or obj.__dict__)):
            return NotImplemented
        if obj.is_quantized or obj.is_nested or _is_named(obj) or obj.device.type not in _KNOWN_DEVICES:
            return NotImplemented
        if has_graph:
            self.note("a tensor with an autograd graph arrives detached, with requires_grad=False")
        self._note_device(obj)
        return self._tensor(obj.detach())

    def _tensor(self, plain: Any) -> Any:
        import torch

        if plain.layout == torch.sparse_coo:
            parts = (plain._indices(), plain._values())
            return rebuild_sparse, (plain.layout, parts, tuple(plain.shape), plain.is_coalesced())
        if plain.layout in (torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc):
            by_row = plain.layout in (torch.sparse_csr, torch.sparse_bsr)
            names = ("crow_indices", "col_indices") if by_row else ("ccol_indices", "row_indices")
            parts = tuple(getattr(plain, name)() for name in (*names, "values"))
            return rebuild_sparse, (plain.layout, parts, tuple(plain.shape), None)
        if plain.layout != torch.strided:
            plain = plain.to_dense()  # mkldnn
        if plain.device.type == "meta" or plain.numel() == 0:
            device = "meta" if plain.device.type == "meta" else "cpu"
            return rebuild_empty, (plain.dtype, tuple(plain.shape), tuple(plain.stride()), device)
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        storage = plain.untyped_storage()
        key, num_bytes = storage._cdata, plain.numel() * plain.element_size()
        lone = key not in self.shared and key not in self.sent and key not in self.alone
        if lone and storage.nbytes() > max(_SMALL_BYTES, 2 * num_bytes):
            self.alone[key] = storage
            plain = plain.contiguous()
            memory, offset = _Memory(storage, plain.view(-1).view(torch.uint8)), 0
        else:
            memory, offset = self._whole(storage), plain.storage_offset()
        return rebuild_tensor, (memory, plain.dtype, offset, tuple(plain.shape), tuple(plain.stride()))

    def _whole(self, storage: Any) -> _Memory:
        """The memory of a storage, the same object for every tensor on it."""
        import torch

        key = storage._cdata
        if key in self.alone:  # a part of it went out already: they have to stay together
            self.shared[key] = storage
        if key not in self.sent:
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self.sent[key] = _Memory(storage, flat)
        return self.sent[key]

    def _storage(self, obj: Any) -> Any:
        """A bare storage, which torch's own reductions contain."""
        import torch

        if isinstance(obj, torch.UntypedStorage):
            untyped, dtype = obj, None
        else:
            untyped, dtype = obj._untyped_storage, obj.dtype
        if untyped.device.type not in _KNOWN_DEVICES or untyped.device.type == "meta":
            return NotImplemented
        self._note_device(untyped)
        return rebuild_bare_storage, (self._whole(untyped), dtype)

    def _note_device(self, obj: Any) -> None:
        if obj.device.type in _CARD_DEVICES:
            self.note(f"{obj.device.type.upper()} tensors were returned as CPU tensors")


def _is_named(obj: Any) -> bool:
    has_names = getattr(obj, "has_names", None)  # gone from torch together with named tensors
    return has_names is not None and bool(has_names())


def _bytes_of(flat: Any) -> memoryview:
    """The memory of a flat uint8 tensor; without a copy where it is on the CPU and NumPy is there."""
    import torch

    if flat.numel() == 0:
        return memoryview(bytearray())
    try:
        array: Any = flat.cpu().numpy()
        return memoryview(array)
    except RuntimeError:  # torch without NumPy
        copy = bytearray(flat.numel())
        torch.frombuffer(copy, dtype=torch.uint8).copy_(flat)
        return memoryview(copy)


def rebuild_storage(data: Any) -> Any:
    """Used in payloads: an untyped CPU storage over received bytes, copied only where they are read-only or few."""
    import torch

    view = memoryview(data)
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    if view.nbytes < _SMALL_BYTES:  # what torch allocates is aligned
        return torch.frombuffer(bytearray(view), dtype=torch.uint8).clone().untyped_storage()
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8).untyped_storage()


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


def rebuild_sparse(layout: Any, parts: Any, shape: tuple[int, ...], coalesced: bool | None) -> Any:
    """Used in payloads: a sparse tensor. torch's own function for it keeps each one until the next ``torch.load``."""
    import torch

    make: Any = torch.sparse_coo_tensor if layout == torch.sparse_coo else torch.sparse_compressed_tensor
    if layout == torch.sparse_coo:
        return make(*parts, shape, check_invariants=False, is_coalesced=coalesced)
    return make(*parts, shape, layout=layout, check_invariants=False)


# --- what the pickler does with torch objects, by the name of a class in their MRO ---------------------------------


def same(obj: Any) -> Any:
    """Used in payloads: stands for an object that travels as another one, such as a wrapper as what it wraps."""
    return obj


def _reduce_tensor(pickler: Any, obj: Any) -> Any:
    if pickler.tensors is None:
        pickler.tensors = TensorReducer(pickler.shared, pickler.note)
    return pickler.tensors.reduce(obj)


def _reduce_ddp(pickler: Any, obj: Any) -> Any:
    pickler.note("a DistributedDataParallel module arrives as the module inside it")
    return same, (obj.module,)


def _reduce_compiled_module(pickler: Any, obj: Any) -> Any:
    pickler.note("a module compiled with torch.compile arrives as the original module")
    return same, (obj._orig_mod,)


_FULL_STATE = (
    "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
)


def _refuse_sharded_tensor(pickler: Any, obj: Any) -> Any:
    raise SerializationError(
        "this rank holds only its shard of a DTensor. Call .full_tensor() on every rank and send the result; "
        f"for a whole model use {_FULL_STATE}"
    )


def _refuse_sharded_module(pickler: Any, obj: Any) -> Any:
    raise SerializationError(
        "this rank holds only its shard of an FSDP module. Send its full state dict instead: "
        f"{_FULL_STATE}, called on every rank"
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
