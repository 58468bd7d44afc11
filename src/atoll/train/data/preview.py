"""Samples as text that shows where tokens and documents begin and what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from rich.text import Text

from atoll.train.data.packing import UNTRAINED, Sample
from atoll.train.data.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what decoding gives for a character of which bytes are missing
_LONGEST_CHARACTER = 8  # tokens; what is incomplete after so many is no character
_PART = "⋯"  # a token that is the beginning of a character, which is shown at the token that completes it
_UNTRAINED_MARK = "∅"
_BORDER = "|"

# Neighbouring tokens get different backgrounds; both colours are set, so that any terminal theme can be read.
_TRAINED_STYLES = ("black on #b3e5fc", "black on #fff59d")
_UNTRAINED_STYLES = ("#78909c on #e1f0f7", "#78909c on #faf6d8")
_RULE_STYLE = "bold"

_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {10: "↵\n", 9: "⇥", 13: "␍"}


def render(sample: Sample, tokenizer: Tokenizer | None, *, colour: bool, ids: bool = False) -> Text:
    """One sequence as text.

    Args:
        tokenizer: decodes; without one ids stand for text.
        colour: tell tokens apart by background, and places that are not trained by a pale one; else by ``|``, and by
            ``∅`` behind the token.
        ids: show each token's id behind it.
    """
    text = Text()
    documents = _documents(sample)
    for number, (start, stop) in enumerate(documents):
        is_filler = _is_filler(sample, start, stop)
        text.append(_rule(sample, number, start, stop, is_filler) + "\n", _RULE_STYLE if colour else "")
        if not is_filler:
            _append_tokens(text, sample, range(start, stop), tokenizer, colour, ids)
            text.append("\n")
    return text


def legend(*, colour: bool) -> str:
    """How to read ``render``."""
    border, untrained = ("a change of background", "pale") if colour else (_BORDER, f"followed by {_UNTRAINED_MARK}")
    return (
        f"{border}: token border · {untrained}: nothing is learnt after this token · {_PART}: first bytes of a "
        "character · ↵: line break"
    )


def as_json(sample: Sample, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """One sequence as a JSON object: the fields of ``Sample``, and ``text``, the piece of text of each token."""
    pieces = [
        piece for start, stop in _documents(sample) for piece in token_pieces(sample.tokens[start:stop], tokenizer)
    ]
    fields = {name: values.tolist() for name, values in sample.fields.items()}
    return {"documents": None, **fields, "trained": sample.num_trained, "text": pieces}


def token_pieces(tokens: Sequence[int] | np.ndarray[Any, Any], tokenizer: Tokenizer | None) -> list[str]:
    """The text that each token adds to that of those before it.

    Tokens are decoded with the piece before them, for many tokenizers drop a space at the beginning. A token that only
    begins a character adds "", and the one that completes it the character; one without text is its id in ⟨⟩.
    """
    numbers = [int(token) for token in tokens]
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in numbers]
    pieces: list[str] = []
    context, shown = 0, 0  # tokens before `shown` are in `pieces`; decoding begins at `context`
    for place, token in enumerate(numbers):
        text = tokenizer.decode(numbers[context : place + 1])
        is_last = place + 1 == len(numbers) or place + 1 - shown == _LONGEST_CHARACTER
        if text.endswith(_INCOMPLETE) and not is_last:
            pieces.append("")
            continue
        pieces.append(text[len(tokenizer.decode(numbers[context:shown])) :] or f"⟨{token}⟩")
        context, shown = shown, place + 1
    return pieces


def _append_tokens(
    text: Text, sample: Sample, places: range, tokenizer: Tokenizer | None, colour: bool, ids: bool
) -> None:
    pieces = token_pieces(sample.tokens[places.start : places.stop], tokenizer)
    for number, (place, piece) in enumerate(zip(places, pieces, strict=True)):
        trained = sample.labels[place] != UNTRAINED
        shown = piece.translate(_VISIBLE) or _PART
        if ids and tokenizer is not None:
            shown += f"⟨{sample.tokens[place]}⟩"
        if colour:
            text.append(shown, (_TRAINED_STYLES if trained else _UNTRAINED_STYLES)[number % 2])
        else:
            text.append((_BORDER if number else "") + shown + ("" if trained else _UNTRAINED_MARK))


def _documents(sample: Sample) -> list[tuple[int, int]]:
    """First and last place (left out) of each document."""
    size = len(sample.tokens)
    if sample.documents is None:
        return [(0, size)]
    borders = [0, *(np.flatnonzero(np.diff(sample.documents)) + 1).tolist(), size]
    return list(pairwise(borders))


def _is_filler(sample: Sample, start: int, stop: int) -> bool:
    """Whether these are the places that fill the last sequence of a part up."""
    labels, tokens = sample.labels[start:stop], sample.tokens[start:stop]
    return stop == len(sample.tokens) and bool((labels == UNTRAINED).all() and (tokens == 0).all())


def _rule(sample: Sample, number: int, start: int, stop: int, is_filler: bool) -> str:
    size = stop - start
    counted = f"{size} token{'s' * (size != 1)}"
    if is_filler:
        return f"── filled up with {size} place{'s' * (size != 1)} that are not trained ──"
    if sample.documents is None:
        return f"── {counted}, documents are not separated ──"
    return f"── document {number + 1}: {counted}, positions {'re' * (number > 0)}start at {sample.positions[start]} ──"
