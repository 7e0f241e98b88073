"""Generate with an assistant: prints the output, then the statistics of the call. The shortest complete program.

python examples/generate.py                    # SmolLM2-135M-Instruct and its published assistant
python examples/generate.py TARGET ASSISTANT   # Hub ids or folders of yours
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp.choosing import assist

CARDS = Path(__file__).parents[1] / "hub_cards"
target, published = sys.argv[1:] or ("HuggingFaceTB/SmolLM2-135M-Instruct", CARDS / "specdecpp-smollm2-135m-instruct")

model = AutoModelForCausalLM.from_pretrained(target)
tokenizer = AutoTokenizer.from_pretrained(target)
assistant = assist(model, published)

inputs = tokenizer("The capital of France is", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(output[0]))
print(assistant.stats)
