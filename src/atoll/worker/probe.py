"""A thread of each rank that answers its agent without a signal that user code could feel.

It says where the main thread stands and which collectives this rank has entered, and stops the running call.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from atoll.agent.rank_io import LEAVE, LOOK

_ALL_SIGNALS = (*range(1, 32), *range(34, 65))  # the two between are the C library's own
_MAX_FRAMES = 200


def start(fd: int, stop: Callable[[int], None]) -> None:
    """Answer requests on ``fd``; ``stop`` is called with the number of a call that is to be stopped."""
    # Not a threading.Thread: code that joins every thread it finds would wait for this one.
    _thread.start_new_thread(_serve, (fd, threading.get_ident(), stop))


def _serve(fd: int, main_thread: int, stop: Callable[[int], None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)  # they have to interrupt the main thread
    with contextlib.suppress(OSError):  # user code closed it: nobody is heard any more
        while request := os.read(fd, 64):
            if request == LOOK:
                answer = {"stack": _stack(main_thread), "groups": _groups()}
                os.write(fd, json.dumps(answer).encode())
            else:
                stop(0 if request == LEAVE else int.from_bytes(request))


def _stack(thread: int) -> str:
    """The frames of a thread, most recent call first."""
    frame = sys._current_frames().get(thread)
    lines: list[str] = []
    while frame is not None and len(lines) < _MAX_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)


def _groups() -> dict[str, list[int]]:
    """For each process group of torch, by its name: how many collectives this rank has entered, and its size."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    found: dict[str, list[int]] = {}
    # It may be half imported, a group may be destroyed at this moment, and not every backend counts.
    with contextlib.suppress(AttributeError, RuntimeError, KeyError):
        for group, name in list(world.pg_names.items()):
            with contextlib.suppress(RuntimeError, KeyError):
                found[name] = [group._get_sequence_number_for_group(), len(world.pg_group_ranks[group])]
    return found
