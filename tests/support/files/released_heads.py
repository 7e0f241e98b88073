"""SpecDec++'s released head, written again from its paper and code, and the files that it was released as."""

import json
from pathlib import Path

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

SIZE = 6


class ResBlock(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.SiLU()(self.linear(x))


class ReleasedHead(nn.Module, PyTorchModelHubMixin):
    """`tied` as released (one block object, repeated), or with distinct blocks as in the fork."""

    def __init__(self, num_layers: int = 3, tied: bool = True, hidden_size: int = SIZE, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            shared = ResBlock(hidden_size)
            blocks = [shared if tied else ResBlock(hidden_size) for _ in range(num_layers)]
            self.model = nn.Sequential(*blocks, nn.Linear(hidden_size, 2))
        self.sizes = {"hidden_size": hidden_size, "num_layers": num_layers}

    def acceptance(self, hidden: Tensor) -> Tensor:
        """Upstream's use of its output: the probability `[...]` that the candidate is accepted."""
        return self.model(hidden.float()).softmax(-1)[..., 1]


def write_config(folder: Path, **sizes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


def save_bin(head: ReleasedHead, folder: Path) -> Path:
    """As released: tied blocks are stored under each of their names."""
    torch.save(head.state_dict(), write_config(folder, **head.sizes) / "pytorch_model.bin")
    return folder


def save_mixin(head: ReleasedHead, folder: Path) -> Path:
    """As in the fork, by huggingface_hub: tied blocks are stored once, their other names in the metadata."""
    head.save_pretrained(folder)
    return write_config(folder, **head.sizes)


class Payload:
    """Unpickling this writes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.proof,))
