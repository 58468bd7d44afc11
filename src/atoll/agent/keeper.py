"""Starts processes that outlive the command which asks for them, where commands are followed by their whole tree's end.

Slurm ends what a step has started when the step ends. So one process a node lives as long as the job does, the keeper:
what has to stay, a supervisor or the session of an agent, is made its child. Who asks for that finds its socket by the
variable ATOLL_KEEPER, and is of the same user. Standard library only, and nothing of Atoll: its source is sent as text.

``keeper FOLDER IDLE_S AGAIN`` serves until it is told to end, and then for as long as what it has started needs for
that. The one on the first node cancels the job once nothing that it has started ran for IDLE_S seconds: whoever wanted
the nodes is gone. Where Slurm has started the job again, it starts what the file AGAIN tells of.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence

VARIABLE = "ATOLL_KEEPER"
NOTICE = "notice"  # a file beside its socket, which the job's script makes: its nodes will be taken soon
_NAME = "keeper.sock"
_START_S = 20.0  # the job's first step may be on its way
_LOOK_S = 1.0
_END_S = 5.0
_LEAVE_S = 300.0  # what saves gets as long as Slurm lets it live
_PEER = struct.Struct("3i")  # pid, uid, gid, as SO_PEERCRED gives them
_PR_SET_CHILD_SUBREAPER = 36


def spawn(argv: Sequence[str], fds: Mapping[int, int], env: Mapping[str, str], *, again_log: str = "") -> bool:
    """Have the keeper of this node start a process, whose input is empty; returns False where there is no keeper.

    Args:
        argv: what is started, in a session of its own, in ``/``.
        fds: its descriptors, by the number that each has there.
        env: its environment.
        again_log: where Slurm starts the job again, on other nodes perhaps, this is started again too, and writes into
            that file.

    Raises:
        OSError: the keeper does not answer, or could not start it.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                sock.connect(os.path.join(folder, _NAME))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        _check_peer(sock)
        with open(os.memfd_create("atoll"), "w+b") as request:  # larger than a message may be
            env = {**env, VARIABLE: folder}
            fields = {"argv": list(argv), "env": env, "numbers": list(fds), "again_log": again_log}
            request.write(json.dumps(fields).encode())
            request.flush()
            sent = array.array("i", [request.fileno(), *fds.values()])
            sock.sendmsg([b"S"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
        if said := sock.recv(4096).decode(errors="replace"):
            raise OSError(said)
    return True


def is_ours(sock: socket.socket) -> bool:
    """Whether the other end of a Unix socket is of the same user."""
    _pid, uid, _gid = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(uid == os.geteuid())


def _check_peer(sock: socket.socket) -> None:
    if not is_ours(sock):
        raise PermissionError("it is another user's")


def _answer(sock: socket.socket, again: str) -> str:
    """Start what is asked for; what went wrong."""
    fds = array.array("i")
    try:
        _check_peer(sock)
        sock.settimeout(_END_S)
        _, ancillary, _, _ = sock.recvmsg(16, socket.CMSG_SPACE(16 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not fds:
            return "no request came"
        request = json.loads(os.pread(fds[0], os.fstat(fds[0]).st_size, 0))
        _start(request["argv"], request["env"], dict(zip(request["numbers"], fds[1:], strict=True)))
        if request["again_log"]:
            _remember(again, request)
    except (OSError, ValueError, KeyError) as error:
        return str(error) or type(error).__name__
    finally:
        for fd in fds:
            os.close(fd)
    return ""


def _start(argv: list[str], env: dict[str, str], fds: dict[int, int]) -> None:
    read, write = os.pipe()  # says what went wrong, or nothing
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.chdir("/")
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            above = max([write, *fds, *fds.values()]) + 1  # no number is overwritten before it was used
            moved = {number: os.dup2(fd, above + at) for at, (number, fd) in enumerate(fds.items())}
            null = os.open(os.devnull, os.O_RDWR)
            for standard in range(3):
                os.dup2(null, standard)
            for wanted, fd in moved.items():
                os.dup2(fd, wanted, inheritable=True)
                os.close(fd)
            os.execve(argv[0], argv, env)
        except BaseException as error:  # noqa: BLE001 - it must not come back from here
            os.write(write, str(error).encode(errors="replace"))
        os._exit(127)
    os.close(write)
    with open(read, "rb") as pipe:
        if said := pipe.read():
            raise OSError(said.decode(errors="replace"))


def _remember(path: str, request: Mapping[str, object]) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(json.dumps(request) + "\n")


def _start_again(path: str) -> None:
    """Start what was started before Slurm started the job again."""
    try:
        with open(path) as file:
            requests = [json.loads(line) for line in file]
    except FileNotFoundError:
        return
    for request in requests:
        log = os.open(request["again_log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            _start(request["argv"], request["env"], {1: log, 2: log})
        os.close(log)


def _children() -> list[int]:
    """Pids of the processes that this one has to wait for."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


def _serve(listener: socket.socket, idle_s: float, again: str) -> None:
    ends: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ends.append(1))
    busy_s = time.monotonic()
    is_first = os.environ.get("SLURM_PROCID") == "0"
    if is_first and os.environ.get("SLURM_RESTART_COUNT"):
        _start_again(again)
    while not ends:
        if select.select([listener], [], [], _LOOK_S)[0]:
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                with sock:
                    sock.send(_answer(sock, again).encode()[:4096])
            busy_s = time.monotonic()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if _children():
            busy_s = time.monotonic()
        elif is_first and time.monotonic() - busy_s > idle_s:
            os.execvp("scancel", ["scancel", os.environ["SLURM_JOB_ID"]])
    # A supervisor ends its jobs, which save, and then the sessions of their agents, here and on the other nodes.
    for last, patience_s in ((signal.SIGTERM, _LEAVE_S), (signal.SIGKILL, _END_S)):
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, last)
        deadline = time.monotonic() + patience_s
        while _children() and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.02)


def main() -> None:
    """Entry."""
    import ctypes
    import shutil

    folder, idle_s, again = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    shutil.rmtree(folder, ignore_errors=True)  # of a job with the same number, before the controller was set up anew
    os.mkdir(folder, 0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.path.join(folder, _NAME))
        listener.listen(64)
        try:
            _serve(listener, idle_s, again)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
