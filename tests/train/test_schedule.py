"""The learning rate over a run."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import ConfigError
from atoll.train.optim.schedule import Schedule, resolve
from atoll.train.recipe.durations import Interval
from atoll.train.recipe.schema import ScheduleSection


def curve(kind, total, warmup=0, decay=None, floor=0.1):
    schedule = resolve(ScheduleSection(kind=kind, warmup=warmup, decay=decay, floor=floor), total, 10.0, 100.0)
    return [schedule.factor(step) for step in range(1, total + 1)]


def test_warmup_rises_to_the_full_rate_and_cosine_falls_towards_the_floor():
    values = curve("cosine", 12, warmup=4)
    assert values[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert values[8] == pytest.approx(0.55)  # half of the way
    assert values[6] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert values[-1] == pytest.approx(0.1 + 0.9 * (1 - math.cos(math.pi / 8)) / 2), "the step after it is at the floor"


def test_linear_and_constant():
    assert curve("linear", 5, floor=0.0) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert curve("constant", 5, warmup=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_wsd_stays_and_then_falls_over_the_last_tenth_by_default():
    values = curve("wsd", 20, warmup=3, floor=0.0)
    assert values[2:19] == [1.0] * 17
    assert values[19:] == pytest.approx([0.5])
    assert curve("wsd", 20, warmup=3, decay="5step", floor=0.5)[14:] == pytest.approx([1, 1, 0.9, 0.8, 0.7, 0.6])


def test_the_factors_are_those_of_torchtitan():
    # Its linear_warmup_stable_decay of 0.2.2, whose steps count from 0, with decay_ratio left out and given.
    for total, warmup, kind, decay in ((200, 20, "linear", 180), (50, 0, "linear", 50), (100, 10, "wsd", 30)):
        stable = total + 1 - warmup - decay
        expected = [
            (step + 1) / warmup if step < warmup else min(1.0, 1 - (step + 1 - warmup - stable) / decay)
            for step in range(total)
        ]
        given = decay if kind == "wsd" else None
        assert curve(kind, total, warmup=warmup, decay=given, floor=0.0) == pytest.approx(expected)


def test_warmup_that_is_left_open_is_a_twentieth_of_the_run_or_two_thousand_steps():
    for total, warmup in ((10, 0), (360, 18), (1_000_000, 2000)):
        assert resolve(ScheduleSection(), total, 10.0, 100.0).warmup_steps == warmup


def test_lengths_in_tokens_and_epochs():
    section = ScheduleSection(kind="wsd", warmup="250tok", decay="0.5ep")
    schedule = resolve(section, 40, steps_per_epoch=10.0, tokens_per_step=100.0)
    assert (schedule.warmup_steps, schedule.decay_steps) == (3, 5)


def test_by_tokens_it_follows_what_was_trained():
    section = ScheduleSection(kind="linear", warmup=4, by="tokens")
    by_tokens = resolve(section, 20, 10.0, tokens_per_step=100.0)
    by_steps = resolve(ScheduleSection(kind="linear", warmup=4), 20, 10.0, tokens_per_step=100.0)
    for step in range(1, 21):
        assert by_tokens.factor(step, 100 * (step - 1)) == by_steps.factor(step, 0)
    assert by_tokens.factor(7, 150) == 2.5 / 4, "half a step more than the second, whatever its number"


def test_a_run_of_one_step_has_the_full_rate():
    for kind in ("constant", "linear", "cosine", "wsd"):
        assert curve(kind, 1, floor=0.0) == [1.0]


def test_steps_after_the_last_are_as_the_last():
    section = ScheduleSection(kind="linear", floor=0.2)
    assert Schedule(section, 10, warmup_steps=0, decay_steps=0).factor(99) == pytest.approx(0.28)
    assert Schedule(section, 1, warmup_steps=0, decay_steps=0).factor(99) == 1.0


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match=r"20 \+ 0 steps, longer than the run of 15"):
        resolve(ScheduleSection(warmup="2ep"), 15, 10.0, 100.0)
    with pytest.raises(ConfigError, match=r"10 \+ 8 steps, longer than the run of 15"):
        resolve(ScheduleSection(kind="wsd", warmup=10, decay=8), 15, 10.0, 100.0)


@settings(deadline=None)
@given(
    kind=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    total=st.integers(1, 300),
    share=st.floats(0, 1),
    floor=st.floats(0, 1),
)
def test_it_never_jumps_and_starts_above_zero(kind, total, share, floor):
    warmup = int(share * total)
    section = ScheduleSection(kind=kind, floor=floor, warmup=warmup)
    schedule = resolve(section, total, 10.0, 100.0)
    values = [schedule.factor(step) for step in range(1, total + 1)]
    assert values[0] > 0
    assert all(0 <= value <= 1 for value in values)
    assert max(values) == 1.0
    falling = schedule.decay_steps if kind == "wsd" else total - warmup
    steepest = max(1 / max(warmup, 1), math.pi / 2 * (1 - floor) / max(falling, 1))
    assert all(abs(b - a) <= steepest + 1e-12 for a, b in itertools.pairwise(values))
    if kind != "constant" and falling:
        assert floor - 1e-9 <= values[-1] <= floor + (1 - floor) / falling + 1e-9


@pytest.mark.parametrize("steps", [1.0, 3.0, 8.25, 16.5, 1.75, 0.3, 1000.1, 7 / 3])
def test_intervals_end_in_the_steps_that_hold_their_multiples(steps: float) -> None:
    exact = Fraction(steps).limit_denominator(1000)
    wanted = {math.ceil(n * exact) for n in range(1, 4000)}
    interval, double = Interval(steps), Interval(2 * steps)
    due = {step for step in range(1, 1001) if interval.due(step)}
    assert due == {step for step in wanted if step <= 1000}
    assert {step for step in range(1, 1001) if double.due(step)} <= due


def test_intervals_of_long_runs_are_exact() -> None:
    interval = Interval(1.5)
    assert [step for step in range(10**9, 10**9 + 7) if interval.due(step)] == [10**9 + n for n in (1, 2, 4, 5)]
