"""Tokenizers: every way to name one, the tokens at a text's ends, and that cutting long texts changes nothing."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import hub_server
from atoll.core.errors import ConfigError
from atoll.train.data import tokenizer as module
from atoll.train.data.tokenizer import ByteTokenizer, FastTokenizer, bpe_size, load_tokenizer, train_bpe

AUSTEN = Path(__file__).parents[2] / "examples/austen/data"
TEXT = (AUSTEN / "persuasion.txt").read_text()

# The published patterns that GPT-2 and Llama 3 split text with, before BPE.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def learnt() -> FastTokenizer:
    return train_bpe([TEXT[:200_000]], 600)


def with_pattern(learnt: FastTokenizer, pattern: str) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer.from_str(learnt._engine.to_str())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return engine


@given(st.text())
def test_bytes_are_utf8(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_have_260_tokens_and_come_back_from_a_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (260, 256, 257, False)
    assert tokenizer.decode([72, 257, 105, 259]) == "Hi"
    assert tokenizer.decode([0xE2, 0x82]) == "�"
    tokenizer.save(tmp_path)
    assert isinstance(load_tokenizer(str(tmp_path)), ByteTokenizer)


def test_learning_gives_the_size_asked_for_and_the_same_in_another_process(learnt: FastTokenizer) -> None:
    assert learnt.vocab_size == 600
    assert learnt.decode(learnt.encode(TEXT[:5000])) == TEXT[:5000]
    assert learnt.eos_id == learnt._engine.token_to_id("<|endoftext|>")
    assert learnt.bos_id is None
    assert not learnt.adds_bos
    code = (
        "import sys; from pathlib import Path; from atoll.train.data.tokenizer import train_bpe; "
        "print(train_bpe([Path(sys.argv[1]).read_text()[:200_000]], 600).fingerprint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(AUSTEN / "persuasion.txt")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == learnt.fingerprint


def test_a_saved_one_loads_here_and_in_transformers(learnt: FastTokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    learnt.save(tmp_path)
    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).fingerprint == ours.fingerprint == learnt.fingerprint
    assert theirs(TEXT[:1000])["input_ids"] == ours.encode(TEXT[:1000])
    assert theirs.eos_token_id == ours.eos_id


def test_one_from_a_hub(learnt: FastTokenizer, tmp_path: Path) -> None:
    learnt.save(tmp_path / "served")
    with hub_server.used(tmp_path / "home") as hub:
        hub.add("jane/austen", tmp_path / "served").files["model.safetensors"] = b"heavy"
        tokenizer = load_tokenizer("jane/austen")
        assert (tokenizer.fingerprint, tokenizer.name) == (learnt.fingerprint, "jane/austen")
        assert not any("safetensors" in each for each in hub.transfers)
        with pytest.raises(ConfigError, match="jane/asten"):
            load_tokenizer("jane/asten")


def test_a_gpt2_folder_of_vocabulary_and_merges(learnt: FastTokenizer, tmp_path: Path) -> None:
    learnt._engine.model.save(str(tmp_path))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode(TEXT[:3000]) == learnt.encode(TEXT[:3000])
    assert (loaded.vocab_size, loaded.eos_id) == (learnt.vocab_size, learnt.eos_id)


def llama_like(learnt: FastTokenizer, folder: Path, **config: object) -> Path:
    """A folder whose tokenizer puts a bos in front by its own template."""
    folder.mkdir()
    engine = with_pattern(learnt, LLAMA3)
    engine.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    bos = engine.token_to_id("<|begin_of_text|>")
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    engine.enable_truncation(16)
    engine.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def test_special_tokens_are_text_where_the_configuration_says_so(learnt: FastTokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = "Anne<|end_of_text|><|begin_of_text|>Elliot"
    split = llama_like(learnt, tmp_path / "split", split_special_tokens=True, eos_token="<|end_of_text|>")
    whole = llama_like(learnt, tmp_path / "whole")
    assert 601 in load_tokenizer(str(whole)).encode(text)
    tokenizer = load_tokenizer(str(split))
    assert not {600, 601} & set(tokenizer.encode(text))
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(split)(text, add_special_tokens=False).input_ids
    assert tokenizer.fingerprint != load_tokenizer(str(whole)).fingerprint
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).encode(text) == tokenizer.encode(text)


def test_tokens_that_only_the_files_beside_it_have(learnt: FastTokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    decoder = {"602": {"content": "<|user|>", "special": True}, "603": {"content": "<tool>", "special": False}}
    folder = llama_like(learnt, tmp_path / "a", added_tokens_decoder=decoder, eos_token="<|end_of_text|>")
    tokenizer = load_tokenizer(str(folder))
    text = "<|user|>Anne <tool>"
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False).input_ids
    assert {602, 603} <= set(tokenizer.encode(text))
    assert tokenizer.vocab_size == 604
    wrong = llama_like(learnt, tmp_path / "b", added_tokens_decoder={"7": {"content": "<|user|>"}})
    with pytest.raises(ConfigError, match=r"token '<\|user\|>' is number 7, and its vocabulary makes it 602"):
        load_tokenizer(str(wrong))
    legacy = llama_like(learnt, tmp_path / "c")
    (legacy / "added_tokens.json").write_text(json.dumps({"<|user|>": 602}))
    assert load_tokenizer(str(legacy)).encode("<|user|>") == [602]


def test_a_template_that_adds_bos_is_told_and_never_adds_it_twice(learnt: FastTokenizer, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(llama_like(learnt, tmp_path / "a")))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (602, 600, 601)
    assert tokenizer.adds_bos
    assert 600 not in tokenizer.encode("Anne")
    assert len(tokenizer.encode(TEXT[:2000])) > 16, "the truncation of the file was kept"
    off = load_tokenizer(str(llama_like(learnt, tmp_path / "b", add_bos_token=False)))
    assert not off.adds_bos
    assert off.fingerprint != tokenizer.fingerprint


def test_special_tokens_by_number_in_the_generation_config(learnt: FastTokenizer, tmp_path: Path) -> None:
    learnt._engine.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [65, 66], "bos_token_id": 67}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.adds_bos) == (65, 67, False)


@pytest.mark.parametrize("pattern", ["gpt2", "llama3"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("block", [700, 10**6])
def test_long_texts_are_cut_without_changing_a_token(
    learnt: FastTokenizer, pattern: str, workers: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 500)
    engine = learnt._engine if pattern == "gpt2" else with_pattern(learnt, LLAMA3)
    tokenizer = FastTokenizer(tokenizers.Tokenizer.from_str(engine.to_str()), "test", {})
    assert tokenizer.can_cut
    text = TEXT[:100_000] + TEXT[100_000:130_000].replace("\n", "\r\n")
    blocks = [(text[at : at + block], at + block >= len(text)) for at in range(0, len(text), block)]
    pieces = list(module.cut(blocks))
    assert len(pieces) > 50
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    arrays = tokenizer.encode_arrays([piece for piece, _ in pieces], workers=workers)
    assert np.concatenate(arrays).tolist() == tokenizer.encode(text)
    assert list(module.cut(blocks, can_cut=False)) == [(text, True)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "B", "é", "7", ".", "!", "'s", " ", "\n", "\r", "\t", "\u2028", "²", "\x1c"])))
def test_no_cut_changes_a_token(learnt: FastTokenizer, letters: list[str]) -> None:
    text = "".join(letters)
    for engine in (learnt._engine, with_pattern(learnt, LLAMA3)):
        whole = engine.encode(text, add_special_tokens=False).ids
        cuts = [0, *(found.start() for found in module._SAFE_CUT.finditer(text)), len(text)]
        parts = [text[start:stop] for start, stop in itertools.pairwise(cuts)]
        assert [token for part in parts for token in engine.encode(part, add_special_tokens=False).ids] == whole


def test_one_that_looks_across_lines_is_not_cut(learnt: FastTokenizer) -> None:
    engine = tokenizers.Tokenizer.from_str(learnt._engine.to_str())
    assert FastTokenizer(engine, "plain", {}).can_cut
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not FastTokenizer(engine, "prefix", {}).can_cut
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    assert not FastTokenizer(engine, "metaspace", {}).can_cut
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.add_tokens(["\n\n"])
    assert not FastTokenizer(engine, "added", {}).can_cut


def test_arrays_are_unsigned(learnt: FastTokenizer) -> None:
    (array,) = learnt.encode_arrays(["Anne"])
    assert array.dtype == np.uint32


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("bytse", "did you mean 'bytes'"),
        ("bpe:many", "expected a number of tokens from 258"),
        ("bpe:²", "expected a number of tokens from 258"),
        ("bpe:999999999999", "expected a number of tokens from 258"),
        ("bpe:100", "tokens from 258 "),
        ("./missing/tokenizer.json", "does not exist"),
    ],
)
def test_typos_are_told(spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bpe_size(spec) if spec.startswith("bpe:") else load_tokenizer(spec)


def test_broken_and_foreign_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json \(or vocab\.json.*\) that can be read"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "spiece.model").write_bytes(b"\n\x0e")
    with pytest.raises(ConfigError, match=r"no spiece\.model .*SentencePiece.*save_pretrained"):
        load_tokenizer(str(tmp_path / "spiece.model"))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ConfigError, match="that can be read"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="that can be read"):
        load_tokenizer(str(tmp_path))


def test_one_that_cannot_encode_is_told(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"known": 0}))
    words.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode("known") == [0]
    calls = [
        lambda: loaded.encode("new"),
        lambda: loaded.encode_arrays(["new"]),
        lambda: loaded.encode_arrays(["new"], workers=1),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"cannot encode the text: .*unk_token"):
            call()


def test_bpe_needs_data() -> None:
    with pytest.raises(ConfigError, match=r"set \[data\] path"):
        load_tokenizer("bpe:300")
