"""Builds an ``Image`` on the host where it runs; ``remote_build`` starts it there. Standard library only.

On stdin comes one line of JSON, ``request`` and ``wheels`` (``"none"``, ``"local"`` or ``"all"``), and a tar of these
wheels. On stdout go lines of JSON behind ``MARK``, as login scripts may print too: ``say``, and in the end ``done``,
``failed``, or ``needs``, which wheels this host has to be sent. The end of stdin means that the driver is gone.
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
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from atoll.core.errors import AtollError, ImageError
from atoll.images.installer import IndexUnreachable
from atoll.images.overlay import Request, ensure_overlay

MARK = "atoll-image:"
NAMES = "names.json"  # first member of the tar: local requirement to the file that stands for it
_PATIENCE = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "10"}  # without a network it is known soon


class _WheelsNeeded(Exception):
    """The driver's local projects have to be sent."""


def _unpack(source: IO[bytes], folder: Path) -> dict[str, str]:
    """Put the driver's wheels into a folder; local requirements, and the wheels that stand for them."""
    names: dict[str, str] = {}
    with tarfile.open(fileobj=source, mode="r|") as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is None or "/" in member.name:
                raise ImageError(f"{member.name!r} came instead of a wheel")
            if member.name == NAMES:
                names = json.load(content)
            else:
                with (folder / member.name).open("wb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
    return {text: str(folder / name) for text, name in names.items()}


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


def _end_with_driver(folder: Path) -> None:
    """Wait for the end of stdin; pip ends with this process."""
    poll = select.poll()
    poll.register(0, select.POLLRDHUP)
    poll.poll()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main(_arguments: Sequence[str]) -> None:
    """Entry: reads a request from standard input, and answers line by line."""
    source = os.fdopen(0, "rb", closefd=False)
    user = site.getusersitepackages()  # ranks see it, and this program was started without
    if sys.prefix == sys.base_prefix and os.path.isdir(user):
        sys.path.append(user)
    given = json.loads(source.readline())
    request, wheels = Request(**given["request"]), given["wheels"]
    needs = {"python": request.python or ".".join(platform.python_version_tuple()[:2]), "platforms": _platforms()}
    with tempfile.TemporaryDirectory(prefix="atoll-wheels-", ignore_cleanup_errors=True) as folder:
        threading.Thread(target=_end_with_driver, args=(Path(folder),), daemon=True).start()
        names: dict[str, str] = {}

        def requirements() -> list[str]:
            if wheels == "all":
                os.environ.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=folder)
            elif wheels == "none" and any(text.startswith("/") for text in request.requirements):
                raise _WheelsNeeded
            for name, value in _PATIENCE.items():
                os.environ.setdefault(name, value)
            return [names.get(text, text) for text in request.requirements]

        try:
            if wheels != "none":
                names.update(_unpack(source, Path(folder)))
            _tell(done=asdict(ensure_overlay(request, say, requirements)))
        except _WheelsNeeded:
            _tell(needs={"wheels": "local", **needs})
        except IndexUnreachable as error:
            if wheels == "all":
                _tell(failed=str(error))
                return
            say("no package index can be reached from there: wheels are sent")
            _tell(needs={"wheels": "all", **needs})
        except (AtollError, OSError) as error:
            _tell(failed=str(error))
