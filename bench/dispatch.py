"""What a call costs: Atoll beside Ray and Dask, each in turn on this machine.

    make bench            or   python bench/dispatch.py [--only atoll,ray,dask] [--quick]

Every system runs in a fresh process of its own, so that none slows another. Prints one table; each row says what was
measured, and the ratio to the better peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TARGETS = {
    "one_p50_ms": ("warm >> of a no-op, p50", "ms", 0.12),
    "one_p99_ms": ("warm >> of a no-op, p99", "ms", 0.3),
    "task_p50_ms": ("(Ray task, p50)", "ms", None),
    "task_p99_ms": ("(Ray task, p99)", "ms", None),
    "gang8_p50_ms": ("@ of a no-op over 8 local ranks, p50", "ms", 1.0),
    "map_per_s": ("map of 10,000 no-ops over 2 ranks", "/s", 8000),
    "enter_s": ("enter a 2-node pool and make the first call", "s", 0.25),
    "array_first_gb_s": ("1 GiB argument to 2 ranks, first call, each", "GB/s", None),
    "array_warm_gb_s": ("1 GiB argument to 2 ranks, from the second on, each", "GB/s", 1.5),
    "array_driver_gib": ("  extra memory in the driver for it", "GiB", 1.2),
    "death_s": ("rank death to exception", "s", 1.0),
    "ctrl_c_s": ("Ctrl-C to nothing left", "s", 5.0),
    "enter64_s": ("64 local ranks: enter", "s", 3.0),
    "gang64_ms": ("64 local ranks: one @", "ms", None),
    "leave64_s": ("64 local ranks: leave", "s", None),
    "idle_pss_mb": ("64 local ranks: proportional memory of an idle rank", "MB", 15.0),
}
MORE_IS_BETTER = ("/s", "GB/s")


def noop() -> None:
    """What is called."""


def identity(value: int) -> int:
    """What is mapped."""
    return value


def touch(array) -> float:
    """Read one byte of every page and write one element, so that the array is really there and writable."""
    array[0] = 1.0
    return float(array[::512].sum())


def timed(call: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each round."""
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return sorted(taken)


def percentiles(prefix: str, taken: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    return {
        f"{prefix}_p50_ms": statistics.median(taken) * 1e3,
        f"{prefix}_p99_ms": taken[int(len(taken) * 0.99)] * 1e3,
    }


def settle_memory(size_gib: int = 5) -> None:
    """Touch memory and give it back: what a virtual machine's host has yet to provide is nobody's figure."""
    import mmap

    with mmap.mmap(-1, size_gib << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE):
        pass


def peak_gib() -> float:
    """This process's own peak memory, memory files it made included."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def shared_gib() -> float:
    """Memory files and shared memory of the whole machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) / (1 << 20)
    return 0.0


def measure_atoll(quick: bool) -> dict[str, float]:
    """Every row for Atoll."""
    import atoll as sky

    out: dict[str, float] = {}
    call = sky.compute(noop)
    entered = []
    for _ in range(3 if quick else 10):
        started = time.perf_counter()
        with sky.ComputePool(nodes=2) as pool:
            _ = call() @ pool
            entered.append(time.perf_counter() - started)
    out["enter_s"] = statistics.median(entered)
    with sky.ComputePool(nodes=2) as pool:
        timed(lambda: call() >> pool, 300)
        out |= percentiles("one", timed(lambda: call() >> pool, 500 if quick else 5000))
        for _ in range(2):  # the first one adapts the chunk
            started = time.perf_counter()
            count = sum(1 for _ in pool.map(identity, range(10_000)))
            out["map_per_s"] = count / (time.perf_counter() - started)
    with sky.ComputePool(nodes=2, workers_per_node=4) as pool:
        timed(lambda: call() @ pool, 100)
        out["gang8_p50_ms"] = percentiles("gang8", timed(lambda: call() @ pool, 1000))["gang8_p50_ms"]
    out |= _arrays_atoll()
    out |= _failures_atoll()
    out |= _wide_atoll(call)
    return out


def _arrays_atoll() -> dict[str, float]:
    import numpy as np

    import atoll as sky

    array = np.ones(1 << 27)  # 1 GiB
    size = array.nbytes / 1e9
    send = sky.compute(touch)
    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        _ = send(np.ones(1)) @ pool
        peak, shared = peak_gib(), shared_gib()
        taken = []
        for _ in range(6):
            started = time.perf_counter()
            _ = send(array) @ pool
            taken.append(time.perf_counter() - started)
        extra = peak_gib() - peak + shared_gib() - shared
    return {
        "array_first_gb_s": size / taken[0],
        "array_warm_gb_s": size / statistics.median(taken[1:]),
        "array_driver_gib": extra,
    }


def _failures_atoll() -> dict[str, float]:
    import atoll as sky

    @sky.compute
    def die_or_wait() -> float:
        import os
        import signal
        import time

        if sky.instance_info().rank == 1:
            time.sleep(0.3)
            Path(os.environ["MARK"]).write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return 0.0

    mark = Path(os.environ.get("TMPDIR", "/tmp")) / f"atoll-bench-{os.getpid()}"
    with sky.ComputePool(nodes=2, env={"MARK": str(mark)}, logs="quiet") as pool:
        try:
            _ = die_or_wait() @ pool
        except sky.WorkerDied:
            death = time.time() - float(mark.read_text())
    mark.unlink()
    return {"death_s": death, "ctrl_c_s": _ctrl_c()}


def _ctrl_c() -> float:
    import signal

    tag = f"bench{os.getpid()}"
    script = (
        "import atoll as sky, time, subprocess\n"
        "@sky.compute\n"
        "def busy():\n"
        "    subprocess.Popen(['setsid', 'sleep', '300']); print('up', flush=True); time.sleep(300)\n"
        "with sky.ComputePool(nodes=2) as pool:\n"
        "    busy() @ pool\n"
    )
    env = {**os.environ, "ATOLL_BENCH_TAG": tag}
    driver = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True
    )
    assert driver.stdout is not None
    for _ in range(2):
        driver.stdout.readline()
    started = time.perf_counter()
    driver.send_signal(signal.SIGINT)
    while _tagged(tag):
        time.sleep(0.005)
    taken = time.perf_counter() - started
    driver.wait()
    driver.stdout.close()
    return taken


def _tagged(tag: str) -> list[int]:
    needle = f"ATOLL_BENCH_TAG={tag}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _wide_atoll(call) -> dict[str, float]:
    import psutil

    import atoll as sky

    started = time.perf_counter()
    with sky.ComputePool(nodes=2, workers_per_node=32) as pool:
        enter = time.perf_counter() - started
        started = time.perf_counter()
        _ = call() @ pool
        gang = time.perf_counter() - started
        time.sleep(1.0)
        ranks = [
            child for child in psutil.Process().children(recursive=True) if "atoll.worker" in " ".join(child.cmdline())
        ]
        pss = [_pss_mb(child.pid) for child in ranks]
        started = time.perf_counter()
    leave = time.perf_counter() - started
    assert len(pss) == 64, f"expected 64 ranks, found {len(pss)}"
    return {"enter64_s": enter, "gang64_ms": gang * 1e3, "leave64_s": leave, "idle_pss_mb": statistics.mean(pss)}


def _pss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure_ray(quick: bool) -> dict[str, float]:
    """The rows that Ray has a counterpart for: two actors are its two ranks."""
    import numpy as np
    import ray

    started = time.perf_counter()
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=6 << 30)
    actor_class = ray.remote(num_cpus=1)(_Actor)
    actors = [actor_class.remote() for _ in range(2)]
    ray.get([actor.noop.remote() for actor in actors])
    out = {"enter_s": time.perf_counter() - started}
    one = actors[0]
    timed(lambda: ray.get(one.noop.remote()), 300)
    out |= percentiles("one", timed(lambda: ray.get(one.noop.remote()), 500 if quick else 5000))
    pool = ray.util.ActorPool(actors)
    for _ in range(2):
        started = time.perf_counter()
        count = sum(1 for _ in pool.map(lambda actor, value: actor.identity.remote(value), range(10_000)))
        out["map_per_s"] = count / (time.perf_counter() - started)
    array = np.ones(1 << 27)
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        reference = ray.put(array)
        ray.get([actor.touch.remote(reference) for actor in actors])
        taken.append(time.perf_counter() - started)
        del reference
    out["array_first_gb_s"] = array.nbytes / 1e9 / taken[0]
    out["array_warm_gb_s"] = array.nbytes / 1e9 / statistics.median(taken[1:])
    for actor in actors:
        ray.kill(actor)
    task = ray.remote(noop)
    timed(lambda: ray.get(task.remote()), 100)
    out |= percentiles("task", timed(lambda: ray.get(task.remote()), 300 if quick else 2000))
    eight = [ray.remote(num_cpus=0)(_Actor).remote() for _ in range(8)]
    timed(lambda: ray.get([actor.noop.remote() for actor in eight]), 50)
    gang = timed(lambda: ray.get([actor.noop.remote() for actor in eight]), 500)
    out["gang8_p50_ms"] = statistics.median(gang) * 1e3
    ray.shutdown()
    return out


class _Actor:
    def noop(self) -> None:
        """Nothing."""

    def identity(self, value: int) -> int:
        """Its argument."""
        return value

    def touch(self, array) -> float:
        """Ray's arrays are read-only: only the reading half is asked of it."""
        return float(array[::512].sum())


def measure_dask(quick: bool) -> dict[str, float]:
    """The rows that Dask has a counterpart for: two worker processes of one thread are its two ranks."""
    from distributed import Client, LocalCluster

    started = time.perf_counter()
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    client = Client(cluster)
    client.submit(noop, pure=False).result()
    out = {"enter_s": time.perf_counter() - started}
    timed(lambda: client.submit(noop, pure=False).result(), 100)
    out |= percentiles("one", timed(lambda: client.submit(noop, pure=False).result(), 200 if quick else 1000))
    for _ in range(2):
        started = time.perf_counter()
        count = len(client.gather(client.map(identity, range(10_000), pure=False)))
        out["map_per_s"] = count / (time.perf_counter() - started)
    client.close()
    cluster.close()
    return out


MEASURES = {"atoll": measure_atoll, "ray": measure_ray, "dask": measure_dask}


def main() -> None:
    """Measure each system in a process of its own, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="atoll,ray,dask", help="which systems, comma separated")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        settle_memory()
        print("RESULT " + json.dumps(MEASURES[options.measure](options.quick)))
        return
    figures = {}
    for name in options.only.split(","):
        print(f"measuring {name} ...", file=sys.stderr)
        command = [sys.executable, __file__, "--measure", name, *(["--quick"] if options.quick else [])]
        env = {**os.environ, "RAY_DISABLE_IMPORT_WARNING": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
        if line is None:
            print(f"{name} could not be measured:\n{done.stderr[-2000:]}", file=sys.stderr)
            sys.exit(1)
        figures[name] = json.loads(line.removeprefix("RESULT "))
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def show(figures: dict[str, dict[str, float]]) -> None:
    """The table, in Markdown."""
    print(f"\n{os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}\n")
    peers = [name for name in figures if name != "atoll"]
    print("| figure | Atoll | " + " | ".join(name.capitalize() for name in peers) + " | best peer ÷ Atoll | target |")
    print("|---|---|" + "---|" * (len(peers) + 2))
    for key, (title, unit, target) in TARGETS.items():
        row = {name: figures[name].get(key) for name in figures}
        if all(value is None for value in row.values()):
            continue
        ours = row.get("atoll")
        theirs = [value for name in peers if (value := row[name]) is not None]
        more = unit in MORE_IS_BETTER
        ratio = "–"
        if ours and theirs:
            best = max(theirs) if more else min(theirs)
            ratio = f"{ours / best:.1f}× better" if more else f"{best / ours:.1f}× better"
        cells = [_cell(row.get(name), unit) for name in ("atoll", *peers)]
        goal = "–" if target is None else f"{'≥' if more else '≤'} {target:,g} {unit}"
        print(f"| {title} | {' | '.join(cells)} | {ratio} | {goal} |")


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


if __name__ == "__main__":
    main()
