"""Past jobs as a tar: what travels, what does not, and what may not be written."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from atoll.core.errors import AtollError
from atoll.tasks import history
from atoll.tasks.spec import JobSpec
from atoll.tasks.store import Store


def add(store: Store) -> int:
    return store.add(JobSpec(num_nodes=1, run="true"), task_id_for=lambda job_id: f"task-{job_id}", user="me")


def test_numbers_go_on_and_logs_are_there_but_no_secrets(tmp_path: Path) -> None:
    before, after = tmp_path / "before" / "c", tmp_path / "after" / "c"
    for folder in (before, after):
        folder.mkdir(parents=True)
    with Store(after) as old:
        add(old)
    tar = io.BytesIO()
    with Store(before) as store:
        assert [add(store), add(store)] == [1, 2]
        (before / "jobs" / "1").mkdir(parents=True)
        (before / "jobs" / "1" / "run.log").write_text("said\n")
        (before / "jobs" / "1" / "secrets.json").write_text("{}")
        history.pack(before, (history.STORE, history.JOBS, "nothing"), tar)  # while it is open
    tar.seek(0)
    assert history.unpack(tar, after) == 2
    assert (after / "jobs" / "1" / "run.log").read_text() == "said\n"
    assert not (after / "jobs" / "1" / "secrets.json").exists()
    with Store(after) as store:
        assert [row.task_id for row in store.jobs()] == ["task-2", "task-1"]
        assert add(store) == 3
    tar.seek(0)
    assert history.unpack(tar, tmp_path / "logs", "jobs/1") == 1
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["run.log"]
    history.remove(before)
    assert list(before.iterdir()) == []


@pytest.mark.parametrize("name", ["../out", "/tmp/out"])
def test_nothing_is_written_outside_of_the_folder(tmp_path: Path, name: str) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    data.seek(0)
    with pytest.raises(AtollError, match="leads out of"):
        history.unpack(data, tmp_path / "in")
    assert list(tmp_path.iterdir()) == []


def test_a_tar_that_ends_early_is_told(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "log").write_bytes(b"x" * 100_000)
    tar = io.BytesIO()
    history.pack(tmp_path, ["jobs"], tar)
    with pytest.raises(AtollError, match="ended early"):
        history.unpack(io.BytesIO(tar.getvalue()[:50_000]), tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").rglob("*")] == ["jobs"]
