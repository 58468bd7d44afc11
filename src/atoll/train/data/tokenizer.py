"""Tokenizers: bytes, byte-level BPE trained on the data, and those of Hugging Face, from a file, folder or the hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from atoll.core.errors import ConfigError
from atoll.core.paths import write_atomic
from atoll.core.validation import nearest
from atoll.train.data.formats import Piece

TRAINING_CHARACTERS = 1 << 29  # of text that "bpe:N" learns from, at most
_MOST_DIGITS = 8  # of the N of "bpe:N"
_LEAST_TOKENS, _MOST_TOKENS = 258, 1 << 24
END_OF_TEXT = "<|endoftext|>"

_BYTES_CLASS = "atoll-bytes"
# What may lie beside tokenizer.json and is kept when a tokenizer is saved again.
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_COMPANIONS = (*_SETTINGS, "added_tokens.json", "chat_template.jinja")
_PATTERNS = ["tokenizer.json", *_COMPANIONS, "vocab.json", "merges.txt"]
_KNOWN_EOS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
_KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]")
# After a line's end where a letter follows: no token of a byte-level vocabulary crosses that place.
_SAFE_CUT = re.compile(r"(?<=\S\n)(?=[^\W\d_])")
_PIECE_CHARACTERS = 1 << 15


class ByteTokenizer:
    """The 256 bytes of UTF-8, then bos 256, eos 257, pad 258 and a spare one: 260 divides by 2 and 4.

    Attributes:
        vocab_size: the largest token id + 1, added tokens included.
        bos_id, eos_id: the tokens that begin and end a text, where it has them.
        adds_bos: whether a text begins with ``bos_id`` for this tokenizer; it is for the caller to add.
        can_cut: whether the pieces of ``cut`` have the tokens of the whole text.
        fingerprint: digest of all that decides which tokens come out.
    """

    name = "bytes"
    vocab_size = 260
    bos_id: int | None = 256
    eos_id: int | None = 257
    adds_bos = False
    can_cut = True
    fingerprint = "bytes-260"

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``; none are added at its ends."""
        return list(text.encode())

    def encode_arrays(self, texts: list[str], *, workers: int = 0) -> list[NDArray[Any]]:
        """Tokens of each text as unsigned integers, on ``workers`` cores (0: on all)."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; special ones are left out, and broken UTF-8 is replaced."""
        return bytes(each for each in ids if each < 256).decode("utf-8", "replace")

    def save(self, folder: str | Path) -> None:
        """Write it so that ``load_tokenizer(folder)`` gives it back."""
        _write_json(Path(folder) / "tokenizer_config.json", {"tokenizer_class": _BYTES_CLASS})


class FastTokenizer:
    """A tokenizer of the ``tokenizers`` library, with what ``ByteTokenizer`` has.

    Args:
        companions: files that lay beside it, by name: they tell its special tokens and are saved with it.

    Raises:
        ConfigError: they give a token another number than its vocabulary.
    """

    def __init__(self, engine: tokenizers.Tokenizer, name: str, companions: dict[str, bytes]) -> None:
        engine.no_truncation()
        engine.no_padding()
        self.name = name
        self._engine = engine
        self._companions = companions
        config = _merged(companions)
        _add_declared(engine, config, companions, name)
        splits = config.get("split_special_tokens") is True
        engine.encode_special_tokens = splits  # as text: "</s>" in a document ends none
        vocabulary = engine.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos_id = _special_id("bos", config, vocabulary, _KNOWN_BOS)
        self.eos_id = _special_id("eos", config, vocabulary, _KNOWN_EOS)
        self.adds_bos = self._adds_bos(config.get("add_bos_token"))
        content = json.dumps([engine.to_str(), self.bos_id, self.eos_id, self.adds_bos, *([splits] if splits else [])])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:32]
        self.can_cut = _can_cut(json.loads(engine.to_str()))

    def encode(self, text: str) -> list[int]:
        with self._encoding():
            return list(self._engine.encode(text, add_special_tokens=False).ids)

    def encode_arrays(self, texts: list[str], *, workers: int = 0) -> list[NDArray[Any]]:
        def encode(some: list[str]) -> list[NDArray[Any]]:
            with self._encoding():
                found = self._engine.encode_batch_fast(some, add_special_tokens=False)
            return [np.array(each.ids, dtype=np.uint32) for each in found]

        if workers == 0:  # the library's own threads divide a batch
            return encode(texts)
        # They have no limit of their own: with so many batches of one text at a time no more of them have work.
        with ThreadPoolExecutor(workers) as threads:
            return [tokens for one in threads.map(encode, ([text] for text in texts)) for tokens in one]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._engine.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: str | Path) -> None:
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, content in self._companions.items():
            write_atomic(target / name, content, mode=0o644)
        if "tokenizer_config.json" not in self._companions:
            special = {"bos_token": self.bos_id, "eos_token": self.eos_id}
            named = {key: self._engine.id_to_token(value) for key, value in special.items() if value is not None}
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": self.adds_bos, **named}
            _write_json(target / "tokenizer_config.json", config)
        write_atomic(target / "tokenizer.json", self._engine.to_str(pretty=True).encode(), mode=0o644)

    def _adds_bos(self, configured: Any) -> bool:
        """As the configuration says, else as the template of the tokenizer itself does."""
        if self.bos_id is None:
            return False
        if isinstance(configured, bool):
            return configured
        with self._encoding():
            return self._engine.encode("a", add_special_tokens=True).ids[:1] == [self.bos_id]

    @contextlib.contextmanager
    def _encoding(self) -> Iterator[None]:
        """Text that has no tokens here, told as ``ConfigError``."""
        try:
            yield
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"[data] tokenizer = {self.name!r} cannot encode the text: {error}. Give it an unk_token"
            ) from error


Tokenizer = ByteTokenizer | FastTokenizer


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer behind ``[data] tokenizer``.

    Args:
        spec: ``"bytes"``, a ``tokenizer.json``, a folder that holds one (or ``vocab.json`` with ``merges.txt``), or a
            name on the hub.

    Raises:
        ConfigError: there is no such tokenizer, or its files cannot be read.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec.startswith("bpe:"):
        raise ConfigError(f"[data] tokenizer = {spec!r} is learnt from the data, and there is none: set [data] path")
    path = Path(spec).expanduser()
    if path.is_dir():
        return _from_folder(path, spec)
    if path.is_file():
        return _from_folder(path.parent, spec, path.name)
    from atoll.train.hub import fetch, is_hub_name

    if not is_hub_name(spec):
        hint = nearest(spec, ["bytes", "bpe:4096"])
        raise ConfigError(
            f"[data] tokenizer = {spec!r} does not exist (looked for in {Path.cwd()}){hint}; expected 'bytes', "
            "'bpe:4096', a tokenizer.json, a folder that holds one, or a hub name like 'owner/name'"
        )
    return _from_folder(fetch(spec, patterns=_PATTERNS), spec)


def train_bpe(texts: Iterable[str], vocab_size: int) -> FastTokenizer:
    """A byte-level BPE (Sennrich et al. 2016, on bytes as in GPT-2) learnt from ``texts``; its eos is <|endoftext|>.

    Equal texts give equal tokenizers. Little text may give fewer than ``vocab_size`` tokens.
    """
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(_first_characters(texts), trainer)
    return FastTokenizer(engine, f"bpe:{vocab_size}", {})


def _first_characters(texts: Iterable[str]) -> Iterator[str]:
    room = TRAINING_CHARACTERS
    for text in texts:
        if room <= 0:
            return
        yield text[:room]
        room -= len(text)


def bpe_size(spec: str) -> int:
    """The N of ``bpe:N``.

    Raises:
        ConfigError: it is no number, leaves no room over the 256 bytes, or is more than any vocabulary has.
    """
    number = spec.removeprefix("bpe:").replace("_", "")
    size = int(number) if number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS else 0
    if not _LEAST_TOKENS <= size <= _MOST_TOKENS:
        raise ConfigError(
            f"[data] tokenizer = {spec!r}: expected a number of tokens from {_LEAST_TOKENS} (256 bytes and "
            f"{END_OF_TEXT} come first) to {_MOST_TOKENS}, like 'bpe:4096'"
        )
    return size


def cut(pieces: Iterable[Piece], *, can_cut: bool = True) -> Iterator[Piece]:
    """The same documents with their texts in short pieces that can be encoded one by one.

    Args:
        can_cut: of the tokenizer; where it cannot, each text is one piece.
    """
    text, searched = "", 0  # what is left of a document, and how much of that has no place for a cut
    for content, ends in pieces:
        if not isinstance(content, str):
            yield content, ends
            continue
        text += content
        start = 0
        while can_cut and (found := _SAFE_CUT.search(text, max(start + _PIECE_CHARACTERS, searched))):
            yield text[start : found.start()], False
            start = found.start()
        text = text[start:]
        searched = len(text)
        if ends:
            yield text, True
            text, searched = "", 0


def _from_folder(folder: Path, spec: str, name: str = "tokenizer.json") -> Tokenizer:
    companions = {each: (folder / each).read_bytes() for each in _COMPANIONS if (folder / each).is_file()}
    try:
        if _merged(companions).get("tokenizer_class") == _BYTES_CLASS:
            return ByteTokenizer()
        if (folder / name).is_file():
            engine = tokenizers.Tokenizer.from_buffer((folder / name).read_bytes())
        else:
            engine = _gpt2_engine(folder, bool(_merged(companions).get("add_prefix_space", False)))
        return FastTokenizer(engine, spec, companions)
    except ConfigError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"[data] tokenizer = {spec!r}: {folder} has no {name} (or vocab.json with merges.txt) that can be read "
            f"({error}). Save one, also of a SentencePiece model, with "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(new_folder) of transformers"
        ) from error


def _gpt2_engine(folder: Path, add_prefix_space: bool) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    )
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    engine.decoder = tokenizers.decoders.ByteLevel()
    known = engine.get_vocab()
    engine.add_special_tokens([each for each in (*_KNOWN_EOS, *_KNOWN_BOS) if each in known])
    return engine


def _merged(companions: dict[str, bytes]) -> dict[str, Any]:
    """All keys of the companions; those of the tokenizer's own configuration come first."""
    out: dict[str, Any] = {}
    for name in reversed(_SETTINGS):
        out |= {key: value for key, value in json.loads(companions.get(name, b"{}")).items() if value is not None}
    return out


def _add_declared(
    engine: tokenizers.Tokenizer, config: dict[str, Any], companions: dict[str, bytes], name: str
) -> None:
    """Add the tokens that only the files beside ``tokenizer.json`` have, as ``transformers`` does."""
    declared = config.get("added_tokens_decoder")
    if declared is None:  # how it was written before
        legacy = json.loads(companions.get("added_tokens.json", b"{}"))
        declared = {number: {"content": token} for token, number in legacy.items()}
    known = engine.get_added_tokens_decoder()
    for number, entry in sorted(((int(number), entry) for number, entry in declared.items()), key=lambda each: each[0]):
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token = tokenizers.AddedToken(entry["content"], **{key: entry[key] for key in flags if key in entry})
        if number not in known or known[number].content != token.content or known[number].special != token.special:
            engine.add_tokens([token])
        if (found := engine.token_to_id(token.content)) != number:
            raise ConfigError(
                f"[data] tokenizer = {name!r}: its configuration says that token {token.content!r} is number {number}, "
                f"and its vocabulary makes it {found}: get its files again"
            )


def _special_id(which: str, config: dict[str, Any], vocabulary: dict[str, int], known: Sequence[str]) -> int | None:
    token = config.get(f"{which}_token")
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str) and token in vocabulary:
        return vocabulary[token]
    number = config.get(f"{which}_token_id")
    number = number[0] if isinstance(number, list) and number else number
    if isinstance(number, int) and number in vocabulary.values():
        return number
    return next((vocabulary[each] for each in known if each in vocabulary), None)


def _can_cut(config: dict[str, Any]) -> bool:
    """Whether cutting at ``_SAFE_CUT`` leaves the tokens as they are: byte-level, and nothing looks across lines."""
    first = config.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", [first])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    normalizer = (config.get("normalizer") or {}).get("type")
    return (
        bool(byte_level)
        and all(step.get("type") in ("ByteLevel", "Split", "Digits", "Punctuation") for step in steps)
        and not any(step.get("add_prefix_space") for step in byte_level)
        and normalizer in (None, "NFC")
        and not any(
            token["lstrip"] or token["rstrip"] or token["single_word"] or re.search(r"\s", token["content"])
            for token in config.get("added_tokens", [])
        )
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(content, indent=2).encode(), mode=0o644)
