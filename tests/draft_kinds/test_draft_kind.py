"""What every kind of draft does: generations are the target's, whatever rule, tree, processor, cache or batch; what it
cannot do is refused with its own reason; stored and loaded again it drafts the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices.pretend_devices import on_device, pretend_devices
from support.files import dflash_files, dspark_files, gemma4_files, mtp_files
from support.files.eagle3_files import VARIANTS as EAGLE3
from support.files.repos import save_model
from support.targets.models import assistant_of, configured, of_pard, partly_agreeing, prompt, tiny
from support.targets.rounds_anew import Ear
from support.targets.snapshots import hash_of, hooks_of
from support.targets.watchers import Collector, tokenizer
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant, assist
from hf_specdecpp.config.speculation import Decisions, SpeculationConfig
from hf_specdecpp.draft_kinds.known import KINDS
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.inspection import inspect
from hf_specdecpp.models.causal_lm import CACHE, CausalLM

TEXT = 1 + prompt(9) % (dflash_files.VOCAB - 1)
PADDED = torch.cat((torch.zeros(1, 4, dtype=torch.long), TEXT[:, :5]), dim=1)
FIXED: dict[str, Any] = {"rule": "fixed", "num_tokens": 5}
COSTS = {"draft": 0.1, "branch": 0.02, "verify": [1.0]}
CHAINS: dict[str, dict[str, Any]] = {
    "fixed": FIXED,
    "threshold": {"rule": "threshold", "threshold": 0.9},
    "throughput": {"rule": "throughput", "costs": COSTS},
}
TREES: dict[str, dict[str, Any]] = {
    "dyspec": {"tree": "dyspec", "tree_budget": 8},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 6},
    "static": {"tree": [3, 1, 1]},
    "dyspec, throughput": {"tree": "dyspec", "rule": "throughput", "tree_budget": 8, "costs": COSTS},
}


class Twice(StoppingCriteria):
    """Ends where the last two tokens stood before, as a stop string would: it looks at the whole text."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        text = input_ids[0].tolist()
        pairs = list(zip(text, text[1:], strict=False))
        return torch.tensor([len(text) > TEXT.shape[1] + 6 and pairs[-1] in pairs[:-1]])


OPTIONS: dict[str, dict[str, Any]] = {
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    # No two tokens follow one another twice, so texts have many different tokens before the last one.
    "a token that ends": {"eos_token_id": [0], "pad_token_id": 0, "no_repeat_ngram_size": 2},
    "another criterion": {"stopping_criteria": StoppingCriteriaList([Twice()])},
    "a padded prompt": {"input_ids": PADDED, "attention_mask": (PADDED > 0).long()},
}


NAMES = [
    "independent", "early_exit", "conditioned", "eagle3", "lookup", "eagle3 of others", "dflash", "dspark",
    "gemma4", "mtp", "mtp, several layers", "pard",
]  # fmt: skip
Pair = tuple[SpecDecPPAssistant, CausalLM]


def pair(name: str, folder: Path) -> Pair:
    """An assistant of each kind, attached to its target."""
    if name.startswith("mtp"):
        target = mtp_files.dense(1 if name == "mtp" else 3).load(folder)
        return assist(target, "mtp", default=False), target
    if name == "dflash":
        target = dflash_files.target_for()
        return SpecDecPPAssistant.from_pretrained(dflash_files.VARIANTS["windows"].save(folder), target), target
    if name == "dspark":
        target = dspark_files.target_for()
        return SpecDecPPAssistant.from_pretrained(
            dspark_files.VARIANTS["speculators, rnn"].save(folder), target
        ), target
    if name.startswith("gemma4"):
        target = gemma4_files.target_for()
        gemma4_files.VARIANTS["plain" if name == "gemma4" else "clusters"].theirs().save_pretrained(folder)
        return SpecDecPPAssistant.from_draft(folder, target), target
    target = tiny("llama")
    if name == "eagle3 of others":
        return SpecDecPPAssistant.from_pretrained(EAGLE3["plain"].save(folder), target), target
    if name == "independent":
        return SpecDecPPAssistant.from_draft(save_model(partly_agreeing(target, 0.9), folder, None), target), target
    if name == "pard":
        return SpecDecPPAssistant.from_draft(save_model(of_pard(target), folder, None), target), target
    if name == "lookup":
        return assist(target, "lookup", default=False), target
    return assistant_of(name, target), target


NEVER_RIGHT = {"lookup", "eagle3 of others"}  # nothing is drawn; random weights among many tokens
ALL = pytest.mark.parametrize("name", NAMES)


def made(name: str, folder: Path, **settings: Any) -> Pair:
    """An assistant, and the target that it is attached to."""
    assistant, target = pair(name, folder / "draft")
    chosen: dict[str, Any] = {**(settings or FIXED), "lookup": assistant.speculation.lookup}
    configured(assistant, **chosen)
    return assistant, target


def check_text(assistant: SpecDecPPAssistant, target: CausalLM, **options: Any) -> None:
    """Greedy text is the target's, and some of it was drafted."""
    how: dict[str, Any] = {"input_ids": TEXT, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **options}
    if "eos_token_id" in how:  # one that stands late in the text
        text = target.generate(**{**how, "eos_token_id": None})[0, TEXT.shape[1] :].tolist()
        how["eos_token_id"] = max(text, key=text.index)
    expected = target.generate(**how)
    assert torch.equal(target.generate(assistant_model=assistant, **how), expected)
    draft, stats = assistant.ready_drafter(), assistant.stats
    assert len(stats.drafted_at) <= draft.places or assistant.speculation.lookup
    assert stats.drafted > 0 or not draft.places


def test_every_kind_is_here(tmp_path: Path) -> None:
    assert {pair(name, tmp_path / name)[0].kind.name for name in NAMES} == {kind.name for kind in KINDS}


@pytest.mark.daily(
    "fixed-independent", "threshold-early_exit", "throughput-conditioned", "dyspec-eagle3", "dyspec-exact-lookup",
    "static-eagle3 of others", "dyspec, throughput-dflash",
)  # fmt: skip
@ALL
@pytest.mark.parametrize("settings", [*CHAINS, *TREES])
def test_greedy_text_is_the_targets(settings: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each round drafts what a draft would that reads the whole text anew."""
    assistant, target = made(name, tmp_path, **{**CHAINS, **TREES}[settings])
    reason = assistant.ready_drafter().cannot.get("trees") if settings in TREES else None
    if reason is None:
        ear = Ear(assistant.ready_drafter(), monkeypatch)
        check_text(assistant, target)
        ear.check(target)
        assert assistant.stats.accepted > 0 or name in NEVER_RIGHT
    else:
        with pytest.raises(ValueError, match=reason[:40]):
            target.generate(TEXT, assistant_model=assistant, max_new_tokens=4)


def test_another_text_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assistant, target = made("eagle3", tmp_path)
    ear = Ear(assistant.ready_drafter(), monkeypatch)
    check_text(assistant, target)
    ear.rounds = [(text[:, 1:], logits) for text, logits in ear.rounds]
    with pytest.raises(AssertionError, match="not close"):
        ear.check(target)


@pytest.mark.daily(
    "processors-independent", "a token that ends-early_exit", "another criterion-conditioned",
    "a padded prompt-eagle3",
)  # fmt: skip
@ALL
@pytest.mark.parametrize("options", OPTIONS)
def test_with_every_option(options: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assistant, target = made(name, tmp_path)
    ear = Ear(assistant.ready_drafter(), monkeypatch)
    check_text(assistant, target, **OPTIONS[options])
    ear.check(target)
    check_text(assistant, target)


@pytest.mark.daily("independent", "dflash", "mtp, several layers")
@ALL
def test_sampled_text_has_its_length(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its distribution is enumerated in `tests/exactness`."""
    assistant, target = made(name, tmp_path)
    ear = Ear(assistant.ready_drafter(), monkeypatch)
    torch.manual_seed(0)
    text = target.generate(TEXT, assistant_model=assistant, max_new_tokens=40, do_sample=True, top_k=6)
    assert text.shape[1] == TEXT.shape[1] + 40
    assert 0 < assistant.stats.accepted < assistant.stats.drafted or name in NEVER_RIGHT
    ear.check(target)


@pytest.mark.daily("eagle3", "mtp, several layers")
@ALL
def test_a_cache_that_is_carried_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the turn before, a draft that reads the target's states has none, but that turn's keys and values."""
    assistant, target = made(name, tmp_path)
    ear = Ear(assistant.ready_drafter(), monkeypatch)
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    cache = {CACHE: DynamicCache(config=target.config)}
    first = target.generate(TEXT, assistant_model=assistant, **how, **cache).sequences
    assert torch.equal(first, target.generate(TEXT, **how).sequences)
    ear.rounds.clear()
    further = torch.cat((first, TEXT), dim=1)
    second = target.generate(further, assistant_model=assistant, **how, **cache).sequences
    assert torch.equal(second, target.generate(further, **how).sequences)
    ear.check(target, first=0 if name == "gemma4" else first.shape[1] - 1)


@pytest.mark.daily("independent", "eagle3", "dflash")
@ALL
def test_rows_of_a_batch(name: str, tmp_path: Path) -> None:
    assistant, target = made(name, tmp_path)
    ids = torch.cat((TEXT, PADDED))
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "attention_mask": ids > 0}
    if (reason := assistant.ready_drafter().cannot.get("batches")) is not None:
        with pytest.raises(ValueError, match=reason[:40]):
            target.generate(ids, assistant_model=assistant, **how)
    else:
        assert torch.equal(target.generate(ids, assistant_model=assistant, **how), target.generate(ids, **how))
        assert assistant.stats.accepted > 0 or name in NEVER_RIGHT


@pytest.mark.daily("eagle3", "dflash")
@ALL
def test_a_lookup_beside_it(name: str, tmp_path: Path) -> None:
    """Rounds in which nothing is drafted, and candidates that the draft has not read."""
    assistant, target = made(name, tmp_path)
    assistant.speculation = SpeculationConfig(rule="throughput", costs=COSTS, lookup=True)
    check_text(assistant, target, input_ids=TEXT.repeat(1, 3))


def placed(assistant: SpecDecPPAssistant, target: CausalLM) -> Pair:
    """Both on a pretended device: a draft of its own is placed by its own arguments, others follow their target."""
    assistant.detach()
    settings = assistant.speculation.to_dict()
    if assistant.kind.name == "independent":
        draft = on_device(assistant.ready_drafter().model.to(target.dtype))
        assistant = configured(SpecDecPPAssistant.from_draft(draft), **settings)
    assistant.attach(on_device(target))
    return assistant, target


@pytest.mark.daily(
    "False-fixed-gemma4", "False-threshold-lookup", "True-fixed-eagle3 of others", "True-tree-dflash", takes=3,
)  # fmt: skip
@ALL
@pytest.mark.parametrize(
    "settings", [FIXED, CHAINS["threshold"], TREES["dyspec"]], ids=["fixed", "threshold", "tree"]
)  # fmt: skip
@pytest.mark.parametrize("do_sample", [False, True])
def test_on_apples_device(do_sample: bool, settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    assistant, target = made(name, tmp_path, **settings)
    if settings in TREES.values() and "trees" in assistant.ready_drafter().cannot:
        settings = FIXED
        configured(assistant, **settings, lookup=assistant.speculation.lookup)
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": do_sample, "top_k": 6 if do_sample else None}
    expected = target.float().generate(TEXT, **how)
    with pretend_devices("mps"):
        assistant, moved = placed(assistant, target)
        text = moved.generate(on_device(TEXT), assistant_model=assistant, **how)
        assert text.shape == expected.shape
        assert do_sample or text.tolist() == expected.tolist()
    assert assistant.stats.drafted > 0 or not assistant.ready_drafter().places


@pytest.mark.daily("independent", "dflash", takes=2)
@ALL
def test_on_a_pretended_device(name: str, tmp_path: Path) -> None:
    assistant, target = made(name, tmp_path)
    expected = target.generate(TEXT, max_new_tokens=8, do_sample=False)
    with pretend_devices() as counts:
        assistant, moved = placed(assistant, target)
        text = moved.generate(on_device(TEXT), assistant_model=assistant, max_new_tokens=8, do_sample=False)
        assert text.tolist() == expected.tolist()
        draft = assistant.ready_drafter()
        assert not draft.places or draft.device.type == "cuda"
        if name in ("dflash", "gemma4"):
            session = draft.session(target.config.get_text_config().vocab_size)
            assert draft.reads is not None
            if draft.shares_cache:
                session.bind_cache(gemma4_files.read_by(moved, on_device(TEXT[:, :4])))
            states = on_device(torch.zeros(1, 3, draft.reads.width, dtype=torch.float64))
            session.read_verified(on_device(TEXT[:, :4]), 0, states)
            before = counts["read"]
            with torch.inference_mode():
                session.propose_next([])
            assert counts["read"] == before, "a step waits for nothing"


@pytest.fixture(
    params=[(name, tree) for name in NAMES for tree in (False, True)], ids=lambda each: f"{each[0]}-{each[1]}"
)
def drawing(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """A pair that draws chains, and one that draws trees where such a draft can."""
    name, has_tree = request.param
    assistant, target = made(name, tmp_path, **(TREES["dyspec"] if has_tree else FIXED))
    if has_tree and "trees" in assistant.ready_drafter().cannot:
        pytest.skip("it drafts no trees")
    return assistant, target


@pytest.mark.daily("independent-False", "conditioned-True", "eagle3 of others-False", "gemma4-True")
def test_a_grammar_that_depends_on_the_path(drawing: Pair) -> None:
    """Every other token is even; of these two are allowed, so a mask of another place would change the text."""

    def allowed(_: int, ids: Tensor) -> list[int]:
        return [1, 3] if int(ids[-1]) % 2 == 0 else [0, 2]

    allowed.reads_prefix_only = True  # type: ignore[attr-defined]  # so it guides the draft
    check_text(*drawing, prefix_allowed_tokens_fn=allowed)


@pytest.mark.daily("early_exit-True-6", "eagle3 of others-False-6", "independent-False-3", "gemma4-False-3")
@pytest.mark.parametrize("at", [3, 6])
def test_stop_strings(drawing: Pair, at: int) -> None:
    text = drawing[1].generate(TEXT, max_new_tokens=20, do_sample=False)[0, TEXT.shape[1] :].tolist()
    check_text(*drawing, stop_strings=[tokenizer().decode(text[at : at + 2])], tokenizer=tokenizer())


@pytest.mark.daily("independent-False", "eagle3-True", "gemma4-False")
def test_an_interrupt_leaves_nothing_behind(drawing: Pair) -> None:
    """In the middle of a text, which a streamer sees; then the same assistant says the whole text."""
    assistant, target = drawing
    check_text(assistant, target)  # transformers' own hooks stay in a target whose states were asked for
    hooks = hooks_of(target)

    class Interrupting(Collector):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.puts) == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        target.generate(TEXT, assistant_model=assistant, do_sample=False, streamer=Interrupting())
    assert hooks_of(target) == hooks
    check_text(assistant, target)


@pytest.mark.daily("eagle3", "mtp, several layers")
@ALL
def test_the_target_stays_as_it_is(name: str, tmp_path: Path) -> None:
    assistant, target = made(name, tmp_path)
    assistant.detach()

    def look() -> dict[str, Any]:
        found = {"class": type(target), "weights": hash_of(target), "config": target.config.to_dict()}
        return {**found, "logits": target(TEXT).logits.tolist(), "hooks": hooks_of(target)}

    target.generate(TEXT, max_new_tokens=4, do_sample=False, output_hidden_states=True, return_dict_in_generate=True)
    before = look()
    assistant.attach(target)
    target.generate(TEXT, assistant_model=assistant, max_new_tokens=8)
    assistant.detach()
    assert look() == before


@pytest.mark.daily("eagle3", "dflash")
@ALL
def test_a_target_that_was_moved(name: str, tmp_path: Path) -> None:
    """A draft that was put beside it would read and write in another dtype."""
    assistant, target = made(name, tmp_path)
    target.float()
    check_text(assistant, target)


RESIZED = {"fixed": FIXED, "successors": {**FIXED, "draft_successors": True}, "dyspec": TREES["dyspec"]}


@pytest.mark.daily("early_exit-5-dyspec", "eagle3-5-successors", "independent--3-fixed")
@pytest.mark.parametrize("settings", RESIZED)
@pytest.mark.parametrize("change", [-3, 5])
@pytest.mark.parametrize("name", [*NAMES[:4], "dflash", "gemma4", "gemma4 with clusters"])
def test_a_target_whose_embeddings_are_resized(name: str, change: int, settings: str, tmp_path: Path) -> None:
    assistant, target = made(name, tmp_path, **RESIZED[settings])
    target.resize_token_embeddings(target.config.get_text_config().vocab_size + change, mean_resizing=False)
    check_text(assistant, target, input_ids=1 + TEXT % 8)  # ids that all sizes have
    target.generate(1 + TEXT % 8, assistant_model=assistant, max_new_tokens=16, do_sample=True)


@pytest.mark.daily("before-independent", "before-gemma4", "after-conditioned")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "lookup"])
@pytest.mark.parametrize("inputs", ["before", "after"])
def test_a_head_on_top(inputs: str, name: str, tmp_path: Path) -> None:
    """Of every draft that has states."""
    assistant, target = made(name, tmp_path, rule="threshold", threshold=0.5)
    draft = assistant.ready_drafter()
    sizes = {"hidden_size": draft.hidden_size, "embedding_size": draft.embedding_size}
    assistant.head = AcceptanceHead(inputs=inputs, **sizes).to(target.dtype)
    check_text(assistant, target)


def drafted_by(assistant: SpecDecPPAssistant, target: CausalLM) -> tuple[list[int], list[int]]:
    """How many candidates a text had at each place of its rounds, and accepted ones, where all are drafted alike."""
    assistant.decisions = Decisions(draft_successors=False)
    check_text(assistant, target)
    return assistant.stats.drafted_at, assistant.stats.accepted_at


@pytest.mark.daily("independent", "mtp, several layers")
@ALL
def test_stored_and_loaded_again(name: str, tmp_path: Path) -> None:
    assistant, target = made(name, tmp_path / "first")
    expected = drafted_by(assistant, target)
    assistant.save_pretrained(tmp_path / "stored")
    own = [assistant.kind.own_file] if assistant.kind.has_own_file(assistant.config) else []
    files = {path.name for path in (tmp_path / "stored").iterdir()}
    assert files == {"README.md", "config.json", *own}, "what others trained stays where it is"
    assistant.detach()
    report = inspect(Repository(str(tmp_path / "stored")))
    assert report.sound
    assert not report.is_foreign
    again = SpecDecPPAssistant.from_pretrained(tmp_path / "stored", target)
    assert drafted_by(again, target) == expected
    if assistant.config.draft_id is None:
        with pytest.raises(ValueError, match="so draft= must be left out"):
            SpecDecPPAssistant.from_pretrained(tmp_path / "stored", draft="org/other")
        return
    with pytest.raises(ValueError, match="is a local folder, so nobody else could load"):
        assistant.push_to_hub("org/assistant")
    moved = Path(assistant.config.draft_id).rename(tmp_path / "moved")
    again.detach()
    again = SpecDecPPAssistant.from_pretrained(tmp_path / "stored", target, draft=moved)
    assert drafted_by(again, target) == expected
