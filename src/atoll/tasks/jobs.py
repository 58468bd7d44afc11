"""``Job``: a job of a cluster, as Python code and the commands hold it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from signal import SIGTERM
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError, ProvisionError
from atoll.core.validation import command_line
from atoll.tasks import clusters, controllers
from atoll.tasks.clusters import UnknownCluster
from atoll.tasks.spec import ClusterSpec, JobStatus

if TYPE_CHECKING:
    from atoll.tasks.control import LocalControl
    from atoll.tasks.remote_control import RemoteControl
    from atoll.tasks.rows import EventRow, JobRow

_PIECES_AHEAD = 16  # of a log, before whoever reads it takes them
_FULL_S = 0.1
_END_S = 2.0


@dataclass(frozen=True)
class Job:
    """A job of a cluster.

    Attributes:
        cluster: the cluster's name.
        id: the job's number in its cluster.
    """

    cluster: str
    id: int

    def row(self) -> JobRow:
        """Its record.

        Raises:
            UnknownCluster: it does not exist (any more).
        """
        return find_job(clusters.load(self.cluster), self.id)

    @property
    def status(self) -> JobStatus:
        """Its status."""
        return self.row().status

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process that made it fail, 0 after success, None where there is none (yet)."""
        row = self.row()
        return 0 if row.status is JobStatus.SUCCEEDED else row.exit_code

    def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait until it has ended, ``timeout`` seconds at most; returns its status."""
        with _asking(clusters.load(self.cluster), self.id) as control:
            return control.wait(self.id, timeout)

    def logs(self, *, follow: bool = False, tail: int = 0, rank: int | None = None) -> str:
        """Its log as text: what there is so far, or all of it with ``follow``.

        Args:
            follow: wait for the end.
            tail: only the last lines, 0 for all.
            rank: only what this rank wrote.
        """
        pieces: list[bytes] = []
        self.follow(pieces.append, follow=follow, tail=tail, rank=rank)
        return b"".join(pieces).decode(errors="replace")

    def follow(
        self,
        write: Callable[[bytes], object],
        *,
        follow: bool = True,
        tail: int = 0,
        rank: int | None = None,
        on_event: Callable[[EventRow], object] | None = None,
        hang_up: int | None = None,
    ) -> JobStatus:
        """Hand its log to ``write`` as it comes; returns its status at the end.

        ``on_event`` gets each event of the job, such as a new status, once the log up to it was handed on. The hang-up
        of the descriptor ``hang_up`` ends the wait.

        Raises:
            UnknownCluster: it does not exist (any more).
            ConfigError: it has no such rank.
            BrokenPipeError: ``hang_up`` was hung up.
        """
        cluster = clusters.load(self.cluster)
        _check_number(cluster, self.id)
        control = clusters.control_of(cluster)
        return control.follow(self.id, write, on_event, follow=follow, tail=tail, rank=rank, hang_up=hang_up)

    def pieces(
        self, *, follow: bool = True, tail: int = 0, rank: int | None = None, idle_s: float | None = None
    ) -> Generator[bytes, None, None]:
        """Its log in pieces as it comes, read by a thread of its own; closing the generator ends that.

        Args:
            follow, tail, rank: as in ``logs``.
            idle_s: an empty piece comes where nothing else has for so long.

        Raises:
            AtollError, OSError: as ``follow``.
        """
        waiting: queue.Queue[bytes | Exception | None] = queue.Queue(_PIECES_AHEAD)
        closed = threading.Event()
        reader, writer = os.pipe()

        def hand_on(piece: bytes | Exception | None) -> None:
            while not closed.is_set():
                with contextlib.suppress(queue.Full):
                    waiting.put(piece, timeout=_FULL_S)
                    return
            raise BrokenPipeError

        def read() -> None:
            with contextlib.suppress(BrokenPipeError):  # nobody reads any more
                try:
                    self.follow(hand_on, follow=follow, tail=tail, rank=rank, hang_up=writer)
                except BrokenPipeError:
                    raise
                except (AtollError, OSError) as error:
                    hand_on(error)
                finally:
                    os.close(writer)
                    hand_on(None)

        thread = threading.Thread(target=read, name=f"log of job {self.id}", daemon=True)
        thread.start()
        try:
            while True:
                try:
                    piece = waiting.get(timeout=idle_s)
                except queue.Empty:
                    piece = b""
                if isinstance(piece, Exception):
                    raise piece
                if piece is None:
                    return
                yield piece
        finally:
            closed.set()
            os.close(reader)
            thread.join(_END_S)  # one that has just lost its connection goes on for a while

    def cancel(self, number: int = SIGTERM) -> None:
        """Ask it to end, with this signal to its processes; ``wait`` tells when it has."""
        clusters.control_of(clusters.load(self.cluster)).cancel([self.id], number)


def rows_of(jobs: Sequence[Job]) -> list[JobRow]:
    """The rows of jobs of one cluster, for one question to it.

    Raises:
        UnknownCluster: one of them does not exist (any more).
    """
    control = clusters.control_of(clusters.load(jobs[0].cluster))
    try:
        queue = control.queue()
    except ProvisionError:
        jobs[0].row()  # a connection that is lost is waited for
        queue = control.queue()
    rows = {row.id: row for row in queue}
    return [rows.get(job.id) or job.row() for job in jobs]


def find_job(cluster: ClusterSpec, job_id: int | None) -> JobRow:
    """A job's row, the newest job's by default.

    Raises:
        UnknownCluster: there is none.
    """
    with _asking(cluster, job_id) as control:
        return control.job(job_id)


@contextlib.contextmanager
def _asking(cluster: ClusterSpec, job_id: int | None) -> Iterator[LocalControl | RemoteControl]:
    """Who is asked about a job; says in the user's words that it does not exist."""
    from atoll.tasks.protocol import NothingLeft

    if job_id is not None:
        _check_number(cluster, job_id)
    try:
        yield clusters.control_of(cluster)
    except NothingLeft as error:
        raise UnknownCluster(str(error)) from None
    except LookupError:
        if job_id is None:
            starts = command_line("atoll", "exec", cluster.name, "CMD")
            raise UnknownCluster(f"cluster {cluster.name} has no job yet; `{starts}` starts one") from None
        raise _no_job(cluster, job_id) from None


def _check_number(cluster: ClusterSpec, job_id: int) -> None:
    """Refuse what no job can be called, and no store can be asked for."""
    if not 0 < job_id < 1 << 63:
        raise _no_job(cluster, job_id)


def _no_job(cluster: ClusterSpec, job_id: int) -> UnknownCluster:
    atoll, where = controllers.words_of(cluster.name)
    who = f"cluster {cluster.name} has no job" if where == [cluster.name] else "there is no managed job"
    return UnknownCluster(f"{who} {job_id}; `{command_line(*atoll, 'queue', *where)}` lists those there are")
