"""Number formats of weights, products and sums; 8-bit products (Micikevicius et al., "FP8 formats for deep learning",
2022) through torchao.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import nn

from atoll.core.errors import ConfigError
from atoll.train.recipe.schema import Recipe

_FIRST_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class NumberFormats(NamedTuple):
    """Of matrix products, of the weights that the optimizer moves, and of gradients as they are summed over ranks."""

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype


def number_formats(recipe: Recipe, device: torch.device) -> NumberFormats:
    """The number formats that a recipe asks for on a device."""
    wanted = recipe.precision
    if wanted.compute == "fp64":
        return NumberFormats(torch.float64, torch.float64, torch.float64)
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
    return NumberFormats(_DTYPES.get(wanted.compute, automatic), torch.float32, _DTYPES[wanted.reduce])


def fastest_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The number format of most matrix products: float8 where the recipe asks for it."""
    return torch.float8_e4m3fn if recipe.precision.float8 != "none" else number_formats(recipe, device).compute


def check_float8(recipe: Recipe, device: torch.device) -> None:
    """Refuse float8 where it would not be on.

    Raises:
        ConfigError: the card is too old, there is none, torchao is missing, or the compute format is not bf16.
    """
    wanted = recipe.precision
    if wanted.float8 == "none":
        return
    what = f"[precision] float8 = {wanted.float8!r}"
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f'{what} needs torchao: pip install "atoll[float8]", or set float8 = "none"')
    if wanted.float8_emulate:
        return
    if wanted.compute not in ("auto", "bf16"):
        raise ConfigError(f"{what} with compute = {wanted.compute!r}: float8 products go with compute = 'bf16'")
    has_gpu = device.type == "cuda"
    if not has_gpu or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        raise ConfigError(
            f"{what} needs an NVIDIA GPU of compute capability 8.9 or newer, and this rank runs on "
            f"{torch.cuda.get_device_name(device) if has_gpu else device.type}: set float8 = 'none' (float8_emulate = "
            "true is for tests)"
        )


def convert_float8(model: nn.Module, recipe: Recipe, *, gathers: bool) -> None:
    """Let the linear layers of ``model`` multiply in float8, in place, where the recipe asks for it.

    Left in bf16 are those whose names contain an entry of ``float8_skip``, and those whose sizes are not divisible by
    16, which the cards' instructions need.

    Args:
        gathers: whether FSDP gathers whole weights: tensorwise, they then travel in 8 bits.
    """
    wanted = recipe.precision
    if wanted.float8 == "none":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_wanted(module: nn.Module, name: str) -> bool:
        if any(part in name for part in wanted.float8_skip):
            return False
        return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0

    rowwise = wanted.float8 == "rowwise"
    tensorwise = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=wanted.float8_emulate)
    config = Float8LinearConfig.from_recipe_name("rowwise") if rowwise else tensorwise
    convert_to_float8_training(model, config=config, module_filter_fn=is_wanted)


def scale_float8(model: nn.Module) -> None:
    """Compute the scales of all float8 weights at once after they moved, not one by one as they are gathered."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
