"""Requests to stop: signals of the launcher, and a file that anybody may make."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from atoll.core.paths import shown_path

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LOOK_EVERY_S = 0.5
_SAME_REQUEST_S = 3.0  # a launcher on a busy machine passes it on late; what it costs is a second Ctrl-C so soon

STOP_FILE = "stop"


class StopRequest:
    """Whether this rank was asked to stop, and by what.

    The first SIGTERM, SIGUSR1 (Slurm's notice) or Ctrl-C asks the run to save and end; a second Ctrl-C ends it at once.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.at: float | None = None
        self._file: Path | None = None
        self._looked = 0.0

    def ask(self, reason: str) -> None:
        """Ask the run to save and end."""
        if self.reason is None:
            self.reason, self.at = reason, time.monotonic()

    @property
    def asked(self) -> bool:
        """Whether the run is to end. Looks for the file at most twice a second."""
        if self.reason is None and self._file is not None and time.monotonic() - self._looked > _LOOK_EVERY_S:
            self._looked = time.monotonic()
            with contextlib.suppress(FileNotFoundError):
                # Whoever makes it may say why.
                why = self._file.read_text(errors="replace").strip()[:200]
                self.ask(why or f"{shown_path(str(self._file))} was made")
        return self.reason is not None

    @property
    def since_s(self) -> float:
        """How long ago it was asked; 0 where it was not."""
        return 0.0 if self.at is None else time.monotonic() - self.at

    def forget_file(self) -> None:
        """The run is over: take the file away, so that it does not stop the next one."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def watch_file(self, folder: Path) -> None:
        """Look for the file ``stop`` in ``folder`` from now on; one left from before is removed."""
        self._file = folder / STOP_FILE
        self._file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Hear the signals while the block runs; where this is not the main thread, only the file is looked for."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A terminal sends Ctrl-C to launcher and ranks alike, and the launcher passes it on: that is one request.
        if number == signal.SIGINT and self.since_s > _SAME_REQUEST_S:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number).name)
