"""What connects a process with its agent: a rank's descriptors and requests, and captured output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import Iterator, Sequence

# Where a rank finds what the agent gave it, after standard input, output and error.
CHANNEL_FD, CONTROL_FD = 3, 4
MIG_VARIABLE = "ATOLL_MIG"  # profiles of the MIG slices of the node's ranks; from a rank's start on, its own alone
LOOK, LEAVE = b"?", b"."  # on CONTROL_FD: say where you are; end now. Anything else is the number of a call to stop
_TAIL_BYTES = 1 << 14
_WAITING = struct.Struct("i")


class Output:
    """One captured stream: where it is read, its log file if it has one, and the end of what it said."""

    def __init__(self, reader: int, path: str | None, is_stderr: bool) -> None:
        self.reader = reader
        self.is_stderr = is_stderr
        self._path = path
        self._file: int | None = None  # opened at its first line: most ranks never write to standard error
        self.tail = bytearray()

    @classmethod
    def piped(cls, path: str | None, is_stderr: bool) -> tuple[Output, int]:
        """One over a new pipe, and the end to write to."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        return cls(reader, path, is_stderr), writer

    def read(self) -> bytes | None:
        """What there is; empty bytes at the end; None when there is nothing just now."""
        try:
            data = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        if data:
            self._keep(data)
        return data

    def drain(self) -> Iterator[bytes]:
        """What lies in the pipe now, and no more: whoever writes without end must not hold the agent up."""
        waiting = _WAITING.unpack(fcntl.ioctl(self.reader, termios.FIONREAD, bytes(_WAITING.size)))[0]
        while waiting > 0 and (data := self.read()):
            waiting -= len(data)
            yield data

    def _keep(self, data: bytes) -> None:
        # A full disk must not stop training: the driver still gets every byte.
        with contextlib.suppress(OSError):
            if self._file is None and self._path is not None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if self._file is not None:
                os.write(self._file, data)
        self.tail += data
        if len(self.tail) > 2 * _TAIL_BYTES:
            del self.tail[:-_TAIL_BYTES]

    def close(self) -> None:
        """Close the pipe and the log file."""
        os.close(self.reader)
        if self._file is not None:
            os.close(self._file)


def last_lines(outputs: Sequence[Output], num_lines: int = 20) -> list[str]:
    """The last lines that are not empty: standard error's, or standard output's where that is silent or the same.

    Of one that was overdrawn, what it showed last.
    """
    said = next((output.tail for output in reversed(outputs) if output.tail.strip()), b"")
    text = said.decode(errors="replace")
    return [line.rpartition("\r")[2][:2000] for line in text.splitlines() if line.strip()][-num_lines:]
