"""What the dashboard shows, as JSON values, from the operations that the commands use."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, ConfigError
from atoll.providers import registry
from atoll.tasks import api, clusters, lifecycle
from atoll.tasks.listing import cluster_row, job_row, waiting_row
from atoll.tasks.spec import ClusterSpec
from atoll.train.metrics import journal

_FRESH_S = 1.0
_LOOK_S = 0.2  # whoever waits looks so often whether that has ended
_HOSTS_FRESH_S = 30.0  # other machines are logged in to for it
_NUM_JOBS = 200  # of a cluster, the newest
_NUM_POINTS = 600  # of a loss curve
_DEPTH = 3  # folders below a given one in which a run may be
_MOST_FOLDERS = 2000  # that are looked into


class Views:
    """What there is to see. Each question is asked once at a time, and not again while its answer is fresh.

    Args:
        folders: are searched for runs of ``atoll train``, as are the homes of local nodes.

    Attributes:
        ending: set once nobody is to wait any more: for a host that doesn't answer, for the next line of a log.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self.ending = threading.Event()
        self._folders = folders
        self._answers: dict[tuple[str, ...], _Answer] = {}
        self._lock = threading.Lock()

    def clusters(self) -> list[dict[str, Any]]:
        """Launches that wait for nodes, clusters that are not down, the newest first, and those that are damaged."""
        return self._asked(("clusters",), _clusters)  # type: ignore[no-any-return]

    def jobs(self, cluster: str) -> list[dict[str, Any]]:
        """Jobs of a cluster, the newest first.

        Raises:
            AtollError: there is no such cluster, or it can't be reached.
        """
        return self._asked(("jobs", cluster), lambda: _jobs(cluster))  # type: ignore[no-any-return]

    def gpus(self, infra: str) -> dict[str, Any]:
        """GPUs of an infra, and who holds them; lines say why there are none.

        Raises:
            AtollError: there is no such infra, or it can't be reached.
        """
        fresh_s = _FRESH_S if registry.is_here(infra) else _HOSTS_FRESH_S
        return self._asked(("gpus", infra), lambda: _gpus(infra), fresh_s)  # type: ignore[no-any-return]

    def runs(self) -> list[dict[str, Any]]:
        """Runs that have a ``metrics.jsonl`` on this machine, those that wrote last first."""
        return self._asked(("runs",), lambda: [_run(each) for each in self._found()])  # type: ignore[no-any-return]

    def curve(self, run: str) -> list[dict[str, Any]]:
        """About 600 rows of a run's ``metrics.jsonl``, and its validations.

        Raises:
            LookupError: no run has this id.
        """
        folder = next((each for each in self._found() if _id_of(each) == run), None)
        if folder is None:
            raise LookupError(f"no run {run}")
        steps = journal.read(folder / journal.STEPS, _NUM_POINTS)
        return [*steps, *journal.read(folder / journal.VALIDATIONS, _NUM_POINTS)]

    def cancel(self, cluster: str, job: int) -> list[int]:
        """Cancels a job; the numbers of those that had not ended.

        Raises:
            AtollError: there is no such job, or its cluster can't be reached.
        """
        return api.cancel(cluster, [job])

    def down(self, cluster: str) -> list[int]:
        """Removes a cluster; the jobs that were ended.

        Raises:
            AtollError: there is no such cluster, or it can't be reached.
        """
        return lifecycle.down(cluster)

    def _found(self) -> list[Path]:
        """Folders of runs, those that wrote last first."""
        homes = [clusters.node_home(name, 0) / "sky_workdir" for name in clusters.all_names()]
        found = {path.resolve(): path for folder in (*self._folders, *homes) for path in _runs_in(folder)}
        return sorted(found, key=_written_s, reverse=True)

    def _asked(self, key: tuple[str, ...], ask: Callable[[], Any], fresh_s: float = _FRESH_S) -> Any:
        with self._lock:  # several pages wait for one answer
            answer = self._answers.get(key)
            if answer is None or answer.is_stale:
                answer = self._answers[key] = _Answer(ask, fresh_s)
        while not answer.done.wait(_LOOK_S):
            if self.ending.is_set():
                raise AtollError("the dashboard has ended")
        if answer.error is not None:
            raise answer.error.with_traceback(None)
        return answer.value


class _Answer:
    """Asks in a thread of its own, which does not keep the process alive: a host may be silent for minutes."""

    def __init__(self, ask: Callable[[], Any], fresh_s: float) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: Exception | None = None
        self._until_s = 0.0
        threading.Thread(target=self._run, args=(ask, fresh_s), daemon=True).start()

    @property
    def is_stale(self) -> bool:
        """May it be asked again?"""
        return self.done.is_set() and time.monotonic() > self._until_s

    def _run(self, ask: Callable[[], Any], fresh_s: float) -> None:
        self.error = RuntimeError("this is a bug of the dashboard; its terminal shows where")
        try:
            self.value = ask()
            self.error = None
        except (AtollError, OSError) as error:
            self.error = error
        finally:
            self._until_s = time.monotonic() + fresh_s
            self.done.set()


def _clusters() -> list[dict[str, Any]]:
    damaged: dict[str, Exception] = {}
    found = sorted(api.status(on_error=damaged.__setitem__), key=lambda each: each.created_s, reverse=True)
    bad = [{"name": name, "status": "DAMAGED", "error": str(error)} for name, error in damaged.items()]
    return [*map(waiting_row, api.waiting_launches()), *map(_cluster, found), *bad]


def _cluster(cluster: ClusterSpec) -> dict[str, Any]:
    row = cluster_row(cluster, None)
    del row["num_unfinished_jobs"]  # the page asks for the jobs themselves
    return row


def _jobs(cluster: str) -> list[dict[str, Any]]:
    return [job_row(row) for row in api.queue(cluster)[:_NUM_JOBS]]


def _gpus(infra: str) -> dict[str, Any]:
    rows, lines = registry.resolve(infra).gpu_rows()
    return {"rows": rows, "lines": lines}


# -------------------------------------------------------------------------------------------------------- runs
def _runs_in(folder: Path) -> Iterator[Path]:
    """Folders with a journal, at most three below ``folder``; hidden ones are left out."""
    todo, looked = [(folder, 0)], 0
    while todo and looked < _MOST_FOLDERS:
        path, depth = todo.pop(0)
        looked += 1
        try:
            with os.scandir(path) as entries:
                names = {each.name: each.is_dir(follow_symlinks=False) for each in entries}
        except OSError:  # not there, or not ours
            continue
        if journal.STEPS in names:
            yield path
        elif depth < _DEPTH:
            todo += [(path / name, depth + 1) for name, is_dir in names.items() if is_dir and not name.startswith(".")]


def _written_s(folder: Path) -> float:
    try:
        return (folder / journal.STEPS).stat().st_mtime
    except OSError:  # removed just now
        return 0.0


def _id_of(folder: Path) -> str:
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]


def _run(folder: Path) -> dict[str, Any]:
    """A run in the list: where it is, what it wrote last, and a curve of few points."""
    rows = journal.read(folder / journal.STEPS, 60)
    last = rows[-1] if rows else {}
    return {
        "id": _id_of(folder),
        "name": folder.name,
        "folder": str(folder),
        "written_at": _written_s(folder),
        **{key: last.get(key) for key in ("step", "tokens", "loss", "lr", "tokens_per_s", "mfu")},
        "losses": [row.get("loss") for row in rows],
    }


def check_folders(folders: Sequence[str]) -> list[Path]:
    """The folders that were given.

    Raises:
        ConfigError: one is not there.
    """
    for each in folders:
        if not Path(each).is_dir():
            raise ConfigError(f"{each}: there is no such folder; give folders of runs, such as outputs")
    return [Path(each) for each in folders]
