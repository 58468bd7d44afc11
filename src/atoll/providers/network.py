"""A network of its own for a cluster on this machine: all ports free, and a way out.

A network namespace with a loopback interface, joined to the outside by ``slirp4netns``, which needs no rights. Both
processes behind it end with this one, however it dies: they wait at a pipe that nobody else holds.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
from typing import IO

from atoll.core.errors import death_reason

_START_S = 30.0  # on a busy machine; without it a cluster has the machine's ports
_END_S = 2.0
_MTU = "65520"
_RESOLVER = "10.0.2.3"  # where slirp4netns answers, with what this machine resolves


class NetworkUnavailable(Exception):
    """No network of its own can be had; the message says why, and what would help."""


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
    def start(cls) -> Network:
        """Start one.

        Raises:
            NetworkUnavailable: it is turned off, the kernel refuses one, or there is no ``slirp4netns``.
        """
        for variable in ("ATOLL_NETWORK_NAMESPACE", "ATOLL_PID_NAMESPACE"):
            if os.environ.get(variable) == "0":
                raise NetworkUnavailable(f"{variable}=0")
        for program, package in (("unshare", "util-linux"), ("nsenter", "util-linux"), ("slirp4netns", "slirp4netns")):
            if shutil.which(program) is None:
                raise NetworkUnavailable(
                    f"there is no {program} program; apt-get install {package} lets clusters use the same ports side "
                    f"by side"
                )
        with contextlib.ExitStack() as failed:
            holder = _hold()
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


def _hold() -> subprocess.Popen[bytes]:
    """A process that sits in a new network namespace until its standard input closes."""
    said = b""
    for rights in ((), ("--user", "--map-current-user")):
        # It says back what it reads, which also tells when it is inside.
        holder = subprocess.Popen(
            ["unshare", *rights, "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
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
