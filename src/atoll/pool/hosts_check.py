"""The preflight over all hosts of a pool or a cluster, driven from this machine: seconds, before any rank starts."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll.core.errors import ProvisionError
from atoll.core.paths import atoll_home, write_atomic
from atoll.pool.preflight import Finding, judge, unreachable
from atoll.providers.remote import RemotePlan
from atoll.providers.ssh import bundle
from atoll.providers.ssh.connection import Connection, connections, on_each
from atoll.providers.ssh.facts import python_command
from atoll.providers.ssh.hosts import Target

_BOOT = "import sys; sys.path.insert(0, {code!r}); from atoll.pool.preflight import main; main(sys.argv[1:])"
_REACH_S = 5.0
_SUM_S = 30.0
_FRESH_S = 600.0  # hosts whose all-reduce passed so lately are not asked for another
_PASSED = "ssh-preflight.json"
_FIRST_PORT, _LAST_PORT = 20_000, 32_000


def check_hosts(
    targets: Sequence[Target],
    plans: Sequence[RemotePlan],
    say: Callable[[str], object],
    *,
    folder: str | None = None,
    again: bool = True,
) -> None:
    """Look at every host, try the way from each to the head, and add a few numbers up over all of them.

    Args:
        targets, plans: the hosts, head first, and what they said about themselves.
        say: called with one line for each thing that is not as it should be, and with one at the end.
        folder: where the ranks will work there, for the disk's free space; their homes by default.
        again: look also at hosts that were found well in the last ten minutes.

    Raises:
        ProvisionError: something would make the ranks fail; all such things are listed, one line each, with the fix.
    """
    began = time.monotonic()
    if not again and _passed_lately("well", plans):
        return
    hosts = [_Host(connections.hold(target), plan) for target, plan in zip(targets, plans, strict=True)]
    try:
        on_each([host.connection for host in hosts], lambda each: _ship(hosts, each))
        head = hosts[0]
        with ThreadPoolExecutor(len(hosts)) as threads:
            peers = [head.plan.addr if host is not head else hosts[-1].plan.addr for host in hosts]
            asked = [
                threads.submit(host.ask, "probe", python=host.plan.python, folder=folder, peer=peer)
                for host, peer in zip(hosts, peers, strict=True)
            ]
            probes = {host.plan.host: each.result() for host, each in zip(hosts, asked, strict=True)}
            findings = judge(probes, now_s=time.time())
            if len(hosts) > 1:
                findings += _reach(head, hosts[1:], threads)
            _refuse(findings, say)
            summed = ""
            if len(hosts) > 1 and all(probe["torch"] for probe in probes.values()) and not _passed_lately("sum", plans):
                took_ms = _all_reduce(hosts, probes, threads)
                _remember("sum", plans)
                summed = f", all-reduce of 4 MiB {took_ms:.1f} ms"
        _remember("well", plans)
        route = probes[head.plan.host].get("route") or {}
        over = f", over {route['interface']}" if len(hosts) > 1 and route.get("interface") else ""
        say(f"preflight: {_counted(len(hosts))} well{over}{summed} ({time.monotonic() - began:.1f} s)")
    finally:
        for host in hosts:
            connections.release(host.connection.target)


class _Host:
    """One host during the preflight."""

    def __init__(self, connection: Connection, plan: RemotePlan) -> None:
        self.connection = connection
        self.plan = plan

    def command(self, operation: str, arguments: dict[str, Any]) -> str:
        code = _BOOT.format(code=self.plan.import_path[0])
        return python_command(self.plan.python, code, operation, json.dumps(arguments))

    def ask(self, operation: str, *, limit_s: float = 60.0, **arguments: Any) -> dict[str, Any]:
        answer = self.connection.run(self.command(operation, arguments), limit_s=limit_s)
        try:
            said: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            lines = answer.stderr.decode(errors="replace").strip().splitlines()
            last = lines[-1] if lines else f"exit code {answer.returncode}"
            raise ProvisionError(f"{self.plan.host}: the preflight failed there: {last}") from None
        return said


def _ship(hosts: Sequence[_Host], connection: Connection) -> None:
    plan = next(host.plan for host in hosts if host.connection is connection)
    bundle.put(connection, plan, plan.bundles[0])


def _reach(head: _Host, others: Sequence[_Host], threads: ThreadPoolExecutor) -> list[Finding]:
    """Can every host connect to a port of the head's?"""
    wish = {"address": "", "port": 0, "num_peers": len(others), "wait_s": _REACH_S}
    server = head.connection.open(head.command("listen", wish), subprocess.PIPE)
    assert server.stdout is not None
    try:
        port = json.loads(server.stdout.readline() or b"{}").get("port", 0)
        if not port:
            return [Finding(head.plan.host, "could not listen on any TCP port", True)]
        asked = [
            threads.submit(host.ask, "reach", address=head.plan.addr, port=port, wait_s=_REACH_S) for host in others
        ]
        findings = []
        for host, each in zip(others, asked, strict=True):
            said = each.result()
            if "error" in said:
                peer = head.plan
                findings.append(unreachable(host.plan.host, peer.host, peer.addr, port, host.plan.addr, said["error"]))
        return findings
    finally:
        server.kill()
        server.communicate()


def _all_reduce(hosts: Sequence[_Host], probes: dict[str, Any], threads: ThreadPoolExecutor) -> float:
    address, port = hosts[0].plan.addr, random.randint(_FIRST_PORT, _LAST_PORT)
    asked = []
    for rank, host in enumerate(hosts):
        interface = (probes[host.plan.host].get("route") or {}).get("interface")
        env = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
        wish = {"python": host.plan.python, "rank": rank, "world_size": len(hosts), "address": address, "port": port}
        asked.append(threads.submit(host.ask, "all_reduce", limit_s=3 * _SUM_S, **wish, wait_s=_SUM_S, env=env))
    said = [each.result() for each in asked]
    wrong = [f"{host.plan.host}: {each['error']}" for host, each in zip(hosts, said, strict=True) if "error" in each]
    if wrong:
        raise ProvisionError(
            "hosts can reach the head, but not add numbers up together: open TCP 1024-65535 between all of them, or "
            "name the interface they share with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME:\n"
            + "\n".join(f"  {line}" for line in wrong)
        )
    return max(float(each.get("ms", 0.0)) for each in said)


def _refuse(findings: Sequence[Finding], say: Callable[[str], object]) -> None:
    fatal = [finding for finding in findings if finding.fatal]
    for finding in findings:
        if not finding.fatal:
            say(str(finding))
    if len(fatal) == 1:
        raise ProvisionError(str(fatal[0]))
    if fatal:
        raise ProvisionError(f"{len(fatal)} things are in the way:\n" + "\n".join(f"  {each}" for each in fatal))


def _passed_lately(what: str, plans: Sequence[RemotePlan]) -> bool:
    return _key(what, plans) in _passed()


def _remember(what: str, plans: Sequence[RemotePlan]) -> None:
    passed = {**_passed(), _key(what, plans): time.time()}
    write_atomic(atoll_home() / _PASSED, json.dumps(passed).encode())


def _passed() -> dict[str, float]:
    """When which hosts passed what, where that is not long ago."""
    with contextlib.suppress(OSError, ValueError):
        passed: dict[str, float] = json.loads((atoll_home() / _PASSED).read_bytes())
        return {key: when_s for key, when_s in passed.items() if 0 <= time.time() - when_s < _FRESH_S}
    return {}


def _key(what: str, plans: Sequence[RemotePlan]) -> str:
    return json.dumps([what, *([plan.host, plan.addr, plan.python] for plan in plans)])


def _counted(num_hosts: int) -> str:
    return "1 host is" if num_hosts == 1 else f"{num_hosts} hosts are"
