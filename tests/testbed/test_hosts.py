"""The testbed does to hosts what it says."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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


def ssh(host: str, command: str, connect_s: int = 20) -> subprocess.CompletedProcess[str]:
    options = ["-o", f"ConnectTimeout={connect_s}", "-o", "BatchMode=yes"]
    return subprocess.run(["ssh", *options, host, command], capture_output=True, text=True, timeout=60)


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.02)


def test_hosts_are_apart_and_reach_each_other(bed: Testbed) -> None:
    asked = "hostname; id -un; pgrep -c sleep; touch /tmp/mine; ls -d /tmp/m*"
    said = [ssh(host, asked).stdout for host in ("h1", "h2")]
    assert said == ["h1\nsky\n1\n/tmp/mine\n", "h2\nsky\n1\n/tmp/mine\n"]
    bed.hosts[0].run("touch ~/here && echo shared > /home/sky/note")
    assert bed.hosts[1].run("ls ~/here 2>&1 || cat /home/sky/note").endswith("shared\n")
    eventually(lambda: ping(bed, 1) < 100, "a short way")  # how long it takes others on this machine decide


def test_a_started_host_listens(bed: Testbed) -> None:
    for host in bed.hosts:
        assert " 00000000:0016 00000000:0000 0A " in Path(f"/proc/{host.pid}/net/tcp").read_text()


@pytest.mark.long
def test_a_cut_host_is_silent_and_comes_back(bed: Testbed) -> None:
    bed.hosts[1].cut()
    said = ssh("h2", "true", connect_s=2).stderr
    assert "timed out" in said or "No route" in said
    assert ssh("h1", "true").returncode == 0
    bed.hosts[1].heal()
    # "No route" for as long as the last question for its address is open.
    eventually(lambda: ssh("h2", "true", connect_s=2).returncode == 0, "h2 is back")


@pytest.mark.long
def test_a_frozen_host_takes_connections_and_says_nothing(bed: Testbed) -> None:
    bed.hosts[1].freeze()
    assert "banner exchange" in ssh("h2", "true", connect_s=3).stderr
    bed.hosts[1].thaw()
    assert ssh("h2", "true").returncode == 0


@pytest.mark.long
def test_a_frozen_host_is_still_whatever_it_was_doing(bed: Testbed) -> None:
    """What forks all the time is never on a list of processes as it is a moment later."""
    host = bed.hosts[1]
    host.run("for _ in 1 2 3; do (while :; do (:); echo x >> /tmp/count; done) > /dev/null 2>&1 & done")
    eventually(lambda: int(host.run("wc -l < /tmp/count || echo 0")) > 20, "they count")
    for _ in range(5):
        host.freeze()
        count = Path(f"/proc/{host.pid}/root/tmp/count")
        before = (count.stat().st_size, host.pids())
        time.sleep(0.1)
        assert (count.stat().st_size, host.pids()) == before
        host.thaw()
        eventually(lambda: count.stat().st_size > before[0], "they go on")  # noqa: B023  # it is called at once


def test_a_host_that_ends_changes_nothing_for_the_others(bed: Testbed) -> None:
    """A switch whose address went with it would leave them without an answer until they ask for it again."""
    bridge = ["nsenter", "-t", str(bed.switch.pid), "-n", "ip", "-o", "link", "show"]

    def links() -> str:
        return subprocess.run(bridge, capture_output=True, text=True, check=True).stdout

    (before,) = (line for line in links().splitlines() if "br0:" in line)
    for host in bed.hosts:
        host.kill()
    eventually(lambda: "p-h" not in links(), "their ports are gone")
    (after,) = (line for line in links().splitlines() if "br0:" in line)
    assert before.split("link/ether ")[1] == after.split("link/ether ")[1]


@pytest.mark.long
def test_a_slow_line(bed: Testbed) -> None:
    bed.hosts[1].slow(8)
    started = time.monotonic()
    assert ssh("h2", "head -c 1000000 /dev/zero | wc -c; head -c 1000000 /dev/zero").stdout.startswith("1000000")
    assert time.monotonic() - started > 0.8


def test_a_long_cable(make_bed: MakeBed) -> None:
    bed = make_bed(2, delay_ms=10)
    assert ping(bed, 1) >= 38  # two cables, there and back
    eventually(lambda: ping(bed, 1) < 98, "no longer than that")
    bed.hosts[1].delay(40)
    eventually(lambda: 98 <= ping(bed, 1) < 300, "a longer cable")
