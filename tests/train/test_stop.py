"""Asked to stop in any phase, every rank saves what there is and ends; nothing hangs and nothing is left half done."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import leaks
import ranks
import small
from atoll.core.errors import ConfigError, NonFiniteError
from atoll.train.events import Note, Progress, StepDone
from atoll.train.metrics.journal import VALIDATIONS, read

pytestmark = [pytest.mark.usefixtures("torch_in_process"), pytest.mark.timeout(300)]

LAYOUT = {"parallel__shard": 2}


class _Slow(http.server.BaseHTTPRequestHandler):
    """A text of 100 GB that comes slowly."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.send_response(200)
        self._send_facts(10**11)

    def do_GET(self) -> None:
        self.send_response(200)
        self._send_facts(10**11)
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"the sea, and then a little more of it\nEND\n" * 25_000)
                time.sleep(0.1)

    def _send_facts(self, size: int) -> None:
        self.send_header("ETag", '"1"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def slow_url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/text.txt"
    server.shutdown()
    server.server_close()
    thread.join()


def _stop_when(recipe: dict[str, Any], when: Callable[[Any], bool], victim: int, how: str = "SIGTERM") -> Any:
    """Run it; rank 0 sends ``how`` to rank ``victim`` at the first event that ``when`` holds for. Result and events."""
    pids = small._pids()
    events: list[Any] = []
    sent: list[Any] = []

    def report(event: Any) -> None:
        events.append(event)
        if not sent and when(event):
            sent.append(event)
            os.kill(pids[victim], getattr(signal, how))

    from atoll.train.trainer import run

    result = run(dict(recipe), report=report)
    return result, [type(event).__name__ for event in events], [e.text for e in events if isinstance(e, Note)]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.long
def test_stopped_while_data_are_prepared(tmp_path: Path, slow_url: str, victim: int) -> None:
    tree = small.tree(tmp_path, data__path=slow_url, data__document_end="END", **LAYOUT)
    started = time.monotonic()
    outcomes = ranks.run(2, _stop_when, tree, lambda event: isinstance(event, Progress), victim, timeout=90)
    assert time.monotonic() - started < 50, "sooner than a collective that nobody joins ends"
    assert [result.status for result, _, _ in outcomes] == ["stopped", "stopped"]
    assert outcomes[0][0].checkpoint is None
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    finished = small.train(small.changed(tree, data__path=str(tmp_path / "text.txt"), parallel__shard=None))
    assert finished.status == "finished", "the folder is free, and holds no recipe that never began"


@pytest.mark.long
def test_the_next_run_of_the_same_ranks_is_not_stopped_with_it(tmp_path: Path, slow_url: str) -> None:
    first = small.tree(tmp_path, data__path=slow_url, data__document_end="END", **LAYOUT)
    second = small.changed(first, data__path=str(tmp_path / "text.txt"))
    assert ranks.run(2, _stop_the_first, first, second) == [("stopped", "finished")] * 2


def _stop_the_first(first: dict[str, Any], second: dict[str, Any]) -> tuple[str, str]:
    stopped, _, _ = _stop_when(first, lambda event: isinstance(event, Progress), 1)
    return stopped.status, small.train(second).status


def test_stopped_before_the_first_step(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, **LAYOUT)
    outcomes = ranks.run(2, _stop_when, tree, lambda event: type(event).__name__ == "RunStarted", 1)
    assert [(result.status, result.step) for result, _, _ in outcomes] == [("stopped", 1)] * 2
    assert small.saved_step(tmp_path / "run") == 1


@pytest.mark.long
def test_stopped_in_a_validation(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, data__validation=0.3, train__validate_every=3, train__steps=9, **LAYOUT)
    outcomes = ranks.run(
        2, _stop_when, tree, lambda event: isinstance(event, Progress) and event.phase == "validating", 1
    )
    assert [(result.status, result.step) for result, _, _ in outcomes] == [("stopped", 3)] * 2
    _, names, notes = outcomes[0]
    assert "Validated" not in names
    assert any("SIGTERM on rank 1" in note and "step 3" in note for note in notes)
    assert small.saved_step(tmp_path / "run") == 3
    assert ranks.run(2, small.train, tree)[0].status == "finished"


@pytest.mark.long
def test_stopped_while_a_save_is_in_flight(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, checkpoint__every=2, train__steps=50, **LAYOUT)
    outcomes = ranks.run(2, _stop_when, tree, lambda event: isinstance(event, StepDone) and event.step == 2, 0)
    assert [(result.status, result.step) for result, _, _ in outcomes] == [("stopped", 3)] * 2
    assert small.saved_step(tmp_path / "run") == 3
    assert ranks.run(2, small.train_and_stop, tree, 5, "SIGUSR1", 1)[0].step == 6


def test_the_stop_file_is_taken_away_and_an_old_one_does_not_count(tmp_path: Path) -> None:
    tree = small.tree(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stop").touch()
    assert small.train(tree).status == "finished"
    assert not (tmp_path / "run" / "stop").exists()


def test_the_exit_code_says_that_it_is_not_finished(tmp_path: Path) -> None:
    path = small.write_toml(small.tree(tmp_path, train__steps=100_000), tmp_path / "tree.toml")
    run = small.fork(tmp_path, path)
    _until(lambda: _lines(tmp_path / "run") > 3, run.is_running)
    os.kill(run.pids[0], signal.SIGTERM)
    ((code, said),) = run.finish()
    assert code == 101, said
    assert "SIGTERM" in said
    assert small.saved_step(tmp_path / "run") == len(small.steps(tmp_path / "run"))


def test_the_second_of_two_runs_in_one_folder_is_refused(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=100_000)
    first = small.fork(tmp_path, small.write_toml(tree, tmp_path / "tree.toml"))
    _until(lambda: _lines(tmp_path / "run") > 1, first.is_running)
    with pytest.raises(ConfigError, match=f"in use by pid {first.pids[0]} "):
        small.train(tree)
    assert first.is_running()
    os.kill(first.pids[0], signal.SIGUSR1)
    assert first.finish()[0][0] == 101
    done = small.saved_step(tmp_path / "run")
    result = small.train(small.changed(small.tree(tmp_path), train__steps=done + 2), allow_changes=True)
    assert (result.status, result.step) == ("finished", done + 2)


@pytest.mark.long
def test_two_runs_side_by_side_share_the_data(tmp_path: Path) -> None:
    trees = [small.tree(tmp_path, train__output_dir=str(tmp_path / name)) for name in ("a", "b")]
    paths = [small.write_toml(tree, tmp_path / f"{number}.toml") for number, tree in enumerate(trees)]
    for run in [small.fork(tmp_path, path) for path in paths]:
        ((code, said),) = run.finish()
        assert code == 0, said
    small.assert_same_run(tmp_path / "a", tmp_path / "b")
    shards = [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    assert len(shards) == 1


def _lines(run: Path) -> int:
    """How many there are in the journal of a run."""
    journal = run / "metrics.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def _until(holds: Callable[[], bool], is_running: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not begin"
        assert is_running()
        time.sleep(0.02)


# ------------------------------------------------------------------------------------- loss and gradients that break
_MODEL = '''
import torch
from torch import nn

STEP = 0

class Broken(torch.autograd.Function):
    """The identity, with infinite gradients."""
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")

class Model(nn.Module):
    def __init__(self, section):
        super().__init__()
        self.embed = nn.Embedding(section.vocabulary, section.dim)
        self.blocks = nn.ModuleList([nn.Linear(section.dim, section.dim) for _ in range(2)])
        self.head = nn.Linear(section.dim, section.vocabulary, bias=False)
        self.calls = 0

    def forward(self, tokens, positions, documents=None):
        import torch.distributed as dist
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if self.training and torch.is_grad_enabled():
            self.calls += 1
        if self.calls == 3 and dist.get_rank() == 1:
            x = BREAK
        return self.head(x)

def build(section):
    return Model(section)
'''


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        pytest.param({"parallel__replicate": 2}, "loss", id="ddp-loss", marks=pytest.mark.long),
        pytest.param({"parallel__replicate": 2}, "gradients", id="ddp-gradients", marks=pytest.mark.long),
        pytest.param({"parallel__shard": 2}, "loss", id="fsdp-loss", marks=pytest.mark.long),
        pytest.param({"parallel__shard": 2}, "gradients", id="fsdp-gradients"),
    ],
)
def test_what_is_not_finite_stops_every_rank_before_the_weights_change(
    tmp_path: Path, what: str, layout: dict[str, Any]
) -> None:
    breaking = 'x * float("nan")' if what == "loss" else "Broken.apply(x)"
    (tmp_path / f"broken_{what}.py").write_text(_MODEL.replace("BREAK", breaking))
    # The run waits for step 3, or it has queued the next step's passes when it learns of it.
    every = 1 if what == "loss" else 2
    tree = small.tree(tmp_path, model__python=f"broken_{what}:build", checkpoint__every=every, **layout)
    outcomes = ranks.run(2, _nonfinite, tree, str(tmp_path))
    for text, status in outcomes:
        assert text == outcomes[0][0]
        assert "step 3" in text
        assert "parameters: inner.blocks.0.bias" in text
        assert "The weights are those of step 2; the newest checkpoint is of step 2. Lower" in text
        if what == "loss":
            assert "the loss is not finite on rank 1;" in text
        else:
            assert "gradients are not finite" in text
            assert "the loss is;" in text
        assert status == "failed" or text is outcomes[1][0]
    assert len(small.steps(tmp_path / "run")) == 2
    assert small.saved_step(tmp_path / "run") == 2


def _nonfinite(recipe: dict[str, Any], folder: str) -> tuple[str, str]:
    """The error and the status that was told; the weights must be those of the checkpoint."""
    import torch

    import atoll.train.trainer as module
    from atoll.train.events import RunEnded

    sys.path.insert(0, folder)
    events: list[Any] = []
    runs: list[Any] = []
    original = module.train

    def train(run: Any) -> None:
        runs.append(run)
        original(run)

    module.train = train
    with pytest.raises(NonFiniteError) as caught:
        small.train(recipe, events=events)
    saved = small.weights(recipe["train"]["output_dir"])
    for name, parameter in runs[0].engine.weights.masters.items():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert torch.equal(whole.detach(), saved[name]), name
    ended = [event for event in events if isinstance(event, RunEnded)]
    return str(caught.value), ended[0].status if ended else ""


# ------------------------------------------------------------------------------------------------ ranks that fail alone
def test_what_fails_on_one_rank_alone_is_told_on_all(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, **LAYOUT)
    outcomes = ranks.start(2, _without_data_on_rank_1, tree, patient=True).outcomes(timeout=55)
    for kind, text in outcomes:
        assert kind == "raised"
        assert "ConfigError" in text
        assert "nowhere.txt" in text


def _without_data_on_rank_1(recipe: dict[str, Any]) -> Any:
    import torch.distributed as dist

    own = small.changed(recipe, data__path="nowhere.txt") if dist.get_rank() == 1 else recipe
    return small.train(own)


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=10_000, **LAYOUT)
    outcomes = ranks.start(2, small.train_and_stop, tree, 3, "SIGKILL", 1, patient=True).outcomes(timeout=55)
    assert outcomes[1] == ("died", -signal.SIGKILL)
    assert outcomes[0][0] == "raised"


# ------------------------------------------------------------------------------------------------ atoll train itself
_COMMAND = "import sys; sys.modules['torch'] = None; from atoll.cli.main import main; main()"


class _Driver:
    """``atoll train`` in a process group of its own; what it says goes into a file, or ``stdout`` into a pipe.

    It does without PyTorch, which takes its ranks seconds to load.
    """

    def __init__(self, folder: Path, *arguments: str | Path, stdout: int | None = None) -> None:
        self._said = folder / "said"
        with self._said.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, "train", *map(str, arguments)],
                stdout=stdout or file,
                stderr=file,
                text=True,
                env=small.environment(),
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait_for(self, text: str) -> None:
        """Until it has said this: what it shows it knows, and what its ranks did it may not know yet."""
        _until(lambda: text in self.said, self.is_running)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def finish(self) -> int:
        """The exit code."""
        return self.process.wait(90)


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    tree = small.tree(tmp_path, train__steps=100_000, checkpoint__every=20)
    return small.write_toml(tree, tmp_path / "tree.toml")


def _running(folder: Path, run: Path, *arguments: str | Path) -> _Driver:
    """``atoll train`` once the run in the folder ``run`` has done some steps, and it has heard of one."""
    driver = _Driver(folder, *arguments)
    driver.wait_for("step 1/")
    _until(lambda: _lines(run) > 3, driver.is_running)
    return driver


@pytest.mark.parametrize(("whom", "name"), [("group", "run-2"), pytest.param("driver", "run", marks=pytest.mark.long)])
def test_ctrl_c_saves_and_says_so(tmp_path: Path, endless: Path, whom: str, name: str) -> None:
    """In the folder that the run has, which is a new one where it started over."""
    run = tmp_path / name
    if name == "run-2":
        small.train(small.tree(tmp_path, train__steps=2))
    driver = _running(tmp_path, run, endless, *(["--no-resume"] if name == "run-2" else []))
    if whom == "group":
        os.killpg(driver.process.pid, signal.SIGINT)
    else:
        driver.interrupt()
    assert driver.finish() == 101, driver.said
    assert "Ctrl-C: saving a checkpoint, then stopping" in driver.said
    assert small.saved_step(run) == len(small.steps(run))
    assert not (run / "stop").exists()


@pytest.mark.long
def test_a_notice_to_the_driver_alone_saves(tmp_path: Path, endless: Path) -> None:
    driver = _running(tmp_path, tmp_path / "run", endless, "--nodes", "2")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.finish() == 101, driver.said
    assert small.saved_step(tmp_path / "run") == len(small.steps(tmp_path / "run"))


@pytest.mark.long
def test_a_reader_that_has_seen_enough_stops_the_run(tmp_path: Path, endless: Path) -> None:
    driver = _Driver(tmp_path, endless, stdout=subprocess.PIPE)
    assert driver.process.stdout is not None
    assert any("step 1/" in line for line in driver.process.stdout)
    driver.process.stdout.close()  # what comes next is written to nobody
    assert driver.finish() == 141
    assert driver.said == (
        "atoll: standard output is closed: saving a checkpoint, then stopping; Ctrl-C stops at once\n"
    )
    assert small.saved_step(tmp_path / "run") == len(small.steps(tmp_path / "run"))


def test_ctrl_c_before_anything_began_ends_at_once(tmp_path: Path, endless: Path) -> None:
    (tmp_path / "run").mkdir()
    driver = _Driver(tmp_path, endless)
    _until(lambda: bool(leaks.descendants(driver.process.pid)), driver.is_running)  # it starts its ranks
    driver.interrupt()
    assert driver.finish() in (130, 101, -signal.SIGINT), driver.said
    if "starting 2 ranks" in driver.said:
        assert "stopping before the first step" in driver.said
    assert "failed" not in driver.said
    assert not (tmp_path / "run" / "stop").exists()


@pytest.mark.long
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, endless: Path) -> None:
    driver = _running(tmp_path, tmp_path / "run", endless)
    for rank in leaks.descendants(driver.process.pid):
        command = Path(f"/proc/{rank}/cmdline").read_bytes()
        if b"worker" in command:
            os.kill(rank, signal.SIGSTOP)  # it can't save any more
    driver.interrupt()
    driver.wait_for("once more stops at once")
    driver.interrupt()
    assert driver.finish() == 130, driver.said


@pytest.mark.long
def test_a_killed_driver_leaves_nothing_and_the_run_resumes(tmp_path: Path, endless: Path) -> None:
    driver = _running(tmp_path, tmp_path / "run", endless)
    _until(lambda: any((tmp_path / "run" / "checkpoints").glob("step-*")), driver.is_running)
    family = leaks.descendants(driver.process.pid)
    driver.process.kill()
    driver.finish()
    deadline = time.monotonic() + 30
    while any(leaks.is_running(pid) for pid in family):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done = small.saved_step(tmp_path / "run")
    tree = small.changed(small.tree(tmp_path, checkpoint__every=20), train__steps=done + 2)
    result = small.train(tree, allow_changes=True)
    assert (result.status, result.step) == ("finished", done + 2)
    assert [row["step"] for row in small.steps(tmp_path / "run")] == list(range(1, done + 3))


@pytest.mark.long
def test_a_validation_that_a_stop_cut_short_is_made_up_for(tmp_path: Path) -> None:
    tree = small.tree(tmp_path, train__steps=6, train__validate_every=3, data__validation=0.2)
    ranks.run(1, small.train_and_stop, tree, 2)  # the step that comes next is one that would be validated
    folder = tree["train"]["output_dir"]
    assert small.saved_step(folder) == 3
    assert read(Path(folder) / VALIDATIONS) == []
    ranks.run(1, small.train, tree)
    assert [row["step"] for row in read(Path(folder) / VALIDATIONS)] == [3, 6]
