"""Saves and loads a sharded state as one atomic thing, while training goes on."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from atoll.core.errors import CheckpointError
from atoll.train.checkpoint import manifest as manifests
from atoll.train.checkpoint.files import Reader, Writer
from atoll.train.checkpoint.manifest import FileEntry, Manifest, Part
from atoll.train.checkpoint.retention import doomed
from atoll.train.checkpoint.staging import HostCopy, Planner
from atoll.train.checkpoint.store import open_store
from atoll.train.checkpoint.survey import INDEX, Survey, read_index, rot, survey
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


class SaveHandle:
    """A save that was begun.

    Attributes:
        started: when, on the monotonic clock.
        stall_s: how long the caller of ``save`` was held up.
    """

    def __init__(self, step: int, path: str, timeout_s: float) -> None:
        self.step = step
        self.stall_s = 0.0
        self._path = path
        self.started = time.monotonic()
        self._timeout_s = timeout_s
        self._took_s = 0.0
        self._over = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has succeeded or failed, everywhere."""
        return self._over.is_set()

    def wait(self) -> Saved:
        """Until it is over.

        Raises:
            CheckpointError: it failed on some rank, or is not over ``timeout_s`` after it began.
        """
        self.settle()
        if self._error is not None:
            raise self._error
        return Saved(self.step, self._path, self._took_s, self.stall_s)

    def settle(self) -> None:
        """Until it is over, whichever way.

        Raises:
            CheckpointError: it is not, ``timeout_s`` after it began.
        """
        if not self._over.wait(max(0.0, self.started + self._timeout_s - time.monotonic())):
            raise CheckpointError(
                f"saving step {self.step} to {self._path} is not done after {self._timeout_s:g} s: something hangs"
            )

    def run(self, work: Callable[[], None]) -> None:
        """Do the work, in the thread it was started for."""
        with Attempt() as attempt:
            work()
        self._error = attempt.error
        self._took_s = time.monotonic() - self.started
        self._over.set()


class Checkpointer:
    """The checkpoints of one run.

    Making one, ``latest``, ``save`` and ``load`` are collective: every rank of ``group`` calls them in the same order.
    ``poll`` and ``wait`` only wait for this rank's thread, whose outcome is the same on all.

    Args:
        root: a folder, or a URL that fsspec reads (``s3://bucket/run``).
        group: a Gloo group of all ranks that nothing else uses, made with ``timeout_s`` as its timeout; None for one
            process.
        keep: so many of the newest checkpoints stay.
        keep_best: the one with the lowest ``metric`` stays.
        asynchronous: ``save`` returns once the tensors are copied to host memory.
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
        self._retention = partial(doomed, keep=keep, keep_best=keep_best)
        self._asynchronous = asynchronous
        self._note = note
        self._timeout_s = timeout_s
        self._copy = HostCopy()
        self._saves: deque[SaveHandle] = deque()
        self._remarks: deque[str] = deque()  # from the writing thread
        self._damaged: dict[int, str] = {}  # found so by reading
        self._team.lead(f"cleaning up {root}", self._store.sweep)

    # ------------------------------------------------------------------------------------------------- what is there
    def latest(self) -> int | None:
        """The newest whole one, or None where nothing was ever saved. Only loading compares checksums.

        Raises:
            CheckpointError: there are some and none is whole, or the storage fails.
        """
        return self._shared_survey().newest()

    def meta(self, step: int) -> dict[str, Any]:
        """What ``save`` was given beside the tensors.

        Raises:
            CheckpointError: that step is not there, or not whole.
        """
        return self._manifest(step, self._survey()).meta

    # ------------------------------------------------------------------------------------------------------- saving
    def save(
        self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, metric: float | None = None
    ) -> SaveHandle:
        """Begin a checkpoint of this moment.

        Waits for a save still in flight, copies the tensors to host memory and leaves the rest to a thread. What
        fails there is told by ``poll``, ``wait`` or the handle, on every rank.

        Args:
            tensors: this rank's, by names that are unique over ranks; what several ranks hold whole is written once.
            meta: JSON; rank 0's is kept. Where its ``keep`` is true the checkpoint stays for good.
            metric: validation loss, for ``keep_best``.

        Raises:
            CheckpointError: ``meta`` is no JSON, or the save before this one hangs.
        """
        handle = SaveHandle(step, self._store.path(step), self._timeout_s)
        self._settle()
        try:
            frozen: dict[str, Any] = json.loads(json.dumps(dict(meta)))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the meta of step {step} is not JSON: {error}") from None
        self._damaged.pop(step, None)
        copies: dict[str, Tensor] = {}
        with Attempt() as copying:
            copies = self._copy.take(tensors)
        work = partial(self._write, step, dict(tensors), copies, copying.error, frozen, metric)
        self._saves.append(handle)
        threading.Thread(target=handle.run, args=(work,), name=f"checkpoint {step}", daemon=True).start()
        if not self._asynchronous:
            handle.settle()
        handle.stall_s = time.monotonic() - handle.started
        return handle

    def poll(self) -> Saved | None:
        """A save that has become complete since the last call, each told once.

        Raises:
            CheckpointError: it failed, on any rank.
        """
        self._tell_remarks()
        if self._saves and self._saves[0].done():
            return self._saves.popleft().wait()
        return None

    def wait(self) -> Saved | None:
        """Until no save is in flight; the last one that ``poll`` has not told of.

        Raises:
            CheckpointError: one failed, on any rank, or hangs.
        """
        saved = None
        while self._saves:
            self._saves[0].settle()
            saved = self._saves.popleft().wait()
        self._tell_remarks()
        return saved

    def close(self) -> None:
        """Wait for a save in flight, and give the host memory back. A failure nobody asked about becomes a note."""
        while self._saves:
            with Attempt() as attempt:
                self._saves[0].wait()
            if attempt.error is not None:
                self._remarks.append(first_line(attempt.error))
            if not self._saves.popleft().done():
                return  # it hangs, and may yet read the copy
        self._tell_remarks()
        self._copy.close()

    # ------------------------------------------------------------------------------------------------------ loading
    def load_newest(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """As ``load``, of the newest step that is what was written; one that is not is passed over with a note.

        Raises:
            CheckpointError: there is none, or it can't be loaded.
        """
        while True:
            found = self._shared_survey()
            if (step := found.newest()) is None:
                raise CheckpointError(f"there is no checkpoint in {self._store.root}")
            try:
                meta = self.load(step, tensors)
            except CheckpointError:
                if step not in self._damaged:
                    raise
            else:
                if found.torn and self._team.rank == 0:
                    self._note(f"damaged checkpoints in {self._store.root} are passed over: {found.damage}")
                return meta

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Read a checkpoint into ``tensors``, in place, whatever ranks and mesh saved it; returns its meta.

        Every byte is read once: checksums are compared with what was read.

        Raises:
            CheckpointError: the step is not there or not whole (the message names the file, and the steps that are),
                or its tensors have other names or shapes. ``tensors`` may then be half old.
        """
        self._settle()
        what = f"loading step {step} from {self._store.path(step)}"
        known = self._team.lead(what, self._survey)
        found = self._manifest(step, known)
        wanted: dict[str, tuple[int, ...]] = {}
        for shapes in self._team.agree(what, lambda: {name: tuple(tensor.shape) for name, tensor in tensors.items()}):
            wanted |= shapes
        group = self._team.group
        readers: list[Reader] = []

        def open_it() -> None:
            index = read_index(self._store, step, found)
            folder = f"{self._store.path(step)}/{found.folder}".rstrip("/")
            readers.append(Reader(self._store.files(), folder, index))

        def read() -> dict[str, list[Part]]:
            _load_state_dict(dict(tensors), readers[0], process_group=group, no_dist=group is None)
            return {found.inside(name): parts for name, parts in readers[0].parts.items()}

        try:
            self._team.agree(what, open_it)
            _compare(what, wanted, readers[0].read_metadata())
            by_rank = self._team.agree(what, read)
        except CheckpointError:
            wrong = self._verify(step, found, found.files, {})
            if wrong is None:
                raise
        else:
            done: defaultdict[str, list[Part]] = defaultdict(list)
            for each in by_rank:
                for name, parts in each.items():
                    done[name] += parts
            wrong = self._verify(step, found, found.files.keys() - {found.inside(INDEX)}, done)
        if wrong is not None:
            self._damaged[step] = wrong
            others = [other for other in sorted(known.whole) if other != step]
            raise CheckpointError(f"step {step} in {self._store.root} is damaged: {wrong}; {_whole(others)}")
        return found.meta

    # ---------------------------------------------------------------------------------------- in the writing thread
    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        copies: dict[str, Tensor],
        copying_error: BaseException | None,
        meta: dict[str, Any],
        metric: float | None,
    ) -> None:
        what = f"saving step {step} to {self._store.path(step)}"
        team, store = self._team, self._store
        place: str | None = None
        try:
            team.agree(f"copying the tensors of step {step} to host memory", partial(_reraise, copying_error))
            place = team.lead(what, lambda: store.begin(step))
            files = store.files()
            writer, planner = Writer(files, place), Planner(copies)

            def write() -> None:
                _save_state_dict(tensors, writer, team.group, no_dist=team.group is None, planner=planner)

            team.agree(what, write)
            entries = team.agree(what, lambda: files.entries)
            team.lead(what, lambda: self._complete(step, place, entries, meta, metric))
        except CheckpointError:
            if place is not None and team.rank == 0:
                with Attempt() as cleaning:
                    store.discard(place, step)
                if cleaning.error is not None:
                    self._remarks.append(f"what step {step} left at {place} can't be removed: {cleaning.error}")
            raise
        if team.rank == 0:
            self._retire(step)

    def _complete(
        self,
        step: int,
        place: str | None,
        entries: list[dict[str, FileEntry]],
        meta: dict[str, Any],
        metric: float | None,
    ) -> None:
        """On rank 0: make what all ranks have written a checkpoint."""
        assert place is not None
        written = {path.removeprefix(f"{place}/"): entry for part in entries for path, entry in part.items()}
        found = Manifest(step, meta, written, self._team.size, time.time(), metric, self._store.folder_of(place))
        wrong = manifests.problem(self._store.sizes(place), found)
        if wrong is not None:
            raise CheckpointError(f"{wrong}: do all hosts see the same {self._store.root}?")
        final = replace(found, files={found.inside(name): entry for name, entry in written.items()})
        self._guard()
        self._store.commit(place, step, final.encode())

    def _retire(self, step: int) -> None:
        """On rank 0: delete those that have served their time. The new one stands, so a failure is but a remark."""
        with Attempt() as attempt:
            whole = self._survey().whole
            kept = [each for each, found in whole.items() if found.meta.get("keep", _may_stay(found.meta))]
            metrics = {each: found.metric for each, found in whole.items()}
            for old in self._retention(metrics, kept, saved=step):
                self._store.remove(old)
        if attempt.error is not None:
            self._remarks.append(f"old checkpoints in {self._store.root} can't be removed: {first_line(attempt.error)}")

    # --------------------------------------------------------------------------------------------------------- parts
    def _shared_survey(self) -> Survey:
        self._settle()
        return self._team.lead(f"looking for checkpoints in {self._store.root}", self._survey)

    def _survey(self) -> Survey:
        found = survey(self._store)
        for step, wrong in self._damaged.items():
            found.mark_torn(step, wrong)
        return found

    def _manifest(self, step: int, known: Survey) -> Manifest:
        if step in known.whole:
            return known.whole[step]
        wrong = f"is damaged: {known.torn[step]}" if step in known.torn else "is not there"
        raise CheckpointError(f"step {step} in {self._store.root} {wrong}; {_whole(sorted(known.whole))}")

    def _verify(
        self, step: int, found: Manifest, names: Collection[str], read: Mapping[str, Collection[Part]]
    ) -> str | None:
        """Compare the checksums, each rank those of its share of the files; what is wrong, the same on every rank."""
        # Every size-th of the files in order of size: about the same for all.
        by_size = sorted(names, key=lambda name: (found.files[name].num_bytes, name))
        share = by_size[self._team.rank :: self._team.size]
        what = f"reading step {step} in {self._store.root}"
        results = self._team.agree(what, lambda: rot(self._store, step, found, share, read))
        return next((each for each in results if each is not None), None)

    def _settle(self) -> None:
        """Until the group is free: the writing thread uses it too."""
        for handle in self._saves:
            handle.settle()
        self._tell_remarks()

    def _tell_remarks(self) -> None:
        while self._remarks:
            self._note(self._remarks.popleft())


def _reraise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _may_stay(meta: Mapping[str, Any]) -> bool:
    """Of a checkpoint of a version that did not write whether it stays for good: whether its recipe had some stay."""
    return meta.get("recipe", {}).get("checkpoint", {}).get("keep_every") is not None


def _compare(what: str, wanted: Mapping[str, tuple[int, ...]], index: Metadata) -> None:
    saved = {
        name: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else ()
        for name, entry in index.state_dict_metadata.items()
    }
    problems = []
    if missing := sorted(wanted.keys() - saved.keys()):
        problems.append(f"it lacks {_some(missing)}")
    if surplus := sorted(saved.keys() - wanted.keys()):
        problems.append(f"it has {_some(surplus)}, which this run has not")
    if other := sorted(name for name in wanted.keys() & saved.keys() if wanted[name] != saved[name]):
        told = [f"{name} of shape {list(saved[name])} instead of {list(wanted[name])}" for name in other]
        problems.append(f"it has {_some(told)}")
    if problems:
        raise CheckpointError(f"{what}: the checkpoint is of another model or optimizer: {'; '.join(problems)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _whole(steps: list[int]) -> str:
    return f"whole: {', '.join(map(str, steps))}" if steps else "no other step is whole"
