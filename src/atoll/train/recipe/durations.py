"""Lengths of training as typed strings: ``500``, ``"500step"``, ``"2ep"``, ``"1e9tok"``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer

Unit = Literal["step", "ep", "tok"]

LONGEST = 1e18  # steps, epochs or tokens

_PATTERN = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([a-z]*)\s*")
_UNITS: dict[str, Unit] = {
    **dict.fromkeys(("", "step", "steps"), "step"),
    **dict.fromkeys(("ep", "epoch", "epochs"), "ep"),
    **dict.fromkeys(("tok", "toks", "tokens"), "tok"),
}


@dataclass(frozen=True, slots=True)
class Duration:
    """A length in optimizer steps, epochs or trained tokens."""

    value: float
    unit: Unit = "step"

    def __str__(self) -> str:
        number = f"{self.value:.0f}" if self.value == int(self.value) else f"{self.value:g}"
        return f"{number}{self.unit}"

    def in_steps(self, *, steps_per_epoch: float, tokens_per_step: float) -> int:
        """Whole optimizer steps that cover this length, at least as long as it.

        Args:
            steps_per_epoch: steps, with a fraction where an epoch is not a whole number of them.
            tokens_per_step: positions that a full step trains on.
        """
        exact = self.exact_steps(steps_per_epoch=steps_per_epoch, tokens_per_step=tokens_per_step)
        return max(0, -int(-exact // 1) if abs(exact - round(exact)) > 1e-9 * max(1.0, exact) else round(exact))

    def exact_steps(self, *, steps_per_epoch: float, tokens_per_step: float) -> float:
        """This length in optimizer steps, with a fraction."""
        return self.value * {"step": 1.0, "ep": steps_per_epoch, "tok": 1.0 / tokens_per_step}[self.unit]


@dataclass(frozen=True, slots=True)
class Interval:
    """Something that happens again and again: ``steps``, which may have a fraction, lie between two times.

    The n-th time is the first whole step at or after n · ``steps``, so roundings don't add up, and intervals that
    meet in epochs or tokens meet in steps.
    """

    steps: float

    def due(self, step: int) -> bool:
        """Whether it happens at the end of this step, the first of which is 1."""
        return self._times(step) > self._times(step - 1)

    def _times(self, step: int) -> int:
        exact = step / self.steps
        nearest = round(exact)
        return nearest if abs(exact - nearest) <= 1e-12 * max(1.0, exact) else math.floor(exact)


def parse_duration(value: Any) -> Duration:
    """Read ``100``, ``"500step"``, ``"2ep"``, ``"0.5ep"`` or ``"1e9tok"``.

    Raises:
        ValueError: it is none of these; the text says what was expected.
    """
    if isinstance(value, Duration):
        return value
    found = _PATTERN.fullmatch(str(value))
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a duration: expected 100, '500step', '2ep' or '1e9tok'")
    number, unit = float(found[1].replace("_", "")), _UNITS[found[2]]
    if number > LONGEST:
        raise ValueError(f"{value!r} is too long: expected at most {LONGEST:g}")
    if unit == "step" and number != int(number):
        raise ValueError(f"{value!r}: steps are whole, expected for instance '{int(number)}step'")
    return Duration(number, unit)


def _shown(duration: Duration) -> int | str:
    return int(duration.value) if duration.unit == "step" else str(duration)


DurationField = Annotated[Duration, BeforeValidator(parse_duration), PlainSerializer(_shown, return_type=int | str)]
