"""The disks of ssh hosts: workdirs, mounts and folders are put there, over one stream each."""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Callable
from typing import Any

from atoll.core.errors import ProvisionError
from atoll.providers import registry
from atoll.providers.base import WORKDIR, Remote
from atoll.tasks.nodes import plan_of
from atoll.tasks.spec import ClusterSpec
from atoll.tasks.sync.mounts import Mount
from atoll.tasks.sync.select import Selection
from atoll.tasks.sync.send import Progress, send
from atoll.wire.command_output import parsed, skip_login_text

Say = Callable[[str], object]


def host_disks(cluster: ClusterSpec) -> list[HostDisk]:
    """The disks of a cluster's hosts; each is used in a ``with`` block."""
    provider, is_run = registry.of(cluster.allocation), bool(cluster.allocation.files_in)
    return [HostDisk(provider.remote(plan), plan.workdir, is_run=is_run) for plan in plan_of(cluster).nodes]


class HostDisk:
    """The disk of an ssh host.

    Attributes:
        home, workdir: folders there.
        workdir_link: where scripts look for the workdir, or None. A run's script starts in it: that link may be one
            that a cluster's job goes by.
        seen: further folders in which jobs see what is put.
    """

    seen = ("/tmp",)

    def __init__(self, remote: Remote, workdir: str, *, is_run: bool = False) -> None:
        self.home, self.workdir = remote.plan.home, workdir
        self.workdir_link = None if is_run else posixpath.join(remote.plan.home, WORKDIR)
        self._remote = remote

    def __enter__(self) -> HostDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._remote.close()

    def put(self, source: Selection | Mount, dest: str, link: str | None, progress: Progress | None) -> list[str]:
        """Make a folder there what was selected here, and link it where jobs are to see it; lines for the user."""
        assert isinstance(source, Selection), "a URL is fetched before this"
        host, lines = self._remote.plan.host, []
        with tempfile.TemporaryFile() as stderr:
            links = () if link is None else (link,)
            process = self._remote.open("tasks.sync.receive", dest, *links, stderr=stderr)
            assert process.stdin is not None
            assert process.stdout is not None

            def answer() -> Any:
                line = process.stdout.readline() if process.stdout is not None else b""
                if not line:
                    raise BrokenPipeError
                return parsed(host, line)

            with process.stdout:
                try:
                    with process.stdin:
                        skip_login_text(process.stdout)
                        lines = send(source, process.stdin, answer, progress)
                    said = answer()
                    lines += [] if said is None else [f"{host}: {said}"]
                except BrokenPipeError:
                    pass  # it ended, and says why
                process.stdout.read()
                process.wait()
            stderr.seek(0)
            if process.returncode != 0:
                shown = stderr.read().decode(errors="replace").strip().splitlines()
                raise ProvisionError(f"{host}: {shown[-1] if shown else f'exit code {process.returncode}'}")
        return lines
