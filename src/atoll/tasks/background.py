"""Processes that outlive whoever starts them: the supervisor, and what cleans up after one. Standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import atoll
from atoll.agent.orphans import VARIABLE
from atoll.core.secrets import is_secret

_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "SSH_AUTH_SOCK", "TZ")


def start(
    boot: str,
    words: Sequence[str],
    folder: Path,
    output: IO[bytes],
    pass_fds: Sequence[int] = (),
) -> None:
    """Run code in a session of its own; it is to fork at once, so that the process that goes on is nobody's child.

    Args:
        boot: the code; ``sys.argv[1]`` is what has to be on its import path.
        words: further arguments.
        folder: of the cluster that it is for; ATOLL_HOME is the state folder that this lies in.
        output: where both its standard streams go. Of the caller's environment it gets what it needs, and no secret.
        pass_fds: descriptors that it gets, too.

    Raises:
        OSError: it could not be started.
    """
    env = {name: value for name, value in os.environ.items() if name in _ENVIRONMENT or name.startswith("ATOLL_")}
    # One that a job starts is not below that job.
    env = {name: value for name, value in env.items() if not is_secret(name, value) and name != VARIABLE}
    # The folder, or the archive, that this package lies in.
    source = str(Path(atoll.__file__).parent.parent)
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", boot, source, *words],
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        cwd="/",
        env={**env, "ATOLL_HOME": str(folder.parent.parent)},
    )
