"""Samples shown as text."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from atoll.cli.data import data_app
from atoll.core.errors import ConfigError
from atoll.train.data.packing import Sample
from atoll.train.data.preview import as_json, legend, render, token_pieces


class Bytes:
    """Each byte a token; 256 ends a document and has no text."""

    def decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class Words:
    """Like the tokenizers of SentencePiece: the space before the first word of a text is dropped."""

    WORDS = (" one", " two", "ish", ",")

    def decode(self, ids: list[int]) -> str:
        return "".join(self.WORDS[token] for token in ids).removeprefix(" ")


def sample_of(documents: list[list[int]], filler: int = 0) -> Sample:
    tokens = [token for document in documents for token in document] + [0] * filler
    labels, positions, numbers = [], [], []
    for number, document in enumerate(documents):
        labels += [*document[1:], -100]
        positions += range(len(document))
        numbers += [number] * len(document)
    labels += [-100] * filler
    positions += range(filler)
    numbers += [len(documents)] * filler
    return Sample(*(np.array(part, dtype=np.int64) for part in (tokens, labels, positions, numbers)))


def text_of(sample: Sample, colour: bool, ids: bool = False) -> str:
    return render(sample, Bytes(), colour=colour, ids=ids).plain


def test_borders_of_tokens_and_documents_without_colour() -> None:
    sample = sample_of([[*list(b"Hi"), 256], list(b"a\nb")], filler=4)
    assert text_of(sample, colour=False) == (
        "── document 1: 3 tokens, positions start at 0 ──\n"
        "H|i|⟨256⟩∅\n"
        "── document 2: 3 tokens, positions restart at 0 ──\n"
        "a|↵\n|b∅\n"
        "── filled up with 4 places that are not trained ──\n"
    )


def test_ids_are_shown_on_request() -> None:
    assert "H⟨72⟩|i⟨105⟩∅" in text_of(sample_of([[72, 105]]), colour=False, ids=True)


def test_data_without_a_tokenizer_is_shown_as_ids() -> None:
    sample = sample_of([[72, 105]])
    assert "\n⟨72⟩|⟨105⟩∅\n" in render(sample, None, colour=False, ids=True).plain
    assert as_json(sample, None)["text"] == ["⟨72⟩", "⟨105⟩"]


def test_colours_alternate_and_pale_is_untrained() -> None:
    sample = sample_of([list(b"abc")])
    text = render(sample, Bytes(), colour=True)
    assert "|" not in text.plain
    assert "abc" in text.plain
    first, second, last = [str(span.style) for span in text.spans if span.end - span.start == 1]
    assert first != second
    assert "black" in first
    assert "black" not in last
    # On a real colour terminal the escapes are there, and the text between them.
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=60)
    console.print(text)
    written = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above
    assert "\x1b[" in written
    assert written.count("\x1b[30;48;2;") >= 2


def test_undivided_documents_are_said_to_be() -> None:
    whole = sample_of([list(b"abc")])
    sample = Sample(whole.tokens, whole.labels, whole.positions, None)
    assert text_of(sample, colour=False).startswith("── 3 tokens, documents are not separated ──\na|b|c")
    assert as_json(sample, Bytes())["documents"] is None


def test_characters_of_several_bytes_are_shown_once_complete() -> None:
    assert token_pieces(list("né €".encode()), Bytes()) == ["n", "", "é", " ", "", "", "€"]
    assert "n|⋯|é| |⋯|⋯|€" in text_of(sample_of([list("né €".encode())]), colour=False)


def test_spaces_between_words_are_kept() -> None:
    assert token_pieces([0, 1, 2, 3, 0], Words()) == ["one", " two", "ish", ",", " one"]


def test_control_characters_never_reach_the_terminal() -> None:
    shown = text_of(sample_of([[27, 91, 50, 74, 7, 9, 13]]), colour=False)
    assert "\x1b" not in shown
    assert "\\x1b|[|2|J|\\x07|⇥|␍" in shown


@given(tokens=st.lists(st.integers(0, 256), min_size=1, max_size=60), colour=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_bytes_can_be_shown(tokens: list[int], colour: bool) -> None:
    assert len(token_pieces(tokens, Bytes())) == len(tokens)
    assert text_of(sample_of([tokens, [65]]), colour, ids=True)


@given(text=st.text(min_size=1, max_size=40).filter(lambda text: "\ufffd" not in text))
@settings(max_examples=100, deadline=None)
def test_pieces_join_to_the_text(text: str) -> None:
    assert "".join(token_pieces(list(text.encode()), Bytes())) == text


def test_json_has_every_field() -> None:
    data = as_json(sample_of([[72, 105]], filler=1), Bytes())
    assert data == {
        "tokens": [72, 105, 0],
        "labels": [105, -100, -100],
        "positions": [0, 1, 0],
        "documents": [0, 0, 1],
        "trained": 1,
        "text": ["H", "i", "\x00"],
    }


def test_the_legend_tells_both_ways() -> None:
    assert "background" in legend(colour=True)
    assert "|" in legend(colour=False)
    assert "∅" in legend(colour=False)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe over one small text, with a state folder of its own."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("CONFIG_FILE", raising=False)
    (tmp_path / "text.txt").write_text("Call me Ishmaël.\n" * 3)
    path = tmp_path / "tiny.toml"
    path.write_text(
        f'[data]\npath = "{tmp_path / "text.txt"}"\ntokenizer = "bytes"\nshuffle = false\n[train]\nseq_len = 20\n'
    )
    return str(path)


def test_the_command_shows_samples(recipe: str) -> None:
    result = CliRunner().invoke(data_app, ["preview", recipe, "--num", "2", "--ids", "--train.seq_len", "18"])
    assert result.exit_code == 0, result.output
    assert "sample 0, number 0 of 3 in epoch 0: 18 of 18 positions are trained" in result.stdout
    assert "C⟨67⟩|a⟨97⟩|l⟨108⟩|l⟨108⟩" in result.stdout
    assert "sample 1," in result.stdout
    assert "sample 2," not in result.stdout
    assert "\x1b" not in result.stdout


def test_the_command_writes_json(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIG_FILE", recipe)
    result = CliRunner().invoke(data_app, ["preview", "--train.seq_len=18", "-n", "1", "--start", "4", "-o", "json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["number"] == 4
    assert len(row["tokens"]) == 18
    # The second sequence of the second epoch, as nothing is shuffled.
    assert "".join(row["text"]) == ("Call me Ishmaël.\n" * 3).encode()[18:36].decode()


def test_a_typo_in_the_command_is_told(recipe: str) -> None:
    result = CliRunner().invoke(data_app, ["preview", recipe, "--train.seq_length", "9"])
    assert isinstance(result.exception, ConfigError)
    assert "seq_len" in str(result.exception)
    assert CliRunner().invoke(data_app, ["preview", recipe, "-o", "yaml"]).exit_code == 2


def test_lines_in_a_pipe_are_whole(recipe: str) -> None:
    found = CliRunner().invoke(data_app, ["preview", recipe, "-n", "1", "--train.seq_len", "50"])
    assert found.exit_code == 0, found.output
    assert max(map(len, found.stdout.splitlines())) > 100  # COLUMNS
    narrow = CliRunner().invoke(data_app, ["preview", recipe, "-n", "1", "--width", "40", "--train.seq_len", "50"])
    assert max(map(len, narrow.stdout.splitlines())) <= 40


@pytest.mark.parametrize(
    "arguments", [("--num", "99999999999"), ("--start", f"{10**23}"), ("--start", "1e23"), ("--start", "-1")]
)
def test_numbers_out_of_reach_are_told(recipe: str, arguments: tuple[str, str]) -> None:
    result = CliRunner().invoke(data_app, ["preview", recipe, *arguments])
    assert result.exit_code == 2, result.output
    assert arguments[0] in result.output
    reached = CliRunner().invoke(data_app, ["preview", recipe, "-n", "1", "--start", str(10**12)])
    assert reached.exit_code == 0, reached.output
