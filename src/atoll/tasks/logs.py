"""A job's log: one file, with what each of its processes wrote behind a prefix that says which.

Everything here works on whole chunks, never line by line: a job that prints 80 MB/s must not be slowed by its log.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

RUN_LOG = "run.log"
_BAR_S = 0.5  # of lines that a progress bar overdraws, one is shown so often
_QUIET_S = 0.5  # a line without its end is shown once nothing has come for so long
_LONGEST_LINE_BYTES = 1 << 20  # a longer one is cut: it must not be kept in memory
_SHORTEST = 6  # secrets that are shorter would be found everywhere
_SHORTEST_LINE = 4  # of a secret of several lines
_HIDDEN = b"****"
_OVERDRAWN = re.compile(rb"^[^\n]*\r", re.M)
_LINE_ENDS = re.compile(rb"\r+\n")
_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
# What stands before each line of a process.
PREFIX = re.compile(rb"^\((?:[^()\n]{0,120}[ ,])?pid=\d+(?:, ip=[^()\n]{1,60})?\) ", re.M)
_BLOCK_BYTES = 1 << 20


class Redactor:
    """Replaces secret values in streams of bytes."""

    def __init__(self, secrets: Iterable[str]) -> None:
        # Of a key with several lines, each line is a secret: output is looked at line by line.
        values = set()
        for value in secrets:
            lines = value.splitlines()
            values |= {
                each for each in (value, *lines) if len(each) >= (_SHORTEST_LINE if len(lines) > 1 else _SHORTEST)
            }
        # Bytes that are no text, as processes print them, and as they stand in lines that were decoded on the way.
        found = {value.encode(errors="surrogateescape") for value in values}
        found |= {value.decode(errors="replace").encode() for value in found}
        self._values = ordered = sorted(found, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, ordered))) if ordered else None
        self.longest_bytes = len(ordered[0]) if ordered else 0

    def hide(self, data: bytes) -> bytes:
        """``data`` with every secret value in it as ``****``."""
        return data if self._pattern is None else self._pattern.sub(_HIDDEN, data)

    def num_settled(self, data: bytes) -> int:
        """How many bytes of ``data`` can't belong to a value that is still being written."""
        longest = min(len(data), self.longest_bytes - 1)
        tails = range(len(data) - longest, len(data))
        at = next((at for at in tails if any(each.startswith(data[at:]) for each in self._values)), len(data))
        for found in self._pattern.finditer(data) if self._pattern is not None else ():
            if found.start() < at < found.end():
                return found.start()
        return at

    def hide_text(self, text: str) -> str:
        """The same for text."""
        return text if self._pattern is None else self.hide(_bytes_of(text)).decode(errors="replace")


def _bytes_of(text: str) -> bytes:
    """A line of our own; what it quotes may have been bytes that are no text, or half a character."""
    return _HALF.sub("?", text).encode(errors="surrogateescape")


class Prefixer:
    """Makes what one process writes into whole lines that begin with its prefix. No I/O."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._joint = b"\n" + prefix
        self._open = b""  # a line without its end
        self._ended = False  # the state of a bar was shown up to its \r: a \n that comes next is the same line's
        self._shown = False  # the line's beginning was shown by `settle`, without an end: what comes next goes on there
        self._bar_shown = 0.0

    @property
    def bar_due(self) -> float | None:
        """When the state of a progress bar that is waiting may be shown (monotonic), or None."""
        return self._bar_shown + _BAR_S if self._open.rpartition(b"\r")[0].strip(b"\r") else None

    def feed(self, data: bytes, now: float) -> bytes:
        """Lines that are whole now. ``\\r\\n`` becomes ``\\n``; of what a lone ``\\r`` overdraws the last is kept."""
        if self._ended and data:
            self._ended = False
            data = data.removeprefix(b"\n")
        data = self._open + data if self._open else data
        cut = data.rfind(b"\n") + 1
        self._open = data[cut:]
        lines = self._lines(data[: cut - 1]) if cut else b""
        if len(self._open) > _LONGEST_LINE_BYTES:
            lines += self.flush()
        return lines + self.tick(now)

    def settle(self) -> bytes:
        """The beginning of a line whose end is long in coming, such as a question."""
        if not self._open or b"\r" in self._open.lstrip(b"\r"):
            return b""
        begun = self._lines(self._open)[:-1]
        self._open, self._shown = b"", True
        return begun

    def interrupted(self) -> None:
        """Somebody else wrote after a line's beginning: what comes next stands on a line of its own."""
        self._ended, self._shown = self._ended or self._shown, False

    def tick(self, now: float) -> bytes:
        """The state of an open progress bar, where it is time to show one."""
        due = self.bar_due
        if due is None or now < due:
            return b""
        states, _, self._open = self._open.rpartition(b"\r")
        self._ended = not self._open
        self._bar_shown = now
        return self._lines(states)

    def flush(self) -> bytes:
        """The last line, where it was left without an end."""
        rest, self._open = self._open.rstrip(b"\r"), b""
        return self._lines(rest) if rest or self._shown else b""

    def _lines(self, body: bytes) -> bytes:
        goes_on, self._shown = self._shown, False
        overdraws = body.startswith(b"\r") and body.lstrip(b"\r")[:1] not in (b"", b"\n")
        if b"\r" in body:
            body = _OVERDRAWN.sub(b"", _LINE_ENDS.sub(b"\n", body.rstrip(b"\r")))
        begin = self._prefix
        if goes_on:
            begin = self._joint if overdraws else b""
        return b"".join((begin, body.replace(b"\n", self._joint), b"\n"))


class LogFile:
    """A file that is only added to. Where it can't be written, output is lost, never the job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._lost_bytes = 0
        self._whole = True  # does what is written end with a line's end?
        self.begun_by: object = None  # whose line it is that has no end yet
        self.problem: str | None = None

    def write_for(self, writer: object, data: bytes) -> None:
        """The same as ``write``, where several write: nobody's line goes on behind what another has begun."""
        if data:
            self.write(data if self.begun_by in (None, writer) else b"\n" + data)
            self.begun_by = None if data.endswith(b"\n") else writer

    def write(self, data: bytes) -> None:
        """Add to it; after output was lost, first a line that says how much."""
        if not data:
            return
        lost_bytes = self._lost_bytes
        if lost_bytes:
            gap = f"atoll: {lost_bytes} bytes of output are missing here: {self.problem}\n".encode()
            data = (b"" if self._whole else b"\n") + gap + data
        left = memoryview(data)
        try:
            if self._fd is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._fd = os.open(self._path, flags, 0o600)
            while left:
                num = os.write(self._fd, left)
                self._whole = left[num - 1] == 10
                left = left[num:]
        except OSError as error:
            self.problem = error.strerror or str(error)
        self._lost_bytes = lost_bytes + len(left) if left else 0

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            with contextlib.suppress(OSError):  # a network file system tells only now that it was full
                os.close(self._fd)
            self._fd = None


class Stream:
    """What one process writes, as prefixed lines into its job's log.

    A line without its end is held back: a secret in it may come in two parts.
    """

    def __init__(self, run_log: LogFile, prefix: str, redactor: Redactor) -> None:
        self._run_log = run_log
        self._redactor = redactor
        self._prefixer = Prefixer(prefix.encode())
        self._held = bytearray()
        self._quiet_at: float | None = None  # until then it may have more to say

    @property
    def due(self) -> float | None:
        """When ``tick`` has something to do (monotonic), or None."""
        dues = (self._prefixer.bar_due, self._quiet_at)
        return min((due for due in dues if due is not None), default=None)

    def feed(self, data: bytes, now: float) -> None:
        """Bytes that it wrote."""
        self._quiet_at = None if data.endswith(b"\n") else now + _QUIET_S
        self._held += data
        num_open = len(data) - max(data.rfind(b"\n"), data.rfind(b"\r")) - 1
        if num_open < len(data):
            self._hand_on(len(self._held) - num_open, now)
        elif len(self._held) > _LONGEST_LINE_BYTES:
            self._held[:] = self._redactor.hide(bytes(self._held))
            self._hand_on(len(self._held) - self._redactor.longest_bytes, now)

    def tick(self, now: float) -> None:
        """Show the state of a progress bar where it is time, and the beginning of a line once it is quiet."""
        self._show(self._prefixer.tick(now))
        if self._quiet_at is not None and now >= self._quiet_at:
            self._quiet_at = None
            self._hand_on(self._redactor.num_settled(bytes(self._held)), now)
            self._show(self._prefixer.settle())

    def close(self, now: float) -> None:
        """It ended: what it left without an end of line is shown too."""
        self._hand_on(len(self._held), now)
        self._show(self._prefixer.flush())

    def _hand_on(self, num_bytes: int, now: float) -> None:
        data = self._redactor.hide(bytes(self._held[:num_bytes]))
        del self._held[:num_bytes]
        if self._run_log.begun_by is not self:
            self._prefixer.interrupted()
        self._show(self._prefixer.feed(data, now))

    def _show(self, data: bytes) -> None:
        self._run_log.write_for(self, data)


class JobLog:
    """The log of one job, in its folder."""

    def __init__(self, folder: Path, secrets: Iterable[str] = ()) -> None:
        self.redactor = Redactor(secrets)
        self._run_log = LogFile(folder / RUN_LOG)
        self._streams: set[Stream] = set()

    @property
    def problem(self) -> str | None:
        """Why lines are missing from the job's log, where some are."""
        return self._run_log.problem

    def say(self, text: str) -> None:
        """A line of our own."""
        self._run_log.write_for(None, self.redactor.hide(_bytes_of(text)) + b"\n")

    def copy(self, data: bytes) -> None:
        """Bytes of another job's log, as they are."""
        self._run_log.write(data)

    def stream(self, prefix: str) -> Stream:
        """For one process."""
        stream = Stream(self._run_log, prefix, self.redactor)
        self._streams.add(stream)
        return stream

    def end(self, stream: Stream, now: float) -> None:
        """Its process ended."""
        stream.close(now)
        self._streams.discard(stream)

    def tick(self, now: float) -> float | None:
        """Show progress bars whose time has come; returns when the next one's comes."""
        waiting = [stream for stream in self._streams if stream.due is not None]
        for stream in waiting:
            stream.tick(now)
        return min((stream.due for stream in waiting if stream.due is not None), default=None)

    def close(self, now: float) -> None:
        """Nothing more comes."""
        for stream in list(self._streams):
            self.end(stream, now)
        self._run_log.close()


# ------------------------------------------------------------------------------------------------- reading


def prefix_of(line: bytes) -> bytes | None:
    """What a line of a process begins with in a job's log; None for one of the launcher's own."""
    found = PREFIX.match(line)
    return None if found is None else found[0]


def only_rank(rank: int, *, several: bool) -> re.Pattern[bytes]:
    """Which lines of a job's log are of this rank; where it has only one process, which are its process's."""
    return re.compile(rb"^\((?:head|worker\d+), rank=%d, [^\n]*\n" % rank if several else rb"^\([^\n]*\n", re.M)


def tail_start(fd: int, num_lines: int, only: re.Pattern[bytes] | None = None) -> int:
    """Where the last so many lines of a file begin, or of those that match. Reads from its end, no more than needed."""
    at, rest = os.fstat(fd).st_size, b""  # the end of a line that begins further up
    while at > 0:
        start = max(0, at - _BLOCK_BYTES)
        block = os.pread(fd, at - start, start) + rest
        first = block.find(b"\n") + 1 or len(block) if start else 0
        begins = [line.start() for line in (only or _LINE).finditer(block, first)]
        if len(begins) >= num_lines:
            return start + begins[-num_lines]
        num_lines -= len(begins)
        at, rest = start, block[:first]
    return 0


class Follower:
    """Reads a log that may not exist yet and may still grow, and hands on its bytes, or the lines that match."""

    def __init__(self, path: Path, write: Callable[[bytes], object], only: re.Pattern[bytes] | None = None) -> None:
        self._path = path
        self._write = write
        self._only = only
        self._open = b""  # of a line that is looked at, what there is
        self._skip_bytes = 0
        self._fd: int | None = None

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def drain(self) -> None:
        """Hand on all there is now."""
        while self.step():
            pass

    def position_of_tail(self, num_lines: int) -> int:
        """Where the last so many lines begin of what would be handed on now."""
        return 0 if (fd := self._found()) is None else tail_start(fd, num_lines, self._only)

    def skip(self, start: int, num_bytes: int) -> None:
        """Begin at a byte of the log, and leave out the first so many bytes of what would be handed on from there."""
        if self._only is None:
            start, num_bytes = start + num_bytes, 0
        self._skip_bytes = num_bytes
        if (fd := self._found()) is not None:
            os.lseek(fd, start, os.SEEK_SET)

    def _found(self) -> int | None:
        if self._fd is None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fd

    def step(self) -> bool:
        """Hand on one block, or the lines of it that match; was there any?"""
        fd = self._found()
        if fd is None or not (block := os.read(fd, _BLOCK_BYTES)):
            return False
        if self._only is not None:
            block = self._open + block
            cut = block.rfind(b"\n") + 1
            block, self._open = b"".join(self._only.findall(block, 0, cut)), block[cut:]
        if self._skip_bytes:
            skipped = min(len(block), self._skip_bytes)
            block, self._skip_bytes = block[skipped:], self._skip_bytes - skipped
        if block:
            self._write(block)
        return True
