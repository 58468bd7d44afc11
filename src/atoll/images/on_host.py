"""Makes an ``Image`` true on the host where it runs; ``remote_image`` starts it there. Standard library only.

On stdin comes one line of JSON, the wish, and later, where they were asked for, a tar of wheels. On stdout go lines of
JSON behind ``MARK``, as login scripts may print too: ``say``, ``wheels`` (which ones this host can use), and in the end
``done`` or ``failed``. The end of stdin means that the driver is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import select
import shutil
import site
import socket
import sys
import tarfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from atoll.core.errors import AtollError, ImageError
from atoll.core.paths import atoll_home, write_atomic
from atoll.images.image import Image
from atoll.images.installer import UNREACHABLE
from atoll.images.interpreters import running_interpreter
from atoll.images.overlay import locked, resolve

MARK = "atoll-image:"
NAMES = "names.json"  # first member of the tar: local requirement to the file that stands for it
_PATIENCE = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "10"}  # without a network it is known soon


class _Host:
    """This host, and the driver that asks."""

    def __init__(self, source: IO[bytes], wish: dict[str, Any]) -> None:
        self._source = source
        self._wish = wish
        self._store = atoll_home() / "images"
        self._store.mkdir(mode=0o700, exist_ok=True)
        asked = json.dumps([wish, sys.executable, running_interpreter().state()], sort_keys=True)
        self._key = f"wish-{hashlib.sha256(asked.encode()).hexdigest()[:24]}"
        # Not one folder for all hosts: a shared home may come without locks that hold between them.
        self.wheels = self._store / f".wheels-{self._key}-{socket.gethostname()}"

    def make(self) -> dict[str, Any]:
        """Interpreter, import paths and lines for the user; made once for the same wish and the same interpreter."""
        if (made := self._known()) is not None:
            return made
        with locked(self._store, self._key, say):
            if (made := self._known()) is not None:  # another process made it while this one waited
                return made
            try:
                made = self._made()
            finally:
                shutil.rmtree(self.wheels, ignore_errors=True)
            write_atomic(self._store / f"{self._key}.json", json.dumps(made).encode())
        return made

    def _known(self) -> dict[str, Any] | None:
        with contextlib.suppress(FileNotFoundError):
            made: dict[str, Any] = json.loads((self._store / f"{self._key}.json").read_bytes())
            if all(map(os.path.exists, [made["python"], *made["paths"]])):
                os.utime(self._store / f"{self._key}.json")  # it was used
                return made
        return None

    def _made(self) -> dict[str, Any]:
        names = self._fetch(everything=False) if self._wish["local"] else {}
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        try:
            return self._resolve(names)
        except ImageError as error:
            if UNREACHABLE not in str(error):
                raise
        say("no package index can be reached from there: wheels are sent")
        names = self._fetch(everything=True)
        links = str(self.wheels)
        os.environ.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=links, UV_OFFLINE="1", UV_FIND_LINKS=links)
        return self._resolve(names)

    def _resolve(self, names: Mapping[str, str]) -> dict[str, Any]:
        wish = self._wish
        pip = [str(self.wheels / names[text]) if text in names else text for text in wish["pip"]]
        image = Image(python=wish["python"], pip=pip, apt=wish["apt"], constraints=wish["constraints"])
        made = resolve(image, has_gpu=wish["has_gpu"], progress=say)
        return {"python": made.python, "paths": made.paths, "lines": made.lines}

    def _fetch(self, *, everything: bool) -> dict[str, str]:
        """Wheels from the driver: of its local projects, or of all that is wished."""
        python = self._wish["python"] or ".".join(platform.python_version_tuple()[:2])
        _tell(wheels={"everything": everything, "python": python, "platforms": _platforms()})
        shutil.rmtree(self.wheels, ignore_errors=True)
        self.wheels.mkdir(mode=0o700)
        names: dict[str, str] = {}
        with tarfile.open(fileobj=self._source, mode="r|") as tar:
            for member in tar:
                content = tar.extractfile(member)
                if content is None or "/" in member.name:
                    raise ImageError(f"{member.name!r} came instead of a wheel")
                if member.name == NAMES:
                    names = json.load(content)
                else:
                    with (self.wheels / member.name).open("wb") as file:
                        shutil.copyfileobj(content, file, 1 << 20)
        return names


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


def _end_with_driver(wheels: Path) -> None:
    """Wait for the end of stdin; installers end with this process."""
    poll = select.poll()
    poll.register(0, select.POLLRDHUP)
    poll.poll()
    shutil.rmtree(wheels, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Entry: ``host_image``."""
    source = os.fdopen(0, "rb", closefd=False)
    user = site.getusersitepackages()  # ranks see it, and this program was started without
    if sys.prefix == sys.base_prefix and os.path.isdir(user):
        sys.path.append(user)
    host = _Host(source, json.loads(source.readline()))
    threading.Thread(target=_end_with_driver, args=(host.wheels,), daemon=True).start()
    try:
        made = host.make()
    except (AtollError, OSError) as error:
        _tell(failed=str(error))
    else:
        _tell(done=made)
