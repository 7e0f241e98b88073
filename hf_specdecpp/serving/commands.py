"""What to type to serve a plain model as the draft of a target, with the engines that take one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from hf_specdecpp.serving.destination import Destination


def plain_model_commands(to: Destination) -> dict[str, list[str]]:
    """The commands for vLLM, SGLang and llama.cpp, ready for a shell; a target without a name is `TARGET`."""
    count, draft = to.num_tokens, str(to.output)
    target, gguf = to.target or "TARGET", f"{to.output}.gguf"
    vllm = {"method": "draft_model", "model": draft, "num_speculative_tokens": count}
    # A chain of k tokens is k steps with one branch; SGLang counts the token before them, too.
    chain = f"--speculative-num-steps {count} --speculative-eagle-topk 1 --speculative-num-draft-tokens {count + 1}"
    words = {
        "vLLM": [["vllm", "serve", target, "--speculative-config", json.dumps(vllm, separators=(",", ":"))]],
        "SGLang": [
            ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "STANDALONE"]
            + ["--speculative-draft-model-path", draft, *chain.split()]
        ],
        "llama.cpp": [
            ["python", "convert_hf_to_gguf.py", draft, "--outfile", gguf],
            ["llama-server", "-m", f"{Path(target).name}.gguf", "-md", gguf, "--spec-draft-n-max", str(count)],
        ],
    }
    return {engine: [shlex.join(command) for command in commands] for engine, commands in words.items()}
