"""The target's answers: right ones, each once, and nothing on disk that is half of something."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.repos import WORDS, save_model
from support.runs.killing import die, run_until_it_dies
from support.runs.rollout_files import EOS, NUM_PROMPTS, PROMPTS, SPLITS, files, greedy, rows_of, small_run
from support.targets.models import VOCAB_SIZE, tiny
from support.targets.watchers import heard
from transformers import AutoModelForCausalLM

from hf_specdecpp.texts import answers
from hf_specdecpp.training import rollouts
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.run import train
from hf_specdecpp.training.targets import LocalTarget


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny target on disk that ends some of its answers."""
    return save_model(tiny("llama", seed=4, eos_token_id=EOS), tmp_path_factory.mktemp("target"))


@pytest.fixture
def config(tmp_path: Path, target: str) -> TrainingConfig:
    return small_run(tmp_path, target)


def test_greedy_rows_are_those_of_generate(config: TrainingConfig) -> None:
    rollouts.run(config)
    rows = rows_of(config)
    assert sorted(row["prompt_id"] for row in rows) == sorted(f"p{n}" for n in range(NUM_PROMPTS))
    for row in rows:
        # One by one, without padding.
        prompt = [WORDS.index(word) for word in PROMPTS[int(row["prompt_id"][1:])].split()]
        assert row["input_ids"] == greedy(config.target, prompt), row["prompt_id"]
        assert (row["prompt_length"], row["finished"]) == (len(prompt), row["input_ids"][-1] == EOS)
        assert EOS not in row["input_ids"][len(prompt) : -1]
        assert (row["source"], row["sample"], row["temperature"]) == ("words", 0, 0.0)
    ended = sum(row["finished"] for row in rows)
    assert 0 < ended < len(rows), "some answers must end and some must not, or nothing was tested"
    record = json.loads((config.work / "rollouts" / "rollouts.json").read_text())
    assert record["complete"]
    assert sum(record[split]["answers"] for split in SPLITS) == NUM_PROMPTS
    assert sum(record[split]["finished"] for split in SPLITS) == ended
    written = sum(len(row["input_ids"]) - row["prompt_length"] for row in rows)
    assert sum(record[split]["answer_tokens"] for split in SPLITS) == written


@pytest.mark.daily("gemma2")
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])  # positions in a table, and a sliding window
def test_left_padding_changes_nothing(config: TrainingConfig, tmp_path: Path, family: str) -> None:
    # In float32, since transformers' eager attention makes NaN of padding in float64.
    config.target = save_model(tiny(family, seed=1).float(), tmp_path / family)
    config.rollouts.batch_size = 8
    rollouts.run(config)
    for row in rows_of(config):
        assert row["input_ids"] == greedy(config.target, row["input_ids"][: row["prompt_length"]]), row["prompt_id"]
        assert not row["finished"]


def test_a_full_context_does_not_stop_the_batch(config: TrainingConfig, tmp_path: Path) -> None:
    """One answer of ten is full early and stays in the batch, where there is no position for its next tokens."""
    config.target = save_model(tiny("gpt2", n_positions=9), tmp_path / "short")
    prompts = ["w1 w2 w3 w4 w5 w6 w7", *(f"w{n}" for n in range(10, 19))]
    Path(config.rollouts.data[0]).write_text("\n".join(json.dumps({"prompt": text}) for text in prompts))
    config.rollouts.batch_size, config.rollouts.heldout, config.rollouts.shard_size = 10, 0.0, 10
    rollouts.run(config)
    rows = list(answers.load(config.work, "train"))
    assert sorted(row["prompt_length"] for row in rows) == [1] * 9 + [7]
    for row in rows:
        prompt = row["input_ids"][: row["prompt_length"]]
        assert row["input_ids"] == greedy(config.target, prompt, max_new_tokens=9 - len(prompt))
        assert (len(row["input_ids"]), row["finished"]) == (9, False)


@pytest.mark.daily("8")
@pytest.mark.parametrize("batch_size", [8, NUM_PROMPTS])
def test_finished_answers_leave_the_batch(
    config: TrainingConfig, tmp_path: Path, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = list(range(1, len(WORDS), 6))  # so many that answers end at all times
    config.target = save_model(tiny("llama", seed=4, eos_token_id=ends), tmp_path / "brief")
    sizes: set[int] = set()
    heard(monkeypatch, LocalTarget, "_draw", lambda _, logits, *given: sizes.add(len(logits)))
    config.rollouts.batch_size, config.rollouts.heldout, config.rollouts.shard_size = batch_size, 0.0, NUM_PROMPTS
    rollouts.run(config)
    assert len(sizes) > 2, "the batch shrinks while it is answered"
    rows = list(answers.load(config.work, "train"))
    assert len(rows) == NUM_PROMPTS
    for row in rows:
        assert row["input_ids"] == greedy(config.target, row["input_ids"][: row["prompt_length"]]), row["prompt_id"]


@pytest.mark.daily("2")
@pytest.mark.parametrize("top_k", [2, 0])
def test_samples_follow_temperature_and_top_k_alone(config: TrainingConfig, tmp_path: Path, top_k: int) -> None:
    model = tiny("llama", seed=4)
    model.generation_config.update(do_sample=True, top_p=0.01, repetition_penalty=9.0, top_k=1)
    config.target = save_model(model, tmp_path / "own_ideas")
    config.rollouts.temperatures, config.rollouts.top_k, config.rollouts.samples_per_prompt = [0.3], top_k, 40
    config.rollouts.max_new_tokens, config.rollouts.batch_size = 1, 40
    config.rollouts.shard_size, config.rollouts.heldout = NUM_PROMPTS, 0.0
    rollouts.run(config)
    model = AutoModelForCausalLM.from_pretrained(config.target)
    drawn: dict[str, list[int]] = {}
    for row in answers.load(config.work, "train"):
        drawn.setdefault(row["prompt_id"], []).append(row["input_ids"][-1])
    assert all(len(tokens) == 40 for tokens in drawn.values())
    expected = observed = 0.0
    for name, tokens in drawn.items():
        ids = torch.tensor([[WORDS.index(word) for word in PROMPTS[int(name[1:])].split()]])
        with torch.no_grad():
            logits, best = model(ids).logits[0, -1].topk(top_k or VOCAB_SIZE)
        p = (logits / 0.3).softmax(0)
        assert set(tokens) <= set(best.tolist())
        observed += tokens.count(int(best[0]))
        expected += 40 * float(p[0])
    # 560 draws, so a standard deviation of at most 12 tokens: six of them are never seen by chance.
    assert abs(observed - expected) < 72


def test_samples_of_a_prompt_differ_and_seeds_matter(config: TrainingConfig) -> None:
    config.rollouts.temperatures, config.rollouts.samples_per_prompt = [1.0], 2
    rollouts.run(config)
    rows = rows_of(config)
    assert len(rows) == 2 * NUM_PROMPTS
    answers = {(row["prompt_id"], row["sample"]): row["input_ids"] for row in rows}
    assert sum(answers[f"p{n}", 0] != answers[f"p{n}", 1] for n in range(NUM_PROMPTS)) > NUM_PROMPTS / 2
    config.work_dir, config.seed = str(config.work) + "-2", 1
    rollouts.run(config)
    assert rows_of(config) != rows


def test_every_temperature_has_its_shards(config: TrainingConfig) -> None:
    config.rollouts.temperatures, config.rollouts.samples_per_prompt = [0.7, 0.0], 2
    rollouts.run(config)
    everyone = sorted(f"p{n}" for n in range(NUM_PROMPTS))
    asked: dict[tuple[int, float], list[str]] = {}
    for row in rows_of(config):
        asked.setdefault((row["sample"], round(row["temperature"], 6)), []).append(row["prompt_id"])
        if row["temperature"] == 0.0:
            assert row["input_ids"] == greedy(config.target, row["input_ids"][: row["prompt_length"]])
    assert {key: sorted(names) for key, names in asked.items()} == dict.fromkeys(
        [(0, 0.7), (0, 0.0), (1, 0.7)], everyone
    ), "a second greedy answer would be the first one again"
    assert asked[0, 0.0] != everyone, "a shard is no slice of the file: its prompts may come sorted by kind"
    for written, count in ((0.7, 2), (0.0, 1)):
        each = [answers.load(config.work, split, written) for split in SPLITS]
        assert sum(map(len, each)) == count * NUM_PROMPTS
    with pytest.raises(ValueError, match=r"at temperature 1, only at 0, 0\.7\. Choose one of these, or add"):
        answers.load(config.work, "train", 1.0)


@pytest.fixture
def tested(config: TrainingConfig, tmp_path: Path) -> TrainingConfig:
    """With a test set of four prompts, two of which are in the training data, too."""
    texts = [PROMPTS[1], "w40 w41", PROMPTS[5], "w42 w43 w44"]
    rows = [{"id": f"t{n}", "prompt": text} for n, text in enumerate(texts)]
    (tmp_path / "quiz.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config.evaluation.data = [str(tmp_path / "quiz.jsonl")]
    return config


@pytest.mark.parametrize("limit", [None, 1])
def test_no_training_on_test_sets(tested: TrainingConfig, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr("hf_specdecpp.texts.prompts.logger.warning", warned.append)
    tested.evaluation.max_prompts = limit
    rollouts.run(tested)
    assert warned == ["2 prompts are also in a test set and are not trained on."]
    expected = sorted(f"p{n}" for n in range(NUM_PROMPTS) if n not in (1, 5))
    assert sorted(row["prompt_id"] for row in rows_of(tested)) == expected, "also those that the limit leaves out"
    rows = list(answers.load(tested.work, "quiz"))
    assert len(rows) == (limit or 4)
    assert {row["prompt_id"] for row in rows} <= {"t0", "t1", "t2", "t3"}
    for row in rows:
        assert row["input_ids"] == greedy(tested.target, row["input_ids"][: row["prompt_length"]])
    assert json.loads((tested.work / "rollouts" / "rollouts.json").read_text())["quiz"]["answers"] == (limit or 4)


@pytest.mark.parametrize("name", ["other/quiz.jsonl", "heldout.jsonl", "train.jsonl"])
def test_names_of_test_sets_that_clash(tested: TrainingConfig, tmp_path: Path, name: str) -> None:
    tested.evaluation.data.append(str(tmp_path / name))
    said = r"need different names, .* other than train and heldout\. Rename the files"
    with pytest.raises(ValueError, match=said):
        rollouts.run(tested)
    assert not tested.work.exists()


def test_names_of_test_sets(config: TrainingConfig) -> None:
    config.evaluation.data = ["/data/quiz.v2.jsonl", "org/sums:test", "org/words"]
    names = "quiz.v2", "sums-test", "words"
    assert rollouts.sets_to_evaluate(config) == dict(zip(names, config.evaluation.data, strict=True))


@pytest.mark.daily("writing")
@pytest.mark.parametrize("moment", ["answering", "writing"])
def test_a_killed_run(config: TrainingConfig, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of the third shard: while the target answers, or with half a file written."""
    config.rollouts.temperatures = [1.0]
    rollouts.run(config)
    expected, names = rows_of(config), files(config)
    config.work_dir = str(tmp_path / "killed")
    answer, write, written = LocalTarget.__call__, rollouts.pyarrow.parquet.write_table, list[Path]()

    def dying_answer(*arguments: Any) -> Any:
        for number, result in enumerate(answer(*arguments)):
            if moment == "answering" and len(written) == 2 and number == 2:
                die()
            yield result

    def dying_write(table: Any, path: Path) -> None:
        if moment == "writing" and len(written) == 2:
            path.write_bytes(b"PAR1 and then nothing")
            die()
        write(table, path)
        written.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalTarget, "__call__", dying_answer)
        patch.setattr(rollouts.pyarrow.parquet, "write_table", dying_write)
        run_until_it_dies(lambda: rollouts.run(config))
    shards = [name for name in files(config) if name.endswith(".parquet")]
    assert len(shards) == 2
    with pytest.raises(ValueError, match="is not complete"):
        answers.load(config.work, "train")

    before = {name: (config.work / "rollouts" / name).stat().st_mtime_ns for name in shards}
    answered, config.layers = count_answers(monkeypatch), 1
    train(config, ["rollouts"])
    assert (rows_of(config), files(config)) == (expected, names)
    assert {name: (config.work / "rollouts" / name).stat().st_mtime_ns for name in shards} == before
    assert sum(answered) == NUM_PROMPTS - 2 * config.rollouts.shard_size


def count_answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompts of each shard that the local target is asked from now on."""
    asked: list[int] = []

    heard(monkeypatch, LocalTarget, "__call__", lambda _, items, *given: asked.append(len(items)))
    return asked


def test_a_complete_run_is_not_repeated(config: TrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts.run(config)
    monkeypatch.setattr(rollouts, "LocalTarget", None)
    config.rollouts.batch_size = 1  # changes nothing that was asked for
    rollouts.run(config)


def test_damaged_shards_are_made_again(config: TrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts.run(config)
    expected, folder = rows_of(config), config.work / "rollouts"
    record = json.loads((folder / "rollouts.json").read_text())
    (folder / "rollouts.json").write_text(json.dumps({**record, "complete": False}))
    shard = folder / "train" / "shard-0-0-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:200])
    asked = count_answers(monkeypatch)
    rollouts.run(config)
    assert (asked, rows_of(config)) == ([4], expected)


def test_other_settings_prompts_and_unknown_ones_are_refused(config: TrainingConfig) -> None:
    rollouts.run(config)
    names = files(config)
    for change, message in (
        ({"temperatures": [0.5]}, r"other settings: temperatures was \[0\.0\] and is now \[0\.5\]\. Continue with the"),
        ({"shard_size": 5, "max_new_tokens": 3}, "max_new_tokens was 12 and is now 3; shard_size was 4 and is now 5"),
        ({"server": "http://localhost:1"}, "answered_by was 'local' and is now 'server'"),
    ):
        with pytest.raises(ValueError, match=message):
            rollouts.run(replace(config, rollouts=replace(config.rollouts, **change)))
    assert files(config) == names
    data = Path(config.rollouts.data[0])
    data.write_text(data.read_text().replace(PROMPTS[0], PROMPTS[0] + " w5"))
    with pytest.raises(ValueError, match=r"prompts was '14 with hash \w+' and is now '14 with hash \w+'\. Continue"):
        rollouts.run(config)
    (config.work / "rollouts" / "rollouts.json").unlink()
    with pytest.raises(ValueError, match=r"has answers but no rollouts\.json"):
        rollouts.run(config)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without room")
def test_a_full_disk(config: TrainingConfig) -> None:
    train = config.work / "rollouts" / "train"
    train.mkdir(parents=True)
    (train / f"shard-0-0-00001.parquet.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"shard-0-0-00001\.parquet could not be written.*No space left.*make room"):
        rollouts.run(config)
    assert files(config) == ["rollouts.json", "train/shard-0-0-00000.parquet"]
    rollouts.run(config)
    assert len(rows_of(config)) == NUM_PROMPTS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_refused(config: TrainingConfig, tmp_path: Path, temperature: float) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    config.target, config.rollouts.temperatures = save_model(model, tmp_path / "nan"), [temperature]
    with pytest.raises(ValueError, match="computed NaN logits in torch.float64 on cpu"):
        rollouts.run(config)
    assert files(config) == ["rollouts.json"]


def test_load_without_answers(config: TrainingConfig) -> None:
    with pytest.raises(ValueError, match="is not complete. Run the stage rollouts first"):
        answers.load(config.work, "train")
    config.rollouts.heldout = 0.0
    rollouts.run(config)
    assert len(answers.load(config.work, "train")) == NUM_PROMPTS
    with pytest.raises(ValueError, match="heldout has no answers"):
        answers.load(config.work, "heldout")
