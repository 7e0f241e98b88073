"""Repositories of every kind of draft, ways to damage them at random, and what becomes of a damaged one."""

import copy
import json
import math
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPConfig, assist
from hf_specdecpp.draft_kinds.draft_kind import Parts
from hf_specdecpp.draft_kinds.known import DFLASH
from hf_specdecpp.draft_kinds.mtp.loading_mtp import FIELDS
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.inspection import inspect
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.early_exit import early_exit
from support.files import dflash_files, dspark_files, eagle3_files, gemma4_files, mtp_files
from support.files.repos import greedy, head_for, save_adapter, save_model
from support.targets.models import random_fusion, random_layer, tiny

MOST_SECONDS, MOST_MEGABYTES = 2.0, 300
TEXT = torch.arange(1, 9)[None]
# What every message has: what to do, or what would be right.
CURES = (
    r"again|onvert|can be|assist\(|ower|aise|orrect|oad|Use|use a|nstall|rain|Say|say |must|ame |hoose|Ask|ook for|"
    r"eave|nset"
)


@dataclass
class Sound:
    """A repository, the target that its draft is for, and how the two come together."""

    folder: Path
    target: CausalLM
    load: Callable[[Path, CausalLM], SpecDecPPAssistant]

    @cached_property
    def text(self) -> list[int]:
        """What the target says without a draft."""
        return greedy(self.target, None, TEXT, max_new_tokens=4, pad_token_id=0)


def from_pretrained(folder: Path, target: CausalLM) -> SpecDecPPAssistant:
    return SpecDecPPAssistant.from_pretrained(folder, target=target)


def _ours(assistant: SpecDecPPAssistant, target: CausalLM, folder: Path) -> Sound:
    assistant.save_pretrained(folder)
    assistant.detach()
    return Sound(folder, target, from_pretrained)


def _early_exit(folder: Path) -> Sound:
    """With all files that an assistant can have."""
    target = tiny("llama")
    adapter = save_adapter(early_exit(target, 2), folder / "peft")
    head, vocab = head_for(target, inputs="before"), list(range(40))
    made = SpecDecPPAssistant.from_early_exit(target, 2, adapter=adapter, head=head, draft_vocab=vocab)
    made.config.acceptance_by_rank = {"greedy": [0.5, 0.25], "sampled": [0.5]}
    return _ours(made, target, folder / "ours")


def _head(folder: Path) -> Sound:
    """Nothing of the draft but a head of the paper's kind, with all that its config can say."""
    target = tiny("llama")
    calibration = {"greedy": {"bias": 0.1, "temperatures": [1.0, 0.9]}, "sampled": {"bias": 0.0}}
    head = head_for(target, num_blocks=3, tied=True, calibration=calibration)
    made = SpecDecPPAssistant.from_early_exit(target, 1, head=head)
    made.config.calibration = {"greedy": [0.1, 0.9]}
    return _ours(made, target, folder)


def _independent(folder: Path) -> Sound:
    """An assistant's repository, and beside it that of its draft, a model of its own."""
    target = tiny("llama")
    save_model(tiny("llama", num_hidden_layers=1), folder / "draft")
    SpecDecPPAssistant.from_draft(folder / "draft", head=head_for(target)).save_pretrained(folder / "ours")

    def load(copy: Path, target: CausalLM) -> SpecDecPPAssistant:
        return SpecDecPPAssistant.from_pretrained(copy / "ours", draft=copy / "draft", target=target)

    return Sound(folder, target, load)


def _of(make: Callable[[CausalLM], SpecDecPPAssistant]) -> Callable[[Path], Sound]:
    """Of a target that is the same for all."""

    def made(folder: Path) -> Sound:
        target = tiny("llama")
        return _ours(make(target), target, folder)

    return made


def _block(folder: Path) -> Sound:
    target = dflash_files.target_for("llama").float()
    checkpoint = dflash_files.Checkpoint(block_size=3, reads=(1,), is_causal=True, samples_anchor=True)
    module = DFLASH.read(checkpoint.config(), checkpoint.tensors(), "trained by an earlier version").float()
    made = SpecDecPPAssistant(SpecDecPPConfig(draft_kind="dflash"), None, None, Parts(module=module))
    made.attach(target)
    return _ours(made, target, folder)


def _of_others(save: Callable[[Path], object], target: Callable[[], CausalLM]) -> Callable[[Path], Sound]:
    def made(folder: Path) -> Sound:
        save(folder)
        return Sound(folder, target(), from_pretrained)

    return made


def _eagle3(variant: str, dialect: str = "original") -> Callable[[Path], Sound]:
    return _of_others(partial(eagle3_files.VARIANTS[variant].save, dialect=dialect), partial(tiny, "llama"))


def _dflash(variant: str, dialect: str = "original") -> Callable[[Path], Sound]:
    return _of_others(partial(dflash_files.VARIANTS[variant].save, dialect=dialect), dflash_files.target_for)


def _gemma4(name: str) -> Callable[[Path], Sound]:
    variant = gemma4_files.VARIANTS[name]
    return _of_others(lambda to: variant.theirs().save_pretrained(to), partial(gemma4_files.target_for, variant.of))


def _mtp(family: str) -> Callable[[Path], Sound]:
    def make(folder: Path) -> Sound:
        files = mtp_files.Files(family)
        target = mtp_files.load(files.save(folder))
        # Of the target's own fields and tensors none are read but these.
        config = json.loads((folder / "config.json").read_text())
        nested = {"text_config": _known_to_mtp(config["text_config"])} if "text_config" in config else {}
        (folder / "config.json").write_text(json.dumps(_known_to_mtp(config) | nested))
        tensors, own = load_file(folder / "model.safetensors"), [name for layer in files.layers for name in layer]
        save_file({name: tensors[name] for name in [*own, next(iter(tensors))]}, folder / "model.safetensors")
        return Sound(folder, target, lambda source, target: assist(target, "mtp", source=source, default=False))

    return make


def _known_to_mtp(config: dict[str, Any]) -> dict[str, Any]:
    known = (*FIELDS, "chain_hidden_post_norm", "model_type", "hidden_size")
    return {name: value for name, value in config.items() if name in known}


MTP = {"MTP of Inkling": "inkling_text", "MTP of Step": "step3p7", "MTP of DeepSeek": "deepseek_v3"}
MAKERS: dict[str, Callable[[Path], Sound]] = {
    "early exit": _early_exit,
    "head": _head,
    "independent": _independent,
    "lookup": _of(lambda target: assist(target, "lookup", default=False)),
    "conditioned": _of(lambda target: SpecDecPPAssistant.from_conditioned(target, [2], fusion=random_fusion(target))),
    "trained layer": _of(lambda target: SpecDecPPAssistant.from_draft(random_layer(target), target)),
    "trained block": _block,
    "EAGLE-3": _eagle3("plain"),
    "EAGLE-3, all tokens": _eagle3("all tokens"),
    "EAGLE-3.1": _eagle3("eagle-3.1"),
    "EAGLE-3, two layers": _eagle3("two layers"),
    "EAGLE-3 with the final state": _eagle3("final state"),
    "EAGLE-3 with embeddings": _eagle3("own embeddings"),
    "EAGLE-3 of speculators": _eagle3("qwen3", "speculators"),
    "DFlash": _dflash("scaled"),
    "DFlash of transformers": _dflash("windows", "transformers"),
    "DFlash of speculators": _dflash("windows", "speculators"),
    "DSpark": _of_others(dspark_files.VARIANTS["deepspec, gated"].save, dspark_files.target_for),
    "DSpark of speculators": _of_others(dspark_files.VARIANTS["speculators, rnn"].save, dspark_files.target_for),
    "DSpark, layers of Gemma 4": _of_others(dspark_files.VARIANTS["gemma4"].save, dspark_files.target_for),
    "Gemma 4": _gemma4("values are keys"),
    "Gemma 4, clusters": _gemma4("clusters"),
    "MTP": _mtp("glm4_moe"),
    "MTP of Qwen": _mtp("qwen3_next"),
    **{name: _mtp(family) for name, family in MTP.items() if family in mtp_files.FAMILIES},
}

# What makes transformers fetch or import, where a config of a model has it.
CODE: dict[str, Any] = {
    "attn_implementation": "kernels-community/x",
    "_attn_implementation": "kernels-community/x",
    "_attn_implementation_internal": "kernels-community/x",
    "experts_implementation": "kernels-community/x",
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"},
    "trust_remote_code": True,
    "return_dict": False,
}
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 1.5, 1e-30, 1e308, float("nan"), float("inf"), 64, 65, 10**4, 2**22, 2**31 - 1,
    2**31, 2**63, 10**18, 10**30, 10**400, "", "x", "1", "kernels-community/x", [], [0], [1, 2, 3], ["x"], [None],
    [0] * 3000, {}, {"x": 1}, {"greedy": [None]}, "full_attention", ["full_attention"] * 2, "sliding_attention", "relu",
]  # fmt: skip


def mappings(value: Any) -> Iterator[Any]:
    """All lists and mappings within a value, itself first."""
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from mappings(inner)


def _another(value: Any, chance: random.Random) -> Any:
    """A value of another type or size."""
    near: list[Any] = [[value], {"x": value}, str(value)]
    if isinstance(value, int | float):
        near += [value + 1, value - 1, 2 * value, -value, value * 1000, *([float(value)] if abs(value) < 1e300 else [])]
    if isinstance(value, list):
        near += [value[1:], value * 2, value[::-1], value * 1000, [[each] for each in value]]
    return chance.choice(near if chance.random() < 0.4 else ODD)


def damage_config(path: Path, chance: random.Random) -> str:
    """Exchange, remove or add a field, at any depth."""
    raw = json.loads(path.read_text())
    inner = chance.choice(list(mappings(raw)))
    if isinstance(inner, dict) and chance.random() < 0.1:
        name = chance.choice(list(CODE))
        inner[name] = CODE[name]
        done = f"{name} added"
    else:
        place: Any = chance.choice(list(inner)) if isinstance(inner, dict) else chance.randrange(len(inner))
        if chance.random() < 0.15:
            del inner[place]
            done = f"{place} removed"
        else:
            inner[place] = _another(copy.deepcopy(inner[place]), chance)
            done = f"{place}={str(inner[place])[:60]}"
    path.write_text(json.dumps(raw))
    return done


def damage_tensors(path: Path, chance: random.Random) -> str:
    """Change one tensor or its name, add one, or damage the bytes of the file."""
    tensors = load_file(path)
    name = chance.choice(sorted(tensors))
    found = tensors[name]
    dtypes = [torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.uint16]
    ways: dict[str, Callable[[], dict[str, Tensor]]] = {
        "missing": dict,
        "flat": lambda: {name: found.flatten().clone()},
        "of another type": lambda: {name: found.to(chance.choice(dtypes))},
        "wider": lambda: {name: torch.cat((found, found), -1) if found.dim() else found[None]},
        "empty": lambda: {name: found.flatten()[:0]},
        "unbounded": lambda: {name: torch.full_like(found.double(), math.inf).to(torch.float32)},
        "huge": lambda: {name: torch.full(found.shape, 3e38)},
        "elsewhere": lambda: {
            re.sub(r"\d+", str(chance.choice([7, 65, 10**5])), name) + chance.choice(["", ".x"]): found
        },
        "beside": lambda: {name: found, chance.choice(["layers.9.x", "x", "d2t", "t2d", "bias"]): found.clone()},
        "many": lambda: {name: found, **{f"layers.{i}.x.weight": torch.zeros(1) for i in range(1, 3000)}},
    }
    way = chance.choice([*ways, "bytes"])
    if way == "bytes":
        content = bytearray(path.read_bytes())
        content[chance.randrange(min(len(content), 2000))] = chance.randrange(256)
        path.write_bytes(content[: chance.choice([len(content), chance.randrange(len(content))])])
        return f"{path.name}: bytes"
    save_file({**{other: tensor for other, tensor in tensors.items() if other != name}, **ways[way]()}, path)
    return f"{path.name}: {name} {way}"


def copied(sound: Sound, folder: Path) -> Path:
    """A copy, in the place of an earlier one."""
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(sound.folder, folder))


def damaged(sound: Sound, folder: Path, chance: random.Random) -> str:
    """Write a copy with one thing or two that are wrong; what they are."""
    copied(sound, folder)
    configs = sorted(path for path in folder.rglob("*config.json") if path.name != "generation_config.json")
    weights, done = sorted(folder.rglob("*.safetensors")), []
    for _ in range(chance.choice([1, 1, 2])):
        if weights and chance.random() < 0.2:
            done.append(damage_tensors(path := chance.choice(weights), chance))
            weights.remove(path)  # it may be no safetensors file any more
        else:
            done.append(damage_config(chance.choice(configs), chance))
    return "; ".join(done)


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """Within, no more processor time and memory are taken than a small repository may."""
    Path("/proc/self/clear_refs").write_text("5")  # the most that was in memory is counted anew
    before, begin = _memory("VmRSS"), time.process_time()
    yield
    seconds, megabytes = time.process_time() - begin, _memory("VmHWM") - before
    assert seconds < MOST_SECONDS, f"{what}: {seconds:.1f} s"
    assert megabytes < MOST_MEGABYTES, f"{what}: {megabytes:.0f} MB"


def _memory(name: str) -> float:
    return int(re.findall(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def check(sound: Sound, folder: Path, what: str) -> bool:
    """Whether a damaged copy is refused, with what is wrong and what to do; else its draft changes no text."""
    refusal = None
    with bounded(what):
        if sound.load is from_pretrained:
            inspect(Repository(str(folder)))
        try:
            assistant = sound.load(folder, sound.target)
        except (ValueError, FileNotFoundError, ImportError) as error:  # the last: a package that its config names
            refusal = str(error)
        else:
            text = greedy(sound.target, assistant, TEXT, max_new_tokens=4, pad_token_id=0)
            assistant.detach()
    if refusal is None:
        assert text == sound.text, what
        return False
    assert re.search(CURES, refusal), f"{what}: {refusal}"
    return True
