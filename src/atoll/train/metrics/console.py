"""The terminal of a run: a panel redrawn in place, or plain lines where there is no terminal."""

from __future__ import annotations

import time

import rich.console
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from atoll.train.events import CheckpointSaved, Event, Note, Progress, RunEnded, RunStarted, StepDone, Validated
from atoll.train.metrics.figures import span
from atoll.train.metrics.panel import Phase, about, end_rows, phase_line, plain_step, run_panel, visible
from atoll.train.metrics.reporter import Reporter
from atoll.train.metrics.session import Session

_PLAIN_EVERY_S = 30.0
_SHOW_PHASE_AFTER_S = 1.0


class Console(Reporter):
    """Shows a run as it goes, from its events: those of this process, or decoded ones of another.

    ``close`` in a ``finally``: it gives the terminal its cursor back.
    """

    def __init__(self, console: rich.console.Console | None = None) -> None:
        self._console = console or rich.console.Console()
        self._redraws = self._console.is_interactive  # not where TERM is dumb: such a terminal can't go back
        self._session = Session()
        self._phases: dict[str, Phase] = {}
        self._live: Live | None = None
        self._said_at = time.monotonic()  # the last plain line about progress
        self._said_tenth = -1

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._session = Session()
            self._said_tenth = -1
        self._session.add(event)
        if self._redraws and not isinstance(event, Note | RunEnded):
            self._start_live()
        match event:
            case Note():
                self._say(event.text)
            case Progress():
                self._phase(event)
            case RunStarted():
                self._end_phases()
                self._log(f"{event.name}: {about(event)} · {event.output_dir}")
            case StepDone():
                self._end_phases()
                if self._is_due(event):
                    self._log(plain_step(self._session))
            case Validated():
                self._phases.pop("validating", None)  # its own line says how long it took
                self._log(f"step {event.step}   validation loss {event.loss:.3f}   {span(event.took_s)}")
            case CheckpointSaved():
                times = f"{span(event.took_s)} (training blocked {span(event.stall_s)})"
                self._log(f"step {event.step}   saved checkpoint {event.path} in {times}")
            case RunEnded():
                self._end(event)

    def close(self) -> None:
        """Leave the terminal as it is now, cursor included."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _start_live(self) -> None:
        if self._live is None:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()

    def _render(self) -> RenderableType:
        now = time.monotonic()
        # list(): the display's own thread reads while events come in.
        shown = [phase for phase in list(self._phases.values()) if now - phase.since >= _SHOW_PHASE_AFTER_S]
        return run_panel(self._session, shown, self._console.width)

    def _phase(self, event: Progress) -> None:
        now = time.monotonic()
        since = self._phases[event.phase].since if event.phase in self._phases else now
        self._phases[event.phase] = Phase(event, since)
        # Between plain lines: soon at first, then every half minute.
        pause_s = _SHOW_PHASE_AFTER_S if now - since < _PLAIN_EVERY_S / 3 else _PLAIN_EVERY_S
        if event.total is not None and event.done >= event.total:
            self._end_phase(event.phase)
        elif now - max(since, self._said_at) >= pause_s:
            self._log(phase_line(event))

    def _end_phase(self, name: str) -> None:
        phase = self._phases.pop(name)
        took_s = time.monotonic() - phase.since
        if took_s >= _SHOW_PHASE_AFTER_S:
            self._say(f"{phase_line(phase.progress)} in {span(took_s)}")

    def _end_phases(self) -> None:
        """End every phase: the training steps run again."""
        for name in list(self._phases):
            self._end_phase(name)

    def _log(self, line: str) -> None:
        """A line where nothing is redrawn; the panel has it otherwise."""
        if not self._redraws:
            self._said_at = time.monotonic()
            self._say(line)

    def _is_due(self, event: StepDone) -> bool:
        """The first step, each tenth of the way, the last, and one every half minute."""
        started = self._session.started
        tenth = 10 * event.step // started.steps if started and started.steps else 0
        due = tenth != self._said_tenth or time.monotonic() - self._said_at >= _PLAIN_EVERY_S
        self._said_tenth = tenth
        return due

    def _end(self, event: RunEnded) -> None:
        self._end_phases()
        self.close()
        rows = end_rows(event, self._session)
        trained = self._session.last is not None or event.status != "finished"  # else a note said "already finished"
        for label, value in rows if trained else rows[1:]:
            self._say(f"{label}: {value}")
        if event.sample:
            self._say(f"sample:\n{event.sample}")

    def _say(self, line: str) -> None:
        # As Text: a file name or a sample with [brackets] is no markup.
        # Where the panel is redrawn it must know how many rows a line takes; a log keeps its lines whole.
        self._console.print(Text(visible(line)), soft_wrap=not self._redraws)
