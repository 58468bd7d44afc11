"""A gang's state machine alone: seeded histories over all of its events, without a process, a socket or a clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import pytest

from atoll.core import events
from atoll.core.errors import CallTimeout, HangError, NodeLost, PoolClosed, ProvisionError, WorkerDied
from atoll.gang import messages as m
from atoll.gang import state as state_module
from atoll.gang.call import Call, Failure, Request, Shipped, Sink
from atoll.gang.state import GIVE_UP_S, KILL_S, SOFT_STOP_S, GangState
from atoll.wire import frames
from atoll.wire.frames import Frame
from atoll.wire.payloads import Encoded

NOTHING = memoryview(b"")
DIED: dict[str, Any] = {"exit_code": 3, "signal": None, "oom": False, "tail": [], "killed": False, "fault": None}


class Unheard(Sink):
    """Nobody listens: the actions are looked at."""

    def frame(self, frame: Frame, rank: int, node: int) -> None: ...
    def done(self, results: dict[int, Frame], failures: list[Failure], error: BaseException | None) -> None: ...


def call_of(
    *,
    everywhere: bool = True,
    retries: int = 0,
    timeout_s: float | None = None,
    digest: str = "f",
    fresh: bool = False,
) -> Call:
    function = Shipped(digest, Encoded({"head": 0}), True, True)
    return Call(Request(function, Encoded({"head": 0}), everywhere, "f", timeout_s, retries, fresh=fresh), Unheard())


@dataclass(eq=False)
class Process:
    """A rank's process: whether it came up, what it runs, and how it takes being told to stop."""

    up: bool = False
    call: int = 0
    streams: bool = False
    listens: bool = True
    interrupted: bool = False
    dying: bool = False
    has_framework: bool = False


@dataclass(eq=False)
class World:
    """What the state machine's actions are performed on, and what it must keep to."""

    node_of: list[int]
    hang_timeout_s: float | None = None
    now: float = 100.0
    actions: list[m.Action] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    resolved: Counter[Call] = field(default_factory=Counter)
    errors: dict[Call, BaseException | None] = field(default_factory=dict)
    stop_by: dict[Call, float] = field(default_factory=dict)
    broadcasts: dict[int, list[int]] = field(default_factory=dict)
    starts: dict[Call, list[tuple[int, ...]]] = field(default_factory=dict)
    asked: list[m.AskStacks] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    open_files: set[int] = field(default_factory=set)
    num_files: int = 0

    def __post_init__(self) -> None:
        num_nodes = max(self.node_of) + 1
        self.processes: dict[int, Process] = {}
        self.nodes = set(range(num_nodes))
        self.to_start: list[int] = []
        self.unreachable: list[int] = []
        self.state = GangState(self.node_of, [10.0] * num_nodes, hang_timeout_s=self.hang_timeout_s, log_dir="logs")
        for node in range(num_nodes):
            self.do(m.NodeUp(node))

    def do(self, event: m.Event) -> list[m.Action]:
        """Have it handle an event, perform what it says, and check what must hold after any event."""
        actions = self.state.handle(event, self.now)
        for action in actions:
            self.perform(action)
        self.actions += actions
        for call, by in self.stop_by.items():
            waits = call.number == 0  # to be started again
            assert waits or call in self.resolved or self.now <= by + 1e-6, "a call that fails ends within a second"
        return actions

    def perform(self, action: m.Action) -> None:
        match action:
            case m.SendCall(call, ranks, header):
                if call not in self.starts:
                    before = self.calls[: self.calls.index(call)]
                    assert self.starts.keys() | self.resolved.keys() >= set(before), "first come, first served"
                self.starts.setdefault(call, []).append(tuple(ranks))
                assert call not in self.resolved, "it had ended"
                for rank in ranks:
                    process = self.processes.get(rank)
                    if process is not None:
                        assert process.call == 0, "a rank runs one call at a time"
                        assert process.up, "a call goes to a rank that said it is there"
                        assert not (call.request.fresh and process.has_framework), "it needs one that has not used any"
                        process.call, process.streams, process.interrupted = call.number, False, False
                    if call.whole_gang:
                        assert header.broadcast
                        self.broadcasts.setdefault(rank, []).append(call.number)
                if call.request.timeout_s is not None:
                    self.stop_by[call] = self.now + call.request.timeout_s + GIVE_UP_S
                else:
                    self.stop_by.pop(call, None)  # of an earlier attempt
            case m.Interrupt(rank, number):
                if (process := self.processes.get(rank)) is not None and process.call == number:
                    process.interrupted = True
            case m.Kill(rank):
                if (process := self.processes.get(rank)) is not None:
                    process.dying = True
            case m.Spawn(rank):
                assert rank not in self.processes, "its process had ended"
                if self.node_of[rank] in self.nodes:
                    self.processes[rank] = Process()
            case m.AskStacks():
                self.asked.append(action)
            case m.HangUp(node):
                self.unreachable.append(node)
            case m.StartNode(node):
                self.to_start.append(node)
            case m.Deliver(_, frame):
                self.close(frame.fds)
            case m.CloseFiles(fds):
                self.close(fds)
            case m.Resolve(call, error):
                self.resolved[call] += 1
                assert self.resolved[call] == 1, "a call ends once"
                self.errors[call] = error or (call.failures[0].error if call.failures else None)
                if error is None and not call.failures:
                    assert set(call.results) | self.streamed(call) == set(call.ranks), "it has a result of every rank"
                for frame in (*call.results.values(), *(f.frame for f in call.failures if f.frame is not None)):
                    self.close(frame.fds)
            case m.Note(text):
                self.notes.append(text)
            case _:
                pass

    @staticmethod
    def streamed(call: Call) -> set[int]:
        return set(call.ranks) if call.streaming else set()

    def close(self, fds: tuple[int, ...]) -> None:
        for fd in fds:
            assert fd in self.open_files, "a descriptor is closed once"
            self.open_files.remove(fd)

    # -- what can happen ----------------------------------------------------------------------------------------------

    def submit(self, **request: Any) -> Call:
        call = call_of(**request)
        self.calls.append(call)
        self.do(m.Submit(call))
        return call

    def cancel(self, call: Call) -> None:
        if call.number and call not in self.resolved:
            self.stop_by[call] = min(self.stop_by.get(call, 1e9), self.now + GIVE_UP_S)
        self.do(m.Cancel(call, CancelledError()))

    def says(
        self, rank: int, kind: int, fields: dict[str, Any] | None = None, *, flags: int = 0, file: bool = False
    ) -> None:
        fds: tuple[int, ...] = ()
        if file:
            self.num_files += 1
            self.open_files.add(self.num_files)
            fds = (self.num_files,)
        self.do(Frame(kind, rank, self.processes[rank].call, fields or {}, NOTHING, fds, flags))

    def hello(self, rank: int) -> None:
        self.processes[rank].up = True
        self.says(rank, frames.HELLO, {"port": 1000 + rank})

    def returns(self, rank: int, *, kind: int = frames.RESULT, flags: int = 0, **fields: Any) -> None:
        if kind == frames.ERROR and not fields.get("cancelled"):
            self.will_fail(rank)
        number, self.processes[rank].call = self.processes[rank].call, 0
        self.processes[rank].has_framework = flags & frames.HAS_FRAMEWORK != 0
        fds: tuple[int, ...] = ()
        if not fields.get("cancelled"):
            self.num_files += 1
            self.open_files.add(self.num_files)
            fds = (self.num_files,)
        self.do(Frame(kind, rank, number, fields, NOTHING, fds, flags))

    def will_fail(self, rank: int) -> None:
        """Something is about to happen to a rank: its call has to end soon, or start again."""
        call = self.state.running.get(self.processes[rank].call) if rank in self.processes else None
        if call is not None and call.ranks == (rank,):
            return
        if call is not None:
            self.stop_by[call] = min(self.stop_by.get(call, 1e9), self.now + GIVE_UP_S)

    def exits(self, rank: int, **fields: Any) -> None:
        self.will_fail(rank)
        process = self.processes.pop(rank)
        self.do(Frame(frames.EXIT, rank, 0, {**DIED, "killed": process.dying, **fields}, NOTHING))

    def node_lost(self, node: int) -> None:
        if node not in self.nodes:
            return
        self.nodes.discard(node)
        self.do(m.NodeUnreachable(node))
        for rank, its in enumerate(self.node_of):
            if its == node:
                self.will_fail(rank)
                self.processes.pop(rank, None)
        self.do(m.NodeGone(node, "its agent ended"))

    def sleep(self, seconds: float) -> None:
        """Let time pass: what is due comes in its time."""
        until = self.now + seconds
        while self.state.next_due <= until:
            self.now = max(self.now, self.state.next_due)
            self.do(m.TimerFired())
        self.now = until


def up(*node_of: int, **options: Any) -> World:
    """A gang whose ranks are all ready."""
    world = World(list(node_of), **options)
    for rank in range(len(node_of)):
        world.hello(rank)
    return world


def of_kind(actions: list[m.Action], kind: type) -> list[Any]:
    return [action for action in actions if type(action) is kind]


# ------------------------------------------------------------------------------------------------------- histories
def step(world: World, rng: random.Random) -> None:
    """One thing that may happen next."""
    ranks = list(world.processes)
    rank = rng.choice(ranks) if ranks else None
    process = world.processes[rank] if rank is not None else None
    what = rng.random()
    if world.unreachable:
        world.node_lost(world.unreachable.pop())
    elif world.to_start and what < 0.5:
        node = world.to_start.pop()
        world.nodes.add(node)
        world.do(m.NodeUp(node))
    elif what < 0.14:
        limit = rng.choice([None, None, 0.5, 3.0])
        world.submit(
            everywhere=rng.random() < 0.5,
            retries=rng.choice([0, 0, 2]),
            timeout_s=limit,
            digest=rng.choice("fgh"),
            fresh=rng.random() < 0.2,
        )
    elif what < 0.18 and world.calls:
        world.cancel(rng.choice(world.calls))
    elif what < 0.21 and world.calls:
        call, credit = rng.choice(world.calls), rng.random() < 0.5
        at = rng.randrange(len(world.node_of))
        world.do(m.StreamCredit(call, at, 8) if credit else m.StreamClosed(call, at))
    elif what < 0.33:
        world.sleep(rng.choice([0.01, 0.1, 0.3, 1.0, 20.0]))
    elif what < 0.335:
        world.node_lost(rng.choice(world.state.nodes).node)
    elif world.asked and what < 0.37:
        asked = world.asked.pop()
        seen = {"cpu_s": world.now, "state": "R", "wchan": "0", "stack": "", "groups": {}}
        world.do(m.StacksSeen(asked.node, asked.number, dict.fromkeys(asked.ranks, seen)))
    elif rank is not None and process is not None:
        rank_step(world, rng, rank, process)


def rank_step(world: World, rng: random.Random, rank: int, process: Process) -> None:
    what = rng.random()
    if process.dying and (what < 0.7 or not process.call):  # else it does something that crosses the order to die
        world.exits(rank)
    elif not process.up:
        world.hello(rank) if what < 0.97 else world.exits(rank)
    elif what < 0.03:
        world.exits(rank)
    elif what < 0.05:
        world.do(rng.choice([m.ChannelClosed, m.ChannelBroken])(rank))
        process.dying = True
    elif what < 0.1:
        world.says(rank, frames.LOG)
    elif not process.call:
        return
    elif process.interrupted and process.listens and what < 0.7:
        world.returns(rank, kind=frames.ERROR, cancelled=1)
        process.listens = rng.random() < 0.8
    elif what < 0.2:
        kind = rng.choice([frames.VALUE, frames.REPORT, frames.STREAM])
        world.says(rank, kind, file=kind != frames.STREAM)
    elif what < 0.25:
        world.says(rank, frames.WANT_GROUP)
    elif what < 0.4:
        world.returns(rank, kind=frames.ERROR)
    elif what < 0.9:
        spent = frames.SPENT if rng.random() < 0.05 else 0
        loaded = rng.choice([frames.HAS_TORCH, frames.HAS_FRAMEWORK])
        world.returns(rank, flags=rng.choice([0, frames.KEPT]) | loaded | spent)
        process.dying = process.dying or spent != 0


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens(seed: int) -> None:
    """Every call ends exactly once and in time, no rank runs two, broadcasts don't cross, files are closed once."""
    for history in range(150):
        rng = random.Random(f"{seed}/{history}")
        world = World(rng.choice([[0], [0, 1], [0, 0, 1, 1], [0, 1, 2]]))
        for _ in range(rng.choice([20, 120])):
            step(world, rng)
        if rng.random() < 0.5:  # all that runs comes to its end by itself
            world.sleep(300.0)
            for _ in range(3000):
                if world.resolved.keys() >= set(world.calls):
                    break
                step_to_the_end(world, rng)
            assert world.resolved.keys() == set(world.calls), f"{seed}/{history}: a call never ended"
        world.do(m.Close(unwind=rng.random() < 0.5))
        world.do(m.EndCalls())
        assert world.resolved.keys() == set(world.calls), f"{seed}/{history}"
        late = world.submit()
        assert isinstance(world.errors[late], Exception), "no call can be made any more"
        assert not world.open_files, f"{seed}/{history}: {len(world.open_files)} descriptors were lost"
        orders = list(world.broadcasts.values())
        for one in orders:
            for other in orders:
                assert [n for n in one if n in other] == [n for n in other if n in one], "broadcasts crossed"
        assert not world.state.running


def step_to_the_end(world: World, rng: random.Random) -> None:
    """What brings things to an end: everybody answers, and nobody dies."""
    while world.unreachable:
        world.node_lost(world.unreachable.pop())
    while world.to_start:
        node = world.to_start.pop()
        world.nodes.add(node)
        world.do(m.NodeUp(node))
    for rank, process in list(world.processes.items()):
        if world.processes.get(rank) is not process:
            continue
        if process.dying:
            world.exits(rank)
        elif not process.up:
            world.hello(rank)
        elif process.call:
            world.returns(rank)
    world.sleep(1.0)


# ------------------------------------------------------------------------------------------------ what each means
def test_single_calls_fill_the_lowest_free_ranks_and_nothing_overtakes_a_broadcast() -> None:
    world = up(0, 0, 0)
    ones = [world.submit(everywhere=False) for _ in range(4)]
    assert [world.starts.get(call) for call in ones] == [[(0,)], [(1,)], [(2,)], None]
    world.returns(1)
    assert world.starts[ones[3]] == [(1,)]
    everywhere, later = world.submit(), world.submit(everywhere=False)
    world.returns(0)
    world.returns(2)
    assert not {everywhere, later} & world.starts.keys(), "rank 1 is busy"
    world.returns(1)
    assert world.starts[everywhere] == [(0, 1, 2)]
    world.returns(2)
    assert world.starts[later] == [(2,)]


def test_thousands_that_wait_are_cancelled_at_once() -> None:
    world = up(0)
    calls = [world.submit() for _ in range(3000)]
    for call in reversed(calls[1:]):
        world.cancel(call)
    assert len(world.resolved) == 2999
    world.returns(0)
    assert len(world.resolved) == 3000


def test_ranks_that_go_on_after_a_failure_are_asked_then_killed_and_the_call_ends() -> None:
    world = up(0, 0, 1)
    call = world.submit()
    started = world.now
    world.returns(0, kind=frames.ERROR)
    orders: dict[str, float] = {}
    while call not in world.resolved:
        world.sleep(0.01)
        for action in world.actions:
            orders.setdefault(type(action).__name__, world.now - started)
    assert orders["Interrupt"] == pytest.approx(SOFT_STOP_S, abs=0.02)
    assert orders["Kill"] == pytest.approx(SOFT_STOP_S + KILL_S, abs=0.02)
    assert world.now - started == pytest.approx(GIVE_UP_S, abs=0.02)
    assert not of_kind(world.actions, m.Emit) or not any(
        isinstance(each.event, events.RankDied) for each in of_kind(world.actions, m.Emit)
    )
    for rank in (1, 2):
        world.exits(rank)
        world.hello(rank)
    again = world.submit()
    assert world.starts[again] == [(0,), (1, 2)], "rank 0 has the function already"


def test_a_rank_that_its_agent_does_not_kill_costs_the_node() -> None:
    world = up(0, 1)
    call = world.submit()
    world.cancel(call)
    world.sleep(5.0)
    assert not world.unreachable
    world.sleep(5.1)
    assert sorted(set(world.unreachable)) == [0, 1]
    world.node_lost(0)
    assert world.to_start == [0]


def test_an_agent_that_owes_stacks_for_too_long_is_given_up() -> None:
    world = up(0, 1)
    call = world.submit()
    world.sleep(40.0)
    asked = {action.node for action in world.asked}
    assert asked == {0, 1}
    assert world.unreachable
    world.node_lost(1)
    world.sleep(1.0)
    assert isinstance(world.errors[call], NodeLost)
    assert "has not answered for" in str(world.errors[call])


def test_a_call_that_loses_a_rank_is_started_again_as_a_whole() -> None:
    world = up(0, 0)
    call = world.submit(retries=1)
    behind = world.submit()
    world.returns(0)
    files = set(world.open_files)
    world.exits(1)
    assert not files & world.open_files, "what the first attempt sent is closed"
    assert any("starting again, 1 of 1 retries" in note for note in world.notes)
    world.hello(1)
    assert world.starts[call] == [(0, 1), (0,), (1,)]
    assert behind not in world.starts, "it goes before what waits"
    world.exits(0)
    world.sleep(1.0)
    assert isinstance(world.errors[call], WorkerDied), "once is what was asked for"


def test_a_result_that_comes_after_its_attempt_was_given_up_is_nobodys() -> None:
    world = up(0, 0)
    call = world.submit(retries=1)
    world.exits(0)
    world.sleep(1.0)  # rank 1 was to be killed, and still runs
    assert any("starting again" in note for note in world.notes)
    world.returns(1)
    assert not world.open_files
    world.exits(1)
    world.hello(0)
    world.hello(1)
    world.returns(0)
    assert call not in world.resolved, "rank 1 has yet to return"
    world.returns(1)
    assert world.errors[call] is None


def test_what_is_not_started_again() -> None:
    raised, streaming = up(0, 0), up(0, 0)
    call = raised.submit(retries=1)
    raised.returns(0, kind=frames.ERROR)
    raised.returns(1, kind=frames.ERROR)
    assert call in raised.resolved, "it would raise again"
    call = streaming.submit(retries=1)
    streaming.says(0, frames.STREAM)
    streaming.exits(1)
    streaming.sleep(1.0)
    assert call in streaming.resolved, "its values were taken"


def test_a_repetition_that_never_starts_takes_nothing_of_the_first_attempt() -> None:
    world = up(0, 0)
    call = world.submit(retries=1)
    world.returns(0)
    world.exits(1)
    world.cancel(call)
    assert isinstance(world.errors[call], CancelledError)
    assert not world.open_files


def test_a_group_is_made_when_every_rank_asks_and_not_without_one_that_ended() -> None:
    def answers() -> list[tuple[int, bool]]:
        return [(each.rank, each.fields["go"]) for each in of_kind(world.actions, m.Send) if each.kind == frames.GROUP]

    world = up(0, 0, 0)
    world.submit()
    world.says(1, frames.WANT_GROUP)
    world.says(0, frames.WANT_GROUP)
    assert answers() == []
    world.says(2, frames.WANT_GROUP)
    assert answers() == [(0, True), (1, True), (2, True)]
    world.actions.clear()
    world.says(0, frames.WANT_GROUP)
    assert answers() == [], "and may be asked for again"
    world.returns(2)
    assert answers() == [(0, False)], "it waits, and needs to be told"
    world.says(1, frames.WANT_GROUP)
    assert answers() == [(0, False), (1, False)]


def test_what_each_rank_offers_goes_to_all_of_them_in_their_order() -> None:
    world = up(0, 0)
    world.submit()
    world.says(1, frames.WANT_GROUP, {"offer": "b"})
    world.says(0, frames.WANT_GROUP, {"offer": "a"})
    answers = [each.fields for each in of_kind(world.actions, m.Send) if each.kind == frames.GROUP]
    assert answers == [{"go": True, "offers": ["a", "b"]}] * 2


def test_a_call_that_needs_fresh_ranks_has_used_ones_replaced() -> None:
    world = up(0, 0)
    world.submit()
    world.returns(0, flags=frames.HAS_FRAMEWORK)
    world.returns(1)
    world.actions.clear()
    call = world.submit(fresh=True)
    assert of_kind(world.actions, m.Kill) == [m.Kill(0, None)]
    assert call not in world.starts
    world.exits(0)
    world.hello(0)
    assert sorted(world.starts[call]) == [(0,), (1,)], "what they lack differs"


def test_timeouts_count_from_the_start() -> None:
    world = up(0)
    first, second = world.submit(), world.submit(timeout_s=2.0)
    world.sleep(100.0)
    world.returns(0)
    world.sleep(1.9)
    assert second not in world.resolved
    world.sleep(0.2)
    world.processes[0].interrupted = True
    world.returns(0, kind=frames.ERROR, cancelled=1)
    assert isinstance(world.errors[second], CallTimeout)
    assert first in world.resolved


def test_functions_that_ranks_keep_are_bounded_and_sent_once() -> None:
    world = up(0)
    sent = []
    for number in [*range(70), 69, 0]:
        world.submit(digest=f"f{number}")
        sent.append(of_kind(world.actions, m.SendCall)[-1].header)
        world.returns(0)
    assert [header.function_payload is not None for header in sent[-3:]] == [True, False, True]
    assert [header.forget for header in sent[62:66]] == [None, None, "f0", "f1"]


def test_a_rank_that_never_comes_up_ends_the_pool() -> None:
    world = World([0])
    world.exits(0)
    assert isinstance(world.state.refusal, ProvisionError)
    world = up(0)
    for _ in range(state_module.MAX_EARLY_DEATHS):
        world.exits(0)
        assert world.state.refusal is None
    world.exits(0)
    assert isinstance(world.state.refusal, ProvisionError), "it was up once"
    world = up(0)
    world.exits(0)
    call = world.submit()
    world.sleep(61.0)
    assert isinstance(world.state.refusal, PoolClosed)
    assert "rank 0 did not come up again within 60 s" in str(world.errors[call])


def test_a_node_that_is_lost_again_and_again_ends_the_pool() -> None:
    world = up(0, 1)
    for _ in range(state_module.MAX_RESTARTS):
        world.node_lost(1)
        assert world.to_start == [1]
        world.nodes.add(world.to_start.pop())
        world.do(m.NodeUp(1))
    world.node_lost(1)
    assert "4 times in a row before a rank came up" in str(world.state.refusal)
    assert world.to_start == []


def test_an_agent_says_why_it_ends() -> None:
    world = up(0)
    call = world.submit(retries=3)
    world.do(m.AgentSaid(0, {"ended": "its ttl of 1 s is over"}))
    world.node_lost(0)
    assert str(world.errors[call]) == "node 0 ended: its ttl of 1 s is over"
    world = World([0])
    world.do(m.AgentSaid(0, {"version": 1, "pid": 1}))
    assert "speaks wire version 1" in str(world.state.refusal)


def test_a_channel_that_user_code_closed_or_wrote_to_costs_its_rank() -> None:
    world = up(0, 0)
    world.submit()
    world.do(m.ChannelBroken(0))
    assert [each.fault for each in of_kind(world.actions, m.Kill)] == ["wrote into its channel to Atoll (descriptor 3)"]
    world.do(m.ChannelClosed(1))
    assert len(of_kind(world.actions, m.Kill)) == 1, "it is probably about to end"
    world.sleep(0.3)
    assert of_kind(world.actions, m.Kill)[-1] == m.Kill(1, "closed its channel to Atoll (descriptor 3)")
    world = up(0)
    world.do(m.ChannelClosed(0))
    world.exits(0)
    world.sleep(1.0)
    assert not of_kind(world.actions, m.Kill), "it ended by itself, and its successor is not killed for it"


def test_a_hang_kills_and_names_the_rank() -> None:
    world = up(0, 0, hang_timeout_s=2.0)
    call = world.submit()

    def looks() -> Iterator[None]:
        while call not in world.resolved:
            world.sleep(0.5)
            for asked in world.asked:
                yield (
                    world.do(m.StacksSeen(asked.node, asked.number, {rank: idle(rank) for rank in asked.ranks}))
                    and None
                )
            world.asked.clear()

    def idle(rank: int) -> dict[str, Any]:
        stack = 'File "torch/distributed/x.py", line 1 in all_reduce' if rank == 0 else 'File "a.py", line 1 in f'
        return {"cpu_s": 1.0, "state": "S", "wchan": "0", "stack": stack, "groups": {"g": [2 - rank, 2]}}

    for _ in looks():
        pass
    error = world.errors[call]
    assert isinstance(error, HangError)
    assert tuple(error.missing) == (1,)
    assert {each.rank for each in of_kind(world.actions, m.Kill)} == {0, 1}


def test_a_call_that_waits_for_streams_that_nobody_reads_is_told_of_once() -> None:
    world = up(0)
    world.submit(everywhere=False)
    world.says(0, frames.STREAM)
    world.submit(everywhere=False)
    world.sleep(60.0)
    assert len([note for note in world.notes if "waits for a free rank" in note]) == 1


def test_going_down_asks_running_calls_to_stop_and_ends_the_rest() -> None:
    world = up(0, 0)
    running, waiting = world.submit(), world.submit()
    world.do(m.Close(unwind=True))
    assert set(world.resolved) == {waiting}
    assert len(of_kind(world.actions, m.Interrupt)) == 2
    world.returns(0, kind=frames.ERROR, cancelled=1)
    world.do(m.EndCalls())
    assert isinstance(world.errors[running], PoolClosed)
    world.exits(0)
    assert not of_kind(world.actions[-3:], m.Spawn), "no rank is started any more"
