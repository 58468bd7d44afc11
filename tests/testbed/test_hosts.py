"""The testbed does to hosts what it says."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from testbed.fixtures import MakeBed, bed, make_bed
from testbed.hosts import Testbed

__all__ = ["bed", "make_bed"]


def ping(bed: Testbed, number: int) -> float:
    """Round trip from h1 in ms, by TCP; the shortest of a few, as others use this machine too."""
    code = (
        "import socket, time; s = time.monotonic(); c = socket.create_connection((%r, 22), 10); "
        "t = time.monotonic(); print((t - s) * 1e3); c.recv(1)"
    )
    return min(float(bed.hosts[0].run(f'python3 -c "{code % bed.hosts[number].addr}"')) for _ in range(3))


def ssh(host: str, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    quick = ["-o", "ConnectTimeout=2", "-o", "BatchMode=yes"]
    return subprocess.run(["ssh", *quick, *options, host, command], capture_output=True, text=True, timeout=20)


def test_hosts_are_apart_and_reach_each_other(bed: Testbed) -> None:
    asked = "hostname; id -un; pgrep -c sleep; touch /tmp/mine; ls -d /tmp/m*"
    said = [ssh(host, asked).stdout for host in ("h1", "h2")]
    assert said == ["h1\nsky\n1\n/tmp/mine\n", "h2\nsky\n1\n/tmp/mine\n"]
    bed.hosts[0].run("touch ~/here && echo shared > /home/sky/note")
    assert bed.hosts[1].run("ls ~/here 2>&1 || cat /home/sky/note").endswith("shared\n")
    assert ping(bed, 1) < 100


def test_a_started_host_listens(bed: Testbed) -> None:
    for host in bed.hosts:
        assert " 00000000:0016 00000000:0000 0A " in Path(f"/proc/{host.pid}/net/tcp").read_text()


def test_a_cut_host_is_silent_and_comes_back(bed: Testbed) -> None:
    bed.hosts[1].cut()
    assert "timed out" in ssh("h2", "true").stderr or "No route" in ssh("h2", "true").stderr
    assert ssh("h1", "true").returncode == 0
    bed.hosts[1].heal()
    deadline = time.monotonic() + 15
    while ssh("h2", "true").returncode:  # "no route" for as long as the last question for its address is open
        assert time.monotonic() < deadline


def test_a_frozen_host_takes_connections_and_says_nothing(bed: Testbed) -> None:
    bed.hosts[1].freeze()
    assert "banner exchange" in ssh("h2", "true").stderr
    bed.hosts[1].thaw()
    assert ssh("h2", "true").returncode == 0


def test_a_slow_line(bed: Testbed) -> None:
    bed.hosts[1].slow(8)
    started = time.monotonic()
    assert ssh("h2", "head -c 1000000 /dev/zero | wc -c; head -c 1000000 /dev/zero").stdout.startswith("1000000")
    assert time.monotonic() - started > 0.8


def test_a_long_cable(make_bed: MakeBed) -> None:
    bed = make_bed(2, delay_ms=10)
    assert 38 <= ping(bed, 1) < 150  # two cables, there and back
    bed.hosts[1].delay(40)
    time.sleep(0.3)
    assert 98 <= ping(bed, 1) < 300
