"""Recipes in the format of TorchTitan 0.2, read as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest
from atoll.train.recipe.durations import Duration
from atoll.train.recipe.files import shipped_model
from atoll.train.recipe.keys import flat

# Sections that only TorchTitan's files have.
_ITS_OWN = {"job", "training", "lr_scheduler", "parallelism", "activation_checkpoint", "profiling", "quantize", "comm"}
_OURS = {"train", "data", "schedule", "parallel", "precision", "objective", "base", "version"}

# Flavors as shipped recipes, and what differs from them.
_FLAVORS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "llama3": {
        "debugmodel": (
            "llama3_8b",
            {"layers": 6, "dim": 256, "heads": 16, "kv_heads": 16, "hidden_dim": 768, "vocab_size": 2048},
        ),
        "1B": ("llama3_1b", {}),
        "3B": ("llama3_3b", {}),
        "8B": ("llama3_8b", {}),
        "70B": ("llama3_70b", {}),
        "405B": ("llama3_405b", {}),
    },
    "qwen3": {
        "debugmodel": ("qwen3_0.6b", {"layers": 8, "dim": 256, "vocab_size": 2048}),
        "0.6B": ("qwen3_0.6b", {}),
        "1.7B": ("qwen3_0.6b", {"dim": 2048, "hidden_dim": 6144}),
        "4B": ("qwen3_0.6b", {"layers": 36, "dim": 2560, "heads": 32, "hidden_dim": 9728}),
        "8B": ("qwen3_8b", {}),
        "14B": ("qwen3_8b", {"layers": 40, "dim": 5120, "heads": 40, "hidden_dim": 17408}),
        "32B": ("qwen3_32b", {}),
    },
}

_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zbv",
}
# Names of its modules that [quantize.linear.float8] filter_fqns leaves in bf16, and of ours.
_MODULES = {"output": "head", "wq": "q", "wk": "k", "wv": "v", "wo": "o", "w1": "gate", "w2": "down", "w3": "up"}
_DATASETS: dict[str, dict[str, Any]] = {
    "c4": {"path": "hf://allenai/c4", "subset": "en", "streaming": True},
    "c4_test": {"path": "tests/assets/c4_test"},
}


def is_titan(tree: Mapping[str, Any]) -> bool:
    """Whether a tree of TOML tables is TorchTitan's rather than ours, by its sections."""
    return bool(_ITS_OWN & tree.keys()) and not _OURS & tree.keys()


def from_titan(tree: Mapping[str, Any], where: str, world_size: int = 1) -> tuple[dict[str, Any], list[str]]:
    """A tree as our own TOML would give it, and a note for each key that has no counterpart.

    Keys that the file leaves out have TorchTitan's defaults, not ours.

    Args:
        tree: the tables of the file.
        where: the file's name, for messages.
        world_size: ranks there will be: without ``global_batch_size`` the batch is ``local_batch_size`` for each of
            those that read data.

    Raises:
        ConfigError: the model is none that Atoll has, or a value is of a kind that can't be read.
    """
    keys = _Keys(tree, where)
    parallel = _parallel(keys)
    train = _train(keys, parallel, world_size)
    model, data = _model(keys), _data(keys)
    ours = {
        "model": model,
        "data": data,
        "train": train,
        "optimizer": _optimizer(keys),
        "schedule": _schedule(keys),
        "parallel": parallel,
        "precision": _precision(keys),
        "compile": {"enabled": keys.take("compile", "enable", keys.take("training", "compile", False))},
        "checkpoint": _checkpoint(keys, train["output_dir"], model),
        "metrics": _metrics(keys),
    }
    _validation(keys, train, data)
    return ours, [*keys.notes, *keys.left_out()]


class _Keys:
    """The file's keys; those that nobody took have no counterpart."""

    def __init__(self, tree: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.values = _values(tree)
        self.notes: list[str] = []
        self.taken: set[tuple[str, str]] = set()

    def take(self, section: str, key: str, default: Any = None) -> Any:
        """The value of a key. Raises ConfigError where it is of another kind than the default."""
        self.taken.add((section, key))
        value = self.values.get((section, key), default)
        kinds: dict[type, tuple[tuple[type, ...], str]] = {
            bool: ((bool,), "true or false"),
            int: ((int,), "a whole number"),
            float: ((int, float), "a number"),
            str: ((str,), "text"),
            list: ((list, str), "a list"),
        }
        accepted, words = kinds.get(type(default), ((object,), ""))
        if not isinstance(value, accepted) or (isinstance(value, bool) and type(default) in (int, float)):
            raise ConfigError(f"{self.where}: [{section}] {key} = {value!r}: expected {words}")
        if isinstance(default, list) and isinstance(value, str):
            return [part for part in value.split(",") if part]
        return value

    def note(self, section: str, key: str, text: str) -> None:
        """Tell the user about a key."""
        self.notes.append(f"{self.where}: [{section}] {key}: {text}")

    def choose(self, section: str, key: str, default: str, choices: Mapping[str, Any], otherwise: Any) -> Any:
        """What one of a few words stands for; another word has no counterpart."""
        value = self.take(section, key, default)
        if value in choices:
            return choices[value]
        self.note(section, key, f"{value!r} has no counterpart, {otherwise!r} is used")
        return otherwise

    def left_out(self) -> Iterator[str]:
        """A note for each key that was not taken."""
        for section, key in self.values:
            if (section, key) not in self.taken:
                yield f"{self.where}: [{section}] {key}: no counterpart, left out"


def _values(tree: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """By section, dotted where it is nested, and key."""
    return {(".".join(path[:-1]), path[-1]): value for path, value in flat(tree)}


def _model(keys: _Keys) -> dict[str, Any]:
    name, flavor = keys.take("model", "name", "llama3"), keys.take("model", "flavor", "debugmodel")
    if name not in _FLAVORS:
        raise ConfigError(f"{keys.where}: [model] name = {name!r}: of TorchTitan's models Atoll has llama3 and qwen3")
    # 8B_flex, debugmodel_varlen_attn, ...: the same network with another attention kernel.
    size, _, kernel = flavor.partition("_")
    if size not in _FLAVORS[name]:
        hint = nearest(flavor, _FLAVORS[name]) or f": expected {', '.join(_FLAVORS[name])}"
        raise ConfigError(f"{keys.where}: [model] flavor = {flavor!r} is not a {name} that Atoll has{hint}")
    if kernel:
        keys.note("model", "flavor", f"{size} is used: Atoll chooses the attention kernel itself")
    shipped, changes = _FLAVORS[name][size]
    return shipped_model(shipped) | changes


def _data(keys: _Keys) -> dict[str, Any]:
    name, path = keys.take("training", "dataset", "c4_test"), keys.take("training", "dataset_path")
    data = {"path": path} if path is not None else dict(_DATASETS.get(name, {}))
    if not data:
        keys.note("training", "dataset", f"{name!r} is not a dataset that Atoll knows by name: add --data.path")
    tokenizer = keys.take("model", "tokenizer_path")
    data["tokenizer"] = keys.take("model", "hf_assets_path", tokenizer)
    return {key: value for key, value in data.items() if value is not None}


def _train(keys: _Keys, parallel: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    local = keys.take("training", "local_batch_size", keys.take("training", "batch_size", 8))
    given = keys.take("training", "global_batch_size", -1)
    piece = keys.take("parallelism", "pipeline_parallel_microbatch_size", 1)
    if given < 0:
        ranks = _data_ranks(parallel, world_size)
        given = local * ranks
        keys.note("training", "local_batch_size", f"{local} on {ranks} data ranks: [train] global_batch = {given}")
    modes = {word: word for word in ("none", "selective", "full")}
    train = {
        "steps": keys.take("training", "steps", 10_000),
        "seq_len": keys.take("training", "seq_len", 2048),
        "global_batch": given,
        "micro_batch": piece if parallel["pipeline"] > 1 else local,
        "recompute": keys.choose("activation_checkpoint", "mode", "selective", modes, otherwise="auto"),
        "output_dir": keys.take("job", "dump_folder", "./outputs"),
        "deterministic": keys.take("debug", "deterministic", keys.take("training", "deterministic", False)),
        "seed": keys.take("debug", "seed", keys.take("training", "seed")),
        "hang_timeout_s": keys.take("comm", "train_timeout_seconds"),
    }
    return {key: value for key, value in train.items() if value is not None}


def _data_ranks(parallel: Mapping[str, Any], world_size: int) -> int:
    sizes = {axis: parallel[axis] for axis in ("replicate", "shard", "tensor", "pipeline", "context")}
    if sizes["shard"] == -1:
        others = sizes["replicate"] * sizes["tensor"] * sizes["pipeline"] * sizes["context"]
        sizes["shard"] = max(1, world_size // max(1, others))
    return int(sizes["replicate"] * sizes["shard"])


def _optimizer(keys: _Keys) -> dict[str, Any]:
    return {
        "kind": keys.choose("optimizer", "name", "AdamW", {"AdamW": "adamw"}, otherwise="adamw"),
        "lr": keys.take("optimizer", "lr", 8e-4),
        "betas": [keys.take("optimizer", "beta1", 0.9), keys.take("optimizer", "beta2", 0.95)],
        "eps": keys.take("optimizer", "eps", 1e-8),
        "weight_decay": keys.take("optimizer", "weight_decay", 0.1),
        "max_grad_norm": keys.take("training", "max_norm", 1.0),
    }


def _schedule(keys: _Keys) -> dict[str, Any]:
    """Decay right after the warm-up, or over the last part of the run where ``decay_ratio`` is given.

    How long that part is, ``decay_length`` tells once the length of the run is final.
    """
    kind = keys.choose(
        "lr_scheduler", "decay_type", "linear", {"linear": "linear", "cosine": "cosine"}, otherwise="linear"
    )
    ratio = keys.take("lr_scheduler", "decay_ratio")
    floor = keys.take("lr_scheduler", "min_lr_factor", keys.take("lr_scheduler", "lr_min", 0.0))
    schedule = {"kind": kind, "warmup": keys.take("lr_scheduler", "warmup_steps", 200), "floor": floor}
    if ratio is None:
        return schedule
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise ConfigError(f"{keys.where}: [lr_scheduler] decay_ratio = {ratio!r}: expected a number")
    if kind != "linear":
        keys.note("lr_scheduler", "decay_type", f"{kind!r} at the end of a run has no counterpart, 'wsd' is used")
    return {**schedule, "kind": "wsd"}


def decay_ratio(tree: Mapping[str, Any]) -> float | None:
    """The share of the run over which a file of TorchTitan's decays; None where it doesn't say."""
    ratio = _values(tree).get(("lr_scheduler", "decay_ratio"))
    return None if ratio is None else float(ratio)


def decay_length(ratio: float, length: Duration, warmup: Duration) -> Duration:
    """That share of a run of ``length``; in steps at most what the warm-up leaves, as TorchTitan has it."""
    if length.unit != "step":
        return Duration(length.value * ratio, length.unit)
    left = length.value - warmup.value if warmup.unit == "step" else length.value
    return Duration(max(0, min(round(length.value * ratio), left)))


def _parallel(keys: _Keys) -> dict[str, Any]:
    def degree(axis: str, default: int = 1) -> int:
        return int(keys.take("parallelism", f"{axis}_degree", default))

    schedule = keys.take("parallelism", "pipeline_parallel_schedule", "1F1B")
    ours: dict[str, Any] = {
        "replicate": degree("data_parallel_replicate"),
        "shard": degree("data_parallel_shard", -1),
        "tensor": degree("tensor_parallel"),
        "pipeline": degree("pipeline_parallel"),
        "context": degree("context_parallel"),
    }
    if schedule.lower() in _SCHEDULES:
        ours["pipeline_schedule"] = _SCHEDULES[schedule.lower()]
    else:
        keys.note("parallelism", "pipeline_parallel_schedule", f"{schedule!r} has no counterpart, '1f1b' is used")
    policies = {"default": None, "always": True, "never": False}
    reshard = keys.choose("parallelism", "fsdp_reshard_after_forward", "default", policies, otherwise=None)
    return ours | ({"reshard_after_forward": reshard} if reshard is not None else {})


def _precision(keys: _Keys) -> dict[str, Any]:
    precision: dict[str, Any] = {}
    if ("training", "mixed_precision_param") in keys.values:
        types = {"bfloat16": "bf16", "float32": "fp32"}
        precision["compute"] = keys.choose("training", "mixed_precision_param", "bfloat16", types, otherwise="auto")
    types = {"bfloat16": "bf16", "float32": "fp32"}
    precision["reduce"] = keys.choose("training", "mixed_precision_reduce", "float32", types, otherwise="fp32")
    for converter in keys.take("model", "converters", []):
        if converter not in ("float8", "quantize.linear.float8"):
            keys.note("model", "converters", f"{converter!r} has no counterpart, left out")
            continue
        section = converter
        recipe = keys.take(section, "recipe_name") or "tensorwise"
        if recipe not in ("tensorwise", "rowwise"):
            keys.note(section, "recipe_name", f"{recipe!r} has no counterpart, 'rowwise' is used")
            recipe = "rowwise"
        precision["float8"] = recipe
        precision["float8_skip"] = [_module(name) for name in keys.take(section, "filter_fqns", [])]
        precision["float8_emulate"] = keys.take(section, "emulate", False)
    return precision


def _module(name: str) -> str:
    return ".".join(_MODULES.get(part, part) for part in name.split("."))


def _checkpoint(keys: _Keys, output_dir: str, model: dict[str, Any]) -> dict[str, Any]:
    enabled = keys.take("checkpoint", "enable", keys.take("checkpoint", "enable_checkpoint", False))
    every = keys.take("checkpoint", "interval", 500)
    keep = keys.take("checkpoint", "keep_latest_k", 10)
    mode = keys.take("checkpoint", "async_mode", "disabled")
    folder = keys.take("checkpoint", "folder", "checkpoint")
    start = keys.take("checkpoint", "initial_load_path")
    if start is not None and keys.take("checkpoint", "initial_load_in_hf", False):
        model["init"] = start
    elif start is not None:
        keys.note("checkpoint", "initial_load_path", "Atoll can't read TorchTitan's checkpoints: export it first")
    if not enabled:
        return {"at_end": False}
    kept: dict[str, Any] = {"keep": keep} if keep else {"keep_every": every}
    return {"every": every, "asynchronous": mode != "disabled", "path": f"{output_dir}/{folder}", **kept}


def _metrics(keys: _Keys) -> dict[str, Any]:
    trackers = [name for name in ("tensorboard", "wandb") if keys.take("metrics", f"enable_{name}", False)]
    metrics: dict[str, Any] = {"trackers": trackers}
    every, active = keys.take("profiling", "profile_freq", 10), keys.take("profiling", "profiler_active", 1)
    if keys.take("profiling", "enable_profiling", False):
        metrics["profile"] = {"start": max(1, every - active), "steps": active}
    return metrics


def _validation(keys: _Keys, train: dict[str, Any], data: dict[str, Any]) -> None:
    take: Callable[..., Any] = keys.take
    enabled = take("validation", "enable", take("validation", "enabled", False))
    name, path = take("validation", "dataset", "c4_validation"), take("validation", "dataset_path")
    every, batches = take("validation", "freq", 10), take("validation", "steps", -1)
    if not enabled:
        return
    if path is None:
        keys.note(
            "validation", "dataset", f"{name!r} has no counterpart: add --data.validation with files or a fraction"
        )
        return
    data["validation"] = path
    train["validate_every"] = every
    if batches > 0:
        train["validate_batches"] = batches
