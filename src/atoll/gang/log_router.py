"""What ranks print: cut into lines, labelled by rank, and shown as the pool was told to."""

from __future__ import annotations

import os
import re
import select
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TextIO

from atoll.core.errors import ConfigError

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_LONGEST_LINE = 1 << 16
_PIECE_BYTES = 4096  # a pipe or terminal that can be written to takes so much without blocking
_LOOK_MS = 100
_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line a rank wrote.

    Attributes:
        rank, node: who wrote it.
        stream: ``"stdout"`` or ``"stderr"``.
        text: the line, without its end; bytes that are not UTF-8 are shown as U+FFFD (files keep them).
        end: ``"\\n"``, ``"\\r"`` for a line that a progress bar will draw over, or ``""`` for a last line left open.
    """

    rank: int
    node: int
    stream: Literal["stdout", "stderr"]
    text: str
    end: str


Logs = Literal["all", "head", "quiet"] | Callable[[LogLine], object]


class LineCutter:
    """Cuts a byte stream into lines at ``\\n``, ``\\r\\n`` and ``\\r``. Every byte comes out once."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[bytes, str]]:
        """Lines that are whole now, each with its end."""
        data = self._rest + data
        lines: list[tuple[bytes, str]] = []
        start = 0
        for end in _END.finditer(data):
            if end[0] == b"\r" and end.end() == len(data):  # it may yet become \r\n
                break
            lines.append((data[start : end.start()], "\r" if end[0] == b"\r" else "\n"))
            start = end.end()
        self._rest = data[start:]
        if len(self._rest) > _LONGEST_LINE:
            lines.append((self._rest, ""))
            self._rest = b""
        return lines

    def flush(self) -> list[tuple[bytes, str]]:
        """What is left: a last line without an end, or one whose ``\\r`` was still open."""
        rest, self._rest = self._rest, b""
        if not rest:
            return []
        return [(rest[:-1], "\r")] if rest.endswith(b"\r") else [(rest, "")]


class LogRouter:
    """Takes the output of every rank and shows it."""

    def __init__(self, logs: Logs, node_of: Callable[[int], int], world_size: int) -> None:
        if not callable(logs) and logs not in ("all", "head", "quiet"):
            raise ConfigError(f"logs={logs!r} is not known; use 'all', 'head', 'quiet' or a callable")
        self._logs = logs
        self._node_of = node_of
        self._width = len(str(max(world_size - 1, 0)))
        self._cutters: dict[tuple[int, bool], LineCutter] = {}
        self._lock = threading.Lock()
        self._closing = False
        self.moved: Callable[[], object] = lambda: None  # called whenever something was shown

    @property
    def is_quiet(self) -> bool:
        """Is nothing shown?"""
        return self._logs == "quiet"

    def close(self) -> None:
        """Wait no more for somebody who reads what is shown."""
        self._closing = True

    def feed(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Bytes a rank wrote."""
        with self._lock:
            cutter = self._cutters.setdefault((rank, is_stderr), LineCutter())
            lines = cutter.feed(data)
        self._show(rank, is_stderr, lines)

    def flush(self, rank: int | None = None) -> None:
        """A call ended or a rank died: what it left without an end of line is shown too."""
        with self._lock:
            left = [(key, c.flush()) for key, c in self._cutters.items() if rank is None or key[0] == rank]
        for (number, is_stderr), lines in left:
            self._show(number, is_stderr, lines)

    def note(self, text: str, rank: int | None = None) -> None:
        """A line of Atoll's own about the pool or a rank."""
        if self._logs == "quiet":
            return
        self._write(sys.stderr, f"atoll: {text}\n" if rank is None else f"atoll: rank {rank}: {text}\n")

    def _show(self, rank: int, is_stderr: bool, lines: list[tuple[bytes, str]]) -> None:
        if not lines or self._logs == "quiet" or (self._logs == "head" and rank != 0):
            return
        if callable(self._logs):
            for raw, end in lines:
                name: Literal["stdout", "stderr"] = "stderr" if is_stderr else "stdout"
                line = LogLine(rank, self._node_of(rank), name, raw.decode(errors="replace"), end)
                try:
                    self._logs(line)
                except BaseException as error:  # noqa: BLE001 - the user's callback must not stop the pool
                    self._write(sys.stderr, f"atoll: logs callable raised {type(error).__name__}: {error}\n")
                self.moved()
            return
        out = sys.stderr if is_stderr else sys.stdout
        label = self._label(rank, out)
        over = "\r" if _is_terminal(out) else "\n"  # a progress bar draws over its line only where that can be seen
        text = "".join(f"{label}{raw.decode(errors='replace')}{over if end == over else chr(10)}" for raw, end in lines)
        if not self._write(out, text):
            self._logs = "quiet"  # nobody reads any more; the files still have it

    def _write(self, out: TextIO | None, text: str) -> bool:
        """Write to one of the driver's own streams; False where it is closed or broken: no reason to end a run.

        One whose reader pauses is waited for without holding its lock, which the end of this process would need.
        """
        if out is None:
            return False
        size = _PIECE_BYTES if text.isascii() else _PIECE_BYTES // 4
        try:
            for start in range(0, len(text), size):
                if not self._wait_for_reader(out):
                    return True
                _write_piece(out, text[start : start + size])
                self.moved()
        except (OSError, ValueError):
            return False
        return True

    def _wait_for_reader(self, out: TextIO) -> bool:
        """Wait until it can be written to; False where the pool ends first."""
        try:
            fd = out.fileno()
        except (OSError, ValueError, AttributeError):  # no file behind it
            return True
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        while not poll.poll(_LOOK_MS):
            if self._closing:
                return False
        return True

    def _label(self, rank: int, out: TextIO) -> str:
        label = f"[rank {rank:>{self._width}}] "
        if _is_terminal(out) and not os.environ.get("NO_COLOR"):
            return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m"
        return label


def _write_piece(out: TextIO, text: str) -> None:
    try:
        out.write(text)
    except UnicodeEncodeError:  # a terminal that can't show it
        encoding = getattr(out, "encoding", None) or "ascii"
        out.write(text.encode(encoding, "backslashreplace").decode(encoding))
    out.flush()


def _is_terminal(out: TextIO) -> bool:
    try:
        return out.isatty()
    except (AttributeError, ValueError):
        return False
