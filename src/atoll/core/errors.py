"""Every failure Atoll raises.

The tree::

    AtollError
    ├── ConfigError            a value that cannot work (also a ValueError)
    ├── UsageError             an operator or a call used in a wrong way (also a TypeError)
    ├── SerializationError     an argument, result or function that can't be sent to a rank (also a TypeError)
    ├── ProvisionError         a node could not be started
    ├── ImageError             the packages of an Image could not be installed
    ├── PoolClosed             the pool is not up, or has ended
    ├── RemoteError            the function raised, and its exception could not be rebuilt here
    ├── WorkerDied             a rank's process ended during a call
    ├── NodeLost               a node's agent went away, and every rank on it
    ├── CallTimeout            a call ran past its ``timeout`` (also a TimeoutError)
    ├── CheckpointError        a checkpoint could not be written, found whole or read
    ├── NonFiniteError         loss or gradients of a training step are not finite
    └── HangError              ranks made no progress for ``hang_timeout`` (also a TimeoutError)

``NeverDispatched`` is a warning, not an error. ``RemoteTraceback`` is never raised by itself: it is the
``__cause__`` of an exception that came from a rank, and prints the traceback as it looked there.
"""

from __future__ import annotations

import signal as _signal
from collections.abc import Mapping, Sequence
from typing import Any


def _reduce(error: Exception) -> tuple[Any, ...]:
    """Pickles an error by message and attributes, whatever its ``__init__`` takes."""
    return _rebuild, (type(error), error.args), error.__dict__


def _rebuild(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    error = kind.__new__(kind)
    error.args = args
    return error


class AtollError(Exception):
    """Root of every error that Atoll raises. All of them survive pickle."""

    __reduce__ = _reduce


class ConfigError(AtollError, ValueError):
    """A value that cannot work; the message names the value, what was expected and the next step."""


class UsageError(AtollError, TypeError):
    """A call or operator used in a wrong way; the message shows the right form."""


class SerializationError(AtollError, TypeError):
    """A function, argument or result that can't be sent to another process; the message names it."""


class ProvisionError(AtollError):
    """A node could not be started. Every node that had started was released before this was raised.

    Attributes:
        node: index of the node that failed.
    """

    def __init__(self, message: str, *, node: int | None = None) -> None:
        super().__init__(message)
        self.node = node


class ImageError(AtollError):
    """The packages of an ``Image`` could not be installed; the message holds the installer's last lines."""


class PoolClosed(AtollError):
    """The pool is not up: never entered, already left, past its ``ttl``, or its server ended."""


class RemoteTraceback(Exception):
    """The traceback of a remote exception as text; the ``__cause__`` of the exception raised here."""

    __reduce__ = _reduce

    def __init__(self, text: str, rank: int, node: int) -> None:
        super().__init__(text)
        self.text = text
        self.rank = rank
        self.node = node

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node})\n\n{self.text.rstrip()}"


class RemoteError(AtollError):
    """A function raised on a rank, and the exception could not be rebuilt in this process.

    Attributes:
        type_name: qualified name of the remote exception's type.
        rank: global rank that raised.
        node: index of that rank's node.
        remote_traceback: the traceback as text.
    """

    def __init__(self, type_name: str, message: str, *, rank: int, node: int, remote_traceback: str) -> None:
        super().__init__(f"rank {rank} (node {node}) raised {type_name}: {message}")
        self.type_name = type_name
        self.message = message
        self.rank = rank
        self.node = node
        self.remote_traceback = remote_traceback


class WorkerDied(AtollError):
    """A rank's process ended during a call.

    Attributes:
        rank, node: which one.
        exit_code: its exit code, or None where a signal ended it.
        signal: the signal that ended it, or None.
        oom: True where the kernel killed it because memory ran out.
        log_tail: the last lines it wrote.
        reason: one clause saying how it ended.
    """

    def __init__(
        self,
        *,
        rank: int,
        node: int,
        exit_code: int | None = None,
        signal: int | None = None,
        oom: bool = False,
        log_tail: Sequence[str] = (),
        reason: str | None = None,
    ) -> None:
        self.rank = rank
        self.node = node
        self.exit_code = exit_code
        self.signal = signal
        self.oom = oom
        self.log_tail = tuple(log_tail)
        self.reason = reason or death_reason(exit_code, signal, oom)
        message = f"rank {rank} (node {node}) died: {self.reason}"
        if self.log_tail:
            message += "\nits last lines:\n" + "\n".join(f"  {line}" for line in self.log_tail)
        super().__init__(message)


def death_reason(exit_code: int | None, signal: int | None, oom: bool) -> str:
    """One clause saying how a process ended, e.g. ``killed by SIGSEGV``."""
    if oom:
        return "killed by the kernel because memory ran out (SIGKILL)"
    if signal is not None:
        try:
            return f"killed by {_signal.Signals(signal).name}"
        except ValueError:
            return f"killed by signal {signal}"
    return f"exited with code {exit_code}"


class NodeLost(AtollError):
    """A node's agent went away, and with it every rank of the node.

    Attributes:
        node: index of the node.
    """

    def __init__(self, node: int, reason: str) -> None:
        super().__init__(f"node {node} was lost: {reason}")
        self.node = node
        self.reason = reason


class CallTimeout(AtollError, TimeoutError):
    """A call ran past its ``timeout``; its ranks were stopped.

    Attributes:
        timeout_s: the limit in seconds.
        ranks: ranks that had not finished.
    """

    def __init__(self, timeout_s: float, ranks: Sequence[int]) -> None:
        super().__init__(f"the call did not finish within timeout={timeout_s:g} s: {name_ranks(ranks)} still running")
        self.timeout_s = timeout_s
        self.ranks = tuple(ranks)


class CheckpointError(AtollError):
    """A checkpoint could not be written, found whole or read; the message names the step, the place, rank and cause.

    What was saved before is untouched, and a later save may succeed.
    """


class NonFiniteError(AtollError):
    """Loss or gradients of a training step are not finite; the message names step, ranks and parameters.

    It is raised on every rank before the optimizer step, so the weights are those of the step before.
    """


class HangError(AtollError, TimeoutError):
    """Ranks made no progress for ``hang_timeout`` seconds; all ranks were stopped.

    Attributes:
        missing: ranks that did not arrive where the others wait; empty if not known.
        waiting: ranks that wait in a collective.
        stacks: state and Python stack of every rank that was still running, by rank.
        why: what proves that it hung.
    """

    def __init__(
        self,
        hang_timeout_s: float,
        missing: Sequence[int],
        waiting: Sequence[int],
        stacks: Mapping[int, str],
        why: str = "",
    ) -> None:
        self.hang_timeout_s = hang_timeout_s
        self.missing = tuple(missing)
        self.waiting = tuple(waiting)
        self.stacks = dict(stacks)
        self.why = why
        named = f"{name_ranks(missing)} did not arrive" if missing else "the rank that holds the others up is not known"
        what = f"no progress for hang_timeout={hang_timeout_s:g} s: {named}"
        if waiting:
            what += f", {name_ranks(waiting)} waiting in a collective"
        if why:
            what += f" ({why})"
        shown = "\n".join(f"rank {rank}:\n{stack.rstrip()}" for rank, stack in sorted(self.stacks.items()))
        super().__init__(f"{what}\n{shown}" if shown else what)


class NeverDispatched(UserWarning):
    """A pending call was thrown away without being dispatched; the warning names its line."""


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0, 2 and 5``."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    if not names:
        return "no rank"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
