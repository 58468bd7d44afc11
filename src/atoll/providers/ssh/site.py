"""Where the supervisor of a group of hosts can run: on the head, if that can log in to all others."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from atoll.core.validation import command_line
from atoll.providers.base import NodePlan, Report
from atoll.providers.ssh.errors import resolved
from atoll.providers.ssh.hosts import Target
from atoll.providers.ssh.preflight import check_hosts, remember
from atoll.providers.ssh.remote import Host, last_words

_HOP_S = 20.0


def check_with_head(
    targets: Sequence[Target], plans: Sequence[NodePlan], report: Report
) -> tuple[list[str], str | None]:
    """Look at the hosts; how the head reaches each other one, and why no supervisor can run there, if so."""
    with Host(targets[0], plans[0]) as head, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(_from_head, head, targets, plans)
        try:
            check_hosts(targets, plans, report)
            return asked.result()
        except BaseException:
            head.abort()
            raise


def _from_head(head: Host, targets: Sequence[Target], plans: Sequence[NodePlan]) -> tuple[list[str], str | None]:
    """How the head reaches each other host, and why it can't, if so."""
    with ThreadPoolExecutor(len(targets)) as threads:
        names = list(threads.map(_name_there, targets[1:], plans[1:]))
        reached = list(threads.map(lambda name: _hop(head, name), names))
    for name, said in zip(names, reached, strict=True):
        if said is not None:
            return [], f"{targets[0]} can't log in to {name} ({said}{_remedy(said, name)})"
    remember("hops", plans)
    return names, None


def _name_there(target: Target, plan: NodePlan) -> str:
    """What the head calls another host."""
    found = resolved(target, "ssh")
    port = found.get("port", "22")
    return f"{found.get('user', '')}@{plan.addr}" + (f":{port}" if port != "22" else "")


def _remedy(said: str, name: str) -> str:
    """What to type on the head, where that helps."""
    host, _, port = name.partition(":")
    words = ["-p", port, host] if port else [host]
    if "Permission denied" in said:
        return f"; there: `{command_line('ssh-copy-id', *words)}`"
    return f"; there: `{command_line('ssh', *words)}` once" if "Host key verification failed" in said else ""


def _hop(head: Host, name: str) -> str | None:
    host, _, port = name.partition(":")
    options = "-o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=5"
    # Its own failure must not look like a failure of the login to the head.
    answer = head.run(f"ssh {options} -p {port or 22} {shlex.quote(host)} true </dev/null || exit 1", limit_s=_HOP_S)
    if answer.returncode == 0:
        return None
    return last_words(answer.stderr, answer.returncode).rstrip(".")
