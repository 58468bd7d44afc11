"""The copy of tensors in host memory that a save writes from while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from atoll.train.checkpoint.files import num_threads
from atoll.train.dtensor import local

_ALIGN_BYTES = 64


class HostCopy:
    """One block of host memory for all tensors of a rank, kept from save to save; page-locked for copies off a GPU.

    Kept because fresh memory costs more to touch than the copy itself. Registered rather than allocated page-locked:
    PyTorch's allocator of that rounds up to powers of two.
    """

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._copies: dict[str, Tensor] = {}
        self._registered = False
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's part of every tensor. Those on a GPU have been copied after ``wait``; until then they are
        held, and nothing changes them that does not come after ``before_change``.

        Valid until the next call.
        """
        parts = {name: local(tensor) for name, tensor in tensors.items()}
        layout = [(name, part.shape, part.dtype) for name, part in parts.items()]
        on_gpu = any(part.is_cuda for part in parts.values())
        if layout != self._layout or on_gpu != self._registered:
            self._allocate(parts, page_locked=on_gpu)
            self._layout = layout
        if not on_gpu:
            for name, part in parts.items():
                self._copies[name].copy_(part)
            return self._copies
        # On a stream of its own: the next step's forward and backward passes go on meanwhile.
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, part in parts.items():
                self._copies[name].copy_(part, non_blocking=True)
                if part.is_cuda:
                    part.record_stream(self._stream)
        self._copied = self._stream.record_event()
        return self._copies

    def before_change(self) -> None:
        """What the current stream is given from now on begins once the tensors are copied."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Until the tensors are copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Give the memory back."""
        self.wait()
        if self._registered and self._block is not None and self._block.numel():
            _cuda_runtime().cudaHostUnregister(self._block.data_ptr())
        self._block, self._layout, self._copies, self._registered = None, [], {}, False

    def _allocate(self, parts: Mapping[str, Tensor], *, page_locked: bool) -> None:
        self.close()
        starts, end = {}, 0
        for name, part in parts.items():
            starts[name] = end
            end += -(-part.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        block = torch.empty(end, dtype=torch.uint8)
        if page_locked and end:
            # One thread needs 7 s to touch the 18 GB of a 1B run for the first time: the kernel clears every page.
            count = num_threads(end)
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(Tensor.zero_, block.chunk(count)))
            torch.cuda.check_error(_cuda_runtime().cudaHostRegister(block.data_ptr(), end, 0))
        memory: Any = block.numpy().data
        for name, part in parts.items():
            if part.numel():
                # A storage of its own, just as long as the tensor: a view of the block would be cloned to be written.
                flat = torch.frombuffer(memory, dtype=part.dtype, count=part.numel(), offset=starts[name])
                self._copies[name] = flat.view(part.shape)
            else:
                self._copies[name] = torch.empty(part.shape, dtype=part.dtype)
        self._block, self._registered = block, page_locked


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch gives it no types


class Planner(DefaultSavePlanner):
    """DCP's planner: what to write is planned by the tensors of the model, what is written is their copy."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copies[index.fqn]
