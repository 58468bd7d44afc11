"""Generation with cached keys and values, against computing all positions again and against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import small
from atoll.core.errors import ConfigError
from atoll.train.models import registry
from atoll.train.models.generate import CachedKernel, _caching, _draw, generate, stream_text
from atoll.train.models.parts import Decoder
from atoll.train.recipe.schema import ModelSection, RopeScaling
from atoll.train.weights import export

TINY = {"layers": 2, "dim": 32, "heads": 4, "hidden_dim": 48, "vocab_size": 96, "max_seq_len": 48}
SECTIONS = {
    "llama": ModelSection(family="llama", kv_heads=2, **TINY),
    "llama-yarn": ModelSection(
        kv_heads=1, rope_scaling=RopeScaling(kind="yarn", factor=4, original_max_seq_len=16), **TINY
    ),
    "olmo2": ModelSection(family="olmo2", kv_heads=2, **TINY),
    "qwen3": ModelSection(family="qwen3", kv_heads=2, head_dim=16, tied=True, **TINY),
    "phi3": ModelSection(family="phi3", **TINY),
    "gpt2": ModelSection(family="gpt2", tied=True, **TINY),
}
PROMPT = [5, 17, 3, 88, 41, 7]


@torch.no_grad()
def model_of(section: ModelSection) -> Decoder:
    torch.manual_seed(0)
    model = registry.build(section, device="cpu")
    assert isinstance(model, Decoder)
    for name, parameter in model.named_parameters():
        parameter.normal_(mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.3)
    return model


def uncached(model: nn.Module, tokens: list[int]) -> Tensor:
    """Logits [V] of the next token, all positions computed anew."""
    with torch.no_grad():
        out: Tensor = model(torch.tensor([tokens]), torch.arange(len(tokens))[None])
    return out[0, -1]


@pytest.mark.parametrize("name", SECTIONS)
def test_cached_logits_are_those_of_all_positions(name: str) -> None:
    model = model_of(SECTIONS[name])
    tokens = list(PROMPT)
    with _caching(model) as next_logits:
        for token in [11, 60, 2, 2, 95, 33]:
            torch.testing.assert_close(next_logits(tokens), uncached_outside(model, tokens), rtol=1e-4, atol=1e-4)
            tokens.append(token)


def uncached_outside(model: Decoder, tokens: list[int]) -> Tensor:
    """The same from a copy of the model, since the caches stand in this one."""
    return uncached(model_of(model.config), tokens)


@pytest.mark.parametrize("name", SECTIONS)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = model_of(SECTIONS[name])
    export(small.source_of(model), tmp_path / "hf", dtype="fp32")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    expected = other.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, 6), max_new_tokens=20, do_sample=False, pad_token_id=0
    )[0, len(PROMPT) :]
    assert list(generate(model, PROMPT, num_tokens=20, temperature=0)) == expected.tolist()


def test_the_model_is_as_it_was_afterwards() -> None:
    model = model_of(SECTIONS["llama"])
    before = uncached(model, PROMPT)
    kernels = [block.attention.attention_kernel for block in model.blocks.values()]  # type: ignore[union-attr]
    running = generate(model, PROMPT, num_tokens=20)
    next(running)
    assert all(isinstance(block.attention.attention_kernel, CachedKernel) for block in model.blocks.values())  # type: ignore[union-attr]
    running.close()
    assert [block.attention.attention_kernel for block in model.blocks.values()] == kernels  # type: ignore[union-attr]
    assert torch.equal(uncached(model, PROMPT), before)


def test_seeds() -> None:
    model = model_of(SECTIONS["qwen3"])
    one, again, other = (list(generate(model, PROMPT, num_tokens=20, temperature=2.0, seed=s)) for s in (1, 1, 2**65))
    assert one == again
    assert one != other
    assert len(one) == 20


def test_it_ends_at_a_stop_token_and_at_the_models_length() -> None:
    model = model_of(SECTIONS["gpt2"])
    free = list(generate(model, PROMPT, num_tokens=1000, temperature=1.5))
    assert len(free) == 48 - len(PROMPT)
    first = free.index(free[10])
    assert list(generate(model, PROMPT, num_tokens=1000, temperature=1.5, stop={free[10]})) == free[:first]
    with pytest.raises(ConfigError, match="the prompt has 48 tokens, expected 1 to 47: max_seq_len is 48"):
        generate(model, [1] * 48, num_tokens=1)
    with pytest.raises(ConfigError, match="the prompt has 0 tokens"):
        generate(model, [], num_tokens=1)


@pytest.mark.parametrize("top_p", [0.0, 1.5])
def test_a_probability_that_cannot_be(top_p: float) -> None:
    with pytest.raises(ConfigError, match=f"top_p = {top_p}: expected a number above 0, 1 at most"):
        generate(model_of(SECTIONS["llama"]), PROMPT, num_tokens=1, top_p=top_p)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(number: float, temperature: float) -> None:
    model = model_of(SECTIONS["llama"])
    with torch.no_grad():
        next(model.parameters()).fill_(number)
    with pytest.raises(ConfigError, match="logits that are not finite"):
        list(generate(model, PROMPT, num_tokens=1, temperature=temperature))


def test_draws_follow_the_distribution() -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    random = torch.Generator().manual_seed(0)

    def shares(**kwargs: Any) -> list[float]:
        options = {"temperature": 1.0, "top_k": None, "top_p": None, **kwargs}
        drawn = torch.tensor([_draw(chances.log(), random=random, **options) for _ in range(4000)])
        return [float((drawn == token).float().mean()) for token in range(4)]

    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert shares(temperature=0.5) == pytest.approx([0.685, 0.247, 0.062, 0.007], abs=0.03)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    # 0.5 + 0.3 reach 0.7; the third is not needed.
    assert shares(top_p=0.7) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(top_p=0.1) == [1, 0, 0, 0]
    assert shares(temperature=0) == [1, 0, 0, 0]


class Users(nn.Module):
    """A model of somebody's own, which has no place for a cache."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens] + self.table[tokens.roll(1, 1)]


def build_users(section: ModelSection) -> nn.Module:
    return Users(section.vocabulary)


def test_a_users_own_model() -> None:
    section = ModelSection(python="test_generate:build_users", vocab_size=50, max_seq_len=16)
    model = registry.build(section, device="cpu")
    tokens = [3, 4]
    for _ in range(8):
        tokens.append(int(uncached(model, tokens).argmax()))
    assert list(generate(model, [3, 4], num_tokens=8, temperature=0)) == tokens[2:]


# ---------------------------------------------------------------------------------------------------------- text
def test_characters_come_when_they_are_whole() -> None:
    text = "naïve – 我 🦀!"

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    pieces = list(stream_text(list(text.encode()), decode))
    assert "".join(pieces) == text
    assert pieces == list(text)


def test_the_space_of_the_first_word_is_kept() -> None:
    """As tokenizers with a word mark do it: decoding drops the space in front."""
    words = ["▁Once", "▁upon", "▁a", "▁ti", "me"]

    def decode(ids: list[int]) -> str:
        return "".join(words[number] for number in ids).replace("▁", " ").removeprefix(" ")

    assert list(stream_text([1, 2, 3, 4], decode, after=[0])) == [" upon", " a", " ti", "me"]
    assert list(stream_text([0, 1], decode)) == ["Once", " upon"]


def test_a_text_that_ends_within_a_character() -> None:
    assert "".join(stream_text([72, 105, 0xF0, 0x9F], lambda ids: bytes(ids).decode("utf-8", "replace"))) == "Hi\ufffd"
