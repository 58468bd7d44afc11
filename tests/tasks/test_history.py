"""Past jobs as a tar: what travels, what does not, and what may not be written."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path

import pytest

from atoll.core.errors import AtollError
from atoll.tasks import history
from atoll.tasks.spec import JobSpec
from atoll.tasks.store import Store


def add(store: Store, of: str = "task") -> int:
    return store.add(JobSpec(num_nodes=1, run="true"), task_id_for=lambda job_id: f"{of}-{job_id}", user="me")


def cluster(folder: Path, num_jobs: int, of: str = "task") -> Path:
    """A folder with so many past jobs."""
    folder.mkdir(parents=True)
    with Store(folder) as store:
        for _ in range(num_jobs):
            at = folder / "jobs" / str(add(store, of))
            at.mkdir(parents=True)
            (at / "run.log").write_text(f"said by {of}\n")
            (at / "variables.json").write_text("{}")
    return folder


def ids(folder: Path) -> list[str]:
    with Store(folder) as store:
        return [row.task_id for row in store.jobs(newest_first=False)]


def packed(folder: Path, *names: str) -> io.BytesIO:
    tar = io.BytesIO()
    history.pack(folder, names or (history.STORE, history.JOBS, "nothing"), tar)
    tar.seek(0)
    return tar


def test_numbers_go_on_and_logs_are_there_but_no_variables(tmp_path: Path) -> None:
    before, after = cluster(tmp_path / "before" / "c", 2), tmp_path / "after" / "c"
    with Store(before):  # while it is open
        tar = packed(before)
    assert history.take(tar, after) == (3, None)
    assert (after / "jobs" / "1" / "run.log").read_text() == "said by task\n"
    assert not list(after.rglob("variables.json"))
    assert sorted(path.name for path in after.iterdir()) == ["jobs", "jobs.db"]
    with Store(after) as store:
        assert add(store) == 3
    assert history.unpack(packed(before), tmp_path / "logs", "jobs/1") == 1
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["run.log"]
    assert ids(before) == ["task-1", "task-2"]  # it stays


def test_a_store_is_replaced_only_by_one_that_goes_on_with_it(tmp_path: Path) -> None:
    short, long, empty = (cluster(tmp_path / str(num) / "c", num) for num in (1, 3, 0))
    assert history.take(packed(long), long) == (0, None)  # the same folder, by whatever name
    assert history.take(packed(short), long) == (0, None)
    assert history.take(packed(empty), long) == (0, None)
    assert ids(long) == ["task-1", "task-2", "task-3"]
    assert (long / "jobs" / "3" / "run.log").exists()
    assert history.take(packed(long), short) == (4, None)
    assert history.take(packed(long), empty) == (4, None)
    assert ids(short) == ids(empty) == ids(long)
    other = cluster(tmp_path / "other" / "c", 5, "other")
    (other / "cluster.json").write_text("{}")
    num_files, aside = history.take(packed(long), other)
    assert (num_files, ids(other)) == (4, ids(long))
    assert aside is not None
    assert len(ids(aside)) == 5
    assert (aside / "jobs" / "5" / "run.log").read_text() == "said by other\n"
    assert (other / "cluster.json").exists()


@pytest.mark.parametrize("name", ["../out", "/tmp/out"])
def test_nothing_is_written_outside_of_the_folder(tmp_path: Path, name: str) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    data.seek(0)
    with pytest.raises(AtollError, match="leads out of"):
        history.unpack(data, tmp_path / "in")
    assert list(tmp_path.iterdir()) == []


def test_a_tar_that_ends_early_is_told_and_changes_nothing(tmp_path: Path) -> None:
    before, after = cluster(tmp_path / "before" / "c", 2), cluster(tmp_path / "after" / "c", 1)
    (before / "jobs" / "2" / "large").write_bytes(b"x" * 100_000)
    with pytest.raises(AtollError, match="ended early"):
        history.take(io.BytesIO(packed(before).getvalue()[:90_000]), after)
    assert ids(after) == ["task-1"]
    assert sorted(path.name for path in after.iterdir()) == ["jobs", "jobs.db"]


@pytest.mark.parametrize("after", range(1, 8))
def test_numbers_go_on_after_a_move_that_was_killed_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    here, there = cluster(tmp_path / "here", 3), cluster(tmp_path / "there", 2, "older")
    real, done = Path.rename, []

    def rename(self: Path, to: Path) -> Path:
        if len(done) == after:
            raise KeyboardInterrupt  # as SIGKILL: nothing is undone
        done.append(self)
        return real(self, to)

    tar = packed(here)
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    with monkeypatch.context() as killed:
        killed.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            history.take(tar, there)
    with Store(there) as store:
        assert add(store) > 2
