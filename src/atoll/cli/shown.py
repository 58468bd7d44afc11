"""What the commands for clusters and jobs print: tables, notes, job logs in colour. Imports are late."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from atoll.core.exit_codes import ExitCode
from atoll.core.validation import command_line
from atoll.tasks.listing import fields, job_row, resources_text
from atoll.tasks.logs import PREFIX
from atoll.tasks.schedule import TURN
from atoll.tasks.spec import JobStatus

if TYPE_CHECKING:
    from atoll.tasks.jobs import Job
    from atoll.tasks.placing import Decision
    from atoll.tasks.rows import EventRow, JobRow

_BEGIN = b"Waiting for task resources"  # the last of a job's own lines before it starts
_GOOD = re.compile(r"^✓.*$".encode(), re.M)
_BAD = re.compile(r"^(?:✗|ERROR:).*$".encode(), re.M)
_CYAN, _GREEN, _RED, _DIM = "36", "32", "31", "2"
_STYLES = {  # of a table's cells, by their first word
    **dict.fromkeys(("UP", "SUCCEEDED", "✓"), "green"),
    **dict.fromkeys(("RUNNING", "INIT", "PENDING"), "cyan"),
    **dict.fromkeys(("STOPPED", "CANCELLED"), "yellow"),
    **dict.fromkeys(("FAILED", "DAMAGED", "✗"), "red"),
}
_GAP, _LEAST = 2, 8  # columns between two columns of a table, and those that its last one has at least
_WAITING = (JobStatus.PENDING, JobStatus.INIT)
_MOST_NAMED = 20  # jobs whose numbers a line gives
_RESULT_LINES = 1000  # at the end of a job's log: its result is looked for in these, however long the log is


def note(text: str) -> None:
    """A remark that is not part of the answer."""
    print(text, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """A line of the answer, at once."""
    print(text, flush=True)


def print_json(value: Any) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=2, default=str))


def in_colour(stream: IO[Any]) -> bool:
    """Is it a terminal, and does its user want colours?"""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: IO[Any] | None = None) -> str:
    """``text`` in an ANSI colour where the stream shows it."""
    return f"\033[{colour}m{text}\033[0m" if in_colour(stream or sys.stdout) else text


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, cut: bool = False) -> None:
    """Columns as wide as they need to be; a table on a terminal, where ``cut`` ends the last column at its edge."""
    if not sys.stdout.isatty():
        widths = [max(len(row[at]) for row in [titles, *rows]) for at in range(len(titles))]
        for row in [titles, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    *widths, last = (max(cell_len(row[at]) for row in [titles, *rows]) for at in range(len(titles)))
    others = sum(width + _GAP for width in widths)
    room = max(Console().width - others, min(last, _LEAST))  # a narrower terminal wraps the lines itself
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title, width in zip(titles, widths, strict=False):
        table.add_column(title, no_wrap=True, width=width)
    table.add_column(titles[-1], no_wrap=cut, overflow="ellipsis" if cut else "fold", max_width=room)
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell.partition("_")[0], "")) for cell in row))
    Console(highlight=False, width=others + room).print(table)


def duration(seconds: float) -> str:
    """``42s``, ``3m 20s``, ``5h 2m``, ``3d 4h``."""
    whole = int(seconds)
    for size, unit, small, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size}{unit}" + (f" {rest}{below}" if rest else "")
    return f"{whole}s"


def ago(time_s: float | None) -> str:
    """How long ago a moment was."""
    return "-" if time_s is None else f"{duration(max(0.0, time.time() - time_s))} ago"


# --------------------------------------------------------------------------------------------------- job logs
class LogWriter:
    """Writes a job's log to a stream; on a terminal with prefixes and last words in colour."""

    def __init__(self, stream: IO[str]) -> None:
        stream.flush()
        self._raw = stream.buffer if hasattr(stream, "buffer") else None
        self._stream = stream
        self._colour = in_colour(stream)
        self._is_mid_line = False

    def __call__(self, data: bytes) -> None:
        if self._colour and data:
            begun = data.find(b"\n") + 1 or len(data) if self._is_mid_line else 0
            self._is_mid_line = not data.endswith(b"\n")
            data = data[:begun] + _coloured(data[begun:])
        if self._raw is None:  # a stream of text only, as in a notebook
            self._stream.write(data.decode(errors="replace"))
            self._stream.flush()
            return
        self._raw.write(data)
        self._raw.flush()


def _coloured(data: bytes) -> bytes:
    for pattern, colour in ((PREFIX, _CYAN), (_GOOD, _GREEN), (_BAD, _RED)):
        data = pattern.sub(b"\033[%sm\\g<0>\033[0m" % colour.encode(), data)
    return data


def to_see(cluster: str, jobs: Sequence[int]) -> str:
    """What to type to see jobs that are still running, and to cancel them."""
    from atoll.tasks import controllers

    several = len(jobs) > 1
    atoll, where = controllers.words_of(cluster)
    see = command_line(*atoll, "queue", *where) if several else command_line(*atoll, "logs", *where, *jobs)
    cancel = command_line(*atoll, "cancel", *where, *(jobs if len(jobs) <= _MOST_NAMED else ["--all"]))
    return f"{'To see them' if several else 'Its log'}: {see}; to cancel {'them' if several else 'it'}: {cancel}"


def follow(job: Job, stream: IO[str], *, tail: int = 0, rank: int | None = None, fresh: bool = False) -> int:
    """Show a job's log until it ends; Ctrl-C only stops showing it.

    Args:
        fresh: the job was submitted just now, so that its start is part of the story.

    Returns:
        the exit code: the job's, or ``ExitCode.NOT_FINISHED`` after Ctrl-C.
    """
    writer = LogWriter(stream)
    try:
        if tail or rank is not None or (not fresh and job.status not in _WAITING):
            status = job.follow(writer, tail=tail, rank=rank)
        else:
            start = _Start(stream, writer)
            status = job.follow(start.write, on_event=start.on_event)
            start.end(started=False)
    except KeyboardInterrupt:
        print(f"\nJob {job.id} is still running. {to_see(job.cluster, [job.id])}", file=stream, flush=True)
        return ExitCode.NOT_FINISHED
    return status.exit_code


class _Start:
    """Shows what a job waits for until it starts, then its log."""

    def __init__(self, stream: IO[str], writer: LogWriter) -> None:
        self._stream = stream
        self._writer = writer
        self._held = b""  # what came and is not shown yet
        self._begins = False  # its own output comes next
        self._any_shown = self._is_over = False

    def write(self, data: bytes) -> None:
        """Shows bytes of its log: lines before its start now, its own output once it is known to have started."""
        if self._is_over:
            self._writer(data)
            return
        self._held += data
        while not self._begins and b"\n" in self._held:
            line, _, rest = self._held.partition(b"\n")
            if PREFIX.match(line) or _BAD.match(line):
                break
            self._held, self._begins, self._any_shown = rest, line.startswith(_BEGIN), True
            print(paint("├──", _DIM, self._stream), line.decode(errors="replace"), file=self._stream, flush=True)

    def on_event(self, event: EventRow) -> None:
        """Sees an event of the job, whose log up to that was written."""
        status = JobStatus(event.data["status"]) if event.kind == "status" else JobStatus.PENDING
        if status not in _WAITING:
            self.end(started=not status.ended)

    def end(self, *, started: bool) -> None:
        """Shows what was held back: the job has started, or will not."""
        if self._is_over:
            return
        self._is_over = True
        if started and self._any_shown:
            how = paint("(Ctrl-C to exit log streaming; job will not be killed)", _DIM, self._stream)
            end = paint("└──", _DIM, self._stream)
            print(f"{end} Job started. Streaming logs... {how}", file=self._stream, flush=True)
        self._writer(self._held)


# ----------------------------------------------------------------------------------------------------- records
def decision_row(decision: Decision) -> dict[str, Any]:
    """What ``--dryrun -o json`` says of a task."""
    return {
        "cluster": decision.cluster.name,
        **fields(decision.cluster, "infra", "num_nodes"),
        **fields(decision, "accelerator", "num_accelerators"),
        "simulated": decision.cluster.simulated,
        "hourly_cost": decision.hourly_cost,
        "notes": list(decision.lines),
    }


def print_jobs(rows: Sequence[JobRow]) -> None:
    """``atoll queue`` for people."""
    shown = []
    waiting = sorted(row.id for row in rows if row.status is JobStatus.PENDING)
    places = {job_id: place for place, job_id in enumerate(waiting, 1)}
    for row in rows:
        spec, end_s = row.spec, row.ended_s or time.time()
        why = row.reason.partition("\n")[0] if not row.status.ended or row.status.exit_code else ""
        if why == row.status.value.lower():  # the status has said it
            why = ""
        if row.id in places and why.startswith(TURN):
            why += f" ({places[row.id]} of {len(waiting)} that wait)"
        shown.append(
            (
                str(row.id),
                row.name or "-",
                ago(row.submitted_s),
                duration(end_s - row.started_s) if row.started_s else "-",
                resources_text(spec.num_nodes, spec.accelerator, spec.num_accelerators, spec.simulated),
                row.status.value,
                why,
            )
        )
    print_table(("ID", "NAME", "SUBMITTED", "DURATION", "RESOURCES", "STATUS", ""), shown, cut=True)


# ------------------------------------------------------------------------------------------------------ sweeps
def sweep_rows(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """One record a job of a sweep: values, how it ended, and its last JSON line or last line."""
    from atoll.tasks.jobs import rows_of

    rows = []
    for job, row in zip(jobs, rows_of(jobs), strict=True):
        seconds = (row.ended_s or time.time()) - row.started_s if row.started_s else None
        rows.append(
            {
                **job_row(row),
                "seconds": None if seconds is None else round(seconds, 3),
                "result": last_result(job.logs(tail=_RESULT_LINES)),
            }
        )
    return rows


def last_result(log: str) -> Any:
    """The last line of a log that is a JSON object, as an object; else the last line that a process wrote."""
    prefix = re.compile(PREFIX.pattern.decode())
    lines = [line[found.end() :] for line in log.splitlines() if (found := prefix.match(line)) is not None]
    for line in reversed(lines):
        if line.lstrip().startswith("{"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                return value
    return next((line for line in reversed(lines) if line.strip()), None)


def print_sweep(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table at the end of a sweep."""
    keys = list(rows[0]["labels"])
    shown = []
    for row in rows:
        result = row["result"]
        text = ", ".join(f"{key}={value}" for key, value in result.items()) if isinstance(result, dict) else result
        seconds = "-" if row["seconds"] is None else f"{row['seconds']:.1f}"
        code = "-" if row["exit_code"] is None else str(row["exit_code"])
        values = [str(row["labels"].get(key, "")) for key in keys]
        shown.append((str(row["job_id"]), *values, row["status"], code, seconds, (text or "").partition("\n")[0]))
    print_table(("JOB", *keys, "STATUS", "EXIT", "SECONDS", "RESULT"), shown, cut=True)
