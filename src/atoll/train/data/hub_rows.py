"""Hugging Face data sets: from the hub, downloaded or streamed, and folders that ``save_to_disk`` wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.validation import nearest
from atoll.train.data.formats import missing_key, text_of
from atoll.train.data.source_files import SourceFile, find_files, reading
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
        if self._saved:
            files: list[SourceFile] = find_files(str(self._saved))
            return ["saved", [(file.path, file.num_bytes, file.stamp) for file in files], self._section.split]
        assert self._builder is not None
        return ["hub", self.name, self._section.subset, self._section.split, str(self._builder.hash)]

    def token_bytes(self) -> int:
        """None: the rows are text."""
        return 0

    def documents(self, *, eos_id: int | None = None, vocab_size: int | None = None) -> Iterator[str]:
        """The texts, in the data set's order.

        Raises:
            ConfigError: no such split or column, or the hub cannot be reached.
        """
        with _hub_errors(self.name):
            rows = self._rows()
        key = self._section.text_key
        columns = rows.column_names
        if columns is not None:
            if key not in columns:
                texts = [name for name in columns if getattr((rows.features or {}).get(name), "dtype", "") == "string"]
                raise missing_key(list(columns), texts, key, self.name)
            rows = rows.select_columns([key])
        self.done = 0
        with _hub_errors(self.name):
            for batch in rows.iter(batch_size=_ROWS_AT_A_TIME):
                if key not in batch:  # a stream tells its columns with its first rows
                    texts = [name for name, values in batch.items() if isinstance(values[0], str)]
                    raise missing_key(list(batch), texts, key, self.name)
                for text in batch[key]:
                    yield text_of({key: text}, key, f"{self.name}, row {self.done}")
                    self.done += 1

    def _load_builder(self, path: str) -> Any:
        datasets = _datasets(path)
        name, _, revision = path.removeprefix(PREFIX).removeprefix("datasets/").partition("@")
        if not name.strip("/"):
            raise ConfigError(f"[data] path = {path!r} is not a data set: expected hf://owner/name")
        with _hub_errors(path):
            return datasets.load_dataset_builder(name, self._section.subset, revision=revision or None)

    def _rows(self) -> Any:
        split = self._section.split
        if self._saved:
            loaded = _datasets(self.name).load_from_disk(str(self._saved))
            if isinstance(loaded, dict):
                self._check_split(loaded)
                loaded = loaded[split]
            self.total = len(loaded)
            return loaded
        assert self._builder is not None
        if self._builder.info.splits and not any(mark in split for mark in "[+"):
            self._check_split(self._builder.info.splits)
            self.total = self._builder.info.splits[split].num_examples or None
        if self._section.streaming:
            return self._builder.as_streaming_dataset(split=split)
        self._builder.download_and_prepare()
        rows = self._builder.as_dataset(split=split)
        self.total = len(rows)
        return rows

    def _check_split(self, splits: Any) -> None:
        split = self._section.split
        if split not in splits:
            there = ", ".join(map(repr, splits))
            raise ConfigError(
                f"{self.name} has no split {split!r}{nearest(split, splits)}; [data] split is one of {there}"
            )


def _datasets(path: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{path}: Hugging Face data sets need the datasets package: pip install datasets") from None
    return datasets


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """What ``datasets`` and the hub raise, told as ``ConfigError``."""
    errors = _datasets(name).exceptions
    try:
        with reading(name):
            yield
    except errors.DatasetsError as error:
        raise ConfigError(f"{name}: {error}") from error
    except ConfigError:
        raise
    except ValueError as error:  # an unknown subset or split; the text lists those there are
        raise ConfigError(f"{name}: {error}. Look at [data] subset and split") from error
