"""What to type to serve a draft with other engines."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from hf_specdecpp.serving.destination import Destination


def plain_model_commands(to: Destination) -> dict[str, list[str]]:
    """The commands for a draft that is a causal LM, ready for a shell; a target without a name is `TARGET`."""
    return _commands(to, "draft_model", "STANDALONE", 1, [], [])


def eagle3_commands(to: Destination) -> dict[str, list[str]]:
    """The commands for an EAGLE-3 draft."""
    converting = ["--target-model-dir", to.target or "TARGET"]
    return _commands(to, "eagle3", "EAGLE3", 4, converting, ["--spec-type", "draft-eagle3"])


def _commands(
    to: Destination, vllm: str, sglang: str, branches: int, converting: list[str], serving: list[str]
) -> dict[str, list[str]]:
    """Commands by engine.

    Args:
        vllm, sglang: what they call the method.
        branches: of SGLang's tree; 1 is a chain.
        converting, serving: further words for llama.cpp.
    """
    count, draft = to.num_tokens, str(to.output)
    target, gguf = to.target or "TARGET", f"{to.output}.gguf"
    settings = {"method": vllm, "model": draft, "num_speculative_tokens": count}
    # Nodes of the tree, the token before it included: a chain of k tokens has k + 1.
    nodes = count + 1 if branches == 1 else branches * count
    tree = f"--speculative-num-steps {count} --speculative-eagle-topk {branches} --speculative-num-draft-tokens {nodes}"
    words = {
        "vLLM": [["vllm", "serve", target, "--speculative-config", json.dumps(settings, separators=(",", ":"))]],
        "SGLang": [
            ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", sglang]
            + ["--speculative-draft-model-path", draft, *tree.split()]
        ],
        "llama.cpp": [
            ["python", "convert_hf_to_gguf.py", draft, *converting, "--outfile", gguf],
            ["llama-server", "-m", f"{Path(target).name}.gguf", *serving, "-md", gguf]
            + ["--spec-draft-n-max", str(count)],
        ],
    }
    return {engine: [shlex.join(command) for command in commands] for engine, commands in words.items()}
