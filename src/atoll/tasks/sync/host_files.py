"""What runs on ssh hosts for a cluster's files: its programs, and the removal of what was sent."""

from __future__ import annotations

import dataclasses
import posixpath
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atoll.core.errors import ProvisionError
from atoll.providers.remote import RemotePlan
from atoll.providers.ssh.connection import connections
from atoll.providers.ssh.facts import python_command
from atoll.tasks.spec import WORKDIR, ClusterSpec
from atoll.tasks.ssh_nodes import plans_of, provider_of, workdir_of
from atoll.tasks.supervisor_client import tell
from atoll.tasks.sync.receive import lock_file, state_file

_PROGRAM = (
    "import os, sys; sys.path.insert(0, {code!r}); os.environ['ATOLL_HOME'] = {home!r}; "
    "from atoll.tasks.{module} import main; sys.exit(main(sys.argv[1:]))"
)
_REMOVE_S = 300.0


def program(plan: RemotePlan, module: str, *arguments: str) -> str:
    """The shell command that runs one of ``atoll.tasks``' programs on a host."""
    code = _PROGRAM.format(code=plan.import_path[0], home=plan.folder, module=module)
    return python_command(plan.python, code, *arguments)


# Several hosts may do it at once in a home that they share.
_REMOVE = """rm -rf -- "$1" "$2" "$3" 2>/dev/null || rm -rf -- "$1" "$2" "$3" || exit 1
[ "$(readlink "$4")" != "$1" ] || rm -f -- "$4"; rmdir -- "$(dirname "$1")" 2>/dev/null; exit 0"""


def remove_files(cluster: ClusterSpec, first: int = 0) -> None:
    """Remove the workdir from every host, unless its place is the user's own choice or is shared by runs.

    Tells where that fails. ``first`` is the number of the first of those hosts.
    """
    if cluster.ssh.get("workdir") or cluster.ssh.get("files_in"):
        return

    def remove(node: int) -> None:
        target = provider_of(cluster).targets()[node]
        try:
            plan = _plan_of(cluster, node)
            workdir = workdir_of(cluster, plan)
            beside = (str(each(Path(workdir))) for each in (state_file, lock_file))
            paths = (workdir, *beside, posixpath.join(plan.home, WORKDIR))
            with connections.used([target]) as (login,):
                answer = login.run(shlex.join(["sh", "-c", _REMOVE, "sh", *paths]), limit_s=_REMOVE_S)
            if answer.returncode != 0:
                raise ProvisionError(f"{target}: {answer.stderr.decode(errors='replace').strip()}")
        except ProvisionError as error:
            tell(f"the workdir of cluster {cluster.name} stays on {target}, remove it by hand: {error}")

    with ThreadPoolExecutor(cluster.num_nodes) as threads:
        list(threads.map(remove, range(first, cluster.num_nodes)))
    connections.close_idle()


def workdir_on(cluster: ClusterSpec, node: int) -> str:
    """Where the workdir lies on one of a cluster's hosts; ``~/sky_workdir`` is that of its latest launch, of any.

    Raises:
        ProvisionError: the host can't be asked.
    """
    try:
        return workdir_of(cluster, _plan_of(cluster, node))
    finally:
        connections.close_idle()


def _plan_of(cluster: ClusterSpec, node: int) -> RemotePlan:
    own = {key: value for key, value in cluster.ssh.items() if key != "addresses"}
    only = dataclasses.replace(cluster, hosts=cluster.hosts[node : node + 1], num_nodes=1, accelerator=None, ssh=own)
    return plans_of(only)[0]
