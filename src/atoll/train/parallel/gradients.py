"""Summed gradients of a step, and the weights the optimizer sees.

Gradients are sums over tokens. They are added up over micro-batches in the masters' number format and over ranks in
the reduction's, and divided once, by the number of tokens of the whole step, in the optimizer (``optim/optimizer.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from atoll.train.dtensor import as_sharded, local, whole_of
from atoll.train.parallel.precision import NumberFormats

_BUCKET_BYTES = 32 * 2**20


class Weights:
    """A model's weights as the loop uses them in a step: its methods are called in this order."""

    masters: dict[str, nn.Parameter]  # what the optimizer moves, by name

    def begin(self) -> None:
        """A step begins: gradients are zero."""
        for parameter in self.masters.values():
            parameter.grad = None

    def last_micro_batch(self) -> None:
        """The backward pass that comes is the last of this step."""

    def finish(self) -> None:
        """All backward passes are done: ``masters`` hold the sums of all ranks in ``.grad`` from now on."""

    def publish(self) -> None:
        """The optimizer has moved ``masters``: the model computes with them from now on."""


class ShardedWeights(Weights):
    """FSDP2 sums the gradients of each block while the backward pass goes on."""

    def __init__(self, stages: Iterable[nn.Module], *, sums_replicas_once: bool) -> None:
        self.masters = {name: p for stage in stages for name, p in stage.named_parameters()}
        self._units = [module for stage in stages for module in stage.modules() if isinstance(module, FSDPModule)]
        self._sums_replicas_once = sums_replicas_once
        for unit in self._units:
            # Sums, not means; torch's own pre-multiplied sum has no Gloo kernel.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def begin(self) -> None:
        super().begin()
        self._all_reduce(False)

    def last_micro_batch(self) -> None:
        self._all_reduce(True)

    def _all_reduce(self, wanted: bool) -> None:
        # Under HSDP the sum over replicas is needed once; that over shards frees memory after every micro-batch.
        # FSDP2 adds up what waits for it in the reduction's format: a narrow one does not wait.
        if self._sums_replicas_once:
            for unit in self._units:
                unit.set_requires_all_reduce(wanted, recurse=False)


class ReplicatedWeights(Weights):
    """Whole parameters on each rank (DDP); gradients are summed bucket by bucket while the last backward pass goes on.

    The stages come with weights in the masters' format. Where they compute in another, they get copies in that one.
    """

    def __init__(
        self,
        stages: Iterable[nn.Module],
        formats: NumberFormats,
        *,
        group: dist.ProcessGroup | None,
        overlap: bool,
    ) -> None:
        everything = {name: p for stage in stages for name, p in stage.named_parameters()}
        self._parameters = {name: p for name, p in everything.items() if p.requires_grad}
        self._own_masters = formats.compute != formats.master
        # Frozen ones are saved and loaded with the others, in the format that they compute in.
        self.masters = everything
        if self._own_masters:
            self.masters = {n: nn.Parameter(p.detach()) if p.requires_grad else p for n, p in everything.items()}
            for master in self.masters.values():
                master.grad_dtype = None  # may also have a gradient in the compute format
            for stage in stages:
                stage.to(formats.compute)
        self._group = group
        self._formats = formats
        self._overlap = overlap
        self._summing = False
        self._alone = False
        self._sent: list[tuple[dist.Work, Tensor]] = []  # in the reduction's format
        self._buckets: list[_Bucket] = []
        if group is None and not self._own_masters:
            return
        names: list[str] = []
        size = 0
        for name in reversed(self._parameters):  # the backward pass reaches the last first
            names.append(name)
            size += local(self._parameters[name]).numel() * formats.master.itemsize
            if size >= _BUCKET_BYTES:
                self._add_bucket(names)
                names, size = [], 0
        if names:
            self._add_bucket(names)

    def _add_bucket(self, names: list[str]) -> None:
        bucket = _Bucket([local(self._parameters[name]) for name in names], self._formats.master)
        self._buckets.append(bucket)
        owner = weakref.ref(self)  # Python's collector does not see what hooks hold: no model would ever be freed
        for place, name in enumerate(names):

            def arrived(parameter: Tensor, bucket: _Bucket = bucket, place: int = place) -> None:
                weights = owner()
                assert weights is not None and parameter.grad is not None
                if weights._alone:
                    return
                bucket.add(place, local(as_sharded(parameter.grad, parameter)))
                parameter.grad = None
                if weights._summing:
                    weights._send()

            self._parameters[name].register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        super().begin()
        self._summing = self._alone = False
        for bucket in self._buckets:
            bucket.filled.clear()

    def last_micro_batch(self) -> None:
        # In a pipeline the passes of several micro-batches interleave: sums are made when all are done.
        self._summing = self._overlap and self._group is not None
        # What one backward pass on one rank makes is summed with nothing: it stays where it is, in its own format.
        self._alone = self._overlap and self._group is None and not any(bucket.filled for bucket in self._buckets)
        for bucket in self._buckets:
            bucket.missing = set(range(bucket.size))

    def _send(self, *, all_of_them: bool = False) -> None:
        # Strictly one bucket after the other, since ranks must agree on the order of their collectives.
        for bucket in self._buckets[len(self._sent) :]:
            if bucket.missing and not all_of_them:
                return
            bucket.fill()
            sent = bucket.flat.to(self._formats.reduce)
            work = dist.all_reduce(sent, group=self._group, async_op=True)
            assert work is not None
            self._sent.append((work, sent))

    def finish(self) -> None:
        if self._alone and self._own_masters:
            for name, parameter in self._parameters.items():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self.masters[name].grad, parameter.grad = as_sharded(gradient, parameter), None
            return
        if self._group is not None:
            self._send(all_of_them=True)  # also those with parameters that no token reached
            for (work, sent), bucket in zip(self._sent, self._buckets, strict=True):
                work.wait()
                bucket.flat.copy_(sent)
            self._sent.clear()
        for bucket in self._buckets:
            bucket.fill()
        views = (view for bucket in self._buckets for view in bucket.views)
        for name, view in zip(reversed(self._parameters), views, strict=False):
            master = self.masters[name]
            master.grad = whole_of(view, master)
        for master in self.masters.values():
            if master.grad is not None:
                master.grad = as_sharded(master.grad, master)

    def publish(self) -> None:
        if self._own_masters:
            with torch.no_grad():
                torch._foreach_copy_(
                    [local(p) for p in self._parameters.values()], [local(self.masters[n]) for n in self._parameters]
                )


class _Bucket:
    """Gradients that are summed over the ranks together."""

    def __init__(self, parameters: list[Tensor], dtype: torch.dtype) -> None:
        self._shapes = [p.shape for p in parameters]
        self.size = len(parameters)
        self._make = partial(torch.empty, sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
        self.missing: set[int] = set()  # those that the last backward pass has yet to reach
        self.filled: set[int] = set()  # those that hold a sum of this step

    @cached_property
    def flat(self) -> Tensor:
        """All of them; made when the first is added."""
        return self._make()

    @cached_property
    def views(self) -> list[Tensor]:
        """Each in ``flat``."""
        pieces = torch.split(self.flat, [shape.numel() for shape in self._shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def add(self, place: int, gradient: Tensor) -> None:
        """Add a gradient of this step; the first takes the place of what the last step left."""
        if place in self.filled:
            self.views[place].add_(gradient)
        else:
            self.views[place].copy_(gradient)
        self.filled.add(place)
        self.missing.discard(place)

    def fill(self) -> None:
        """Those that no token reached have a gradient of zero."""
        for place, view in enumerate(self.views):
            if place not in self.filled:
                view.zero_()
                self.filled.add(place)
