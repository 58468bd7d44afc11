"""Tells the user when a run ends: by a command of theirs, or by a POST to a webhook."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from atoll.core.errors import ConfigError
from atoll.train.events import Event, RunEnded, RunStarted
from atoll.train.metrics.reporter import Reporter, ReporterFailed
from atoll.train.metrics.summary import summarise

TIMEOUT_S = 10.0


class Notifier(Reporter):
    """Sends the summary of ``[metrics] notify`` when the run ends.

    Args:
        target: an ``http://`` or ``https://`` URL that gets the summary as JSON; anything else is a shell command with
            the summary on its standard input and ``ATOLL_RUN_NAME``, ``ATOLL_STATUS``, ``ATOLL_STEP``, ``ATOLL_LOSS``,
            ``ATOLL_OUTPUT_DIR`` in its environment.

    Raises:
        ConfigError: a URL without a host, or with a port that is none.
    """

    def __init__(self, target: str) -> None:
        if _is_url(target) and not _host(target):
            raise ConfigError(
                "[metrics] notify is not a URL that can be reached: expected https://HOST/PATH, or a command"
            )
        self._target = target
        self._started: RunStarted | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._started = event
        elif isinstance(event, RunEnded):
            send(self._target, summarise(event, self._started))


def send(target: str, summary: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S) -> None:
    """Send a summary, as ``Notifier`` says.

    Raises:
        ReporterFailed: it was refused, failed or took longer than ``timeout_s``. The text names a URL by its host
            only: the path of a webhook is a secret.
    """
    body = json.dumps(summary, ensure_ascii=False).encode(errors="replace")
    if _is_url(target):
        _post(target, body, timeout_s)
    else:
        _run(target, body, summary, timeout_s)


def _is_url(target: str) -> bool:
    return target.lower().startswith(("http://", "https://"))


def _host(url: str) -> str:
    """The host of a URL, empty where there is none or the URL is broken."""
    try:
        parts = urllib.parse.urlsplit(url)
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        return ""
    host = parts.hostname or ""
    return host if port_is_right and not re.search(r"\s", host) else ""


def _post(url: str, body: bytes, timeout_s: float) -> None:
    place = _host(url)
    headers = {"Content-Type": "application/json", "User-Agent": "atoll"}
    try:
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=timeout_s):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        raise ReporterFailed(f"[metrics] notify: {place} answered {error.code} {error.reason}") from None
    except TimeoutError:
        raise ReporterFailed(f"[metrics] notify: {place} did not answer within {timeout_s:g} s") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise ReporterFailed(f"[metrics] notify: {place} did not answer within {timeout_s:g} s") from None
        raise ReporterFailed(f"[metrics] notify: {place} could not be reached: {error.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # a connection that breaks, no HTTP at all
        raise ReporterFailed(f"[metrics] notify: the POST failed ({type(error).__name__})") from None


def _run(command: str, body: bytes, summary: Mapping[str, Any], timeout_s: float) -> None:
    loss = summary.get("loss")
    variables = {
        "ATOLL_RUN_NAME": str(summary.get("name", "")),
        "ATOLL_STATUS": str(summary.get("status", "")),
        "ATOLL_STEP": str(summary.get("step", "")),
        "ATOLL_LOSS": "" if loss is None else str(loss),
        "ATOLL_OUTPUT_DIR": str(summary.get("output_dir", "")),
    }
    # Files rather than pipes: a command that reads nothing, or leaves a program behind, blocks nobody.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(body)
        given.seek(0)
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=given,
            stdout=said,
            stderr=said,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ReporterFailed(f"[metrics] notify: the command took longer than {timeout_s:g} s: ended") from None
        finally:
            if process.returncode is None:  # also after Ctrl-C
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0:
            said.seek(0)
            lines = said.read().decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            raise ReporterFailed(
                f"[metrics] notify: the command exited with code {code}" + (f": {last}" if last else "")
            )
