"""A job's life as a state machine without I/O: what happened goes in, what is to be done comes out.

One attempt is: start the nodes, wait for all; run setup on each, wait for all; run the job's processes, wait for all;
stop the nodes. Whatever ends an attempt early (a process that fails, a lost node, a timeout, somebody's cancel) is its
``Cause``: processes that still live are terminated, the nodes are stopped, and only then is the job over or, where
``Restarts`` allows it, started again as the next attempt. Inputs of an older attempt mean nothing. Where its provider
gives others for nodes that are lost or taken, the machine ends with the job ``PENDING``, and another one goes on.

Rows of the event log that others rely on: ``failed`` and ``lost`` name the culprit by ``node`` and ``rank``, with its
last lines in ``data`` as ``tail``; ``restart`` has in ``data`` how many ``restarts`` there were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from signal import SIGKILL, SIGTERM

from atoll.core.errors import ConfigError
from atoll.tasks import transitions as t
from atoll.tasks.causes import Cause, ended_text, failed, process_cause, setup_cause, shell_code
from atoll.tasks.spec import JobSpec, JobStatus, node_name

# From the culprit's end to the job's there are 2 s; what others need to end on SIGTERM must fit in.
STOP_GRACE_S = 1.5
CANCEL_GRACE_S = 4.0  # nothing of a job survives its cancel, or the end of its owner, by 5 s
# A setup that fails on one node mostly fails on all: so long the others may do so by themselves, to be named as well.
SETUP_SETTLE_S = 0.5
# Ends heard of within this time happened at once: the first heard of need not have been the first.
SAME_INSTANT_S = 0.1
# A lost node makes ranks elsewhere fail, which may be heard of so much earlier.
LOST_SETTLE_S = 0.5
LONGEST_BACKOFF_S = 30.0

_Key = tuple[t.Phase, int, int]  # phase, node, process


class JobMachine:
    """One job, from its first node to its end.

    Args:
        spec: the job.
        nodes: of the cluster, that it runs on; the first ones by default.
        num_cluster_nodes: nodes of the cluster; setup runs on all of them.
        setup_needed: run the setup; after a lost node it is run again.
        restarts: how often it was started again before, and ``num_lost`` of these because a node was lost.
        replaces_nodes: others are given for nodes that are lost, once the job has left them.

    Attributes:
        status: where the job stands.
        attempt: counts from 1 once started.

    Raises:
        ConfigError: the job wants more nodes than the cluster has.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        num_cluster_nodes: int,
        setup_needed: bool,
        nodes: Sequence[int] | None = None,
        restarts: int = 0,
        num_lost: int = 0,
        replaces_nodes: bool = False,
    ) -> None:
        if not 1 <= spec.num_nodes <= num_cluster_nodes:
            raise ConfigError(
                f"num_nodes={spec.num_nodes}: the cluster has {num_cluster_nodes}: request fewer or launch a larger one"
            )
        self.status = JobStatus.PENDING
        self.attempt = restarts
        self._spec = spec
        self._nodes = tuple(nodes or range(spec.num_nodes))
        self._num_cluster_nodes = num_cluster_nodes
        self._has_setup = self._setup_due = setup_needed and spec.setup is not None
        self._processes = spec.num_processes if spec.command is not None else 1
        self._phase = "new"  # then nodes, setup, run, stop, backoff; nodes again; ended
        self._starting: set[int] = set()
        self._up: set[int] = set()
        self._silent: dict[int, float] = {}  # nodes that don't answer, since when
        self._living: set[_Key] = set()  # asked to start and not known to have ended
        self._failed_setups: list[t.ProcessEnded] = []
        self._cause: Cause | None = None
        self._restarts, self._num_errors, self._num_lost = restarts, 0, num_lost
        self._replaces_nodes = replaces_nodes
        self._taken = ""  # why the nodes are taken that it is leaving for another reason
        self._next_s: float | None = None  # when the phase ends by itself
        self._timeout_at_s: float | None = None

    @property
    def deadline(self) -> float | None:
        """When a ``Tick`` must come at the latest."""
        if self.done:
            return None
        limit = None if self._phase == "stop" else self._timeout_at_s
        return min((at for at in (self._next_s, limit) if at is not None), default=None)

    @property
    def done(self) -> bool:
        """Has it ended, with nothing left to stop?"""
        return self._phase == "ended"

    def start(self, now: float) -> list[t.Action]:
        """Begin the first attempt."""
        if self._spec.timeout_s is not None:
            self._timeout_at_s = now + self._spec.timeout_s
        return [self._set(JobStatus.INIT), *self._start_attempt()]

    def give_up(self, reason: str) -> list[t.Action]:
        """End it at once, whatever it is doing: its driver can't continue."""
        return [] if self.done else [*self._stop_nodes(), self._end(JobStatus.FAILED_DRIVER, reason)]

    def handle(self, event: t.Input, now: float) -> list[t.Action]:
        """What is to be done after ``event``, in this order."""
        if self._phase in ("new", "ended"):
            return []
        match event:
            case t.Tick():
                return self._tick(now)
            case t.CancelAsked():
                return self._cancel(event, now)
            case t.NodesTaken():
                return self._nodes_taken(event, now)
            case _ if event.attempt != self.attempt:
                return []
            case t.NodeUp():
                return self._node_up(event)
            case t.NodeDown():
                return self._node_down(event, now)
            case t.NodeSilent():
                return self._node_silent(event, now)
            case t.ProcessStarted():
                return self._process_started(event)
            case t.ProcessEnded():
                return self._process_ended(event, now)

    # ------------------------------------------------------------------------------------------- forwards
    def _start_attempt(self) -> list[t.Action]:
        self.attempt += 1
        self._phase, self._cause, self._next_s = "nodes", None, None
        self._failed_setups = []
        self._starting = set(range(self._num_cluster_nodes) if self._setup_due else self._nodes)
        wanted = self._spec.num_nodes
        text = f"Waiting for task resources on {wanted} node{'s' if wanted > 1 else ''}."
        if self.attempt > 1:
            text = f"Attempt {self.attempt}. {text}"
        return [
            t.Log("attempt", text, data=(("attempt", self.attempt),)),
            *(t.StartNode(node, self.attempt) for node in sorted(self._starting)),
        ]

    def _node_up(self, event: t.NodeUp) -> list[t.Action]:
        if event.node not in self._starting:
            return []
        self._starting.remove(event.node)
        self._up.add(event.node)
        return [t.Log("node_up", node=event.node), *self._next_phase()]

    def _next_phase(self) -> list[t.Action]:
        """Enter the next phase, where the barrier before it is reached."""
        if self._phase == "nodes" and not self._starting:
            if self._setup_due:
                return self._start_phase("setup", JobStatus.SETTING_UP, sorted(self._up), 1)
            return self._start_run()
        if self._phase == "setup" and not self._living:
            self._setup_due = False
            return self._start_run()
        if self._phase == "run" and not self._living:
            return [*self._stop_nodes(), self._end(JobStatus.SUCCEEDED)]
        return []

    def _start_run(self) -> list[t.Action]:
        spare = sorted(self._up.difference(self._nodes))
        self._up.difference_update(spare)
        stops = [t.StopNode(node) for node in spare]
        if self._spec.run is None and self._spec.command is None:
            return [*stops, *self._stop_nodes(), self._end(JobStatus.SUCCEEDED)]
        return [*stops, *self._start_phase("run", JobStatus.RUNNING, sorted(self._up), self._processes)]

    def _start_phase(self, phase: t.Phase, status: JobStatus, nodes: list[int], num_processes: int) -> list[t.Action]:
        self._phase = phase
        self._living = {(phase, node, process) for node in nodes for process in range(num_processes)}
        started = [t.StartProcess(node, process, phase, self.attempt) for _, node, process in sorted(self._living)]
        return [self._set(status), *started]

    def _process_started(self, event: t.ProcessStarted) -> list[t.Action]:
        if (event.phase, event.node, event.process) not in self._living:
            return []
        data = (("phase", event.phase), ("pid", event.pid), ("attempt", event.attempt))
        return [t.Log("process_started", node=event.node, rank=self._rank(event), data=data)]

    def _process_ended(self, event: t.ProcessEnded, now: float) -> list[t.Action]:
        key: _Key = (event.phase, event.node, event.process)
        if key not in self._living:  # heard of twice, or nobody started it
            return []
        self._living.remove(key)
        stopped = self._phase == "stop"
        data = (
            ("phase", event.phase),
            ("exit_code", shell_code(event)),
            ("how", ended_text(event)),
            ("stopped", stopped),
            ("attempt", event.attempt),
        )
        logged = t.Log("process_ended", node=event.node, rank=self._rank(event), data=data)
        if stopped:
            return [logged, *self._reconsidered(event, now), *self._stop_if_quiet(now)]
        if not failed(event):
            return [logged, *(self._setups_failed(now) if self._failed_setups else self._next_phase())]
        if event.phase == "setup":
            self._failed_setups.append(event)
            self._next_s = self._next_s or now + SETUP_SETTLE_S
            return [logged, *self._setups_failed(now)]
        return [logged, *self._fail(self._beside_silence(process_cause(event, self._rank(event), now)), now)]

    def _beside_silence(self, cause: Cause) -> Cause:
        """With the nodes named that did not answer by then: they may be why it failed."""
        silent = [
            f"{node_name(node)} for {cause.at_s - since_s:.0f} s"
            for node, since_s in sorted(self._silent.items())
            if node != cause.node
        ]
        if not silent:
            return cause
        return dataclasses.replace(cause, reason=f"{cause.reason}, while nothing was heard of {', '.join(silent)}")

    def _rank(self, event: t.ProcessStarted | t.ProcessEnded) -> int:
        return self._nodes.index(event.node) * self._processes + event.process if event.phase == "run" else event.node

    # ------------------------------------------------------------------------------------------- what goes wrong
    def _node_down(self, event: t.NodeDown, now: float) -> list[t.Action]:
        if event.node not in self._starting and event.node not in self._up:
            return []
        was_silent = self._silent.pop(event.node, None) is not None
        self._starting.discard(event.node)
        self._up.discard(event.node)
        needed = (
            self._phase == "nodes"
            or (self._phase == "setup" and event.node in self._nodes)
            or any(node == event.node for _, node, _ in self._living)
        )
        self._living = {key for key in self._living if key[1] != event.node}
        name = node_name(event.node)
        data = (("reason", event.reason), ("started", event.started))
        lost = Cause("lost", f"{name} was lost: {event.reason}", now, event.node)
        if self._phase == "stop":
            down = t.Log("node_down", node=event.node, data=data)
            return [down, *self._lost_instead(lost, was_silent), *self._stop_if_quiet(now)]
        if not needed:
            return [t.Log("node_down", f"{lost.reason}; its ranks had finished by then.", event.node, data=data)]
        down = t.Log("node_down", node=event.node, data=data)
        if self._failed_setups:
            return [down, *self._setups_failed(now)]
        if event.started:
            return [down, *self._fail(lost, now)]
        return [down, *self._fail(Cause("start", f"{name} could not be started: {event.reason}", now, event.node), now)]

    def _node_silent(self, event: t.NodeSilent, now: float) -> list[t.Action]:
        if event.node not in self._starting | self._up or (event.silent_s > 0) == (event.node in self._silent):
            return []
        if event.silent_s > 0:
            self._silent[event.node] = now - event.silent_s
            return [t.Log("silent", event.said, node=event.node)]
        del self._silent[event.node]
        return [t.Log("answers", event.said, node=event.node)]

    def _setups_failed(self, now: float) -> list[t.Action]:
        """Setup failed somewhere: fail, once all have ended or had their time to."""
        if self._living and self._next_s is not None and now < self._next_s:
            return []
        return self._fail(setup_cause(self._failed_setups, now), now)

    def _cancel(self, event: t.CancelAsked, now: float) -> list[t.Action]:
        cause = Cause("cancel", event.why, now)
        if self._phase != "stop":
            actions = self._fail(cause, now, CANCEL_GRACE_S, event.signal)
            if self._spec.save_s is not None and self._phase == "stop" and self._next_s is not None:
                self._next_s = now + self._spec.save_s
            return actions
        if event.signal == SIGKILL and self._next_s is not None:
            self._next_s = now
        if self._cause is None or self._cause.kind == "cancel":
            return []
        self._cause = cause  # everything was terminated before
        return [_cause_row(cause, f"{cause.reason}.")]

    def _nodes_taken(self, event: t.NodesTaken, now: float) -> list[t.Action]:
        if self._phase == "backoff" and event.again:
            return self._hand_over(event.why)
        if self._phase == "stop":
            self._taken = event.why if event.again else ""
            return []
        self._taken = event.why if event.again else ""
        return self._fail(Cause("taken", event.why, now), now, event.save_s)

    def _hand_over(self, why: str) -> list[t.Action]:
        """Leave the job to another machine, on other nodes."""
        self._restarts += 1
        self._phase = "ended"
        text = f"It goes on as attempt {self.attempt + 1} on other nodes: {why}"
        return [
            t.Log("restart", text, data=(("restarts", self._restarts),)),
            self._set(JobStatus.PENDING, f"waiting for other nodes: {why}"),
        ]

    def _tick(self, now: float) -> list[t.Action]:
        if self._phase != "stop" and self._timeout_at_s is not None and now >= self._timeout_at_s:
            reason = f"it ran past its time limit of {self._spec.timeout_s:g} s"
            return self._fail(Cause("timeout", reason, now), now)
        if self._next_s is None or now < self._next_s:
            return []
        if self._phase == "setup":
            return self._setups_failed(now)
        if self._phase == "backoff":
            return self._start_attempt()
        return self._finish(now)

    # ------------------------------------------------------------------------------------------- the end of an attempt
    def _fail(self, cause: Cause, now: float, grace_s: float = STOP_GRACE_S, number: int = SIGTERM) -> list[t.Action]:
        """End the attempt: terminate what lives, stop the nodes once that has ended or its time is over.

        That is ``grace_s``, unless the job says another.
        """
        if self._spec.grace_s is not None and cause.kind != "taken":
            grace_s = self._spec.grace_s
        self._cause, self._phase, self._next_s = cause, "stop", now + grace_s
        terminated = [t.Terminate(node, number) for node in sorted({node for _, node, _ in self._living})]
        what = "the job" if cause.kind in ("cancel", "timeout", "taken") else "the others"
        text = f"{cause.reason}; stopping {what}." if terminated else ""  # else the job's last line says it at once
        return [_cause_row(cause, text), *terminated, *self._stop_if_quiet(now)]

    def _reconsidered(self, event: t.ProcessEnded, now: float) -> list[t.Action]:
        """A process ended after the one that was taken for the culprit: was it the culprit, heard of second?"""
        cause = self._cause
        if cause is None or cause.kind != "run" or cause.telling or now - cause.at_s > SAME_INSTANT_S:
            return []
        other = process_cause(event, self._rank(event), cause.at_s)
        if not other.telling:
            return []
        self._cause = other
        return [_cause_row(other, f"{other.reason}, at the same time: the more likely cause.")]

    def _lost_instead(self, lost: Cause, was_silent: bool) -> list[t.Action]:
        """A node was lost after a process elsewhere failed: that came of the loss, if the node was going by then."""
        cause = self._cause
        if cause is None or cause.kind != "run" or cause.telling or cause.node == lost.node:
            return []
        if not was_silent and lost.at_s - cause.at_s > LOST_SETTLE_S:
            return []
        self._cause = lost
        return [_cause_row(lost, f"{lost.reason}: the more likely cause.")]

    def _stop_if_quiet(self, now: float) -> list[t.Action]:
        return [] if self._living else self._finish(now)

    def _finish(self, now: float) -> list[t.Action]:
        """Nothing lives any more, or time is up: stop the nodes, then end or restart."""
        cause = self._cause
        assert cause is not None  # _fail set it, and nothing else leads here
        stops = self._stop_nodes()
        if cause.kind == "taken" and self._taken:
            return [*stops, *self._hand_over(cause.reason)]
        if not self._restarts_after(cause):
            reason = cause.reason
            if self._restarts and cause.kind != "cancel":
                reason += f" (it had been restarted {self._restarts} time{'s' if self._restarts > 1 else ''})"
            return [*stops, self._end(_END_STATUS[cause.kind], reason, cause.exit_code)]
        if self._taken or (self._replaces_nodes and cause.kind in ("lost", "start")):
            return [*stops, *self._hand_over(self._taken or cause.reason)]
        wait_s = min(2.0 ** min(self._restarts, 10), LONGEST_BACKOFF_S)  # a thousandth is no float any more
        self._restarts += 1
        self._phase, self._next_s = "backoff", now + wait_s
        if cause.kind in ("lost", "start"):
            self._setup_due = self._has_setup  # a node that comes back may be a fresh machine
        text = f"Restarting in {wait_s:.0f} s (restart {self._restarts}): {cause.reason}"
        return [
            *stops,
            self._set(JobStatus.RECOVERING, cause.reason),
            t.Log("restart", text, data=(("restarts", self._restarts),)),
        ]

    def _restarts_after(self, cause: Cause) -> bool:
        """May it start again after this? Counts, where that is limited."""
        allowed = self._spec.restarts
        if cause.kind in ("run", "setup"):
            if cause.exit_code in allowed.on_exit_codes:
                return True
            self._num_errors += 1
            return self._num_errors <= allowed.on_errors
        if cause.kind == "lost" or (cause.kind == "start" and self._restarts):  # at first, whoever waits should hear it
            self._num_lost += 1
            return self._num_lost <= allowed.on_lost_nodes
        return False

    def _stop_nodes(self) -> list[t.Action]:
        stops: list[t.Action] = [t.StopNode(node) for node in sorted(self._starting | self._up)]
        self._starting, self._up, self._living = set(), set(), set()
        self._silent = {}
        return stops

    def _set(self, status: JobStatus, reason: str = "", exit_code: int | None = None) -> t.SetStatus:
        self.status = status
        return t.SetStatus(status, reason, exit_code)

    def _end(self, status: JobStatus, reason: str = "", exit_code: int | None = None) -> t.SetStatus:
        self._phase = "ended"
        return self._set(status, reason, exit_code)


_END_STATUS: dict[str, JobStatus] = {
    "run": JobStatus.FAILED,
    "setup": JobStatus.FAILED_SETUP,
    "lost": JobStatus.FAILED,
    "start": JobStatus.FAILED_DRIVER,
    "timeout": JobStatus.FAILED,
    "taken": JobStatus.FAILED,
    "cancel": JobStatus.CANCELLED,
}
_LOG_KIND = {"run": "failed", "setup": "failed", "lost": "lost", "start": "lost"}


def _cause_row(cause: Cause, text: str) -> t.Log:
    """The row of the event log that names the culprit."""
    data = (("exit_code", cause.exit_code), ("tail", "\n".join(cause.tail)))
    return t.Log(_LOG_KIND.get(cause.kind, cause.kind), text, cause.node, cause.rank, data)
