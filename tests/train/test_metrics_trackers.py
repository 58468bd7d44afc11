"""Trackers with their real libraries: TensorBoard's event files, W&B offline, MLflow's file store."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import leaks
from atoll.core.errors import ConfigError
from atoll.train.events import Event, Note, RunEnded, RunStarted, StepDone, Validated
from atoll.train.metrics.reporter import Reporter, ReporterFailed, Reporters
from atoll.train.metrics.trackers import open_trackers, public
from atoll.train.recipe.schema import DataSection, MetricsSection, Recipe

SECRET = "hunter2"
RECIPE = Recipe(
    name="tiny",
    data=DataSection(path=[f"s3://me:{SECRET}@bucket/a", f"https://host/b.txt?X-Signature={SECRET}"]),
    metrics=MetricsSection(project="atoll-test", notify=f"https://hooks.example/{SECRET}"),
)


def opened(names: list[str], output_dir: Path) -> list[Reporter]:
    metrics = RECIPE.metrics.model_copy(update={"trackers": names})
    return open_trackers(RECIPE.model_copy(update={"metrics": metrics}), str(output_dir))


def session(first_step: int, last: int, lr: float) -> list[Event]:
    events: list[Event] = [RunStarted("tiny", "out", 1000, "one rank", "CPU", 1, first_step, 6, 100)]
    for step in range(first_step + 1, last + 1):
        events.append(StepDone(step, 100 * step, step, 3.0 - step / 10, lr, 1.0, 50.0, 50.0, 2.0, 0.1, 1 << 20))
    events.append(Validated(last, 3.5, 100, 0.1))
    return events


def play(names: list[str], output_dir: Path, first_step: int, last: int, lr: float, status: str | None) -> None:
    """A session, as a fresh process would have it; without a status it ends as if it were killed."""
    for tracker in opened(names, output_dir):
        for event in session(first_step, last, lr):
            tracker(event)
        if status is not None:
            tracker(RunEnded(status, last, 2.5, 100 * last, 1.0))
        tracker.close()
        tracker.close()


def holds_secret(folder: Path) -> bool:
    return any(SECRET.encode() in file.read_bytes() for file in folder.rglob("*") if file.is_file())


# ------------------------------------------------------------------------------------------------- TensorBoard
def test_tensorboard_shows_one_curve_over_a_stop(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play(["tensorboard"], tmp_path, 0, 5, 1e-3, None)
    play(["tensorboard"], tmp_path, 3, 6, 5e-4, "finished")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/lr", "validation/loss", "speed/tokens_per_s", "memory/peak_bytes"} <= set(
        events.Tags()["scalars"]
    )
    lrs = events.Scalars("train/lr")
    assert [each.step for each in lrs] == [1, 2, 3, 4, 5, 6], "redone steps stand there once"
    assert [round(each.value, 6) for each in lrs] == [1e-3] * 3 + [5e-4] * 3
    assert [each.value for each in events.Scalars("train/loss")] == pytest.approx([2.9, 2.8, 2.7, 2.6, 2.5, 2.4])
    assert not holds_secret(tmp_path)


# ------------------------------------------------------------------------------------------------------- MLflow
@pytest.fixture
def mlflow_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = f"file://{tmp_path}/mlruns"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return uri


@pytest.mark.long
def test_mlflow_goes_on_in_the_same_run_and_leaves_others_alone(tmp_path: Path, mlflow_folder: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient()
    other = client.create_run(client.create_experiment("atoll-test")).info.run_id
    play(["mlflow"], tmp_path, 0, 5, 1e-3, None)
    run_id = json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    assert client.get_run(run_id).info.status == "FAILED"
    play(["mlflow"], tmp_path, 3, 6, 1e-3, "stopped")
    assert client.get_run(run_id).info.status == "KILLED"
    play(["mlflow"], tmp_path, 6, 6, 1e-3, "finished")
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "tiny"
    assert run.data.params["train.seq_len"] == "2048"
    assert run.data.params["layout"] == "one rank"
    history = client.get_metric_history(run_id, "train/loss")
    assert [each.step for each in history] == [1, 2, 3, 4, 5, 6]
    assert [each.value for each in history] == pytest.approx([2.9, 2.8, 2.7, 2.6, 2.5, 2.4])
    assert [each.step for each in client.get_metric_history(run_id, "validation/loss")] == [5, 6]
    assert len(client.search_runs([run.info.experiment_id])) == 2
    assert client.get_run(other).info.status == "RUNNING"
    assert not holds_secret(tmp_path)


def test_mlflow_that_cannot_write_there_refuses_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "bogus://place")
    with pytest.raises(ConfigError, match=r"mlflow.*bogus://place.*MLFLOW_TRACKING_URI"):
        opened(["mlflow"], tmp_path)


class _Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Quiet."""


def test_an_mlflow_server_that_refuses_costs_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        notes: list[str] = []
        reporters = Reporters([*opened(["mlflow"], tmp_path), _Notes(notes)])
        for event in session(0, 3, 1e-3):
            reporters(event)
        reporters.close()
        server.shutdown()
    [line] = notes
    assert "MLflow is off from here on" in line
    assert "403" in line


class _Notes:
    """Keeps the notes it gets."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note):
            self._notes.append(event.text)

    def close(self) -> None:
        """Nothing."""


# ---------------------------------------------------------------------------------------------------------- W&B
@pytest.fixture
def wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """W&B as a user without a network has it; its service is ended afterwards."""
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with leaks.keep():  # event loop and SSL contexts that the library makes at import
        import wandb
    yield wandb
    wandb.teardown()


@pytest.mark.long
def test_wandb_goes_on_under_the_same_id_and_leaves_the_users_run_open(tmp_path: Path, wandb_offline: Any) -> None:
    theirs = wandb_offline.init(project="theirs", dir=str(tmp_path / "theirs"), settings={"silent": True})
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    play(["wandb"], output_dir, 0, 5, 1e-3, "stopped")
    play(["wandb"], output_dir, 3, 6, 1e-3, "finished")
    theirs.log({"x": 1.0})  # raises where the run is over
    theirs.finish()
    identity = json.loads((output_dir / "trackers.json").read_text())["wandb"]
    files = sorted(output_dir.glob(f"wandb/offline-run-*/run-{identity}.wandb"))
    assert files
    records = [record for file in files for record in wandb_records(file)]
    logged = [json_items(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]
    steps = [int(row["train/samples"]) for row in logged if "train/samples" in row]
    assert steps == [1, 2, 3, 4, 5, 4, 5, 6]
    assert [row["validation/loss"] for row in logged if "validation/loss" in row] == [3.5, 3.5]
    configs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {config.run_id for config in configs} == {identity}
    assert {config.project for config in configs} == {"atoll-test"}
    assert {config.display_name for config in configs} == {"tiny"}
    assert not holds_secret(output_dir)


def test_wandb_without_a_key_refuses_at_the_start(
    tmp_path: Path, wandb_offline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    wandb_offline.teardown()
    with pytest.raises(ConfigError, match=r"no API key.*wandb login.*WANDB_API_KEY.*WANDB_MODE=offline"):
        opened(["wandb"], tmp_path)


def wandb_records(file: Path) -> list[Any]:
    """The records of W&B's log: after a header of 7 bytes, pieces in blocks of 32 KiB, as LevelDB's log has them."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, piece, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole one, or the last piece
            record = Record()
            record.ParseFromString(piece)
            found.append(record)
            piece = b""
    return found


def json_items(items: Any) -> dict[str, Any]:
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


# ---------------------------------------------------------------------------------------------------- all of them
@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
def test_one_that_is_not_installed_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as the import system marks a module that is not there
    with pytest.raises(ConfigError, match=rf'pip install "atoll\[{name}\]"'):
        opened([name], tmp_path)


def test_secrets_are_taken_out_of_a_recipe() -> None:
    recipe = RECIPE.model_dump(mode="json")
    cleaned = public(recipe)
    assert SECRET not in json.dumps(cleaned)
    assert cleaned["data"]["path"] == ["s3://****@bucket/a", "https://host/b.txt?****"]
    assert "notify" not in cleaned["metrics"]
    assert cleaned["train"] == recipe["train"]


def test_a_full_disk_under_a_tracker_costs_one_note(tmp_path: Path) -> None:
    [tracker] = opened(["tensorboard"], tmp_path)
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    notes: list[str] = []
    reporters = Reporters([tracker, _Notes(notes)])
    for event in session(0, 3, 1e-3):
        reporters(event)
    with contextlib.suppress(ReporterFailed):
        reporters.close()
    [line] = notes
    assert line.startswith("TensorBoard is off from here on: ")
