"""MLflow, whose client talks to its server in the caller's thread: here a thread of its own does that."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from atoll.core.errors import ConfigError
from atoll.core.secrets import redact
from atoll.train.events import Event, RunEnded, RunStarted
from atoll.train.metrics.reporter import Reporter, ReporterFailed
from atoll.train.metrics.tracked_run import TrackedRun, figures
from atoll.train.recipe.keys import flat

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

_BATCH = 900  # metrics a request; servers take 1,000
_PAUSE_S = 1.0  # between two requests
_CLOSE_TIMEOUT_S = 30.0
_HELD_BACK = 500_000  # figures, then the server counts as gone
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


class MLflow(Reporter):
    """A run of MLflow's experiment ``project``. After a stop it goes on; steps that it has already are not sent again.

    The training never waits for the server. One that stays away, or refuses, is told of at the next event.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self._about = run
        self._waiting: deque[tuple[str, float, int, int]] = deque()  # name, value, time in ms, step
        self._ended = threading.Event()
        self._failure: str | None = None
        self._status = "FAILED"
        self._thread: threading.Thread | None = None
        try:
            self._client: MlflowClient = MlflowClient()
            if not self._client.tracking_uri.startswith(("http", "databricks")):
                self._client.get_experiment_by_name(run.project)  # a folder or database: known at once whether it opens
        except MlflowException as error:
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
        elif self._thread is not None:
            now_ms = int(time.time() * 1000)
            for name, value in figures(event).items():
                self._waiting.append((name, value, now_ms, getattr(event, "step", 0)))
            if len(self._waiting) > _HELD_BACK:
                raise ReporterFailed(f"MLflow is off from here on: {len(self._waiting)} figures wait for its server")

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
        """The thread: opens the run, sends figures in batches, ends the run."""
        from mlflow.exceptions import MlflowException

        try:
            run_id, known = self._open(started)
            for batch in self._batches(known):
                self._client.log_batch(run_id, metrics=batch)
            self._client.set_terminated(run_id, status=self._status)
        except (MlflowException, OSError, ValueError) as error:
            reason = " ".join(redact(str(error)).split())
            self._failure = f"MLflow is off from here on: {reason}"

    def _open(self, started: RunStarted) -> tuple[str, dict[str, int]]:
        """The run's id, and the last step that it has of each figure."""
        run_id = self._about.identity("mlflow")
        if run_id is not None:
            run = self._client.get_run(run_id)
            self._client.update_run(run_id, status="RUNNING")
            histories = {name: self._client.get_metric_history(run_id, name) for name in run.data.metrics}
            return run_id, {name: max(each.step for each in found) for name, found in histories.items() if found}
        project = self._about.project
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project)
        run_id = self._client.create_run(experiment_id, run_name=self._about.name).info.run_id
        self._about.keep_identity("mlflow", run_id)
        self._log_parameters(run_id, started)
        return run_id, {}

    def _log_parameters(self, run_id: str, started: RunStarted) -> None:
        from mlflow.entities import Param

        values = {".".join(path): value for path, value in flat(self._about.recipe) if value is not None}
        values |= {"parameters": started.parameters, "layout": started.layout, "device": started.device}
        values["world_size"] = started.world_size
        params = [Param(key, str(value)[:500]) for key, value in values.items()]
        for i in range(0, len(params), 100):
            self._client.log_batch(run_id, params=params[i : i + 100])

    def _batches(self, known: Mapping[str, int]) -> Iterator[list[Metric]]:
        """What waits, once a second, without steps that the run has; ends with what was there at ``close``."""
        from mlflow.entities import Metric

        ended = False
        while not ended:
            ended = self._ended.wait(_PAUSE_S)
            batch: list[Metric] = []
            while self._waiting:
                name, value, at_ms, step = self._waiting.popleft()
                if step > known.get(name, -1):
                    batch.append(Metric(name, value, at_ms, step))
            yield from (batch[i : i + _BATCH] for i in range(0, len(batch), _BATCH))
