"""An EAGLE-3 layer is taught what it does in a round, and what was taught is what is stored."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.distillation_files import check_that_training_helps, prepare, report_of
from support.eagle3_files import Checkpoint
from support.models import prompt, tiny
from support.zoo import tiny_of
from transformers import AutoModelForCausalLM

from hf_specdecpp import SpeculationConfig
from hf_specdecpp.models.causal_lm import inner_decoder
from hf_specdecpp.training import models
from hf_specdecpp.training.distillation import initial_layer
from hf_specdecpp.training.distillation import stage as distillation


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
