"""Which model a recipe gets: names, counts, arithmetic, and models of the user's own."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.core.errors import ConfigError
from atoll.train.models.init import initialize, materialize
from atoll.train.models.parts import Decoder
from atoll.train.models.registry import UserModel, build, flops_per_token, parameter_count
from atoll.train.recipe.schema import ModelSection

TINY = {"vocab_size": 61, "dim": 32, "layers": 2, "heads": 4, "hidden_dim": 48, "max_seq_len": 128}


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def test_parameter_names() -> None:
    block = ["attention.q", "attention.k", "attention.v", "attention.o", "feed_forward.up", "feed_forward.down"]
    norms = ["attention_norm", "feed_forward_norm"]
    one = {**TINY, "layers": 1}

    def names(section: ModelSection) -> set[str]:
        return {name for name, _ in build(section).named_parameters()}

    llama = {f"blocks.0.{part}.weight" for part in [*block, *norms, "feed_forward.gate"]} | {"norm.weight"}
    assert names(ModelSection(**one)) == llama | {"embed.weight", "head.weight"}
    assert names(ModelSection(**one, family="phi3")) == llama | {"embed.weight", "head.weight"}
    head_norms = {"blocks.0.attention.q_norm.weight", "blocks.0.attention.k_norm.weight"}
    assert names(ModelSection(**one, family="qwen3", tied=True)) == llama | head_norms | {"embed.weight"}
    assert names(ModelSection(**one, family="gpt2", tied=True)) == {
        "embed.weight",
        "learned_positions.weight",
        *(f"blocks.0.{part}.{kind}" for part in [*block, *norms] for kind in ("weight", "bias")),
        "norm.weight",
        "norm.bias",
    }


PUBLISHED = {
    "Llama 3.1 8B": (
        8_030_261_248,
        {"vocab_size": 128_256, "dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden_dim": 14_336},
    ),
    "Qwen3 0.6B": (
        596_049_920,
        {
            "family": "qwen3",
            "vocab_size": 151_936,
            "dim": 1024,
            "layers": 28,
            "heads": 16,
            "kv_heads": 8,
            "head_dim": 128,
            "hidden_dim": 3072,
            "tied": True,
        },
    ),
    "Phi-3 mini": (
        3_821_079_552,
        {"family": "phi3", "vocab_size": 32_064, "dim": 3072, "layers": 32, "heads": 32, "hidden_dim": 8192},
    ),
    "SmolLM2 135M": (
        134_515_008,
        {"vocab_size": 49_152, "dim": 576, "layers": 30, "heads": 9, "kv_heads": 3, "hidden_dim": 1536, "tied": True},
    ),
    "GPT-2 small": (
        124_439_808,
        {
            "family": "gpt2",
            "vocab_size": 50_257,
            "dim": 768,
            "layers": 12,
            "heads": 12,
            "max_seq_len": 1024,
            "tied": True,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str) -> None:
    count, dimensions = PUBLISHED[name]
    assert parameter_count(ModelSection(**dimensions)) == count


def test_flops_per_token() -> None:
    llama = ModelSection(**PUBLISHED["Llama 3.1 8B"][1])
    assert flops_per_token(llama, 8192) == pytest.approx(51.5e9, rel=1e-3)
    # By hand: per layer q, k, v, o, up, down; the tied head; positions are looked up.
    gpt2 = ModelSection(**TINY, family="gpt2", tied=True)
    multiplied = 2 * (4 * 32 * 32 + 2 * 32 * 48) + 61 * 32
    assert flops_per_token(gpt2, 10) == 6 * multiplied + 12 * 2 * 4 * 8 * 10 / 2


# ------------------------------------------------------------------------------------------------- a user's own
USER = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Tiny(nn.Module):
        def __init__(self, section):
            super().__init__()
            self.embed = nn.Embedding(section.vocabulary, section.dim)
            self.mix = nn.Linear(section.dim, section.dim)
            self.norm = nn.LayerNorm(section.dim)
            self.scale = nn.Parameter(torch.full((section.dim,), 1e-4))  # as LayerScale's gamma
            self.head = nn.Linear(section.dim, section.vocabulary, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("table", torch.arange(section.dim) / section.dim, persistent=False)

        def forward(self, tokens):
            return self.head(self.norm(self.mix(self.embed(tokens)) + self.table))

    class Full(Tiny):
        def forward(self, tokens, positions, documents=None, labels=None):
            assert positions.shape == tokens.shape
            logits = super().forward(tokens)
            if labels is None:
                return logits
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").reshape(1)

    class Mean(Full):
        def forward(self, tokens, positions, labels):
            return super().forward(tokens, positions)

    class Greedy(Tiny):
        def forward(self, tokens, attention_mask):
            return super().forward(tokens)

    class Open(Tiny):  # as models for the meta device are: what the constructor leaves open, a method sets
        def __init__(self, section):
            super().__init__(section)
            self.gain = nn.Parameter(torch.full((3,), torch.nan))

        def init_weights(self, buffer_device=None):
            nn.init.normal_(self.mix.weight, std=0.5)
            nn.init.ones_(self.gain)

    class Applied(Tiny):  # as many models are: the method of that name is for each module
        def init_weights(self, module):
            raise AssertionError(module)

    number = 3
    opened, applied = Open, Applied
    tiny, full, mean, greedy = Tiny, Full, Mean, Greedy
    def dictionary(section): return {}
    def empty(section): return nn.Identity()
    def llama(section):
        from atoll.train.models.families.llama import FAMILY
        return FAMILY.build(section)
    def scaled(section):
        model = llama(section)
        model.blocks["0"].gamma = nn.Parameter(torch.full((section.dim,), 1e-4))
        return model
    def gpt2(section):
        import transformers
        config = transformers.GPT2Config(vocab_size=section.vocabulary, n_embd=32, n_layer=1, n_head=2)
        return transformers.GPT2LMHeadModel(config)
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a section whose model is a function of a user's module."""
    (tmp_path / "users_model.py").write_text(textwrap.dedent(USER))
    (tmp_path / "users_broken.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda name, module="users_model": ModelSection(
        vocab_size=61, dim=32, layers=1, tied=True, python=f"{module}:{name}"
    )
    for name in ("users_model", "users_broken"):
        sys.modules.pop(name, None)


def _loss_by_hand(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens, _positions(tokens))
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum").reshape(1)


@pytest.mark.parametrize("name", ["tiny", "full"])
def test_a_users_model(users: Any, name: str) -> None:
    section = users(name)
    model = build(section)
    assert isinstance(model, UserModel)
    materialize(model, torch.device("cpu"))
    initialize(model, 0)
    inner: Any = model.inner
    assert inner.head.weight is inner.embed.weight
    assert torch.equal(inner.table, torch.arange(32) / 32)
    assert torch.equal(inner.norm.weight, torch.ones(32))
    assert torch.equal(inner.scale, torch.full((32,), 1e-4))
    tokens = torch.randint(0, 61, (2, 9))
    assert torch.equal(model(tokens, _positions(tokens), None, tokens), _loss_by_hand(model, tokens))
    assert parameter_count(section) == 61 * 32 + 32 * 32 + 4 * 32
    assert flops_per_token(section, 9) == 6 * (61 * 32 + 32 * 32)


def _set(section: ModelSection, seed: int = 0) -> tuple[dict[str, Tensor], list[str]]:
    """Weights as a run begins with them, and the names of those that the user's function set."""
    model = build(section)
    materialize(model, torch.device("cpu"))
    theirs = initialize(model, seed)
    return {name: value.detach() for name, value in model.named_parameters()}, theirs


def test_a_users_module_sets_its_own_weights(users: Any) -> None:
    weights, theirs = _set(users("opened"))
    assert set(weights) <= set(theirs)
    assert torch.equal(weights["inner.gain"], torch.ones(3)), "by init_weights"
    assert 0.4 < weights["inner.mix.weight"].std() < 0.6, "by init_weights"
    again, other = _set(users("opened"))[0], _set(users("opened"), 2**63 - 1)[0]
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["inner.embed.weight"], other["inner.embed.weight"])
    assert torch.equal(_set(users("applied"))[0]["inner.norm.weight"], torch.ones(32))


def test_of_a_users_decoder_atoll_draws_what_it_knows(users: Any) -> None:
    weights, theirs = _set(users("scaled"))
    assert theirs == ["blocks.0.gamma"]
    assert torch.equal(weights["blocks.0.gamma"], torch.full((32,), 1e-4))
    plain, none = _set(users("llama"))
    assert none == []
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_a_users_model_is_told_of_documents_or_refuses(users: Any) -> None:
    tokens = torch.randint(0, 61, (2, 9))
    documents = torch.zeros_like(tokens)
    full, tiny = build(users("full"), device="cpu"), build(users("tiny"), device="cpu")
    assert full(tokens, _positions(tokens), documents).shape == (2, 9, 61)
    with pytest.raises(ConfigError, match=r"takes no documents.*isolate_documents = false"):
        tiny(tokens, _positions(tokens), documents)


def test_a_model_of_transformers_is_a_users_model(users: Any) -> None:
    model = build(users("gpt2"))
    materialize(model, torch.device("cpu"))
    initialize(model.eval(), 0)  # it drops out
    tokens = torch.randint(0, 61, (2, 9))
    loss = model(tokens, _positions(tokens), None, tokens)
    assert torch.equal(loss, _loss_by_hand(model, tokens))
    assert 0.5 < loss.item() / 18 / torch.tensor(61.0).log().item() < 1.5


def test_a_users_function_may_return_one_of_ours(users: Any) -> None:
    assert isinstance(build(users("llama")), Decoder)


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("users_model", "expected 'package.module:function'"),
        ("users_modell:tiny", "importing users_modell failed: No module named 'users_modell'"),
        ("users_model.part:tiny", "importing users_model.part failed: No module named"),
        ("users_model:tinny", "module 'users_model' has no attribute 'tinny'"),
        ("users_model:number", "number is a int, expected a function"),
        ("users_model:dictionary", "returned dict: expected a torch.nn.Module with parameters"),
        ("users_model:empty", "returned Identity: expected a torch.nn.Module with parameters"),
        ("users_model:greedy", "its forward needs attention_mask"),
        ("users_broken:tiny", "importing users_broken failed: No module named 'no_such_library'"),
    ],
)
def test_a_users_mistake_is_named(users: Any, python: str, said: str) -> None:
    module, _, name = python.partition(":")
    section = users(name, module) if name else ModelSection(vocab_size=61, python=module)
    with pytest.raises(ConfigError, match=said) as caught:
        build(section)
    assert f"[model] python = {python!r}" in str(caught.value)


def test_what_a_users_forward_returns_is_checked(users: Any) -> None:
    tokens = torch.randint(0, 61, (2, 9))
    model = build(users("mean"), device="cpu")
    with pytest.raises(ConfigError, match=r"returned \[2, 9, 61\], expected the sum of the losses, \[1\]"):
        model(tokens, _positions(tokens), None, tokens)
