"""Hugging Face data sets: from the hub, downloaded or streamed, and folders that ``save_to_disk`` wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest
from atoll.train.data.formats import Piece, text_of
from atoll.train.data.source_files import find_files, reading
from atoll.train.recipe.schema import DataSection

PREFIX = "hf://"
_ROWS_AT_A_TIME = 1000


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` of ``datasets`` wrote it."""
    with reading(str(folder)):
        return (folder / "dataset_dict.json").is_file() or (
            (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
        )


class HubRows:
    """One split of a Hugging Face data set; each row's ``text_key`` is a document."""

    unit: str = "rows"
    names: tuple[str, ...] = ()
    is_tokens: bool = False

    def __init__(self, section: DataSection, path: str) -> None:
        self._section = section
        self.name = path
        self.done = 0
        self.total: int | None = None
        folder = Path(path.removeprefix(PREFIX)).expanduser()
        self._saved = folder if not path.startswith(PREFIX) and is_saved_dataset(folder) else None
        self._builder = None if self._saved else self._load_builder(path)

    @property
    def note(self) -> str:
        """One line on what is read."""
        how = "saved on disk" if self._saved else "streamed from the hub" if self._section.streaming else "from the hub"
        return f"data: Hugging Face data set {self.name}, split {self._section.split!r}, {how}, one document a row"

    def identity(self) -> list[Any]:
        """What tells this content from any other."""
        section = self._section
        if self._builder is None:
            files = find_files(str(self._saved), [])
            return ["saved", [(file.path, file.num_bytes, file.stamp) for file in files], section.split]
        return ["hub", self.name, section.subset, section.split, str(self._builder.hash)]

    def token_bytes(self) -> int:
        """None: the rows are text."""
        return 0

    def pieces(self, *, eos_id: int | None = None, vocab_size: int | None = None) -> Iterator[Piece]:
        """The texts, in the data set's order.

        Raises:
            ConfigError: no such split or column, or the hub cannot be reached.
        """
        key = self._section.text_key
        self.done = 0
        with _hub_errors(self.name):
            rows = self._rows()
            if key in (rows.column_names or ()):  # a stream may tell its columns with its first rows only
                rows = rows.select_columns([key])
            for batch in rows.iter(batch_size=_ROWS_AT_A_TIME):
                for values in zip(*batch.values(), strict=True):
                    row = dict(zip(batch, values, strict=True))
                    yield text_of(row, key, f"{self.name}, row {self.done}"), True
                    self.done += 1

    def _load_builder(self, path: str) -> Any:
        name, _, revision = path.removeprefix(PREFIX).removeprefix("datasets/").partition("@")
        if not name.strip("/"):
            raise ConfigError(f"[data] path = {path!r} is not a data set: expected hf://owner/name")
        with _hub_errors(path):
            return _datasets(path).load_dataset_builder(name, self._section.subset, revision=revision or None)

    def _rows(self) -> Any:
        split = self._section.split
        if self._builder is None:
            rows = _datasets(self.name).load_from_disk(str(self._saved))
            if isinstance(rows, dict):
                if split not in rows:
                    there = ", ".join(map(repr, rows))
                    raise ConfigError(f"{self.name} has no split {split!r}{nearest(split, rows)}; there are {there}")
                rows = rows[split]
            self.total = len(rows)
            return rows
        if not self._section.streaming:
            self._builder.download_and_prepare()
        if (known := (self._builder.info.splits or {}).get(split)) is not None:
            self.total = known.num_examples or None
        if self._section.streaming:
            return self._builder.as_streaming_dataset(split=split)
        return self._builder.as_dataset(split=split)


def _datasets(path: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f'{path}: Hugging Face data sets need datasets: pip install "atoll[data]"') from None
    return datasets


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """What ``datasets`` and the hub raise, told as ``ConfigError``."""
    try:
        with reading(name):
            yield
    except ConfigError:
        raise
    # An unknown subset or split, where the text lists those there are; and the root of the library's own errors.
    except (ValueError, _datasets(name).exceptions.DatasetsError) as error:
        raise ConfigError(f"{name}: {error}. Look at [data] subset and split") from error
