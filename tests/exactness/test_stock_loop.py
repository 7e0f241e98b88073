"""The exact distribution of transformers' verification with our candidates: one round, and whole generations.

torch's two sources of randomness in that code are replaced by a `Replay`, which enumerates what they could have said.
"""

from typing import Any

import pytest
import torch
from support.enumeration.exact_distribution import VISIBLE, Replay, Tokens, exact_distribution, worst_error
from support.enumeration.stock_rounds import PROMPT, VOCAB, in_their_loop, small, target_distribution
from support.enumeration.whole_generations import assert_exactly_p
from transformers import GenerationConfig, PreTrainedModel, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.utils import _speculative_sampling

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPCandidateGenerator, SpeculationConfig

# transformers and the drafter turn logits into float32 before anything else, whatever the models' dtype.
TOLERANCE = 1e-6
RULES: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 2},
    "threshold": {"rule": "threshold", "threshold": 0.6, "max_tokens": 2},
}


def assistant_for(draft: PreTrainedModel, rule: str, target: PreTrainedModel | None = None) -> SpecDecPPAssistant:
    return SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig(**RULES[rule]))


def one_round(assistant: SpecDecPPAssistant, target: PreTrainedModel, reported_temperature: float) -> Tokens:
    """Candidates of our generator, which transformers verifies."""
    warpers = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(3)]
    config = GenerationConfig(do_sample=True)
    generator = SpecDecPPCandidateGenerator(assistant.setup(), config, warpers, target=target)
    sequences, q_scores = generator.get_candidates(PROMPT)
    count = sequences.shape[1] - PROMPT.shape[1]
    with torch.no_grad():
        scores = target(sequences).logits[0, -count - 1 :].float()
    for warper in warpers:
        scores = warper(PROMPT, scores)
    tokens, _ = _speculative_sampling(sequences, q_scores.double() / reported_temperature, count, scores[None].double())
    return tuple(tokens[0].tolist())


@pytest.mark.parametrize("rule", RULES)
def test_transformers_verifies_a_round_of_ours_exactly(rule: str, enumerate_torch: Any) -> None:
    lengths = set()
    for seed in range(3):
        target, draft = small(seed), small(seed + 100)
        assistant = assistant_for(draft, rule)

        def program(replay: Replay, assistant: SpecDecPPAssistant = assistant, target: Any = target) -> Tokens:
            enumerate_torch(replay)
            tokens = one_round(assistant, target, reported_temperature=1.0)
            lengths.add(len(tokens))
            return tokens

        assert worst_error(exact_distribution(program), target_distribution(target, 0.8, 3), VOCAB) < TOLERANCE
    assert lengths == {1, 2, 3}


def test_another_reported_temperature_is_caught(enumerate_torch: Any) -> None:
    """The same enumeration sees a q that is reported at another temperature than it was drawn at."""
    target, assistant = small(0), assistant_for(small(100), "fixed")

    def program(replay: Replay) -> Tokens:
        enumerate_torch(replay)
        return one_round(assistant, target, reported_temperature=0.9)

    assert worst_error(exact_distribution(program), target_distribution(target, 0.8, 3), VOCAB) > VISIBLE


@pytest.mark.daily("ours-fixed", takes=3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("loop", ["ours", "transformers'"])
def test_generate_emits_exactly_p(loop: str, rule: str, enumerate_torch: Any) -> None:
    """The distribution of a whole `generate()`: several rounds, with the prompt, the caches and their roll-backs.

    The penalty on repetitions makes p depend on the candidates before a position also through a processor."""
    target, draft = small(7), small(107)
    assistant = assistant_for(draft, rule, target if loop == "ours" else None)
    how = None if loop == "ours" else in_their_loop(target, assistant)
    assert assert_exactly_p(target, assistant, enumerate_torch, penalty=1.7, how=how) > 2, (
        "few candidates were rejected"
    )
