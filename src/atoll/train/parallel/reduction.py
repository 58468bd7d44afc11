"""Reduce-scatter of gradients that were computed in 16 bits and are summed in more: they travel as they are.

FSDP2 would widen them first, and send twice the bytes. Sums are the same up to their order, since what is added are the
same numbers in the same format.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class WideSum:
    """FSDP2's ``ReduceScatter``: every rank gets its part of each other rank's gradients, and sums them.

    Args:
        dtype: of the sums.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._input: Tensor | None = None  # allocated, and not reduced yet

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What FSDP2 fills with gradients, in their format, and then, for these, what takes their sums."""
        if self._input is None:
            self._input = torch.empty(*size, dtype=dtype, device=device)
            return self._input
        return torch.empty(*size, dtype=self._dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Sum ``input_tensor`` [N] of all n ranks; this rank's part of it is ``output_tensor`` [N/n].

        ``op`` is the sum: ``ShardedWeights`` asks for it. FSDP2 waits by events of the stream it calls this on.
        """
        assert self._input is input_tensor and not async_op
        self._input = None
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, dtype=self._dtype, out=output_tensor)
