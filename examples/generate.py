"""Generate with an assistant: the shortest complete program.

python examples/generate.py HuggingFaceTB/SmolLM2-135M-Instruct
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import SpecDecPPAssistant

target = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model = AutoModelForCausalLM.from_pretrained(target)
tokenizer = AutoTokenizer.from_pretrained(target)
inputs = tokenizer("The capital of France is", return_tensors="pt")

# An early exit of the model itself. With a published head: SpecDecPPAssistant.from_pretrained("org/repo", target=model)
assistant = SpecDecPPAssistant.from_early_exit(model, layers=4)

output = model.generate(**inputs, assistant_model=assistant, max_new_tokens=32, do_sample=False)
sys.stdout.write(f"{tokenizer.decode(output[0])}\n\n{assistant.stats}\n")
