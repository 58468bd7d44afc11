"""The scheduler alone: random histories of calls and ranks, without a process or a clock."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.gang.scheduler import Scheduler


@dataclass(eq=False)
class Call:
    """A call as the scheduler sees it."""

    number: int
    whole_gang: bool


def ready(world_size: int) -> Scheduler[Call]:
    scheduler: Scheduler[Call] = Scheduler(world_size)
    for rank in range(world_size):
        scheduler.free(rank)
    return scheduler


def test_single_calls_fill_the_lowest_idle_ranks() -> None:
    scheduler = ready(3)
    calls = [Call(i, False) for i in range(4)]
    for call in calls:
        scheduler.add(call)
    assert [scheduler.next() for _ in range(4)] == [(calls[0], (0,)), (calls[1], (1,)), (calls[2], (2,)), None]
    scheduler.free(1)
    assert scheduler.next() == (calls[3], (1,))


def test_a_broadcast_waits_for_every_rank_and_nothing_overtakes_it() -> None:
    scheduler = ready(2)
    first, wide, later = Call(0, False), Call(1, True), Call(2, False)
    for call in (first, wide, later):
        scheduler.add(call)
    assert scheduler.next() == (first, (0,))
    assert scheduler.next() is None, "rank 1 is idle, and stays so"
    scheduler.free(0)
    assert scheduler.next() == (wide, (0, 1))
    assert scheduler.next() is None
    scheduler.free(1)
    assert scheduler.next() == (later, (1,))


def test_a_lost_rank_holds_a_broadcast_up_until_it_is_back() -> None:
    scheduler = ready(2)
    wide, single = Call(0, True), Call(1, False)
    scheduler.lost(1)
    scheduler.add(wide)
    assert scheduler.next() is None
    assert scheduler.remove(wide)
    scheduler.add(single)
    assert scheduler.next() == (single, (0,))
    scheduler.free(1)
    assert scheduler.idle == {1}
    assert scheduler.running == {0: single}


def test_a_repetition_goes_before_what_waits() -> None:
    scheduler = ready(1)
    running, waiting = Call(0, True), Call(1, True)
    scheduler.add(running)
    scheduler.next()
    scheduler.add(waiting)
    scheduler.add(running, first=True)
    scheduler.free(0)
    assert scheduler.next() == (running, (0,))


def test_what_waits_can_be_taken_back() -> None:
    scheduler = ready(1)
    calls = [Call(i, False) for i in range(3)]
    for call in calls:
        scheduler.add(call)
    scheduler.next()
    assert not scheduler.remove(calls[0]), "it has started"
    assert scheduler.remove(calls[1])
    assert not scheduler.remove(calls[1])
    assert len(scheduler) == 1
    assert scheduler.drain() == [calls[2]]
    assert len(scheduler) == 0


def test_taking_back_thousands_compares_none_with_the_others() -> None:
    compared = 0

    class Counting(Call):
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

    scheduler = ready(1)
    calls = [Counting(i, False) for i in range(3000)]
    for call in calls:
        scheduler.add(call)
    assert all(scheduler.remove(call) for call in reversed(calls))
    assert compared < len(calls)


STEP = st.tuples(st.sampled_from(["single", "broadcast", "finish", "lose", "return", "cancel"]), st.integers(0, 63))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(world_size=st.integers(1, 5), steps=st.lists(STEP, max_size=60))
def test_random_histories(world_size: int, steps: list[tuple[str, int]]) -> None:
    """First come, first served; a rank runs one call at a time; a broadcast has all ranks; everything ends."""
    scheduler = ready(world_size)
    added: list[Call] = []
    started: list[Call] = []
    cancelled: set[Call] = set()
    busy: dict[int, Call] = {}
    gone: set[int] = set()

    def start_all() -> None:
        while (found := scheduler.next()) is not None:
            call, ranks = found
            assert not busy.keys() & set(ranks)
            assert not gone & set(ranks)
            assert ranks == tuple(range(world_size)) if call.whole_gang else len(ranks) == 1
            busy.update(dict.fromkeys(ranks, call))
            started.append(call)

    for what, choice in steps:
        if what in ("single", "broadcast"):
            added.append(Call(len(added), what == "broadcast"))
            scheduler.add(added[-1])
        elif what == "finish" and busy:
            rank = sorted(busy)[choice % len(busy)]
            del busy[rank]
            scheduler.free(rank)
        elif what == "lose":
            rank = choice % world_size
            busy.pop(rank, None)
            gone.add(rank)
            scheduler.lost(rank)
        elif what == "return" and gone:
            rank = sorted(gone)[choice % len(gone)]
            gone.discard(rank)
            scheduler.free(rank)
        elif what == "cancel" and added:
            call = added[choice % len(added)]
            assert scheduler.remove(call) == (call not in started and call not in cancelled)
            if call not in started:
                cancelled.add(call)
        start_all()
        assert scheduler.running == busy
        assert scheduler.idle == set(range(world_size)) - busy.keys() - gone

    for _ in range(len(added) + 1):  # every rank comes back and every call ends
        for rank in range(world_size):
            if rank in busy or rank in gone:
                busy.pop(rank, None)
                gone.discard(rank)
                scheduler.free(rank)
        start_all()
    assert started == [call for call in added if call not in cancelled], "in the order they came"
    assert len(scheduler) == 0
