"""Train a draft and an acceptance head for a model of yours, from Python.

    python examples/train_a_head.py HuggingFaceTB/SmolLM2-135M-Instruct

The dozen prompts below make a run of a few minutes on a CPU, with all stages. A good head needs far more prompts
(docs/training.md). `specdecpp train` does the same from the command line. An interrupted run continues when it is
started again.
"""

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp.choosing import assist
from hf_specdecpp.training.configuration import DistillConfig, HeadConfig, RolloutConfig, TrainingConfig
from hf_specdecpp.training.run import train

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that reverses a string.",
    "A shop sells pens at 3 for 2 dollars. How much do 12 pens cost?",
    "Give me four tips for a job interview.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "Write a SQL query that counts the orders of each customer.",
    "What is the difference between a virus and a bacterium?",
    "Translate 'good morning, how are you?' into French.",
    "If I read 20 pages an hour, how long does a book of 350 pages take?",
    "Write a haiku about autumn.",
    "How do I boil an egg?",
    "List the planets of the solar system.",
)

target = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
output = Path("specdecpp-example")
prompts = Path(f"{output}-prompts.jsonl")
prompts.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS), encoding="utf-8")

model = AutoModelForCausalLM.from_pretrained(target)
last = model.config.get_text_config(decoder=True).num_hidden_layers - 1

config = TrainingConfig(
    target=target,
    output=str(output),
    # The draft: the first three layers of the target and the last layer. `draft="org/model"` takes a separate model.
    layers=[0, 1, 2, last],
    # The target answers every prompt twice at temperature 1 and once greedily, so that the head is fitted for both.
    # A third of the prompts is held out for calibration and evaluation.
    rollouts=RolloutConfig(data=[str(prompts)], samples_per_prompt=2, max_new_tokens=64, heldout=0.34),
    # A LoRA adapter is trained on the target's answers. The draft's LM head keeps 4096 tokens, because for small models
    # the LM head is most of the cost of a candidate.
    distill=DistillConfig(rank=16, draft_vocab_size=4096, epochs=2.0),
    # The head is trained to predict which candidates the target accepts.
    head=HeadConfig(inputs="before", epochs=3.0, learning_rate=1e-3),
)

train(config)

# `output` is now a repository. To upload it: assistant.push_to_hub("org/name").
assistant = assist(model, output)
tokenizer = AutoTokenizer.from_pretrained(target)
inputs = tokenizer("The capital of France is", return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(answer[0]))
print(assistant.stats)
