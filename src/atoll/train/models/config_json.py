"""Values of a Hugging Face config.json, with messages that name the file and key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from atoll.core.errors import ConfigError
from atoll.train.recipe.schema import RopeScaling

_MOST = 10**9  # of anything that is counted; more is a damaged file

_S = TypeVar("_S", bound=BaseModel)
_V = TypeVar("_V")


def checked(kind: type[_S], fields: Mapping[str, Any], source: str, names: Mapping[str, str] = {}) -> _S:
    """A section of these fields; ``names`` are the source's of them.

    Raises:
        ConfigError: a value cannot be; names ``source``, the first such field and its value.
    """
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(names.get(str(each), str(each)) for each in first["loc"])
        what = f"{key} = {first['input']!r}: {first['msg']}" if key else first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{source}: {what if key else renamed(what, names)}") from None


def renamed(message: str, names: Mapping[str, str]) -> str:
    """A message about our keys, in a source's names of them."""
    for ours, theirs in names.items():
        message = re.sub(rf"\b{ours}(?= =)", theirs, message)
    return message


class ConfigJson:
    """A config.json, or a table of it. Every reading method raises ``ConfigError`` at a value that can't be."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def _value(self, key: str, default: _V | None, fits: Callable[[Any], bool], expected: str) -> _V:
        """Where it is absent or null the default, without which it must be there."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not fits(value):
            raise ConfigError(f"{self.source}: {key} is {value!r}, expected {expected}")
        return cast(_V, value)

    def number(self, key: str, default: int | None = None) -> int:
        """A count."""
        return self._value(
            key, default, lambda value: type(value) is int and 1 <= value < _MOST, "a whole number above 0"
        )

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        return self._value(
            key, default, lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number above 0"
        )

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self._value(key, default, lambda value: isinstance(value, bool), "true or false")

    def table(self, key: str) -> dict[str, Any]:
        """An object; empty where there is none."""
        return self._value(key, {}, lambda value: isinstance(value, dict), "an object")

    def must(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a key whose value means another computation than ours; one that is absent is fine."""
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            expected = " or ".join(repr(each) for each in allowed)
            raise ConfigError(f"{self.source}: {key} = {value!r} is not supported here, only {expected}")

    def window(self, by_default: bool) -> int | None:
        """The sliding window of attention, None where each token sees all before it.

        Args:
            by_default: whether ``sliding_window`` counts where ``use_sliding_window`` is not given.
        """
        used = self.flag("use_sliding_window", by_default) and self.has("sliding_window")
        window = self.number("sliding_window") if used else None
        layer_types: list[Any] = self._value("layer_types", [], lambda value: isinstance(value, list), "a list")
        if "sliding_attention" in layer_types and window is None:
            raise ConfigError(f"{self.source}: layer_types has sliding_attention, which is not supported here")
        return window

    def rope(self, length: int) -> tuple[float, RopeScaling | None]:
        """theta and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

        Args:
            length: positions that the model was made for.
        """
        rope = self.table("rope_scaling") or self.table("rope_parameters")
        if isinstance(rope.get("full_attention"), Mapping):
            rope = dict(rope["full_attention"])
        inner = ConfigJson(rope, self.source)
        theta = inner.positive("rope_theta", self.positive("rope_theta", 10_000.0))
        partial = rope.get("partial_rotary_factor", self.values.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise ConfigError(f"{self.source}: partial_rotary_factor = {partial} is not supported here, only 1")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "default":
            return theta, None
        if kind not in ("llama3", "yarn"):
            raise ConfigError(f"{self.source}: rope_type = {kind!r} is not supported here, only 'llama3' and 'yarn'")
        if rope.get("truncate") is False:
            raise ConfigError(f"{self.source}: yarn with truncate = false is not supported here")
        original = "original_max_position_embeddings"
        fields: dict[str, Any] = {"kind": kind, "factor": rope.get("factor")}
        fields["original_max_seq_len"] = rope.get(original) or self.values.get(original) or length
        if kind == "llama3":
            fields |= {key: rope[key] for key in ("low_freq_factor", "high_freq_factor") if key in rope}
        else:
            fields |= {key: rope[key] for key in ("beta_fast", "beta_slow") if rope.get(key) is not None}
            fields["attention_factor"] = rope.get("attention_factor") or inner.mscale()
        names = {"original_max_seq_len": original}
        return theta, checked(RopeScaling, fields, f"{self.source}: rope scaling {kind!r}", names)

    def mscale(self) -> float | None:
        """YaRN's attention factor of DeepSeek's two scales; None where they are not given."""
        factor = self.positive("factor", 1.0)
        if not self.has("mscale") or not self.has("mscale_all_dim") or factor <= 1:
            return None
        above, below = self.positive("mscale", 1.0), self.positive("mscale_all_dim", 1.0)
        stretch = 0.1 * math.log(factor)
        return float((above * stretch + 1) / (below * stretch + 1))
