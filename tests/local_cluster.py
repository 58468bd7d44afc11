"""A cluster of local nodes for tests: its folder, its control, and how to see what lives of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import leaks
from atoll.agent.process_tree import stat_of
from atoll.tasks import record, supervisor
from atoll.tasks.control import LocalControl
from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec, JobSpec, JobStatus


@dataclass
class LocalCluster:
    """One cluster below a test's own state folder."""

    folder: Path
    control: LocalControl

    @classmethod
    def make(cls, home: Path, name: str = "train", **fields: Any) -> LocalCluster:
        folder = home / "clusters" / name
        folder.mkdir(parents=True)
        record.save(folder, ClusterSpec(name, created_s=time.time(), **fields))
        return cls(folder, LocalControl(folder))

    def submit(self, run: str | None = None, secrets: dict[str, str] | None = None, **spec: Any) -> int:
        spec.setdefault("base_env", {"PATH": os.environ["PATH"]})
        return self.control.submit(JobSpec(run=run, **spec), secrets or {})

    def follow(self, job_id: int, **how: Any) -> tuple[JobStatus, str]:
        """Until it ends; its status and all of its log."""
        got: list[bytes] = []
        status = self.control.follow(job_id, got.append, **how)
        return status, b"".join(got).decode()

    def run(self, run: str | None = None, **spec: Any) -> tuple[JobStatus, str]:
        return self.follow(self.submit(run, **spec))

    def log(self, job_id: int) -> str:
        path = self.folder / "jobs" / str(job_id) / "run.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, job_id: int, text: str) -> None:
        until(lambda: text in self.log(job_id), f"{text!r} in the log of job {job_id}")

    def wait_for_status(self, job_id: int, *wanted: JobStatus) -> JobRow:
        until(lambda: self.control.job(job_id).status in wanted, f"{wanted} of job {job_id}")
        return self.control.job(job_id)

    def wait_until_idle(self) -> None:
        """Until its supervisor has ended."""
        wait_until_idle(self.folder)

    def supervisor_pid(self) -> int:
        return int((self.folder / "supervisor.lock").read_text())


def wait_until_idle(folder: Path) -> None:
    """Until the supervisor of a cluster's folder has ended: it gives up its lock first, and its files after that."""
    until(lambda: not supervisor.is_running(folder), f"the end of the supervisor of {folder}")
    if (pid := supervisor.pid_of(folder)) is not None:
        until(lambda: not leaks.is_running(pid), f"the end of the supervisor's process, {pid}")


def until(true: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}"
        time.sleep(0.01)


def processes_with(word: str) -> list[int]:
    """Pids of processes that have a word in their environment: what a job left behind."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if word.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


def descendants(root: int) -> list[int]:
    """Pids below a process, which a thread of it may have started."""
    found: list[int] = []
    todo = [root]
    while todo:
        for children in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # that thread, or its process, has ended
                new = [int(each) for each in children.read_text().split()]
                found += new
                todo += new
    return sorted(found)


def stop(pid: int) -> None:
    """SIGSTOP, and wait until the process has seen it: until then it goes on."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: (stat := stat_of(pid)) is not None and stat.state == "T", f"process {pid} to be stopped")
