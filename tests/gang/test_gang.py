"""The shell of a gang whose agent and ranks the test plays: real channels, no processes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from tests.pools import eventually
from tests.talking import Talk

from atoll.core import events
from atoll.core.errors import NodeLost, WorkerDied
from atoll.gang import messages as m
from atoll.gang.call import Request, Shipped
from atoll.gang.futures import CallFuture
from atoll.gang.gang import Gang
from atoll.gang.log_router import LogRouter
from atoll.gang.members import GangSpec
from atoll.gang.notifier import Notifier
from atoll.providers.base import Allocation, Boot, NodePlan, NodeRequest, Plan, Provider
from atoll.wire import frames
from atoll.wire.codec import dumps
from atoll.wire.exceptions import pack_exception
from atoll.wire.frames import HEADER, Frame, close_all, pack, pack_payload, send_all
from atoll.wire.payloads import Arena, Encoded

DIED: dict[str, Any] = {"exit_code": 3, "signal": None, "oom": False, "tail": [], "killed": False, "fault": None}


NO_JSON = HEADER.pack(6, frames.VALUE, 0, 0, 0, 1) + b"\2\0\0\0{["


class Handle:
    """A started node: one end of its channel."""

    reason = None

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel

    def listen(self, on_silence: object) -> None:
        pass

    def stop(self) -> None:
        self.channel.close()


class Agents(Provider):
    """A provider of one node, whose agent and ranks are played by the test."""

    kind = form = "the test"

    def __init__(self, num_ranks: int) -> None:
        self.spec_plan = Plan(self.name, (NodePlan(0, "127.0.0.1", num_ranks),))
        ours, self._theirs = socket.socketpair()
        self.talk = Talk(self._theirs)
        self._handle = Handle(ours)
        self._ranks: dict[int, Talk] = {}
        for rank in range(num_ranks):
            self.send(frames.HELLO, rank, 0, {"port": 1})

    def rank(self, number: int, *, again: bool = False) -> Talk:
        """The rank's end of its channel, as its agent was given it; it prints nothing."""
        if again or number not in self._ranks:
            channel, *outputs = self.talk.next(frames.START, number).fds
            close_all(outputs)
            self._ranks[number] = Talk(socket.socket(fileno=channel))
        return self._ranks[number]

    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        return self.spec_plan

    def launch_agents(self, allocation: Allocation, nodes: Sequence[NodePlan], boot: Boot) -> Iterator[Handle]:
        yield self._handle

    def send(self, kind: int, rank: int, call: int = 0, meta: dict[str, Any] | None = None) -> None:
        self.talk.send(kind, rank, meta, call)

    def raises(self, rank: int, call: int, error: Exception) -> None:
        encoded = Arena().encode(pack_exception(error))
        data = pack(frames.ERROR, rank, call, {"payload": encoded.table}, encoded.inline)
        send_all(self.rank(rank).channel, data)

    def returns(self, rank: int, call: int, value: object) -> None:
        send_all(self.rank(rank).channel, pack_payload(frames.RESULT, rank, call, dumps(value).head))

    def hang_up(self) -> None:
        self._theirs.close()
        self.talk.close()
        for talk in self._ranks.values():
            talk.channel.close()


class Gangs:
    """A gang of played ranks, and calls of it."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.agents = Agents(num_ranks)
        self.events: list[events.Event] = []
        spec = GangSpec(
            provider=self.agents,
            plan=self.agents.spec_plan,
            pool_id="playedby",
            python="python",
            env={},
            path=(),
            cwd="/",
            log_dir=str(folder),
            job_dir=str(folder),
            tmp_root=str(folder),
        )
        self.gang = Gang(spec, Notifier(LogRouter("quiet", lambda rank: 0, num_ranks), self.events.append))
        self.gang.start()

    def call(self, *, retries: int = 0) -> tuple[CallFuture[Any], int]:
        """Start a broadcast; its number, once the ranks have it."""
        payload = dumps(None)
        encoded = Encoded({"head": len(payload.head)}, [payload.head])
        request = Request(Shipped("digest", encoded, False, False), encoded, True, "played", retries=retries)
        num_ranks = self.gang.world_size
        future: CallFuture[Any] = CallFuture(self.gang, request, [0] * num_ranks)
        self.gang.handle(m.Submit(future.call))
        (number,) = {self.agents.rank(rank).next(frames.CALL, rank).call for rank in range(num_ranks)}
        return future, number


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Callable[[int], Gangs]]:
    """Makes gangs."""
    made: list[Gangs] = []

    def make(num_ranks: int) -> Gangs:
        made.append(Gangs(tmp_path, num_ranks))
        return made[-1]

    yield make
    for each in made:
        each.agents.hang_up()
        each.gang.stop()


def test_what_a_channel_does_not_take_is_sent_when_it_does(played: Callable[[int], Gangs]) -> None:
    gang = played(1)
    future, number = gang.call()
    rank = gang.agents.rank(0)
    rank.channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for size in range(2000):
        gang.gang.handle(m.StreamCredit(future.call, 0, size))  # more than the channel takes; nobody reads
    assert gang.gang._channels[0].num_bytes, "something waits"
    assert [rank.next(frames.CREDIT, 0).meta["num"] for _ in range(2000)] == list(range(2000))
    gang.agents.raises(0, number, ValueError("enough"))
    assert isinstance(future.exception(30), ValueError)


def test_a_result_that_lies_in_the_channel_of_a_dead_rank_counts(played: Callable[[int], Gangs]) -> None:
    gang = played(1)
    future, number = gang.call()
    rank = gang.agents.rank(0)
    gang.agents.returns(0, number, "the last word")
    rank.channel.close()
    gang.agents.send(frames.EXIT, 0, 0, DIED)
    assert future.result(30) == ["the last word"]
    gang.agents.rank(0, again=True)  # its successor gets a channel of its own


@pytest.mark.parametrize("how", ["writes", "closes", "writes JSON that is none"])
def test_a_rank_that_breaks_its_channel_is_killed_with_the_reason(played: Callable[[int], Gangs], how: str) -> None:
    gang = played(1)
    future, _number = gang.call()
    rank = gang.agents.rank(0)
    if how == "closes":
        rank.channel.close()
    else:
        garbage = {"writes": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "writes JSON that is none": NO_JSON}
        rank.channel.sendall(garbage[how])
    fault = gang.agents.talk.next(frames.KILL, 0).meta["fault"]
    assert fault == ("closed" if how == "closes" else "wrote into") + " its channel to Atoll (descriptor 3)"
    gang.agents.send(frames.EXIT, 0, 0, {**DIED, "fault": fault})
    with pytest.raises(WorkerDied, match="its channel to Atoll"):
        future.result(30)


def in_a_thread(future: CallFuture[Any], timeout: float | None = None) -> tuple[threading.Thread, list[Any]]:
    """Ask for its result in a thread; what comes of it. Returns once that thread reads the rank's channel itself."""
    came: list[Any] = []

    def ask() -> None:
        try:
            came.append(future.result(timeout))
        except BaseException as error:
            came.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: future.call.reader == thread.ident, "it reads the channel itself")
    return thread, came


def test_who_waits_for_a_call_on_one_rank_reads_its_answer(played: Callable[[int], Gangs]) -> None:
    gang = played(1)
    completed_in: list[int | None] = []
    asked_in: list[int | None] = []
    for value in range(2):
        future, number = gang.call()
        future.when_done(lambda _: completed_in.append(threading.get_ident()))
        thread, came = in_a_thread(future)
        gang.agents.returns(0, number, value)
        thread.join(30)
        assert came == [[value]]
        asked_in.append(thread.ident)
    assert completed_in == asked_in, "no other thread had to be woken"


def test_the_reader_goes_on_where_one_who_waited_stops(played: Callable[[int], Gangs]) -> None:
    gang = played(1)
    future, number = gang.call()
    thread, came = in_a_thread(future, 0.2)
    thread.join(30)
    assert isinstance(came[0], TimeoutError)
    completed_in: list[int] = []
    future.when_done(lambda _: completed_in.append(threading.get_ident()))
    gang.agents.returns(0, number, "late")
    eventually(lambda: completed_in, "the answer is read")
    assert future.result(30) == ["late"]


def test_the_reader_goes_on_where_ctrl_c_comes_as_one_who_waited_stops(played: Callable[[int], Gangs]) -> None:
    gang = played(1)
    future, number = gang.call()
    loop = gang.gang._loop
    modify = loop.modify

    def interrupted(fd: int, mask: int) -> None:
        if mask:
            loop.modify = modify  # type: ignore[method-assign]
            raise KeyboardInterrupt
        modify(fd, mask)

    loop.modify = interrupted  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        future.result(0.01)
    gang.agents.returns(0, number, "late")
    eventually(future.done, "the answer is read")
    assert future.result(30) == ["late"]


def test_a_call_that_is_to_start_again_is_cancelled_before_its_reader_leaves(played: Callable[[int], Gangs]) -> None:
    gang = played(1)
    future, _number = gang.call(retries=1)
    thread, came = in_a_thread(future)
    with gang.gang._lock:
        gang.gang.handle(Frame(frames.EXIT, 0, 0, dict(DIED), memoryview(b"")))
        gang.gang.handle(m.Cancel(future.call, CancelledError()))
    thread.join(10)
    assert isinstance(came[0], CancelledError), came
    assert gang.gang.usable


def test_a_forked_child_that_waits_takes_no_answer_from_its_parent(played: Callable[[int], Gangs]) -> None:
    gang = played(1)
    future, number = gang.call()
    gang.agents.rank(0)
    child = os.fork()
    if not child:
        try:
            future.result(0.5)
        except TimeoutError:
            os._exit(3)
        finally:
            os._exit(4)
    gang.agents.returns(0, number, "the parent's")
    assert future.result(30) == ["the parent's"]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@pytest.mark.parametrize("how", ["cancelled", "its rank died", "its node was lost"])
def test_who_reads_an_answer_hears_of_an_end_that_another_thread_decided(
    played: Callable[[int], Gangs], how: str
) -> None:
    gang = played(1)
    future, _number = gang.call()
    thread, came = in_a_thread(future)
    match how:
        case "cancelled":
            future.cancel()
        case "its rank died":
            gang.agents.send(frames.EXIT, 0, 0, DIED)
        case _:
            gang.agents.hang_up()
    thread.join(10)
    assert not thread.is_alive()
    expected = {"cancelled": CancelledError, "its rank died": WorkerDied}.get(how, NodeLost)
    assert isinstance(came[0], expected), came
