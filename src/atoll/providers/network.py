"""A network of its own for a cluster on this machine: all ports free, a way out, and a link to the other clusters.

A network namespace with a loopback interface, joined to the outside by ``slirp4netns``, which needs no rights. Both
processes behind it end with this one, however it dies: they wait at a pipe that nobody else holds.

A bridge links the clusters of one ``ATOLL_HOME``. No process sits in its namespace: the process behind each cluster
has it open, so the kernel removes it with the last of them. ``ATOLL_HOME/networks`` lists these processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import select
import shutil
import subprocess
from collections.abc import Sequence
from typing import IO

from atoll.core.errors import death_reason
from atoll.core.paths import atoll_home

_START_S = 30.0  # on a busy machine; without it a cluster has the machine's ports
_END_S = 2.0
_MTU = "65520"
_RESOLVER = "10.0.2.3"  # where slirp4netns answers, with what this machine resolves
_SUBNET = "10.213"  # of the bridge, /16
# What listens on the head's 127.0.0.1, as scripts bind to its address, is reached at the cluster's address too, unless
# something listens just there.
_FORWARD = """
table ip atoll {
    chain from_others {
        type nat hook prerouting priority -100
        iifname != "atoll0" accept
        socket wildcard 0 accept
        fib daddr type local dnat to 127.0.0.1
    }
}
"""
_PROGRAMS = (("unshare", "util-linux"), ("nsenter", "util-linux"), ("slirp4netns", "slirp4netns"), ("ip", "iproute2"))


class NetworkUnavailable(Exception):
    """No network of its own can be had; the message says why, and what would help."""


def reason_unavailable() -> str | None:
    """Why no network can be had, before the kernel is asked for one."""
    for variable in ("ATOLL_NETWORK_NAMESPACE", "ATOLL_PID_NAMESPACE"):
        if os.environ.get(variable) == "0":
            return f"{variable}=0"
    for program, package in _PROGRAMS:
        if shutil.which(program) is None:
            step = f"apt-get install {package} lets clusters use the same ports side by side"
            return f"there is no {program} program; {step}"
    return None


def address_of(cluster: str) -> str:
    """Where other clusters reach a cluster that has a network of its own."""
    number = 1 + int(hashlib.sha256(cluster.encode()).hexdigest(), 16) % 65534
    return f"{_SUBNET}.{number >> 8}.{number & 255}"


def entering(network: str) -> list[str]:
    """The command that enters ``/proc/PID/ns/net``, and the user namespace that owns it where that isn't ours."""
    user = os.path.join(os.path.dirname(network), "user")
    if os.readlink(user) == os.readlink("/proc/self/ns/user"):
        return ["nsenter", f"--net={network}"]
    return ["nsenter", f"--user={user}", f"--net={network}", "--preserve-credentials"]


class Network:
    """A running network. Made by ``Network.start()``.

    Attributes:
        path: of the network namespace.
        resolv_conf: the text that ``/etc/resolv.conf`` should hold inside, or None: as outside.
    """

    def __init__(self, holder: subprocess.Popen[bytes], slirp: subprocess.Popen[bytes]) -> None:
        self._holder = holder
        self._slirp = slirp
        self.path = f"/proc/{holder.pid}/ns/net"
        self.resolv_conf: str | None = _resolv_conf()

    @classmethod
    def start(cls, cluster: str) -> Network:
        """Start the network of a cluster.

        Raises:
            NetworkUnavailable: it is turned off, the kernel refuses one, or a program is missing.
        """
        if (reason := reason_unavailable()) is not None:
            raise NetworkUnavailable(reason)
        with contextlib.ExitStack() as failed:
            try:
                holder = _hold_linked(cluster)
            except OSError as error:  # the list of networks can't be used, say
                raise NetworkUnavailable(f"clusters can't be linked: {error}") from None
            failed.callback(_end, holder)
            slirp = _connect(holder)
            failed.pop_all()
        return cls(holder, slirp)

    @property
    def fault(self) -> str | None:
        """Which process behind it has ended, and how, as a clause; or None while both run."""
        for what, process in (("slirp4netns", self._slirp), ("what holds it", self._holder)):
            if (code := process.poll()) is not None:
                how = death_reason(code, None, False) if code >= 0 else f"was {death_reason(None, -code, False)}"
                return f"{what} {how}"
        return None

    def close(self) -> None:
        """End it. Safe to call twice. What still runs inside keeps a network without a way out."""
        _end(self._holder)
        _end(self._slirp)


def _hold_linked(cluster: str) -> subprocess.Popen[bytes]:
    """A process in a new network namespace that is linked to the bridge."""
    address = address_of(cluster)
    port = "c" + address.removeprefix(f"{_SUBNET}.")
    with (atoll_home() / "networks").open("a+", errors="replace") as members, contextlib.ExitStack() as opened:
        fcntl.flock(members, fcntl.LOCK_EX)
        members.seek(0)
        bridge, living = None, []
        for name, pid, net, user, inode in re.findall(r"(\S+) (\d+) (\d+) (\d+) (\d+)\n", members.read()):
            found = _opened(f"/proc/{pid}/fd/{net}", f"/proc/{pid}/fd/{user}", opened)
            if found is None or os.fstat(found[0]).st_ino != int(inode):
                continue
            if name != cluster and address_of(name) == address:
                raise NetworkUnavailable(f"cluster {name} has the address {address} that this one would get")
            bridge = found
            living.append(f"{name} {pid} {net} {user} {inode}\n")
        bridge = bridge or _new_bridge(opened)
        enter, own_user = ["nsenter"], []
        if os.fstat(bridge[1]).st_ino != os.stat("/proc/self/ns/user").st_ino:
            enter += [f"--user=/proc/self/fd/{bridge[1]}", "--preserve-credentials"]
            own_user = [f"--map-user={os.getuid()}", f"--map-group={os.getgid()}"]
        holder = _hold([*enter, "--", "unshare", *own_user, "--net"], keep=bridge)
        try:
            switch = [*enter, f"--net=/proc/self/fd/{bridge[0]}"]
            # An earlier network of this cluster, which jobs may still be in, gives up the address.
            subprocess.run([*switch, "ip", "link", "del", port], pass_fds=bridge, stderr=subprocess.DEVNULL)
            _ip(switch, f"link add {port} type veth peer name atoll0 netns {holder.pid}", keep=bridge)
            _ip(switch, f"link set {port} master atoll up", keep=bridge)
            own = [*enter, f"--net=/proc/{holder.pid}/ns/net"]
            _ip(own, f"addr add {address}/16 dev atoll0", "link set atoll0 up", keep=bridge)
            subprocess.run(  # without nft, only what listens on every address is reached
                [*own, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/atoll0/route_localnet && exec nft -f -"],
                input=_FORWARD.encode(),
                pass_fds=bridge,
                stderr=subprocess.DEVNULL,
            )
        except BaseException:
            _end(holder)
            raise
        living.append(f"{cluster} {holder.pid} {bridge[0]} {bridge[1]} {os.fstat(bridge[0]).st_ino}\n")
        members.truncate(0)
        members.writelines(living)
    return holder


def _opened(net: str, user: str, opened: contextlib.ExitStack) -> tuple[int, int] | None:
    """Descriptors of a network namespace and of the user namespace that owns it; None where they are gone."""
    found = []
    try:
        for path in (net, user):
            found.append(os.open(path, os.O_RDONLY))
            opened.callback(os.close, found[-1])
    except OSError:
        return None
    return found[0], found[1]


def _new_bridge(opened: contextlib.ExitStack) -> tuple[int, int]:
    first = _hold(["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"])
    try:
        _ip(entering(f"/proc/{first.pid}/ns/net"), "link add atoll type bridge", "link set atoll up")
        bridge = _opened(f"/proc/{first.pid}/ns/net", f"/proc/{first.pid}/ns/user", opened)
        assert bridge is not None
        return bridge
    finally:
        _end(first)


def _ip(enter: Sequence[str], *commands: str, keep: Sequence[int] = ()) -> None:
    """Run commands of ``ip`` in a namespace."""
    done = subprocess.run(
        [*enter, "ip", "-batch", "-"], input="\n".join(commands), capture_output=True, text=True, pass_fds=keep
    )
    if done.returncode != 0:
        raise NetworkUnavailable(f"clusters can't be linked: {(done.stderr.strip() or 'ip failed').splitlines()[0]}")


def _hold(*commands: list[str], keep: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """A process that the first command that works starts in a namespace, until its standard input closes."""
    said = b""
    for command in commands:
        # It says back what it reads, which also tells when it is inside.
        holder = subprocess.Popen(
            [*command, "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=keep,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )
        with contextlib.suppress(BrokenPipeError):
            _pipe(holder.stdin).write(b"\n")
            _pipe(holder.stdin).flush()
        if _pipe(holder.stdout).read(1):
            return holder
        said = _pipe(holder.stderr).read()
        _end(holder)
    raise NetworkUnavailable(f"the kernel refuses a network namespace: {said.decode(errors='replace').strip()}")


def _connect(holder: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Give the holder's namespace an address, a route and a resolver, by a process that ends with us too."""
    with contextlib.ExitStack() as opened:
        said = opened.enter_context(open(os.memfd_create("atoll-slirp"), "w+b"))
        ready, theirs = os.pipe()
        opened.callback(os.close, ready)
        try:
            slirp = subprocess.Popen(
                [
                    *("slirp4netns", "--configure", f"--mtu={_MTU}", "--disable-host-loopback"),
                    # It leaves once its standard input closes.
                    *("--exit-fd=0", f"--ready-fd={theirs}", str(holder.pid), "tap0"),
                ],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        answered, _, _ = select.select([ready], [], [], _START_S)
        if answered and os.read(ready, 1):
            return slirp
        _end(slirp)
        said.seek(0)
        lines = said.read().decode(errors="replace").split("\n")
    why = [line for line in lines if line.strip() and "tapfd" not in line]
    raise NetworkUnavailable(f"slirp4netns failed: {'; '.join(why) or f'no answer within {_START_S:g} s'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close its standard input, which ends it; by force where it doesn't."""
    for end in (process.stdin, process.stdout, process.stderr):
        if end is not None:
            with contextlib.suppress(BrokenPipeError):
                end.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end


def _resolv_conf() -> str:
    """This machine's, with slirp4netns as the only resolver: those on 127.0.0.0/8 can't be reached from inside."""
    lines = [f"nameserver {_RESOLVER}"]
    with contextlib.suppress(OSError), open("/etc/resolv.conf", encoding="utf-8", errors="replace") as file:
        lines += [line.rstrip() for line in file if line.startswith(("search", "domain", "options"))]
    return "\n".join([*lines, ""])
