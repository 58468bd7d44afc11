"""For the scripts of the scenarios in ``calls``: prints a pool's events once it is down, and what a call raises."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import atoll as sky

# What differs from run to run.
UNSTABLE = {"time", "took_s", "pid", "pool_id", "job_id", "silent_s", "stacks", "checkpoint"}


@contextlib.contextmanager
def pool(in_order: bool = True, **options: Any) -> Iterator[sky.ComputePool]:
    """A pool whose events are printed at the end.

    One line each; those of one type that came together are sorted, as ranks work side by side. Where calls do so too,
    ``in_order=False`` prints how many there were of each.
    """
    seen: list[Any] = []
    try:
        with sky.ComputePool(**{"nodes": 2, "on_event": seen.append, **options}) as made:
            yield made
    finally:
        if not in_order:
            counts = Counter(type(event).__name__ for event in seen)
            print("events", *(f"{name}={counts[name]}" for name in sorted(counts)))
            seen.clear()
        for _, together in groupby(seen, key=type):
            for line in sorted(map(described, together)):
                print("event", line)


def described(event: Any) -> str:
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    shown = (f"{key}={value!r}" for key, value in values.items() if key not in UNSTABLE)
    return " ".join([type(event).__name__, *shown])


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Prints the type and the message of what is raised inside, and whether there is a remote traceback."""
    try:
        yield
    except BaseException as error:
        cause = type(error.__cause__).__name__ if error.__cause__ else "none"
        print(f"raised {type(error).__name__}: {error} (cause: {cause})")
    else:
        print("raised nothing")
