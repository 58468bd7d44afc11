"""``metrics.jsonl``: one JSON object for every step of a run, also over stops, crashes and resumes.

A step's object has the fields of ``events.StepDone``, the objective's metrics among them. Validations are in
``validation.jsonl`` beside it, so that a script may take every line of the first for a step. JSON knows no NaN: a
figure that is not finite is null, and its object has ``"nonfinite": true``.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.train.events import CheckpointSaved, Event, RunEnded, StepDone, Validated
from atoll.train.metrics.figures import finite
from atoll.train.metrics.reporter import Reporter

STEPS, VALIDATIONS = "metrics.jsonl", "validation.jsonl"


class Journal(Reporter):
    """Appends to the two files. A line is with the kernel once its step is reported, and before that step is saved.

    Args:
        first_step: steps done before, 0 for a fresh start. What an earlier run wrote about later ones is removed,
            because they are trained again; so is a last line that a crash left torn.
        note: told where the disk takes no more lines; they are held back until it does.
    """

    def __init__(
        self, folder: str | os.PathLike[str], first_step: int, note: Callable[[str], None] = lambda _: None
    ) -> None:
        self._steps = _Lines(Path(folder) / STEPS, first_step, note)
        self._validations = _Lines(Path(folder) / VALIDATIONS, first_step, note)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            values = dataclasses.asdict(event)
            self._steps.append({**values.pop("metrics"), **values})
        elif isinstance(event, Validated):
            values = {f"validation_{name}": value for name, value in event.metrics.items()}
            values |= {"step": event.step, "validation_loss": event.loss}
            self._validations.append({**values, "validation_tokens": event.tokens, "validation_s": event.took_s})
        elif isinstance(event, CheckpointSaved | RunEnded):
            # A resume starts at the checkpoint, so lines before it are never written again: they must last.
            self._steps.write(sync=True)
            self._validations.write(sync=True)

    def close(self) -> None:
        self._steps.file.close()
        self._validations.file.close()


class _Lines:
    """One file of JSON objects. Raises ``OSError`` only where it can't be opened."""

    def __init__(self, path: Path, first_step: int, note: Callable[[str], None]) -> None:
        _forget_after(path, first_step)
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 - open until close()
        self._held = bytearray()
        self._note, self._failed = note, False

    def append(self, values: dict[str, Any]) -> None:
        known = {key: finite(value) for key, value in values.items()}
        if any(known[key] is not value for key, value in values.items()):
            known["nonfinite"] = True
        self._held += json.dumps(known, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        self.write()

    def write(self, *, sync: bool = False) -> None:
        failed_before, self._failed = self._failed, False
        try:
            while self._held:
                del self._held[: self.file.write(self._held)]
            if sync:
                os.fsync(self.file.fileno())
        except OSError as error:
            self._failed = True
            if not failed_before:
                self._note(f"{self.file.name}: {error.strerror}: its lines are held back until there is room")


def read(path: str | os.PathLike[str], at_most: int | None = None) -> list[dict[str, Any]]:
    """The objects of a journal in their order; none where there is no file.

    Lines that hold no object are left out: a torn last one, or what a crash of the machine left.

    Args:
        at_most: about so many rows, evenly spaced, and the last one; no others are parsed, but for those not finite.
    """
    found: list[dict[str, Any]] = []
    if not os.path.exists(path):
        return found
    with open(path, "rb") as file:
        line = file.readline()
        apart = 1 if at_most is None else max(1, os.fstat(file.fileno()).st_size // (len(line) or 1) // at_most)
        file.seek(0)
        for number, line in enumerate(file):
            if number % apart == 0 or b'"nonfinite"' in line:
                found += _parsed(line)
    last = _parsed(line)
    return found if found[-1:] == last else found + last


def _parsed(line: bytes) -> list[dict[str, Any]]:
    """The object of a whole line, or nothing."""
    try:
        values = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return []
    return [values] if isinstance(values, dict) and isinstance(values.get("step"), int) else []


def _forget_after(path: Path, step: int) -> None:
    """Cut off lines about later steps, and torn ones, from the end: the steps of a journal rise."""
    if not path.exists() or not path.stat().st_size:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = len(content)
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            if any(values["step"] <= step for values in _parsed(content[start:end])):
                break
            end = start
    os.truncate(path, end)
