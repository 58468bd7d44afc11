"""joblib and scikit-learn over a pool: tasks run on ranks, in order, and fail as they do in joblib."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

import atoll as sky

pytestmark = pytest.mark.leaks_per_module


def test_tasks_run_on_all_ranks_and_results_are_in_order(pool: sky.ComputePool) -> None:
    from joblib import Parallel, delayed

    def square(x: int) -> tuple[int, str]:
        time.sleep(0.01)
        return x * x, sky.instance_info().head_addr

    with sky.joblib_backend(pool):
        results = Parallel()(delayed(square)(x) for x in range(40))
        one = Parallel(n_jobs=1)(delayed(os.getpid)() for _ in range(2))
        streamed = list(Parallel(return_as="generator")(delayed(pow)(x, 2) for x in range(5)))
    assert [value for value, _ in results] == [x * x for x in range(40)]
    assert {place for _, place in results} == {"127.0.0.1", "127.0.0.2"}
    assert one == [os.getpid()] * 2, "joblib runs one job where it is called"
    assert streamed == [0, 1, 4, 9, 16]
    assert Parallel(n_jobs=1)(delayed(os.getpid)() for _ in range(1)) == [os.getpid()]


def test_what_a_task_raises_comes_back_and_the_rest_is_stopped(pool: sky.ComputePool) -> None:
    from joblib import Parallel, delayed

    def fail(x: int) -> int:
        if x == 3:
            raise LookupError("task 3")
        time.sleep(0.05 if x < 3 else 30)
        return x

    started = time.monotonic()
    with sky.joblib_backend(pool), pytest.raises(LookupError, match="task 3"):
        Parallel(batch_size=1)(delayed(fail)(x) for x in range(8))
    assert time.monotonic() - started < 10
    assert pool.run_one(abs, -1) == 1


def test_tasks_that_use_joblib_themselves_do_it_within_their_rank(pool: sky.ComputePool) -> None:
    from joblib import Parallel, delayed

    def outer(x: int) -> list[int]:
        return list(Parallel(n_jobs=2)(delayed(abs)(-x * y) for y in range(3)))

    with sky.joblib_backend(pool):
        assert Parallel()(delayed(outer)(x) for x in range(3)) == [[0, 0, 0], [0, 1, 2], [0, 2, 4]]


@pytest.mark.long  # scikit-learn is loaded on every rank
def test_a_grid_search_is_as_without_a_pool(pool: sky.ComputePool) -> None:
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    def best(n_jobs: int | None) -> Any:
        search = GridSearchCV(LogisticRegression(max_iter=500), {"C": [0.01, 1.0]}, cv=3, n_jobs=n_jobs)
        search.fit(*load_iris(return_X_y=True))
        return search.best_params_, search.cv_results_["mean_test_score"].tolist()

    alone = best(1)
    with sky.joblib_backend(pool):
        assert best(None) == alone


def test_it_says_what_is_missing(pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sky.UsageError, match="takes a ComputePool, not int"), sky.joblib_backend(3):  # type: ignore[arg-type]
        pass
    with pytest.raises(sky.PoolClosed), sky.joblib_backend(sky.ComputePool()):
        pass
    monkeypatch.setitem(__import__("sys").modules, "joblib", None)
    with pytest.raises(sky.ConfigError, match="pip install joblib"), sky.joblib_backend(pool):
        pass
