"""Targets and drafts on pretended accelerators: the right devices everywhere, and how often the host waits."""

from collections import Counter
from typing import Any

import pytest
import torch
from support.devices.pretend_devices import DeviceTensor, on_device, pretend_devices, spread
from support.targets.models import (
    configured,
    partly_agreeing,
    prompt,
    quiet_later_layers,
    random_fusion,
    random_layer,
    tiny,
)
from support.targets.watchers import Collector, Recorder, tokenizer, unnoticed

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant
from hf_specdecpp.generation.decoding import AssistedDecoding

LEVELS = 4
RULES: list[dict[str, Any]] = [
    {"rule": "fixed", "num_tokens": 4},
    {"rule": "threshold", "threshold": 0.6, "max_tokens": 6},
    {"rule": "throughput", "tree": False, "costs": {"draft": 0.05, "verify": [1.0, 1.0, 1.0, 1.2]}},
]
TREES: list[dict[str, Any]] = [
    {"tree": "dyspec", "tree_budget": 12, "tree_depth": LEVELS},
    {"tree": "dyspec", "rule": "throughput", "costs": {"draft": 0.05, "verify": [1.0, 1.0, 1.0, 1.2], "branch": 0.01}},
    {"tree": "dyspec-exact", "tree_budget": 6, "tree_depth": 3},
    {"tree": [2, 2, 1]},
]
OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "pad_token_id": 0}


def assert_plain(
    target: Any, make: Any, devices: tuple[str, str] = ("cuda:0", "cuda:0"), **options: Any
) -> Counter[str]:
    """Greedy text on a device is that of plain generation on the host; what was counted.

    `make`: makes the assistant of the target, once that is on its device. `devices`: of the target, and of a draft of
    its own."""
    plain = target.generate(prompt(), do_sample=False, **OPTIONS)
    with pretend_devices() as counts, torch.no_grad():
        on_device(target, devices[0])
        assistant, ids = make(target), on_device(prompt(), devices[0])
        text = target.generate(ids, do_sample=False, assistant_model=assistant, **{**OPTIONS, **options})
        text = text.sequences if options.get("return_dict_in_generate") else text
        assert isinstance(text, DeviceTensor)
        assert str(text.device) == devices[0]
        assert torch.equal(text.host, plain)
        assert 0 < assistant.stats.accepted < assistant.stats.drafted
        assert assistant.stats.plain_pass_seconds > 0.0
        return Counter(counts)


def with_draft(device: str = "cuda:0", attached: bool = True, head: bool = False, **speculation: Any) -> Any:
    """Makes an assistant with a draft of its own on a device."""

    def make(target: Any) -> SpecDecPPAssistant:
        draft = on_device(partly_agreeing(ORIGINAL, 0.9), device)
        estimator = None
        if head:
            torch.manual_seed(0)
            estimator = on_device(AcceptanceHead(32, embedding_size=32, inputs="before").double(), device)
        assistant = SpecDecPPAssistant.from_draft(draft, target if attached else None, head=estimator)
        return configured(assistant, **(speculation or RULES[0]))

    return make


ORIGINAL = tiny("llama")


@pytest.mark.daily("{'rule': 'fixed', 'num_tokens': 4}")
@pytest.mark.parametrize("speculation", [*RULES, *TREES], ids=str)
def test_every_rule_and_tree(speculation: dict[str, Any]) -> None:
    assert_plain(tiny("llama"), with_draft(**speculation))


@pytest.mark.daily("{'rule': 'fixed', 'num_tokens': 4}", "{'tree': 'dyspec', 'tree_budget': 12, 'tree_depth': 4}")
@pytest.mark.parametrize("speculation", [RULES[0], RULES[1], TREES[0]], ids=str)
def test_a_draft_on_another_device(speculation: dict[str, Any]) -> None:
    assert_plain(tiny("llama"), with_draft("cuda:1", **speculation), ("cuda:0", "cuda:1"))


PLACES = {
    **dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1"), "cuda:0"),
    **dict.fromkeys(("model.layers.2", "model.norm", "lm_head"), "cuda:1"),
}


@pytest.mark.daily("{'tree': 'dyspec', 'tree_budget': 12, 'tree_depth': 4}-early exit")
@pytest.mark.parametrize("kind", ["independent", "early exit", "head", "conditioned", "eagle3", "vocabulary"])
@pytest.mark.parametrize("speculation", [RULES[1], TREES[0]], ids=str)
def test_a_target_on_two_devices(kind: str, speculation: dict[str, Any]) -> None:
    original = quiet_later_layers(tiny("llama"))
    fusion, layer = random_fusion(original).double(), random_layer(original, (0, 2))
    plain = original.generate(prompt(), do_sample=False, **OPTIONS)
    torch.manual_seed(0)
    head = AcceptanceHead(32, embedding_size=32, inputs="before").double()
    options: dict[str, Any] = {
        "early exit": {}, "head": {"head": head}, "conditioned": {"fusion": fusion},
        "vocabulary": {"draft_vocab": range(3, 46)},
    }  # fmt: skip
    with pretend_devices(), torch.no_grad():
        target = spread(original, PLACES)
        on_device(fusion), on_device(head)
        if kind == "independent":
            assistant = with_draft(**speculation)(target)
        elif kind == "eagle3":  # it reads states on both
            assistant = SpecDecPPAssistant.from_draft(layer, target)
        else:
            make = SpecDecPPAssistant.from_conditioned if kind == "conditioned" else SpecDecPPAssistant.from_early_exit
            assistant = make(target, [0, 2], **options[kind])
        configured(assistant, **speculation)
        text = target.generate(on_device(prompt()), do_sample=False, assistant_model=assistant, **OPTIONS)
        assert torch.equal(text.host, plain)
        assert assistant.stats.drafted > 0
        target.generate(on_device(prompt()), do_sample=True, assistant_model=assistant, **OPTIONS)


@pytest.mark.daily("{'rule': 'threshold', 'threshold': 0.6, 'max_tokens': 6}", takes=3)
@pytest.mark.parametrize("speculation", [RULES[1], TREES[0]], ids=str)
def test_what_goes_with_a_text(speculation: dict[str, Any]) -> None:
    """Records, streaming, stop strings, criteria that see every token, chunks, and processors that see the text."""
    make = with_draft(**speculation)
    records: dict[str, Any] = dict.fromkeys(("output_scores", "output_logits", "output_hidden_states"), True)
    assert_plain(tiny("llama"), make, return_dict_in_generate=True, **records)
    streamer, criterion = Collector(), Recorder()
    options = {"stop_strings": ["none of these"], "tokenizer": tokenizer(), "stopping_criteria": [criterion]}
    assert_plain(tiny("llama"), make, streamer=streamer, prefill_chunk_size=5, **options)
    assert (sum(map(len, streamer.puts)), len(criterion.asked)) == (12 + 20, 20)


@pytest.mark.takes(4)
def test_a_batch() -> None:
    target, ids = tiny("llama"), torch.cat((prompt(), prompt(seed=1)))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    plain = target.generate(ids, attention_mask=mask, do_sample=False, **OPTIONS)
    with pretend_devices(), torch.no_grad():
        on_device(target)
        for rule in (RULES[1], RULES[-1]):
            assistant = with_draft(**rule)(target)
            inputs = {"input_ids": on_device(ids), "attention_mask": on_device(mask)}
            text = target.generate(**inputs, do_sample=False, assistant_model=assistant, **OPTIONS)
            assert torch.equal(text.host, plain)
            assert assistant.stats.accepted > 0
            target.generate(**inputs, do_sample=True, assistant_model=assistant, **OPTIONS)


@pytest.mark.daily("2-*")
@pytest.mark.takes(4)
@pytest.mark.parametrize(("rows", "speculation"), [(1, RULES[0]), (1, TREES[0]), (2, RULES[1])], ids=str)
def test_a_default_device(rows: int, speculation: dict[str, Any]) -> None:
    """`torch.set_default_device("cuda")`: the numbers that the host keeps are made on the host."""
    target, ids = tiny("llama"), torch.cat([prompt(seed=seed) for seed in range(rows)])
    plain = target.generate(ids, do_sample=False, **OPTIONS)
    with pretend_devices(), torch.no_grad():
        on_device(target)
        assistant = with_draft(head=rows == 1, **speculation)(target)
        for sampled in (True, False):
            given = on_device(ids)
            with torch.device("cuda:0"):
                text = target.generate(given, do_sample=sampled, assistant_model=assistant, **OPTIONS)
        assert torch.equal(text.host, plain)
        assert assistant.stats.accepted > 0


def counted_rounds(speculation: dict[str, Any], **sampling: Any) -> list[tuple[int, Counter[str]]]:
    """Of each round but the first, in a generation: how many candidates it had, and what it cost."""
    target = tiny("llama")
    rounds: list[tuple[int, Counter[str]]] = []
    take = AssistedDecoding.round
    launched: list[int] = []  # before each forward that runs

    def counted(decoding: AssistedDecoding) -> None:
        stats = decoding.texts[0].stats
        before, drafted = Counter(counts), stats.drafted
        take(decoding)
        rounds.append((stats.drafted - drafted, Counter(counts) - before))

    def begins(*_: Any) -> None:
        launched.append(counts["launch"])

    def ends(*_: Any) -> None:
        counts["launch within forwards"] += counts["launch"] - launched.pop()

    with pretend_devices() as counts, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(AssistedDecoding, "round", counted)
        on_device(target)
        assistant = with_draft(**speculation)(target)
        for model in (target, assistant.ready_drafter().model):
            for part in (model.get_decoder(), model.get_output_embeddings()):
                part.register_forward_pre_hook(unnoticed(begins))
                part.register_forward_hook(unnoticed(ends))
        torch.manual_seed(0)
        target.generate(on_device(prompt()), assistant_model=assistant, **OPTIONS, **sampling)
    assert len(rounds) > 2
    return rounds[1:]


SAMPLING: list[dict[str, Any]] = [
    {"do_sample": False}, {"do_sample": True, "top_k": 0}, {"do_sample": True, "top_k": 20, "repetition_penalty": 1.2},
]  # fmt: skip


@pytest.mark.daily(
    "{'rule': 'fixed', 'num_tokens': 4}-greedy", "{'rule': 'threshold', 'threshold': 0.6, 'max_tokens': 6}-penalty",
)  # fmt: skip
@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled", "penalty"])
@pytest.mark.parametrize("speculation", [*RULES, {**RULES[0], "verification": "token"}], ids=str)
def test_what_a_chain_costs(speculation: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Two reads where the rule looks at nothing, else one a candidate and one. The candidates are uploaded for the
    pass, for their verification, and for a processor that looks at the tokens; what was emitted is another upload."""
    for drafted, cost in counted_rounds(speculation, **sampling):
        assert cost["read"] <= (2 if speculation["rule"] == "fixed" else drafted + 1)
        assert cost["upload"] <= 2 + sampling["do_sample"] + ("repetition_penalty" in sampling)
        assert cost["sync"] == 0


@pytest.mark.daily("{'tree': 'dyspec', 'tree_budget': 12, 'tree_depth': 4}-greedy")
@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled", "penalty"])
@pytest.mark.parametrize("speculation", [TREES[0], TREES[3]], ids=str)
def test_what_a_tree_costs(speculation: dict[str, Any], sampling: dict[str, Any]) -> None:
    """A read a level and two. An upload a level, that of the root included: its draft pass needs none, the target's
    pass takes one with all that its verification needs, and what was emitted is another. For a processor that looks at
    the tokens all paths are uploaded together: of each level below the root, and of the tree."""
    levels = LEVELS if speculation["tree"] == "dyspec" else 3
    for _, cost in counted_rounds(speculation, **sampling):
        assert cost["read"] <= levels + 2
        assert cost["upload"] <= levels + 1 + ("repetition_penalty" in sampling) * levels
        assert cost["sync"] == 0


@pytest.mark.daily("tree of 12")
@pytest.mark.takes(3)
@pytest.mark.parametrize(
    ("speculation", "most"), [(RULES[0], (17, 60)), (TREES[0], (31, 160))], ids=["chain of 4", "tree of 12"]
)
def test_what_is_launched_beside_forwards(speculation: dict[str, Any], most: tuple[int, int]) -> None:
    """On average, since random numbers and columns that grow with the text are made for several rounds at once."""
    for sampling, bound in zip(SAMPLING, most, strict=False):
        rounds = counted_rounds(speculation, **sampling)
        launches = [cost["launch"] - cost["launch within forwards"] for _, cost in rounds]
        assert sum(launches) / len(launches) <= bound


@pytest.mark.parametrize("rows", [1, 2])
def test_attention_is_not_cudnns_in_uncaptured_rounds(rows: int) -> None:
    """It makes a plan for each length of the text. Prompts are read as in plain generation."""
    target, seen = quiet_later_layers(tiny("llama")), []

    def note(*_: Any) -> None:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())

    with pretend_devices(), torch.no_grad():
        on_device(target)
        assistant = configured(SpecDecPPAssistant.from_early_exit(target, 1), rule="fixed", num_tokens=3)
        target.register_forward_hook(unnoticed(note))
        ids = on_device(prompt().expand(rows, -1))
        for use in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(use)
            seen.clear()
            target.generate(ids, assistant_model=assistant, do_sample=False, **OPTIONS)
            assert seen[0] == use
            assert len(seen) > 3
            assert not any(seen[1:])
            assert torch.backends.cuda.cudnn_sdp_enabled() == use
    torch.backends.cuda.enable_cudnn_sdp(True)
