"""What a draft gains by learning from the text it drafts for, on kinds of text that its training lacked, as tables.

    OMP_NUM_THREADS=1 python examples/learning_gain.py HuggingFaceTB/SmolLM2-135M-Instruct \
        hub_cards/specdecpp-smollm2-135m-instruct --prompts alpaca_train.jsonl --code code_train.jsonl \
        --published gsm8k_test.jsonl --published humaneval_test.jsonl --published alpaca_test.jsonl

Each kind asks for something else about the same prompts, of which a seed takes a block from the end of the file. The
target answers them in batches, greedily and at temperature 1 in turn, and what a generation would keep of its answers
is kept in `--output`, so that a run that was stopped goes on. The draft learns from the answers to the first prompts of
the block, for so many seconds in all. Shown is, for the first candidate of a round, how likely it is accepted at
temperature 1 and how often it is the target's likeliest token, on average over all places of the answers to the other
prompts, and to those of the published sets: with the draft as it is, and corrected, by a temperature where it samples
and mixed with the target's latest successors (`SpeculationConfig(draft_temperature=0.8, draft_successors=True)`), whose
table has heard the answers that were learned from. Then some of these are answered live, greedily and at temperature 1,
by plain generation on the same passes and with the draft before and after learning in turn, all with the settings of
the assistant's repository, after one text that is not counted. Seconds are those of this thread where there is only
one, so that other programs count little. With `--costs` they are reckoned, and no clock counts: how many rounds there
were of each length, and what such a round costs on a machine of which that is known (`SpeculationConfig.costs` as JSON,
first of a draft as it is, then of a corrected one). Without `--seconds` nothing is learned.
"""

import argparse
import copy
import itertools
import json
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.benchmark.report import markdown_table
from hf_specdecpp.clocks import computing_clock
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.files import read_json
from hf_specdecpp.learning.kept import KeptText, kept_of, logits_of
from hf_specdecpp.sampling.successors import Successors, contexts_of
from hf_specdecpp.texts.encoding import padded
from hf_specdecpp.texts.prompts import read_prompts

KINDS = {  # what is asked, turn by turn
    "Spanish": ["Responde en español. {}"],
    "tables": ["Make a Markdown table with three columns and six rows about this: {}"],
    "chat": ["{}", "Explain that again in a letter to a child of six."],
    "JavaScript": ["{} Write it in JavaScript, with comments."],
}
OF_CODE = ("JavaScript",)
AS_THEY_ARE = ["{}"]
MODES = {"greedy": {"do_sample": False}, "T = 1": {"do_sample": True, "temperature": 1.0, "top_k": 0}}
ROWS = 50  # answers in a batch
DRAFTS = ("published", "corrected", "learned", "learned, corrected")
TEMPERATURE = 0.8  # of a corrected draft that samples
MOST = 10**9  # tokens that are kept


class Writer:
    """Writes the answers of a target.

    Args:
        reader: the states that the draft reads.
    """

    def __init__(self, target, tokenizer, reader) -> None:
        self.target, self.tokenizer, self.reader = target, tokenizer, reader

    def texts(self, turns: list[str], prompts: list[str], mode: str, tokens: int) -> list[KeptText]:
        """What is kept of the answers of up to so many tokens to each prompt, turn by turn."""
        chats: list[list[dict[str, str]]] = [[] for _ in prompts]
        rows: list[list[KeptText | None]] = [[] for _ in prompts]
        for turn in turns:
            for chat, prompt in zip(chats, prompts, strict=True):
                chat.append({"role": "user", "content": turn.format(prompt)})
            for chat, row, (asked, answer) in zip(chats, rows, self._answers(chats, mode, tokens), strict=True):
                said = self.tokenizer.decode(answer, skip_special_tokens=True)
                chat.append({"role": "assistant", "content": said})
                row.append(kept_of(self.target, self.reader, torch.tensor(asked + answer), len(asked)))
        return [text for row in rows for text in row if text is not None]

    def _answers(self, chats, mode: str, tokens: int) -> list[tuple[list[int], list[int]]]:
        ids = [self.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
        end, found = self.tokenizer.eos_token_id, []
        for first in range(0, len(ids), ROWS):
            batch = {name: part.to(self.target.device) for name, part in padded(ids[first : first + ROWS]).items()}
            written = self.target.generate(**batch, max_new_tokens=tokens, **MODES[mode])
            for asked, answer in zip(ids[first:], written[:, batch["input_ids"].shape[1] :].tolist(), strict=False):
                found.append((asked, answer[: answer.index(end) + 1] if end in answer else answer))
        return found


def kept(file: Path, write) -> dict[str, list[KeptText]]:
    """What `write()` returns, from the file if it was written before."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(write(), file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
    return torch.load(file, weights_only=False)


@torch.no_grad()
def of_text(drafter, text: KeptText) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Along an answer the last tokens before each place, and the logits of draft and target `[n, num_ids]` there."""
    ids, device = text.tokens.long(), drafter.device
    read = ids[None].to(device)
    if text.states is None:
        begin, hidden = text.begin, drafter.hidden_states(read)[0, text.begin - 1 : -1]
    else:  # before the first token there is no state
        begin, states = max(text.begin, 2), text.states.read().to(device, drafter.dtype)
        hidden = drafter.hidden_states(read[:, 1:], None, states[None])[0, begin - 2 : -1]
    own = slice(begin - text.begin, None)
    logits = logits_of(text.likely[own].to(device), text.probs[own].to(device), text.num_ids)
    answer = ids[begin:].tolist()
    contexts = contexts_of(ids[None, :begin], [answer[:place] for place in range(len(answer))])
    return contexts, drafter.logits(hidden, text.num_ids), logits


def first_candidates(assistant, texts: list[KeptText], table: Successors | None = None) -> list[float]:
    """How likely the first candidate of a round is accepted at temperature 1, and how often the draft's likeliest token
    is the target's: the mean over all places of answers, with q as it is or corrected, for the first as where it is
    drawn from, with a temperature, for the second as in greedy texts. The table goes on."""
    drafter, found = assistant.ready_drafter(), []
    for text in texts:
        contexts, logits, p_logits = of_text(drafter, text)
        drawn, likeliest = logits, logits
        if table is not None:
            rows = []
            for context, q, p in zip(contexts.split(1), logits.split(1), p_logits.split(1), strict=True):
                rows.append((table.mixed(context, q / TEMPERATURE, False), table.mixed(context, q, True)))
                table.learn(context, p)
            drawn, likeliest = map(torch.cat, zip(*rows, strict=True))
        accepted = torch.minimum(drawn.softmax(-1), p_logits.softmax(-1)).sum(-1)
        agrees = likeliest.argmax(-1) == p_logits.argmax(-1)
        found.append(torch.stack((accepted, agrees.to(accepted)), -1).cpu())
    mean: list[float] = torch.cat(found).mean(0).tolist()
    return mean


@torch.no_grad()
def hear(table: Successors, texts: list[KeptText]) -> None:
    """Let a table take note of what the target said along answers."""
    for text in texts:
        ids, answer = text.tokens[None, : text.begin], text.tokens[text.begin :].tolist()
        contexts = contexts_of(ids, [answer[:place] for place in range(len(answer))])
        table.learn(contexts, logits_of(text.likely, text.probs, text.num_ids))


class Live:
    """Tokens, passes of the target and seconds of texts that are generated with an assistant.

    Args:
        assistant: None for plain generation, on the passes of another one.
        costs: of rounds, from which seconds are reckoned. None takes the time.
        corrected: whether its q has a temperature and is mixed with the target's successors.
    """

    def __init__(self, assistant, passes_of, costs: Costs | None, corrected: bool = False) -> None:
        self.assistant, self.passes_of, self.costs, self.corrected = assistant, passes_of, costs, corrected
        self.counts = {mode: [0, 0, 0.0] for mode in MODES}

    def answer(self, target, inputs, tokens: int, mode: str, seed: int, counts: bool) -> list[int]:
        torch.manual_seed(seed)
        clock = computing_clock(target.device)
        begin = clock()
        if self.assistant is None:
            with self.passes_of.setup().products(target):
                output = target.generate(**inputs, max_new_tokens=tokens, **MODES[mode])
        else:
            self.assistant.speculation.costs = None if self.costs is None else self.costs.to_dict()
            self.assistant.speculation.draft_successors = self.corrected
            self.assistant.speculation.draft_temperature = TEMPERATURE if self.corrected else 1.0
            output = target.generate(**inputs, assistant_model=self.assistant, max_new_tokens=tokens, **MODES[mode])
        answer = output[0, inputs["input_ids"].shape[1] :].tolist()  # waits for a GPU
        seconds = clock() - begin
        passes = len(answer) if self.assistant is None else self.assistant.stats.target_passes
        if self.costs is not None:
            seconds = self._reckoned(self.costs, passes)
        if counts:
            self.counts[mode] = [a + b for a, b in zip(self.counts[mode], (len(answer), passes, seconds), strict=True)]
        return answer

    def _reckoned(self, costs: Costs, passes: int) -> float:
        """What the passes cost, by the number of candidates in each."""
        longer = [] if self.assistant is None else self.assistant.stats.drafted_at
        at_least = [passes, *longer, 0]
        of_length = [count - next_ for count, next_ in itertools.pairwise(at_least)]
        return float(costs.round_seconds(len(longer)) @ of_length)


def compare(target, texts: list[KeptText], contestants: list[Live], tokens: int) -> int:
    """Answer the prompts of texts in turn; how many greedy texts are not those of plain generation."""
    wrong = 0
    for place, text in enumerate(texts):
        ids = text.tokens[: text.begin].long()[None].to(target.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for mode in MODES:
            answers = [each.answer(target, inputs, tokens, mode, place, counts=place > 0) for each in contestants]
            wrong += sum(answer != answers[0] for answer in answers) if mode == "greedy" else 0
    return wrong


def measure(writer: Writer, name: str, prompts: list[str], assistants, published: list[KeptText], args, seed) -> dict:
    """What is found of one kind of text."""
    turns = KINDS[name]
    of_one = len(turns)

    def write() -> dict[str, list[KeptText]]:
        torch.manual_seed(seed)
        answers = args.learn // of_one
        first, test = prompts[:answers], prompts[answers:]
        even, odd = (writer.texts(turns, first[at::2], mode, args.learn_tokens) for at, mode in enumerate(MODES))
        learn = [text for at in range(0, len(even), of_one) for half in (even, odd) for text in half[at : at + of_one]]
        return {"learn": learn} | {mode: writer.texts(turns, test, mode, args.tokens) for mode in MODES}

    texts = kept(args.output / f"{name}-{seed}.pt", write)
    before, after = assistants
    for each in assistants:
        each.memory.clear()
        device = each.ready_drafter().device
        table = each.memory.recall_successors(writer.target, texts["learn"][0].num_ids, device)
        hear(table, texts["learn"])
    test = [text for mode in MODES for text in texts[mode]]
    for text in texts["learn"]:
        after.memory.texts.add(text)

    def shares(corrected: bool = False) -> list[float]:
        return [
            share
            for asked in (test, published)
            for share in first_candidates(after, asked, copy.deepcopy(table) if corrected else None)
        ]

    as_published, as_corrected, as_learned, as_both = DRAFTS
    rows = [[as_published, 0.0, 0, *shares()], [as_corrected, 0.0, 0, *shares(corrected=True)]]
    spent, steps = 0.0, 0
    for seconds in args.seconds:
        lesson = after.learn(seconds=seconds - spent)
        print(f"{name}, seed {seed}: {lesson}", flush=True)
        spent, steps = spent + lesson.seconds, steps + lesson.steps
        rows.append([as_learned, spent, steps, *shares()])
    if args.seconds:
        rows.append([as_both, spent, steps, *shares(corrected=True)])
    print(rows, flush=True)
    of_published, of_corrected = args.costs
    contestants = [Live(None, before, of_published)]
    for each in assistants if args.seconds else assistants[:1]:
        contestants += [Live(each, before, of_published), Live(each, before, of_corrected, corrected=True)]
    live = texts["greedy"][: args.live + 1] if args.live else []
    wrong = compare(writer.target, live, contestants, args.tokens)
    after.unlearn()
    size = sum(map(len, texts["learn"])), sum(text.nbytes for text in texts["learn"])
    counts = {mode: [each.counts[mode] for each in contestants] for mode in MODES if live}
    return {"kind": name, "seed": seed, "learned": rows, "live": counts, "wrong": wrong, "size": size}


def groups_of(results: list[dict]) -> list[tuple[str, list[dict]]]:
    """Results of each kind, of each seed and all."""
    kinds, seeds = (list(dict.fromkeys(each[what] for each in results)) for what in ("kind", "seed"))
    groups = [(kind, [each for each in results if each["kind"] == kind]) for kind in kinds]
    groups += [(f"mean, seed {seed}", [each for each in results if each["seed"] == seed]) for seed in seeds]
    return [(name, group) for name, group in [*groups, ("mean", results)] if group]


def show(results: list[dict]) -> None:
    """As tables in Markdown: means of the seeds of each kind, of the kinds of each seed, and of all."""
    tokens, size = (sum(each["size"][which] for each in results) for which in (0, 1))
    facts = f"{size / tokens:.0f} bytes a kept token; {sum(each['wrong'] for each in results)} greedy texts wrong."
    print("", _first_candidates_table(results), _live_table(results), facts, sep="\n\n")


def _first_candidates_table(results: list[dict]) -> str:
    lines = []
    for name, group in groups_of(results):
        for rows in zip(*(each["learned"] for each in group), strict=True):
            seconds, steps, *shares = map(fmean, list(zip(*rows, strict=True))[1:])
            lines.append([name, rows[0][0], f"{seconds:.0f}", f"{steps:.0f}", *map("{:.3f}".format, shares)])
    shares_head = ("accepted", "agrees", "published sets: accepted", "agrees")
    return markdown_table(("kind", "draft", "seconds", "steps", *shares_head), lines)


def _live_table(results: list[dict]) -> str:
    lines = []
    for name, group in groups_of([each for each in results if each["live"]]):
        for decoding, modes in (*((mode, [mode]) for mode in MODES), ("both", MODES)):
            for place, draft in enumerate(DRAFTS[: len(group[0]["live"]["greedy"]) - 1], start=1):
                found = [_of_draft(each["live"][mode], place) for each in group for mode in modes]
                lines.append([name, decoding, draft, *(f"{fmean(column):.2f}" for column in zip(*found, strict=True))])
    speeds_head = ("tokens a pass", "over plain, same passes", "over the published draft")
    return markdown_table(("kind", "decoding", "draft", *speeds_head), lines)


def _of_draft(counts: list[list[float]], place: int) -> tuple[float, float, float]:
    """Tokens a pass of one contestant, and its speed over the first's and over the second's."""
    plain, published, speed = (counts[which][0] / counts[which][2] for which in (0, 1, place))
    return counts[place][0] / counts[place][1], speed / plain, speed / published


def read_costs(file: str) -> Costs:
    return Costs.from_dict(read_json(Path(file)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("assistant")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--code", required=True)
    parser.add_argument("--published", action="append", required=True)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--learn", type=int, default=150, help="answers to learn from")
    parser.add_argument("--test", type=int, default=50, help="answers to test with, of each way to decode")
    parser.add_argument("--published-test", type=int, default=12, help="prompts of each published set to test with")
    parser.add_argument("--live", type=int, default=12, help="of these, answered live and counted; 0 for none")
    parser.add_argument("--learn-tokens", type=int, default=256, help="of the longest answer to learn from")
    parser.add_argument("--tokens", type=int, default=96, help="of the longest answer to test with, and live")
    parser.add_argument("--seconds", type=float, nargs="*", default=[60, 180, 600], help="of learning in all")
    costs_help = "what rounds cost elsewhere, of a draft as it is and corrected"
    parser.add_argument("--costs", nargs=2, type=read_costs, default=(None, None), metavar="FILE", help=costs_help)
    parser.add_argument("--dtype", default="auto", help="of the target: many CPUs are slow in bfloat16")
    parser.add_argument("--device", default="cpu", help="of target and draft")
    parser.add_argument("--output", type=Path, default=Path("learning_gain"))
    args = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    assistants = [SpecDecPPAssistant.from_pretrained(args.assistant, target=target) for _ in range(2)]
    assistants[1].memory.texts.most = MOST
    writer = Writer(target, tokenizer, assistants[0].ready_drafter().reads)

    def prompts_of(source: str, count: int, seed: int = 0) -> list[str]:
        found = [prompt.messages[-1]["content"] for prompt in read_prompts(source)]
        return found[len(found) - count * (seed + 1) : len(found) - count * seed]

    def write() -> dict[str, list[KeptText]]:
        torch.manual_seed(0)
        asked = [text for source in args.published for text in prompts_of(source, args.published_test)]
        return {mode: writer.texts(AS_THEY_ARE, asked, mode, args.tokens) for mode in MODES}

    published = [text for texts in kept(args.output / "published.pt", write).values() for text in texts]
    for seed in args.seeds:
        for name in args.kinds:
            file = args.output / f"{name}-{seed}.json"
            if not file.exists():
                count = (args.learn + args.test) // len(KINDS[name])
                prompts = prompts_of(args.code if name in OF_CODE else args.prompts, count, seed)
                found = measure(writer, name, prompts, assistants, published, args, seed)
                file.write_text(json.dumps(found), encoding="utf-8")
    show([json.loads(file.read_text(encoding="utf-8")) for file in sorted(args.output.glob("*-*.json"))])


if __name__ == "__main__":
    main()
