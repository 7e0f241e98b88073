"""The check of published drafts: how often they guess what their target says, whatever their kind."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files import dflash_files, dspark_files, gemma4_files, mtp_files
from support.files.eagle3_files import VARIANTS, VOCAB, Checkpoint
from support.files.repos import change_json, letter_tokenizer
from support.targets.formulas import states_of
from support.targets.models import prompt, tiny
from support.targets.watchers import heard
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specdecpp import SpecDecPPAssistant, assist
from hf_specdecpp.cli import app
from hf_specdecpp.draft_kinds import acceptance
from hf_specdecpp.draft_kinds.acceptance import EVERY, FIRST, PLACES, TEXTS, agreement, describe, is_wrong, texts_for
from hf_specdecpp.draft_kinds.known import EAGLE3
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.files import save_tensors
from hf_specdecpp.training.distillation.unrolling import unrolled

RIGHT = [2, 1, 3]  # of five layers
WRONG: dict[str, dict[str, Any]] = {
    "ids one too low": {"reads": [1, 0, 2]},
    "ids one too high": {"reads": [3, 2, 4]},
    "residual": {"norm_before_residual": True},
    "feedback": {"norm_output": True},  # of which the first candidate of a round tells nothing
}
LETTERS = letter_tokenizer()


def saved(target: Any, folder: Path) -> Path:
    target.save_pretrained(folder)
    LETTERS.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and of a draft that learned what it says of the texts of the check."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny("llama", num_hidden_layers=5).float()
    saved(target, folder / "target")
    draft = Checkpoint(vocab=VOCAB).save(folder / "draft", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 1, 3]})
    drafter = SpecDecPPAssistant.from_pretrained(draft, target=target, eagle3={"reads": RIGHT}).ready_drafter()
    texts = [LETTERS(text, return_tensors="pt")["input_ids"] for text in TEXTS]
    with torch.no_grad():
        said = [(ids, states_of(target, drafter, ids), target(ids).logits[0].argmax(-1)) for ids in texts]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        optimizer = torch.optim.Adam(drafter.model.requires_grad_(True).parameters(), lr=1e-2)
        for _ in range(60):
            losses = [
                cross_entropy(drafter.logits(hidden[0], VOCAB)[step:], chosen[step:])
                for ids, states, chosen in said
                for step, hidden in enumerate(unrolled(drafter, ids, states, PLACES), 1)
            ]
            optimizer.zero_grad()
            sum(losses).backward()  # type: ignore[union-attr]
            optimizer.step()
    save_tensors(EAGLE3.own_tensors(drafter.model), draft / "model.safetensors")
    change_json(draft / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": RIGHT})
    return folder / "target", draft


def shares(pair: tuple[Path, Path], **said: Any) -> list[float]:
    """Of the draft, if its config said this."""
    target = AutoModelForCausalLM.from_pretrained(pair[0])
    assistant = SpecDecPPAssistant.from_pretrained(pair[1], target=target, eagle3={"reads": RIGHT, **said})
    return list(assistant.agreement)


@pytest.mark.daily("feedback", "ids one too low", takes=6)
@pytest.mark.parametrize("wrong", WRONG)
def test_the_right_reading_agrees_best(pair: tuple[Path, Path], wrong: str) -> None:
    right, other = shares(pair), shares(pair, **WRONG[wrong])
    assert len(right) == PLACES
    assert min(right) > 0.8
    assert sum(other) < sum(right) - 0.3
    assert (other[0] == right[0]) == (wrong == "feedback")


@pytest.mark.takes(3)
def test_ids_that_may_mean_either_are_settled_by_agreement(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each meaning is measured once, and not again when the draft is attached, or the target moves."""
    target, expected, measured = AutoModelForCausalLM.from_pretrained(pair[0]), shares(pair), list[list[int]]()
    heard(monkeypatch, acceptance, "agreement", lambda draft, *_: measured.append(draft.fusion.reads))
    for ids in (RIGHT, [read + 1 for read in RIGHT]):
        folder = Path(shutil.copytree(pair[1], tmp_path / "draft", dirs_exist_ok=True))
        change_json(folder / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
        measured.clear()
        assistant = SpecDecPPAssistant.from_pretrained(folder, target=target)
        assert assistant.ready_drafter().fusion.reads == RIGHT
        assert assistant.agreement == expected
        target.double()
        assistant.setup()
        assert len(measured) == 2
        assert assistant.ready_drafter().fusion.reads == RIGHT
        assistant.detach()
        target.float()


def begun(draft: Any, target: Any, text: torch.Tensor) -> Any:
    """A draft's side of a text that both have read anew."""
    if draft.shares_cache:
        return gemma4_files.begun(draft, target, text)
    session = draft.session(target.config.get_text_config().vocab_size)
    session.read_verified(text, 0, None if draft.reads is None else states_of(target, draft, text)[:, :-1])
    return session


def mtp(files: mtp_files.Files) -> Callable[[Path], tuple[Any, str]]:
    return lambda to: (files.load(to), "mtp")


def of_repository(save: Callable[[Path], Any], target_for: Callable[[], Any]) -> Callable[[Path], tuple[Any, Path]]:
    def made(to: Path) -> tuple[Any, Path]:
        save(to)
        return target_for(), to

    return made


# A target, and what `assist` is told to draft with.
DRAFTS: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "eagle3": of_repository(VARIANTS["plain"].save, lambda: tiny("llama")),
    "dflash": of_repository(dflash_files.VARIANTS["plain"].save, dflash_files.target_for),
    "dspark": of_repository(dspark_files.VARIANTS["speculators, rnn"].save, dspark_files.target_for),
    "gemma4": of_repository(
        lambda to: gemma4_files.VARIANTS["plain"].theirs(sliding_window=64).save_pretrained(to),
        lambda: gemma4_files.target_for(sliding_window=64),
    ),
    "mtp": mtp(mtp_files.dense()),
    "mtp, two layers": mtp(mtp_files.dense(2)),
    "mtp of a recurrent target": mtp(mtp_files.Files("qwen3_5_text")),
}


@pytest.mark.takes(3)
@pytest.mark.parametrize("kind", DRAFTS)
@torch.no_grad()
def test_rounds_are_those_of_texts_read_anew(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, source = DRAFTS[kind](tmp_path)
    draft = assist(target, source, default=False).ready_drafter()
    vocab, most = target.config.get_text_config().vocab_size, int(min(PLACES, draft.places))
    texts = [prompt(FIRST + 2 * EVERY + most + seed).mul(seed + 1) % vocab for seed in range(2)]

    def guessed(text: torch.Tensor, length: int) -> list[int]:
        session = begun(draft, target, text[:, :length])
        return [int(session.propose_next(list(text[0, length : length + place]))[0].argmax()) for place in range(most)]

    rounds = [(text, length) for text in texts for length in range(text.shape[1] - most, FIRST - 1, -EVERY)]
    expected = [guessed(text, length) for text, length in rounds]
    shorter = [guessed(text, length - 1) for text, length in rounds]  # a mutant: rounds begin one token too early
    chosen = [target(text).logits[0, length - 1 :].argmax(-1).tolist() for text, length in rounds]
    heard = hear_guesses(draft, monkeypatch)
    shares = agreement(draft, target, texts)
    assert [heard[at : at + most] for at in range(0, len(heard), most)] == expected != shorter
    hits = [
        [guess == choice for guess, choice in zip(*each, strict=False)] for each in zip(expected, chosen, strict=True)
    ]
    assert shares == [sum(column) / len(rounds) for column in zip(*hits, strict=True)]


def hear_guesses(draft: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a draft guesses from now on."""
    heard: list[int] = []
    begin = draft.session

    def listened(width: int) -> Any:
        reading = begin(width)
        step = reading.propose_next

        def noted(path: list[torch.Tensor]) -> Any:
            found = step(path)
            heard.append(int(found[0].argmax()))
            return found

        monkeypatch.setattr(reading, "propose_next", noted)
        return reading

    monkeypatch.setattr(draft, "session", listened)
    return heard


def test_texts_that_the_target_cannot_read_are_left_out() -> None:
    target = tiny("llama")
    assert [text.shape[0] for text in texts_for(target, LETTERS)] == [1] * len(TEXTS)
    assert texts_for(target, None) == texts_for(target, lambda _: {"input_ids": []}) == []
    assert texts_for(target, lambda _: {"input_ids": [VOCAB] * 50}) == []
    short = tiny("gpt2", n_positions=16)
    assert [text.shape[1] for text in texts_for(short, lambda _: {"input_ids": [1] * 50})] == [16] * len(TEXTS)
    assert agreement(Drafter(target), target, []) == []
    assert not is_wrong([])
    assert "is not known" in describe([])


# What is told of it: when a draft is attached, in statistics, and by specdecpp inspect REPO --target ID. --------------


def inspect(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


@pytest.mark.takes(3)
def test_a_draft_for_this_target(pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair[0])
    with caplog.at_level("INFO", "hf_specdecpp"):
        assistant = SpecDecPPAssistant.from_pretrained(pair[1], target=target)
    told = r"Of its first, second, third candidates (\d\d|100)%, (\d\d|100)%, (\d\d|100)% are what the target says\."
    said = [each for each in caplog.records if re.search(told, each.message)]
    assert [each.levelname for each in said] == ["INFO"]
    target.generate(prompt() % VOCAB, assistant_model=assistant, max_new_tokens=8, do_sample=False)
    assert assistant.stats.agreement == shares(pair)
    code, output = inspect(pair[1], "--target", pair[0])
    assert code == 0, output
    assert re.search(told, output)
    assert "another target" not in output


@pytest.mark.takes(3)
def test_a_draft_of_another_target(pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = saved(tiny("llama", num_hidden_layers=5, seed=7), tmp_path)
    with caplog.at_level("WARNING", "hf_specdecpp"):
        SpecDecPPAssistant.from_pretrained(pair[1], target=AutoModelForCausalLM.from_pretrained(other))
    assert re.search(r"candidates \d%, .* It is probably for another target, or read in a wrong way", caplog.text)
    assert "It is probably for another target" in inspect(pair[1], "--target", other)[1]
    code, output = inspect(pair[1], "--target", saved(tiny("llama", hidden_size=16, head_dim=8), tmp_path))
    assert code == 1
    assert "reads states of 32 numbers, and they have 16 in LlamaForCausalLM" in output
    own = SpecDecPPAssistant.from_early_exit(AutoModelForCausalLM.from_pretrained(pair[0]), 1)
    own.save_pretrained(tmp_path / "own")
    code, output = inspect(tmp_path / "own", "--target", pair[0])
    assert code == 1
    assert "this assistant drafts with layer 0 of the target. Leave --target out" in output
