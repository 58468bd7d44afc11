"""Who takes the events of a run, and how one that fails is left out without harm to the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from atoll.train.events import Event, Note

# What consoles, files and trackers raise: disk and network, a library's refusal, a value it cannot take.
_FAILURES = (OSError, RuntimeError, ValueError, TypeError)


class Reporter:
    """Takes the events of a run, in the order they happen, from one thread."""

    def __call__(self, event: Event) -> None:
        """Take one event in."""

    def close(self) -> None:
        """Write what is still held back and let go of files and connections. A second call does nothing."""


class ReporterFailed(RuntimeError):
    """What a reporter raises when its own library, file or server fails; the text says what is lost and why."""


class Reporters:
    """Several reporters as one. One that raises is told of in a note to the others, and gets no more events.

    Training is worth more than what is shown of it: a full disk under a tracker, or a server that went away, must not
    end the run. The order is the order of delivery: files first, then trackers, the notifier, and the console last,
    which so learns of every failure.
    """

    def __init__(self, reporters: Iterable[Reporter]) -> None:
        self.active = list(reporters)

    def __call__(self, event: Event) -> None:
        notes = [text for reporter in list(self.active) if (text := self._deliver(reporter, event))]
        for text in notes:  # each may silence another reporter, so this ends after as many rounds as there are
            self(Note(text))

    def close(self) -> None:
        """Close each; those that fail are told of to those not closed yet."""
        while self.active:
            reporter = self.active.pop(0)
            try:
                reporter.close()
            except _FAILURES as error:
                self(Note(_line(reporter, error)))

    def _deliver(self, reporter: Reporter, event: Event) -> str | None:
        try:
            reporter(event)
        except _FAILURES as error:
            self.active.remove(reporter)
            text = _line(reporter, error)
            with contextlib.suppress(*_FAILURES):  # the first reason is the telling one
                reporter.close()
            return text
        return None


def _line(reporter: Reporter, error: BaseException) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return reason if isinstance(error, ReporterFailed) else f"{type(reporter).__name__} is off from here on: {reason}"
