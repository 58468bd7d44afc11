"""The launcher, as commands a person types: each figure beside its target, and beside the peer where there is one.

    python bench/launch.py            # all; --only echo,ssh picks some

The peers are bare ``torchrun`` and bare ``ssh`` (a channel that echoes, and ``cat`` through it), each measured in turn
with Atoll on this machine. The ssh figures start an sshd of their own on a free port of 127.0.0.1, with keys made for
the run. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

BIN = Path(sys.executable).parent
ATOLL = str(BIN / "atoll")
ROWS: list[tuple[str, str, str, str, str]] = []


def row(figure: str, ours: float, unit: str, target: str, met: bool, peer: str = "–") -> None:
    """One line of the table, printed at once."""
    ROWS.append((figure, f"{ours:.3g} {unit}", peer, target, "yes" if met else "NO"))
    print(
        f"{figure:58} {ours:9.3g} {unit:6} peer {peer:24} target {target:12} {'met' if met else 'NOT MET'}", flush=True
    )


def atoll(*words: str, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command; fails with its output."""
    done = subprocess.run([ATOLL, *words], capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]
    if check and done.returncode != 0:
        sys.exit(f"atoll {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def median(turns: int, action: Callable[[int], float]) -> float:
    """The median of some turns."""
    return statistics.median(action(turn) for turn in range(turns))


# ---------------------------------------------------------------------------------------------- local figures


def echo(turns: int) -> None:
    """From the command to the prompt, on a cluster that is made for it."""

    def once(turn: int) -> float:
        started = time.perf_counter()
        done = atoll("launch", "-y", "-c", f"echo{turn}", "--num-nodes", "2", "echo hello")
        took = time.perf_counter() - started
        assert done.stdout.count("hello") >= 2, done.stdout
        atoll("down", "-y", f"echo{turn}")
        return took

    once(99)
    took = median(turns, once)
    row("atoll launch of echo on 2 local nodes, command to prompt", took, "s", "≤ 1.0 s", took <= 1.0)


def first_line(command: list[str], word: str) -> float:
    """Seconds until a line with the word appears."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    took = next(time.perf_counter() - started for line in process.stdout if word in line)
    process.communicate(timeout=60)
    return took


def run(turns: int, folder: Path) -> None:
    """To the first line of a rank that prints at once."""
    script = folder / "line.py"
    script.write_text("import os\nprint('rank', os.environ['RANK'], flush=True)\n")
    ours, theirs = [], []
    for turn in range(turns + 1):
        mine = first_line([ATOLL, "run", "--nproc-per-node", "2", str(script)], "rank")
        peer = first_line([str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(script)], "rank")
        if turn:
            ours.append(mine)
            theirs.append(peer)
    mine, peer = statistics.median(ours), statistics.median(theirs)
    row("atoll run to the first rank line", mine, "s", "≤ torchrun", mine <= peer, f"torchrun {peer:.2f} s")


def logs(folder: Path) -> None:
    """Eight ranks that print as fast as they can, and one that prints now and then."""
    num_lines, width = 200_000, 100
    script = folder / "loud.py"
    script.write_text(
        "import os, sys\n"
        f"n, w = {num_lines}, {width}\n"
        "r = os.environ['RANK']\n"
        "for at in range(0, n, 1000):\n"
        "    sys.stdout.write(''.join(f'{r} {i:08d} '.ljust(w - 1, 'x') + '\\n' for i in range(at, at + 1000)))\n"
    )
    shown = folder / "shown"
    started = time.perf_counter()
    with open(shown, "wb") as out:
        subprocess.run([ATOLL, "run", "--nproc", "8", str(script)], stdout=out, stderr=subprocess.DEVNULL, check=True)
    took = time.perf_counter() - started
    found = re.findall(rb"(?m)^\(head, rank=\d+, pid=\d+\) (\d) (\d{8}) x+$", shown.read_bytes())
    assert len(found) == len(set(found)) == 8 * num_lines, f"{len(found)} lines of {8 * num_lines} came through"
    rate = 8 * num_lines * width / took / 1e6
    row("log throughput, 8 ranks printing, start and end included", rate, "MB/s", "≥ 80 MB/s", rate >= 80)
    quiet = folder / "quiet.py"
    quiet.write_text(
        "import time\nfor _ in range(30):\n    time.sleep(0.2)\n    print('at', time.time(), flush=True)\n"
    )
    process = subprocess.Popen([ATOLL, "run", str(quiet)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    late = [time.time() - float(line.split()[-1]) for line in process.stdout if "at " in line]
    process.wait(60)
    worst = 1000 * sorted(late)[-2]
    row("from print to screen when quiet, median", 1000 * statistics.median(late), "ms", "≤ 50 ms", worst <= 50)


def status(turns: int, folder: Path) -> None:
    """With 1,000 past jobs in the store."""
    from atoll.tasks.spec import JobSpec, JobStatus
    from atoll.tasks.store import Store
    from atoll.tasks.transitions import SetStatus

    atoll("launch", "-y", "-c", "old", "echo hello")
    with contextlib.closing(Store(Path(os.environ["ATOLL_HOME"]) / "clusters" / "old")) as store:
        for _ in range(1000):
            job = store.add(JobSpec(name="past", run="true"), task_id_for=lambda number: f"sky-{number}", user="bench")
            store.apply(job, [SetStatus(JobStatus.SUCCEEDED, "", 0)], time.time())

    def once(_turn: int) -> float:
        started = time.perf_counter()
        atoll("status")
        return time.perf_counter() - started

    took = median(turns, once)
    row("atoll status with 1,000 past jobs", took, "s", "≤ 0.3 s", took <= 0.3)
    atoll("down", "-y", "old")


def many() -> None:
    """64 local nodes, until each has printed."""
    command = [ATOLL, "launch", "-y", "-c", "many", "--num-nodes", "64", "echo I am $SKYPILOT_NODE_RANK"]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen: set[str] = set()
    for line in process.stdout:
        if (found := re.search(r"rank=(\d+).*I am \1\b", line)) is not None:
            seen.add(found[1])
            if len(seen) == 64:
                took = time.perf_counter() - started
    process.wait(60)
    assert len(seen) == 64, f"{len(seen)} of 64 printed"
    row("64 local nodes: all ranks printed", took, "s", "≤ 5 s", took <= 5)
    atoll("down", "-y", "many")


# ---------------------------------------------------------------------------------------------- ssh on loopback


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[None]:
    """An sshd on a free port of 127.0.0.1, for keys made here; ``ssh bench`` of this process finds it."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        sys.exit("bench/launch.py: sshd is missing: apt-get install openssh-server, or leave ssh out with --only")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    authorized = folder / "authorized"
    authorized.write_bytes((folder / "user.pub").read_bytes())
    settings = {
        "Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "AuthorizedKeysFile": authorized,
        "PasswordAuthentication": "no", "UsePAM": "no", "StrictModes": "no", "PidFile": "none", "MaxStartups": 100,
    }  # fmt: skip
    (folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    os.makedirs("/run/sshd", exist_ok=True)
    process = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL)
    known = (folder / "host.pub").read_text().split()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {known[0]} {known[1]}\n")
    (folder / "ssh_config").write_text(
        f"Host bench\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentitiesOnly yes\n"
        f"  IdentityFile {folder / 'user'}\n  UserKnownHostsFile {folder / 'known'}\n"
    )
    wrapper = folder / "bin" / "ssh"  # the home that ssh looks for its config in can't be set
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder / "ssh_config"} "$@"\n')
    wrapper.chmod(0o755)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{wrapper.parent}:{path}"
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield
    finally:
        os.environ["PATH"] = path
        process.terminate()
        process.wait()


def round_trip(num: int) -> float:
    """Median round trip of 100 bytes through one bare channel, in ms."""
    command = ["ssh", "bench", "cat"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    took = []
    for turn in range(num + 20):
        started = time.perf_counter()
        process.stdin.write(b"x" * 100)
        while left := 100:
            left -= len(process.stdout.read(left))
            if not left:
                break
        if turn >= 20:
            took.append(time.perf_counter() - started)
    process.stdin.close()
    process.wait(10)
    return 1000 * statistics.median(took)


def through_cat(size: int) -> float:
    """MiB/s of ``cat`` through one bare channel."""
    started = time.perf_counter()
    subprocess.run(["ssh", "bench", "cat >/dev/null"], input=bytes(size), check=True)
    return size / 2**20 / (time.perf_counter() - started)


def ssh(folder: Path, turns: int) -> None:
    """A warm call and a large argument, beside bare channels."""
    import numpy as np

    import atoll as sky

    size = 200 << 20
    with sshd(folder):
        provider = sky.SSH(hosts=["bench"], python=sys.executable)
        bare = round_trip(500)
        plain: list[float] = []
        ours: dict[str, list[float]] = {"NumPy": [], "bytes": []}
        with sky.ComputePool(provider) as pool:
            took = []
            for turn in range(550):
                started = time.perf_counter()
                _ = pool.run_one(_nothing, None)
                if turn >= 50:
                    took.append(time.perf_counter() - started)
            mine = 1000 * statistics.median(took)
            array = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
            values: dict[str, object] = {"NumPy": array, "bytes": array.tobytes()}
            for _ in range(turns):
                plain.append(through_cat(size))
                for kind, value in values.items():
                    started = time.perf_counter()
                    _ = pool.run_one(_nothing, value)
                    ours[kind].append(size / 2**20 / (time.perf_counter() - started))
        row("warm call over ssh on loopback, p50", mine, "ms", "≤ ssh + 1 ms", mine <= bare + 1, f"ssh {bare:.2f} ms")
        cat = statistics.median(plain)
        for kind, rates in ours.items():
            rate = statistics.median(rates)
            row(f"200 MiB argument over one ssh channel, {kind}", rate, "MiB/s", "≥ 90 % of cat", rate >= 0.9 * cat,
                f"cat {cat:.0f} MiB/s")  # fmt: skip


def _nothing(_value: object) -> None:
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = ("echo", "run", "ssh", "logs", "status", "many")
    parser.add_argument("--only", default=",".join(names), help=f"some of {','.join(names)}")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", help="write the rows there as well")
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(names):
        parser.error(f"unknown figure {', '.join(unknown)}; known: {', '.join(names)}")
    with tempfile.TemporaryDirectory(prefix="bench-") as text:
        folder = Path(text)
        os.environ["ATOLL_HOME"] = str(folder / "home")
        actions: dict[str, Callable[[], None]] = {
            "echo": lambda: echo(args.turns),
            "run": lambda: run(args.turns, folder),
            "ssh": lambda: ssh(folder, args.turns),
            "logs": lambda: logs(folder),
            "status": lambda: status(args.turns, folder),
            "many": many,
        }
        for name in names:
            if name in wanted:
                actions[name]()
    print("\n| figure | Atoll | peer | target | met |\n|---|---|---|---|---|")
    for entry in ROWS:
        print(f"| {' | '.join(entry)} |")
    if args.json:
        Path(args.json).write_text(json.dumps(ROWS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
