"""``SkyPilot`` and its clouds: machines that are rented when they are needed, and given back.

SkyPilot makes a cluster that runs nothing, and says how ``ssh`` reaches its nodes; from then on they are hosts like
others: our agents run jobs there, and their logs and exit codes come to the machine that launched. A cluster that
nobody renews ends by itself: SkyPilot's autostop on its head is told to count from now on, again and again, by the
watcher of the cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import posixpath
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.validation import check_seconds, check_whole, command_line, nearest, suggests_fields
from atoll.providers.accelerators import misspelt
from atoll.providers.base import (
    AcceleratorsLacking,
    AllocatedNode,
    Allocation,
    AllocationState,
    NodePlan,
    NodeRequest,
    Offer,
    Plan,
    Report,
)
from atoll.providers.bundle import atoll_bundle
from atoll.providers.skypilot import KINDS, client, environment, notes
from atoll.providers.ssh.connection import connections, on_each
from atoll.providers.ssh.host_provider import HostProvider
from atoll.providers.ssh.hosts import Target

_GRACE_S = 90.0  # a cluster behind SkyPilot's server is out of reach while that starts again
_END_MINUTES = 60
_PYTHON_S = 180.0
_ANSWER_S = 10.0
_OPTIONS = (  # of the resources that SkyPilot takes, those that are no part of `infra`
    *("cpus", "memory", "accelerators", "accelerator_args", "instance_type", "use_spot", "disk_size", "disk_tier"),
    *("network_tier", "local_disk", "ports", "image_id", "labels", "max_hourly_cost", "volumes"),
)
_OF_JOBS = "our jobs are not SkyPilot's: "
# Prints a Python of the wanted version, and puts a link to it where every node has it.
_FIND_PYTHON = """set -e
for each in python$1 python3; do
    found=$(command -v $each) && [ "$($found -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = $1 ] && break
    found=
done
if [ -z "$found" ]; then
    uv=$HOME/.local/bin/uv
    [ -x "$uv" ] || uv=$(command -v uv)
    "$uv" python install --quiet $1 >&2
    found=$("$uv" python find --no-project --managed-python $1)
fi
rmdir "$HOME/sky_workdir" 2>/dev/null || true  # which SkyPilot makes: it becomes a link to ours
mkdir -p "$HOME/.atoll"
ln -sfn "$found" "$HOME/.atoll/python3"
echo "$HOME/.atoll/python3"
"""


@suggests_fields
@dataclass(frozen=True, slots=True)
class SkyPilot(HostProvider):
    """Rented machines. ``sky.AWS()``, ``sky.GCP()``, … are this with the cloud said.

    Args:
        infra: as SkyPilot writes it: ``aws``, ``gcp/us-central1``, ``k8s/CONTEXT``, ``slurm/NAME/PARTITION``; empty for
            the cheapest of those that are set up.
        region, zone: the same in words of their own.
        use_spot: rent spot machines.
        instance_type, cpus, memory, disk_size, disk_tier, image_id, ports, labels, max_hourly_cost: as in a task file;
            a task's own take precedence.
        end_minutes: how long the machines stay once this side does not renew them any more: it has lost power, or
            sleeps. They are stopped then where the cloud can, else taken down.
        grace_s: how long a connection may be lost before its node counts as lost, in seconds.

    Raises:
        ConfigError: a value that cannot work.
    """

    kind: ClassVar[str] = "skypilot"
    form: ClassVar[str] = "skypilot[/CLOUD]"
    expected: ClassVar[str] = "skypilot/CLOUD/REGION/ZONE, where what is left out may be any, or skypilot/slurm/NAME"
    undeclared: ClassVar[str] = (
        "clouds, through SkyPilot: `atoll check aws` says what to set up; so do gcp, azure, k8s, nebius, lambda, "
        "runpod, …, skypilot/slurm/NAME"
    )
    lacks: ClassVar[Mapping[str, str]] = {
        "priority": f"{_OF_JOBS}they start in the order in which they were submitted",
        "priority_class": f"{_OF_JOBS}they start in the order in which they were submitted",
        "hooks": f"{_OF_JOBS}a script that is told to end gets SIGTERM",
    }

    infra: str = ""
    _: KW_ONLY
    region: str | None = None
    zone: str | None = None
    use_spot: bool | None = None
    instance_type: str | None = None
    cpus: int | str | None = None
    memory: int | str | None = None
    disk_size: int | str | None = None
    disk_tier: str | None = None
    image_id: str | None = None
    ports: int | str | list[str] | None = None
    labels: Mapping[str, str] | None = None
    max_hourly_cost: float | None = None
    end_minutes: int = _END_MINUTES
    grace_s: float = _GRACE_S

    def __post_init__(self) -> None:
        for name in ("infra", "region", "zone", "instance_type", "disk_tier", "image_id"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{type(self).__name__}({name}={value!r}): expected text")
        check_whole(f"{type(self).__name__}(end_minutes=)", self.end_minutes, 5, 7 * 24 * 60)
        check_seconds(f"{type(self).__name__}(grace_s=)", self.grace_s)
        object.__setattr__(self, "infra", self._written_out())

    def _written_out(self) -> str:
        """The infra as the registry resolves it."""
        own = () if self.kind == "skypilot" else (self.kind,)
        parts = [part for part in self.infra.removeprefix("skypilot").strip("/").split("/") if part]
        if own and parts[:1] not in ([], [*own]):
            raise ConfigError(f"{type(self).__name__}(infra={self.infra!r}): expected {self.form}")
        parts = parts or [*own]
        for name, at in (("region", 1), ("zone", 2)):
            value = getattr(self, name)
            if value is not None and len(parts) > at:
                raise ConfigError(f"{name}={value!r}: infra={self.infra!r} says this already: keep one of the two")
            if value is not None:
                parts += ["*"] * (at - len(parts)) + [value]
        while parts[-1:] == ["*"]:
            parts.pop()
        if parts and parts[0] not in (*KINDS, "slurm", "ssh", "*"):
            hint = nearest(parts[0], KINDS) or f": it has {', '.join(KINDS)}, slurm and ssh"
            raise ConfigError(f"infra={self.infra!r}: SkyPilot has no cloud {parts[0]!r}{hint}")
        return "/".join(parts if parts and parts[0] in KINDS else ("skypilot", *parts))

    @property
    def place(self) -> str:
        """The infra as SkyPilot writes it; empty for any."""
        return self.infra.removeprefix("skypilot").strip("/")

    @property
    def cloud(self) -> str:
        """The cloud as SkyPilot calls it; empty for any."""
        first = self.place.partition("/")[0].replace("*", "")
        return "kubernetes" if first == "k8s" else first

    @classmethod
    def declared(cls) -> list[str]:
        """None: credentials are looked at when a cloud is named."""
        return []

    @classmethod
    def has_form(cls, name: str) -> bool:
        """A cloud has regions, which have zones; a context of Kubernetes may be called anything."""
        return cls.kind in ("skypilot", "k8s", "kubernetes") or name.count("/") < 2

    @classmethod
    def resolve(cls, name: str) -> SkyPilot:
        """``CLOUD/REGION/ZONE``."""
        return cls("/".join(part for part in (cls.kind, name) if part))

    @classmethod
    def of(cls, allocation: Allocation) -> SkyPilot:
        """As it was when its machines were rented."""
        how = allocation.settings
        return cls(allocation.infra, end_minutes=how["end_minutes"], grace_s=how["grace_s"])

    def _ask(self, method: str, **arguments: Any) -> Any:
        return client.ask(self.cloud, method, **arguments)

    # -- planning ---------------------------------------------------------------------------------------------------

    def _resources(self, request: NodeRequest) -> dict[str, Any]:
        """A request as SkyPilot's resources."""
        own = {name: getattr(self, name, None) for name in _OPTIONS}
        kinds = [f"{name}:{count}" for name, count in request.accelerators or ()]
        several = kinds if request.in_order else dict.fromkeys(kinds)  # to SkyPilot a mapping has no order
        wanted = kinds[0] if len(kinds) == 1 else several
        asked = {"cpus": request.cpus, "memory": request.memory, "accelerators": wanted}
        found = {**own, **{name: value for name, value in asked.items() if value}}
        found |= {name: value for name, value in request.resources.items() if name in _OPTIONS}
        return {name: value for name, value in found.items() if value is not None} | {"infra": self.place or None}

    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        """What would be rented, and its price; on an allocation, its nodes as they are now."""
        if allocation is not None and allocation.nodes:
            return self._plan_on(request, allocation)
        try:
            best = self._ask("offers", resources=self._resources(request), num_nodes=request.num_nodes)[0]
        except client.SkyPilotError as error:
            if error.kind != "ResourcesUnavailableError" or not request.accelerators:
                raise
            asked = " or ".join(f"{name}:{count}" for name, count in request.accelerators)
            why = misspelt(name for name, _ in request.accelerators) or str(error)
            raise AcceleratorsLacking(asked, f"can't be had on {self.infra}: {why}") from None
        name, count = next(iter(best["accelerators"].items()), (None, 0))
        num = int(max(1, count)) if name else 0
        nodes = tuple(
            NodePlan(node, "", request.num_ranks(num), name, num, is_elsewhere=True, host=f"node {node}")
            for node in range(request.num_nodes)
        )
        prices = {name: best[name] for name in ("instance_type", "use_spot", "price", "spot_price", "missing")}
        place = "/".join(part for part in (best["cloud"], best["region"], best["zone"]) if part)
        is_told = best["instance_type"] or best["missing"]  # of a cluster that is the user's own nobody says a price
        offer = Offer(infra=place, **prices) if is_told else None
        return Plan(self.name, nodes, False, bool(num), (), name, num, self._pending(request), offer)

    def _plan_on(self, request: NodeRequest, allocation: Allocation) -> Plan:
        """The nodes, whose GPUs are those that were rented, whatever the driver calls them."""
        wanted = request.accelerators
        plan = HostProvider.plan(self, dataclasses.replace(request, accelerators=None if wanted else ()), allocation)
        nodes = [self._in_users_environment(node) for node in plan.nodes]
        if not wanted:
            return dataclasses.replace(plan, nodes=tuple(nodes))
        fitting = next(((name, count) for name, count in wanted if count <= plan.num_accelerators), None)
        if fitting is None:
            asked = " or ".join(f"{name}:{count}" for name, count in wanted)
            raise AcceleratorsLacking(
                asked, f"can't be had on {self.infra}: its nodes show {plan.num_accelerators} GPUs"
            )
        name, count = fitting
        nodes = [
            dataclasses.replace(
                node,
                accelerator=name,
                num_accelerators=count,
                num_ranks=request.num_ranks(count),
                gpus=tuple(dataclasses.replace(gpu, name=name) for gpu in node.gpus),
            )
            for node in nodes
        ]
        return dataclasses.replace(plan, nodes=tuple(nodes), accelerator=name, num_accelerators=count, has_gpu=True)

    @staticmethod
    def _in_users_environment(node: NodePlan) -> NodePlan:
        """Scripts find the Python that SkyPilot has made for them, not ours."""
        programs = posixpath.dirname(node.python)
        path = node.base_env.get("PATH", "").removeprefix(f"{programs}:")
        users = posixpath.join(node.home, "sky-user-env", "bin")
        return dataclasses.replace(node, base_env={**node.base_env, "PATH": f"{users}:{path}"})

    # -- machines ---------------------------------------------------------------------------------------------------

    def _pending(self, request: NodeRequest) -> Allocation:
        settings = {"end_minutes": self.end_minutes, "grace_s": self.grace_s, "name": f"atoll-{request.id}"}
        return Allocation(
            infra=self.infra,
            id=request.id,
            state=AllocationState.PENDING,
            shares_machine=False,
            files="hosts",
            files_in=request.files_in,
            settings=settings,
        )

    def provision(self, request: NodeRequest, report: Report, have: Allocation | None = None) -> Allocation:
        """Begin to rent, or go on with what a launch has begun that was killed."""
        if have is not None and have.nodes:
            now = self.restart(have) if have.state is AllocationState.STOPPED else self.poll(have)
            if now.state is AllocationState.READY and request.num_nodes > len(now.nodes):
                raise ConfigError(
                    f"cluster {request.id} has {len(now.nodes)} nodes, and rented machines can't become more: "
                    f"`{command_line('atoll', 'down', request.id)}`, then launch it again"
                )
            if now.state in (AllocationState.READY, AllocationState.PENDING):
                return now
        if self.cloud and (missing := self._ask("check", cloud=self.cloud)):
            raise ConfigError(f"{self.infra} can't be used yet: {missing}")
        pending = self._pending(request)
        begun = notes.begun_request(pending)
        if begun is None:
            begun = self._begin(pending, request)
        else:
            report(f"an earlier launch of {request.id} goes on")
        if not begun["guard"]:
            report(f"machines of {self.infra} can't end themselves: `{command_line('atoll', 'down', request.id)}` does")
        report("the supervisor runs on this machine. Keep it awake while jobs run")
        settings = {**pending.settings, **begun}
        code = atoll_bundle().digest
        return self.poll(dataclasses.replace(pending, code=code, since_s=time.time(), settings=settings))

    def _begin(self, pending: Allocation, request: NodeRequest) -> dict[str, Any]:
        notes.write(pending, {})  # from now on SkyPilot's server is needed
        try:
            begun: dict[str, Any] = self._ask(
                "launch",
                name=pending.settings["name"],
                resources=self._resources(request),
                num_nodes=request.num_nodes,
                idle_minutes=self.end_minutes,
            )
        except AtollError:
            self._forget(pending)
            raise
        notes.write(pending, begun)
        return begun

    def restart(self, allocation: Allocation) -> Allocation:
        """Begin to start machines that were stopped."""
        how = allocation.settings
        if allocation.state is not AllocationState.STOPPED:
            return allocation
        begun = self._ask("start", name=how["name"], guard=how["guard"], idle_minutes=self.end_minutes)
        notes.write(allocation, begun)
        since_s = time.time() - (how["stopped_s"] - allocation.since_s)  # what it has cost counts on
        settings = {**how, **begun}
        state = AllocationState.PENDING
        return dataclasses.replace(allocation, state=state, nodes=(), since_s=since_s, settings=settings)

    def poll(self, allocation: Allocation, *, max_age_s: float = 0.0) -> Allocation:
        """While machines are being rented how far that is; later, from time to time, whether they are still there."""
        name, begun = allocation.settings["name"], allocation.settings.get("request")
        if allocation.state is AllocationState.PENDING and begun:
            try:
                now = self._ask("request", request_id=begun)
            except AtollError as error:
                with contextlib.suppress(AtollError):  # some of them may be there
                    self.release(allocation, keep_disks=False)
                return dataclasses.replace(allocation, state=AllocationState.LOST, reason=str(error))
            if not now["done"]:
                return dataclasses.replace(allocation, reason=now["line"])
            return self._reached(allocation, self._ask("describe", name=name, folder=str(notes.ssh_config().parent)))
        if allocation.state is not AllocationState.READY or notes.is_fresh(allocation):
            return allocation
        notes.write(allocation, {"seen_s": time.time()})
        try:
            now = self._ask("describe", name=name, refresh=True)
        except (
            AtollError
        ):  # the cloud does not answer, or there is no network: nothing is known, so nothing has changed
            return allocation
        if (now is None or now["status"] == "STOPPED") and self._answers(allocation):
            return allocation
        if now is None:
            reason = f"machines of {self.infra} are not there any more, which was not done here"
            return dataclasses.replace(allocation, state=AllocationState.LOST, reason=reason)
        return self._stopped(allocation) if now["status"] == "STOPPED" else allocation

    def _answers(self, allocation: Allocation) -> bool:
        """Does its head answer, whatever the cloud says?"""
        try:
            with connections.used([self.target(allocation.head.reach)]) as (login,):
                return login.run("true", limit_s=_ANSWER_S).returncode == 0
        except ProvisionError:
            return False

    def _stopped(self, allocation: Allocation) -> Allocation:
        settings = {**allocation.settings, "stopped_s": time.time()}
        reason = "its machines were stopped: nobody used them, or somebody did that by hand"
        return dataclasses.replace(allocation, state=AllocationState.STOPPED, reason=reason, settings=settings)

    def _reached(self, allocation: Allocation, now: dict[str, Any] | None) -> Allocation:
        """An allocation whose machines are there."""
        if now is None or now["status"] != "UP":
            why = "they are not there" if now is None else f"SkyPilot says {now['status']} {now['reason']}".strip()
            return dataclasses.replace(allocation, state=AllocationState.LOST, reason=why)
        infra = "/".join(now["infra"]) if now["infra"][0] in KINDS else "/".join(("skypilot", *now["infra"]))
        nodes = tuple(
            AllocatedNode(name=host, address=address, reach=host)
            for host, address in zip(now["hosts"], now["addresses"], strict=True)
        )
        cost = now["hourly_cost"]
        ready = dataclasses.replace(
            allocation,
            infra=allocation.infra if self.cloud in ("kubernetes", "ssh") else infra,
            state=AllocationState.READY,
            reason="",
            nodes=nodes,
            python=self._find_python(nodes),
            hourly_cost=None if cost is None else cost * len(nodes),
        )
        notes.write(ready, {"seen_s": time.time()})
        return ready

    def _find_python(self, nodes: tuple[AllocatedNode, ...]) -> str:
        """The nodes' Python of our minor version, as functions travel to it; installed where it is missing."""
        minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
        command = shlex.join(["/bin/sh", "-c", _FIND_PYTHON, "sh", minor])
        with connections.used([self.target(node.reach) for node in nodes]) as logins:
            answers = on_each(logins, lambda login: login.run(command, limit_s=_PYTHON_S))
        for node, answer in zip(nodes, answers, strict=True):
            if answer.returncode != 0:
                said = answer.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
                raise ProvisionError(f"{node.name} has no Python {minor}, and none could be installed: {said[-1]}")
        return answers[0].stdout.decode().strip()

    def target(self, reach: str) -> Target:
        """By the entry for ssh that SkyPilot has written."""
        return Target(reach, config=str(notes.ssh_config()), python="~/.atoll/python3")

    def keep(self, allocation: Allocation) -> bool:
        """Have SkyPilot's autostop count from now."""
        how = allocation.settings
        if (
            not how.get("guard")
            or time.time() - notes.read(allocation).get("renewed_s", 0.0) < 60 * self.end_minutes / 4
        ):
            return False
        self._ask("renew", name=how["name"], guard=how["guard"], idle_minutes=self.end_minutes)
        notes.write(allocation, {"renewed_s": time.time()})
        return True

    def release(self, allocation: Allocation, *, keep_disks: bool) -> Allocation:
        """Stop the machines where the cloud can and their disks are wanted, else give them back."""
        how = allocation.settings
        if allocation.state is AllocationState.RELEASED:
            return allocation
        if not allocation.nodes and not notes.path_of(allocation).exists():  # its launch has failed or was taken down
            return dataclasses.replace(allocation, state=AllocationState.RELEASED)
        if keep_disks and allocation.state is AllocationState.STOPPED:
            return allocation
        if keep_disks and how.get("guard") == "stop":
            self._ask("stop", name=how["name"])
            self._forget(allocation)
            return self._stopped(allocation)
        self._ask("down", name=how["name"], request_id=how.get("request", "") if not allocation.nodes else "")
        self._forget(allocation)
        for path in notes.ssh_folder().glob(f"{how['name']}.*"):
            path.unlink(missing_ok=True)
        return dataclasses.replace(allocation, state=AllocationState.RELEASED)

    def _forget(self, allocation: Allocation) -> None:
        """Nothing has to be known of it any more; after the last one nobody needs SkyPilot's server."""
        path = notes.path_of(allocation)
        path.unlink(missing_ok=True)
        if not any(path.parent.glob("*.json")):
            with contextlib.suppress(AtollError):
                self._ask("end_server")

    def end_orphans(self, allocation: Allocation, owner: str, first: int = 0) -> tuple[list[str], list[str]]:
        """As on hosts; machines that are gone have nothing left."""
        if self.poll(allocation).state is not AllocationState.READY:
            return [], []
        return HostProvider.end_orphans(self, allocation, owner, first)

    # -- for people -------------------------------------------------------------------------------------------------

    def examine(self) -> Iterator[tuple[bool, str]]:
        """Whether credentials are there, and where prices are known."""
        if not self.cloud:
            raise ConfigError("name a cloud, as in `atoll check aws`")
        if missing := self._ask("check", cloud=self.cloud):
            yield False, missing
        else:
            yield True, f"{self.cloud} can be used, through SkyPilot {environment.VERSION}"

    def gpu_rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The kinds that the cloud rents, with their cheapest machines."""
        if not self.cloud:
            raise ConfigError("name a cloud, as in `atoll gpus aws`")
        rows = self._ask("gpus", cloud=self.cloud)
        missing = self._ask("check", cloud=self.cloud)
        lines = [f"{self.infra} can't be used yet: {missing}"] if missing else []
        return rows, lines if rows else [*lines, f"no prices of {self.infra} are known"]
