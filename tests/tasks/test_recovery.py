"""The state machine of managed jobs, under thousands of histories in which clusters are late, lost, silent and lie."""

from __future__ import annotations

import time
from collections import Counter

from tests.tasks.outages import Played, play

from atoll.providers.base import AllocationState
from atoll.tasks import recovery as r
from atoll.tasks import transitions as t
from atoll.tasks.spec import JobStatus

READY, LOST, RELEASED = AllocationState.READY, AllocationState.LOST, AllocationState.RELEASED
NUM_SEEDS = 1000


def test_any_history() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        played = play(seed)
        try:
            check(played)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen[played.end.status] += 1
        seen["restarts"] += played.machine.state.num_restarts
    for status in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.FAILED_DRIVER):
        assert seen[status] > 10, seen
    assert seen["restarts"] > NUM_SEEDS / 4, seen


def check(played: Played) -> None:
    actions, end = played.actions, played.end
    assert [each for _, each in actions if isinstance(each, t.SetStatus)][-1] is end
    # In every end all clusters are down, but for those that were said to be left.
    num_left = sum(each.kind == "left" for _, each in played.of(t.Log))  # type: ignore[union-attr]
    up = [each for each in played.clusters.values() if each.state != "down"]
    assert len(up) <= num_left, f"{up} are left"
    causes(played)
    healthy_jobs_are_let_be(played)
    launches(played)
    if played.cancelled_s is not None and end.status is JobStatus.CANCELLED:
        after = actions[-1][0] - played.cancelled_s
        assert after <= r.CANCEL_S + 5 + r.DOWN_S + 2 * r.LONGEST_DOWN_S, f"its cancel took {after} s"


def causes(played: Played) -> None:
    """How it ended is how its last task did, and nothing is launched after an end that is final."""
    end, state = played.end, played.machine.state
    last = [event for _, event in played.handled if isinstance(event, r.Ended) and event.launch == state.launch][-1:]
    if end.status is JobStatus.SUCCEEDED:
        assert last[0].how == "succeeded"
    elif end.status is JobStatus.FAILED_DRIVER:
        assert all(place.refused for place in state.places)
    elif end.status is JobStatus.FAILED and last and last[0].how == "failed":
        assert end.exit_code == 3
    elif end.status is JobStatus.FAILED:
        assert state.num_fruitless >= r.MOST_FRUITLESS
    elif played.cancelled_s is None:
        assert end.status is JobStatus.CANCELLED
        released = RELEASED in (last[0].state if last else None, state_said(played))
        assert released or last[0].how == "cancelled"
    final = [at for at, e in played.handled if isinstance(e, r.Ended) and e.how in ("succeeded", "failed", "cancelled")]
    assert not [at for at, _ in played.of(r.Launch) if final and at > final[-1] and played.num_crashes == 0]


def state_said(played: Played) -> AllocationState | None:
    said = [event for _, event in played.handled if isinstance(event, r.Unheard)]
    return said[-1].state if said else None


def healthy_jobs_are_let_be(played: Played) -> None:
    """A cluster that was heard of lately is not taken down while its task runs, whatever its provider says."""
    for at, action in played.of(r.TakeDown):
        assert isinstance(action, r.TakeDown)
        cluster = played.clusters.get(action.cluster)
        if cluster is None or (played.cancelled_s is not None and played.cancelled_s <= at):
            continue
        running = [launch for launch, ended in cluster.tasks.items() if ended is None]
        if running and cluster.taken_down_s is not None and cluster.taken_down_s >= at:
            unheard_s = at - cluster.heard_s
            known = {e.launch for when, e in played.handled if when <= at and isinstance(e, r.LaunchFailed)}
            assert unheard_s >= r.LOST_S or set(running) & known, f"{cluster} was taken down after {unheard_s} s"


def launches(played: Played) -> None:
    """One after the other, with a pause where the place has just failed, and on no place that still has a cluster."""
    failed: dict[int, float] = {}
    going: dict[int, int] = {}  # clusters that are being taken down, on which choice
    choice_of: dict[int, int] = {}
    events = [*((at, 0, e) for at, e in played.handled), *((at, 1, a) for at, a in played.actions)]
    for at, _, each in sorted(events, key=lambda row: row[0]):
        if isinstance(each, r.Launch):
            if choice_of.get(each.cluster) is None:  # a new cluster
                assert each.choice not in going.values(), f"two clusters on {each.choice}"
            choice_of[each.cluster] = each.choice
            if each.launch not in failed:
                failed[each.launch] = at
        elif isinstance(each, r.TakeDown) and each.cluster in choice_of:
            going[each.cluster] = choice_of[each.cluster]
        elif isinstance(each, r.Down):
            going.pop(each.cluster, None)
        elif isinstance(each, t.Log) and each.kind == "left":
            going.clear()
    numbers = [each.launch for _, each in played.of(r.Launch)]  # type: ignore[union-attr]
    assert numbers == sorted(numbers)


# --------------------------------------------------------------------------------------------------- single decisions
def begun(*choices: str) -> r.RecoveryMachine:
    machine = r.RecoveryMachine([*choices])
    machine.start(0.0)
    return machine


def running(*choices: str) -> r.RecoveryMachine:
    machine = begun(*choices)
    machine.handle(r.Launched(1, 1), 1.0)
    machine.handle(r.Moved(1, JobStatus.RUNNING, ""), 1.0)
    return machine


def asked(actions: list[r.Action], kind: type) -> list[r.Action]:
    return [each for each in actions if isinstance(each, kind)]


def test_a_lost_cluster_is_replaced_elsewhere_and_the_place_set_aside() -> None:
    machine = running("a", "b")
    actions = machine.handle(r.Ended(1, "lost", "preempted", state=LOST), 100.0)
    assert asked(actions, r.TakeDown) == [r.TakeDown(1)]
    assert asked(actions, r.Launch) == [r.Launch(2, 2, 1, 0)]  # at once: b has not failed
    # b has nothing: a again, once its own back-off is over, though it is set aside for longer.
    machine.handle(r.Down(1), 101.0)
    actions = machine.handle(r.LaunchFailed(2, "no machine"), 103.0)
    assert asked(actions, r.Launch) == [r.Launch(3, 3, 0, 0)]


def test_the_only_place_is_tried_again_with_growing_pauses() -> None:
    machine, now, pauses = begun("a"), 0.0, []
    for launch in range(1, 12):
        machine.handle(r.LaunchFailed(launch, "no machine"), now)
        machine.handle(r.Down(launch), now)
        assert machine.deadline is not None
        pauses.append(machine.deadline - now)
        now = machine.deadline
        assert asked(machine.handle(t.Tick(), now), r.Launch) == [r.Launch(launch + 1, launch + 1, 0, 0)]
    assert pauses[:4] == [2.0, 4.0, 8.0, 16.0]
    assert pauses[-1] == r.LONGEST_BACKOFF_S


def test_a_cluster_that_is_still_there_is_kept_once() -> None:
    machine = running("a", "b")
    actions = machine.handle(r.Ended(1, "lost", "a node died", state=READY), 10.0)
    assert not asked(actions, r.TakeDown)
    assert asked(machine.handle(t.Tick(), 12.0), r.Launch) == [r.Launch(2, 1, 0, 0)]
    machine.handle(r.Launched(2, 2), 13.0)
    actions = machine.handle(r.Ended(2, "lost", "again", state=READY), 14.0)
    assert asked(actions, r.TakeDown) == [r.TakeDown(1)]
    assert asked(actions, r.Launch) == [r.Launch(3, 2, 1, 0)]


def test_a_task_that_failed_is_not_recovered_and_its_code_is_the_jobs() -> None:
    machine = running("a")
    actions = machine.handle(r.Ended(1, "failed", "rank 0 exited with code 3", 3), 10.0)
    assert asked(actions, r.TakeDown) == [r.TakeDown(1)]
    assert machine.handle(r.Down(1), 11.0) == [t.SetStatus(JobStatus.FAILED, "rank 0 exited with code 3", 3)]


def test_restarts_after_errors_are_counted_over_clusters() -> None:
    machine = running("a")
    machine.handle(r.Ended(1, "lost", "gone", state=LOST, num_errors=2), 10.0)
    machine.handle(r.Down(1), 11.0)
    assert asked(machine.handle(t.Tick(), 13.0), r.Launch) == [r.Launch(2, 2, 0, 2)]


def test_what_somebody_released_is_cancelled_and_what_a_probe_says_once_is_not_believed() -> None:
    machine = running("a")
    for at in range(10, 29):  # it answers in between
        assert not asked(machine.handle(r.Unheard(1, "no route", RELEASED if at % 2 else LOST), float(at)), r.TakeDown)
    machine.handle(r.Heard(1), 29.0)
    for at in range(30, 50):
        assert not asked(machine.handle(r.Unheard(1, "no route", RELEASED), float(at)), r.TakeDown)
    assert asked(machine.handle(r.Unheard(1, "scancel", RELEASED), 50.0), r.TakeDown)
    assert machine.handle(r.Down(1), 51.0) == [t.SetStatus(JobStatus.CANCELLED, "scancel", None)]


def test_a_cluster_that_its_provider_calls_healthy_is_waited_for_five_minutes() -> None:
    machine = running("a", "b")
    for at in range(300):
        assert not asked(machine.handle(r.Unheard(1, "no route", READY), 10.0 + at), r.Launch)
    assert asked(machine.handle(r.Unheard(1, "no route", READY), 310.0), r.Launch)


def test_restarts_on_a_cluster_are_counted_once_also_where_they_are_told_again() -> None:
    machine = running("a")
    for event in (r.Restarted(1, 1), r.Restarted(1, 2), r.Restarted(1, 1), r.Restarted(1, 2)):
        machine.handle(event, 5.0)
    assert machine.state.num_restarts == 2
    machine.handle(r.Ended(1, "lost", "gone", state=LOST), 10.0)
    machine.handle(r.Down(1), 11.0)
    machine.handle(t.Tick(), 13.0)
    machine.handle(r.Launched(2, 1), 14.0)
    machine.handle(r.Restarted(2, 1), 15.0)
    assert machine.state.num_restarts == 4


def test_a_task_that_waits_on_its_cluster_says_why() -> None:
    machine = begun("a")
    machine.handle(r.Launched(1, 1), 1.0)
    waits = r.Moved(1, JobStatus.PENDING, "waiting for a: behind 3 jobs")
    assert machine.handle(waits, 2.0) == [t.SetStatus(JobStatus.INIT, waits.reason)]
    assert machine.handle(r.Moved(1, JobStatus.RUNNING, ""), 3.0) == [t.SetStatus(JobStatus.RUNNING, "on a")]
    assert machine.handle(waits, 4.0) == [t.SetStatus(JobStatus.RECOVERING, waits.reason)]


def test_a_cluster_that_waits_for_other_nodes_is_not_lost() -> None:
    machine = running("a", "b")
    for at in range(0, 100_000, 10):
        actions = machine.handle(r.Unheard(1, "behind 3 jobs", AllocationState.PENDING), 10.0 + at)
        assert not asked(actions, r.Launch)


def test_a_task_that_is_lost_again_and_again_at_once_has_failed() -> None:
    machine, now = begun("a"), 0.0
    for launch in range(1, 100):
        machine.handle(r.Launched(launch, launch), now)
        machine.handle(r.Ended(launch, "lost", "the machine crashed", state=LOST), now)
        machine.handle(r.Down(machine.state.num_clusters), now)
        if machine.done:
            break
        assert machine.deadline is not None
        now = machine.deadline
        machine.handle(t.Tick(), now)
    assert (machine.status, launch) == (JobStatus.FAILED, r.MOST_FRUITLESS)


def test_a_queue_that_does_not_move_is_left_where_there_is_another() -> None:
    machine = begun("a", "b")
    machine.handle(r.Waits(1, "behind others"), 5.0)
    assert machine.deadline == r.PENDING_S
    assert asked(machine.handle(t.Tick(), r.PENDING_S), r.Abort) == [r.Abort(1)]
    assert asked(machine.handle(r.LaunchFailed(1, "given up"), r.PENDING_S + 1), r.Launch) == [r.Launch(2, 2, 1, 0)]
    assert begun("a").deadline is None


def test_ten_thousand_nodes_cost_little() -> None:
    """10,000 jobs of a node each, heard of every 15 s and lost once an hour: CPU of a minute of theirs."""
    machines = [running("a", "b", "c") for _ in range(10_000)]
    began = time.process_time()
    now = 100.0
    for second in range(60):
        now += 1.0
        for at in range(second % 15, len(machines), 15):
            machines[at].handle(r.Heard(machines[at].state.launch), now)
        for at in range(second, len(machines), 3600):
            machine = machines[at]
            machine.handle(r.Ended(machine.state.launch, "lost", "preempted", state=LOST), now)
            machine.handle(r.Launched(machine.state.launch, 1), now)
            machine.state.to_json()
    assert time.process_time() - began <= 1.0
