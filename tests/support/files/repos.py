"""Tiny models, adapters and assistants on disk, with tokenizers beside them."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from string import ascii_letters
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant, SpecDecPPConfig
from support.runs.hub_server import HubServer
from support.targets.models import VOCAB_SIZE, configured, partly_agreeing, prompt, quiet_later_layers, tiny

WORDS = ["<unk>", *(f"w{i}" for i in range(1, VOCAB_SIZE))]
PROMPT = prompt(12)
TEXT = " ".join(WORDS[i] for i in PROMPT[0].tolist())


def tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    inner = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def ending_tokenizer() -> PreTrainedTokenizerFast:
    """The same, whose last token, `"</s>"`, ends texts and pads them."""
    words = tokenizer([*WORDS[:-1], "</s>"])
    words.eos_token = words.pad_token = "</s>"
    return words


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """That one with a chat template, in which a message is its words."""
    words = ending_tokenizer()
    words.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return words


def save_chat_model(folder: Path) -> str:
    """Write a model that chats, most of whose tokens its first layers guess; its folder, as a string."""
    model = quiet_later_layers(tiny("llama", eos_token_id=47, pad_token_id=47)).float()
    chat_tokenizer().save_pretrained(folder)
    return save_model(model, folder, None)


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """A letter a token: transformers' stop strings need tokens that can be joined."""
    inner = Tokenizer(WordLevel({letter: index for index, letter in enumerate(ascii_letters[:VOCAB_SIZE])}, "a"))
    inner.pre_tokenizer, inner.decoder = Split("", "isolated"), Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def save_model(model: PreTrainedModel, folder: Path, words: Sequence[str] | None = WORDS) -> str:
    """Write a model, and its tokenizer unless `words` is None; the folder, as a string."""
    model.save_pretrained(folder)
    if words is not None:
        tokenizer(words).save_pretrained(folder)
    return str(folder)


def save_adapter(model: PreTrainedModel, folder: Path, seed: int = 0, targets: Any = ("q_proj", "up_proj")) -> str:
    """Write a LoRA adapter that changes what the model says; the model stays as it is."""
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=4, target_modules=list(targets)))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    wrapped.save_pretrained(str(folder))
    wrapped.unload()
    return str(folder)


def head_for(model: PreTrainedModel, seed: int = 0, **arguments: Any) -> AcceptanceHead:
    """A random head, so that an estimate tells one from another."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AcceptanceHead(model.config.hidden_size, **{"num_blocks": 2, **arguments})


def files_of(folder: str | Path) -> dict[str, bytes]:
    root = Path(folder)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def save_assistant(folder: Path, **changes: Any) -> Path:
    """A complete repository with an early-exit draft, which needs no other repository; the target is `tiny("llama")`.

    `changes`: fields of the config."""
    fields = {"draft_kind": "early_exit", "draft_layers": [0, 1], "target_id": "org/target", **changes}
    SpecDecPPAssistant(SpecDecPPConfig(**fields), None, head_for(tiny("llama"))).save_pretrained(folder)
    return folder


def publish_pair(hub: HubServer) -> tuple[str, str]:
    """Commit a target and a partly agreeing draft with a tokenizer; their commit hashes."""
    target, draft = (hub.commit(name, files) for name, files in _pair().items())
    return target, draft


def commit_head_of_a_draft(hub: HubServer, folder: Path) -> None:
    """`org/head`, of `org/draft`."""
    hub.commit("org/head", files_of(save_assistant(folder / "a", draft_kind="independent", draft_id="org/draft")))


@cache
def _pair() -> dict[str, dict[str, bytes]]:
    """The files of both, which are written once."""
    target, found = tiny("llama"), {}
    for name, model in (("org/target", target), ("org/draft", partly_agreeing(target))):
        with TemporaryDirectory() as folder:
            found[name] = files_of(save_model(model, Path(folder)))
    return found


def greedy(target: Any, assistant: Any = None, ids: Tensor = PROMPT, **arguments: Any) -> list[int]:
    output = target.generate(ids, assistant_model=assistant, **{"do_sample": False, "max_new_tokens": 24, **arguments})
    return output[0].tolist()


def estimates(assistant: SpecDecPPAssistant) -> Tensor:
    """What draft and head say after each token of a fixed text: logits and log-odds of acceptance."""
    drafter = assistant.ready_drafter()
    with torch.no_grad():
        hidden = drafter.model.get_decoder()(PROMPT.to(drafter.device)).last_hidden_state[0]
        logits = torch.stack([drafter.logits(state, VOCAB_SIZE) for state in hidden])
        return logits if assistant.head is None else torch.cat((logits, assistant.head(hidden)[:, None].float()), dim=1)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


def check_round_trip(assistant: SpecDecPPAssistant, target: PreTrainedModel, folder: Path) -> None:
    """Saved and loaded again it drafts the same and estimates the same."""
    configured(assistant, rule="threshold", threshold=0.4, adapt=False)
    expected = greedy(target)
    assert greedy(target, assistant) == expected
    assistant.save_pretrained(folder)
    for again in (SpecDecPPAssistant.from_pretrained(folder, target), SpecDecPPAssistant.from_pretrained(folder)):
        again.decisions = assistant.decisions
        if again.drafter is None:
            again.attach(target)
        # One more float operation a weight where an adapter is not merged.
        torch.testing.assert_close(estimates(again), estimates(assistant), rtol=1e-5, atol=1e-5)
        assert greedy(target, again) == expected
        again.attach(target)
        greedy(target, again)
        assert greedy(target, assistant) == expected
        assert (again.stats.drafted, again.stats.accepted) == (assistant.stats.drafted, assistant.stats.accepted)
        again.detach()
