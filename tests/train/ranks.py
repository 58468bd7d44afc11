"""Ranks for tests: a server that has imported torch forks them, so that a gang of four starts in 0.2 s.

``run(4, function, *args)`` gives each rank a Gloo group and returns what ``function(*args)`` returned, by rank. A rank
that raises makes ``run`` raise ``RankFailed`` with its traceback; the others are killed. Functions and arguments travel
by cloudpickle. Ranks are real processes: ``start(...)`` gives the ``Gang`` itself to those who kill some.

Ranks may use CUDA, which a process can't after a fork of one that has begun with it: the server never does, not even by
asking whether there is a GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

import leaks

_server: tuple[socket.socket, subprocess.Popen[bytes]] | None = None
_IMPORTS = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "numpy",
    "atoll.train.trainer",
)
_IMPORTS_IF_THERE = ("s3fs",)


class RankFailed(AssertionError):
    """A rank raised; the text has its traceback."""


class Gang:
    """Ranks that run; ``pids`` by rank."""

    def __init__(self, channel: socket.socket, world: int, folder: str) -> None:
        self._channel, self._folder = channel, folder
        self.world = world
        self.pids: list[int] = _receive(channel)

    def wait(self, timeout: float = 100.0) -> list[Any]:
        """What each rank returned.

        Raises:
            RankFailed: one raised or died.
            TimeoutError: they took longer.
        """
        try:
            kind, value = _receive(self._channel, timeout)
        except TimeoutError:
            stacks = "".join(_stack(pid) for pid in self.pids)
            raise TimeoutError(f"{self.world} ranks are not done after {timeout:.0f} s\n{stacks}") from None
        finally:
            self.close()
        if kind == "failed":
            raise RankFailed(value)
        return value

    def outcomes(self, timeout: float = 100.0) -> list[tuple[str, Any]]:
        """Per rank ``("returned", value)``, ``("raised", traceback)`` or ``("died", signal or exit code)``."""
        try:
            return _receive(self._channel, timeout)
        finally:
            self.close()

    def close(self) -> None:
        self._channel.close()  # the server kills what still runs
        shutil.rmtree(self._folder, ignore_errors=True)


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 100.0, **kwargs: Any) -> list[Any]:
    """Run ``function`` on ``world`` ranks with a Gloo group and return the values by rank."""
    return start(world, function, *args, **kwargs).wait(timeout)


def start(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    patient: bool = False,
    env: dict[str, str] | None = None,
    group: bool = True,
    **kwargs: Any,
) -> Gang:
    """Start ranks. ``patient``: a rank that fails leaves the others running, and ``outcomes`` tells of all."""
    server = _serving()
    folder = tempfile.mkdtemp(prefix="ranks-")
    request = cloudpickle.dumps((world, function, args, kwargs, patient, env or {}, group, folder, os.getcwd()))
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(server, [b"r"], [theirs.fileno()])
    _send_bytes(ours, request)
    return Gang(ours, world, folder)


def _serving() -> socket.socket:
    global _server
    if _server is None:
        with leaks.keep():
            ours, theirs = socket.socketpair()
            # A count of the GPUs by the CUDA runtime alone, as some libraries make one, would bar the ranks from them.
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
            theirs.close()
            if not ours.recv(1):  # it has imported torch
                ours.close()
                raise RuntimeError(f"the server of ranks ended with {process.wait(10)}: see its error output above")
            _server = (ours, process)
            atexit.register(_end_server)
    return _server[0]


def _end_server() -> None:
    if _server is not None:
        _server[0].close()
        _server[1].wait(60)


# ------------------------------------------------------------------------------------------------- the server
def _serve(control: socket.socket) -> None:
    import importlib

    for name in _IMPORTS:
        importlib.import_module(name)
    for name in _IMPORTS_IF_THERE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control.send(b"+")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        if os.fork() == 0:
            control.close()
            with contextlib.suppress(BrokenPipeError, EOFError):
                _run_gang(socket.socket(fileno=descriptors[0]))
            os._exit(0)
        os.close(descriptors[0])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _run_gang(channel: socket.socket) -> None:
    # Loaded once, here: the ranks have it by the fork, with the test's module and all that this imports.
    world, function, args, kwargs, patient, env, group, folder, cwd = _receive(channel)
    pipes: dict[int, int] = {}
    pids: list[int] = []
    for rank in range(world):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            channel.close()
            os.close(reading)
            os.chdir(cwd)
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            os.environ.update(env | {key: str(value) for key, value in place.items()})
            store = Path(folder) / "store" if group else None
            _rank_main(rank, world, store, functools.partial(function, *args, **kwargs), writing)
        os.close(writing)
        pipes[reading] = rank
        pids.append(pid)
    _send(channel, pids)
    outcomes: dict[int, tuple[str, Any]] = {}
    buffers = dict.fromkeys(pipes, b"")
    given_up = False
    while pipes:
        ready, _, _ = select.select([*pipes, channel], [], [])
        if given_up := channel in ready:  # the test waits no more
            break
        for descriptor in ready:
            piece = os.read(descriptor, 1 << 20)
            buffers[descriptor] += piece
            if piece:
                continue
            rank = pipes.pop(descriptor)
            status = os.waitpid(pids[rank], 0)[1]
            if buffers[descriptor]:
                outcomes[rank] = pickle.loads(buffers[descriptor])
            else:
                outcomes[rank] = ("died", os.waitstatus_to_exitcode(status))
            if outcomes[rank][0] != "returned" and not patient:
                pipes.clear()
                break
    for rank, pid in enumerate(pids):
        if rank not in outcomes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    shutil.rmtree(folder, ignore_errors=True)
    if given_up:
        return
    if patient:
        _send(channel, [outcomes.get(rank, ("died", -9)) for rank in range(world)])
        return
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome[0] != "returned"}
    if failed:
        _send(channel, ("failed", "\n".join(f"rank {r} {kind}: {value}" for r, (kind, value) in failed.items())))
    else:
        _send(channel, ("ok", [outcomes[rank][1] for rank in range(world)]))


def _rank_main(rank: int, world: int, store: Path | None, function: Callable[[], Any], writing: int) -> None:
    import traceback

    import torch.distributed as dist

    try:
        if store is not None:
            dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
        outcome = ("returned", function())
        # Not destroyed: a rank that is done must not pull the store from under one that is not.
    except BaseException:
        outcome = ("raised", traceback.format_exc())
    with os.fdopen(writing, "wb") as file:
        try:
            file.write(cloudpickle.dumps(outcome))
        except Exception:
            file.write(pickle.dumps(("raised", traceback.format_exc())))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _stack(pid: int) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(pid)], capture_output=True, text=True
    )
    return done.stdout


# ------------------------------------------------------------------------------------------------- messages
def _send(channel: socket.socket, value: Any) -> None:
    _send_bytes(channel, cloudpickle.dumps(value))


def _send_bytes(channel: socket.socket, data: bytes) -> None:
    channel.sendall(struct.pack("<Q", len(data)) + data)


def _receive(channel: socket.socket, timeout: float = 100.0) -> Any:
    return pickle.loads(_receive_bytes(channel, timeout))


def _receive_bytes(channel: socket.socket, timeout: float) -> bytes:
    deadline = time.monotonic() + timeout

    def exactly(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            channel.settimeout(max(0.01, deadline - time.monotonic()))
            piece = channel.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise EOFError("the server of ranks is gone")
            data += piece
        channel.settimeout(None)
        return bytes(data)

    return exactly(struct.unpack("<Q", exactly(8))[0])


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
