"""Where the text goes on after the prompt: positions, masked rows, and the cache after an exception."""

from typing import Any

import pytest
import torch
from support.models import assistant_for, prompt
from support.tree_generation import TREES, target_of
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.caches.text import roll_back
from hf_specdecpp.generation.prefix import Prefix
from hf_specdecpp.models.causal_lm import CACHE

PAD = 0


def test_positions_counted_from_the_mask_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant is what trees did once: they stood where the number of visible tokens says."""
    target, text = target_of("llama"), prompt(14)
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "no_repeat_ngram_size": 6}
    arguments |= {"position_ids": 2 * torch.arange(14)[None], "attention_mask": torch.ones_like(text)}
    plain, made = target.generate(text, **arguments), Prefix.tree_inputs

    def counted(self: Prefix, input_ids: Tensor, *tree: Any, **options: Any) -> dict[str, Any]:
        self.model_kwargs["position_ids"] = torch.arange(input_ids.shape[1])[None]
        self._spare = 0  # what was made ahead for further rounds is not used
        return made(self, input_ids, *tree, **options)

    monkeypatch.setattr(Prefix, "tree_inputs", counted)
    assistant = assistant_for(target, mix=0.9, **TREES["dyspec"])
    with_mutant = target.generate(text, assistant_model=assistant, **arguments)
    assistant.detach()
    assert not torch.equal(with_mutant, plain)


def _lengths(cache: Any) -> set[int]:
    return {layer.get_seq_length() for layer in cache.layers}


def test_roll_back_leaves_alone_what_cannot_go_back() -> None:
    target = target_of("mistral")  # a window of 8
    cache = DynamicCache(config=target.config)
    target(prompt(12), past_key_values=cache)
    roll_back(cache, 6)
    assert _lengths(cache) == {12}


@pytest.mark.parametrize("held", [14, 15])
def test_the_whole_prompt_is_in_the_cache_already(held: int) -> None:
    """Plain generation then reads the last token twice, and so do chains; trees say what to do, and then work."""
    target = target_of("llama")
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    text = prompt(14)

    def cache() -> DynamicCache:
        found = DynamicCache(config=target.config)
        with torch.no_grad():
            target(torch.cat((text, text[:, :1]), dim=1)[:, :held], **{CACHE: found}, use_cache=True)
        return found

    def texts(cropped: int | None, **speculation: Any) -> list[Tensor]:
        assistant, found = assistant_for(target, **speculation), []
        for options_of in ({}, {"assistant_model": assistant}):
            own = cache()
            if cropped is not None:
                own.crop(cropped)
            found.append(target.generate(text, **{CACHE: own}, **options, **options_of))
        return found

    plain, ours = texts(None, rule="fixed", num_tokens=4)
    assert torch.equal(ours, plain)
    with pytest.raises(ValueError, match=rf"held {held} tokens already.*has 14.*crop\({13 - held}\)"):
        texts(None, tree="dyspec")
    plain, ours = texts(13 - held, tree="dyspec")
    assert torch.equal(ours, plain)
