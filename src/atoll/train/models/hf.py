"""Hugging Face's names and config.json of the families, both ways. Nothing here reads or writes a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

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


def layout(section: ModelSection) -> list[Stored]:
    """Every tensor of a model in the order of its layers, as ``transformers`` names it."""
    return _LAYOUTS[section.family](section)


def shapes(section: ModelSection) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, by our name."""
    d, e = section.dim, section.size_of_head
    q, k, f = section.heads * e, section.num_kv_heads * e, section.ffn_dim
    found: dict[str, tuple[int, ...]] = {"embed.weight": (section.vocabulary, d)}
    biased = section.family == "gpt2"
    if biased:
        found["learned_positions.weight"] = (section.max_seq_len, d)
    linear = {"attention.q": (q, d), "attention.k": (k, d), "attention.v": (k, d), "attention.o": (d, q)}
    linear |= {"feed_forward.up": (f, d), "feed_forward.down": (d, f)}
    linear |= {} if biased else {"feed_forward.gate": (f, d)}
    norms = {"attention_norm": d, "feed_forward_norm": d}
    norms |= {"attention.q_norm": e, "attention.k_norm": e} if section.family == "qwen3" else {}
    for number in range(section.layers):
        block = f"blocks.{number}"
        for name, shape in linear.items():
            found[f"{block}.{name}.weight"] = shape
            if biased:
                found[f"{block}.{name}.bias"] = shape[:1]
        for name, width in norms.items():
            found[f"{block}.{name}.weight"] = (width,)
            if biased:
                found[f"{block}.{name}.bias"] = (width,)
    found["norm.weight"] = (d,)
    if biased:
        found["norm.bias"] = (d,)
    if not section.tied:
        found["head.weight"] = (section.vocabulary, d)
    return found


# ----------------------------------------------------------------------------------------------------- layouts
def _llama(section: ModelSection) -> list[Stored]:
    return _table(
        section,
        {
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
        | ({f"self_attn.{each}": [f"attention.{each}"] for each in _HEAD_NORMS} if section.family == "qwen3" else {}),
    )


def _phi3(section: ModelSection) -> list[Stored]:
    return _table(
        section,
        {
            "self_attn.qkv_proj": ["attention.q", "attention.k", "attention.v"],
            "self_attn.o_proj": ["attention.o"],
            "mlp.gate_up_proj": ["feed_forward.gate", "feed_forward.up"],
            "mlp.down_proj": ["feed_forward.down"],
            "input_layernorm": ["attention_norm"],
            "post_attention_layernorm": ["feed_forward_norm"],
        },
    )


def _gpt2(section: ModelSection) -> list[Stored]:
    return _table(
        section,
        {
            "attn.c_attn": ["attention.q", "attention.k", "attention.v"],
            "attn.c_proj": ["attention.o"],
            "mlp.c_fc": ["feed_forward.up"],
            "mlp.c_proj": ["feed_forward.down"],
            "ln_1": ["attention_norm"],
            "ln_2": ["feed_forward_norm"],
        },
        outer={
            "transformer.wte": "embed",
            "transformer.wpe": "learned_positions",
            "transformer.ln_f": "norm",
            "lm_head": "head",
        },
        block="transformer.h",
        transposed=True,
    )


_HEAD_NORMS = ("q_norm", "k_norm")
_OUTER = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"}
_LAYOUTS: dict[str, Callable[[ModelSection], list[Stored]]] = {
    "llama": _llama,
    "qwen3": _llama,
    "phi3": _phi3,
    "gpt2": _gpt2,
}


def _table(
    section: ModelSection,
    per_block: Mapping[str, list[str]],
    *,
    outer: Mapping[str, str] = _OUTER,
    block: str = "model.layers",
    transposed: bool = False,
) -> list[Stored]:
    """The stored tensors of names without their ``.weight`` and ``.bias``; ``outer`` is for those outside blocks."""
    names: list[tuple[str, list[str], bool]] = [(theirs, [ours], False) for theirs, ours in outer.items()]
    for number in range(section.layers):
        names += [
            (f"{block}.{number}.{theirs}", [f"blocks.{number}.{each}" for each in ours], True)
            for theirs, ours in per_block.items()
        ]
    known = shapes(section)
    found = []
    for theirs, ours, inside in names:
        for kind in ("weight", "bias"):
            parts = tuple(
                Part(f"{each}.{kind}", known[f"{each}.{kind}"][0]) for each in ours if f"{each}.{kind}" in known
            )
            if parts:
                matrix = len(known[parts[0].name]) == 2
                found.append(Stored(f"{theirs}.{kind}", parts, transposed=transposed and inside and matrix))
    return found


# ------------------------------------------------------------------------------------------- config.json, in
def section_from_hf(config: Mapping[str, Any], *, source: str = "config.json") -> ModelSection:
    """The network that a Hugging Face ``config.json`` describes.

    Args:
        config: its content.
        source: what messages call it.

    Raises:
        ConfigError: it is of an unknown architecture, lacks a dimension, or describes something that these models do
            not compute.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"{source}: model_type is {kind!r}; known are {', '.join(MODEL_TYPES)}. For another one write its network "
            "as [model] python"
        )
    if quantised := config.get("quantization_config"):
        raise ConfigError(
            f"{source}: quantization_config = {quantised!r}: quantised weights are read from GGUF files only; take the "
            "model's plain weights"
        )
    reader = _Reader(config, source)
    fields = _gpt2_fields(reader) if kind == "gpt2" else _rotary_fields(reader, kind)
    fields["family"] = "llama" if kind == "mistral" else kind
    fields["init_std"] = reader.positive("initializer_range", 0.02)
    return checked(ModelSection, fields, source)


_S = TypeVar("_S", bound=BaseModel)
_THEIR_NAMES = {"original_max_seq_len": "original_max_position_embeddings"}


def checked(kind: type[_S], fields: Mapping[str, Any], source: str) -> _S:
    """A section of these fields.

    Raises:
        ConfigError: a value cannot be; names ``source``, the first such field and its value.
    """
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(_THEIR_NAMES.get(str(each), str(each)) for each in first["loc"])
        what = f"{key} = {first['input']!r}: {first['msg']}" if key else first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{source}: {what}") from None


class _Reader:
    """Values of a config.json, with messages that name the file and key."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def number(self, key: str, default: int | None = None, *, largest: float = math.inf) -> int:
        """A whole number above 0; where it is absent or null the default, without which it must be there."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
            limit = "" if largest == math.inf else f", {largest} at most"
            raise ConfigError(f"{self.source}: {key} is {value!r}, expected a whole number above 0{limit}")
        return value

    def positive(self, key: str, default: float) -> float:
        value = self.config.get(key)
        if value is None or (value == 0 and key == "initializer_range"):  # which says no more than that it is unknown
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"{self.source}: {key} is {value!r}, expected a number above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {key} is {value!r}, expected true or false")
        return default if value is None else value

    def table(self, key: str) -> dict[str, Any]:
        value = self.config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.source}: {key} is {value!r}, expected an object")
        return dict(value or {})

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
    if config.get("head_dim") is None and kind != "qwen3" and dim % heads:
        raise ConfigError(
            f"{reader.source}: hidden_size = {dim} is not divisible by num_attention_heads = {heads}, and head_dim is "
            "not given"
        )
    head_dim = reader.number("head_dim", 128 if kind == "qwen3" else dim // heads)
    if head_dim % 2:
        raise ConfigError(f"{reader.source}: head_dim = {head_dim} is odd, and rotary positions need pairs")
    kv_heads = reader.number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{reader.source}: num_attention_heads = {heads} is not divisible by num_key_value_heads = {kv_heads}"
        )
    return {
        "layers": reader.number("num_hidden_layers", largest=_MOST_LAYERS),
        "dim": dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": None if head_dim * heads == dim else head_dim,
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
    return theta, checked(RopeScaling, fields, f"{reader.source}: rope scaling {kind!r}")


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
    if dim % heads:
        raise ConfigError(f"{reader.source}: n_embd = {dim} is not divisible by n_head = {heads}")
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

    Args:
        section: the network, its vocabulary size known.
        dtype: "fp32", "bf16" or "fp16".

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
        "initializer_range": section.init_std,
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
