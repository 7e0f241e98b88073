"""Do two models speak the same tokens? Compares token-to-id maps, because padded `vocab_size`s say nothing."""

from __future__ import annotations

import hashlib
import json
import warnings
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import load_tokenizer

PADDING = 1024  # rows of a table of tokens that stand for none, at most


def hash_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the tokenizer's token-to-id map, added tokens left out."""
    return hashlib.sha256(json.dumps(sorted(_regular(tokenizer).items())).encode()).hexdigest()


def special_ids(*configs: Any) -> frozenset[int]:
    """Ids that configs name: ends of texts, padding, what images and sounds are put in the place of."""
    ids: set[int] = set()
    for config in configs:
        for name, value in config.to_dict().items():
            if name.endswith(("token_id", "token_ids", "token_index")):
                ids.update(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))
    return frozenset(ids)


def tokenizer_of(name_or_path: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer stored beside a model, from its folder or the local cache; `None` if it is not there."""
    if not name_or_path:
        return None
    try:
        return _load_tokenizer(name_or_path)
    except Exception:  # noqa: BLE001 - any reason for not having it means that there is nothing to compare
        return None


@lru_cache(maxsize=16)
def _load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    # Apart, since a failure must not be remembered: the tokenizer may be downloaded at any time.
    return load_tokenizer(name_or_path, local_files_only=True)


def check_same_tokenizer(target: CausalLM, draft: CausalLM) -> None:
    """Refuse a draft whose tokens mean something else to the target.

    Where a tokenizer cannot be found (a model built in memory) only a difference in vocabulary size can be seen, and is
    warned of. The output would be right all the same; only the speed would be lost.

    Raises:
        ValueError: some ids stand for different tokens.
    """
    target_name, draft_name = target.config.name_or_path, draft.config.name_or_path
    if target_name and target_name == draft_name:
        return
    ours, theirs = tokenizer_of(target_name), tokenizer_of(draft_name)
    if ours is None or theirs is None:
        sizes = [model.config.get_text_config().vocab_size for model in (target, draft)]
        if sizes[0] != sizes[1]:
            is_padding = abs(sizes[0] - sizes[1]) <= PADDING
            warnings.warn(
                f"The target has {sizes[0]} token ids and the draft {sizes[1]}. "
                + (
                    "That is harmless padding if both use the same tokenizer"
                    if is_padding
                    else "That is more than padding explains, so they hardly use the same tokenizer"
                )
                + ", which could not be checked because no tokenizer files were found beside the models. If almost "
                "nothing is accepted, the tokenizers differ.",
                stacklevel=2,
            )
        return
    check_same_tokens(ours, theirs, f"target {target_name!r}", f"draft {draft_name!r}")


def check_same_tokens(
    ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, our_name: str, their_name: str
) -> None:
    """Raise `ValueError` if an id stands for different tokens in the two tokenizers."""
    by_id = {index: token for token, index in _regular(ours).items()}
    different = [
        (index, by_id[index], token)
        for token, index in _regular(theirs).items()
        if index in by_id and by_id[index] != token
    ]
    if different:
        index, token, other = min(different)
        raise ValueError(
            f"The {our_name} and the {their_name} have different tokenizers: {len(different)} ids stand for different "
            f"tokens, the first being {index} ({token!r} against {other!r}). A draft proposes token ids, so they must "
            "mean the same to both. Use a draft of the target's own family, or an early exit of the target: "
            "SpecDecPPAssistant.from_early_exit(target, layers=4)."
        )


def outside(size: int | None, target: CausalLM) -> str | None:
    """What about the number of token ids that a draft was made for does not fit a target; `None` where it does.

    Tables are padded, some drafts' otherwise than their targets'. More ids than that are of another tokenizer, and
    logits would be as wide as a config says.
    """
    most = target.config.get_text_config(decoder=True).vocab_size + PADDING
    return (
        f"was made for {size} token ids, and there are {most - PADDING}" if size is not None and size > most else None
    )


def check_hash(target: CausalLM, expected: str | None, trained_for: str | None) -> None:
    """Raise `ValueError` if the target's tokenizer is not the one that an assistant was trained with."""
    tokenizer = tokenizer_of(target.config.name_or_path)
    if expected is None or tokenizer is None or hash_of(tokenizer) == expected:
        return
    raise ValueError(
        f"This assistant was trained for {trained_for!r}, whose tokenizer differs from that of "
        f"{target.config.name_or_path!r} (hash {expected[:12]} against {hash_of(tokenizer)[:12]}), so its token ids "
        "mean something else. Load the assistant that belongs to your target."
    )


def _regular(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    # Added tokens (chat markers, reserved slots) are renamed between a base model and its instruct version.
    added = tokenizer.get_added_vocab()
    return {token: index for token, index in tokenizer.get_vocab().items() if token not in added}
