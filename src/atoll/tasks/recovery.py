"""A managed job's life as a state machine without I/O: clusters are launched for it, lost, replaced and taken down.

The task runs as a job of a cluster of its own, whose own supervisor replaces single nodes. This machine decides what
happens when that is not enough: the cluster could not be had, was taken away, or is not heard of any more. Then the
task is launched again, at the same task id, on the same cluster where that is still there, else on a new one: of
several ``choices`` the first that has not failed lately. A task that fails by itself has failed; one that somebody
cancelled is cancelled. In every end all clusters are taken down before the job is over.

What it knows is ``State``, plain JSON values: whoever comes after a controller that was killed continues with it.
"""

# ruff: noqa: UP014

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from signal import SIGKILL, SIGTERM
from typing import Any, Literal, NamedTuple

from atoll.providers.base import GONE, AllocationState
from atoll.tasks import transitions as t
from atoll.tasks.spec import JobStatus

# A choice that failed is set aside for so long, twice as long each time; with none left the least bad one is tried.
COOL_S, LONGEST_COOL_S = 60.0, 1800.0
BACKOFF_S, LONGEST_BACKOFF_S = 2.0, 300.0
PENDING_S = 900.0  # nodes that are not there by then are looked for elsewhere, where there is an elsewhere
# A cluster that does not answer is lost once its provider has said so for this long, or nobody has heard of it at all.
LOST_S, UNHEARD_S = 20.0, 300.0
GOOD_RUN_S = 60.0  # a task that ran for so long shows that its place works
MOST_FRUITLESS = 10  # runs in a row that were lost before that: the task itself may be why
CANCEL_S = 60.0  # a cancelled job has ended by then, beside its own time to save
DOWN_S, RETRY_DOWN_S, LONGEST_DOWN_S = 300.0, 2.0, 30.0


# ------------------------------------------------------------------------------------------------ inputs and actions
# ``cluster`` is the number of one of the job's clusters, ``launch`` that of a launch: from 1, in their order.
Launched = NamedTuple("Launched", [("launch", int), ("job_id", int)])  # the task is a job there
Waits = NamedTuple("Waits", [("launch", int), ("why", str)])  # a launch waits for nodes
Moved = NamedTuple("Moved", [("launch", int), ("status", JobStatus), ("reason", str)])  # the task has not ended
Heard = NamedTuple("Heard", [("launch", int)])  # its cluster answers
Restarted = NamedTuple("Restarted", [("launch", int), ("num_restarts", int)])  # so often, on its cluster's other nodes
Down = NamedTuple("Down", [("cluster", int)])
DownFailed = NamedTuple("DownFailed", [("cluster", int), ("reason", str)])


class LaunchFailed(NamedTuple):
    """A launch came to nothing; ``refused``: the choice can't be had however often it is tried."""

    launch: int
    reason: str
    refused: bool = False


class Ended(NamedTuple):
    """The task's job has ended.

    ``how``: its own success or failure, or ``lost`` with its nodes, or somebody's ``cancelled``. ``state`` is what its
    provider says of the cluster by then, ``num_errors`` how often the task itself had failed before.
    """

    launch: int
    how: Literal["succeeded", "failed", "failed_setup", "lost", "cancelled"]
    reason: str = ""
    exit_code: int | None = None
    state: AllocationState | None = None
    num_errors: int = 0


class Unheard(NamedTuple):
    """Its cluster does not answer, sent at each try; ``state``: what its provider says of it, None for nothing."""

    launch: int
    reason: str
    state: AllocationState | None = None


OfLaunch = Launched | LaunchFailed | Waits
OfTask = Moved | Restarted | Heard | Unheard | Ended
Input = OfLaunch | OfTask | Down | DownFailed | t.CancelAsked | t.Tick


class Launch(NamedTuple):
    """Launch the task on a cluster, which may be there already; answered by ``Launched`` or ``LaunchFailed``."""

    launch: int
    cluster: int
    choice: int
    num_errors: int


Abort = NamedTuple("Abort", [("launch", int)])  # give a launch up, which answers that it failed, or was faster
Follow = NamedTuple("Follow", [("launch", int), ("cluster", int), ("job_id", int)])  # until ``Ended``, or its end here
Leave = NamedTuple("Leave", [("launch", int)])  # follow it no more
Cancel = NamedTuple("Cancel", [("cluster", int), ("job_id", int), ("signal", int)])
TakeDown = NamedTuple("TakeDown", [("cluster", int)])  # answered by ``Down`` or ``DownFailed``

Action = Launch | Abort | Follow | Leave | Cancel | TakeDown | t.Log | t.SetStatus


# ------------------------------------------------------------------------------------------------------------- state
@dataclass
class Place:
    """One of the choices: how often it failed in a row, and why it can't be had at all, if so.

    It is set aside until ``free_at_s``, and may be tried from ``retry_at_s`` on where all are.
    """

    num_failed: int = 0
    retry_at_s: float = 0.0
    free_at_s: float = 0.0
    refused: str = ""
    has_worked: bool = False


@dataclass
class Going:
    """A cluster that is being taken down: since when, how often that was tried, when it is tried again."""

    choice: int
    since_s: float
    num_tries: int = 0
    next_s: float | None = None


@dataclass
class State:
    """All that a machine knows; times are seconds since 1970.

    Attributes:
        phase: ``new``, ``launch``, ``run``, ``backoff``, ``cancel``, ``down`` (only clusters are left), ``ended``.
        launch, cluster, choice, job_id: those of the newest attempt; no cluster is 0.
        num_clusters: so many were launched so far.
        next_s: when the phase ends by itself.
        ran_s: since when the task runs.
        unheard_s, lost_s: since when the cluster does not answer, and its provider calls it lost.
        num_restarts, num_on_cluster: how often it was started again, and how often of that by the cluster it is on.
        num_fruitless: so many runs in a row were lost at once; ``num_errors``: so often the task itself had failed.
        end: how the job ends, once no cluster is left: status, reason, exit code.
    """

    phase: str = "new"
    launch: int = 0
    cluster: int = 0
    choice: int = 0
    job_id: int | None = None
    num_clusters: int = 0
    next_s: float | None = None
    ran_s: float | None = None
    unheard_s: float | None = None
    lost_s: float | None = None
    num_restarts: int = 0
    num_on_cluster: int = 0
    num_fruitless: int = 0
    num_errors: int = 0
    end: tuple[JobStatus, str, int | None] | None = None
    places: list[Place] = field(default_factory=list)
    going: dict[int, Going] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> State:
        """From what ``to_json`` gave."""
        state = cls(**data)
        state.places = [Place(**each) for each in data["places"]]
        state.going = {int(cluster): Going(**each) for cluster, each in data["going"].items()}
        state.end = None if data["end"] is None else (JobStatus(data["end"][0]), *data["end"][1:])
        return state


# ----------------------------------------------------------------------------------------------------------- machine
class RecoveryMachine:
    """One managed job, from its first launch until none of its clusters is left.

    Args:
        choices: infras that would do, the preferred one first.
        save_s: how long the task may take to end after a cancel.
        state: of a job that another controller has begun, with the ``status`` that it had.
    """

    def __init__(
        self,
        choices: list[str],
        save_s: float = 0.0,
        state: State | None = None,
        status: JobStatus = JobStatus.PENDING,
    ) -> None:
        self.state = state or State(places=[Place() for _ in choices])
        self.status = status
        self._choices = choices
        self._save_s = save_s

    @property
    def done(self) -> bool:
        """Has the job ended?"""
        return self.state.phase == "ended"

    @property
    def deadline(self) -> float | None:
        """When a ``Tick`` must come at the latest."""
        times = [self.state.next_s, *(each.next_s for each in self.state.going.values())]
        return None if self.done else min((at for at in times if at is not None), default=None)

    def start(self, now: float) -> list[Action]:
        """Begin, or continue what another controller has begun."""
        s = self.state
        if s.phase == "new":
            return self._relaunch(now)
        actions: list[Action] = [t.Log("resumed", "The controller was started again, and continues.")]
        for cluster, going in sorted(s.going.items()):
            going.next_s = None
            actions.append(TakeDown(cluster))
        if s.phase == "launch":
            actions.append(Launch(s.launch, s.cluster, s.choice, s.num_errors))
        elif s.phase in ("run", "cancel") and s.job_id is not None:
            actions.append(Follow(s.launch, s.cluster, s.job_id))
            if s.phase == "cancel":
                actions.append(Cancel(s.cluster, s.job_id, SIGTERM))
        elif s.phase == "cancel":  # whatever a launch had made of it by then goes
            actions += self._close(now)
        return actions + self._tick(now)

    def handle(self, event: Input, now: float) -> list[Action]:
        """What is to be done after ``event``, in this order."""
        s = self.state
        if s.phase in ("new", "ended"):
            return []
        match event:
            case t.Tick():
                return self._tick(now)
            case t.CancelAsked():
                return self._cancel(event, now)
            case Down() | DownFailed():
                return self._down(event, now) if event.cluster in s.going else []
            case _ if event.launch != s.launch or s.phase not in ("launch", "run", "cancel"):
                return []
            case Launched() | LaunchFailed() | Waits() if s.job_id is None:
                return self._of_launch(event, now)
            case Moved() | Restarted() | Heard() | Unheard() | Ended() if s.job_id is not None:
                return self._of_task(event, now)
        return []

    # ------------------------------------------------------------------------------------------- forwards
    @property
    def _able(self) -> list[int]:
        return [choice for choice, place in enumerate(self.state.places) if not place.refused]

    def _choose(self, now: float) -> tuple[int | None, float | None]:
        """The choice to launch on now; or None, and when one may be tried, if no cluster that goes has to be gone."""
        s = self.state
        going = {each.choice for each in s.going.values()}
        able = [choice for choice in self._able if choice not in going]
        free = [choice for choice in able if s.places[choice].free_at_s <= now]
        if free or not able:
            return (free[0] if free else None), None
        soonest = min(able, key=lambda choice: s.places[choice].retry_at_s)
        at_s = s.places[soonest].retry_at_s
        return (soonest, None) if at_s <= now else (None, at_s)

    def _relaunch(self, now: float) -> list[Action]:
        """Launch the task on the cluster that is there, or on a new one, once that may be."""
        s = self.state
        choice, until_s = (s.choice, s.places[s.choice].retry_at_s) if s.cluster else self._choose(now)
        if choice is None or (s.cluster and until_s is not None and until_s > now):
            s.phase, s.next_s = "backoff", until_s
            return []
        if not s.cluster:
            s.num_clusters += 1
            s.cluster, s.choice = s.num_clusters, choice
        s.launch += 1
        s.phase, s.job_id, s.ran_s, s.unheard_s, s.lost_s, s.num_on_cluster = "launch", None, None, None, None, 0
        s.next_s = now + PENDING_S if len(self._able) > 1 else None
        infra = self._choices[choice]
        data = (("launch", s.launch), ("cluster", s.cluster), ("infra", infra))
        status = JobStatus.RECOVERING if s.num_restarts else JobStatus.INIT
        return [
            self._set(status, f"launching on {infra}"),
            t.Log("launch", f"Attempt {s.launch}: launching on {infra}.", data=data),
            Launch(s.launch, s.cluster, s.choice, s.num_errors),
        ]

    def _of_launch(self, event: OfLaunch, now: float) -> list[Action]:
        s, place = self.state, self.state.places[self.state.choice]
        if isinstance(event, Waits):
            return [t.Log("waiting", event.why)] if s.phase == "launch" else []
        if s.phase == "cancel":
            return self._close(now)
        if isinstance(event, Launched):
            s.phase, s.job_id, s.next_s, place.has_worked = "run", event.job_id, None, True
            return [Follow(s.launch, s.cluster, event.job_id)]
        text = f"Attempt {s.launch} came to nothing: {event.reason}"
        if event.refused and not place.has_worked:
            place.refused = event.reason
        else:
            self._set_aside(now)
        actions: list[Action] = [t.Log("waiting", text), *self._take_down(now)]
        if not self._able:
            return actions + self._finish(now, JobStatus.FAILED_DRIVER, self._refusals())
        return actions + self._relaunch(now)

    def _refusals(self) -> str:
        each = zip(self._choices, self.state.places, strict=True)
        return "; ".join(dict.fromkeys(place.refused or infra for infra, place in each))

    def _of_task(self, event: OfTask, now: float) -> list[Action]:
        s = self.state
        if isinstance(event, Ended):
            return self._ended(event, now)
        if isinstance(event, Unheard):
            return self._unheard(event, now)
        actions: list[Action] = [] if s.unheard_s is None else [t.Log("answers", "Its cluster answers again.")]
        s.unheard_s = s.lost_s = None
        if isinstance(event, Restarted) and event.num_restarts > s.num_on_cluster:  # told again to each controller
            s.num_restarts += event.num_restarts - s.num_on_cluster
            s.num_on_cluster = event.num_restarts
            actions.append(t.Log("restart", data=(("restarts", s.num_restarts),)))
        if isinstance(event, Moved) and s.phase == "run":
            status, reason = event.status, event.reason
            if status is JobStatus.RUNNING:
                reason = f"on {self._choices[s.choice]}"
                s.ran_s = now if s.ran_s is None else s.ran_s
            elif status is JobStatus.PENDING:  # it waits for nodes or its turn there
                status = JobStatus.INIT if s.ran_s is None else JobStatus.RECOVERING
            actions.append(self._set(status, reason))
        return actions

    # ------------------------------------------------------------------------------------------- what goes wrong
    def _unheard(self, event: Unheard, now: float) -> list[Action]:
        """Its cluster does not answer. Neither that nor what a provider says once is proof that it is gone."""
        s = self.state
        actions: list[Action] = []
        if s.unheard_s is None:
            s.unheard_s = now
            actions = [t.Log("silent", f"Its cluster does not answer: {event.reason}; trying again.")]
        if event.state is AllocationState.PENDING:  # it waits for other nodes, as long as that takes
            s.unheard_s, s.lost_s = now, None
            return actions
        is_gone = event.state in GONE
        s.lost_s = (now if s.lost_s is None else s.lost_s) if is_gone else None
        if s.lost_s is not None and now - s.lost_s >= LOST_S:
            reason = event.reason
        elif now - s.unheard_s >= UNHEARD_S:
            reason = f"nothing was heard of its cluster for {UNHEARD_S / 60:.0f} minutes: {event.reason}"
        else:
            return actions
        lost = Ended(s.launch, "lost", reason, state=event.state if is_gone else None)
        return [*actions, Leave(s.launch), *self._ended(lost, now)]

    def _ended(self, event: Ended, now: float) -> list[Action]:
        s = self.state
        s.num_errors += event.num_errors
        if event.how == "succeeded":
            return self._finish(now, JobStatus.SUCCEEDED)
        if s.phase == "cancel":
            return self._close(now)
        if event.how == "cancelled" or (event.how == "lost" and event.state is AllocationState.RELEASED):
            return self._finish(now, JobStatus.CANCELLED, event.reason)
        if event.how == "failed_setup":
            return self._finish(now, JobStatus.FAILED_SETUP, event.reason, event.exit_code)
        if event.how == "failed":
            return self._finish(now, JobStatus.FAILED, event.reason, event.exit_code)
        return self._lost(event, now)

    def _lost(self, event: Ended, now: float) -> list[Action]:
        """Its nodes are gone: begin again, on the cluster that is still there or on another one."""
        s, place = self.state, self.state.places[self.state.choice]
        ran_s = 0.0 if s.ran_s is None else now - s.ran_s
        if ran_s >= GOOD_RUN_S:
            place.num_failed = s.num_fruitless = 0
        else:
            s.num_fruitless += 1
        if s.num_fruitless >= MOST_FRUITLESS:
            why = f"{event.reason} (it was lost {s.num_fruitless} times, each before it had run for {GOOD_RUN_S:.0f} s)"
            return self._finish(now, JobStatus.FAILED, why)
        keeps = event.state is AllocationState.READY and not place.num_failed
        self._set_aside(now)
        s.num_restarts += 1
        infra = self._choices[s.choice]
        text = f"Attempt {s.launch} on {infra} ended after {ran_s:.0f} s: {event.reason}"
        gone = [] if keeps else self._take_down(now)
        status = self._set(JobStatus.RECOVERING, event.reason)
        return [status, t.Log("restart", text, data=(("restarts", s.num_restarts),)), *gone, *self._relaunch(now)]

    def _set_aside(self, now: float) -> None:
        """The choice in use has failed: others come first for a while."""
        place = self.state.places[self.state.choice]
        factor = 2.0 ** min(place.num_failed, 30)
        place.num_failed += 1
        place.retry_at_s = now + min(BACKOFF_S * factor, LONGEST_BACKOFF_S)
        place.free_at_s = now + min(COOL_S * factor, LONGEST_COOL_S)

    def _cancel(self, event: t.CancelAsked, now: float) -> list[Action]:
        s = self.state
        if s.phase == "down":
            return []
        if s.phase == "cancel":
            again = event.signal == SIGKILL and s.job_id is not None
            return [Cancel(s.cluster, s.job_id, SIGKILL)] if again and s.job_id is not None else []
        s.end = JobStatus.CANCELLED, event.why, None
        asked = t.Log("cancel", f"{event.why[:1].upper()}{event.why[1:]}: ending the task and its cluster.")
        if s.phase == "backoff":
            return [asked, *self._close(now)]
        s.phase, s.next_s = "cancel", now + CANCEL_S + self._save_s
        if s.job_id is None:
            return [asked, Abort(s.launch)]
        return [asked, Cancel(s.cluster, s.job_id, event.signal)]

    def _tick(self, now: float) -> list[Action]:
        s = self.state
        actions: list[Action] = []
        for cluster, going in sorted(s.going.items()):
            if going.next_s is not None and now >= going.next_s:
                going.next_s = None
                actions.append(TakeDown(cluster))
        if s.phase == "down":
            return actions + self._over()
        if s.next_s is None or now < s.next_s:
            return actions + (self._relaunch(now) if s.phase == "backoff" and s.next_s is None else [])
        s.next_s = None
        if s.phase == "launch":
            text = f"{self._choices[s.choice]} has had no nodes for {PENDING_S / 60:.0f} minutes: trying elsewhere."
            return [*actions, t.Log("waiting", text), Abort(s.launch)]
        if s.phase == "cancel":
            return [*actions, Leave(s.launch), *self._close(now)]
        return actions + self._relaunch(now)

    # ------------------------------------------------------------------------------------------- the end
    def _finish(self, now: float, status: JobStatus, reason: str = "", exit_code: int | None = None) -> list[Action]:
        self.state.end = status, reason, exit_code
        return self._close(now)

    def _close(self, now: float) -> list[Action]:
        """Nothing is launched any more: the job ends as ``end`` says, once no cluster is left."""
        self.state.phase, self.state.next_s = "down", None
        return [*self._take_down(now), *self._over()]

    def _over(self) -> list[Action]:
        s = self.state
        if s.going or s.end is None:
            return []
        s.phase = "ended"
        return [self._set(*s.end)]

    def _take_down(self, now: float) -> list[Action]:
        s = self.state
        if not s.cluster:
            return []
        cluster, s.cluster = s.cluster, 0
        s.going[cluster] = Going(s.choice, now)
        return [TakeDown(cluster)]

    def _down(self, event: Down | DownFailed, now: float) -> list[Action]:
        s = self.state
        going = s.going[event.cluster]
        actions: list[Action] = []
        if isinstance(event, DownFailed):
            going.num_tries += 1
            if now - going.since_s < DOWN_S:
                going.next_s = now + min(RETRY_DOWN_S * 2.0 ** min(going.num_tries - 1, 30), LONGEST_DOWN_S)
                return []
            actions = [t.Log("left", f"A cluster could not be taken down: {event.reason}")]
        del s.going[event.cluster]
        if s.phase == "backoff":
            return actions + self._relaunch(now)
        return actions + (self._over() if s.phase == "down" else [])

    def _set(self, status: JobStatus, reason: str = "", exit_code: int | None = None) -> t.SetStatus:
        self.status = status
        return t.SetStatus(status, reason, exit_code)
