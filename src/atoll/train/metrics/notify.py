"""Tells the user when a run ends: by a command of theirs, or by a POST to a webhook."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from atoll.train.metrics.reporter import ReporterFailed

TIMEOUT_S = 10.0


def send(target: str, summary: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S) -> None:
    """Send a summary.

    Args:
        target: an ``http://`` or ``https://`` URL that gets the summary as JSON; anything else is a shell command with
            the summary on its standard input and ``ATOLL_RUN_NAME``, ``ATOLL_STATUS``, ``ATOLL_STEP``, ``ATOLL_LOSS``,
            ``ATOLL_OUTPUT_DIR`` in its environment.

    Raises:
        ReporterFailed: it was refused, failed or took longer than ``timeout_s``. The text names a URL by its host
            only: the path of a webhook is a secret.
    """
    body = json.dumps(summary, ensure_ascii=False).encode(errors="replace")
    if target.lower().startswith(("http://", "https://")):
        _post(target, body, timeout_s)
    else:
        _run(target, body, summary, timeout_s)


def _post(url: str, body: bytes, timeout_s: float) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "atoll"}
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        urllib.request.urlopen(request, timeout=timeout_s).close()
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        # What is no HTTP at all may be quoted in the error, with the URL.
        reason = error if isinstance(error, OSError) else type(error).__name__
        raise ReporterFailed(f"[metrics] notify: the POST to {urlsplit(url).hostname} failed: {reason}") from None


def _run(command: str, body: bytes, summary: Mapping[str, Any], timeout_s: float) -> None:
    keys = {"RUN_NAME": "name", "STATUS": "status", "STEP": "step", "LOSS": "loss", "OUTPUT_DIR": "output_dir"}
    values = {f"ATOLL_{name}": summary.get(key) for name, key in keys.items()}
    variables = {name: "" if value is None else str(value) for name, value in values.items()}
    # `timeout` ends all that the command started. A file, not a pipe: a program left behind must not block the run.
    words = ["timeout", "--signal=KILL", str(timeout_s), "sh", "-c", command]
    with tempfile.TemporaryFile() as said:
        code = subprocess.run(
            words, input=body, stdout=said, stderr=said, env={**os.environ, **variables}, check=False
        ).returncode
        said.seek(0)
        last = said.read().decode(errors="replace").strip().rpartition("\n")[2].strip()
    if code == -signal.SIGKILL:
        raise ReporterFailed(f"[metrics] notify: the command took longer than {timeout_s:g} s: ended")
    if code != 0:
        raise ReporterFailed(f"[metrics] notify: the command exited with code {code}: {last}")
