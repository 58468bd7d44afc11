"""The keys that recipes may have: looked up, and suggested where one is misspelt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from atoll.train.recipe.schema import Recipe

TOP_LEVEL = ("version", "name")

Path = tuple[str, ...]

# Other spellings of keys of [parallel].
AXIS_SPELLINGS = {"dp_replicate": "replicate", "dp_shard": "shard", "tp": "tensor", "pp": "pipeline", "cp": "context"}

# What other trainers call a key that has another meaning here, or other values.
OTHER_NAMES = {
    "batch_size": "train.global_batch",
    "global_batch_size": "train.global_batch",
    "gradient_accumulation_steps": "train.global_batch",
    "micro_batch_size": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "max_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "epochs": "train.steps",
    "max_length": "train.seq_len",
    "block_size": "train.seq_len",
    "gradient_checkpointing": "train.recompute",
    "eval_steps": "train.validate_every",
    "learning_rate": "optimizer.lr",
    "warmup_steps": "schedule.warmup",
    "lr_scheduler_type": "schedule.kind",
    "dataset": "data.path",
    "ddp": "parallel.replicate",
    "fsdp": "parallel.shard",
    "bf16": "precision.compute",
    "torch_compile": "compile.enabled",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "report_to": "metrics.trackers",
}


def flat(tree: Mapping[str, Any], where: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of nested tables, with its path."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, (*where, key))
        else:
            yield (*where, key), value


def sections() -> dict[str, type[BaseModel]]:
    """The model of every section, by name."""
    return {name: _models(field.annotation)[0] for name, field in Recipe.model_fields.items() if name not in TOP_LEVEL}


def field_of(path: Path) -> FieldInfo | None:
    """The field that ``("train", "steps")`` names; None where there is none."""
    models: list[type[BaseModel]] = [Recipe]
    field = None
    for part in path:
        field = models[0].model_fields.get(AXIS_SPELLINGS.get(part, part)) if models else None
        models = _models(field.annotation) if field is not None else []
    return field


def keys_in(table: Path) -> list[str]:
    """The keys of a table, such as ``("metrics", "profile")``."""
    field = field_of(table)
    return [key for model in _models(field.annotation) for key in model.model_fields] if field is not None else []


def named(key: str) -> list[str]:
    """``train.steps`` of ``steps``, or of the name that another trainer has for it."""
    found = [f"{section}.{key}" for section in sections() if key in keys_in((section,))]
    other = {**OTHER_NAMES, **{short: f"parallel.{axis}" for short, axis in AXIS_SPELLINGS.items()}}.get(key)
    return found or ([other] if other is not None else [])


def meant(key: str, table: Path = ()) -> list[str]:
    """The keys that an unknown one in ``table``, or outside every section, may stand for."""
    if found := named(key):
        return found
    if table:
        return [".".join((*table, near)) for near in get_close_matches(key, keys_in(table), 1)]
    every = [each for section in sections() for each in keys_in((section,))]
    return [full for near in get_close_matches(key, every, 1) for full in named(near)]


def title(path: Path) -> str:
    """``[train] steps``, ``[model] rope_scaling.factor``, ``[model]``; ``name``."""
    return path[0] if path[0] in TOP_LEVEL else f"[{path[0]}] {'.'.join(path[1:])}".rstrip()


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Tables inside an annotation, those in lists included."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in get_args(annotation) for model in _models(each)]
