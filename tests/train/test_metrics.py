"""FLOPs, memory, traces, pictures, summaries, and how reporters stand beside each other."""

from __future__ import annotations

import gzip
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.train.events import Event, Note, RunEnded, RunStarted, StepDone
from atoll.train.metrics.flops import formula_line, mfu, peak_flops
from atoll.train.metrics.memory import peak_memory_bytes
from atoll.train.metrics.plot import averaged, save_curve
from atoll.train.metrics.profile import StepProfiler
from atoll.train.metrics.reporter import ReporterFailed, Reporters
from atoll.train.metrics.summary import SummaryFile, next_steps
from atoll.train.models.registry import flops_per_token
from atoll.train.recipe.load import load_recipe
from atoll.train.recipe.schema import ProfileSection


# -------------------------------------------------------------------------------------------------------- FLOPs
@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peaks_of_known_cards(name: str, tera: float) -> None:
    assert peak_flops(name, torch.bfloat16) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Tesla V100-SXM2-16GB", torch.bfloat16),
        ("NVIDIA H100 80GB HBM3", torch.float32),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16),
        ("NVIDIA A1000", torch.bfloat16),
        ("NVIDIA T400", torch.bfloat16),
        ("NVIDIA Z900", torch.bfloat16),
        ("CPU", torch.bfloat16),
    ],
)
def test_unknown_peaks_give_no_mfu(name: str, dtype: torch.dtype) -> None:
    peak = peak_flops(name, dtype)
    assert peak is None
    assert mfu(1000.0, 1e9, peak) is None
    assert name in formula_line(1e9, peak, name, dtype)


def test_mfu_is_what_its_line_says() -> None:
    # Llama 3 8B at 8,192 tokens: 7.5 B weights multiply (without the embedding's table).
    needed = flops_per_token(load_recipe("llama3_8b").recipe.model, 8192)
    assert needed == pytest.approx(6 * 7_504_658_432 + 6 * 32 * 4096 * 8192)
    assert mfu(5_000.0, needed, 989.4e12) == pytest.approx(5_000 * 5.147e10 / 989.4e12, rel=1e-3)
    line = formula_line(needed, 989.4e12, "NVIDIA H100 80GB HBM3", torch.bfloat16)
    assert "5.147e+10 FLOPs a token (6 N + 6 L H Q S, causal) ÷ 989 TFLOP/s (dense bfloat16 peak of NVIDIA H100" in line


# ------------------------------------------------------------------------------------------------------- memory
@pytest.mark.long
def test_peak_memory_on_cpu_is_of_this_process_and_stays_after_a_free() -> None:
    program = (
        "import torch\n"
        "from atoll.train.metrics.memory import peak_memory_bytes as peak\n"
        "cpu = torch.device('cpu')\n"
        "before = peak(cpu)\n"
        "held = torch.ones(50_000_000); del held\n"  # 190 MiB
        "print(before, peak(cpu))\n"
    )
    # A child of a big parent must not start at the parent's peak.
    held = torch.ones(150_000_000)
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    before, after = map(int, output.split())
    assert held.numel() * 4 < peak_memory_bytes(torch.device("cpu"))
    assert 50 << 20 < before < 500 << 20
    assert 150 << 20 < after - before < 300 << 20


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_in_process")
def test_peak_memory_on_a_gpu_is_of_its_tensors() -> None:
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    held = torch.empty(1 << 20, device=device)
    assert peak_memory_bytes(device) >= held.nbytes


# ------------------------------------------------------------------------------------------------------- traces
def traced(folder: Path, section: ProfileSection | None, steps: int) -> Path:
    profiler = StepProfiler(section, folder, rank=3, say=lambda line: None)
    with profiler:
        for step in range(1, steps + 1):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.step()
    return profiler.path


@pytest.mark.parametrize(
    ("start", "steps", "run", "expected"),
    [(3, 2, 8, {3, 4}), (1, 2, 5, {1, 2}), (2, 1, 5, {2}), (3, 5, 4, {3, 4})],
)
def test_the_trace_holds_the_ops_of_the_asked_steps(
    tmp_path: Path, start: int, steps: int, run: int, expected: set[int]
) -> None:
    path = traced(tmp_path, ProfileSection(start=start, steps=steps), run)
    assert path == tmp_path / "profile" / "rank3.pt.trace.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert {int(name.split()[1]) for name in names if name.startswith("step ")} == expected
    assert sum(name == "aten::mm" for name in names) == len(expected)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_trace_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file where the folder should be")
    said: list[str] = []
    with StepProfiler(ProfileSection(start=1, steps=1), tmp_path, rank=0, say=said.append) as profiler:
        torch.ones(1).add(1)
        profiler.step()
    [line] = said
    assert line.startswith("no trace: ")


def test_an_error_in_a_traced_step_stays_the_error(tmp_path: Path) -> None:
    said: list[str] = []
    profiler = StepProfiler(ProfileSection(start=1, steps=3), tmp_path, rank=0, say=said.append)

    def fail() -> None:
        with profiler:
            torch.ones(1).add(1)
            raise KeyError("of the step")

    with pytest.raises(KeyError):
        fail()
    assert said == [f"trace: {profiler.path} (perfetto.dev opens it)"]


@pytest.mark.parametrize(("section", "steps"), [(None, 5), (ProfileSection(start=10), 5)])
def test_no_trace_where_none_is_due(tmp_path: Path, section: ProfileSection | None, steps: int) -> None:
    assert not traced(tmp_path, section, steps).parent.exists()


# ----------------------------------------------------------------------------------------------------- pictures
def row(step: int, loss: float | None) -> dict[str, Any]:
    return {"step": step, "tokens": 100 * step, "loss": loss, "lr": 1e-3}


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(1, 2.0)],
        [row(1, None), row(2, math.nan)],
        [row(s, 5 / s) for s in range(1, 200)] + [{"step": 100, "validation_loss": 1.0}],
        [{"step": 0, "validation_loss": 5.0}],
        [row(3, 1.0), row(1, 1.0)],
    ],
    ids=["none", "one", "not-finite", "usual", "validation-only", "flat"],
)
def test_a_picture_is_drawn_of_whatever_there_is(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "loss.png"
    save_curve(path, rows, "a $run_with^signs")
    width, height = np.frombuffer(path.read_bytes()[16:24], dtype=">u4")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert (width, height) == (1120, 700)
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]


def test_averages_stand_where_their_values_do_and_skip_gaps() -> None:
    steps = np.arange(100, dtype=np.float64)
    x, y = averaged(steps, 2 * steps, 10)
    assert x == pytest.approx(np.arange(4.5, 100, 10))
    assert y == pytest.approx(2 * x)
    assert np.isfinite(averaged(steps, np.where(steps == 50, math.nan, steps), 10)[1]).all()
    assert [len(each) for each in averaged(steps[:1], np.array([math.nan]), 10)] == [0, 0]


# ---------------------------------------------------------------------------------------------------- summaries
def test_the_summary_is_a_file_that_json_readers_take(tmp_path: Path) -> None:
    summary = SummaryFile(tmp_path)
    summary(RunStarted("austen", str(tmp_path), 1000, "FSDP 2", "CPU", 2, 10, 60, 4096))
    for step, loss in ((11, 4.5), (12, 4.0)):
        summary(StepDone(step, 4096 * step, 8 * step, loss, 1e-3, 1.0, 1.0, 1.0, 1.0, 0.0, 1))
    summary(RunEnded("failed", 12, math.nan, 49_152, 3.5, error="no", sample="\ud800", figures={"mfu": math.inf}))
    summary.close()
    values = json.loads((tmp_path / "summary.json").read_text())
    assert values["first_loss"] == 4.5
    assert values["loss"] is None
    assert values["figures"] == {"mfu": None}
    assert (values["name"], values["status"], values["step"], values["steps"]) == ("austen", "failed", 12, 60)


def commands(lines: list[str]) -> list[list[str]]:
    return [shlex.split(line[line.index("  atoll ") :]) for line in lines]


def test_next_steps_are_commands_that_a_shell_takes() -> None:
    lines = next_steps("my recipe.toml", "out/my run", nodes=2)
    assert commands(lines) == [
        ["atoll", "train", "my recipe.toml", "--nodes", "2", "--train.steps", "N"],
        ["atoll", "generate", "out/my run", "Once upon a time"],
        ["atoll", "export", "out/my run", "out/my run-hf"],
        ["atoll", "train", "my recipe.toml", "--nodes", "4", "--no-resume"],
    ]
    assert len({line.index("  atoll") for line in lines}) == 1, "one column"


def test_next_steps_repeat_what_was_given() -> None:
    given = ["--nproc", "2", "--train.steps", "3", "--data.path", "a b.txt", "--train.tokens=5", "--allow-changes"]
    lines = next_steps("my.toml", "out", options=given)
    assert commands(lines)[0][2:] == ["my.toml", "--nproc", "2", "--data.path", "a b.txt", "--train.steps", "N"]
    assert not any("export" in line for line in next_steps("my.toml", "out", exports=False))


def test_next_steps_of_a_run_that_stopped() -> None:
    [resume, *_] = next_steps("llama3_debug", "out", status="stopped")
    assert resume.split(maxsplit=1) == ["resume", "atoll train llama3_debug"]
    words = [line.split()[-1] for line in next_steps("llama3_debug", "out", status="failed", has_checkpoint=False)]
    assert words == ["llama3_debug", "--no-resume"], "nothing to export"
    assert not any("scale" in line for line in next_steps("my.toml", "out", to_scale=None)), "no more nodes"


# ---------------------------------------------------------------------------------------------------- reporters
class Recorder:
    def __init__(self, fails: Exception | None = None, fails_to_close: Exception | None = None) -> None:
        self.events: list[Event] = []
        self.closed = 0
        self._fails, self._fails_to_close = fails, fails_to_close

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if self._fails is not None:
            raise self._fails

    def close(self) -> None:
        self.closed += 1
        if self._fails_to_close is not None:
            raise self._fails_to_close


def test_one_that_fails_is_off_and_the_others_are_told_once() -> None:
    bad, good = Recorder(OSError("disk\nfull"), ValueError("again")), Recorder()
    also_bad = Recorder(ReporterFailed("the whole line"))
    reporters = Reporters([bad, good, also_bad])
    reporters(Note("1"))
    reporters(Note("2"))
    reporters.close()
    assert [event.text for event in good.events if isinstance(event, Note)] == [
        "1", "Recorder is off from here on: disk full", "the whole line", "2",
    ]  # fmt: skip
    assert bad.events == also_bad.events == [Note("1")]
    assert (bad.closed, also_bad.closed, good.closed) == (1, 1, 1)


def test_one_that_fails_at_the_end_is_told_to_those_after_it() -> None:
    last = Recorder()
    reporters = Reporters([Recorder(fails_to_close=ReporterFailed("3 figures were lost")), last])
    reporters.close()
    reporters.close()
    assert last.events == [Note("3 figures were lost")]
    assert last.closed == 1


def test_an_error_of_the_program_itself_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        Reporters([Recorder(ZeroDivisionError())])(Note("1"))
