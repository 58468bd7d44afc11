"""Small real data for what the guide leaves undefined: paragraphs of two novels, told apart by their words.

Only the driver uses this file; the data travels to the ranks as globals of the scripts.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_NOVELS = Path(__file__).parent.parent / "austen" / "data"
_WORD = re.compile(r"[a-z']+")


def paragraphs(num: int, skip: int = 0) -> tuple[list[str], list[int]]:
    """``num`` paragraphs and their labels: in turn one of `Emma` (label 0) and one of `Persuasion` (label 1).

    ``skip`` leaves out as many from the beginning, for a test set that shares nothing with the training set.
    """
    halves = [_long_paragraphs(name)[skip // 2 : (skip + num) // 2] for name in ("emma", "persuasion")]
    return list(chain.from_iterable(zip(*halves, strict=True))), [0, 1] * (num // 2)


def word_counts(texts: list[str], num_words: int = 256) -> torch.Tensor:
    """How often each of the commonest words stands in each text: log(1 + count), standardised; (N, num_words)."""
    import torch

    counts = [Counter(_WORD.findall(text.lower())) for text in texts]
    words = [word for word, _ in sum(counts, Counter()).most_common(num_words)]
    table = torch.tensor([[count[word] for word in words] for count in counts]).float().log1p()
    return (table - table.mean(dim=0)) / table.std(dim=0)


def _long_paragraphs(novel: str) -> list[str]:
    text = (_NOVELS / f"{novel}.txt").read_bytes().decode("utf-8")
    return [" ".join(part.split()) for part in re.split(r"\n{2,}", text) if len(part) > 250]
