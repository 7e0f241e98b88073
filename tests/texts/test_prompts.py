"""Reading, splitting and encoding the prompts of a training run."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.files.repos import WORDS, save_model, tokenizer
from support.targets.models import tiny
from transformers import AutoTokenizer

pytest.importorskip("datasets", reason="needs the [train] extra")

from hf_specdecpp.texts.encoding import Codec
from hf_specdecpp.texts.prompts import Prompt, read_prompts, split_prompts

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "w1 {{ message.content }} w2 {% endfor %}{% if add_generation_prompt %}w3{% endif %}"
)


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def asked(text: str) -> Prompt:
    return Prompt("id", "source", [user(text)])


def codec_for(folder: Path, template: str | None = None, **config: Any) -> Codec:
    name = save_model(tiny("llama", **config), folder)
    if template:
        words = tokenizer()
        words.chat_template = template
        words.save_pretrained(folder)
    return Codec.from_pretrained(name)


def test_reads_every_kind_of_row(tmp_path: Path) -> None:
    rows = [
        {"id": 7, "prompt": "a"},
        {"prompt": "b\u2028b"},  # a separator of lines to Python, not to JSON Lines
        "",
        {"instruction": "c", "input": "d"},
        {"instruction": "c", "input": ""},
        {"messages": [user("e"), {"role": "assistant", "content": "f", "tool": 1}, user("g")]},
        {"messages": [user("h"), {"role": "assistant", "content": "the answer of the data"}]},
        {"prompt": [user("i")]},
        {"question": "j", "answer": "k"},
        {"category": "writing", "turns": ["l", "m"]},
    ]
    path = tmp_path / "some.jsonl"
    path.write_text("\ufeff" + "\n".join(json.dumps(row, ensure_ascii=False) if row else "" for row in rows))
    prompts = read_prompts(str(path))
    assert [prompt.id for prompt in prompts] == ["7", *(f"some-{n}" for n in (2, 4, 5, 6, 7, 8, 9, 10))]
    assert {prompt.source for prompt in prompts} == {"some"}
    contents = [[message["content"] for message in prompt.messages] for prompt in prompts]
    assert contents == [["a"], ["b\u2028b"], ["c\nInput: d"], ["c"], ["e", "f", "g"], ["h"], ["i"], ["j"], ["l"]]


@pytest.mark.parametrize(("line", "message"), [
    ('{"prompt": "a', r"bad\.jsonl:2 is not JSON"),
    ("[1]", r"bad\.jsonl:2 is a list"),
    ("{}", r"bad\.jsonl:2 has nothing but no prompt"),
    ('{"text": "a"}', r"bad\.jsonl:2 has 'text' but no prompt"),
    ('{"prompt": 3}', r"bad\.jsonl:2: 'prompt' must be text.*not 3"),
    ('{"prompt": " "}', r"bad\.jsonl:2: 'prompt' is empty"),
    ('{"messages": []}', r"bad\.jsonl:2: 'messages' is empty"),
    ('{"turns": []}', r"bad\.jsonl:2: 'turns' is empty"),
    ('{"turns": [3]}', r"bad\.jsonl:2: 'turns' must be text.*not 3"),
    ('{"messages": [{"role": "assistant", "content": "a"}]}', r"bad\.jsonl:2: 'messages' is empty"),
    ('{"messages": [{"role": "user"}]}', r"bad\.jsonl:2: 'messages' must be text.*but a message is \{'role'"),
])  # fmt: skip
def test_malformed_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_prompts(write(tmp_path / "bad.jsonl", {"prompt": "fine"}, line))


def test_files_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"empty\.jsonl has no prompts"):
        read_prompts(write(tmp_path / "empty.jsonl", "", " "))
    with pytest.raises(FileNotFoundError, match=r"no file .*absent\.jsonl"):
        read_prompts(str(tmp_path / "absent.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"binary\.jsonl:1 is not JSON.*utf-8"):
        read_prompts(str(tmp_path / "binary.jsonl"))


def test_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", {"question": "a", "n": 1}, {"question": None, "n": 2}, {"question": "c", "n": 3})
    write(folder / "test.jsonl", {"question": "d", "n": 4})
    prompts = read_prompts(str(folder))
    assert [(prompt.id, prompt.source) for prompt in prompts] == [(f"{folder}-{n}", str(folder)) for n in (0, 2)]
    assert [prompt.opening for prompt in read_prompts(f"{folder}:test")] == ["d"]
    with pytest.raises(ValueError, match="dev"):
        read_prompts(f"{folder}:dev")
    other = tmp_path / "other"
    other.mkdir()
    write(other / "train.jsonl", {"text": "a"})
    with pytest.raises(ValueError, match="other has no prompts"):
        read_prompts(str(other))


def test_split_is_stable_and_leaks_nothing(tmp_path: Path) -> None:
    texts = [f"What is {n}?" for n in range(400)]
    first = write(tmp_path / "a.jsonl", *({"prompt": text} for text in texts))
    # The same questions spaced otherwise, and as the opening of longer conversations.
    again = write(
        tmp_path / "b.jsonl",
        *({"prompt": text.replace(" ", "  ") + "\n"} for text in texts[:50]),
        *({"messages": [user(text), {"role": "assistant", "content": "7"}, user("Sure?")]} for text in texts[:50]),
    )
    alone, both = split_prompts([first], 0.2), split_prompts([again, first], 0.2)
    assert len(alone["train"]) + len(alone["heldout"]) == 400
    assert len(both["train"]) + len(both["heldout"]) == 450  # duplicates counted once
    assert 50 < len(alone["heldout"]) < 110
    openings = {name: {prompt.opening for prompt in prompts} for name, prompts in both.items()}
    assert not openings["train"] & openings["heldout"]
    assert openings == {name: {prompt.opening for prompt in prompts} for name, prompts in alone.items()}


def test_split_of_few_prompts(tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    for share in (1e-9, 1 - 1e-9):
        split = split_prompts([few], share)
        assert (len(split["train"]), len(split["heldout"])) == (1, 2), share  # one calibrates, one measures
    assert split_prompts([few], 0.0)["heldout"] == []
    with pytest.raises(ValueError, match="Different first messages of users: 1, but three are needed"):
        split_prompts([write(tmp_path / "one.jsonl", {"prompt": "a"}, {"prompt": " a"})], 0.1)
    with pytest.raises(ValueError, match="No prompts were given"):
        split_prompts([], 0.1)


def test_at_most_so_many_prompts_of_each_source(tmp_path: Path) -> None:
    many = write(tmp_path / "many.jsonl", *({"prompt": f"What is {n}?"} for n in range(100)))
    few = write(tmp_path / "few.jsonl", *({"prompt": f"Who is {n}?"} for n in range(5)))

    def chosen(limit: int | None, seed: int = 0) -> set[str]:
        return {prompt.id for prompts in split_prompts([many, few], 0.2, limit, seed).values() for prompt in prompts}

    names = chosen(20)
    assert (sum(name.startswith("many") for name in names), sum(name.startswith("few") for name in names)) == (20, 5)
    assert names == chosen(20)
    assert names != chosen(20, seed=1)
    assert not {f"many-{n}" for n in range(1, 21)} <= names, "not the first ones: files may be sorted"
    assert len(chosen(100)) == len(chosen(None)) == 105


def test_prompts_that_must_not_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr("hf_specdecpp.texts.prompts.logger.warning", warned.append)
    texts = [f"What is {n}?" for n in range(60)]
    talk = {"messages": [user(texts[3]), {"role": "assistant", "content": "3"}, user("Sure?")]}
    path = write(tmp_path / "a.jsonl", *({"prompt": text} for text in texts), talk, {"prompt": texts[7]})
    whole = split_prompts([path], 0.3)
    warned.clear()
    part = split_prompts([path], 0.3, unseen={texts[3], texts[4], "of another file"})
    assert warned == [
        "1 of 62 prompts are duplicates and were left out.",
        "3 prompts are also in a test set and are not trained on.",
    ]
    for name, prompts in part.items():
        openings = [prompt.opening for prompt in whole[name] if prompt.opening not in texts[3:5]]
        assert [prompt.opening for prompt in prompts] == openings
    with pytest.raises(ValueError, match="All 61 prompts of rollouts.data are in a test set.*Give other prompts"):
        split_prompts([path], 0.3, unseen=set(texts))


def test_encoding_with_and_without_template(tmp_path: Path) -> None:
    plain, chat = codec_for(tmp_path / "plain"), codec_for(tmp_path / "chat", TEMPLATE)
    assert plain.encode(asked("w5 w6")).input_ids == [5, 6]
    encoded = chat.encode(asked("w5 w6"))
    assert (encoded.text, encoded.input_ids) == ("w1 w5 w6 w2 w3", [1, 5, 6, 2, 3])
    turns = Prompt("talk", "source", [user("w5"), {"role": "assistant", "content": "w6"}, user("w7")])
    assert chat.encode(turns).input_ids == [1, 5, 2, 1, 6, 2, 1, 7, 2, 3]
    with pytest.raises(ValueError, match="'talk' is a conversation of 3 messages.*no chat template"):
        plain.encode(turns)
    system = Prompt("sys", "source", [{"role": "system", "content": "w5"}, user("w6")])
    with pytest.raises(ValueError, match="template refuses prompt 'sys' with the roles system, user: no system"):
        chat.encode(system)


def test_prompts_that_fill_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_for(tmp_path, max_position_embeddings=4)
    warned: list[str] = []
    monkeypatch.setattr("hf_specdecpp.texts.encoding.logger.warning", warned.append)
    short, exact, long = asked("w5 w6"), asked("w5 w6 w7"), asked("w5 w6 w7 w8")
    assert [item.input_ids for item in codec.encode_all([short, exact, long])] == [[5, 6], [5, 6, 7]]
    left_out = "1 of 3 prompts leave no room for an answer in the target's context of 4 tokens and were left out."
    assert warned == [left_out]
    assert [codec.num_fitting(codec.encode(prompt), 8) for prompt in (short, exact, long)] == [2, 1, 0]
    none_left = "Each of the 1 prompts fills the target's context of 4 tokens: the shortest has 4"
    with pytest.raises(ValueError, match=none_left):
        codec.encode_all([long])


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    codec = codec_for(tmp_path, eos_token_id=[9, 8])
    assert codec.eos == [9, 8]
    words = AutoTokenizer.from_pretrained(tmp_path)
    words.eos_token = WORDS[8]
    words.save_pretrained(tmp_path)
    codec = Codec.from_pretrained(str(tmp_path))
    assert codec.eos == [8, 9], "a server's `stop` is the tokenizer's own"
    (tmp_path / "generation_config.json").unlink()
    assert Codec.from_pretrained(str(tmp_path)).eos == [8, 9]
    item = codec.encode(asked("w5"))
    assert codec.read_answer(item, "w6 w7", finished=True) == ([6, 7, 8], True)
    assert codec.read_answer(item, " w6 w7", finished=False) == ([6, 7], False)
    assert codec.read_answer(item, " w6 w9 w7", finished=False) == ([6, 9], True)
    assert codec.read_answer(item, "", finished=True) == ([8], True)
