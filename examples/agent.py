"""Run a smolagents agent whose model has an assistant: print the answer, then the statistics of the last step.

python examples/agent.py "How many prime numbers are below 100?"   # Qwen2.5-Coder-1.5B and its published assistant
python examples/agent.py QUESTION TARGET ASSISTANT                 # Hub ids or folders of yours

Needs `pip install smolagents`. `TransformersModel` loads the model, so the assistant is attached afterwards, as the
default of all calls. `TransformersModel(target, assistant_model=assistant)` also works, but this model and its agent
cannot be saved, because the assistant would be part of their JSON.
"""

import sys
from pathlib import Path

from hf_specdecpp.choosing import assist

try:
    from smolagents import CodeAgent, TransformersModel
except ImportError:
    sys.exit("This example needs smolagents, which is not installed: pip install smolagents")

PUBLISHED = Path(__file__).parents[1] / "hub_cards" / "specdecpp-qwen2.5-coder-1.5b-instruct"

if len(sys.argv) not in (2, 4):
    sys.exit(__doc__)
question, *models = sys.argv[1:]
target, assistant_id = models or ("Qwen/Qwen2.5-Coder-1.5B-Instruct", PUBLISHED)

model = TransformersModel(target, max_new_tokens=256, do_sample=False)
assistant = assist(model.model, assistant_id)

agent = CodeAgent(tools=[], model=model, max_steps=4)
print(agent.run(question))
print(assistant.stats)
