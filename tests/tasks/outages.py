"""Clouds made of a seed, in virtual time: clusters that come late or never, vanish, go silent and lie about it.

``play(seed)`` has a ``RecoveryMachine`` run one managed job there, with a controller that is killed now and then, and
gives back what really happened beside what the machine asked for.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.providers.base import AllocationState
from atoll.tasks import recovery as r
from atoll.tasks import transitions as t
from atoll.tasks.spec import JobStatus

READY, LOST, RELEASED = AllocationState.READY, AllocationState.LOST, AllocationState.RELEASED
Due = Callable[[], r.Input | None]


@dataclass
class FakeCluster:
    """``up``, ``lost``, ``released`` by somebody, or ``down``; its tasks by their launch, with how each ended."""

    number: int
    choice: int
    state: str = "up"
    silent_until_s: float = 0.0
    heard_s: float = 0.0
    tasks: dict[int, r.Ended | None] = field(default_factory=dict)
    taken_down_s: float | None = None


@dataclass
class Played:
    """What happened in the end."""

    seed: int
    choices: list[str]
    machine: r.RecoveryMachine
    clusters: dict[int, FakeCluster]
    actions: list[tuple[float, r.Action]]
    handled: list[tuple[float, r.Input]]
    num_crashes: int
    cancelled_s: float | None

    @property
    def end(self) -> t.SetStatus:
        (found,) = [each for _, each in self.actions if isinstance(each, t.SetStatus) and each.status.ended]
        return found

    def of(self, kind: type) -> list[tuple[float, r.Action]]:
        return [(at, action) for at, action in self.actions if isinstance(action, kind)]


class World:
    """Does what a machine asks for, in its way."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 1e9
        self.choices = [f"infra{at}" for at in range(rng.choice((1, 1, 2, 3)))]
        self.clusters: dict[int, FakeCluster] = {}
        self.due: list[tuple[float, int, int, Due]] = []
        self._order = itertools.count()
        self.life = 1  # of the controller
        self.followed = 0
        self.aborted: set[int] = set()
        self.cancelled_s: float | None = None
        self.p_launch_fails = rng.choice((0, 0, 0.3, 0.7))
        self.p_refused = rng.choice((0, 0, 0.1))
        self.p_lost = rng.choice((0, 0.5, 0.9, 0.98))
        self.p_silent = rng.choice((0, 0.3))
        self.p_lies = rng.choice((0, 0.5, 1.0))
        self.p_down_fails = rng.choice((0, 0, 0.5, 0.9))
        self.p_fails = rng.choice((0, 0, 0.3))
        self.longest_s = rng.choice((5.0, 300.0, 5000.0))

    def happens(self, probability: float) -> bool:
        return self.rng.random() < probability

    def later(self, delay_s: float, what: Due, life: int | None = None) -> None:
        """``life``: only in that life of the controller, whose threads end with it; 0 is the world's own."""
        due = (self.now + delay_s, next(self._order), self.life if life is None else life, what)
        heapq.heappush(self.due, due)

    # ------------------------------------------------------------------------------------------- what is asked for
    def perform(self, action: r.Action) -> None:
        match action:
            case r.Launch():
                self._launch(action)
            case r.Follow():
                self.followed = action.launch
                self.later(self.rng.random(), lambda: self._look(action, None))
            case r.Leave():
                self.followed = 0
            case r.Abort():
                self.aborted.add(action.launch)
            case r.Cancel():
                cluster = self.clusters[action.cluster]
                if cluster.state == "up" and self.now >= cluster.silent_until_s:
                    launch = action.job_id
                    ended = r.Ended(launch, self.rng.choice(("cancelled", "cancelled", "succeeded")), "cancelled")
                    self.later(self.rng.random() * 5, lambda: self._end(cluster, launch, ended), 0)
            case r.TakeDown():
                self.later(self.rng.random() * 3, lambda: self._down(action.cluster))

    def _launch(self, action: r.Launch) -> None:
        rng = self.rng
        wait_s = rng.choice((0.1, rng.random() * 10, rng.random() * self.longest_s))
        until_s = self.now + wait_s

        def answer() -> r.Input | None:
            if action.launch in self.aborted:
                return r.LaunchFailed(action.launch, "given up")
            if self.now < until_s:
                self.later(min(5.0, until_s - self.now), answer)
                return r.Waits(action.launch, "behind others") if self.happens(0.2) else None
            cluster = self.clusters.get(action.cluster)
            if cluster is not None and action.launch in cluster.tasks:  # a controller before this one did it
                return r.Launched(action.launch, action.launch)
            if self.happens(self.p_refused):
                return r.LaunchFailed(action.launch, "no such thing", refused=True)
            if self.happens(self.p_launch_fails) or (cluster is not None and cluster.state != "up"):
                return r.LaunchFailed(action.launch, "no machine left")
            if cluster is None:
                cluster = self.clusters[action.cluster] = FakeCluster(action.cluster, action.choice, heard_s=self.now)
                self._fate(cluster)
            cluster.tasks[action.launch] = None
            end = rng.random() * self.longest_s
            how = "failed" if self.happens(self.p_fails) else "succeeded"
            ended = r.Ended(action.launch, how, how, 3 if how == "failed" else 0)  # type: ignore[arg-type]
            self.later(end, lambda: self._end(cluster, action.launch, ended), 0)
            return r.Launched(action.launch, action.launch)

        self.later(min(wait_s, 5.0), answer)

    def _fate(self, cluster: FakeCluster) -> None:
        if self.happens(self.p_lost):
            gone = self.rng.choice(("lost", "lost", "lost", "lost", "lost", "nodes", "nodes", "released"))
            self.later(self.rng.random() ** 2 * self.longest_s, lambda: self._lose(cluster, gone), 0)
        if self.happens(self.p_silent):

            def silence() -> None:
                cluster.silent_until_s = self.now + self.rng.choice((5.0, 60.0, 300.0))

            self.later(self.rng.random() * self.longest_s, silence, 0)

    def _lose(self, cluster: FakeCluster, how: str) -> None:
        if cluster.state != "up":
            return
        for launch, ended in cluster.tasks.items():
            if ended is None:
                state = READY if how == "nodes" else RELEASED if how == "released" else LOST
                cluster.tasks[launch] = r.Ended(launch, "lost", "its nodes went away", state=state)
        cluster.state = "up" if how == "nodes" else how  # of nodes alone the cluster gets others

    def _end(self, cluster: FakeCluster, launch: int, ended: r.Ended) -> None:
        if cluster.state == "up" and cluster.tasks[launch] is None:
            cluster.tasks[launch] = ended

    def _look(self, action: r.Follow, said: JobStatus | None) -> r.Input | None:
        """What a follower sees that looks each second."""
        if self.followed != action.launch:
            return None
        cluster = self.clusters[action.cluster]
        if cluster.state == "down":
            return r.Ended(action.launch, "cancelled", "it was removed")
        gone = cluster.state in ("lost", "released")
        if self.now < cluster.silent_until_s or (gone and self.happens(0.9)):
            truth = READY if not gone else RELEASED if cluster.state == "released" else LOST
            state = self.rng.choice((LOST, None)) if self.happens(self.p_lies) and not gone else truth
            self.later(self.rng.choice((1.0, 5.0)), lambda: self._look(action, said))
            return r.Unheard(action.launch, "no route", state)
        cluster.heard_s = self.now
        ended = cluster.tasks[action.launch]
        if ended is not None:
            self.followed = 0
            return ended
        self.later(1.0 if self.longest_s < 1000 else 20.0, lambda: self._look(action, JobStatus.RUNNING))
        return r.Heard(action.launch) if said else r.Moved(action.launch, JobStatus.RUNNING, "")

    def _down(self, number: int) -> r.Input:
        cluster = self.clusters.get(number)
        if cluster is not None and cluster.state == "up" and self.happens(self.p_down_fails):
            return r.DownFailed(number, "no route")
        if cluster is not None:
            cluster.state, cluster.taken_down_s = "down", self.now
        return r.Down(number)


def play(seed: int) -> Played:
    """Run the job of ``seed`` until its machine is done.

    Raises:
        AssertionError: the machine hangs, or does not end.
    """
    world = World(seed)
    rng = world.rng
    machine = r.RecoveryMachine(world.choices, save_s=5.0)
    actions: list[tuple[float, r.Action]] = []
    handled: list[tuple[float, r.Input]] = []
    num_crashes = 0

    def do(asked: list[r.Action]) -> None:
        for action in asked:
            actions.append((world.now, action))
            world.perform(action)

    def cancel() -> r.Input:
        world.cancelled_s = world.cancelled_s or world.now
        return t.CancelAsked()

    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        world.later(rng.random() * world.longest_s, cancel, 0)
    crashes = sorted(world.now + rng.random() * world.longest_s for _ in range(rng.choice((0, 0, 1, 3))))
    do(machine.start(world.now))
    while not machine.done:
        deadline = machine.deadline
        assert world.due or deadline is not None, "nothing will ever happen again"
        at = min(world.due[0][0] if world.due else 1e12, deadline if deadline is not None else 1e12)
        if crashes and crashes[0] <= at:  # what its threads do is heard by nobody; what was written down stays
            world.now = max(world.now, crashes.pop(0))
            num_crashes += 1
            world.life += 1
            world.followed = 0
            state = r.State.from_json(json.loads(json.dumps(machine.state.to_json())))
            machine = r.RecoveryMachine(world.choices, 5.0, state, machine.status)
            do(machine.start(world.now))
            continue
        if deadline is not None and (not world.due or deadline <= world.due[0][0]):
            world.now, event = max(world.now, deadline), t.Tick()
        else:
            world.now, _, life, what = heapq.heappop(world.due)
            if life not in (0, world.life):
                continue
            found = what()
            if found is None:
                continue
            event = found  # type: ignore[assignment]
        assert world.now < 1e9 + 3e6, "it takes for ever"
        handled.append((world.now, event))
        do(machine.handle(event, world.now))
    for late in (t.Tick(), t.CancelAsked(), r.Launched(machine.state.launch, 1), r.Down(1)):
        assert machine.handle(late, world.now + 1) == [], "it acts after its end"
    return Played(seed, world.choices, machine, world.clusters, actions, handled, num_crashes, world.cancelled_s)
