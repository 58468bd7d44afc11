"""``Control`` of a cluster whose supervisor runs on another machine: through the program in ``control``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.tasks.control import Write
from atoll.tasks.spec import ClusterSpec, JobSpec, JobStatus
from atoll.tasks.store import JobRow

_EXIT_CODES = frozenset(status.exit_code for status in JobStatus)
_BLOCK_BYTES = 1 << 20
_KINDS: dict[str, type[Exception]] = {
    each.__name__: each for each in (AtollError, ConfigError, ProvisionError, LookupError)
}


class ProgramControl:
    """``Control`` through the program, on whatever machine the command runs it.

    Args:
        command: gives the argument list that runs an operation, such as ``ssh`` with what it is to run there.
        cluster: name of the cluster.
    """

    def __init__(self, command: Callable[[str], Sequence[str]], cluster: str) -> None:
        self._command = command
        self._cluster = cluster

    def create(self, cluster: ClusterSpec) -> None:
        """Write the cluster's record there."""
        self._ask("create", spec=cluster.to_json())

    def submit(self, spec: JobSpec, secrets: Mapping[str, str]) -> int:
        """Add a job; returns its number."""
        return int(self._ask("submit", spec=spec.to_json(), secrets=dict(secrets)))

    def cancel(self, job_ids: Sequence[int] | None) -> list[int]:
        """Ask for the end of jobs."""
        return list(self._ask("cancel", job_ids=None if job_ids is None else list(job_ids)))

    def queue(self) -> list[JobRow]:
        """Every job, newest first."""
        return [JobRow.from_json(each) for each in self._ask("queue")]

    def job(self, job_id: int | None) -> JobRow:
        """One job; None is the newest."""
        return JobRow.from_json(self._ask("job", job_id=job_id))

    def follow(
        self,
        job_id: int,
        write: Write,
        *,
        follow: bool = True,
        tail: int = 0,
        rank: int | None = None,
    ) -> JobStatus:
        """Write a job's log, until the job has ended."""
        wish = {"job_id": job_id, "follow": follow, "tail": tail, "rank": rank}
        with self._start("follow", wish) as process:
            assert process.stdout is not None
            try:
                while block := os.read(process.stdout.fileno(), _BLOCK_BYTES):
                    write(block)
            except BaseException:  # Ctrl-C, or nobody reads any more: it ends when it notices
                process.terminate()
                raise
            assert process.stderr is not None
            said = process.stderr.read()
        if process.returncode not in _EXIT_CODES:
            self._fail(said, process.returncode)
        return self.job(job_id).status

    def cluster(self) -> ClusterSpec:
        """The cluster's record."""
        return ClusterSpec.from_json(self._ask("cluster"))

    def change(self, **fields: Any) -> ClusterSpec:
        """Change fields of the record."""
        return ClusterSpec.from_json(self._ask("change", fields=fields))

    def remove_nodes(self) -> None:
        """Cancel the jobs, and remove the nodes' files."""
        self._ask("remove_nodes")

    def _start(self, operation: str, wish: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = subprocess.Popen([*self._command(operation)], stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # where it failed, it says why
            process.stdin.write(json.dumps({"cluster": self._cluster, **wish}).encode())
        return process

    def _ask(self, operation: str, **wish: Any) -> Any:
        with self._start(operation, wish) as process:
            assert process.stdout is not None and process.stderr is not None
            answer, said = process.stdout.read(), process.stderr.read()
        if process.returncode != 0:
            self._fail(answer or said, process.returncode)
        return json.loads(answer)["value"]

    def _fail(self, said: bytes, code: int) -> None:
        try:
            answer = json.loads(said)
            kind, message = _KINDS.get(answer["error"], AtollError), answer["message"]
        except (ValueError, KeyError, TypeError):
            text = said.decode(errors="replace").strip()[-2000:]
            kind, message = AtollError, f"cluster {self._cluster} can't be asked (exit code {code}): {text}"
        raise kind(message)
