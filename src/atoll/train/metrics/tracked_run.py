"""What a tracker is told of a run and of its steps, without secrets, and what it calls the run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.paths import write_atomic
from atoll.core.secrets import redact
from atoll.train.events import Event, StepDone, Validated

_QUERY = re.compile(r"(?<=[a-z0-9]://)([^\s?]+)\?\S+")


def public(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without what may be secret: where to notify, credentials and signatures in URLs."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return _QUERY.sub(r"\1?****", redact(value))
        if isinstance(value, Mapping):
            return {key: clean(each) for key, each in value.items() if key != "notify"}
        return [clean(each) for each in value] if isinstance(value, list | tuple) else value

    cleaned: dict[str, Any] = clean(recipe)
    return cleaned


def figures(event: Event) -> dict[str, float]:
    """What trackers draw of an event, by name; the part before the slash groups the pictures."""
    if isinstance(event, Validated):
        return {f"validation/{name}": value for name, value in {**event.metrics, "loss": event.loss}.items()}
    if not isinstance(event, StepDone):
        return {}
    values = {f"train/{name}": value for name, value in event.metrics.items()} | {
        "train/loss": event.loss,
        "train/lr": event.lr,
        "train/grad_norm": event.grad_norm,
        "train/tokens": float(event.tokens),
        "train/samples": float(event.samples),
        "speed/tokens_per_s": event.tokens_per_s,
        "speed/tokens_per_s_per_gpu": event.tokens_per_s_per_gpu,
        "speed/step_s": event.step_s,
        "speed/step_spread_s": event.step_spread_s,
        "speed/data_wait_s": event.data_wait_s,
        "memory/peak_bytes": float(event.memory_bytes),
    }
    return values if event.mfu is None else {**values, "speed/mfu": event.mfu}


@dataclass(frozen=True)
class TrackedRun:
    """What trackers are told of a run, and what each of them calls it, which ``trackers.json`` keeps."""

    output_dir: str
    name: str
    project: str
    recipe: Mapping[str, Any]  # without its secrets

    @property
    def _path(self) -> Path:
        return Path(self.output_dir) / "trackers.json"

    def identity(self, tracker: str) -> str | None:
        """The run's identity there, or None where it has none yet."""
        found = self._read().get(tracker)
        return found if isinstance(found, str) else None

    def keep_identity(self, tracker: str, identity: str) -> None:
        """Keep it for the next start."""
        write_atomic(self._path, json.dumps({**self._read(), tracker: identity}, indent=2).encode() + b"\n", mode=0o644)

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}
