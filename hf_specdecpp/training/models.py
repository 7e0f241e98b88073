"""The models of a training run, as far as it has got (`Trained`), and what of them is on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafts.conditioned import FUSION, Fusion, read_fusion
from hf_specdecpp.drafts.kind import Kind
from hf_specdecpp.drafts.stored import OwnFile, Parts
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.files import check_finite, load_tensors, read_json, save_tensors
from hf_specdecpp.hub.repository import ADAPTER_FOLDER, DRAFT_VOCAB, read_head
from hf_specdecpp.models.adapters import ADAPTER_FILES
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.models.early_exit import early_exit
from hf_specdecpp.models.loading import load_model, load_model_config, load_tokenizer
from hf_specdecpp.models.vocabulary import check_same_tokenizer
from hf_specdecpp.texts import answers
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training import draft_vocab
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.resuming import save_json
from hf_specdecpp.training.trainers import process_state

HEAD, HEAD_WEIGHTS, HEAD_CONFIG = "head", "head.safetensors", "head.json"
FUSION_CONFIG, LAYER_CONFIG = "fusion.json", "layer.json"


@dataclass(frozen=True)
class Trained:
    """What the stages after `distill` work with.

    Attributes:
        config: of the run.
        target: its target.
        assistant: what the stages have made so far, attached to `target`.
    """

    config: TrainingConfig
    target: CausalLM
    assistant: SpecDecPPAssistant

    @classmethod
    def load(cls, config: TrainingConfig) -> Trained:
        target = load_target(config)
        return cls(config, target, load_assistant(config, target))

    @property
    def drafter(self) -> Drafter:
        return self.assistant.ready_drafter()

    @property
    def head(self) -> AcceptanceHead:
        """The fitted head, or `ValueError` where there is none."""
        if self.assistant.head is None:
            folder = self.config.work / HEAD
            raise ValueError(f"{folder} has no fitted head yet: run the stage 'head' before this one.")
        return self.assistant.head

    def texts(self, split: str, sampling: Sampling) -> Dataset:
        """Rollouts of `split` that were written at the temperature of `sampling`; `ValueError` if there are none."""
        return answers.written_at(answers.load(self.config.work, split), sampling.temperature)


def check(config: TrainingConfig) -> None:
    """Find before the rollouts what a later stage would refuse; reads configurations and tokenizers, no weights.

    Raises:
        ValueError: the target cannot be assisted, the draft is not for it, or `layers` or `distill.draft_vocab_size` is
            out of range, or a model is not found.
    """
    target = _without_weights(config.target)
    check_target(target)
    draft = draft_of(config, target, _without_weights)
    if config.distill.draft_vocab_size is not None:
        num_ids = draft_vocab.most_ids(target, draft)
        draft_vocab.check_size(config.distill.draft_vocab_size, draft_vocab.always_kept(target), num_ids)


def draft_of(config: TrainingConfig, target: CausalLM, load: Callable[[str], CausalLM]) -> CausalLM:
    """Some layers of the target, or the model that `load` makes of a name; `ValueError` if it is not for the target."""
    if config.independent_draft is None:
        return early_exit(target, layers_of(config, target))
    draft = load(config.independent_draft)
    check_same_tokenizer(target, draft)
    return draft


def layers_of(config: TrainingConfig, target: CausalLM) -> int | list[int]:
    """The layers of the target that draft."""
    if config.layers is not None:
        return config.layers
    first = config.trainable.first_layers
    return [depth_of(target) - 1] if first is None else first


def reads_of(config: TrainingConfig, target: CausalLM) -> list[int]:
    """The layers of the target that a conditioned draft reads; of 30 layers 2, 15 and 28."""
    depth = depth_of(target)
    return config.reads if config.reads is not None else sorted({min(2, depth - 1), depth // 2, max(depth - 2, 0)})


def depth_of(target: CausalLM) -> int:
    return int(target.config.get_text_config(decoder=True).num_hidden_layers)


def _without_weights(name: str) -> CausalLM:
    with suppress(OSError, ValueError):  # not every draft has one; `check_same_tokenizer` looks into the local cache
        load_tokenizer(name)
    try:
        config = load_model_config(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"The model {name!r} cannot be loaded: it must be a folder or a Hub id. {error}") from None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


@contextmanager
def without_bars() -> Iterator[None]:
    """Load models without a bar each: every stage loads some."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load(name: str, dtype: Any) -> CausalLM:
    """A model on the device of this process."""
    with without_bars():
        return load_model(name, dtype=dtype, device=process_state().device)


def load_target(config: TrainingConfig) -> CausalLM:
    """The target, in the dtype of the run."""
    return load(config.target, config.dtype)


def load_draft_vocab(work: Path) -> Tensor | None:
    """The token ids that a run's draft may propose, or `None` for all."""
    return load_tensors(work / DRAFT_VOCAB)["token_ids"] if (work / DRAFT_VOCAB).is_file() else None


def load_assistant(config: TrainingConfig, target: CausalLM) -> SpecDecPPAssistant:
    """The assistant that the stages have made so far, attached to `target`, with what is in `config.work`."""
    work = config.work
    adapter = work / ADAPTER_FOLDER if (work / ADAPTER_FOLDER / ADAPTER_FILES[1]).is_file() else None
    vocab = load_draft_vocab(work)
    head = load_head(work / HEAD) if (work / HEAD / HEAD_CONFIG).is_file() else None
    if config.ready_made is not None:
        assistant = SpecDecPPAssistant.from_pretrained(config.ready_made)
        assistant.head = head
        assistant.attach(target)
        return assistant
    if config.trains_layer:
        parts = Parts(module=load_layer(config.kind, work))
        assistant = SpecDecPPAssistant(SpecDecPPConfig(draft_kind=config.kind.name), None, head, parts)
        assistant.attach(target)
        return assistant.eval()
    if config.trains_module:
        return SpecDecPPAssistant.from_conditioned(
            target, layers_of(config, target), fusion=load_fusion(work), adapter=adapter, head=head, draft_vocab=vocab
        )
    if config.independent_draft is None:
        return SpecDecPPAssistant.from_early_exit(
            target, layers_of(config, target), adapter=adapter, head=head, draft_vocab=vocab
        )
    with without_bars():
        return SpecDecPPAssistant.from_draft(
            config.independent_draft, target, adapter=adapter, head=head, draft_vocab=vocab
        )


def fingerprint(config: TrainingConfig) -> dict[str, object]:
    """What tells the texts and the draft from others: names, and the contents of what earlier stages wrote."""
    files = (
        Path(answers.FOLDER) / answers.RECORD, Path(ADAPTER_FOLDER) / ADAPTER_FILES[1], Path(DRAFT_VOCAB), Path(FUSION),
        *(map(Path, config.own_files) if config.trains_layer else []),
    )  # fmt: skip
    contents = {str(name): digest(config.work / name) for name in files}
    layers = None if config.independent_draft else config.layers
    return {"target": config.target, "draft": config.named_draft or config.draft, "layers": layers, **contents}


def save_head(head: AcceptanceHead, folder: Path) -> None:
    """Write a head; `head.json` comes last, and a folder with it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(head.state_dict(), folder / HEAD_WEIGHTS, head.to_config(), folder / HEAD_CONFIG)


def load_head(folder: Path) -> AcceptanceHead:
    """The head that `save_head` wrote; `ValueError` if a file is damaged, or the two do not belong together."""
    hint = f"It does not belong to {HEAD_CONFIG} beside it: delete {folder} and fit the head again."
    return read_head(read_json(folder / HEAD_CONFIG), folder / HEAD_WEIGHTS, hint)


def save_fusion(fusion: Fusion, tensors: dict[str, Tensor], work: Path) -> None:
    """Write a fusion's trained tensors, and last its description."""
    _save(tensors, work / FUSION, fusion.to_config(), work / FUSION_CONFIG)


def load_fusion(work: Path) -> Fusion:
    """The fusion that `save_fusion` wrote; `ValueError` if a file is damaged, or the draft is not trained yet."""
    if not (work / FUSION_CONFIG).is_file():
        raise ValueError(f"{work} has no trained fusion of a conditioned draft. Run the stage distill first.")
    return read_fusion(read_json(work / FUSION_CONFIG), work / FUSION)


def save_layer(kind: Kind, model: Any, state: Mapping[str, Tensor], dtype: torch.dtype, work: Path) -> None:
    """Write a draft's own trained layers, whose tensors are in `state`, in half precision, and last what they are."""
    own = own_file(kind)
    tensors, path = own.tensors(model, state, dtype), work / own.name
    check_finite(tensors, path)
    _save(tensors, path, model.settings.to_config(), work / LAYER_CONFIG)


def load_layer(kind: Kind, work: Path) -> Any:
    """The layers that `save_layer` wrote; `ValueError` if a file is damaged, or they are not trained yet."""
    own = own_file(kind)
    path = work / own.name
    if not ((work / LAYER_CONFIG).is_file() and path.is_file()):
        raise ValueError(f"{work} has no trained layers in {path.name}. Run the stage distill first.")
    return own.read(read_json(work / LAYER_CONFIG), path)


def own_file(kind: Kind) -> OwnFile:
    """The file with a draft's own trained layers; `ValueError` where the kind has none."""
    if (own := kind.stored.own) is None:
        raise ValueError(f"A draft of the kind {kind.name} has no layers of its own.")
    return own


def _save(tensors: dict[str, Tensor], weights: Path, description: dict[str, Any], config: Path) -> None:
    save_tensors(tensors, weights)
    save_json(description, config)


def digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
