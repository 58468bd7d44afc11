"""Keeps an agent on a host while the ssh sessions that lead to it come and go. Standard library only.

``link start FOLDER GRACE_S AGENT`` and ``link attach FOLDER`` run under ssh, their stdin and stdout being the link.
``start`` leaves a *session* behind, a process of its own that starts the agent, relays for it, and listens on a
socket in FOLDER, which only this user can enter. Both then hand their stdin and stdout to the session, so that no
byte goes through them, and wait: they see what the session can't, namely how their end of the ssh connection ends.
The end of stdin while sshd lives on means that the driver closed it or died, and the session ends. An sshd that is
gone means that the connection was lost, and the session waits GRACE_S seconds for an ``attach``. Under srun, on a node
of a Slurm job, nobody can tell the two apart: a driver that goes says so over the link, and one that dies counts as
cut off.

AGENT is a JSON object: ``argv``, to which the channel's descriptor and -1 are added, and ``pid_namespace``, whether
the agent is to have its own where this user may make one.

On the driver's own machine, which ``here`` as the last argument says, the driver itself is in sshd's place: that it is
gone ends the session. For a FOLDER called ``atoll-link-CLUSTER.DRIVER.…`` what CLUSTER's earlier drivers left here is
ended first.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, NoReturn

from atoll.agent import keeper, orphans
from atoll.agent.process_tree import PR_SET_CHILD_SUBREAPER, kill_tree, prctl
from atoll.core.paths import short_path
from atoll.wire.frames import WireError, close_all, receive
from atoll.wire.resumable_protocol import HELLO, REFUSED, VERSION, Greeter, greeting
from atoll.wire.resumable_stream import Link, Relay

HERE: Final = "here"
_SOCKET: Final = "link.sock"
_AGENT_LOG: Final = "agent.log"
_DRIVER_GONE: Final = b"E"
_SERVE: Final = "import sys; sys.path.insert(0, sys.argv[1]); from atoll.agent.session import serve_kept; serve_kept()"
_BEGIN_S: Final = 30.0  # a session nobody greets ends
_AGENT_END_S: Final = 3.0  # an agent whose channel is closed gets this long to end its ranks and remove its files
_SWEEP_S: Final = 2 * _AGENT_END_S  # what sessions of an earlier driver get to end
_HEARING_S: Final = 1.0  # the front of a link that failed may still say that its driver is gone
_VERDICT_S: Final = 0.2  # what an sshd that ends may take from closing our stdin to being gone
_NAMESPACE: Final = ("--pid", "--mount-proc", "--propagation", "slave", "--fork", "--kill-child=SIGKILL")


class _Front:
    """A process under ssh, and the link that it handed over."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.link: Link | None = None
        self.greeter = Greeter(skip_noise=False)


class Session(Relay):
    """The process that stays.

    ``is_kept``: a keeper has started it, whose job may be told to end: SIGTERM then reaches every process of the job,
    and it is the driver that ends the agent, once what that runs has saved.
    """

    def __init__(
        self, folder: str, listener: socket.socket, grace_s: float, agent: dict[str, Any], *, is_kept: bool = False
    ) -> None:
        ours, self._theirs = socket.socketpair()
        super().__init__(ours)
        self._folder = folder
        self._listener = listener
        self._grace_s = grace_s
        self._is_kept = is_kept
        self._command = agent
        self._agent: subprocess.Popen[bytes] | None = None
        self._token = ""
        self._fronts: set[_Front] = set()
        self._front: _Front | None = None  # whose link is in use, or was last
        # The one whose verdict counts: something came over its link after we greeted, so it saw its sshd alive.
        self._trusted: _Front | None = None
        self._ending = False
        self._done = False

    def serve(self) -> None:
        """Until the agent or the driver ends, or no link came for too long."""
        self.loop.watch(self._listener.fileno(), lambda *_: self._accept())
        self.loop.after(_BEGIN_S, self._finish, "begin")
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # not ignored, which the agent would inherit
            signal.signal(number, lambda *_: None)
        if not self._is_kept:
            signal.signal(signal.SIGTERM, lambda *_: self.loop.post(self._finish))
        try:
            while not self._done:
                self.loop.turn()
        finally:
            self._end_agent()
            self._theirs.close()
            self.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._listener.close()
            for front in list(self._fronts):  # last: they end when they see it, and ssh with them
                self._close_front(front)

    def _finish(self) -> None:
        self._done = True

    # -- links ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            control, _ = self._listener.accept()
            if not keeper.is_ours(control):
                control.close()
                return
            control.setblocking(False)
            front = _Front(control)
            self._fronts.add(front)
            self.loop.watch(control.fileno(), lambda *_: self._hear_front(front))

    def _hear_front(self, front: _Front) -> None:
        try:
            data, fds = receive(front.control)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if len(fds) == 2 and front.link is None:
            front.link = Link(*fds)
            self.loop.watch(front.link.read_fd, lambda *_: self._read_greeting(front))
            return
        close_all(fds)
        if data == _DRIVER_GONE and (front is self._trusted or self._agent is None):
            self._done = True
        elif data in (b"", _DRIVER_GONE):
            if front.link is not None and front.link is self.link:
                self.give_up("its ssh session ended")
            self._close_front(front)

    def _close_front(self, front: _Front) -> None:
        self._fronts.discard(front)
        if front.link is not None:
            self.loop.unwatch(front.link.read_fd)
            front.link.close()
            front.link = None
        if front.control.fileno() >= 0:
            self.loop.unwatch(front.control.fileno())
            front.control.close()
        if self._agent is None and not self._fronts:  # nobody greeted, and nobody will
            self._done = True

    def _read_greeting(self, front: _Front) -> None:
        assert front.link is not None
        try:
            data = os.read(front.link.read_fd, 1 << 16)
            said = front.greeter.feed(data)
        except BlockingIOError:
            return
        except (OSError, WireError) as error:
            self._refuse(front, str(error))
            return
        if said is not None:
            self._greeted(front, front.link, *said)
        elif not data:
            self.loop.unwatch(front.link.read_fd)  # the front says what that means

    def _greeted(self, front: _Front, link: Link, kind: int, meta: dict[str, Any]) -> None:
        self.loop.unwatch(link.read_fd)
        token, received, version = meta.get("token"), meta.get("received"), meta.get("version")
        if kind != HELLO or not isinstance(token, str) or not token or not isinstance(received, int):
            self._refuse(front, "it did not greet")
        elif version != VERSION:
            self._refuse(
                front,
                f"the host speaks version {VERSION} of the link, the driver {version}: use the same Atoll on both",
            )
        elif self._token and not hmac.compare_digest(token, self._token):
            self._refuse(front, "the session belongs to another driver")
        elif self._agent is None and (problem := self._start_agent()):
            self._refuse(front, problem)
            self._done = True
        else:
            self._token = token
            self._use(front, link, received)

    def _use(self, front: _Front, link: Link, received: int) -> None:
        self.give_up("another one took its place")
        old, self._front = self._front, front
        if old is not None:
            self._close_front(old)
        hello = greeting(HELLO, {"version": VERSION, "received": self.received})
        try:
            self.adopt(link, received, front.greeter.rest, hello)
        except WireError as error:
            self._refuse(front, str(error))
        else:
            self._trusted = None
            self.loop.cancel("grace")
            self.loop.cancel("begin")

    def heard(self) -> None:
        """The driver lives, and its front is what it seems to be."""
        super().heard()
        self._trusted = self._front

    def _refuse(self, front: _Front, reason: str) -> None:
        if front.link is not None and front.link.write_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(front.link.write_fd, greeting(REFUSED, {"reason": reason}))
        self._close_front(front)

    # -- what the relay tells ---------------------------------------------------------------------------------------

    def link_lost(self, link: Link, reason: str) -> None:
        """Wait for another; the front may still say that there will be none."""
        self.loop.after(self._grace_s, self._finish, "grace")
        if reason and (front := self._front) is not None:  # a driver that died may be seen in either way first
            self.loop.after(_HEARING_S, lambda: self._close_front(front), "front")

    def local_ended(self) -> None:
        """The agent closed its channel: the driver is told, with the reason, behind everything the agent said."""
        if not self._ending:
            self._ending = True
            self.say_end(self._end_agent())

    def peer_ended(self, reason: str) -> None:
        """The driver is through."""
        self._done = True

    # -- the agent ------------------------------------------------------------------------------------------------

    def _start_agent(self) -> str:
        """Start it; returns what went wrong."""
        prefix = _namespace() if self._command.get("pid_namespace") else ()
        owner = _owner(self._folder)
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        argv = [*prefix, *self._command["argv"], str(self._theirs.fileno()), "-1", str(proc)]
        try:
            with open(os.path.join(self._folder, _AGENT_LOG), "wb") as log:
                self._agent = subprocess.Popen(
                    argv,
                    pass_fds=(self._theirs.fileno(), proc),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, **({} if owner is None else {orphans.VARIABLE: owner})},
                )
        except OSError as error:
            return f"the agent could not be started: {error}"
        finally:
            os.close(proc)
        self._theirs.close()
        return ""

    def _end_agent(self) -> str:
        """End it and everything below it; returns what went wrong with it."""
        self.close_local()
        if self._agent is None:
            return ""
        try:
            code = self._agent.wait(_AGENT_END_S)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            code = self._agent.wait()
        kill_tree(os.getpid(), "\0")  # what an agent that was killed left came to us; no environment has such a tag
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not code:
            return ""
        said = Path(self._folder, _AGENT_LOG).read_bytes()[-4000:].decode(errors="replace").split("\n")
        last = next((line for line in reversed(said) if line.strip()), "")
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        return f"its agent ended with {how}" + (f": {last}" if last else "")


def _namespace() -> tuple[str, ...]:
    """The command that gives an agent its own PID namespace; nothing where only a user namespace would allow it.

    Inside one, programs that change the user, such as sudo, would not work.
    """
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        return ()
    command = (unshare, *_NAMESPACE)
    probe = subprocess.run([*command, "true"], stdin=subprocess.DEVNULL, capture_output=True)
    return command if probe.returncode == 0 else ()


# ------------------------------------------------------------------------------------------------------ under ssh
def _owner(folder: str) -> str | None:
    """``CLUSTER.DRIVER.…``, where its name says so."""
    name = os.path.basename(folder).removeprefix(orphans.LINK)
    return name if "." in name else None


def _end_earlier(folder: str) -> str:
    """End what the same cluster's drivers that are no more left here: both would write to the same files.

    Returns:
        what is wrong where that can't be done.
    """
    owner = _owner(folder)
    if owner is None:
        return ""
    cluster, driver, *_ = owner.split(".")
    left = orphans.end(cluster, but=f"{cluster}.{driver}", patience_s=_SWEEP_S)
    return (
        f"what an earlier job of this cluster left there can't be ended, not even with SIGKILL: {', '.join(left)}"
        if left
        else ""
    )


def _start(folder: str, grace_s: float, agent: dict[str, Any]) -> None:
    """Make the session's folder and socket, and leave a process behind that serves it."""
    os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    os.mkdir(folder, 0o700)
    listener = socket.socket(socket.AF_UNIX)
    try:
        with short_path(folder, _SOCKET) as path:
            listener.bind(path)
        listener.listen()
    except OSError:
        shutil.rmtree(folder)
        raise
    serve = [sys.executable, "-I", "-S", "-c", _SERVE, sys.path[0], str(listener.fileno()), folder]
    if keeper.spawn([*serve, str(grace_s), json.dumps(agent)], {listener.fileno(): listener.fileno()}, os.environ):
        listener.close()
        return
    child = os.fork()
    if child:
        listener.close()
        os.waitpid(child, 0)
        return
    # In the session: neither sshd's end nor that of a terminal reaches it, and it holds nothing of theirs.
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    _serve(listener, folder, grace_s, agent)


def _serve(
    listener: socket.socket, folder: str, grace_s: float, agent: dict[str, Any], *, is_kept: bool = False
) -> NoReturn:
    listener.setblocking(False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        Session(folder, listener, grace_s, agent, is_kept=is_kept).serve()
    finally:
        os._exit(0)


def serve_kept() -> None:
    """Entry of a session that a keeper has started."""
    descriptor, folder, grace_s, agent = sys.argv[2:]
    _serve(socket.socket(fileno=int(descriptor)), folder, float(grace_s), json.loads(agent), is_kept=True)


def _attach(folder: str, here: bool) -> None:
    """Hand stdin and stdout over, and wait until they are of no more use."""
    anchor = _anchor()
    with socket.socket(socket.AF_UNIX) as control:
        with short_path(folder, _SOCKET) as path:
            control.connect(path)
        rights = array.array("i", (0, 1))
        control.sendmsg([b"L"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        poll = select.poll()
        poll.register(0, select.POLLRDHUP)
        poll.register(control, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if control.fileno() in ready:
                return
            if 0 in ready:
                break
        deadline = time.monotonic() + _VERDICT_S
        while time.monotonic() < deadline:
            if _anchor() != anchor:
                if here:
                    break
                return  # the connection was lost
            time.sleep(0.02)
        if not here and "SLURM_STEP_ID" in os.environ:
            return
        with contextlib.suppress(OSError):
            control.sendall(_DRIVER_GONE)
            control.settimeout(2 * _AGENT_END_S)
            control.recv(1)


def _anchor() -> tuple[int, int]:
    """The process that sshd started, which leads our session, and its parent: sshd, or another once that is gone."""
    leader = os.getsid(0)
    try:
        return leader, int(Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return leader, 0


def main() -> None:
    """Entry: ``link start FOLDER GRACE_S AGENT`` or ``link attach FOLDER``."""
    what, folder = sys.argv[1], os.path.abspath(sys.argv[2])
    if what == "start" and (reason := _end_earlier(folder)):
        _say_refused(reason)
    try:
        if what == "start":
            _start(folder, float(sys.argv[3]), json.loads(sys.argv[4]))
        _attach(folder, here=sys.argv[-1] == HERE)
    except OSError as error:
        if what == "start":
            reason = f"the session's folder {folder} can't be made: {error.strerror}"
        else:
            reason = "the agent is gone: the host was restarted, or the agent's session was ended"
            if isinstance(error, ConnectionRefusedError):
                shutil.rmtree(folder, ignore_errors=True)
        _say_refused(reason)


def _say_refused(reason: str) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(1, greeting(REFUSED, {"reason": reason}))
    sys.exit(f"atoll: {reason}")


if __name__ == "__main__":
    main()
