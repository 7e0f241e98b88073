"""Several processes: what comes out is what one process with as many gradient accumulation steps gives."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from support.distillation_files import adapter_of, prepare, report_of

import hf_specdecpp.training
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import stage as distillation

CONFIGS = Path(hf_specdecpp.training.__file__).with_name("accelerate_configs")
SCRIPT = Path(__file__).parents[1] / "support" / "distillation_files.py"


def launch(config: TrainingConfig, folder: Path, name: str) -> None:
    """Run with a shipped config. Without GPUs the same processes talk gloo."""
    described = folder / "run.json"
    described.write_text(json.dumps(asdict(config)))
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{name}.yaml")]
    command = [*launcher, "--main_process_port", "0", str(SCRIPT), str(described)]
    path = os.pathsep.join((str(SCRIPT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("Held-out answers") == 1, "one process reports"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["independent", "early_exit"])
def test_two_processes(tmp_path: Path, kind: str) -> None:
    """Two gloo processes see batches 0, 2, ... and 1, 3, ... of the order in which one process takes two a step.

    Rounding differs (gradients are added in another order) and Adam divides by small numbers, so the weights, which
    move by up to 0.02, may differ by 1e-3, a fifth of the learning rate; in float16 they resolve 2e-4 or less."""
    single = prepare(tmp_path / "single", kind, epochs=1, gradient_accumulation_steps=2)
    distillation.run(single)
    double = prepare(tmp_path / "double", kind, epochs=1)
    launch(double, tmp_path, "multi_gpu")
    moved = 0.0
    for name, tensor in adapter_of(single).items():
        torch.testing.assert_close(adapter_of(double)[name].float(), tensor.float(), rtol=0, atol=1e-3, msg=name)
        if "lora_B" in name:  # begins at zero
            moved = max(moved, float(tensor.abs().max()))
    assert moved > 0.01
    reports = [report_of(config) for config in (single, double)]
    assert reports[0]["steps"] == reports[1]["steps"] == 8
    for stage in ("before", "after"):
        assert reports[1][stage]["all"] == pytest.approx(reports[0][stage]["all"], abs=1e-3)


@pytest.mark.parametrize("name", ["single_gpu", "multi_gpu", "fsdp"])
def test_shipped_configs_are_understood(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.distributed_type == {"single_gpu": "NO", "multi_gpu": "MULTI_GPU", "fsdp": "FSDP"}[name]
    assert "mixed_precision" not in yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), "the run's own setting"
