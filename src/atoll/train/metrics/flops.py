"""Model FLOP utilisation: which FLOPs are counted, and which peak they are divided by."""

from __future__ import annotations

import re

# Dense peaks in TFLOP/s, as the makers' data sheets have them (half of "with sparsity"); None: no such tensor cores.
# The first name that is found in the device's counts, so the more special ones stand first.
_PEAKS: list[tuple[str, float | None, float | None, float | None]] = [
    # name, bf16, fp16, fp8
    (r"GB200", 2500.0, 2500.0, 5000.0),
    (r"B200", 2250.0, 2250.0, 4500.0),
    (r"B100", 1750.0, 1750.0, 3500.0),
    (r"GH200", 989.4, 989.4, 1978.9),
    (r"H200 NVL", 835.5, 835.5, 1671.0),
    (r"H200", 989.4, 989.4, 1978.9),
    (r"H100 NVL", 835.5, 835.5, 1671.0),
    (r"H100 PCIe", 756.5, 756.5, 1513.0),
    (r"H[18]00", 989.4, 989.4, 1978.9),
    (r"H20", 148.0, 148.0, 296.0),
    (r"A[18]00", 312.0, 312.0, None),
    (r"A40", 149.7, 149.7, None),
    (r"A30", 165.0, 165.0, None),
    (r"A10G", 70.0, 70.0, None),
    (r"A10", 125.0, 125.0, None),
    (r"L40S", 362.0, 362.0, 733.0),
    (r"L40", 181.0, 181.0, 362.0),
    (r"L4", 121.0, 121.0, 242.5),
    (r"V100-PCIE", None, 112.0, None),
    (r"V100", None, 125.0, None),
    (r"T4", None, 65.0, None),
    # GeForce: with sums in fp32, as training needs them.
    (r"RTX 5090", 209.5, 209.5, 419.0),
    (r"RTX 4090", 165.2, 165.2, 330.3),
    (r"RTX 3090", 71.0, 71.0, None),
    (r"RTX 6000 Ada", 364.2, 364.2, 728.5),
    (r"RTX A6000", 154.8, 154.8, None),
    (r"MI300X", 1307.4, 1307.4, 2614.9),
]
_COLUMNS = {"bf16": 1, "bfloat16": 1, "fp16": 2, "float16": 2, "fp8": 3, "float8": 3}
# Same chip, other product: a cut-down one whose name begins alike must not get the big one's peak.
_PART = re.compile(r"\bMIG\b|Laptop|Max-Q| D\b", re.I)


def peak_flops(device_name: str, dtype: object) -> float | None:
    """FLOP/s that the card's matrix units reach at most in ``dtype``, without sparsity; None where that is unknown.

    Args:
        device_name: as ``torch.cuda.get_device_name()`` gives it.
        dtype: ``"bf16"``, ``"fp16"``, ``"fp8"``, or ``torch.bfloat16``, ``torch.float16``. Others are unknown: what
            fp32 reaches depends on whether TF32 is allowed.
    """
    column = _COLUMNS.get(str(dtype).removeprefix("torch."))
    if column is None or _PART.search(device_name):  # a MIG slice goes by the name of the whole card
        return None
    for row in _PEAKS:
        if re.search(rf"(?<![A-Za-z0-9]){row[0]}(?![A-Za-z0-9])", device_name):
            peak = row[column]
            return None if not isinstance(peak, float) else peak * 1e12
    return None


def mfu(tokens_per_s_per_gpu: float, flops_per_token: float, peak: float | None) -> float | None:
    """Model FLOPs done in a second over those the card could do, as a fraction; None where the peak is unknown."""
    return None if peak is None else tokens_per_s_per_gpu * flops_per_token / peak


def formula_line(flops_per_token: float, peak: float | None, device_name: str, dtype: object) -> str:
    """Says how MFU is reckoned, or why there is none."""
    name = str(dtype).removeprefix("torch.")
    if peak is None:
        return f"no MFU: the {name} peak of {device_name} is not in Atoll's table"
    return (
        f"MFU = tokens/s a GPU × {flops_per_token:.4g} FLOPs a token (6 N + 6 L H Q S, causal) ÷ "
        f"{peak / 1e12:,.0f} TFLOP/s (dense {name} peak of {device_name})"
    )
