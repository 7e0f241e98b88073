"""Measure the gain of an acceptance head from further inputs: the target's states, or the last verifications.

    specdecpp train --config heads.yaml --stage rollouts
    python examples/head_inputs.py heads.yaml ASSISTANT [COST]

`heads.yaml` names a target, prompts, and test sets under `evaluation`. ASSISTANT is a folder or Hub id with a head of
`inputs="before"`. COST is the cost of a draft step in target passes, 0.09 by default. Chains are drafted along the
answers. Small networks, fitted on the answers, correct the head's log-odds from an increasing number of inputs,
starting with the head's own inputs. On the test sets they are compared by AUC (higher is better), by KL to the true
probability in nats, and by the time of a generated token in target passes under the threshold rule, with the threshold
that was best on the training answers. Each number is the mean of three fits.
"""

import sys
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.estimators import MODES
from hf_specdecpp.estimation.metrics import auc, binary_kl
from hf_specdecpp.texts import answers
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.evaluation import rule_curves, survivals
from hf_specdecpp.training.recorded_chains import (
    MAX_TOKENS,
    STARTS,
    BranchingText,
    Recorder,
    head_estimates,
    target_states,
)
from hf_specdecpp.training.rollouts import sets_to_evaluate

LAST = 8  # earlier tokens that are used as inputs
STEPS, SEEDS = 400, 3
COLUMNS = {
    "its own inputs": ["index", "log q", "entropy", "margin"],
    "and the target at the last token": ["target's entropy", "target's log p", "target's largest log p"],
    "and the last tokens": ["mean log q", "share of likeliest"],
}


def of_text(ids: list[int], assistant: SpecDecPPAssistant, target: nn.Module) -> Tensor:
    """`[len(ids), 5]`: what is known of the text where a round begins, before the token at each place.

    Of the target its entropy, log p of the token before, and its largest log p there; of the draft the mean log q of
    the last tokens and how often they were its likeliest. Example: a round that begins at place 9 looks at the target's
    distribution after place 7, which token 8 was chosen from, and at tokens 1 to 8.
    """
    reader, drafter = Drafter(target, shares_target=True), assistant.ready_drafter()
    width, tokens = target.config.vocab_size, torch.tensor(ids)[1:, None]
    p = reader.logits(reader.hidden_states(torch.tensor([ids]))[0, :-1], width).log_softmax(-1)
    draft = BranchingText(drafter, ids, target_states(target, drafter, ids)).states[:-1]
    q = drafter.logits(draft, width).log_softmax(-1)
    log_q, is_likeliest = q.gather(1, tokens)[:, 0].clamp_min(-12.0), (q.argmax(-1) == tokens[:, 0]).float()
    found = torch.zeros(len(ids), 5)
    found[2:, 0] = torch.special.entr(p.exp()).sum(-1)[:-1]
    found[2:, 1], found[2:, 2] = p.gather(1, tokens)[:-1, 0], p.amax(-1)[:-1]
    for place in range(2, len(ids)):
        last = slice(max(place - 1 - LAST, 0), place - 1)
        found[place, 3], found[place, 4] = log_q[last].mean(), is_likeliest[last].mean()
    return found


@torch.no_grad()
def rows_of(
    config: TrainingConfig, split: str, sampling: Sampling, assistant: SpecDecPPAssistant, target: nn.Module
) -> dict[str, Tensor]:
    """The candidates of the chains along the answers of a split, with `inputs` `[n, 9]` and the head's `log_odds`."""
    parts, recorder = [], Recorder(assistant, target, sampling, assistant.head.inputs)
    texts = answers.load(config.work, split, sampling.temperature)
    for number, text in enumerate(logging.tqdm(texts, desc=f"{split}, temperature {sampling.temperature:g}")):
        ids, generator = text["input_ids"], torch.Generator().manual_seed(number)
        first, number_of_places = text["prompt_length"] + 1, len(ids) - MAX_TOKENS - text["prompt_length"] - 1
        if number_of_places < STARTS:
            continue
        starts = (first + torch.randperm(number_of_places, generator=generator)[:STARTS]).sort().values.tolist()
        rows = recorder.of_text(ids, starts, generator)
        own = torch.cat((rows["index"][:, None].float().log1p(), rows["scalars"][:, :3]), dim=1)
        rows["inputs"] = torch.cat((own, of_text(ids, assistant, target)[rows["start"]]), dim=1)
        rows["text"] = torch.full_like(rows["start"], number)
        parts.append(rows)
    together = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    raw = head_estimates(assistant.head, together, assistant.ready_drafter())
    calibration = assistant.head.calibration.get(MODES[sampling.greedy])
    together["log_odds"] = raw if calibration is None else calibration.apply(raw, together["index"])
    return together


def correction(rows: dict[str, Tensor], width: int, seed: int) -> nn.Module:
    """A network on the first `width` inputs and the log-odds, whose output is added to the log-odds."""
    torch.manual_seed(seed)
    inputs = torch.cat((rows["log_odds"][:, None], rows["inputs"][:, :width]), dim=1)
    scale = nn.BatchNorm1d(width + 1, affine=False, momentum=1.0)
    network = nn.Sequential(scale, nn.Linear(width + 1, 32), nn.SiLU(), nn.Linear(32, 1))
    nn.init.zeros_(network[-1].weight)
    nn.init.zeros_(network[-1].bias)
    optimiser = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=1e-2)
    for _ in range(STEPS):
        loss = binary_cross_entropy_with_logits(rows["log_odds"] + network(inputs)[:, 0], rows["label"])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return network.eval()


@torch.no_grad()
def corrected(rows: dict[str, Tensor], network: nn.Module | None, width: int) -> Tensor:
    """Estimates `[n]`."""
    if network is None:
        return rows["log_odds"].sigmoid()
    inputs = torch.cat((rows["log_odds"][:, None], rows["inputs"][:, :width]), dim=1)
    return (rows["log_odds"] + network(inputs)[:, 0]).sigmoid()


def times(rows: dict[str, Tensor], estimates: Tensor, cost: float) -> list[float]:
    """Of a generated token in target passes, for each of the thresholds."""

    curves = rule_curves(*survivals(rows, {"head": estimates}, "before"), Costs(cost, (1.0,)).round_seconds(MAX_TOKENS))
    return [1.0 / point.speed for point in curves["head"]]


def main(path: str, name: str, cost: float = 0.09) -> None:
    config = TrainingConfig.from_dict(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=getattr(torch, config.dtype)).eval()
    assistant = SpecDecPPAssistant.from_pretrained(name, target=target)
    lines = ["| temperature | the head corrected by | AUC | KL | time of a token |", "|---|---|---|---|---|"]
    for temperature in config.rollouts.temperatures:
        sampling = config.sampling(temperature)
        fitting = rows_of(config, "train", sampling, assistant, target)
        sets = [rows_of(config, split, sampling, assistant, target) for split in sets_to_evaluate(config)]
        for number, each in enumerate(sets):
            each["text"] += 100_000 * number
        test = {key: torch.cat([each[key] for each in sets]) for key in fitting}
        width = 0
        for title, columns in {"nothing": [], **COLUMNS}.items():
            width += len(columns)
            found = []
            for seed in range(SEEDS if columns else 1):
                network = correction(fitting, width, seed) if columns else None
                before = torch.tensor(times(fitting, corrected(fitting, network, width), cost))
                estimates = corrected(test, network, width)
                best = times(test, estimates, cost)[int(before.argmin())]
                found.append([auc(estimates, test["label"]), binary_kl(estimates, test["label"]), best])
            judged = " | ".join(f"{value:.3f}" for value in torch.tensor(found).mean(0).tolist())
            lines.append(f"| {temperature:g} | {title} | {judged} |")
        texts = [len(rows["text"].unique()) for rows in (fitting, test)]
        lines.append(f"| | {texts[0]} answers fitted on, {texts[1]} measured | | | |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:]))
