"""Recipes: found, inherited, overridden, checked, compared, and the ones that ship."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from atoll.cli.recipes import recipes_app
from atoll.core.errors import ConfigError
from atoll.train.models.family import family_of
from atoll.train.models.registry import parameter_count
from atoll.train.recipe import keys
from atoll.train.recipe.compare import HARMLESS, diff, harmful, resolved_toml
from atoll.train.recipe.durations import Duration
from atoll.train.recipe.files import shipped_file, shipped_names
from atoll.train.recipe.load import load_recipe, require_complete
from atoll.train.recipe.schema import ModelSection, Recipe

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo2_32b": 32_234_279_936,
    "phi3_mini": 3_821_079_552,
    "smollm2_135m": 134_515_008,
    "gpt2_small": 124_439_808,
}
ALL = {"llama3_debug", "olmo2_debug", "gpt_mini", *PUBLISHED}


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(spec: Any, *overrides: str) -> Recipe:
    return load_recipe(spec, overrides, env={}).recipe


def refusal(spec: Any, *overrides: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(spec, overrides, env=env or {})
    text = str(caught.value)
    assert "pydantic" not in text.lower()
    assert "Input should" not in text
    return text


# ------------------------------------------------------------------------------------------------------ shipped
def closed_form(model: ModelSection) -> int:
    """Parameters by arithmetic, apart from the modules that `parameter_count` adds up."""
    dim, head, hidden = model.dim, model.size_of_head, family_of(model).hidden_dim(model)
    attention = 2 * dim * model.heads * head + 2 * dim * model.num_kv_heads * head
    if model.family == "gpt2":
        block = attention + 4 * dim + 2 * dim * hidden + hidden + dim + 4 * dim
        around = model.max_seq_len * dim + 2 * dim
    else:
        norms = {"qwen3": 2 * head, "olmo2": (model.heads + model.num_kv_heads) * head}
        block = attention + 3 * dim * hidden + 2 * dim + norms.get(model.family, 0)
        around = dim
    embeddings = model.vocabulary * dim * (1 if model.tied else 2)
    return embeddings + model.layers * block + around


def test_all_are_shipped():
    assert set(shipped_names()) == ALL


@pytest.mark.parametrize("name", sorted(ALL))
def test_shipped_recipe_has_the_published_size_everywhere(name):
    model = recipe(name).model
    count = closed_form(model)
    assert count == PUBLISHED.get(name, count)
    assert parameter_count(model) == count
    # `atoll recipes ls` reads it from there.
    assert f"{count:,} parameters" in shipped_file(name).read_text().split("\n", 1)[0]


@pytest.mark.parametrize("name", sorted(ALL))
def test_shipped_recipe_needs_at_most_data(name):
    loaded = load_recipe(name, env={})
    assert loaded.recipe.name == loaded.source == name
    assert loaded.recipe.train.output_dir == f"outputs/{name}"
    assert loaded.recipe.train.seq_len <= loaded.recipe.model.max_seq_len
    assert loaded.notes == []
    require_complete(recipe(name, "--data.path", "x.txt"))


def test_the_debug_recipe_needs_nothing_and_divides():
    debug = recipe("llama3_debug")
    require_complete(debug)
    assert debug.data.tokenizer == "bytes"
    # On every Debian, and so on the machine that runs the tests.
    assert list(Path("/").glob(str(debug.data.path).lstrip("/")))
    model, train = debug.model, debug.train
    hidden_dim = family_of(model).hidden_dim(model)
    sizes = [model.layers, model.heads, model.num_kv_heads, hidden_dim, model.vocabulary, model.dim, train.seq_len]
    assert all(size % 4 == 0 for size in [*sizes, train.global_batch])
    assert model.vocabulary >= 259


def test_the_published_dimensions_of_llama():
    scaling = recipe("llama3_3b").model.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_max_seq_len) == ("llama3", 32.0, 8192)
    assert recipe("llama3_3b").model.tied
    big = recipe("llama3_405b")
    assert (big.model.layers, big.model.num_kv_heads, big.model.size_of_head) == (126, 8, 128)
    assert (big.parallel.tensor, big.parallel.shard, big.optimizer.lr) == (8, -1, 8e-5)


# ------------------------------------------------------------------------------------------------------ finding
def test_names_paths_and_the_environment(workdir):
    assert recipe("llama3_8b.toml") == recipe("llama3_8b")
    (workdir / "sub").mkdir()
    (workdir / "sub" / "my.v2.toml").write_text("[train]\nsteps = 3\n")
    for spec in ("sub/my.v2.toml", Path("sub/my.v2.toml"), str(workdir / "sub" / "my.v2.toml")):
        found = recipe(spec)
        assert (found.name, found.train.output_dir) == ("my.v2", "outputs/my.v2")
    loaded = load_recipe(None, env={"CONFIG_FILE": "sub/my.v2.toml"})
    assert (loaded.recipe.train.steps, loaded.source) == (Duration(3), "sub/my.v2.toml")
    assert "set CONFIG_FILE" in refusal(None)


def test_a_file_here_goes_before_the_shipped_one_of_its_name(workdir):
    (workdir / "llama3_8b.toml").write_text('base = "llama3_8b"\n[train]\nsteps = 7\n')
    assert recipe("llama3_8b.toml").train.steps == Duration(7)
    assert recipe("./llama3_8b.toml").model.layers == 32
    assert recipe("llama3_8b").train.steps == Duration(1000)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("./torchtitan/models/llama3/train_configs/llama3_70b.toml", "llama3_70b"),
        ("./models/llama3/train_configs/debug_model.toml", "llama3_debug"),
    ],
)
def test_a_path_of_another_trainer_is_the_shipped_recipe_with_a_note(workdir, path, name):
    loaded = load_recipe(None, env={"CONFIG_FILE": path})
    assert loaded.recipe == recipe(name)
    assert loaded.notes == [f"{path} is not here: the recipe {name} that ships with Atoll is used"]


def test_unknown_names_have_the_nearest(workdir):
    assert "did you mean 'llama3_8b'?" in refusal("lama3_8b")
    assert "`atoll recipes ls`" in refusal("zzz")
    (workdir / "mine.toml").touch()
    assert "did you mean 'mine.toml'?" in refusal("mine")
    (workdir / "folder").mkdir()
    assert "folder is a folder" in refusal("folder")


def test_broken_files_name_the_line(workdir):
    (workdir / "a.toml").write_text("[train]\nsteps = = 3\n")
    assert re.match(r"a\.toml: invalid TOML: .* \(at line 2, column 9\)", refusal("a.toml"))
    (workdir / "b.toml").write_text("[train]\nsteps = 3\n[train]\n")
    assert "(at line 3, column " in refusal("b.toml")
    (workdir / "c.toml").write_text("name = [1,")
    assert refusal("c.toml").startswith("c.toml: invalid TOML")
    (workdir / "d.toml").write_bytes(b"name = '\xff'")
    assert "d.toml is not text in UTF-8" in refusal("d.toml")


# -------------------------------------------------------------------------------------------------- inheritance
def test_bases_merge_deeply(workdir):
    (workdir / "shared").mkdir()
    (workdir / "shared" / "low.toml").write_text('base = "llama3_8b"\nname = "low"\n[optimizer]\nbetas = [0.8, 0.9]\n')
    (workdir / "top.toml").write_text(
        'base = "shared/low.toml"\n[model.rope_scaling]\nfactor = 16.0\n[data]\npath = ["a"]\n'
    )
    top = recipe("top.toml")
    assert top.name == "top"
    assert top.optimizer.betas == (0.8, 0.9)
    assert top.optimizer.lr == 3e-4
    scaling = top.model.rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.original_max_seq_len) == (16.0, 8192)
    assert top.data.path == ["a"]
    assert top.data.tokenizer == "meta-llama/Llama-3.1-8B"
    assert recipe({"base": "shared/low.toml", "name": "mine"}).name == "mine"


def test_cycles_and_missing_bases_are_refused(workdir):
    (workdir / "a.toml").write_text('base = "b.toml"\n')
    (workdir / "b.toml").write_text('base = "a.toml"\n')
    assert refusal("a.toml") == "b.toml: base = 'a.toml' leads back to itself: a.toml -> b.toml -> a.toml"
    (workdir / "c.toml").write_text('base = "llama3_9b"\n')
    assert refusal("c.toml").startswith("c.toml: base: no recipe 'llama3_9b'")
    (workdir / "d.toml").write_text('base = ["llama3_8b"]\n')
    assert refusal("d.toml").startswith("d.toml: base = ['llama3_8b']: expected the name")


def test_the_length_is_said_once(workdir):
    child = recipe({"base": "llama3_8b", "train": {"tokens": 1e9}})
    assert child.train.steps is None
    assert child.train.length == Duration(1e9, "tok")
    assert recipe({"base": "llama3_8b", "train": {"tokens": 1e9}}, "--train.steps", "5").train.length == Duration(5)
    assert "steps and tokens are both given" in refusal({"train": {"tokens": 1e9, "steps": 5}})


def test_other_spellings_of_an_axis_replace_the_base(workdir):
    assert recipe("llama3_70b", "--parallel.tp", "2").parallel.tensor == 2
    assert recipe("llama3_70b", "--parallel.dp_shard=4", "--parallel.cp", "2").parallel.context == 2
    assert "unknown key `tp` in [parallel]: did you mean parallel.tensor?" in refusal(
        {"parallel": {"tp": 2, "tensor": 2}}
    )


def test_versions():
    assert recipe({"version": 1}).version == 1
    assert "version = 2: this Atoll reads version 1: update Atoll" in refusal({"version": 2})
    assert "version = '1': this Atoll reads version 1" in refusal({"version": "1"})


# ---------------------------------------------------------------------------------------------------- overrides
@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        (["--train.steps", "100"], "train.steps", Duration(100)),
        (["--train.steps=2ep"], "train.steps", Duration(2, "ep")),
        (["--train.steps", "1", "--train.steps", "1e9tok"], "train.steps", Duration(1e9, "tok")),
        (["--train.seq-len", "512"], "train.seq_len", 512),
        (["--data.path=foo.txt"], "data.path", "foo.txt"),
        (["--data.path", "2024"], "data.path", "2024"),
        (["--data.path", "2024-01-01"], "data.path", "2024-01-01"),
        (["--data.path", "a=b.txt"], "data.path", "a=b.txt"),
        (["--data.path", '["a", "b"]'], "data.path", ["a", "b"]),
        (["--data.tokenizer", "bytes"], "data.tokenizer", "bytes"),
        (["--data.validation", "0.1"], "data.validation", 0.1),
        (["--data.validation", "held.txt"], "data.validation", "held.txt"),
        (["--metrics.trackers", '["tensorboard"]'], "metrics.trackers", ["tensorboard"]),
        (["--metrics.sample_prompt", "It is a truth"], "metrics.sample_prompt", "It is a truth"),
        (["--metrics.sample_prompt", "1\nx = 2"], "metrics.sample_prompt", "1\nx = 2"),
        (["--metrics.profile.start", "3"], "metrics.profile.start", 3),
        (["--checkpoint.asynchronous", "false"], "checkpoint.asynchronous", False),
        (["--checkpoint.every", "none"], "checkpoint.every", None),
        (["--model.vocab_size", "none"], "model.vocab_size", None),
        (["--train.recompute", "none"], "train.recompute", "none"),
        (["--precision.float8=none"], "precision.float8", "none"),
        (["--parallel.shard", "-1"], "parallel.shard", -1),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--optimizer.betas", "[0.8, 0.9]"], "optimizer.betas", (0.8, 0.9)),
        (["train.seed=3"], "train.seed", 3),
        (["--name", "42"], "name", "42"),
    ],
)
def test_overrides(arguments, path, value):
    found: Any = recipe("llama3_8b", *arguments)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (["--steps", "3"], "unknown option --steps: did you mean --train.steps?"),
        (["--kind", "3"], "--objective.kind or --optimizer.kind or --schedule.kind"),
        (["--stepz", "3"], "unknown option --stepz: did you mean --train.steps?"),
        (["--learning_rate", "1"], "unknown option --learning_rate: did you mean --optimizer.lr?"),
        (["--batch-size", "8"], "unknown option --batch-size: did you mean --train.global_batch?"),
        (["--nodes", "2"], "unknown option --nodes: it is for `atoll train`"),
        (["--resume"], "unknown option --resume: the same command resumes by default"),
        (["--parallel.fsdp", "2"], "unknown key `fsdp` in [parallel]: did you mean parallel.shard?"),
        (["--optimizer.learning_rate", "2"], "unknown key `learning_rate` in [optimizer]: did you mean optimizer.lr?"),
        (["--train", "3"], "--train is a section: name a key in it, such as --train.steps"),
        (["--train.steps"], "--train.steps has no value"),
        (["--train.steps", "--train.seed", "3"], "--train.steps has no value"),
        (["steps"], "expected --section.key VALUE"),
        (["--train.lr", "1"], "command line: unknown key `lr` in [train]: did you mean optimizer.lr?"),
        (["--optimiser.lr", "1"], "unknown section [optimiser]: did you mean 'optimizer'?"),
        (
            ["--metrics.profile.begin", "1"],
            "unknown key `begin` in [metrics.profile]: its keys are start, steps",
        ),
        (["--train.steps.x", "1"], "[train] steps"),
        (["--data.validation", "1.5"], "[data] validation = 1.5 should be"),
        (["--data.validation", "true"], "[data] validation = True should be"),
        (["--data.path", "''"], "[data] path = '' should have at least 1 character"),
        (["--data.path", '[{pth = "a"}]'], "unknown key `pth` in [data.path]: did you mean data.path.path?"),
        (["--data.path", '[{path = "a", weight = 0}]'], "[data] path = 0 should be greater than 0"),
        (["--metrics.trackers", "wandb"], "[metrics] trackers = 'wandb' should be a list, as [\"wandb\"]"),
        (["--optimizer.lr", "none"], "[optimizer] lr = 'none' should be a valid number"),
        (["--metrics.profile", "3", "--metrics.profile.start", "3"], "metrics.profile was given a plain value before"),
    ],
)
def test_wrong_overrides(argument, words):
    assert words in refusal("llama3_8b", *argument)


# ------------------------------------------------------------------------------------------------------ checking
def test_every_mistake_is_told_at_once_with_its_file(workdir):
    (workdir / "low.toml").write_text('[train]\nseq_len = "long"\n')
    (workdir / "my.toml").write_text(
        'base = "low.toml"\nsteps = 3\n[train]\nstep = 5\nseed = -1\n[trian]\n[optimizer]\nkind = "adam"\n'
        'betas = [0.5]\n[schedule]\nwarmup = "1week"\n[model]\nheads = 3\n[data]\npath = [{path = "a", wieght = 2}]\n'
    )
    lines = refusal("my.toml", "--train.micro_batch=0", "--compile.enabled", "maybe").split("\n  ")
    assert lines[0] == "12 mistakes in the recipe:"
    assert set(lines[1:]) == {
        "my.toml: unknown key `steps` outside every section: did you mean train.steps?",
        "my.toml: unknown key `step` in [train]: did you mean train.steps?",
        "my.toml: unknown section [trian]: did you mean 'train'?",
        "my.toml: unknown key `wieght` in [data.path]: did you mean data.path.weight?",
        "low.toml: [train] seq_len = 'long' should be a valid integer, unable to parse string as an integer",
        "my.toml: [train] seed = -1 should be greater than or equal to 0",
        "command line: [train] micro_batch = 0 should be greater than 0",
        "my.toml: [optimizer] kind = 'adam' should be 'adamw', 'muon' or 'sgd': did you mean 'adamw'?",
        "my.toml: [optimizer] betas: a value is missing in [0.5]",
        "my.toml: [schedule] warmup: '1week' is not a duration: expected 100, '500step', '2ep' or '1e9tok'",
        "my.toml: [model]: dim = 256 is not divisible by heads = 3; set head_dim",
        "command line: [compile] enabled = 'maybe' should be a valid boolean, unable to interpret input",
    }


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"train": 3}, "[train] = 3 should be a table"),
        ({"train": [{"steps": 3}]}, "[train] = [{'steps': 3}] should be a table"),
        ({"model": {"rope_scaling": 3}}, "[model] rope_scaling = 3 should be a table"),
        (
            {"model": {"rope_scaling": {"kind": "yarn", "factor": 2.0}}},
            "rope_scaling.original_max_seq_len: a value is missing",
        ),
        (
            {"model": {"rope_scaling": {"knd": "yarn"}}},
            "unknown key `knd` in [model.rope_scaling]: did you mean model.rope_scaling.kind?",
        ),
        ({"data": {"path": 3}}, "[data] path = 3 should be a valid string or be a list"),
        ({"data": {"path": [{"path": "a", "weight": -1}]}}, "[data] path = -1 should be greater than 0"),
        ({"train": {"steps": 1.5}}, "[train] steps: 1.5: steps are whole"),
        ({"parallel": {"shard": -1, "tensor": -1}}, "more than one axis: shard = -1, tensor = -1"),
        (
            {"metrics": {"trackers": ["wandbb"]}},
            "= 'wandbb' should be 'tensorboard', 'wandb' or 'mlflow': did you mean 'wandb'?",
        ),
    ],
)
def test_wrong_values(tree, words):
    assert words in refusal(tree)


YARN = {"kind": "yarn", "factor": 2.0, "original_max_seq_len": 64}
LLAMA3 = {**YARN, "kind": "llama3"}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"train": {"seed": 2**63}}, "[train] seed = 9223372036854775808 should be less than or equal to"),
        ({"train": {"steps": "1e400tok"}}, "[train] steps: '1e400tok' is too long: expected at most 1e+18"),
        ({"train": {"steps": "1e400"}}, "[train] steps: '1e400' is too long"),
        ({"checkpoint": {"every": "1e19step"}}, "[checkpoint] every: '1e19step' is too long"),
        ({"train": {"tokens": 1e19}}, "[train] tokens = 1e+19 should be less than or equal to 1"),
        ({"train": {"hang_timeout_s": 1e12}}, "[train] hang_timeout_s = 1000000000000.0 should be less than or"),
        ({"train": {"grace_s": 1e12}}, "[train] grace_s = 1000000000000.0 should be less than or equal to"),
        ({"train": {"global_batch": 2**40}}, "[train] global_batch = 1099511627776 should be less than or equal to"),
        ({"model": {"layers": 10**30}}, "should be less than or equal to 1000"),
        ({"model": {"layers": True}}, "[model] layers: true is a truth value: expected a number"),
        ({"optimizer": {"lr": True}}, "[optimizer] lr: true is a truth value: expected a number"),
        ({"optimizer": {"max_grad_norm": True}}, "max_grad_norm: true is a truth value"),
        ({"data": {"path": [{"path": "a", "weight": True}]}}, "path: true is a truth value"),
        (
            {"model": {"rope_scaling": {"kind": "llama3", "factor": True, "original_max_seq_len": 8}}},
            "factor: true is a",
        ),
        ({"model": {"tied": "perhaps"}}, "[model] tied = 'perhaps' should be a valid boolean"),
        ({"optimizer": {"betas": [1.0, 0.9]}}, "[optimizer] betas = 1.0 should be less than 1"),
        ({"data": {"workers": 10**9}}, "[data] workers = 1000000000 should be less than or equal to 4096"),
        ({"model": {"rope_theta": 1.0}}, "[model] rope_theta = 1.0 should be greater than 1"),
        (
            {"model": {"rope_scaling": {**YARN, "beta_slow": 0.0}}},
            "beta_slow = 0 and beta_fast = 32: expected 0 < beta",
        ),
        ({"model": {"rope_scaling": {**YARN, "beta_fast": 0.5}}}, "beta_slow = 1 and beta_fast = 0.5: expected 0 <"),
        (
            {"model": {"rope_scaling": {**YARN, "attention_factor": 0.0}}},
            "attention_factor = 0.0 should be greater than 0",
        ),
        (
            {"model": {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}},
            "[model] rope_scaling: low_freq_factor = 4 an",
        ),
        (
            {"schedule": {"kind": "cosine", "decay": 5}},
            "[schedule]: decay = 5step is given, and kind = 'cosine' has none",
        ),
        ({"name": "a/b"}, "recipe: name: 'a/b' can't be the name of a folder"),
        ({"name": ".."}, "recipe: name: '..' can't be the name of a folder"),
        ({"name": ""}, "recipe: name: '' can't be the name of a folder"),
        ({"name": 3}, "name = 3 should be a valid string"),
        ({"train": {"output_dir": ""}}, "[train] output_dir = '' should have at least 1 character"),
        ({"train": {"output_dir": "s3://bucket/run"}}, "put checkpoints there with [checkpoint] path"),
        ({"data": {"path": ["a", ""]}}, "[data] path = '' should have at least 1 character"),
        ({"data": {"validation": ""}}, "[data] validation = '' should have at least 1 character"),
        ({"data": {"tokenizer": ""}}, "[data] tokenizer = '' should have at least 1 character"),
        ({"model": {"init": ""}}, "[model] init = '' should have at least 1 character"),
        ({"base": ""}, "recipe: base: "),
    ],
)
def test_values_that_no_run_could_take(tree, words):
    assert words in refusal(tree)


def test_another_kind_of_schedule_replaces_the_decay_of_a_base(workdir):
    (workdir / "low.toml").write_text('[schedule]\nkind = "wsd"\ndecay = 50\n')
    (workdir / "my.toml").write_text('base = "low.toml"\n[schedule]\nkind = "cosine"\n')
    assert recipe("low.toml").schedule.decay == Duration(50)
    assert recipe("low.toml", "--schedule.kind", "linear").schedule.decay is None
    assert recipe("my.toml").schedule.decay is None


def test_a_byte_order_mark_is_passed_over(workdir):
    (workdir / "my.toml").write_text("\ufeff[train]\nsteps = 3\n", encoding="utf-8")
    assert recipe("my.toml").train.steps == Duration(3)


def test_too_deep_to_read(workdir):
    (workdir / "deep.toml").write_text(f"a = {'[' * 5000}{']' * 5000}\n")
    assert "deep.toml: invalid TOML: maximum recursion depth" in refusal("deep.toml")
    (workdir / "big.toml").write_text(f"[train]\nseed = {'9' * 5000}\n")
    assert "big.toml: invalid TOML: Exceeds the limit" in refusal("big.toml")


def test_the_folder_of_a_run_is_a_recipe(workdir):
    (workdir / "outputs/pq").mkdir(parents=True)
    made = recipe("llama3_8b", "--name", "pq", "--train.steps", "7")
    file = workdir / "outputs/pq/recipe.json"
    file.write_text(json.dumps(made.model_dump(mode="json")))
    assert recipe("outputs/pq") == recipe("outputs/pq/recipe.json") == made
    assert recipe("outputs/pq", "--train.steps", "9").train.steps == Duration(9)
    file.write_text("{\n!")
    assert re.search(r"outputs/pq/recipe.json: invalid JSON: .*line 2", refusal("outputs/pq"))
    file.write_text("[]")
    assert "outputs/pq/recipe.json: expected the recipe of a run" in refusal("outputs/pq")


def test_what_only_the_user_can_give_is_asked_for():
    with pytest.raises(ConfigError, match=r"^\[data\] path is not set: add --data.path FILE"):
        require_complete(recipe("llama3_8b"))
    with pytest.raises(ConfigError) as caught:
        require_complete(recipe({}))
    for flag in ("--data.path", "--data.tokenizer", "--train.steps"):
        assert flag in str(caught.value)


# ----------------------------------------------------------------------------------------------------- comparing
@pytest.mark.parametrize("name", sorted(ALL))
def test_resolved_toml_reads_back(name, workdir):
    original = recipe(name, "--metrics.profile.start", "3", "--train.steps", "0.5ep")
    (workdir / "copy.toml").write_text(resolved_toml(original))
    assert recipe("copy.toml") == original
    assert recipe(original) == original


@given(st.text(), st.lists(st.text().filter(str.strip), max_size=3), st.floats(1e-30, 1e30), st.integers(0, 2**62))
def test_any_value_survives_toml(text, texts, number, whole):
    tree = {"data": {"path": texts, "document_end": text}, "optimizer": {"lr": number}, "train": {"seed": whole}}
    mixture = {"metrics": {"sample_prompt": text}, "data": {"path": [{"path": texts, "weight": number}]}}
    for original in (recipe(tree), recipe(mixture)):
        assert recipe(tomllib.loads(resolved_toml(original))) == original


def test_diff_and_what_may_change_when_resuming():
    old = recipe("llama3_8b", "--data.path", "a.txt")
    assert diff(old, old) == harmful(old, old) == []
    new = recipe(
        *("llama3_8b", "--data.path", "b.txt", "--train.steps", "2ep", "--parallel.tp", "2", "--train.micro_batch=2"),
        *("--metrics.profile.start=5", "--checkpoint.keep", "9", "--model.rope_scaling.factor", "4"),
    )
    breaking = [
        "[model] rope_scaling.factor: 8.0 -> 4.0",
        '[data] path: "a.txt" -> "b.txt"',
        '[train] steps: 1000 -> "2ep"',
    ]
    assert sorted(harmful(old, new)) == sorted(breaking)
    assert sorted(diff(old, new)) == sorted(
        [
            *breaking,
            "[train] micro_batch: 1 -> 2",
            "[parallel] tensor: 1 -> 2",
            "[checkpoint] keep: 2 -> 9",
            "[metrics] profile.start: none -> 5",
            "[metrics] profile.steps: none -> 3",
        ]
    )
    assert harmful(old, recipe(old, "--train.steps", "1001")) == []
    assert harmful(old, recipe(old, "--train.steps", "999")) == ["[train] steps: 1000 -> 999"]
    plain = recipe(old, "--model.rope_scaling", "none")
    assert plain.model.rope_scaling is None
    assert '[model] rope_scaling.kind: "llama3" -> none' in harmful(old, plain)


def test_harmless_keys_exist():
    for name in HARMLESS:
        section, _, key = name.partition(".")
        assert keys.field_of((section,) if key in ("", "*") else (section, key)) is not None, name


# ------------------------------------------------------------------------------------------------- command, docs
def test_data_beside_the_recipe_are_found(workdir):
    (workdir / "sub").mkdir()
    (workdir / "sub" / "notes.txt").write_text("here")
    (workdir / "sub" / "my.toml").write_text(
        'base = "llama3_debug"\n[data]\npath = ["notes.txt", "no.txt", "s3://x/y"]\n'
    )
    assert recipe("sub/my.toml").data.path == ["sub/notes.txt", "no.txt", "s3://x/y"]
    (workdir / "notes.txt").write_text("the current folder comes first")
    assert recipe("sub/my.toml").data.path[0] == "notes.txt"


def test_recipes_ls():
    runner = CliRunner()
    table = runner.invoke(recipes_app, ["ls"])
    assert table.exit_code == 0
    assert re.search(r"llama3_70b +70.6 B +8192 +shard rest × tensor 8 +Llama 3.1 70B; needs --data.path", table.stdout)
    rows = json.loads(runner.invoke(recipes_app, ["ls", "-o", "json"]).stdout)
    assert {row["name"]: row["parameters"] for row in rows}.items() >= PUBLISHED.items()
    assert {row["name"] for row in rows} == ALL
    assert runner.invoke(recipes_app, ["ls", "-o", "xml"]).exit_code == 2


def test_recipes_show():
    runner = CliRunner()
    shown = runner.invoke(recipes_app, ["show", "x/llama3_8b.toml", "--train.steps", "100", "--data.path=a.txt"])
    assert shown.exit_code == 0
    assert shown.stdout == resolved_toml(recipe("llama3_8b", "--train.steps", "100", "--data.path=a.txt"))
    assert shown.stderr.startswith("note: x/llama3_8b.toml is not here")
    first = runner.invoke(recipes_app, ["show", "--train.steps", "100", "llama3_8b"])
    assert first.exit_code == 2
    assert "the recipe comes first" in first.stderr
    assert isinstance(runner.invoke(recipes_app, ["show", "llama4"]).exception, ConfigError)


def test_recipes_cp(workdir):
    runner = CliRunner()
    copied = runner.invoke(recipes_app, ["cp", "llama3_70b"])
    assert copied.stdout == "written to ./llama3_70b.toml; edit it, then: atoll train ./llama3_70b.toml\n"
    assert recipe("./llama3_70b.toml") == recipe("llama3_70b")
    again = runner.invoke(recipes_app, ["cp", "llama3_70b"])
    assert "llama3_70b.toml already exists, not overwritten" in str(again.exception)
    (workdir / "folder").mkdir()
    assert runner.invoke(recipes_app, ["cp", "gpt_mini.toml", "folder"]).exit_code == 0
    assert (workdir / "folder" / "gpt_mini.toml").read_text() == shipped_file("gpt_mini").read_text()
    assert "can't be written" in str(runner.invoke(recipes_app, ["cp", "gpt_mini", "no/such.toml"]).exception)
    assert "did you mean 'gpt_mini'?" in str(runner.invoke(recipes_app, ["cp", "gpt_mnin"]).exception)


def test_the_reference_has_every_key_and_its_meaning(monkeypatch):
    """It is made from the schema: each table has a place on the page, each key a comment."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    hook = importlib.import_module("reference_hook")
    page = (ROOT / "docs" / "recipe-keys.md").read_text()
    for section, model in keys.sections().items():
        inner = {f"{section}.{key}": keys._models(field.annotation) for key, field in model.model_fields.items()}
        inner.pop("data.path", None)  # a list of tables, which its own line explains
        for name, kind in [(section, model), *((name, kinds[0]) for name, kinds in inner.items() if kinds)]:
            assert f"<!-- keys of [{name}] -->" in page
            meanings = hook.meanings_of(kind)
            assert [key for key in kind.model_fields if not meanings.get(key)] == []
    assert "| `lr` | `0.0003` | peak learning rate |" in hook.keys_of("optimizer")


def test_recipes_in_the_docs_are_right(workdir):
    page = (ROOT / "docs" / "recipes.md").read_text()
    blocks = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 2
    for block in blocks:
        (workdir / "my.toml").write_text(block)
        load_recipe("my.toml", env={})
