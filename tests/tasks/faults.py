"""A world made of a seed: nodes, processes and all that goes wrong with them, in virtual time.

``play(seed)`` has a ``JobMachine`` run one job in such a world and gives back what really happened, beside what the
machine said. A ``FakeProvider`` starts slowly or not at all, loses nodes, goes silent and comes back, tells of an end
twice, of a process that nobody started, of an attempt long gone; its processes fail by themselves, because a peer did,
or hang.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from atoll.tasks.machine import JobMachine
from atoll.tasks.spec import JobSpec, Restarts
from atoll.tasks.transitions import (
    Action,
    CancelAsked,
    Input,
    Log,
    NodeDown,
    NodeSilent,
    NodeUp,
    Phase,
    ProcessEnded,
    ProcessStarted,
    SetStatus,
    StartNode,
    StartProcess,
    StopNode,
    Terminate,
    Tick,
)

JITTER_S = 0.03  # between an end and its being heard of
ENDS = ((1, None), (3, None), (42, None), (127, None), (139, None), (None, 9), (None, 11), (None, 6), (137, None))


@dataclass
class FakeProcess:
    """A process: alive until it has ``ended``, ``by_itself`` or when ``asked``; ``heard_s`` is when we heard."""

    node: FakeNode
    process: int
    phase: Phase
    alive: bool = True
    asked: bool = False
    by_itself: bool = True
    ended: ProcessEnded | None = None
    heard_s: float | None = None

    @property
    def failed_by_itself(self) -> bool:
        return self.by_itself and self.ended is not None and (self.ended.exit_code != 0 or self.ended.oom)


@dataclass
class FakeNode:
    """One start of a node: ``starting``, ``up``, ``lost`` or ``stopped``."""

    node: int
    attempt: int
    state: str = "starting"
    silent_until_s: float = 0.0
    processes: list[FakeProcess] = field(default_factory=list)
    down_heard_s: float | None = None

    @property
    def living(self) -> list[FakeProcess]:
        return [process for process in self.processes if process.alive]


@dataclass
class Played:
    """What happened: the world at the end, and all that the machine asked for, with the time."""

    seed: int
    spec: JobSpec
    num_cluster_nodes: int
    setup_needed: bool
    machine: JobMachine
    world: FakeProvider
    actions: list[tuple[float, Action]] = field(default_factory=list)
    cancelled_at_s: float | None = None  # when the machine was told

    def statuses(self) -> list[tuple[float, SetStatus]]:
        return [(at, action) for at, action in self.actions if isinstance(action, SetStatus)]

    def logged(self, *kinds: str) -> list[tuple[float, Log]]:
        return [(at, action) for at, action in self.actions if isinstance(action, Log) and action.kind in kinds]


class FakeProvider:
    """Does what a machine asks for, in its way. ``due`` are things to come: (time, order, what happens then)."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.nodes: list[FakeNode] = []  # of all attempts
        self.due: list[tuple[float, int, Callable[[], Input | None]]] = []
        self._order = itertools.count()
        # How bad this world is, from good to terrible.
        self.p_start_fails = rng.choice((0, 0, 0, 0.05, 0.3))
        self.p_lost = rng.choice((0, 0, 0, 0.05, 0.3))
        self.p_silent = rng.choice((0, 0, 0.2))
        self.p_fails = rng.choice((0, 0, 0.1, 0.3, 1.0))
        self.p_lies = rng.choice((0, 0, 0.3))
        self.longest_s = rng.choice((0.2, 5.0, 300.0))

    # ------------------------------------------------------------------------------------------- time
    def later(self, delay_s: float, what: Callable[[], Input | None]) -> None:
        heapq.heappush(self.due, (self.now + delay_s, next(self._order), what))

    def say(
        self,
        node: FakeNode,
        event: Input,
        delay_s: float | None = None,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        """Have the machine hear it, unless the node is gone by then; once the node answers."""

        def arrive() -> Input | None:
            if node.state == "lost" or (node.state == "stopped" and not self.happens(self.p_lies)):
                return None
            if self.now < node.silent_until_s:
                self.later(node.silent_until_s - self.now + self.rng.random() * JITTER_S, arrive)
                return None
            if node.state == "up":
                heard()
            if self.happens(self.p_lies):
                self.later(self.rng.random() * 20, lambda: event)  # the same again, perhaps in a later attempt
            return event

        self.later(self.rng.random() * JITTER_S if delay_s is None else delay_s, arrive)

    def happens(self, probability: float) -> bool:
        return self.rng.random() < probability

    def current(self, node: int) -> FakeNode | None:
        return next((each for each in reversed(self.nodes) if each.node == node), None)

    # ------------------------------------------------------------------------------------------- what is asked for
    def perform(self, action: Action) -> None:
        match action:
            case StartNode():
                self._start_node(action)
            case StartProcess():
                self._start_process(action)
            case Terminate():
                node = self.current(action.node)
                assert node is not None
                for process in node.living:
                    process.asked = True
                    if not self.happens(0.2):  # the others don't care
                        end = self.rng.choice(((None, 15), (143, None), (1, None), (0, None), (None, 6)))
                        self.later(self.rng.random() * 3, partial(self._end, process, *end, by_itself=False))
            case StopNode():
                node = self.current(action.node)
                assert node is not None
                assert node.state != "stopped", f"{action} of a node that was stopped before"
                node.state = "stopped"
                for process in node.living:
                    assert process.asked, f"{process} was ended by force before it was asked to end"
                    process.alive = False

    def _start_node(self, action: StartNode) -> None:
        before = self.current(action.node)
        assert before is None or before.state in ("stopped", "lost"), f"{action}, but it runs"
        node = FakeNode(action.node, action.attempt)
        self.nodes.append(node)
        start_s = self.rng.choice((0.0, self.rng.random(), self.rng.random() * 60))
        fails = self.happens(self.p_start_fails)

        def started() -> None:
            if node.state != "starting":
                if self.happens(self.p_lies):
                    self.later(0, lambda: NodeUp(node.node, node.attempt))
                return
            if fails:
                node.state = "lost"
                node.down_heard_s = self.now
                self.later(0, lambda: NodeDown(node.node, node.attempt, "it refused", started=False))
                return
            node.state = "up"
            self.say(node, NodeUp(node.node, node.attempt))
            if self.happens(self.p_lost):
                self.later(self.rng.random() * self.longest_s, lambda: self._lose(node))
            if self.happens(self.p_silent):
                self.later(self.rng.random() * self.longest_s, lambda: self._silence(node))

        self.later(start_s, started)

    def _start_process(self, action: StartProcess) -> None:
        node = self.current(action.node)
        assert node is not None
        assert node.attempt == action.attempt, f"{action}, but the node is of attempt {node.attempt}"
        assert node.state in ("up", "lost"), f"{action} on a node that is {node.state}"
        process = FakeProcess(node, action.process, action.phase, alive=node.state == "up")
        node.processes.append(process)
        if node.state == "lost":
            return
        self.say(node, ProcessStarted(action.node, action.process, action.phase, action.attempt, self.rng.randrange(9)))
        end: tuple[int | None, int | None] = self.rng.choice(ENDS) if self.happens(self.p_fails) else (0, None)
        runs_s = self.rng.choice((0.0, self.rng.random() * self.longest_s, self.longest_s))
        self.later(runs_s, lambda: self._end(process, *end))
        if self.happens(self.p_lies):
            lie = ProcessEnded(action.node, action.process, action.phase, action.attempt - 1, 1)
            if self.happens(0.5):
                lie = ProcessEnded(action.node, action.process + 7, action.phase, action.attempt, 1)
            self.later(self.rng.random(), lambda: lie)

    # ------------------------------------------------------------------------------------------- what happens
    def _end(self, process: FakeProcess, exit_code: int | None, signal: int | None, *, by_itself: bool = True) -> None:
        if not process.alive:
            return
        node = process.node
        process.alive, process.by_itself = False, by_itself
        oom = signal == 9 and self.happens(0.5)
        process.ended = ProcessEnded(
            node.node, process.process, process.phase, node.attempt, exit_code, signal, oom, (f"bye {self.now}",)
        )

        def heard() -> None:
            process.heard_s = self.now

        self.say(node, process.ended, heard=heard)
        if process.failed_by_itself and process.phase == "run":
            self._pull_down(node)

    def _pull_down(self, culprit: FakeNode) -> None:
        """Peers notice that one is gone, and fail too, soon."""
        for node in self.nodes:
            if node.attempt == culprit.attempt:
                for process in node.living:
                    if process.phase == "run" and self.happens(0.5):
                        self.later(self.rng.random() * 0.2, partial(self._end, process, 1, None))

    def _lose(self, node: FakeNode) -> None:
        if node.state != "up":
            return
        node.state = "lost"
        for process in node.living:
            process.alive = False
        if self.happens(0.5):  # no FIN: it takes a while
            self.later(5.0, lambda: NodeSilent(node.node, node.attempt, 5.0, "quiet"))
            delay_s = 8.0
        else:
            delay_s = self.rng.random() * JITTER_S
        down = NodeDown(node.node, node.attempt, "its agent went away", started=True)

        def told() -> Input:
            node.down_heard_s = self.now
            return down

        self.later(delay_s, told)
        if self.happens(self.p_lies):
            self.later(delay_s + self.rng.random(), lambda: down)
        if self.happens(0.5):
            self._pull_down(node)

    def _silence(self, node: FakeNode) -> None:
        if node.state != "up":
            return
        node.silent_until_s = self.now + self.rng.random() * 20
        self.later(5.0, lambda: NodeSilent(node.node, node.attempt, 5.0, "quiet"))
        self.say(node, NodeSilent(node.node, node.attempt, 0.0, "back"), node.silent_until_s - self.now)


def random_job(rng: random.Random) -> JobSpec:
    """Any job."""
    command = rng.random() < 0.3
    return JobSpec(
        num_nodes=rng.choice((1, 2, 2, 3, 4)),
        setup=rng.choice((None, "pip install it")),
        run=None if command or rng.random() < 0.05 else "python train.py",
        command=("python", "train.py") if command else None,
        num_processes=rng.choice((1, 2)) if command else 1,
        restarts=Restarts(rng.choice((0, 0, 1, 3)), rng.choice(((), (), (42,), (139,))), rng.choice((0, 1, 3))),
        timeout_s=rng.choice((None, None, None, rng.random() * 100)),
    )


def play(seed: int) -> Played:
    """Run the job of ``seed`` in its world until the machine is done.

    Raises:
        AssertionError: the machine asked for what makes no sense, hangs, or does not end.
    """
    rng = random.Random(seed)
    spec = random_job(rng)
    num_cluster_nodes = spec.num_nodes + rng.choice((0, 0, 1))
    setup_needed = rng.random() < 0.7
    world = FakeProvider(rng)
    machine = JobMachine(spec, num_cluster_nodes=num_cluster_nodes, setup_needed=setup_needed)
    played = Played(seed, spec, num_cluster_nodes, setup_needed, machine, world)
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        world.later(rng.random() * rng.choice((1.0, 10.0, 100.0)), CancelAsked)
    _do(played, machine.start(0.0))
    while not machine.done:
        deadline = machine.deadline
        assert world.due or deadline is not None, "nothing will ever happen again"
        if deadline is not None and (not world.due or deadline <= world.due[0][0]):
            world.now = max(world.now, deadline)
            event: Input | None = Tick()
        else:
            world.now, _, what = heapq.heappop(world.due)
            event = what()
        assert world.now < 20_000, "it takes for ever"
        if event is not None:
            if isinstance(event, CancelAsked) and played.cancelled_at_s is None:
                played.cancelled_at_s = world.now
            _do(played, machine.handle(event, world.now))
    for event in (
        Tick(),
        CancelAsked(),
        NodeUp(0, machine.attempt),
        NodeDown(0, machine.attempt, "late", started=True),
    ):
        assert machine.handle(event, world.now + 1) == [], "it acts after its end"
    return played


def _do(played: Played, actions: list[Action]) -> None:
    for action in actions:
        played.actions.append((played.world.now, action))
        played.world.perform(action)
