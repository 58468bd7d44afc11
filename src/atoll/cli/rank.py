"""What every rank of ``atoll train`` runs."""

from __future__ import annotations

from typing import Any

from atoll.core.context import current


def train_rank(recipe: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank; rank 0 sends the events of the run to the terminal.

    Args:
        recipe: resolved.
        options: ``resume`` and ``allow_changes``.

    Returns:
        the fields of ``TrainResult``.
    """
    import dataclasses

    from atoll.train import prepare_process

    prepare_process()

    from atoll.train import run
    from atoll.train.events import Event, encode

    context = current()

    def report(event: Event) -> None:
        if context is not None and context.send_report is not None:
            context.send_report(encode(event), None)

    return dataclasses.asdict(run(recipe, report=report, **options))
