"""The quickstart: its text, its vocabulary, its model, its schedule, its display, and a short run of the real thing."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

AUSTEN = Path(__file__).resolve().parents[2] / "examples" / "austen"
MODULES = ("novels", "model", "display")


@pytest.fixture(scope="module")
def austen() -> Iterator[SimpleNamespace]:
    """The example's modules, imported as the script does and forgotten again: their names are common ones."""
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(AUSTEN))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    finally:
        sys.path.remove(str(AUSTEN))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@pytest.fixture(scope="module")
def novels(austen: SimpleNamespace) -> dict[str, str]:
    return austen.novels.read_novels()


@pytest.fixture(scope="module")
def vocabulary(austen: SimpleNamespace, novels: dict[str, str]) -> Any:
    return austen.novels.Vocabulary("".join(map(austen.novels.join_lines, novels.values())))


def test_the_six_novels_are_whole(novels: dict[str, str]) -> None:
    assert {name: len(text) for name, text in novels.items()} == {
        "emma": 883_027,
        "mansfield_park": 883_278,
        "northanger_abbey": 433_410,
        "persuasion": 466_853,
        "pride_and_prejudice": 684_767,
        "sense_and_sensibility": 673_687,
    }
    assert sum(map(len, novels.values())) == 4_025_022
    assert novels["emma"].startswith("EMMA\n\nBy Jane Austen")
    assert novels["emma"].endswith("FINIS")
    assert "\r" not in "".join(novels.values())


def test_joining_lines_keeps_words_and_paragraphs(austen: SimpleNamespace, novels: dict[str, str]) -> None:
    assert austen.novels.join_lines("One\ntwo  three.\n\n\nFour\nfive.") == "One two three.\n\nFour five."
    for text in novels.values():
        joined = austen.novels.join_lines(text)
        assert joined.split() == text.split()
        assert "\n" not in joined.replace("\n\n", "")


def test_split_is_disjoint_and_complete(austen: SimpleNamespace, novels: dict[str, str]) -> None:
    for text in novels.values():
        first, rest = austen.novels.split(text)
        assert first + rest == text
        assert len(rest) == pytest.approx(0.05 * len(text), abs=1)


def test_encoding_is_lossless_and_shorter(austen: SimpleNamespace, novels: dict[str, str], vocabulary: Any) -> None:
    text = austen.novels.join_lines(novels["persuasion"])
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert max(ids) < len(vocabulary) <= 4_100
    assert len(ids) < len(text) / 3.5
    assert vocabulary.encode(" Elizabeth") == [vocabulary.tokens.index(" Elizabeth")]


@given(st.text(alphabet="abcXYZ ,.;-'\"\n_0", max_size=60))
def test_any_text_of_known_characters_survives(vocabulary: Any, text: str) -> None:
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_an_unknown_character_is_named(vocabulary: Any) -> None:
    with pytest.raises(ValueError, match="no token for 'é'"):
        vocabulary.encode("fiancé")


def test_vocabulary_is_the_same_in_every_process(austen: SimpleNamespace, novels: dict[str, str]) -> None:
    text = austen.novels.join_lines(novels["persuasion"])
    here = austen.novels.Vocabulary(text, 200, 100).tokens
    code = (
        "import novels; t = novels.join_lines(novels.read_novels()['persuasion']); "
        "print(repr(novels.Vocabulary(t, 200, 100).tokens))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONIOENCODING": "utf-8"}
    there = subprocess.run([sys.executable, "-c", code], cwd=AUSTEN, env=env, capture_output=True, text=True)
    assert there.stdout.strip() == repr(here), there.stderr


def test_model_shapes_and_causality(austen: SimpleNamespace) -> None:
    import torch

    torch.manual_seed(0)
    model = austen.model.GPT(vocab_size=50, seq_len=16, dim=32, num_heads=4, num_layers=2)
    tokens = torch.randint(50, (3, 16))
    logits = model(tokens)
    assert logits.shape == (3, 16, 50)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 50
    after = model(changed)
    assert torch.equal(after[:, :10], logits[:, :10])
    assert not torch.allclose(after[:, 10:], logits[:, 10:])
    assert model(tokens[:, :5]).shape == (3, 5, 50)


def test_a_fresh_model_knows_nothing(austen: SimpleNamespace) -> None:
    """Its loss is that of a fair guess over the vocabulary, ln V."""
    import math

    import torch

    torch.manual_seed(0)
    model = austen.model.GPT(vocab_size=4_000, seq_len=32)
    tokens = torch.randint(4_000, (8, 33))
    loss = austen.model.next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(4_000), abs=0.15)
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 2e6


def test_generation_is_repeatable_and_goes_past_the_window(austen: SimpleNamespace) -> None:
    import torch

    torch.manual_seed(0)
    model = austen.model.GPT(vocab_size=20, seq_len=8, dim=16, num_heads=2, num_layers=1)
    prompt = [1, 2, 3]
    first = model.generate(prompt, 20, seed=5)
    assert first[:3] == prompt == [1, 2, 3]
    assert len(first) == 23
    assert first == model.generate(prompt, 20, seed=5) != model.generate(prompt, 20, seed=6)


def test_windows_cover_every_target_once(austen: SimpleNamespace) -> None:
    import torch

    windows = austen.model.Windows(torch.arange(42), seq_len=10)
    assert len(windows) == 4
    inputs, targets = zip(*(windows[i] for i in range(len(windows))), strict=True)
    assert torch.equal(torch.cat(inputs), torch.arange(40))
    assert torch.equal(torch.cat(targets), torch.arange(1, 41))


@pytest.mark.parametrize("steps", [1, 2, 19, 20, 700])
def test_learning_rate_warms_up_then_falls_to_a_tenth(austen: SimpleNamespace, steps: int) -> None:
    rates = [austen.model.learning_rate(step, steps, peak=1.0) for step in range(1, steps + 1)]
    top = rates.index(max(rates))
    assert max(rates) == 1.0
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert all(rate > 0 for rate in rates)
    if steps > 1:
        assert rates[-1] == pytest.approx(0.1)


def test_curve_waits_for_every_rank_and_takes_their_mean(austen: SimpleNamespace) -> None:
    curve = austen.display.Curve()
    assert curve.add({"step": 1, "loss": 4.0}, world_size=2) is None
    assert curve.train == {}
    assert curve.add({"step": 2, "loss": 3.0}, world_size=2) is None
    assert curve.add({"step": 1, "loss": 2.0, "held_out": 5.0}, world_size=2) == 1
    assert curve.train == {1: 3.0}
    assert curve.held_out == {1: 5.0}
    assert curve.add({"step": 2, "loss": 2.0}, world_size=2) == 2
    assert curve.smoothed(2) == [(2, 2.75)]


def test_display_without_a_terminal_prints_ten_plain_lines(austen: SimpleNamespace) -> None:
    from rich.console import Console

    from atoll.core.events import MetricsReported, PoolStarted

    out = io.StringIO()
    with austen.display.Display(100, Console(file=out, width=200)) as display:
        display(PoolStarted(pool_id="p", nodes=2, world_size=2, took_s=0.2))
        for step in range(1, 101):
            for rank in (0, 1):
                metrics = {"step": step, "loss": 8 - step / 50, "tokens_per_s": 5_000.0, "memory_bytes": 300 << 20}
                display(MetricsReported(job_id="j", rank=rank, node=rank, metrics=metrics))
    lines = out.getvalue().splitlines()
    assert lines[0] == "2 nodes with 2 ranks are up after 0.20 s"
    assert len(lines) == 1 + 11
    assert "\x1b" not in out.getvalue()
    assert lines[1].startswith("step    1/100   loss 7.980   10,000 tokens/s   300 MiB a rank")
    assert lines[-1].startswith("step  100/100")


def test_display_on_a_terminal_draws_a_bar_and_a_sparkline(austen: SimpleNamespace) -> None:
    from rich.console import Console

    from atoll.core.events import MetricsReported

    out = io.StringIO()
    with austen.display.Display(40, Console(file=out, width=100, force_terminal=True)) as display:
        for step in range(1, 41):
            metrics = {"step": step, "loss": 8 - step / 10, "tokens_per_s": 5_000.0, "memory_bytes": 300 << 20}
            display(MetricsReported(job_id="j", rank=0, node=0, metrics=metrics))
    assert "40/40" in out.getvalue()
    assert "█▇" in out.getvalue()


def test_sparkline(austen: SimpleNamespace) -> None:
    assert austen.display.sparkline([]) == ""
    assert austen.display.sparkline([3.0, 3.0]) == "▁▁"
    assert austen.display.sparkline([8.0, 4.5, 1.0]) == "█▅▁"


def quickstart(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(AUSTEN / "quickstart.py"), *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)


def test_quickstart_trains_on_two_nodes(tmp_path: Path) -> None:
    import torch

    out = tmp_path / "out"
    run = quickstart("--nodes", "2", "--steps", "24", "--out", str(out), "--prompt", "Mr. Darcy")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "6 novels: 4,025,022 characters" in run.stdout
    assert "2 ranks hold equal parameters" in run.stdout
    assert "Mr. Darcy" in run.stdout
    losses = [float(line.split("loss ")[1].split()[0]) for line in run.stdout.splitlines() if line.startswith("step ")]
    assert losses[0] > losses[-1] + 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    state = torch.load(out / "model.pt", weights_only=True)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_quickstart_refuses_what_cannot_work(tmp_path: Path) -> None:
    run = quickstart("--nodes", "3", "--out", str(tmp_path / "out"))
    assert run.returncode == 2
    assert "--nodes 3" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()


def test_quickstart_without_torch_says_what_to_install(tmp_path: Path) -> None:
    # Torch is installed where the tests run, so the interpreter is told not to find it.
    code = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        f"sys.argv = ['quickstart.py', '--out', {str(tmp_path / 'out')!r}]\n"
        f"runpy.run_path({str(AUSTEN / 'quickstart.py')!r}, run_name='__main__')\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(AUSTEN), *sys.path])}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert run.stderr.strip() == 'This example needs torch. Install with: pip install "atoll[train]"'
    assert not (tmp_path / "out").exists()
