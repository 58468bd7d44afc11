"""Text from a model, one token at a time, on one device. Shapes as in ``parts``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.core.errors import ConfigError
from atoll.train.models.attention import SdpaKernel
from atoll.train.models.parts import Attention, Decoder

_BROKEN = "\ufffd"  # what UTF-8 decodes to where a character is not complete yet


class CachedKernel(SdpaKernel):
    """Attention of new positions to all before them, whose keys and values it keeps."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None  # keys and values, each [B, T, K, E]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Of q [B, S, H, E], k and v [B, S, K, E] of the first positions, or of one more."""
        if self.kept is not None:
            k, v = torch.cat((self.kept[0], k), dim=1), torch.cat((self.kept[1], v), dim=1)
        self.kept = k, v
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=grouped).transpose(1, 2)


def generate(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Collection[int] = frozenset(),
) -> Iterator[int]:
    """Go on after ``tokens``, yielding each new one as it is drawn.

    Blocks keep their keys and values, so that a token costs one position; a user's own model computes all positions
    again for each. The same seed gives the same tokens on the same kind of device.

    Args:
        tokens: the prompt, at least one.
        num_tokens: new ones at most; fewer where the model's ``max_seq_len`` ends first.
        temperature: of the distribution drawn from; 0 takes the likeliest token.
        top_k: draw from that many likeliest tokens only.
        top_p: draw from the likeliest tokens that together have this probability (Holtzman et al., 2020).
        stop: tokens that end the text; they are not yielded.

    Raises:
        ConfigError: no prompt, one that fills the model's length, or ``top_p`` out of range; while drawing, logits that
            are not finite.
    """
    longest = int(model.config.max_seq_len)  # type: ignore[union-attr,arg-type]  # Decoder's and UserModel's section
    if not 0 < len(tokens) < longest:
        raise ConfigError(f"the prompt has {len(tokens)} tokens, expected 1 to {longest - 1}: max_seq_len is {longest}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p = {top_p}: expected a number above 0, 1 at most")

    def drawn() -> Iterator[int]:
        known, random = list(tokens), torch.Generator().manual_seed(seed % 2**64)
        with _caching(model) as next_logits:
            for _ in range(min(num_tokens, longest - len(known))):
                token = _draw(next_logits(known), temperature, top_k, top_p, random)
                if token in stop:
                    return
                known.append(token)
                yield token

    return drawn()


@contextmanager
def _caching(model: nn.Module) -> Iterator[Callable[[list[int]], Tensor]]:
    """A function from all tokens so far to the logits [V] of the next; caches stand in the model meanwhile."""
    device = next(model.parameters()).device
    attentions = [part for part in model.modules() if isinstance(part, Attention) and isinstance(model, Decoder)]
    kernels = [attention.attention_kernel for attention in attentions]
    # Logits of the whole prompt can be large: the head is given its last position only.
    norm = model.norm if isinstance(model, Decoder) else None
    hook = None if norm is None else norm.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, -1:],))
    done = 0

    @torch.inference_mode()
    def next_logits(tokens: list[int]) -> Tensor:
        nonlocal done
        start, done = (done, len(tokens)) if attentions else (0, 0)
        ids = torch.tensor([tokens[start:]], device=device)
        positions = torch.arange(start, len(tokens), device=device)[None]
        logits: Tensor = model(ids, positions)
        return logits[0, -1].float().cpu()

    try:
        for attention in attentions:
            attention.attention_kernel = CachedKernel()
        yield next_logits
    finally:
        for attention, kernel in zip(attentions, kernels, strict=True):
            attention.attention_kernel = kernel
        if hook is not None:
            hook.remove()


def _draw(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, random: torch.Generator) -> int:
    """One token from logits [V]."""
    if not math.isfinite(logits.max()):  # NaN where any is; a model may rule out some tokens with -inf
        raise ConfigError(
            "the model computes logits that are not finite: take an earlier checkpoint, or fetch the weights again"
        )
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k is not None and top_k < len(logits):
        logits = logits.where(logits >= logits.topk(top_k).values[-1], -torch.inf)
    chances = logits.softmax(dim=-1)
    if top_p is not None and top_p < 1:
        ordered, places = chances.sort(descending=True)
        # Those before which less than top_p is reached; the first always is.
        keep = ordered.cumsum(0) - ordered < top_p
        chances = torch.zeros_like(chances).scatter(0, places, ordered * keep)
    return int(torch.multinomial(chances, 1, generator=random))


def stream_text(tokens: Iterable[int], decode: Callable[[list[int]], str], after: Sequence[int] = ()) -> Iterator[str]:
    """The text of tokens as they come; a character that spans tokens comes when it is whole.

    Args:
        after: what came before them, at least the last token: some tokenizers drop the space before a first word.
    """
    pending = list(after[-1:])
    shown = decode(pending)
    for token in tokens:
        pending.append(token)
        text = decode(pending)
        if text.endswith(_BROKEN):
            continue
        if len(text) > len(shown):
            yield text[len(shown) :]
        pending = pending[-1:]
        shown = decode(pending)
    rest = decode(pending)[len(shown) :]
    if rest:
        yield rest
