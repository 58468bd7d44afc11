"""Saves and loads a sharded state as one atomic thing, while training goes on."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.nn import Parameter

from atoll.core.errors import CheckpointError
from atoll.train.checkpoint.files import Writer
from atoll.train.checkpoint.manifest import FileEntry, Manifest, Part
from atoll.train.checkpoint.staging import HostCopy, Planner
from atoll.train.checkpoint.store import open_store
from atoll.train.checkpoint.survey import INDEX, Survey, read_index, reader_of, rot, survey
from atoll.train.checkpoint.team import Attempt, Team, first_line


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is complete.

    Attributes:
        stall_s: how long the caller of ``save`` was held up.
        took_s: from that call until the checkpoint was complete.
    """

    step: int
    path: str
    took_s: float
    stall_s: float


@dataclass(slots=True)
class _Saving:
    """A save in flight; how long it took in the end, and what to tell the reader."""

    step: int
    started: float  # on the monotonic clock
    over: futures.Future[tuple[float, str | None]]
    stall_s: float = 0.0


class Checkpointer:
    """The checkpoints of one run.

    Making one, ``latest``, ``save`` and ``load_newest`` are collective: every rank of ``group`` calls them in the same
    order. ``poll`` and ``wait`` only wait for this rank's thread, whose outcome is the same on all.

    Args:
        root: a folder, or a URL that fsspec reads (``s3://bucket/run``).
        group: a Gloo group of all ranks that nothing else uses, made with ``timeout_s`` as its timeout; None for one
            process.
        keep: so many of the newest checkpoints stay.
        keep_best: the one with the lowest ``metric`` stays.
        asynchronous: ``save`` returns once the copy of the tensors to host memory is begun.
        note: takes lines for the reader, on rank 0, in the thread of the caller.
        timeout_s: after so long a save counts as failed.
        guard: asked on rank 0 before a step becomes a checkpoint; raises ``OSError`` where somebody else writes here.

    Raises:
        ConfigError: ``root`` is no place that can be used.
        CheckpointError: it can't be reached.
    """

    def __init__(
        self,
        root: str,
        *,
        group: dist.ProcessGroup | None,
        keep: int,
        keep_best: bool,
        asynchronous: bool,
        note: Callable[[str], None],
        timeout_s: float = 1800,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._guard = guard
        self._store = open_store(root)
        self._team = Team(group)
        self._doomed = partial(doomed, keep=keep, keep_best=keep_best)
        self._asynchronous = asynchronous
        self._note = note
        self._timeout_s = timeout_s
        self._copy = HostCopy()
        self._saving: _Saving | None = None
        self._damaged: dict[int, str] = {}  # found so by reading
        self._team.lead(f"cleaning up {root}", self._store.sweep)

    # ------------------------------------------------------------------------------------------------------- saving
    def save(
        self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, metric: float | None = None
    ) -> None:
        """Begin a checkpoint of this moment.

        Waits for a save still in flight, begins to copy the tensors to host memory and leaves the rest to a thread.
        What fails there is told by ``poll`` and ``wait``, on every rank. Call ``before_change`` before tensors on a
        GPU change.

        Args:
            tensors: this rank's, by names that are unique over ranks; what several ranks hold whole is written once.
            meta: JSON; rank 0's is kept. Where its ``keep`` is not false the checkpoint stays for good.
            metric: validation loss, for ``keep_best``.

        Raises:
            CheckpointError: the save before this one failed, or hangs.
        """
        self.wait()
        self._saving = saving = _Saving(step, time.monotonic(), futures.Future())
        self._damaged.pop(step, None)
        copies: dict[str, Tensor] = {}
        with Attempt() as copying:
            copies = self._copy.take(tensors)
        frozen = json.loads(json.dumps(meta))
        write = partial(self._write, step, dict(tensors), copies, copying, frozen, metric)

        def run() -> None:
            remark: str | None = None
            with Attempt() as attempt:
                remark = write()
            if attempt.error is None:
                saving.over.set_result((time.monotonic() - saving.started, remark))
            else:
                saving.over.set_exception(attempt.error)

        threading.Thread(target=run, name=f"checkpoint {step}", daemon=True).start()
        if not self._asynchronous:
            self._settle()
        saving.stall_s = time.monotonic() - saving.started

    def before_change(self) -> None:
        """What the GPU is given from now on begins once the tensors of the last save are copied."""
        self._copy.before_change()

    def poll(self) -> Saved | None:
        """A save that has become complete since the last call.

        Raises:
            CheckpointError: it failed, on any rank.
        """
        return self.wait() if self._saving is not None and self._saving.over.done() else None

    def wait(self) -> Saved | None:
        """Until no save is in flight; the one that was, if ``poll`` has not told of it.

        Raises:
            CheckpointError: it failed, on any rank, or is not over ``timeout_s`` after it began.
        """
        self._settle()
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        took_s, remark = saving.over.result()
        if remark is not None:
            self._note(remark)
        return Saved(saving.step, self._store.path(saving.step), took_s, saving.stall_s)

    def close(self) -> None:
        """Wait for a save in flight, and give the host memory back. A failure nobody asked about becomes a note."""
        with Attempt() as attempt:
            self.wait()
        if attempt.error is not None:
            self._note(first_line(attempt.error))
        if self._saving is None:  # else it hangs, and may yet read the copy
            self._copy.close()

    def _settle(self) -> None:
        """Until the group is free: the writing thread uses it too."""
        if (saving := self._saving) is None:
            return
        if not futures.wait([saving.over], saving.started + self._timeout_s - time.monotonic()).done:
            raise CheckpointError(
                f"saving step {saving.step} to {self._store.path(saving.step)} is not done after {self._timeout_s:g} "
                "s: something hangs"
            )

    # ---------------------------------------------------------------------------------------- in the writing thread
    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        copies: dict[str, Tensor],
        copying: Attempt,
        meta: dict[str, Any],
        metric: float | None,
    ) -> str | None:
        """Write a step, and delete those that have served their time; returns what to tell the reader."""
        what = f"saving step {step} to {self._store.path(step)}"
        team, store = self._team, self._store

        def copied() -> None:
            copying.check()
            self._copy.wait()

        team.agree(f"copying the tensors of step {step} to host memory", copied)
        place = team.lead(what, lambda: store.begin(step))
        files = store.files()

        def write() -> dict[str, FileEntry]:
            planner = Planner(copies)
            _save_state_dict(tensors, Writer(files, place), team.group, no_dist=team.group is None, planner=planner)
            return {path.removeprefix(f"{place}/"): entry for path, entry in files.entries.items()}

        def complete() -> None:
            written = {name: entry for part in entries for name, entry in part.items()}
            manifest = Manifest(step, meta, written, team.size, time.time(), metric)
            if (wrong := manifest.problem(store.sizes(place))) is not None:
                raise CheckpointError(f"{wrong}: do all hosts see the same {store.root}?")
            self._guard()
            store.commit(place, step, manifest.encode())

        try:
            entries = team.agree(what, write)
            team.lead(what, complete)
        except CheckpointError:
            if team.rank == 0:
                with Attempt():  # the next run sweeps again
                    store.sweep()
            raise
        with Attempt() as retiring:
            for old in self._retired(step) if team.rank == 0 else ():
                store.remove(old)
        if retiring.error is None:
            return None
        return f"old checkpoints in {store.root} can't be removed: {first_line(retiring.error)}"

    def _retired(self, saved: int) -> list[int]:
        whole = self._survey().whole
        kept = [step for step, found in whole.items() if found.meta.get("keep", True)]  # versions before: all
        return self._doomed({step: found.metric for step, found in whole.items()}, kept, saved=saved)

    # ------------------------------------------------------------------------------------------------------ loading
    def latest(self) -> Manifest | None:
        """The newest whole one, or None where nothing was ever saved. Only loading compares checksums.

        Raises:
            CheckpointError: there are some and none is whole, or the storage fails.
        """
        return self._shared_survey().newest()

    def load_newest(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Read the newest checkpoint into ``tensors``, in place, whatever ranks and mesh saved it; returns its meta.

        One that is not what was written is passed over with a note.

        Raises:
            CheckpointError: there is none, or it can't be read, or its tensors have other names or shapes. ``tensors``
                may then be half old.
        """
        while True:
            found = self._shared_survey()
            if (newest := found.newest()) is None:
                raise CheckpointError(f"there is no checkpoint in {self._store.root}")
            if (damage := self._load(newest, tensors)) is None:
                break
            self._damaged[newest.step] = damage
        if found.torn and self._team.rank == 0:
            self._note(f"damaged checkpoints in {self._store.root} are passed over: {found.damage}")
        return newest.meta

    def _load(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> str | None:
        """Read every byte of a checkpoint once, its checksums compared with what was read; what is damaged in it."""
        team, store = self._team, self._store
        what = f"loading step {manifest.step} from {store.path(manifest.step)}"
        wanted: dict[str, tuple[int, ...]] = {}
        for shapes in team.agree(what, lambda: {name: tuple(tensor.shape) for name, tensor in tensors.items()}):
            wanted |= shapes
        files = set(manifest.files)
        done: defaultdict[str, list[Part]] = defaultdict(list)
        failure: CheckpointError | None = None
        try:
            index = team.lead(what, lambda: read_index(store, manifest))
            _compare(what, wanted, index)
            reader = reader_of(store, manifest, index)

            def read() -> dict[str, list[Part]]:
                _load_state_dict(dict(tensors), reader, process_group=team.group, no_dist=team.group is None)
                return reader.parts

            for parts in team.agree(what, read):
                for name, each in parts.items():
                    done[manifest.inside(name)] += each
            files.remove(manifest.inside(INDEX))
        except CheckpointError as error:
            failure = error  # is it damage?
        share = sorted(files)[team.rank :: team.size]
        results = team.agree(what, lambda: rot(store, manifest, share, done))
        damage = next((each for each in results if each is not None), None)
        if damage is None and failure is not None:
            raise failure
        return damage

    def _shared_survey(self) -> Survey:
        self._settle()
        return self._team.lead(f"looking for checkpoints in {self._store.root}", self._survey)

    def _survey(self) -> Survey:
        found = survey(self._store)
        for step, wrong in self._damaged.items():
            found.mark_torn(step, wrong)
        return found


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str]) -> dict[str, Tensor]:
    """The optimizer's state by name, ``optim.<parameter>.<key>``: the tensors themselves, to save or to load into."""
    return {
        f"optim.{name}.{key}": value
        for parameter, name in names.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def doomed(
    metrics: Mapping[int, float | None], kept: Collection[int], *, saved: int, keep: int, keep_best: bool
) -> list[int]:
    """Steps to delete, oldest first.

    Args:
        metrics: every whole checkpoint, with its validation loss where it has one.
        kept: those that stay for good.
        saved: the step just completed: it stays, also where a run that went back to an older step saved it.
    """
    stay = {saved, *kept, *sorted(metrics)[-keep:]}
    if keep_best:
        rated = {step: metric for step, metric in metrics.items() if metric is not None and not math.isnan(metric)}
        if rated:
            stay.add(min(rated, key=lambda step: (rated[step], -step)))
    return sorted(set(metrics) - stay)


def _compare(what: str, wanted: Mapping[str, tuple[int, ...]], index: Metadata) -> None:
    saved = {
        name: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else ()
        for name, entry in index.state_dict_metadata.items()
    }
    problems = [f"it lacks {name}" for name in sorted(wanted.keys() - saved.keys())]
    problems += [f"it has {name}, which this run has not" for name in sorted(saved.keys() - wanted.keys())]
    problems += [
        f"it has {name} of shape {list(saved[name])} instead of {list(wanted[name])}"
        for name in sorted(wanted.keys() & saved.keys())
        if wanted[name] != saved[name]
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{what}: the checkpoint is of another model or optimizer: {'; '.join(problems[:5])}{more}"
        )
