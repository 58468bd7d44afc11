"""What a driver does for an allocation: waits until its nodes are there, has them stay, and go when it is killed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from atoll.core.errors import AtollError, ProvisionError
from atoll.providers.base import Allocation, AllocationReleased, AllocationState, Provider, Report

_POLL_S = 0.05  # at first, doubled each time
_KEEP_S = 30.0
_OVER = b"over"
_GUARD = "import sys; sys.path.insert(0, sys.argv[1]); from atoll.providers.upkeep import guard; guard()"


def wait_until_ready(
    provider: Provider, allocation: Allocation, report: Report, given_up: Callable[[], bool] = lambda: False
) -> Allocation:
    """Poll until an allocation is ready, and report why it is not whenever that changes.

    Raises:
        AllocationReleased: somebody gave it back.
        ProvisionError: it is lost, or is ``given_up``.
    """
    said, pause_s = None, _POLL_S
    while allocation.state is AllocationState.PENDING:
        if allocation.reason != said:
            said = allocation.reason
            report(f"waiting for {allocation.infra}: {said or 'its nodes are not there yet'}")
        if given_up():
            raise ProvisionError(f"{allocation.infra} had no nodes yet: {said or 'no reason was given'}")
        time.sleep(pause_s)
        allocation = provider.poll(allocation, max_age_s=pause_s)  # not what it said before the pause
        pause_s = min(2 * pause_s, provider.poll_s)
    if allocation.state is not AllocationState.READY:
        kind = AllocationReleased if allocation.state is AllocationState.RELEASED else ProvisionError
        raise kind(f"{allocation.infra} gave no nodes: {allocation.reason or allocation.state.lower()}")
    return allocation


class Upkeep:
    """Has nodes stay while a driver of this process uses them, and go when this process is killed.

    Rented ones are kept by a thread that asks their provider; they end themselves without it. Where the provider
    ``ends_with_driver``, a process of its own gives the nodes back once it sees this one's end.
    """

    def __init__(self, provider: Provider, allocation: Allocation) -> None:
        self._provider, self._allocation = provider, allocation
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="atoll-upkeep", daemon=True)
        self._guard: subprocess.Popen[bytes] | None = None
        if allocation.is_rented:
            self._thread.start()
        if provider.ends_with_driver:
            source = str(Path(__file__).parents[2])
            null = subprocess.DEVNULL
            command = [sys.executable, "-I", "-S", "-c", _GUARD, source]
            self._guard = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=null, stderr=null, cwd="/", start_new_session=True
            )
            assert self._guard.stdin is not None
            self._guard.stdin.write(json.dumps(allocation.to_json()).encode() + b"\n")
            self._guard.stdin.flush()

    def _run(self) -> None:
        while not self._is_over.wait(_KEEP_S):
            with contextlib.suppress(AtollError):  # asked again
                self._provider.keep(self._allocation)

    def end(self) -> None:
        """Let them go. Safe to call twice."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._guard is not None:
            with contextlib.suppress(BrokenPipeError):  # somebody ended it
                self._guard.communicate(_OVER)
            self._guard = None


def guard() -> None:
    """Entry of the process that gives nodes back: the end of its input is the end of the driver."""
    from atoll.providers import registry

    allocation = Allocation.from_json(json.loads(sys.stdin.buffer.readline()))
    if sys.stdin.buffer.read() != _OVER:
        registry.of(allocation).release(allocation, keep_disks=False)
        registry.close_idle()
