"""A block draft is taught what its rounds do, and what was taught is what is stored."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distillation_files import PROMPT_LENGTH, check_that_training_helps, prepare, report_of, rows
from support.eagle3_files import Checkpoint
from support.models import VOCAB_SIZE, prompt, quiet_later_layers, tiny
from support.training_files import training_run
from support.zoo import tiny_of
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.drafts.dflash.model import DFlashDraft
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.texts.branches import Drawing, ReadText, draft_chains, target_states
from hf_specdecpp.training import models
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import initial_block, initial_layer
from hf_specdecpp.training.distillation import stage as distillation
from hf_specdecpp.training.distillation.students import BlockStudent, chosen
from hf_specdecpp.training.run import train

PLACES = 3


def begun(folder: Path, family: str = "llama", **distill: Any) -> TrainingConfig:
    return prepare(folder, "block", family, block_size=PLACES, **{"learning_rate": 2e-3, **distill})


@torch.no_grad()
def block_of(draft: DFlashDraft, states: Any, ids: Tensor, anchor: int) -> Tensor:
    """Logits `[places, vocab]` of a round after the token at `anchor`."""
    session = draft.session(VOCAB_SIZE)
    session.begin_round(ids[:, : anchor + 1], 0, states[:, :anchor])
    return session._block()[0]


@torch.no_grad()
def measured(assistant: SpecDecPPAssistant, target: CausalLM) -> list[float]:
    """Mean acceptance by place on the held-out answers, from the blocks of rounds."""
    draft, chances = assistant.ready_drafter(), []
    for row in rows(16, seed=2):
        ids = torch.tensor([row["input_ids"]])
        p, states = target(ids).logits[0].softmax(-1), target_states(target, draft, ids[0].tolist())
        for place in range(max(PROMPT_LENGTH - 1, PLACES), ids.shape[1] - 1):
            q = [block_of(draft, states, ids, place - k)[k].softmax(-1) for k in range(PLACES)]
            chances.append([float(torch.minimum(p[place], each).sum()) for each in q])
    return torch.tensor(chances).mean(0).tolist()


@pytest.mark.takes(4)
@pytest.mark.parametrize(("family", "layers"), [("llama", 1), pytest.param("qwen3", 2, marks=pytest.mark.slow)])
def test_training_helps_and_is_what_is_stored(family: str, layers: int, tmp_path: Path) -> None:
    config = begun(tmp_path, family, epochs=8, block_layers=layers)
    distillation.run(config)
    report = report_of(config)
    before, after = report["before"]["all"], report["after"]["all"]
    names = ["acceptance", "acceptance_2", "acceptance_3"]
    assert all(after[name] > before[name] + 0.01 for name in names), report
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)
    expected = {name: parameter.clone() for name, parameter in target.named_parameters()}
    assistant = models.load_assistant(config, target)
    assert measured(assistant, target) == pytest.approx([after[name] for name in names], abs=2e-3)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in target.named_parameters())
    assistant.save_pretrained(tmp_path / "repo")
    stored = json.loads((tmp_path / "repo" / "config.json").read_text())
    assert (stored["draft_kind"], stored["draft_id"], stored["dflash"]["block_size"]) == ("dflash", None, PLACES)
    ids, options = prompt(9), {"max_new_tokens": 20, "do_sample": False}
    for tree in (None, "dyspec"):
        again = SpecDecPPAssistant.from_pretrained(
            tmp_path / "repo", target=target, speculation=SpeculationConfig(tree=tree, rule="fixed")
        )
        assert torch.equal(target.generate(ids, assistant_model=again, **options), target.generate(ids, **options))
        assert again.stats.drafted > 0
        assert len(again.ready_drafter().model.layers) == layers
        again.detach()


@torch.no_grad()
def loss_of(weights: list[float], decay: float) -> tuple[float, float]:
    """What a step is taught of one text with a block after each of its tokens, and the same by hand."""
    target = quiet_later_layers(tiny("llama")).float()
    model = initial_block.untrained(initial_block.settings_for(target, [1], PLACES, 1, VOCAB_SIZE - 1), target)
    initial_block.fit(model, target, [prompt(30, seed) for seed in range(20)], 4.0)
    student = BlockStudent(DFlashDraft(model, target), anchors=99, decay=decay)
    ids, answers = prompt(14), torch.arange(13)[None] >= 5
    with TargetStates(target, model.reader) as caught:
        p_logits, states = target(ids).logits[0, 5:13], caught.take()
    ours = float(student(ids, answers, lambda at: p_logits[at], states))
    total = mass = 0.0
    for anchor in range(5, 13):
        block = block_of(student.drafter, states, ids, anchor)
        for place in range(min(PLACES, 13 - anchor)):
            p, q = p_logits[anchor + place - 5].log_softmax(-1), block[place].log_softmax(-1)
            total += weights[place] * float((p.exp() * (p - q)).sum())
            mass += weights[place]
    return ours, 8 * total / mass


def test_the_loss_is_the_weighted_divergence() -> None:
    weights = [math.exp(-place / 1.5) for place in range(PLACES)]
    ours, by_hand = loss_of(weights, 1.5)
    assert ours == pytest.approx(by_hand, rel=1e-4)
    assert ours != pytest.approx(loss_of([1.0] * PLACES, 1.5)[1], rel=3e-3), "all places alike"
    assert ours != pytest.approx(loss_of(weights[::-1], 1.5)[1], rel=3e-3), "the last ones first"


def test_which_places_are_taught() -> None:
    """Two texts of 9 and 7 tokens, padded to 9, whose answers begin with token 5 and 6."""
    answers = torch.tensor([[False] * 4 + [True] * 4, [False] * 5 + [True] + [False] * 2])
    anchors, taught = chosen(answers, 6, 3)
    found = [
        {(int(anchor), place) for anchor, row in zip(anchors[text], taught[text], strict=True)
         for place in range(3) if row[place]}
        for text in range(2)
    ]  # fmt: skip
    assert found[0] == {(4, 0), (4, 1), (4, 2), (5, 0), (5, 1), (5, 2), (6, 0), (6, 1), (7, 0)}
    assert found[1] == {(5, 0)}
    few = {tuple(sorted(chosen(answers[:1], 2, 3)[0][0].tolist())) for _ in range(60)}
    assert len(few) == 6, "every pair of four is drawn; the chance that one is not is under 0.0002"


@torch.no_grad()
def test_it_begins_with_what_least_squares_predict() -> None:
    """The first row's input of the last MLP is the linear map of context and embedding that fits the target's best."""
    target = quiet_later_layers(tiny("llama", head_dim=128, hidden_size=128)).float()
    texts = [1 + prompt(40, seed) % 24 for seed in range(60)]  # few tokens: easy to tell from contexts
    model = initial_block.untrained(initial_block.settings_for(target, [0], PLACES, 1, VOCAB_SIZE - 1), target)
    inputs: list[Tensor] = []
    model.layers[0].post_attention_layernorm.register_forward_pre_hook(lambda _, seen: inputs.append(seen[0]))
    initial_block.fit(model, target, texts, 4.0)
    layer: Any = inner_decoder(target).layers[-1]
    theirs: list[Tensor] = []
    layer.post_attention_layernorm.register_forward_pre_hook(lambda _, seen: theirs.append(seen[0]))
    draft, known, wanted, ours = DFlashDraft(model, target), [], [], []
    for ids in texts:
        states: Any = target_states(target, draft, ids[0].tolist())
        wanted.append(theirs.pop()[0, 5:] - draft.embed(ids)[0, 5:])
        embeddings = model.layers[0].input_layernorm(draft.embed(ids))[0, 5:]
        known.append(torch.cat((model.reader(states)[0, 4:-1], embeddings), -1))
        block_of(draft, states, ids, 20)
        ours.append(inputs.pop()[0, 0] - draft.embed(ids)[0, 20])
    rows, inputs_of_mlp = torch.cat(known).double(), torch.cat(wanted).double()
    solution = torch.linalg.lstsq(rows, inputs_of_mlp, rcond=1e-6, driver="gelsd").solution  # 24 embeddings, 128 wide
    best = (torch.stack([each[15] for each in known]).double() @ solution).float()
    assert float((torch.stack(ours) - best).square().mean()) < 0.1 * float(best.square().mean())


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "granite", "mixtral"])
def test_other_families(family: str) -> None:
    """With norms behind products, without a gate or with experts in the MLP, with scaled logits."""
    target = tiny(family).float()
    model = initial_block.untrained(initial_block.settings_for(target, [0], PLACES, 2, VOCAB_SIZE - 1), target)
    initial_block.fit(model, target, [prompt(20, seed) for seed in range(4)] + [prompt(2)], 4.0)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assistant = SpecDecPPAssistant.from_draft(model, target=target, speculation=SpeculationConfig(rule="fixed"))
    ids, options = prompt(9), {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=assistant, **options), target.generate(ids, **options))
    assert assistant.stats.drafted > 0


def test_training_goes_on_with_a_run(tmp_path: Path) -> None:
    first, second = (begun(tmp_path / name, answers=20, epochs=1) for name in ("first", "second"))
    second.distill.start_from = str(first.work)
    for config in (first, second):
        distillation.run(config)
    ended, begins = (report_of(config) for config in (first, second))
    assert begins["before"]["all"]["acceptance"] == pytest.approx(ended["after"]["all"]["acceptance"], abs=2e-3)


def test_chains_on_a_text_are_those_of_rounds() -> None:
    """What a head learns from, and what it is calibrated and measured on."""
    target = quiet_later_layers(tiny("llama")).float()
    settings = initial_block.settings_for(target, [1], PLACES, 1, VOCAB_SIZE - 1)
    draft, ids = DFlashDraft(initial_block.untrained(settings, target), target), prompt(16)
    states: Any = target_states(target, draft, ids[0].tolist())
    starts, drawing = torch.tensor([5, 9, 16]), Drawing(lambda x: x.softmax(-1), VOCAB_SIZE)
    drafted = draft_chains(draft, ReadText(ids[0].tolist(), states), starts, 20, drawing)
    assert drafted.tokens.shape == (3, PLACES)
    for row, start in enumerate(starts.tolist()):
        logits = block_of(draft, states, ids, start - 1)
        assert torch.equal(drafted.tokens[row], logits.argmax(-1))
        found = draft.logits(drafted.hidden[row, :PLACES], VOCAB_SIZE)
        torch.testing.assert_close(functional.softmax(found, -1), logits.softmax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.takes(3)
def test_all_stages(tmp_path: Path) -> None:
    """They end with a repository that has a head, drafts and changes nothing."""
    config = training_run(tmp_path, num_texts=16, early_exit=True, temperatures=(1.0, 0.0))
    config.draft, config.layers, config.rollouts.data = "block", None, ["prompts.jsonl"]
    config.distill.block_size, config.distill.learning_rate = PLACES, 1e-3
    train(config, ["distill", "head", "calibrate", "eval", "card"])
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)
    assistant = SpecDecPPAssistant.from_pretrained(config.output, target=target)
    assert assistant.head is not None
    ids, options = prompt(9), {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=assistant, **options), target.generate(ids, **options))
    card = Path(config.output, "README.md").read_text(encoding="utf-8")
    assert "| draft | DFlash blocks, which read states of" in card


# An EAGLE-3 layer is taught what it does in a round, and what was taught is what is stored. ---------------------------


@pytest.mark.every(2, takes=3)
@pytest.mark.parametrize("family", ["llama", "qwen2", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_training_a_layer_helps_and_is_what_is_stored(family: str, tmp_path: Path) -> None:
    vocab = 40 if family == "llama" else None
    config = prepare(tmp_path, "eagle3", family, draft_vocab_size=vocab, unroll=3, epochs=6)
    again, target = check_that_training_helps(config, tmp_path / "repo")
    again.speculation = SpeculationConfig("fixed", num_tokens=3)
    ids, options = prompt(9), {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=again, **options), target.generate(ids, **options))
    assert again.stats.drafted > 0


@pytest.mark.slow
def test_training_goes_on_with_a_run_and_with_a_checkpoint_of_others(tmp_path: Path) -> None:
    first = prepare(tmp_path / "first", "eagle3", draft_vocab_size=40, epochs=2)
    distillation.run(first)
    learned = report_of(first)["after"]["all"]["acceptance"]
    config = prepare(tmp_path / "second", "eagle3", draft_vocab_size=40, epochs=2)
    config.distill.start_from = str(first.work)
    distillation.run(config)
    report = report_of(config)
    assert report["before"]["all"]["acceptance"] == pytest.approx(learned, abs=2e-3)
    assert report["after"]["all"]["acceptance"] > learned

    theirs = Checkpoint(flags={"norm_before_residual": True}).save(tmp_path / "theirs")
    config = prepare(tmp_path / "third", "eagle3", epochs=4)
    config.distill.start_from = str(theirs)
    distillation.run(config)
    report = report_of(config)
    assert report["after"]["all"]["acceptance"] > report["before"]["all"]["acceptance"] + 0.01
    stored = models.load_own(config.kind, config.work)
    assert stored.settings.norm_before_residual
    assert stored.token_ids is not None
    assert stored.token_ids.tolist() == Checkpoint().ids

    config = prepare(tmp_path / "fourth", "eagle3", epochs=1)
    config.distill.start_from = config.target
    with pytest.raises(ValueError, match="not of an hf_specdecpp assistant"):
        distillation.run(config)


def test_sizes_that_a_target_does_not_name() -> None:
    """GPT-2 has no `intermediate_size`; that of the first Llama would be far too much."""
    assert initial_layer.settings_for(tiny("gpt2"), [0, 1], None).layer_config().intermediate_size == 4 * 32


def test_layers_that_differ() -> None:
    """Gemma 4's have heads of two sizes, so its config names none: the last layer's are taken, as its weights are."""
    target = tiny_of("gemma4_text")
    settings = initial_layer.settings_for(target, [0, 1], None)
    last: Any = inner_decoder(target).layers[-1]
    assert settings.layer["head_dim"] == last.self_attn.head_dim
    initial_layer.fit(initial_layer.untrained(settings, target, None), target, [prompt(20)])


def test_a_target_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="has no attention.*another kind of draft"):
        initial_layer.settings_for(tiny_of("mamba"), [0], None)


def test_what_training_takes_no_part_of(tmp_path: Path) -> None:
    """Embeddings and LM head stay the target's; everything else is trained."""
    config = prepare(tmp_path, "eagle3", draft_vocab_size=40, epochs=1)
    distillation.run(config)
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)
    layer = models.load_own(config.kind, config.work)
    assert layer.token_ids is not None
    assert layer.lm_head is not None
    kept = target.lm_head.weight[layer.token_ids]
    torch.testing.assert_close(layer.lm_head.weight.float(), kept, rtol=1e-3, atol=1e-3)
    begun = initial_layer.untrained(layer.settings, target, layer.token_ids)
    assert not torch.allclose(layer.norm.weight.float(), begun.norm.weight, atol=1e-4)
