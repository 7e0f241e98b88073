"""The ways to an assistant (`Making`): from a repository, from a draft model, from layers of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_specdecpp.config.assistant import SpecDecPPConfig, special_tokens
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.drafting.drafter import Drafter, check_head
from hf_specdecpp.drafts.conditioned import Fusion
from hf_specdecpp.drafts.eagle3.model import Eagle3Model
from hf_specdecpp.drafts.kind import Kind, Loading
from hf_specdecpp.drafts.known import (
    CONDITIONED,
    EAGLE3,
    EARLY_EXIT,
    LOOKUP,
    draft_name,
    in_memory,
    kind_of,
    multi_token_layers,
    override,
    ready_made,
)
from hf_specdecpp.drafts.lookup import NoDraft
from hf_specdecpp.drafts.stored import Parts, is_model
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.files import Repository
from hf_specdecpp.generation.doors.unattached import ModelInterface
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.hub.repository import check_hub_kwargs, find_adapter, load_config, load_parts
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.adapters import add_adapter
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.models.cpu_products import PackedWeights
from hf_specdecpp.models.early_exit import check_layers
from hf_specdecpp.models.int8_products import quantise
from hf_specdecpp.models.loading import load_draft
from hf_specdecpp.models.target_states import StateReader
from hf_specdecpp.provenance import commit_of
from hf_specdecpp.throughput.memory import Memory

if TYPE_CHECKING:
    from typing_extensions import Self


class Making(ModelInterface):
    """How an assistant is made of its parts. `SpecDecPPAssistant` brings what is done with it."""

    config: SpecDecPPConfig
    config_class = SpecDecPPConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    attach: Any

    def __init__(
        self,
        config: SpecDecPPConfig,
        drafter: Draft | None = None,
        head: AcceptanceHead | None = None,
        parts: Parts | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> None:
        super().__init__(config)
        self.kind = kind_of(config)
        self.parts, self.head = parts or Parts(), head
        self.drafter: Any = drafter
        self.speculation = SpeculationConfig.from_dict(config.speculation) if speculation is None else speculation
        self.stats = SpeculationStats()
        self.memory = Memory(config.calibration)
        self.packed, self.int8 = PackedWeights(), PackedWeights(quantise)
        if head is not None and isinstance(drafter, Drafter):
            check_head(head, drafter, draft_name(config))

    @property
    def speculation(self) -> SpeculationConfig:
        """The settings of a run."""
        return self._speculation

    @speculation.setter
    def speculation(self, value: SpeculationConfig) -> None:
        if not isinstance(value, SpeculationConfig):
            raise TypeError(
                f"speculation={value!r} must be a SpeculationConfig, such as SpeculationConfig(rule='throughput')."
            )
        self._speculation = value

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        repo_or_folder: str | Path,
        target: CausalLM | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        speculation: SpeculationConfig | None = None,
        draft: CausalLM | str | Path | None = None,
        merge: bool = True,
        eagle3: dict[str, Any] | None = None,
        default: bool = False,
        **hub_kwargs: Any,
    ) -> Self:
        """Load draft, adapter, head and options from a Hub repo or a folder.

        Args:
            repo_or_folder: Hub id (`org/repo`, or `org/repo/folder`) or local folder, as written by `save_pretrained`
                or `specdecpp train`; or an EAGLE-3 or DFlash draft that others trained, in the original dialect or that
                of `speculators`, or a Gemma 4 assistant.
            target: attach to this model. A draft that rests on the target needs it here or in a later `attach`.
            revision, subfolder: of the assistant's repository.
            dtype, device: of an independent draft; by default the target's, without a target the draft's own and CPU.
            speculation: replaces the repository's defaults.
            draft: a copy of the draft that the repository names, where that cannot be reached: its folder, or a model
                object, which is left as and where it is.
            merge: of an early exit, as in `from_early_exit`.
            eagle3: how to read an EAGLE-3 draft of others where its config is silent or wrong: `norm_before_residual`,
                `norm_output`, `rope_theta`, `own_embeddings=False` for the target's, or `reads`, the target's layers
                whose outputs it reads, counted from 0. `specdecpp inspect REPO --target ID` finds out.
            default: make it the target's default assistant, which calls without one use, too (`attach`).
            hub_kwargs: `token`, `cache_dir`, `local_files_only`, `force_download`: passed to every download.

        Raises:
            ValueError: a file is damaged, something does not fit, or the assistant was trained for other tokens.
            TypeError: an argument is not known, or of another type.
            OSError, huggingface_hub errors: a file or repository is missing or cannot be reached.
        """
        hub_kwargs = check_hub_kwargs(hub_kwargs)
        target = None if target is None else causal_lm.base_model(target)
        repository = Repository(str(repo_or_folder), revision, subfolder, hub_kwargs)
        config = load_config(repository)
        if eagle3 is not None:
            override(config, eagle3)
        head, parts = load_parts(repository, config, draft)
        parts = replace(parts, merge=merge)
        kind, how = kind_of(config), Loading(draft, target, dtype, device, hub_kwargs)
        drafter = None if kind.rests_on == "target" else kind.draft(config, parts, how)
        assistant = cls(config, drafter, head, parts, speculation)
        if device is None and (placed := drafter or target) is not None:
            device = placed.device
        if device is not None:
            assistant.to(device)  # type: ignore[arg-type]
        assistant._begin_with(target, default)
        return assistant.eval()

    @classmethod
    def from_draft(
        cls,
        draft_model_or_id: CausalLM | str | Path,
        target: CausalLM | None = None,
        adapter: str | Path | None = None,
        head: AcceptanceHead | None = None,
        draft_vocab: Tensor | Sequence[int] | None = None,
        speculation: SpeculationConfig | None = None,
        default: bool = False,
    ) -> Self:
        """Draft with a model of its own.

        Args:
            draft_model_or_id: a causal LM (a PEFT model too), its Hub id or its folder; or those of a DFlash draft or
                of a Gemma 4 assistant.
            target: attach to this model; a draft given by name is loaded in its dtype and on its device.
            adapter: folder or Hub id of a PEFT adapter for the draft. It is merged into a draft given by name; a model
                object is left as it is.
            head: acceptance head trained for this draft.
            draft_vocab: token ids that the draft may propose, all by default.
            speculation: settings of a run.
            default: make it the target's default assistant, which calls without one use, too (`attach`).

        Raises:
            ValueError: the draft, head or vocabulary does not fit.
        """
        if (kind := ready_made(draft_model_or_id)) is not None:
            if adapter is not None or draft_vocab is not None:
                raise ValueError(f"A {kind.name} draft is taken as it is: leave adapter and draft_vocab out.")
            return cls._from_ready_made(kind, draft_model_or_id, target, head, speculation, default)
        target = None if target is None else causal_lm.base_model(target)
        draft = load_draft(draft_model_or_id, None, target)
        config = SpecDecPPConfig(
            draft_id=draft.config.name_or_path or None, draft_revision=commit_of(draft), **special_tokens(draft)
        )
        parts = _parts(adapter, draft_vocab)
        if parts.adapter is not None:
            draft = add_adapter(draft, parts.adapter, merge=isinstance(draft_model_or_id, str | Path))
        assistant = cls(config, Drafter(draft, parts.draft_vocab), head, parts, speculation)
        if head is not None:
            head.to(draft.device)
        assistant._begin_with(target, default)
        return assistant.eval()

    @classmethod
    def from_early_exit(
        cls,
        target: CausalLM,
        layers: int | Sequence[int],
        adapter: str | Path | None = None,
        head: AcceptanceHead | None = None,
        draft_vocab: Tensor | Sequence[int] | None = None,
        speculation: SpeculationConfig | None = None,
        merge: bool = True,
        default: bool = False,
    ) -> Self:
        """Draft with some of the target's own layers, and attach to it. Move the target to its device before.

        Args:
            target: the model to draft for and with. Its tensors are shared, not copied, and never changed.
            layers: number of first layers (4), or ascending indices ([0, 1, 2, 29]).
            adapter, head, draft_vocab, speculation, default: as in `from_draft`.
            merge: merge the adapter into copies of the weights that it changes. `False` saves their memory, which is
                that of `layers`, but a draft step computes the adapter each time and takes about twice as long.

        Raises:
            ValueError: the layers do not exist, or adapter, head or vocabulary do not fit.
        """
        parts = _parts(adapter, draft_vocab, merge)
        return cls._from_layers(EARLY_EXIT, target, layers, parts, head, speculation, default)

    @classmethod
    def from_conditioned(
        cls,
        target: CausalLM,
        layers: int | Sequence[int],
        reads: Sequence[int] = (),
        fusion: Fusion | None = None,
        adapter: str | Path | None = None,
        head: AcceptanceHead | None = None,
        draft_vocab: Tensor | Sequence[int] | None = None,
        speculation: SpeculationConfig | None = None,
        merge: bool = True,
        default: bool = False,
    ) -> Self:
        """Draft with some of the target's own layers that read its hidden states, and attach to it.

        One layer is enough: the states that each verification computes anyway tell it what the target thinks. It has to
        be trained (`specdecpp train --draft conditioned`), and needs an attached target.

        Args:
            target, layers: as in `from_early_exit`.
            reads: indices of the target's layers whose outputs are read beside its final state.
            fusion: trained, with its own `reads`; by default an untrained one.
            adapter, head, draft_vocab, speculation, merge, default: as in `from_early_exit`.

        Raises:
            ValueError: the layers do not exist, or fusion, adapter, head or vocabulary do not fit.
        """
        fusion = fusion or Fusion.untrained(causal_lm.base_model(target), reads)
        parts = _parts(adapter, draft_vocab, merge, fusion)
        return cls._from_layers(CONDITIONED, target, layers, parts, head, speculation, default)

    @classmethod
    def from_eagle3(
        cls,
        target: CausalLM,
        draft: Eagle3Model,
        head: AcceptanceHead | None = None,
        speculation: SpeculationConfig | None = None,
        default: bool = False,
    ) -> Self:
        """Draft with an EAGLE-3 layer in memory, and attach to the target; `from_pretrained` loads one.

        Args:
            target: the model to draft for.
            draft: trained (`specdecpp train --draft eagle3`), or read by `eagle3.checkpoint.read_model`.
            head, speculation, default: as in `from_draft`.

        Raises:
            ValueError: the draft was made for another target, or the head for another draft.
        """
        config = SpecDecPPConfig(draft_kind=EAGLE3.name)
        assistant = cls(config, None, head, Parts(module=draft), speculation)
        assistant.attach(target, default)
        return assistant.eval()

    @classmethod
    def from_mtp(
        cls,
        target: CausalLM,
        source: str | Path | None = None,
        head: AcceptanceHead | None = None,
        speculation: SpeculationConfig | None = None,
        default: bool = False,
    ) -> Self:
        """Draft with the multi-token layers of the target's own checkpoint, and attach to it.

        They are read from its files once, and kept. Move the target to its device before.

        Args:
            target: the model to draft for, of DeepSeek-V3, GLM-4.5 or their like, Qwen3-Next or Qwen3.5.
            source: Hub id or folder of the model's files that hold them, where those that the target was loaded from do
                not (quantised and finetuned ones often lack them).
            head, speculation, default: as in `from_draft`; by default `rule="throughput"`.

        Raises:
            ValueError: there are no such layers, with what to do, or they or the head do not fit the target.
            OSError, huggingface_hub errors: a file is missing or cannot be reached.
        """
        target = causal_lm.base_model(target)
        check_target(target, recurrent=True)
        config, layers = multi_token_layers(target, source)
        assistant = cls(config, None, head, Parts(module=layers), speculation)
        assistant._begin_with(target, default)
        return assistant.eval()

    @classmethod
    def _from_ready_made(
        cls, kind: Kind, draft: Any, target: CausalLM | None, head: AcceptanceHead | None,
        speculation: SpeculationConfig | None, default: bool,
    ) -> Self:  # fmt: skip
        """`from_draft` with a draft that is taken as it is."""
        if is_model(draft):
            config, repository = in_memory(kind, draft), Repository("")
        else:
            config = load_config(repository := Repository(str(draft)))
        module = kind.stored.load(config, repository, draft if is_model(draft) else None)
        assistant = cls(config, None, head, Parts(module=module), speculation)
        assistant._begin_with(target, default)
        return assistant.eval()

    @classmethod
    def from_lookup(cls, target: CausalLM, speculation: SpeculationConfig | None = None, default: bool = False) -> Self:
        """No draft: candidates are what followed in the text before, after the same tokens (`docs/lookup.md`).

        They cost nothing, and any target has them at once. Where texts repeat themselves, as in rewriting, summaries,
        code edits and chat, they are often right; elsewhere nothing is looked up.

        Args:
            target: attach to this model.
            speculation: settings of a run, in which `lookup` is set; by default `rule="throughput"`.
            default: as in `from_draft`.
        """
        assistant = cls(SpecDecPPConfig(draft_kind=LOOKUP.name), NoDraft(), speculation=speculation)
        chosen = speculation or SpeculationConfig(rule="throughput")
        assistant.speculation = replace(chosen, lookup=True)
        assistant.attach(target, default)
        return assistant.eval()

    @classmethod
    def _from_layers(
        cls,
        kind: Kind,
        target: CausalLM,
        layers: int | Sequence[int],
        parts: Parts,
        head: AcceptanceHead | None,
        speculation: SpeculationConfig | None,
        default: bool,
    ) -> Self:
        """What the two above have in common."""
        target = causal_lm.base_model(target)
        check_target(target, recurrent=True)
        chosen = check_layers(layers, target.config.get_text_config(decoder=True).num_hidden_layers)
        config = SpecDecPPConfig(draft_kind=kind.name, draft_layers=chosen)
        assistant = cls(config, None, head, parts, speculation)
        assistant.attach(target, default)
        return assistant.eval()

    def _begin_with(self, target: CausalLM | None, default: bool) -> None:
        """Attach to a target, if there is one."""
        if target is not None:
            self.attach(target, default)
        elif default:
            raise ValueError(
                "default=True makes this the default assistant of a model, and none was given. Pass target=model, or "
                "call assistant.attach(model, default=True)."
            )


def _parts(
    adapter: str | Path | None,
    draft_vocab: Tensor | Sequence[int] | None,
    merge: bool = True,
    module: StateReader | None = None,
) -> Parts:
    """The parts of a draft, from the arguments of `from_draft` and its like."""
    folder = find_adapter(Repository(str(adapter)), None) if adapter is not None else None
    return Parts(folder, None if draft_vocab is None else torch.as_tensor(draft_vocab, dtype=torch.long), module, merge)
