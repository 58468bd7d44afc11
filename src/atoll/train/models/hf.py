"""The config.json of Hugging Face, to ``[model]`` and back. Nothing here reads or writes a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.core.errors import ConfigError
from atoll.train.models import families
from atoll.train.models.config_json import ConfigJson, Positive, checked, renamed
from atoll.train.models.family import family, family_of
from atoll.train.recipe.schema import ModelSection

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def section_from_hf(values: Mapping[str, Any], *, source: str = "config.json") -> ModelSection:
    """The network that a Hugging Face ``config.json`` describes.

    Raises:
        ConfigError: it is of an unknown architecture, lacks a dimension, or describes something that these models do
            not compute.
    """
    known = {kind: name for name in families.names() for kind in family(name).model_types}
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(
            f"{source}: model_type is {kind!r}; known are {', '.join(known)}; write another as [model] python"
        )
    for key in ("quantization_config", "compression_config"):
        if quantised := values.get(key):
            raise ConfigError(f"{source}: {key} = {quantised!r}: quantised weights are read from GGUF files only")
    found, config = family(known[kind]), ConfigJson(values, source)
    fields = found.read_config(config)
    # 0 says no more than that it is unknown.
    std = config.get("initializer_range", Positive, 0.02) if values.get("initializer_range") != 0 else 0.02
    section = checked(ModelSection, {**fields, "family": known[kind], "init_std": std}, source, found.config_keys)
    try:
        found.check(section)
    except ValueError as error:
        raise ConfigError(f"{source}: {renamed(str(error), found.config_keys)}") from None
    return section


def hf_config(section: ModelSection, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of a network, for transformers 4 and 5.

    Raises:
        ConfigError: ``transformers`` has no such network.
    """
    if section.python is not None:
        raise ConfigError(f"[model] python = {section.python!r}: transformers has no network of this name to export to")
    found = family_of(section)
    return {
        "architectures": [found.architecture],
        "model_type": found.model_types[0],
        "vocab_size": section.vocabulary,
        "tie_word_embeddings": section.tied,
        "initializer_range": section.std,
        "dtype": DTYPES[dtype],
        "torch_dtype": DTYPES[dtype],
        # Those of an imported model take their place.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **found.write_config(section),
    }
