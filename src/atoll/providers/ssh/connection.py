"""One host over the user's own OpenSSH: one login, and every further session through it without another.

What the user's ssh config says holds: keys, agents, jump hosts, Match blocks. Host keys are checked, never accepted
for the user. Where there is a terminal, ssh asks there for what it needs: a passphrase, a code.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, TypeVar

from atoll.core import terminal
from atoll.core.errors import ProvisionError
from atoll.core.paths import atoll_home
from atoll.providers.ssh.errors import LoginDenied, explain, silent
from atoll.providers.ssh.hosts import HERE, SSH_FAILED, Facts, Target
from atoll.wire.command_output import marked, never_began, own_output

R = TypeVar("R")
LOGIN_S = 15.0  # what logging in, or a short command, may take
_PROMPT_S = 180.0  # the same where a person types
_LOGOUT_S = 5.0
_LOOK_S = 0.2
_CONNECT_S = 5  # two more tries of TCP, after 1 and 3 s
_PROXY_S = 45  # for a login through a program of its own, which may have to start
_ALIVE_S, _ALIVE_COUNT = 2, 3  # a host that is silent for their product is given up by ssh
_PERSIST_S = 60  # a login that nobody uses ends by itself; it lasts where somebody may have typed a code for it
_PERSIST_ALONE_S = 5
_LONGEST_PATH = 104 - 18 - 16  # of a Unix socket, less what ssh and we put behind the folder
_FROM_SRUN = re.compile(rb"^srun: error: (.*)", re.M)
_IN_A_TERMINAL = "; or run this in a terminal, where ssh asks for the password or code"


class Connection:
    """A login to one host that commands share, also those of other processes of this user.

    ``facts`` is what the host said about itself, while ``Connections.kept`` lasts.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.facts: Facts | None = None
        self._is_here = target.host == HERE
        self._ssh = _program() if not self._is_here else ""
        key = hashlib.blake2b(repr((target.host, target.options, self._ssh)).encode(), digest_size=6).hexdigest()
        self._socket = _folder() / key
        self._lock_file = os.open(f"{self._socket}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_file, fcntl.LOCK_SH)  # as long as somebody uses the login: see close()
        self._login = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, command: str, data: bytes = b"", *, limit_s: float = LOGIN_S) -> subprocess.CompletedProcess[bytes]:
        """Run a command there with ``data`` as its input; logs in first where nobody has.

        What start files of the login shell printed is no part of its output.

        Raises:
            ProvisionError: the host can't be reached, does not let us in, runs no command, or says nothing within
                ``limit_s`` seconds.
        """
        if self.target.config is not None and not self._socket.exists():
            limit_s += _PROXY_S
        with self._login:  # the first makes the login, those after it share it
            try:
                return self._run(command, data, limit_s, ask=False)
            except LoginDenied as denied:
                if not _has_terminal():
                    raise LoginDenied(f"{denied}{_IN_A_TERMINAL if denied.may_ask else ''}") from None
            with terminal.prompts:
                answer = self._run(command, data, _PROMPT_S, ask=True)
            with contextlib.suppress(OSError):  # it did not stay
                os.pwrite(self._lock_file, f"{self._socket.stat().st_ino:20}".encode(), 0)
            return answer

    def _run(self, command: str, data: bytes, limit_s: float, *, ask: bool) -> subprocess.CompletedProcess[bytes]:
        with tempfile.TemporaryFile() as given:  # communicate() forgets what it has not written when its time is over
            given.write(data)
            given.seek(0)
            process = self.open(command, stdin=given, ask=ask)
            self._running.add(process)
            try:
                out, said = self._communicate(process, limit_s)
            finally:
                self._end(process)
        if process.returncode == SSH_FAILED and not self._is_here:
            raise explain(self.target, said.decode(errors="replace"), self._ssh)
        if (own := own_output(out)) is None:
            if process.returncode < 0:  # ssh itself was killed: abort()
                raise self._interrupted()
            raise never_began(str(self.target), out, said)
        if self.target.step is not None and process.returncode and (why := _FROM_SRUN.findall(said)):
            job = self.target.step[0]
            raise ProvisionError(
                f"{self.target}: Slurm job {job} runs nothing there: {why[-1].decode(errors='replace')}"
            )
        return subprocess.CompletedProcess(process.args, process.returncode, own, said)

    def _communicate(self, process: subprocess.Popen[bytes], limit_s: float) -> tuple[bytes, bytes]:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return process.communicate(timeout=min(_LOOK_S, limit_s))
            except subprocess.TimeoutExpired as not_yet:
                came = not_yet.output or b""
            if process not in self._running:  # killed; the login may hold its pipes open for long
                raise self._interrupted()
            if time.monotonic() > deadline:
                raise silent(self.target, limit_s, began=own_output(came) is not None)

    def _interrupted(self) -> ProvisionError:
        return ProvisionError(f"{self.target}: interrupted")

    def open(
        self,
        command: str,
        stderr: int | IO[bytes] = subprocess.PIPE,
        *,
        stdin: int | IO[bytes] = subprocess.PIPE,
        ask: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a command whose input and output are pipes; the caller ends it, and begins with ``skip_login_text``."""
        return subprocess.Popen(
            self.argv(command, ask=ask),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=not ask,  # Ctrl-C is ours to handle; only one that asks needs the terminal
        )

    def argv(self, command: str, *, ask: bool = False) -> list[str]:
        """The argument list that runs a command there, whose output begins behind what ``skip_login_text`` skips."""
        command = marked(self.target.within(command))
        if self._is_here:
            return ["/bin/sh", "-c", command]
        return [self._ssh, *self._options(ask), "--", self.target.host, command]

    def _options(self, ask: bool) -> list[str]:
        settings = {
            "BatchMode": "no" if ask else "yes",
            "StrictHostKeyChecking": "yes" if self.target.config is None else "accept-new",
            "UpdateHostKeys": "no",
            # Who types a code for a jump host holds up what is behind it.
            "ConnectTimeout": int(_PROMPT_S) if ask else _CONNECT_S if self.target.config is None else _PROXY_S,
            "ServerAliveInterval": _ALIVE_S,
            "ServerAliveCountMax": _ALIVE_COUNT,
            "ControlMaster": "auto",
            "ControlPath": _in_config(self._socket),
            "ControlPersist": _PERSIST_S if _has_terminal() else _PERSIST_ALONE_S,
            "LogLevel": "INFO" if ask else "ERROR",
            "ClearAllForwardings": "yes",
            "RemoteCommand": "none",
            "PermitLocalCommand": "no",
        }
        # What comes first wins over the user's config.
        options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        return [*options, "-T", "-e", "none", *self.target.options]

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._running.discard(process)
        if process.poll() is None:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def abort(self) -> None:
        """End every command that runs, from any thread; their callers see it fail."""
        while self._running:
            with contextlib.suppress(KeyError):  # it has ended meanwhile
                self._running.pop().kill()

    def close(self) -> None:
        """Log out, unless another process uses the login too. Does nothing the second time.

        One that somebody typed something for ends by itself, some time after its last use: the next command, or a
        supervisor that has just been started, can't ask for it again.
        """
        descriptor, self._lock_file = self._lock_file, -1
        if descriptor < 0:
            return
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._socket.exists() and not self._was_typed_for(descriptor):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._log_out()
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have it open too
        os.close(descriptor)

    def _log_out(self) -> None:
        """End the login, and wait for that: it removes its socket last, by name, also if a later login made that."""
        answer = subprocess.run(
            [self._ssh, "-o", f"ControlPath={_in_config(self._socket)}", "-O", "exit", "--", self.target.host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LOGOUT_S,
        )
        deadline = time.monotonic() + _LOGOUT_S
        while answer.returncode == 0 and self._socket.exists() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _was_typed_for(self, lock_file: int) -> bool:
        """Is the login one that somebody typed something for, here or in another process?"""
        with contextlib.suppress(OSError, ValueError):
            return int(os.pread(lock_file, 20, 0)) == self._socket.stat().st_ino
        return False


class Connections:
    """Logins of this process, by target, with the number of their users: the last one logs out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Target, tuple[Connection, int]] = {}
        self._keepers = 0
        self._pid = os.getpid()

    @property
    def are_kept(self) -> bool:
        """Is ``kept`` going on?"""
        return self._keepers > 0

    @contextlib.contextmanager
    def kept(self, *, stay: bool = False) -> Iterator[None]:
        """While this lasts, hosts are logged in to once and asked about themselves once, whoever wants to know.

        ``stay``: logins stay until a later ``close_idle``, unless it fails.
        """
        with self._lock:
            self._keepers += 1
        try:
            yield
        except BaseException:
            stay = False
            raise
        finally:
            with self._lock:
                self._keepers -= 1
                for connection, _ in self._open.values() if self._keepers == 0 else ():
                    connection.facts = None
            if not stay:
                self.close_idle()

    @contextlib.contextmanager
    def used(self, targets: Iterable[Target]) -> Iterator[list[Connection]]:
        """Logins for questions before anything is started; they stay until a later ``close_idle``, unless it fails."""
        held: list[Connection] = []
        try:
            try:
                held.extend(map(self.hold, targets))
                yield held
            finally:
                for connection in held:
                    self.leave(connection.target)
        except BaseException:
            self.close_idle()
            raise

    def hold(self, target: Target) -> Connection:
        """The login, counted: give it back with ``release``."""
        return self._count(target, 1)

    def release(self, target: Target) -> None:
        """One user less; logs out of every host that nobody uses."""
        self.leave(target)
        self.close_idle()

    def leave(self, target: Target) -> None:
        """One user less; the login stays until a later ``close_idle``."""
        self._count(target, -1)

    def _count(self, target: Target, more: int) -> Connection:
        with self._lock:
            connection, users = self._open.get(target) or (Connection(target), 0)
            self._open[target] = (connection, users + more)
            return connection

    def close_idle(self) -> None:
        """Log out of every host that nobody uses."""
        # A forked child has a copy, and may run this when it ends: the logins are not its.
        if os.getpid() != self._pid or self.are_kept:
            return
        with self._lock:
            idle = [target for target, (_, users) in self._open.items() if users <= 0]
            closing = [self._open.pop(target)[0] for target in idle]
        for connection in closing:
            connection.close()


connections = Connections()
atexit.register(connections.close_idle)


def on_each(open_ones: Sequence[Connection], work: Callable[[Connection], R]) -> list[R]:
    """Do something with several hosts at once; a Ctrl-C ends it everywhere.

    Raises:
        ProvisionError: it failed for some: all of them are named.
    """
    if not open_ones:
        return []
    with ThreadPoolExecutor(len(open_ones), thread_name_prefix="atoll-ssh") as threads:
        futures: list[Future[R]] = []
        try:
            futures.extend(threads.submit(work, connection) for connection in open_ones)
            wait(futures)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            while wait(futures, 0.05).not_done:
                for connection in open_ones:
                    connection.abort()
            raise
    failed = [error for future in futures if (error := future.exception()) is not None]
    for error in failed:
        if not isinstance(error, ProvisionError):
            raise error
    if len(failed) > 1:
        raise ProvisionError(
            f"{len(failed)} of {len(futures)} hosts failed:\n" + "\n".join(f"  {each}" for each in failed)
        )
    if failed:
        raise failed[0]
    return [future.result() for future in futures]


def _in_config(path: Path) -> str:
    """A path as ssh's config takes it: with spaces, and ``%`` that stands for itself."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def _program() -> str:
    found = shutil.which("ssh")
    if found is None:
        raise ProvisionError(
            "this machine has no ssh: install OpenSSH's client (on Debian: apt-get install openssh-client)"
        )
    return found


def _has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def _folder() -> Path:
    """Where the sockets lie: nobody else may enter, and its path is short enough for a socket's."""
    folder = atoll_home() / "ssh"
    if len(os.fsencode(folder)) > _LONGEST_PATH:
        folder = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < 40 else "/tmp", f"atoll-{os.getuid()}-ssh")
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077 or folder.is_symlink():
        raise ProvisionError(f"{folder} belongs to somebody else or others may enter it: remove it, or set ATOLL_HOME")
    return folder
