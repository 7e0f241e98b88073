"""Serve a model with an assistant at an OpenAI-compatible endpoint, with transformers' own server.

python examples/serve.py                                # SmolLM2-135M-Instruct and its published assistant
python examples/serve.py TARGET ASSISTANT --port 8000   # Hub ids or folders; by default own layers, or lookups

curl localhost:8000/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'

Needs `pip install "transformers[serving]"`. `transformers serve` has no option for an assistant, but calls
`model.generate()`, which uses the model's default assistant. Ctrl-C ends the server.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager

from hf_specdecpp.choosing import assist

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
PUBLISHED = Path(__file__).parents[1] / "hub_cards" / "specdecpp-smollm2-135m-instruct"


def serve(target: str, assistant: str | Path | None, **options: Any) -> Serve:
    """Answer requests, until Ctrl-C unless `non_blocking=True`; `options` are those of `transformers serve`."""

    class WithAssistant(model_manager.ModelManager):
        """Gives the model its assistant as it is loaded: for the first request, or before."""

        assisted: Any = None

        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> Any:
            model, processor = super().load_model_and_processor(*args, **kwargs)
            if model is not self.assisted:
                print(assist(model, assistant or "auto"))  # the model keeps it
                self.assisted = model
            return model, processor

    model_manager.ModelManager = WithAssistant  # `Serve` makes one
    return Serve(force_model=target, **options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", nargs="?", default=SMOLLM2)
    parser.add_argument("assistant", nargs="?")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    published = PUBLISHED if given.target == SMOLLM2 else None
    serve(given.target, given.assistant or published, host=given.host, port=given.port)


if __name__ == "__main__":
    main()
