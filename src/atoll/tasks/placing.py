"""What a launch gets: a cluster that is made, reused, restarted or resized, with what its infra has for it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.validation import command_line
from atoll.providers import registry
from atoll.providers.base import (
    DEFAULT,
    Accelerators,
    AcceleratorsLacking,
    AllocationState,
    NodeRequest,
    Offer,
)
from atoll.providers.upkeep import wait_until_ready
from atoll.tasks import waiting
from atoll.tasks.rows import JobRow
from atoll.tasks.spec import ClusterSpec, ClusterStatus


@dataclass(frozen=True, slots=True)
class Decision:
    """What a launch gets.

    Attributes:
        cluster: the record as it should be.
        accelerator, num_accelerators: what the job uses of each node.
        lines: what the user is told about it.
        changed: does the record have to be written?
        offer: what a new cluster's nodes are rented as, None where they are not.
        others: what else would do, the better first.
    """

    cluster: ClusterSpec
    accelerator: str | None
    num_accelerators: int
    lines: tuple[str, ...]
    changed: bool
    offer: Offer | None = None
    others: tuple[Decision, ...] = ()

    @property
    def hourly_cost(self) -> float | None:
        """Of the new cluster, in US dollars; None where it is not known, or nothing is rented."""
        each = None if self.offer is None else self.offer.hourly_cost
        return None if each is None else each * self.cluster.num_nodes

    @property
    def rank(self) -> tuple[bool, float]:
        """Of what would do as well the lowest is taken: what is set up, then what costs least."""
        return bool(self.offer and self.offer.missing), self.hourly_cost or 0.0


def decide_any(
    name: str,
    have: ClusterSpec | None,
    requests: Sequence[NodeRequest],
    busy: Sequence[JobRow] = (),
    *,
    in_order: bool = False,
) -> Decision:
    """``decide`` for the best of several requests: for a new cluster what is set up and cheapest, or comes first.

    Raises:
        ConfigError, ProvisionError: as ``decide``; of several, each says why it can't be had.
    """
    if have is not None and have.status is not ClusterStatus.DOWN:
        fitting = (each for each in requests if registry.fits(each.infra, have.infra))
        return decide(name, have, next(fitting, requests[0]), busy)
    found, refused = [], []
    kind: type[AtollError] = ConfigError
    for request in requests:
        try:
            found.append(decide(name, have, request, busy))
        except (ConfigError, ProvisionError) as error:
            if len(requests) == 1:
                raise
            kind = ProvisionError if isinstance(error, ProvisionError) else kind
            refused.append(f"{request.infra or DEFAULT}: {str(error).removeprefix(f'{request.infra}: ')}")
    if not found:
        raise kind("none of the task's alternatives can be had:\n" + "\n".join(refused))
    found.sort(key=lambda each: each.rank[:1] if in_order else each.rank)
    return dataclasses.replace(found[0], others=tuple(found[1:]), lines=(*refused, *found[0].lines))


def cheapest_first(name: str, requests: Sequence[NodeRequest]) -> list[NodeRequest]:
    """Requests of which any would do for a new cluster, as ``decide_any`` would try them; what can't be had is last."""

    def rank(request: NodeRequest) -> tuple[bool, bool, float]:
        try:
            return False, *decide(name, None, request).rank
        except (ConfigError, ProvisionError):
            return True, True, 0.0

    return sorted(requests, key=rank) if len(requests) > 1 else list(requests)


def decide(name: str, have: ClusterSpec | None, request: NodeRequest, busy: Sequence[JobRow] = ()) -> Decision:
    """Make, reuse, restart or resize a cluster for a request.

    Args:
        name: of the cluster.
        have: its record, or None.
        busy: its jobs that have not ended.

    Raises:
        ConfigError: an unknown infra, another infra than it is on, a resize while jobs run, accelerators that can't
            be had without simulation.
        ProvisionError: a node can't be used.
    """
    if have is None or have.status is ClusterStatus.DOWN:
        return _new(name, have, request)
    if not registry.fits(request.infra, have.infra):
        raise ConfigError(
            f"cluster {name} is on {have.infra}, not on {request.infra} (--infra): use another name (-c), "
            f"or `{command_line('atoll', 'down', name)}` first"
        )
    kinds = request.accelerators or ()
    chosen = next((each for each in kinds if have.accelerator == each[0] and have.num_accelerators >= each[1]), None)
    if chosen is not None and have.simulated and not request.simulate:
        _planned(have, request)  # refuses
    wanted = chosen or next(iter(kinds), None)
    changes = _lacking(have, request, None if chosen else wanted)
    stopped = have.status is ClusterStatus.STOPPED
    if not changes:
        restarted = (f"cluster {name} was stopped and is restarted",) if stopped else ()
        return _decision(dataclasses.replace(have, status=ClusterStatus.UP), wanted, restarted, changed=stopped)
    if busy:
        ids, first = ", ".join(str(job.id) for job in busy), (name, busy[0].id)
        raise ConfigError(
            f"cluster {name} can't be resized ({', '.join(changes)}) while job {ids} is on it. Wait for it "
            f"({command_line('atoll', 'logs', *first)}), cancel it ({command_line('atoll', 'cancel', *first)}), or use "
            f"another name (-c)"
        )
    grown = dataclasses.replace(
        have,
        num_nodes=max(have.num_nodes, request.num_nodes),
        cpus=_larger(have.cpus, request.cpus),
        memory_gb=_larger(have.memory_gb, request.memory),
        status=ClusterStatus.UP,
    )
    if wanted is None or chosen:  # the cluster keeps what it has
        kinds = ((have.accelerator, have.num_accelerators),) if have.accelerator else ()
    cluster, _ = _planned(grown, dataclasses.replace(request, accelerators=kinds, resources=have.resources))
    if wanted is not None and chosen is None:
        wanted = (cluster.accelerator or wanted[0], cluster.num_accelerators)
    notes = () if wanted is None else cluster.notes  # of accelerators that this job doesn't use
    lines = (f"cluster {name} is resized: {', '.join(changes)}", *notes)
    return _decision(cluster, wanted, lines)


def _decision(
    cluster: ClusterSpec, accelerators: Accelerators | None, lines: tuple[str, ...], *, changed: bool = True
) -> Decision:
    accelerator, num = accelerators or (None, 0)
    return Decision(cluster, accelerator, num, lines, changed)


def _new(name: str, have: ClusterSpec | None, request: NodeRequest) -> Decision:
    made = ClusterSpec(
        name=name,
        infra=request.infra or DEFAULT,
        num_nodes=request.num_nodes,
        cpus=request.cpus,
        memory_gb=request.memory,
        resources=request.resources,
        created_s=time.time(),
    )
    cluster, offer = _planned(made, request)
    again = () if have is None else (f"cluster {name} was down and is created again; its old jobs' logs are kept",)
    mine = (cluster.accelerator, cluster.num_accelerators) if cluster.accelerator else None
    return dataclasses.replace(_decision(cluster, mine, (*again, *cluster.notes)), offer=offer)


def _planned(cluster: ClusterSpec, request: NodeRequest) -> tuple[ClusterSpec, Offer | None]:
    """The cluster with what its infra has for a request; its notes say what differs from what was requested.

    And what its nodes are rented as.
    """
    files_in = request.files_in or cluster.allocation.files_in
    request = dataclasses.replace(request, id=cluster.name, num_nodes=cluster.num_nodes, files_in=files_in)
    try:
        plan = registry.resolve(cluster.infra).plan(request)
    except AcceleratorsLacking as error:
        step = ". Drop --no-simulate to run on CPU instead, or request fewer (--gpus none for none)"
        raise ConfigError(
            f"{error.requested} {error.reason}{step if error.can_simulate else '; --gpus none requests none'}"
        ) from None
    planned = dataclasses.replace(
        cluster,
        accelerator=plan.accelerator if plan.num_accelerators else None,
        num_accelerators=plan.num_accelerators,
        simulated=plan.simulated,
        notes=plan.lines,
        allocation=plan.allocation,
    )
    return planned, plan.offer


def provision(
    cluster: ClusterSpec,
    before: ClusterSpec | None,
    owner: str,
    say: Callable[[str], object],
    given_up: Callable[[], bool],
    *,
    here: bool,
    recheck: bool,
    on_allocated: Callable[[ClusterSpec], object],
) -> ClusterSpec:
    """Get a cluster its nodes, waiting while they are pending, and check them before a job.

    Args:
        cluster: as it was decided.
        before: its record so far, or None.
        owner: what its agents are known by.
        say: called with a line for each thing the user should know.
        given_up: where it is true, nodes are waited for no longer.
        here: its supervisor runs on this machine, because its jobs end with a process here.
        recheck: look also at machines that were found well lately.
        on_allocated: called with it once its nodes are known, or awaited: from then on others can give them back.

    Raises:
        ProvisionError: a node can't be had or used.
    """
    provider = registry.resolve(cluster.infra)
    have = None if before is None or before.status is ClusterStatus.DOWN else before.allocation
    request = dataclasses.replace(cluster.request(), supervised_here=here, recheck=recheck, owner=owner)
    with waiting.told(cluster, say) as tell:
        allocation = provider.provision(request, tell, have)
        is_new = have is None or not have.nodes
        with registry.given_back_on_failure(provider, allocation) if is_new else contextlib.nullcontext():
            if is_new and not allocation.shares_machine:
                on_allocated(dataclasses.replace(cluster, allocation=dataclasses.replace(allocation, owner=owner)))
            has_waited = allocation.state is AllocationState.PENDING
            allocation = wait_until_ready(provider, allocation, tell, given_up)
            if has_waited:  # nobody has looked at its nodes yet
                provider.plan(request, allocation)
    return dataclasses.replace(cluster, allocation=dataclasses.replace(allocation, owner=owner))


def accelerators_text(accelerator: str | None, num: int) -> str:
    """``L4:2``, or ``no accelerator``."""
    return f"{accelerator}:{num}" if accelerator and num else "no accelerator"


def _lacking(have: ClusterSpec, request: NodeRequest, accelerators: Accelerators | None) -> list[str]:
    """What a cluster has less of than is requested, in words."""
    changes = []
    if request.num_nodes > have.num_nodes:
        changes.append(f"{have.num_nodes} → {request.num_nodes} nodes")
    if accelerators is not None:
        before = accelerators_text(have.accelerator, have.num_accelerators)
        changes.append(f"{before} → {accelerators_text(*accelerators)} per node")
    for what, old, new in (("CPUs", have.cpus, request.cpus), ("memory", have.memory_gb, request.memory)):
        if _larger(old, new) != old:
            changes.append(f"{old} → {new} {what}" if old else f"{new} {what}")
    return changes


def _larger(old: str | None, new: str | None) -> str | None:
    """Of two amounts such as ``8+`` and ``32GB``, the larger; a ratio (``4x``) changes nothing."""
    if new is None or new.endswith("x"):
        return old
    return new if old is None or _amount(new) > _amount(old) else old


def _amount(text: str) -> float:
    found = re.match(r"\s*\d+(\.\d+)?", text)
    return float(found[0]) if found else 0.0
