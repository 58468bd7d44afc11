"""The job state machine: cases by hand, then thousands of seeded schedules in which everything goes wrong."""

from __future__ import annotations

from collections import Counter
from signal import SIGKILL
from typing import Any

import pytest
from tests.tasks.faults import FakeProcess, Played, play

from atoll.core.errors import ConfigError
from atoll.tasks.machine import CANCEL_GRACE_S, SAME_INSTANT_S, SETUP_SETTLE_S, STOP_GRACE_S, JobMachine
from atoll.tasks.spec import JobSpec, JobStatus, Restarts, node_name
from atoll.tasks.transitions import (
    Action,
    CancelAsked,
    Input,
    Log,
    NodeDown,
    NodeSilent,
    NodesTaken,
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


# ------------------------------------------------------------------------------------------------- by hand
class Hand:
    """A machine driven by hand: ``tell`` inputs, look at what it answered last, and at everything so far."""

    def __init__(self, spec: JobSpec, *, cluster: int | None = None, setup_needed: bool = True, **earlier: Any) -> None:
        cluster = cluster or spec.num_nodes
        self.machine = JobMachine(spec, num_cluster_nodes=cluster, setup_needed=setup_needed, **earlier)
        self.now = 100.0
        self.last = self.machine.start(self.now)
        self.all = list(self.last)

    def tell(self, *events: Input, after_s: float = 0.0) -> list[Action]:
        self.now += after_s
        self.last = [action for event in events for action in self.machine.handle(event, self.now)]
        self.all += self.last
        return self.last

    def up(self, *nodes: int) -> list[Action]:
        return self.tell(*(NodeUp(node, self.machine.attempt) for node in nodes))

    def down(self, node: int, reason: str = "its agent went away", *, started: bool = True) -> list[Action]:
        return self.tell(NodeDown(node, self.machine.attempt, reason, started))

    def end(
        self,
        node: int,
        code: int | None = 0,
        signal: int | None = None,
        *,
        process: int = 0,
        phase: Phase = "run",
        oom: bool = False,
        tail: tuple[str, ...] = (),
        after_s: float = 0.0,
    ) -> list[Action]:
        if signal is not None:
            code = None
        ended = ProcessEnded(node, process, phase, self.machine.attempt, code, signal, oom, tail)
        return self.tell(ended, after_s=after_s)

    def tick(self) -> list[Action]:
        """The time that it waits for has come."""
        assert self.machine.deadline is not None
        self.now = self.machine.deadline
        return self.tell(Tick())

    @property
    def outcome(self) -> tuple[JobStatus, str, int | None]:
        last = [action for action in self.all if isinstance(action, SetStatus)][-1]
        assert last.status is self.machine.status
        return last.status, last.reason, last.exit_code


def kinds(actions: list[Action]) -> list[str]:
    """What was asked for, without rows of the log: ``StopNode 1``."""
    named = []
    for action in actions:
        if isinstance(action, SetStatus):
            named.append(str(action.status))
        elif isinstance(action, StartProcess):
            named.append(f"StartProcess {action.phase} {action.node}.{action.process}")
        elif not isinstance(action, Log):
            named.append(f"{type(action).__name__} {action.node}")
    return named


def lines(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, Log) and action.text]


def running(num_nodes: int = 2, restarts: Restarts | None = None, **more: Any) -> Hand:
    """A job without setup, whose processes run."""
    hand = Hand(JobSpec(num_nodes=num_nodes, run="true", restarts=restarts or Restarts(), **more))
    hand.up(*range(num_nodes))
    assert hand.machine.status is JobStatus.RUNNING
    return hand


def test_a_job_goes_through_its_phases_and_each_waits_for_all() -> None:
    hand = Hand(JobSpec(num_nodes=2, setup="a", run="b"), cluster=3)
    assert kinds(hand.last) == ["INIT", "StartNode 0", "StartNode 1", "StartNode 2"]
    assert lines(hand.last) == ["Waiting for task resources on 2 nodes."]
    assert kinds(hand.up(2, 0)) == []
    assert kinds(hand.up(1)) == ["SETTING_UP", *(f"StartProcess setup {node}.0" for node in range(3))]
    assert kinds(hand.end(0, phase="setup")) == kinds(hand.end(2, phase="setup")) == []
    # The third node was there for setup only.
    assert kinds(hand.end(1, phase="setup")) == [
        "StopNode 2",
        "RUNNING",
        "StartProcess run 0.0",
        "StartProcess run 1.0",
    ]
    assert kinds(hand.end(0)) == []
    assert hand.machine.deadline is None
    assert not hand.machine.done
    assert kinds(hand.end(1, after_s=3600)) == ["StopNode 0", "StopNode 1", "SUCCEEDED"]
    assert hand.machine.done
    assert hand.outcome == (JobStatus.SUCCEEDED, "", None)


@pytest.mark.parametrize("setup_needed", [True, False])
def test_setup_runs_where_there_is_one_and_it_is_wanted(setup_needed: bool) -> None:
    without = Hand(JobSpec(run="b"), cluster=2, setup_needed=setup_needed)
    without.up(0)
    assert kinds(without.all) == ["INIT", "StartNode 0", "RUNNING", "StartProcess run 0.0"]
    only_setup = Hand(JobSpec(setup="a"), setup_needed=setup_needed)
    only_setup.up(0)
    if setup_needed:
        assert only_setup.machine.status is JobStatus.SETTING_UP
        only_setup.end(0, phase="setup")
    assert only_setup.machine.done
    assert only_setup.outcome[0] is JobStatus.SUCCEEDED


def test_the_first_that_fails_is_named_and_the_others_stopped_within_two_seconds() -> None:
    hand = running(3)
    begun = hand.now
    assert kinds(hand.end(2, 1, tail=("no such file", "bye"))) == ["Terminate 0", "Terminate 1"]
    assert lines(hand.last) == ["rank 2 on worker2 exited with code 1; stopping the others."]
    (named,) = [action for action in hand.last if isinstance(action, Log) and action.kind == "failed"]
    assert (named.node, named.rank, dict(named.data)) == (2, 2, {"exit_code": 1, "tail": "no such file\nbye"})
    assert kinds(hand.end(0, None, 15)) == []
    assert kinds(hand.tick()) == ["StopNode 0", "StopNode 1", "StopNode 2", "FAILED"]
    assert hand.now - begun < 2.0
    assert hand.outcome == (JobStatus.FAILED, "rank 2 on worker2 exited with code 1", 1)
    stopped = [action for action in hand.all if isinstance(action, Log) and dict(action.data).get("stopped")]
    assert [action.node for action in stopped] == [0]


def test_a_failed_job_does_not_wait_for_who_has_ended() -> None:
    hand = running(2)
    hand.end(1, 3)
    assert kinds(hand.end(0, 1, after_s=0.2)) == ["StopNode 0", "StopNode 1", "FAILED"]
    assert hand.outcome == (JobStatus.FAILED, "rank 1 on worker1 exited with code 3", 3)
    alone = running(1)
    assert kinds(alone.end(0, 3)) == ["StopNode 0", "FAILED"]
    assert lines(alone.last) == [], "the job's last line says it"


@pytest.mark.parametrize("first", [0, 1])
def test_one_rank_ends_well_at_once_and_the_other_fails_later(first: int) -> None:
    hand = running(2)
    assert kinds(hand.end(first)) == []
    assert kinds(hand.end(1 - first, 7, after_s=600)) == ["StopNode 0", "StopNode 1", "FAILED"]
    assert hand.outcome == (JobStatus.FAILED, f"rank {1 - first} on {node_name(1 - first)} exited with code 7", 7)


@pytest.mark.parametrize(
    ("ended", "text", "code"),
    [
        ({"signal": 9}, "was killed by SIGKILL (signal 9)", 137),
        ({"signal": 9, "oom": True}, "was killed for memory (the kernel's OOM killer)", 137),
        ({"code": 137, "oom": True}, "was killed for memory (the kernel's OOM killer)", 137),
        ({"code": 0, "oom": True}, "was killed for memory (the kernel's OOM killer)", 0),
        ({"code": 137}, "exited with code 137 (what it ran was killed by SIGKILL (signal 9))", 137),
        ({"code": 2}, "exited with code 2", 2),
        ({"code": -1}, "exited with code -1", -1),
        ({"code": 255}, "exited with code 255", 255),
        ({"code": 127}, "exited with code 127 (command not found: is it installed there, and on PATH?)", 127),
        ({"signal": 34}, "was killed by SIGRTMIN (signal 34)", 162),
        ({"signal": 40}, "was killed by signal 40", 168),
        ({"code": None}, "ended, its exit code is not known", None),
    ],
)
def test_how_a_process_ended_is_said(ended: dict[str, Any], text: str, code: int | None) -> None:
    hand = running(2)
    hand.end(1, **ended)
    hand.end(0, 143)
    assert hand.outcome == (JobStatus.FAILED, f"rank 1 on worker1 {text}", code)


@pytest.mark.parametrize("ended", [{"code": 139}, {"signal": 11}])
def test_a_segmentation_fault_comes_with_a_hint(ended: dict[str, Any]) -> None:
    hand = running(1)
    hand.end(0, **ended)
    assert "(a segmentation fault: look at native code" in hand.outcome[1]


def test_all_killed_at_once_has_a_culprit_too() -> None:
    hand = running(3)
    for node in (1, 0, 2):
        hand.end(node, 137)
    assert hand.outcome[1].startswith("rank 1 on worker1 exited with code 137")


@pytest.mark.parametrize("ended", [{"signal": 11}, {"code": 139}, {"signal": 9, "oom": True}, {"code": 1, "oom": True}])
def test_of_two_that_fail_at_once_the_telling_end_is_the_cause(ended: dict[str, Any]) -> None:
    hand = running(3)
    hand.end(0, 1)  # its connection to rank 1 broke, and we hear of that first
    hand.end(1, **ended, after_s=SAME_INSTANT_S / 2)
    hand.end(2, None, 9)
    assert hand.outcome[1].startswith("rank 1 on worker1 ")
    culprits = [action.rank for action in hand.all if isinstance(action, Log) and action.kind == "failed"]
    assert culprits == [0, 1], "the last row of this kind counts"


@pytest.mark.parametrize(
    ("code", "signal", "after_s"),
    [
        (1, None, 0.0),  # no more telling than the first
        (None, 15, 0.01),  # that was us
        (143, None, 0.01),
        (None, 6, 0.01),  # aborted in its destructors, on our SIGTERM
        (None, 11, SAME_INSTANT_S * 2),  # too late to have been the cause
    ],
)
def test_what_ends_after_the_culprit_was_stopped_by_us(code: int | None, signal: int | None, after_s: float) -> None:
    hand = running(2)
    hand.end(0, 1)
    hand.end(1, code, signal, after_s=after_s)
    assert hand.outcome == (JobStatus.FAILED, "rank 0 on head exited with code 1", 1)


def test_ranks_of_a_node_are_counted_through() -> None:
    hand = running(2, command=("python", "x.py"), num_processes=3)
    assert len(kinds(hand.all)) == 3 + 1 + 6
    hand.end(1, 9, process=2)
    assert hand.last[-2:] == [Terminate(0), Terminate(1)]
    assert "rank 5 on worker1 exited with code 9" in lines(hand.last)[0]


def test_a_failing_setup_waits_a_moment_for_others_that_fail_as_well() -> None:
    hand = Hand(JobSpec(num_nodes=3, setup="a", run="b"))
    hand.up(0, 1, 2)
    assert kinds(hand.end(1, 127, phase="setup")) == []
    assert kinds(hand.end(2, 0, phase="setup")) == []
    assert kinds(hand.end(0, 1, phase="setup", after_s=SETUP_SETTLE_S / 2)) == [
        "StopNode 0",
        "StopNode 1",
        "StopNode 2",
        "FAILED_SETUP",
    ]
    assert hand.outcome[1].startswith("setup failed on 2 nodes: worker1 exited with code 127 (command not found")
    assert hand.outcome[1].endswith(", head exited with code 1")
    assert hand.outcome[2] == 127


def test_a_failing_setup_does_not_wait_for_those_that_go_on() -> None:
    hand = Hand(JobSpec(num_nodes=2, setup="a", run="b"))
    hand.up(0, 1)
    begun = hand.now
    hand.end(1, 2, phase="setup")
    assert kinds(hand.tick()) == ["Terminate 0"]
    assert kinds(hand.tick()) == ["StopNode 0", "StopNode 1", "FAILED_SETUP"]
    assert hand.outcome[1:] == ("setup on worker1 exited with code 2", 2)
    assert hand.now - begun == pytest.approx(SETUP_SETTLE_S + STOP_GRACE_S)


def test_what_is_stale_told_twice_or_made_up_means_nothing() -> None:
    hand = running(2, Restarts(on_errors=1))
    hand.end(0, 1)
    hand.end(1, None, 15)
    hand.tick()
    assert hand.machine.attempt == 2
    for event in (
        NodeUp(0, 1),
        NodeDown(1, 1, "old", started=True),
        ProcessEnded(0, 0, "run", 1, 1),
        ProcessStarted(0, 0, "run", 2, 17),
        ProcessEnded(0, 0, "run", 2, 1),
        NodeSilent(0, 1, 5.0, "quiet"),
        NodeUp(7, 2),
    ):
        assert hand.tell(event) == []
    hand.up(0, 1)
    assert hand.up(0) == []
    assert hand.end(0, 1, phase="setup") == hand.end(0, 1, process=1) == hand.end(5, 1) == []
    hand.end(0)
    assert hand.end(0) == hand.end(0, 1) == []
    hand.end(1)
    assert hand.outcome[0] is JobStatus.SUCCEEDED


def test_a_lost_node_restarts_the_job_on_fresh_nodes_after_a_while() -> None:
    hand = Hand(JobSpec(num_nodes=2, setup="a", run="b"))
    hand.up(0, 1)
    hand.end(0, phase="setup")
    hand.end(1, phase="setup")
    assert kinds(hand.down(1)) == ["Terminate 0"]
    assert kinds(hand.end(0, 1)) == ["StopNode 0", "RECOVERING"]
    assert hand.outcome[:2] == (JobStatus.RECOVERING, "worker1 was lost: its agent went away")
    assert lines(hand.last) == ["Restarting in 1 s (restart 1): worker1 was lost: its agent went away"]
    assert kinds(hand.tick()) == ["StartNode 0", "StartNode 1"]
    assert hand.machine.status is JobStatus.RECOVERING
    hand.up(0, 1)
    assert hand.machine.status is JobStatus.SETTING_UP, "it may be a fresh machine"


def test_setup_is_not_repeated_after_an_error() -> None:
    hand = Hand(JobSpec(setup="a", run="b", restarts=Restarts(on_errors=1)))
    hand.up(0)
    hand.end(0, phase="setup")
    hand.end(0, 1)
    hand.tick()
    assert kinds(hand.up(0)) == ["RUNNING", "StartProcess run 0.0"]


def test_a_setup_that_failed_is_repeated() -> None:
    hand = Hand(JobSpec(setup="a", run="b", restarts=Restarts(on_errors=1)))
    hand.up(0)
    hand.end(0, 1, phase="setup")
    hand.tick()
    assert kinds(hand.up(0)) == ["SETTING_UP", "StartProcess setup 0.0"]
    hand.end(0, 1, phase="setup")
    assert hand.outcome == (
        JobStatus.FAILED_SETUP,
        "setup on head exited with code 1 (it had been restarted 1 time)",
        1,
    )


def test_restarts_are_counted_by_what_they_answer_and_wait_longer_each_time() -> None:
    hand = running(1, Restarts(on_errors=2, on_exit_codes=(42, 137), on_lost_nodes=1))
    waits = []

    def again(**ended: Any) -> None:
        hand.end(0, **ended)
        begun = hand.now
        hand.tick()
        waits.append(hand.now - begun)
        hand.up(0)

    for ended in ({"code": 42}, {"code": 1}, {"signal": 9}, {"code": 2}, {"code": 42}, {"code": 42}):
        again(**ended)
    assert waits == [1, 2, 4, 8, 16, 30]
    hand.down(0)
    hand.tick()
    hand.up(0)
    assert hand.machine.status is JobStatus.RUNNING
    hand.end(0, 1)
    assert hand.outcome == (JobStatus.FAILED, "rank 0 on head exited with code 1 (it had been restarted 7 times)", 1)


def test_restarts_may_go_on_for_weeks() -> None:
    hand = running(1, Restarts(on_exit_codes=(42,)))
    for _ in range(1100):  # 2.0 ** 1024 is too much for a number
        hand.end(0, 42)
        hand.tick()
        hand.up(0)
    assert hand.machine.status is JobStatus.RUNNING


def test_lost_nodes_are_endured_so_often() -> None:
    hand = running(2, Restarts(on_lost_nodes=2))
    for _ in range(2):
        hand.down(1)
        hand.tick()
        hand.tick()
        hand.up(0, 1)
    hand.down(1, "no power")
    hand.tick()
    assert hand.outcome[:2] == (JobStatus.FAILED, "worker1 was lost: no power (it had been restarted 2 times)")
    (*_, named) = [action for action in hand.all if isinstance(action, Log) and action.kind == "lost"]
    assert (named.node, named.rank) == (1, None)


def test_nodes_that_cannot_be_had_fail_at_first_and_are_tried_again_later() -> None:
    hand = Hand(JobSpec(num_nodes=3, run="a"))
    hand.up(0)
    assert kinds(hand.down(1, "it refuses", started=False)) == ["StopNode 0", "StopNode 2", "FAILED_DRIVER"]
    assert hand.outcome[1] == "worker1 could not be started: it refuses"
    later = running(2, Restarts(on_lost_nodes=2))
    later.down(1)
    later.end(0, None, 15)
    later.tick()
    assert kinds(later.down(1, "no route", started=False)) == ["StopNode 0", "RECOVERING"]
    later.tick()
    later.down(1, "no route", started=False)
    assert later.outcome[:2] == (
        JobStatus.FAILED_DRIVER,
        "worker1 could not be started: no route (it had been restarted 2 times)",
    )


def test_a_node_lost_when_its_part_is_done_harms_nobody() -> None:
    hand = running(2)
    hand.end(0)
    assert kinds(hand.down(0)) == []
    assert lines(hand.last) == ["head was lost: its agent went away; its ranks had finished by then."]
    assert hand.down(0) == [], "it is said once"
    assert kinds(hand.end(1)) == ["StopNode 1", "SUCCEEDED"]


@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_node_lost_during_setup_is_missed_where_it_has_a_part_to_come(node: int) -> None:
    hand = Hand(JobSpec(num_nodes=2, setup="a", run="b"), cluster=3)
    hand.up(0, 1, 2)
    hand.end(node, phase="setup")
    hand.down(node)
    if node < 2:
        hand.tick()
        assert hand.machine.status is JobStatus.RECOVERING
    else:
        assert hand.machine.status is JobStatus.SETTING_UP
        hand.end(0, phase="setup")
        hand.end(1, phase="setup")
        assert hand.machine.status is JobStatus.RUNNING


def test_a_node_lost_beside_a_failing_setup_does_not_hide_it() -> None:
    hand = Hand(JobSpec(num_nodes=2, setup="a", run="b"))
    hand.up(0, 1)
    hand.end(0, 1, phase="setup")
    assert kinds(hand.down(1)) == ["StopNode 0", "FAILED_SETUP"]
    assert hand.outcome[1] == "setup on head exited with code 1"


@pytest.mark.parametrize(
    ("silent", "after_s", "is_cause"), [(False, 0.2, True), (True, 1.2, True), (False, 1.2, False)]
)
def test_a_rank_that_fails_because_a_node_is_going_is_not_the_culprit(
    silent: bool, after_s: float, is_cause: bool
) -> None:
    hand = running(3, Restarts(on_lost_nodes=1))
    if silent:
        hand.tell(NodeSilent(2, 1, 5.0, "quiet"))
    hand.end(0, 1)
    hand.tell(NodeDown(2, 1, "power", started=True), after_s=after_s)
    hand.end(1, None, 15)
    if is_cause:
        assert hand.outcome[:2] == (JobStatus.RECOVERING, "worker2 was lost: power")
    else:
        assert hand.outcome[:2] == (JobStatus.FAILED, "rank 0 on head exited with code 1")


def test_a_node_lost_while_it_is_stopped_is_just_gone() -> None:
    hand = running(2)
    hand.end(0, None, 11)
    assert kinds(hand.down(1)) == ["StopNode 0", "FAILED"]
    assert hand.outcome[1].startswith("rank 0 on head was killed by SIGSEGV")
    same_node = running(2, Restarts(on_lost_nodes=1), command=("x",), num_processes=2)
    same_node.end(1, 3)
    same_node.down(1)
    same_node.tick()
    assert same_node.outcome[1] == "rank 2 on worker1 exited with code 3"
    cancelled = running(2)
    cancelled.tell(CancelAsked())
    cancelled.down(1)
    cancelled.end(0, None, 15)
    assert cancelled.outcome[0] is JobStatus.CANCELLED


def test_silence_is_said_once_and_so_is_its_end() -> None:
    hand = running(2)
    told = [NodeSilent(1, 1, silent_s, f"h1: {silent_s:g}") for silent_s in (5.2, 6.2, 0.0, 0.0)]
    hand.tell(*told)
    assert lines(hand.last) == ["h1: 5.2", "h1: 0"]
    assert hand.machine.status is JobStatus.RUNNING


def test_who_fails_beside_a_silent_node_is_told_with_it() -> None:
    hand = running(3)
    hand.tell(NodeSilent(2, 1, 5.0, "quiet"))
    hand.end(0, 1, after_s=2.0)
    hand.end(1, None, 15)
    hand.tick()
    assert hand.outcome[:2] == (
        JobStatus.FAILED,
        "rank 0 on head exited with code 1, while nothing was heard of worker2 for 7 s",
    )


@pytest.mark.parametrize("when", ["INIT", "SETTING_UP", "RUNNING", "RECOVERING"])
def test_cancel_at_any_time(when: str) -> None:
    hand = Hand(JobSpec(num_nodes=2, setup="a", run="b", restarts=Restarts(on_errors=1)))
    if when != "INIT":
        hand.up(0, 1)
    if when in ("RUNNING", "RECOVERING"):
        hand.end(0, phase="setup")
        hand.end(1, phase="setup")
    if when == "RECOVERING":
        hand.end(0, 1)
        hand.end(1, None, 15)
    assert hand.machine.status == when
    hand.tell(CancelAsked("cancelled by ada"))
    if when in ("SETTING_UP", "RUNNING"):
        assert kinds(hand.last) == ["Terminate 0", "Terminate 1"]
        assert lines(hand.last) == ["cancelled by ada; stopping the job."]
        hand.end(0, 1, phase="setup" if when == "SETTING_UP" else "run")
        assert hand.tell(CancelAsked(), after_s=1.0) == []
        begun = hand.now - 1.0
        hand.tick()
        assert hand.now - begun == CANCEL_GRACE_S
    assert hand.outcome == (JobStatus.CANCELLED, "cancelled by ada", None)
    assert kinds(hand.last)[:-1] == ([] if when == "RECOVERING" else ["StopNode 0", "StopNode 1"])


@pytest.mark.parametrize("how", ["cancel", "failure", "time limit"])
def test_ranks_have_the_time_to_save_that_their_job_gives_them_whatever_ends_them(how: str) -> None:
    hand = running(2, grace_s=60.0, timeout_s=100.0)
    begun = hand.now
    if how == "cancel":
        assert Terminate(1, 10) in hand.tell(CancelAsked("cancelled", 10))
    elif how == "failure":
        hand.end(0, 1)
    else:
        hand.tick()
        begun = hand.now
    hand.tick()
    assert hand.now - begun == 60.0
    assert hand.machine.done


def test_a_cancel_alone_gives_the_time_to_save_and_sigkill_ends_that_time() -> None:
    hand = running(2, save_s=60.0)
    begun = hand.now
    hand.tell(CancelAsked("cancelled"))
    hand.tick()
    assert hand.now - begun == 60.0
    hand = running(2, save_s=60.0)
    hand.tell(CancelAsked("cancelled"))
    hand.tell(CancelAsked("", SIGKILL), after_s=1.0)
    begun = hand.now
    hand.tick()
    assert (hand.now, hand.outcome[0]) == (begun, JobStatus.CANCELLED)
    hand = running(2, save_s=60.0)
    hand.end(0, 1)
    begun = hand.now
    hand.tick()
    assert hand.now - begun == STOP_GRACE_S


def test_cancel_of_what_is_being_stopped_gives_no_more_time() -> None:
    hand = running(2, Restarts(on_errors=5))
    hand.end(0, 1)
    begun = hand.now
    assert kinds(hand.tell(CancelAsked(), after_s=1.0)) == [], "it was terminated before"
    hand.tick()
    assert hand.now - begun == STOP_GRACE_S
    assert hand.outcome[0] is JobStatus.CANCELLED


@pytest.mark.parametrize("when", ["INIT", "RUNNING", "RECOVERING"])
def test_a_time_limit(when: str) -> None:
    hand = Hand(JobSpec(run="b", timeout_s=0.5, restarts=Restarts(on_errors=1)))
    if when != "INIT":
        hand.up(0)
    if when == "RECOVERING":
        hand.end(0, 1)
    assert hand.machine.status == when
    hand.tick()
    if when == "RUNNING":
        assert kinds(hand.last) == ["Terminate 0"]
        hand.tick()
    assert hand.outcome[0] is JobStatus.FAILED
    assert hand.outcome[1].startswith("it ran past its time limit of 0.5 s")


NEAR = "the time limit is near"


def test_nodes_that_are_taken_are_left_and_another_machine_goes_on() -> None:
    hand = running(grace_s=1.0)
    assert kinds(hand.tell(NodesTaken(NEAR, 40.0, again=True))) == ["Terminate 0", "Terminate 1"]
    assert lines(hand.last) == [f"{NEAR}; stopping the job."]
    assert hand.machine.deadline == hand.now + 40.0
    hand.end(0, 0, after_s=20.0)
    assert kinds(hand.end(1, 143)) == ["StopNode 0", "StopNode 1", "PENDING"]
    assert lines(hand.last) == [f"It goes on as attempt 2 on other nodes: {NEAR}"]
    assert hand.machine.done
    assert hand.tell(CancelAsked()) == []

    after = Hand(JobSpec(num_nodes=1, run="true"), restarts=1)
    assert lines(after.last) == ["Attempt 2. Waiting for task resources on 1 node."]
    after.up(0)
    after.end(0, 0)
    assert after.outcome == (JobStatus.SUCCEEDED, "", None)


def test_nodes_that_are_taken_for_good_fail_the_job_with_their_reason() -> None:
    hand = running(1)
    hand.tell(NodesTaken("its time limit of 1:00:00 was reached", 5.0, again=False))
    hand.end(0, None, 15)
    assert hand.outcome == (JobStatus.FAILED, "its time limit of 1:00:00 was reached", None)


def test_nodes_that_are_taken_while_a_job_ends_or_waits_to_start_again() -> None:
    hand = running(1, Restarts(on_errors=1))
    hand.end(0, 1)  # nothing else lives: it waits for its restart
    assert hand.machine.status is JobStatus.RECOVERING
    hand.tell(NodesTaken(NEAR, 5.0, again=True))
    assert hand.outcome[0] is JobStatus.PENDING

    hand = running(2)
    hand.end(0, 1)  # its own fault, whatever its nodes do
    hand.tell(NodesTaken(NEAR, 5.0, again=True))
    hand.end(1, None, 15)
    assert hand.outcome == (JobStatus.FAILED, "rank 0 on head exited with code 1", 1)

    hand = running(1)
    hand.tell(CancelAsked())
    hand.tell(NodesTaken(NEAR, 5.0, again=True))
    hand.end(0, None, 15)
    assert hand.outcome[0] is JobStatus.CANCELLED

    hand = running(1)
    hand.tell(NodesTaken(NEAR, 5.0, again=True))
    hand.tell(CancelAsked())
    hand.end(0, None, 15)
    assert hand.outcome[0] is JobStatus.CANCELLED


def test_a_lost_node_is_replaced_where_its_provider_does_that_so_often() -> None:
    spec = JobSpec(num_nodes=2, run="true", restarts=Restarts(on_lost_nodes=2))
    for num_lost, status in ((1, JobStatus.PENDING), (2, JobStatus.FAILED)):
        hand = Hand(spec, replaces_nodes=True, restarts=num_lost, num_lost=num_lost)
        hand.up(0, 1)
        hand.down(1)
        hand.end(0, None, 15)
        assert hand.outcome[0] is status


def test_a_job_larger_than_its_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_nodes=3: the cluster has 2"):
        JobMachine(JobSpec(num_nodes=3, run="a"), num_cluster_nodes=2, setup_needed=True)


def test_nothing_moves_it_before_it_starts() -> None:
    machine = JobMachine(JobSpec(run="a"), num_cluster_nodes=1, setup_needed=True)
    assert machine.handle(CancelAsked(), 0.0) == []
    assert machine.status is JobStatus.PENDING
    assert machine.deadline is None


# ------------------------------------------------------------------------------------------------- by the thousand
NUM_SCHEDULES, BATCHES = 5000, 5


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_schedule_ends_well_or_says_why(batch: int) -> None:
    ends: Counter[JobStatus] = Counter()
    for seed in range(batch, NUM_SCHEDULES, BATCHES):
        try:
            played = play(seed)
            for check in (_nothing_lives, _phases, _status, _culprit, _restarts, _in_time):
                check(played)
        except AssertionError as error:
            error.add_note(f"in the schedule of seed {seed}: play({seed}) of faults.py plays it again")
            raise
        ends[played.machine.status] += 1
    assert all(ends[status] > 20 for status in JobStatus if status.ended), f"the schedules have become tame: {ends}"


def _nothing_lives(played: Played) -> None:
    assert played.machine.done
    for node in played.world.nodes:
        assert node.state in ("stopped", "lost"), f"{node} was left running"
        assert not node.living
    # What was told to be lost is gone by itself; everything else was stopped, also what nobody knows to be lost.
    stops = Counter(action.node for _, action in played.actions if isinstance(action, StopNode))
    starts = Counter(action.node for _, action in played.actions if isinstance(action, StartNode))
    downs = Counter(node.node for node in played.world.nodes if node.down_heard_s is not None)
    for number, count in starts.items():
        assert stops[number] <= count <= stops[number] + downs[number]


def _phases(played: Played) -> None:
    causes = _cause_of_each_attempt(played)
    has_setup = setup_due = played.setup_needed and played.spec.setup is not None
    per_node = played.spec.num_processes if played.spec.command else 1
    everything = [(node, process) for node in range(played.spec.num_nodes) for process in range(per_node)]
    for attempt in range(1, played.machine.attempt + 1):
        processes = [each for node in played.world.nodes if node.attempt == attempt for each in node.processes]
        setups = [each for each in processes if each.phase == "setup"]
        runs = [each for each in processes if each.phase == "run"]
        if setups:
            assert sorted(each.node.node for each in setups) == list(range(played.num_cluster_nodes))
        if processes:
            assert bool(setups) == setup_due, f"setup in attempt {attempt}, after {causes}"
        if runs:
            assert all(_heard_well(each) for each in setups), "a run before a setup had ended well"
            assert sorted((each.node.node, each.process) for each in runs) == everything
            setup_due = False
        if attempt <= len(causes) and causes[attempt - 1].kind == "lost":
            setup_due = has_setup


def _heard_well(process: FakeProcess) -> bool:
    return process.ended is not None and process.heard_s is not None and process.ended.exit_code == 0


def _status(played: Played) -> None:
    statuses = [action for _, action in played.statuses()]
    assert [each.status.ended for each in statuses] == [False] * (len(statuses) - 1) + [True]
    assert played.actions[-1][1] == statuses[-1], "something was asked for after the end"
    status = statuses[-1].status
    assert played.machine.status is status
    assert (status is JobStatus.CANCELLED) == (played.cancelled_at_s is not None), "cancelled if asked, and only then"
    if status is JobStatus.SUCCEEDED:
        assert statuses[-1].reason == ""
        last = [node for node in played.world.nodes if node.attempt == played.machine.attempt]
        processes = [each for node in last for each in node.processes if each.phase == "run"]
        assert all(_heard_well(each) for each in processes)
        assert bool(processes) == (played.spec.run is not None or played.spec.command is not None)
    else:
        assert statuses[-1].reason


def _culprit(played: Played) -> None:
    """Who is named failed by itself, in the last attempt, and nobody was heard of to have done so before."""
    _, end = played.statuses()[-1]
    if end.status not in (JobStatus.FAILED, JobStatus.FAILED_SETUP, JobStatus.FAILED_DRIVER):
        return
    last = [node for node in played.world.nodes if node.attempt == played.machine.attempt]
    named = [(at, log) for at, log in played.logged("failed", "lost", "timeout")]
    _, culprit = named[-1]
    if culprit.kind == "timeout":
        assert played.spec.timeout_s is not None
        assert "time limit" in end.reason
        return
    assert culprit.node is not None
    assert node_name(culprit.node) in end.reason
    if culprit.kind == "lost":
        node = next(node for node in last if node.node == culprit.node)
        assert node.down_heard_s is not None
        assert (end.status is JobStatus.FAILED_DRIVER) == (not node.processes and "could not be started" in end.reason)
        return
    phase = "run" if end.status is JobStatus.FAILED else "setup"
    failed = [each for node in last for each in node.processes if each.phase == phase and each.failed_by_itself]
    heard = sorted((each.heard_s, _rank(played, each)) for each in failed if each.heard_s is not None)
    mine = next(
        each for each in failed if each.node.node == culprit.node and culprit.rank in (None, _rank(played, each))
    )
    assert mine.heard_s is not None
    assert mine.ended is not None
    assert mine.heard_s - heard[0][0] <= SAME_INSTANT_S, "it was not the first to fail"
    if mine.heard_s > heard[0][0]:
        assert mine.ended.oom or mine.ended.signal in (9, 11) or mine.ended.exit_code in (137, 139)
    expected = 128 + mine.ended.signal if mine.ended.signal else mine.ended.exit_code
    assert end.exit_code == expected
    assert dict(culprit.data)["tail"] == mine.ended.tail[0]
    if phase == "setup":
        settled = [each.node.node for each in failed if each.heard_s is not None and each.heard_s <= mine.heard_s + 0.4]
        assert all(node_name(node) in end.reason for node in settled), "a node whose setup failed is not named"


def _rank(played: Played, process: FakeProcess) -> int:
    per_node = played.spec.num_processes if played.spec.command else 1
    return process.node.node * per_node + process.process


def _restarts(played: Played) -> None:
    allowed = played.spec.restarts
    causes = _cause_of_each_attempt(played)
    errors = [
        log for log in causes if log.kind == "failed" and dict(log.data)["exit_code"] not in allowed.on_exit_codes
    ]
    losses = [log for log in causes if log.kind == "lost"]
    _, end = played.statuses()[-1]
    assert len(played.logged("restart")) == len(causes) >= played.machine.attempt - 1
    assert len(errors) <= allowed.on_errors
    assert len(losses) <= allowed.on_lost_nodes
    if end.status in (JobStatus.FAILED, JobStatus.FAILED_SETUP):
        (*_, (_, last)) = played.logged("failed", "lost", "timeout")
        if last.kind == "failed":
            assert end.exit_code not in allowed.on_exit_codes
            assert len(errors) == allowed.on_errors, "it gave up too early"
        if last.kind == "lost":
            assert len(losses) == allowed.on_lost_nodes, "it gave up too early"


def _cause_of_each_attempt(played: Played) -> list[Log]:
    """What each restart answered."""
    causes: list[Log] = []
    latest: Log | None = None
    for _, action in played.actions:
        if isinstance(action, Log) and action.kind in ("failed", "lost"):
            latest = action
        elif isinstance(action, Log) and action.kind == "restart":
            assert latest is not None
            causes.append(latest)
            assert dict(action.data)["restarts"] == len(causes)
    return causes


def _in_time(played: Played) -> None:
    """What was found to fail is over within 2 s (setups: and the moment they wait); what was cancelled within 5 s."""
    settled = [at for at, action in played.statuses() if action.status.ended or action.status is JobStatus.RECOVERING]
    for at, log in played.logged("failed", "lost", "timeout"):
        assert min(end for end in settled if end >= at) - at <= STOP_GRACE_S + 1e-6, log
    if played.cancelled_at_s is not None:
        assert settled[-1] - played.cancelled_at_s <= CANCEL_GRACE_S + 1e-6
    if played.spec.timeout_s is not None:
        assert settled[-1] <= played.spec.timeout_s + CANCEL_GRACE_S, "it ran past its time limit"
