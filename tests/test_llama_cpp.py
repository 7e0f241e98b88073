"""llama.cpp's server serves SmolLM2 with exported drafts, as the exported commands say (`make test-serving`)."""

import importlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from huggingface_hub import snapshot_download
from support.files import learned_drafts
from support.files.dspark_exports import given_back
from support.files.eagle3_files import VARIANTS
from support.files.repos import save_model
from support.targets.models import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.hub.exporting import export
from hf_specdecpp.serving import AS_DSPARK, AS_EAGLE3, AS_MODEL, Destination, commands_for
from hf_specdecpp.texts import answers
from hf_specdecpp.training import rollouts
from hf_specdecpp.training.configuration import RolloutConfig, TrainingConfig

pytestmark = pytest.mark.takes(240)
xllamacpp = pytest.importorskip("xllamacpp", reason="run `make test-serving`")

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
SOURCES = Path(xllamacpp.__file__).parents[1] / "sources" / "vendor" / "llama.cpp"
SMOLLM2 = os.environ.get("SMOLLM2", str(ROOT / ".models" / "smollm2"))  # a folder or a Hub id
QUESTION = "Write a Python function that returns the n-th Fibonacci number."
LAYERS, LENGTH = 28, 48  # of 30 layers: without training, 20 layers propose hardly a token that 30 choose
TOLERANCE = 0.1  # of the share of accepted candidates; the last round of an answer is cut here
LEAST = 0.15  # of the candidates are accepted, or the comparison would say little


@dataclass
class Served:
    """The target, its chat prompt and greedy answer, and the folder in which the commands run; `plain`: the answer of
    llama.cpp without a draft."""

    target: Any
    source: str
    prompt: list[int]
    answer: list[int]
    folder: Path
    plain: list[int] = field(default_factory=list)

    @property
    def text(self) -> torch.Tensor:
        return torch.tensor([self.prompt + self.answer])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("served")
    source = str(Path(SMOLLM2).absolute()) if Path(SMOLLM2).is_dir() else snapshot_download(SMOLLM2)
    target: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).requires_grad_(False)
    messages, tokenizer = [{"role": "user", "content": QUESTION}], AutoTokenizer.from_pretrained(source)
    prompt: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    text = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=LENGTH)[0].tolist()
    assert len(text) == len(prompt) + LENGTH, "no end of turn in between"
    convert(f"python convert_hf_to_gguf.py {shlex.quote(source)} --outfile {Path(source).name}.gguf", folder)
    made = Served(target, source, prompt, text[len(prompt) :], folder)
    made.plain = asked(made, f"llama-server -m {Path(source).name}.gguf")["tokens"]
    return made


def convert(command: str, folder: Path) -> None:
    """Run a command as `export` prints it, but in the precision that transformers is compared in. Within this process:
    an interpreter of its own would spend half of its time on imports."""
    python, script, *words = shlex.split(command)
    assert (python, script) == ("python", "convert_hf_to_gguf.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SOURCES))
        patch.chdir(folder)
        patch.setattr(sys, "argv", [script, *words, "--outtype", "f32"])
        importlib.import_module("convert_hf_to_gguf").main()


@contextmanager
def server(folder: Path, command: str) -> Iterator[Any]:
    """llama.cpp's server with the options of a `llama-server` command, on one thread."""
    program, *words = shlex.split(command)
    given = dict(zip(words[::2], words[1::2], strict=True))
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / given.pop("-m"))
    params.n_ctx, params.n_parallel, params.port, params.warmup, params.verbosity = 512, 1, 0, False, 0
    draft = params.speculative.draft
    for threads in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        threads.n_threads = 1  # threads that share a core wait for one another, busily
    if "--spec-type" in given:
        name = given.pop("--spec-type").upper().replace("-", "_")
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{name}")]
        draft.mparams.path = str(folder / given.pop("-md"))
        draft.n_max, draft.p_min = int(given.pop("--spec-draft-n-max")), float(given.pop("--spec-draft-p-min", "0"))
    assert (program, given) == ("llama-server", {})
    yield xllamacpp.Server(params)


def asked(served: Served, command: str) -> dict[str, Any]:
    """The greedy answer to the prompt: `tokens`, and in `timings` the numbers of drafted and accepted candidates."""
    body = {"prompt": served.prompt, "n_predict": LENGTH, "temperature": 0.0, "return_tokens": True}
    with server(served.folder, command) as running:
        request = Request(f"{running.listening_address}/completion", json.dumps(body).encode())  # noqa: S310 - ours
        with urlopen(request, timeout=600) as response:  # noqa: S310 - ours
            found: dict[str, Any] = json.load(response)
    return found


def drafted(served: Served, commands: list[str]) -> tuple[int, int]:
    """Convert and serve a draft. The answer is that without a draft; returns drafted and accepted candidates."""
    conversion, serving = commands
    convert(conversion, served.folder)
    found = asked(served, serving)
    assert found["tokens"] == served.plain
    count, accepted = (found["timings"].get(name, 0) for name in ("draft_n", "draft_n_accepted"))
    logger.info(f"{serving}: {accepted} of {count} candidates accepted")  # shown by ARGS=--log-cli-level=INFO
    return count, accepted


def test_without_a_draft_it_answers_as_transformers_does(served: Served) -> None:
    assert served.plain == served.answer


def test_an_early_exit(served: Served) -> None:
    speculation = SpeculationConfig(rule="fixed", num_tokens=3)
    made = SpecDecPPAssistant.from_early_exit(served.target, LAYERS, speculation=speculation)
    made.save_pretrained(served.folder / "exits-early")
    exported = export(served.folder / "exits-early", served.folder / "shorter", served.source, "llama.cpp")
    count, accepted = drafted(served, exported.commands["llama.cpp"])
    assert count / 6 < accepted <= count


def test_an_eagle3_layer(served: Served) -> None:
    repo, fixed = served.folder / "reads-states", SpeculationConfig(rule="fixed", num_tokens=3)
    learned_drafts.eagle3(served.target, served.text, repo)
    exported = export(repo, served.folder / "eagle3", served.source, "llama.cpp")
    count, accepted = drafted(served, exported.commands["llama.cpp"])
    assistant = SpecDecPPAssistant.from_pretrained(repo, target=served.target, speculation=fixed)
    here = learned_drafts.accepted_share(served.target, assistant, [served.prompt], LENGTH)
    assert here > LEAST
    assert accepted / count == pytest.approx(here, abs=TOLERANCE)


@pytest.fixture(scope="module")
def blocks(served: Served) -> dict[bool, Path]:
    """Published drafts of blocks, with (`True`) and without a Markov head."""
    folders = {is_dspark: served.folder / f"blocks-{is_dspark}" for is_dspark in (False, True)}
    for is_dspark, folder in folders.items():
        learned_drafts.blocks(served.target, [(served.text, served.text.shape[1] // 2 - 1)], folder, is_dspark)
    return folders


@pytest.mark.parametrize("is_dspark", [False, True], ids=["dflash", "dspark"])
def test_published_blocks_are_served_from_their_own_repository(
    is_dspark: bool, served: Served, blocks: dict[bool, Path]
) -> None:
    with pytest.raises(ValueError, match=r"unchanged as published.*llama\.cpp"):
        export(blocks[is_dspark], served.folder / "none", served.source, "llama.cpp")
    to = Destination(served.folder, blocks[is_dspark], served.source, None, learned_drafts.BLOCK - 1)
    names = ("", "", "draft-dspark" if is_dspark else "draft-dflash")
    count, accepted = drafted(served, commands_for(to, names)["llama.cpp"])
    assert count / 3 < accepted <= count, "it has learned the answer by heart"


@pytest.mark.daily("dspark")
@pytest.mark.parametrize("is_dspark", [False, True], ids=["dflash", "dspark"])
def test_blocks_with_a_head(is_dspark: bool, served: Served, blocks: dict[bool, Path]) -> None:
    """The exported confidence head decides: with one that is sure all candidates are drafted, else none."""
    counts = []
    for name, bias in (("sure", 3.0), ("unsure", -3.0)):
        made = SpecDecPPAssistant.from_pretrained(blocks[is_dspark], target=served.target)
        made.head = AcceptanceHead(made.ready_drafter().hidden_size, inputs="path")
        with torch.no_grad():
            made.head.output.weight.zero_()
            made.head.output.bias.fill_(bias)
        folder = served.folder / f"{name}-{is_dspark}"
        made.save_pretrained(folder)
        exported = export(folder, Path(f"{folder}-exported"), served.source, "llama.cpp")
        counts.append(drafted(served, exported.commands["llama.cpp"]))
    (count, accepted), nothing = counts
    assert count / 3 < accepted <= count
    assert nothing == (0, 0)


def test_answers_for_training_come_from_its_server(served: Served, tmp_path: Path) -> None:
    """The stage rollouts with `--server`: the answers are those of the local target."""
    data = tmp_path / "prompts.jsonl"
    prompts = [QUESTION, "Name three colours.", "What is 2 + 2?", "Where is Paris?"]
    data.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    rows = {}
    with server(served.folder, f"llama-server -m {Path(served.source).name}.gguf") as running:
        for name, address in (("served", running.listening_address), ("local", None)):
            options = RolloutConfig(
                [str(data)], temperatures=[0.0], max_new_tokens=16, batch_size=2, heldout=0.4, server=address
            )
            config = TrainingConfig(served.source, str(tmp_path / name), dtype="float32", rollouts=options)
            rollouts.run(config)
            rows[name] = {
                (split, row["prompt_id"]): (row["input_ids"], row["finished"])
                for split in ("train", "heldout")
                for row in answers.load(config.work, split)
            }
    assert rows["served"] == rows["local"]
    assert len(rows["local"]) == len(prompts)


def test_what_its_converter_refuses(tmp_path: Path) -> None:
    """An EAGLE-3.1 draft with a norm for each state, which `export` notes, and a gated Markov head."""
    checkpoint = VARIANTS["eagle-3.1"]
    target = save_model(tiny("llama", hidden_size=checkpoint.target_size, head_dim=8), tmp_path / "target")
    exported = export(checkpoint.save(tmp_path / "theirs", "original"), tmp_path / "out", target, "llama.cpp")
    assert any("llama.cpp and older ones do not" in note for note in exported.notes)
    with pytest.raises(ValueError, match=r"Can not map tensor 'fc_norm\.0\.weight'"):
        convert(exported.commands["llama.cpp"][0], tmp_path)
    (folder := tmp_path / "gated").mkdir()
    gated = given_back("gated, prefixed", folder)[2]
    with pytest.raises(ValueError, match=r"unsupported markov_head_type 'gated' \(only 'vanilla' is supported\)"):
        convert(gated.commands["llama.cpp"][0], folder)


def test_its_programs_have_the_options_of_our_commands() -> None:
    to = Destination(Path("x"), Path("draft"), "org/target", None, 3)
    options = (SOURCES / "common" / "arg.cpp").read_text("utf-8")
    methods = (SOURCES / "common" / "speculative.cpp").read_text("utf-8")
    converter = (SOURCES / "convert_hf_to_gguf.py").read_text("utf-8")
    library = next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")).read_bytes()
    for method in (AS_MODEL, AS_EAGLE3, AS_DSPARK):
        converting, serving = commands_for(to, method)["llama.cpp"]
        assert [word for word in shlex.split(converting) if word[0] == "-" and f'"{word}"' not in converter] == []
        words = shlex.split(serving)
        assert [word for word in words if word[0] == "-" and f'"{word}"' not in options] == []
        assert [word for word in words if word.startswith("--") and f"{word}\0".encode() not in library] == []
        assert f'{{"{words[words.index("--spec-type") + 1]}",' in methods
