"""GGUF files, as llama.cpp and its kin use: the network and tokenizer that their metadata describe, and their names."""

from __future__ import annotations

import json
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
# Ours by what follows the architecture's name in the metadata.
_KEYS = {
    "layers": "block_count",
    "dim": "embedding_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "hidden_dim": "feed_forward_length",
    "max_seq_len": "context_length",
    "rope_theta": "rope.freq_base",
}
_OPTIONAL = ("kv_heads", "head_dim", "rope_theta")


class GgufFile:
    """One open GGUF file.

    Attributes:
        shapes: of its tensors, by name in the file's order.

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
        self.shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """A tensor as float32."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        data = np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W")  # the file is mapped read-only
        return torch.from_numpy(data).view(self.shapes[name])

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
        if "token_embd.weight" not in self._tensors:
            raise ConfigError(f"{self.path} has no tensor token_embd.weight: is it a whole language model?")
        rotary = family(known[kind]).rotary
        names = {ours: f"{kind}.{theirs}" for ours, theirs in _KEYS.items() if rotary or ours != "rope_theta"}
        found = {ours: self.value(theirs) for ours, theirs in names.items()}
        epsilon = self.value(f"{kind}.attention.layer_norm_rms_epsilon")
        fields = {
            **{ours: value for ours, value in found.items() if value is not None or ours not in _OPTIONAL},
            "family": known[kind],
            "vocab_size": self.shapes["token_embd.weight"][0],
            "tied": "output.weight" not in self._tensors,
            "norm_eps": _as_written(epsilon or self.value(f"{kind}.attention.layer_norm_epsilon", 1e-5)),
        }
        section = checked(ModelSection, fields, str(self.path), names)
        window = self.value(f"{kind}.attention.sliding_window") or section.max_seq_len
        changes: dict[str, Any] = {
            "kv_heads": section.num_kv_heads,
            "head_dim": None if section.size_of_head * section.heads == section.dim else section.head_dim,
            "max_seq_len": min(section.max_seq_len, window),
        }
        if rotary:
            rotated = self.value(f"{kind}.rope.dimension_count", section.size_of_head)
            if rotated != section.size_of_head:
                raise ConfigError(
                    f"{self.path}: rotary positions on {rotated} of {section.size_of_head} dimensions are not supported"
                )
            changes["rope_scaling"] = self._scaling(kind, section)
        return section.model_copy(update=changes)

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
        # Llama 3.1's scaling is stored as what it makes of each frequency.
        stored = self.read("rope_freqs.weight").double()
        cpu = torch.device("cpu")
        plain = Positions(section.size_of_head, section.rope_theta).frequencies(cpu)
        factor = round(float(stored.max()), 3)
        scaling = RopeScaling(kind="llama3", factor=factor, original_max_seq_len=original or 8192)
        scaled = Positions(section.size_of_head, section.rope_theta, scaling).frequencies(cpu)
        if not torch.allclose(plain.double() / scaled.double(), stored, rtol=1e-3):
            raise ConfigError(f"{self.path}: its rope_freqs are not those of a Llama 3.1, 3.2 or 3.3")
        return scaling

    # ----------------------------------------------------------------------------------------------- tokenizer
    def write_tokenizer(self, folder: Path) -> str | None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``; where it can't, says why and writes nothing."""
        kind, pre = self.value("tokenizer.ggml.model"), self.value("tokenizer.ggml.pre", "gpt-2")
        if kind != "gpt2" or pre not in _GPT2_LIKE + _DIGIT_BY_DIGIT + _LLAMA3_LIKE + _QWEN_LIKE:
            known = kind if kind != "gpt2" else pre
            return f"its tokenizer ({known!r}) is not rebuilt: copy tokenizer.json of the original model beside it"
        tokens: list[str] = self.value("tokenizer.ggml.tokens")
        types = self.value("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
        adds_bos = self.value("tokenizer.ggml.add_bos_token", pre in _LLAMA3_LIKE)
        bos = self.special_ids.get("bos_token_id") if adds_bos else None
        tokenizer = _tokenizer(tokens, self.value("tokenizer.ggml.merges"), types, pre, bos=bos)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.section.max_seq_len,
            "clean_up_tokenization_spaces": False,
            **{key.removesuffix("_id"): tokens[number] for key, number in self.special_ids.items()},
        }
        if (template := self.value("tokenizer.chat_template")) is not None:
            settings["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        return None

    @property
    def special_ids(self) -> dict[str, Any]:
        """``bos_token_id`` and its like, where the file names them."""
        names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        found = {key: self.value(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
        return {key: number for key, number in found.items() if number is not None}


def _as_written(value: float) -> float:
    """A float32 of the file as the decimal number that was meant: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tokenizer(tokens: list[str], merges: list[str], types: list[int], pre: str, *, bos: int | None) -> Any:
    """A byte-level BPE of ``tokenizers``, splitting text as the runtimes do for ``tokenizer.ggml.pre``."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _LLAMA3_LIKE))
    splitters: list[Any] = []
    if pre in _DIGIT_BY_DIGIT:
        splitters.append(pre_tokenizers.Digits(individual_digits=True))
    by_letters = pre in _LLAMA3_LIKE + _QWEN_LIKE
    if by_letters:
        numbers = r"\p{N}{1,3}" if pre in _LLAMA3_LIKE else r"\p{N}"
        splitters.append(pre_tokenizers.Split(Regex(_LETTERS.replace("NUMBERS", numbers)), "isolated"))
    splitters.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not by_letters))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
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
