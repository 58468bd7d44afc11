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
from atoll.train.events import Event, RunStarted, StepDone, Validated

_FILE = "trackers.json"
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
    project: str  # W&B's project, MLflow's experiment
    recipe: Mapping[str, Any]  # without its secrets

    @staticmethod
    def facts(started: RunStarted) -> dict[str, Any]:
        """What a tracker notes of the run beside its recipe."""
        return {key: getattr(started, key) for key in ("parameters", "layout", "device", "world_size")}

    def identity(self, tracker: str) -> str | None:
        """The run's identity there, or None where it has none yet."""
        return self._known().get(tracker)

    def keep_identity(self, tracker: str, identity: str) -> None:
        """Keep it for the next start."""
        text = json.dumps({**self._known(), tracker: identity}, indent=2)
        write_atomic(Path(self.output_dir) / _FILE, text.encode() + b"\n", mode=0o644)

    def _known(self) -> dict[str, str]:
        path = Path(self.output_dir) / _FILE
        known: dict[str, str] = json.loads(path.read_bytes()) if path.exists() else {}
        return known
