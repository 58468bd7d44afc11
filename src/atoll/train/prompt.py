"""A sample of what a run has learnt, from its checkpoint: no rank needs to take part."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.errors import AtollError
from atoll.core.validation import command_line
from atoll.train.models import registry
from atoll.train.models.generate import generate
from atoll.train.recipe.schema import Recipe

_LARGEST = 2_000_000_000  # parameters that are generated from on the host while GPUs hold the trained ones


def continue_prompt(recipe: Recipe, checkpoint: str, note: Callable[[str], None]) -> str | None:
    """``[metrics] sample_prompt`` with what the model of a checkpoint goes on with; None where none is asked for.

    Args:
        recipe: of the run, its vocabulary known.
        checkpoint: a step's folder or URL.
    """
    prompt = recipe.metrics.sample_prompt
    if prompt is None:
        return None
    if registry.parameter_count(recipe.model) > _LARGEST:
        note(f"no sample: the model is large; {command_line('atoll', 'generate', checkpoint, prompt)} makes one")
        return None
    from atoll.train.data.tokenizer import load_tokenizer
    from atoll.train.weight_source import open_weights
    from atoll.train.weights import load_weights

    try:
        opened = open_weights(checkpoint)
        if opened.tokenizer is None:
            note("no sample: the run has no tokenizer")
            return None
        tokenizer = load_tokenizer(opened.tokenizer)
        model = registry.build(recipe.model, device="cpu").eval()
        load_weights(model, recipe.model, opened)
        tokens = tokenizer.encode(prompt)
        if tokenizer.bos_id is not None and (tokenizer.adds_bos or not tokens):
            tokens.insert(0, tokenizer.bos_id)
        stop = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
        new = generate(
            model, tokens, num_tokens=recipe.metrics.sample_tokens, seed=recipe.train.seed, stop=stop, temperature=0.7
        )
        return tokenizer.decode([*tokens, *new])
    except AtollError as error:
        note(f"no sample: {error}")
        return None
