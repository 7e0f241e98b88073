"""Generations with multi-token layers of every family; what all drafts do is in `tests/drafts/test_contract.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import prompt
from support.mtp_files import FAMILIES, HIDDEN, HYBRID, VOCAB, Files, dense
from transformers.generation import candidate_generator

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafts.mtp.model import MtpDraft
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput.known_costs import Rounds

TEXT = 1 + prompt(9) % (VOCAB - 1)
FIXED: dict[str, Any] = {"rule": "fixed", "num_tokens": 5}
DYSPEC: dict[str, Any] = {"rule": "threshold", "tree": "dyspec", "tree_budget": 8}


def check_equal(target: CausalLM, assistant: SpecDecPPAssistant) -> None:
    how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    expected = target.generate(TEXT, **how)
    assert torch.equal(target.generate(TEXT, assistant_model=assistant, **how), expected)
    assert assistant.stats.drafted > 0


def assisted(target: CausalLM, **settings: Any) -> SpecDecPPAssistant:
    return assist(target, "mtp", speculation=SpeculationConfig(**(settings or FIXED)), default=False)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_they_draft_further_than_there_are_layers(num_layers: int, tmp_path: Path) -> None:
    target = dense(num_layers).load(tmp_path)
    assistant = assisted(target)
    assert type(assistant.drafter) is (Drafter if num_layers == 1 else MtpDraft)
    check_equal(target, assistant)
    assert assistant.stats.accepted > 0
    assert len(assistant.stats.drafted_at) == 5
    described = Rounds(target, assistant.drafter, assistant.head or DraftProbability(), 4).conditions()
    assert described["reads"] == {"multi_token": True, "hidden_size": HIDDEN}
    assert described.get("multi_token_layers", 1) == num_layers


@pytest.mark.every(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_every_family(family: str, tmp_path: Path) -> None:
    """In chains; and in trees, where the target reads trees."""
    target = Files(family, seed=1).load(tmp_path)
    assistant = assisted(target)
    check_equal(target, assistant)
    assert assistant.stats.accepted > 0
    if family not in HYBRID:
        assistant.speculation = SpeculationConfig(**DYSPEC)
        check_equal(target, assistant)
        assert assistant.stats.accepted > 0


# Refused, and left alone. ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(candidate_generator, "MTPCandidateGenerator"), reason="this transformers has no use_mtp to refuse"
)
def test_transformers_own_is_left_alone_but_not_mixed_in(tmp_path: Path) -> None:
    target = Files("glm4_moe", seed=1).load(tmp_path)
    assistant = assisted(target)
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with pytest.raises(ValueError, match="use_mtp=True is transformers' own speculation.*assist"):
        target.generate(TEXT, assistant_model=assistant, use_mtp=True, **how)
    assert torch.equal(target.generate(TEXT, use_mtp=True, **how), target.generate(TEXT, **how))
    assert assistant.stats.rounds == 0
