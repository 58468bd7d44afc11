"""The preflight over all hosts of a pool or a cluster, driven from this machine: seconds, before any rank starts."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from atoll.agent.preflight import Finding, judge, unreachable
from atoll.core.errors import ProvisionError
from atoll.core.paths import atoll_home
from atoll.providers.base import NodePlan
from atoll.providers.ssh.hosts import Target
from atoll.providers.ssh.remote import ANSWER_S, Host, for_each, on_hosts
from atoll.wire.command_output import parsed_object, skip_login_text

_LISTEN_S = 30.0  # where it was asked just now, and answered
_REACH_S = 5.0
_SUM_S = 60.0  # its ranks wait so long for one another, whose torch may come from such a disk too
_FRESH_S = 600.0  # hosts whose all-reduce passed so lately are not asked for another


def check_hosts(
    targets: Sequence[Target],
    plans: Sequence[NodePlan],
    say: Callable[[str], object],
    *,
    again: bool = True,
) -> None:
    """Judge what every host said of itself, try the way from each to the head, and add numbers up over all of them.

    Args:
        targets, plans: the hosts, head first, and what they said about themselves.
        say: called with one line for each thing that is not as it should be, and with one at the end.
        again: try the way also between hosts that were found well in the last ten minutes.

    Raises:
        ProvisionError: something would make the ranks fail; all such things are listed, one line each, with the fix.
    """
    began = time.monotonic()
    findings = judge({plan.host: plan.seen for plan in plans})
    if not again and passed_lately("well", plans):
        _refuse(findings, say)
        return
    over = summed = ""
    if len(plans) == 1:
        _refuse(findings, say)
    else:
        with on_hosts(targets, plans) as hosts:
            over, summed = _together(hosts, findings, say)
    remember("well", plans)
    say(f"preflight: {_counted(len(plans))} OK{over}{summed} ({time.monotonic() - began:.1f} s)")


def _together(hosts: Sequence[Host], findings: list[Finding], say: Callable[[str], object]) -> tuple[str, str]:
    """Try what ranks will do with each other; what is to be said of it: over which interface, and how fast."""
    plans = [host.plan for host in hosts]
    for_each(hosts, Host.bring_code)
    with ThreadPoolExecutor(len(hosts)) as threads:
        reached, interfaces, port = _reach(hosts[0], hosts[1:], threads)
        _refuse([*findings, *reached], say)
        over = f", over {interfaces[0]}" if interfaces[0] else ""
        if not all(plan.seen.get("torch") for plan in plans) or passed_lately("sum", plans):
            return over, ""
        took_ms = _all_reduce(hosts, interfaces, port, threads)
    remember("sum", plans)
    return over, f", all-reduce of 4 MiB {took_ms:.1f} ms"


def _ask(host: Host, operation: str, limit_s: float = ANSWER_S, **arguments: Any) -> dict[str, Any]:
    answer: dict[str, Any] = host.python("agent.preflight", operation, json.dumps(arguments), limit_s=limit_s)
    return answer


def _reach(head: Host, others: Sequence[Host], threads: ThreadPoolExecutor) -> tuple[list[Finding], list[str], int]:
    """Can every host connect to a port of the head's? Each one's interface on that way, the head's first; the port."""
    wish = {"address": "", "port": 0, "num_peers": len(others), "wait_s": ANSWER_S}
    server = head.open("agent.preflight", "listen", json.dumps(wish))
    assert server.stdout is not None
    limit = threading.Timer(_LISTEN_S, server.kill)
    limit.start()
    try:
        skip_login_text(server.stdout)
        said = server.stdout.readline()
        limit.cancel()
        if not said:
            why = "the preflight did not begin there: does something in ~/.bashrc there read standard input?"
            return [Finding(head.plan.host, why, True)], [], 0
        port = parsed_object(head.plan.host, said).get("port", 0)
        if not port:
            return [Finding(head.plan.host, "could not listen on any TCP port", True)], [], 0
        asked = [
            threads.submit(_ask, host, "reach", address=head.plan.addr, port=port, wait_s=_REACH_S) for host in others
        ]
        findings, interfaces = [], [""]
        for host, each in zip(others, asked, strict=True):
            answer = each.result()
            interfaces.append(answer.get("interface", ""))
            if "error" in answer:
                peer, error = head.plan, answer["error"]
                findings.append(unreachable(host.plan.host, peer.host, peer.addr, port, host.plan.addr, error))
        if not findings:
            own = parsed_object(head.plan.host, server.stdout.readline() or b"{}")
            interfaces[0] = own.get("interface", "")
        return findings, interfaces, port
    finally:
        limit.cancel()
        limit.join()
        server.kill()
        server.communicate()


def _all_reduce(hosts: Sequence[Host], interfaces: Sequence[str], port: int, threads: ThreadPoolExecutor) -> float:
    """Sum over all hosts, at the port that all of them have just reached; how long it took, in ms."""
    address, asked = hosts[0].plan.addr, []
    for rank, (host, interface) in enumerate(zip(hosts, interfaces, strict=True)):
        env = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
        wish = {"python": host.plan.python, "rank": rank, "world_size": len(hosts), "address": address, "port": port}
        asked.append(threads.submit(_ask, host, "all_reduce", limit_s=3 * _SUM_S, **wish, wait_s=_SUM_S, env=env))
    said = [each.result() for each in asked]
    wrong = [f"{host.plan.host}: {each['error']}" for host, each in zip(hosts, said, strict=True) if "error" in each]
    if wrong:
        raise ProvisionError(
            "hosts can reach the head, but an all-reduce over them fails: open TCP 1024-65535 between all of them, or "
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
        raise ProvisionError(f"{len(fatal)} problems:\n" + "\n".join(f"  {each}" for each in fatal))


def passed_lately(what: str, plans: Sequence[NodePlan]) -> bool:
    """Have these hosts passed a check in the last ten minutes?"""
    try:
        return 0 <= time.time() - _stamp(what, plans).stat().st_mtime < _FRESH_S
    except FileNotFoundError:
        return False


def remember(what: str, plans: Sequence[NodePlan]) -> None:
    """These hosts have passed a check."""
    stamp = _stamp(what, plans)
    stamp.parent.mkdir(mode=0o700, exist_ok=True)
    stamp.touch()


def _stamp(what: str, plans: Sequence[NodePlan]) -> Path:
    """The file that was last touched when these hosts passed a check."""
    hosts = json.dumps([[plan.host, plan.addr, plan.python] for plan in plans])
    return atoll_home() / "preflight" / f"{what}-{hashlib.sha256(hosts.encode()).hexdigest()[:16]}"


def _counted(num_hosts: int) -> str:
    return "1 host" if num_hosts == 1 else f"{num_hosts} hosts"
