"""``metrics.jsonl``: one JSON object for every step of a run, also over stops, crashes and resumes.

A step's object has the fields of ``events.StepDone``. Validations are in ``validation.jsonl`` beside it, so that a
script may take every line of the first for a step. JSON knows no NaN: a figure that is not finite is null, and its
object has ``"nonfinite": true``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from atoll.core.paths import write_atomic
from atoll.train.events import CheckpointSaved, Event, RunEnded, StepDone, Validated
from atoll.train.metrics.reporter import Reporter

STEPS, VALIDATIONS = "metrics.jsonl", "validation.jsonl"


class Journal(Reporter):
    """Appends to the two files; each line is with the kernel before the next step, so a kill loses none.

    Args:
        first_step: steps done before, 0 for a fresh start. What an earlier run wrote about later ones is removed,
            because they are trained again; so is a last line that a crash left torn.
    """

    def __init__(self, folder: str | os.PathLike[str], first_step: int) -> None:
        self._steps = _Lines(Path(folder) / STEPS, first_step)
        self._validations = _Lines(Path(folder) / VALIDATIONS, first_step)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._steps.append(dataclasses.asdict(event))
        elif isinstance(event, Validated):
            values = {"step": event.step, "validation_loss": event.loss}
            self._validations.append({**values, "validation_tokens": event.tokens, "validation_s": event.took_s})
        elif isinstance(event, CheckpointSaved | RunEnded):
            # A resume starts at the checkpoint, so lines before it are never written again: they must last.
            self._steps.sync()
            self._validations.sync()

    def close(self) -> None:
        self._steps.file.close()
        self._validations.file.close()


class _Lines:
    """One file of JSON objects."""

    def __init__(self, path: Path, first_step: int) -> None:
        _forget_after(path, first_step)
        self.file = open(path, "ab")  # noqa: SIM115 - open until close()

    def append(self, values: dict[str, Any]) -> None:
        known = {key: value if _is_finite(value) else None for key, value in values.items()}
        if any(not _is_finite(value) for value in values.values()):
            known["nonfinite"] = True
        self.file.write(json.dumps(known, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self.file.flush()

    def sync(self) -> None:
        os.fsync(self.file.fileno())


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a journal in their order; none where there is no file. A torn last line is left out."""
    return [values for _, values in _lines(Path(path))]


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Whole lines with what they hold. Lines that hold no object, as after a crash of the machine, are left out."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    found = []
    for line in content.split(b"\n")[:-1]:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            found.append((line + b"\n", values))
    return found


def _forget_after(path: Path, step: int) -> None:
    """Remove lines about later steps and torn ones: the file holds the old content or all of the new."""
    kept = b"".join(line for line, values in _lines(path) if values["step"] <= step)
    if path.exists() and path.stat().st_size != len(kept):
        write_atomic(path, kept, mode=path.stat().st_mode & 0o777)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
