"""A pool that the tests of a module share, and waiting for what a rank does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

import atoll as sky


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    """Two nodes, one rank each. A module that uses it is marked ``leaks_per_module``."""
    with sky.ComputePool(nodes=2, logs="quiet") as shared:
        yield shared


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """``until(lambda: path.exists())`` waits for it, and fails after a minute."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < deadline, "waited a minute in vain"
            time.sleep(0.01)

    return wait
