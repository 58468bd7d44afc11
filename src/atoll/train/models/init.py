"""Initial weights, a function of the seed, a parameter's name and the place of an element in it, and of nothing else.

Each rank computes the elements it holds from their places in the whole tensor, so that every layout starts from the
same bits and no tensor is ever whole.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from atoll.train.dtensor import copy_part, local, part_of
from atoll.train.models.family import family_of, shapes
from atoll.train.models.parts import Decoder
from atoll.train.recipe.schema import ModelSection

_SLICE = {"cpu": 1 << 17, "cuda": 1 << 22}  # elements computed at a time: what fits a CPU's cache, what fills a GPU


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
    theirs: dict[str, Tensor] = dict(model.named_parameters())
    if isinstance(model, Decoder):
        for name in theirs.keys() & shapes(model.config).keys():
            _draw(theirs.pop(name), name, model.config, seed)
    names = list(theirs)
    theirs |= dict(model.named_buffers())
    if theirs:
        made = model.make(seed)  # type: ignore[operator]  # of a user's function: ``registry.build`` gave it
        values = dict(made.named_parameters(remove_duplicate=False)) | dict(made.named_buffers())
        for name, tensor in theirs.items():
            copy_part(values[name].detach(), tensor)
    return names


def _draw(parameter: Tensor, name: str, config: ModelSection, seed: int) -> None:
    if name.endswith("bias"):
        local(parameter).zero_()
    elif parameter.ndim == 1:
        local(parameter).fill_(1.0)
    else:
        _fill_normal(parameter, key(seed, name), std_of(name, config))


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
    kind, part = family_of(config), name.removesuffix(".weight")
    writes = part.endswith(tuple(f".{each}" for each in kind.residual))
    if scheme == "gpt2":
        return std / math.sqrt(2 * config.layers) if writes else std
    if name == "head.weight" or (name == "embed.weight" and config.tied):
        return 1.0 / math.sqrt(config.dim)
    if name == "embed.weight":
        return 1.0
    if scheme == "zero_residual":
        return 0.0 if writes else std
    if writes or part.endswith(tuple(f".{each}" for each in kind.deep)):
        return std / math.sqrt(2 * (int(name.split(".")[1]) + 1))
    return std


def key(seed: int, name: str) -> int:
    """64 bits that are a function of a seed and a name: what numbers drawn for that name start from."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _fill_normal(parameter: Tensor, key: int, std: float) -> None:
    """Fill what this rank holds of ``parameter`` with its part of a normal tensor, some rows at a time."""
    part, shape = local(parameter), parameter.shape
    places = []  # of each dimension: what its indices add to the place of an element
    for dim, size in enumerate(shape):
        indices = torch.arange(size, device="cpu") * math.prod(shape[dim + 1 :])
        places.append(part_of(parameter, indices, dim).to(part.device))
    inner = torch.zeros((), dtype=torch.int64, device=part.device)
    for offset in places[1:]:
        inner = inner[..., None] + offset
    rows = max(1, _SLICE.get(part.device.type, 1 << 20) // max(1, inner.numel()))
    for start in range(0, len(part), rows):
        outer = places[0][start : start + rows]
        values = _normal(outer.reshape(-1, *[1] * inner.ndim) + inner, key) * std
        part[start : start + rows].copy_(values if part.dtype == torch.float64 else values.float())


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
