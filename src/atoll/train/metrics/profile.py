"""``torch.profiler`` traces of the steps that ``[metrics.profile]`` asks for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerAction, profile

from atoll.core.paths import sweep_temporary, temporary_beside
from atoll.train.recipe.schema import ProfileSection


class StepProfiler:
    """Traces a few steps of this session into ``<folder>/profile/rank<rank>.pt.trace.json.gz``.

    ``with profiler:`` stands around the loop and ``profiler.step()`` ends each step. Steps are counted from 1 in every
    session, so a resumed run is traced as well. Outside the traced steps, and without a section, nothing happens.

    Args:
        say: gets a line when the trace is there, or when it could not be written, which does not end the training.
    """

    def __init__(
        self, section: ProfileSection | None, folder: str | os.PathLike[str], rank: int, *, say: Callable[[str], None]
    ) -> None:
        self.path = Path(folder) / "profile" / f"rank{rank}.pt.trace.json.gz"
        self._say = say
        self._first = section.start - 1 if section is not None else 0  # steps before
        self._last = self._first + section.steps - 1 if section is not None else 0
        self._profile: profile | None = None
        if section is not None:
            self._profile = profile(schedule=self._action, on_trace_ready=self._export, record_shapes=True)

    def __enter__(self) -> StepProfiler:
        if self._profile is not None:
            self._profile.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if self._profile is None:
            return
        num_steps = self._profile.step_num
        # A run that ends inside the window leaves what was traced until then.
        # A GPU that failed has no trace to give: its own error counts.
        with contextlib.suppress(*(() if error is None else (RuntimeError,))):
            self._profile.stop()
        if num_steps < self._first:
            self._say(f"no trace: [metrics.profile] start = {self._first + 1}, and there were {num_steps} steps")

    def step(self) -> None:
        """A step is over."""
        if self._profile is not None:
            self._profile.step()

    def _action(self, done: int) -> ProfilerAction:
        """The step before the first traced one takes what the start of the tracer costs."""
        if done == self._last:
            return ProfilerAction.RECORD_AND_SAVE
        if self._first <= done < self._last:
            return ProfilerAction.RECORD
        return ProfilerAction.WARMUP if done == self._first - 1 else ProfilerAction.NONE

    def _export(self, traced: profile) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            sweep_temporary(self.path)
            with temporary_beside(self.path, folder=True) as place:  # torch wants a name that ends in .gz
                traced.export_chrome_trace(str(place / self.path.name))
                os.replace(place / self.path.name, self.path)
            line = f"trace: {self.path} (perfetto.dev opens it)"
        except OSError as error:
            line = f"no trace: {error}"
        self._say(line)
