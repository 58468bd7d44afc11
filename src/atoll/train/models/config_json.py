"""Values of a Hugging Face config.json, with messages that name the file and key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from atoll.core.errors import ConfigError
from atoll.train.recipe.schema import RopeScaling

Count = Annotated[int, Field(ge=1, lt=10**9)]  # more is a damaged file
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_S = TypeVar("_S", bound=BaseModel)


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

    def get(self, key: str, kind: Any, default: Any = None) -> Any:
        """A value of that type; where it is absent or null the default, without which it must be there."""
        if not self.has(key) and default is not None:
            return default
        try:
            return TypeAdapter(kind).validate_python(self.values.get(key), strict=True)
        except ValidationError as error:
            raise ConfigError(f"{self.source}: {key} = {self.values.get(key)!r}: {error.errors()[0]['msg']}") from None

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
        used = self.get("use_sliding_window", bool, by_default) and self.has("sliding_window")
        if not used and "sliding_attention" in self.get("layer_types", list, []):
            raise ConfigError(f"{self.source}: layer_types has sliding_attention, which is not supported here")
        window: int | None = self.get("sliding_window", Count) if used else None
        return window

    def rope(self, length: int) -> tuple[float, RopeScaling | None]:
        """theta and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

        Args:
            length: positions that the model was made for.
        """
        table = self.get("rope_scaling", dict, {}) or self.get("rope_parameters", dict, {})
        table = ConfigJson(table, self.source).get("full_attention", dict, table)
        # Some keys are in the table or beside it.
        rope = ConfigJson(
            {**self.values, **{key: each for key, each in table.items() if each is not None}}, self.source
        )
        theta = rope.get("rope_theta", Positive, 10_000.0)
        rope.must("partial_rotary_factor", (1, None))
        kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
        if kind == "default":
            return theta, None
        if kind not in ("llama3", "yarn"):
            raise ConfigError(f"{self.source}: rope_type = {kind!r} is not supported here, only 'llama3' and 'yarn'")
        rope.must("truncate", (True, None))
        original = "original_max_position_embeddings"
        fields: dict[str, Any] = {"kind": kind, "factor": rope.values.get("factor")}
        fields["original_max_seq_len"] = rope.values.get(original) or length
        optional = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_fast", "beta_slow")
        fields |= {key: rope.values[key] for key in optional if rope.has(key)}
        if kind == "yarn":
            fields["attention_factor"] = rope.values.get("attention_factor") or rope.mscale()
        names = {"original_max_seq_len": original}
        return theta, checked(RopeScaling, fields, f"{self.source}: rope scaling {kind!r}", names)

    def mscale(self) -> float | None:
        """YaRN's attention factor of DeepSeek's two scales; None where they are not given."""
        factor = self.get("factor", Positive, 1.0)
        if not self.has("mscale") or not self.has("mscale_all_dim") or factor <= 1:
            return None
        above, below = self.get("mscale", Positive), self.get("mscale_all_dim", Positive)
        stretch = 0.1 * math.log(factor)
        return float((above * stretch + 1) / (below * stretch + 1))
