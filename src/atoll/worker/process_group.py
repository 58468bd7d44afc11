"""The gang's torch process group.

A function that imports torch on a broadcast finds the group made. All ranks agree first, through the driver: the
group exists when every rank of the call has imported torch, and does not when one has returned without it. Rank 0
serves the store on the port it reserved when it started, so nothing can take the port in between.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import Any

from atoll.core import context
from atoll.core.errors import ConfigError
from atoll.worker import isolation
from atoll.worker.channel import DriverChannel

_TIMEOUT_VARIABLE = "NCCL_SOCKET_TIMEOUT"  # unknown to NCCL, and named by many guides


@dataclass(slots=True)
class _State:
    """What this process holds for groups; stores outlive calls, groups do not."""

    worker: DriverChannel | None = None
    armed: bool = False  # the running call wants a group as soon as torch is there
    ours: bool = False  # the present group was made by us
    num_groups: int = 0
    stores: dict[tuple[str, int], Any] = field(default_factory=dict)


_state = _State()


def before_call(worker: DriverChannel, all_have_torch: bool) -> None:
    """Get ready for a broadcast: make the group now if torch is loaded everywhere, else when it is imported."""
    _state.worker = worker
    # The slices of a GPU are jobs of their own: a group over them is made where it is asked for.
    _state.armed = worker.broadcast and worker.setup["world_size"] > 1 and not worker.setup["mig"]
    _state.num_groups = 0  # counted within a call: a rank that started later has to come to the same names
    worker.at_end.append(_after_call)
    if type(sys.meta_path[0]) is not _TorchFinder and _TorchFinder not in map(type, sys.meta_path):
        sys.meta_path.insert(0, _TorchFinder())
    if "torch" in sys.modules:
        _on_torch()
    elif all_have_torch:
        import torch  # noqa: F401 - some ranks have it from an earlier call: all must come to the same answer


def disarm() -> DriverChannel:
    """Importing torch makes no group in this call; returns the channel of this rank, which runs one."""
    assert _state.worker is not None
    _state.armed = False
    return _state.worker


def explicit(backend: str | None, timeout_s: float | None) -> None:
    """Make the group that a framework decorator asks for, over one rank too; raises where it can't be had."""
    ctx = context.current()
    if ctx is None or _state.worker is None:
        return
    _state.armed = False
    dist = _dist()

    if dist.is_initialized():
        dist.destroy_process_group()
    _make(backend, timeout_s)


def backend_for(asked: str | None, *, simulated: bool, local_world_size: int) -> str:
    """NCCL where each rank has its own GPU, else Gloo. An explicit ``nccl`` becomes Gloo only in simulation."""
    import torch

    own_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
    if _state.worker is not None and _state.worker.setup["mig"] and not simulated:
        if asked is not None and "nccl" in asked:
            raise ConfigError(
                f"backend={asked!r}: NCCL takes two slices of a GPU for the same device and refuses; use "
                f"backend='gloo', or leave mig out of the pool's accelerator"
            )
        own_gpu = False
    if asked is None:
        return "nccl" if own_gpu else "gloo"
    if "nccl" in asked and not own_gpu:
        if simulated:
            return "gloo"
        raise ConfigError(
            f"backend={asked!r} needs a GPU for each of the {local_world_size} ranks of this node, and "
            f"{torch.cuda.device_count()} are visible; use backend='gloo' or leave it out"
        )
    return asked


class _TorchFinder:
    """Runs ``_on_torch`` after the top-level ``torch`` has been imported whole."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        # On the loader itself: importing importlib.abc for a subclass costs every rank half its start.
        loader: Any = spec.loader
        import_torch = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with _whole():
                import_torch(module)
                isolation.note_torch(module)
                _on_torch()

        loader.exec_module = exec_module
        return spec


def _on_torch() -> None:
    """torch is loaded and a call runs: its device becomes current, and its group is made if the others come too."""
    worker, ctx = _state.worker, context.current()
    if worker is None or ctx is None:
        return
    import torch

    if not torch.distributed.is_available():
        return
    _replace_init_process_group(torch)
    _set_device(torch, ctx)
    if not _state.armed or ctx.world_size == 1:
        return
    _state.armed = False
    if not torch.distributed.is_initialized():
        _make(None, None)


def _set_device(torch: Any, ctx: context.CallContext) -> None:
    """Make ``cuda:LOCAL_RANK`` current, where there is one."""
    if torch.cuda.is_available() and ctx.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(ctx.local_rank)


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Importing torch and making a group are done whole or not at all: a rank that was stopped half-way is replaced.

    torch can't be imported a second time, and what it counts groups by would no longer agree between ranks.
    """
    try:
        yield
    except BaseException:
        if _state.worker is not None:
            _state.worker.spent = True
        raise


def _make(backend: str | None, timeout_s: float | None) -> None:
    worker, ctx = _state.worker, context.current()
    assert worker is not None and ctx is not None
    import torch

    dist = _dist()

    _set_device(torch, ctx)
    store = _agreed_store(worker, ctx)
    if store is None:
        return
    _replace_init_process_group(torch)
    options: dict[str, Any] = {}
    seconds = timeout_s if timeout_s is not None else _seconds(os.environ.get(_TIMEOUT_VARIABLE))
    if seconds is not None:
        options["timeout"] = timedelta(seconds=seconds)
    chosen = backend_for(backend, simulated=ctx.simulated, local_world_size=ctx.local_world_size)
    _state.num_groups += 1
    prefixed = dist.PrefixStore(f"atoll/{worker.call}/{_state.num_groups}", store)
    with _whole():
        dist.init_process_group._atoll_original(
            chosen, store=prefixed, rank=ctx.rank, world_size=ctx.world_size, **options
        )
        # One whose function is done at once would close what another is still connecting to.
        if prefixed.add("made", 1) == ctx.world_size:
            prefixed.set("all made", "")
        prefixed.wait(["all made"])
    _state.ours = True
    os.environ.__class__ = _WatchedEnviron


def _agreed_store(worker: DriverChannel, ctx: context.CallContext) -> Any | None:
    """The gang's store once every rank wants it; None when one has returned without."""
    dist = _dist()

    if ctx.world_size == 1:
        return dist.HashStore()
    if ctx.rank == 0:
        _store(worker, ctx)  # serve before anybody is told to connect
    return None if worker.agree() is None else _store(worker, ctx)


def _store(worker: DriverChannel, ctx: context.CallContext) -> Any:
    """Rank 0's store: the server there, a client elsewhere; kept between calls of the same gang."""
    dist = _dist()

    stores = _state.stores
    key = (ctx.head_addr, ctx.head_port)
    if key not in stores:
        stores.clear()
        timeout = timedelta(seconds=300)
        if ctx.rank == 0:
            # The store takes the descriptor over, so it gets one of its own.
            fd = os.dup(worker.port_socket.fileno())
            stores[key] = dist.TCPStore(
                *key, ctx.world_size, True, timeout, wait_for_workers=False, master_listen_fd=fd
            )
        else:
            stores[key] = dist.TCPStore(*key, ctx.world_size, False, timeout, wait_for_workers=False)
    return stores[key]


def _replace_init_process_group(torch: Any) -> None:
    """A function that calls ``init_process_group`` gets its own group, also when ours was there before it.

    Rank 0 already serves a store on MASTER_PORT, so a call that would make one there is given that store.
    """
    dist, c10d = torch.distributed, torch.distributed.distributed_c10d
    if hasattr(dist.init_process_group, "_atoll_original"):
        return
    original = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        worker, ctx = _state.worker, context.current()
        if worker is None or ctx is None:
            original(*args, **kwargs)
            return
        if _state.ours and dist.is_initialized():
            dist.destroy_process_group()
            _state.ours = False
        _state.armed = False
        by_environment = len(args) < 2 and kwargs.get("init_method") in (None, "env://") and not kwargs.get("store")
        if by_environment and _environment_is_ours(ctx):
            kwargs.pop("init_method", None)
            _state.num_groups += 1
            base = dist.HashStore() if ctx.world_size == 1 else _store(worker, ctx)
            kwargs["store"] = dist.PrefixStore(f"caller/{worker.call}/{_state.num_groups}", base)
            for name, mine in (("rank", ctx.rank), ("world_size", ctx.world_size)):
                if kwargs.get(name, -1) == -1:
                    kwargs[name] = mine
        if worker.setup["mig"] and "nccl" in (*args[:1], kwargs.get("backend")):
            backend_for("nccl", simulated=ctx.simulated, local_world_size=ctx.local_world_size)
        if ctx.simulated and args[:1] == ("nccl",):  # its GPUs are not there
            args = ("gloo", *args[1:])
        if ctx.simulated and kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        with _whole():
            original(*args, **kwargs)
        os.environ.__class__ = _WatchedEnviron

    init_process_group._atoll_original = original  # type: ignore[attr-defined]
    init_process_group.__doc__ = original.__doc__
    dist.init_process_group = c10d.init_process_group = init_process_group


def _environment_is_ours(ctx: context.CallContext) -> bool:
    wanted = {"MASTER_ADDR": ctx.head_addr, "MASTER_PORT": str(ctx.head_port), "WORLD_SIZE": str(ctx.world_size)}
    return all(os.environ.get(key) == value for key, value in wanted.items())


def _after_call() -> None:
    """Leave whatever group the call left behind."""
    _state.armed = False
    _state.ours = False
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _dist() -> Any:
    """``torch.distributed``, untyped: it does not declare the stores it exports."""
    import torch.distributed

    return torch.distributed


def _seconds(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{_TIMEOUT_VARIABLE}={text!r} is not a number of seconds; write e.g. 600") from error


class _WatchedEnviron(type(os.environ)):  # type: ignore[misc]  # a class like any other, typed as a variable
    """``os.environ`` that gives the present group its timeout where a function sets it. An audit hook is slower."""

    def __setitem__(self, key: str, value: str) -> None:
        super().__setitem__(key, value)
        if key == _TIMEOUT_VARIABLE and _state.worker is not None and _state.worker.call:
            dist, seconds = _dist(), _seconds(value)
            if seconds is not None and dist.is_initialized():
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
