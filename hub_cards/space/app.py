"""A Space: the same answer with and without an assistant, token by token, with accepted candidates marked."""

import base64
import html
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import gradio as gr
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import assist
from hf_specdecpp.terminal.listener import Answer, Listener, picture

TARGET = os.environ.get("TARGET", "HuggingFaceTB/SmolLM2-135M-Instruct")
ASSISTANT = os.environ.get("ASSISTANT")  # Hub id or folder; by default the target's multi-token layers, or lookups
EXAMPLES = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in three sentences why the sky is blue.",
    "A train travels 60 km in 45 minutes. What is its average speed in km/h?",
]
LONGEST = 2000  # characters of a question
BOX = "white-space:pre-wrap;font-family:monospace;min-height:16em;line-height:1.5"
CANDIDATE = "background:#2da44e59;color:inherit;border-radius:3px"  # on light and dark pages
INTRODUCTION = f"""# Speculative decoding, token by token

{TARGET} answers twice: by plain `generate()`, and with an [hf_specdecpp](https://pypi.org/project/hf-specdecpp/)
assistant, which proposes tokens that the model checks several at a time. Green tokens were such candidates. The text is
the same."""

model = AutoModelForCausalLM.from_pretrained(TARGET)
tokenizer = AutoTokenizer.from_pretrained(TARGET)
assistant = assist(model, ASSISTANT or "auto", default=False)
threads = ThreadPoolExecutor(1)


def encode(question):
    """The question as inputs of the model."""
    if tokenizer.chat_template is None:
        return tokenizer(question, return_tensors="pt")
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def generate(inputs, length, helper, listener):
    """Generate one answer; its seconds, without the time in the queue."""
    listener.begin = time.perf_counter()
    model.generate(**inputs, max_new_tokens=length, do_sample=False, assistant_model=helper, streamer=listener)
    return time.perf_counter() - listener.begin


def write(question, length, trees):
    """Both answers as they are written, then both again at once, and the most branched tree."""
    if not 0 < len(question.strip()) <= LONGEST:
        raise gr.Error(f"A question has between 1 and {LONGEST} characters; this one has {len(question.strip())}.")
    assistant.speculation.tree = "dyspec" if trees else None
    inputs, answers, panes = encode(question), [], [coloured([]), "", coloured([]), "", "", ""]
    for side, helper in enumerate((None, assistant)):
        listener = Listener()
        running = threads.submit(generate, inputs, int(length), helper, listener)
        while wait([running], timeout=0.1).not_done:
            panes[2 * side] = coloured(listener.tokens(tokenizer))
            yield panes
        try:
            seconds = running.result()
        except ValueError as error:  # such as trees with a target that cannot read trees
            raise gr.Error(str(error)) from None
        answer = Answer(listener.tokens(tokenizer, None if helper is None else helper.stats), seconds)
        panes[2 * side : 2 * side + 2] = coloured(answer.tokens), answer.rate
        answers.append(answer)
        yield panes
    plain, assisted = answers
    ratio = f"{plain.seconds / assisted.seconds:.2f} times as fast"
    panes[3] = f"**{ratio}**: {assisted.rate}"
    note = f"{ratio}; {assistant.stats.tokens_per_pass:.2f} tokens a pass"
    wide, narrow = (picture(question, plain, assisted, [note], is_narrow=narrow) for narrow in (False, True))
    panes[4:] = image(wide, narrow), tree_of(assistant)
    yield panes


def coloured(tokens):
    """An answer as HTML, its accepted candidates marked."""
    texts = [(html.escape(token.text), token.accepted) for token in tokens if token.text]
    marked = (f'<mark style="{CANDIDATE}">{text}</mark>' if accepted else text for text, accepted in texts)
    return f'<div style="{BOX}">{"".join(marked)}</div>'


def tree_of(assistant):
    """A drawing of the most branched tree, or why there is none."""
    if assistant.stats.branched_tree is None:
        return "No tree: chains were drafted, or no round was worth a candidate."
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tree.svg"
        assistant.stats.branched_tree.save(file, lambda token: repr(tokenizer.decode([token])))
        return image(file.read_text(encoding="utf-8"))


def image(svg, narrow=None):
    """An SVG as an image, so that its style sheet is its own; another one may stand in its place on telephones."""
    shown = f'<img style="max-width:100%" src="{as_data(svg)}">'
    if narrow is None:
        return shown
    return f'<picture><source media="(max-width:700px)" srcset="{as_data(narrow)}">{shown}</picture>'


def as_data(svg):
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


with gr.Blocks(title="hf_specdecpp") as demo:
    gr.Markdown(INTRODUCTION)
    with gr.Row():
        question = gr.Textbox(EXAMPLES[0], label="Question", max_length=LONGEST, scale=4)
        length = gr.Slider(16, 256, 96, step=16, label="Most tokens", scale=2)
        trees = gr.Checkbox(True, label="Draft trees", scale=1)
    button = gr.Button("Answer", variant="primary")
    outputs = []
    with gr.Row():
        for side in ("Plain `generate()`", "With the assistant"):
            with gr.Column():
                gr.Markdown(f"### {side}")
                outputs += gr.HTML(coloured([])), gr.Markdown()
    with gr.Accordion("Both at once, at the measured speeds"):
        outputs.append(gr.HTML())
    with gr.Accordion("The most branched tree: green was accepted, the paler a candidate the less likely it seemed"):
        outputs.append(gr.HTML())
    gr.Examples([[each] for each in EXAMPLES], question)
    asked = [button.click, question.submit]
    gr.on(asked, write, [question, length, trees], outputs, api_name="write", show_progress="hidden")

# Warm up, so that measurements before the first call do not count into an answer.
for helper in (None, assistant):
    generate(encode("Hello"), 8, helper, Listener())

if __name__ == "__main__":
    demo.launch()
