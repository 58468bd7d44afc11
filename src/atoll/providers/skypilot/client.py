"""Asks SkyPilot's SDK, which runs in a process of its own: a JSON line for each request and for each answer."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.validation import command_line
from atoll.providers.skypilot import environment

_ANSWER_S = 900.0  # to take down what a cloud is slow with
_PROGRAM = Path(__file__).with_name("helper.py")
_LONGEST = 400  # characters of what SkyPilot says, in a message
# Its errors that come from what was asked for; others come from what the cloud or the machine did.
_OF_REQUEST = frozenset(
    {
        *("ValueError", "TypeError", "NoCloudAccessError", "InvalidCloudCredentials", "InvalidCloudConfigs"),
        *("ResourcesMismatchError", "NotSupportedError", "InvalidSkyPilotConfigError", "ProvisionPrechecksError"),
    }
)
_REFUSED = "ApiServerAuthenticationError"
_STEPS = {
    "APIVersionMismatchError": "end its server, the next command starts another one: `atoll down` what runs, then "
    "remove the folder {folder}",
    _REFUSED: "another program answers on its port: remove {folder}/port",
    "ApiServerConnectionError": "{folder}/home/.sky/api_server/server.log says why. If another program has its port, "
    "remove {folder}/port",
    "NoCloudAccessError": "`{check}` says what to set up",
    "ResourcesUnavailableError": "try another region, or `any_of` several; `atoll gpus INFRA` lists what there is",
    "prices": "put the cloud's vms.csv into {folder}/home/.sky/catalogs/v8/{cloud}",
    "ModuleNotFoundError": "remove {folder}/venv: the next command installs it again",
    "ClusterOwnerIdentityMismatchError": "log in to the account that made it",
}


class SkyPilotError(ProvisionError):
    """What SkyPilot says went wrong; ``kind`` is the name of its exception."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class Helper:
    """SkyPilot's process; it ends when this one does."""

    def __init__(self, cloud: str) -> None:
        self._cloud = cloud
        self._lock = threading.Lock()
        self._number = 0
        python = environment.interpreter(cloud)
        self._log = environment.folder() / "helper.log"
        try:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    [str(python), "-u", str(_program()), environment.VERSION],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment.environ(),
                    cwd="/",
                    start_new_session=True,  # Ctrl-C is ours to handle
                )
        except OSError as error:
            raise ProvisionError(f"SkyPilot's Python {python} can't be started: {error.strerror}. {_again()}") from None
        self._buffer = b""

    def call(self, method: str, /, **arguments: Any) -> Any:
        """What it answers.

        Raises:
            ConfigError: what was asked for can't be.
            SkyPilotError: something else failed.
        """
        with self._lock:
            self._number += 1
            request = json.dumps({"id": self._number, "method": method, "arguments": arguments}).encode() + b"\n"
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(request)
                self._process.stdin.flush()
                answer = self._answer()
            except (BrokenPipeError, EOFError):
                self.close()
                raise SkyPilotError(f"SkyPilot's process ended: {self._last_words()}. {_again()}") from None
        if "error" in answer:
            raise self._error(answer["error"]["type"], answer["error"]["message"])
        return answer["result"]

    def _answer(self) -> dict[str, Any]:
        """The answer to the newest request; what comes late for an older one is not waited for any more."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + _ANSWER_S
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                answer: dict[str, Any] = json.loads(line)
                if answer["id"] == self._number:
                    return answer
                continue
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise SkyPilotError(f"SkyPilot did not answer within {_ANSWER_S:.0f} s: see {self._log}")
            if not (block := os.read(self._process.stdout.fileno(), 1 << 16)):
                raise EOFError
            self._buffer += block

    def _error(self, kind: str, message: str) -> AtollError:
        if kind == "ConnectionError" and "/v8" in message:  # that version of its catalogs
            kind, message = "prices", "prices could not be fetched from the internet"
        if kind == "ApiServerConnectionError" or "API server process exited" in message:
            kind, message = "ApiServerConnectionError", "its server did not start"
        said = _shortened(message)
        said = said if " " in said else f"{kind} {said}".strip()  # of a KeyError that is the key
        check = command_line("atoll", "check", *filter(None, [self._cloud]))
        step = _STEPS.get(kind, "").format(folder=environment.folder(), cloud=self._cloud or "CLOUD", check=check)
        text = f"SkyPilot: {said.rstrip('.')}" + (f": {step}" if step else "")
        return ConfigError(text) if kind in _OF_REQUEST else SkyPilotError(text, kind)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return _shortened(lines[-1])

    @property
    def is_running(self) -> bool:
        """Can it be asked?"""
        return self._process.poll() is None

    def close(self) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_helpers: dict[tuple[Path, str], Helper] = {}
_lock = threading.Lock()


def ask(cloud: str, method: str, /, **arguments: Any) -> Any:
    """Ask this process's helper, which is started where none runs; one serves every question about a cloud.

    Raises:
        ConfigError: what was asked for can't be.
        ProvisionError: SkyPilot can't be had, or something failed there.
    """
    for is_again in (False, True):  # a password that was lost was chosen anew
        helper = _helper(cloud)
        try:
            return helper.call(method, **arguments)
        except SkyPilotError as error:
            if error.kind != _REFUSED:
                raise
        helper.close()  # it may know an older one than the server
        if is_again:  # so the server does
            environment.end_server()
    return _helper(cloud).call(method, **arguments)


def _helper(cloud: str) -> Helper:
    with _lock:
        key = environment.folder(), cloud
        helper = _helpers.get(key)
        if helper is None or not helper.is_running:
            helper = _helpers[key] = Helper(cloud)
        return helper


def close() -> None:
    """End every helper of this process."""
    with _lock:
        while _helpers:
            _helpers.popitem()[1].close()


atexit.register(close)


def _program() -> Path:
    """The helper's file, beside this one or, where our code lies in an archive, a copy."""
    if _PROGRAM.exists():
        return _PROGRAM
    import importlib.resources

    copy = environment.folder() / "helper.py"
    copy.write_text(importlib.resources.files(__package__).joinpath("helper.py").read_text())
    return copy


def _again() -> str:
    return f"To have it installed again, remove {environment.folder() / 'venv'}"


def _shortened(message: str) -> str:
    """The first lines of a message that say something, in one; of a launch, why each place had no machines."""
    message = message.partition("Provision failures (tried ")[2].partition("\n")[2] or message
    lines = [line.strip("✗ ") for line in message.strip().splitlines() if line.strip()]
    text = "; ".join(lines[:4])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
