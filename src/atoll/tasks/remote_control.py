"""What ``LocalControl`` does, where a cluster's supervisor runs on another machine: through the program there."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import secrets as random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from signal import SIGTERM
from typing import IO, Any

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.validation import command_line
from atoll.providers.ssh.output import never_began, own_output, parsed_object, skip_login_text, unreadable
from atoll.tasks.control import NOTE, NothingLeft, Write
from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec, JobSpec, JobStatus

_EXIT_CODES = frozenset(status.exit_code for status in JobStatus)
_BLOCK_BYTES = 1 << 20
_NO_CONNECTION = 255  # ssh's own exit code
_ANSWER_S = 120.0  # cancelled jobs end within 30, and a network file system may take its time
_ERROR = b'{"error": '
_NOTES_S = 0.5  # a note is handed on within this time
_RETRY_S, _RETRY_MOST_S = 0.5, 5.0
_KINDS: dict[str, type[Exception]] = {
    each.__name__: each for each in (AtollError, ConfigError, ProvisionError, LookupError, NothingLeft)
}


class ProgramControl:
    """``LocalControl`` on whatever machine the command runs its program.

    Args:
        command: gives the argument list that runs an operation, as ``Connection.argv`` does.
        cluster: name of the cluster.
        host: what to call that machine in messages, where that is not this one.
        patience_s: where the connection is lost, it is made again for so long before a log or a job is given up.
        on_driver_failed: called when its newest job, or one that was asked for, turns out to have failed like that.
    """

    def __init__(
        self,
        command: Callable[[str], Sequence[str]],
        cluster: str,
        host: str = "",
        patience_s: float = 0.0,
        on_driver_failed: Callable[[], object] = lambda: None,
    ) -> None:
        self._command = command
        self._cluster = cluster
        self._head = f"the head of cluster {cluster}" + (f" ({host})" if host else "")
        self._patience_s = patience_s
        self._on_driver_failed = on_driver_failed

    def create(self, cluster: ClusterSpec, *, anew: bool) -> list[int]:
        """Write the cluster's record there; ``anew``: after what still ran there has ended, jobs that are returned."""
        return list(self._ask("create", spec=cluster.to_json(), anew=anew))

    def end(self) -> list[int]:
        """End the jobs, whatever is wrong; returns them."""
        return list(self._ask("end"))

    def submit(self, spec: JobSpec, secrets: Mapping[str, str]) -> int:
        """Add a job, once however often the connection is lost meanwhile; returns its number."""
        spec = dataclasses.replace(spec, key=spec.key or random.token_hex(8))
        wish = {"spec": spec.to_json(), "variables": spec.variables(), "secrets": dict(secrets)}
        return int(self._patiently("submit", **wish))

    def cancel(self, job_ids: Sequence[int] | None, number: int = SIGTERM) -> list[int]:
        """Ask for the end of jobs, whose processes get the signal ``number``."""
        try:
            return list(self._ask("cancel", job_ids=None if job_ids is None else list(job_ids), signal=number))
        except NothingLeft:
            return []

    def queue(self) -> list[JobRow]:
        """Every job, newest first."""
        try:
            rows = [JobRow.from_json(each) for each in self._ask("queue")]
        except NothingLeft as error:
            tell(f"note: {error}")
            return []
        for row in rows[:1]:
            self._noted(row.status)
        return rows

    def job(self, job_id: int | None) -> JobRow:
        """One job; None is the newest."""
        row = JobRow.from_json(self._patiently("job", job_id=job_id))
        self._noted(row.status)
        return row

    def _noted(self, status: JobStatus) -> JobStatus:
        if status is JobStatus.FAILED_DRIVER:
            self._on_driver_failed()
        return status

    def follow(
        self,
        job_id: int,
        write: Write,
        *,
        follow: bool = True,
        tail: int = 0,
        rank: int | None = None,
    ) -> JobStatus:
        """Write a job's log, until the job has ended. Where the connection is lost it goes on at the same byte."""
        start = self._patiently("position_of_tail", job_id=job_id, tail=tail, rank=rank) if tail else 0
        wish = {"job_id": job_id, "follow": follow, "rank": rank, "start": start}
        seen_bytes = 0

        def counted(data: bytes) -> None:
            nonlocal seen_bytes
            write(data)
            seen_bytes += len(data)

        lost = self._lost()
        while True:
            before = seen_bytes
            code, said = self._stream({**wish, "skip_bytes": seen_bytes}, counted)
            if seen_bytes > before:
                lost.is_over()
            if code in _EXIT_CODES:
                lost.is_over()
                found = re.findall(rb'{"status": "(\w+)"}', said)  # login scripts may say something, too
                return self._noted(JobStatus(found[-1].decode())) if found else self.job(job_id).status
            if code != _NO_CONNECTION:
                self._fail(said, code)
            lost.wait(said)

    def _lost(self) -> _Lost:
        return _Lost(self._cluster, self._head, self._patience_s)

    def _stream(self, wish: Mapping[str, Any], write: Write) -> tuple[int, bytes]:
        """Hand on what one run of ``follow`` writes; its exit code and what it said."""
        with (
            tempfile.TemporaryFile() as said,
            self._notes_told(said),
            self._started("follow", wish, said) as process,
        ):
            self._begin(process, said)
            assert isinstance(process.stdout, io.BufferedReader)
            while block := process.stdout.read1(_BLOCK_BYTES):
                write(block)
            code = process.wait()
            said.seek(0)
            return code, said.read()

    @contextlib.contextmanager
    def _notes_told(self, said: IO[bytes]) -> Iterator[None]:
        """Hand on, as it comes, what the program notes for whoever waits."""
        over = threading.Event()

        def look() -> None:
            seen_bytes = 0
            while not over.wait(_NOTES_S):
                came, newline, _ = os.pread(said.fileno(), _BLOCK_BYTES, seen_bytes).rpartition(b"\n")
                seen_bytes += len(came + newline)
                for line in came.decode(errors="replace").splitlines():
                    if line.startswith(NOTE):
                        tell(f"{NOTE}{self._head}: {line.removeprefix(NOTE)}")

        thread = threading.Thread(target=look, name="notes")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def cluster(self) -> ClusterSpec:
        """The cluster's record."""
        return ClusterSpec.from_json(self._ask("cluster"))

    def change(self, **fields: Any) -> ClusterSpec:
        """Change fields of the record."""
        return ClusterSpec.from_json(self._ask("change", fields=fields))

    def remove_nodes(self) -> list[str]:
        """Cancel the jobs, and remove the nodes' files; a line for each host on which something may still run."""
        with contextlib.suppress(NothingLeft):
            return list(self._ask("remove_nodes"))
        return []

    @contextlib.contextmanager
    def _started(self, operation: str, wish: Mapping[str, Any], said: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
        """The program, with what it is asked; it has ended afterwards. What it starts over there notices that."""
        pipe = subprocess.PIPE
        command = [*self._command(operation)]
        # Ctrl-C is this process's to handle: a program that it ended too would look like a lost connection.
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, start_new_session=True)
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # where it failed, it says why
                process.stdin.write(json.dumps({"cluster": self._cluster, **wish}).encode() + b"\n")
            process.stdin = None
            yield process
        finally:
            process.kill()
            process.stdout.close()
            process.wait()

    def _ask(self, operation: str, **wish: Any) -> Any:
        code, answer, said = self._asked(operation, wish)
        if code != 0:
            self._fail(answer or said, code)
        return self._value(answer)

    def _patiently(self, operation: str, **wish: Any) -> Any:
        """Ask for something that may be asked twice, again where the connection is lost."""
        lost = self._lost()
        while (done := self._asked(operation, wish))[0] == _NO_CONNECTION:
            lost.wait(done[2])
        lost.is_over()
        code, answer, said = done
        if code != 0:
            self._fail(answer or said, code)
        return self._value(answer)

    def _asked(self, operation: str, wish: Mapping[str, Any]) -> tuple[int, bytes, bytes]:
        """Exit code, answer, and what the program said."""
        with tempfile.TemporaryFile() as said, self._started(operation, wish, said) as process:
            try:
                answer, _ = process.communicate(timeout=_ANSWER_S)
            except subprocess.TimeoutExpired:
                raise ProvisionError(
                    f"cluster {self._cluster}: {operation}: its head did not answer within {_ANSWER_S:.0f} s. Is its "
                    f"disk full, or its home on a server that is gone?"
                ) from None
            said.seek(0)
            errors = said.read()
            own = own_output(answer)
            if own is None and process.returncode != _NO_CONNECTION:
                raise never_began(self._head, answer, errors)
            return process.returncode, own or b"", errors

    def _begin(self, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
        """Read up to the program's own output."""
        assert process.stdout is not None
        came = skip_login_text(process.stdout)
        if came is not None and process.wait() != _NO_CONNECTION:
            said.seek(0)
            raise never_began(self._head, came, said.read())

    def _value(self, answer: bytes) -> Any:
        said = parsed_object(self._head, answer)
        if "value" not in said:
            raise unreadable(self._head, answer)
        return said["value"]

    def _fail(self, said: bytes, code: int) -> None:
        try:
            answer = json.loads(said[max(said.rfind(_ERROR), 0) :])  # login scripts may say something on stderr, too
            kind, message = _KINDS.get(answer["error"], AtollError), answer["message"]
            if kind is AtollError:  # of a file there, or a process
                message = f"{self._head}: {message}"
        except (ValueError, KeyError, TypeError):
            text = said.decode(errors="replace").strip()[-2000:]
            if code == _NO_CONNECTION:
                raise ProvisionError(_unreachable(self._cluster, self._head, text)) from None
            kind, message = AtollError, f"cluster {self._cluster} can't be asked (exit code {code}): {text}"
        raise kind(message)


class _Lost:
    """Patience with a connection that is lost: says so, waits a little more each time, and gives up in the end."""

    def __init__(self, cluster: str, head: str, patience_s: float) -> None:
        self._cluster = cluster
        self._head = head
        self._patience_s = patience_s
        self._since: float | None = None
        self._pause_s = _RETRY_S

    def wait(self, said: bytes) -> None:
        """It could not be made once more.

        Raises:
            ProvisionError: it has been so for too long.
        """
        text = said.decode(errors="replace").strip()
        if self._since is None:
            self._since = time.monotonic()
            if self._patience_s > 0:
                why = f" ({text.splitlines()[-1]})" if text else ""
                tell(f"the connection to {self._head} is lost{why}; trying again")
        if time.monotonic() - self._since >= self._patience_s:
            raise ProvisionError(_unreachable(self._cluster, self._head, text))
        time.sleep(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, _RETRY_MOST_S)

    def is_over(self) -> None:
        """It is there again."""
        if self._since is not None:
            tell(f"{self._head} answers again")
        self._since, self._pause_s = None, _RETRY_S


def _unreachable(cluster: str, head: str, said: str) -> str:
    why = f": {said.splitlines()[-1]}" if said else ""
    return f"{head} can't be reached{why}. {what_then(cluster)}"


def what_then(cluster: str) -> str:
    """What becomes of the jobs of a cluster whose head can't be reached, and what to do."""
    return (
        f"Its jobs go on there as long as it runs: `{command_line('atoll', 'logs', cluster)}` shows them once it can "
        f"be reached. If it is gone for good: `{command_line('atoll', 'down', cluster)}`"
    )


def tell(line: str) -> None:
    """A line for whoever waits; the answer itself has to stay whole."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
