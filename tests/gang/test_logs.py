"""Everything a rank writes is captured: every byte once, live, labelled, in files."""

from __future__ import annotations

import os
import pty
import re
import stat
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.pools import eventually, read_terminal, script, start_script

import atoll as sky
from atoll.gang.log_router import LineCutter, LogLine, LogRouter


class Collector:
    """A ``logs=`` callable."""

    def __init__(self) -> None:
        self.lines: list[LogLine] = []

    def __call__(self, line: LogLine) -> None:
        self.lines.append(line)

    def text(self, rank: int, stream: str = "stdout") -> str:
        return "".join(line.text + line.end for line in self.lines if (line.rank, line.stream) == (rank, stream))


@sky.compute
def write_every_way() -> None:
    import ctypes
    import os
    import subprocess
    import sys

    rank = sky.instance_info().rank
    print(f"print {rank}")
    print(f"error {rank}", file=sys.stderr)
    os.write(1, f"os.write {rank}\n".encode())
    subprocess.run(["echo", f"echo {rank}"], check=True)
    os.system(f"echo system {rank}")
    ctypes.CDLL(None).printf(b"printf %d", rank)  # no newline, and in the C library's buffer


def test_every_way_of_writing_arrives_before_the_result() -> None:
    seen = Collector()
    with sky.ComputePool(nodes=2, logs=seen) as pool:
        write_every_way() @ pool
        for rank in range(2):
            text = seen.text(rank)
            for what in ("print", "os.write", "echo", "system"):
                assert f"{what} {rank}\n" in text
            assert text.endswith(f"printf {rank}")
            assert seen.text(rank, "stderr") == f"error {rank}\n"
            assert {line.node for line in seen.lines if line.rank == rank} == {rank}
            assert (pool.log_dir / f"rank{rank}.out").read_text() == text


def test_labels_on_the_drivers_streams(capfd: pytest.CaptureFixture[str]) -> None:
    with sky.ComputePool(nodes=2) as pool:
        write_every_way() @ pool
        out, err = capfd.readouterr()
    assert "[rank 0] print 0\n" in out
    assert "[rank 1] echo 1\n" in out
    assert "[rank 1] printf 1\n" in out
    assert "[rank 1] error 1\n" in err
    assert all(line.startswith(("[rank 0] ", "[rank 1] ")) for line in out.splitlines())
    assert "\x1b" not in out


def test_progress_bars_bytes_and_open_ends() -> None:
    seen = Collector()

    def write() -> None:
        import os

        os.write(1, b"10%\r20%\r30%\r\n")
        os.write(1, b"bad \xff\xfe bytes\n")
        os.write(1, b"split ")
        os.write(1, b"line\r")
        os.write(1, b"\nopen end")

    with sky.ComputePool(nodes=1, logs=seen) as pool:
        pool.run(write)
        raw = (pool.log_dir / "rank0.out").read_bytes()
    got = [(line.text, line.end) for line in seen.lines]
    assert got == [
        ("10%", "\r"),
        ("20%", "\r"),
        ("30%", "\n"),
        ("bad \ufffd\ufffd bytes", "\n"),
        ("split line", "\n"),
        ("open end", ""),
    ]
    assert raw == b"10%\r20%\r30%\r\nbad \xff\xfe bytes\nsplit line\r\nopen end"


@pytest.mark.long
def test_fifty_megabytes_every_byte_once() -> None:
    lines = 400_000
    counts: dict[int, int] = defaultdict(int)
    sums: dict[int, int] = defaultdict(int)

    def take(line: LogLine) -> None:
        counts[line.rank] += 1
        sums[line.rank] += int(line.text.partition(" ")[0])

    def flood(lines: int) -> None:
        import os

        rank = sky.instance_info().rank
        block = []
        for number in range(lines):
            block.append(f"{number} rank {rank} ".ljust(63, "."))
            if len(block) == 1000:
                data = ("\n".join(block) + "\n").encode()
                while data:
                    data = data[os.write(1, data) :]
                block.clear()

    with sky.ComputePool(nodes=2, logs=take) as pool:
        pool.run(flood, lines)
        sizes = [(pool.log_dir / f"rank{rank}.out").stat().st_size for rank in range(2)]
    assert counts == {0: lines, 1: lines}
    assert sums == {0: lines * (lines - 1) // 2, 1: lines * (lines - 1) // 2}
    assert sizes == [64 * lines, 64 * lines]


def test_a_child_that_never_stops_writing_does_not_hold_up_the_result() -> None:
    def chatter() -> str:
        import subprocess

        subprocess.Popen(["yes"])
        return "done"

    with sky.ComputePool(nodes=1, logs="quiet") as pool:
        assert pool.run(chatter) == ["done"]
        assert pool.run(lambda: 1) == [1]
        # Take it down before it fills the log's disk.
        pool.run(lambda: __import__("os").system("kill -9 $(pgrep -s 0 yes || pgrep -P $PPID yes) 2>/dev/null"))


@pytest.mark.parametrize("logs", ["head", "quiet"])
def test_less_is_shown_but_the_files_have_all(logs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with sky.ComputePool(nodes=2, logs=logs) as pool:
        write_every_way() @ pool
        out, err = capfd.readouterr()
        assert ("print 0" in out) == (logs == "head")
        assert ("error 0" in err) == (logs == "head")
        assert "print 1" not in out
        assert "print 1" in (pool.log_dir / "rank1.out").read_text()


def test_a_callable_that_raises_stops_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def broken(line: LogLine) -> None:
        raise ValueError("my logger is broken")

    with sky.ComputePool(nodes=1, logs=broken) as pool:
        assert pool.run(lambda: print("x")) == [None]
    assert "logs callable raised ValueError: my logger is broken" in capfd.readouterr().err


def test_unknown_logs_are_refused() -> None:
    with pytest.raises(sky.ConfigError, match="'loud'"):
        sky.ComputePool(logs="loud")  # type: ignore[arg-type]


def test_files_are_private() -> None:
    with sky.ComputePool(nodes=1, logs="quiet") as pool:
        pool.run(lambda: [print("secret", file=stream) for stream in (sys.stdout, sys.stderr)] and None)
        folder = pool.log_dir
        assert folder.is_relative_to(os.environ["ATOLL_HOME"])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for name in ("rank0.out", "rank0.err"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert (folder / "rank0.out").read_text() == "secret\n"  # they outlive the pool


def test_log_tail_of_a_dead_rank() -> None:
    def talk_and_die() -> None:
        import os
        import sys

        for number in range(100):
            print(f"line {number}", file=sys.stderr)
        os.write(2, b"an open end")
        os._exit(1)

    with sky.ComputePool(nodes=1, logs="quiet") as pool, pytest.raises(sky.WorkerDied) as caught:
        pool.run(talk_and_die)
    assert caught.value.log_tail[-2:] == ("line 99", "an open end")
    assert "line 99" in str(caught.value)


# ------------------------------------------------------------------------------------------- the driver's own streams
DRIVER = """
import atoll as sky
@sky.compute
def talk():
    import time
    for number in range({lines}):
        print("line", number, flush=True)
        time.sleep({pause})
    return 5
with sky.ComputePool(nodes=2) as pool:
    result = talk() @ pool
open({done!r}, "w").write(str(list(result)))
"""


def driver(tmp_path: Path, lines: int = 3, pause: float = 0.0) -> Path:
    return script(tmp_path, DRIVER.format(lines=lines, pause=pause, done=str(tmp_path / "done")))


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colour_on_a_terminal_only(tmp_path: Path, no_color: str) -> None:
    ours, theirs = pty.openpty()
    try:
        process = start_script(
            driver(tmp_path), tmp_path / "tmp", env={"NO_COLOR": no_color}, stdout=theirs, stderr=subprocess.DEVNULL
        )
        assert process.wait(60) == 0
    finally:
        os.close(theirs)
        text = read_terminal(ours)
    plain = re.sub(r"\x1b\[\d*m", "", text).replace("\r", "")
    assert sorted(plain.splitlines()) == sorted(f"[rank {r}] line {n}" for r in range(2) for n in range(3))
    assert ("\x1b[" in text) == (not no_color)


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    process = start_script(driver(tmp_path, lines=50, pause=0.02), tmp_path / "tmp")
    assert process.stdout is not None
    assert process.stderr is not None
    assert "line" in process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    process.wait(60)
    assert (tmp_path / "done").read_text() == "[5, 5]"


def test_a_driver_with_closed_streams(tmp_path: Path) -> None:
    path = driver(tmp_path)
    path.write_text("import os, sys\nsys.stdout.close(); sys.stderr = None\n" + path.read_text())
    start_script(path, tmp_path / "tmp", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait(60)
    assert (tmp_path / "done").read_text() == "[5, 5]"


def test_a_full_disk_behind_stdout(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        start_script(driver(tmp_path), tmp_path / "tmp", stdout=full, stderr=subprocess.DEVNULL).wait(60)
    assert (tmp_path / "done").read_text() == "[5, 5]"


def test_a_terminal_that_can_not_show_it(tmp_path: Path) -> None:
    path = driver(tmp_path)
    text = path.read_text().replace('"line"', '"l\\u00eene"')
    path.write_text(text.replace("import time\n", "import sys, time; sys.stdout.reconfigure(encoding='utf-8')\n"))
    process = start_script(path, tmp_path / "tmp", env={"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "l\\xeene 2" in out


# ------------------------------------------------------------------------------------------------------ line cutting
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=60).map(lambda b: bytes(b"ab\r\n"[x % 4] for x in b)), st.lists(st.integers(0, 60)))
def test_any_split_gives_the_same_lines(data: bytes, cuts: list[int]) -> None:
    whole = LineCutter()
    expected = whole.feed(data) + whole.flush()
    parts = LineCutter()
    got = []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        got += parts.feed(data[start:end])
    got += parts.flush()
    assert got == expected
    joined = b"".join(text + end.encode() for text, end in got)
    assert joined == data.replace(b"\r\n", b"\n")


def test_a_line_without_end_is_not_kept_for_ever() -> None:
    cutter = LineCutter()
    total = sum(len(text) for _ in range(100) for text, _ in cutter.feed(b"x" * 10_000))
    assert total > 900_000
    assert total + sum(len(text) for text, _ in cutter.flush()) == 1_000_000


def test_interleaved_ranks_are_cut_apart(capsys: pytest.CaptureFixture[str]) -> None:
    router = LogRouter("all", lambda rank: rank, 12)
    router.feed(0, False, b"he")
    router.feed(11, False, b"wor")
    router.feed(0, False, b"llo\n")
    router.feed(11, False, b"ld\n")
    assert capsys.readouterr().out == "[rank  0] hello\n[rank 11] world\n"


def test_output_between_calls_is_shown_too() -> None:
    seen = Collector()

    def later() -> None:
        import threading

        threading.Timer(0.2, lambda: print("after the call")).start()

    with sky.ComputePool(nodes=1, logs=seen) as pool:
        pool.run(later)
        eventually(lambda: "after the call\n" in seen.text(0), "a line printed after the call")
