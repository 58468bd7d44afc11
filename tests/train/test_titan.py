"""TOML files of TorchTitan 0.2, read as recipes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.core.errors import ConfigError
from atoll.train.models.registry import parameter_count
from atoll.train.recipe.durations import Duration
from atoll.train.recipe.load import load_recipe
from atoll.train.recipe.titan import is_titan

# Every section that 0.2's own files have, with values that are not the defaults.
FULL = """
[job]
dump_folder = "./out"
description = "a run"

[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100

[metrics]
log_freq = 10
enable_tensorboard = true
save_tb_folder = "tb"
enable_wandb = true

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = ["quantize.linear.float8"]

[optimizer]
name = "AdamW"
lr = 2e-4
beta2 = 0.99
eps = 1e-9
implementation = "fused"

[lr_scheduler]
warmup_steps = 20
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.1

[training]
local_batch_size = 2
seq_len = 8192
max_norm = 0.5
steps = 1000
dataset = "c4"
mixed_precision_param = "bfloat16"

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "never"
tensor_parallel_degree = 4
enable_async_tensor_parallel = false
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
context_parallel_degree = 1

[checkpoint]
enable = true
folder = "checkpoint"
interval = 50
keep_latest_k = 3
last_save_model_only = false
async_mode = "async"

[activation_checkpoint]
mode = "full"
selective_ac_option = "op"

[compile]
enable = true
components = ["model", "loss"]

[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output", "attention.wq"]

[validation]
enable = true
dataset = "c4_validation"
dataset_path = "held.txt"
freq = 25
steps = 10

[comm]
init_timeout_seconds = 300
train_timeout_seconds = 90

[debug]
seed = 7
"""


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_section_is_read(workdir):
    (workdir / "big.toml").write_text(FULL)
    loaded = load_recipe("big.toml", ["--train.steps", "500"], world_size=32)
    recipe = loaded.recipe
    assert recipe.name == "big"
    assert recipe.model == load_recipe("llama3_8b").recipe.model
    data, train, parallel = recipe.data, recipe.train, recipe.parallel
    assert (data.path, data.subset, data.streaming) == ("hf://allenai/c4", "en", True)
    assert (data.tokenizer, data.validation) == ("./assets/hf/Llama-3.1-8B", "held.txt")
    assert (train.steps, train.seq_len, train.output_dir, train.seed) == (Duration(500), 8192, "./out", 7)
    # 32 ranks / (2 stages × 4 tensor) = 4 data ranks of 2 sequences; a pipeline takes them one at a time.
    assert (train.global_batch, train.micro_batch, train.recompute) == (8, 1, "full")
    assert (train.validate_every, train.validate_batches, train.hang_timeout_s) == (Duration(25), 10, 90.0)
    assert (parallel.replicate, parallel.shard, parallel.tensor, parallel.pipeline, parallel.context) == (
        2,
        -1,
        4,
        2,
        1,
    )
    assert (parallel.pipeline_schedule, parallel.reshard_after_forward) == ("interleaved", False)
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.max_grad_norm) == (2e-4, (0.9, 0.99), 1e-9, 0.5)
    assert (schedule.kind, schedule.warmup, schedule.decay, schedule.floor) == ("wsd", Duration(20), Duration(400), 0.1)
    precision, checkpoint = recipe.precision, recipe.checkpoint
    assert (precision.compute, precision.float8, precision.float8_skip) == (
        "bf16",
        "tensorwise",
        ["head", "attention.q"],
    )
    assert (checkpoint.every, checkpoint.keep, checkpoint.asynchronous) == (Duration(50), 3, True)
    assert checkpoint.path == "./out/checkpoint"
    assert recipe.compile.enabled
    assert recipe.metrics.trackers == ["tensorboard", "wandb"]
    assert recipe.metrics.profile is not None
    assert (recipe.metrics.profile.start, recipe.metrics.profile.steps) == (99, 1)


def test_each_key_without_counterpart_has_a_line(workdir):
    (workdir / "big.toml").write_text(FULL)
    notes = load_recipe("big.toml", world_size=32).notes
    assert notes[0] == "big.toml: [training] local_batch_size: 2 on 4 data ranks: [train] global_batch = 8"
    assert {note.removesuffix(": no counterpart, left out").removeprefix("big.toml: ") for note in notes[1:]} == {
        "[job] description",
        "[profiling] save_traces_folder",
        "[metrics] log_freq",
        "[metrics] save_tb_folder",
        "[optimizer] implementation",
        "[parallelism] enable_async_tensor_parallel",
        "[checkpoint] last_save_model_only",
        "[activation_checkpoint] selective_ac_option",
        "[compile] components",
        "[quantize.linear.float8] enable_fsdp_float8_all_gather",
        "[comm] init_timeout_seconds",
    }


def test_keys_left_out_have_its_defaults():
    recipe = load_recipe({"training": {"global_batch_size": 64}, "model": {"flavor": "8B"}}).recipe
    assert (recipe.train.steps, recipe.train.seq_len, recipe.train.global_batch) == (Duration(10_000), 2048, 64)
    assert (recipe.train.micro_batch, recipe.train.recompute) == (8, "selective")
    assert (recipe.optimizer.lr, recipe.schedule.kind, recipe.schedule.warmup) == (8e-4, "linear", Duration(200))
    assert (recipe.schedule.floor, recipe.parallel.shard, recipe.parallel.replicate) == (0.0, -1, 1)
    assert (recipe.checkpoint.every, recipe.checkpoint.at_end, recipe.compile.enabled) == (None, False, False)
    assert (recipe.precision.compute, recipe.precision.float8) == ("auto", "none")


@pytest.mark.parametrize(
    ("name", "flavor", "billions"),
    [
        ("llama3", "1B", 1.236),
        ("llama3", "8B_flex", 8.030),
        ("llama3", "405B", 405.853),
        ("qwen3", "0.6B", 0.596),
        ("qwen3", "1.7B", 1.721),
        ("qwen3", "4B", 4.022),
        ("qwen3", "14B", 14.768),
        ("qwen3", "32B", 32.762),
    ],
)
def test_flavors(name, flavor, billions):
    loaded = load_recipe({"training": {}, "model": {"name": name, "flavor": flavor}})
    assert parameter_count(loaded.recipe.model) / 1e9 == pytest.approx(billions, abs=6e-4)
    assert any("[model] flavor" in note for note in loaded.notes) == (flavor == "8B_flex")


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_debug_flavors_build(name):
    model = load_recipe({"training": {}, "model": {"name": name}}).recipe.model
    assert model.vocab_size == 2048
    assert parameter_count(model) < 40e6


def test_older_spellings():
    """Those of 0.1, which many files still have."""
    old = """
    [model]
    flavor = "70B"
    tokenizer_path = "tok"
    converters = "float8"
    [training]
    batch_size = 4
    compile = true
    seed = 3
    [lr_scheduler]
    lr_min = 0.2
    [checkpoint]
    enable_checkpoint = true
    keep_latest_k = 0
    interval = 5
    [float8]
    filter_fqns = "output,wq"
    recipe_name = "rowwise_with_gw_hp"
    [validation]
    enabled = true
    """
    loaded = load_recipe(tomllib.loads(old), world_size=2)
    recipe = loaded.recipe
    assert (recipe.data.tokenizer, recipe.train.global_batch, recipe.train.seed) == ("tok", 8, 3)
    assert (recipe.compile.enabled, recipe.schedule.floor) == (True, 0.2)
    assert (recipe.checkpoint.every, recipe.checkpoint.keep_every) == (Duration(5), Duration(5))
    assert (recipe.precision.float8, recipe.precision.float8_skip) == ("rowwise", ["head", "q"])
    text = "\n".join(loaded.notes)
    assert "[float8] recipe_name: 'rowwise_with_gw_hp' has no counterpart, 'rowwise' is used" in text
    assert "[validation] dataset: 'c4_validation' has no counterpart: add --data.validation" in text


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"optimizer": {"name": "Adam"}}, "[optimizer] name: 'Adam' has no counterpart, 'adamw' is used"),
        ({"training": {"dataset": "mine"}}, "[training] dataset: 'mine' is not a dataset that Atoll knows by name"),
        (
            {"parallelism": {"pipeline_parallel_schedule": "DualPipeV"}},
            "'DualPipeV' has no counterpart, '1f1b' is used",
        ),
        (
            {"activation_checkpoint": {"mode": "memory_budget"}},
            "mode: 'memory_budget' has no counterpart, 'auto' is used",
        ),
        (
            {"model": {"converters": ["quantize.linear.mx"]}},
            "[model] converters: 'quantize.linear.mx' has no counterpart",
        ),
        ({"checkpoint": {"initial_load_path": "x"}}, "[checkpoint] initial_load_path: Atoll can't read TorchTitan's"),
        (
            {"lr_scheduler": {"decay_type": "cosine", "decay_ratio": 0.1}},
            "'cosine' at the end of a run has no counterpart",
        ),
        ({"mine": {"a": {"b": 1}}}, "[mine.a] b: no counterpart, left out"),
    ],
)
def test_what_is_left_out_is_said(tree, words):
    notes = load_recipe({"job": {}, **tree}).notes
    assert any(words in note for note in notes), notes


def test_published_weights_to_start_from():
    start = {"initial_load_path": "weights", "initial_load_in_hf": True}
    assert load_recipe({"job": {}, "checkpoint": start}).recipe.model.init == "weights"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (
            {"model": {"name": "deepseek_v3"}},
            "[model] name = 'deepseek_v3': of TorchTitan's models Atoll has llama3 and qwen3",
        ),
        ({"model": {"flavor": "80B"}}, "[model] flavor = '80B' is not a llama3 that Atoll has: did you mean '8B'?"),
        ({"training": {"steps": "many"}}, "[training] steps = 'many': expected a value such as 10000"),
        ({"training": {"steps": True}}, "[train] steps: True is not a duration"),
        ({"checkpoint": {"enable": 1}}, "[checkpoint] enable = 1: expected a value such as False"),
        ({"lr_scheduler": {"decay_ratio": "all"}}, "[lr_scheduler] decay_ratio = 'all': expected a value such as 0.0"),
        ({"parallelism": {"tensor_parallel_degree": 0}}, "[parallel]: tensor = 0: expected 1 or more"),
        ({"training": {"seq_len": -1}}, "[train] seq_len = -1 should be greater than 0"),
    ],
)
def test_what_cannot_be_is_refused(tree, words):
    with pytest.raises(ConfigError) as caught:
        load_recipe({"job": {}, **tree})
    assert words in str(caught.value)


def test_what_is_titan():
    assert is_titan({"model": {}, "training": {}})
    assert not is_titan({"model": {}, "train": {}})
    # A mixture of both is ours, with mistakes that the schema tells.
    assert not is_titan({"train": {}, "training": {}})
    assert not is_titan({"base": "llama3_8b", "training": {}})
    assert not is_titan({"model": {}, "optimizer": {}, "metrics": {}, "checkpoint": {}})


def test_a_recipe_may_grow_from_one(workdir):
    (workdir / "big.toml").write_text(FULL)
    grown = load_recipe({"base": "big.toml", "train": {"steps": 5}}, world_size=32)
    assert grown.recipe.train.steps == Duration(5)
    assert grown.recipe.train.seq_len == 8192
    assert grown.notes[0].startswith("big.toml: [training] local_batch_size")


@pytest.mark.parametrize(
    ("overrides", "decay"),
    [
        ([], Duration(800)),
        (["--train.steps", "100"], Duration(80)),
        (["--train.steps", "100", "--schedule.warmup", "50"], Duration(50)),
        (["--train.steps", "2ep"], Duration(1.6, "ep")),
        (["--train.tokens", "1e9"], Duration(8e8, "tok")),
        (["--train.steps", "100", "--schedule.decay", "3"], Duration(3)),
        (["--train.steps", "100", "--schedule.kind", "cosine"], None),
    ],
)
def test_the_decay_is_a_ratio_of_the_run_that_there_will_be(workdir, overrides, decay):
    (workdir / "big.toml").write_text(FULL)
    assert load_recipe("big.toml", overrides).recipe.schedule.decay == decay


def test_the_decay_is_a_ratio_under_a_recipe_that_has_it_as_a_base(workdir):
    (workdir / "big.toml").write_text(FULL)
    (workdir / "short.toml").write_text('base = "big.toml"\n[train]\nsteps = 200\n')
    assert load_recipe("short.toml").recipe.schedule.decay == Duration(160)


@pytest.mark.parametrize(
    ("flags", "ranks"), [((), 1), (("--gpus", "H100:8"), 8), (("--gpus", "L4", "--nodes", "2"), 2)]
)
def test_the_batch_of_a_rank_counts_the_gpus_that_the_command_asks_for(workdir, monkeypatch, flags, ranks):
    (workdir / "small.toml").write_text('[model]\nflavor = "debugmodel"\n[training]\nlocal_batch_size = 2\n')
    monkeypatch.setattr("atoll.cli.train.local_gpus", tuple)
    monkeypatch.setattr("atoll.cli.train._dryrun", lambda asked, _: seen.append(asked.loaded.recipe.train.global_batch))
    seen: list[int] = []
    result = CliRunner().invoke(app, ["train", "small.toml", "--dryrun", *flags])
    assert (result.exit_code, seen) == (0, [2 * ranks]), result.output
