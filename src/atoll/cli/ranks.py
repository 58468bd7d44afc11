"""What ``atoll run`` prints: lines of ranks on standard output, the launcher's own on standard error."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Collection, Iterator

from atoll.cli.shown import LogWriter
from atoll.tasks.logs import prefix_of

_LINES = re.compile(rb"[^\n]*\n")
_RANK = re.compile(rb"^\([^ ]+, rank=(\d+), ")


class RankWriter:
    """Writes a run's log as it comes.

    Args:
        num_ranks: of all nodes. The lines of a single one stand as it printed them, without a prefix.
        num_processes: ranks a node.
        local_ranks: of each node, those whose lines are shown; None for all.
    """

    def __init__(self, num_ranks: int, num_processes: int, local_ranks: Collection[int] | None) -> None:
        self._alone = num_ranks == 1
        self._num_processes = num_processes
        self._local_ranks = local_ranks
        self._ranks = LogWriter(sys.stdout)
        self._own = LogWriter(sys.stderr)
        self._rest = b""
        self._num_bytes = 0  # of the log, seen so far
        self._skip_bytes = 0

    def begin_again(self) -> None:
        """What comes next is the log from its start: what was seen of it is passed over."""
        self._skip_bytes, self._num_bytes = self._num_bytes, 0

    def __call__(self, data: bytes) -> None:
        """The next piece of the log."""
        self._num_bytes += len(data)
        skipped = min(len(data), self._skip_bytes)
        self._skip_bytes -= skipped
        data = self._rest + data[skipped:]
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        if end:
            self._write(data[:end])

    def close(self) -> None:
        """Write what has no end of line."""
        if self._rest:
            self._write(self._rest + b"\n")
            self._rest = b""

    def _write(self, lines: bytes) -> None:
        for prefix, piece in _sorted(lines):
            if prefix is None:
                self._own(piece)
            elif self._alone:
                self._ranks(piece[len(prefix) :].replace(b"\n" + prefix, b"\n"))
            elif self._local_ranks is not None:
                self._ranks(b"".join(line for line in _LINES.findall(piece) if self._is_wanted(line)))
            else:
                self._ranks(piece)

    def _is_wanted(self, line: bytes) -> bool:
        found = _RANK.match(line)
        assert found is not None and self._local_ranks is not None
        return int(found[1]) % self._num_processes in self._local_ranks


def _sorted(lines: bytes) -> Iterator[tuple[bytes | None, bytes]]:
    """Whole lines, cut where those of ranks and our own meet; each piece with its first prefix, None for ours."""
    if lines.count(b"\n(") == lines.count(b"\n") - 1 and (first := prefix_of(lines)) is not None:
        yield first, lines  # nearly always, and at the speed of a search
        return
    for ours, piece in itertools.groupby(_LINES.findall(lines), lambda line: prefix_of(line) is None):
        joined = b"".join(piece)
        yield None if ours else prefix_of(joined), joined
