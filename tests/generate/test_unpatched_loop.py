"""`SpecDecPPCandidateGenerator` inside transformers' own assisted decoding, of which nothing is patched.

Only the method that transformers asks for a candidate generator is set, on the instance: the hook for those who bring
their own loop or generator."""

import types
from itertools import product
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import Rounds, assistant_for, partly_agreeing, prompt, quiet_later_layers, tiny
from support.snapshots import has_our_methods, of_own_class

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPCandidateGenerator, SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM

PROMPT = prompt(20)
RULES: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold", "threshold": 0.8, "max_tokens": 7},
    "throughput": {"rule": "throughput", "costs": {"draft": 0.4, "verify": [1.0]}},  # some rounds draft nothing
}


def with_generator(target: CausalLM, assistant: SpecDecPPAssistant) -> list[SpecDecPPCandidateGenerator]:
    """Make transformers' loop on `target` draft with our generator; the list collects one a call."""
    made: list[SpecDecPPCandidateGenerator] = []

    def get(self: Any, **kwargs: Any) -> SpecDecPPCandidateGenerator:
        assert kwargs["assistant_model"] is assistant
        made.append(
            SpecDecPPCandidateGenerator(
                assistant.setup(),
                kwargs["generation_config"],
                kwargs["logits_processor"],
                kwargs["model_kwargs"].get("attention_mask"),
            )
        )
        return made[-1]

    target._get_candidate_generator = types.MethodType(get, target)
    return made


QUICK = [("llama", "fixed", "independent"), ("gemma3_text", "threshold", "early exit"),
         ("gpt2", "throughput", "independent")]  # fmt: skip
CASES = list(product(["llama", "gemma3_text", "gpt2"], RULES, ["independent", "early exit"]))


@pytest.mark.every(3, takes=2)
@pytest.mark.parametrize(
    ("family", "rule", "kind"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_greedy_equality(family: str, rule: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, arguments = tiny(family), {"max_new_tokens": 200, "do_sample": False, "repetition_penalty": 1.05}
    plain, speculation = target.generate(PROMPT, **arguments), SpeculationConfig(**RULES[rule])
    if kind == "independent":
        assistant = SpecDecPPAssistant.from_draft(partly_agreeing(target), speculation=speculation)
    else:
        assistant = SpecDecPPAssistant.from_early_exit(target, 2, speculation=speculation)
        assistant.detach()  # it keeps its draft, and the loop is transformers' again
    made, rounds = with_generator(target, assistant), Rounds(monkeypatch)
    assert torch.equal(target.generate(PROMPT, assistant_model=assistant, **arguments), plain)

    # Feedback: transformers tells the generator of every round, the last one included.
    stats = made[0].stats
    assert len(made) == 1
    assert stats.rounds == len(rounds.outcomes) > 0
    assert stats.accepted + stats.rounds == 200
    if kind == "independent":
        rounds.assert_all_kinds()


def test_the_rule_learns() -> None:
    target = tiny("llama")
    assistant = SpecDecPPAssistant.from_draft(partly_agreeing(target), speculation=SpeculationConfig("threshold"))
    made = with_generator(target, assistant)
    target.generate(PROMPT, assistant_model=assistant, max_new_tokens=30, do_sample=False)
    rule: Any = made[0].rule
    assert rule.rates.rounds > 0


# Targets inside wrappers, and the knobs of transformers' own assistants. ----------------------------------------------


@pytest.mark.apart
def test_a_compiled_target_is_attached_behind_its_wrapper() -> None:
    target = of_own_class(tiny("llama"))
    compiled: Any = torch.compile(target)
    draft = partly_agreeing(target)
    assistant = SpecDecPPAssistant.from_draft(draft, compiled, speculation=SpeculationConfig(rule="fixed"))
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
    plain = target.generate(prompt(), **how)
    assert torch.equal(compiled.generate(prompt(), assistant_model=assistant, **how), plain)
    assert assistant.stats.complete, "our own loop ran"
    assistant.detach(compiled)
    assert not has_our_methods(target)


@pytest.mark.apart
def test_an_early_exit_of_a_target_whose_forward_is_compiled() -> None:
    """The draft's own forward is its class's: the compiled one runs the target."""
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
    target.forward = torch.compile(target.forward, backend="eager", dynamic=True)
    assistant = SpecDecPPAssistant.from_early_exit(target, 1, speculation=SpeculationConfig(rule="fixed"))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
    plain = target.generate(prompt(), **options)
    assert torch.equal(target.generate(prompt(), assistant_model=assistant, **options), plain)
    assert assistant.stats.accepted > 0


def test_batches_with_an_adapter_for_each_row() -> None:
    """PEFT tells its layers about all rows, and rows that end leave a batch."""
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    target: Any = get_peft_model(tiny("llama"), config)
    target.add_adapter("other", config)
    target.eval()
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, speculation=SpeculationConfig(rule="fixed"))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    one = {"input_ids": prompt(), "adapter_names": ["other"], **options}
    assert torch.equal(target.generate(**one, assistant_model=assistant), target.generate(**one))
    rows = {"input_ids": torch.cat((prompt(), prompt(seed=1))), "adapter_names": ["default", "other"], **options}
    with pytest.raises(ValueError, match="each row has an adapter of its own"):
        target.generate(**rows, assistant_model=assistant)


@pytest.mark.parametrize(("name", "value"), [
    ("num_assistant_tokens", 5),
    ("num_assistant_tokens_schedule", "heuristic"),
    ("assistant_confidence_threshold", 0.3),
])  # fmt: skip
def test_transformers_own_knobs_are_not_ignored_silently(name: str, value: object) -> None:
    assistant = assistant_for(tiny("llama"))
    with pytest.raises(AttributeError, match=rf"{name}.*assistant\.speculation = SpeculationConfig\(rule='fixed'"):
        setattr(assistant.generation_config, name, value)
