"""One of the processes of a target that is spread over two, as `generation/test_ranks.py` starts them. It
writes what it saw to `FOLDER/rank-N.json`.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 rank_program.py FOLDER texts|dies|fails"""

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from support.targets.models import partly_agreeing, prompt, random_layer
from support.targets.watchers import Replaces, unnoticed

RULES: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 3},
    "threshold": {"rule": "threshold"},
    "throughput": {"rule": "throughput", "costs": {"draft": 0.1, "verify": [1.0, 1.1, 1.2, 1.3]}},
    "unmeasured": {"rule": "throughput"},  # ranks cannot time passes in step: `"threshold"` decides
    "lookup": {"rule": "fixed", "num_tokens": 3, "lookup": True},
    "tree": {"tree": "dyspec", "tree_budget": 4},  # refused
}
GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
STATIC: dict[str, Any] = {**GREEDY, "cache_implementation": "static", "disable_compile": True}
SAMPLED: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "pad_token_id": 0}


def texts(target: Any, draft: Any, rank: int) -> dict[str, Any]:
    """Texts by rule, or why there are none; each rank has other random numbers."""
    found: dict[str, Any] = {"plain": target.generate(prompt(), **GREEDY).tolist()}
    found["plain written"] = target.generate(prompt(), **GREEDY, stopping_criteria=[Replaces()]).tolist()
    for name, settings in RULES.items():
        speculation = SpeculationConfig(**{"rule": "threshold", **settings})
        assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=speculation)
        try:
            found[name] = target.generate(prompt(), assistant_model=assistant, **GREEDY).tolist()
        except ValueError as refused:
            found[name] = str(refused)
            continue
        found[f"{name} static"] = target.generate(prompt(), assistant_model=assistant, **STATIC).tolist()
        written = target.generate(prompt(), assistant_model=assistant, **GREEDY, stopping_criteria=[Replaces()])
        found[f"{name} written"] = written.tolist()
        found[f"{name} accepted"] = [assistant.stats.accepted, assistant.stats.drafted]
        torch.manual_seed(rank)
        found[f"{name} sampled"] = target.generate(prompt(), assistant_model=assistant, **SAMPLED).tolist()
        found[f"{name} random state"] = torch.rand(1).item()
    for name, make in {
        "early exit": lambda: SpecDecPPAssistant.from_early_exit(target, 2),
        "eagle3": lambda: SpecDecPPAssistant.from_draft(random_layer(target), target),
    }.items():
        try:
            make().detach()
        except ValueError as refused:
            found[name] = str(refused)
    return found


def dies(target: Any, draft: Any, rank: int) -> dict[str, Any]:
    """The second rank is gone in its fourth pass."""
    passes: list[int] = []

    def count(*_: Any) -> None:
        passes.append(1)
        if rank == 1 and len(passes) == 4:
            os._exit(1)

    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig(**RULES["fixed"]))
    target.model.register_forward_pre_hook(unnoticed(count))
    return _error(target, assistant)


def fails(target: Any, draft: Any, rank: int) -> dict[str, Any]:
    """The draft, which the first rank alone runs, raises in its fourth step."""
    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig(**RULES["fixed"]))
    steps: list[int] = []

    def count(*_: Any) -> None:
        steps.append(rank)
        if len(steps) == 4:
            raise ValueError("the draft is broken")

    assistant.ready_drafter().model.model.register_forward_pre_hook(count)
    return {**_error(target, assistant), "steps": len(steps)}


def _error(target: Any, assistant: Any) -> dict[str, Any]:
    try:
        target.generate(prompt(), assistant_model=assistant, **GREEDY)
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def main(folder: Path, what: str) -> None:
    rank = int(os.environ["RANK"])
    meeting: dict[str, Any] = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": 2}
    # A busy machine may start the other rank minutes later.
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=20), **meeting)
    config = DistributedConfig(tp_size=2, tp_plan="auto")
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64, distributed_config=config)
    draft = partly_agreeing(AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64), 0.9)
    found = {"texts": texts, "dies": dies, "fails": fails}[what](target.eval(), draft.eval(), rank)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # a group whose other process is gone cannot be taken down in order


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
