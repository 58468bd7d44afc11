"""A gang whose agents the test plays: what is ordered when a rank fails, and when. Real channels, no processes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from tests.pools import eventually
from tests.talking import Talk

from atoll.core import events
from atoll.core.errors import WorkerDied
from atoll.gang import dispatch
from atoll.gang.call import Failure, Job, Request, Shipped, Sink
from atoll.gang.futures import CallFuture
from atoll.gang.gang import Gang
from atoll.gang.log_router import LogRouter
from atoll.gang.members import GangSpec
from atoll.gang.notifier import Notifier
from atoll.providers.accelerators import AcceleratorSpec
from atoll.providers.base import NodePlan, Plan
from atoll.wire import frames
from atoll.wire.codec import dumps
from atoll.wire.exceptions import pack_exception
from atoll.wire.frames import Frame, pack, send_all
from atoll.wire.payloads import Arena, Encoded

DIED: dict[str, Any] = {"exit_code": 3, "signal": None, "oom": False, "tail": [], "killed": False, "fault": None}


class Handle:
    """A started node: one end of its channel."""

    reason = None

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel

    def stop(self) -> None:
        self.channel.close()


class Agents:
    """A provider of one node, whose agent and ranks are played by the test."""

    name = "the test"

    def __init__(self, num_ranks: int) -> None:
        self.spec_plan = Plan(self.name, (NodePlan(0, "127.0.0.1", num_ranks),))
        ours, self._theirs = socket.socketpair()
        self.talk = Talk(self._theirs)
        self._handle = Handle(ours)
        for rank in range(num_ranks):
            self.hello(rank)

    def plan(self, *, nodes: int, accelerator: AcceleratorSpec | None, workers_per_node: int | str) -> Plan:
        return self.spec_plan

    def start(self, node: NodePlan, agent: Sequence[str]) -> Handle:
        return self._handle

    def send(self, kind: int, rank: int, call: int = 0, meta: dict[str, Any] | None = None, fds: Any = ()) -> None:
        self.talk.channel.settimeout(20)
        send_all(self.talk.channel, pack(kind, rank, call, meta, (), len(fds)), fds)

    def hello(self, rank: int) -> None:
        self.send(frames.HELLO, rank, 0, {"port": 1})

    def raises(self, rank: int, call: int, error: Exception) -> None:
        encoded = Arena().encode(pack_exception(error))
        send_all(self.talk.channel, pack(frames.ERROR, rank, call, {"payload": encoded.table}, encoded.inline))

    def hang_up(self) -> None:
        self._theirs.close()


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
        self.gang.submit(future.job)
        (number,) = {self.agents.talk.next(frames.CALL, rank).call for rank in range(num_ranks)}
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


def test_ranks_that_go_on_after_a_failure_are_asked_then_killed_and_the_call_ends(
    played: Callable[[int], Gangs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_HARD_STOP_S", 0.9)  # time for this test to answer, on a busy machine
    monkeypatch.setattr(dispatch, "_GIVE_UP_S", 1.2)
    gang = played(3)
    talk = gang.agents.talk
    future, number = gang.call()
    started = time.monotonic()
    gang.agents.raises(0, number, LookupError("the first"))
    assert [talk.next(frames.CANCEL, rank).call for rank in (1, 2)] == [number, number]
    assert time.monotonic() - started >= 0.15, "ranks get a moment to end by themselves"
    gang.agents.raises(2, number, KeyError("the second"))  # it listens; rank 1 does not
    assert talk.next(frames.KILL).rank == 1
    with pytest.raises(LookupError, match="the first") as caught:
        future.result(30)
    assert "rank 2 raised too: KeyError" in caught.value.__notes__[0]
    gang.agents.send(frames.EXIT, 1, number, {**DIED, "killed": True})
    assert talk.next(frames.SPAWN).rank == 1
    gang.agents.hello(1)
    again, number = gang.call()  # the gang is whole
    for rank in range(3):
        gang.agents.raises(rank, number, ZeroDivisionError())
    assert isinstance(again.exception(30), ZeroDivisionError)
    assert not any(isinstance(event, events.RankDied) for event in gang.events), "it was killed, it did not die"


def test_a_repetition_that_never_starts_takes_nothing_of_the_first_attempt(played: Callable[[int], Gangs]) -> None:
    gang = played(2)
    future, number = gang.call(retries=1)
    result = os.memfd_create("result")
    try:
        gang.agents.send(frames.RESULT, 0, number, {"payload": {"head": 0, "file": 1}}, [result])
    finally:
        os.close(result)
    gang.agents.send(frames.EXIT, 1, number, DIED)  # the others returned: the call is started again as a whole
    eventually(lambda: any(isinstance(event, events.CallRetried) for event in gang.events), "a repetition")
    ours = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # get the numbers that were closed
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(30)
    for fd in ours:
        os.close(fd)  # none of them was closed instead of the result


class Silent(Sink):
    """A sink that nothing is said to."""

    def frame(self, frame: Frame, rank: int, node: int) -> None: ...

    def done(self, results: dict[int, Frame], failures: list[Failure], error: BaseException | None) -> None: ...


def job_on(*ranks: int) -> Job:
    encoded = Encoded({}, [])
    job = Job(Request(Shipped("", encoded, False, False), encoded, True, "f", retries=1), Silent())
    job.begin(1, ranks)
    return job


def test_a_group_is_made_when_every_rank_asks() -> None:
    job = job_on(0, 1, 2)
    assert job.ask_group(1) == ([], False)
    assert job.ask_group(0) == ([], False)
    assert job.ask_group(2) == ((0, 1, 2), True)
    assert job.ask_group(0) == ([], False), "and may be asked for again"


def test_no_group_is_made_without_a_rank_that_ended() -> None:
    job = job_on(0, 1, 2)
    assert job.ask_group(0) == ([], False)
    assert job.end_rank(2) == [0], "it waits, and needs to be told"
    assert job.ask_group(1) == ([1], False), "told at once"
    assert job.end_rank(0) == []
    late = job_on(0, 1)
    assert late.end_rank(1) == []
    assert late.ask_group(0) == ([0], False)


def test_what_is_started_again() -> None:
    job = job_on(0, 1)
    died, raised = Failure(1, 0, error=WorkerDied(rank=1, node=0)), Failure(0, 0)
    assert job.fault(None) is None
    job.failures = [raised]
    assert job.fault(None) == "rank 0 raised"
    found = {"it would raise again": job.may_repeat}
    job.failures.append(died)
    found["a rank was lost"] = job.may_repeat
    job.streaming = True
    found["its values were taken"] = job.may_repeat
    job.streaming, job.attempt = False, 1
    found["once is what was asked for"] = job.may_repeat
    assert [why for why, repeat in found.items() if repeat] == ["a rank was lost"]
    assert job.fault(CancelledError("stopped")) == "stopped"
