"""``ComputePool``: a set of nodes that start together, run calls, and end together."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Protocol, TypeVar, overload

from atoll.core import events
from atoll.core.errors import ConfigError, PoolClosed, UsageError
from atoll.core.paths import atoll_home, current_folder
from atoll.core.validation import MOST_NODES, MOST_TRIES, check_seconds, check_truth, check_whole, suggests_keywords
from atoll.functions.arguments import (
    check_image,
    check_mig,
    check_provider,
    check_workers,
    not_a_call,
    not_a_function,
    safe_callback,
)
from atoll.functions.import_path import ImportPath
from atoll.functions.mapping import Mapped, zip_items
from atoll.functions.named.client import Attached
from atoll.functions.named.config import IDLE_S, PoolConfig, shown_provider, shown_variables
from atoll.functions.named.registry import check_name, end_pool
from atoll.functions.remote_code import LocalModules, prepare
from atoll.functions.retention import prune_jobs, prune_logs
from atoll.functions.serialize import ByValueModules, name_of, serialize_call, unwrap
from atoll.gang.call import Call, Request, random_bits
from atoll.gang.futures import Backend, CallFuture, RankResults
from atoll.gang.gang import Gang
from atoll.gang.log_router import LogRouter, Logs
from atoll.gang.members import GangSpec, sweep_stale
from atoll.gang.messages import Submit
from atoll.gang.notifier import Notifier
from atoll.gang.remote_ranks import OneUseArena
from atoll.images.image import Image, check_env, check_pip
from atoll.images.overlay import Environment
from atoll.images.resolve import resolve
from atoll.providers.accelerators import AcceleratorSpec
from atoll.providers.base import NodeRequest, Plan, Provider
from atoll.providers.registry import given_back_on_failure, kept
from atoll.providers.upkeep import wait_until_ready
from atoll.wire.payloads import Arena

R = TypeVar("R")


class _Stoppable(Backend, Protocol):
    arena: Arena

    def stop(self) -> None: ...


class ComputePool:
    """Nodes that a provider starts together, with a rank on each accelerator, or one on each CPU node.

    Use it as a context manager, or call ``up()`` and ``down()``. ``f(x) @ pool`` runs a call on every rank,
    ``f(x) >> pool`` on one.

    Args:
        provider: where nodes come from, also as text (``"local"``, ``"ssh/NAME"``) and also ``infra=``; this machine
            by default.
        nodes: number of nodes; by default every host of ``SSH(hosts=…)``, otherwise one.
        accelerator: accelerators per node, in any spelling: ``"A100"``, ``"A100:2"``, ``sky.NVIDIA.A100``; also
            ``accelerators=`` and ``gpus=``. None leases all GPUs of the machine.
        image: packages and variables of the ranks.
        pip, env: added to the image's; they take precedence.
        workers_per_node: ranks per node; ``"auto"``, the default, is one per accelerator, otherwise one. Also
            ``nproc=`` and ``nproc_per_node=``.
        timeout: seconds a call may take; None sets no limit.
        ttl: seconds the pool may live; after that it ends by itself.
        retries: how often a call that lost a rank is restarted, with all its ranks.
        hang_timeout: seconds without progress after which a call fails naming the ranks that did not arrive.
        name: keep the pool warm after the block under this name, for other processes to attach to.
        idle: seconds a named pool stays up with nothing to do; 600 by default.
        on_event: called with each event (``atoll.core.events``), in a thread of the pool's.
        logs: ``"all"``, ``"head"`` for rank 0 only, ``"quiet"``, or a callable that takes each ``LogLine``. Files
            under ``ATOLL_HOME/logs`` have everything whichever it is.

    Raises:
        ConfigError: a value that cannot work.
        ProvisionError: a node could not be started; those that had were released.
        ImageError: packages could not be installed.
    """

    @suggests_keywords
    def __init__(
        self,
        provider: Provider | str | None = None,
        nodes: int | None = None,
        accelerator: str | AcceleratorSpec | Mapping[str, int] | None = None,
        image: Image | None = None,
        pip: str | Sequence[str] | None = None,
        env: Mapping[str, object] | None = None,
        workers_per_node: int | Literal["auto", "gpu"] | None = None,
        timeout: float | None = None,
        ttl: float | None = None,
        retries: int = 0,
        hang_timeout: float | None = None,
        name: str | None = None,
        idle: float | None = None,
        on_event: Callable[[events.Event], object] | None = None,
        *,
        logs: Logs = "all",
    ) -> None:
        self.provider: Provider = check_provider(provider)
        self.nodes = check_whole("nodes", self.provider.num_nodes if nodes is None else nodes, 1, MOST_NODES)
        self.accelerator = AcceleratorSpec.parse(accelerator)
        if self.accelerator is not None and self.accelerator.mig is not None:
            check_mig(self.accelerator, self.provider, workers_per_node)
        self.image = check_image(image)
        self.pip = check_pip("pip=", pip) or None
        self.env = check_env("env=", env)
        self.workers_per_node = check_workers("auto" if workers_per_node is None else workers_per_node)
        self.timeout = check_seconds("timeout", timeout)
        self.ttl = check_seconds("ttl", ttl)
        self.retries = check_whole("retries", retries, 0, MOST_TRIES)
        self.hang_timeout = check_seconds("hang_timeout", hang_timeout)
        self.name = check_name(name) if name is not None else None
        self.idle = check_seconds("idle", idle)
        if idle is not None and name is None:
            raise ConfigError(
                f"idle={idle!r} keeps a named pool warm; give the pool a name= as well, or leave idle out"
            )
        self.logs: Logs = logs
        self.id = ""
        self._on_event = safe_callback(on_event)
        self._config = self._config_of(
            provider=provider,
            nodes=nodes,
            accelerator=accelerator,
            image=image,
            pip=pip,
            env=env if env is not None else self.image.env or None,
            workers_per_node=workers_per_node,
            ttl=ttl,
            hang_timeout=hang_timeout,
            idle=idle,
        )
        self._imports = ImportPath()
        self._pid = os.getpid()
        self._backend: _Stoppable | None = None
        self._node_of: list[int] = []
        self._modules = ByValueModules()  # that ranks can't import
        self._elsewhere = False  # its nodes are other machines
        self._lock = threading.Lock()
        self._finalizer: weakref.finalize[[], ComputePool] | None = None
        LogRouter(logs, lambda rank: 0, 1)  # refuses a wrong `logs` here, where it was written

    def _config_of(self, **given: object) -> PoolConfig:
        settings = {key: getattr(self, key) for key in given}
        settings["provider"] = shown_provider(self.provider)
        settings["image"] = dataclasses.replace(self.image, env=None)
        settings["env"] = shown_variables({**(self.image.env or {}), **self.env})
        settings["idle"] = IDLE_S if self.idle is None else self.idle
        return PoolConfig.of(settings, given)

    # -- life -----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """What ``up()`` would start, without starting it."""
        return self.provider.plan(self._request())

    def _request(self) -> NodeRequest:
        wanted = self.accelerator
        slices = wanted.slices() * wanted.count if wanted is not None else ()
        return NodeRequest(
            id=self.name or self.id,
            num_nodes=self.nodes,
            accelerators=None if wanted is None else ((wanted.name, len(slices) or wanted.count),),
            resources={"mig": slices} if slices else {},
            workers_per_node=self.workers_per_node,
            supervised_here=True,
            recheck=False,
        )

    def up(self) -> ComputePool:
        """Start the nodes and wait until every rank is ready. Does nothing on a pool that is up."""
        with self._lock:
            if self._backend is None:
                self._pid = os.getpid()
                self._backend = self._start()
                self._finalizer = weakref.finalize(self, self._backend.stop)
        return self

    def down(self) -> None:
        """End every rank and release every node, of a named pool for everybody. Does nothing on a pool that is down."""
        self._leave()
        if self.name is not None:
            end_pool(self.name)

    def _leave(self) -> None:
        """Let go: an unnamed pool ends, a named one stays up for others."""
        with self._lock:
            backend, self._backend = self._backend, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if backend is not None:
            backend.stop()

    def __enter__(self) -> ComputePool:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _start(self) -> _Stoppable:
        self._elsewhere = self.provider.is_elsewhere
        self._modules = LocalModules(self.image) if self._elsewhere else ByValueModules()
        if self.name is None:
            spec = self._spec()
            router = self._router(self._node_of.__getitem__, len(self._node_of))
            gang = Gang(spec, Notifier(router, self._on_event))
            gang.start()
            return gang
        idle_s = self.idle if self.idle is not None else IDLE_S
        to_start = lambda: (self._spec(), self._imports.extra)  # noqa: E731 - where no pool of this name is up
        attached = Attached(self.name, self._config, to_start, idle_s, self._router, self._on_event)
        self.id, self._node_of = attached.pool_id, attached.node_of
        self._imports = ImportPath(attached.python, attached.extra_path)
        if self._elsewhere:
            attached.arena = OneUseArena()
        return attached

    def _router(self, node_of: Callable[[int], int], world_size: int) -> LogRouter:
        return LogRouter(self.logs, node_of, world_size)

    def _spec(self) -> GangSpec:
        """Everything to start a gang from; builds the image first."""
        cwd = current_folder()
        self.id = secrets.token_hex(4)
        with kept(stay=True):
            plan = self._provisioned()
        with given_back_on_failure(self.provider, plan.allocation):
            return self._spec_on(plan, cwd)

    def _spec_on(self, plan: Plan, cwd: str) -> GangSpec:
        remote = plan.is_elsewhere
        if remote:
            plan, variables = prepare(self.provider, plan, self.image, self.pip, self.env, self._say)
            environment = Environment(sys.executable, (), variables, ())
        else:
            environment = resolve(self.image, pip=self.pip, env=self.env, has_gpu=plan.has_gpu, progress=self._say)
        self._imports = ImportPath(environment.python, environment.paths)
        for line in environment.lines:
            self._say(line)
        self._node_of = [node.node for node in plan.nodes for _ in range(node.num_ranks)]
        home = atoll_home()
        prune_logs(home / "logs")
        prune_jobs(home / "jobs")
        sweep_stale(tempfile.gettempdir())
        return GangSpec(
            provider=self.provider,
            plan=plan,
            pool_id=self.id,
            python=environment.python,
            env=environment.env if remote else _environment(environment, plan.world_size),
            path=() if remote else self._imports.now(),
            cwd=cwd,
            log_dir=str(home / "logs" / self.id),
            job_dir=str(home / "jobs"),
            tmp_root=tempfile.gettempdir(),
            hang_timeout_s=self.hang_timeout,
            ttl_s=self.ttl,
            name=self.name,
        )

    def _provisioned(self) -> Plan:
        request = self._request()
        given = self.provider.provision(request, self._say)
        with given_back_on_failure(self.provider, given):
            plan = self.provider.plan(request, wait_until_ready(self.provider, given, self._say))
        for line in plan.lines:
            self._say(line)
        return plan

    def _say(self, line: str) -> None:
        if self.logs != "quiet":
            print(f"atoll: {line}", file=sys.stderr)

    # -- facts ----------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Can calls be made?"""
        return self._backend is not None

    @property
    def world_size(self) -> int:
        """Ranks of the pool."""
        return self._running().world_size

    @property
    def log_dir(self) -> Path:
        """Where every rank's output is kept, as ``rank{N}.out`` and ``rank{N}.err``."""
        self._running()
        return atoll_home() / "logs" / self.id

    def __repr__(self) -> str:
        state = f"up, {self._backend.world_size} ranks" if self._backend is not None else "down"
        return f"<ComputePool {self.name or self.id or self.provider.name}: {self.nodes} nodes, {state}>"

    # -- calls ----------------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> RankResults[R]:
        """Run on every rank at once; the same as ``function(...) @ pool``."""
        results: RankResults[R] = self._wait(self.submit_call(function, args, kwargs, whole_gang=True))
        return results

    def run_one(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
        """Run on one rank, with world size 1; the same as ``function(...) >> pool``."""
        future = self.submit_call(function, args, kwargs, whole_gang=False)
        try:
            result: R = future.result()
        except BaseException:
            self._abandon(future)
            raise
        return result

    @overload
    def submit(
        self, function: Callable[..., R], /, *args: Any, detach: Literal[True], everywhere: bool = ..., **kwargs: Any
    ) -> str: ...
    @overload
    def submit(
        self, function: Callable[..., R], /, *args: Any, everywhere: Literal[True], **kwargs: Any
    ) -> CallFuture[RankResults[R]]: ...
    @overload
    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> CallFuture[R]: ...
    def submit(
        self, function: Callable[..., Any], /, *args: Any, everywhere: bool = False, detach: bool = False, **kwargs: Any
    ) -> Any:
        """Start a call on one rank, or with ``everywhere=True`` on every rank, in the background.

        Returns a ``concurrent.futures.Future`` whose ``cancel()`` also stops a call that runs. With ``detach=True``
        the call outlives this process, in a named pool, and its id is returned: ``sky.result(id)`` gives the result
        in any process, then or later.

        Raises:
            ConfigError: ``detach=True`` on a pool without a name.
        """
        everywhere = check_truth("everywhere", everywhere)
        if not check_truth("detach", detach):
            return self.submit_call(function, args, kwargs, whole_gang=everywhere)
        backend = self._running()
        if not isinstance(backend, Attached):
            raise ConfigError(
                "detach=True needs a pool that outlives this process: give it a name, ComputePool(name='my-pool', ...)"
            )
        future = self.submit_call(function, args, kwargs, whole_gang=everywhere, start=backend.submit_detached)
        return future.job_id

    def map(
        self,
        function: Callable[..., R],
        /,
        *iterables: Iterable[Any],
        ordered: bool = True,
        chunksize: int | None = None,
    ) -> Iterator[R]:
        """Run the function on each item, spread over the ranks, each with world size 1.

        Args:
            iterables: one for each argument; may be endless, they are read as ranks become free.
            ordered: give results in the order of the items; False gives them as they complete.
            chunksize: items sent at a time; None adapts it to how long they take. A ``timeout`` holds for a chunk.

        Raises:
            Exception: what the function raised, at that item's place; items after it are dropped.
        """
        if not iterables:
            raise UsageError("map needs at least one iterable of items: pool.map(f, items)")
        self._running()
        if not callable(function):
            raise UsageError(not_a_function(function))
        items = zip_items(name_of(unwrap(function)), iterables)
        return Mapped(self._submit_chunk(function), function, items, self.world_size, ordered, chunksize)

    def _submit_chunk(
        self, function: Callable[..., Any]
    ) -> Callable[[Callable[..., Any], tuple[Any, ...]], CallFuture[Any]]:
        options = getattr(function, "__atoll_options__", None)
        return lambda chunk, args: self.submit_call(chunk, args, {}, whole_gang=False, options=options)

    def submit_call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        whole_gang: bool,
        options: Any = None,
        start: Callable[[Call], object] | None = None,
    ) -> CallFuture[Any]:
        """Start a call; what the operators and the methods above are made of.

        Args:
            options: of the decorator, where ``function`` is not what was decorated.
            start: what starts it, in place of the pool.
        """
        backend = self._backend
        if backend is None or self._pid != os.getpid():
            backend = self._running()
        options = options or getattr(function, "__atoll_options__", None)
        raw = getattr(function, "__atoll_function__", function)
        if not callable(raw):
            raise UsageError(not_a_function(raw))
        timeout, retries = self.timeout, self.retries
        if options is not None:
            timeout = timeout if options.timeout is None else options.timeout
            retries = retries if options.retries is None else options.retries
        shipped, arguments = serialize_call(raw, args, kwargs, backend.arena, self._modules)
        path = None
        if not self._elsewhere:
            path = self._imports.current if sys.path == self._imports.seen else self._imports.now()
        job_id = f"{random_bits(48):012x}"
        name: str = getattr(raw, "__qualname__", None) or name_of(raw)
        fresh: bool = getattr(raw, "__atoll_fresh__", False)
        request = Request(shipped, arguments, whole_gang, name, timeout, retries, path, job_id, fresh)
        future: CallFuture[Any] = CallFuture(backend, request, self._node_of)
        if start is not None:
            start(future.call)
        else:
            backend.handle(Submit(future.call))
        if future.call.done and not future.call.number:  # refused: the pool is down, or can't go on
            raise future.call.error or PoolClosed("the pool is down")
        return future

    def wait(self, futures: Sequence[CallFuture[Any]]) -> list[Any]:
        """The results of several calls in their order; the first failure cancels the others."""
        try:
            return [self._wait(future) for future in futures]
        except BaseException:
            for future in reversed(futures):  # those that wait first: none of them is to start
                future.cancel()
            wait_for(futures, 2.0)
            raise

    def _wait(self, future: CallFuture[Any]) -> Any:
        try:
            return future.result()
        except BaseException:
            self._abandon(future)
            raise

    @staticmethod
    def _abandon(future: CallFuture[Any]) -> None:
        """Cancel a call where it was the wait for it that ended, by Ctrl-C or a signal handler's exception."""
        if not future.done():
            future.cancel()
            wait_for([future], 2.0)

    def _running(self) -> _Stoppable:
        backend = self._backend
        if backend is not None and self._pid != os.getpid():
            raise PoolClosed(
                "this process was forked from the one that started the pool, and can't use it: both would read the "
                "same answers. Start a pool here, or make the calls in the parent"
            )
        if backend is None:
            raise PoolClosed(
                "the pool is not up: make calls inside `with sky.ComputePool(...) as pool:`, or call pool.up() first"
            )
        return backend

    # -- what people type by mistake --------------------------------------------------------------------------------

    __array_ufunc__ = None  # so that NumPy leaves `array @ pool` to us

    def __rmatmul__(self, other: object) -> NoReturn:
        raise UsageError(not_a_call(other, "@"))

    def __rrshift__(self, other: object) -> NoReturn:
        raise UsageError(not_a_call(other, ">>"))

    def __rand__(self, other: object) -> NoReturn:
        raise UsageError(not_a_call(other, ">>"))

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a ComputePool lives in the process that made it and can't travel to a rank: a task that waited for its "
            "own pool could wait for ever. Dispatch from the driver, or use pool.map there"
        )


def _environment(environment: Environment, world_size: int) -> dict[str, str]:
    """The user's environment with what a rank needs; what the user set himself stays."""
    env = dict(os.environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // world_size)))
    env.update(environment.env)
    return env
