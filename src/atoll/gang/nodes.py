"""The nodes of a gang: started, sent to, released. Starting and releasing take a while, and hold no lock."""

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

from atoll.agent.process_tree import kill_tree
from atoll.core.errors import ProvisionError
from atoll.gang.members import GangSpec
from atoll.providers.base import Boot, Node, NodePlan
from atoll.wire.channel import Channel

_DEAF_S = 10.0  # an agent that has not answered for so long is given up
_FORCE_S = 4.0  # finding out how one node ended, and ending it by force, take a second less than this


class NodeChannel:
    """A node and the channel to its agent, while it has one."""

    def __init__(self, plan: NodePlan) -> None:
        self.plan = plan
        self.handle: Node | None = None
        self.channel: Channel | None = None
        self.stop_start: Callable[[], None] | None = None  # has a start that is on its way fail soon

    @property
    def deaf_s(self) -> float:
        """How long its agent may owe an answer: over a connection that may be lost, longer than it may be."""
        return _DEAF_S + self.plan.grace_s

    def open(self, handle: Node, channel: Channel) -> None:
        """Use the channel of a node that was started."""
        self.handle, self.channel = handle, channel

    def detach(self) -> Node | None:
        """Forget the channel, which ended; returns the node's handle, which is to be released, once."""
        handle, channel = self.handle, self.channel
        self.handle = self.channel = None
        if channel is not None:
            channel.close()
        return handle

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send to the agent, or queue what it does not take now.

        Raises:
            OSError: there is no descriptor left.
        """
        if self.channel is None:
            return
        own = tuple(map(os.dup, fds))
        try:
            self.channel.send(data, own)
        except BaseException:  # Ctrl-C: how much of the frame is on its way is not known
            self.hang_up()
            raise

    def hang_up(self) -> None:
        """End the channel from this side; who reads it sees that."""
        if self.handle is not None:
            with contextlib.suppress(OSError):
                self.handle.channel.shutdown(socket.SHUT_RDWR)


class Nodes:
    """Starts and releases the nodes of a gang.

    Args:
        adopt: called with each that was started, in the thread that started it; False where it is not wanted any more.
    """

    def __init__(self, spec: GangSpec, adopt: Callable[[NodeChannel, Node], bool]) -> None:
        self.channels = [NodeChannel(plan) for plan in spec.plan.nodes]
        self.are_remote = spec.plan.is_elsewhere
        self._spec = spec
        self._adopt = adopt
        self._lock = threading.Lock()
        self._cleaning: list[threading.Thread] = []  # after nodes that were lost or have ended

    def start_all(self) -> None:
        """Nodes of this machine one by one, which takes milliseconds; others all at once.

        Raises:
            ProvisionError: one could not be started. Those that are still to come are stopped as they come.
        """
        if not self.are_remote:
            for node in self.channels:
                self._start_or_say(node)
            return
        with ThreadPoolExecutor(len(self.channels), thread_name_prefix="atoll-start") as threads:
            futures = [threads.submit(self._start_or_say, node) for node in self.channels]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._adopt = lambda _node, _handle: False
                self.abandon()
                raise

    def _start_or_say(self, node: NodeChannel) -> None:
        try:
            self.start(node)
        except Exception as error:
            raise ProvisionError(
                f"node {node.plan.node} of {len(self.channels)} could not be started on "
                f"{self._spec.provider.name}: {error}",
                node=node.plan.node,
            ) from error

    def start(self, node: NodeChannel) -> None:
        """Start a node."""
        boot = Boot(starting=functools.partial(setattr, node, "stop_start"))
        try:
            (handle,) = self._spec.provider.launch_agents(self._spec.plan.allocation, [node.plan], boot)
        finally:
            node.stop_start = None
        if not self._adopt(node, handle):
            handle.stop()

    def abandon(self) -> None:
        """Have every start that is on its way fail soon."""
        for node in self.channels:
            if (stop := node.stop_start) is not None:
                stop()

    def release(self, node: NodeChannel, handle: Node, *, gone: bool) -> None:
        """Release a node; ``gone``: it did not end because it was told to."""
        if self.are_remote:  # logging out takes its time, and its successor need not wait for that
            self.in_background(handle.stop)
            return
        handle.stop()
        if gone or os.path.exists(self._spec.tmp_dir(node.plan)):
            # An agent on this machine that was killed can't clean up after itself.
            kill_tree(None, self._spec.node_tag(node.plan))
            shutil.rmtree(self._spec.tmp_dir(node.plan), ignore_errors=True)

    def in_background(self, work: Callable[[], object]) -> None:
        """Do what takes a while in a thread of its own."""
        thread = threading.Thread(target=work, name="atoll-clean-up", daemon=True)
        with self._lock:
            self._cleaning = [*(other for other in self._cleaning if other.is_alive()), thread]
            thread.start()

    def end(self, wait_s: float, has_ended: Callable[[float], bool]) -> None:
        """Release every node: after a while by force.

        Args:
            has_ended: waits so many seconds for all channels to end; says whether they have.
        """
        if any(thread.is_alive() for thread in self._cleaning):
            self.abandon()
        if not has_ended(wait_s):  # an agent that does not answer
            open_ = [node for node in self.channels if node.handle is not None]
            for node in open_:
                node.hang_up()
            has_ended(_FORCE_S * (1 + len(open_)))
        for node in self.channels:
            if (handle := node.detach()) is not None:
                handle.stop()
        deadline = time.monotonic() + _FORCE_S
        while (left := [thread for thread in self._cleaning if thread.is_alive()]) and time.monotonic() < deadline:
            left[0].join(max(0.0, deadline - time.monotonic()))
