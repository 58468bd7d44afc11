"""Weights in and out, against transformers: every family, every format, every sharding."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
import typer
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor
from torch.distributed.checkpoint import save
from typer.testing import CliRunner

import inputs
import ranks
import small
from atoll.cli.weights import register
from atoll.core.errors import ConfigError
from atoll.train.checkpoint.manifest import FileEntry, Manifest, hex_of, step_name
from atoll.train.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from atoll.train.models import gguf, hf, registry
from atoll.train.models.parts import Decoder
from atoll.train.recipe.schema import ModelSection, Recipe, RopeScaling
from atoll.train.weight_source import open_weights
from atoll.train.weights import export, load_weights

TINY = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "hidden_dim": 48, "vocab_size": 96, "max_seq_len": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16, "norm_eps": 1e-6, "rope_theta": 1e6},
    "phi3": {},
    "olmo2": {"rope_theta": 5e5},
    "gpt2": {"kv_heads": 4},
}
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=16)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16)


def section_for(family: str, /, **changes: Any) -> ModelSection:
    return ModelSection(**{"family": family, **TINY, **FAMILIES[family], **changes})


@torch.no_grad()
def model_of(section: ModelSection, seed: int = 0) -> Decoder:
    """A model none of whose numbers is that of an initialisation."""
    torch.manual_seed(seed)
    model = registry.build(section, device="cpu")
    assert isinstance(model, Decoder)
    for name, parameter in model.named_parameters():
        parameter.normal_(mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.2)
    return model


def export_model(model: Decoder, folder: Path, dtype: str = "fp32", **kwargs: Any) -> Path:
    export(small.source_of(model), folder, dtype=dtype, **kwargs)
    return folder


def logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
    return out


def theirs(folder: Path, tokens: Tensor) -> Tensor:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        out: Tensor = model.eval()(tokens).logits
    return out


def assert_same(model: torch.nn.Module, other: torch.nn.Module) -> None:
    pairs = list(zip(model.named_parameters(), other.named_parameters(), strict=True))
    assert pairs
    for (name, value), (other_name, other_value) in pairs:
        assert name == other_name
        assert torch.equal(value, other_value), name


TOKENS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))

VARIANTS = [
    *(section_for(family, tied=tied) for family in FAMILIES for tied in (False, True)),
    section_for("llama", rope_scaling=LLAMA3),
    section_for("llama", rope_scaling=YARN, head_dim=16),
    section_for("qwen3", rope_scaling=YARN),
]


def _name(section: ModelSection) -> str:
    scaling = f"-{section.rope_scaling.kind}" if section.rope_scaling else ""
    return section.family + ("-tied" if section.tied else "") + scaling


# ------------------------------------------------------------------------------------------------- Hugging Face
@pytest.mark.parametrize("section", VARIANTS, ids=_name)
def test_transformers_computes_the_same_from_an_export(section: ModelSection, tmp_path: Path) -> None:
    model = model_of(section)
    folder = export_model(model, tmp_path / "hf")
    torch.testing.assert_close(theirs(folder, TOKENS), logits(model, TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("section", VARIANTS, ids=_name)
def test_an_export_comes_back_bit_by_bit(section: ModelSection, tmp_path: Path) -> None:
    model = model_of(section)
    folder = export_model(model, tmp_path / "hf", max_shard_bytes=20_000)
    assert open_weights(str(folder)).section == section.model_copy(
        update={"kv_heads": section.num_kv_heads, "init_std": section.std}
    )
    back = model_of(section, seed=1)
    assert load_weights(back, section, str(folder)) == []
    assert_same(back, model)
    export(str(folder), tmp_path / "again")
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "again" / file).read_text() == (folder / file).read_text()
    shards = [safetensors.torch.load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    one = safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")
    assert one.keys() == {name for shard in shards for name in shard}
    assert all(torch.equal(one[name], value) for shard in shards for name, value in shard.items())


CONFIGS = {
    "llama": transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4),
    "mistral": transformers.MistralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=48,
    ),
    "qwen3": transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "phi3": transformers.Phi3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    ),
    "olmo2": transformers.Olmo2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    ),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_that_transformers_saved(kind: str, tmp_path: Path) -> None:
    config = CONFIGS[kind]
    config.vocab_size = 96
    torch.manual_seed(0)
    original = transformers.AutoModelForCausalLM.from_config(config).eval()
    original.save_pretrained(tmp_path / "hf")
    section = open_weights(str(tmp_path / "hf")).section
    if kind == "mistral":
        assert (section.family, section.max_seq_len) == ("llama", 48)
    model = model_of(section)
    assert load_weights(model, section, str(tmp_path / "hf")) == []
    with torch.no_grad():
        expected = original(TOKENS).logits
    torch.testing.assert_close(logits(model, TOKENS), expected, rtol=1e-5, atol=1e-5)


def test_a_bare_gpt2_as_the_first_checkpoints_have_it(tmp_path: Path) -> None:
    model = model_of(section_for("gpt2", tied=True))
    folder = export_model(model, tmp_path / "hf")
    old = {
        name.removeprefix("transformer."): value
        for name, value in safetensors.torch.load_file(folder / "model.safetensors").items()
    }
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    safetensors.torch.save_file(old, folder / "model.safetensors")
    back = model_of(model.config, seed=1)
    load_weights(back, model.config, str(folder))
    assert_same(back, model)


def test_shards_hold_what_was_allowed_and_an_index(tmp_path: Path) -> None:
    model = model_of(section_for("llama"))
    seen: list[tuple[float, float | None]] = []
    folder = export_model(model, tmp_path / "hf", max_shard_bytes=20_000, progress=lambda *now: seen.append(now))
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sizes = [sum(t.numel() * 4 for t in safetensors.torch.load_file(path).values()) for path in files]
    assert len(files) > 2
    assert max(sizes) <= 20_000
    assert sum(sizes) == index["metadata"]["total_size"] == seen[-1][0] == seen[-1][1]
    assert set(index["weight_map"].values()) == {path.name for path in files}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_an_index_says_for_each_tensor_which_file_counts(tmp_path: Path) -> None:
    """A shard that was saved before the index was may still hold what has moved to another one."""
    model = model_of(section_for("llama"))
    folder = export_model(model, tmp_path / "hf", max_shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name, first = next(iter(index["weight_map"].items()))
    last = folder / max(index["weight_map"].values())
    content = safetensors.torch.load_file(last)
    safetensors.torch.save_file(
        {**content, name: torch.zeros_like(safetensors.torch.load_file(folder / first)[name])}, last
    )
    back = model_of(model.config, seed=1)
    assert load_weights(back, model.config, str(folder)) == []
    assert_same(back, model)
    safetensors.torch.save_file(dict(list(content.items())[1:]), last)
    lost = next(iter(content))
    with pytest.raises(ConfigError, match=rf"does not hold what its .*index\.json says: .*{re.escape(lost)}"):
        load_weights(back, model.config, str(folder))
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(
        ConfigError, match=r"hf holds no weights that can be read: .* with their model.safetensors.index.json"
    ):
        load_weights(back, model.config, str(folder))


def test_one_whole_file_comes_before_an_index(tmp_path: Path) -> None:
    """As transformers reads it."""
    stale, model = model_of(section_for("llama"), seed=3), model_of(section_for("llama"))
    folder = export_model(stale, tmp_path / "hf", max_shard_bytes=20_000)
    whole = export_model(model, tmp_path / "whole")
    (whole / "model.safetensors").rename(folder / "model.safetensors")
    back = model_of(model.config, seed=1)
    load_weights(back, model.config, str(folder))
    assert_same(back, model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.model.embed_tokens.weight, model.embed.weight)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", "{}", r"holds an adapter \(adapter_config.json\).*merge_and_unload"),
        ("pytorch_model-00001-of-00002.bin", "", r"Files that end in \.bin are pickles, which are not read"),
    ],
)
def test_what_is_not_read_of_a_folder_is_refused_by_name(tmp_path: Path, name: str, content: str, message: str) -> None:
    section = section_for("llama")
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_weights(model_of(section), section, str(tmp_path))


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_dtypes(dtype: str, torch_dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of(section_for("qwen3"))
    folder = export_model(model, tmp_path / "hf", dtype=dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch_dtype
    back = model_of(model.config, seed=1)
    load_weights(back, model.config, str(folder))
    for value, original in zip(back.parameters(), model.parameters(), strict=True):
        assert torch.equal(value, original.to(torch_dtype).float())
    export(str(folder), tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == hf.DTYPES[dtype]


def test_a_bare_safetensors_file_takes_the_recipes_network(tmp_path: Path) -> None:
    model = model_of(section_for("phi3"))
    file = export_model(model, tmp_path / "hf") / "model.safetensors"
    alone = shutil.copy(file, tmp_path / "weights.safetensors")
    back = model_of(model.config, seed=1)
    load_weights(back, model.config, str(alone))
    assert_same(back, model)


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    model = model_of(section_for("llama"))
    with torch.no_grad():
        next(parameter for name, parameter in model.named_parameters() if name == "norm.weight")[3:5] = math.nan
    folder = export_model(model, tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"hf: 2 of 32 values of norm\.weight are NaN or infinite"):
        load_weights(model_of(model.config, seed=1), model.config, str(folder))


def test_an_untied_head_starts_from_a_tied_one(tmp_path: Path) -> None:
    model = model_of(section_for("llama", tied=True))
    folder = export_model(model, tmp_path / "hf")
    untied = model_of(section_for("llama"), seed=1)
    notes = load_weights(untied, untied.config, str(folder))
    assert notes == [f"{folder} has a tied head: here the head starts as a copy of the embedding"]
    assert untied.head is not None
    assert untied.embed is not None
    assert untied.head.weight is not None
    assert torch.equal(untied.head.weight, untied.embed.weight)
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()


def test_a_stage_takes_its_own_part(tmp_path: Path) -> None:
    model = model_of(section_for("llama"))
    folder = export_model(model, tmp_path / "hf")
    stage = model_of(model.config, seed=1)
    stage.embed = None
    del stage.blocks["0"]
    load_weights(stage, model.config, str(folder))
    whole = dict(model.named_parameters())
    assert all(torch.equal(value, whole[name]) for name, value in stage.named_parameters())


def test_a_tied_head_that_the_file_holds_again(tmp_path: Path) -> None:
    """It is left alone, as transformers does."""
    model = model_of(section_for("llama", tied=True))
    folder = export_model(model, tmp_path / "hf")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    assert load_weights(model, model.config, str(folder)) == []


# ------------------------------------------------------------------------------------------------------ refusals
def test_what_differs_without_a_shape_is_told(tmp_path: Path) -> None:
    model = model_of(section_for("llama"))
    folder = export_model(model, tmp_path / "hf")
    other = section_for("llama", rope_theta=5e5, max_seq_len=128)
    notes = load_weights(model_of(other), other, str(folder))
    assert notes == [
        f"[model] rope_theta = 500000.0 here, 10000.0 in {folder}",
        f"[model] max_seq_len = 128 here: {folder} was made for 64 at most",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, r"lacks 9 tensors that the model needs, such as blocks\.2\.attention_norm\.weight \[32\]"),
        ({"layers": 1}, r"has 9 tensors that the model has no place for, such as blocks\.1\."),
        ({"tied": True}, r"has 1 tensor that the model has no place for, such as head\.weight \[96, 32\]"),
        (
            {"hidden_dim": 64},
            r"tensor model\.layers\.0\.mlp\.gate_proj\.weight \(blocks\.0\.feed_forward\.gate\.weight\) is \[48, 32\], "
            r"the model has \[64, 32\] there",
        ),
        ({"vocab_size": 100}, r"\(embed\.weight\) is \[96, 32\], the model has \[100, 32\] there"),
        (
            {"heads": 8, "kv_heads": 4, "head_dim": 4},
            r"heads = 8, kv_heads = 4, head_dim = 4 with rotary positions, .* is of heads = 4, kv",
        ),
        ({"family": "qwen3"}, r"lacks 4 tensors that the model needs, such as blocks\.0\.attention\.q_norm\.weight"),
    ],
)
def test_a_network_that_is_another(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = export_model(model_of(section_for("llama")), tmp_path / "hf")
    other = section_for("llama", **changes)
    model = model_of(other)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ConfigError, match=message):
        load_weights(model, other, str(folder))
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


LLAMA_CONFIG = hf.hf_config(section_for("llama"), "fp32")
BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 5, "head_dim": None}, r"hidden_size = 32 .* num_attention_heads = 5"),
    ({"num_attention_heads": 0}, r"num_attention_heads = 0: Input should be greater than or equal to 1"),
    ({"num_key_value_heads": 3}, r"num_attention_heads = 4 .* num_key_value_heads = 3"),
    ({"head_dim": 7}, r"head_dim = 7 is odd"),
    ({"head_dim": "q"}, r"head_dim = 'q': Input should be a valid integer"),
    ({"num_hidden_layers": True}, r"num_hidden_layers = True: Input should be a valid integer"),
    ({"num_hidden_layers": 10**9}, r"num_hidden_layers = 1000000000: Input should be less than"),
    ({"rms_norm_eps": -1}, r"rms_norm_eps = -1: Input should be greater than 0"),
    ({"rms_norm_eps": "x"}, r"rms_norm_eps = 'x': Input should be a valid number"),
    ({"max_position_embeddings": -1}, r"max_position_embeddings = -1: Input should be greater"),
    ({"max_position_embeddings": "x"}, r"max_position_embeddings = 'x': Input should be a valid integer"),
    ({"rope_parameters": None, "rope_theta": -3}, r"rope_theta = -3: Input should be greater than 0"),
    ({"rope_parameters": {"rope_theta": "x"}}, r"rope_theta = 'x': Input should be a valid number"),
    ({"rope_parameters": [1]}, r"rope_parameters = \[1\]: Input should be a valid dictionary"),
    ({"rope_parameters": "x"}, r"rope_parameters = 'x': Input should be a valid dictionary"),
    ({"rope_parameters": {"rope_type": ["x"]}}, r"rope_type = \['x'\] is not supported"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 0.5}}, r"factor = 0\.5"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": -1}},
        r"original_max_position_embeddings = -1",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 8, "mscale": "a", "mscale_all_dim": 1}},
        r"mscale = 'a': Input should be a valid number",
    ),
    ({"initializer_range": "x"}, r"initializer_range = 'x': Input should be a valid number"),
    ({"sliding_window": "x"}, r"sliding_window = 'x': Input should be a valid integer"),
    ({"layer_types": 5}, r"layer_types = 5: Input should be a valid list"),
    ({"model_type": ["x"]}, r"model_type is \['x'\]; known are"),
    ({"tie_word_embeddings": "x"}, r"tie_word_embeddings = 'x': Input should be a valid boolean"),
    ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config .*'gptq'.* quantised"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS, ids=lambda value: str(value)[:40])
def test_values_of_a_config_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^x/config\.json: .*{message}"):
        hf.section_from_hf({**LLAMA_CONFIG, **changes}, source="x/config.json")
    gpt2 = hf.hf_config(section_for("gpt2"), "fp32")
    for key in ("n_inner", "n_positions", "layer_norm_epsilon"):
        with pytest.raises(ConfigError, match=rf"^x/config\.json: {key} = 'x': Input should be a valid"):
            hf.section_from_hf({**gpt2, key: "x"}, source="x/config.json")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", [1], r"config\.json holds \[1\], expected an object"),
        (
            "config.json",
            {**LLAMA_CONFIG, "eos_token_id": "x"},
            r"eos_token_id\.int = 'x': Input should be a valid integer",
        ),
        ("generation_config.json", [], r"generation_config\.json holds \[\], expected an object"),
        ("model.safetensors.index.json", {}, r"index\.json: weight_map is None, expected the file of each tensor"),
        (
            "model.safetensors.index.json",
            {"weight_map": ["a"]},
            r"weight_map is \['a'\], expected the file of each tensor",
        ),
        ("model.safetensors.index.json", {"weight_map": {"a": "b"}}, r"b is not a complete safetensors file: No such"),
    ],
)
def test_files_of_another_form(file: str, content: Any, message: str, tmp_path: Path) -> None:
    folder = export_model(model_of(section_for("llama")), tmp_path / "hf")
    (folder / file).write_text(json.dumps(content))
    if file.endswith("index.json"):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(ConfigError, match=message):
        open_weights(str(folder))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor(1.0), r"self_attn\.qkv_proj\.weight is \[\], its config says 32 \+ 16 \+ 16 rows"),
        (torch.zeros(64, 32, dtype=torch.int8), r"qkv_proj\.weight is of type I8, .* quantised"),
        (torch.zeros(64, 32).to(torch.float8_e4m3fn), r"qkv_proj\.weight is of type F8_E4M3, .* quantised"),
    ],
)
def test_tensors_of_another_form(tensor: Tensor, message: str, tmp_path: Path) -> None:
    model = model_of(section_for("phi3"))
    folder = export_model(model, tmp_path / "hf")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.qkv_proj.weight"] = tensor
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_weights(model, model.config, str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, r"model_type is 'bert'; known are gpt2, llama, mistral, olmo2, phi3, qwen3"),
        ({"attention_bias": True}, r"attention_bias = True is not supported here"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu' is not supported here, only 'silu'"),
        ({"hidden_size": None}, r"hidden_size = None: Input should be a valid integer"),
        ({"partial_rotary_factor": 0.75}, r"partial_rotary_factor = 0.75 is not supported here, only 1"),
        ({"rope_scaling": {"type": "longrope", "factor": 4}}, r"rope_type = 'longrope' is not supported here"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None}}, r"factor = None"),
        (
            {"model_type": "qwen3", "use_sliding_window": False, "layer_types": ["sliding_attention"]},
            r"layer_types has sliding_attention",
        ),
    ],
)
def test_configs_that_mean_something_else_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hf.section_from_hf({**LLAMA_CONFIG, **changes}, source="x/config.json")


def test_rope_of_old_and_new_configs() -> None:
    old = {k: v for k, v in LLAMA_CONFIG.items() if k != "rope_parameters"}
    scaling = {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
    section = hf.section_from_hf({**old, "rope_theta": 5e5, "rope_scaling": scaling})
    new = {k: v for k, v in LLAMA_CONFIG.items() if k not in ("rope_theta", "rope_scaling")}
    parameters = {**scaling, "rope_type": "llama3", "rope_theta": 5e5}
    assert section == hf.section_from_hf({**new, "rope_parameters": parameters})
    assert (section.rope_theta, section.rope_scaling) == (5e5, LLAMA3)


def test_networks_that_transformers_lacks() -> None:
    with pytest.raises(ConfigError, match=r"'yarn' with family = 'phi3' cannot be exported.*family = 'llama'"):
        hf.hf_config(section_for("phi3", rope_scaling=YARN), "bf16")
    with pytest.raises(ConfigError, match="GPT-2 has as many kv-heads as heads"):
        hf.hf_config(section_for("gpt2", kv_heads=2), "bf16")
    with pytest.raises(ConfigError, match="transformers has no network of this name"):
        hf.hf_config(section_for("llama", python="my.model:build"), "bf16")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "no such file or folder, and no owner/name on a hub"),
        (lambda folder: folder.mkdir(), "holds no weights that can be read: .* it has nothing"),
        (lambda folder: folder.write_text("x"), r"expected a run's folder, .* a \.safetensors or \.gguf file"),
    ],
)
def test_sources_that_are_none(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "a")
    with pytest.raises(ConfigError, match=message):
        open_weights(str(tmp_path / "a"))


def test_a_source_that_is_misspelt_is_named_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs/austen").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'outputs/austen'"):
        open_weights("outputs/asten")


def test_files_that_are_cut_short(tmp_path: Path) -> None:
    folder = export_model(model_of(section_for("llama")), tmp_path / "hf", max_shard_bytes=20_000)
    first, *_ = sorted(folder.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=f"{first.name} is not a complete safetensors file"):
        open_weights(str(folder))
    first.unlink()
    with pytest.raises(ConfigError, match=f"{first.name} is not a complete safetensors file: No such file"):
        open_weights(str(folder))
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(ConfigError, match=r"a\.gguf is not a complete GGUF file"):
        open_weights(str(tmp_path / "a.gguf"))


# ------------------------------------------------------------------------------------------------------- writing
def test_a_target_that_is_taken(tmp_path: Path) -> None:
    model = model_of(section_for("llama"))
    folder = export_model(model, tmp_path / "hf")
    (folder / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="exists and is not empty: choose another folder, or give --force"):
        export_model(model, folder)
    assert (folder / "mine.txt").exists()
    with pytest.raises(ConfigError, match=r"holds mine\.txt, which is not of an export, and --force replaces earlier"):
        export_model(model, folder, force=True)
    (folder / "mine.txt").unlink()
    (folder / "model.safetensors").write_text("old")
    (tmp_path / "link").symlink_to(folder)
    export_model(model, tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert len(safetensors.torch.load_file(folder / "model.safetensors")) == 21
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "link"]
    (tmp_path / "empty").mkdir()
    export_model(model, tmp_path / "empty")
    with pytest.raises(ConfigError, match="is a file"):
        export_model(model, tmp_path / "hf" / "config.json", force=True)


def test_the_folder_one_is_in_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    for folder in (Path(), Path(".."), tmp_path / "a"):
        with pytest.raises(ConfigError, match="is, or holds, the folder you are in"):
            export_model(model_of(section_for("llama")), folder, force=True)
    export_model(model_of(section_for("llama")), Path("c"))
    assert [path.name for path in Path().iterdir()] == ["c"]


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    model = model_of(section_for("llama"))
    folder = export_model(model, tmp_path / "hf")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    name = "blocks.1.attention.q.weight"
    broken = small.source_of(model, **{name: torch.zeros(3, 3)})
    with pytest.raises(ConfigError, match=r"tensor blocks\.1\.attention\.q\.weight .* is \[3, 3\], its network has"):
        export(broken, folder, dtype="fp32", force=True)
    lost = small.source_of(model)
    lost.read_stored = lambda name: (_ for _ in ()).throw(OSError("Input/output error"))
    with pytest.raises(ConfigError, match=r"cannot write .*hf: Input/output error"):
        export(lost, folder, dtype="fp32", force=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    model.head = None
    with pytest.raises(ConfigError, match=r"lacks 1 tensor that its network needs, such as head\.weight"):
        export(small.source_of(model), tmp_path / "other")
    with pytest.raises(ConfigError, match="dtype = 'int8': expected one of fp32, bf16, fp16"):
        export_model(model, tmp_path / "other", dtype="int8")


def test_an_export_that_was_killed_leaves_nothing_after_the_next(tmp_path: Path) -> None:
    model = model_of(section_for("llama"))
    export_model(model, tmp_path / "hf")
    child = os.fork()
    if not child:
        export_model(model, tmp_path / "hf", force=True, progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 3
    export_model(model, tmp_path / "hf", force=True)
    assert [each.name for each in tmp_path.iterdir()] == ["hf"]


def test_one_shard_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Every tensor is read when its shard is made, and not before."""
    model = model_of(section_for("llama"))
    written: list[int] = []

    def read(name: str) -> Tensor:
        written.append(len(list(tmp_path.glob(".hf.*.tmp/*.safetensors"))))
        return model.get_parameter(name)

    source = small.source_of(model)
    source.read_stored = read
    export(source, tmp_path / "hf", dtype="fp32", max_shard_bytes=20_000)
    assert written == sorted(written)
    assert len(set(written)) == len(list((tmp_path / "hf").glob("*.safetensors")))


# ------------------------------------------------------------------------------------------------------ sharded
KINDS = {"fsdp": ["Shard"], "hsdp": ["Replicate", "Shard"], "tensor and fsdp": ["Shard", "_StridedShard"]}


def _load_each_sharded(folders: dict[str, str], sections: dict[str, ModelSection]) -> dict[str, dict[str, Any]]:
    return {how: _load_sharded(folders[how], sections[how], how) for how in folders}


def _load_sharded(folder: str, section: ModelSection, how: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = registry.build(section)
    mesh = init_device_mesh("cpu", (4,) if how == "fsdp" else (2, 2), mesh_dim_names=("a", "b")[: 1 + (how != "fsdp")])
    assert isinstance(model, Decoder)
    if how == "tensor and fsdp":
        plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {"feed_forward.up": ColwiseParallel(), "feed_forward.gate": ColwiseParallel()}
        plan |= {"attention.o": RowwiseParallel(), "feed_forward.down": RowwiseParallel()}
        for block in model.blocks.values():
            parallelize_module(block, mesh["b"], plan)
    for part in (*model.blocks.values(), model):
        fully_shard(part, mesh=mesh["a"] if how == "tensor and fsdp" else mesh)
    model.to_empty(device="cpu")
    load_weights(model, section, folder)
    kinds = sorted({type(p).__name__ for value in model.parameters() for p in value.placements})
    return {"kinds": kinds, **{name: value.full_tensor().detach() for name, value in model.named_parameters()}}


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.long), "phi3"])
def test_each_rank_takes_its_shard(family: str, tmp_path: Path) -> None:
    # 4 ranks share 47 rows unevenly; under tensor parallelism it must divide by 2.
    hidden = {"fsdp": 47, "hsdp": 47, "tensor and fsdp": 46}
    models = {how: model_of(section_for(family, hidden_dim=dim, vocab_size=97)) for how, dim in hidden.items()}
    folders = {how: str(export_model(model, tmp_path / how)) for how, model in models.items()}
    sections = {how: model.config for how, model in models.items()}
    for rank in ranks.run(4, _load_each_sharded, folders, sections):
        for how, found in rank.items():
            assert found.pop("kinds") == KINDS[how]
            expected = dict(models[how].named_parameters())
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (how, name)


# --------------------------------------------------------------------------------------------------------- GGUF
def write_gguf(model: Decoder, path: Path, quantised: bool = False, **extra: Any) -> None:
    section = model.config
    kind = section.family
    writer = GGUFWriter(path, kind)
    writer.add_block_count(section.layers)
    writer.add_embedding_length(section.dim)
    writer.add_head_count(section.heads)
    writer.add_head_count_kv(section.num_kv_heads)
    writer.add_key_length(section.size_of_head)
    writer.add_feed_forward_length(section.hidden_dim)
    writer.add_context_length(section.max_seq_len)
    (writer.add_layer_norm_eps if kind == "gpt2" else writer.add_layer_norm_rms_eps)(section.norm_eps)
    writer.add_rope_freq_base(section.rope_theta)
    parameters = dict(model.named_parameters())
    for stored in gguf.layout(section):
        tensor = torch.cat([parameters[part.name].detach() for part in stored.parts])
        if stored.permuted_heads:  # as llama.cpp's converter does it
            shape = (stored.permuted_heads, 2, -1, *tensor.shape[1:])
            tensor = tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)
        if quantised and tensor.ndim == 2:
            data = quantize(tensor.numpy(), GGMLQuantizationType.Q8_0)
            writer.add_tensor(stored.name, data, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(stored.name, tensor.numpy().copy())
    for name, value in extra.items():
        writer.add_tensor(name.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gguf(family: str, tied: bool, tmp_path: Path) -> None:
    model = model_of(section_for(family, tied=tied))
    write_gguf(model, tmp_path / "a.gguf")
    expected = model.config.model_copy(update={"kv_heads": model.config.num_kv_heads})
    assert open_weights(str(tmp_path / "a.gguf")).section == expected
    back = model_of(model.config, seed=1)
    assert load_weights(back, model.config, str(tmp_path / "a.gguf")) == []
    assert_same(back, model)
    notes = export(str(tmp_path / "a.gguf"), tmp_path / "hf")
    assert notes == ["its tokenizer (None) is not rebuilt: copy tokenizer.json of the original model beside it"]
    torch.testing.assert_close(theirs(tmp_path / "hf", TOKENS), logits(model, TOKENS), rtol=1e-5, atol=1e-5)


def test_a_gguf_with_values_that_cannot_be(tmp_path: Path) -> None:
    for number, (count, message) in enumerate(
        [
            (0, "head_count = 0: Input should be greater"),
            (3, r"head_count = 4 is not divisible by llama\.attention\.head_count_kv = 3"),
        ]
    ):
        path = tmp_path / f"{number}.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_embedding_length(32)
        writer.add_head_count(4 if count else 0)
        writer.add_head_count_kv(count)
        writer.add_feed_forward_length(48)
        writer.add_context_length(64)
        writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ConfigError, match=message):
            open_weights(str(path)).section


def test_quantised_gguf(tmp_path: Path) -> None:
    model = model_of(section_for("qwen3", hidden_dim=64))
    write_gguf(model, tmp_path / "a.gguf", quantised=True)
    back = model_of(model.config, seed=1)
    load_weights(back, model.config, str(tmp_path / "a.gguf"))
    for value, original in zip(back.parameters(), model.parameters(), strict=True):
        kind = GGMLQuantizationType.Q8_0
        exact = original.detach().numpy()
        expected = dequantize(quantize(exact, kind), kind) if exact.ndim == 2 else exact
        assert np.array_equal(value.detach().numpy(), expected)


def test_gguf_keeps_llama3_scaling_as_factors(tmp_path: Path) -> None:
    scaling = RopeScaling(kind="llama3", factor=32.0, original_max_seq_len=8192)
    section = section_for("llama", rope_theta=5e5, rope_scaling=scaling)
    model = model_of(section)
    assert model.rope is not None
    scaled = model.rope.frequencies(torch.device("cpu"))
    plain = 1.0 / 5e5 ** (torch.arange(0, 8, 2) / 8)
    write_gguf(model, tmp_path / "a.gguf", rope_freqs__weight=(plain / scaled).numpy())
    assert open_weights(str(tmp_path / "a.gguf")).section == section
    write_gguf(model, tmp_path / "b.gguf", rope_freqs__weight=np.full(4, 3.0, dtype=np.float32))
    with pytest.raises(ConfigError, match="its rope_freqs are not those of a Llama 3"):
        open_weights(str(tmp_path / "b.gguf")).section


# --------------------------------------------------------------------------------------------- runs and commands
def save_step(run: Path, model: Decoder | registry.UserModel, step: int) -> Path:
    """A checkpoint as the trainer leaves it: DCP's files and a manifest."""
    folder = run / "checkpoints" / step_name(step)
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        save({**tensors, "optimizer.step": torch.tensor(step)}, checkpoint_id=folder, no_dist=True)
    recipe = Recipe(model=model.config).model_dump(mode="json")
    files = {
        path.name: FileEntry(path.stat().st_size, hex_of(zlib.crc32(path.read_bytes()))) for path in folder.iterdir()
    }
    manifest = Manifest(step, {"recipe": recipe}, files, world_size=1, created=time.time())
    (folder / "manifest.json").write_bytes(manifest.encode())
    return folder


def atoll(*arguments: object) -> str:
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_export_of_a_run_takes_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    models = [model_of(section_for("llama", tied=True), seed=seed) for seed in range(3)]
    steps = [save_step(run, model, number) for number, model in zip((5, 10, 15), models, strict=True)]
    (steps[2] / "manifest.json").unlink()  # torn
    train_bpe(["a tale of two cities " * 50], 300).save(run / "tokenizer")
    output = atoll("export", run, tmp_path / "hf", "--dtype", "fp32")
    assert "try it: atoll generate" in output
    back = model_of(models[1].config, seed=9)
    load_weights(back, back.config, str(tmp_path / "hf"))
    assert_same(back, models[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    own = load_tokenizer(str(run / "tokenizer"))
    assert tokenizer.encode("two cities") == own.encode("two cities")
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == own.eos_id
    torch.testing.assert_close(theirs(tmp_path / "hf", TOKENS), logits(models[1], TOKENS), rtol=1e-5, atol=1e-5)
    load_weights(back, back.config, str(steps[0]))
    assert_same(back, models[0])
    load_weights(back, back.config, str(run))
    assert_same(back, models[1])


def test_a_run_in_an_object_store(tmp_path: Path) -> None:
    import fsspec

    model = model_of(section_for("qwen3", tied=True))
    step = save_step(tmp_path / "run", model, 7)
    memory = fsspec.filesystem("memory")
    try:
        memory.put(str(step), "/bucket/run/checkpoints/step-00000007", recursive=True)
        for spec in (
            "memory://bucket/run",
            "memory://bucket/run/checkpoints",
            f"memory://bucket/run/checkpoints/{step.name}",
        ):
            back = model_of(model.config, seed=1)
            load_weights(back, model.config, spec)
            assert_same(back, model)
        with pytest.raises(ConfigError, match="memory://bucket/other: no such file or folder"):
            open_weights("memory://bucket/other")
    finally:
        memory.rm("/bucket", recursive=True)


def test_a_run_of_a_users_own_model(tmp_path: Path) -> None:
    section = ModelSection(python="test_generate:build_users", vocab_size=260, max_seq_len=32)
    model = registry.build(section, device="cpu")
    save_step(tmp_path / "run", model, 1)
    ByteTokenizer().save(tmp_path / "run" / "tokenizer")
    back = registry.build(section, device="cpu")
    with torch.no_grad():
        for parameter in back.parameters():
            parameter.zero_()
    load_weights(back, section, str(tmp_path / "run"))
    assert_same(back, model)
    assert atoll("generate", tmp_path / "run", "ab", "-n", "4", "--device", "cpu").startswith("ab")
    with pytest.raises(ConfigError, match="transformers has no network of this name to export to"):
        atoll("export", tmp_path / "run", tmp_path / "hf")


def _export_to_a_small_disk(folder: str) -> str:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    try:
        export_model(model_of(section_for("llama")), Path(folder))
    except ConfigError as error:
        return str(error)
    return "it fitted"


@pytest.mark.long
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    (message,) = ranks.run(1, _export_to_a_small_disk, str(tmp_path / "hf"))
    assert message.startswith(f"cannot write {tmp_path / 'hf'}: ")
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_whole_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    step = save_step(run, model_of(section_for("llama")), 5)
    data = next(step.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"no checkpoint in .* is whole: step 5: {data.name} has"):
        atoll("export", run, tmp_path / "hf")
    shutil.rmtree(step)
    with pytest.raises(ConfigError, match="has no whole checkpoint yet"):
        atoll("export", run, tmp_path / "hf")
    with pytest.raises(ConfigError, match="is neither a run of Atoll nor one of its checkpoints"):
        atoll("export", tmp_path, tmp_path / "hf")
    with pytest.raises(ConfigError, match="no such folder"):
        atoll("export", tmp_path / "none", tmp_path / "hf")


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_force_deletes_no_run(tmp_path: Path) -> None:
    run = tmp_path / "out" / "run"
    step = save_step(run, model_of(section_for("llama", tied=True)), 5)
    ByteTokenizer().save(run)
    before = _contents(tmp_path)
    for dest in (run, run.parent, run / "checkpoints", step):
        with pytest.raises(ConfigError, match="choose another folder"):
            atoll("export", run, dest, "--force")
    assert _contents(tmp_path) == before
    atoll("export", run, run / "hf")  # a new folder takes nothing away
    atoll("import", run / "hf", run / "hf", "--force", "--dtype", "fp32")  # what is read stays until it is replaced
    assert json.loads((run / "hf" / "config.json").read_text())["dtype"] == "float32"
    with pytest.raises(ConfigError, match="'' is not a source of weights"):
        atoll("export", "", tmp_path / "x")


def test_a_checkpoint_that_rotted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    models = [model_of(section_for("llama"), seed=seed) for seed in range(2)]
    old, new = (save_step(run, model, number) for number, model in zip((5, 10), models, strict=True))
    data = next(new.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    back = model_of(models[0].config, seed=9)
    (note,) = load_weights(back, back.config, str(run))
    assert note.startswith(f"{new} is damaged: {data.name} has crc32 ")
    assert note.endswith("; step-00000005 is used")
    assert_same(back, models[0])
    assert "step-00000005 is used" in atoll("export", run, tmp_path / "hf")
    with pytest.raises(ConfigError, match=rf"no checkpoint in .* is whole: step 10: {data.name} has crc32"):
        atoll("export", new, tmp_path / "other")
    (old / ".metadata").write_bytes(bytes((old / ".metadata").stat().st_size))
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is whole: step 5: \.metadata has crc32"):
        open_weights(str(old)).section


def test_a_run_on_bytes(tmp_path: Path) -> None:
    model = model_of(section_for("gpt2", vocab_size=260))
    save_step(tmp_path / "run", model, 3)
    ByteTokenizer().save(tmp_path / "run" / "tokenizer")
    output = atoll("export", tmp_path / "run", tmp_path / "hf")
    assert "tokenizer is 'bytes', which Atoll knows and transformers does not" in output
    from_run = atoll("generate", tmp_path / "run", "Emma", "-n", "12", "--temperature", "0", "--device", "cpu")
    assert from_run.startswith("Emma")
    assert len(from_run) > len("Emma\n")


def test_import_and_generate(tmp_path: Path) -> None:
    model = model_of(section_for("qwen3", vocab_size=300))
    source = export_model(model, tmp_path / "hf")
    train_bpe(["the quick brown fox " * 50], 300).save(source)
    output = atoll("import", source, tmp_path / "in", "--dtype", "fp16", "--max-shard", "40KB")
    assert f"--model.init {tmp_path / 'in'} --data.tokenizer {tmp_path / 'in'}" in output
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    arguments = ("the quick", "-n", "8", "--seed", "3", "--device", "cpu")
    assert atoll("generate", source, *arguments) == atoll("generate", source, *arguments)
    for size in ("5XB", "1..5GB", "_GB", "0GB", "", "9" * 400):
        with pytest.raises(ConfigError, match=f"--max-shard {size}: expected a size such as 5GB"):
            atoll("import", source, tmp_path / "other", "--max-shard", size)
    for device in ("tpu0", "meta", "mps"):
        with pytest.raises(ConfigError, match=f"--device {device}: expected cpu, cuda or cuda:N"):
            atoll("generate", source, "x", "--device", device)
    with pytest.raises(ConfigError, match="dtype = '': expected one of fp32, bf16, fp16"):
        atoll("import", source, tmp_path / "other", "--dtype", "")
    with pytest.raises(ConfigError, match="the prompt is not valid UTF-8 text at its character 2"):
        atoll("generate", source, "a\udcff", "--device", "cpu")
    with pytest.raises(ConfigError, match="'' is not a source of weights"):
        atoll("generate", "", "x", "--device", "cpu")
    with pytest.raises(ConfigError, match="'' is not a source of weights"):
        open_weights("").section


def test_sizes_are_told_in_their_unit(tmp_path: Path) -> None:
    source = export_model(model_of(section_for("llama")), tmp_path / "hf")
    assert " KiB\n" in atoll("import", source, tmp_path / "in")


def test_a_folder_that_is_missing_is_not_asked_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="outputs/nope: no such file or folder"):
        atoll("generate", "outputs/nope", "hi", "--device", "cpu")
    with pytest.raises(ConfigError, match="outputs/nope: no such file or folder"):
        open_weights("outputs/nope").section


# ------------------------------------------------------------------------------------------------------ real ones
@pytest.mark.long
def test_smollm2(tmp_path: Path) -> None:
    try:
        file = inputs.smollm2()
    except inputs.MissingInput as error:
        pytest.fail(str(error), pytrace=False)
    section = open_weights(str(file)).section
    assert registry.parameter_count(section) == 134_515_008
    atoll("import", file, tmp_path / "hf", "--dtype", "fp32")
    model = registry.build(section, device="cpu")
    assert load_weights(model, section, str(file)) == []
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    own = load_tokenizer(str(tmp_path / "hf"))
    text = "In 1815, Emma Woodhouse said: “She's 21 years old!”  我\n\tdef f(x): return x**2"
    ids = own.encode(text)
    assert ids == tokenizer.encode(text)
    assert own.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert own.encode("<|im_end|>") == [2]
    tokens = torch.tensor([ids])
    torch.testing.assert_close(logits(model, tokens), theirs(tmp_path / "hf", tokens), rtol=1e-4, atol=1e-4)
    answer = atoll("generate", file, "The capital of France is", "-n", "5", "--temperature", "0", "--device", "cpu")
    assert answer.startswith("The capital of France is Paris.")
