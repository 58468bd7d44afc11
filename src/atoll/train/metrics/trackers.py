"""TensorBoard, Weights & Biases and MLflow: the figures of a run in the user's own tracker.

A run that goes on after a stop goes on as the same run there: what a tracker calls it is kept in ``trackers.json``
under ``output_dir``. Only the run that was opened here is ended; another one that the process has open is not touched.
Values come from the user's environment as each tracker reads it (``WANDB_API_KEY``, ``MLFLOW_TRACKING_URI``, ...).
"""

from __future__ import annotations

import importlib
import json
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.paths import write_atomic
from atoll.core.secrets import redact
from atoll.train.events import Event, RunEnded, RunStarted, StepDone, Validated
from atoll.train.metrics.reporter import Reporter, ReporterFailed
from atoll.train.recipe.keys import flat
from atoll.train.recipe.schema import Recipe

_FILE = "trackers.json"
_QUERY = re.compile(r"(?<=[a-z0-9]://)([^\s?]+)\?\S+")
_DRAWN = {
    "train": ("loss", "lr", "grad_norm", "tokens", "samples"),
    "speed": ("tokens_per_s", "tokens_per_s_per_gpu", "step_s", "step_spread_s", "data_wait_s", "mfu"),
}
_WANDB_FINISH_S = 60.0
_MLFLOW_BATCH = 900  # metrics a request; servers take 1,000
_MLFLOW_PAUSE_S = 1.0  # between two requests
_MLFLOW_CLOSE_S = 30.0
_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


def open_trackers(recipe: Recipe, output_dir: str) -> list[Reporter]:
    """The trackers of ``[metrics] trackers``. Each opens its run when the training starts.

    Raises:
        ConfigError: one is not installed, has no credentials, or does not know its address; the text says what to do.
    """
    run = TrackedRun(output_dir, recipe.name, recipe.metrics.project, public(recipe.model_dump(mode="json")))
    opened: list[Reporter] = []
    for each in dict.fromkeys(recipe.metrics.trackers):
        module, tracker = _TRACKERS[each]
        try:
            library = importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f'[metrics] trackers = ["{each}"], but it cannot be imported here ({error}): '
                f'pip install "atoll[{each}]", or take it out of the list'
            ) from None
        opened.append(tracker(library, run))
    return opened


@dataclass(frozen=True)
class TrackedRun:
    """What trackers are told of a run, and what each of them calls it, which ``trackers.json`` keeps."""

    output_dir: str
    name: str
    project: str  # W&B's project, MLflow's experiment
    recipe: Mapping[str, Any]  # without its secrets

    @staticmethod
    def facts(started: RunStarted) -> dict[str, Any]:
        """What a tracker notes of the run beside its recipe."""
        return {key: getattr(started, key) for key in ("parameters", "layout", "device", "world_size")}

    def identity(self, tracker: str) -> str | None:
        """The run's identity there, or None where it has none yet."""
        return self._known().get(tracker)

    def keep_identity(self, tracker: str, identity: str) -> None:
        """Keep it for the next start."""
        text = json.dumps({**self._known(), tracker: identity}, indent=2)
        write_atomic(Path(self.output_dir) / _FILE, text.encode() + b"\n", mode=0o644)

    def _known(self) -> dict[str, str]:
        path = Path(self.output_dir) / _FILE
        known: dict[str, str] = json.loads(path.read_bytes()) if path.exists() else {}
        return known


def public(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without what may be secret: where to notify, credentials and signatures in URLs."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return _QUERY.sub(r"\1?****", redact(value))
        if isinstance(value, Mapping):
            return {key: clean(each) for key, each in value.items() if key != "notify"}
        return [clean(each) for each in value] if isinstance(value, list | tuple) else value

    cleaned: dict[str, Any] = clean(recipe)
    return cleaned


def figures(event: Event) -> dict[str, float]:
    """What trackers draw of an event, by name; the part before the slash groups the pictures."""
    if isinstance(event, Validated):
        return {f"validation/{name}": value for name, value in {**event.metrics, "loss": event.loss}.items()}
    if not isinstance(event, StepDone):
        return {}
    values: dict[str, Any] = {f"train/{name}": value for name, value in event.metrics.items()}
    values |= {f"{group}/{name}": getattr(event, name) for group, names in _DRAWN.items() for name in names}
    values["memory/peak_bytes"] = event.memory_bytes
    return {name: float(value) for name, value in values.items() if value is not None}


class TensorBoard(Reporter):
    """Event files under ``<output_dir>/tensorboard``."""

    def __init__(self, library: ModuleType, run: TrackedRun) -> None:
        self._library = library
        self._folder = Path(run.output_dir) / "tensorboard"
        self._recipe = run.recipe
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            # Steps from here on that an earlier run wrote are done again: TensorBoard hides the old ones.
            purge = event.first_step + 1 if event.first_step or self._folder.exists() else None
            self._writer = self._library.SummaryWriter(str(self._folder), purge_step=purge, flush_secs=10)
            text = json.dumps(self._recipe, indent=2, ensure_ascii=False).replace("\n", "\n    ")
            self._writer.add_text("recipe", f"    {text}", global_step=event.first_step + 1)
        elif self._writer is not None:
            for name, value in figures(event).items():
                self._writer.add_scalar(name, value, getattr(event, "step", 0))
            if isinstance(event, RunEnded):
                self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class WeightsAndBiases(Reporter):
    """A W&B run. Steps that were logged before a stop and are done again are the same figures: W&B keeps the first."""

    def __init__(self, library: ModuleType, run: TrackedRun) -> None:
        self._wandb: Any = library
        self._about = run
        self._run: Any = None
        self._status = "failed"
        try:
            # Never a prompt: a rank has no keyboard.
            ready = self._wandb.login(prompt=False, verify=False)
        except self._wandb.errors.Error as error:
            raise ConfigError(f'[metrics] trackers = ["wandb"]: {error}') from None
        if not ready and self._wandb.setup().settings.mode not in ("offline", "dryrun", "disabled"):
            raise ConfigError(
                '[metrics] trackers = ["wandb"]: W&B has no API key: wandb login, WANDB_API_KEY or WANDB_MODE=offline'
            )

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._open(event)
        elif self._run is None:
            return
        elif isinstance(event, RunEnded):
            self._status = event.status
            self._run.summary["status"] = event.status
        elif values := figures(event):
            self._run.log(values, step=getattr(event, "step", 0))

    def _open(self, event: RunStarted) -> None:
        identity = self._about.identity("wandb")
        if identity is None:
            identity = secrets.token_hex(4)
            self._about.keep_identity("wandb", identity)
        settings = self._wandb.Settings(
            silent=True,  # the terminal belongs to the console
            console="off",
            # Neither the command line nor the sources leave the machine: they may hold secrets.
            x_disable_meta=True,
            disable_git=True,
            disable_code=True,
            finish_timeout=_WANDB_FINISH_S,
            finish_timeout_raises=True,
        )
        try:
            self._run = self._wandb.init(
                project=self._about.project,
                name=self._about.name,
                id=identity,
                resume="allow",
                dir=self._about.output_dir,
                config={**self._about.recipe, **self._about.facts(event)},
                allow_val_change=True,
                reinit="create_new",  # beside a run that the process may have open
                settings=settings,
            )
        except self._wandb.errors.Error as error:
            raise ReporterFailed(f"W&B is off for this run: {error}") from None

    def close(self) -> None:
        """End the run and wait, within limits, until the server has everything."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish(exit_code=0 if self._status in ("finished", "stopped") else 1)
        except (self._wandb.errors.Error, TimeoutError) as error:
            folder = f"{self._about.output_dir}/wandb"
            raise ReporterFailed(
                f"W&B did not take the last figures ({error}): `wandb sync` sends them from {folder}"
            ) from None


class MLflow(Reporter):
    """A run of MLflow's experiment ``project``. After a stop it goes on; steps that it has already are not sent again.

    Its client talks to the server in the caller's thread, so a thread of its own does that: the training never waits.
    A server that stays away, or refuses, is told of at the next event. (MLflow's own asynchronous logging waits at the
    end without a limit, and keeps steps that are done again twice.)
    """

    def __init__(self, library: ModuleType, run: TrackedRun) -> None:
        self._mlflow: Any = library
        self._about = run
        self._waiting: deque[tuple[int, Event]] = deque()  # with the time in ms
        self._ended = threading.Event()
        self._failure: str | None = None
        self._status = "FAILED"
        self._thread: threading.Thread | None = None
        try:
            self._client = self._mlflow.MlflowClient()
            if not self._client.tracking_uri.startswith(("http", "databricks")):
                self._client.get_experiment_by_name(run.project)  # a folder or database: known at once whether it opens
        except self._mlflow.exceptions.MlflowException as error:
            raise ConfigError(
                f'[metrics] trackers = ["mlflow"]: {redact(str(error))} (MLFLOW_TRACKING_URI says where it writes)'
            ) from None

    def __call__(self, event: Event) -> None:
        if self._failure is not None:
            raise ReporterFailed(self._failure)
        if isinstance(event, RunStarted):
            self._thread = threading.Thread(target=self._send, args=(event,), name="atoll-mlflow", daemon=True)
            self._thread.start()
        elif isinstance(event, RunEnded):
            self._status = _MLFLOW_STATUS.get(event.status, "FAILED")
        else:
            self._waiting.append((int(time.time() * 1000), event))

    def close(self) -> None:
        """Send what is left and end the run.

        Raises:
            ReporterFailed: the server did not take it all in time.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ended.set()
        thread.join(_MLFLOW_CLOSE_S)
        if thread.is_alive():
            raise ReporterFailed(f"MLflow did not take the last figures within {_MLFLOW_CLOSE_S:g} s")
        if self._failure is not None:
            raise ReporterFailed(self._failure)

    def _send(self, started: RunStarted) -> None:
        """The thread: opens the run, sends what waits once a second, ends the run."""
        try:
            run_id, known = self._open(started)
            ended = False
            while not ended:
                ended = self._ended.wait(_MLFLOW_PAUSE_S)
                batch = []
                while self._waiting:
                    at_ms, event = self._waiting.popleft()
                    step = getattr(event, "step", 0)
                    new = {name: value for name, value in figures(event).items() if step > known.get(name, -1)}
                    batch += [self._mlflow.entities.Metric(name, value, at_ms, step) for name, value in new.items()]
                for i in range(0, len(batch), _MLFLOW_BATCH):
                    self._client.log_batch(run_id, metrics=batch[i : i + _MLFLOW_BATCH])
            self._client.set_terminated(run_id, status=self._status)
        except (self._mlflow.exceptions.MlflowException, OSError, ValueError) as error:
            self._failure = f"MLflow is off from here on: {' '.join(redact(str(error)).split())}"

    def _open(self, started: RunStarted) -> tuple[str, dict[str, int]]:
        """The run's id, and the last step that it has of each figure."""
        client, project = self._client, self._about.project
        run_id = self._about.identity("mlflow")
        if run_id is not None:
            run = client.get_run(run_id)
            client.update_run(run_id, status="RUNNING")
            histories = {name: client.get_metric_history(run_id, name) for name in run.data.metrics}
            return run_id, {name: max(each.step for each in found) for name, found in histories.items() if found}
        experiment = client.get_experiment_by_name(project)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(project)
        run_id = client.create_run(experiment_id, run_name=self._about.name).info.run_id
        self._about.keep_identity("mlflow", run_id)
        values = {".".join(path): value for path, value in flat(self._about.recipe) if value is not None}
        values |= self._about.facts(started)
        params = [self._mlflow.entities.Param(key, str(value)[:500]) for key, value in values.items()]
        for i in range(0, len(params), 100):  # what servers take at a time
            client.log_batch(run_id, params=params[i : i + 100])
        return run_id, {}


_TRACKERS: dict[str, tuple[str, Callable[[ModuleType, TrackedRun], Reporter]]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "wandb": ("wandb", WeightsAndBiases),
    "mlflow": ("mlflow", MLflow),
}
