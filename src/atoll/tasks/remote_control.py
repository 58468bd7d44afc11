"""What ``LocalControl`` does, where a cluster's supervisor runs on another machine: through the program there."""

from __future__ import annotations

import contextlib
import functools
import json
import select
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from atoll.core.errors import AtollError, ProvisionError
from atoll.core.validation import command_line
from atoll.providers import registry
from atoll.providers.base import AllocationState, Remote
from atoll.tasks import reaper
from atoll.tasks.client import Client, OnEvent, ProgramStream, StreamLost, Write, tell
from atoll.tasks.control import FollowPosition, LocalControl
from atoll.tasks.record import folder_of
from atoll.tasks.spec import ClusterSpec, JobStatus
from atoll.tasks.sync.host_files import remove_files

_PATIENCE_S = 300.0  # a connection to the head that was there may be gone for so long
_ANSWER_S = 120.0  # cancelled jobs end within 30, and a network file system may take its time
_REMOVE_S = 300.0
_NO_CONNECTION = 255  # ssh's own exit code
_NODES_S = 10.0  # nodes that have still to come are asked for so often
_RETRY_S, _RETRY_MOST_S = 0.5, 5.0
_MAY_WAIT = ("submit", "job", "events", "position_of_tail", "follow", "wait")  # for a connection that is lost


P = ParamSpec("P")
R = TypeVar("R")


def remote(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of ``LocalControl`` that the program is asked for: its signature is the only one."""

    @functools.wraps(method)
    def ask(self: RemoteControl, /, *args: P.args, **kwargs: P.kwargs) -> R:
        answer: R = self.call(method.__name__, args, kwargs)
        return answer

    return ask


class RemoteControl:
    """``LocalControl`` on the machine where a command runs its program, which is kept for further requests.

    Args:
        command: gives the argument list that runs the program, for each connection anew.
        cluster: name of the cluster.
        host: what to call that machine in messages, where that is not this one.
        patience_s: where the connection is lost, it is made again for so long before a log or a job is given up.
        awaited: says what the cluster's nodes are waited for, where they have still to come again.
        is_lost: tells by the command's exit code and standard error whether the connection was lost.
    """

    def __init__(
        self,
        command: Callable[[], Sequence[str]],
        cluster: str,
        host: str = "",
        patience_s: float = 0.0,
        awaited: Callable[[], str] = str,
        is_lost: Callable[[int, bytes], bool] = lambda code, said: code == _NO_CONNECTION,
    ) -> None:
        self._awaited = awaited
        self._cluster = cluster
        self._head = f"the head of cluster {cluster}" + (f" ({host})" if host else "")
        self._patience_s = patience_s
        self._client = Client(
            functools.partial(ProgramStream, command, self._head, is_lost),
            self._head,
            self._head,
            functools.partial(_note, self._head),
        )

    create = remote(LocalControl.create)
    submit = remote(LocalControl.submit)
    cancel = remote(LocalControl.cancel)
    queue = remote(LocalControl.queue)
    job = remote(LocalControl.job)
    cluster = remote(LocalControl.cluster)
    change = remote(LocalControl.change)
    remove_nodes = remote(LocalControl.remove_nodes)
    end = remote(LocalControl.end)
    events = remote(LocalControl.events)
    position_of_tail = remote(LocalControl.position_of_tail)

    def follow(
        self,
        job_id: int,
        write: Write,
        on_event: OnEvent | None = None,
        *,
        follow: bool = True,
        tail: int = 0,
        rank: int | None = None,
        hang_up: int | None = None,
        start: int = 0,
    ) -> JobStatus:
        """Writes a job's log, until the job has ended. Where the connection is lost it goes on at the same byte."""
        start = self.position_of_tail(job_id, tail, rank) if tail else start
        seen = FollowPosition(write, on_event)
        args = (job_id, seen.write, None if on_event is None else seen.on_event)
        how = {"follow": follow, "rank": rank, "start": start}
        told = ""
        while True:
            status: JobStatus = self.call("follow", args, lambda: {**how, **seen.so_far}, None, hang_up)
            if not follow or status.ended:
                return status
            told = self._wait_for_nodes(told, None, hang_up)

    def wait(self, job_id: int, limit_s: float | None = None) -> JobStatus:
        """Waits until a job has ended, so many seconds at most; returns where it stands then."""
        began = time.monotonic()

        def left() -> dict[str, float | None]:
            return {"limit_s": None if limit_s is None else limit_s - (time.monotonic() - began)}

        told = ""
        while True:
            status: JobStatus = self.call("wait", (job_id,), left, None)
            left_s = left()["limit_s"]
            if status.ended or (left_s is not None and left_s <= 0):
                return status
            told = self._wait_for_nodes(told, left_s)

    def _wait_for_nodes(self, told: str, limit_s: float | None, hang_up: int | None = None) -> str:
        """Its job waits for other nodes: wait with it for a while, and tell what for, unless that was told.

        Raises:
            BrokenPipeError: ``hang_up`` was hung up.
        """
        why = self._awaited()
        if why and why != told:
            tell(f"waiting for nodes of cluster {self._cluster}: {why}")
        reader = select.poll()
        if hang_up is not None:
            reader.register(hang_up, 0)
        if reader.poll(1000 * (_NODES_S if limit_s is None else min(_NODES_S, limit_s))):
            raise BrokenPipeError
        return why

    def call(
        self,
        operation: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        answer_s: float | None = _ANSWER_S,
        hang_up: int | None = None,
    ) -> Any:
        """Asks for something, again where the connection is lost and that may be.

        Args:
            operation, args: what, as ``LocalControl`` has it.
            kwargs: further arguments, or what gives those of each try.
            answer_s: it is answered within this time.
            hang_up: a descriptor whose hang-up ends the wait with ``BrokenPipeError``.
        """
        patience_s = self._patience_s if operation in _MAY_WAIT else 0.0
        lost = _Reconnection(self._cluster, self._head, patience_s, answer_s)
        while True:
            try:
                now = kwargs() if callable(kwargs) else kwargs
                return self._client.ask(operation, args, now, lost.silent, on_hello=lost.reconnected, hang_up=hang_up)
            except StreamLost as error:
                lost.wait(str(error))
            except TimeoutError:
                raise ProvisionError(
                    f"cluster {self._cluster}: {operation}: its head did not answer within {answer_s:.0f} s. Is its "
                    f"disk full, or its home on a server that is gone?"
                ) from None


def _note(head: str, line: str) -> None:
    tell(f"note: {head}: {line}")


class _Reconnection:
    """Patience with a connection that is lost: says so, waits a little more each time, and gives up in the end."""

    def __init__(self, cluster: str, head: str, patience_s: float, answer_s: float | None = None) -> None:
        self._cluster = cluster
        self._head = head
        self._patience_s = patience_s
        self._answer_s = answer_s
        self._since: float | None = None
        self._pause_s = _RETRY_S

    def silent(self, waited_s: float) -> None:
        """Raises ``TimeoutError`` when an answer is overdue."""
        if self._answer_s is not None and waited_s > self._answer_s:
            raise TimeoutError

    def wait(self, said: str) -> None:
        """It could not be made once more; ``said`` is what ssh wrote.

        Raises:
            ProvisionError: it has been so for too long.
        """
        why = said.splitlines()[-1] if said else ""
        if self._since is None:
            self._since = time.monotonic()
            if self._patience_s > 0:
                tell(f"the connection to {self._head} is lost{f' ({why})' if why else ''}; trying again")
        if time.monotonic() - self._since >= self._patience_s:
            raise ProvisionError(
                f"{self._head} can't be reached{why and f': {why}'}. {advice_on_lost_head(self._cluster)}"
            )
        time.sleep(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, _RETRY_MOST_S)

    def reconnected(self) -> None:
        """It is there again."""
        if self._since is not None:
            tell(f"{self._head} answers again")
        self._since, self._pause_s = None, _RETRY_S


def advice_on_lost_head(cluster: str) -> str:
    """What becomes of the jobs of a cluster whose head can't be reached, and what to do."""
    return (
        f"Its jobs continue there as long as it runs: `{command_line('atoll', 'logs', cluster)}` shows them once it "
        f"can be reached. If it is gone for good: `{command_line('atoll', 'down', cluster)}`"
    )


# ------------------------------------------------------------------------------------------------------ the head
_controls: dict[str, tuple[Remote, RemoteControl]] = {}  # by how a head is reached: its login serves a whole process


def control(cluster: ClusterSpec, patience_s: float = _PATIENCE_S) -> RemoteControl:
    """Asks the head of a cluster that is supervised there.

    Args:
        cluster: the cluster.
        patience_s: where the connection is lost, it is made again for so long.

    Raises:
        ProvisionError: the head can't be reached.
    """
    return _reach(cluster, patience_s)[1]


class _Desk:
    """The machine that answers for a cluster; where nodes share their files, another one does once it is lost."""

    def __init__(self, cluster: ClusterSpec, head: Remote) -> None:
        self._cluster = cluster
        self._head = head
        self._is_new = True

    def command(self) -> Sequence[str]:
        """What runs the program there.

        Raises:
            StreamLost: none can be reached.
        """
        allocation = self._cluster.allocation
        if not self._is_new and allocation.files == "shared":
            try:
                self._head = registry.of(allocation).desk(allocation)
                self._head.bring_code()
            except ProvisionError as error:
                raise StreamLost(str(error)) from None
        self._is_new = False
        return self._head.argv("tasks.control", self._cluster.name)

    def is_lost(self, code: int, said: bytes) -> bool:
        """Did the way there break?"""
        return self._head.is_lost(code, said)

    def awaited(self) -> str:
        """What its nodes are waited for, where they have still to come again."""
        with contextlib.suppress(ProvisionError):  # it is asked again
            now = registry.of(self._cluster.allocation).poll(self._cluster.allocation, max_age_s=_NODES_S)
            return now.reason if now.state is AllocationState.PENDING else ""
        return "nobody can be asked just now"


def _reach(cluster: ClusterSpec, patience_s: float = _PATIENCE_S) -> tuple[Remote, RemoteControl]:
    """The machine that supervises a cluster elsewhere, with Atoll's code there, and how its program is asked."""
    allocation = cluster.allocation
    how = [cluster.name, allocation.head.reach, allocation.settings, allocation.code, patience_s]
    key = json.dumps(how, sort_keys=True)
    if key not in _controls:
        try:
            head = registry.of(allocation).desk(allocation)
            head.bring_code()
        except ProvisionError as error:
            raise ProvisionError(f"{error}. {advice_on_lost_head(cluster.name)}") from None
        desk = _Desk(cluster, head)
        control = RemoteControl(desk.command, cluster.name, head.plan.host, patience_s, desk.awaited, desk.is_lost)
        _controls[key] = head, control
    return _controls[key]


def remove_record(cluster: ClusterSpec) -> None:
    """Removes what the head keeps of a cluster that is down: its record, jobs and logs. Tells where that fails."""
    folder = cluster.allocation.folder or f"~/.atoll/clusters/{cluster.name}"
    try:
        head, control = _reach(cluster)
        control.end()
        head.check(f"rm -rf -- {shlex.quote(folder)}", limit_s=_REMOVE_S)
    except AtollError as error:
        _tell_left(cluster, error, f"{folder} stays there, and running jobs continue")


def clean_up_without_head(cluster: ClusterSpec, error: ProvisionError, *, for_good: bool) -> None:
    """Cleans up after a cluster whose head can't be asked to, as far as that goes, and says what stays.

    ``for_good``: its record goes, so that this can't be done again.
    """
    folder = cluster.allocation.folder or f"~/.atoll/clusters/{cluster.name}"
    downs = command_line("atoll", "down", cluster.name)
    again = "" if for_good else f"; once it can be reached, `{downs}` again ends and removes that"
    stays = f"jobs continue there as long as it runs, and {folder} stays there (jobs, logs, workdir){again}"
    _tell_left(cluster, error, stays)
    left, lines = reaper.end_on_nodes(cluster, folder_of(cluster.name), first=1)
    for line in (*(f"not even SIGKILL ends {each}" for each in left), *lines):
        tell(line)
    remove_files(cluster, first=1)


def _tell_left(cluster: ClusterSpec, error: AtollError, what: str) -> None:
    site = cluster.allocation.head.name
    why = str(error).removesuffix(f". {advice_on_lost_head(cluster.name)}").removeprefix(f"{site}: ")
    tell(f"{site}: {why}. So {what}")
