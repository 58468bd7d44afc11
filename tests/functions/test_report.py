"""``sky.report`` and ``sky.latest_checkpoint``: metrics while the call runs, checkpoints that outlive a rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import atoll as sky
from atoll.core.paths import atoll_home
from atoll.functions.retention import prune_jobs, prune_logs


def test_outside_a_pool_it_only_checks_its_arguments(tmp_path: Path) -> None:
    sky.report({"loss": 1.0})
    assert sky.latest_checkpoint() is None
    with pytest.raises(sky.UsageError, match="takes a dict of metrics, not float"):
        sky.report(1.0)  # type: ignore[arg-type]
    with pytest.raises(sky.UsageError, match="path of a file or folder, not dict"):
        sky.report({}, checkpoint={"model": 1})  # type: ignore[arg-type]
    with pytest.raises(sky.ConfigError, match="does not exist: write it before reporting it"):
        sky.report({}, checkpoint=tmp_path / "missing")


def test_metrics_and_checkpoints_of_file_and_folder(tmp_path: Path) -> None:
    heard: list[sky.events.Event] = []

    @sky.compute
    def train() -> list[Any]:
        rank = sky.instance_info().rank
        seen = []
        for step in (1, 2, 3):
            folder = tmp_path / f"r{rank}s{step}"
            folder.mkdir()
            (folder / "weights").write_text(f"{rank}.{step}")
            sky.report({"step": step}, checkpoint=folder, sharded=True)
            seen.append(sky.latest_checkpoint())
        return seen

    @sky.compute
    def head_only() -> str | None:
        if sky.instance_info().is_head:
            file = tmp_path / "model.pt"
            file.write_text("weights")
            sky.report({"loss": 0.5}, checkpoint=str(file))
            file.write_text("changed since")
        return None

    with sky.ComputePool(nodes=2, logs="quiet", on_event=heard.append) as pool:
        results = train() @ pool
        assert results == [[None] * 3] * 2, "only what an earlier start left counts"
        assert sorted((m["rank"], m["step"]) for m in results.metrics) == [(r, s) for r in (0, 1) for s in (1, 2, 3)]
        assert (Path(results.checkpoint or "") / "weights").read_text() in ("0.3", "1.3")
        single = head_only() @ pool
        assert single.metrics == [{"loss": 0.5, "rank": 0}]
    assert Path(single.checkpoint or "").read_text() == "weights", "it survives its pool, as it was when reported"
    reported = [event for event in heard if isinstance(event, sky.events.MetricsReported)]
    assert len(reported) == 7
    assert {event.job_id for event in reported} == {results.job_id, single.job_id}


def test_a_gang_that_lost_a_rank_starts_again_from_its_last_checkpoint(tmp_path: Path) -> None:
    heard: list[sky.events.Event] = []

    @sky.compute(retries=1)
    def train() -> Any:
        import shutil
        import time

        info = sky.instance_info()
        latest = sky.latest_checkpoint()
        start = int((latest / "step").read_text()) if latest else 0
        first = not (tmp_path / "died").exists()
        for step in range(start + 1, 6):
            folder = tmp_path / f"work{info.rank}"
            folder.mkdir()
            (folder / "step").write_text(str(step))
            if first and step == 4 and info.rank == 1:
                # Killed in the middle of copying its fourth checkpoint: a torn one lies beside the whole ones.
                torn = latest_folder() / "00000004" / f".rank1.{os.getpid()}" / "work1"
                torn.mkdir(parents=True)
                while not (tmp_path / "ahead").exists():
                    time.sleep(0.01)
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            sky.report({"step": step, "first": first}, checkpoint=folder, sharded=True)
            shutil.rmtree(folder)
            if first and step == 4:
                (tmp_path / "ahead").touch()  # rank 0 is a step further than what both have
                time.sleep(1000)
        return start, info.rank, info.world_size

    def latest_folder() -> Path:
        from atoll.core.context import current

        context = current()
        assert context is not None
        assert context.checkpoint_dir is not None
        return Path(context.checkpoint_dir)

    with sky.ComputePool(nodes=2, logs="quiet", on_event=heard.append) as pool:
        results = _clean_between(tmp_path, train) @ pool
        starts = {start for start, *_ in results}
        assert starts == {3}, "both ranks go on after the last step that both had kept"
        assert [(rank, world) for _, rank, world in results] == [(0, 2), (1, 2)]
    for rank in (0, 1):
        assert [m["step"] for m in results.metrics if not m["first"] and m["rank"] == rank] == [4, 5]
    retried = [event for event in heard if isinstance(event, sky.events.CallRetried)]
    assert [event.attempt for event in retried] == [1]
    assert "SIGKILL" in retried[0].reason


def _clean_between(tmp_path: Path, function: Any) -> Any:
    """The call, with the working folder of a killed attempt removed when the next begins."""

    @sky.compute(retries=1)
    def clean() -> Any:
        import shutil

        shutil.rmtree(tmp_path / f"work{sky.instance_info().rank}", ignore_errors=True)
        return function.local()

    return clean()


def test_parts_of_two_attempts_do_not_mix(tmp_path: Path) -> None:
    @sky.compute(retries=2)
    def train() -> Any:
        import time

        rank = sky.instance_info().rank
        latest = sky.latest_checkpoint()
        found = latest.read_text() if latest else None
        attempt = sum((tmp_path / f"attempt{n}.{rank}").exists() for n in range(3))
        (tmp_path / f"attempt{attempt}.{rank}").touch()
        part = tmp_path / f"part{rank}"
        for step in (1, 2):
            part.write_text(f"a{attempt}s{step}")
            if attempt == 0 and rank == 1 and step == 2:
                while not (tmp_path / "ahead").exists():
                    time.sleep(0.01)
                os._exit(3)
            sky.report({}, checkpoint=part, sharded=True)
        if rank == 0 and attempt == 0:
            (tmp_path / "ahead").touch()  # rank 0 has kept a second part that rank 1 never will
            time.sleep(1000)
        if attempt == 1 and rank == 1:
            os._exit(4)
        if attempt == 1:
            time.sleep(1000)
        return found

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        assert train() @ pool == ["a1s2", "a1s2"]


def test_a_first_part_alone_is_no_checkpoint(tmp_path: Path) -> None:
    """The other rank died before it reported any: which of them ever report can't be told from what is there."""

    @sky.compute(retries=1)
    def train() -> Path | None:
        import time

        found = sky.latest_checkpoint()
        if (tmp_path / "again").exists():
            return found
        if sky.instance_info().rank == 1:
            while not (tmp_path / "reported").exists():
                time.sleep(0.01)
            (tmp_path / "again").touch()
            os._exit(3)
        (tmp_path / "part").touch()
        sky.report({}, checkpoint=tmp_path / "part", sharded=True)
        (tmp_path / "reported").touch()
        time.sleep(1000)
        return None

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        assert train() @ pool == [None, None]


def test_parts_that_are_not_called_so_are_refused(tmp_path: Path) -> None:
    def train() -> None:
        part = tmp_path / f"part{sky.instance_info().rank}"
        part.touch()
        sky.report({}, checkpoint=part)

    with (
        sky.ComputePool(nodes=2, logs="quiet") as pool,
        pytest.raises(sky.UsageError, match=r"rank \d reported a checkpoint, and so did rank \d: .*sharded=True"),
    ):
        pool.run(train)


def test_a_call_that_runs_keeps_its_folder_however_old(tmp_path: Path) -> None:
    def train() -> None:
        import time

        (tmp_path / "state").touch()
        sky.report({}, checkpoint=tmp_path / "state")
        (tmp_path / "reported").touch()
        while not (tmp_path / "end").exists():
            time.sleep(0.01)

    with sky.ComputePool(logs="quiet") as pool:
        future = pool.submit(train)
        while not (tmp_path / "reported").exists():
            time.sleep(0.01)
        jobs = atoll_home() / "jobs"
        age(jobs / future.job_id)
        prune_jobs(jobs)
        assert (jobs / future.job_id).exists()
        (tmp_path / "end").touch()
        future.result()
        pool.run_one(int)  # the rank has cleaned up after the call before
        age(jobs / future.job_id)
        prune_jobs(jobs)
        assert not (jobs / future.job_id).exists()


def test_a_pool_that_is_up_keeps_its_logs_however_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    with sky.ComputePool(logs="quiet") as pool:
        own = pool.log_dir
        for i in range(50):
            (own.parent / f"later{i}").mkdir()
        age(own)
        prune_logs(own.parent)
        assert own.exists()
    age(own)  # its ranks wrote when they ended
    prune_logs(own.parent)
    assert not own.exists()


def age(folder: Path) -> None:
    """Make all that lies there look 15 days old."""
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (time.time() - 15 * 86400,) * 2)


def test_exceptions_are_not_retried(tmp_path: Path) -> None:
    @sky.compute(retries=3)
    def fail() -> None:
        with open(tmp_path / f"runs{sky.instance_info().rank}", "a") as file:
            file.write("x")
        raise ValueError("a bug is a bug the second time too")

    with sky.ComputePool(nodes=2, retries=3, logs="quiet") as pool, pytest.raises(ValueError, match="a bug"):
        fail() @ pool
    runs = {path.name: path.read_text() for path in tmp_path.iterdir()}  # one that comes late is stopped before it runs
    assert runs
    assert set(runs.values()) <= {"x", ""}


def test_retries_come_to_an_end(tmp_path: Path) -> None:
    @sky.compute
    def die() -> None:
        if sky.instance_info().rank == 1:
            with open(tmp_path / "runs", "a") as file:
                file.write("x")
            os._exit(9)

    with sky.ComputePool(nodes=2, retries=2, logs="quiet") as pool:
        with pytest.raises(sky.WorkerDied, match="exited with code 9") as caught:
            die() @ pool
        assert (caught.value.rank, caught.value.exit_code) == (1, 9)
        assert (tmp_path / "runs").read_text() == "xxx"
        assert pool.run(lambda: 1) == [1, 1]
