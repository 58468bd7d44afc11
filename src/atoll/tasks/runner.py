"""One job's nodes: the state machine's actions become frames to agents, frames and timers become its inputs.

Everything runs in the supervisor's loop, except what blocks: nodes are started and stopped in threads. Standard
library only.
"""

from __future__ import annotations

import os
import random
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGTERM
from typing import Any, TypeVar

from atoll.core.errors import AtollError, ConfigError
from atoll.providers.base import AllocationReleased
from atoll.providers.gpus import VISIBLE, bound_text, lease_wish
from atoll.tasks import environment
from atoll.tasks import transitions as t
from atoll.tasks.logs import JobLog, Stream
from atoll.tasks.machine import JobMachine
from atoll.tasks.nodes import ClusterNodes, StartedNode
from atoll.tasks.ports import free_port
from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec, JobStatus, node_name
from atoll.tasks.store import drop_variables, read_variables
from atoll.wire import frames
from atoll.wire.channel import Channel, said_of_end
from atoll.wire.event_loop import EventLoop
from atoll.wire.frames import RawFrame, close_all

T = TypeVar("T")
Record = Callable[[int, Sequence[t.SetStatus | t.Log]], JobStatus]

_ANSWER_S = 60.0  # an agent that was started says so within this time
_LEASE_S = 1.0  # about so often, GPUs that others have are requested again
_TAIL_LINES = 5  # of the culprit's last lines, which stand further up as well
_MOST_STARTS = 64  # nodes that are started at the same time


@dataclass
class _NodeSlot:
    """One node of the job in one attempt."""

    node: int
    attempt: int
    started: StartedNode | None = None
    channel: Channel | None = None
    answered: bool = False
    devices: str | None = None  # what it leases, as CUDA_VISIBLE_DEVICES
    stopped: bool = False
    running: dict[int, tuple[t.Phase, int]] = field(default_factory=dict)  # by number: phase, process
    streams: dict[int, Stream] = field(default_factory=dict)


class JobRunner:
    """Runs one job from its first node to its end.

    Args:
        job: its row.
        on: the cluster's nodes that it runs on.
        cluster: where it runs.
        nodes: starts them.
        folder: of the cluster.
        loop: the supervisor's.
        record: writes events and status into the store; says what the status is then.
        notes: lines to begin the job's log with.
        num_lost: how often it was started again before because a node was lost.

    Raises:
        ConfigError: the job wants more nodes than the cluster has, or more GPUs than it may lease.
    """

    def __init__(
        self,
        job: JobRow,
        on: Sequence[int],
        cluster: ClusterSpec,
        nodes: ClusterNodes,
        folder: Path,
        loop: EventLoop,
        record: Record,
        notes: Sequence[str],
        num_lost: int = 0,
    ) -> None:
        values = read_variables(folder, job.id)
        secrets = values.get("secrets", {})
        spec = replace(job.spec, base_env=values.get("base_env", {}), env=values.get("env", {}))
        self.job = replace(job, spec=spec)
        self.nodes = tuple(on)
        self.cancelled = False
        self._replaces_nodes = cluster.allocation.replaces_nodes
        self._machine = JobMachine(
            spec,
            num_cluster_nodes=cluster.num_nodes,
            setup_needed=spec.setup is not None,
            nodes=on,
            restarts=job.restarts,
            num_lost=num_lost,
            replaces_nodes=self._replaces_nodes,
        )
        visible = {**spec.base_env, **spec.env}.get(VISIBLE)
        self._gpus = [nodes.gpus(node, spec.num_accelerators, visible) for node in range(cluster.num_nodes)]
        self._num_gpus = 0 if cluster.simulated or spec.simulated else spec.num_accelerators  # of each node
        self._check_gpus(visible, shared=cluster.allocation.shares_machine)
        names = job.id, job.task_id, job.user
        self._task = environment.Task(spec, cluster, *names, nodes.addresses, secrets, self.nodes)
        self._log = JobLog(folder / "jobs" / str(job.id), environment.hidden_values(spec, secrets))
        self._folder = folder
        self._nodes = nodes
        self._loop = loop
        self._record = record
        self._notes = list(notes)
        self._inputs: deque[t.Input] = deque()
        self._slots: dict[int, _NodeSlot] = {}
        self._threads = ThreadPoolExecutor(min(cluster.num_nodes, _MOST_STARTS), f"job{job.id}")
        self._turns: dict[int, deque[Callable[[], None]]] = {}  # blocking work of a node, one piece after another
        self._culprit: t.Log | None = None
        self._ports: dict[int, int] = {}  # by attempt
        self._round = 0  # of questions for GPUs, which all nodes lease at once or none; 0 gives them back
        self._leases: dict[int, dict[str, Any]] = {}  # answers of nodes in this round
        self._held = ""  # who has them, as was last said
        self._log_due: float | None = None

    # ------------------------------------------------------------------------------------------- for the supervisor
    @property
    def status(self) -> JobStatus:
        """Where the job stands."""
        return self._machine.status

    @property
    def finished(self) -> bool:
        """Has the job ended, and is nothing left of it?"""
        return self._machine.done and not self._turns and not self._inputs

    def start(self) -> None:
        """Begin."""
        self._guard(self._start)

    def _start(self) -> None:
        for note in self._notes:
            self._log.say(note)
        if not self._num_gpus and (known := next(filter(None, self._gpus), None)):
            self._log.say(f"this job requests no GPU and sees none: pass --gpus {known[0].name}:1 for one")
        self._do(self._machine.start(time.monotonic()))
        if not self._replaces_nodes:
            drop_variables(self._folder, self.job.id)  # from here on the job ends with this process
        self._handle_inputs()

    def cancel(self, why: str, number: int = SIGTERM) -> None:
        """End it before its time, beginning with this signal."""
        self.cancelled = True
        self._guard(lambda: self._hear(t.CancelAsked(why, number)))

    def leave(self) -> bool:
        """It ends with its supervisor."""
        return False

    def leave_nodes(self, why: str, save_s: float, *, again: bool) -> None:
        """Its nodes are about to be taken: have it save within so long. ``again``: it goes on on others."""
        if not self.cancelled:
            self._guard(lambda: self._hear(t.NodesTaken(why, save_s, again)))

    def tell_fault(self, fault: str) -> None:
        """Say in its log, once, what its nodes have lost."""
        if fault not in self._notes and not self._machine.done:
            self._notes.append(fault)
            self._guard(lambda: self._do([t.Log("note", fault)]))

    def _guard(self, call: Callable[[], object]) -> None:
        """Call it; an error that nothing here expects fails this job, and no other."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - as above
            self._inputs.clear()
            self._do(self._machine.give_up(unexpected(error)))

    def _post(self, call: Callable[[], object]) -> None:
        """Have it called in the supervisor's loop."""
        self._loop.post(lambda: self._guard(call))

    def _at(self, due: float, what: str, call: Callable[[], object]) -> None:
        """Have it called there at this moment (monotonic), in place of what was to be called for ``what``."""
        self._loop.after(due - time.monotonic(), lambda: self._guard(call), f"job {self.job.id}: {what}")

    def close(self) -> None:
        """Give up threads and files; the job has finished."""
        self._threads.shutdown()
        self._log.close(time.monotonic())

    # ------------------------------------------------------------------------------------------- inputs and actions
    def _hear(self, event: t.Input) -> None:
        self._inputs.append(event)
        if len(self._inputs) == 1:  # else it is seen to after the one that led to it
            self._handle_inputs()

    def _handle_inputs(self) -> None:
        while self._inputs:
            self._do(self._machine.handle(self._inputs[0], time.monotonic()))
            self._inputs.popleft()
        if (due := self._machine.deadline) is not None:
            self._at(due, "machine", lambda: self._hear(t.Tick()))

    def _do(self, actions: Sequence[t.Action]) -> None:
        rows: list[t.SetStatus | t.Log] = []
        for action in actions:
            match action:
                case t.StartNode():
                    self._start_node(action)
                case t.StartProcess():
                    self._start_process(action)
                case t.Terminate():
                    if (slot := self._slots.get(action.node)) is not None and slot.channel is not None:
                        fields = {"signal": int(action.signal), "whole": self.job.spec.command is None}
                        slot.channel.send(frames.pack(frames.TERM, frames.EVERY, meta=fields))
                case t.StopNode():
                    self._stop_node(action.node)
                case t.Log():
                    rows.append(action)
                    if action.text:
                        self._log.say(action.text)
                    if action.kind in ("failed", "lost"):
                        self._culprit = action
                case t.SetStatus():
                    rows.append(action)
                    if action.status.ended:
                        if self._log.problem is not None:
                            rows.insert(0, t.Log("note", f"this log is incomplete: {self._log.problem}"))
                        self._say_end(action)
        if rows and self._record(self.job.id, rows).ended and not self._machine.done:
            self._inputs.append(t.CancelAsked())  # it was cancelled before it began

    def _say_end(self, end: t.SetStatus) -> None:
        if end.status is JobStatus.SUCCEEDED:
            self._log.say("✓ Job finished (status: SUCCEEDED).")
            return
        if end.status is JobStatus.CANCELLED:
            why = "" if end.reason in ("", "cancelled") else f": {end.reason}"
            self._log.say(f"✗ Job {self.job.id} was cancelled (status: CANCELLED){why}.")
            return
        line = f"✗ Job {self.job.id} failed (status: {end.status}): {end.reason.removesuffix('.')}."
        tail = str(dict(self._culprit.data).get("tail") or "") if self._culprit is not None else ""
        spec = self.job.spec
        could_start = end.exit_code not in (126, 127)  # else the tail is ours, and nowhere else
        if spec.command is not None and spec.num_nodes * spec.num_processes == 1 and could_start:
            tail = ""  # the log of a single rank ends with them
        if tail:
            line += " Its last lines:\n" + "\n".join(f"    {each}" for each in tail.splitlines()[-_TAIL_LINES:])
        if self._culprit is not None and self.job.spec.num_nodes * self.job.spec.num_processes > 1:
            line += "\n  The others were stopped by the launcher." if tail else " The others were stopped."
        self._log.say(line)

    # ------------------------------------------------------------------------------------------- nodes
    def _start_node(self, action: t.StartNode) -> None:
        slot = self._slots[action.node] = _NodeSlot(action.node, action.attempt)

        def started(result: tuple[tuple[str, ...], StartedNode] | AtollError | OSError) -> None:
            if isinstance(result, (AtollError, OSError)):
                if isinstance(result, AllocationReleased):
                    self.cancel(str(result))
                elif not slot.stopped:
                    self._hear(t.NodeDown(slot.node, slot.attempt, str(result), started=False))
                return
            addresses, slot.started = result
            handle = slot.started.handle
            if slot.stopped:
                self._in_turn(slot.node, handle.stop, _ignore, first=True)
            else:
                self._task = replace(self._task, addresses=addresses)
                self._at(time.monotonic() + _ANSWER_S, f"node {slot.node}", lambda: self._check_answer(slot))
                # It tells in a thread of its own.
                handle.listen(lambda *heard: self._post(lambda: self._silent(slot, *heard)))
                slot.channel = Channel(
                    handle.channel,
                    self._loop,
                    lambda frame: self._guard(lambda: self._frame(slot, frame)),
                    lambda error: self._guard(lambda: self._lost(slot, handle.reason or said_of_end(error))),
                )

        def note(line: str) -> None:
            self._post(lambda: self._note(slot, line, "waiting"))

        def start() -> tuple[tuple[str, ...], StartedNode] | AtollError | OSError:
            try:
                addresses = self._nodes.ask(self.job.id, slot.attempt, note, lambda: slot.stopped)
                return addresses, self._nodes.start(self.job.id, slot.node, slot.attempt, *self._visible())
            except (AtollError, OSError) as error:
                return error

        self._in_turn(slot.node, start, started)

    def _check_answer(self, slot: _NodeSlot) -> None:
        if not slot.answered:
            self._lost(slot, f"its agent did not answer within {_ANSWER_S:.0f} s")

    def _silent(self, slot: _NodeSlot, silent_s: float, said: str) -> None:
        if not slot.stopped:
            self._hear(t.NodeSilent(slot.node, slot.attempt, silent_s, said))

    def _note(self, slot: _NodeSlot, line: str, kind: str = "note") -> None:
        if not slot.stopped:
            self._do([t.Log(kind, line, slot.node)])

    def _visible(self) -> tuple[list[str], list[str]]:
        """Paths that processes need although they may lie below /tmp: where they work, and what they only read."""
        spec = self.job.spec
        given = {**spec.base_env, **spec.env}
        path = [each for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") for each in given.get(name, "").split(":")]
        whole = "/tmp" if spec.inherit_env else None  # as the caller sees it
        if spec.command is not None:  # an interpreter by its path
            path.append(os.path.dirname(spec.command[0]))
        work = [each for each in (whole, spec.cwd, spec.base_env.get("VIRTUAL_ENV")) if each]
        return work, [each for each in path if os.path.isabs(each)]

    def _stop_node(self, node: int) -> None:
        slot = self._slots.pop(node, None)
        if slot is None:
            return
        slot.stopped = True
        if slot.channel is not None:
            slot.channel.drain()  # what it has said counts, and belongs into the log before the job's end does
        self._end_streams(slot)
        if slot.channel is not None:
            slot.channel.close()
        if slot.started is not None:  # else it is stopped as soon as it has
            self._in_turn(node, slot.started.handle.stop, _ignore)

    def _lost(self, slot: _NodeSlot, reason: str) -> None:
        if slot.stopped:
            return
        # Its slot stays: the machine knows of the loss and stops what is left of the attempt, without this node.
        self._stop_node(slot.node)
        self._hear(t.NodeDown(slot.node, slot.attempt, reason, slot.answered))

    def _in_turn(self, node: int, work: Callable[[], T], then: Callable[[T], None], *, first: bool = False) -> None:
        """Do blocking work for a node in a thread, after what it is busy with; then go on in the loop."""

        def done(future: Future[T]) -> None:
            self._post(lambda: after(future))

        def after(future: Future[T]) -> None:
            try:
                then(future.result())
            finally:  # also where the work raised what it doesn't expect, which fails the job
                turns.popleft()
                if turns:
                    turns[0]()
                else:
                    del self._turns[node]

        def begin() -> None:
            self._threads.submit(work).add_done_callback(done)

        turns = self._turns.setdefault(node, deque())
        if first and turns:
            turns.insert(1, begin)  # the one at the front is being done
        else:
            turns.append(begin)
        if len(turns) == 1:
            begin()

    # ------------------------------------------------------------------------------------------- processes
    def _start_process(self, action: t.StartProcess) -> None:
        slot = self._slots.get(action.node)
        if slot is None or slot.channel is None or slot.started is None:
            return  # it was lost just now, which the machine will hear next
        spec, started = self.job.spec, slot.started
        number = action.process + (action.phase == "run")  # setup is process 0 of its agent
        slot.running[number] = (action.phase, action.process)
        cwd = started.plan.workdir if action.phase == "setup" else spec.cwd or started.plan.workdir
        node_env = {**started.env, **self._devices(slot, action.phase)}
        meta: dict[str, object] = {"cwd": cwd}
        if action.phase == "run" and spec.command is not None:
            env = environment.command_environment(
                self._task,
                action.node,
                action.process,
                node_env,
                master_port=self._master_port(action.attempt),
                restarts=action.attempt - 1,
                cores=started.plan.cores,
            )
            here = self._task.cluster.allocation.shares_machine  # it is the caller's shell that it is run from
            argv = list(spec.command) if here else ["bash", "-c", 'exec "$@"', "bash", *spec.command]
        else:
            env = environment.script_environment(self._task, action.phase, action.node, node_env)
            text = spec.setup if action.phase == "setup" else spec.run
            argv = environment.script_arguments(spec.strict)
            meta["script"] = {"name": f"{action.phase}.sh", "text": text}
        wrapper = started.plan.wrapper
        # A container's environment is its own, not that of start files outside.
        if not wrapper and argv != list(spec.command or ()):
            meta["shell"] = environment.shell_text(self._task, started.env, env)
        meta |= {"argv": [*wrapper, *argv], "env": {**env, "PWD": cwd}}
        slot.channel.send(frames.pack(frames.START, number, meta=meta))

    def _frame(self, slot: _NodeSlot, frame: RawFrame) -> None:
        close_all(frame.fds)  # no agent of a task sends any
        match frame.kind:
            case frames.LOG:
                if (stream := slot.streams.get(frame.rank)) is not None:
                    stream.feed(bytes(frame.parsed().rest), time.monotonic())
                    if self._log_due is None:
                        self._show_log_at(stream.due)
            case frames.AGENT:
                self._answered(slot, frame)
            case frames.LEASED if not slot.stopped:
                self._leased(slot, frame.parsed().meta)
            case frames.STARTED if frame.rank in slot.running:
                phase, process = slot.running[frame.rank]
                pid = int(frame.parsed().meta["pid"])
                slot.streams[frame.rank] = self._log.stream(self._prefix(slot, phase, process, pid))
                self._hear(t.ProcessStarted(slot.node, process, phase, slot.attempt, pid))
            case frames.EXIT if frame.rank in slot.running:
                self._exited(slot, frame)

    def _answered(self, slot: _NodeSlot, frame: RawFrame) -> None:
        meta = frame.parsed().meta
        if slot.answered:
            return
        if meta.get("version") != frames.VERSION:
            self._lost(slot, f"its agent speaks version {meta.get('version')} of the protocol, not {frames.VERSION}")
            return
        slot.answered = True
        for note in (meta.get("place") or {}).get("notes", ()):
            if not any(note.partition(": ")[2] in said for said in self._notes):  # the cause, perhaps of more
                self._notes.append(note)
                self._note(slot, note)
        if not self._num_gpus or slot.node not in self.nodes:
            self._hear(t.NodeUp(slot.node, slot.attempt))
        elif all(self._has_answered(node) for node in self.nodes):
            self._ask_leases()

    # ------------------------------------------------------------------------------------------- GPUs
    def _check_gpus(self, visible: str | None, *, shared: bool) -> None:
        """Refuses a job that asks for more GPUs than it could ever lease; all nodes ``shared`` have the same ones."""
        wanted = self._num_gpus * (len(self.nodes) if shared else 1)
        fewest = min((len(self._gpus[node]) for node in self.nodes), default=0)
        if fewest < wanted:
            where = "this machine" if shared else "a node"
            raise ConfigError(
                f"{len(self.nodes)} × {self.job.spec.accelerator or 'GPU'}:{self._num_gpus} can't be had: {where} has "
                f"{fewest} of them{bound_text(visible)}; request fewer (--gpus)"
            )

    def _has_answered(self, node: int) -> bool:
        slot = self._slots.get(node)
        return slot is not None and slot.answered

    def _ask_leases(self) -> None:
        """Has all of the job's nodes lease their GPUs."""
        self._leases = {}
        self._round += 1
        if not all(self._has_answered(node) for node in self.nodes):
            return  # one was lost just now, or they are started anew
        for node in self.nodes:
            self._send_lease(node, self._num_gpus, self._round)

    def _send_lease(self, node: int, count: int, number: int) -> None:
        slot = self._slots[node]
        assert slot.channel is not None  # it has answered
        request = lease_wish(self._gpus[node], count, f"job {self.job.id} of cluster {self._task.cluster.name}")
        slot.channel.send(frames.pack(frames.LEASE, meta={**request, "round": number}))

    def _leased(self, slot: _NodeSlot, meta: dict[str, Any]) -> None:
        if meta["round"] != self._round or self._machine.done:
            return
        self._leases[slot.node] = meta
        if len(self._leases) < len(self.nodes):
            return
        held = {f"{node_name(node)}: {answer['why']}" for node, answer in self._leases.items() if answer["why"]}
        if not held:
            for node in self.nodes:
                if (up := self._slots.get(node)) is not None:
                    up.devices = ",".join(self._leases[node]["gpus"])
                    self._hear(t.NodeUp(node, up.attempt))
            return
        for node in self.nodes:  # all is given back: two jobs that wait for each other's would do so for ever
            if self._has_answered(node):
                self._send_lease(node, 0, 0)
        self._at(time.monotonic() + _LEASE_S * random.uniform(0.5, 1.5), "leases", self._ask_leases)
        if (text := f"Waiting for GPUs. {'; '.join(sorted(held))}") != self._held:
            self._held = text
            self._do([t.Log("waiting", text)])

    def _devices(self, slot: _NodeSlot, phase: t.Phase) -> dict[str, str]:
        """What its processes see of the node's GPUs: what is leased; without a lease a setup sees all, a run none."""
        if slot.devices is not None:
            return {VISIBLE: slot.devices}
        gpus = self._gpus[slot.node]
        return {VISIBLE: "" if phase == "run" else ",".join(gpu.device for gpu in gpus)} if gpus else {}

    def _exited(self, slot: _NodeSlot, frame: RawFrame) -> None:
        meta = frame.parsed().meta
        phase, process = slot.running.pop(frame.rank)
        if (stream := slot.streams.pop(frame.rank, None)) is not None:
            self._log.end(stream, time.monotonic())
        tail = tuple(self._log.redactor.hide_text(line) for line in meta.get("tail") or ())
        self._hear(
            t.ProcessEnded(
                slot.node,
                process,
                phase,
                slot.attempt,
                meta["exit_code"],
                meta.get("signal"),
                bool(meta.get("oom")),
                tail,
            )
        )

    def _show_log_at(self, due: float | None) -> None:
        """Have the log show progress bars and unfinished lines when their time comes."""
        self._log_due = due
        if due is not None:
            self._at(due, "log", lambda: self._show_log_at(self._log.tick(time.monotonic())))

    def _end_streams(self, slot: _NodeSlot) -> None:
        for stream in slot.streams.values():
            self._log.end(stream, time.monotonic())
        slot.streams.clear()

    def _prefix(self, slot: _NodeSlot, phase: t.Phase, process: int, pid: int) -> str:
        """What the lines of a process begin with in the job's log."""
        spec, name, addr = self.job.spec, node_name(slot.node), self._task.addresses[slot.node]
        if phase == "setup":
            num_there = len(self._task.addresses), self._task.addresses.count(addr)
            which = "" if num_there[0] == 1 else f", ip={addr}" if num_there[1] == 1 else f", ip={addr}, {name}"
            return f"(setup pid={pid}{which}) "
        num_processes = spec.num_processes if spec.command is not None else 1
        rank = slot.node * num_processes + process
        if spec.num_nodes * num_processes == 1:
            return f"({spec.name or 'task'}, pid={pid}) "
        return (
            f"({name}, rank={rank}, pid={pid}) " if not slot.node else f"({name}, rank={rank}, pid={pid}, ip={addr}) "
        )

    def _master_port(self, attempt: int) -> int:
        """Where rank 0 of this attempt will listen: as asked, or a port that is free on this machine at least."""
        if attempt not in self._ports:
            self._ports[attempt] = self.job.spec.master_port or free_port(self._task.addresses[self.nodes[0]])
        return self._ports[attempt]


def unexpected(error: Exception) -> str:
    """What an error that nothing expected is called in its job; where it came from is in the supervisor's log."""
    traceback.print_exception(error)
    return f"an error of Atoll's own, {type(error).__name__}: {error}; the supervisor's log has its traceback"


def _ignore(_result: object) -> None:
    """What a node's end returns."""
