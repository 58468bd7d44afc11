"""The job store of a cluster: ``jobs.db`` in its folder, SQLite in WAL mode, read and written by several processes.

Table ``events`` is the truth, one row for everything that happened to a job; its row in ``jobs`` is the fold of them
(``JobRow.after``), kept beside so that a thousand past jobs are listed at once. Values of variables are in neither:
they lie in a file of the job's own folder until the job starts. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import shlex
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGTERM
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from atoll.core.errors import AtollError, ConfigError
from atoll.tasks.record import check_owner, removes
from atoll.tasks.rows import EventRow, JobRow
from atoll.tasks.spec import JobSpec, JobStatus
from atoll.tasks.transitions import Log, SetStatus

SCHEMA = 1
_BUSY_S = 20.0  # other processes' transactions take milliseconds
_RESERVE = "reserve"  # a file whose room is given up for what must be written on a disk that a job has filled
_RESERVE_BYTES = 1 << 18
STORE = "jobs.db"
VARIABLES = "variables.json"
IN_THE_WAY = (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)  # of what a cluster consists of

_TABLES = """
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT, task_id TEXT NOT NULL, user TEXT NOT NULL, spec TEXT NOT NULL,
    status TEXT NOT NULL, reason TEXT NOT NULL, exit_code INTEGER, submitted_s REAL NOT NULL, started_s REAL,
    ended_s REAL, restarts INTEGER NOT NULL, culprit_node INTEGER, culprit_rank INTEGER, cancel_asked INTEGER NOT NULL
);
CREATE INDEX unfinished ON jobs (id) WHERE ended_s IS NULL;
CREATE TABLE events (
    job_id INTEGER NOT NULL, seq INTEGER NOT NULL, time_s REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
    node INTEGER, rank INTEGER, data TEXT NOT NULL, PRIMARY KEY (job_id, seq)
) WITHOUT ROWID;
"""
_KEYS = "CREATE UNIQUE INDEX IF NOT EXISTS keys ON jobs (json_extract(spec, '$.key'))"  # those without one differ


class NoRoom(AtollError):
    """The disk is full."""


Method = TypeVar("Method", bound=Callable[..., Any])


def _for_sure(method: Method) -> Method:
    """Has a method of the store that finds no room done again with the reserve's."""

    @functools.wraps(method)
    def done(self: Store, *arguments: Any, **more: Any) -> Any:
        try:
            return method(self, *arguments, **more)
        except NoRoom:
            if not give_reserve(self._folder):
                raise
            return method(self, *arguments, **more)

    return cast(Method, done)


class Store:
    """The jobs of the cluster that lives in ``folder``; made where it does not exist yet.

    Not to be shared by threads or over a fork; any number of processes may have one each.

    Raises:
        AtollError: it can't be read or written, is damaged, or was made by a newer Atoll. So do the methods; nothing
            of what was to be written is there then.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / STORE
        self._folder = folder
        check_owner(folder)
        with self._explained():
            # Only where there is none: closing any descriptor of a file drops all locks this process has on it.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
        try:
            self._open()
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def keep_reserve(self) -> None:
        """Set room aside for telling how jobs end, should one of them fill the disk."""
        with contextlib.suppress(OSError), open(self._folder / _RESERVE, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)

    # ------------------------------------------------------------------------------------------- writing
    def add(self, spec: JobSpec, *, task_id_for: Callable[[int], str], user: str) -> int:
        """A new job, ``PENDING``; its number, or that of the job which has its key already.

        ``task_id_for`` makes the task id of the number, and may put the values of the job's variables:
        nobody can see the job before it returns, and where it raises there is none.
        """
        with self._transaction() as db:
            values = (spec.name, user, _json(spec.to_json()), JobStatus.PENDING, time.time())
            db.execute(_KEYS)
            found = db.execute("SELECT id FROM jobs WHERE json_extract(spec, '$.key') = ?", (spec.key,)).fetchone()
            if found is not None:
                return int(found[0])
            sql = (
                "INSERT INTO jobs (name, task_id, user, spec, status, reason, submitted_s, restarts, cancel_asked)"
                " VALUES (?, '', ?, ?, ?, '', ?, 0, 0)"
            )
            job_id = db.execute(sql, values).lastrowid
            assert job_id is not None
            while os.path.lexists(path := self._folder / "jobs" / str(job_id)) and not path.is_dir():
                db.execute("UPDATE jobs SET id = id + 1 WHERE id = ?", (job_id,))  # something else is called so
                db.execute("UPDATE sqlite_sequence SET seq = seq + 1 WHERE name = 'jobs'")
                job_id += 1
            db.execute("UPDATE jobs SET task_id = ? WHERE id = ?", (task_id_for(job_id), job_id))
        return job_id

    @_for_sure
    def apply(self, job_id: int, actions: Sequence[SetStatus | Log], now_s: float) -> JobStatus:
        """Write what happened, as one transaction; the job's status after it.

        A job that has ended stays so: of it only ``Log`` rows are written. That the status is not the one just set
        is how a supervisor learns that somebody cancelled the job before it was begun.

        Raises:
            LookupError: there is no such job.
        """
        with self._transaction():
            row = self.job(job_id)
            seq = self._last_seq(job_id)
            for action in actions:
                if isinstance(action, SetStatus):
                    if row.status.ended:
                        continue
                    data: dict[str, Any] = {"status": action.status, "exit_code": action.exit_code}
                    event = EventRow(seq + 1, now_s, "status", action.reason, None, None, data)
                else:
                    data = dict(action.data)
                    event = EventRow(seq + 1, now_s, action.kind, action.text, action.node, action.rank, data)
                seq += 1
                row = self._record(row, event)
            self._write(row)
        if row.status.ended:
            drop_variables(self._folder, job_id)
        return row.status

    @_for_sure
    def ask_cancel(self, job_ids: Sequence[int] | None, number: int = SIGTERM) -> list[int]:
        """Ask for an end of these jobs, or of all: those that had not ended. A ``PENDING`` one ends at once.

        ``number``: the signal that their processes get.
        """
        now_s = time.time()
        chosen = None if job_ids is None else set(job_ids)
        ended = []
        with self._transaction():
            rows = [row for row in self.jobs(newest_first=False, unfinished=True) if chosen is None or row.id in chosen]
            for row in rows:
                seq = self._last_seq(row.id)
                changed = self._record(
                    row, EventRow(seq + 1, now_s, "cancel_asked", "", None, None, {"signal": number})
                )
                if row.status is JobStatus.PENDING:
                    data = {"status": JobStatus.CANCELLED, "exit_code": None}
                    changed = self._record(changed, EventRow(seq + 2, now_s, "status", "cancelled", None, None, data))
                    ended.append(row.id)
                self._write(changed)
        for job_id in ended:
            drop_variables(self._folder, job_id)
        return [row.id for row in rows]

    # ------------------------------------------------------------------------------------------- reading
    def job(self, job_id: int) -> JobRow:
        """One job.

        Raises:
            LookupError: there is none of this number.
        """
        found = self._rows("WHERE id = ?", job_id)
        if not found:
            raise LookupError(f"there is no job {job_id}")
        return found[0]

    def jobs(self, *, newest_first: bool = True, limit: int | None = None, unfinished: bool = False) -> list[JobRow]:
        """All jobs, or those of them that have not ended."""
        which = "INDEXED BY unfinished WHERE ended_s IS NULL" if unfinished else ""
        order = "DESC" if newest_first else "ASC"
        return self._rows(f"{which} ORDER BY id {order} LIMIT ?", -1 if limit is None else limit)

    def events(self, job_id: int, after: int = 0) -> list[EventRow]:
        """What happened to a job since event number ``after``."""
        sql = "SELECT seq, time_s, kind, text, node, rank, data FROM events WHERE job_id = ? AND seq > ? ORDER BY seq"
        with self._explained():
            found = self._db.execute(sql, (job_id, after)).fetchall()
        return [
            EventRow(seq, time_s, kind, text, node, rank, json.loads(data))
            for seq, time_s, kind, text, node, rank, data in found
        ]

    # ------------------------------------------------------------------------------------------- inside
    def _open(self) -> None:
        try:
            with self._explained():
                self._prepare()
        except NoRoom:  # not even for the file that processes share; what is there can be read without that
            self._db.close()
            with self._explained():
                self._db = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._prepare()

    def _prepare(self) -> None:
        version = self._user_version()
        if version == 0:
            with _held(self._folder):  # switching to WAL does not wait for others by itself
                if self._user_version() == 0:
                    self._db.execute("PRAGMA journal_mode = WAL")
                    # Numbers go on where an earlier store's had got to: its jobs' logs are still there.
                    first = f"INSERT INTO sqlite_sequence VALUES ('jobs', {_last_number(self._folder)});"
                    made = f"BEGIN IMMEDIATE; {_TABLES} {first} PRAGMA user_version = {SCHEMA}; COMMIT;"
                    self._db.executescript(made)
        elif version > SCHEMA:
            raise AtollError(
                f"the job store {self.path} was made by a newer Atoll (its version is {version}, this one knows "
                f"{SCHEMA}): update Atoll here"
            )
        self._db.execute("PRAGMA synchronous = NORMAL")  # whole after a power cut, perhaps without the last moment

    def _user_version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # on a full disk SQLite may have rolled back by itself
                    self._db.execute("ROLLBACK")
                raise

    def _last_seq(self, job_id: int) -> int:
        sql = "SELECT COALESCE(MAX(seq), 0) FROM events WHERE job_id = ?"
        return int(self._db.execute(sql, (job_id,)).fetchone()[0])

    def _record(self, row: JobRow, event: EventRow) -> JobRow:
        values = (row.id, event.seq, event.time_s, event.kind, event.text, event.node, event.rank, _json(event.data))
        self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        return row.after(event)

    def _write(self, row: JobRow) -> None:
        values = {name: getattr(row, name) for name in _FOLDED}
        sets = ", ".join(f"{name} = :{name}" for name in _FOLDED)
        self._db.execute(f"UPDATE jobs SET {sets} WHERE id = :id", {**values, "id": row.id})

    def _rows(self, rest: str, *values: Any) -> list[JobRow]:
        with self._explained():
            found = self._db.execute(f"SELECT {', '.join(_COLUMNS)} FROM jobs {rest}", values).fetchall()
        try:
            return [_row(columns) for columns in found]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise AtollError(f"the job store {self.path} {_damaged(error, self.path)}") from error

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a mistake in the code that uses it
        except (sqlite3.Error, OSError) as error:
            kind = NoRoom if _is_full(error) else AtollError
            raise kind(f"the job store {self.path} {_what_is_wrong(error, self.path)}") from error


_FULL = ("SQLITE_FULL", "SQLITE_IOERR")
_COLUMNS = tuple(each.name for each in dataclasses.fields(JobRow))
_FOLDED = tuple(
    name for name in _COLUMNS if name not in ("id", "name", "task_id", "user", "spec", "submitted_s")
)  # what events change


def _row(columns: tuple[Any, ...]) -> JobRow:
    values = dict(zip(_COLUMNS, columns, strict=True))
    return JobRow.from_json(
        {**values, "spec": json.loads(values["spec"]), "cancel_asked": bool(values["cancel_asked"])}
    )


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _is_full(error: sqlite3.Error | OSError) -> bool:
    """Has the disk no room, as the database found it, or a file that is written beside it?"""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorname", "").startswith(_FULL)


def _what_is_wrong(error: sqlite3.Error | OSError, path: Path) -> str:
    if path.is_dir():
        return f"is a folder, not a file. {_advice(path)}"
    if _is_full(error):
        return f"can't be written ({error}): is the disk full, or a quota used up? Its earlier contents are still there"
    if isinstance(error, OSError):
        return f"can't be used: {error}"
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or name == "SQLITE_ERROR":
        return _damaged(error, path)
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"was held by another process for {_BUSY_S:.0f} s: try again"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return f"can't be opened for writing ({error}): check who owns it and its folder"
    return f"failed: {error}"


def _damaged(error: Exception, path: Path) -> str:
    return f"is damaged ({error}). {_advice(path)}"


def _advice(path: Path) -> str:
    folder = shlex.quote(str(path.parent))
    return (
        f"Jobs' logs are separate files and not affected: {removes(path.parent.name)}; to begin a new store, which "
        f"ends jobs that still run, move this one away: mkdir -p {folder}/damaged && mv {folder}/{path.name}* "
        f"{folder}/damaged"
    )


def give_reserve(folder: Path) -> bool:
    """Make room for what must be written on a full disk; was there any?"""
    with contextlib.suppress(OSError):
        (folder / _RESERVE).unlink()
        return True
    return False


def _last_number(folder: Path) -> int:
    """The highest number of a job that has a folder."""
    return max((int(path.name) for path in folder.glob("jobs/*") if path.name.isdecimal()), default=0)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Alone among processes that make a store in ``folder``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_folder(folder: Path, job_id: int) -> None:
    """Make the folder of a job's logs and variables.

    Raises:
        AtollError: something is in its way.
    """
    try:
        (folder / "jobs" / str(job_id)).mkdir(mode=0o700, parents=True, exist_ok=True)
    except IN_THE_WAY as error:
        raise unusable(folder / "jobs", error) from error


def unusable(path: Path, error: OSError) -> AtollError:
    """What to raise where a file or a folder of a cluster is none, or somebody else's."""
    return AtollError(f"{path} can't be used: {error.strerror}. {removes(path.parent.name)}")


# ------------------------------------------------------------------------------------------------- variables
def _variables_path(folder: Path, job_id: int) -> Path:
    return folder / "jobs" / str(job_id) / VARIABLES


def put_variables(folder: Path, job_id: int, values: Mapping[str, Mapping[str, str]]) -> None:
    """Keep the values of a job's variables, in a file that only its owner can read, until the job starts or ends."""
    make_folder(folder, job_id)
    drop_variables(folder, job_id)  # of a job that could not be added
    try:
        descriptor = os.open(
            _variables_path(folder, job_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "w", encoding="ascii") as file:  # nobody reads it before the job can be seen
            file.write(_json(values))
    except OSError:
        drop_variables(folder, job_id)
        raise


def read_variables(folder: Path, job_id: int) -> dict[str, dict[str, str]]:
    """The values of a waiting job's variables.

    Raises:
        ConfigError: their file is gone, can't be read, or is damaged.
    """
    path = _variables_path(folder, job_id)
    try:
        values = json.loads(path.read_bytes())
        if all(isinstance(text, str) for each in values.values() for text in each.values()):
            return {str(key): each for key, each in values.items()}
    except OSError as error:
        raise ConfigError(f"its variables can't be read: {error}. Submit it again") from error
    except (ValueError, AttributeError):
        pass  # the same as one of another shape
    raise ConfigError(f"its variables in {path} are damaged: submit it again")


def drop_variables(folder: Path, job_id: int) -> None:
    """Forget the values of a job's variables."""
    with contextlib.suppress(OSError):
        _variables_path(folder, job_id).unlink()
