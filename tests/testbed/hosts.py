"""Real hosts on one machine: each a set of namespaces with its own sshd, root, /tmp, processes and network.

``Testbed.start(2)`` gives two, on a switch of their own; nothing of it is reachable from outside. Programs that see
``testbed.environ`` find an ``ssh`` that reaches them, with a home folder that holds its config, key and known hosts.
Needs root, sshd, iproute2, nftables and tini: ``missing()`` says what this machine lacks.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# The clone and its environment, where they lie below /tmp, which hosts have of their own.
_KEPT = sorted({path for path in (str(Path(__file__).resolve().parents[2]), sys.prefix) if path.startswith("/tmp/")})
_INIT = Path(__file__).with_name("host_init.sh")
NVIDIA_SMI = Path(__file__).with_name("nvidia-smi")
_CABLE = Path(__file__).with_name("cable.py")
_PROGRAMS = ("unshare", "nsenter", "ip", "tc", "tini", "ssh", "ssh-keygen", "ssh-keyscan", "nft", "/usr/sbin/sshd")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BARE = {"PATH": _PATH, "LANG": "C.UTF-8"}
_MAC = "02:00:0a:4d:00:01"
_SSHD = re.compile(r"(/\S*/)?sshd\b")  # as of OpenSSH 9.8 also sshd-session and sshd-auth
_LAST_STARTED = "sleep infinity"  # of a host, by its init
_LIMIT_S = 60.0  # never the reason that something fails
USER = "sky"  # who logs in; an ordinary user


def rows(num: int, name: str = "NVIDIA L4") -> tuple[list[str], str]:
    """UUIDs of so many GPUs that nobody else has, and what the fake prints of them."""
    uuids = [f"GPU-{uuid.uuid4()}" for _ in range(num)]
    return uuids, "".join(f"{index}, {each}, {name}, 23034, 0, 580.95\n" for index, each in enumerate(uuids))


def missing() -> str | None:
    """Why there can be no testbed here, or None."""
    if os.geteuid() != 0:
        return "the testbed makes namespaces and mounts: it needs root"
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    packages = "openssh-server iproute2 tini nftables"
    return f"the testbed needs {', '.join(lacking)}: apt-get install {packages}" if lacking else None


@dataclass
class Host:
    """One host. ``pid`` is its PID 1 as seen from here."""

    name: str
    addr: str
    switch: int
    pid: int
    process: subprocess.Popen[bytes] = field(repr=False)
    cable: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def cut(self) -> None:
        """Take its cable out: nothing gets through, and nobody is told."""
        _in_switch(self.switch, f"link set p-{self.name} down")

    def heal(self) -> None:
        """Put the cable back. TCP takes up to about as long again as the cut was."""
        _in_switch(self.switch, f"link set p-{self.name} up")

    def power_off(self) -> None:
        """As if its plug was pulled: no FIN, no RST."""
        self.cut()
        self.kill()

    def kill(self) -> None:
        """End its PID 1, and with it everything on it."""
        if self.process.poll() is None:  # else its pid may be somebody else's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.process.wait(_LIMIT_S)

    def freeze(self) -> None:
        """Stop every process: the network still answers, nobody else does. Nothing runs there any more afterwards."""
        self._bring(signal.SIGSTOP, lambda state: state in "TtZX")

    def thaw(self) -> None:
        """Let them go on."""
        self._bring(signal.SIGCONT, lambda state: state not in "Tt")

    def _bring(self, number: int, there: Callable[[str], bool]) -> None:
        """Signal processes until all are in a state that is ``there``: some have forked while they were listed."""

        def rest() -> list[int]:
            others = [pid for pid in self.pids() if not there(_state(pid))]
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            return others

        # Twice, as one may have forked between the list and its own stop.
        _until(lambda: not rest() and not rest(), f"every process of {self.name} gets signal {number}")

    def give_gpus(self, num: int, name: str = "NVIDIA L4") -> list[str]:
        """Have its ``nvidia-smi`` tell of so many GPUs; returns their UUIDs."""
        uuids, text = rows(num, name)
        self.run(f"cat > /usr/local/bin/gpus.csv <<'END'\n{text}END")
        return uuids

    def slow(self, mbit: float) -> None:
        """Limit its line, in both directions, to so many Mbit/s."""
        for pid, port in ((self.pid, "eth0"), (self.switch, f"p-{self.name}")):
            shape = f"tc qdisc replace dev {port} root tbf rate {mbit}mbit burst 16kb latency 50ms"
            _check(["nsenter", "-t", str(pid), "-n", *shape.split()])

    def delay(self, one_way_ms: float) -> None:
        """Hold every frame of its line for so long, each way, where the testbed was started with ``delay_ms=``."""
        assert self.cable is not None, "start the testbed with delay_ms=0"
        assert self.cable.stdin is not None
        self.cable.stdin.write(f"{one_way_ms}\n".encode())
        self.cable.stdin.flush()

    def pids(self) -> list[int]:
        """Its processes, as seen from here."""
        if self.process.poll() is not None:  # its pid may be somebody else's by now
            return []
        try:
            own = os.readlink(f"/proc/{self.pid}/ns/pid_for_children")
        except OSError:
            return []
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == own:
                    found.append(int(name))
        return found

    def command_lines(self) -> list[str]:
        """What its processes were started as, without its own init and sshd."""
        lines = filter(None, map(_command, self.pids()))
        return [line for line in lines if not line.startswith(("tini ", _LAST_STARTED)) and not _SSHD.match(line)]

    def run(self, command: str, *, user: str = "root", timeout_s: float = 60.0) -> str:
        """Run a shell command on it, past ssh; returns what it printed. Raises where it fails."""
        who = [] if user == "root" else ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
        home = "HOME=/root" if user == "root" else f"HOME=/home/{user}"
        inside = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "env", "-i", f"PATH={_PATH}", home]
        return _check([*inside, *who, "sh", "-c", command], timeout_s=timeout_s)


class Testbed:
    """Hosts h1, h2, … on one switch, and a client that reaches them."""

    __test__ = False  # pytest would take it for a test

    def __init__(self, folder: Path, switch: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.switch = switch
        self.hosts: list[Host] = []
        self.home = folder / "client"
        self.environ = {"PATH": f"{folder / 'bin'}:{os.environ.get('PATH', _PATH)}", "HOME": str(self.home)}

    @classmethod
    def start(cls, num_hosts: int, folder: Path, *, shared_home: bool = True, delay_ms: float | None = None) -> Testbed:
        """Start hosts.

        Args:
            folder: an empty one for the testbed's files.
            shared_home: they share /home.
            delay_ms: what a frame takes from each host to the switch, in ms; that needs a process for each, which
                holds frames back, so that None is faster than 0.
        """
        switch = subprocess.Popen(["unshare", "-n", "sleep", "infinity"], env=_BARE, start_new_session=True)
        bed = cls(folder, switch)
        try:
            bed._start(num_hosts, shared_home, delay_ms)
        except BaseException:
            bed.close()
            raise
        return bed

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything; namespaces, links and mounts go with the processes that hold them."""
        for host in self.hosts:
            if host.process.poll() is None:  # else its pid may be somebody else's by now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(host.pid, signal.SIGKILL)
        for host in self.hosts:
            host.process.kill()  # one that did not get as far as telling its pid
            host.process.wait(_LIMIT_S)
            if host.cable is not None and host.cable.stdin is not None:
                host.cable.kill()
                host.cable.wait(_LIMIT_S)
                host.cable.stdin.close()
        self.switch.kill()
        self.switch.wait(_LIMIT_S)

    def _start(self, num_hosts: int, shared_home: bool, delay_ms: float | None) -> None:
        switch = self.switch.pid
        own = os.readlink("/proc/self/ns/net")
        _until(lambda: os.readlink(f"/proc/{switch}/ns/net") != own, "the switch starts")
        names = [f"h{number}" for number in range(1, num_hosts + 1)]
        addrs = {name: f"10.77.0.{10 + number}" for number, name in enumerate(names, 1)}
        self._write_files(addrs)
        home = str(self.folder / "home") if shared_home else "own"
        for name in names:
            command = ["unshare", "-n", "-m", "-u", "-i", "-p", "--fork", "--kill-child", "bash", str(_INIT)]
            with (self.folder / f"{name}.log").open("wb") as log:
                process = subprocess.Popen(
                    [*command, str(self.folder), name, addrs[name], home, *_KEPT],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=_BARE,
                )
            self.hosts.append(Host(name, addrs[name], switch, process.pid, process))
        for host in self.hosts:
            told = self.folder / "state" / f"{host.name}.pid"
            host.pid = int(
                _until(lambda told=told: told.exists() and told.read_text().strip(), f"{host.name} tells its pid")
            )
        if delay_ms is None:
            link = "link add eth0 netns {} type veth peer name p-{} netns {}"
            links = [link.format(host.pid, host.name, switch) for host in self.hosts]
            _check(["ip", "-batch", "-"], text="\n".join(links))
        else:
            self._lay_cables(delay_ms)
        # With an address of its own: else it has one of its ports', and another one when that host is gone.
        bridge = [
            "link set lo up",
            f"link add br0 address {_MAC} type bridge",
            "addr add 10.77.0.1/24 dev br0",
            "link set br0 up",
        ]
        _in_switch(switch, *bridge, *(f"link set p-{host.name} master br0 up" for host in self.hosts))
        for host in self.hosts:
            _until(lambda host=host: self._ready(host), f"{host.name} starts")

    def _lay_cables(self, delay_ms: float) -> None:
        for host in self.hosts:
            command = [sys.executable, "-I", str(_CABLE), str(host.pid), str(self.switch.pid), f"p-{host.name}"]
            host.cable = subprocess.Popen([*command, "0"], stdin=subprocess.PIPE, env=_BARE, start_new_session=True)
            host.delay(delay_ms)
        devices = f"/proc/{self.switch.pid}/net/dev"
        for host in self.hosts:
            _until(lambda host=host: f"p-{host.name}:" in Path(devices).read_text(), f"{host.name} gets its cable")

    def _ready(self, host: Host) -> bool:
        if host.process.poll() is not None:
            raise RuntimeError(f"{host.name} did not start: {(self.folder / f'{host.name}.log').read_text()}")
        if not os.path.exists(f"/proc/{host.pid}/root/run/ready"):
            return False
        return _LAST_STARTED in map(_command, host.pids())

    def _write_files(self, addrs: dict[str, str]) -> None:
        ssh = self.home / ".ssh"
        for folder in (self.folder / "bin", self.folder / "home", ssh):
            folder.mkdir(parents=True)
        make_key(ssh / "id_ed25519")
        shutil.copy(ssh / "id_ed25519.pub", self.folder / "authorized_keys")
        shutil.copy(NVIDIA_SMI, self.folder)
        known = []
        for name, addr in addrs.items():
            keys = self.folder / "keys" / name
            keys.mkdir(parents=True)
            (self.folder / "state" / name).mkdir(parents=True)
            _check(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(keys / "ssh_host_ed25519_key")]
            )
            known.append(f"{addr} {(keys / 'ssh_host_ed25519_key.pub').read_text()}")
        (ssh / "known_hosts").write_text("".join(known))
        entries = [f"Host {name}\n    HostName {addr}\n" for name, addr in addrs.items()]
        common = f"User {USER}\n    IdentityFile {ssh / 'id_ed25519'}\n    UserKnownHostsFile {ssh / 'known_hosts'}"
        (ssh / "config").write_text(
            "\n".join([*entries, f"Host *\n    {common}\n    GlobalKnownHostsFile /dev/null\n"])
        )
        lines = ["127.0.0.1 localhost", *(f"{addr} {name}" for name, addr in addrs.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        for program, options in (("ssh", f"-F {ssh / 'config'}"), ("ssh-keyscan", "")):
            path = self.folder / "bin" / program
            inside = f"exec nsenter -t {self.switch.pid} -n -- {shutil.which(program, path=_PATH)} {options}"
            path.write_text(f'#!/bin/sh\n{inside} "$@"\n')
            path.chmod(0o755)


def make_key(path: Path) -> None:
    """A key pair without passphrase: ``path`` and ``path.pub``."""
    _check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", str(path)])


def _in_switch(switch: int, *lines: str) -> None:
    _check(["nsenter", "-t", str(switch), "-n", "ip", "-batch", "-"], text="\n".join(lines))


def _check(command: list[str], *, text: str = "", timeout_s: float = 60.0) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s, env=_BARE)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def _state(pid: int) -> str:
    """One letter, as ``ps`` has it; X where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][0]
    except OSError:
        return "X"


def _command(pid: int) -> str:
    """What a process was started as; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _until(condition: Callable[[], object], what: str) -> str:
    deadline = time.monotonic() + _LIMIT_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {_LIMIT_S:g} s: {what}")
        time.sleep(0.005)
    return str(found)
