"""A run that is a job: what its log becomes on the screen, and what of a recipe is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.cli import train_job
from atoll.cli.train_job import TrainJob
from atoll.core.errors import ConfigError
from atoll.tasks.spec import JobStatus
from atoll.train.events import Event, Note, Validated, encode

PREFIX = "(tiny, rank=0, pid=7, ip=10.0.0.1) "


class Job:
    """A job whose log comes in pieces."""

    def __init__(self, log: str, size: int) -> None:
        data = log.encode()
        self._pieces = [data[at : at + size] for at in range(0, len(data), size)]

    def follow(self, write: Callable[[bytes], object], **_how: Any) -> JobStatus:
        for piece in self._pieces:
            write(piece)
        return JobStatus.SUCCEEDED


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_lines_and_the_result_come_out_of_the_log(size: int) -> None:
    event = Validated(step=1, loss=2.5, tokens=64, took_s=1.0)
    log = (
        "Waiting for task resources on 2 nodes.\n"
        f"{PREFIX}{json.dumps(encode(event))}\n"
        f"{PREFIX}hello\n"
        "(tiny, rank=1, pid=8, ip=10.0.0.2) é\n"
        f'{PREFIX}{{"event": "Mine", "x": 1}}\n'
        f'{PREFIX}{{"result": {{"status": "finished", "steps": 1}}}}\n'
        "✓ Job finished (status: SUCCEEDED).\n"
    )
    shown: list[Event] = []
    run = TrainJob(Job(log, size))  # type: ignore[arg-type]
    assert run.follow(shown.append) is JobStatus.SUCCEEDED
    assert shown == [
        Note("Waiting for task resources on 2 nodes."),
        event,
        Note("rank 0: hello"),
        Note("rank 1: é"),
        Note('rank 0: {"event": "Mine", "x": 1}'),
        Note("✓ Job finished (status: SUCCEEDED)."),
    ]
    assert run.result == {"status": "finished", "steps": 1}
    assert not run.began.is_set()


def test_a_recipe_is_named_as_hosts_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    (folder / "recipes").mkdir(parents=True)
    (folder / "recipes/tiny.toml").touch()
    (tmp_path / "other.toml").touch()
    monkeypatch.chdir(folder)
    sent = train_job._sent_recipe
    assert sent("recipes/tiny.toml", folder) == "recipes/tiny.toml"
    assert sent(str(folder / "recipes/tiny.toml"), folder) == "recipes/tiny.toml"
    assert sent("llama3_debug", folder) == "llama3_debug"
    monkeypatch.setenv("CONFIG_FILE", "./recipes/tiny.toml")
    assert sent(None, folder) == "recipes/tiny.toml"
    with pytest.raises(ConfigError, match="outside the current folder"):
        sent("../other.toml", folder)


def test_only_clusters_of_train_have_its_panel() -> None:
    assert train_job.is_training("train-0a1b2c")
    assert not train_job.is_training("train")
