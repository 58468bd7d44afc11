"""joblib, and so scikit-learn, over the ranks of a pool: ``with sky.joblib_backend(pool):``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from atoll.core.errors import ConfigError, UsageError
from atoll.functions.compute_pool import ComputePool
from atoll.gang.futures import CallFuture


@contextlib.contextmanager
def joblib_backend(pool: ComputePool) -> Iterator[None]:
    """Within the block, ``joblib.Parallel`` and scikit-learn's ``n_jobs`` run on the ranks of a pool.

    Each batch of tasks is one call on one rank. ``n_jobs`` left out or -1 uses all ranks; 2 has two batches under way.
    What a task starts with joblib itself runs within its rank, one after the other. Arguments travel with every batch:
    give large data to a task as a path, or let the task make it.

    Args:
        pool: one that is up.

    Raises:
        ConfigError: joblib is not installed.
        UsageError: ``pool`` is none.
        PoolClosed: it is not up.
    """
    if not isinstance(pool, ComputePool):
        raise UsageError(f"joblib_backend takes a ComputePool, not {type(pool).__name__}")
    num_ranks = pool.world_size
    try:
        import joblib
    except ModuleNotFoundError as error:
        raise ConfigError(
            "sky.joblib_backend needs joblib: pip install joblib, or scikit-learn, which has it"
        ) from error
    with joblib.parallel_config(backend=_backend(pool, num_ranks), n_jobs=-1):
        yield


def _backend(pool: ComputePool, num_ranks: int) -> Any:
    from joblib.parallel import AutoBatchingMixin, ParallelBackendBase, SequentialBackend

    class PoolBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
        supports_retrieve_callback = True
        default_n_jobs = -1

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._running: set[CallFuture[Any]] = set()

        def effective_n_jobs(self, n_jobs: int | None) -> int:
            """As joblib counts: -1 is all ranks, -2 all but one."""
            if n_jobs == 0:
                raise ConfigError("n_jobs=0 has no meaning: give a number of ranks, or -1 for all of them")
            wanted = 1 if n_jobs is None else n_jobs if n_jobs > 0 else num_ranks + 1 + n_jobs
            return max(1, min(wanted, num_ranks))

        def submit(self, func: Callable[[], Any], callback: Callable[[Any], object] | None = None) -> CallFuture[Any]:
            """Run a batch of tasks on one rank."""
            future = pool.submit(func)
            self._running.add(future)
            future.add_done_callback(self._running.discard)
            if callback is not None:
                future.add_done_callback(callback)
            return future

        apply_async = submit  # as joblib before 1.5 calls it

        def retrieve_result_callback(self, out: CallFuture[Any]) -> Any:
            """What the batch gave, or raise what it raised."""
            return out.result()

        def abort_everything(self, ensure_ready: bool = True) -> None:
            """Stop what runs: its results are not taken any more."""
            for future in list(self._running):
                future.cancel()

        def get_nested_backend(self) -> tuple[Any, int | None]:
            """Tasks that use joblib themselves do so within their rank."""
            return SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None

    return PoolBackend()
