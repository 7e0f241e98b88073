"""Measure the speed on a GPU in under five minutes, without the Hub, and print a report in Markdown.

    python examples/bench_gpu.py > report.md          # or: make bench-gpu
    python examples/bench_gpu.py --dtype float32 --repetitions 8 > exact.md    # are all outputs equal to plain's?
    python examples/bench_gpu.py --dry_run            # on a CPU, in less than a minute: does all of it run?

Targets have the shapes of real models and random weights in bfloat16. The draft is the first layer; the weights of all
other layers are scaled down until the draft is right as often as requested. The output is meaningless, but the times
are real, because the time of a pass depends on shapes alone. With random weights the best tokens are often nearly tied,
so in bfloat16 passes over several tokens and compiled passes often choose the other token. Outputs that first differ at
a near-tie are counted separately. In float32 all outputs should be equal.

Contestants, one after the other on the same prompts: plain and compiled `generate()`
(`cache_implementation="static"`), transformers' assisted generation with the same draft, also with a static cache, with
which it compiles the target's passes, economize (PyPI, `pip install economize==0.3.2`) with the same draft and CUDA
graphs if installed, and this package: captured plain passes, chains of 3, 5 and 7, trees of 15 and 30, and
`rule="throughput"`; in batches only chains. The row of captured plain passes separates the gain of the graphs from the
gain of speculation. `--prompt 4096` or `16384` shows what long texts cost.
"""

import argparse
import gc
import importlib
import importlib.util
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.choosing import assist
from hf_specdecpp.config.speculation import Decisions, SpeculationConfig
from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.early_exit import with_layers
from hf_specdecpp.version import __version__

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 97},
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {
    "ours, 3 candidates": {"rule": "fixed", "num_tokens": 3},
    "ours, 5 candidates": {"rule": "fixed", "num_tokens": 5},
    "ours, 7 candidates": {"rule": "fixed", "num_tokens": 7},
    "ours, tree of 15": {"rule": "fixed", "tree": "dyspec", "tree_budget": 15},
    "ours, tree of 30": {"rule": "fixed", "tree": "dyspec", "tree_budget": 30},
    "ours, throughput": {"rule": "throughput"},
    "ours, throughput, nothing captured": {"rule": "throughput", "graphs": "off"},
    "ours, 5 candidates, compile=True": {"rule": "fixed", "num_tokens": 5, "compile": True},
    "ours, 7 candidates, compile=True": {"rule": "fixed", "num_tokens": 7, "compile": True},
    "ours, tree of 30, compile=True": {"rule": "fixed", "tree": "dyspec", "tree_budget": 30, "compile": True},
    "ours, throughput, compile=True": {"rule": "throughput", "compile": True},
}
IN_BATCHES = ["ours, 3 candidates", "ours, 5 candidates", "ours, throughput", "ours, throughput, nothing captured"]
AT_ALL_RATES = ["ours, 3 candidates", "ours, throughput", "ours, throughput, compile=True"]
DRY_RUN = [  # these come first, so that given arguments override them
    "--device", "cpu", "--shapes", "tiny", "--rates", "0.8", "--new_tokens", "12", "--repetitions", "1", "--no_compile",
    "--ours", "ours, 3 candidates", "ours, tree of 15", "ours, throughput",
]  # fmt: skip
PLAIN, COMPILED, CAPTURED = "plain generate()", "plain generate(), compiled", "plain passes, captured by us"
ASSISTED, ECONOMIZE = "transformers' assisted, 5 candidates", "economize, 5 candidates, its graphs"
PROMPT, SAMPLE = 64, 128  # tokens
NEAR = 4  # units of the dtype's precision, of the best logit


class Times(BaseStreamer):
    """Notes when the prompt and then each token came."""

    def __init__(self) -> None:
        self.noted: list[float] = []

    def put(self, _value: Tensor) -> None:
        self.noted.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left."""


@dataclass
class Result:
    """What one contestant took: seconds to the first token of its first text, of all of this text, of the later ones;
    tokens a pass."""

    first_token: float | None
    first: float
    seconds: list[float]
    passes: float
    texts: list[Tensor]
    note: str


def built(shape: dict[str, Any], device: str, dtype: torch.dtype) -> CausalLM:
    config = LlamaConfig(
        **shape, max_position_embeddings=32768, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        initializer_range=0.05,
    )  # fmt: skip
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(old)
    return model.eval()


@torch.inference_mode()
def set_agreement(target: CausalLM, rate: float) -> float:
    """Scale what all layers but the first add, until the first alone is right about so often in texts of the target;
    how often it is."""
    draft, scale, found = with_layers(target, [0]), 1.0, 0.0
    weights = [
        part.weight for layer in target.model.layers[1:] for part in (layer.self_attn.o_proj, layer.mlp.down_proj)
    ]
    ids = torch.randint(1, target.config.vocab_size, (1, PROMPT), device=target.device)
    for is_own in (False, True, True):  # the text follows from the scale
        if is_own:
            ids = target.generate(
                ids[:, :PROMPT], attention_mask=torch.ones_like(ids[:, :PROMPT]), do_sample=False, max_new_tokens=SAMPLE
            )
        guesses, (low, high) = draft(ids).logits[0, -SAMPLE:].argmax(-1), (1e-4, 10.0)
        for _ in range(14):
            wanted = (low * high) ** 0.5
            torch._foreach_mul_(weights, wanted / scale)
            scale = wanted
            found = float((target(ids).logits[0, -SAMPLE:].argmax(-1) == guesses).float().mean())
            low, high = (low, wanted) if found < rate else (wanted, high)
    return found


class Contest:
    """One target and all who generate with it.

    Args:
        files: an empty folder, or where the draft of this target has been saved.
    """

    def __init__(self, target: CausalLM, new_tokens: int, rows: int, files: Path, prompt: int = PROMPT) -> None:
        self.target, self.new_tokens, self.rows, self.files = target, new_tokens, rows, files
        generator = torch.Generator().manual_seed(0)
        vocab = target.config.vocab_size
        self.prompts = [
            torch.randint(1, vocab, (rows, prompt), generator=generator).to(target.device) for _ in range(4)
        ]

    def generate(self, ids: Tensor, **options: Any) -> Tensor:
        text: Tensor = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=self.new_tokens,
            min_new_tokens=self.new_tokens, **options,
        )  # fmt: skip
        return text.cpu()

    def economize(self, repetitions: int) -> Result:
        """economize with a chain of the same draft, which it reads from files, and with its CUDA graphs."""
        if not any(self.files.iterdir()):
            with_layers(self.target, [0]).save_pretrained(self.files)
        package, technique = (importlib.import_module(f"economize{name}") for name in ("", ".techniques.draft_model"))
        decoding = package.DecodeConfig(cycle_length=6, cuda_graphs=self.target.device.type == "cuda")
        model = package.apply(self.target, technique.DraftModelConfig(model=str(self.files)), decoding=decoding)
        seconds, texts, passes = [], [], 1
        for number in range(-2, repetitions):
            begin = time.perf_counter()
            ids = self.prompts[number % len(self.prompts)]
            found = model.decode_batch([*ids], self.new_tokens)
            texts.append(torch.cat((ids.cpu(), torch.stack([each.tokens.cpu() for each in found])), dim=1))
            seconds.append(time.perf_counter() - begin)
            passes = sum(1 + len(each.acceptance) for each in found)
        return Result(
            None, seconds[0], seconds[2:], self.new_tokens * self.rows / passes, texts[2:], package.__version__
        )

    def run(self, repetitions: int, assistant: SpecDecPPAssistant | None = None, **options: Any) -> Result:
        if assistant is not None:
            options["assistant_model"] = assistant
        streamer, begin = Times() if self.rows == 1 else None, time.perf_counter()
        self.generate(self.prompts[0], streamer=streamer, **options)
        first = time.perf_counter() - begin
        first_token = None if streamer is None else streamer.noted[1] - begin
        self.generate(self.prompts[1], **options)
        seconds, texts = [], []
        for number in range(repetitions):
            begin = time.perf_counter()
            texts.append(self.generate(self.prompts[number % len(self.prompts)], **options))
            seconds.append(time.perf_counter() - begin)
        stats = None if assistant is None else assistant.stats
        note = "" if stats is None else stats.uncaptured or _spent(stats)
        passes = 1.0 if stats is None else stats.tokens_per_pass
        return Result(first_token, first, seconds, passes, texts, note)


def _spent(stats: Any) -> str:
    rounds = max(stats.rounds, 1)
    parts = {"device": stats.target_seconds, "host": stats.overhead_seconds + stats.draft_seconds}
    split = ", ".join(f"{name} {1000 * seconds / rounds:.2f}" for name, seconds in parts.items())
    made = f"{stats.graphs} graphs made in {stats.graph_seconds:.1f} s, which take {stats.graph_bytes / 2**20:.0f} MiB"
    return f"rounds {stats.decided.get('rounds', 'uncaptured')}; ms a round: {split}; {made}"


def contestants(contest: Contest, compiles: bool, fuse: bool, ours: list[str]) -> dict[str, Callable[[int], Result]]:
    """All who take part, by name.

    Args:
        compiles: whether transformers' compiled generation does.
        fuse: whether captured passes with compiled pieces do.
    """
    target = contest.target
    found: dict[str, Callable[[int], Result]] = {PLAIN: contest.run}
    if compiles:
        found[COMPILED] = lambda n: contest.run(n, cache_implementation="static")
    if contest.rows == 1:
        draft = with_layers(target, [0])
        draft.generation_config.num_assistant_tokens, draft.generation_config.num_assistant_tokens_schedule = (
            5,
            "constant",
        )
        draft.generation_config.assistant_confidence_threshold = 0.0
        assisted = partial(contest.run, assistant_model=draft)
        found[ASSISTED] = lambda n: assisted(max(n // 2, 1))
        if compiles:
            found[f"{ASSISTED}, compiled"] = lambda n: assisted(max(n // 2, 1), cache_implementation="static")
    if importlib.util.find_spec("economize") is not None:
        found[ECONOMIZE] = contest.economize
    if contest.rows == 1:
        for name, fuses in ((CAPTURED, False), (f"{CAPTURED}, compile=True", True))[: 1 + fuse]:
            settings = SpeculationConfig(rule="fixed", compile=fuses)
            lookup = assist(target, "lookup", speculation=settings, default=False)
            lookup.decisions = Decisions(lookup_tokens=1)
            found[name] = partial(contest.run, assistant=lookup)
    assistants = {
        name: SpecDecPPAssistant.from_early_exit(target, 1, speculation=SpeculationConfig(**OURS[name]))
        for name in ours
        if contest.rows == 1 or name in IN_BATCHES
    }
    for name, assistant in assistants.items():
        found[name] = partial(contest.run, assistant=assistant)
    return found


def parted(target: CausalLM, ours: Tensor, plain: Tensor) -> list[bool]:
    """For each row `[n]` of two texts `[rows, n]` that are not equal: whether plain's logits of both tokens at the
    first difference are nearly tied, within what rounding in the target's dtype can change."""
    found = []
    for row, (a, b) in enumerate(zip(ours, plain, strict=True)):
        if torch.equal(a, b):
            continue
        place = int((a != b).int().argmax())
        with torch.inference_mode():
            logits = target(plain[row : row + 1, :place].to(target.device)).logits[0, -1].float()
        best, gap = logits.max(), (logits[b[place]] - logits[a[place]]).abs()
        found.append(bool(gap <= NEAR * torch.finfo(target.dtype).eps * best.abs()))
    return found


def said_of(target: CausalLM, ours: list[Tensor], plain: list[Tensor]) -> str:
    """How many texts equal plain's, and where the others part from them."""
    pairs = list(zip(ours, plain, strict=False))
    rows = [near for a, b in pairs for near in parted(target, a, b)]
    said = f"{sum(torch.equal(a, b) for a, b in pairs)} of {len(pairs)}"
    said += f"; {sum(rows)} of {len(rows)} others part at a near tie" if rows else ""
    return said


def measured(contest: Contest, everyone: dict[str, Callable[[int], Result]], repetitions: int, end: float) -> str:
    lines = [
        "| | first token, text (s) | ms a token | x plain | x compiled | tokens a pass | texts equal to plain's | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    results: dict[str, Result] = {}
    for name, run in everyone.items():
        if time.monotonic() > end:
            lines.append(f"| {name} | | | | | | | left out: no time |")
            continue
        try:
            results[name] = result = run(repetitions)
        except Exception as error:  # noqa: BLE001 - the others go on, and the report says what failed
            lines.append(f"| {name} | | | | | | | failed: {type(error).__name__}: {str(error)[:200]} |")
            continue
        own = 1000 * median(result.seconds) / contest.new_tokens / contest.rows
        ratios = []
        for of in (PLAIN, COMPILED):
            base = results.get(of)
            ratios.append(f"{median(base.seconds) / median(result.seconds):.2f}" if base else "")
        equal = said_of(contest.target, result.texts, results[PLAIN].texts)
        first = "" if result.first_token is None else f"{result.first_token:.1f}, "
        lines.append(
            f"| {name} | {first}{result.first:.1f} | {own:.2f} | {' | '.join(ratios)} | {result.passes:.2f} | "
            f"{equal} | {result.note} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def machine(device: str) -> str:
    """Where, and with what."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"**no GPU**, {platform.machine()}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, hf_specdecpp {__version__}"
    return f"{name}; {versions}, Python {platform.python_version()}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8b", "smollm2", "1.5b"])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.8, 0.3], help="candidates that are right")
    parser.add_argument("--ours", nargs="*", choices=OURS, default=list(OURS))
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[1, 4], help="all but the first at one rate")
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="bfloat16 by default; on a CPU float32")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=280.0, help="what would begin after these is left out")
    parser.add_argument("--dry_run", action="store_true", help="all of it on a CPU, of a tiny shape")
    parser.add_argument("--no_compile", action="store_true", help="leave out all that is compiled")
    dry = DRY_RUN if "--dry_run" in sys.argv else []
    options = parser.parse_args([*dry, *sys.argv[1:]])
    end = time.monotonic() + options.seconds
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "There is no GPU here that torch sees, so there is nothing to report. --device cpu runs all of it anyway."
        )
    if options.dry_run:  # what would be captured runs again as it is
        graphs.can_capture = lambda _device: True
        graphs.captured = lambda function, _restore, _pool: SimpleNamespace(replay=function)
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    if dtype == torch.float32:
        torch.set_float32_matmul_precision("highest")  # no TF32, which rounds like half precision
    where = f"{machine(options.device)} Weights and passes in {dtype}."
    print(f"# On a GPU\n\n{where}\n\n```console\n{' '.join(['python', *sys.argv])}\n```\n", flush=True)
    for shape in options.shapes:
        torch.manual_seed(0)
        target, files = built(SHAPES[shape], options.device, dtype), TemporaryDirectory()
        for place, rate in enumerate(options.rates):
            found = set_agreement(target, rate)
            for rows in options.batch_sizes[: 1 if place else None]:
                contest = Contest(target, options.new_tokens, rows, Path(files.name), options.prompt)
                compiles = not options.no_compile and place == 0 and rows == 1
                print(f"## {shape}, the draft right {found:.2f} of the time, batch of {rows}\n", flush=True)
                # The other rates show the loss with a poor draft.
                ours = [name for name in options.ours if place == 0 or name in AT_ALL_RATES]
                everyone = contestants(contest, compiles, not options.no_compile and place == 0, ours)
                print(measured(contest, everyone, options.repetitions, end), flush=True)
        files.cleanup()
        del target, contest
        gc.collect()
        torch._dynamo.reset()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
