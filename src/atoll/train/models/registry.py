"""From ``[model]`` to a module: the families of Atoll, or a user's own function; its size and its arithmetic."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import ConfigError
from atoll.train.batch import Batch
from atoll.train.models.family import build_decoder
from atoll.train.models.init import materialize
from atoll.train.models.logprobs import LogitsLogProbs
from atoll.train.models.parts import Decoder
from atoll.train.objective import Objective, sums_of
from atoll.train.objectives.pretrain import Pretrain
from atoll.train.recipe.schema import ModelSection
from atoll.train.user_code import load_function


class UserModel(nn.Module):
    """A model of the user's own, called as a ``Decoder`` is.

    The contract of its ``forward`` is ``forward(tokens, positions, documents=None, labels=None)``: logits [B, S, V], or
    the sum of the losses [1] where labels are given (``Decoder.forward`` says more). Less will do: of ``positions`` (or
    ``position_ids``), ``documents`` and ``labels`` it gets what it names, ``labels`` only if it names ``positions``
    too, and its logits (or those in the ``logits`` attribute of what it returns) become the loss here.
    """

    def __init__(self, inner: nn.Module, config: ModelSection) -> None:
        super().__init__()
        self.inner = inner
        self.config = config
        self.make: Callable[[int], nn.Module] | None = None  # as a Decoder's
        self.objective: Objective = Pretrain()
        self._names = _accepted(inner, config)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Tensor,
    ) -> Tensor:
        """As ``Decoder.forward``.

        Raises:
            ConfigError: documents shall not see each other and the model does not take ``documents``, what it
                returned is neither logits nor a loss, or it has a loss of its own beside another objective.
        """
        if documents is not None and "documents" not in self._names:
            raise ConfigError(
                f"[model] python = {self.config.python!r}: its forward takes no documents, so that it cannot keep them "
                "apart; add the parameter, or set [data] isolate_documents = false"
            )
        # One document where none are told apart: its forward need not know of two cases.
        apart = torch.zeros_like(positions) if documents is None else documents
        offered = {"positions": positions, "position_ids": positions, "documents": apart, "labels": labels}
        out = self.inner(x, **{name: offered[name] for name in self._names})
        out = getattr(out, "logits", out)
        own_loss = labels is not None and "labels" in self._names
        if not isinstance(out, Tensor) or (out.numel() != 1 if own_loss else out.shape[:-1] != x.shape):
            wanted = "the sum of the losses, [1]" if own_loss else f"logits, [{x.shape[0]}, {x.shape[1]}, V]"
            got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ConfigError(f"[model] python = {self.config.python!r}: its forward returned {got}, expected {wanted}")
        if own_loss and not isinstance(self.objective, Pretrain):
            raise ConfigError(
                f"[model] python = {self.config.python!r}: its forward computes a loss of its own, and [objective] "
                "another one: leave out its parameter labels"
            )
        if labels is None or own_loss:
            return out.reshape(1) if own_loss else out
        batch = Batch(others.pop("tokens", x), labels, positions, documents, others)
        return sums_of(self.objective, LogitsLogProbs(out, labels), batch)


def build(
    section: ModelSection, *, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32
) -> Decoder | UserModel:
    """The model of a recipe, its weights not set; one of a user's function knows by ``make`` how it set them.

    Args:
        section: ``[model]``, its ``vocab_size`` known.
        device: where the parameters lie; ``meta`` takes no memory.
        dtype: of the parameters.

    Raises:
        ConfigError: ``python`` names something that isn't there or gives no module, or the family can't build it.
    """
    if section.python is not None:
        return _build_users(section, section.python, torch.device(device), dtype)
    model = build_decoder(section).to(dtype)
    if torch.device(device).type != "meta":
        materialize(model, torch.device(device))
    return model


def parameter_count(section: ModelSection) -> int:
    """Parameters of the whole model; a tied head counts once."""
    return sum(parameter.numel() for parameter in build(section).parameters())


def flops_per_token(section: ModelSection, seq_len: int) -> float:
    """Floating-point operations of a training step per token, recomputation not counted.

    6 × the parameters that multiply (matrices and the head, tied or not; no looked-up embeddings, norms or biases: 2 a
    token forward, 4 backward), plus 6 × layers × heads × head width × ``seq_len`` for attention's two causal products.
    Llama 3.1 8B at 8,192 tokens: 51.5 GFLOP. Of a user's own model nothing is known about attention: it is left out.
    """
    model = build(section)
    multiplied = sum(
        parameter.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim >= 2
    )
    if isinstance(model, UserModel):
        return 6.0 * multiplied
    if section.tied:
        multiplied += section.vocabulary * section.dim
    return 6.0 * (multiplied + section.layers * section.heads * section.size_of_head * seq_len)


# ------------------------------------------------------------------------------------------------- a user's own
def _build_users(section: ModelSection, spec: str, device: torch.device, dtype: torch.dtype) -> Decoder | UserModel:
    function = load_function(spec, "[model] python")

    def build_on(device: torch.device) -> Decoder | UserModel:
        with device:
            made = function(section)
        if not isinstance(made, nn.Module) or next(made.parameters(), None) is None:
            got = type(made).__name__
            raise ConfigError(f"[model] python = {spec!r} returned {got}: expected a torch.nn.Module with parameters")
        return made if isinstance(made, Decoder) else UserModel(made, section)

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = build_on(torch.device("cpu"))
            inner = made.inner if isinstance(made, UserModel) else made
            # Where a constructor leaves them open, one of these sets them, by the habit of torch and of TorchTitan.
            for name in ("init_weights", "reset_parameters"):
                method = getattr(inner, name, None)
                if callable(method) and not _required(method):
                    method()
                    break
        return made

    model = build_on(device).to(dtype)
    model.make = make
    return model


def _accepted(inner: nn.Module, config: ModelSection) -> tuple[str, ...]:
    """Which of the known names the model's ``forward`` takes, beside the tokens; ``ConfigError`` if it needs others."""
    others = list(inspect.signature(inner.forward).parameters.values())[1:]
    named = [each for each in others if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    names = {each.name for each in named}
    known = {"positions", "position_ids", "documents"} | ({"labels"} if "positions" in names else set())
    missing = [each.name for each in named if each.default is each.empty and each.name not in known]
    if missing:
        raise ConfigError(
            f"[model] python = {config.python!r}: its forward needs {', '.join(missing)}; Atoll hands over tokens, "
            "positions, documents and (with positions) labels: give other parameters a default"
        )
    return tuple(sorted(names & known))


def _required(method: Callable[..., Any]) -> bool:
    """Whether a method can't be called without arguments."""
    parameters = inspect.signature(method).parameters.values()
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
