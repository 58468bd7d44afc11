"""Makes an ``Image`` true on the host where it runs; ``remote_build`` starts it there. Standard library only.

On stdin comes one line of JSON, the request, and later, where they were asked for, a tar of wheels. On stdout go lines
of JSON behind ``MARK``, as login scripts may print too: ``say``, ``wheels`` (which ones this host can use), and in the
end ``done`` or ``failed``. The end of stdin means that the driver is gone.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import site
import sys
import tarfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from atoll.core.errors import AtollError, ImageError
from atoll.images.installer import IndexUnreachable
from atoll.images.overlay import Install, Overlay, Request, ensure_overlay

MARK = "atoll-image:"
NAMES = "names.json"  # first member of the tar: local requirement to the file that stands for it
_PATIENCE = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "10"}  # without a network it is known soon


class _Wheels:
    """Gets wheels from the driver: of its local projects always, of all the rest where no index can be reached."""

    def __init__(self, source: IO[bytes], request: Request) -> None:
        self._source = source
        self._request = request
        self.work: Path | None = None

    def supply(self, work: Path, install: Install) -> Overlay:
        self.work = work
        try:
            return self._supply(work, install)
        finally:
            self.work = None  # from here on it may be another process's

    def _supply(self, work: Path, install: Install) -> Overlay:
        wanted = self._request.requirements
        if any(text.startswith("/") for text in wanted):
            wanted = self._fetch(work / "wheels", everything=False)
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        try:
            return install(wanted)
        except IndexUnreachable:
            say("no package index can be reached from there: wheels are sent")
        wanted = self._fetch(work / "wheels", everything=True)
        os.environ.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(work / "wheels"))
        return install(wanted)

    def _fetch(self, folder: Path, *, everything: bool) -> list[str]:
        """Fill a folder with wheels; the requirements, local ones as the wheels that stand for them."""
        python = self._request.python or ".".join(platform.python_version_tuple()[:2])
        _tell(wheels={"everything": everything, "python": python, "platforms": _platforms()})
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        names: dict[str, str] = {}
        with tarfile.open(fileobj=self._source, mode="r|") as tar:
            for member in tar:
                content = tar.extractfile(member)
                if content is None or "/" in member.name:
                    raise ImageError(f"{member.name!r} came instead of a wheel")
                if member.name == NAMES:
                    names = json.load(content)
                else:
                    with (folder / member.name).open("wb") as file:
                        shutil.copyfileobj(content, file, 1 << 20)
        return [str(folder / names[text]) if text in names else text for text in self._request.requirements]


def _platforms() -> list[str]:
    """Tags of the wheels that run here, as pip spells them, newest first."""
    machine = platform.machine()
    library, version = platform.libc_ver()
    if library != "glibc":
        return [f"linux_{machine}"]
    newest = int(version.split(".")[1])
    return [f"manylinux_2_{minor}_{machine}" for minor in range(newest, 4, -1)] + [
        *(f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux"))
    ]


def say(line: str) -> None:
    """A line for the user."""
    _tell(say=line)


def _tell(**message: object) -> None:
    # By one write, so that nothing that a library prints comes in between.
    os.write(1, f"{MARK}{json.dumps(message)}\n".encode())


def _end_with_driver(wheels: _Wheels) -> None:
    """Wait for the end of stdin; pip ends with this process."""
    poll = select.poll()
    poll.register(0, select.POLLRDHUP)
    poll.poll()
    if (work := wheels.work) is not None:
        shutil.rmtree(work, ignore_errors=True)
    os._exit(1)


def main(_arguments: Sequence[str]) -> None:
    """Entry: reads a request from standard input, and answers line by line."""
    source = os.fdopen(0, "rb", closefd=False)
    user = site.getusersitepackages()  # ranks see it, and this program was started without
    if sys.prefix == sys.base_prefix and os.path.isdir(user):
        sys.path.append(user)
    request = Request(**json.loads(source.readline()))
    wheels = _Wheels(source, request)
    threading.Thread(target=_end_with_driver, args=(wheels,), daemon=True).start()
    try:
        overlay = ensure_overlay(request, say, wheels.supply)
    except (AtollError, OSError) as error:
        _tell(failed=str(error))
    else:
        _tell(done=asdict(overlay))
