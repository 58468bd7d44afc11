"""The ranks of a run, whoever started them: torchrun, ``atoll train``, srun, accelerate, or nobody."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from atoll.core.errors import AtollError, ConfigError, ProvisionError

_POLL_S = 0.05
_PATIENCE_S = 3.0


@dataclass(frozen=True)
class World:
    """This process among the ranks.

    Attributes:
        device: what this rank computes on.
        control: a Gloo group of all ranks, for decisions that are made on the host.
        owned: whether the process group was made here, so that it is ended here too.
        session: different from that of other runs that the same process group has seen.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    device: torch.device
    control: dist.ProcessGroup
    owned: bool
    session: str

    @property
    def is_head(self) -> bool:
        """Rank 0 decides and writes."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def decide(self, action: Callable[[], Any]) -> Any:
        """Do something on rank 0; its outcome, an error of Atoll included, is everyone's."""
        outcome: list[Any] = [None]
        if self.is_head:
            try:
                outcome = [(True, action())]
            except AtollError as error:
                outcome = [(False, error)]
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        done, value = outcome[0]
        if not done:
            raise value
        return value

    def agree(self, error: AtollError | None) -> None:
        """Go on where no rank has an error; else the first one is everybody's.

        Raises:
            AtollError: that one, with a note that says on which rank where it is not on rank 0.
        """
        for rank, each in enumerate(self.gather(error)):
            if each is not None:
                if rank > 0:
                    each.add_note(f"found on rank {rank}")
                raise each

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        vote = torch.tensor([int(flag)])
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.control)
        return bool(vote.item())

    def meet(self, name: str, waiting: Callable[[int], None]) -> None:
        """Wait for every rank, however long it takes: no collective is pending meanwhile, so none times out.

        Args:
            name: of this meeting, different from all others of the run.
            waiting: called about every tenth of a second with the number of ranks that are still missing.
        """
        key = f"meet-{name}"
        self._count(key, 1)
        while (missing := self.size - self._count(key)) > 0:
            waiting(missing)
            time.sleep(2 * _POLL_S)

    def announce(self, name: str) -> None:
        """Let every rank know of something, at once and without waiting for them."""
        self._count(name, 1)

    def announced(self, name: str) -> bool:
        """Whether any rank has announced it; a round trip to the store."""
        return self._count(name) > 0

    def is_known(self, text: str) -> bool:
        """Whether rank 0 says this too. Other ranks give it three seconds to do so."""
        content = text.encode(errors="backslashreplace")  # it may quote what is no Unicode
        key = f"said-{hashlib.blake2b(content, digest_size=8).hexdigest()}"
        try:
            said = self._count(key, int(self.is_head))
            deadline = time.monotonic() + _PATIENCE_S
            while not said and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                said = self._count(key)
        except RuntimeError:  # the store went with rank 0, which has said why
            return True
        return said > 0

    def _count(self, name: str, more: int = 0) -> int:
        """Add to a counter that all ranks share; what it is then."""
        total: int = c10d._get_default_store().add(f"atoll-{self.session}-{name}", more)
        return total

    def close(self) -> None:
        """Leave the groups that were made here."""
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()


def join(*, timeout_s: float) -> World:
    """Join the process group that the environment describes; one rank alone where it describes none.

    Args:
        timeout_s: of a collective.

    Raises:
        ConfigError: the environment is incomplete, or there are fewer GPUs than ranks.
        ProvisionError: the ranks could not meet.
    """
    environ = os.environ
    rank = _number(environ, "RANK" if "RANK" in environ else "SLURM_PROCID", 0)
    try:
        return _join(timeout_s, environ)
    except AtollError as error:
        if rank > 0:
            error.add_note(f"on rank {rank}")  # rank 0 may find nothing wrong
        raise


def _join(timeout_s: float, environ: Mapping[str, str]) -> World:
    facts = _from_slurm(environ) if "RANK" not in environ and "SLURM_PROCID" in environ else environ
    rank, size = _number(facts, "RANK", 0), _number(facts, "WORLD_SIZE", 1)
    local_rank = _number(facts, "LOCAL_RANK", 0)
    local_size = _number(facts, "LOCAL_WORLD_SIZE", size if "LOCAL_RANK" not in facts else 0)
    local_size = local_size or _number(facts, "SLURM_NTASKS_PER_NODE", 0) or size
    device = _device(local_rank)
    owned = not dist.is_initialized()
    timeout = timedelta(seconds=timeout_s)
    if owned:
        _make_group(facts, rank, size, device, timeout, own_names=facts is environ)
    rank, size = dist.get_rank(), dist.get_world_size()
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    session = [secrets.token_hex(8)]
    dist.broadcast_object_list(session, src=0, group=control)
    return World(rank, local_rank, size, local_size, device, control, owned, session[0])


def _make_group(
    facts: Mapping[str, str], rank: int, size: int, device: torch.device, timeout: timedelta, *, own_names: bool
) -> None:
    """The default process group. ``own_names``: the variables are in the environment under torch's own names."""
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    if size == 1 and "MASTER_ADDR" not in facts:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout, **options)
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not facts.get(name):
            raise ConfigError(
                f"WORLD_SIZE={size} but {name} is not set: start the ranks with torchrun, srun or atoll train"
            )
    place = f"{facts['MASTER_ADDR']}:{facts['MASTER_PORT']}"
    # torchrun's agent may serve the store, which torch's own "env://" knows about.
    method = "env://" if own_names else f"tcp://{place}"
    try:
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=size, timeout=timeout, **options)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        why = str(error).splitlines()[0]
        raise ProvisionError(
            f"the {size} ranks could not meet at {place} within {timeout.total_seconds():g} s: {why} (MASTER_ADDR and "
            f"MASTER_PORT say where rank 0 is; [train] hang_timeout_s is how long they wait)"
        ) from None


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available() or os.environ.get("ATOLL_SIMULATED") == "1":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"rank with LOCAL_RANK={local_rank}, but this machine has {count} GPUs: start at most {count} ranks here"
        )
    # Without it, memory that the allocator holds in pieces is lost to long runs; read when the first tensor is made.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _number(facts: Mapping[str, str], name: str, default: int) -> int:
    text = facts.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment: expected a whole number") from None


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables from those that srun sets; the port is a function of the job, so that jobs don't meet."""
    facts = dict(environ)
    facts["RANK"], facts["WORLD_SIZE"] = environ["SLURM_PROCID"], environ.get("SLURM_NTASKS", "1")
    facts["LOCAL_RANK"] = environ.get("SLURM_LOCALID", "0")
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    if per_node.partition("(")[0].isdigit():
        facts["LOCAL_WORLD_SIZE"] = per_node.partition("(")[0]
    job = int(environ.get("SLURM_JOB_ID", "0")) * 97 + int(environ.get("SLURM_STEP_ID", "0") or 0)
    facts.setdefault("MASTER_PORT", str(20_000 + job % 12_000))
    if "MASTER_ADDR" not in facts and int(facts["WORLD_SIZE"]) > 1:
        facts["MASTER_ADDR"] = _first_host(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", "")))
    return facts


def _first_host(nodes: str) -> str:
    """The first of Slurm's compressed list of hosts, ``gpu[03-05,9]`` for instance."""
    return re.sub(r"\[([^-,\]]+)[^\]]*\]", r"\1", nodes).partition(",")[0] or socket.gethostname()
