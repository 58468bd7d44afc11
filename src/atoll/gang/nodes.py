"""The nodes of a gang and the channels to their agents: started, sent to, given up, released, started again."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from atoll.agent.process_tree import kill_tree
from atoll.agent.send_queue import Outbox
from atoll.core.errors import NodeLost, PoolClosed, ProvisionError
from atoll.gang.members import SOURCE_ROOT, GangSpec, NodeState, RankState, agent_command, node_setup
from atoll.gang.reader import Reader
from atoll.gang.remote_ranks import is_remote
from atoll.providers.base import Node
from atoll.providers.remote import RemoteHandle, RemotePlan, RemoteProvider
from atoll.wire import frames
from atoll.wire.frames import Parser, pack

_MAX_RESTARTS = 3  # of a node in a row
_DEAF_S = 10.0  # an agent that has not answered for so long is given up
_FORCE_S = 4.0  # finding out how one node ended, and ending it by force, take a second less than this
_LEAVE_S = 1.5  # agents get this long to end, of which they give their ranks a second; then their channels close


class Nodes:
    """All of them. ``lock`` is the gang's.

    Attributes:
        states: what is known of each, by its index.
        closing: they are about to end: none is started any more.
    """

    def __init__(
        self,
        spec: GangSpec,
        ranks: Sequence[RankState],
        lock: threading.RLock,
        reader: Reader,
        note: Callable[[str], object],
    ) -> None:
        self.states = [NodeState(plan) for plan in spec.plan.nodes]
        self.closing = False
        self._spec = spec
        self._ranks = ranks
        self._lock = lock
        self._reader = reader
        self._note = note
        self._remote = is_remote(spec.plan)
        self._given_up = False  # they did not all start
        self._cleaning: list[threading.Thread] = []  # after nodes that were lost or have ended

    def of(self, rank: int) -> NodeState:
        """The node that a rank runs on."""
        return self.states[self._ranks[rank].node]

    def ranks_of(self, node: NodeState) -> list[RankState]:
        """The ranks that run on a node."""
        return [state for state in self._ranks if state.node == node.plan.node]

    def send(self, node: NodeState, data: bytes | bytearray, fds: Sequence[int] = ()) -> None:
        """Send to a node's agent, or queue what it does not take now. The lock is held.

        Raises:
            OSError: there is no descriptor left.
        """
        if node.out is not None:
            node.out.add(bytes(data), tuple(map(os.dup, fds)))
            self.flush(node)

    def flush(self, node: NodeState) -> None:
        """Send what waits, as far as the channel takes it. The lock is held."""
        if node.handle is None or node.out is None:
            return
        try:
            node.out.flush()
        except OSError:  # a lost node is noticed by the reader
            node.out.clear()
        except BaseException:  # Ctrl-C: how much of the frame is on its way is not known
            self.give_up(node, "a frame to it was cut by a signal")
            raise
        self._reader.want_write(node.handle.channel.fileno(), bool(node.out))

    # -- starting -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Nodes of this machine one by one, which takes milliseconds; others all at once.

        Raises:
            ProvisionError: one could not be started.
        """
        if not self._remote:
            for node in self.states:
                self._start_or_say(node)
            return
        with ThreadPoolExecutor(len(self.states), thread_name_prefix="atoll-start") as threads:
            futures = [threads.submit(self._start_or_say, node) for node in self.states]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._given_up = True  # those that are still to come are stopped as they come
                self._abandon()
                raise

    def _start_or_say(self, node: NodeState) -> None:
        try:
            self._start(node)
        except Exception as error:
            raise ProvisionError(
                f"node {node.plan.node} of {len(self.states)} could not be started on "
                f"{self._spec.provider.name}: {error}",
                node=node.plan.node,
            ) from error

    def _start(self, node: NodeState) -> None:
        handle = self._started(node)
        with self._lock:
            wanted = not self.closing and not self._given_up
            if wanted:
                self._adopt(node, handle)
        if not wanted:
            handle.stop()

    def _started(self, node: NodeState) -> Node:
        if not self._remote:
            return self._spec.provider.start(node.plan, agent_command(SOURCE_ROOT))
        try:
            provider = cast("RemoteProvider", self._spec.provider)
            return provider.start_remote(node.plan, functools.partial(setattr, node, "stop_start"))
        finally:
            node.stop_start = None

    def _adopt(self, node: NodeState, handle: Node) -> None:
        node.handle, node.parser, node.ended = handle, Parser(), None
        node.silent, node.asked_s = None, 0.0
        if isinstance(node.plan, RemotePlan):
            cast("RemoteHandle", handle).listen(lambda _silent_s, line: self._note(line))
        handle.channel.setblocking(False)
        node.out = Outbox(handle.channel)
        self._reader.watch(node)
        self.send(node, pack(frames.SETUP, meta=node_setup(self._spec, node.plan, self._ranks)))

    def _abandon(self) -> None:
        for node in self.states:
            if (stop := node.stop_start) is not None:
                stop()

    # -- nodes that go away -----------------------------------------------------------------------------------------

    def deaf_s(self, node: NodeState) -> float:
        """How long an agent may owe an answer: over a connection that may be lost, longer than it may be."""
        return _DEAF_S + (node.plan.grace_s if isinstance(node.plan, RemotePlan) else 0.0)

    def ask_stacks(self, node: NodeState, call: int) -> None:
        """Ask for the stacks of a call's ranks; gives a node up that owes an answer for too long."""
        now = time.monotonic()
        node.asked_s = node.asked_s or now
        if now - node.asked_s > self.deaf_s(node):
            self.give_up(node, f"its agent has not answered for {now - node.asked_s:.0f} s")
        else:
            self.send(node, pack(frames.STACKS, 0, call))

    def give_up(self, node: NodeState, reason: str) -> None:
        """Give a node up that no longer answers; the reader sees the end of its channel."""
        if node.handle is not None and not self.closing:
            node.silent = reason
            with contextlib.suppress(OSError):
                node.handle.channel.shutdown(socket.SHUT_RDWR)

    def detach(self, node: NodeState) -> Node:
        """Forget a node's channel, which ended; returns its handle, which is to be released. The lock is held."""
        handle, node.handle = node.handle, None
        assert handle is not None and node.out is not None
        self._reader.unwatch(handle.channel.fileno())
        node.parser.close()
        node.out.clear()
        node.out = None
        return handle

    def clean_up(self, work: Callable[[], object]) -> None:
        """Do what takes a while after a node was lost, in a thread of its own."""
        thread = threading.Thread(target=work, name="atoll-clean-up", daemon=True)
        with self._lock:
            self._cleaning = [*(other for other in self._cleaning if other.is_alive()), thread]
            thread.start()

    def release(self, node: NodeState, handle: Node, *, gone: bool) -> None:
        """Let go of a node; ``gone``: it did not end because it was told to."""
        if self._remote:  # logging out takes its time, and its successor need not wait for that
            self.clean_up(handle.stop)
            return
        handle.stop()
        if gone or os.path.exists(self._spec.tmp_dir(node.plan)):
            # An agent on this machine that was killed can't clean up after itself.
            kill_tree(None, self._spec.node_tag(node.plan))
            shutil.rmtree(self._spec.tmp_dir(node.plan), ignore_errors=True)

    def revive(
        self,
        node: NodeState,
        started: Callable[[Sequence[RankState]], object],
        failed: Callable[[BaseException], object],
    ) -> None:
        """Start a lost node again, and say how it went."""
        node.restarts += 1
        try:
            if self.closing:
                return
            if node.restarts > _MAX_RESTARTS:
                raise NodeLost(node.plan.node, f"{node.restarts} times in a row before a rank came up")
            self._start(node)
            started(self.ranks_of(node))
        except Exception as error:  # noqa: BLE001 - whatever a provider raises ends the pool with its reason
            failed(PoolClosed(f"node {node.plan.node} was lost and could not be started again: {error}"))

    def end(self) -> None:
        """Have every agent end, then release every node. Safe to call twice."""
        with self._lock:
            for node in self.states:
                self.send(node, pack(frames.SHUTDOWN))
        if any(thread.is_alive() for thread in self._cleaning):
            self._abandon()
        self._reader.leave()
        if not self._reader.join(_LEAVE_S):  # an agent that does not answer: end its channel from this side
            handles = [node.handle for node in self.states if node.handle is not None]
            for lost in handles:
                with contextlib.suppress(OSError):
                    lost.channel.shutdown(socket.SHUT_RDWR)
            self._reader.join(_FORCE_S * (1 + len(handles)))
        for node in self.states:
            handle, node.handle = node.handle, None
            if handle is not None:
                self._reader.unwatch(handle.channel.fileno())
                handle.stop()
        deadline = time.monotonic() + _FORCE_S
        for thread in self._cleaning:
            thread.join(max(0.0, deadline - time.monotonic()))
