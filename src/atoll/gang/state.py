"""What a gang decides: events in, actions out. No I/O, no clock, no lock: ``Gang`` performs the actions.

First come, first served. A broadcast starts on all ranks at once, when all can take a call, and nothing overtakes it:
two broadcasts reach every rank in the same order, so their collectives can't cross. A call that loses a rank or raises
on one has its others stopped within a second: asked, then killed, then given up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from atoll.core import events
from atoll.core.errors import (
    AtollError,
    CallTimeout,
    HangError,
    NodeLost,
    PoolClosed,
    ProvisionError,
    WorkerDied,
    name_ranks,
)
from atoll.gang import messages as m
from atoll.gang.call import Call, Failure
from atoll.gang.hangs import HangWatch, suspicion, unread_streams
from atoll.gang.rank_state import NodeState, Phase, RankState
from atoll.wire import frames
from atoll.wire.frames import CallHeader, Frame

SOFT_STOP_S = 0.15  # after a failure the other ranks get this long to end by themselves,
KILL_S = 0.3  # and are killed this long after they were asked to stop
GIVE_UP_S = 0.9  # the call ends by now, whatever still has to die
CLOSED_S = 0.2  # a rank whose channel is closed gets this long to end by itself: it is probably about to
MAX_EARLY_DEATHS = 3  # of a rank that was up once, in a row
MAX_RESTARTS = 3  # of a node in a row
_KEPT_FUNCTIONS = 64  # by a rank, each at most 1 MiB: the driver says which one it is to forget


class GangState:
    """Ranks × nodes × calls.

    Args:
        node_of: the node of each rank.
        deaf_s: by node, how long its agent may owe an answer.
        path: the import path that ranks start with.
        log_dir: where ranks' output is, for messages.
        wants_events: somebody listens to ``Emit``.

    Attributes:
        running: calls that run, by number.
        queue: calls that wait for ranks, in order.
        broken: what ended the gang.
        next_due: when ``TimerFired`` has to come at the latest.
    """

    def __init__(
        self,
        node_of: Sequence[int],
        deaf_s: Sequence[float],
        *,
        path: tuple[str, ...] = (),
        log_dir: str = "",
        hang_timeout_s: float | None = None,
        start_timeout_s: float = 60.0,
        wants_events: bool = True,
    ) -> None:
        self.ranks = [RankState(rank, node) for rank, node in enumerate(node_of)]
        self.nodes = [NodeState(node, each) for node, each in enumerate(deaf_s)]
        self.running: dict[int, Call] = {}
        self.queue: dict[Call, None] = {}  # one that is cancelled is found at once
        self.broken: BaseException | None = None
        self.closing = False
        self.next_due = math.inf
        self._path = path
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._wants_events = wants_events
        self._hangs = HangWatch(hang_timeout_s)
        self._numbers = itertools.count(1)
        self._timers: dict[tuple[object, str], tuple[float, Callable[[], None]]] = {}
        self._now = 0.0
        self._actions: list[m.Action] = []
        self._handlers: dict[type | int, Callable[[Any], None]] = {
            **dict.fromkeys(frames.KINDS, self._ignore),
            **dict.fromkeys((frames.VALUE, frames.STREAM, frames.REPORT), self._on_value),
            **dict.fromkeys((frames.RESULT, frames.ERROR), self._on_result),
            frames.WANT_GROUP: self._on_want_group,
            frames.LOG: self._on_log,
            frames.HELLO: self._on_hello,
            frames.STARTED: self._on_started,
            frames.EXIT: self._on_exit,
            m.Submit: self._submit,
            m.Cancel: lambda event: self._stop(event.call, event.error),
            **dict.fromkeys((m.StreamCredit, m.StreamClosed), self._to_stream),
            m.ChannelClosed: self._channel_closed,
            m.ChannelBroken: self._channel_broken,
            m.AgentSaid: self._agent_said,
            m.StacksSeen: self._stacks_seen,
            m.NodeUp: self._node_up,
            m.NodeUnreachable: self._node_unreachable,
            m.NodeGone: self._node_gone,
            m.Broken: lambda event: self._break(event.error),
            m.Close: self._close,
            m.EndCalls: lambda _event: self._end_calls(),
            m.TimerFired: lambda _event: self._fire(),
        }

    def handle(self, event: m.Event, now: float) -> list[m.Action]:
        """What to do about an event at this moment, in this order; first what is left of one that Ctrl-C ended."""
        self._now = now
        kind = type(event)
        self._handlers[event.kind if kind is Frame else kind](event)  # type: ignore[union-attr]
        actions, self._actions = self._actions, []
        return actions

    # -- questions --------------------------------------------------------------------------------------------------

    @property
    def refusal(self) -> BaseException | None:
        """Why no call can be made, or None."""
        if self.broken is not None:
            return self.broken
        if self.closing:
            return PoolClosed("the pool is shut down; make the call inside its `with` block, or call .up() first")
        return None

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come up yet."""
        return [rank.rank for rank in self.ranks if rank.phase in (Phase.STARTING, Phase.GONE)]

    @property
    def busy(self) -> list[int]:
        """Ranks that run something, wanted or not."""
        return [rank.rank for rank in self.ranks if rank.call is not None]

    # -- timers -----------------------------------------------------------------------------------------------------

    def _after(self, owner: object, what: str, delay_s: float, action: Callable[[], None]) -> None:
        when = self._now + delay_s
        self._timers[owner, what] = (when, action)
        self.next_due = min(self.next_due, when)

    def _fire(self) -> None:
        for key, (when, _) in sorted(self._timers.items(), key=lambda timer: timer[1][0]):
            if when <= self._now and (timer := self._timers.pop(key, None)) is not None:
                timer[1]()
        self.next_due = min((when for when, _ in self._timers.values()), default=math.inf)
        self._start_calls()

    # -- calls: starting ----------------------------------------------------------------------------------------------

    def _submit(self, event: m.Submit) -> None:
        if self.broken is not None or self.closing:
            event.call.error = self.refusal
            self._end(event.call, event.call.error)
            return
        self.queue[event.call] = None
        if _HANGS not in self._timers:
            self._after("gang", "hangs", self._hangs.period_s, self._look_for_hangs)
        self._start_calls()

    def _start_calls(self) -> None:
        """Start what can be started now. This is where it is decided whether a rank can take a call."""
        while self.queue:
            call = next(iter(self.queue))
            chosen = []
            for rank in self.ranks:
                if rank.phase is Phase.READY and rank.call is None:
                    chosen.append(rank)
                    if not call.whole_gang:
                        break
            if len(chosen) < (len(self.ranks) if call.whole_gang else 1):
                return
            if call.request.fresh and (used := [rank for rank in chosen if rank.has_framework]):
                for rank in used:
                    rank.phase = Phase.ENDING
                    self._actions.append(m.Kill(rank.rank, None))
                return
            self._start(call, chosen)

    def _start(self, call: Call, ranks: list[RankState]) -> None:
        # In this order: a signal may raise between two lines, and cancelling has to find what was done so far.
        numbers = []
        all_have_torch = False
        for rank in ranks:
            numbers.append(rank.rank)
            all_have_torch = all_have_torch or rank.has_torch
        call.begin(next(self._numbers), tuple(numbers), self._now)
        self.running[call.number] = call
        self.queue.pop(call, None)
        request, function, whole_gang = call.request, call.request.function, call.whole_gang
        same: dict[tuple[bool, bool, str | None], m.SendCall] = {}
        for rank in ranks:
            rank.call, rank.number = call, call.number
            lacks, forget = function.digest not in rank.functions, None
            if function.cacheable:
                kept = rank.functions
                kept.pop(function.digest, None)
                kept[function.digest] = None
                if len(kept) > _KEPT_FUNCTIONS:
                    forget = next(iter(kept))
                    del kept[forget]
            moves = request.path is not None and request.path != rank.path
            if moves:
                rank.path = request.path
            needs = (lacks, moves, forget)
            if needs in same:
                same[needs].ranks.append(rank.rank)
                continue
            header = CallHeader(
                request.job_id,
                function.digest,
                request.arguments.table,
                whole_gang,
                ranks[0].port if whole_gang else 0,
                # Where only some have torch from an earlier call, the others import it: all have to agree.
                whole_gang and all_have_torch,
                function.pure,
                function.encoded.table if lacks else None,
                lacks and function.cacheable,
                forget,
                request.path if moves else None,
            )
            same[needs] = m.SendCall(call, [rank.rank], header)
            self._actions.append(same[needs])
        if call.sink.hears_start:
            self._actions.append(m.Started(call))
        if request.timeout_s is not None:
            limit = request.timeout_s
            self._after(call, "timeout", limit, lambda: self._stop(call, CallTimeout(limit, call.unfinished)))
        if self._wants_events:
            self._actions.append(m.Emit(events.CallStarted(job_id=request.job_id, ranks=call.ranks)))

    # -- calls: while they run ----------------------------------------------------------------------------------------

    def _to_stream(self, event: m.StreamCredit | m.StreamClosed) -> None:
        call, rank = event.call, event.rank
        if not call.done and rank in call.ranks and rank not in call.ended:
            fields = {"num": event.num} if isinstance(event, m.StreamCredit) else None
            kind = frames.CLOSE if fields is None else frames.CREDIT
            self._actions.append(m.Send(rank, kind, call.number, fields))

    def _answer_group(self, call: Call, ranks: Sequence[int], offers: list[str] | None) -> None:
        fields = {"go": offers is not None} | ({"offers": offers} if offers and any(offers) else {})
        self._actions += [m.Send(rank, frames.GROUP, call.number, fields) for rank in ranks]

    # -- calls: their end ---------------------------------------------------------------------------------------------

    def _stop(self, call: Call, error: BaseException) -> None:
        """End a call with an error, within a second where it runs."""
        if call.done:
            return
        call.error = call.error or error
        self.queue.pop(call, None)
        if call.number:
            self._stop_ranks(call, soft_s=0.0)
        else:
            self._end(call, call.error)

    def _stop_ranks(self, call: Call, *, soft_s: float) -> None:
        """Ask ranks that still run the call to stop, then kill them, then end it without them."""
        if call.stopping:
            return
        call.stopping = True
        number = call.number
        if soft_s:
            self._after(call, "interrupt", soft_s, lambda: self._interrupt(call))
        else:
            self._interrupt(call)
        self._after(call, "kill", soft_s + KILL_S, lambda: self._kill(call))
        self._after(call, "give up", GIVE_UP_S, lambda: self._end(call, call.error))
        deaf_s = max(self.nodes[self.ranks[rank].node].deaf_s for rank in call.ranks)
        self._after(number, "deaf", deaf_s, lambda: self._lose_deaf(number))

    def _interrupt(self, call: Call) -> None:
        self._actions += [m.Interrupt(rank, call.number) for rank in call.unfinished]

    def _kill(self, call: Call) -> None:
        for rank in call.unfinished:
            self.ranks[rank].phase = Phase.ENDING  # a result that crosses the order on its way does not save it
            self._actions.append(m.Kill(rank, None))

    def _lose_deaf(self, number: int) -> None:
        """A rank that was to be killed long ago still counts as running: its agent does not hear us."""
        for rank in self.ranks:
            if rank.call is not None and rank.number == number:
                node = self.nodes[rank.node]
                self._give_up(node, f"its agent did not stop rank {rank.rank} within {node.deaf_s:g} s")

    def _rank_failed(self, call: Call, failure: Failure) -> None:
        """A rank raised, or is gone: the others are stopped."""
        call.failures.append(failure)
        if len(call.failures) == 1 and any(rank not in call.ended and rank != failure.rank for rank in call.ranks):
            self._stop_ranks(call, soft_s=SOFT_STOP_S)

    def _rank_ended(self, call: Call, rank: int) -> None:
        """The rank is through with the call."""
        if waiting := call.end_rank(rank):
            self._answer_group(call, waiting, None)
        if len(call.ended) == len(call.ranks):
            self._end(call, call.error)

    def _end(self, call: Call, error: BaseException | None) -> None:
        if call.done:
            return
        self.running.pop(call.number, None)
        if call.stopping or call.request.timeout_s is not None:
            for what in ("timeout", "interrupt", "kill", "give up"):
                self._timers.pop((call, what), None)
        if error is None and call.failures and call.may_repeat and self.refusal is None:
            self._repeat(call)
            return
        call.done = True
        if self._wants_events and call.number:
            took, text = self._now - call.started_s, call.failure_text(error)
            self._actions.append(m.Emit(events.CallFinished(job_id=call.request.job_id, took_s=took, error=text)))
        self._actions.append(m.Resolve(call, error, not (call.kept or call.failures or error is not None)))
        if self.closing:
            self._actions.append(_CHANGED)

    def _repeat(self, call: Call) -> None:
        """A call that lost a rank is started again as a whole."""
        call.attempt += 1
        for frame in (*call.results.values(), *(f.frame for f in call.failures if f.frame is not None)):
            self._actions.append(m.CloseFiles(frame.fds))
        reason = next(str(failure.error) for failure in call.failures if failure.is_death).partition("\n")[0]
        self._emit(events.CallRetried(job_id=call.request.job_id, attempt=call.attempt, reason=reason))
        text = f"{call.request.name}: {reason}; starting again, {call.attempt} of {call.request.retries} retries"
        self._actions.append(m.Note(text, None))
        call.begin(0, (), self._now)  # what the ranks sent is closed: nobody may take it where it never starts again
        self.queue = {call: None, **self.queue}
        self._start_calls()

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _ignore(self, frame: Frame) -> None:
        self._actions.append(m.CloseFiles(frame.fds))

    def _on_log(self, frame: Frame) -> None:
        rank = self.ranks[frame.rank]
        rank.printed = True
        if rank.call is not None:
            rank.call.saw(rank.rank, self._now)
        self._actions.append(m.ShowLog(rank.call, frame))

    def _on_want_group(self, frame: Frame) -> None:
        if (call := self.ranks[frame.rank].running) is not None and frame.call == call.number:
            self._answer_group(call, *call.ask_group(frame.rank, frame.meta.get("offer", "")))

    def _on_value(self, frame: Frame) -> None:
        call = self.ranks[frame.rank].running
        if call is None or frame.call != call.number or (call.stopping and frame.kind != frames.REPORT):
            self._ignore(frame)  # nobody takes values of a call that failed; what it reported still counts
            return
        call.saw(frame.rank, self._now)
        call.streaming = call.streaming or frame.kind == frames.STREAM
        self._actions.append(m.Deliver(call, frame, self.ranks[frame.rank].node))

    def _on_result(self, frame: Frame) -> None:
        number, flags = frame.rank, frame.flags
        rank = self.ranks[number]
        call = rank.call
        if call is None or frame.call != rank.number:
            self._ignore(frame)
            return
        rank.call = None
        rank.has_torch = flags & frames.HAS_TORCH != 0
        rank.has_framework = flags & frames.HAS_FRAMEWORK != 0
        if rank.printed:
            rank.printed = False
            self._actions.append(m.FlushLog(number))
        if flags & frames.SPENT:  # it ends, and a fresh one is started when it has
            rank.phase = Phase.ENDING
        if call.done or call.number != rank.number or number in call.ended:
            self._ignore(frame)
        else:
            for line in frame.meta.get("notes", ()):
                self._actions.append(m.Note(line, number))
            call.kept = call.kept or flags & frames.KEPT != 0
            if frame.kind == frames.RESULT:
                call.results[number] = frame
                if call.streaming:
                    self._actions.append(m.Returned(call))
            elif not frame.meta.get("cancelled"):
                self._rank_failed(call, Failure(number, rank.node, frame=frame))
            elif not call.failures and call.error is None:
                call.error = AtollError(f"rank {number} stopped without being asked to")
            if len(call.ranks) == 1:
                call.ended.add(number)
                self._end(call, call.error)
            else:
                self._rank_ended(call, number)
        if self.queue:
            self._start_calls()

    def _on_started(self, frame: Frame) -> None:
        self.ranks[frame.rank].pid = frame.meta["pid"]

    def _on_hello(self, frame: Frame) -> None:
        rank = self.ranks[frame.rank]
        rank.phase, rank.port, rank.has_torch, rank.has_framework = Phase.READY, frame.meta["port"], False, False
        rank.functions, rank.path = {}, self._path
        self.nodes[rank.node].restarts = 0
        self._timers.pop((rank, "up"), None)
        self._emit(events.RankStarted(rank=rank.rank, node=rank.node, pid=rank.pid, restarts=rank.starts))
        rank.starts += 1
        self._actions.append(_CHANGED)
        self._start_calls()

    def _on_exit(self, frame: Frame) -> None:
        rank, fields = self.ranks[frame.rank], frame.meta
        call, was = rank.running, rank.phase
        rank.call, rank.phase = None, Phase.STARTING
        self._timers.pop((rank, "closed"), None)
        if rank.printed:
            rank.printed = False
            self._actions.append(m.FlushLog(rank.rank))
        died = WorkerDied(
            rank=rank.rank,
            node=rank.node,
            exit_code=fields["exit_code"],
            signal=fields["signal"],
            oom=fields["oom"],
            log_tail=fields["tail"],
            reason=fields["fault"],
        )
        if not fields["killed"] and was is not Phase.ENDING and not self.closing:
            self._emit(events.RankDied(rank=rank.rank, node=rank.node, reason=died.reason))
        rank.early_deaths = 0 if was in (Phase.READY, Phase.ENDING) else rank.early_deaths + 1
        if call is not None:
            if not (fields["killed"] and call.stopping):  # its agent may have ended it for reasons of its own
                self._rank_failed(call, Failure(rank.rank, rank.node, error=died))
            self._rank_ended(call, rank.rank)
        if rank.early_deaths >= (MAX_EARLY_DEATHS if rank.starts else 1):
            self._break(ProvisionError(f"a rank could not be started: {died}", node=rank.node))
        elif not self.closing:
            self._actions.append(m.Spawn(rank.rank))
            self._expect([rank])

    def _expect(self, ranks: Sequence[RankState]) -> None:
        """Ranks were started again: they come up in time, or the pool ends saying so."""
        limit = self._start_timeout_s

        def check() -> None:
            late = [rank.rank for rank in ranks if rank.phase in (Phase.STARTING, Phase.GONE)]
            if late and not self.closing:
                self._break(
                    PoolClosed(f"{name_ranks(late)} did not come up again within {limit:g} s; see {self._log_dir}")
                )

        for rank in ranks:
            self._after(rank, "up", limit, check)

    def _channel_closed(self, event: m.ChannelClosed) -> None:
        rank = self.ranks[event.rank]
        fault = "closed its channel to Atoll (descriptor 3)"
        if rank.phase is not Phase.ENDING and not self.closing:
            self._after(rank, "closed", CLOSED_S, lambda: self._actions.append(m.Kill(rank.rank, fault)))

    def _channel_broken(self, event: m.ChannelBroken) -> None:
        self._actions.append(m.Kill(event.rank, "wrote into its channel to Atoll (descriptor 3)"))

    # -- hangs --------------------------------------------------------------------------------------------------------

    def _look_for_hangs(self) -> None:
        """Ask for the stacks of every call that runs since the last round; one timer for all, none while idle."""
        period, running = self._hangs.period_s, self.running
        for call in running.values():
            if call.started_s <= self._now - period and not call.stopping:
                by_node: dict[int, list[int]] = {}
                for rank in call.unfinished:
                    by_node.setdefault(self.ranks[rank].node, []).append(rank)
                for node, ranks in by_node.items():
                    self._ask_stacks(self.nodes[node], call, ranks)
        waiting = next(iter(self.queue), None)
        line = unread_streams(waiting, running.values())
        if line is not None:
            self._actions.append(m.Note(line, None))
        if running or waiting is not None:
            self._after("gang", "hangs", period, self._look_for_hangs)

    def _ask_stacks(self, node: NodeState, call: Call, ranks: list[int]) -> None:
        node.asked_s = self._now if node.asked_s is None else node.asked_s
        owed_s = self._now - node.asked_s
        if owed_s > node.deaf_s:
            self._give_up(node, f"its agent has not answered for {owed_s:.0f} s")
        else:
            self._actions.append(m.AskStacks(node.node, call.number, ranks))

    def _stacks_seen(self, event: m.StacksSeen) -> None:
        self.nodes[event.node].asked_s = None
        call = self.running.get(event.number)
        if call is None or call.stopping:
            return
        seen = {rank: {**each, "pid": self.ranks[rank].pid} for rank, each in event.ranks.items()}
        hang = self._hangs.seen(call, seen, self._now)
        if isinstance(hang, HangError):
            call.error = hang
            self._kill(call)
            self._stop_ranks(call, soft_s=0.0)
        elif hang is not None:
            self._emit(hang)
            self._actions.append(m.Note(suspicion(hang), None))

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _node_up(self, event: m.NodeUp) -> None:
        node = self.nodes[event.node]
        node.ended = node.silent = node.asked_s = None
        ranks = [rank for rank in self.ranks if rank.node == node.node]
        for rank in ranks:
            rank.phase = Phase.STARTING
            self._actions.append(m.Spawn(rank.rank))
        if node.ups:
            self._expect(ranks)
        node.ups += 1

    def _agent_said(self, event: m.AgentSaid) -> None:
        if "ended" in event.fields:
            self.nodes[event.node].ended = event.fields["ended"]
        elif event.fields["version"] != frames.VERSION:
            self._break(
                ProvisionError(
                    f"node {event.node} speaks wire version {event.fields['version']}, this driver "
                    f"{frames.VERSION}: install the same Atoll on both",
                    node=event.node,
                )
            )

    def _give_up(self, node: NodeState, reason: str) -> None:
        if not self.closing:
            node.silent = reason
            self._actions.append(m.HangUp(node.node))

    def _node_unreachable(self, event: m.NodeUnreachable) -> None:
        for rank in self.ranks:
            if rank.node == event.node:
                rank.phase = Phase.GONE
                self._timers.pop((rank, "closed"), None)
                if rank.running is None:
                    rank.call = None

    def _node_gone(self, event: m.NodeGone) -> None:
        """Fail what ran on a lost node, which is started again unless that means the end of the pool."""
        node, reason = self.nodes[event.node], event.reason
        if not self.closing:  # nobody asks how a node ended that was told to
            reason = node.ended or node.silent or reason
        ranks = [rank for rank in self.ranks if rank.node == node.node]
        if not self.closing and not all(rank.starts for rank in ranks):
            self._break(ProvisionError(f"node {node.node} ended while it started: {reason}", node=node.node))
        elif not self.closing and node.ended is not None:
            self._break(PoolClosed(f"node {node.node} ended: {reason}"))
        lost = NodeLost(node.node, reason)
        for rank in ranks:
            call, rank.call = rank.running, None
            if call is not None:
                self._rank_failed(call, Failure(rank.rank, rank.node, error=lost))
                self._rank_ended(call, rank.rank)
        node.restarts += 1
        if self.refusal is None and node.restarts > MAX_RESTARTS:
            again = NodeLost(node.node, f"{node.restarts} times in a row before a rank came up")
            self._break(PoolClosed(f"node {node.node} was lost and could not be started again: {again}"))
        if self.refusal is None:
            self._actions.append(m.StartNode(node.node))

    # -- the end of all -----------------------------------------------------------------------------------------------

    def _break(self, error: BaseException) -> None:
        self.broken = self.broken or error
        waiting, self.queue = list(self.queue), {}
        for call in [*self.running.values(), *waiting]:
            if not call.failures:
                call.error = call.error or error
            self._end(call, call.error)
        self._actions.append(_CHANGED)

    def _close(self, event: m.Close) -> None:
        self.closing = True
        closed = self.broken or PoolClosed("the pool was shut down before the call finished")
        waiting, self.queue = list(self.queue), {}
        for call in waiting:
            self._end(call, call.error or closed)
        for call in self.running.values():
            call.error = call.error or (None if call.failures else closed)
            if event.unwind:
                self._interrupt(call)

    def _end_calls(self) -> None:
        for call in list(self.running.values()):
            self._end(call, call.error)

    def _emit(self, event: events.Event) -> None:
        if self._wants_events:
            self._actions.append(m.Emit(event))


_CHANGED, _HANGS = m.Changed(), ("gang", "hangs")
