"""What is kept of a job: rows of its event log, and the row that they fold into. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.tasks.spec import JobSpec, JobStatus


@dataclass(frozen=True, slots=True)
class EventRow:
    """One row of a job's event log.

    ``kind`` is that of a ``Log``, or ``status`` (``data`` has ``status`` and ``exit_code``, ``text`` the reason), or
    ``cancel_asked``. ``seq`` counts from 1 in each job; ``time_s`` is seconds since 1970.
    """

    seq: int
    time_s: float
    kind: str
    text: str
    node: int | None
    rank: int | None
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JobRow:
    """Where one job stands.

    Attributes:
        id: number in its cluster, from 1.
        name, spec: what was submitted.
        task_id: ``SKYPILOT_TASK_ID``, the same over restarts.
        user: who submitted it.
        status, reason: where it stands and, unless all is well, why.
        exit_code: the culprit's, as a shell has it (128 + n for signal n); None where there is none.
        submitted_s, started_s, ended_s: seconds since 1970; started is the first setup's or first run's start.
        restarts: how often it was started again.
        culprit_node, culprit_rank: what failed last.
        cancel_asked: somebody wants it to end.
    """

    id: int
    name: str | None
    task_id: str
    user: str
    spec: JobSpec
    status: JobStatus
    reason: str
    exit_code: int | None
    submitted_s: float
    started_s: float | None = None
    ended_s: float | None = None
    restarts: int = 0
    culprit_node: int | None = None
    culprit_rank: int | None = None
    cancel_asked: bool = False

    def after(self, event: EventRow) -> JobRow:
        """Where it stands after ``event``. What has ended stays as it is."""
        if self.status.ended:
            return self
        if event.kind == "status":
            return self._with_status(event)
        if event.kind in ("failed", "lost"):
            return dataclasses.replace(self, culprit_node=event.node, culprit_rank=event.rank)
        if event.kind == "waiting":
            return dataclasses.replace(self, reason=event.text)
        if event.kind == "restart":
            return dataclasses.replace(self, restarts=int(event.data["restarts"]))
        return dataclasses.replace(self, cancel_asked=True) if event.kind == "cancel_asked" else self

    def _with_status(self, event: EventRow) -> JobRow:
        status = JobStatus(event.data["status"])
        changed = dataclasses.replace(self, status=status, reason=event.text, exit_code=event.data["exit_code"])
        if self.started_s is None and status in (JobStatus.SETTING_UP, JobStatus.RUNNING):
            changed = dataclasses.replace(changed, started_s=event.time_s)
        if status.ended:
            changed = dataclasses.replace(changed, ended_s=event.time_s)
        if status in (JobStatus.SUCCEEDED, JobStatus.CANCELLED):
            changed = dataclasses.replace(changed, culprit_node=None, culprit_rank=None)
        return changed

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobRow:
        """From what ``to_json`` gave, of this version or another one."""
        known = {each.name for each in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        values["spec"] = JobSpec.from_json(values["spec"])
        values["status"] = JobStatus(values["status"])
        return cls(**values)
