"""GGUF files, as llama.cpp and its kin use: the network and tokenizer that their metadata describe, and their names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.train.models import families
from atoll.train.models.config_json import checked
from atoll.train.models.family import Stored, family, family_of, stored_tensors
from atoll.train.models.parts import Positions
from atoll.train.recipe.schema import ModelSection, RopeScaling

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types
_LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_LIKE = ("gpt-2", "mpt", "olmo", "jais", "phi-2")
_DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3", "falcon3")
_QWEN_LIKE = ("qwen2", "stablelm2", "deepseek-r1-qwen")


class GgufFile:
    """One open GGUF file.

    Raises:
        ConfigError: the package ``gguf`` is missing, or the file is none.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise ConfigError(f"{path}: reading GGUF files needs the package gguf: pip install gguf") from None
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, OSError) as error:
            raise ConfigError(f"{path} is not a complete GGUF file: {error}") from None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the file's order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, outermost dimension first."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str) -> Tensor:
        """A tensor as float32, or as the file has it where that is a float type of torch."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.F64):
            data = np.array(tensor.data)  # a copy: the file is mapped read-only
        else:
            data = dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(data).view(self.shape(name))

    @property
    def dtype(self) -> str:
        """The dtype to keep its matrices in: "fp32" or "fp16" where they are, else "bf16"."""
        kinds = {tensor.tensor_type.name for tensor in self._tensors.values() if len(tensor.shape) > 1}
        return {frozenset({"F32"}): "fp32", frozenset({"F16"}): "fp16"}.get(frozenset(kinds), "bf16")

    def value(self, key: str, default: Any = None) -> Any:
        """A value of the metadata."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    # ------------------------------------------------------------------------------------------------- network
    @property
    def section(self) -> ModelSection:
        """The network it describes.

        Raises:
            ConfigError: its architecture, or a part of it, is not among the families here.
        """
        kind = self.value("general.architecture")
        known = {family(name).model_types[0]: name for name in families.names()}
        if kind not in known:
            raise ConfigError(f"{self.path}: its architecture is {kind!r}; known are {', '.join(known)}")
        rotary = family(known[kind]).rotary
        if any("_exps" in name for name in self._tensors):
            raise ConfigError(f"{self.path} is a mixture of experts, which is not among the families here")

        def number(key: str) -> int:
            value = self.value(f"{kind}.{key}")
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{self.path}: {kind}.{key} is {value!r}, expected a whole number above 0")
            return value

        if "token_embd.weight" not in self._tensors:
            raise ConfigError(f"{self.path} has no tensor token_embd.weight: is it a whole language model?")

        dim, heads = number("embedding_length"), number("attention.head_count")
        head_dim = self.value(f"{kind}.attention.key_length", dim // heads)
        rotated = self.value(f"{kind}.rope.dimension_count", head_dim)
        if rotary and rotated != head_dim:
            raise ConfigError(f"{self.path}: rotary positions on {rotated} of {head_dim} dimensions are not supported")
        epsilon = self.value(f"{kind}.attention.layer_norm_rms_epsilon")
        length = number("context_length")
        fields: dict[str, Any] = {
            "family": known[kind],
            "layers": number("block_count"),
            "dim": dim,
            "heads": heads,
            "kv_heads": self.value(f"{kind}.attention.head_count_kv", heads),
            "head_dim": None if head_dim * heads == dim else head_dim,
            "hidden_dim": number("feed_forward_length"),
            "vocab_size": self.shape("token_embd.weight")[0],
            "max_seq_len": min(length, self.value(f"{kind}.attention.sliding_window") or length),
            "tied": "output.weight" not in self._tensors,
            "norm_eps": _as_written(epsilon or self.value(f"{kind}.attention.layer_norm_epsilon", 1e-5)),
        }
        if rotary:
            fields["rope_theta"] = self.value(f"{kind}.rope.freq_base", 10_000.0)
            fields["rope_scaling"] = self._scaling(kind, checked(ModelSection, fields, str(self.path)))
        return checked(ModelSection, fields, str(self.path))

    def _scaling(self, kind: str, section: ModelSection) -> RopeScaling | None:
        how = self.value(f"{kind}.rope.scaling.type", "none")
        original = self.value(f"{kind}.rope.scaling.original_context_length")
        if how == "yarn":
            factor = self.value(f"{kind}.rope.scaling.factor")
            yarn = {"kind": "yarn", "factor": factor, "original_max_seq_len": original or section.max_seq_len}
            return checked(RopeScaling, yarn, f"{self.path}: rope scaling")
        if how != "none" or "rope_factors_long.weight" in self._tensors:
            raise ConfigError(f"{self.path}: rope scaling {how!r} is not supported here, only Llama 3's and 'yarn'")
        if "rope_freqs.weight" not in self._tensors:
            return None
        # Llama 3.1's scaling is stored as what it makes of each frequency: of the published settings, find which.
        stored = self.read("rope_freqs.weight").double()
        cpu = torch.device("cpu")
        plain = Positions(section.size_of_head, section.rope_theta).frequencies(cpu)
        for length in {original or 8192, 8192}:
            scaling = RopeScaling(kind="llama3", factor=round(float(stored.max()), 3), original_max_seq_len=length)
            scaled = Positions(section.size_of_head, section.rope_theta, scaling).frequencies(cpu)
            if torch.allclose(plain.double() / scaled.double(), stored, rtol=1e-3):
                return scaling
        raise ConfigError(f"{self.path}: its rope_freqs are not those of a Llama 3.1, 3.2 or 3.3")

    # ----------------------------------------------------------------------------------------------- tokenizer
    def write_tokenizer(self, folder: Path) -> str | None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``; where it can't, says why and writes nothing."""
        kind, pre = self.value("tokenizer.ggml.model"), self.value("tokenizer.ggml.pre", "gpt-2")
        if kind != "gpt2" or pre not in _GPT2_LIKE + _DIGIT_BY_DIGIT + _LLAMA3_LIKE + _QWEN_LIKE:
            known = kind if kind != "gpt2" else pre
            return f"its tokenizer ({known!r}) is not rebuilt: copy tokenizer.json of the original model beside it"
        tokens: list[str] = self.value("tokenizer.ggml.tokens")
        tokenizer = _tokenizer(
            tokens,
            self.value("tokenizer.ggml.merges"),
            self.value("tokenizer.ggml.token_type", [_NORMAL] * len(tokens)),
            pre,
            bos=self.special_ids.get("bos_token_id") if self._adds_bos(pre) else None,
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.section.max_seq_len,
            "clean_up_tokenization_spaces": False,
        }
        for key, number in self.special_ids.items():
            settings[key.removesuffix("_id")] = tokens[number]
        if (template := self.value("tokenizer.chat_template")) is not None:
            settings["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        return None

    def _adds_bos(self, pre: str) -> bool:
        return bool(self.value("tokenizer.ggml.add_bos_token", pre in _LLAMA3_LIKE))

    @property
    def special_ids(self) -> dict[str, Any]:
        """``bos_token_id`` and its like, where the file names them."""
        found = {
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.value("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.value("tokenizer.ggml.padding_token_id"),
        }
        return {key: number for key, number in found.items() if number is not None}


def _as_written(value: float) -> float:
    """A float32 of the file as the decimal number that was meant: 1e-05 for 9.999999747378752e-06."""
    return float(np.format_float_positional(np.float32(value), unique=True)) if math.isfinite(value) else value


def _tokenizer(tokens: list[str], merges: list[str], types: list[int], pre: str, *, bos: int | None) -> Any:
    """A byte-level BPE of ``tokenizers``, splitting text as the runtimes do for ``tokenizer.ggml.pre``."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=pairs,
            ignore_merges=pre in _LLAMA3_LIKE,
        )
    )
    splitter: Any
    if pre in _GPT2_LIKE:
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _DIGIT_BY_DIGIT:
        splitter = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        numbers = r"\p{N}{1,3}" if pre in _LLAMA3_LIKE else r"\p{N}"
        splitter = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LETTERS.replace("NUMBERS", numbers)), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.pre_tokenizer = splitter
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for kind in (_CONTROL, _USER_DEFINED):
        special = kind == _CONTROL
        known = [
            AddedToken(token, special=special, normalized=False)
            for token, t in zip(tokens, types, strict=True)
            if t == kind
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(known)
    byte_level = processors.ByteLevel(trim_offsets=False)
    if bos is None:
        tokenizer.post_processor = byte_level
    else:
        first = tokens[bos]
        template = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first}:1 $B:1", special_tokens=[(first, bos)]
        )
        tokenizer.post_processor = processors.Sequence([byte_level, template])
    return tokenizer


def layout(section: ModelSection) -> list[Stored]:
    """Every tensor of a model as GGUF names it: in parts as ``transformers`` has them, matrices never transposed."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = family_of(section)
    architecture = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind.model_types[0])
    names = get_tensor_name_map(architecture, section.layers)
    heads = {"attn_q": section.heads, "attn_k": section.num_kv_heads} if kind.permuted else {}
    found = []
    for each in stored_tensors(section):
        base, _, suffix = each.name.rpartition(".")
        theirs = names.get_name(base)
        assert theirs is not None, base
        permuted = heads.get(theirs.rpartition(".")[2], 0)
        found.append(Stored(f"{theirs}.{suffix}", each.parts, permuted_heads=permuted))
    return found
