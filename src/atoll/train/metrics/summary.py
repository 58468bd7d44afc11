"""How a run ended, as a file that programs read and as lines that say what to type next."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.core.paths import write_atomic
from atoll.core.validation import command_line
from atoll.train.events import Event, RunEnded, RunStarted, StepDone
from atoll.train.metrics.figures import finite
from atoll.train.metrics.notify import send
from atoll.train.metrics.reporter import Reporter

_ABOUT = ("name", "output_dir", "parameters", "layout", "device", "world_size", "first_step", "steps")


class SummaryFile(Reporter):
    """Writes ``summary.json`` into the folder of a run when it ends: its ``RunEnded``, and where and what it was.

    Args:
        notify: ``[metrics] notify``, which gets the same, see ``notify.send``.
    """

    def __init__(self, output_dir: str | os.PathLike[str], notify: str | None = None) -> None:
        self.path = Path(output_dir) / "summary.json"
        self._notify = notify
        self._about: dict[str, Any] = {}
        self._first_loss: float | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._about = {key: getattr(event, key) for key in _ABOUT}
        elif isinstance(event, StepDone):
            self._first_loss = event.loss if self._first_loss is None else self._first_loss
        elif isinstance(event, RunEnded):
            values = {**dataclasses.asdict(event), **self._about, "first_loss": self._first_loss}
            values["figures"] = {key: finite(value) for key, value in event.figures.items()}
            summary = {key: finite(value) for key, value in values.items()}
            try:
                text = json.dumps(summary, indent=2, ensure_ascii=False)
                write_atomic(self.path, text.encode(errors="replace") + b"\n", mode=0o644)
            finally:  # a full disk is what the user wants to hear of
                if self._notify:
                    send(self._notify, summary)


def next_steps(
    recipe: str,
    output_dir: str,
    *,
    options: Sequence[str] = (),
    status: str = "finished",
    has_checkpoint: bool = True,
    nodes: int = 1,
    steps: int | None = None,
    to_scale: Sequence[str] | None = (),
    generates: bool = True,
    exports: bool = True,
) -> list[str]:
    """What to type after a run, one command a line: resume, generate, export, scale.

    Args:
        recipe: as the user gave it, a name or a file.
        options: what the user gave beside the nodes, to be repeated.
        has_checkpoint: whether there is one to resume from.
        steps: a longer run's; N where none is given.
        to_scale: what twice as many nodes need beside that; None where there are no more, or they can't train it.
        generates: whether there is a tokenizer to generate with.
        exports: whether the model is one that Hugging Face knows.
    """
    repeated = _without(options, "--no-resume", "--allow-changes")
    start = ["atoll", "train", recipe]
    same = [*start, *(["--nodes", str(nodes)] if nodes > 1 else []), *repeated]
    lines: list[tuple[str, list[str]]] = []
    if status != "finished":
        lines.append(("resume" if has_checkpoint else "start again", same))
    elif has_checkpoint:
        longer = _without(same, "--train.steps", "--train.tokens")
        lines.append(("train longer", [*longer, "--train.steps", str(steps or "N")]))
    if has_checkpoint and generates:
        lines.append(("generate text", ["atoll", "generate", output_dir, "Once upon a time"]))
    if has_checkpoint and exports:
        lines.append(("export to Hugging Face", ["atoll", "export", output_dir, f"{output_dir.rstrip('/')}-hf"]))
    if to_scale is not None:
        replaced = [word for word in to_scale if word.startswith("--")]
        wider = _without(repeated, "--train.output_dir", *replaced)  # it is a new run
        lines.append(("scale", [*start, "--nodes", str(2 * nodes), *wider, *to_scale, "--no-resume"]))
    width = max((len(what) for what, _ in lines), default=0)
    return [f"{what:<{width}}  {command_line(*words)}" for what, words in lines]


def _without(words: Sequence[str], *options: str) -> list[str]:
    """A command's words without these options, and without their values: ``--key value`` or ``--key=value``."""
    kept: list[str] = []
    left = iter(words)
    for word in left:
        if word not in options and word.partition("=")[0] not in options:
            kept.append(word)
        elif word.startswith("--") and "." in word and "=" not in word:  # a key of the recipe: its value follows
            next(left, None)
    return kept
