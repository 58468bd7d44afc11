"""Numbers as people read them."""

from __future__ import annotations

import math
from typing import Any


def count(number: float) -> str:
    """``950``, ``12.3 k``, ``1.24 B``: three digits and a power of a thousand."""
    if not math.isfinite(number):
        return str(number)
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999.95 k would be shown as 1000 k: it is 1.00 M.
        if abs(number) >= size * 0.9995:
            return f"{_three_digits(number / size)} {unit}"
    return f"{number:.0f}" if number == int(number) else _three_digits(number)


def size(number_bytes: float) -> str:
    """``512 MiB``, ``1.25 GiB``."""
    for unit, one in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number_bytes >= one:
            return f"{_three_digits(number_bytes / one)} {unit}"
    return f"{number_bytes:.0f} B"


def span(seconds: float) -> str:
    """``23 ms``, ``0.4 s``, ``42 s``, ``3 min 05 s``, ``2 h 07 min``, ``3 d 04 h``."""
    if not math.isfinite(seconds):
        return "?"
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if (parts := round(seconds / part_s)) * part_s >= unit_s:
            whole, rest = divmod(parts, unit_s // part_s)
            return f"{whole} {unit} {rest:02d} {part}"
    return f"{round(seconds)} s"


def sparkline(values: list[float]) -> str:
    """A chart of one line: the highest value as a full block, the lowest as a thin one."""
    low, high = min(values), max(values)
    scale = 7 / ((high - low) or 1.0)
    return "".join("▁▂▃▄▅▆▇█"[round(scale * (value - low))] for value in values)


def finite(value: Any) -> Any:
    """The value as JSON can have it: None where it is a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _three_digits(number: float) -> str:
    return f"{number:.{max(0, 2 - int(math.log10(max(1.0, abs(number) * 1.0005))))}f}"
