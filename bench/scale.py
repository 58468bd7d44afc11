"""What costs grow like: time, memory and whatever else counts at three sizes, and the exponent that fits them.

    python bench/scale.py                        # all, under ten minutes on two quiet cores
    python bench/scale.py --only jobs,calls      # some sections
    python bench/scale.py --quick                # small sizes, to see that it runs

Each size runs in a process of its own with a state folder of its own. Memory is that process's peak without mapped
files; for ranks it is the proportional set size of the driver, its agent and all ranks once they are up. An exponent
of 1 is linear; of 0, constant. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, float]


@contextlib.contextmanager
def timed(figures: Figures, name: str = "time_s") -> Iterator[None]:
    """Adds the seconds that the body took."""
    began = time.perf_counter()
    yield
    figures[name] = time.perf_counter() - began


def descriptors(pid: int) -> int:
    """How many a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for each in found:
        for thread in Path(f"/proc/{each}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def pss_mb(pids: list[int]) -> float:
    """Memory of processes, what several share counted once."""
    lines = itertools.chain.from_iterable(Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids)
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


# ------------------------------------------------------------------------------------------------------- the pool
def ranks(num: int) -> Figures:
    """Enter a pool of so many ranks on one node, a broadcast, and leave."""
    import atoll as sky

    figures: Figures = {}
    pool = sky.ComputePool(nodes=1, workers_per_node=num, logs="quiet")
    with timed(figures, "enter_s"):
        pool.up()
    for _ in range(2):
        pool.run(os.getpid)
    took = []
    for _ in range(7):
        began = time.perf_counter()
        assert len(set(pool.run(os.getpid))) == num
        took.append(time.perf_counter() - began)
    figures["broadcast_s"] = statistics.median(took)
    figures["memory_mb"] = pss_mb(tree(os.getpid()))
    figures["driver_fds"] = descriptors(os.getpid())
    figures["agent_fds"] = max(descriptors(pid) for pid in tree(os.getpid())[1:])
    with timed(figures, "leave_s"):
        pool.down()
    return figures


def mapped(num: int) -> Figures:
    """``pool.map`` over so many items on two ranks."""
    import atoll as sky

    figures: Figures = {}
    with sky.ComputePool(nodes=2, logs="quiet") as pool, timed(figures):
        assert sum(1 for _ in pool.map(abs, range(num))) == num
    return figures


def gathered(num: int) -> Figures:
    """``sky.gather(..., stream=True)`` of so many calls on two ranks."""
    import atoll as sky

    figures: Figures = {}
    call = sky.compute(abs)
    with sky.ComputePool(nodes=2, logs="quiet") as pool, timed(figures):
        assert sum(1 for _ in sky.gather(*map(call, range(num)), stream=True) >> pool) == num
    return figures


def cancelled(num: int) -> Figures:
    """Cancel so many calls that wait behind one that sleeps."""
    import atoll as sky

    figures: Figures = {}
    with sky.ComputePool(nodes=1, logs="quiet") as pool:
        futures = [pool.submit(time.sleep, 1000) for _ in range(num)]
        with timed(figures):
            for future in reversed(futures):
                future.cancel()
    return figures


# ------------------------------------------------------------------------------------------------------------ jobs
def _new_cluster(**fields: Any) -> Any:
    from atoll.core.paths import atoll_home
    from atoll.tasks import record
    from atoll.tasks.spec import ClusterSpec

    folder = atoll_home() / "clusters" / "c"
    folder.mkdir(parents=True)
    record.save(folder, ClusterSpec("c", created_s=time.time(), **fields))
    return folder


def _left(folder: Path) -> Figures:
    """What the jobs of a cluster left behind."""
    from atoll.tasks.store import Store

    with Store(folder) as store:
        (num_events,) = store._db.execute("SELECT COUNT(*) FROM events").fetchone()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"events": num_events, "left_mb": size / 1e6}


def _sweep(num: int) -> Any:
    from atoll.tasks.spec import JobSpec

    return JobSpec(run="true", group="s", num_in_group=num, parallel=8, base_env={"PATH": os.environ["PATH"]})


def real_jobs(num: int) -> Figures:
    """A sweep of so many jobs that do nothing, 8 at a time, until all have ended. Memory is the supervisor's peak."""
    from atoll.tasks import supervisor
    from atoll.tasks.control import LocalControl

    folder = _new_cluster()
    control, spec, figures = LocalControl(folder), _sweep(num), dict[str, float]()
    with timed(figures, "submit_s"):
        for _ in range(num):
            control.submit(spec, {})
    with timed(figures):
        while supervisor.is_running(folder):
            with contextlib.suppress(OSError, TypeError):
                status = Path(f"/proc/{supervisor.pid_of(folder)}/status").read_text()
                figures["memory_mb"] = int(status.partition("VmHWM:")[2].split()[0]) / 1024
            time.sleep(0.1)
    figures["time_s"] += figures["submit_s"]
    assert all(row.status == "SUCCEEDED" for row in control.queue())
    return {**figures, **_left(folder)}


def job_ranks(num: int) -> Figures:
    """A job of so many processes on two nodes, each of which prints a line."""
    from atoll.tasks.control import LocalControl
    from atoll.tasks.spec import JobSpec

    folder = _new_cluster(num_nodes=2)
    control, figures, pieces = LocalControl(folder), dict[str, float](), list[bytes]()
    spec = JobSpec(command=("/bin/echo", "hello"), num_nodes=2, num_processes=num // 2, base_env=dict(os.environ))
    with timed(figures):
        status = control.follow(control.submit(spec, {}), pieces.append)
    assert status == "SUCCEEDED"
    assert b"".join(pieces).count(b") hello\n") == num
    return {**figures, **_left(folder)}


def supervised(num: int) -> Figures:
    """The supervisor alone: so many jobs of a sweep, 8 at a time, each of which ends at once; then ``atoll queue``."""
    from atoll.cli.shown import print_jobs
    from atoll.tasks import dispatcher, record, supervisor
    from atoll.tasks.control import LocalControl
    from atoll.tasks.spec import JobStatus
    from atoll.tasks.store import Store
    from atoll.tasks.transitions import SetStatus

    class Ends:
        status, deadline, cancelled, finished = JobStatus.RUNNING, None, False, True

        def __init__(self, job: Any, nodes: tuple[int, ...], *_: object) -> None:
            self.job, self.nodes = job, nodes

        def start(self) -> None: ...
        def close(self) -> None: ...

    folder = _new_cluster()
    dispatcher.JobRunner = Ends  # type: ignore[misc,assignment]
    lock = supervisor.open_lock(folder)
    assert record.take_lock(lock, 0.0)
    figures: Figures = {}
    first, _whoever_started_it = socket.socketpair()
    with Store(folder) as ours:
        dispatch = dispatcher.Dispatcher(folder, ours, lock, first)
        with timed(figures, "submit_s"):
            for _ in range(num):
                dispatch.add(_sweep(num), {}, "ada")
                dispatch._look()
        with timed(figures):
            while dispatch._runners:
                for job_id in dispatch._runners:
                    ours.apply(job_id, [SetStatus(JobStatus.RUNNING)], time.time())
                    ours.apply(job_id, [SetStatus(JobStatus.SUCCEEDED)], time.time())
                dispatch._clear_finished()
                dispatch._look()
        dispatch._close()
    with timed(figures, "queue_s"), contextlib.redirect_stdout(open(os.devnull, "w")):
        print_jobs(LocalControl(folder).queue())
    return {**figures, **_left(folder)}


# ------------------------------------------------------------------------------------------------------------ logs
def log_lines(num: int) -> Figures:
    """Eight ranks print so many lines into a job's log; the last ten of one rank; then all of it is read."""
    from atoll.core.paths import atoll_home
    from atoll.tasks.logs import RUN_LOG, Follower, JobLog, only_rank

    folder = atoll_home()
    folder.mkdir(parents=True, exist_ok=True)
    figures: Figures = {}
    with timed(figures, "write_s"):
        log = JobLog(folder, ["a-secret-value"])
        streams = [log.stream(f"(worker{rank}, rank={rank}, pid=1) ") for rank in range(8)]
        for at in range(0, num, 500):
            block = "".join(f"step {i} loss 2.345 grad norm 0.123 tokens/s 12345\n" for i in range(at, at + 500))
            streams[at // 500 % 8].feed(block.encode(), 1.0)
        log.close(1.0)
    figures["left_mb"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    lines: list[bytes] = []
    before = _bytes_read()
    with timed(figures, "tail_s"), Follower(folder / RUN_LOG, lines.append, only_rank(3, several=True)) as follower:
        follower.skip(follower.position_of_tail(10), 0)
        follower.drain()
    assert b"".join(lines).count(b"\n") == 10
    figures["tail_read_mb"] = (_bytes_read() - before) / 1e6
    num_bytes = 0

    def count(data: bytes) -> None:
        nonlocal num_bytes
        num_bytes += len(data)

    with timed(figures, "read_s"), Follower(folder / RUN_LOG, count) as follower:
        follower.drain()
    assert num_bytes == (folder / RUN_LOG).stat().st_size
    return figures


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


# --------------------------------------------------------------------------------------------------------- trainer
def _prepared(path: Path) -> Figures:
    from atoll.train.data.prepare import prepare
    from atoll.train.recipe.schema import DataSection

    section = DataSection(path=str(path), tokenizer="bytes", workers=1)
    figures: Figures = {}
    for name in ("time_s", "again_s"):
        with timed(figures, name):
            prepare(section, seq_len=128, progress=lambda _: None, note=lambda _: None).close()
    return figures


def text(num_mb: int) -> Figures:
    """Prepare one text file of so many MB, as bytes; then open it again from the cache."""
    words = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be\n"
    path = Path("corpus.txt")
    with open(path, "w") as file:
        for at in range(num_mb * 13_250):
            file.write(words[at % 50 :])
    return _prepared(path)


def small_files(num: int) -> Figures:
    """Prepare so many files of 200 bytes, one document each; then open them again from the cache."""
    folder = Path("corpus")
    folder.mkdir()
    for at in range(num):
        (folder / f"{at:06}.txt").write_text(f"document {at}\n" * 15)
    return _prepared(folder)


def steps(num: int) -> Figures:
    """Go on after so many steps of ``metrics.jsonl``; then draw the loss curve."""
    import matplotlib.figure  # noqa: F401 - its import is no part of the figure

    from atoll.train.events import RunEnded
    from atoll.train.metrics.journal import STEPS, Journal
    from atoll.train.reporters import LossCurve

    row = '{"step":%d,"tokens":%d,"samples":%d,"loss":%.6f,"lr":0.0003,"grad_norm":0.5,"tokens_per_s":12345.6,'
    row += '"tokens_per_s_per_gpu":12345.6,"step_s":0.1,"data_wait_s":0.001,"memory_bytes":123456789,"mfu":0.4}\n'
    with open(STEPS, "w") as file:
        file.writelines(row % (i, i * 8192, i * 8, 2 + 8 / (1 + i / 1000)) for i in range(1, num + 1))
    figures: Figures = {}
    with timed(figures, "start_s"):
        Journal(".", num).close()
    with timed(figures, "plot_s"):
        LossCurve(Path(), "bench")(RunEnded("finished", num, 2.0, num * 8192, 1.0))
    assert Path("loss.png").exists()
    return figures


# ------------------------------------------------------------------------------------------------------ the harness
@dataclass(frozen=True)
class Case:
    """One thing that is measured at several sizes."""

    section: str
    run: Callable[[int], Figures]
    unit: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]


CASES = (
    Case("ranks", ranks, "ranks", (16, 64, 256), (2, 4, 8)),
    Case("ranks", job_ranks, "ranks", (16, 64, 256), (2, 4, 8)),
    Case("calls", mapped, "items", (10_000, 100_000, 1_000_000), (1000, 3000, 10_000)),
    Case("calls", gathered, "calls", (300, 3000, 30_000), (100, 300, 1000)),
    Case("calls", cancelled, "calls", (1000, 10_000, 100_000), (100, 300, 1000)),
    Case("jobs", real_jobs, "jobs", (30, 100, 300), (4, 8, 16)),
    Case("jobs", supervised, "jobs", (300, 1000, 3000), (30, 100, 300)),
    Case("logs", log_lines, "lines", (50_000, 500_000, 5_000_000), (5000, 20_000, 50_000)),
    Case("text", text, "MB", (5, 50, 500), (1, 2, 5)),
    Case("files", small_files, "files", (100, 1000, 10_000), (10, 30, 100)),
    Case("steps", steps, "steps", (10_000, 100_000, 1_000_000), (1000, 3000, 10_000)),
)


def exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    """The slope of the line that fits both as logarithms best."""
    x, y = [math.log(size) for size in sizes], [math.log(max(value, 1e-6)) for value in values]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def measure(case: Case, size: int) -> Figures:
    """One size, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="atoll-scale-", dir="/var/tmp") as folder:
        env = {**os.environ, "ATOLL_HOME": f"{folder}/home", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, os.path.abspath(__file__), "--child", case.run.__name__, str(size)]
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
        try:
            out, _ = process.communicate()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        if process.returncode != 0:
            sys.exit(f"{case.run.__name__} of {size:,} {case.unit} failed")
        figures: Figures = json.loads(out.splitlines()[-1])
        return figures


def child(name: str, size: int) -> None:
    """Prints the figures of one size as JSON."""
    peak_kb = 0

    def sample() -> None:
        nonlocal peak_kb
        while True:
            status = Path("/proc/self/status").read_text()
            peak_kb = max(peak_kb, int(status.partition("RssAnon:")[2].split()[0]))
            time.sleep(0.02)

    threading.Thread(target=sample, daemon=True).start()
    figures = next(case.run for case in CASES if case.run.__name__ == name)(size)
    figures.setdefault("memory_mb", peak_kb / 1024)
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="sections, e.g. jobs,calls; all by default")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], int(options.child[1]))
        return
    known = list(dict.fromkeys(case.section for case in CASES))
    wanted = options.only.split(",") if options.only else known
    if unknown := set(wanted) - set(known):
        sys.exit(f"--only {', '.join(unknown)}: expected some of {', '.join(known)}")
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}")
    found = []
    for case in CASES:
        if case.section not in wanted:
            continue
        sizes = case.quick if options.quick else case.sizes
        print(f"\n{case.section}: {(case.run.__doc__ or '').strip()}", flush=True)
        results = []
        for size in sizes:
            results.append(measure(case, size))
            told = "   ".join(f"{name} {value:,.4g}" for name, value in results[-1].items())
            print(f"  {size:>9,} {case.unit:6} {told}", flush=True)
        fitted = {name: exponent(sizes, [each[name] for each in results]) for name in results[0]}
        print(f"  {'exponent':>9} {'':6} " + "   ".join(f"{name} {value:.2f}" for name, value in fitted.items()))
        found.append({"case": case.run.__name__, "sizes": sizes, "results": results, "exponents": fitted})
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
