"""The target's side of a call (`TargetSide`), which owns its cache and how passes run: of one text (`OneTarget`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specdecpp.generation.captured.text import Captured
from hf_specdecpp.generation.prefix import Prefix, TargetText, try_pass
from hf_specdecpp.generation.refusals import check_numbers, check_prompt
from hf_specdecpp.generation.text import Round, Text
from hf_specdecpp.models.causal_lm import CausalLM, cache_among, input_device
from hf_specdecpp.models.cpu_products import FasterProducts
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.throughput.target_passes import TargetPasses, passes_of

MOST_PENDING = 16  # tokens that a target with recurrent layers reads again and again before a round settles them


class TargetSide(Protocol):
    """What the loop asks of the target.

    Attributes:
        model: the target.
        passes: what its passes take, and which products they run on.
    """

    model: CausalLM
    passes: TargetPasses

    @property
    def products(self) -> FasterProducts:
        """The context within which passes are made."""

    def read_prompt(self, rounds: Sequence[Round], input_ids: Tensor) -> None:
        """Read the prompts as plain `generate()` does: the `outputs` of the rounds."""

    def begin(self, texts: Sequence[Text]) -> None:
        """Told once, before the first round."""

    def prepare(self, texts: Sequence[Text]) -> None:
        """What a round needs and is not counted among its seconds."""

    def make_whole_round(self, texts: Sequence[Text]) -> bool:
        """Make a round that is captured from its first step to its last, where that can be done."""

    def room(self, text: Text) -> int | None:
        """How many candidates the next pass has room for; `None`: any number."""

    def states_of(self, text: Text) -> Tensor | None:
        """`[1, n, width]` that the draft reads, at the n tokens that the last pass left in the text."""

    def read(self, rounds: Sequence[Round]) -> None:
        """One pass over the last token of each text and its candidates: `outputs` and `width` of the rounds."""

    def keep(self, rounds: Sequence[Round]) -> None:
        """Leave the cache at what was emitted."""

    def stays(self, texts: Sequence[Text]) -> list[bool]:
        """Which texts go on."""

    def select(self, texts: Sequence[Text], places: Sequence[int]) -> None:
        """Of `texts` those at `places` go on."""

    def complete(self, texts: Sequence[Text]) -> None:
        """After the last round: leave the cache as plain `generate()` leaves it."""

    def roll_back(self) -> None:
        """After an exception: leave the cache, which may be the user's, at what was emitted."""

    def end(self) -> None:
        """Told last, whatever happened."""

    def output(self, texts: Sequence[Text]) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate()` returns."""


class OneTarget:
    """The target's side of one text. Nothing that it holds may hold it: in a circle, caches stay until garbage is
    collected.

    Args:
        model: the target.
        text: that it reads.
        config: of the generation.
        model_kwargs: the forward's other arguments, the cache among them.

    Attributes:
        prefix: what was read, in its cache or in captured rooms.
    """

    def __init__(self, model: CausalLM, text: Text, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
        self.model, self.config, self.text, self.generator = model, config, text, text.generator
        self.stats, setup = text.stats, text.generator.setup
        self.states = TargetStates(model, None if self.generator.rests else setup.drafter.reads)
        self.prefix: TargetText = Prefix(model, self.states.asked_for(model_kwargs))
        self.generator.session.share(self.prefix)
        self.device = input_device(model)
        self.passes = passes_of(model, setup.other_product(model))
        self.captured = Captured(self)

    @property
    def products(self) -> FasterProducts:
        return self.generator.products

    def read_prompt(self, rounds: Sequence[Round], input_ids: Tensor) -> None:
        prefix: Any = self.prefix  # of the target's own passes
        outputs = self.states.catch(self.model._prefill, input_ids, self.config, prefix.model_kwargs)
        cache = cache_among(outputs)
        check_prompt(outputs)
        check_numbers(self.model, outputs.logits, prefix.model_kwargs.get("attention_mask"))
        if self.generator.draws_trees:
            prefix.check_rows(input_ids, cache, getattr(self.config, "_mask_length", None))
        # Not earlier: a sliding-window layer that records would keep the whole prompt.
        cache.activate_past_recording()
        rounds[0].outputs = outputs

    def begin(self, texts: Sequence[Text]) -> None:
        if texts:
            self.captured.begin(self.text.ids)

    def prepare(self, texts: Sequence[Text]) -> None:  # noqa: ARG002
        if self.captured.rounds is not None:
            return
        self.stats.rounds_at_change += self.prefix.is_at_change(self.text.ids)
        self.compare_passes()

    def make_whole_round(self, texts: Sequence[Text]) -> bool:  # noqa: ARG002
        return self.captured.make_round(self.text)

    def room(self, text: Text) -> int | None:
        # Tokens that are read again with every round cost more than one round without candidates, which settles them.
        if self.prefix.pending >= MOST_PENDING or not self.captured.drafts:
            return 0
        return self.prefix.most_candidates(text.ids)

    def states_of(self, text: Text) -> Tensor | None:  # noqa: ARG002
        return self.states.found

    def read(self, rounds: Sequence[Round]) -> None:
        (each,) = rounds
        input_ids, tree = each.text.ids, each.tree
        if tree.is_chain:
            inputs = self.prefix.chain_inputs(input_ids, tree.ids(input_ids.device))
        else:
            families = each.text.verifier.tests_families(input_ids.device)
            inputs = self.prefix.tree_inputs(input_ids, each.rows, families=families)
        each.outputs, each.width = self._forward(inputs, len(tree) + 1), self.prefix.width
        if self.prefix.mark is not None:
            self.stats.state_bytes = self.prefix.mark.num_bytes

    def _forward(self, inputs: dict[str, Any], count: int) -> Any:
        """The target's pass over `count` tokens, in a static cache with dummies after them."""
        timed = self.passes.timed(self.prefix.width, self.generator.products.has_choice, self.device)
        with nullcontext() if self.prefix.is_captured else timed:
            return self.prefix.forward(self.states, inputs, count)

    def keep(self, rounds: Sequence[Round]) -> None:
        (each,) = rounds
        count, kept, path = len(each.tree), each.emitted.kept, each.emitted.path
        in_pass = None if path is None else path.rows
        each.text.records.add_states(each.outputs, kept, count, in_pass, again=self.prefix.pending)
        # All of the prompt; later the last token before the round and the accepted candidates.
        if each.is_prompt:
            rows: Tensor | slice = slice(None)
        elif not count and not self.prefix.pending:
            rows = slice(-1, None)  # the text before it may have been read anew
        elif path is None:
            rows = slice(self.prefix.pending, self.prefix.pending + kept)
        else:
            rows = path.on_device[:kept]
        self.states.keep(rows)
        self.prefix.settle(each.outputs, kept, count, path)

    def try_pass(self, count: int) -> None:
        """Make a pass over the last token and so many candidates, only for it to be captured."""
        try_pass(self.prefix, self._forward, self.text.ids, self.generator.draws_trees, count)

    def compare_passes(self) -> None:
        """Time a pass over one token beside those of the rounds, where these do not tell what it takes."""
        if self.prefix.is_captured:
            return
        tell_it = self.generator.rests and self.device.type == "cpu"
        if tell_it or self.prefix.pending or self.prefix.is_at_change(self.text.ids):
            return
        product = self.passes.missing(1, self.generator.products.has_choice)
        if product is not None:
            begin = time.perf_counter()
            self.passes.make(1, product, self.model, self.prefix.chain_inputs(self.text.ids, []), self.device)
            self.stats.compared_passes += 1
            self.stats.preparing_seconds += time.perf_counter() - begin

    def stays(self, texts: Sequence[Text]) -> list[bool]:
        return [not text.finished for text in texts]

    def select(self, texts: Sequence[Text], places: Sequence[int]) -> None:
        """Nothing goes on after the only text."""

    def complete(self, texts: Sequence[Text]) -> None:  # noqa: ARG002
        with self.products:
            self.prefix.read_pending(self.text.ids)

    def roll_back(self) -> None:
        self.captured.end().roll_back()

    def end(self) -> None:
        self.captured.end().end()

    def output(self, texts: Sequence[Text]) -> Tensor | GenerateDecoderOnlyOutput:  # noqa: ARG002
        if not self.config.return_dict_in_generate:
            return self.text.ids
        return self.text.records.output(self.text.ids, self.prefix.cache)
