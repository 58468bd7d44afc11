"""Recipes in the format of TorchTitan 0.2, read as ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest
from atoll.train.recipe.durations import Duration
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

# Keys of the same meaning: its key and, after "or", the older one; its default, if it has one; our key.
_SAME: tuple[tuple[str, Any, str], ...] = (
    ("job.dump_folder", "./outputs", "train.output_dir"),
    ("training.steps", 10_000, "train.steps"),
    ("training.seq_len", 2048, "train.seq_len"),
    ("training.max_norm", 1.0, "optimizer.max_grad_norm"),
    ("debug.deterministic or training.deterministic", False, "train.deterministic"),
    ("debug.seed or training.seed", None, "train.seed"),
    ("comm.train_timeout_seconds", None, "train.hang_timeout_s"),
    ("model.hf_assets_path or model.tokenizer_path", None, "data.tokenizer"),
    ("optimizer.lr", 8e-4, "optimizer.lr"),
    ("optimizer.eps", 1e-8, "optimizer.eps"),
    ("optimizer.weight_decay", 0.1, "optimizer.weight_decay"),
    ("lr_scheduler.warmup_steps", 200, "schedule.warmup"),
    ("lr_scheduler.min_lr_factor or lr_scheduler.lr_min", 0.0, "schedule.floor"),
    ("parallelism.data_parallel_replicate_degree", 1, "parallel.replicate"),
    ("parallelism.data_parallel_shard_degree", -1, "parallel.shard"),
    ("parallelism.tensor_parallel_degree", 1, "parallel.tensor"),
    ("parallelism.pipeline_parallel_degree", 1, "parallel.pipeline"),
    ("parallelism.context_parallel_degree", 1, "parallel.context"),
    ("compile.enable or training.compile", False, "compile.enabled"),
)
_FORMATS = {"bfloat16": "bf16", "float32": "fp32"}
_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zbv",
}
# Keys whose words have other names here: its key, its default, our key, our words, and the one for any other of its.
_WORDS: tuple[tuple[str, str | None, str, dict[str, Any], str | None], ...] = (
    ("optimizer.name", "AdamW", "optimizer.kind", {"adamw": "adamw"}, "adamw"),
    ("lr_scheduler.decay_type", "linear", "schedule.kind", {"linear": "linear", "cosine": "cosine"}, "linear"),
    (
        "activation_checkpoint.mode",
        "selective",
        "train.recompute",
        {word: word for word in ("none", "selective", "full")},
        "auto",
    ),
    ("training.mixed_precision_param", None, "precision.compute", _FORMATS, "auto"),
    ("training.mixed_precision_reduce", "float32", "precision.reduce", _FORMATS, "fp32"),
    ("parallelism.pipeline_parallel_schedule", "1F1B", "parallel.pipeline_schedule", _SCHEDULES, "1f1b"),
    (
        "parallelism.fsdp_reshard_after_forward",
        "default",
        "parallel.reshard_after_forward",
        {"default": None, "always": True, "never": False},
        None,
    ),
)
# Names of its modules that [quantize.linear.float8] filter_fqns leaves in bf16, and of ours.
_MODULES = {"output": "head", "wq": "q", "wk": "k", "wv": "v", "wo": "o", "w1": "gate", "w2": "down", "w3": "up"}
_DATASETS: dict[str, dict[str, Any]] = {
    "c4": {"path": "hf://allenai/c4", "subset": "en", "streaming": True},
    "c4_test": {"path": "tests/assets/c4_test"},
}


@dataclass(frozen=True, slots=True)
class FromTitan:
    """A file of TorchTitan's, as our own TOML would give it.

    Attributes:
        model: the shipped recipe whose network it has, but for what ``tree`` says of ``[model]``.
        notes: a line for each key that has no counterpart.
        decay_ratio: the share of the run over which the learning rate decays, where it says so.
    """

    tree: dict[str, Any]
    model: str
    notes: list[str]
    decay_ratio: float | None


def is_titan(tree: Mapping[str, Any]) -> bool:
    """Whether a tree of TOML tables is TorchTitan's rather than ours, by its sections."""
    return bool(_ITS_OWN & tree.keys()) and not _OURS & tree.keys()


def from_titan(tree: Mapping[str, Any], where: str, world_size: int = 1) -> FromTitan:
    """Translate a file. Keys that it leaves out have TorchTitan's defaults, not ours.

    Args:
        tree: the tables of the file.
        where: the file's name, for messages.
        world_size: ranks there will be: without ``global_batch_size`` the batch is ``local_batch_size`` for each of
            those that read data.

    Raises:
        ConfigError: the model is none that Atoll has, or a value is of another kind than TorchTitan's default.
    """
    keys = _Keys(tree, where)
    ours: dict[str, dict[str, Any]] = defaultdict(dict)

    def put(place: str, value: Any) -> None:
        section, _, key = place.partition(".")
        if value is not None:
            ours[section][key] = value

    for theirs, default, place in _SAME:
        put(place, keys.take(theirs, default))
    for theirs, word, place, words, otherwise in _WORDS:
        if (value := keys.take(theirs, word)) is not None:
            if (known := str(value).lower()) not in words:
                keys.note(theirs, f"{value!r} has no counterpart, {otherwise!r} is used")
            put(place, words.get(known, otherwise))
    ours["optimizer"]["betas"] = [keys.take("optimizer.beta1", 0.9), keys.take("optimizer.beta2", 0.95)]
    model, ours["model"] = _model(keys)
    _data(keys, ours["data"])
    _batch(keys, ours["train"], ours["parallel"], world_size)
    _float8(keys, ours["precision"])
    ours["checkpoint"] = _checkpoint(keys, ours)
    ours["metrics"] = _metrics(keys)
    _validation(keys, ours)
    ratio = _decay_ratio(keys, ours["schedule"])
    left_out = [f"{keys.title(key)}: no counterpart, left out" for key in keys.values if key not in keys.taken]
    return FromTitan(dict(ours), model, [*keys.notes, *left_out], ratio)


class _Keys:
    """The file's keys, by section and key with a dot between; those that nobody took have no counterpart."""

    def __init__(self, tree: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.values = {".".join(path): value for path, value in flat(tree)}
        self.notes: list[str] = []
        self.taken: set[str] = set()

    def take(self, names: str, default: Any = None) -> Any:
        """The value of a key, or of its older name. Raises ConfigError where it is of another kind than the default."""
        every = names.split(" or ")
        self.taken.update(every)
        name = next((each for each in every if each in self.values), every[0])
        value = self.values.get(name, default)
        if isinstance(default, list) and isinstance(value, str):
            value = [part for part in value.split(",") if part]
        kinds = (int, float) if isinstance(default, float) else type(default)
        if default is not None and not isinstance(value, kinds):
            raise ConfigError(f"{self.title(name)} = {value!r}: expected a value such as {default!r}")
        return value

    def title(self, name: str) -> str:
        """``big.toml: [training] steps``."""
        section, _, key = name.rpartition(".")
        return f"{self.where}: [{section}] {key}"

    def note(self, name: str, text: str) -> None:
        """Tell the user about a key."""
        self.notes.append(f"{self.title(name)}: {text}")


def _model(keys: _Keys) -> tuple[str, dict[str, Any]]:
    """The shipped recipe that has the network, and what differs from it."""
    name, flavor = keys.take("model.name", "llama3"), keys.take("model.flavor", "debugmodel")
    if name not in _FLAVORS:
        raise ConfigError(f"{keys.where}: [model] name = {name!r}: of TorchTitan's models Atoll has llama3 and qwen3")
    # 8B_flex, debugmodel_varlen_attn, ...: the same network with another attention kernel.
    size, _, kernel = flavor.partition("_")
    if size not in _FLAVORS[name]:
        hint = nearest(flavor, _FLAVORS[name]) or f": expected {', '.join(_FLAVORS[name])}"
        raise ConfigError(f"{keys.where}: [model] flavor = {flavor!r} is not a {name} that Atoll has{hint}")
    if kernel:
        keys.note("model.flavor", f"{size} is used: Atoll chooses the attention kernel itself")
    shipped, changes = _FLAVORS[name][size]
    return shipped, dict(changes)


def _data(keys: _Keys, data: dict[str, Any]) -> None:
    name, path = keys.take("training.dataset", "c4_test"), keys.take("training.dataset_path")
    if path is None and name not in _DATASETS:
        keys.note("training.dataset", f"{name!r} is not a dataset that Atoll knows by name: add --data.path")
    data.update({"path": path} if path is not None else _DATASETS.get(name, {}))


def _batch(keys: _Keys, train: dict[str, Any], parallel: Mapping[str, int], world_size: int) -> None:
    local = keys.take("training.local_batch_size or training.batch_size", 8)
    given = keys.take("training.global_batch_size", -1)
    piece = keys.take("parallelism.pipeline_parallel_microbatch_size", 1)
    if given < 0:
        ranks = parallel["replicate"] * parallel["shard"]
        if parallel["shard"] == -1:
            others = parallel["tensor"] * parallel["pipeline"] * parallel["context"]
            ranks = parallel["replicate"] * max(1, world_size // max(1, parallel["replicate"] * others))
        given = local * ranks
        keys.note("training.local_batch_size", f"{local} on {ranks} data ranks: [train] global_batch = {given}")
    train |= {"global_batch": given, "micro_batch": piece if parallel["pipeline"] > 1 else local}


def _decay_ratio(keys: _Keys, schedule: dict[str, Any]) -> float | None:
    """Without a ratio, the decay begins right after the warm-up."""
    if "lr_scheduler.decay_ratio" not in keys.values:
        return None
    if schedule["kind"] != "linear":
        note = f"{schedule['kind']!r} at the end of a run has no counterpart, 'wsd' is used"
        keys.note("lr_scheduler.decay_type", note)
    schedule["kind"] = "wsd"
    return float(keys.take("lr_scheduler.decay_ratio", 0.0))


def decay_length(ratio: float, length: Duration, warmup: Duration) -> Duration:
    """That share of a run of ``length``; in steps at most what the warm-up leaves, as TorchTitan has it."""
    if length.unit != "step":
        return Duration(length.value * ratio, length.unit)
    left = length.value - warmup.value if warmup.unit == "step" else length.value
    return Duration(max(0, min(round(length.value * ratio), left)))


def _float8(keys: _Keys, precision: dict[str, Any]) -> None:
    for converter in keys.take("model.converters", []):
        if converter not in ("float8", "quantize.linear.float8"):
            keys.note("model.converters", f"{converter!r} has no counterpart, left out")
            continue
        recipe = keys.take(f"{converter}.recipe_name") or "tensorwise"
        if recipe not in ("tensorwise", "rowwise"):
            keys.note(f"{converter}.recipe_name", f"{recipe!r} has no counterpart, 'rowwise' is used")
            recipe = "rowwise"
        precision["float8"] = recipe
        skipped = [name.split(".") for name in keys.take(f"{converter}.filter_fqns", [])]
        precision["float8_skip"] = [".".join(_MODULES.get(part, part) for part in name) for name in skipped]
        precision["float8_emulate"] = keys.take(f"{converter}.emulate", False)


def _checkpoint(keys: _Keys, ours: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    enabled = keys.take("checkpoint.enable or checkpoint.enable_checkpoint", False)
    every, keep = keys.take("checkpoint.interval", 500), keys.take("checkpoint.keep_latest_k", 10)
    mode, folder = keys.take("checkpoint.async_mode", "disabled"), keys.take("checkpoint.folder", "checkpoint")
    start, in_hf = keys.take("checkpoint.initial_load_path"), keys.take("checkpoint.initial_load_in_hf", False)
    if start is not None and in_hf:
        ours["model"]["init"] = start
    elif start is not None:
        keys.note("checkpoint.initial_load_path", "Atoll can't read TorchTitan's checkpoints: export it first")
    if not enabled:
        return {"at_end": False}
    kept: dict[str, Any] = {"keep": keep} if keep else {"keep_every": every}
    path = f"{ours['train']['output_dir']}/{folder}"
    return {"every": every, "asynchronous": mode != "disabled", "path": path, **kept}


def _metrics(keys: _Keys) -> dict[str, Any]:
    trackers = [name for name in ("tensorboard", "wandb") if keys.take(f"metrics.enable_{name}", False)]
    every, active = keys.take("profiling.profile_freq", 10), keys.take("profiling.profiler_active", 1)
    profile = {"start": max(1, every - active), "steps": active}
    return {"trackers": trackers} | ({"profile": profile} if keys.take("profiling.enable_profiling", False) else {})


def _validation(keys: _Keys, ours: Mapping[str, dict[str, Any]]) -> None:
    enabled = keys.take("validation.enable or validation.enabled", False)
    name, path = keys.take("validation.dataset", "c4_validation"), keys.take("validation.dataset_path")
    every, batches = keys.take("validation.freq", 10), keys.take("validation.steps", -1)
    if enabled and path is None:
        keys.note("validation.dataset", f"{name!r} has no counterpart: add --data.validation with files or a fraction")
    elif enabled:
        ours["data"]["validation"] = path
        ours["train"] |= {"validate_every": every, **({"validate_batches": batches} if batches > 0 else {})}
