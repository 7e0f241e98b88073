"""Rounds that are captured whole, of every kind of draft, in chains, trees and batches; on pretended graphs.

A graph is replayed with the contents of later rounds, so one that is wrong for other contents changes texts or what is
drafted."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices.capturing import CHAIN, Drawn, generate
from support.devices.whole_rounds import KINDS, SAMPLED, TREE, batch, made, together
from support.targets.models import assistant_of, prompt, quiet_later_layers, tiny
from support.targets.outputs import PROCESSORS
from support.targets.watchers import heard
from torch import Tensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.cuda_graphs import captured_rounds, captured_target, fixed_cache, on_device
from hf_specdecpp.cuda_graphs.captured_draft import CapturedDraft, RoundShape
from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache
from hf_specdecpp.cuda_graphs.graphs import CannotCaptureError, Graphs
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.generation import output_text as generation_text
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.captured.parts import GraphDrafts
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.throughput import round_shapes

pytestmark = [pytest.mark.usefixtures("pretended"), pytest.mark.takes(6)]


def outcomes(target: CausalLM, assistant: SpecDecPPAssistant, **how: Any) -> tuple[Tensor, list[Any]]:
    """A text, and how many candidates each of its rounds had and accepted."""
    with pytest.MonkeyPatch.context() as patch:
        noted = Drawn(patch)
        return generate(target, assistant, **how), noted.outcomes


@pytest.mark.daily("chain")
@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_default_dtype_changes_no_sampled_text(settings: dict[str, Any], tmp_path: Path) -> None:
    """Temperatures, q and what is drawn are float32, whatever `torch.set_default_dtype` says."""
    texts = []
    for kind in (torch.float32, torch.bfloat16):
        target, assistant = made("independent", tmp_path, **settings)
        torch.set_default_dtype(kind)
        try:
            texts.append(generate(target, assistant, **SAMPLED))
        finally:
            torch.set_default_dtype(torch.float32)
        assert assistant.stats.decided["rounds"] == "captured"
    assert torch.equal(*texts)


@pytest.mark.daily("dspark speculators, rnn")
@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_drafted_as_uncaptured(kind: str, tmp_path: Path, pretended: Counter[str]) -> None:
    """And each round is one replay, after the first text without a capture."""
    target, assistant = made(kind, tmp_path, **CHAIN)
    assistant.decisions = type(assistant.decisions)(draft_successors=False)
    for length in (4, 236):  # the second outgrows its room
        text, rounds = outcomes(target, assistant, length=length)
        assert assistant.stats.decided["rounds"] == "captured"
        assert torch.equal(text, generate(target, None, length))
        before = pretended.copy()
        generate(target, assistant, length)
        assert pretended["captured"] == before["captured"]
        assert pretended["replayed"] - before["replayed"] == assistant.stats.rounds
        assistant.speculation.graphs = "off"
        _, expected = outcomes(target, assistant, length=length)
        assistant.speculation.graphs = "auto"
        full = [each for each in expected if each[0] == CHAIN["num_tokens"]]
        assert rounds[: len(full) - 1] == full[:-1]
        assert len(full) > 2


@pytest.mark.daily("dflash windows alone", "pard")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind == "pard" or "dflash" in kind])
def test_a_block_longer_than_its_chain_has_room(kind: str, tmp_path: Path) -> None:
    """Near the end of a room of 256, where the chain would still fit."""
    target, assistant = made(kind, tmp_path, rule="fixed", num_tokens=2)
    ids = 1 + prompt(245) % (target.config.vocab_size - 1)
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    text = target.generate(ids, assistant_model=assistant, **how)
    assert assistant.stats.decided["rounds"] == "captured"
    assert torch.equal(text, target.generate(ids, **how))


@pytest.mark.daily("conditioned")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in ("eagle3", "conditioned") or kind[0] == "d"])
def test_texts_after_one_in_which_drafting_did_not_pay(kind: str, tmp_path: Path) -> None:
    """They are not left to the target without its states, which rounds go on to read."""
    target, assistant = made(kind, tmp_path, rule="throughput", max_tokens=5)
    for turn in range(4):
        assert torch.equal(generate(target, assistant, 236 + turn), generate(target, None, 236 + turn))
        assert assistant.stats.decided["rounds"] == "captured"


@pytest.mark.daily("independent-greedy", "dspark deepspec, rnn-sampled")
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_replays_with_other_contents(kind: str, sampled: bool, tmp_path: Path) -> None:
    """What is captured, replayed twice with other contents, is the function run anew."""
    target, assistant = made(
        kind, tmp_path, **(TREE if kind in ("conditioned", "dflash windows", "dspark deepspec, rnn") else CHAIN)
    )
    generate(target, assistant, **(SAMPLED if sampled else {}))
    ((rounds, _),) = captured_target._known[target][1].rounds.values()
    draft = rounds.draft
    lengths = [rounds.passes.context.cache.length, draft.context.cache.length]
    results = [rounds.report, rounds.token, draft.tokens, draft.last, draft.candidates, draft.parents, draft.ancestors]
    results += [draft.count, draft.estimates, *lengths, *(each for each in (draft.states, draft.q) if each is not None)]
    made_of = [made for key, made in rounds.graphs._graphs.items() if key[0] == "round"]
    assert len(made_of) == 1
    for seed in range(2):
        for graph, function in made_of:
            torch.manual_seed(seed)
            for ids in (rounds.token, draft.tokens, draft.candidates):
                ids.random_(target.config.vocab_size)
            for length in lengths:
                length.fill_(11 + 3 * seed)
            draft.last.fill_(draft.steps.again + seed)
            if draft.states is not None:
                draft.states.normal_()
            before, found = [each.clone() for each in results], []
            for run in (graph.replay, function):
                for each, old in zip(results, before, strict=True):
                    each.copy_(old)
                torch.manual_seed(7)
                run()
                found.append([each.clone() for each in results])
            for replayed, anew in zip(*found, strict=True):
                torch.testing.assert_close(replayed, anew)
            assert any(not torch.equal(each, old) for each, old in zip(found[0], before, strict=True))


def judging(drafter: Any) -> AcceptanceHead:
    """A head with random weights that matter to its verdict, which has nothing to do with q."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        sizes = {"hidden_size": drafter.hidden_size, "embedding_size": drafter.embedding_size}
        head = AcceptanceHead(num_blocks=1, inputs="before", rank=4, **sizes)
        head.output.weight.normal_(std=3.0)
        head.from_embedding.weight.normal_()
    return head


def noted_trees(patch: pytest.MonkeyPatch) -> list[Any]:
    """Tokens and parents of the trees of rounds from now on."""
    found: list[Any] = []
    told = captured_rounds.CapturedRounds._report_of

    def note(*arguments: Any) -> Any:
        report = told(*arguments)
        found.append((report.tree.tokens, report.tree.parents))
        return report

    patch.setattr(captured_rounds.CapturedRounds, "_report_of", note)
    return found


@pytest.mark.daily("dflash windows alone")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mtp 3"])
def test_a_head_values_the_slots_of_trees(kind: str, tmp_path: Path, pretended: Counter[str]) -> None:
    target, assistant = made(kind, tmp_path, **TREE)
    plain, grown = generate(target, None), []
    for head in (None, judging(assistant.ready_drafter())):
        assistant.head = head
        before = pretended.copy()
        with pytest.MonkeyPatch.context() as patch:
            trees = noted_trees(patch)
            assert torch.equal(generate(target, assistant), plain)
        assert assistant.stats.decided["rounds"] == "captured"
        assert pretended["captured"] - before["captured"] == 1 + (head is None)  # a pass is compared first
        grown.append(trees[0])
        assert generate(target, assistant, **SAMPLED).shape == plain.shape
    assert grown[0] != grown[1]


def first_trees(target: CausalLM, assistant: SpecDecPPAssistant) -> list[Any]:
    """What the first round of a text drafts before anything is learned, once rounds have taught that estimates mean the
    opposite, and where nothing may be learned."""
    found = []
    assistant.memory.clear()
    for turn, adapt in enumerate((True, True, False)):
        assistant.decisions = type(assistant.decisions)(adapt=adapt, draft_successors=False)
        with pytest.MonkeyPatch.context() as patch:
            trees = noted_trees(patch)
            assert torch.equal(generate(target, assistant), generate(target, None))
        assert assistant.stats.decided["rounds"] == "captured"
        found.append(trees[0])
        (learned,) = assistant.memory.learned[target].values()
        if turn == 0:
            assert learned.rates.rounds == len(trees)
            assert learned.rates.accepted.sum() == assistant.stats.accepted
        for _ in range(300):
            learned.rates.observe_tree([([0.05], 0), ([0.3], 0), ([0.7], None), ([0.93], None), ([0.995], None)])
    return found


@pytest.mark.daily("tree")
@pytest.mark.parametrize("settings", [TREE, {"rule": "threshold", "max_tokens": 5}], ids=["tree", "chain"])
def test_calibration_is_contents_of_a_graph(
    settings: dict[str, Any], tmp_path: Path, pretended: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, assistant = made("independent", tmp_path, **settings)
    before, calibrated, adapted_no_more = first_trees(target, assistant)
    assert calibrated != before == adapted_no_more
    graphs = pretended["captured"]
    monkeypatch.setattr(CapturedDraft, "calibrate", lambda *_: None)  # a mutant
    found = first_trees(target, assistant)
    assert found[0] == found[1] == found[2]
    assert pretended["captured"] == graphs


MOST_TOKENS = {"rule": "throughput"}


@pytest.mark.daily("settings2-auto-block-ran2", "settings6-off-block-ran6", "settings8-auto-block-ran8")
@pytest.mark.parametrize(("settings", "graphs", "asked", "ran"), [
    (CHAIN, "auto", "block", {"chain block"}),
    (CHAIN, "auto", "token", {"chain token"}),
    (MOST_TOKENS, "auto", "block", {"chain block", "tree block"}),
    (MOST_TOKENS, "auto", "token", {"chain token", "tree token"}),
    (TREE, "auto", "block", {"tree block"}),
    (TREE, "auto", "token", {"tree token"}),
    (TREE, "off", "block", {"tree block"}),
    (TREE, "off", "token", {"tree token"}),
    ({**TREE, **MOST_TOKENS}, "auto", "block", {"tree block"}),
])  # fmt: skip
def test_the_verification_that_runs_is_told(
    settings: dict[str, Any], graphs: str, asked: Any, ran: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    target, assistant = made("independent", tmp_path, graphs=graphs, **settings)
    assistant.decisions = type(assistant.decisions)(verification=asked)
    found: set[str] = set()
    heard(monkeypatch, on_device, "tree_tests", lambda *how: found.add(f"tree {how[-1]}"))
    heard(
        monkeypatch,
        captured_rounds,
        "outcomes",
        lambda drawn, *how: found.update([f"chain {how[-1]}"] * bool(drawn.numel())),
    )
    heard(
        monkeypatch, generation_text, "test_children", lambda tree, *_: found.update(["tree token"] * bool(len(tree)))
    )
    heard(
        monkeypatch,
        generation_text,
        "verify_tree",
        lambda tree, *how: found.update([f"tree {how[-1]}"] * bool(len(tree))),
    )
    monkeypatch.setattr(round_shapes, "PROBES", (2, 4))  # a tree is tried now and then
    generate(target, assistant, **{**SAMPLED, "max_new_tokens": 30})
    assert found == ran
    assert assistant.stats.decided["verification"] == asked
    assert generate(target, assistant).shape == (1, 36)
    assert assistant.stats.decided["verification"] == "equality"


REASONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another budget": ({**TREE, "tree_budget": 12}, {}, "trees that are grown on the device have 15 or 30 candidates"),
    "a static tree": ({"tree": [3, 2, 1]}, {}, "only trees of Algorithm 2"),
    "scores": (CHAIN, {"return_dict_in_generate": True, "output_scores": True}, "scores or logits are requested"),
    "a processor": (
        CHAIN,
        PROCESSORS["logits_processor"],
        "a logits processor has to be called token by token, in order",
    ),
    "costs": ({"rule": "throughput", "costs": {"draft": 0.1, "verify": [1.0]}}, {}, "given or assumed costs"),
}


@pytest.mark.parametrize("name", REASONS)
def test_why_rounds_are_made_step_by_step(name: str, tmp_path: Path) -> None:
    settings, how, reason = REASONS[name]
    target, assistant = made("early_exit", tmp_path, **settings)
    generate(target, assistant, **how)
    assert reason in assistant.stats.decided["rounds"]
    assert assistant.stats.uncaptured is None


@pytest.mark.daily("independent")
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch(kind: str, tmp_path: Path, pretended: Counter[str]) -> None:
    """Rows of other lengths, each drafted for as by itself."""
    if kind == "gemma 4":
        return  # which drafts for no batches
    target, assistant = made(kind, tmp_path, **CHAIN)
    ids, mask = batch(3, vocab=target.config.vocab_size)
    expected = together(target, None, ids, mask)
    for turn in range(2):
        before = pretended.copy()
        assert torch.equal(together(target, assistant, ids, mask), expected)
        assert assistant.stats.uncaptured is None
        assert assistant.stats.decided["rounds"] == "captured"
        assert (pretended["captured"] > before["captured"]) == (turn == 0)
    assert pretended["replayed"] - before["replayed"] == max(row.rounds for row in assistant.stats.rows)
    together_accepted = [row.accepted for row in assistant.stats.rows]
    assert sum(together_accepted) > 0
    for row, own in enumerate(mask):
        generated = target.generate(
            ids[row : row + 1, own > 0], assistant_model=assistant, do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        assert generated.shape[1] == int(own.sum()) + 20
        assert assistant.stats.accepted == together_accepted[row]


@pytest.mark.daily("gpt2-independent")
@pytest.mark.parametrize("kind", ["independent", "early_exit", "conditioned"])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_padded_batch_with_a_table_of_positions(family: str, kind: str) -> None:
    """Which has no place for padding; and the rows grow to the end of the table."""
    longest = 64
    positions: dict[str, Any] = {"n_positions" if family == "gpt2" else "max_position_embeddings": longest}
    target = quiet_later_layers(tiny(family, **positions))
    assistant = assistant_of(kind, target, **CHAIN)
    ids, mask = batch(3)
    how: dict[str, Any] = {"max_new_tokens": longest - ids.shape[1]}
    assert torch.equal(together(target, assistant, ids, mask, **how), together(target, None, ids, mask, **how))
    assert assistant.stats.decided["rounds"] == "captured"
    assert all(row.accepted > 0 for row in assistant.stats.rows)


def test_positions_of_padding_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made_of = fixed_cache.inputs_in_place

    def counted_back(model: Any, cache: Any, nodes: Any, num_prefix: Any) -> Any:
        found = made_of(model, cache, nodes, num_prefix)
        return found | {"position_ids": num_prefix[:, None] + nodes.places + cache.prompt.offset}

    monkeypatch.setattr(fixed_cache, "inputs_in_place", counted_back)
    target = quiet_later_layers(tiny("gpt2"))
    with pytest.raises(IndexError):
        together(target, assistant_of("independent", target, **CHAIN), *batch(2))


@pytest.mark.daily("throughput")
@pytest.mark.parametrize("settings", [CHAIN, {"rule": "threshold", "threshold": 0.9}, {"rule": "throughput"}],
                         ids=lambda each: each["rule"])  # fmt: skip
def test_rows_that_end_leave(settings: dict[str, Any], tmp_path: Path) -> None:
    """Of eight rows some end early; the others go on in the same graphs, into a larger room; the cache is as ever."""
    target, assistant = made("independent", tmp_path, **settings)
    ids, mask = batch(8, shortest=230)
    ends = together(target, None, ids, mask)[[0, 3, 5], ids.shape[1] + torch.tensor([2, 9, 15])].tolist()
    how: dict[str, Any] = {"eos_token_id": ends, "max_new_tokens": 40, "return_dict_in_generate": True}
    plain, ours = (together(target, each, ids, mask, **how) for each in (None, assistant))
    assert torch.equal(ours.sequences, plain.sequences)
    assert assistant.stats.decided["rounds"] == "captured"
    assert len({row.generated for row in assistant.stats.rows}) > 2
    for one, other in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        columns = one.keys.shape[2]
        shown = torch.nn.functional.pad(mask, (0, columns - mask.shape[1]), value=1).bool()  # nobody sees the others
        for name in ("keys", "values"):
            found, expected = (getattr(each, name).transpose(1, 2)[shown] for each in (one, other))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_more_rows_than_graphs_are_made_for(tmp_path: Path) -> None:
    target, assistant = made("independent", tmp_path, **CHAIN)
    ids, mask = batch(33)
    assert torch.equal(together(target, assistant, ids, mask), together(target, None, ids, mask))
    assert assistant.stats.uncaptured == "more than 32 sequences"


def moves_nothing(cache: FixedCache, rows: Tensor) -> None:
    """A mutant: the rows of a path stay where the pass wrote them."""


def keeps_states_of_candidates(take: Callable[..., None]) -> Callable[..., None]:
    def wrong(draft: CapturedDraft, accepted: Tensor, token: Tensor, drafted: Tensor, states: Any, **how: Any) -> None:
        take(draft, accepted, token, drafted, None if states is None else states.flip(1), **how)

    return wrong


def test_rows_that_are_not_moved_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache that is returned, and in what its wrong rows lead to."""
    target, assistant = made("independent", tmp_path, **TREE)
    how: dict[str, Any] = {"return_dict_in_generate": True}
    plain = generate(target, None, **how)
    for mutant in (None, moves_nothing):
        with monkeypatch.context() as patch:
            if mutant is not None:
                patch.setattr(FixedCache, "move", mutant)
            target, assistant = made("independent", tmp_path, **TREE)
            ours = generate(target, assistant, **how)
        pairs = zip(*([each.keys for each in of.past_key_values.layers] for of in (ours, plain)), strict=True)
        same = [one.shape == other.shape and torch.allclose(one, other, atol=1e-9) for one, other in pairs]
        assert all(same) == (mutant is None)


def test_other_states_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, assistant = made("conditioned", tmp_path, **CHAIN)
    _, expected = outcomes(target, assistant)
    monkeypatch.setattr(CapturedDraft, "settle", keeps_states_of_candidates(CapturedDraft.settle))
    target, assistant = made("conditioned", tmp_path, **CHAIN)
    text, rounds = outcomes(target, assistant)
    assert rounds != expected
    assert torch.equal(text, generate(target, None))


def test_rows_that_go_on_after_their_end_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lengths grow, until they write past their room."""
    monkeypatch.setattr(CapturedDraft, "continue_with", lambda *_: None)
    target, assistant = made("independent", tmp_path, **CHAIN)
    ids, mask = batch(2)
    end = int(together(target, None, ids, mask)[0, ids.shape[1] + 3])
    kept: list[Tensor] = []
    told_ = captured_rounds.CapturedRounds.read_reports

    def run(rounds: Any, *arguments: Any) -> Any:
        found = told_(rounds, *arguments)
        kept.append(rounds.passes.context.cache.length.clone())
        return found

    monkeypatch.setattr(captured_rounds.CapturedRounds, "read_reports", run)
    together(target, assistant, ids, mask, eos_token_id=end, max_new_tokens=30)
    assert int(kept[-1][0]) > ids.shape[1] + 4


def test_a_round_that_cannot_be_captured_in_mid_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text goes on without graphs, and without the draft, to which later states are not known."""
    target, assistant = made("conditioned", tmp_path, **CHAIN)
    plain, capture, tried = generate(target, None, 240), Graphs._capture, list[Any]()

    def fails(graphs: Any, function: Any, changes: Any) -> Any:
        tried.append(function)
        if len(tried) == 3:  # after a pass and a round, the round in a larger cache
            raise CannotCaptureError("OutOfMemoryError: no memory")
        return capture(graphs, function, changes)

    monkeypatch.setattr(Graphs, "_capture", fails)
    assert torch.equal(generate(target, assistant, 240), plain)
    assert assistant.stats.uncaptured == "a round cannot be captured (OutOfMemoryError: no memory)"
    assert assistant.stats.accepted > 0
    assert assistant.stats.idle_rounds > 10
    assert len(tried) == 3


def test_a_first_round_that_cannot_be_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are made step by step then."""
    for rows in (1, 2):
        target, assistant = made("conditioned", tmp_path, **CHAIN)
        ids, mask = batch(rows)
        with monkeypatch.context() as patch:
            patch.setattr(Processing, "of_nodes", lambda _, scores, _texts: scores * float(scores.sum() < 1e9))
            text = together(target, assistant, ids, mask)
        assert torch.equal(text, together(target, None, ids, mask))
        assert "a round cannot be captured (" in str(assistant.stats.uncaptured)
        assert "waits for the device" in str(assistant.stats.uncaptured)
        assert assistant.stats.accepted > 0


@pytest.mark.daily("RoundShape(levels=0, width=1, given=0)", "RoundShape(levels=5, width=3, given=0)")
@pytest.mark.parametrize("cheap", [RoundShape(0), RoundShape(3), RoundShape(5, 3)], ids=str)
def test_throughput_takes_what_is_cheap(cheap: RoundShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a tree, once one was tried."""

    monkeypatch.setattr(round_shapes.RoundSeconds, "of", lambda _, shape: 1.0 if shape == cheap else 50.0)
    monkeypatch.setattr(round_shapes, "PROBES", (3, 12))
    monkeypatch.setattr(round_shapes, "PROBED", (2, 2))
    target, assistant = made("independent", tmp_path, rule="throughput")
    shapes: list[RoundShape] = []

    heard(monkeypatch, captured_rounds.CapturedRounds, "launch", lambda _, shape, *rest: shapes.append(shape))
    assert torch.equal(generate(target, assistant, max_new_tokens=60), generate(target, None, max_new_tokens=60))
    assert shapes[-12:].count(cheap) > 6
    assert len(set(shapes)) > 1, "others are tried now and then"


def first_candidates(target: CausalLM, assistant: SpecDecPPAssistant) -> dict[int, int]:
    """The first candidate of the rounds of a text, by the tokens before the round."""
    found: dict[int, int] = {}

    def note(_: Any, tree: Any, _path: Any, length: int) -> None:
        if len(tree):
            found[length] = tree.tokens[1]

    with pytest.MonkeyPatch.context() as patch:
        heard(patch, SpecDecPPCandidateGenerator, "record_outcome", note)
        assert torch.equal(generate(target, assistant, max_new_tokens=60), generate(target, None, max_new_tokens=60))
    return found


@pytest.mark.daily("eagle3")
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_the_draft_has_not_read_come_in_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rounds without candidates pay, one with candidates reads the window when it is full. Without that the
    window would be written to behind its end."""
    monkeypatch.setattr(round_shapes.RoundSeconds, "of", lambda _, shape: 50.0 * shape.levels + 1)
    monkeypatch.setattr(round_shapes, "PROBES", (1000, 1000))
    target, assistant = made(kind, tmp_path, rule="throughput", max_tokens=5)
    drafted = first_candidates(target, assistant)
    assert len(drafted) > 2
    assert all(round_shapes.SPARE <= later - before <= 2 * round_shapes.SPARE for before, later in pairwise(drafted))
    assistant.speculation.rule, assistant.speculation.graphs = "fixed", "off"
    assistant.decisions, uncaptured = type(assistant.decisions)(draft_successors=False), dict[int, int]()
    for assistant.speculation.num_tokens in (1, 2):
        uncaptured |= first_candidates(target, assistant)
    assert drafted.keys() & uncaptured.keys()
    assert all(drafted[length] == uncaptured[length] for length in drafted.keys() & uncaptured.keys())
    assistant.speculation.rule, assistant.speculation.graphs = "throughput", "auto"
    monkeypatch.setattr(GraphDrafts, "_shape", lambda *_: RoundShape(0))  # a mutant
    with pytest.raises(RuntimeError, match="out of bounds"):
        generate(target, assistant, max_new_tokens=60)
