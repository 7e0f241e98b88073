"""An EAGLE-3 layer begins like the target's last layer, is taught what it does in a round, and is stored as taught."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.files.eagle3_files import Checkpoint
from support.runs.distillation_files import check_that_training_helps, prepare, report_of, states_of
from support.targets.models import prompt, tiny
from support.targets.zoo import families, tiny_of
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPConfig, SpeculationConfig
from hf_specdecpp.draft_kinds.draft_kind import Parts
from hf_specdecpp.draft_kinds.eagle3.loading_eagle3 import flat_config
from hf_specdecpp.draft_kinds.eagle3.modeling_eagle3 import Eagle3Model
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.target_states import StateReader
from hf_specdecpp.training import models
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import distill as distillation
from hf_specdecpp.training.distillation import first_weights
from hf_specdecpp.training.distillation.initialise import initial_draft


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_training_a_layer_helps_and_is_what_is_stored(family: str, tmp_path: Path) -> None:
    vocab = 40 if family == "llama" else None
    config = prepare(tmp_path, "eagle3", family, draft_vocab_size=vocab, unroll=3, epochs=6)
    again, target = check_that_training_helps(config, tmp_path / "repo")
    again.speculation = SpeculationConfig("fixed", num_tokens=3)
    ids, options = prompt(9), {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=again, **options), target.generate(ids, **options))
    assert again.stats.drafted > 0
    if vocab is not None:
        check_what_is_trained(models.load_own(config.kind, config.work), target)


def check_what_is_trained(layer: Eagle3Model, target: CausalLM) -> None:
    """Embeddings and LM head stay the target's; everything else is trained."""
    assert layer.token_ids is not None
    assert layer.lm_head is not None
    kept = target.lm_head.weight[layer.token_ids]
    torch.testing.assert_close(layer.lm_head.weight.float(), kept, rtol=1e-3, atol=1e-3)
    begun = first_weights.untrained_layer(layer.settings, target, layer.token_ids)
    assert not torch.allclose(layer.norm.weight.float(), begun.norm.weight, atol=1e-4)


@pytest.mark.slow
def test_training_goes_on_with_a_checkpoint_of_others(tmp_path: Path) -> None:
    theirs = Checkpoint(flags={"norm_before_residual": True}).save(tmp_path / "theirs")
    config = prepare(tmp_path / "own", "eagle3", epochs=4)
    config.distill.start_from = str(theirs)
    distillation.run(config)
    report = report_of(config)
    assert report["after"]["all"]["acceptance"] > report["before"]["all"]["acceptance"] + 0.01
    stored = models.load_own(config.kind, config.work)
    assert stored.settings.norm_before_residual
    assert stored.token_ids is not None
    assert stored.token_ids.tolist() == Checkpoint().ids

    config = prepare(tmp_path / "no layer", "eagle3", epochs=1)
    config.distill.start_from = config.target
    with pytest.raises(ValueError, match="not an hf_specdecpp assistant"):
        distillation.run(config)


@pytest.mark.parametrize(("depth", "reads"), [(8, [1, 3, 4]), (3, [1, 2]), (2, [0, 1])])
def test_layers_that_are_read_where_none_are_named(
    depth: int, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a target that is too small for the usual ones; its draft names them for other engines."""
    monkeypatch.setattr(first_weights, "fit_layer", lambda *_: None)
    target, config = tiny("llama", num_hidden_layers=depth), TrainingConfig(target="target", draft="eagle3")
    inputs: Any = SimpleNamespace(config=config, target=target, earlier=None, texts_to_fit_on=str)
    module = initial_draft(inputs, None).drafter.model
    assert module.settings.reads == reads
    assert (named := flat_config(module.settings, reads, target.config).get("eagle_config")) or depth > 3
    assert named is None or named["eagle_aux_hidden_state_layer_ids"] == reads
    assistant = SpecDecPPAssistant(SpecDecPPConfig(draft_kind="eagle3"), None, None, Parts(module=module))
    ids, options = prompt(9), {"max_new_tokens": 9, "do_sample": False}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, **options, assistant_model=assistant), plain)


def test_sizes_that_a_target_does_not_name() -> None:
    """GPT-2 has no `intermediate_size`; that of the first Llama would be far too much."""
    assert first_weights.layer_settings(tiny("gpt2"), [0, 1], None).layer_config().intermediate_size == 4 * 32


def test_layers_that_differ() -> None:
    """Gemma 4's have heads of two sizes, so its config names none: the last layer's are taken, as its weights are."""
    target = tiny_of("gemma4_text")
    settings = first_weights.layer_settings(target, [0, 1], None)
    last: Any = inner_decoder(target).layers[-1]
    assert settings.layer["head_dim"] == last.self_attn.head_dim
    first_weights.fit_layer(first_weights.untrained_layer(settings, target, None), target, [prompt(20)])


@pytest.mark.parametrize("family", sorted({"beam", "llama", "gemma3_text", "cohere", "olmo", "dory"} & set(families())))
@torch.no_grad()
def test_a_norm_begins_as_the_targets(family: str) -> None:
    """One with or without a weight, which subtracts the mean or does not."""
    theirs: Any = inner_decoder(tiny_of(family)).norm.float()
    ours = LlamaRMSNorm(32)
    if getattr(theirs, "weight", None) is not None:
        torch.nn.init.uniform_(theirs.weight, 0.5, 2.0)
    first_weights.copy_norm(theirs, ours)
    states = torch.randn(5, 32)
    states -= states.mean(-1, keepdim=True)
    torch.testing.assert_close(ours(states), theirs(states), rtol=1e-3, atol=1e-3)


def test_a_target_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="has no attention.*another kind of draft"):
        first_weights.layer_settings(tiny_of("mamba"), [0], None)


# A layer begins like the target's last layer: heads that attend to their own place carry what it lacks. ---------------


READS, LAST = [0, 1], 2
SIZE, HEAD, OWN = 32, 8, 3  # of four heads
TEXTS = [prompt(60, seed) for seed in range(60)]
NEW = [prompt(60, seed) for seed in range(100, 106)]


def target_of(family: str = "llama") -> CausalLM:
    """Its embeddings have something in common, as those of trained models do."""
    target = tiny(family).float()
    with torch.no_grad():
        target.get_input_embeddings().weight.add_(0.4)
    return target


def begun(target: CausalLM) -> Eagle3Model:
    model = first_weights.untrained_layer(first_weights.layer_settings(target, READS, None), target, None)
    first_weights.fit_layer(model, target, TEXTS)
    return model


def outputs(target: CausalLM, layer: int, ids: Tensor) -> Tensor:
    """The outputs `[1, n, hidden_size]` of a layer of the target along a text."""
    catching = StateReader()
    catching.hidden_size, catching.reads = SIZE, [layer]
    return states_of(target, catching, ids)


@torch.no_grad()
def off(model: Eagle3Model, target: CausalLM, step: int) -> float:
    """The squared error of the draft's state beside the target's own, in units of its square. In a later step the draft
    goes on from a state like its own, for which the target's is taken."""
    errors, sizes = [], []
    for ids in NEW:
        read = torch.cat([outputs(target, layer, ids) for layer in (READS if step == 1 else [LAST])], -1)
        inputs = model.reader(read[:, :-1], target.get_input_embeddings()(ids[:, 1:]))
        wanted = outputs(target, LAST, ids)[:, 1:]
        errors.append((model.decoder(inputs_embeds=inputs).last_hidden_state - wanted).square().sum())
        sizes.append(wanted.square().sum())
    return float(sum(errors) / sum(sizes))


def without_phase(model: Eagle3Model) -> Eagle3Model:
    """The mutant: RoPE turns nothing, so that all places look alike."""
    model.decoder.rotary_emb.inv_freq.zero_()
    return model


@torch.no_grad()
def plain(model: Eagle3Model) -> Eagle3Model:
    """Without what the heads carry: the residual is g, and no more."""
    model.decoder.layers[0].self_attn.o_proj.weight[:, -OWN * HEAD :] = 0
    return model


@pytest.mark.daily("2")
@pytest.mark.parametrize("step", [1, 2])
def test_it_computes_what_the_last_layer_does(step: int) -> None:
    target = target_of()
    ours = off(begun(target), target, step)
    assert ours < 0.05
    assert off(without_phase(begun(target)), target, step) > 2 * ours
    assert off(plain(begun(target)), target, step) > 3 * ours


def test_fc_makes_the_final_state_of_what_is_read() -> None:
    target = target_of()
    model = begun(target)
    assert model.reader.fc is not None
    read = torch.cat([torch.cat([outputs(target, layer, ids) for layer in READS], -1)[0] for ids in TEXTS])
    final = torch.cat([outputs(target, LAST, ids)[0] for ids in TEXTS])
    unit = final / final.square().mean(-1, keepdim=True).sqrt()
    best = read @ torch.linalg.lstsq(read, unit).solution * final.square().mean().sqrt()
    with torch.no_grad():
        error = model.reader.fc(read) - best
    assert float(error.square().mean()) < 0.05 * float(best.square().mean())


def test_the_target_is_left_alone() -> None:
    target = target_of("gemma3_text")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    begun(target)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    assert not any(module._forward_hooks for module in target.modules())
