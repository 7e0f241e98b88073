"""lm-eval with an assistant among `gen_kwargs`, and with a default one: the answers are those of plain generation.

It is no dependency: `make test-integrations` installs it beside this package."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.enumeration.mutants import accept_everything
from support.files.repos import WORDS, ending_tokenizer, save_model
from support.targets.models import assistant_for, tiny
from support.targets.watchers import runs_of
from transformers import AutoModelForCausalLM

pytest.importorskip("lm_eval", reason="make test-integrations installs it")

from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

pytestmark = pytest.mark.takes(60)

STOP = WORDS[5]
QUESTIONS = [" ".join(WORDS[1 + (i * 7 + j * j) % 40] for j in range(3 + i)) for i in range(5)]


@pytest.fixture
def target(tmp_path: Path) -> Any:
    words, model = [*WORDS[:-1], "</s>"], tiny("llama", eos_token_id=47, pad_token_id=47).float()
    return AutoModelForCausalLM.from_pretrained(save_model(model, tmp_path / "target", words))


def evaluate(target: Any, folder: Path, batch_size: int = 1, **gen_kwargs: Any) -> tuple[list[str], Any]:
    """All answers, and the results, of a task of five questions."""
    data = folder / "questions.jsonl"
    data.write_text("\n".join(json.dumps({"question": each, "answer": "w1"}) for each in QUESTIONS))
    words = ending_tokenizer()
    task = ConfigurableTask(
        config={
            "task": "questions",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "data")},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": [STOP], "do_sample": False, "max_gen_toks": 20},
            "metric_list": [{"metric": "bleu"}],
        }
    )
    lm = HFLM(pretrained=target, tokenizer=words, batch_size=batch_size, device="cpu")
    none = TaskManager(include_defaults=False)  # of its thousands, which take a quarter of a minute to list
    found = simple_evaluate(lm, tasks=[task], gen_kwargs=gen_kwargs or None, bootstrap_iters=0, task_manager=none)
    samples = sorted(found["samples"]["questions"], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0][0] for sample in samples], found["results"]["questions"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    return runs_of(monkeypatch)


def test_among_the_arguments(target: Any, tmp_path: Path, ran: list[Any]) -> None:
    """They are copied for every question, and the copy must be attached."""
    plain = evaluate(target, tmp_path)
    assert len(set(plain[0])) == len(QUESTIONS)
    assert evaluate(target, tmp_path, assistant_model=assistant_for(target)) == plain
    assert len(ran) == len(QUESTIONS)
    assert sum(stats.accepted for _, stats in ran) > 0


def test_a_default_assistant(target: Any, tmp_path: Path, ran: list[Any]) -> None:
    plain = evaluate(target, tmp_path)
    assistant_for(target).attach(target, default=True)
    assert (evaluate(target, tmp_path), len(ran)) == (plain, len(QUESTIONS))


def test_batches_are_plain(target: Any, tmp_path: Path, ran: list[Any]) -> None:
    """lm-eval's criterion notes which rows have ended, so that no row can be asked about by itself."""
    plain, assistant = evaluate(target, tmp_path, batch_size=3), assistant_for(target)
    assistant.attach(target, default=True)
    assert evaluate(target, tmp_path, batch_size=3) == plain
    assert "MultiTokenEOSCriteria may keep state" in str(assistant.stats.refusal)
    assert ran == []


def test_a_wrong_verification_would_be_seen(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant accepts everything, so answers have to change."""
    plain = evaluate(target, tmp_path)
    accept_everything(monkeypatch)
    assert evaluate(target, tmp_path, assistant_model=assistant_for(target)) != plain
