"""Which rank works on which of several matrices of one shape, and how it gets them and hands back what it made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


class Hop(Protocol):
    """One move of matrices between ranks, and the way back."""

    def there(self, parts: Tensor) -> Tensor:
        """From what this rank holds of N matrices to what it works on."""

    def back(self, made: Tensor) -> Tensor:
        """From what this rank made to what it holds of all N."""


@dataclass(frozen=True)
class Dealing:
    """The hops of matrices that are spread alike.

    Attributes:
        size: ranks that share the work.
    """

    hops: Sequence[Hop]
    size: int

    def whole(self, parts: Tensor) -> Tensor:
        """This rank's share of whole matrices, [n, R, C], of its parts of all, [N, r, c]. Every rank calls it."""
        for hop in self.hops:
            parts = hop.there(parts)
        return parts

    def back(self, made: Tensor) -> Tensor:
        """This rank's parts of all, [N, r, c], of what each made of its share. Every rank calls it."""
        for hop in reversed(self.hops):
            made = hop.back(made)
        return made


def dealing_of(parameter: nn.Parameter, replicas: dist.ProcessGroup | None) -> Dealing:
    """How matrices are dealt that are spread as ``parameter`` is, which the ranks of ``replicas`` hold alike."""
    hops: list[Hop] = [] if replicas is None else [_Share(replicas)]
    size = 1 if replicas is None else dist.get_world_size(replicas)
    if not isinstance(parameter, DTensor):
        return Dealing(hops, size)
    mesh = parameter.device_mesh
    spread = {axis: place for axis, place in enumerate(parameter.placements) if not place.is_replicate()}
    if len(spread) == 1 and all(type(place) is Shard for place in spread.values()):
        hops += [_Share(mesh.get_group(axis)) for axis in range(mesh.ndim) if axis not in spread]
        hops += [_Exchange(mesh.get_group(axis), place.dim, parameter.shape) for axis, place in spread.items()]  # type: ignore[attr-defined]  # shards have a dim
    else:
        hops += [_Gather(parameter), *(_Share(mesh.get_group(axis)) for axis in range(mesh.ndim))]
    return Dealing(hops, size * mesh.size())


class _Share:
    """Each rank has all; it takes its share, and gets what the others made of theirs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size, self._rank = group, dist.get_world_size(group), dist.get_rank(group)

    def there(self, parts: Tensor) -> Tensor:
        self._count = len(parts)
        self._most = -(-len(parts) // self._size)
        return parts[self._rank * self._most :][: self._most]

    def back(self, made: Tensor) -> Tensor:
        own = made.new_zeros((self._most, *made.shape[1:]))
        own[: len(made)] = made
        everything = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(everything, own, group=self._group)
        return torch.cat(everything)[: self._count]


class _Exchange:
    """Each rank has a slice of every matrix; it sends those of the matrices that are another's and gets its own's."""

    def __init__(self, group: dist.ProcessGroup, dim: int, shape: torch.Size) -> None:
        self._group, self._dim, self._shape = group, dim, shape
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        # As DTensor cuts: the last ranks may have less, or nothing.
        per_rank = -(-shape[dim] // self._size)
        ends = [min(shape[dim], per_rank * (rank + 1)) for rank in range(self._size)]
        self._lengths = [end - min(shape[dim], per_rank * rank) for rank, end in enumerate(ends)]

    def _slices(self, count: int) -> list[list[int]]:
        """Shapes of the slices that each rank has of ``count`` matrices."""
        shapes = [[count, *self._shape] for _ in self._lengths]
        for shape, length in zip(shapes, self._lengths, strict=True):
            shape[1 + self._dim] = length
        return shapes

    def there(self, parts: Tensor) -> Tensor:
        self._counts = [(len(parts) + self._size - 1 - rank) // self._size for rank in range(self._size)]
        shapes = self._slices(self._counts[self._rank])
        sent = [count * parts[0].numel() for count in self._counts]
        got = self._all_to_all(parts.contiguous().view(-1), sent, [math.prod(shape) for shape in shapes])
        return torch.cat([piece.view(shape) for piece, shape in zip(got, shapes, strict=True)], dim=1 + self._dim)

    def back(self, made: Tensor) -> Tensor:
        slices = [piece.flatten() for piece in torch.split(made, self._lengths, dim=1 + self._dim)]
        own = self._slices(1)[self._rank]
        sizes = [count * math.prod(own) for count in self._counts]
        got = self._all_to_all(torch.cat(slices), [len(piece) for piece in slices], sizes)
        return torch.cat(got).view(-1, *own[1:])

    def _all_to_all(self, values: Tensor, sent: list[int], got: list[int]) -> list[Tensor]:
        out = values.new_empty(sum(got))
        dist.all_to_all_single(out, values, got, sent, group=self._group)
        return [out[end - size : end] for end, size in zip(accumulate(got), got, strict=True)]


class _Gather:
    """Each rank has a part of every matrix, in whatever way; it gets all of them whole, and keeps its part."""

    def __init__(self, parameter: DTensor) -> None:
        self._mesh, self._shape = parameter.device_mesh, parameter.shape
        self._spread = [_deeper(place) for place in parameter.placements]
        self._everywhere: list[Placement] = [Replicate()] * self._mesh.ndim

    def there(self, parts: Tensor) -> Tensor:
        shape = torch.Size((len(parts), *self._shape))
        stride = (shape[1] * shape[2], shape[2], 1)
        spread = DTensor.from_local(parts, self._mesh, self._spread, run_check=False, shape=shape, stride=stride)
        return spread.full_tensor()

    def back(self, made: Tensor) -> Tensor:
        whole = DTensor.from_local(made, self._mesh, self._everywhere, run_check=False)
        return whole.redistribute(placements=self._spread).to_local()


def _deeper(place: Placement) -> Placement:
    """The placement of a stack of tensors that are placed so."""
    if type(place) is Shard:
        return Shard(place.dim + 1)
    if place.is_replicate():
        return place
    return type(place)(place.dim + 1, split_factor=place.split_factor)  # type: ignore[attr-defined,call-arg]  # a shard of shards
