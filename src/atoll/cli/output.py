"""Standard output and error that take it well when nobody reads them any more, as in ``atoll logs NAME | head``."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

_closed = False


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


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
    """A line on a terminal's standard error that shows that the command is working; gone at the end."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    over = threading.Event()

    def turn() -> None:
        for mark in itertools.cycle("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"):
            sys.stderr.write(f"\r{mark} {text}")
            sys.stderr.flush()
            if over.wait(0.1):
                break
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()

    thread = threading.Thread(target=turn, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Pipe(io.FileIO):
    tells = True

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            drop(self.fileno())
            if not self.tells:
                return super().write(data)
            global _closed
            _closed = True
            raise OutputClosed from None
