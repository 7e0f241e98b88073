"""Runs a case beside plain `generate()` and says how it went: `run_case`."""

import copy
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

import hf_specdecpp
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu import faster_products, products
from hf_specdecpp.models.cpu.products import ProductTimes
from hf_specdecpp.models.cpu.weight_copies import WeightCopies
from support.fuzz.arguments import arguments, first_prompt, positions_of, random_ids
from support.fuzz.cases import RECORDS, Case
from support.fuzz.models import LORA_MODULES, assistant_for, target_of
from support.targets.outputs import assert_same, assert_same_cache

PACKAGE = str(Path(hf_specdecpp.__file__).parent)
# Between the two likeliest tokens of plain generation. Passes over one and over several tokens round differently.
NEAR_TIE = {"float64": 1e-4, "float32": 1e-2}
TOLERANCE = {"float64": 1e-5, "float32": 2e-2}  # of side outputs
ALWAYS = ProductTimes((2e-9,) * 4, (1e-9,) * 4, least=1, most=24)  # copies of weights are the faster ones
# Frames of a round: an exception from there comes too late to be a refusal.
ROUND = {"round", "propose"}


@dataclass
class Result:
    """`kind`: "equal", "refused" (by us, before anything was emitted), "raised" (in plain, too), "tie" (plain's own two
    likeliest tokens are too close to tell), "NaN" (plain computes it) or "wrong"; `detail`: why, or what differs."""

    kind: str
    detail: str = ""
    accepted: int = 0


@dataclass
class Answer:
    """What one `generate()` call did."""

    output: Any = None
    error: Exception | None = None
    streamed: list[list[int]] | None = None

    @property
    def sequences(self) -> Tensor:
        return self.output if isinstance(self.output, Tensor) else self.output.sequences


class Different(AssertionError):  # noqa: N818 - a finding
    """Ours is not what plain `generate()` did."""


class Conversation:
    """One side's state from turn to turn: the text so far, its mask and positions, the cache."""

    def __init__(self, case: Case, target: CausalLM) -> None:
        self.case, self.target = case, target
        self.ids, self.mask = first_prompt(case)
        self.cache = DynamicCache(config=target.config.get_text_config(decoder=True)) if case.cache != "none" else None
        self.hidden = 0  # tokens of the text that are not passed again, since the cache holds them
        self.shown = self.ids
        self.positions = positions_of(case, self.ids, self.mask)

    def answer(self, turn: int, assistant: Any, **others: Any) -> Answer:
        """Generate the turn's answer from the state, which stays as it is but for the cache."""
        inputs = arguments(self.case, turn, self.shown.shape[1]) | others
        if self.mask is not None:
            inputs["attention_mask"] = self.mask
        if self.positions is not None:
            inputs["position_ids"] = self.positions[:, self.hidden :]
        if self.cache is not None:
            inputs["past_key_values"] = self.cache
        streamer = inputs.get("streamer")
        answer = Answer(streamed=streamer.puts if streamer is not None else None)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                answer.output = self.target.generate(self.shown, assistant_model=assistant, **inputs)
        except Exception as error:  # noqa: BLE001 - whatever either side raises is compared
            answer.error = error
        return answer

    def copy(self) -> "Conversation":
        """As it is now, with a cache of its own."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    def go_on(self, answer: Answer, turn: int) -> None:
        """Take up the answer and the user's next words."""
        words = random_ids(self.case.seed + turn + 1, 1 + (self.case.seed + turn) % 5)
        self.ids = torch.cat((self.ids[:, : self.hidden], answer.sequences, words), dim=1)
        if self.mask is not None:
            self.mask = torch.nn.functional.pad(self.mask, (0, self.ids.shape[1] - self.mask.shape[1]), value=1)
        if self.positions is not None:
            further = torch.arange(1, self.ids.shape[1] - self.positions.shape[1] + 1)
            self.positions = torch.cat((self.positions, self.positions[:, -1:] + further), dim=1)
        if self.case.cache == "new ids" and self.cache is not None and _counts_tokens(self.cache):
            self.hidden = self.cache.get_seq_length()
        self.shown = self.ids[:, self.hidden :]


def _counts_tokens(cache: Any) -> bool:
    """Whether a cache knows how many tokens it holds: Mamba's recurrent states do not."""
    return any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def run_case(case: Case) -> Result:
    """Run it and compare; never raises for what the case does."""
    target = target_of(case.family, case.attention, case.dtype)
    if case.weights != "as they are":
        target = copy.deepcopy(target)
        for parameter in target.parameters() if case.seed % 2 else ():
            parameter.data = parameter.data.bfloat16().to(parameter.dtype)  # so that float16 holds it
    assistant: Any = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assistant = assistant_for(case, target)
        if case.weights == "as they are":
            return _compare(case, target, assistant)
        with (  # tiny layers would have no copies, and others only after a while
            mock.patch.object(faster_products, "LEAST_ELEMENTS", 1),
            mock.patch.object(products, "_measure", return_value=ALWAYS),
            mock.patch.object(products, "_measured", {}),
            mock.patch.object(products, "_first", {}),
            mock.patch.object(WeightCopies, "prepared", WeightCopies.current),
        ):
            if case.weights != "copies":
                _change_weights(case, target, assistant)
            return _compare(case, target, assistant)
    except Different as different:
        return Result("wrong", str(different))
    except Exception as error:  # noqa: BLE001 - a constructor that fails without a reason is a finding, too
        return Result("refused", _reason(error)) if _is_refusal(error) else Result("wrong", _described(error))
    finally:
        if assistant is not None:
            assistant.detach()


def _compare(case: Case, target: CausalLM, assistant: Any) -> Result:
    plain, ours = Conversation(case, target), Conversation(case, target)
    accepted = 0
    for turn in range(case.turns):
        is_last = turn == case.turns - 1
        before, expected = plain.copy(), plain.answer(turn, None)
        actual = ours.answer(turn, None if case.earlier == "plain" and not is_last else assistant)
        if actual.error is not None and _is_refusal(actual.error):
            return Result("refused", _reason(actual.error))
        if expected.error is not None:
            return Result("raised", _described(expected.error))
        if actual.error is not None:
            raise Different(f"turn {turn}: {_described(actual.error)}")
        if _has_nan(plain.cache, expected.output):
            return Result("NaN")
        accepted += assistant.stats.accepted
        if not torch.equal(actual.sequences, expected.sequences):
            if (gap := _gap(before, expected, actual, turn)) < NEAR_TIE[case.dtype]:
                return Result("tie", f"{gap:.1g}")
            found, wanted = (each.sequences[0].tolist() for each in (actual, expected))
            raise Different(f"turn {turn}: tokens {found} instead of {wanted}")
        _compare_outputs(case, ours, plain, actual, expected, turn)
        if not is_last:
            plain.go_on(expected, turn)
            ours.go_on(actual, turn)
    return Result("equal", accepted=accepted)


def _compare_outputs(
    case: Case, ours: Conversation, plain: Conversation, actual: Answer, expected: Answer, turn: int
) -> None:
    if type(actual.output) is not type(expected.output):
        raise Different(f"turn {turn}: a {type(actual.output).__name__}, not a {type(expected.output).__name__}")
    if expected.streamed is not None and sum(actual.streamed or [], []) != sum(expected.streamed, []):
        raise Different(f"turn {turn}: streamed {actual.streamed} instead of {expected.streamed}")
    for name in RECORDS:
        if name == "logits" and "in place" in case.processors:
            continue  # in plain `generate()` such a processor writes into the raw logits, too; ours stay raw
        if name in case.records:
            values = getattr(actual.output, name), getattr(expected.output, name)
            _same(case, f"turn {turn}: {name}", assert_same, *values)
    if plain.cache is not None:
        _same(case, f"turn {turn}: cache", assert_same_cache, ours.cache, plain.cache)
    elif case.records:
        caches = actual.output.past_key_values, expected.output.past_key_values
        _same(case, f"turn {turn}: returned cache", assert_same_cache, *caches)


def _has_nan(cache: Any, output: Any) -> bool:
    """Whether plain generation computed NaN, as some models do at masked tokens, from where it spreads.

    Masked rows count nothing, but 0 times NaN is NaN: how far it spreads depends on which rows a cache still has."""
    cache = cache or getattr(output, "past_key_values", None)
    layers = [layer for layer in getattr(cache, "layers", []) if getattr(layer, "keys", None) is not None]
    return any(bool(layer.keys.isnan().any()) for layer in layers)


def _same(case: Case, what: str, check: Any, ours: Any, plain: Any) -> None:
    try:
        check(ours, plain, TOLERANCE[case.dtype])
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise Different(f"{what}: {str(error)[:400] or frame.line}") from error


def _gap(before: Conversation, expected: Answer, actual: Answer, turn: int) -> float:
    """Between plain's two likeliest tokens where the texts part, raw and processed: the smaller of both."""
    start = before.shown.shape[1]
    ours, plain = actual.sequences[0, start:].tolist(), expected.sequences[0, start:].tolist()
    at = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), None)
    if at is None:
        return float("inf")
    records = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
    again = before.answer(turn, None, do_sample=False, **records)
    gaps = []
    for record in (again.output.scores, again.output.logits):
        if at < len(record):
            first, second = record[at][0].topk(2).values
            gaps.append(float(first - second) / max(1.0, abs(float(first))))
    return min(gaps, default=float("inf"))


def _change_weights(case: Case, target: CausalLM, assistant: Any) -> None:
    """Answer once, so that copies are made, then change the target's weights as users do."""
    if case.weights == "merged":
        modules = {name.rpartition(".")[2] for name, module in target.named_modules() if hasattr(module, "weight")}
        wrapped = get_peft_model(target, LoraConfig(r=2, target_modules=sorted(modules & LORA_MODULES)))
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_" in name:
                    parameter.fill_(0.2)
    target.generate(random_ids(1, 4), assistant_model=assistant, max_new_tokens=4, do_sample=False, pad_token_id=0)
    if case.weights == "merged":
        wrapped.merge_adapter()
        return
    for name, parameter in target.named_parameters():
        if parameter.dim() != 2 or "embed" in name:
            continue
        if case.weights == "scaled":
            parameter.data.mul_(-1.0 if "v_proj" in name else 1.5)
        elif case.weights == "copied":
            parameter.data.copy_(parameter.data.roll(1, 0))
        elif case.weights == "replaced":
            parameter.data = parameter.data.roll(1, 0)


def _is_refusal(error: Exception | None) -> bool:
    """Whether it is a `ValueError` that our code, or transformers' check of an assistant, raised before any round; or
    what transformers says of a target without a cache."""
    if isinstance(error, RuntimeError) and str(error).startswith("Assisted decoding requires a cache"):
        return True
    if not isinstance(error, ValueError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    ours = {frame.name for frame in frames if frame.filename.startswith(PACKAGE)}
    by_transformers = frames[-1].name in ("_assisted_decoding", "_validate_generation_mode")
    return not ROUND & ours and (by_transformers or frames[-1].filename.startswith(PACKAGE))


def _reason(error: Exception) -> str:
    return str(error)[:70]


def _described(error: Exception | None) -> str:
    if error is None:
        return "no exception"
    frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-4:]]
    return f"{type(error).__name__}: {str(error)[:300]} ({' < '.join(reversed(frames))})"
