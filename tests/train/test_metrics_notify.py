"""Telling the user that a run is over: commands and webhooks, those that fail and those that hang."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError
from atoll.train.events import Event, Note, RunEnded, RunStarted
from atoll.train.metrics.notify import send
from atoll.train.metrics.reporter import ReporterFailed, Reporters
from atoll.train.metrics.summary import SummaryFile
from atoll.train.recipe.load import load_recipe

STARTED = RunStarted("my run", "out/my run", 1000, "one rank", "CPU", 1, 0, 60, 4096)
ENDED = RunEnded("finished", 60, 2.25, 245_760, 61.2, checkpoint="out/my run/checkpoints/60", sample="\ud800 «end»")


@contextmanager
def served(status: int = 204, hang: bool = False) -> Iterator[tuple[str, list[tuple[str, dict[str, object]]]]]:
    """A real HTTP server on loopback, and the content types and bodies that it got."""
    got: list[tuple[str, dict[str, object]]] = []
    release = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.headers["Content-Type"], json.loads(body)))
            if hang:
                release.wait(30)
                return
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hook/s3cret", got
        finally:
            release.set()
            server.shutdown()


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note):
            self.lines.append(event.text)

    def close(self) -> None:
        """Nothing."""


def notes_of(target: str) -> list[str]:
    """What a run with ``[metrics] notify = target`` says about it."""
    notes = Notes()
    with tempfile.TemporaryDirectory() as folder:
        reporters = Reporters([SummaryFile(folder, target), notes])
        reporters(STARTED)
        reporters(ENDED)
        reporters.close()
        assert (Path(folder) / "summary.json").exists()
    return notes.lines


def test_a_webhook_gets_the_summary() -> None:
    with served() as (url, got):
        assert notes_of(url) == []
    [(content_type, summary)] = got
    assert content_type == "application/json"
    expected = {"name": "my run", "status": "finished", "step": 60, "steps": 60, "loss": 2.25, "tokens": 245_760}
    assert expected.items() <= summary.items()


def test_a_webhook_that_answers_an_error_is_one_line_without_its_secret() -> None:
    with served(status=500) as (url, got):
        [line] = notes_of(url)
    assert len(got) == 1
    assert line == "[metrics] notify: the POST to 127.0.0.1 failed: HTTP Error 500: Internal Server Error"


def test_a_webhook_that_nobody_serves_is_one_line() -> None:
    with socket.socket() as bound:  # held, so that nobody else serves there, and not listening
        bound.bind(("127.0.0.1", 0))
        [line] = notes_of(f"http://127.0.0.1:{bound.getsockname()[1]}/s3cret")
    assert re.fullmatch(r"\[metrics\] notify: the POST to 127.0.0.1 failed: .*refused.*", line)
    assert "s3cret" not in line


def test_a_webhook_that_hangs_is_left() -> None:
    with served(hang=True) as (url, _), pytest.raises(ReporterFailed, match=r"the POST to 127\.0\.0\.1 .*timed out"):
        send(url, {"status": "finished"}, timeout_s=0.3)


@pytest.mark.parametrize("url", ["http://", "http://[broken/s3cret", "https://a b/s3cret", "http://127.0.0.1:x/s3cret"])
def test_a_url_that_is_none_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"\[metrics\] notify: .*https://HOST/PATH") as caught:
        load_recipe({"metrics": {"notify": url}}, env={})
    assert "s3cret" not in str(caught.value)


def test_a_server_that_speaks_no_http_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"220 mail.example ESMTP\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        [line] = notes_of(f"http://127.0.0.1:{listener.getsockname()[1]}/s3cret")
        thread.join()
    assert line == "[metrics] notify: the POST to 127.0.0.1 failed: BadStatusLine"


def test_a_command_gets_the_summary_and_variables(tmp_path: Path) -> None:
    out = shlex.quote(str(tmp_path / "got"))
    names = ("RUN_NAME", "STATUS", "STEP", "LOSS", "OUTPUT_DIR")
    lines = "; ".join(f'echo "$ATOLL_{name}"' for name in names)
    assert notes_of(f"(cat; echo; {lines}) > {out}") == []
    body, *variables = (tmp_path / "got").read_text().splitlines()
    assert json.loads(body)["checkpoint"] == "out/my run/checkpoints/60"
    assert variables == ["my run", "finished", "60", "2.25", "out/my run"]


def test_a_command_that_reads_nothing_is_fine() -> None:
    assert notes_of("true") == []


def test_a_command_that_fails_is_one_line_with_its_last_one() -> None:
    assert notes_of("echo first; echo no such channel >&2; exit 3") == [
        "[metrics] notify: the command exited with code 3: no such channel"
    ]


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    for timeout_s in (0.5, 5.0, 40.0):  # a slow machine has not begun with it in half a second
        with pytest.raises(ReporterFailed, match=f"took longer than {timeout_s:g} s"):
            send(f"sleep 60 & echo $! > {shlex.quote(str(pid))}; wait", {}, timeout_s=timeout_s)
        if pid.exists() and pid.read_text():
            break
    deadline = time.monotonic() + 30
    while _runs(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(int(pid.read_text()))


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX" and os.getpid() != pid
    except OSError:
        return False
