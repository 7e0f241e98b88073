"""The q that a verifier is given is the distribution that the candidates were drawn from, whatever processors are set.

Real `generate()` calls, in our loop and with our generator in transformers', with an ear at both ends: what the draft
draws from, and what the verifier is told. The same q is then computed by transformers alone, from the draft and the
text before the candidate.
"""

from typing import Any

import pytest
import torch
import transformers
from support.enumeration.stock_rounds import in_their_loop
from support.targets.models import partly_agreeing, tiny
from support.targets.watchers import heard
from torch import Tensor
from torch.testing import assert_close
from transformers.generation import utils as transformers_generation

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPCandidateGenerator, SpeculationConfig
from hf_specdecpp.generation import output_text as verification
from hf_specdecpp.generation.output_text import OutputText
from hf_specdecpp.sampling.randomness import TorchRandomness
from hf_specdecpp.trees.tree import DraftTree

VOCAB, LOOPS = 24, ["ours", "transformers'"]
PROMPT = torch.tensor([[5, 6, 7, 5, 6, 8, 5, 6]])
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "pad_token_id": 0}


class FavoursTheNextId(transformers.LogitsProcessor):
    """A user's own processor that looks at the text, and says that it keeps no state: so drafts are processed, too."""

    reads_prefix_only = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        changed = scores.clone()
        changed[:, (input_ids[0, -1] + 1) % scores.shape[-1]] += 3.0
        return changed


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "typical-p": {"typical_p": 0.7},
    "repetition penalty": {"repetition_penalty": 1.8},
    "no repeated n-gram": {"no_repeat_ngram_size": 2},
    "suppressed tokens": {"suppress_tokens": [3, 4, 5, 6]},
    "bad words": {"bad_words_ids": [[7], [5, 6], [6, 9]]},
    "minimum length": {"min_length": 18, "eos_token_id": [0, 1, 2, 3, 4, 5, 6, 7]},
    "user's own": {"logits_processor": transformers.LogitsProcessorList([FavoursTheNextId()])},
    "several": {"temperature": 1.4, "top_k": 8, "top_p": 0.95, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


class Ear:
    """Listens to what the draft draws from and to what the verifier of either loop is told about it.

    `rounds`: (the text, candidates, the distributions that they were drawn from, the verifier's q), one a round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds: list[tuple[Tensor, list[int], Tensor, Tensor]] = []
        self.drawn: list[Tensor] = []
        heard(monkeypatch, SpecDecPPCandidateGenerator, "propose", self.start_round)
        heard(monkeypatch, TorchRandomness, "categorical", lambda _, probs: self.drawn.append(probs.clone()))
        heard(monkeypatch, verification, "verify_sampled", lambda candidates, p, q, *_: self.note(candidates, q))
        heard(monkeypatch, OutputText, "_verify_in_order", lambda _, each, *__: self.hear_a_walk(each.tree))
        heard(monkeypatch, transformers_generation, "_speculative_sampling", self.hear_theirs)

    def start_round(self, _: SpecDecPPCandidateGenerator, input_ids: Tensor, *args: Any, **kwargs: Any) -> None:
        self.text = input_ids
        self.drawn.clear()  # the target's own draws of the last round

    def hear_a_walk(self, tree: DraftTree) -> None:
        """Of processors that are called token by token."""
        if len(tree):
            self.note(tree.candidates, torch.stack([tree.q(node) for node in range(len(tree))]))

    def hear_theirs(self, ids: Tensor, scores: Tensor, count: int, *args: Any, **kwargs: Any) -> None:
        self.note(ids[0, -count:].tolist(), scores[0].softmax(dim=-1))

    def note(self, candidates: list[int], q: Tensor) -> None:
        if candidates:
            self.rounds.append((self.text, candidates, torch.stack(self.drawn), q))


@pytest.mark.daily(
    "plain-ours", "temperature-transformers'", "top-p-ours", "min-p-transformers'", "repetition penalty-ours",
    "no repeated n-gram-transformers'", "bad words-ours", "minimum length-transformers'", "several-ours",
)  # fmt: skip
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", OPTIONS)
def test_q_is_what_was_drawn_from_as_transformers_has_it(name: str, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every candidate's q sees its own prefix: the emitted text, then the candidates before it."""
    target, ear = tiny("llama", vocab_size=VOCAB, num_hidden_layers=1), Ear(monkeypatch)
    draft, speculation = partly_agreeing(target, mix=0.8), SpeculationConfig(rule="fixed", num_tokens=3)
    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=speculation)
    torch.manual_seed(1)
    settings = {**SAMPLED, "max_new_tokens": 14, **OPTIONS[name]}
    if loop == "ours":
        settings["assistant_model"] = assistant
    else:
        settings |= in_their_loop(target, assistant)
    assert target.generate(PROMPT, **settings).shape[1] > PROMPT.shape[1]
    assert len(ear.rounds) >= 3
    assert any(len(candidates) == 3 for _, candidates, _, _ in ear.rounds)
    for text, candidates, distributions, q in ear.rounds:
        assert len(candidates) == len(distributions) == len(q)
        assert_close(q, distributions, rtol=1e-6, atol=0.0)  # a softmax of the same numbers; zeros are exactly zero
        assert all(float(row[token]) > 0.0 for token, row in zip(candidates, q, strict=True))
        for place, row in enumerate(q):
            prefix = torch.cat((text, torch.tensor([candidates[:place]], dtype=torch.long)), dim=1)
            assert_close(row, draft_distribution(draft, prefix, **OPTIONS[name]), rtol=1e-4, atol=1e-6)


def draft_distribution(draft: Any, prefix: Tensor, **options: Any) -> Tensor:
    """q after `prefix`, by one step of plain `generate()` on the draft."""
    settings = {**SAMPLED, "max_length": prefix.shape[1] + 20, **options, "return_dict_in_generate": True}
    mask = torch.ones_like(prefix)  # else transformers takes every token 0 for padding
    first = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(prefix.shape[1] + 1)])
    output = draft.generate(prefix, attention_mask=mask, stopping_criteria=first, output_scores=True, **settings)
    return output.scores[0][0].softmax(dim=-1)
