"""Builds an ``Image`` on the hosts of a pool: once for each content, from their own index, or with wheels from here."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from atoll.core.errors import AtollError, ImageError, ProvisionError
from atoll.images.image import Image
from atoll.images.installer import Pip, Progress
from atoll.images.on_host import MARK, NAMES
from atoll.images.overlay import Request
from atoll.images.requirements import is_local
from atoll.images.resolve import request_of
from atoll.providers.base import NodePlan, Provider, Remote


def build(
    provider: Provider, plans: Sequence[NodePlan], image: Image, pip: Sequence[str], say: Progress
) -> list[NodePlan]:
    """The nodes with interpreter and import paths of the image, which is built where it is not there yet.

    Args:
        provider: of the nodes; ``plans``: those nodes.
        pip: requirements of the pool, which win over the image's.
        say: called with a line for each step that takes time.

    Raises:
        ConfigError: a constraints file that can't be read.
        ImageError: a package can't be installed there, or got here.
    """
    asked = [request_of(image, pip, has_gpu=plan.num_accelerators > 0) for plan in plans]
    with tempfile.TemporaryDirectory(prefix="atoll-wheels-") as folder:
        wheels = _Wheels(Path(folder), lambda line: say(f"here: {line}"))
        hosts = [
            _Host(provider.remote(plan), request, wheels, say) for plan, (request, _) in zip(plans, asked, strict=True)
        ]
        with ThreadPoolExecutor(len(hosts), thread_name_prefix="atoll-image") as threads:
            futures = [threads.submit(host.run) for host in hosts]
            try:
                answers = [_answer(future.result) for future in futures]
            except BaseException:
                for host in hosts:
                    host.end()
                raise
    failed: dict[str, list[str]] = {}
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            failed.setdefault(answer, []).append(host.plan.host)
    if failed:
        raise ImageError("\n".join(f"{', '.join(names)}: {why}" for why, names in failed.items()))
    made = [answer for answer in answers if not isinstance(answer, str)]
    told: dict[str, list[str]] = {}
    for host, answer, (_, lines) in zip(hosts, made, asked, strict=True):
        for line in [*lines, *answer["lines"]]:
            told.setdefault(line, []).append(host.plan.host)
    for line, names in told.items():
        say(f"{', '.join(names)}: {line}")
    return [_planned(host.plan, answer, image.python) for host, answer in zip(hosts, made, strict=True)]


def _answer(ask: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    try:
        return ask()
    except AtollError as error:
        return str(error)


def _planned(plan: NodePlan, made: Mapping[str, Any], python: str | None) -> NodePlan:
    version = plan.python_version
    if made["python"] != plan.python and python is not None:
        version = tuple(map(int, python.split(".")))
    paths = tuple(made["paths"])
    return dataclasses.replace(plan, python=made["python"], python_version=version, packages=paths)


class _Host:
    """One host while its image is built."""

    def __init__(self, remote: Remote, request: Request, wheels: _Wheels, say: Progress) -> None:
        self.plan = remote.plan
        self._remote = remote
        self._request = request
        self._wheels = wheels
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._lock = threading.Lock()

    def run(self) -> dict[str, Any]:
        """What the host says in the end; it is asked again with the wheels that it needs."""
        try:
            self._remote.bring_code()
            wheels, folder = "none", None
            while True:
                answer = self._ask(wheels, folder)
                if "failed" in answer:
                    raise ImageError(answer["failed"])
                if "done" in answer:
                    done: dict[str, Any] = answer["done"]
                    return done
                wheels = answer["needs"].pop("wheels")
                folder = self._wheels.get(self._request, everything=wheels == "all", **answer["needs"])
        finally:
            self._remote.close()

    def _ask(self, wheels: str, folder: Path | None) -> dict[str, Any]:
        """The host's last message."""
        with tempfile.TemporaryFile() as said:
            with self._lock:
                if self._ended:
                    raise ProvisionError("interrupted")
                process = self._process = self._remote.open("images.on_host", stderr=said)
            assert process.stdin is not None and process.stdout is not None
            message: dict[str, Any] = {}
            try:
                request = {"request": dataclasses.asdict(self._request), "wheels": wheels}
                process.stdin.write(json.dumps(request).encode() + b"\n")
                if folder is not None:
                    self._wheels.send(process.stdin, folder)
                process.stdin.flush()
                for line in process.stdout:
                    _, mark, text = line.decode(errors="replace").partition(MARK)
                    message = json.loads(text) if mark else {}
                    if "say" in message:
                        self._say(f"{self.plan.host}: {message['say']}")
                    elif message:
                        return message
            except BrokenPipeError:
                pass  # it says why
            finally:
                _kill(process)
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise ProvisionError(f"building the image ended early: {lines[-1] if lines else 'nothing said'}")

    def end(self) -> None:
        """End it there too, where it still runs. From any thread."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what it had not read yet
                pipe.close()


class _Wheels:
    """Wheels for hosts that can't get them themselves, each kind got once."""

    def __init__(self, folder: Path, say: Progress) -> None:
        self._folder = folder
        self._say = say
        self._got: dict[str, Path] = {}
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()

    def get(self, request: Request, *, everything: bool, python: str, platforms: Sequence[str]) -> Path:
        """A folder of wheels for a host of this kind: of local projects, or of ``everything`` that is requested."""
        with self._lock:
            folder = self._build_local(request)
            if everything:
                key = json.dumps([request.requirements, python, *platforms])
                if key not in self._got:
                    self._got[key] = self._download(request, python, platforms, f"wheels-{len(self._got)}")
                folder = self._got[key]
        return folder

    def send(self, stream: IO[bytes], folder: Path) -> None:
        """Write a tar of a folder's wheels."""
        with tarfile.open(fileobj=stream, mode="w|", bufsize=1 << 20) as tar:
            names = json.dumps(self._names).encode()
            about = tarfile.TarInfo(NAMES)
            about.size = len(names)
            tar.addfile(about, io.BytesIO(names))
            for wheel in sorted(folder.iterdir()):
                tar.add(wheel, wheel.name)

    def _build_local(self, request: Request) -> Path:
        """A folder with a wheel of every local project."""
        folder = self._folder / "local"
        folder.mkdir(exist_ok=True)
        for text in filter(is_local, request.requirements):
            if text not in self._names:
                path, bracket, extras = text.partition("[")
                before = {each.name for each in folder.iterdir()}
                with tempfile.TemporaryDirectory(prefix="atoll-pip-") as work:
                    Pip(sys.executable, Path(work), self._say).wheel(path, folder)
                (made,) = {each.name for each in folder.iterdir()} - before
                self._names[text] = f"{made}{bracket}{extras}"
        return folder

    def _download(self, request: Request, python: str, platforms: Sequence[str], name: str) -> Path:
        folder = self._folder / name
        shutil.copytree(self._folder / "local", folder)
        wanted = [str(folder / self._names[text]) if text in self._names else text for text in request.requirements]
        with tempfile.TemporaryDirectory(prefix="atoll-pip-") as work:
            Pip(sys.executable, Path(work), self._say, request.constraints).download(wanted, python, platforms, folder)
        return folder
