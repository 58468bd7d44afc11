"""Networks of their own for clusters on this machine: real namespaces, and a real way out."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pools import SOURCE_ROOT, eventually

import leaks
from atoll.providers.network import Network, NetworkUnavailable, address_of, entering
from atoll.providers.network import _pipe as opened


def why_not() -> str | None:
    try:
        Network.start("one").close()
    except NetworkUnavailable as error:
        return str(error)
    return None


REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no network of its own here: {REASON}")


@pytest.fixture
def network() -> Iterator[Network]:
    with contextlib.closing(Network.start("one")) as started:
        yield started


def inside(network: Network, code: str) -> list[str]:
    return [*entering(network.path), sys.executable, "-I", "-c", code]


def outer_address() -> str | None:
    """An address of this machine that is not the loopback's; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def bridge() -> dict[str, str]:
    """The inode of the bridge that each cluster has open."""
    lines = (Path(os.environ["ATOLL_HOME"]) / "networks").read_text().splitlines()
    return {line.split()[0]: line.split()[-1] for line in lines}


BINDS = """
import socket, sys
held = [socket.create_server((f"127.0.0.{at}", 29500)) for at in (1, 2, 3)]
with socket.create_connection(("127.0.0.2", 29500)):
    print("bound", flush=True)
sys.stdin.read()
"""


def test_a_list_of_networks_that_is_damaged(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = Path(os.environ["ATOLL_HOME"]) / "networks"
    linked = bridge()
    networks.write_bytes(networks.read_bytes() + b"\xff\xfe\0 1 2\n")
    with contextlib.closing(Network.start("two")):
        assert set(bridge().values()) == set(linked.values())
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    (tmp_path / "networks").mkdir()
    with pytest.raises(NetworkUnavailable, match=r"clusters can't be linked: .*Is a directory"):
        Network.start("two")


def test_two_hold_the_same_ports_side_by_side(network: Network) -> None:
    with contextlib.closing(Network.start("two")) as other, contextlib.ExitStack() as stack:
        for each in (network, other):
            process = subprocess.Popen(inside(each, BINDS), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.enter_context(process)
            assert opened(process.stdout).readline() == b"bound\n"


@pytest.mark.parametrize("bound_to", ["0.0.0.0", "127.0.0.1", address_of("one")])
def test_clusters_of_one_home_reach_each_other_until_the_last_one_ends(network: Network, bound_to: str) -> None:
    serve = f"""
import socket
with socket.create_server(("{bound_to}", 29500)) as server:
    print("up", flush=True)
    while True:
        server.accept()[0].close()
"""
    reach = f"import socket; socket.create_connection(('{address_of('one')}', 29500), timeout=20)"
    with subprocess.Popen(inside(network, serve), stdout=subprocess.PIPE) as server:
        try:
            assert opened(server.stdout).readline() == b"up\n"
            if bound_to != "127.0.0.1":
                subprocess.run(inside(network, reach), check=True)
            with contextlib.closing(Network.start("two")) as other:
                assert bridge() == dict.fromkeys(("one", "two"), bridge()["one"])
                subprocess.run(inside(other, reach), check=True)
        finally:
            server.kill()
    network.close()
    with contextlib.closing(Network.start("three")):
        assert set(bridge()) == {"three"}  # of those that have ended nothing is known
        with contextlib.closing(Network.start("one")):
            assert bridge()["one"] == bridge()["three"]


def test_a_network_that_is_made_anew_gets_its_address_back(network: Network) -> None:
    serve = "import socket; s = socket.create_server(('0.0.0.0', 29500)); print('up', flush=True); s.accept()"
    reach = f"import socket; socket.create_connection(('{address_of('one')}', 29500), timeout=20)"
    with (
        contextlib.closing(Network.start("one")) as fresh,
        subprocess.Popen(inside(fresh, serve), stdout=subprocess.PIPE) as server,
    ):
        assert opened(server.stdout).readline() == b"up\n"
        with contextlib.closing(Network.start("two")) as other:
            subprocess.run(inside(other, reach), check=True)


def test_a_download_from_outside_works_and_the_machines_own_loopback_stays_closed(network: Network) -> None:
    address = outer_address()
    if address is None:
        pytest.skip("this machine has no address but the loopback's")
    body = os.urandom(1 << 20) * 20

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            """Quiet."""

    code = """
import hashlib, socket, sys, urllib.request
print(hashlib.sha256(urllib.request.urlopen("http://{}:{}/", timeout=20).read()).hexdigest())
for host in ("127.0.0.1", "10.0.2.2"):
    try:
        socket.create_connection((host, {}), timeout=3)
    except OSError:
        print("closed")
"""
    with (
        http.server.ThreadingHTTPServer((address, 0), Handler) as server,
        socket.create_server(("127.0.0.1", 0)) as local,
    ):
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            ask = inside(network, code.format(address, server.server_port, local.getsockname()[1]))
            said = subprocess.run(ask, capture_output=True, text=True, timeout=60)
        finally:
            server.shutdown()
            thread.join()
    assert said.stdout.split() == [hashlib.sha256(body).hexdigest(), "closed", "closed"], said.stderr


def test_it_asks_its_own_resolver_and_keeps_search_lists(network: Network) -> None:
    assert network.resolv_conf is not None
    lines = network.resolv_conf.splitlines()
    assert [line for line in lines if line.startswith("nameserver")] == ["nameserver 10.0.2.3"]
    there = Path("/etc/resolv.conf").read_text().splitlines()
    assert [line for line in there if line.startswith(("search", "domain", "options"))] == lines[1:]


def test_closing_twice_is_fine_and_ends_everything(network: Network) -> None:
    before = set(leaks.descendants())
    network.close()
    network.close()
    assert before - set(leaks.descendants()) == {network._holder.pid, network._slirp.pid}


@pytest.mark.parametrize("which", [("_slirp", "slirp4netns"), ("_holder", "what holds it")])
def test_it_tells_which_of_its_processes_ended(network: Network, which: tuple[str, str]) -> None:
    assert network.fault is None
    getattr(network, which[0]).kill()
    eventually(lambda: network.fault == f"{which[1]} was killed by SIGKILL", "its fault")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_who_started_it(number: int) -> None:
    code = f"""
import sys, time
sys.path.insert(0, {SOURCE_ROOT!r})
from atoll.providers.network import Network
network = Network.start("one")
print("up", flush=True)
time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE) as starter:
        assert opened(starter.stdout).readline() == b"up\n"
        below = leaks.descendants(starter.pid)
        assert len(below) == 2
        starter.send_signal(number)
        starter.wait()
        eventually(lambda: not any(map(leaks.is_running, below)), "both processes gone")


def test_where_it_cannot_be_had_it_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("ATOLL_NETWORK_NAMESPACE", "ATOLL_PID_NAMESPACE"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "0")
            with pytest.raises(NetworkUnavailable, match=f"^{variable}=0$"):
                Network.start("one")
    for name in ("unshare", "nsenter", "cat", "ip"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NetworkUnavailable, match="apt-get install slirp4netns lets clusters use the same ports"):
        Network.start("one")
    fails = tmp_path / "slirp4netns"
    fails.write_text("#!/bin/sh\necho 'open(\"/dev/net/tun\"): Permission denied' >&2\nexit 1\n")
    fails.chmod(0o755)
    with pytest.raises(NetworkUnavailable, match=r'slirp4netns failed: open\("/dev/net/tun"\): Permission denied'):
        Network.start("one")
