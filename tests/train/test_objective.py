"""An objective is one class in one file: a user's own trains through the real loop, on every axis as on one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ranks
import small
from atoll.core.errors import ConfigError
from atoll.train import objectives
from atoll.train.batch import Batch
from atoll.train.data.loader import batched
from atoll.train.data.packing import Sample
from atoll.train.models import registry
from atoll.train.models.init import initialize
from atoll.train.models.logprobs import ChunkedLogProbs, LogitsLogProbs, LogProbs
from atoll.train.objective import Objective, make_objective, sums_of
from atoll.train.objectives.pretrain import Pretrain
from atoll.train.recipe.load import load_recipe
from atoll.train.recipe.schema import ObjectiveSection

pytestmark = pytest.mark.usefixtures("torch_in_process")

# Of two documents in a row the first shall be the likelier one, as in DPO; the model shall speak a little too.
MINE = """
import numpy as np
import torch
from torch.nn import functional as F

from atoll.train.objective import Objective


class Pairs(Objective):
    metrics = ("accuracy", "margin")

    def fields(self, sample):
        return {"rate": 1.0 + np.arange(len(sample.tokens)) % 3}

    def loss(self, logprobs, batch):
        first, second, are_pairs = self.pairs(batch, logprobs.tokens() * batch.extra["rate"])
        margins = (first - second)[are_pairs]
        loss = -F.logsigmoid(margins).sum().reshape(1) + 0.1 * logprobs.nll()
        return loss, {"accuracy": (margins > 0).sum(), "margin": margins.sum()}

    def weight(self, batch):
        return int(self.pairs(batch, torch.zeros(batch.labels.shape))[2].sum())

    def pairs(self, batch, scores):
        none = scores.new_zeros(len(scores), batch.labels.shape[1] + 2)
        sums = none.scatter_add(1, batch.documents, scores)
        labels = none.scatter_add(1, batch.documents, (batch.labels != -100).to(scores))
        return sums[:, 0::2], sums[:, 1::2], (labels[:, 0::2] > 0) & (labels[:, 1::2] > 0)
"""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"train__micro_batch": 1}),
    "tensor": (2, {"parallel__tensor": 2}),
    "pipeline": (2, {"parallel__pipeline": 2, "train__micro_batch": 1}),
    "context": (2, {"parallel__context": 2}),
    "shard": (2, {"parallel__shard": 2}),
    "zbv": (2, {"parallel__pipeline": 2, "parallel__pipeline_schedule": "zbv", "model__layers": 4}),
    "tensor_context": (4, {"parallel__tensor": 2, "parallel__context": 2}),
    "pipeline_context": (4, {"parallel__pipeline": 2, "parallel__context": 2}),
}
IN_MAKE_TEST = ("one", "tensor", "pipeline", "context")


def _sums_by_hand(model: torch.nn.Module, samples: list[Sample]) -> tuple[Tensor, int, int, Tensor, int]:
    """Loss, pairs, pairs that are right, their margin, and trained tokens of sequences, document by document."""
    loss, margin = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    pairs = right = tokens = 0
    for sample in samples:
        assert sample.documents is not None
        arrays = (sample.tokens, sample.positions, sample.documents)
        (logits,) = model(*(torch.from_numpy(each)[None] for each in arrays))
        scores: dict[int, Tensor] = {}
        for place, (label, document) in enumerate(zip(sample.labels, sample.documents, strict=True)):
            if label != -100:
                logprob = logits[place].log_softmax(0)[int(label)]
                scores[int(document)] = scores.get(int(document), torch.zeros_like(logprob)) + (1 + place % 3) * logprob
                loss = loss - 0.1 * logprob
                tokens += 1
        for number in range(0, small.SEQ_LEN, 2):
            if number in scores and number + 1 in scores:
                apart = scores[number] - scores[number + 1]
                loss, margin = loss - F.logsigmoid(apart), margin + apart.detach()
                pairs, right = pairs + 1, right + int(apart > 0)
    return loss, pairs, right, margin, tokens


@pytest.mark.parametrize(
    "layout", [each if each in IN_MAKE_TEST else pytest.param(each, marks=pytest.mark.long) for each in LAYOUTS]
)
def test_an_objective_of_the_users_trains_on_every_axis_as_on_one_process(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "zbv" and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 can't part the backward pass of zero bubbles at a Python autograd.Function")
    world, changes = LAYOUTS[layout]
    monkeypatch.chdir(tmp_path)
    if world == 1:  # beside Atoll's own
        (tmp_path / "pairs.py").write_text(MINE + "\n\nOBJECTIVE = Pairs\n")
        monkeypatch.setattr(objectives, "__path__", [*objectives.__path__, str(tmp_path)])
        chosen = {"kind": "pairs"}
    else:
        (tmp_path / "mine.py").write_text(MINE)
        chosen = {"python": "mine:Pairs"}
    (tmp_path / "held.txt").write_text(small.text(9, seed=9))
    tree = small.tree(
        tmp_path,
        objective={**chosen, "chunk_tokens": 13},
        precision__compute="fp64",
        optimizer={"kind": "sgd", "momentum": 0.0, "lr": 0.05, "weight_decay": 0.0, "max_grad_norm": 0.0},
        schedule={"kind": "constant", "warmup": 0},
        data__validation="held.txt",
        train__steps=3,
        **changes,
    )
    if world == 1:
        small.train(tree)
    else:
        ranks.run(world, small.train, tree)

    corpus = small.corpus(tree)
    section = load_recipe(tree).recipe.model.model_copy(update={"vocab_size": 260})
    model = registry.build(section, device="cpu", dtype=torch.float64)
    initialize(model, 0)
    total = 0
    for step, row in enumerate(small.steps(tmp_path / "run")):
        loss, pairs, right, margin, tokens = _sums_by_hand(model, corpus.dataset.samples(range(4 * step, 4 * step + 4)))
        total += tokens
        expected = {"loss": loss.item() / pairs, "accuracy": right / pairs, "margin": margin.item() / pairs}
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-11)
        assert row["tokens"] == total
        gradients = torch.autograd.grad(loss / pairs, list(model.parameters()))
        assert row["grad_norm"] == pytest.approx(sum(float(g.square().sum()) for g in gradients) ** 0.5, rel=1e-11)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.05 * gradient
    found = small.weights(tmp_path / "run")
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-11, atol=1e-11)

    assert corpus.validation is not None
    with torch.no_grad():
        held = [corpus.validation.window(index) for index in range(len(corpus.validation))]
        loss, pairs, right, _, tokens = _sums_by_hand(model, held)
    (told,) = map(json.loads, (tmp_path / "run" / "validation.jsonl").read_text().splitlines())
    assert told["validation_loss"] == pytest.approx(loss.item() / pairs, rel=1e-11)
    assert told["validation_accuracy"] == pytest.approx(right / pairs)
    assert told["validation_tokens"] == tokens


def test_the_objective_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-objective.md").read_text()
    (tmp_path / "myloss.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    tree = small.tree(tmp_path, objective={"python": "myloss:PerDocument"}, train__steps=2)
    small.train(tree)
    corpus = small.corpus(tree)
    model = registry.build(load_recipe(tree).recipe.model.model_copy(update={"vocab_size": 260}), device="cpu")
    initialize(model, 0)
    means: list[float] = []
    total = 0.0
    for sample in corpus.dataset.samples(range(4)):
        assert sample.documents is not None
        arrays = (sample.tokens, sample.positions, sample.documents, sample.labels)
        tokens, positions, documents, labels = (torch.from_numpy(each)[None] for each in arrays)
        losses = F.cross_entropy(model(tokens, positions, documents)[0], labels[0], reduction="none")
        for number in range(int(documents.max()) + 1):
            own = losses[(documents[0] == number) & (labels[0] != -100)]
            means += [own.mean().item()] if len(own) else []
            total += own.sum().item()
    row = small.steps(tmp_path / "run")[0]
    assert row["loss"] == pytest.approx(sum(means) / len(means), rel=1e-5)
    assert row["nll"] == pytest.approx(total / len(means), rel=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "pretrian"}, r"'pretrian' is no objective: did you mean 'pretrain'\?; known are pretrain"),
        (
            {"python": "collections:OrderedDict"},
            r"returned OrderedDict: expected an atoll\.train\.objective\.Objective",
        ),
    ],
)
def test_what_is_no_objective_is_refused(given: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        small.train(small.tree(tmp_path, objective=given))


class _Needs(Pretrain):
    def __init__(self, temperature: float) -> None:
        self.temperature = temperature


class _Taken(Pretrain):
    metrics = ("accuracy", "lr")


class _PerToken(Pretrain):
    def loss(self, logprobs: LogProbs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs.tokens(), {}


class _Bare(Pretrain):
    def loss(self, logprobs: LogProbs, batch: Batch) -> Any:
        return logprobs.nll()


class _Forgets(Pretrain):
    metrics = ("accuracy",)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Needs, r"python = 'test_objective:_Needs': .*missing 1 required positional argument"),
        (Objective, r"Can't instantiate abstract class Objective"),
        (_Taken, r"its metric 'lr' is a figure of every step: give it another name"),
        (_PerToken, r"_PerToken\.loss has to return the loss and a dict with \[\], each a tensor of one number"),
        (_Bare, r"_Bare\.loss has to return the loss and a dict"),
        (_Forgets, r"_Forgets\.loss has to return the loss and a dict with \['accuracy'\]"),
    ],
)
def test_mistakes_of_an_objective_are_named(kind: type[Objective], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _sums_of_zeros(ObjectiveSection(python=f"test_objective:{kind.__name__}"))


def _sums_of_zeros(section: ObjectiveSection) -> Tensor:
    _, _, labels, _ = _problem()
    zeros = torch.zeros_like(labels)
    logprobs = LogitsLogProbs(torch.zeros(*labels.shape, 23), labels)
    return sums_of(make_objective(section), logprobs, Batch(zeros, labels, zeros, None))


def test_a_mistake_on_the_last_stage_is_named(tmp_path: Path) -> None:
    tree = small.tree(
        tmp_path, objective={"python": "test_objective:_Bare"}, parallel={"pipeline": 2}, train__micro_batch=1
    )
    (_, (how, said)) = ranks.start(2, small.train, tree, patient=True).outcomes()
    assert how == "raised"
    assert "ConfigError: [objective] _Bare.loss has to return the loss and a dict" in said
    assert "RuntimeError" not in said


class _Answers(Pretrain):
    """Trains what follows token 5 in each document."""

    def fields(self, sample: Sample) -> dict[str, Any]:
        seen = np.array([5 in sample.tokens[: place + 1].tolist() for place in range(len(sample.tokens))])
        return {"labels": np.where(seen, sample.labels, -100)}


def test_an_objective_may_leave_labels_out() -> None:
    tokens, labels, positions = (np.array(row) for row in ([1, 2, 5, 7, 8], [2, 5, 7, 8, -100], range(5)))
    batch = batched([Sample(tokens, labels, positions, None)], _Answers())
    assert batch.labels.tolist() == [[-100, -100, 7, 8, -100]]
    assert (_Answers().weight(batch), batch.num_trained) == (2, 2)


# ------------------------------------------------------------------------------------- log-probabilities of tokens
def _problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a weight, labels and what each token's log-probability counts."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(37, 12, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(23, 12, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, 23, (1, 37), generator=generator)
    labels[:, ::5] = -100
    return hidden, weight, labels, torch.randn(1, 37, generator=generator, dtype=torch.float64)


def _by_hand() -> tuple[Tensor, ...]:
    hidden, weight, labels, rates = _problem()
    chosen = (hidden @ weight.t()).log_softmax(-1).gather(1, labels.clamp(min=0).t()).t()
    values = chosen.where(labels != -100, 0.0)
    return values.detach(), *torch.autograd.grad((values * rates).exp().sum(), (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", [1, 8, 1000])
def test_log_probabilities_of_tokens_and_their_gradients(chunk_tokens: int) -> None:
    hidden, weight, labels, rates = _problem()
    for logprobs in (
        ChunkedLogProbs(hidden, weight, labels, chunk_tokens),
        LogitsLogProbs((hidden @ weight.t())[None], labels),
    ):
        values = logprobs.tokens()
        found = values, *torch.autograd.grad((values * rates).exp().sum(), (hidden, weight))
        for value, expected in zip(found, _by_hand(), strict=True):
            torch.testing.assert_close(value, expected, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(logprobs.nll(), -values.sum().reshape(1), atol=1e-12, rtol=1e-12)


def _on_a_slice() -> tuple[Tensor, ...]:
    import torch.distributed as dist

    hidden, weight, labels, rates = _problem()
    per_rank = -(-23 // dist.get_world_size())
    start = dist.get_rank() * per_rank
    mine = weight.detach()[start : start + per_rank].clone().requires_grad_()
    values = ChunkedLogProbs(hidden, mine, labels, 8, dist.group.WORLD, start).tokens()
    return values.detach(), *torch.autograd.grad((values * rates).exp().sum(), (hidden, mine))


def test_log_probabilities_of_tokens_over_slices_of_the_vocabulary() -> None:
    values, grad_hidden, grad_weight = _by_hand()
    results = ranks.run(3, _on_a_slice)
    for found in results:
        torch.testing.assert_close(found[0], values, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(found[1], grad_hidden, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(torch.cat([found[2] for found in results]), grad_weight, atol=1e-12, rtol=1e-12)
