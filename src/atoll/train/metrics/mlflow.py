"""MLflow, whose client talks to its server in the caller's thread: here a thread of its own does that.

(MLflow's own asynchronous logging waits at the end without a limit, and keeps steps that are done again twice.)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from types import ModuleType
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.secrets import redact
from atoll.train.events import Event, RunEnded, RunStarted
from atoll.train.metrics.reporter import Reporter, ReporterFailed
from atoll.train.metrics.tracked_run import TrackedRun, figures
from atoll.train.recipe.keys import flat

_BATCH = 900  # metrics a request; servers take 1,000
_PAUSE_S = 1.0  # between two requests
_CLOSE_TIMEOUT_S = 30.0
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


class MLflow(Reporter):
    """A run of MLflow's experiment ``project``. After a stop it goes on; steps that it has already are not sent again.

    The training never waits for the server. One that stays away, or refuses, is told of at the next event.
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
            self._status = _STATUS.get(event.status, "FAILED")
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
        thread.join(_CLOSE_TIMEOUT_S)
        if thread.is_alive():
            raise ReporterFailed(f"MLflow did not take the last figures within {_CLOSE_TIMEOUT_S:g} s")
        if self._failure is not None:
            raise ReporterFailed(self._failure)

    def _send(self, started: RunStarted) -> None:
        """The thread: opens the run, sends what waits once a second, ends the run."""
        try:
            run_id, known = self._open(started)
            ended = False
            while not ended:
                ended = self._ended.wait(_PAUSE_S)
                batch = []
                while self._waiting:
                    at_ms, event = self._waiting.popleft()
                    step = getattr(event, "step", 0)
                    new = {name: value for name, value in figures(event).items() if step > known.get(name, -1)}
                    batch += [self._mlflow.entities.Metric(name, value, at_ms, step) for name, value in new.items()]
                for i in range(0, len(batch), _BATCH):
                    self._client.log_batch(run_id, metrics=batch[i : i + _BATCH])
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
