"""``atoll dashboard``: who may ask, that it says what the commands say, and that it ends without a trace."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import atoll as sky
from atoll.core.errors import AtollError
from atoll.dashboard import job_log
from atoll.dashboard.views import Views
from atoll.tasks.jobs import Job
from atoll.tasks.spec import JobStatus
from atoll.train import events
from local_cluster import until
from testbed.fixtures import MakeBed, make_bed

__all__ = ["make_bed"]

STEPS = 'for i in $(seq 40); do echo "{\\"step\\": $i, \\"loss\\": 4.$((40 - i))}"; done'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@dataclass
class Dashboard:
    process: subprocess.Popen[str]
    port: int
    token: str

    def request(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        status, body, _ = self.answer(path, method, **headers)
        return status, body

    def answer(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers

    def get(self, path: str) -> Any:
        status, body = self.request(f"/{self.token}/api/{path}")
        assert status == 200, body
        return json.loads(body)

    def post(self, path: str) -> tuple[int, Any]:
        status, body = self.request(f"/{self.token}/api/{path}", "POST")
        return status, json.loads(body)

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(10)


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Dashboard]:
    command = [sys.executable, "-m", "atoll", "dashboard", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"Dashboard: http://127\.0\.0\.1:(\d+)/([\w-]{20,})/\n", line)
            assert found is not None, line + process.communicate()[1]
            yield Dashboard(process, int(found[1]), found[2])
        finally:
            process.kill()


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    with running() as found:
        yield found


def test_nobody_gets_in_without_the_token(dashboard: Dashboard) -> None:
    here = f"/{dashboard.token}/"
    for path in (
        "/",
        "/style.css",
        "/api/clusters",
        "/wrong/api/clusters",
        f"{here[:-2]}/",
        f"//{here}",
        "/%2e%2e/",
        "*",
    ):
        status, body = dashboard.request(path)
        assert (status, b"token is missing or wrong" in body) == (403, True), path
    assert dashboard.request("/api/clusters/c/down", "POST")[0] == 403
    for host in ("evil.example", f"evil.example:{dashboard.port}", "127.0.0.1.evil.example", ""):
        status, body = dashboard.request(here, Host=host)
        assert (status, b"Atoll" in body) == (403, False), host
    for host in (f"localhost:{dashboard.port}", "LOCALHOST:9", "[::1]:80", "127.0.0.1"):  # as an ssh forwarding has it
        assert dashboard.request(here, Host=host)[0] == 200
    status, body, headers = dashboard.answer(here)
    assert (status, b"<title>Atoll</title>" in body) == (200, True)
    assert headers["Content-Security-Policy"].startswith("default-src 'self'")
    assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")
    assert dashboard.request(f"{here}page.js")[0] == dashboard.request(f"{here}style.css")[0] == 200
    assert dashboard.request(f"{here}api/clusters/c/down")[0] == 405  # a link does nothing
    with socket.socket() as there:  # not on this machine's other addresses
        there.settimeout(1)
        assert there.connect_ex((_own_address(), dashboard.port)) != 0


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])


def _typed(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "atoll", *words], capture_output=True, text=True).stdout


def _said(*words: str) -> Any:
    return json.loads(_typed(*words, "-o", "json"))


def test_it_shows_what_the_commands_show_and_acts(dashboard: Dashboard, home: Path) -> None:
    assert dashboard.get("clusters") == []
    job = sky.launch(sky.Task(name="steps", run=f"{STEPS}; echo 'größer'; sleep 60", num_nodes=2), "c")
    sky.exec(sky.Task(run="true", num_nodes=2), "c")
    until(lambda: "größer" in job.logs(), "its output")
    shown = {name: value for name, value in _said("status")[0].items() if name != "num_unfinished_jobs"}
    until(lambda: dashboard.get("clusters") == [shown], "the cluster")
    until(
        lambda: dashboard.get("clusters/c/jobs") == [_without_cluster(row) for row in _said("queue", "c")], "the jobs"
    )
    assert dashboard.get("gpus/local").keys() == {"rows", "lines"}
    assert dashboard.request(f"/{dashboard.token}/api/clusters/d/jobs")[0] == 404
    assert dashboard.request(f"/{dashboard.token}/api/clusters/c/jobs/9/log")[0] == 404
    assert dashboard.request(f"/{dashboard.token}/api/gpus/nowhere")[0] == 502

    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=30)) as connection:
        connection.request("GET", f"/{dashboard.token}/api/clusters/c/jobs/1/log?tail=5")
        lines = iter(connection.getresponse().readline, b"")
        messages = _read(lines, "größer")
        texts = [text for message in messages for _, text in message["lines"]]
        assert (texts[-1], len(texts)) == ("größer", 5)
        steps = {point["step"]: point["loss"] for message in messages for point in message["points"]}
        assert steps[40] == 4.0
        assert dashboard.post("clusters/c/jobs/1/cancel") == (200, [1])
        *_, last = (json.loads(line) for line in lines)
        assert last == {"status": "CANCELLED"}
    assert dashboard.post("clusters/c/jobs/77/cancel")[0] == 404
    assert dashboard.post("clusters/c/down")[0] == 200
    assert sky.get(sky.status()) == []
    until(lambda: dashboard.get("clusters") == [], "the cluster to be gone")


def _without_cluster(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "cluster"}


def _read(lines: Iterator[bytes], text: str) -> list[dict[str, Any]]:
    """Messages up to one with a line of this text."""
    found = []
    for line in lines:
        message = json.loads(line)
        found += [message] if message else []
        if message and [text] in [each[1:] for each in message["lines"]]:
            return found
    raise AssertionError(found)


def test_ctrl_c_ends_it_while_a_log_is_followed(dashboard: Dashboard) -> None:
    sky.launch(sky.Task(run="echo begun; sleep 60"), "c")
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=30)) as connection:
        connection.request("GET", f"/{dashboard.token}/api/clusters/c/jobs/1/log")
        _read(iter(connection.getresponse().readline, b""), "begun")
        began = time.monotonic()
        assert dashboard.interrupt() == 0
        assert time.monotonic() - began < 4
    assert dashboard.process.stderr is not None
    said = dashboard.process.stderr.read()
    assert said.splitlines()[1:] == ["Ctrl-C ends it"], said
    assert f"-L {dashboard.port}:127.0.0.1:{dashboard.port}" in said
    sky.down("c")


def test_runs_and_their_curves(tmp_path: Path, home: Path) -> None:
    for name, losses in (("a", [3.0, 2.5]), ("deep/er/b", [9.0])):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        rows = [{"step": step, "loss": loss, "tokens": 7} for step, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "lo')
    os.utime(tmp_path / "runs/a/metrics.jsonl", (1e9, 1e9))
    (tmp_path / "runs/a/validation.jsonl").write_text('{"step": 2, "validation_loss": 2.75}\n')
    with running("runs") as dashboard:
        found = dashboard.get("runs")
        shown = [(each["name"], each["step"], each["loss"], each["losses"]) for each in found]
        assert shown == [("b", 1, 9.0, [9.0]), ("a", 2, 2.5, [3.0, 2.5])]
        curve = dashboard.get(f"runs/{found[1]['id']}")
        assert [row.get("loss", row.get("validation_loss")) for row in curve] == [3.0, 2.5, 2.75]
        assert dashboard.request(f"/{dashboard.token}/api/runs/..%2f..%2fetc")[0] == 404


def test_what_can_not_be_served_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, said in ((["--port", port], f"--port {port}: "), (["nowhere"], "nowhere: there is no such folder")):
            done = subprocess.run([sys.executable, "-m", "atoll", "dashboard", *words], capture_output=True, text=True)
            assert (done.returncode, done.stderr.startswith(f"atoll: {said}")) == (2, True), done.stderr


def test_a_silent_host_is_asked_once_and_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    views, asked, answered = Views(), threading.Semaphore(0), threading.Event()

    def silent(cluster: str) -> list[dict[str, Any]]:
        asked.release()
        answered.wait(30)
        return []

    monkeypatch.setattr("atoll.dashboard.views._jobs", silent)
    ended: list[str] = []

    def page() -> None:
        try:
            views.jobs("c")
        except AtollError as error:
            ended.append(str(error))

    pages = [threading.Thread(target=page) for _ in range(3)]
    for each in pages:
        each.start()
    assert asked.acquire(timeout=10)
    views.ending.set()
    for each in pages:
        each.join(10)
    assert ended == ["the dashboard has ended"] * 3
    assert not asked.acquire(blocking=False)
    answered.set()


def test_the_log_of_a_training_job_is_points_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    step = events.StepDone(3, 9, 9, 2.5, 1e-3, 1.0, 10.0, 5.0, 1.0, 0.0, 1)
    lines = [
        json.dumps(events.encode(each)) for each in (events.Note("resuming"), step, events.Validated(3, 2.25, 9, 1.0))
    ]
    log = "".join(f"(head, rank=0, pid=7) {line}\n" for line in [*lines, '{"event": "Other"}', "plain"]) + "✓ Job"

    def pieces(self: Job, **how: object) -> Iterator[bytes]:
        data = log.encode()
        yield from (data[at : at + 50] for at in range(0, len(data), 50))
        yield b""

    monkeypatch.setattr(Job, "pieces", pieces)
    monkeypatch.setattr(Job, "status", JobStatus.SUCCEEDED)
    found = [each for each in job_log.messages(Job("c", 1), 0, threading.Event()) if each]
    texts = [line for each in found for line in each.get("lines", ())]
    prefix = "(head, rank=0, pid=7) "
    assert texts[0] == [prefix, "resuming"]
    assert texts[1][1].startswith("Validated: step=3, loss=2.25")
    assert texts[2:] == [[prefix, '{"event": "Other"}'], [prefix, "plain"], ["", "✓ Job"]]
    assert next(point["loss"] for each in found for point in each.get("points", ()) if "loss" in point) == 2.5
    assert found[-1] == {"status": "SUCCEEDED"}


@pytest.mark.long
def test_it_follows_jobs_of_other_hosts(make_bed: MakeBed) -> None:
    bed = make_bed(1)
    Path(os.environ["ATOLL_HOME"], "config.toml").write_text('[ssh.lab]\nhosts = ["h1"]\n')
    _typed("launch", "-d", "-c", "c", "--infra", "ssh/lab", "echo begun; sleep 300")
    until(lambda: "begun" in _typed("logs", "c", "--no-follow"), "its output")
    before = len(bed.hosts[0].command_lines())
    with running() as dashboard:
        assert [each["supervised_from"] for each in dashboard.get("clusters")] == ["h1"]
        assert [each["status"] for each in dashboard.get("clusters/c/jobs")] == ["RUNNING"]
        assert dashboard.get("gpus/ssh%2Flab")["lines"][0].startswith("h1: ")
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=60)) as connection:
            connection.request("GET", f"/{dashboard.token}/api/clusters/c/jobs/1/log")
            _read(iter(connection.getresponse().readline, b""), "begun")
            assert len(bed.hosts[0].command_lines()) > before
            assert dashboard.interrupt() == 0
    until(lambda: len(bed.hosts[0].command_lines()) <= before, "nobody asks any more", 20)
    _typed("down", "c")


# ------------------------------------------------------------------------------------------------------ browser
@pytest.mark.long
def test_a_person_sees_it(tmp_path: Path, home: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason='no driver: pip install "playwright"')
    (tmp_path / "outputs/novels").mkdir(parents=True)
    rows = "".join(json.dumps({"step": step, "loss": 9 / step, "lr": 0.1}) + "\n" for step in range(1, 80))
    (tmp_path / "outputs/novels/metrics.jsonl").write_text(rows)
    task = sky.Task(name="steps", run=f"{STEPS}; echo '<b>bold</b>'; sleep 100", resources={"accelerators": "L4:4"})
    sky.launch(task, "c")
    sky.exec(sky.Task(name="later", run="true", resources={"accelerators": "L4:4"}), "c")
    wrong: list[str] = []
    with running() as dashboard, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 900})
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"http://127.0.0.1:{dashboard.port}/{dashboard.token}/")
        card = page.locator("[data-cluster=c]")
        playwright.expect(card.locator("tr.job")).to_have_count(2, timeout=20_000)
        playwright.expect(page.locator("#totals")).to_contain_text("4 of 4")
        playwright.expect(card).to_contain_text("waiting for 4 × L4")  # why the second one waits
        card.get_by_text("steps").click()
        log = page.locator("#detail pre")
        playwright.expect(log).to_contain_text("<b>bold</b>", timeout=20_000)  # as text
        playwright.expect(page.locator("#detail .chart")).to_contain_text("step 40")
        page.get_by_placeholder("lines with").fill("bold")
        playwright.expect(log.locator("div:visible")).to_have_count(1)
        cancel = page.get_by_role("button", name="Cancel job")
        cancel.click()
        page.get_by_role("button", name="sure?").click()
        playwright.expect(page.locator("#detail .pill")).to_have_text("CANCELLED", timeout=20_000)
        page.locator("a.run").click()
        playwright.expect(page.locator("#detail .chart")).to_contain_text("step 79")
        playwright.expect(page.locator("#detail")).to_contain_text("outputs/novels")
        page.screenshot(path=str(tmp_path / "page.png"))
        assert wrong == []
        assert dashboard.interrupt() == 0
        playwright.expect(page.locator("#connection")).to_have_text("not connected", timeout=20_000)
        browser.close()
    sky.down("c")
