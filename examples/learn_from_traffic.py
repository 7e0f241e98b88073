"""Answer requests, and let the draft learn from them whenever there are some more.

    python examples/learn_from_traffic.py HuggingFaceTB/SmolLM2-135M-Instruct ASSISTANT requests.jsonl NEW_FOLDER

A service would call `learn` while it waits for requests. What is kept of the texts stays in memory: 20,000 tokens are
50 MB for SmolLM2-135M. Whoever stores the learned draft stores weights and no text.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.texts.prompts import read_prompts

LEARN_AFTER = 20  # requests
SECONDS = 10.0


def main(name: str, repository: str, requests: str, folder: str) -> None:
    target, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    assistant = SpecDecPPAssistant.from_pretrained(repository, target=target)
    assistant.speculation.keep_texts = 20_000
    for count, request in enumerate(read_prompts(requests), 1):
        if tokenizer.chat_template is None:
            inputs = tokenizer(request.messages[-1]["content"], return_tensors="pt")
        else:
            inputs = tokenizer.apply_chat_template(
                request.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        target.generate(**inputs, assistant_model=assistant, max_new_tokens=128)
        print(f"request {count}: {assistant.stats.tokens_per_pass:.2f} tokens a pass")
        if count % LEARN_AFTER == 0:
            print(assistant.learn(seconds=SECONDS))
    assistant.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
