"""``torch.profiler`` traces of the steps that ``[metrics.profile]`` asks for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.paths import sweep_temporary, temporary_beside
from atoll.train.recipe.schema import ProfileSection

if TYPE_CHECKING:
    from torch.profiler import profile


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
        self._section = section
        self.path = Path(folder) / "profile" / f"rank{rank}.pt.trace.json.gz"
        self._say = say
        self._done = 0  # steps
        self._profile: profile | None = None

    def __enter__(self) -> StepProfiler:
        self._start_if_next()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if self._section is not None and self._profile is None and self._done < self._section.start:
            self._say(f"no trace: [metrics.profile] start = {self._section.start}, and there were {self._done} steps")
        # A run that ends inside the window leaves what was traced until then.
        if error is None:
            self._stop()
        else:
            with contextlib.suppress(RuntimeError):  # a GPU that failed has no trace to give: its own error counts
                self._stop()

    def step(self) -> None:
        """A step is over."""
        self._done += 1
        if self._section is None:
            return
        if self._profile is not None:
            self._profile.step()
            if self._done == self._section.start - 1 + self._section.steps:
                self._stop()
        else:
            self._start_if_next()

    def _start_if_next(self) -> None:
        """Start one step ahead of the first traced one: that step takes what the start of the tracer costs."""
        section = self._section
        if section is None or self._done != max(0, section.start - 2):
            return
        from torch.profiler import profile, schedule

        ahead = schedule(wait=0, warmup=1, active=section.steps, repeat=1) if section.start > 1 else None
        self._profile = profile(schedule=ahead, on_trace_ready=self._export, record_shapes=True)
        self._profile.start()

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

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
