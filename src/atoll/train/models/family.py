"""What a model family brings, in its one file of ``families/``: network, names, tensor parallelism, initial weights."""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from atoll.core.errors import ConfigError
from atoll.train.models import families
from atoll.train.models.config_json import ConfigJson, Count, Positive
from atoll.train.models.parts import Decoder
from atoll.train.recipe.schema import ModelSection

# How tensor parallelism treats a part of a block:
#   gather: what enters it is made whole on each rank; columns, rows: a matrix is cut along its outputs, its inputs;
#   norm: works between the blocks, on this rank's part of the sequence; head_norm: on the heads of this rank;
#   width_norm: over all heads at once, which are on all ranks.
Cut = Literal["gather", "columns", "rows", "norm", "head_norm", "width_norm"]


@dataclass(frozen=True, slots=True)
class Part:
    """One of our tensors inside a stored one."""

    name: str
    rows: int  # its length along the first dimension


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file has it: our ``parts`` one after the other along the first dimension, then transposed if so.

    Attributes:
        permuted_heads: llama.cpp stores queries and keys of Llama with the two of each rotary pair side by side; this
            is how many heads they have, 0 where they lie as we have them.
    """

    name: str
    parts: tuple[Part, ...]
    transposed: bool = False
    permuted_heads: int = 0


class Family(ABC):
    """A model family. Memory and FLOPs are counted on the network that ``build`` makes."""

    # Of config.json: which ``model_type`` it reads; it writes the first, which GGUF files have too.
    model_types: ClassVar[tuple[str, ...]]
    architecture: ClassVar[str]  # its class in transformers
    config_keys: ClassVar[Mapping[str, str]]  # theirs by ours
    defaults: ClassVar[Mapping[str, Any]]  # of keys that may be missing, by our name
    # Keys and the values with which the network is this one, the written one first.
    computes: ClassVar[Mapping[str, tuple[Any, ...]]]

    # Names of tensors in transformers, without ``.weight``, and ours; several of ours where they are stored as one.
    outer_names: ClassVar[Mapping[str, str]]
    block_prefix: ClassVar[str]  # before a block's number
    block_names: ClassVar[Mapping[str, tuple[str, ...]]]
    transposed: ClassVar[bool] = False  # whether the matrices of blocks are stored the other way round
    permuted: ClassVar[bool] = False  # whether GGUF files have the two of each rotary pair side by side (``Stored``)

    rotary: ClassVar[bool] = True  # else there is a learnt vector for each position
    # Which matrices write to the residual stream: ``init_scheme`` makes them smaller, or 0.
    residual: ClassVar[tuple[str, ...]] = ("attention.o", "feed_forward.down")
    deep: ClassVar[tuple[str, ...]] = ()  # others that ``init_scheme = "torchtitan"`` makes smaller with depth
    # How tensor parallelism treats those parts of a block that there are; others are not touched.
    cuts: ClassVar[Mapping[str, Cut]] = {
        "attention_norm": "norm",
        "attention": "gather",
        "attention.q": "columns",
        "attention.k": "columns",
        "attention.v": "columns",
        "attention.o": "rows",
        "feed_forward_norm": "norm",
        "feed_forward": "gather",
        "feed_forward.gate": "columns",
        "feed_forward.up": "columns",
        "feed_forward.down": "rows",
    }

    @abstractmethod
    def build(self, config: ModelSection) -> Decoder:
        """The network of these dimensions, its weights not set."""

    def hidden_dim(self, config: ModelSection) -> int:
        """Width of the feed-forward part."""
        return config.hidden_dim or 4 * config.dim

    def read_config(self, config: ConfigJson) -> dict[str, Any]:
        """The fields of ``[model]`` that a config.json describes, ``family`` and ``init_std`` not among them."""
        for key, allowed in self.computes.items():
            config.must(key, allowed)
        fields: dict[str, Any] = {"tied": config.get("tie_word_embeddings", bool, self.defaults["tied"])}
        for ours, theirs in {**self.config_keys, "vocab_size": "vocab_size"}.items():
            if ours in self.defaults and not config.has(theirs):
                fields[ours] = self.defaults[ours]
            else:
                fields[ours] = config.get(theirs, Positive if ours == "norm_eps" else Count)
        return {"kv_heads": fields["heads"], **{ours: value for ours, value in fields.items() if value is not None}}

    def write_config(self, config: ModelSection) -> dict[str, Any]:
        """The keys of config.json that are this family's own; ``ConfigError`` where transformers cannot have them."""
        derived = {
            "kv_heads": config.num_kv_heads,
            "head_dim": config.size_of_head,
            "hidden_dim": self.hidden_dim(config),
        }
        values = {theirs: derived.get(ours, getattr(config, ours)) for ours, theirs in self.config_keys.items()}
        return values | {key: allowed[0] for key, allowed in self.computes.items()}

    def check(self, config: ModelSection) -> None:
        """Refuse dimensions that this network can't have, with a ``ValueError`` that names the key."""
        if self.rotary and config.size_of_head % 2:
            raise ValueError(f"head_dim = {config.size_of_head} is odd, and rotary positions need pairs")
        if not self.rotary and config.rope_scaling is not None:
            raise ValueError(f"rope_scaling is given, and {config.family} has no rotary positions: leave it out")


def family(name: str) -> Family:
    """The family of that name, one of ``families.names()``."""
    found: Family = importlib.import_module(f"{families.__name__}.{name}").FAMILY
    return found


def family_of(section: ModelSection) -> Family:
    """The family of ``[model]``."""
    return family(section.family)


def check_network(section: ModelSection) -> None:
    """Refuse a ``[model]`` that its family can't build, with a ``ConfigError``."""
    if section.python is None:
        try:
            family_of(section).check(section)
        except ValueError as error:
            raise ConfigError(f"[model] {error}") from None


def build_decoder(section: ModelSection) -> Decoder:
    """The network of a family on the meta device."""
    check_network(section)
    with torch.device("meta"):
        return family_of(section).build(section)


@functools.lru_cache(maxsize=16)
def shapes(section: ModelSection) -> Mapping[str, tuple[int, ...]]:
    """The shape of every parameter, by our name; a user's own model is taken for one of ``family``."""
    model = build_decoder(section.model_copy(update={"python": None}))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def stored_tensors(section: ModelSection) -> list[Stored]:
    """Every tensor of a model in the order of its layers, as ``transformers`` names and stores it."""
    kind, known = family_of(section), shapes(section)
    names = {theirs: [ours] for theirs, ours in kind.outer_names.items()}
    for number in range(section.layers):
        for theirs, each in kind.block_names.items():
            names[f"{kind.block_prefix}.{number}.{theirs}"] = [f"blocks.{number}.{ours}" for ours in each]
    found = []
    for theirs, ours in names.items():
        for suffix in ("weight", "bias"):
            full = [f"{each}.{suffix}" for each in ours]
            parts = tuple(Part(name, known[name][0]) for name in full if name in known)
            if parts:
                matrix = len(known[parts[0].name]) == 2 and parts[0].name.startswith("blocks.")
                found.append(Stored(f"{theirs}.{suffix}", parts, transposed=kind.transposed and matrix))
    return found
