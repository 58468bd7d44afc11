"""One host for what is done there besides running agents: a command, a module of Atoll, a file of code."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import IO, Any, TypeVar

from atoll.core.errors import ProvisionError
from atoll.providers.base import Bundle, NodePlan
from atoll.providers.ssh.connection import LOGIN_S, Connection, connections, on_each
from atoll.providers.ssh.facts import python_command
from atoll.providers.ssh.hosts import Target
from atoll.wire.command_output import parsed

R = TypeVar("R")
ANSWER_S = 60.0  # with the start of a Python from a cold or shared disk
_BOOT = (
    "import os, sys; sys.path.insert(0, {code!r}); os.environ['ATOLL_HOME'] = {home!r}; "
    "from atoll.{module} import main; sys.exit(main(sys.argv[1:]))"
)


_UPLOAD_S = 300.0
_OLD_S = 30 * 86400

# Written aside and renamed: a home may be shared, and several hosts get the file at once. Old ones go meanwhile.
_PUT = """
import hashlib, os, socket, sys, time
path, digest, old_s = sys.argv[1:]
data = sys.stdin.buffer.read()
if hashlib.sha256(data).hexdigest() != digest:
    sys.exit('it arrived damaged, as %d bytes: does something in ~/.bashrc there read standard input?' % len(data))
folder = os.path.dirname(path)
os.makedirs(folder, 0o700, exist_ok=True)
aside = '%s.%s.%d' % (path, socket.gethostname(), os.getpid())
try:
    with open(aside, 'wb') as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
except OSError as error:
    try:
        os.unlink(aside)
    except OSError:
        pass
    sys.exit(str(error))
for name in os.listdir(folder):
    other = os.path.join(folder, name)
    try:
        if os.stat(other).st_mtime < time.time() - float(old_s):
            os.unlink(other)
    except FileNotFoundError:  # another host's, which has its name now or was old too
        pass
"""


class Host:
    """A login to a host with a plan, held until ``close``."""

    def __init__(self, target: Target, plan: NodePlan) -> None:
        self.target = target
        self.plan = plan
        self.login = connections.hold(target)
        self._is_open = True

    def __enter__(self) -> Host:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Log out where nobody else uses the login. Safe to call twice."""
        if self._is_open:
            self.leave()
            connections.close_idle()

    def leave(self) -> None:
        """The same, but a login that nobody uses stays until a later ``close_idle``."""
        if self._is_open:
            self._is_open = False
            connections.leave(self.target)

    def is_lost(self, code: int, said: bytes) -> bool:
        """Did the way there break, by the exit code and standard error of what ran through it?"""
        return self.target.is_lost(code, said)

    def abort(self) -> None:
        """Have what runs there through this login fail, from another thread."""
        self.login.abort()

    def run(self, command: str, data: bytes = b"", *, limit_s: float = LOGIN_S) -> subprocess.CompletedProcess[bytes]:
        """Run a shell command there; see ``Connection.run``."""
        return self.login.run(command, data, limit_s=limit_s)

    def check(self, command: str, data: bytes = b"", *, limit_s: float = LOGIN_S) -> bytes:
        """Run a shell command there that has to succeed; returns what it printed.

        Raises:
            ProvisionError: it failed; the message ends with the last line that it said.
        """
        answer = self.run(command, data, limit_s=limit_s)
        if answer.returncode != 0:
            raise ProvisionError(f"{self.plan.host}: {last_words(answer.stderr, answer.returncode)}")
        return answer.stdout

    def bring_code(self) -> None:
        """Bring Atoll's code there where it is lacking."""
        code = self.plan.bundles[0]
        put(self.login, self.plan, code)
        self.plan = dataclasses.replace(self.plan, present=self.plan.present | {code.digest})

    def python(self, module: str, *arguments: str, limit_s: float = ANSWER_S) -> Any:
        """Run a module of Atoll there; what it prints, which is JSON."""
        self.bring_code()
        return parsed(self.plan.host, self.check(self._command(module, *arguments), limit_s=limit_s))

    def open(self, module: str, *arguments: str, stderr: int | IO[bytes] = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """The same, talked to by pipes; the caller ends it, and begins with ``skip_login_text``."""
        self.bring_code()
        return self.login.open(self._command(module, *arguments), stderr)

    def argv(self, module: str, *arguments: str) -> list[str]:
        """The argument list that runs a module of Atoll there, whose code has been brought."""
        return self.login.argv(self._command(module, *arguments))

    def _command(self, module: str, *arguments: str) -> str:
        code = _BOOT.format(code=self.plan.import_path[0], home=self.plan.folder, module=module)
        return python_command(self.plan.python, code, *arguments)


@contextlib.contextmanager
def on_hosts(targets: Sequence[Target], plans: Sequence[NodePlan]) -> Iterator[list[Host]]:
    """Logins for what is asked before anything is started; they stay until a later ``close_idle``, unless it fails."""
    with connections.used(targets):
        hosts = list(map(Host, targets, plans))
        try:
            yield hosts
        finally:
            for host in hosts:
                host.leave()


def for_each(hosts: Sequence[Host], work: Callable[[Host], R]) -> list[R]:
    """Do something with several hosts at once; a Ctrl-C ends it everywhere.

    Raises:
        ProvisionError: it failed for some: all of them are named.
    """
    by_login = {id(host.login): host for host in hosts}
    return on_each([host.login for host in hosts], lambda login: work(by_login[id(login)]))


def put(connection: Connection, plan: NodePlan, bundle: Bundle) -> None:
    """Bring a bundle to a host that lacks it.

    Raises:
        ProvisionError: it can't be written there: the disk is full, say.
    """
    facts = connection.facts
    if bundle.digest in plan.present or (facts is not None and bundle.digest in facts.bundles):
        return
    path = plan.bundle_path(bundle)
    command = python_command(plan.python, _PUT, path, bundle.digest, str(_OLD_S))
    answer = connection.run(command, bundle.path.read_bytes(), limit_s=_UPLOAD_S)
    if answer.returncode != 0:
        said = answer.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        fix = ". Free some space there" if "No space left" in said[-1] or "Disk quota" in said[-1] else ""
        raise ProvisionError(f"{connection.target}: could not write {path} there: {said[-1]}{fix}")
    if facts is not None:
        connection.facts = dataclasses.replace(facts, bundles=facts.bundles | {bundle.digest})


def last_words(said: bytes, code: int) -> str:
    """The last line that a command wrote to standard error, else its exit code."""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else f"exit code {code}"
