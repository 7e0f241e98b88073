"""What an assistant brings to one generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu_products import FasterProducts, PackedWeights
from hf_specdecpp.throughput.memory import Memory


@dataclass(frozen=True)
class DraftSetup:
    """The parts that draft for a target; `SpecDecPPAssistant.setup()` makes it. A generation reads it only.

    Attributes:
        drafter: the draft model.
        head: the acceptance head, or `None`: then the draft's own probability takes its place.
        speculation: the settings of a run.
        memory: what was learned of targets, which generations add to.
        packed: packed copies of weights, which a generation renews.
        rates: `SpecDecPPConfig.acceptance_by_rank`, for static trees without a shape.
        rows: sequences in the batch, which share the target's passes.
        vocab_size: width of the target's logits, where no target says it.
    """

    drafter: Drafter
    head: AcceptanceHead | None = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    memory: Memory = field(default_factory=Memory)
    packed: PackedWeights = field(default_factory=PackedWeights)
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    rows: int = 1
    vocab_size: int | None = None

    def products(self, target: CausalLM | None) -> FasterProducts:
        """The context in which target and draft compute as `cpu_products` and `pack_weights` say.

        Packed copies are made, checked or dropped now. Where no target is given, which is the unattached door, there
        are none: nothing would say when they are no longer needed.
        """
        config = self.speculation
        packs = config.cpu_products == "auto" and config.pack_weights and target is not None
        if not packs:
            self.packed.clear()
        if config.cpu_products == "off":
            return FasterProducts()
        models = [] if self.drafter.steps is not None else [self.drafter.model, self.drafter]
        return FasterProducts(*([] if target is None else [target]), *models, packed=self.packed if packs else None)
