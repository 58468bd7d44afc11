"""The loop of a rank: take a call, run it on the main thread, send back what came of it."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from atoll.agent.process_tree import PR_SET_PDEATHSIG, prctl
from atoll.agent.rank_io import CHANNEL_FD, CONTROL_FD, MIG_VARIABLE
from atoll.core.context import CallContext, Peer, set_current
from atoll.wire import definitions, frames
from atoll.wire.codec import dumps, is_plain, loads
from atoll.wire.frames import CallHeader, Frame, close_all, pack
from atoll.wire.payloads import decode_parts
from atoll.worker import probe
from atoll.worker.channel import Cancelled, DriverChannel
from atoll.worker.children import DefinitionsSpec
from atoll.worker.folder_locks import hold_folder, hold_images
from atoll.worker.isolation import Isolation
from atoll.worker.streams import is_stream, send_stream

_CANCEL_SIGNAL = signal.SIGRTMIN + 1  # from this process to its own main thread
_EXIT_S = 0.5  # for exit handlers
_ASK_AGAIN_S = 0.02
_SMALL_BYTES = 1 << 16  # results up to this are sent without looking at what they are made of again


class Worker(DriverChannel):
    """One rank."""

    def __init__(self, sock: socket.socket, setup: dict[str, Any]) -> None:
        super().__init__(sock, setup)
        self._functions: dict[str, tuple[bytes, Any]] = {}
        self._peers = tuple(Peer(node, addr) for node, addr in enumerate(setup["peers"]))
        self._place: tuple[bool, int] | None = None
        self._stopped_call = -1
        self._main_thread = threading.get_ident()
        signal.signal(_CANCEL_SIGNAL, self._on_cancel)
        probe.start(CONTROL_FD, self._stop)
        self.isolation = Isolation()

    # -- the loop -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Announce this rank, then run calls until told to stop."""
        self.send(frames.HELLO, {"port": self.port})
        import cloudpickle  # noqa: F401 - the first call needs it; nobody waits for it now

        while True:
            frame = self.next_frame()
            if frame.kind == frames.CALL:
                self._run(frame)

    def _run(self, frame: Frame) -> None:
        header = CallHeader.from_wire(frame.meta)
        self.broadcast = header.broadcast
        self._holds_job, self._job = False, header.job_id
        self._cancel_pending = False
        self.isolation.before_call()
        definitions.begin_call()
        self._enter(header, frame.call)
        if header.keep_function or header.forget:
            self._keep_function(header, frame.rest)
        self.call = frame.call
        try:
            try:
                if self._stopped_call == self.call:  # before it began
                    close_all(frame.fds)
                    raise Cancelled
                data, fds = self._call(header, frame)
            except Cancelled:
                raise
            except SystemExit as stop:
                leave(_exit_code(stop))
            except BaseException as error:  # noqa: BLE001 - whatever the user's code raises goes back to the driver
                data, fds = self._failure(error)
            flush_output()
            self.call, call = 0, self.call  # from here on there is nothing to cancel
        except Cancelled:
            self.call, call = 0, frame.call
            data, fds = bytearray(pack(frames.ERROR, self.setup["rank"], call, {"cancelled": 1})), []
        data[frames.FLAGS_AT] |= frames.SPENT * self.spent
        self.isolation.before_result()
        self._send(data, fds)
        if self.spent:
            leave(0)
        self._clean_up()

    def _call(self, header: CallHeader, frame: Frame) -> tuple[bytearray, list[int]]:
        from atoll.worker import process_group  # a rank starts without it

        process_group.before_call(self, header.all_have_torch)
        function, arguments, mappings = self._unpack(header, frame)
        args, kwargs = arguments
        del arguments
        result = _settle(function(*args, **kwargs))
        if is_stream(result):
            send_stream(self, result)
            result = None
        head = pickle.dumps(result, protocol=5) if is_plain(result) else b""
        if 0 < len(head) <= _SMALL_BYTES:
            data, fds = frames.pack_payload(frames.RESULT, self.setup["rank"], self.call, head), list[int]()
        else:
            data, fds = self.encode(frames.RESULT, dumps(result, what="the result"))
        del result, args, kwargs, function
        for action in self.before_result:
            action()
        kept = any(mapping() is not None for mapping in mappings)
        data[frames.FLAGS_AT] |= frames.KEPT * kept | _loaded()
        return data, fds

    def _failure(self, error: BaseException) -> tuple[bytearray, list[int]]:
        from atoll.wire.exceptions import pack_exception

        data, fds = self.encode(frames.ERROR, pack_exception(error))
        data[frames.FLAGS_AT] |= frames.KEPT | _loaded()
        return data, fds

    def _clean_up(self) -> None:
        self.before_result.clear()
        while self.at_end:
            action = self.at_end.pop()
            try:
                action()
            except Exception as error:  # noqa: BLE001 - a group that cannot be left must not stop the next call
                print(f"atoll: after the call: {type(error).__name__}: {error}", file=sys.stderr)
        set_current(None)
        self.isolation.restore()

    # -- a call's parts -------------------------------------------------------------------------------------------

    def _enter(self, header: CallHeader, call: int) -> None:
        setup = self.setup
        if header.path is not None:
            sys.path[:] = header.path
            self.isolation.moved()
        broadcast = self.broadcast
        rank = setup["rank"] if broadcast else 0
        world = setup["world_size"] if broadcast else 1
        local_world = setup["local_world_size"] if broadcast else 1
        addr = setup["head_addr"] if broadcast else setup["addr"]
        port = header.head_port if broadcast else self.port
        if self._place != (broadcast, port):  # the variables stay from call to call
            self._place = (broadcast, port)
            self.isolation.set_variables(
                RANK=str(rank),
                WORLD_SIZE=str(world),
                LOCAL_RANK=str(setup["local_rank"]),
                LOCAL_WORLD_SIZE=str(local_world),
                NODE_RANK=str(setup["node"]),
                MASTER_ADDR=addr,
                MASTER_PORT=str(port),
                JAX_COORDINATOR_ADDRESS=f"{addr}:{port + 1}",
                JAX_NUM_PROCESSES=str(world),
                JAX_PROCESS_ID=str(rank),
                JAX_LOCAL_DEVICE_COUNT=str(max(local_world, setup["accelerators"] if broadcast else 1)),
            )
        set_current(
            None,
            lambda: CallContext(
                job_id=header.job_id,
                node=setup["node"],
                total_nodes=setup["total_nodes"],
                rank=rank,
                local_rank=setup["local_rank"],
                world_size=world,
                local_world_size=local_world,
                head_addr=addr,
                head_port=port,
                peers=self._peers,
                accelerator=setup["accelerator"],
                accelerators=setup["accelerators"],
                seed=int(header.job_id, 16),
                simulated=setup["simulated"],
                pool_id=setup["pool_id"],
                # A folder for each attempt, in order.
                checkpoint_dir=f"{setup['job_dir']}/{header.job_id}/checkpoints/{call:08d}",
                send_report=self._report,
            ),
        )

    def _report(self, metrics: dict[str, Any], checkpoint: str | None) -> None:
        flush_output()
        if checkpoint and not self._holds_job:
            self._holds_job, held = True, hold_folder(f"{self.setup['job_dir']}/{self._job}")
            self.at_end.append(lambda: os.close(held))
        self.send(frames.REPORT, {"checkpoint": checkpoint} if checkpoint else {}, dumps(metrics, what="the metrics"))

    def _keep_function(self, header: CallHeader, rest: memoryview) -> None:
        """Keep the bytes of a function, before the call can be cancelled: it is not sent again."""
        self._functions.pop(header.forget or "", None)
        if header.keep_function and header.function_payload is not None:
            self._functions[header.function] = (bytes(rest[: header.function_payload["head"]]), None)

    def _unpack(self, header: CallHeader, frame: Frame) -> tuple[Callable[..., Any], tuple[Any, Any], list[Any]]:
        rest, fds, digest = frame.rest, list(frame.fds), header.function
        table = header.function_payload
        function_mapping = None
        if table is not None:
            own = [fds.pop(0)] if table.get("file") else []
            size = 0 if own else table["head"] + sum(table.get("buffers", ()))
            head, buffers, function_mapping = decode_parts(table, rest[:size], own)
            rest = rest[size:]
            function = loads(head, buffers)
        else:
            stored, function = self._functions[digest]
            if function is None:
                function = loads(stored)
        if header.is_pure:  # it holds nothing that a call could change: no need to rebuild it each time
            self._functions[digest] = (self._functions[digest][0], function)
        arg_head, arg_buffers, mapping = decode_parts(header.arguments, rest, fds)
        mappings = [reference for reference in (function_mapping, mapping) if reference is not None]
        return function, loads(arg_head, arg_buffers), mappings

    def _stop(self, call: int) -> None:
        """Interrupt the main thread, wherever it waits, if it runs this call; 0 is for a rank that runs none."""
        self._stopped_call = call
        if self.call == call:
            signal.pthread_kill(self._main_thread, _CANCEL_SIGNAL)

    def _on_cancel(self, _signum: int, frame: FrameType | None) -> None:
        if self._stopped_call != self.call:
            return
        if not self.call:
            leave(0)
        if self._sending:  # half a frame would be the end of this rank
            self._cancel_pending = True
        elif _importing(frame):  # so would half a module: torch can't be imported again. Killed if it takes too long
            again = threading.Timer(_ASK_AGAIN_S, signal.pthread_kill, (self._main_thread, _CANCEL_SIGNAL))
            again.daemon = True
            again.start()
        else:
            raise Cancelled


def _loaded() -> int:
    """Flags that say what is loaded in this process."""
    modules = sys.modules
    framework = "jax" in modules or "keras" in modules or "tensorflow" in modules
    return frames.HAS_TORCH * ("torch" in modules) | frames.HAS_FRAMEWORK * framework


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _settle(result: Any) -> Any:
    """The value of a coroutine, for ``async def`` functions; anything else as it is."""
    code = getattr(result, "cr_code", None)
    if code is None:
        return result
    import asyncio

    return asyncio.run(result)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF if -(2**31) <= stop.code < 2**31 else 255
    print(stop.code, file=sys.stderr)
    return 1


_fflush: Callable[[None], object] | None = None  # the C library's


def flush_output() -> None:
    """Push out what Python and the C library hold back, so that it arrives before the result does."""
    global _fflush
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    if _fflush is None and "ctypes" in sys.modules:
        _fflush = sys.modules["ctypes"].CDLL(None).fflush
    if _fflush is not None:
        _fflush(None)


def leave(code: int) -> NoReturn:
    """End the process as Python would, without waiting for threads that never end."""
    signal.signal(_CANCEL_SIGNAL, signal.SIG_IGN)
    last = threading.Timer(_EXIT_S, os._exit, (code,))
    last.daemon = True
    last.start()  # a handler that joins a child which never ends must not keep the driver waiting
    atexit._run_exitfuncs()
    flush_output()
    os._exit(code)


def _keep_own_slice(setup: dict[str, Any]) -> None:
    """In a MIG pool: hide the slices of the node's other ranks, of which CUDA would take the first."""
    profiles = os.environ.get(MIG_VARIABLE, "").split(",")
    setup["mig"] = profiles != [""]
    if setup["mig"]:
        os.environ[MIG_VARIABLE] = profiles[setup["local_rank"]]
        if not setup["simulated"]:
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[setup["local_rank"]]


def main() -> None:
    """Entry of a rank's process."""
    if os.environ.pop("ATOLL_PDEATHSIG", None):
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    setup: dict[str, Any] = json.loads(os.environ.pop("ATOLL_SETUP"))
    _keep_own_slice(setup)
    if setup.get("path"):
        sys.path[:] = setup["path"]
    sys.argv[:] = [""]
    for fd in (CHANNEL_FD, CONTROL_FD):
        os.set_inheritable(fd, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    definitions.keep_definitions(DefinitionsSpec())
    hold_images()
    Worker(socket.socket(fileno=CHANNEL_FD), setup).serve()
