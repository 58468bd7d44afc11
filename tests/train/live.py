"""Bytes of tensors that live, counted operation by operation: measured memory without a GPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations under it make, from their birth to their death.

    What kernels use inside is not seen. ``now`` is what lives, ``peak`` the most that did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in self._known:
                self._forget_later(leaf.untyped_storage(), 0)  # older than the count
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._known:
            return
        size = storage.nbytes() if storage.device.type != "meta" else 0
        self.now += size
        self.peak = max(self.peak, self.now)
        self._forget_later(storage, size)

    def _forget_later(self, storage: torch.UntypedStorage, size: int) -> None:
        number = id(storage)
        self._known.add(number)

        def gone() -> None:
            self._known.discard(number)
            self.now -= size

        weakref.finalize(storage, gone)

    def reset_peak(self) -> None:
        """Count the peak from here."""
        self.peak = self.now
