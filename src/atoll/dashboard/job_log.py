"""A job's log for the page: text in batches, figures of its steps apart, and how the job stands."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Generator
from typing import Any

from atoll.tasks.jobs import Job
from atoll.tasks.logs import prefix_of
from atoll.train import events

_IDLE_S = 0.5
_FIGURES = ("step", "loss", "validation_loss", "lr", "tokens_per_s")
_LONGEST = 4000  # characters of a line that are shown


def messages(job: Job, tail: int, ending: threading.Event) -> Generator[dict[str, Any] | None, None, None]:
    """What a page gets of a job until it ends: ``{"lines": […], "points": […]}``, at the end ``{"status": …}``.

    Points are of lines that are JSON objects with ``step`` and ``loss``, as ``atoll train`` and many scripts print
    them. None comes where nothing else does for a while. It ends early once ``ending`` is set.

    Raises:
        AtollError: there is no such job, or its cluster can't be reached.
    """
    rest = b""
    with contextlib.closing(job.pieces(tail=tail, idle_s=_IDLE_S)) as pieces:
        for piece in pieces:
            if ending.is_set():
                return
            if not piece:
                yield None
                continue
            *lines, rest = (rest + piece).split(b"\n")
            if lines:
                yield _batch(lines)
    if rest:
        yield _batch([rest])
    yield {"status": job.status.value}


def _batch(lines: list[bytes]) -> dict[str, Any]:
    shown, points = [], []
    for line in lines:
        prefix = prefix_of(line) or b""
        values = _object(line[len(prefix) :])
        point = {name: values[name] for name in _FIGURES if isinstance(values.get(name), (int, float))}
        if "step" in point and len(point) > 1:
            points.append(point)
        if (text := _text(values)) is None:
            text = line[len(prefix) :].decode(errors="replace")[:_LONGEST]
        if text:
            shown.append([prefix.decode(errors="replace"), text])
    return {"lines": shown, "points": points}


def _object(line: bytes) -> dict[str, Any]:
    """The JSON object that a line is; an empty one where it is none."""
    if line.startswith(b"{"):
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict):
                return values
    return {}


def _text(values: dict[str, Any]) -> str | None:
    """What is shown of an event of ``atoll train``: nothing of a step, which is a point; None of any other line."""
    if "event" not in values:
        return None
    try:
        event = events.decode(values)
    except (KeyError, TypeError):  # printed by somebody else
        return None
    if isinstance(event, events.StepDone):
        return ""
    if isinstance(event, events.Note):
        return event.text
    facts = {key: value for key, value in values.items() if key != "event" and value not in (None, {}, "")}
    return f"{values['event']}: " + ", ".join(f"{key}={value}" for key, value in facts.items())
