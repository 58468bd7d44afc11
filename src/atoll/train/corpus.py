"""The data of a run: prepared once, as the loop reads them, and how long a run is in their terms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import AtollError, ConfigError
from atoll.train.data.packing import PackedDataset
from atoll.train.data.prepare import Prepared, prepare
from atoll.train.events import Event, Note, Progress
from atoll.train.recipe.durations import Duration, Interval
from atoll.train.recipe.schema import Recipe
from atoll.train.stop import StopRequest
from atoll.train.world import World

_STOP = "stop"


class StoppedEarly(Exception):
    """A rank was asked to stop before the first step: there is nothing to save."""


def prepare_together(
    recipe: Recipe, world: World, stop: StopRequest, report: Callable[[Event], None], cleanup: contextlib.ExitStack
) -> Prepared:
    """The first rank of each node prepares the data, or waits for a process that does; then the others open them.

    The ranks meet after each turn in every case: none waits for one that failed or was stopped.

    Raises:
        ConfigError: some rank could not.
        StoppedEarly: some rank was asked to stop.
    """

    def progress(event: Progress) -> None:
        if stop.asked:
            world.announce(_STOP)
        if world.announced(_STOP):
            raise StoppedEarly
        report(event)

    def waiting(missing: int) -> None:
        report(Progress("waiting for other ranks to prepare data", world.size - missing, world.size, "ranks"))
        if stop.asked:
            world.announce(_STOP)
            if stop.since_s > recipe.train.grace_s / 2:
                raise StoppedEarly  # they don't answer, and there is nothing to save

    prepared: Prepared | None = None
    for turn, is_mine in enumerate((world.local_rank == 0, world.local_rank > 0)):
        error: AtollError | None = None
        with contextlib.suppress(StoppedEarly):
            try:
                if is_mine:
                    prepared = prepare(
                        recipe.data,
                        seq_len=recipe.train.seq_len,
                        progress=progress,
                        note=lambda line: report(Note(line)),
                    )
                    cleanup.callback(prepared.close)
            except AtollError as failure:
                error = failure
        world.meet(f"data-{turn}", waiting)
        world.agree(error)
        if world.any((is_mine and prepared is None) or stop.asked):
            raise StoppedEarly
    assert prepared is not None
    return prepared


@dataclass(frozen=True)
class Corpus:
    """Packed sequences to train on and, perhaps, to validate with."""

    dataset: PackedDataset
    validation: PackedDataset | None
    identity: dict[str, Any]  # what a checkpoint's place in the data refers to


def open_corpus(recipe: Recipe, prepared: Prepared) -> Corpus:
    """Pack prepared shards as the recipe says.

    Raises:
        ConfigError: a token is none of the model's vocabulary.
    """
    data, train = recipe.data, recipe.train
    for shards in [*(shards for shards, _ in prepared.train), *([prepared.validation] if prepared.validation else [])]:
        if shards.largest_token >= recipe.model.vocabulary:
            raise ConfigError(
                f"[data] has the token {shards.largest_token}, and [model] vocab_size = {recipe.model.vocabulary}: the "
                "tokens were made for another vocabulary, or [data] bin_dtype is wrong"
            )
    dataset = PackedDataset(
        prepared.train, train.seq_len, isolate=data.isolate_documents, shuffle=data.shuffle, seed=train.seed
    )
    validation = None
    if prepared.validation is not None:
        validation = PackedDataset(
            [(prepared.validation, 1.0)], train.seq_len, isolate=data.isolate_documents, shuffle=False
        )
    identity = {
        "parts": [[shards.fingerprint, weight] for shards, weight in prepared.train],
        "tokens": sum(shards.num_tokens for shards, _ in prepared.train),
        "documents": sum(shards.num_documents for shards, _ in prepared.train),
    }
    return Corpus(dataset, validation, identity)


def described(identity: dict[str, Any] | None) -> str:
    """Data in a few words, for messages."""
    if not identity:
        return "nothing that is known"
    return f"{identity['tokens']:,} tokens in {identity['documents']:,} documents"


def with_vocabulary(recipe: Recipe, known: int | None) -> Recipe:
    """The recipe with the ``known`` size of the tokenizer's vocabulary where it left the size open.

    Raises:
        ConfigError: the tokenizer has more tokens than the model, or nobody says how many there are.
    """
    wanted = recipe.model.vocab_size
    if wanted is None and known is None:
        raise ConfigError(
            "[model] vocab_size is not set, and there is no tokenizer to take it from: add --model.vocab_size N or "
            "--data.tokenizer NAME"
        )
    if wanted is None:
        model = recipe.model.model_copy(update={"vocab_size": known})
        return recipe.model_copy(update={"model": model})
    if known is not None and known > wanted:
        raise ConfigError(
            f"the tokenizer {recipe.data.tokenizer!r} has {known} tokens, but [model] vocab_size = {wanted}: add "
            "--model.vocab_size none to take the tokenizer's (a base of the recipe may have set it)"
        )
    return recipe


class Length:
    """How long a run is, in every unit.

    Attributes:
        steps: optimizer steps, the last of which may be smaller.
        samples: sequences over the whole run; None where steps are given, of whatever batch.
        tokens_per_step: places that a full step trains on, on average.
    """

    def __init__(self, recipe: Recipe, dataset: PackedDataset) -> None:
        batch = recipe.train.global_batch
        self.steps_per_epoch = len(dataset) / batch
        self.tokens_per_step = dataset.mean_trained * batch
        wanted = recipe.train.length
        assert wanted is not None  # require_complete has seen to it
        lengths = {"steps_per_epoch": self.steps_per_epoch, "tokens_per_step": self.tokens_per_step}
        self.samples: int | None = None
        if wanted.unit == "ep":
            self.samples = round(wanted.value * len(dataset))
            self.steps = -(-self.samples // batch)
        else:
            self.steps = wanted.in_steps(**lengths)
            if wanted.unit == "tok":
                self.samples = self.steps * batch
        if self.steps < 1:
            raise ConfigError(f"[train] steps = {wanted} is less than one step of {batch} sequences; make it longer")

    def interval(self, duration: Duration | None) -> Interval | None:
        """How often something happens that a recipe wants once a duration; None: never."""
        if duration is None or duration.value == 0:
            return None
        lengths = {"steps_per_epoch": self.steps_per_epoch, "tokens_per_step": self.tokens_per_step}
        return Interval(duration.exact_steps(**lengths))
