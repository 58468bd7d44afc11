"""Which rank works on which of several matrices of one shape, and how it gets them and hands back what it made."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

Work = Callable[[Tensor], Tensor]  # from matrices to as many of the same shape


def num_workers(parameter: nn.Parameter, replicas: dist.ProcessGroup | None) -> int:
    """How many ranks share the work on matrices that are spread as ``parameter`` is."""
    copies = 1 if replicas is None else dist.get_world_size(replicas)
    return copies * parameter.device_mesh.size() if isinstance(parameter, DTensor) else copies


def dealt(work: Work, parameter: nn.Parameter, replicas: dist.ProcessGroup | None) -> Work:
    """``work`` on whole matrices [n, R, C], as a function of a rank's parts [N, r, c] of all: each rank works on some.

    Every rank calls it. The matrices are spread as ``parameter`` is, and the ranks of ``replicas`` hold the same.
    """
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        copies = list(range(mesh.ndim))
        spread = [axis for axis, place in enumerate(parameter.placements) if not place.is_replicate()]
        if len(spread) == 1 and type(place := parameter.placements[spread[0]]) is Shard:
            work = partial(_exchanged, work, mesh.get_group(spread[0]), place.dim, parameter.shape)
            copies.remove(spread[0])
        for axis in reversed(copies):
            work = partial(_shared, work, mesh.get_group(axis))
        if len(copies) == mesh.ndim:
            work = partial(_gathered, work, parameter)
    return work if replicas is None else partial(_shared, work, replicas)


def _shared(work: Work, group: dist.ProcessGroup, parts: Tensor) -> Tensor:
    """Each rank has all; it works on its share, and gets what the others made of theirs."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    most = -(-len(parts) // size)
    made = work(parts[rank * most :][:most])
    own = made.new_zeros((most, *made.shape[1:]))
    own[: len(made)] = made
    everything = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(everything, own, group=group)
    return torch.cat(everything)[: len(parts)]


def _exchanged(work: Work, group: dist.ProcessGroup, dim: int, shape: torch.Size, parts: Tensor) -> Tensor:
    """Each rank has a slice of every matrix; it sends those of the matrices that are another's and gets its own's."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    # As DTensor cuts: the last ranks may have less, or nothing.
    per_rank = -(-shape[dim] // size)
    ends = [min(shape[dim], per_rank * (each + 1)) for each in range(size)]
    lengths = [end - min(shape[dim], per_rank * each) for each, end in enumerate(ends)]
    counts = [(len(parts) + size - 1 - each) // size for each in range(size)]

    def slices(count: int, length: int) -> list[int]:
        """Their shape, of ``count`` matrices."""
        return [count, *shape[:dim], length, *shape[dim + 1 :]]

    def all_to_all(values: Tensor, sent: list[int], shapes: list[list[int]]) -> list[Tensor]:
        got = [math.prod(each) for each in shapes]
        out = values.new_empty(sum(got))
        dist.all_to_all_single(out, values, got, sent, group=group)
        pieces = zip(accumulate(got), got, shapes, strict=True)
        return [out[end - length : end].view(each) for end, length, each in pieces]

    sent = [count * parts[0].numel() for count in counts]
    shapes = [slices(counts[rank], length) for length in lengths]
    made = work(torch.cat(all_to_all(parts.contiguous().view(-1), sent, shapes), dim=1 + dim))
    back = [piece.flatten() for piece in torch.split(made, lengths, dim=1 + dim)]
    shapes = [slices(count, lengths[rank]) for count in counts]
    return torch.cat(all_to_all(torch.cat(back), [len(piece) for piece in back], shapes))


def _gathered(work: Work, parameter: DTensor, parts: Tensor) -> Tensor:
    """Each rank has a part of every matrix, in whatever way; it gets all of them whole, and keeps its part."""
    mesh, shape = parameter.device_mesh, torch.Size((len(parts), *parameter.shape))
    spread = [_deeper(place) for place in parameter.placements]
    stride = (shape[1] * shape[2], shape[2], 1)
    made = work(DTensor.from_local(parts, mesh, spread, run_check=False, shape=shape, stride=stride).full_tensor())
    whole = DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=spread).to_local()


def _deeper(place: Placement) -> Placement:
    """The placement of a stack of tensors that are placed so."""
    if type(place) is Shard:
        return Shard(place.dim + 1)
    if place.is_replicate():
        return place
    return type(place)(place.dim + 1, split_factor=place.split_factor)  # type: ignore[attr-defined,call-arg]  # a shard of shards
