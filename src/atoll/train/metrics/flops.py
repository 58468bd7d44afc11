"""Model FLOP utilisation: which FLOPs are counted, and which peak they are divided by."""

from __future__ import annotations

import re

import torch

# Dense peaks of bf16 in TFLOP/s, as the makers' data sheets have them (half of "with sparsity").
# The first name that is found in the device's counts, so the more special ones stand first.
_PEAKS = {
    r"GB200": 2500.0,
    r"B200": 2250.0,
    r"B100": 1750.0,
    r"GH200": 989.4,
    r"H200 NVL": 835.5,
    r"H200": 989.4,
    r"H100 NVL": 835.5,
    r"H100 PCIe": 756.5,
    r"H[18]00": 989.4,
    r"H20": 148.0,
    r"A[18]00": 312.0,
    r"A40": 149.7,
    r"A30": 165.0,
    r"A10G": 70.0,
    r"A10": 125.0,
    r"L40S": 362.0,
    r"L40": 181.0,
    r"L4": 121.0,
    # GeForce: with sums in fp32, as training needs them.
    r"RTX 5090": 209.5,
    r"RTX 4090": 165.2,
    r"RTX 3090": 71.0,
    r"RTX 6000 Ada": 364.2,
    r"RTX A6000": 154.8,
    r"MI300X": 1307.4,
}
_NO_FLOAT8 = re.compile(r"A[18]00|A40\b|A30\b|A10|RTX 30|RTX A")  # Ampere
# Same chip, other product: a cut-down one whose name begins alike must not get the big one's peak.
_PART = re.compile(r"\bMIG\b|Laptop|Max-Q| D\b", re.I)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s that the card's matrix units reach at most in ``dtype``, without sparsity; None where that is unknown.

    That is so for all but bf16 and float8, twice as fast where there is one: what fp32 reaches depends on whether TF32
    is allowed.
    """
    if dtype == torch.float8_e4m3fn and not _NO_FLOAT8.search(device_name):
        narrower = peak_flops(device_name, torch.bfloat16)
        return None if narrower is None else 2 * narrower
    if dtype != torch.bfloat16 or _PART.search(device_name):  # a MIG slice goes by the name of the whole card
        return None
    found = (tera for name, tera in _PEAKS.items() if re.search(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])", device_name))
    return next((tera * 1e12 for tera in found), None)


def mfu(tokens_per_s_per_gpu: float, flops_per_token: float, peak: float | None) -> float | None:
    """Model FLOPs done in a second over those the card could do, as a fraction; None where the peak is unknown."""
    return None if peak is None else tokens_per_s_per_gpu * flops_per_token / peak


def formula_line(flops_per_token: float, peak: float | None, device_name: str, dtype: torch.dtype) -> str:
    """Says how MFU is reckoned, or why there is none."""
    name = str(dtype).removeprefix("torch.")
    if peak is None:
        return f"no MFU: the {name} peak of {device_name} is not in Atoll's table"
    return (
        f"MFU = tokens/s a GPU × {flops_per_token:.4g} FLOPs a token (6 N + 6 L H Q S, causal) ÷ "
        f"{peak / 1e12:,.0f} TFLOP/s (dense {name} peak of {device_name})"
    )
