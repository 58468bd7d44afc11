"""``sky.Dag``: the tasks that are made inside a ``with`` block, as scripts of SkyPilot write a pipeline."""

from __future__ import annotations

import threading
from typing import Any

from atoll.core.errors import UsageError

_open = threading.local()


class Dag:
    """Tasks in a row, each to start when the one before has succeeded: ``with sky.Dag() as dag: sky.Task(...)``.

    They stand in the order in which they were made; ``first >> second`` puts the second one behind.

    Attributes:
        name: of the pipeline, or None.
        tasks: in their order.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.tasks: list[Any] = []  # Task, which knows this module

    def __enter__(self) -> Dag:
        _open.dag = self
        return self

    def __exit__(self, *_: object) -> None:
        _open.dag = None

    def add(self, task: Any) -> None:
        """Add a task at the end."""
        self.tasks.append(task)

    def add_edge(self, before: Any, after: Any) -> None:
        """Have a task run behind another one."""
        if self._place(after) < self._place(before):
            self.tasks.remove(after)
            self.tasks.insert(self._place(before) + 1, after)

    def _place(self, task: Any) -> int:
        for place, each in enumerate(self.tasks):
            if each is task:
                return place
        raise UsageError(f"{task!r:.60} is no task of this Dag: make it inside of `with sky.Dag() as dag:`")


def current() -> Dag | None:
    """The one whose ``with`` block this thread is in."""
    dag: Dag | None = getattr(_open, "dag", None)
    return dag
