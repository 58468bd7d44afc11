"""Standard output and error that take it well when nobody reads them any more, as in ``atoll logs NAME | head``."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from atoll.core import terminal

_closed = False
_SPINNER_S = 0.3  # what takes no longer has no spinner


class OutputClosed(BaseException):
    """Whoever read standard output has enough of it; what is written from then on goes nowhere."""


def is_closed() -> bool:
    """Has ``OutputClosed`` been raised?"""
    return _closed


def watch() -> None:
    """From now on, standard output that nobody reads raises ``OutputClosed``, once; standard error is just dropped.

    Libraries take a ``BrokenPipeError`` for their own affair: one exits silently, one prints nothing from then on.
    """
    global _closed
    _closed = False
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            pipe = _Pipe(stream.fileno(), "w", closefd=False)
            pipe.tells = name == "stdout"
            watched = io.TextIOWrapper(
                io.BufferedWriter(pipe),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, watched)


def drop(descriptor: int) -> None:
    """What is written there from now on goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class Spinner:
    """A moving line on a terminal's standard error that shows what the command waits for.

    It comes after a moment, makes room for whatever else is printed, and is gone at the end.
    """

    def __init__(self) -> None:
        self.text = ""
        self._lock = threading.Lock()
        self._is_drawn = False
        self._is_held = False  # the last thing printed has no end of line: what comes next belongs to it
        self._until_output = self.has_printed = self._is_turning = False

    @contextlib.contextmanager
    def __call__(self, text: str, *, until_output: bool = False, interrupted: str | None = None) -> Iterator[None]:
        """Show ``text`` while this lasts; one inside another has the line meanwhile.

        Args:
            until_output: only until something is printed.
            interrupted: what standard error gets after a Ctrl-C.
        """
        before = self.text, self._until_output
        self.text, self._until_output = text, until_output
        try:
            with contextlib.nullcontext() if self._is_turning else self._turning():
                yield
        except KeyboardInterrupt:
            if interrupted is not None:
                print(f"\natoll: interrupted: {interrupted}", file=sys.stderr, flush=True)
            raise
        finally:
            self.text, self._until_output = before

    @contextlib.contextmanager
    def _turning(self) -> Iterator[None]:
        if not _takes_moving_lines():
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._turn, args=(over,), daemon=True)
        self._is_turning = True
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._is_turning = False
            self._erase()

    def _turn(self, over: threading.Event) -> None:
        if over.wait(_SPINNER_S):
            return
        for mark in itertools.cycle("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"):
            with self._lock:
                if terminal.prompts.locked():
                    self._erase()
                elif not self._is_held and not (self._until_output and self.has_printed):
                    width = shutil.get_terminal_size().columns - 3
                    os.write(2, f"\r\033[K{mark} {self.text[:width]}".encode())
                    self._is_drawn = True
            if over.wait(0.1):
                return

    def make_room(self, data: bytes) -> None:
        """Something is about to be printed."""
        with self._lock:
            self._erase()
            self._is_held = not data.endswith(b"\n")
            self.has_printed = True

    def _erase(self) -> None:
        if self._is_drawn:
            os.write(2, b"\r\033[K")
            self._is_drawn = False


spinner = Spinner()


def _takes_moving_lines() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class CopyProgress:
    """How far copying to the nodes is: in the spinner of a terminal, otherwise a line every 10 s."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._said = 0.0

    def __call__(self, done_bytes: int, num_bytes: int) -> None:
        line = f"copying to the nodes: {done_bytes / 1e6:,.0f} of {num_bytes / 1e6:,.0f} MB"
        if _takes_moving_lines():
            spinner.text = line if done_bytes < num_bytes else "starting"
            return
        now = time.monotonic()
        if self._began is None:  # before it, hosts may have been looked at for long
            self._began = self._said = now
        if now > self._said + 10 or (done_bytes >= num_bytes and now > self._began + 1):
            self._said = now
            print(line, file=sys.stderr, flush=True)


class _Pipe(io.FileIO):
    tells = True

    def write(self, data: Any, /) -> int:
        spinner.make_room(bytes(data[-1:]))
        try:
            return super().write(data)
        except BrokenPipeError:
            drop(self.fileno())
            if not self.tells:
                return super().write(data)
            global _closed
            _closed = True
            raise OutputClosed from None
