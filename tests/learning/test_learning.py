"""A draft that learns from the texts it drafts for: what is gained, kept, taken back and stored."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import assistant_for, assistant_of, prompt, tiny
from support.repos import save_model
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.kinds.adapted import RANK
from hf_specdecpp.kinds.known import KINDS
from hf_specdecpp.learning import learner as learning
from hf_specdecpp.learning.kept import logits_of
from hf_specdecpp.learning.learner import latest
from hf_specdecpp.learning.taught import DISTANCES
from hf_specdecpp.models.adapters import Adapter, Lora, add_adapter, joined, read_adapter, write_adapter
from hf_specdecpp.models.causal_lm import CausalLM

CHAIN: dict[str, Any] = {"rule": "fixed", "num_tokens": 3, "keep_texts": 5000}
NEW, LENGTH = 24, 36  # tokens of an answer and of its text
LEARN = ("independent", "early_exit", "conditioned", "eagle3")


@pytest.fixture(autouse=True)
def many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and short texts are learned from again and again."""
    monkeypatch.setattr(learning, "TIMES", 1000)


def texts(target: CausalLM, assistant: SpecDecPPAssistant, count: int = 8) -> list[list[int]]:
    """Sampled answers, the same for the same assistant."""
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        output = target.generate(prompt(seed=seed), assistant_model=assistant, max_new_tokens=NEW, do_sample=True)
        found.append(output[0].tolist())
    return found


def weights_of(assistant: SpecDecPPAssistant) -> dict[str, Tensor]:
    drafter = assistant.ready_drafter()
    fusion = {} if drafter.fusion is None else drafter.fusion.state_dict()
    return {name: tensor.clone() for name, tensor in {**drafter.model.state_dict(), **fusion}.items()}


def q_of(assistant: SpecDecPPAssistant, steps: int = 1) -> Tensor:
    """The draft's distributions along a text."""
    drafter, ids = assistant.ready_drafter(), prompt(20, seed=99)
    states = None
    if drafter.reads is not None:
        states = torch.randn(1, 20, drafter.reads.width, generator=torch.Generator().manual_seed(0)).to(drafter.dtype)
    with torch.no_grad():
        return drafter.vocab_logits(drafter.hidden_states(ids, None, states)).softmax(-1)


@pytest.fixture
def target() -> CausalLM:
    return tiny("llama")


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", LEARN)
def test_it_gains_keeps_the_target_and_takes_everything_back(target: CausalLM, kind: str) -> None:
    assistant = assistant_of(kind, target, **CHAIN)
    before, weights, own = texts(target, assistant), weights_of(assistant), copy.deepcopy(target.state_dict())
    config, q = assistant.config.to_dict(), q_of(assistant)
    random = torch.get_rng_state()
    lesson = assistant.learn(steps=30)
    assert torch.equal(random, torch.get_rng_state())
    assert lesson.is_kept
    assert lesson.after > lesson.before > 0.01
    assert (lesson.steps, lesson.texts, lesson.tokens, lesson.measured) == (30, 6, 6 * LENGTH, 2 * LENGTH)
    assert "30 steps on 6 texts of 216 tokens" in str(lesson)
    assert str(lesson).endswith("."), str(lesson)
    again = assistant.learn(steps=30)
    assert again.before == pytest.approx(lesson.after, abs=1e-9), "it goes on from where it was"
    assert assistant.config.learned == {"tokens": 216, "texts": 6}
    assert all(torch.equal(tensor, own[name]) for name, tensor in target.state_dict().items())
    assert all(parameter.grad is None for parameter in target.parameters())
    assert float((q_of(assistant) - q).abs().max()) > 1e-3
    texts(target, assistant, 1)
    assistant.unlearn()
    assert assistant.config.to_dict() == config
    now = weights_of(assistant)
    assert weights.keys() == now.keys()
    assert all(torch.equal(tensor, now[name]) for name, tensor in weights.items())
    assert torch.equal(q_of(assistant), q)
    assistant.memory.clear()
    assert texts(target, assistant) == before
    assistant.unlearn()  # there is nothing left to take back


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", LEARN)
def test_what_drafts_is_what_was_measured(target: CausalLM, kind: str) -> None:
    """The draft in use, adapter merged, has the student's distributions."""
    assistant = assistant_of(kind, target, **CHAIN)
    texts(target, assistant)
    assert assistant.learn(steps=20).is_kept
    learned = q_of(assistant)
    with assistant.learning[0].drafting() as student:  # type: ignore[index]
        assistant.drafter = student.drafter
        torch.testing.assert_close(learned, q_of(assistant), rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError):  # the weights that the next steps go on from are other ones
        torch.testing.assert_close(learned, q_of(assistant), rtol=1e-4, atol=1e-5)


def test_the_draft_goes_three_quarters_of_the_way(target: CausalLM) -> None:
    """And the next steps go on from the end of it."""
    assistant = assistant_of("conditioned", target, **CHAIN)
    texts(target, assistant)

    def weight(drafter: Any) -> Tensor:
        return drafter.fusion.fuse.weight.detach().clone()

    published = weight(assistant.drafter)
    assistant.learn(steps=20)
    learned = weight(assistant.learning[0].student)  # type: ignore[index]
    assert float((learned - published).abs().max()) > 1e-5
    torch.testing.assert_close(weight(assistant.drafter), 0.25 * published + 0.75 * learned)


def test_each_text_is_learned_from_so_many_times(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "TIMES", 3)
    monkeypatch.setattr(learning, "STEP", 2 * LENGTH)
    assistant = assistant_of("early_exit", target, **CHAIN)
    texts(target, assistant, 7)  # two of them are held out
    met: list[int] = []
    learner, _ = assistant._learning()
    step = learner._step

    def note(batch: Any) -> bool:
        met.extend(text.number for text in batch)
        return step(batch)

    monkeypatch.setattr(learner, "_step", note)
    assistant.learn(steps=2)
    assert assistant.learn(seconds=60.0).steps == 8 - 2, "15 texts, two a step"
    assert {number: met.count(number) for number in met} == dict.fromkeys([0, 2, 3, 4, 5], 3)
    q, lesson = q_of(assistant), assistant.learn(seconds=60.0)
    assert (lesson.steps, lesson.is_kept) == (0, False)
    assert str(lesson).startswith("Each of the kept texts was learned from 3 times before")
    assert torch.equal(q_of(assistant), q)
    texts(target, assistant, 1)
    assert assistant.learn(seconds=60.0).texts == 1


def test_an_update_that_does_not_help_is_taken_back_with_the_optimiser(
    target: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assistant = assistant_of("conditioned", target, **CHAIN)
    texts(target, assistant)
    assert assistant.learn(steps=3).is_kept
    learner, _ = assistant.learning  # type: ignore[misc]
    drafter, q = assistant.drafter, q_of(assistant)
    parameters = [each.detach().clone() for each in learner.trained]
    moments = copy.deepcopy(learner.optimizer.state_dict())
    monkeypatch.setitem(DISTANCES, "kl+tv", DISTANCES["kl"])
    distance = learner.student.distance
    learner.student.distance = lambda p, q: -distance(p, q)  # away from what the target says
    lesson = assistant.learn(steps=5)
    assert not lesson.is_kept
    assert lesson.after < lesson.before
    assert str(lesson).endswith("so the draft stays as it was.")
    assert assistant.drafter is drafter
    assert torch.equal(q_of(assistant), q)
    assert all(torch.equal(a, b) for a, b in zip(parameters, learner.trained, strict=True))
    state = learner.optimizer.state_dict()["state"]
    for place, each in moments["state"].items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(state[place][name])) for name, value in each.items()
        )
    learner.student.distance = lambda p, q: distance(p, q) * float("nan")
    lesson = assistant.learn(steps=50)
    assert (lesson.steps, lesson.is_kept) == (1, False)
    learner.student.distance = distance
    assert assistant.learn(steps=10).is_kept


def test_the_loss_is_that_of_the_stage_on_what_was_kept(target: CausalLM) -> None:
    """By hand: the target's kept distributions, and steps of the draft along the text, one by one."""
    assistant = assistant_of("conditioned", target, **CHAIN)
    texts(target, assistant, 1)
    (kept,) = assistant.memory.texts.texts
    drafter = assistant.ready_drafter()
    learner, _ = assistant._learning()
    ids, answers, p_logits, states = learner._teaching([kept], whole=True)
    with torch.no_grad():
        loss = learner.student(ids, answers, p_logits, states)
        total = 0.0
        for place in range(12, LENGTH):
            p = logits_of(kept.likely[place - 12, None], kept.probs[place - 12, None], 48)[0]
            hidden = drafter.hidden_states(ids[:, 1:place], None, states[:, : place - 1])[:, -1]
            q = drafter.vocab_logits(hidden)[0]
            total += float(DISTANCES["kl+tv"](p, q))
    assert int(answers.sum()) == NEW
    assert states[0, -1].abs().max() == 0
    # The first of the steps that the loss is the mean of is the one by hand.
    learner.student.unroll = 1
    with torch.no_grad():
        alone = learner.student(ids, answers, p_logits, states)
    assert float(alone) == pytest.approx(total, rel=1e-4)
    assert float(loss) > 0
    assert float(loss) != pytest.approx(float(alone), rel=1e-3)


def test_learning_is_repeatable_and_texts_are_while_nothing_is_learned(target: CausalLM) -> None:
    lessons = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        assistant = assistant_of("conditioned", target, **CHAIN)
        texts(target, assistant)
        torch.manual_seed(seed)
        lesson = assistant.learn(steps=5)
        lessons.append((lesson.before, lesson.after))
        first = texts(target, assistant)
        assert texts(target, assistant) == first
        assistant.detach()
    assert lessons[0] == lessons[1]


def test_estimates_and_copies_follow(target: CausalLM) -> None:
    target.float()
    assistant = assistant_of("early_exit", target, **{**CHAIN, "rule": "threshold", "lookup": True})
    texts(target, assistant)
    weight = assistant.ready_drafter().model.lm_head.weight
    assistant.packed.current(weight)
    assistant.int8.current(weight)
    assert assistant.memory.learned[target]
    assert assistant.memory.lookups[target]
    assert assistant.learn(steps=5).is_kept
    assert assistant.packed.bytes == assistant.int8.bytes == 0
    assert not assistant.memory.learned, "how often another draft's estimates came true"
    assert assistant.memory.lookups[target], "lookups are what they were"
    assert len(assistant.memory.texts.texts) == 8


@pytest.mark.usefixtures("pretended")
def test_steps_are_captured_for_the_draft_that_has_learned(target: CausalLM) -> None:
    assistant = assistant_of("conditioned", target, **CHAIN)
    texts(target, assistant)
    before: Any = assistant.setup().drafter
    assert assistant.learn(steps=10).is_kept
    after: Any = assistant.setup().drafter
    assert after is not before
    assert after.steps is not before.steps
    assert after.steps.fits(after)
    assert not before.steps.fits(after)


def test_a_text_that_is_being_generated_ends_with_the_draft_that_it_began_with(target: CausalLM) -> None:
    assistant = assistant_of("conditioned", target, **CHAIN)
    texts(target, assistant)
    setup = assistant.setup()
    drafter, q = setup.drafter, q_of(assistant)
    assert assistant.learn(steps=5).is_kept
    assert setup.drafter is drafter is not assistant.drafter
    assistant.drafter = drafter
    assert torch.equal(q_of(assistant), q)


# Storing it -----------------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", LEARN)
@pytest.mark.parametrize("twice", [False, True])
def test_a_learned_draft_is_stored_and_says_on_how_much(
    target: CausalLM, tmp_path: Path, kind: str, twice: bool
) -> None:
    target.float()
    name = save_model(target, tmp_path / "target")
    if kind == "independent":
        draft = save_model(assistant_for(target, mix=0.9).drafter.model, tmp_path / "draft")
        assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig(**CHAIN))
    else:
        assistant = assistant_of(kind, target, **CHAIN)
    assistant.config.target_id = name
    texts(target, assistant)
    assert assistant.learn(steps=25).is_kept
    assistant.save_pretrained(tmp_path / "first")
    if twice:
        assistant.detach()
        assistant = SpecDecPPAssistant.from_pretrained(tmp_path / "first", target=target)
        texts(target, assistant)
        assert assistant.learn(steps=3).is_kept
        assistant.save_pretrained(tmp_path / "second")
    learned = q_of(assistant)
    assistant.detach()
    folder = tmp_path / ("second" if twice else "first")
    loaded = SpecDecPPAssistant.from_pretrained(folder, target=target)
    torch.testing.assert_close(q_of(loaded), learned, rtol=1e-4, atol=1e-5)
    tokens = 216 * (1 + twice)
    assert loaded.config.learned == {"tokens": tokens, "texts": 6 * (1 + twice)}
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"from {tokens} tokens of {6 * (1 + twice)} texts" in card
    loaded.detach()


def test_a_learned_adapter_survives_detaching(target: CausalLM) -> None:
    assistant = assistant_of("conditioned", target, **CHAIN)
    texts(target, assistant)
    q = q_of(assistant)
    assert assistant.learn(steps=10).is_kept
    learned = q_of(assistant)
    assistant.detach()
    assistant.attach(target)
    torch.testing.assert_close(q_of(assistant), learned, rtol=1e-5, atol=1e-6)
    assert not assistant.memory.texts.texts, "states of what it was attached to before"
    assistant.unlearn()
    assert torch.equal(q_of(assistant), q)


def test_adapters_are_joined(tmp_path: Path) -> None:
    model = tiny("llama").float()
    generator = torch.Generator().manual_seed(0)

    def lora(name: str, rank: int, scaling: float) -> tuple[str, Lora]:
        module: Any = model.get_submodule(name)
        a = torch.randn(rank, module.weight.shape[1], generator=generator)
        return name, Lora(a, torch.randn(module.weight.shape[0], rank, generator=generator), scaling)

    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1, 2)]
    first = Adapter(
        {"base_model_name_or_path": "org/model"}, dict([lora(names[0], 2, 0.5), lora(names[1], 2, 2.0)]), {}
    )
    second = Adapter({}, dict([lora(names[1], 3, 3.0), lora(names[2], 3, 1.0)]), {})
    one = add_adapter(model, joined(first, second), merge=True)
    two = add_adapter(add_adapter(model, first, merge=True), second, merge=True)
    write_adapter(joined(first, second), tmp_path)
    three = add_adapter(model, tmp_path, merge=False)
    assert read_adapter(tmp_path).config["base_model_name_or_path"] == "org/model"
    expected = two(prompt()).logits
    assert float((expected - model(prompt()).logits).abs().max()) > 0.1
    for each in (one, three):
        torch.testing.assert_close(each(prompt()).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("merge", [True, False])
def test_an_adapter_that_is_there_already_stays(target: CausalLM, tmp_path: Path, merge: bool) -> None:
    target.float()
    name = "model.layers.0.mlp.up_proj"
    write_adapter(Adapter({}, {name: Lora(torch.randn(2, 32), torch.randn(48, 2) / 10, 1.0)}, {}), tmp_path)
    assistant = SpecDecPPAssistant.from_early_exit(
        target, 2, adapter=tmp_path, merge=merge, speculation=SpeculationConfig(**CHAIN)
    )
    texts(target, assistant)
    q = q_of(assistant)
    assert assistant.learn(steps=10).is_kept
    learned = q_of(assistant)
    assert isinstance(assistant.parts.adapter, Adapter)
    assert assistant.parts.adapter.loras[name].a.shape[0] == 2 + RANK
    made = assistant.kind.make(assistant.config, assistant.parts, target)
    assistant.drafter = made
    torch.testing.assert_close(q_of(assistant), learned, rtol=1e-4, atol=1e-5)
    assistant.unlearn()
    assert torch.equal(q_of(assistant), q)


# What cannot be done --------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_said(target: CausalLM) -> None:
    assistant = assistant_of("early_exit", target, **CHAIN)
    for arguments in ({"steps": 0}, {"seconds": -1.0}, {"seconds": 1.0, "steps": 1}):
        with pytest.raises(ValueError, match="give one of the two, above 0"):
            assistant.learn(**arguments)
    with pytest.raises(ValueError, match=r"0 texts are kept.*keep_texts=50000"):
        assistant.learn()
    texts(target, assistant, 1)
    with pytest.raises(ValueError, match="1 texts are kept"):
        assistant.learn()
    texts(target, assistant, 2)
    assert assistant.learn(seconds=0.01).steps == 1


def test_kinds_that_do_not_learn_say_why(target: CausalLM) -> None:
    assistant = SpecDecPPAssistant.from_lookup(target)
    with pytest.raises(ValueError, match="does not learn: there is no draft"):
        assistant.learn()
    learn = {kind.name for kind in KINDS if "learning" not in kind.cannot}
    assert learn == set(LEARN)


def test_drafts_with_an_adapter_in_memory_are_refused(target: CausalLM) -> None:
    from peft import LoraConfig, get_peft_model

    draft = get_peft_model(copy.deepcopy(target), LoraConfig(target_modules=["q_proj"]))
    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig(**CHAIN))
    texts(target, assistant, 2)
    with pytest.raises(ValueError, match="merge_and_unload"):
        assistant.learn()


def test_the_latest_texts_of_so_many_tokens(target: CausalLM) -> None:
    assistant = assistant_of("early_exit", target, **CHAIN)
    texts(target, assistant, 3)
    kept = list(assistant.memory.texts.texts)
    assert [text.number for text in latest(kept, 2 * LENGTH)] == [2, 1]
    assert [text.number for text in latest(kept, 10)] == [2]


def test_long_texts_are_learned_in_pieces(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "LONGEST", 15)
    assistant = assistant_of("conditioned", target, **CHAIN)
    texts(target, assistant)
    assert [len(piece) for piece in learning.pieces(assistant.memory.texts.texts)] == 8 * [15, 15, 6]
    assert assistant.learn(steps=40).is_kept


def test_in_half_precision(target: CausalLM) -> None:
    target.to(torch.bfloat16)
    assistant = assistant_of("conditioned", target, **CHAIN)
    texts(target, assistant)
    lesson = assistant.learn(steps=40)
    assert lesson.is_kept
    assert {parameter.dtype for parameter in assistant.drafter.fusion.parameters()} == {torch.bfloat16}
    texts(target, assistant, 1)
