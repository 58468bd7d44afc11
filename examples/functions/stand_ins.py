"""Small real data for what the guide leaves undefined or downloads: paragraphs of two novels, told apart by their
words, and images of digits.

Only the driver uses this file; the data travels to the ranks as globals of the scripts.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
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


def digits(num_test: int = 297) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """scikit-learn's 1,797 handwritten digits in the shape of MNIST: images (N, 28, 28) of 0 to 255 and labels (N,).

    Two pairs, to train and to test with.
    """
    import numpy as np
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)  # 8 × 8, of 0 to 16
    nearest = np.arange(28) * 8 // 28
    images = (images.reshape(-1, 8, 8)[:, nearest][:, :, nearest] * (255 / 16)).astype(np.uint8)
    return (images[num_test:], labels[num_test:]), (images[:num_test], labels[:num_test])


def _long_paragraphs(novel: str) -> list[str]:
    text = (_NOVELS / f"{novel}.txt").read_bytes().decode("utf-8")
    return [" ".join(part.split()) for part in re.split(r"\n{2,}", text) if len(part) > 250]
