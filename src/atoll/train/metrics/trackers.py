"""TensorBoard, Weights & Biases and MLflow: the figures of a run in the user's own tracker.

A run that goes on after a stop goes on as the same run there: what a tracker calls it is kept in ``trackers.json``
under ``output_dir``. Only the run that was opened here is ended; another one that the process has open is not touched.
Values come from the user's environment as each tracker reads it (``WANDB_API_KEY``, ``MLFLOW_TRACKING_URI``, ...).
"""

from __future__ import annotations

import importlib
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from atoll.core.errors import ConfigError
from atoll.train.events import Event, RunEnded, RunStarted
from atoll.train.metrics.mlflow import MLflow
from atoll.train.metrics.reporter import Reporter, ReporterFailed
from atoll.train.metrics.tracked_run import TrackedRun, figures, public
from atoll.train.recipe.schema import Recipe

_FINISH_TIMEOUT_S = 60.0


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
            finish_timeout=_FINISH_TIMEOUT_S,
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


_TRACKERS: dict[str, tuple[str, Callable[[ModuleType, TrackedRun], Reporter]]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "wandb": ("wandb", WeightsAndBiases),
    "mlflow": ("mlflow", MLflow),
}
