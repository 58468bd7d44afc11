"""One rank as its agent sees it: a process, its channel, its output, and the thread in it that answers requests."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import termios
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atoll.wire.channel import Channel
from atoll.wire.frames import close_all

# Where a rank finds what the agent gave it, after standard input, output and error.
CHANNEL_FD, CONTROL_FD = 3, 4
LOOK, LEAVE = b"?", b"."  # on CONTROL_FD: say where you are; end now. Anything else is the number of a call to stop
_TAIL_BYTES = 1 << 14
_WAITING = struct.Struct("i")


class Output:
    """One captured stream: where it is read, its log file if it has one, and the end of what it said."""

    def __init__(self, reader: int, path: str | None, is_stderr: bool) -> None:
        self.reader = reader
        self.is_stderr = is_stderr
        self._path = path
        self._file: int | None = None  # opened at its first line: most ranks never write to standard error
        self.tail = bytearray()

    @classmethod
    def piped(cls, path: str | None, is_stderr: bool) -> tuple[Output, int]:
        """One over a new pipe, and the end to write to."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        return cls(reader, path, is_stderr), writer

    def read(self) -> bytes | None:
        """What there is; empty bytes at the end; None when there is nothing just now."""
        try:
            data = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        if data:
            self._keep(data)
        return data

    def drain(self) -> Iterator[bytes]:
        """What lies in the pipe now, and no more: whoever writes without end must not hold the agent up."""
        waiting = _WAITING.unpack(fcntl.ioctl(self.reader, termios.FIONREAD, bytes(_WAITING.size)))[0]
        while waiting > 0 and (data := self.read()):
            waiting -= len(data)
            yield data

    def _keep(self, data: bytes) -> None:
        # A full disk must not stop training: the driver still gets every byte.
        with contextlib.suppress(OSError):
            if self._file is None and self._path is not None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if self._file is not None:
                os.write(self._file, data)
        self.tail += data
        if len(self.tail) > 2 * _TAIL_BYTES:
            del self.tail[:-_TAIL_BYTES]

    def close(self) -> None:
        """Close the pipe and the log file."""
        os.close(self.reader)
        if self._file is not None:
            os.close(self._file)


def tail_lines(said: bytes | bytearray, num_lines: int = 20) -> list[str]:
    """The last lines of an output that are not empty; of one that was overdrawn, what it showed last."""
    text = said.decode(errors="replace")
    return [line.rpartition("\r")[2][:2000] for line in text.splitlines() if line.strip()][-num_lines:]


# What processes of a node may have open; the agent itself takes all it can get, as it holds some for each of them.
_descriptor_limit: tuple[int, int] | None = None


def raise_descriptor_limit() -> None:
    """Let this process open as many files as it may."""
    global _descriptor_limit
    _descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_descriptor_limit[1], _descriptor_limit[1]))


def spawn(
    program: str, argv: list[str], env: Mapping[str, str], fds: Sequence[int], failed: contextlib.ExitStack
) -> tuple[int, int]:
    """Start a process in a session of its own; its pid and pidfd. ``failed`` kills it.

    It finds nothing on standard input, and the descriptors as 1, 2, ... in their order.
    """
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pid = os.posix_spawn(
            program,
            argv,
            {os.fsencode(key): os.fsencode(value) for key, value in env.items()},
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, at) for at, fd in enumerate((null, *fds))],
            setsid=True,
            setsigmask=[],
            # Python ignores some, and what the agent does with others is no concern of the user's code.
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
        )
    finally:
        os.close(null)
    failed.callback(os.kill, pid, signal.SIGKILL)
    if _descriptor_limit is not None:  # not before: posix_spawn takes no descriptor beyond the limit
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _descriptor_limit)
    return pid, os.pidfd_open(pid)


def exit_meta(
    code: int, tail: list[str], *, oom: bool = False, killed: bool = False, fault: str | None = None
) -> dict[str, Any]:
    """What an EXIT frame says of a process that ended with this code, a negative one being a signal's."""
    return {
        "exit_code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "oom": oom,
        "tail": tail,
        "killed": killed,
        "fault": fault,
    }


def last_lines(outputs: Sequence[Output]) -> list[str]:
    """The last lines that were written: standard error's, or standard output's where that was silent."""
    out, err = (output.tail for output in outputs)
    return tail_lines(err if err.strip() else out)


class Rank:
    """A running rank.

    Attributes:
        sock: its channel, where its frames go through the agent; else the driver has that, and ``outputs`` are empty.
    """

    def __init__(self, spec: dict[str, Any], setup: dict[str, Any], given: list[int]) -> None:
        self.rank: int = spec["rank"]
        self.killed = False
        self.fault: str | None = None  # what it did that made its agent end it
        self.sight: dict[str, Any] | None = None  # what it last said of itself, see `look`
        self._owes_sight = False
        self.tag = f"ATOLL_RANK_TAG={setup['tag']}.{self.rank}"
        self.sock: socket.socket | None = None
        self.channel: Channel | None = None  # over it
        self.outputs: list[Output] = []
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as ends:
            ends.callback(close_all, tuple(given))
            self._spawn(spec, setup, given, failed, ends)
            failed.pop_all()

    def _spawn(
        self,
        spec: dict[str, Any],
        setup: dict[str, Any],
        given: list[int],
        failed: contextlib.ExitStack,
        ends: contextlib.ExitStack,
    ) -> None:
        """Start its process; ``ends`` closes what that has a copy of, ``failed`` the rest where it can't be started."""
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends.callback(control.close)
        failed.callback(self._control.close)
        self._control.setblocking(False)
        if not given:
            self.sock, theirs = socket.socketpair()
            ends.callback(theirs.close)
            failed.callback(self.sock.close)
            given = [theirs.fileno()]
            for is_stderr in (False, True):
                output, writer = Output.piped(None, is_stderr)
                ends.callback(os.close, writer)
                failed.callback(output.close)
                self.outputs.append(output)
                given.append(writer)
        channel, out, err = given
        key, _, value = self.tag.partition("=")
        env = {**setup["env"], **spec["env"], key: value, "ATOLL_POOL_TAG": f"{setup['tag']}.{setup['node']}"}
        if os.getpid() != 1:  # as PID 1 of a namespace the kernel takes ranks down with the agent; else they ask
            env["ATOLL_PDEATHSIG"] = "1"
        argv, fds = [setup["python"], *setup["argv"]], (out, err, channel, control.fileno())
        self.pid, self.pidfd = spawn(setup["python"], argv, env, fds, failed)

    def cancel(self, call: int) -> None:
        """Raise in the rank's main thread if it still runs that call."""
        self._request(call.to_bytes(8))

    def leave(self) -> None:
        """Have the rank run its exit handlers and end."""
        self.killed = True
        self._request(LEAVE)

    def look(self) -> None:
        """Have the rank say where it is, as ``sight``; one that owes an answer is not asked again."""
        self.has_answered()
        self.sight = None
        self._owes_sight = self._owes_sight or self._request(LOOK)

    def has_answered(self) -> bool:
        """Has the answer come? It can't while native code holds the GIL, or the process is stopped."""
        with contextlib.suppress(OSError, ValueError):  # user code may write there, too
            if answer := self._control.recv(1 << 18):
                self._owes_sight = False
                self.sight = json.loads(answer)
        return self.sight is not None

    def _request(self, request: bytes) -> bool:
        with contextlib.suppress(OSError):  # it is gone, or has not read for long
            return bool(self._control.send(request))
        return False

    def close(self) -> None:
        """Give up every descriptor of a rank that is gone."""
        if self.channel is not None:
            self.channel.close()
        if self.sock is not None:
            self.sock.close()
        for output in self.outputs:
            output.close()
        self._control.close()
        os.close(self.pidfd)
