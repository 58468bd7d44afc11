"""Which last lines of a culprit are shown. ``torchrun_said`` has what torchrun 2.13 wrote, each with two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.tasks.causes import process_cause, setup_cause, telling_lines
from atoll.tasks.transitions import ProcessEnded

SAID = Path(__file__).parent / "torchrun_said"


def said(name: str) -> list[str]:
    return (SAID / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("raised", "RuntimeError: the shard has 3 rows, expected 4"),
        ("aborted", "terminate called without an active exception"),
        ("recorded", "ValueError: bad row"),
    ],
)
def test_the_last_lines_of_torchrun_are_those_of_its_rank(name: str, cause: str) -> None:
    shown = telling_lines(said(name))
    assert shown[-2] == cause
    assert "local_rank: 1 (pid: " in shown[-1], "which of the ranks it was stays"
    assert not any("====" in line or "ChildFailedError" in line or "OMP_NUM_THREADS" in line for line in shown)


def test_where_the_rank_said_nothing_there_is_how_it_ended() -> None:
    (shown,) = telling_lines(said("quiet"))
    assert "failed (exitcode: 3) local_rank: 1" in shown


def test_what_the_script_said_after_torchrun_counts_too() -> None:
    shown = telling_lines([*said("raised"), "uploading", "no such bucket"])
    assert shown[-2:] == ("uploading", "no such bucket")
    assert shown[-4] == "RuntimeError: the shard has 3 rows, expected 4"


def test_a_frame_without_its_beginning_is_better_than_nothing() -> None:
    end = said("raised")[-20:]
    assert telling_lines(end) == tuple(end[-10:])


def test_lines_of_others_stay_as_they_are() -> None:
    lines = ["=" * 40, "Traceback (most recent call last):", "ChildFailedError:", "=" * 40, "bye"]
    assert telling_lines(lines) == tuple(lines)
    assert telling_lines([]) == ()
    assert telling_lines([str(number) for number in range(30)]) == tuple(str(number) for number in range(20, 30))


def test_causes_have_the_lines_that_tell() -> None:
    ended = ProcessEnded(0, 0, "run", 1, 1, tail=tuple(said("aborted")))
    assert process_cause(ended, 0, 1.0).tail == setup_cause([ended], 1.0).tail == telling_lines(ended.tail)


def test_a_process_whose_threads_outlived_the_interpreter_says_what_to_do() -> None:
    ended = ProcessEnded(1, 0, "run", 1, None, 6, tail=("grad 1.5", "terminate called without an active exception\n"))
    assert "os._exit(0)" in process_cause(ended, 3, 1.0).reason
    assert "_exit" not in process_cause(ended._replace(tail=("other",)), 3, 1.0).reason
