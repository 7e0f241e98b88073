"""Check of published drafts: how often the draft's candidates equal the target's choices in a few short texts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.models.causal_lm import CausalLM, cache_argument, input_device, longest_text, num_embeddings, trying
from hf_specdecpp.models.target_states import TargetStates

PLACES = 3  # candidates per round that are compared
FIRST, EVERY = 8, 4  # fewest tokens before a round, and the tokens between the starts of two rounds
NOTHING = 0.1  # share of first candidates below which a draft is for another target, or misread
WRONG = "It is probably for another target, or read in a wrong way: docs/ready-made.md says what else to try."
TEXTS = (
    "The old lighthouse at the end of the harbour had not been used for twenty years. When the town decided to sell "
    "it, nobody expected that a young engineer would buy it and turn it into a small museum.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "To find 15% of 80, first write the percentage as a fraction: 15% is 15/100. Then multiply: 80 * 15 / 100 = 12.",
)


def agreement(draft: Draft, target: CausalLM, texts: Sequence[Tensor]) -> list[float]:
    """Return the shares of first, second and third candidates that equal the target's likeliest token: 3 numbers, fewer
    if the draft proposes fewer candidates; `[]` without texts. Called by `StoredKind.bind`.

    A round starts at every fourth position of each text. The draft reads the tokens before it, and candidates are its
    likeliest tokens. The second and third follow the text's own tokens, not the draft's, so that the target needs one
    forward pass per text. If a draft's files can be interpreted in two ways, the one with higher agreement is taken.

    Args:
        draft: a draft of this target.
        texts: token ids, `[1, n]` each (`texts_for`)."""
    places, rounds = int(min(PLACES, draft.places)), 0
    hits, width = [0] * places, target.config.get_text_config().vocab_size
    for text in (each.to(input_device(target)) for each in texts):
        # Drafts that read the target's cache get it cropped to the prefix of each round.
        cache: Any = DynamicCache(config=target.config) if draft.shares_cache else None
        states = TargetStates(target, draft.reads)
        with trying(target) as read:
            inputs = {} if cache is None else {cache_argument(target): cache}
            logits = states.catch(read, text, **states.requesting({"use_cache": cache is not None, **inputs})).logits
            caught, chosen = states.states_of(), logits[0].argmax(-1).tolist()
            for length in range(text.shape[1] - places, FIRST - 1, -EVERY):
                reading = draft.session(width)
                if cache is not None:
                    cache.crop(length - 1 - cache.get_seq_length())
                    reading.bind_cache(SimpleNamespace(cache=cache, shown=None, position=torch.tensor([[length - 1]])))
                reading.read_verified(text[:, :length], 0, None if caught is None else caught[:, : length - 1])
                for place in range(places):
                    step = reading.propose_next(list(text[0, length : length + place]))
                    hits[place] += step is not None and int(step[0].argmax()) == chosen[length - 1 + place]
                rounds += 1
    return [hit / rounds for hit in hits] if rounds else []


def texts_for(target: CausalLM, tokenizer: Any | None) -> list[Tensor]:
    """Return the token ids `[1, n]` of each of `TEXTS`, cut to 256 tokens or the target's longest sequence. Texts with
    too few tokens (transformers makes tokenizers without a vocabulary for some configs) or with ids that the target
    does not embed are left out. `[]` without a tokenizer."""
    known, most = num_embeddings(target), int(min(longest_text(target), 256))
    made = [] if tokenizer is None else [tokenizer(text)["input_ids"][:most] for text in TEXTS]
    return [torch.tensor([ids]) for ids in made if len(ids) >= FIRST + PLACES and max(ids) < known]


def describe(shares: Sequence[float]) -> str:
    """Describe the result of `agreement` in sentences, with a remedy if the draft is useless (`is_wrong`)."""
    if not shares:
        return "How often it guesses right is not known, as the target has no tokenizer that fits it."
    words = ", ".join(("first", "second", "third")[: len(shares)])
    result = f"Of its {words} candidates {', '.join(f'{share:.0%}' for share in shares)} are what the target says."
    return f"{result} {WRONG}" if is_wrong(shares) else result


def is_wrong(shares: Sequence[float]) -> bool:
    """Whether under 10 % (`NOTHING`) of first candidates agree, given the result of `agreement`; False for `[]`."""
    return bool(shares) and shares[0] < NOTHING
