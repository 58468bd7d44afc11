"""Initial weights, a function of the seed, a parameter's name and the place of an element in it, and of nothing else.

Each rank computes the elements it holds from their places in the whole tensor, so that every layout starts from the
same bits and no tensor is ever whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from atoll.train.models.family import family_of, shapes
from atoll.train.models.parts import Decoder
from atoll.train.recipe.schema import ModelSection

_SLICE = {"cpu": 1 << 17, "cuda": 1 << 22}  # elements computed at a time: what fits a CPU's cache, what fills a GPU
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give the parameters and buffers of a model on the meta device storage, its bits undefined.

    ``Module.to_empty`` alone would leave parameters that modules share as different ones.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (module, name), *others in owners.values():
        for other, other_name in others:
            other.register_parameter(other_name, module.get_parameter(name))


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> list[str]:
    """Set every parameter, in place, and the buffers of a user's model.

    Of a family's parameters, matrices and tables are normal with ``std_of``, norms are 1 and biases 0. Anything else is
    a user's, and is what their function makes: each rank calls it on the CPU under the same seed and keeps its part.

    Parameters may be plain tensors or DTensors of any mesh and placement. Values are computed in float64; for narrower
    types they are rounded to float32 and then to the type. The logarithms of a GPU and a CPU may differ in the last bit
    of a float64: the same seed gives the same float32 on both in all but a few values of ten million.

    Returns:
        names of the parameters that their user's function set.
    """
    theirs: dict[str, Tensor] = {}
    ours = shapes(model.config) if isinstance(model, Decoder) else {}
    for path, module in model.named_modules():
        for last, parameter in module.named_parameters(recurse=False):
            name = plain_name(f"{path}.{last}".lstrip("."))
            if isinstance(model, Decoder) and name in ours:
                _draw(parameter, name, model.config, seed)
            else:
                theirs[name] = parameter
    names = list(theirs)
    theirs |= {plain_name(name): buffer for name, buffer in model.named_buffers()}
    if theirs:
        make: Callable[[int], nn.Module] | None = getattr(model, "make", None)
        assert make is not None, f"nothing says how to set {names}"
        made = make(seed)
        values = dict(made.named_parameters(remove_duplicate=False)) | dict(made.named_buffers())
        for name, tensor in theirs.items():
            copy_part(values[name].detach(), tensor)
    return names


def _draw(parameter: Tensor, name: str, config: ModelSection, seed: int) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    if name.endswith("bias"):
        local.zero_()
    elif parameter.ndim == 1:
        local.fill_(1.0)
    else:
        _fill_normal(local, parameter.shape, _places(parameter), key(seed, name), std_of(name, config))


def std_of(name: str, config: ModelSection) -> float:
    """The standard deviation of a matrix's or table's initial values: ``config.std``, except that

    - under ``zero_residual`` (Jordan et al., "modded-nanogpt", 2024; Karpathy, "nanochat", 2025) what writes to the
      residual stream starts at 0, so that each block starts as the identity;
    - under ``torchtitan`` (its release 0.2.2) that, and the feed-forward part's ``up``, is divided by
      sqrt(2 · (layer + 1));
    - under both the embedding has 1, as wide as norms make the stream, and the head, or an embedding that is the head,
      dim^-0.5: logits start with variance 1;
    - under ``gpt2`` (Radford et al., 2019) what writes to the residual stream is divided by sqrt(2 · layers).
    """
    std, scheme = config.std, config.scheme
    kind = family_of(config)
    writes = kind.is_residual(name)
    if scheme == "gpt2":
        return std / math.sqrt(2 * config.layers) if writes else std
    if name == "head.weight" or (name == "embed.weight" and config.tied):
        return 1.0 / math.sqrt(config.dim)
    if name == "embed.weight":
        return 1.0
    if scheme == "zero_residual":
        return 0.0 if writes else std
    if writes or kind.is_deep(name):
        return std / math.sqrt(2 * (int(name.split(".")[1]) + 1))
    return std


def plain_name(name: str) -> str:
    """A parameter's name without what compilation, recomputation and DDP put into it."""
    return ".".join(part for part in name.removeprefix("module.").split(".") if part not in _WRAPPERS)


def splits_of(parameter: DTensor) -> list[tuple[int, int, int]]:
    """How a tensor was cut to what this rank holds, one cut after the other: dimension, which piece, of how many."""
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    splits = list(zip(parameter.placements, coordinate, mesh.shape, strict=True))
    # FSDP over tensor parallelism: the outer mesh dimension splits what the inner one left, and says so.
    splits.sort(key=lambda split: isinstance(split[0], _StridedShard))
    return [(at.dim, number, count) for at, number, count in splits if isinstance(at, Shard | _StridedShard)]


def piece_of(whole: Tensor, dim: int, number: int, count: int) -> Tensor:
    """One of ``count`` pieces as torch's shards are; empty where there are more of them than places."""
    pieces = whole.chunk(count, dim)
    return pieces[number] if number < len(pieces) else whole.narrow(dim, 0, 0)


def copy_part(whole: Tensor, tensor: Tensor) -> Tensor:
    """Set and return what this rank holds of ``tensor`` from the whole of it, of which only that part is read."""
    for cut in splits_of(tensor) if isinstance(tensor, DTensor) else ():
        whole = piece_of(whole, *cut)
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()).copy_(whole)


def _places(parameter: Tensor) -> list[Tensor]:
    """For each dimension, the indices in the whole tensor of what this rank holds."""
    places = [torch.arange(size, device="cpu") for size in parameter.shape]
    for dim, number, count in splits_of(parameter) if isinstance(parameter, DTensor) else ():
        places[dim] = piece_of(places[dim], 0, number, count)
    return places


def key(seed: int, name: str) -> int:
    """64 bits that are a function of a seed and a name: what numbers drawn for that name start from."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _fill_normal(local: Tensor, shape: torch.Size, places: list[Tensor], key: int, std: float) -> None:
    """Fill what a rank holds with its part of a normal tensor of ``shape``, some rows at a time."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offsets = [(place * stride).to(local.device) for place, stride in zip(places, strides, strict=True)]
    if not offsets:  # of no dimension: one element
        offsets, local = [torch.zeros(1, dtype=torch.int64, device=local.device)], local.view(1)
    inner = torch.zeros(1, dtype=torch.int64, device=local.device)
    for offset in offsets[1:]:
        inner = inner[..., None] + offset
    inner = inner.squeeze(0) if len(offsets) > 1 else inner[0]
    rows = max(1, _SLICE.get(local.device.type, 1 << 20) // max(1, inner.numel()))
    for start in range(0, local.shape[0], rows):
        outer = offsets[0][start : start + rows]
        places_here = outer.reshape(-1, *[1] * inner.ndim) + inner
        values = _normal(places_here, key) * std
        if local.dtype != torch.float64:
            values = values.float()
        local[start : start + rows].copy_(values)


def _normal(places: Tensor, key: int) -> Tensor:
    """Standard normal values in float64, each a function of its place and the key alone.

    The places are counted with the golden ratio and mixed as SplitMix64 does (Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators", 2014); the inverse of the normal distribution makes one value of each.
    """
    x = places * _signed(0x9E3779B97F4A7C15) + key
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shifted(x, 31)
    # 52 bits and a half: neither 0 nor 1, and exact.
    uniform = (_shifted(x, 12).to(torch.float64) + 0.5) * 2.0**-52
    normal: Tensor = torch.special.ndtri(uniform)
    return normal


def _shifted(x: Tensor, bits: int) -> Tensor:
    """``x`` shifted right, zeros coming in from the left: torch's own shift of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return number - (1 << 64) if number >= 1 << 63 else number
