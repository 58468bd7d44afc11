"""Hugging Face's names and config.json of the families, both ways. Nothing here reads or writes a file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from atoll.core.errors import ConfigError
from atoll.train.recipe.schema import ModelSection, RopeScaling

MODEL_TYPES = ("llama", "mistral", "qwen3", "phi3", "gpt2")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_MOST_LAYERS = 10_000  # more is a damaged file, whose names alone would fill the memory

_SWIGLU = "silu"
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")


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


def shapes(section: ModelSection) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, by our name."""
    d, e = section.dim, section.size_of_head
    q, k, f = section.heads * e, section.num_kv_heads * e, section.ffn_dim
    biased = section.family == "gpt2"
    block: dict[str, tuple[int, ...]] = {"attention.q": (q, d), "attention.k": (k, d), "attention.v": (k, d)}
    block |= {"attention.o": (d, q), "feed_forward.up": (f, d), "feed_forward.down": (d, f)}
    block |= {} if biased else {"feed_forward.gate": (f, d)}
    block |= {"attention_norm": (d,), "feed_forward_norm": (d,)}
    block |= {"attention.q_norm": (e,), "attention.k_norm": (e,)} if section.family == "qwen3" else {}
    tables = {"embed": (section.vocabulary, d)} | ({"learned_positions": (section.max_seq_len, d)} if biased else {})
    inside = {f"blocks.{n}.{name}": shape for n in range(section.layers) for name, shape in block.items()}
    found: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in tables.items()}
    for name, shape in (inside | {"norm": (d,)}).items():
        found[f"{name}.weight"] = shape
        if biased:
            found[f"{name}.bias"] = shape[:1]
    return found | ({} if section.tied else {"head.weight": (section.vocabulary, d)})


# ----------------------------------------------------------------------------------------------------- layouts
_OUTER = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"}
_GPT2_OUTER = {
    "transformer.wte": "embed",
    "transformer.wpe": "learned_positions",
    "transformer.ln_f": "norm",
    "lm_head": "head",
}
_LLAMA = {
    "self_attn.q_proj": ["attention.q"],
    "self_attn.k_proj": ["attention.k"],
    "self_attn.v_proj": ["attention.v"],
    "self_attn.o_proj": ["attention.o"],
    "mlp.gate_proj": ["feed_forward.gate"],
    "mlp.up_proj": ["feed_forward.up"],
    "mlp.down_proj": ["feed_forward.down"],
    "input_layernorm": ["attention_norm"],
    "post_attention_layernorm": ["feed_forward_norm"],
}
_BLOCKS = {
    "llama": _LLAMA,
    "qwen3": _LLAMA | {f"self_attn.{each}": [f"attention.{each}"] for each in ("q_norm", "k_norm")},
    "phi3": {
        "self_attn.qkv_proj": ["attention.q", "attention.k", "attention.v"],
        "self_attn.o_proj": ["attention.o"],
        "mlp.gate_up_proj": ["feed_forward.gate", "feed_forward.up"],
        "mlp.down_proj": ["feed_forward.down"],
        "input_layernorm": ["attention_norm"],
        "post_attention_layernorm": ["feed_forward_norm"],
    },
    "gpt2": {
        "attn.c_attn": ["attention.q", "attention.k", "attention.v"],
        "attn.c_proj": ["attention.o"],
        "mlp.c_fc": ["feed_forward.up"],
        "mlp.c_proj": ["feed_forward.down"],
        "ln_1": ["attention_norm"],
        "ln_2": ["feed_forward_norm"],
    },
}


def layout(section: ModelSection) -> list[Stored]:
    """Every tensor of a model in the order of its layers, as ``transformers`` names it."""
    blocks = _BLOCKS[section.family]
    if section.family != "gpt2":
        return stored_tensors(section, _OUTER, "model.layers", blocks)
    known = shapes(section)
    found = stored_tensors(section, _GPT2_OUTER, "transformer.h", blocks)
    # Its linear layers hold their weights the other way round.
    linear = {n for n in known if n.startswith("blocks.") and len(known[n]) == 2}
    return [replace(each, transposed=each.parts[0].name in linear) for each in found]


def stored_tensors(
    section: ModelSection, outer: Mapping[str, str], block: str, per_block: Mapping[str, list[str]]
) -> list[Stored]:
    """The tensors of a file by its names for them and ours, both without ``.weight`` and ``.bias``.

    Args:
        outer: those outside of blocks.
        block: what stands in front of a block's number.
        per_block: those of each block, ours one after the other where the file has several as one.
    """
    names = {theirs: [ours] for theirs, ours in outer.items()}
    for number in range(section.layers):
        for theirs, ours in per_block.items():
            names[f"{block}.{number}.{theirs}"] = [f"blocks.{number}.{each}" for each in ours]
    known = shapes(section)
    found = []
    for theirs, ours in names.items():
        for kind in ("weight", "bias"):
            full = [f"{each}.{kind}" for each in ours]
            parts = tuple(Part(name, known[name][0]) for name in full if name in known)
            if parts:
                found.append(Stored(f"{theirs}.{kind}", parts))
    return found


# ------------------------------------------------------------------------------------------- config.json, in
def section_from_hf(config: Mapping[str, Any], *, source: str = "config.json") -> ModelSection:
    """The network that a Hugging Face ``config.json`` describes.

    Raises:
        ConfigError: it is of an unknown architecture, lacks a dimension, or describes something that these models do
            not compute.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"{source}: model_type is {kind!r}; known are {', '.join(MODEL_TYPES)}; write another as [model] python"
        )
    for key in ("quantization_config", "compression_config"):
        if quantised := config.get(key):
            raise ConfigError(f"{source}: {key} = {quantised!r}: quantised weights are read from GGUF files only")
    reader = _Reader(config, source)
    fields = _gpt2_fields(reader) if kind == "gpt2" else _rotary_fields(reader, kind)
    fields["family"] = "llama" if kind == "mistral" else kind
    fields["init_std"] = reader.positive("initializer_range", 0.02)
    return checked(ModelSection, fields, source, _GPT2_NAMES if kind == "gpt2" else _ROTARY_NAMES)


_S = TypeVar("_S", bound=BaseModel)
_V = TypeVar("_V")
_ROTARY_NAMES = {"dim": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
_GPT2_NAMES = {"dim": "n_embd", "heads": "n_head"}
_SCALING_NAMES = {"original_max_seq_len": "original_max_position_embeddings"}


def checked(kind: type[_S], fields: Mapping[str, Any], source: str, names: Mapping[str, str] = {}) -> _S:
    """A section of these fields; ``names`` are the source's of them.

    Raises:
        ConfigError: a value cannot be; names ``source``, the first such field and its value.
    """
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(names.get(str(each), str(each)) for each in first["loc"])
        what = f"{key} = {first['input']!r}: {first['msg']}" if key else first["msg"].removeprefix("Value error, ")
        for ours, theirs in () if key else names.items():
            what = re.sub(rf"\b{ours}(?= =)", theirs, what)
        raise ConfigError(f"{source}: {what}") from None


class _Reader:
    """Values of a config.json, with messages that name the file and key."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def _value(self, key: str, default: _V | None, fits: Callable[[Any], bool], expected: str) -> _V:
        """Where it is absent or null the default, without which it must be there."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if not fits(value):
            raise ConfigError(f"{self.source}: {key} is {value!r}, expected {expected}")
        return cast(_V, value)

    def number(self, key: str, default: int | None = None, *, largest: float = math.inf) -> int:
        expected = "a whole number above 0" + ("" if largest == math.inf else f", {largest} at most")
        return self._value(key, default, lambda value: type(value) is int and 1 <= value <= largest, expected)

    def positive(self, key: str, default: float) -> float:
        if key == "initializer_range" and self.config.get(key) == 0:  # says no more than that it is unknown
            return default
        return self._value(
            key, default, lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number above 0"
        )

    def flag(self, key: str, default: bool) -> bool:
        return self._value(key, default, lambda value: isinstance(value, bool), "true or false")

    def table(self, key: str) -> dict[str, Any]:
        return self._value(key, {}, lambda value: isinstance(value, dict), "an object")

    def must(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a key whose value means another computation than ours; one that is absent is fine."""
        value = self.config.get(key, allowed[0])
        if value not in allowed:
            expected = " or ".join(repr(each) for each in allowed)
            raise ConfigError(f"{self.source}: {key} = {value!r} is not supported here, only {expected}")


def _rotary_fields(reader: _Reader, kind: str) -> dict[str, Any]:
    config = reader.config
    reader.must("hidden_act", (_SWIGLU,))
    for key in ("attention_bias", "mlp_bias"):
        reader.must(key, (False, None))
    dim, heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    length = reader.number("max_position_embeddings", {"qwen3": 32768, "phi3": 4096}.get(kind, 2048))
    windowed = reader.flag("use_sliding_window", kind != "qwen3") and config.get("sliding_window") is not None
    window = reader.number("sliding_window") if windowed else None
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ConfigError(f"{reader.source}: layer_types is {layer_types!r}, expected a list")
    if "sliding_attention" in layer_types and window is None:
        raise ConfigError(f"{reader.source}: layer_types has sliding_attention, which is not supported here")
    theta, scaling = _rope(reader, length)
    head_dim = reader.number("head_dim", 128) if kind == "qwen3" or config.get("head_dim") is not None else None
    return {
        "layers": reader.number("num_hidden_layers", largest=_MOST_LAYERS),
        "dim": dim,
        "heads": heads,
        "kv_heads": reader.number("num_key_value_heads", heads),
        "head_dim": None if head_dim is None or head_dim * heads == dim else head_dim,
        "hidden_dim": reader.number("intermediate_size"),
        "vocab_size": reader.number("vocab_size"),
        # Within its window a token sees all before it, as here: shorter sequences are exact.
        "max_seq_len": min(length, window or length),
        "tied": reader.flag("tie_word_embeddings", False),
        "norm_eps": reader.positive("rms_norm_eps", 1e-5 if kind == "phi3" else 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _rope(reader: _Reader, length: int) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    config = reader.config
    rope = reader.table("rope_scaling") or reader.table("rope_parameters")
    if isinstance(rope.get("full_attention"), Mapping):
        rope = dict(rope["full_attention"])
    inner = _Reader(rope, reader.source)
    theta = inner.positive("rope_theta", reader.positive("rope_theta", 10_000.0))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ConfigError(f"{reader.source}: partial_rotary_factor = {partial} is not supported here, only 1")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("llama3", "yarn"):
        raise ConfigError(f"{reader.source}: rope_type = {kind!r} is not supported here, only 'llama3' and 'yarn'")
    if rope.get("truncate") is False:
        raise ConfigError(f"{reader.source}: yarn with truncate = false is not supported here")
    factor = rope.get("factor")
    if not isinstance(factor, (int, float)) or isinstance(factor, bool):
        raise ConfigError(f"{reader.source}: the rope scaling {kind!r} has factor = {factor!r}, expected a number")
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or length
    fields: dict[str, Any] = {"kind": kind, "factor": factor, "original_max_seq_len": original}
    if kind == "llama3":
        fields |= {key: rope[key] for key in ("low_freq_factor", "high_freq_factor") if key in rope}
    else:
        fields |= {key: rope[key] for key in ("beta_fast", "beta_slow") if rope.get(key) is not None}
        fields["attention_factor"] = rope.get("attention_factor") or _mscale(inner, factor)
    return theta, checked(RopeScaling, fields, f"{reader.source}: rope scaling {kind!r}", _SCALING_NAMES)


def _mscale(rope: _Reader, factor: float) -> float | None:
    """YaRN's attention factor of DeepSeek's two scales; None where they are not given."""
    if not rope.config.get("mscale") or not rope.config.get("mscale_all_dim") or factor <= 1:
        return None
    above, below = rope.positive("mscale", 1.0), rope.positive("mscale_all_dim", 1.0)
    stretch = 0.1 * math.log(factor)
    return float((above * stretch + 1) / (below * stretch + 1))


def _gpt2_fields(reader: _Reader) -> dict[str, Any]:
    reader.must("activation_function", _GELU_TANH)
    reader.must("scale_attn_weights", (True,))
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        reader.must(key, (False,))
    dim, heads = reader.number("n_embd"), reader.number("n_head")
    return {
        "layers": reader.number("n_layer", largest=_MOST_LAYERS),
        "dim": dim,
        "heads": heads,
        "kv_heads": heads,
        "hidden_dim": reader.number("n_inner", 4 * dim),
        "vocab_size": reader.number("vocab_size"),
        "max_seq_len": reader.number("n_positions", reader.number("n_ctx", 1024)),
        "tied": reader.flag("tie_word_embeddings", True),
        "norm_eps": reader.positive("layer_norm_epsilon", 1e-5),
    }


# ------------------------------------------------------------------------------------------ config.json, out
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def hf_config(section: ModelSection, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of a network, for transformers 4 and 5.

    Raises:
        ConfigError: ``transformers`` has no such network.
    """
    if section.python is not None:
        raise ConfigError(f"[model] python = {section.python!r}: transformers has no network of this name to export to")
    common: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[section.family]],
        "model_type": section.family,
        "vocab_size": section.vocabulary,
        "tie_word_embeddings": section.tied,
        "initializer_range": section.std,
        "dtype": DTYPES[dtype],
        "torch_dtype": DTYPES[dtype],
        # Those of an imported model take their place.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return common | (_gpt2_config(section) if section.family == "gpt2" else _rotary_config(section))


def _rotary_config(section: ModelSection) -> dict[str, Any]:
    if section.family == "phi3" and section.rope_scaling is not None:
        raise ConfigError(
            f"[model] rope_scaling = {section.rope_scaling.kind!r} with family = 'phi3' cannot be exported: there "
            "transformers knows 'longrope' only. The same network is family = 'llama'"
        )
    config: dict[str, Any] = {
        "hidden_size": section.dim,
        "intermediate_size": section.ffn_dim,
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "num_key_value_heads": section.num_kv_heads,
        "head_dim": section.size_of_head,
        "hidden_act": _SWIGLU,
        "max_position_embeddings": section.max_seq_len,
        "rms_norm_eps": section.norm_eps,
        "rope_theta": section.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": section.rope_theta},
        "attention_bias": False,
    }
    if section.family == "llama":
        config["mlp_bias"] = False
    if section.family == "phi3":
        config["sliding_window"] = None
        config["original_max_position_embeddings"] = section.max_seq_len
    if (scaling := section.rope_scaling) is not None:
        rope: dict[str, Any] = {
            "rope_type": scaling.kind,
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        else:
            rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            rope |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
        config["rope_scaling"] = rope
        config["rope_parameters"] = {**rope, "rope_theta": section.rope_theta}
    return config


def _gpt2_config(section: ModelSection) -> dict[str, Any]:
    if section.num_kv_heads != section.heads or section.size_of_head * section.heads != section.dim:
        raise ConfigError(
            f"[model] family = 'gpt2' with kv_heads = {section.num_kv_heads}, head_dim = {section.size_of_head}: "
            f"transformers' GPT-2 has as many kv-heads as heads ({section.heads}) and head_dim = dim / heads"
        )
    return {
        "n_embd": section.dim,
        "n_layer": section.layers,
        "n_head": section.heads,
        "n_inner": section.ffn_dim,
        "n_positions": section.max_seq_len,
        "n_ctx": section.max_seq_len,
        "activation_function": _GELU_TANH[0],
        "layer_norm_epsilon": section.norm_eps,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
