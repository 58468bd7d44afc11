"""The model families against transformers' own, documents kept apart, the chunked loss, and users' models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ranks
from atoll.train.models.attention import SdpaKernel
from atoll.train.models.family import stored_tensors
from atoll.train.models.init import initialize
from atoll.train.models.logprobs import ChunkedLogProbs
from atoll.train.models.parts import Decoder, Positions
from atoll.train.models.registry import build
from atoll.train.recipe.schema import ModelSection, RopeScaling

LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=16)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16)
TINY = {"vocab_size": 61, "dim": 32, "layers": 2, "heads": 4, "hidden_dim": 48, "max_seq_len": 128}
SECTIONS = {
    "llama": ModelSection(**TINY, kv_heads=2),
    "llama-tied": ModelSection(**TINY, kv_heads=1, tied=True),
    "llama3.1": ModelSection(**TINY, kv_heads=2, rope_scaling=LLAMA3, rope_theta=500_000.0),
    "llama-yarn": ModelSection(**TINY, kv_heads=2, rope_scaling=YARN),
    "qwen3": ModelSection(**TINY, family="qwen3", kv_heads=2, head_dim=16, norm_eps=1e-6, rope_theta=1e6),
    "phi3": ModelSection(**TINY, family="phi3", kv_heads=4),
    "olmo2": ModelSection(**TINY, family="olmo2", kv_heads=2, norm_eps=1e-6),
    "gpt2": ModelSection(**TINY, family="gpt2", tied=True),
}


def _random(section: ModelSection, dtype: torch.dtype = torch.float32) -> Decoder:
    """A model whose norms and biases are not the 1 and 0 that hide mistakes."""
    model = build(section, device="cpu", dtype=dtype)
    assert isinstance(model, Decoder)
    initialize(model, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return model


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


# ------------------------------------------------------------------------------------------------- transformers
_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"attention.{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"feed_forward.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def _llama_weights(model: Decoder) -> dict[str, Tensor]:
    found = {}
    for name, value in model.state_dict().items():
        if name.startswith("blocks."):
            _, number, part = name.removesuffix(".weight").split(".", 2)
            found[f"model.layers.{number}.{_NAMES[part]}.weight"] = value
        else:
            found[_NAMES[name.removesuffix(".weight")] + ".weight"] = value
    return found


def _phi3_weights(model: Decoder) -> dict[str, Tensor]:
    found = _llama_weights(model)
    for number in model.blocks:
        attention, feed_forward = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        parts = [found.pop(f"{attention}.{part}_proj.weight") for part in "qkv"]
        found[f"{attention}.qkv_proj.weight"] = torch.cat(parts)
        parts = [found.pop(f"{feed_forward}.{part}_proj.weight") for part in ("gate", "up")]
        found[f"{feed_forward}.gate_up_proj.weight"] = torch.cat(parts)
    return found


def _olmo2_weights(model: Decoder) -> dict[str, Tensor]:
    found = _llama_weights(model)
    for number in model.blocks:
        norm = f"model.layers.{number}.{{}}_layernorm.weight"
        found[norm.format("post_feedforward")] = found.pop(norm.format("post_attention"))
        found[norm.format("post_attention")] = found.pop(f"model.layers.{number}.input_layernorm.weight")
    return found


def _gpt2_weights(model: Decoder) -> dict[str, Tensor]:
    ours = model.state_dict()
    found = {
        "transformer.wte.weight": ours["embed.weight"],
        "transformer.wpe.weight": ours["learned_positions.weight"],
    }
    for kind in ("weight", "bias"):
        found[f"transformer.ln_f.{kind}"] = ours[f"norm.{kind}"]
        for number in model.blocks:
            block, theirs = f"blocks.{number}", f"transformer.h.{number}"
            qkv = torch.cat([ours[f"{block}.attention.{part}.{kind}"] for part in "qkv"])
            rest = {"attn.c_proj": "attention.o", "mlp.c_fc": "feed_forward.up", "mlp.c_proj": "feed_forward.down"}
            matrices = {"attn.c_attn": qkv, **{there: ours[f"{block}.{here}.{kind}"] for there, here in rest.items()}}
            # Conv1D keeps its matrices the other way round.
            found.update({f"{theirs}.{name}.{kind}": value.t() for name, value in matrices.items()})
            found[f"{theirs}.ln_1.{kind}"] = ours[f"{block}.attention_norm.{kind}"]
            found[f"{theirs}.ln_2.{kind}"] = ours[f"{block}.feed_forward_norm.{kind}"]
    return found


def _rope_parameters(section: ModelSection) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": section.rope_theta}
    if section.rope_scaling is not None:
        scaling = section.rope_scaling
        found |= {
            "rope_type": scaling.kind,
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
        if scaling.kind == "llama3":
            found |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    return found


def _theirs(section: ModelSection, model: Decoder) -> nn.Module:
    import transformers

    if section.family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=section.vocabulary,
            n_embd=section.dim,
            n_layer=section.layers,
            n_head=section.heads,
            n_inner=section.hidden_dim,
            n_positions=section.max_seq_len,
            layer_norm_epsilon=section.norm_eps,
        )
        theirs, weights = transformers.GPT2LMHeadModel(config), _gpt2_weights(model)
    else:
        name = {"llama": "Llama", "qwen3": "Qwen3", "phi3": "Phi3", "olmo2": "Olmo2"}[section.family]
        config = getattr(transformers, f"{name}Config")(
            vocab_size=section.vocabulary,
            hidden_size=section.dim,
            intermediate_size=section.hidden_dim,
            num_hidden_layers=section.layers,
            num_attention_heads=section.heads,
            num_key_value_heads=section.num_kv_heads,
            head_dim=section.size_of_head,
            max_position_embeddings=section.max_seq_len,
            rms_norm_eps=section.norm_eps,
            rope_parameters=_rope_parameters(section),
            tie_word_embeddings=section.tied,
            pad_token_id=None,
        )
        theirs = getattr(transformers, f"{name}ForCausalLM")(config)
        weights = {"phi3": _phi3_weights, "olmo2": _olmo2_weights}.get(section.family, _llama_weights)(model)
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if section.tied else set())
    theirs.tie_weights()
    return theirs.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", SECTIONS)
def test_logits_are_those_of_transformers(family: str, dtype: torch.dtype) -> None:
    section = SECTIONS[family]
    model = _random(section, dtype)
    theirs = _theirs(section, model).to(dtype)
    tokens = torch.randint(0, 61, (2, 96), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = model(tokens, _positions(tokens))
    assert found.dtype == dtype
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["olmo2", "qwen3", "phi3", "gpt2"])
def test_gradients_are_those_of_transformers(family: str) -> None:
    section = SECTIONS[family]
    model = _random(section, torch.float64)
    theirs = _theirs(section, model).double()
    tokens = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))
    logits = theirs(tokens).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    model(tokens, _positions(tokens), None, labels).backward()
    stored = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for each in stored_tensors(section):
        parts = [model.get_parameter(part.name).grad for part in each.parts]
        own = torch.cat([part for part in parts if part is not None])
        found = stored[each.name]
        assert found is not None
        torch.testing.assert_close(
            own.t() if each.transposed else own, found, atol=1e-5, rtol=1e-4
        )  # its norms are fp32


@pytest.mark.parametrize(
    ("theta", "scaling", "head_dim"),
    [
        (500_000.0, RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=8192), 128),
        (500_000.0, RopeScaling(kind="llama3", factor=32.0, original_max_seq_len=8192), 64),
        (1_000_000.0, RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=32768), 128),
        (10_000.0, RopeScaling(kind="yarn", factor=16.0, original_max_seq_len=4096, attention_factor=1.5), 64),
        (10_000.0, RopeScaling(kind="yarn", factor=1.0, original_max_seq_len=4096), 64),
    ],
)
def test_rope_is_that_of_transformers_to_the_last_bit(theta: float, scaling: RopeScaling, head_dim: int) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    section = ModelSection(**TINY, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
    parameters = _rope_parameters(section)
    if scaling.attention_factor is not None:
        parameters["attention_factor"] = scaling.attention_factor
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 4, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=parameters
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
    rope = Positions(head_dim, theta, scaling)
    assert torch.equal(rope.frequencies(torch.device("cpu")), frequencies)
    assert rope.amplitude == factor
    cos, sin = rope(torch.tensor([[0, 5]]), torch.float64)
    assert cos.shape == (1, 2, 1, head_dim)
    expected = torch.cat((5 * frequencies.double(),) * 2)
    assert torch.equal(cos[0, 1, 0], expected.cos() * factor)
    assert torch.equal(sin[0, 1, 0], expected.sin() * factor)


def test_rope_is_not_state_and_is_copied_to_a_device_once() -> None:
    rope = Positions(8, 10_000.0)
    cpu = torch.device("cpu")
    assert rope.frequencies(cpu) is rope.frequencies(cpu)
    assert not rope.state_dict()
    assert not list(rope.buffers())
    with torch._subclasses.FakeTensorMode():
        fake = Positions(8, 10_000.0)
        fake.frequencies(cpu)
    assert type(fake.frequencies(cpu)) is Tensor


# ------------------------------------------------------------------------------------------------- attention
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_grouped_attention_forward_and_backward(dtype: torch.dtype, tolerance: float, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        return torch.randn(2, 12, heads, 8, generator=generator, dtype=dtype).requires_grad_()

    q, k, v, grad = drawn(6), drawn(2), drawn(2), drawn(6).detach()
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    mask = SdpaKernel().document_mask(documents if masked else None)
    out = SdpaKernel().attend(q, k, v, mask)
    wide = [x.double().transpose(1, 2) for x in (q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2))]
    seen = torch.ones(12, 12).tril().bool()[None, None]
    if masked:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = (wide[0] @ wide[1].transpose(-1, -2) / 8**0.5).masked_fill(~seen, -torch.inf)
    expected = (scores.softmax(-1) @ wide[2]).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    for found, wanted in zip(
        torch.autograd.grad(out, (q, k, v), grad),
        torch.autograd.grad(expected, (q, k, v), grad.double()),
        strict=True,
    ):
        torch.testing.assert_close(found.double(), wanted.double(), atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("family", ["llama3.1", "qwen3", "olmo2", "gpt2"])
def test_documents_do_not_see_each_other(family: str) -> None:
    model = _random(SECTIONS[family], torch.float64)
    first, second = torch.randint(0, 61, (1, 17)), torch.randint(0, 61, (1, 26))
    positions = torch.cat((_positions(first), _positions(second)), dim=1)
    documents = torch.tensor([[0] * 17 + [1] * 26])
    packed = model(torch.cat((first, second), dim=1), positions, documents)
    changed = model(torch.cat(((first + 1) % 61, second), dim=1), positions, documents)
    assert torch.equal(packed[:, 17:], changed[:, 17:])
    assert not torch.equal(packed[:, :17], changed[:, :17])
    for piece, alone in ((packed[:, :17], first), (packed[:, 17:], second)):
        torch.testing.assert_close(piece, model(alone, _positions(alone)), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("family", SECTIONS)
def test_bf16_stays_near_fp32(family: str) -> None:
    model = _random(SECTIONS[family])
    tokens = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(tokens, _positions(tokens), None, tokens)
        found = model.bfloat16()(tokens, _positions(tokens), None, tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


# ------------------------------------------------------------------------------------------------- the loss
def _problem(tokens: int = 37, dim: int = 12, vocabulary: int = 23) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, dim, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, dim, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    loss = F.cross_entropy(hidden @ weight.t(), labels, ignore_index=-100, reduction="sum").reshape(1)
    return loss, *torch.autograd.grad(3 * loss, (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
def test_chunked_loss_is_cross_entropy(chunk_tokens: int) -> None:
    hidden, weight, labels = _problem()
    loss = ChunkedLogProbs(hidden, weight, labels, chunk_tokens).nll()
    found = (loss, *torch.autograd.grad(3 * loss, (hidden, weight)))
    for value, expected in zip(found, _plain(hidden, weight, labels), strict=True):
        torch.testing.assert_close(value, expected, atol=1e-12, rtol=1e-12)


def test_nothing_to_learn_from_gives_zeros() -> None:
    hidden, weight, labels = _problem()
    loss = ChunkedLogProbs(hidden, weight, torch.full_like(labels, -100), 8).nll()
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0.0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@pytest.mark.parametrize("needed", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient(needed: str) -> None:
    hidden, weight, labels = _problem()
    _, grad_hidden, grad_weight = _plain(hidden, weight, labels)
    (weight if needed == "hidden" else hidden).requires_grad_(False)
    (3 * ChunkedLogProbs(hidden, weight, labels, 8).nll()).backward()
    found, expected = (hidden.grad, grad_hidden) if needed == "hidden" else (weight.grad, grad_weight)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_huge_logits_do_not_overflow() -> None:
    hidden, weight, labels = _problem()
    with torch.no_grad():
        hidden *= 1e4
    loss = ChunkedLogProbs(hidden, weight, labels, 8).nll()
    found = (loss, *torch.autograd.grad(3 * loss, (hidden, weight)))
    for value, expected in zip(found, _plain(hidden, weight, labels), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-9)


class _Watched(TorchDispatchMode):
    """The largest tensor that any operation made, and which operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ran.append(str(func))
        self.largest = max([self.largest, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


def test_logits_are_never_whole() -> None:
    hidden, weight, labels = _problem(tokens=512, dim=8, vocabulary=100)
    with _Watched() as watched:
        ChunkedLogProbs(hidden, weight, labels, 64).nll().backward()
    assert watched.largest == 64 * 100


def test_without_gradients_none_are_computed() -> None:
    hidden, weight, labels = _problem()
    expected = _plain(hidden, weight, labels)[0]
    with torch.no_grad(), _Watched() as watched:
        loss = ChunkedLogProbs(hidden, weight, labels, 64).nll()
    torch.testing.assert_close(loss, expected.detach(), atol=1e-12, rtol=1e-12)
    assert sum("mm" in name for name in watched.ran) == 1
    assert not any("scatter" in name for name in watched.ran)


def _vocabulary_parallel(vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    import torch.distributed as dist

    hidden, weight, labels = _problem(vocabulary=vocabulary)
    per_rank = -(-vocabulary // dist.get_world_size())
    start = dist.get_rank() * per_rank
    mine = weight.detach()[start : start + per_rank].clone().requires_grad_()
    loss = ChunkedLogProbs(hidden, mine, labels, 8, dist.group.WORLD, start).nll()
    return loss.detach(), *torch.autograd.grad(3 * loss, (hidden, mine))


@pytest.mark.parametrize(
    ("world", "vocabulary"),
    [(3, 23), *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, 24), (2, 23)))],
)
def test_each_rank_has_a_slice_of_the_vocabulary(world: int, vocabulary: int) -> None:
    results = ranks.run(world, _vocabulary_parallel, vocabulary)
    loss, grad_hidden, grad_weight = _plain(*_problem(vocabulary=vocabulary))
    for found in results:
        torch.testing.assert_close(found[0], loss.detach(), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(found[1], grad_hidden, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(torch.cat([found[2] for found in results]), grad_weight, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
def test_a_model_with_labels_gives_the_loss_of_its_logits(family: str) -> None:
    model = _random(SECTIONS[family], torch.float64)
    tokens, labels = torch.randint(0, 61, (2, 20)), torch.randint(0, 61, (2, 20))
    labels[:, -1] = -100
    logits = model(tokens, _positions(tokens))
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum").reshape(1)
    loss = model(tokens, _positions(tokens), None, labels)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    names = [name for name, _ in model.named_parameters()]
    for name, found, wanted in zip(
        names,
        torch.autograd.grad(loss, list(model.parameters())),
        torch.autograd.grad(expected, list(model.parameters())),
        strict=True,
    ):
        assert (found - wanted).abs().max() < 1e-11, name
