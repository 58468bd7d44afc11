"""From ``[data]`` of a recipe to token shards: found, tokenised once, cached by content, opened."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import ConfigError
from atoll.core.paths import atoll_home
from atoll.train.data.formats import Piece, Tokens
from atoll.train.data.once import build_once
from atoll.train.data.order import GOLDEN, mixed
from atoll.train.data.shards import FORMAT_VERSION, ShardWriter, TokenShards, damage
from atoll.train.data.sources import Source, open_source
from atoll.train.data.tokenizer import Tokenizer, bpe_size, cut, load_tokenizer, train_bpe
from atoll.train.events import Progress
from atoll.train.recipe.schema import DataSection

FEW_DOCUMENTS = 20  # with fewer the end of each document is held out, instead of whole documents

_BATCH_CHARACTERS = 1 << 22
_BATCH_PIECES = 4096
_PROGRESS_EVERY_S = 0.2

# What is held out, in meta.json
TAILS, WHOLE = "the end of each document", "whole documents"

Report = Callable[[Progress], None]


@dataclass
class Prepared:
    """Data that is ready to be read.

    Attributes:
        train: shards of each part of the mixture, with its weight; one part where the recipe has no mixture.
        tokenizer: None where the files hold tokens and the recipe names no tokenizer.
    """

    train: list[tuple[TokenShards, float]]
    validation: TokenShards | None
    tokenizer: Tokenizer | None

    def close(self) -> None:
        """Unmap everything."""
        for shards, _ in self.train:
            shards.close()
        if self.validation is not None:
            self.validation.close()


def prepare(section: DataSection, *, seq_len: int, progress: Report, note: Callable[[str], None]) -> Prepared:
    """Find, tokenise and open the data. Every rank may call it at once: one process works, the others wait.

    Args:
        progress: told a few times a second.

    Raises:
        ConfigError: data or tokenizer are missing or broken; the message says which, where and what to do.
    """
    preparation = _Preparation(section, progress, note)
    train: list[tuple[TokenShards, float]] = []
    for source, weight in preparation.parts:
        shards = TokenShards.open(preparation.shards(source, preparation.fraction) / "train")
        if empty := shards.meta[0]["empty_documents"]:
            note(f"data: {empty:,} empty documents of {source.name} are left out")
        _check_length(source, shards, seq_len, preparation.fraction)
        train.append((shards, weight))
    validation = preparation.open_validation(seq_len)
    tokens, documents = (sum(getattr(each, name) for each, _ in train) for name in ("num_tokens", "num_documents"))
    held = "" if validation is None else f", {validation.num_tokens:,} held out"
    of = f"{documents:,} document{'s' if documents != 1 else ''}"
    note(f"data: {tokens:,} tokens in {of}{held}; kept in {preparation.root}")
    return Prepared(train, validation, preparation.tokenizer)


class _Preparation:
    """The sources and the tokenizer of one recipe, and where its shards go."""

    def __init__(self, section: DataSection, progress: Report, note: Callable[[str], None]) -> None:
        self.section = section
        self.progress = progress
        self.note = note
        self.root = Path(section.cache).expanduser().absolute() if section.cache else atoll_home() / "data"
        self.fraction = section.validation if isinstance(section.validation, float) else 0.0
        self.parts = [(self._open(paths), weight) for paths, weight in _parts(section)]
        self._own = None if isinstance(section.validation, float) else self._open(section.validation)
        trained = {name for part, _ in self.parts for name in part.names}
        if self._own and (both := trained.intersection(self._own.names)):
            note(
                f"data: {min(both)}{' and more' if len(both) > 1 else ''} of [data] validation is trained on too, so "
                "the validation loss tells nothing about new text"
            )
        self.tokenizer = self._load_tokenizer()
        if (self.tokenizer is None or self.tokenizer.eos_id is None) and any(part.is_tokens for part, _ in self.parts):
            note("data: no tokenizer says which token ends a document, so each token file is one document")

    def _open(self, paths: str | list[str]) -> Source:
        source = open_source(self.section, paths)
        self.note(source.note)
        return source

    def shards(self, source: Source, fraction: float) -> Path:
        """The folder with ``train`` and, where a fraction is held out, ``validation`` of a source."""
        options = [self.section.text_key, self.section.document_end, self.section.bin_dtype, fraction]
        tokenizer = self.tokenizer
        known = [tokenizer.fingerprint, tokenizer.vocab_size] if tokenizer else None
        folder = self.root / _digest([FORMAT_VERSION, known, source.identity(), options])
        build_once(
            folder,
            lambda aside: _Build(self.section, source, tokenizer, fraction, self.progress).into(aside),
            damage=lambda path: damage(path / "train") or (damage(path / "validation") if fraction else None),
            progress=self.progress,
            note=self.note,
        )
        return folder

    def open_validation(self, seq_len: int) -> TokenShards | None:
        """What is held out, over all parts; None, with a note, where that is less than a sequence."""
        if self._own is None and not self.fraction:
            return None
        if self._own is not None:
            shards = TokenShards.open(self.shards(self._own, 0.0) / "train")
        else:
            shards = TokenShards.open(*(self.shards(part, self.fraction) / "validation" for part, _ in self.parts))
        if any(each["held_out"] == TAILS for each in shards.meta):
            self.note(
                f"data: fewer than {FEW_DOCUMENTS} documents, so the last {self.fraction:.1%} of each is held out, not "
                "whole documents"
            )
        if shards.num_tokens > seq_len:
            return shards
        self.note(
            f"data: no validation, as {shards.num_tokens:,} held-out tokens are less than one sequence "
            f"(seq_len = {seq_len} and one to predict): raise [data] validation, or lower [train] seq_len"
        )
        shards.close()
        return None

    def _load_tokenizer(self) -> Tokenizer | None:
        spec = self.section.tokenizer
        sources = [source for source, _ in self.parts]
        if spec is None:
            if all(source.is_tokens for source in sources):
                return None
            raise ConfigError(
                "[data] tokenizer is missing: set it to 'bytes', to 'bpe:4096' (learnt from the data), to the hub name "
                "of a model ('HuggingFaceTB/SmolLM2-135M'), or to a folder with tokenizer.json"
            )
        if not spec.startswith("bpe:"):
            return load_tokenizer(spec)
        options = [self.section.text_key, self.section.document_end]
        folder = self.root / f"tokenizer-{_digest([spec, [source.identity() for source in sources], options])}"

        def learn(aside: Path) -> None:
            texts = (text for source in sources for text in _texts(source, self.progress))
            train_bpe(texts, bpe_size(spec)).save(aside)

        build_once(
            folder,
            learn,
            damage=lambda path: None if (path / "tokenizer.json").is_file() else "tokenizer.json is missing",
            progress=self.progress,
            note=self.note,
        )
        learnt = load_tokenizer(str(folder))
        learnt.name = spec
        return learnt


def _parts(section: DataSection) -> list[tuple[str | list[str], float]]:
    path = section.path
    if path is None or path in ("", []):
        raise ConfigError(
            "[data] path is missing: set it to a file, folder, glob, URL or 'hf://owner/name', for instance with "
            "--data.path my.txt"
        )
    if isinstance(path, str):
        return [(path, 1.0)]
    mixture = [(part.path, part.weight) for part in path if not isinstance(part, str)]
    return mixture or [([each for each in path if isinstance(each, str)], 1.0)]


def _digest(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content, default=list).encode()).hexdigest()[:32]


def _texts(source: Source, progress: Report) -> Iterator[str]:
    for content, _ in cut(_watched(source, source.pieces(), "learning the tokenizer", progress)):
        if not isinstance(content, str):
            raise ConfigError(
                f"{source.name} holds tokens, which no tokenizer can learn from: name the one that made them"
            )
        yield content


def _watched(source: Source, pieces: Iterator[Piece], phase: str, progress: Report) -> Iterator[Piece]:
    """The pieces, with the progress of their reading told now and then."""
    last = 0.0
    for piece in pieces:
        yield piece
        if time.monotonic() - last >= _PROGRESS_EVERY_S:
            last = time.monotonic()
            progress(Progress(phase, source.done, source.total, source.unit))
    progress(Progress(phase, source.done, source.total, source.unit))


def _check_length(source: Source, shards: TokenShards, seq_len: int, fraction: float) -> None:
    if shards.num_tokens <= seq_len:
        held = f", as [data] validation = {fraction} holds out the rest" if fraction else ""
        raise ConfigError(
            f"{source.name} has {shards.num_tokens:,} tokens to train on{held}, less than one sequence: "
            f"seq_len = {seq_len} needs {seq_len + 1:,}. Lower {'[data] validation or ' if fraction else ''}"
            "[train] seq_len, or add data"
        )


def is_held_out(index: int, fraction: float) -> bool:
    """Whether document ``index`` of a source is held out: a hash of the index alone, so order and worker don't matter.

    One of the first ``FEW_DOCUMENTS`` always is, so that small data has something held out.
    """
    return _share(index) < fraction or index == _FIRST_HELD_OUT


def _share(index: int) -> float:
    """The index as an even-looking number in [0, 1)."""
    return mixed(index * GOLDEN) / 2**64


_FIRST_HELD_OUT = min(range(FEW_DOCUMENTS), key=_share)


@dataclass
class _Build:
    """Tokenises one source into a folder."""

    _section: DataSection
    _source: Source
    _tokenizer: Tokenizer | None
    _fraction: float
    _progress: Report
    _empty: int = 0
    _begins: bool = True  # whether the next piece is the first of its document

    def into(self, folder: Path) -> None:
        """Write ``folder/train`` and, where a fraction is held out, ``folder/validation``."""
        by = self._tokenizer
        vocab_size = by.vocab_size if by else 1 << 8 * self._source.token_bytes()
        names = ["train", "validation"] if self._fraction else ["train"]
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(ShardWriter(folder / name, vocab_size=vocab_size)) for name in names]
            documents = stack.enter_context(contextlib.closing(self._documents(folder)))
            held_out = self._divide(documents, *writers) if self._fraction else None
            for document in documents:  # all that is not divided
                writers[0].add(document)
            about = {
                "tokenizer": None if by is None else {"name": by.name, "fingerprint": by.fingerprint},
                "source": self._source.name,
                "held_out": held_out,
                "empty_documents": self._empty,
            }
            for writer in writers:
                writer.finish(**about)

    def _divide(self, documents: Iterator[Tokens], train: ShardWriter, held: ShardWriter) -> str:
        """Write each document where it belongs; returns what is held out."""
        first = list(itertools.islice(documents, FEW_DOCUMENTS))
        if len(first) < FEW_DOCUMENTS:
            for document in first:
                kept = len(document) - round(len(document) * self._fraction)
                train.add(document[:kept])
                if kept < len(document):
                    held.add(document[kept:])
            return TAILS
        for index, document in enumerate(itertools.chain(first, documents)):
            (held if is_held_out(index, self._fraction) else train).add(document)
        return WHOLE

    def _documents(self, folder: Path) -> Generator[Tokens, None, None]:
        """Documents as tokens; one of several pieces is a file without a name, as no memory may hold it."""
        with contextlib.closing(self._tokenised()) as pieces:
            for tokens, ends in pieces:
                if ends:
                    yield tokens
                    continue
                with tempfile.TemporaryFile(dir=folder) as file:
                    file.write(tokens.tobytes())
                    is_last = False
                    while not is_last:
                        following, is_last = next(pieces)
                        file.write(following.tobytes())
                    file.flush()
                    yield np.memmap(file, dtype=tokens.dtype, mode="r") if file.tell() else tokens

    def _tokenised(self) -> Generator[tuple[Tokens, bool], None, None]:
        """Tokens of each piece, in order; a batch is encoded while the next one is read."""
        with ThreadPoolExecutor(1) as thread, contextlib.closing(self._batches()) as batches:
            running: Future[list[tuple[Tokens, bool]]] | None = None
            for batch in batches:
                following = thread.submit(self._encode, batch)
                yield from running.result() if running else ()
                running = following
            yield from running.result() if running else ()

    def _batches(self) -> Generator[list[Piece], None, None]:
        """The pieces of documents that are not empty, many at a time."""
        by = self._tokenizer
        read = self._source.pieces(eos_id=by.eos_id if by else None, vocab_size=by.vocab_size if by else None)
        watched = _watched(self._source, read, "tokenising", self._progress)
        batch: list[Piece] = []
        size, begins = 0, True
        for content, ends in cut(watched, can_cut=by is None or by.can_cut):
            if begins and ends and not len(content):
                self._empty += 1
                continue
            batch.append((content, ends))
            begins = ends
            size += len(content)
            if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
                yield batch
                batch, size = [], 0
        yield batch

    def _encode(self, batch: list[Piece]) -> list[tuple[Tokens, bool]]:
        """The batch as tokens, with those that begin and end a text."""
        by = self._tokenizer
        texts = [content for content, _ in batch if isinstance(content, str)]
        if by is None and texts:
            raise ConfigError(f"{self._source.name} holds text beside tokens: set [data] tokenizer")
        encoded = iter(by.encode_arrays(texts, workers=self._section.workers) if by and texts else ())
        bos = [by.bos_id] if by and by.adds_bos and by.bos_id is not None else []
        eos = [by.eos_id] if by and by.eos_id is not None else []
        dtype = np.uint16 if by and by.vocab_size <= 1 << 16 else np.uint32
        out: list[tuple[Tokens, bool]] = []
        for content, ends in batch:
            if isinstance(content, str):
                parts = (bos if self._begins else [], next(encoded), eos if ends else [])
                out.append((np.concatenate(parts, dtype=dtype, casting="unsafe"), ends))
            else:
                out.append((content, ends))
            self._begins = ends
        return out
