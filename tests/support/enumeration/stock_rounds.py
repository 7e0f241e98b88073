"""transformers' own loop, also with every random number replaced, so that rounds can be enumerated."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdecpp import SpecDecPPAssistant, SpecDecPPCandidateGenerator
from hf_specdecpp.generation import candidate_generator
from support.enumeration.exact_distribution import Replay, Tokens
from support.targets.models import tiny

PROMPT, VOCAB = torch.tensor([[1, 0, 2]]), 4


def small(seed: int) -> Any:
    return tiny("llama", seed, vocab_size=VOCAB, num_hidden_layers=1)


def in_their_loop(
    target: Any, assistant: SpecDecPPAssistant, made: list[SpecDecPPCandidateGenerator] | None = None
) -> dict[str, Any]:
    """Arguments with which `target.generate()` runs transformers' loop with generators of ours, which `made` collects.

    The method that transformers asks for a candidate generator is set on the instance: the hook for those who bring
    their own loop or generator. The argument asks for assisted generation without an assistant."""

    def get(self: Any, **kwargs: Any) -> SpecDecPPCandidateGenerator:
        config, processors = kwargs["generation_config"], kwargs["logits_processor"]
        mask = kwargs["model_kwargs"].get("attention_mask")
        generator = SpecDecPPCandidateGenerator(assistant.setup(), config, processors, mask, target=self)
        if made is not None:
            made.append(generator)
        return generator

    target._get_candidate_generator = types.MethodType(get, target)
    return {"prompt_lookup_num_tokens": 1}


def target_distribution(target: PreTrainedModel, temperature: float, top_k: int, penalty: float = 1.0):
    """p(prefix) after repetition penalty, temperature and top-k, computed here."""

    @torch.no_grad()
    def p(prefix: Tokens) -> Tensor:
        text = torch.cat((PROMPT, torch.tensor([prefix], dtype=torch.long)), dim=1)
        scores, seen = target(text).logits[0, -1].double(), text.unique()
        scores[seen] = torch.where(scores[seen] > 0.0, scores[seen] / penalty, scores[seen] * penalty)
        scores = scores / temperature
        return scores.where(scores >= scores.topk(top_k).values[-1], float("-inf")).softmax(dim=-1)

    return p


@pytest.fixture
def enumerate_torch(monkeypatch: pytest.MonkeyPatch):
    """Calls the program with `torch.multinomial` and `torch.rand_like` answered by the replay."""

    def use(replay: Replay) -> None:
        def multinomial(probs: Tensor, num_samples: int) -> Tensor:
            assert num_samples == 1
            return replay.categorical(probs.flatten()).reshape((*probs.shape[:-1], 1))

        def rand_like(ratio: Tensor) -> Tensor:
            # What transformers compares with the ratio p/q: 0 is always accepted, 2 never.
            answers = [0.0 if replay.bernoulli(min(1.0, float(each))) else 2.0 for each in ratio.flatten()]
            return torch.tensor(answers).reshape(ratio.shape)

        monkeypatch.setattr(torch, "multinomial", multinomial)
        monkeypatch.setattr(torch, "rand_like", rand_like)
        monkeypatch.setattr(candidate_generator, "TorchRandomness", lambda: replay)  # same, with our bernoulli

    return use
