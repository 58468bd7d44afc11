"""The job store, on real files and with real processes: what it keeps, and what it says when it can't."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.core.errors import AtollError, ConfigError
from atoll.tasks import record
from atoll.tasks.rows import EventRow, JobRow
from atoll.tasks.spec import JobSpec, JobStatus, Restarts
from atoll.tasks.store import Store, put_variables, read_variables
from atoll.tasks.transitions import Log, SetStatus

RUNNING = SetStatus(JobStatus.RUNNING)


def add(store: Store, spec: JobSpec | None = None) -> int:
    return store.add(spec or JobSpec(run="true"), task_id_for=lambda job_id: f"sky-1_c_{job_id}", user="ada")


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own that has a store, ``store``, of the folder in ``folder``, its first argument."""
    before = (
        "import os, sys, time\nfrom pathlib import Path\nfrom atoll.core.errors import AtollError\n"
        "from atoll.tasks.spec import JobSpec, JobStatus\nfrom atoll.tasks.store import Store, put_variables\n"
        "from atoll.tasks.transitions import Log, SetStatus\nfolder = Path(sys.argv[1])\nstore = Store(folder)\n"
    )
    command = [sys.executable, "-c", before + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def consistent(folder: Path) -> list[JobRow]:
    """Every job of the store, each found to be the fold of its events, and the file whole."""
    with Store(folder) as store:
        rows = store.jobs(newest_first=False)
        for row in rows:
            events = store.events(row.id)
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            folded = JobRow(
                row.id, row.name, row.task_id, row.user, row.spec, JobStatus.PENDING, "", None, row.submitted_s
            )
            for event in events:
                folded = folded.after(event)
            assert folded == row
    with sqlite3.connect(folder / "jobs.db") as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()
    return rows


# ------------------------------------------------------------------------------------------------- what it keeps
def test_a_job_from_its_submission_to_its_end(tmp_path: Path) -> None:
    spec = JobSpec(
        name="train",
        num_nodes=2,
        command=("python", "x.py"),
        env={"A": "1"},
        ports=(8008,),
        restarts=Restarts(2, (42,), 1),
        labels={"lr": "0.1"},
    )
    with Store(tmp_path) as store:
        assert add(store, spec) == 1
        row = store.job(1)
        assert (row.id, row.name, row.task_id, row.user) == (1, "train", "sky-1_c_1", "ada")
        assert row.spec == dataclasses.replace(spec, env={})
        assert row.status is JobStatus.PENDING
        assert abs(row.submitted_s - time.time()) < 60
        store.apply(1, [SetStatus(JobStatus.PENDING, "waiting for port 8008, held by job 3 of cluster train")], 5.0)
        assert store.job(1).reason.startswith("waiting for port 8008")
        store.apply(1, [SetStatus(JobStatus.INIT), Log("attempt", "Waiting for task resources on 2 nodes.")], 10.0)
        assert store.job(1).started_s is None
        store.apply(1, [SetStatus(JobStatus.SETTING_UP)], 11.0)
        store.apply(1, [RUNNING], 12.0)
        lost = Log("lost", "worker1 was lost", node=1, data=(("tail", ""),))
        again = Log("restart", "Restarting", data=(("restarts", 1),))
        store.apply(1, [lost, SetStatus(JobStatus.RECOVERING, "worker1 was lost"), again], 20.0)
        row = store.job(1)
        assert (row.reason, row.restarts, row.culprit_node, row.culprit_rank) == ("worker1 was lost", 1, 1, None)
        failed = Log("failed", "", node=0, rank=0, data=(("exit_code", 1), ("tail", "bye")))
        status = store.apply(1, [RUNNING, failed, SetStatus(JobStatus.FAILED, "rank 0 on head exited…", 1)], 30.0)
        assert status is JobStatus.FAILED
        row = store.job(1)
        assert (row.status, row.reason, row.exit_code) == (JobStatus.FAILED, "rank 0 on head exited…", 1)
        assert (row.started_s, row.ended_s, row.culprit_node, row.culprit_rank) == (11.0, 30.0, 0, 0)
        events = store.events(1)
        assert events[-2] == EventRow(10, 30.0, "failed", "", 0, 0, {"exit_code": 1, "tail": "bye"})
        assert store.events(1, after=8) == events[8:]
    assert consistent(tmp_path) == [row]


def test_a_job_that_succeeds_in_the_end_has_no_culprit(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        add(store)
        store.apply(1, [Log("failed", "", 0, 0), RUNNING, SetStatus(JobStatus.SUCCEEDED)], 1.0)
        row = store.job(1)
    assert (row.culprit_node, row.culprit_rank, row.reason, row.exit_code) == (None, None, "", None)


def test_what_has_ended_stays_so(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        add(store)
        store.apply(1, [SetStatus(JobStatus.FAILED, "first")], 1.0)
        late: list[SetStatus | Log] = [SetStatus(JobStatus.SUCCEEDED), Log("note", "late"), Log("failed", "", 3, 3)]
        assert store.apply(1, late, 2.0) is JobStatus.FAILED
        row = store.job(1)
        assert (row.reason, row.ended_s, row.culprit_node) == ("first", 1.0, None)
        assert [event.kind for event in store.events(1)] == ["status", "note", "failed"]
    consistent(tmp_path)


def test_jobs_are_listed_in_order(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        assert store.jobs() == []
        for _ in range(4):
            add(store)
        store.apply(2, [SetStatus(JobStatus.SUCCEEDED)], 1.0)
        assert [row.id for row in store.jobs()] == [4, 3, 2, 1]
        assert [row.id for row in store.jobs(limit=2)] == [4, 3]
        assert [row.id for row in store.jobs(newest_first=False, unfinished=True)] == [1, 3, 4]
        for missing in (0, 5):
            with pytest.raises(LookupError, match=f"there is no job {missing}"):
                store.job(missing)
        with pytest.raises(LookupError, match="there is no job 9"):
            store.apply(9, [RUNNING], 1.0)
        assert store.events(9) == []


def test_a_row_travels_as_json(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        add(store, JobSpec(command=("a", "b"), restarts=Restarts(1, (7,))))
        row = store.job(1)
    text = json.dumps(row.to_json())
    assert json.loads(text)["status"] == "PENDING"
    assert JobRow.from_json(json.loads(text)) == row
    assert JobRow.from_json({**json.loads(text), "a field of a later version": 1}) == row


def test_a_thousand_past_jobs_are_listed_at_once(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        spec = JobSpec(name="train", run="x" * 2000, env={f"V{i}": "x" * 50 for i in range(20)})
        for _ in range(1000):
            job_id = add(store, spec)
            store.apply(job_id, [RUNNING, *[Log("note")] * 20, SetStatus(JobStatus.SUCCEEDED)], 1.0)
        begun = time.thread_time()  # of ours alone, whatever else the machine is busy with
        assert len(store.jobs()) == 1000
        listed_s = time.thread_time() - begun
        begun = time.thread_time()
        for _ in range(10):
            assert store.jobs(unfinished=True) == []
        unfinished_s = (time.thread_time() - begun) / 10
    assert listed_s < 0.5  # 25 ms on a quiet machine
    assert unfinished_s < listed_s / 5


# ------------------------------------------------------------------------------------------------- cancelling
def test_asking_for_an_end(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for _ in range(5):
            add(store)
        store.apply(1, [SetStatus(JobStatus.SUCCEEDED)], 1.0)
        store.apply(2, [RUNNING], 1.0)
        store.apply(3, [SetStatus(JobStatus.RECOVERING)], 1.0)
        assert store.ask_cancel([1, 2, 4, 77]) == [2, 4]
        assert [row.id for row in store.jobs() if row.cancel_asked] == [4, 2]
        waiting = store.job(4)
        assert (waiting.status, waiting.reason) == (JobStatus.CANCELLED, "cancelled")
        assert waiting.ended_s is not None
        assert store.apply(4, [SetStatus(JobStatus.INIT)], 2.0) is JobStatus.CANCELLED, "whoever would begin it is told"
        assert store.ask_cancel(None) == [2, 3, 5]
        assert [row.id for row in store.jobs(unfinished=True) if row.cancel_asked] == [3, 2]
        store.apply(2, [SetStatus(JobStatus.CANCELLED)], 2.0)
        assert store.ask_cancel([2]) == store.ask_cancel([]) == []
    consistent(tmp_path)


# ------------------------------------------------------------------------------------------------- secrets
VALUES = {"env": {"WORD": "planted-1"}, "base_env": {"PGHOST": "planted-2"}, "secrets": {"HF_TOKEN": "planted-3"}}


def test_values_of_variables_are_apart(tmp_path: Path) -> None:
    for _ in range(2):  # the second after one that could not be added
        put_variables(tmp_path, 1, VALUES)
    path = tmp_path / "jobs" / "1" / "variables.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_variables(tmp_path, 1) == VALUES
    path.unlink()
    with pytest.raises(ConfigError, match=r"its variables can't be read: .*Submit it again"):
        read_variables(tmp_path, 1)


@pytest.mark.parametrize("end", ["ended", "cancelled"])
def test_values_go_with_the_end_of_their_job(tmp_path: Path, end: str) -> None:
    def begin(job_id: int) -> str:
        put_variables(tmp_path, job_id, VALUES)
        return "sky-1"

    with Store(tmp_path) as store:
        spec = JobSpec(env=VALUES["env"], base_env=VALUES["base_env"], secret_names=("HF_TOKEN",))
        store.add(spec, task_id_for=begin, user="ada")
        store.apply(1, [Log("note"), SetStatus(JobStatus.PENDING, "waits")], 1.0)
        assert read_variables(tmp_path, 1) == VALUES
        for file in tmp_path.glob("jobs.db*"):
            assert b"planted" not in file.read_bytes()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        if end == "ended":
            store.apply(1, [SetStatus(JobStatus.FAILED)], 1.0)
        else:
            store.ask_cancel(None)
    assert list((tmp_path / "jobs" / "1").iterdir()) == []


# ------------------------------------------------------------------------------------------------- several processes
def test_many_processes_make_it_and_write_at_once(tmp_path: Path) -> None:
    code = (
        "for i in range(30):\n"
        "    job = store.add(JobSpec(name=sys.argv[2]), task_id_for=str, user='u')\n"
        "    store.apply(1, [Log('note', f'{sys.argv[2]}.{i}'), Log('note')], 1.0)\n"
        "    store.apply(job, [SetStatus(JobStatus.RUNNING), SetStatus(JobStatus.SUCCEEDED)], 1.0)\n"
        "    store.ask_cancel([job])\n"
    )
    for process in [child(code, tmp_path, number) for number in range(4)]:
        finish(process)
    rows = consistent(tmp_path)
    assert [row.id for row in rows] == list(range(1, 121))
    with Store(tmp_path) as store:
        texts = [event.text for event in store.events(1) if event.text]
    assert sorted(texts) == sorted(f"{number}.{i}" for number in range(4) for i in range(30))
    assert {row.status for row in rows} == {JobStatus.SUCCEEDED}


def test_one_killed_while_it_writes_leaves_whole_transactions(tmp_path: Path) -> None:
    code = (
        "n = 0\n"
        "while True:\n"
        "    job = store.add(JobSpec(name='x'), task_id_for=str, user='u')\n"
        "    store.apply(job, [Log('a'), SetStatus(JobStatus.RUNNING), Log('b'), SetStatus(JobStatus.FAILED)], 1.0)\n"
        "    os.write(1, f'{job}\\n'.encode())\n"
    )
    told: list[int] = []  # jobs that it said were written whole
    for round_number in range(5):
        process = child(code, tmp_path)
        assert process.stdout is not None
        told += [int(process.stdout.readline()) for _ in range(5 + 7 * round_number)]
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout]
        process.communicate()
        rows = {row.id: row for row in consistent(tmp_path)}
        assert {rows[job_id].status for job_id in told} == {JobStatus.FAILED}
        with Store(tmp_path) as store:
            for row in rows.values():
                assert len(store.events(row.id)) == (4 if row.status is JobStatus.FAILED else 0)
        assert len(rows) - len(told) <= 1 + round_number, "one at most was not told of each time"


# ------------------------------------------------------------------------------------------------- what goes wrong
def test_a_full_disk_loses_nothing_from_before(tmp_path: Path) -> None:
    """Files of this process may not grow: for SQLite and for us that is a full disk."""
    code = (
        "import resource\n"
        "for i in range(20):\n"
        "    store.add(JobSpec(name=f'before-{i}'), task_id_for=str, user='u')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "written = 20\n"
        "try:\n"
        "    while True:\n"
        "        store.add(JobSpec(run='x' * 3000), task_id_for=str, user='u')\n"
        "        written += 1\n"
        "except AtollError as error:\n"
        "    print(error)\n"
        "print(written, len(store.jobs()))\n"
    )
    message, counts = finish(child(code, tmp_path)).splitlines()
    assert message.startswith(f"the job store {tmp_path}/jobs.db can't be written (")
    assert message.endswith("is the disk full, or a quota used up? Its earlier contents are still there")
    written, seen = map(int, counts.split())
    assert written == seen >= 20
    assert len(consistent(tmp_path)) == written
    with Store(tmp_path) as store:
        assert add(store) == written + 1, "with room again it goes on"


def test_no_room_for_secrets_means_no_job(tmp_path: Path) -> None:
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "try:\n"
        "    put = lambda job: put_variables(folder, job, {'env': {'A': 'x' * 300_000}})\n"
        "    store.add(JobSpec(), task_id_for=put, user='u')\n"
        "except AtollError as error:\n"
        "    print(error)\n"
    )
    assert "File too large" in finish(child(code, tmp_path))
    assert consistent(tmp_path) == []
    assert list((tmp_path / "jobs" / "1").iterdir()) == []


@pytest.mark.parametrize("where", [0, 5000])
def test_a_damaged_store_says_so_and_what_to_do(tmp_path: Path, where: int) -> None:
    tmp_path /= "it's a home"
    tmp_path.mkdir()
    with Store(tmp_path) as store:
        for _ in range(50):
            add(store, JobSpec(run="x" * 1000))
    path = tmp_path / "jobs.db"
    with path.open("r+b") as file:
        file.seek(where)
        file.write(os.urandom(os.path.getsize(path) - where))
    with pytest.raises(AtollError, match="is damaged") as caught:
        read_all(tmp_path)
    message = str(caught.value)
    assert str(path) in message
    advice = message.partition("move this one away: ")[2]
    put_variables(tmp_path, 50, {})  # the folder of a job of old
    subprocess.run(["bash", "-c", advice], check=True)
    with Store(tmp_path) as store:
        assert add(store) == 51, "not where an old job's log is"
    assert (tmp_path / "damaged" / "jobs.db").exists()


def read_all(folder: Path) -> None:
    with Store(folder) as store:
        for row in store.jobs():
            store.events(row.id)


def test_a_store_of_a_newer_atoll_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "jobs.db") as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(AtollError, match=r"made by a newer Atoll \(its version is 7, this one knows 1\): update Atoll"):
        Store(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match=r"can't be used: .*No such file or directory: '.*/gone/jobs.db'"):
        Store(tmp_path / "gone")


def test_a_mistake_in_the_code_is_not_taken_for_the_disks(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.close()
    with pytest.raises(sqlite3.ProgrammingError):
        store.jobs()


def test_it_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import atoll.tasks.store, atoll.tasks.machine\n"
        "third = [n for n, m in sys.modules.items() if 'site-packages' in (getattr(m, '__file__', None) or '')]\n"
        "assert not third, third\n"
    )
    import atoll

    source = Path(atoll.__file__).parents[1]
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(source)], check=True, cwd=tmp_path)


def test_stores_of_one_process_do_not_drop_each_others_locks(tmp_path):
    import threading

    failed = []

    def work():
        try:
            for _ in range(30):
                with Store(tmp_path) as store:
                    store.add(JobSpec(run="true"), task_id_for=str, user="me")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    with Store(tmp_path) as store:
        assert len(store.jobs()) == 120


@pytest.mark.parametrize("harm", ["folder", "row", "schema"])
def test_other_damages_say_so(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "jobs.db"
    if harm == "folder":
        path.mkdir()
    else:
        with Store(tmp_path) as store:
            add(store)
        with sqlite3.connect(path) as db:
            db.execute("UPDATE jobs SET spec = '[]'" if harm == "row" else "DROP TABLE events")
        db.close()
    with pytest.raises(AtollError, match="is a folder" if harm == "folder" else "is damaged") as caught:
        read_all(tmp_path)
    assert str(path) in str(caught.value)
    assert f"atoll down --purge {tmp_path.name}" in str(caught.value)


def test_a_number_that_something_else_has_is_left_out(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        assert add(store) == 1
        (tmp_path / "jobs").mkdir()
        (tmp_path / "jobs" / "2").write_text("in the way")
        (tmp_path / "jobs" / "3").symlink_to("nowhere")
        assert add(store) == 4
        assert add(store) == 5
    assert [row.id for row in consistent(tmp_path)] == [1, 4, 5]


@pytest.mark.parametrize("text", ["{", "null", '{"A": 1}', '{"env": {"A": 1}}'])
def test_damaged_variables(tmp_path: Path, text: str) -> None:
    put_variables(tmp_path, 1, VALUES)
    (tmp_path / "jobs" / "1" / "variables.json").write_text(text)
    with pytest.raises(ConfigError, match="are damaged: submit it again"):
        read_variables(tmp_path, 1)


@pytest.mark.parametrize(
    "harm",
    [
        "null",
        "[]",
        "{}",
        '{"name": 1}',
        '{"name": "other"}',
        '{"name": "c", "num_nodes": "2"}',
        '{"name": "c", "allocation": 1}',
        '{"name": "c", "status": "ODD"}',
        '{"name": "c", "allocation": {"infra": "local", "nodes": 5}}',
        '{"name": "c", "status": null}',
        "\x00\xff",
    ],
)
def test_a_damaged_record(tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "cluster.json").write_text(harm)
    with pytest.raises(ConfigError, match=r"cluster\.json is damaged"):
        record.load(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_somebody_elses_cluster(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        add(store)
    before = sorted(os.listdir(tmp_path))
    os.chown(tmp_path, 1, 1)
    with pytest.raises(ConfigError, match=rf"cluster {tmp_path.name} belongs to daemon: run as them, or use another"):
        Store(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
