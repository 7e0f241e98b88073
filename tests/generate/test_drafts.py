"""Which models can draft, and how: independent or early exit, adapters, vocabularies, tokenizers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.repos import WORDS, check_round_trip, estimates, greedy, head_for, save_model
from support.targets.models import VOCAB_SIZE, tiny
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    BartForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig

FIXED = SpeculationConfig("fixed", num_tokens=4)


# --- independent ---


def test_dtype_of_a_draft_given_by_name(draft: str) -> None:
    assert SpecDecPPAssistant.from_draft(draft, tiny("llama").to(torch.bfloat16)).dtype == torch.bfloat16
    assert SpecDecPPAssistant.from_draft(draft).dtype == torch.float64, "its own"


def test_draft_in_memory_cannot_be_saved(target: PreTrainedModel, tmp_path: Path) -> None:
    assistant = SpecDecPPAssistant.from_draft(tiny("llama"), target)
    with pytest.raises(ValueError, match="in memory without a Hub id or folder.*Save the draft"):
        assistant.save_pretrained(tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("model", "message"), [
    (lambda: BartForConditionalGeneration(BartConfig(**SMALL)), "encoder-decoder model; a draft must be a decoder"),
    (lambda: MambaForCausalLM(MambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=48)), "recurrent state"),
    (lambda: tiny("llama").model, "has no LM head.*AutoModelForCausalLM"),
], ids=["encoder-decoder", "stateful", "headless"])  # fmt: skip
def test_models_that_cannot_draft(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecDecPPAssistant.from_draft(model(), tiny("llama"))


SMALL: dict[str, Any] = {
    "vocab_size": 48, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip


def test_decoder_of_an_encoder_decoder() -> None:
    """Half of an encoder-decoder, loaded as a causal LM, is a draft like any other; also fresh from training."""
    target, draft = tiny("llama"), BartForCausalLM(BartConfig(**{**SMALL, "dropout": 0.5})).train()
    assert greedy(target, SpecDecPPAssistant.from_draft(draft, target, speculation=FIXED)) == greedy(target)


# --- vocabularies ---


@pytest.mark.daily("early exit")
@pytest.mark.takes(2)
@pytest.mark.parametrize("kind", ["independent", "early exit"])
def test_draft_vocab(target: PreTrainedModel, draft: str, tmp_path: Path, kind: str) -> None:
    ids = [int(i) for i in torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))[:20]]
    for vocab in (ids, tuple(ids), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32)):
        if kind == "independent":
            assistant = SpecDecPPAssistant.from_draft(draft, target, draft_vocab=vocab, head=head_for(target))
        else:
            assistant = SpecDecPPAssistant.from_early_exit(target, 2, draft_vocab=vocab, head=head_for(target))
        assert set(estimates(assistant)[:, :VOCAB_SIZE].isfinite().nonzero()[:, 1].tolist()) == set(ids)
        assert greedy(target, assistant) == greedy(target)
    check_round_trip(assistant, target, tmp_path / "a")


@pytest.mark.parametrize(
    ("ids", "found"),
    [([], "0 ids, none"), ([1, 1], "2 ids, 1 to 1"), ([-1, 3], "2 ids, -1 to 3"), ([0, 48], "2 ids, 0 to 48")],
)
def test_bad_draft_vocab(target: PreTrainedModel, draft: str, ids: list[int], found: str) -> None:
    message = f"draft_vocab must list distinct token ids from 0 to 47; got {found}.*made for another draft"
    with pytest.raises(ValueError, match=message):
        SpecDecPPAssistant.from_draft(draft, target, draft_vocab=ids)
    with pytest.raises(ValueError, match=message):
        SpecDecPPAssistant.from_early_exit(target, 2, draft_vocab=ids)


@pytest.mark.daily("72-64", takes=2)
@pytest.mark.parametrize(("ours", "theirs"), [(72, 64), (64, 72), (72, 48), (48, 72)])
def test_padded_vocabularies(ours: int, theirs: int, tmp_path: Path) -> None:
    """Rows beyond the tokenizer's are padding, of which models of one family have different amounts."""
    target = AutoModelForCausalLM.from_pretrained(save_model(tiny("llama", vocab_size=ours), tmp_path / "target"))
    folder = save_model(tiny("llama", vocab_size=theirs), tmp_path / "draft")
    with torch.no_grad():  # a target that says its padding, too, which the draft cannot read
        target.lm_head.weight[48:] *= 3
    assistant = SpecDecPPAssistant.from_draft(folder, target, speculation=FIXED)
    text = greedy(target, max_new_tokens=60)
    assert (greedy(target, assistant, max_new_tokens=60), assistant.config.vocab_size) == (text, ours)
    if ours > 48:
        assert max(text[12:]) >= 48
    check_round_trip(assistant, target, tmp_path / "a")


# --- tokenizers ---


def test_different_tokenizers(target: PreTrainedModel, tmp_path: Path) -> None:
    other = save_model(tiny("llama"), tmp_path / "other", [*WORDS[:5], "other", *WORDS[6:-1], "last"])
    message = (
        r"The target '.*target' and the draft '.*other' have different tokenizers: 2 ids stand for different tokens, "
        r"the first being 5 \('w5' against 'other'\).*Use a draft of the target's own family, or an early exit"
    )
    with pytest.raises(ValueError, match=message):
        SpecDecPPAssistant.from_draft(other, target)
    late = SpecDecPPAssistant.from_draft(other)
    with pytest.raises(ValueError, match=message):
        late.attach(target)


def test_unknown_tokenizers(target: PreTrainedModel, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    same = save_model(tiny("llama"), tmp_path / "same", None)
    padded = save_model(tiny("llama", vocab_size=64), tmp_path / "padded", None)
    SpecDecPPAssistant.from_draft(same, target)
    assert not [w for w in recwarn if "token ids" in str(w.message)]
    with pytest.warns(UserWarning, match="target has 48 token ids and the draft 64.*could not be checked because"):
        SpecDecPPAssistant.from_draft(padded, target)


# --- one folder ---


def test_an_early_exit_attached_again(target: PreTrainedModel) -> None:
    """To its own target, or to another one: its draft is made of that one's layers."""
    assistant = SpecDecPPAssistant.from_early_exit(target, 2)
    for model in (target, tiny("llama", seed=3)):
        assistant.detach()
        assistant.attach(model)
        assert greedy(model, assistant) == greedy(model)
        assert assistant.ready_drafter().model.get_input_embeddings().weight is model.get_input_embeddings().weight
