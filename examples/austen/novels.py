"""The six novels: reading them, and turning text into tokens and back. Standard library only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

DATA = Path(__file__).parent / "data"

# A word with the space before it, a run of punctuation with the space before it, or white space.
PIECE = re.compile(r" ?[^\W\d_]+| ?[^\w\s]+|\n+|.", re.DOTALL)


def read_novels(folder: Path = DATA) -> dict[str, str]:
    """The text of each novel by name, exactly as in its file."""
    return {path.stem: path.read_bytes().decode("utf-8") for path in sorted(folder.glob("*.txt"))}


def join_lines(text: str) -> str:
    """One line per paragraph: where a printed line breaks says nothing about the language."""
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    return re.sub(r" +", " ", re.sub(r"\n{2,}", "\n\n", text))


def split(text: str, held_out: float = 0.05) -> tuple[str, str]:
    """The part to train on, and the end of the novel, which the model never sees: ``held_out`` of its characters."""
    cut = round(len(text) * (1 - held_out))
    return text[:cut], text[cut:]


class Vocabulary:
    """A token is one of the commonest words, a fragment common in the rarer words, or a single character.

    A word that is not in the vocabulary is spelled with the longest fragments that fit, from left to right, so every
    text made of known characters can be encoded, and decoding gives it back unchanged.

    Attributes:
        tokens: the text of each token by its id.
    """

    def __init__(self, text: str, num_words: int = 3000, num_fragments: int = 1000) -> None:
        counts = Counter(PIECE.findall(text))
        words = {word for word, _ in counts.most_common(num_words)}
        fragments: Counter[str] = Counter()
        for word, count in counts.items():
            if word in words:
                continue
            for length in range(2, 7):
                for start in range(len(word) - length + 1):
                    # Weighed by how many tokens it saves over spelling the fragment out.
                    fragments[word[start : start + length]] += count * (length - 1)
        for word in words:
            del fragments[word]
        common = {fragment for fragment, _ in fragments.most_common(num_fragments)}
        # Longest first, so that the first alternative of the pattern that matches is the longest.
        self.tokens = sorted(set(text) | words | common, key=lambda token: (-len(token), token))
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        self._longest = re.compile("|".join(map(re.escape, self.tokens)), re.DOTALL)
        self._spelled: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """The ids of a text's tokens. Raises ValueError at a character that the vocabulary does not have."""
        ids: list[int] = []
        for piece in PIECE.findall(text):
            if piece not in self._spelled:
                self._spelled[piece] = self._spell(piece)
            ids += self._spelled[piece]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text that these ids stand for."""
        return "".join(self.tokens[i] for i in ids)

    def _spell(self, piece: str) -> list[int]:
        if piece in self._ids:
            return [self._ids[piece]]
        parts = self._longest.findall(piece)
        if "".join(parts) != piece:
            unknown = sorted(set(piece) - set("".join(parts)))
            raise ValueError(f"no token for {', '.join(map(repr, unknown))}: use characters that occur in the novels")
        return [self._ids[part] for part in parts]
