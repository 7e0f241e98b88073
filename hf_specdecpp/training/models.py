"""The models of a training run (`Trained`), their files in `work_dir`, and the draft vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.draft_kinds.draft_kind import DraftKind, Parts
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.files import check_finite, load_tensors, read_json, save_tensors
from hf_specdecpp.hub.repository import ADAPTER_FOLDER, DRAFT_VOCAB, read_head
from hf_specdecpp.models import loading
from hf_specdecpp.models.adapters import ADAPTER_FILES
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.models.early_exit import early_exit
from hf_specdecpp.texts import answers
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.trainers import process_state, save_json

CONVERSATION = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
HEAD, HEAD_WEIGHTS, HEAD_CONFIG = "head", "head.safetensors", "head.json"
CALIBRATION, EVALUATION_FOLDER = "calibration.json", "evaluation"


@dataclass(frozen=True)
class Trained:
    """Inputs of the stages after `distill`: the target, and the assistant as trained so far, attached to the target."""

    config: TrainingConfig
    target: CausalLM
    assistant: SpecDecPPAssistant

    @classmethod
    def load(cls, config: TrainingConfig) -> Trained:
        target = load(config.target, config.dtype)
        return cls(config, target, load_assistant(config, target))

    @property
    def drafter(self) -> Drafter:
        return self.assistant.ready_drafter()

    @property
    def head(self) -> AcceptanceHead:
        """The fitted head. `ValueError` if there is none yet."""
        if self.assistant.head is None or self.assistant.head.is_published:
            folder = self.config.work / HEAD
            raise ValueError(f"{folder} has no fitted head yet: run the stage 'head' before this one.")
        return self.assistant.head

    def texts(self, split: str, sampling: Sampling) -> Dataset:
        """Return the rollouts of `split` at the temperature of `sampling`. `ValueError` if there are none."""
        return answers.load(self.config.work, split, sampling.temperature)


def check(config: TrainingConfig) -> None:
    """Raise `ValueError` if target, draft or vocabulary size do not fit. Called before rollouts; loads no weights."""
    target = _without_weights(config.target)
    check_target(target)
    draft = draft_of(config, target, _without_weights)
    config.kind.refuse_published(draft)
    if config.distill.draft_vocab_size is not None:
        check_size(config.distill.draft_vocab_size, always_kept(target), most_ids(target, draft))


def draft_of(config: TrainingConfig, target: CausalLM, load: Callable[[str], CausalLM]) -> CausalLM:
    """Return the draft: layers of the target, or `load(name)`. `ValueError` if its tokenizer is not the target's."""
    if config.independent_draft is None:
        return early_exit(target, layers_of(config, target))
    draft = load(config.independent_draft)
    loading.check_same_tokenizer(target, draft, draft.config.get_text_config().vocab_size)
    return draft


def layers_of(config: TrainingConfig, target: CausalLM) -> int | list[int]:
    """The layers of the target that make up the draft, as configured, or the default of the kind of draft."""
    if config.layers is not None:
        return config.layers
    first = config.kind.first_layers
    return [depth_of(target) - 1] if first is None else first


def depth_of(target: CausalLM) -> int:
    return int(target.config.get_text_config(decoder=True).num_hidden_layers)


def _without_weights(name: str) -> CausalLM:
    with suppress(OSError, ValueError):  # drafts may lack a tokenizer; `check_same_tokenizer` reads the local cache
        loading.load_tokenizer(name)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(loading.load_model_config(name), trust_remote_code=False)


def load(name: str, dtype: Any) -> CausalLM:
    """Load a model on the device of this process."""
    with loading.quiet_loading():
        return loading.load_model(name, dtype=dtype, device=process_state().device)


def load_draft_vocab(work: Path) -> Tensor | None:
    """The token ids `[n]` that a run's draft may propose, or `None` for all."""
    return load_tensors(work / DRAFT_VOCAB)["token_ids"] if (work / DRAFT_VOCAB).is_file() else None


def load_assistant(config: TrainingConfig, target: CausalLM) -> SpecDecPPAssistant:
    """Return the assistant as trained so far, from the files in `config.work`, attached to `target`."""
    work = config.work
    head = load_head(work / HEAD) if (work / HEAD / HEAD_CONFIG).is_file() else None
    if config.ready_made is not None:
        return SpecDecPPAssistant.from_draft(config.ready_made, target, head=head)
    if config.kind.own_layers:
        parts, described = Parts(module=load_own(config.kind, work)), SpecDecPPConfig(draft_kind=config.kind.name)
        return SpecDecPPAssistant.of_parts(described, None, parts, target, {"head": head})
    adapter = work / ADAPTER_FOLDER if (work / ADAPTER_FOLDER / ADAPTER_FILES[1]).is_file() else None
    trained: Any = {"head": head, "adapter": adapter, "draft_vocab": load_draft_vocab(work)}
    if config.independent_draft is not None:
        with loading.quiet_loading():
            return SpecDecPPAssistant.from_draft(config.independent_draft, target, **trained)
    layers = layers_of(config, target)
    if config.trains_module:
        return SpecDecPPAssistant.from_conditioned(target, layers, fusion=load_own(config.kind, work), **trained)
    return SpecDecPPAssistant.from_early_exit(target, layers, **trained)


def fingerprint(config: TrainingConfig) -> dict[str, object]:
    """Names of target and draft, and hashes of the files of earlier stages: if equal, rollouts and draft are equal."""
    files = (f"{answers.FOLDER}/{answers.RECORD}", f"{ADAPTER_FOLDER}/{ADAPTER_FILES[1]}", DRAFT_VOCAB)
    contents = {name: digest(config.work / name) for name in (*files, *config.own_files)}
    layers = None if config.independent_draft else config.layers
    return {"target": config.target, "draft": config.named_draft or config.draft, "layers": layers, **contents}


def save_module(module: Any, tensors: dict[str, Tensor], path: Path) -> None:
    """Write finite weights of a head, fusion or own layers, and last their config, which marks them as complete."""
    check_finite(tensors, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, path)
    save_json(module.to_config(), path.with_suffix(".json"))


def load_head(folder: Path) -> AcceptanceHead:
    """Load the fitted head in `folder`. `ValueError` if a file is damaged, or the two files do not match."""
    hint = f"It does not belong to {HEAD_CONFIG} in the same folder: delete {folder} and fit the head again."
    return read_head(read_json(folder / HEAD_CONFIG), folder / HEAD_WEIGHTS, hint)


def load_own(kind: DraftKind, work: Path) -> Any:
    """Load the trained fusion or own layers. `ValueError` if a file is damaged or missing."""
    path = work / kind.own_file
    if not (path.is_file() and path.with_suffix(".json").is_file()):
        raise ValueError(f"{work} has no trained {path.name}. Run the stage distill first.")
    return kind.read_own(read_json(path.with_suffix(".json")), path)


def digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


# The draft vocabulary -------------------------------------------------------------------------------------------------


def choose_vocab(
    answers: Dataset, size: int, always: Sequence[int], num_ids: int, prompts: Sequence[Sequence[int]] = ()
) -> Tensor:
    """The draft vocabulary `[size]`, ascending: the tokens `always`, then the most frequent tokens of the answers.

    If the answers have too few tokens, the most frequent tokens of the prompts follow, and last the lowest ids, because
    tokenizers number tokens by frequency, roughly. `ValueError` unless `len(always) < size < num_ids`."""
    kept = check_size(size, always, num_ids)
    asked = np.bincount(np.concatenate([*map(np.asarray, prompts), []]).astype(np.int64), minlength=num_ids)[:num_ids]
    counts = answer_counts(answers, num_ids)[:num_ids] * (asked.sum() + 1) + asked
    counts[kept] = np.iinfo(counts.dtype).max
    # A stable sort orders tokens of equal frequency by id.
    return torch.as_tensor(np.sort(np.argsort(-counts, kind="stable")[:size]))


def check_size(size: int, always: Sequence[int], num_ids: int) -> list[int]:
    """Return those of the tokens `always` that are below `num_ids`, ascending. `ValueError` as in `choose_vocab`."""
    kept = sorted({token for token in always if token < num_ids})
    if not len(kept) < size < num_ids:
        raise ValueError(
            f"distill.draft_vocab_size={size} must be over {len(kept)} (the end-of-text and chat tokens, always kept) "
            f"and under {num_ids} (the draft's whole vocabulary). Some thousands are usual; leave it out to keep all."
        )
    return kept


def most_ids(target: CausalLM, draft: CausalLM) -> int:
    """Number of token ids that both LM heads have."""
    return min(model.get_output_embeddings().weight.shape[0] for model in (target, draft))


def covered_mass(token_ids: Tensor, answers: Dataset) -> float:
    """Share of the answers' tokens in the draft vocabulary, an upper bound on the acceptance."""
    counts = answer_counts(answers, int(token_ids.max()) + 1)
    return float(counts[token_ids.numpy()].sum() / counts.sum())


def answer_counts(answers: Dataset, num_ids: int) -> np.ndarray:
    """Count each token id in the answers: `[num_ids]` numbers of occurrences, or more if larger ids occur."""
    counts = np.zeros(num_ids, dtype=np.int64)
    for batch in answers.select_columns(["input_ids", "prompt_length"]).iter(batch_size=1000):
        pairs = zip(batch["input_ids"], batch["prompt_length"], strict=True)
        tokens = np.concatenate([np.asarray(ids[length:], dtype=np.int64) for ids, length in pairs])
        found = np.bincount(tokens, minlength=len(counts))
        counts = np.pad(counts, (0, len(found) - len(counts))) + found
    return counts


def always_kept(target: CausalLM) -> list[int]:
    """The target's end-of-sequence ids, and the special tokens that its chat template puts around an answer."""
    ends = [target.generation_config.eos_token_id, target.config.get_text_config(decoder=True).eos_token_id]
    kept = {token for end in ends for token in (end if isinstance(end, list) else [end]) if token is not None}
    tokenizer = loading.tokenizer_of(target)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        kept.add(tokenizer.eos_token_id)
    if tokenizer is not None and tokenizer.chat_template is not None:
        rendered: Any = tokenizer.apply_chat_template(CONVERSATION, tokenize=True, return_dict=True)
        kept |= set(rendered["input_ids"]) & set(tokenizer.all_special_ids)
    return sorted(kept)
