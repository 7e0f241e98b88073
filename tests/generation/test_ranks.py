"""A target that is spread over two processes (tensor parallelism, gloo): both say what one process says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.targets.models import prompt, tiny

PROGRAM = Path(__file__).parents[1] / "support" / "devices" / "rank_program.py"
CHAINS = ("fixed", "threshold", "throughput", "unmeasured", "lookup")


def run(folder: Path, what: str) -> list[dict[str, Any]]:
    """What the two ranks saw; nothing for one that is gone."""
    tiny("llama").save_pretrained(folder / "target")
    path = os.pathsep.join((str(PROGRAM.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "WORLD_SIZE": "2"}
    command, ranks = [sys.executable, str(PROGRAM), str(folder), what], ({"RANK": r, "LOCAL_RANK": r} for r in "01")
    with (folder / "errors").open("w") as errors:
        processes = [subprocess.Popen(command, env=environment | rank, stderr=errors) for rank in ranks]
        try:
            for process in processes:  # gloo ends a rank that waits for another in vain
                process.wait()
        finally:
            for process in processes:
                process.kill()
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert any(file.exists() for file in files), (folder / "errors").read_text()[-3000:]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


@pytest.mark.apart
def test_both_say_what_one_process_says(tmp_path: Path) -> None:
    first, second = run(tmp_path, "texts")
    expected = tiny("llama").generate(prompt(), max_new_tokens=40, do_sample=False, pad_token_id=0).tolist()
    assert first["plain"] == expected
    for rule in CHAINS:
        assert first[rule] == second[rule] == expected
        assert first[f"{rule} static"] == second[f"{rule} static"] == expected
        assert first[f"{rule} written"] == second[f"{rule} written"] == first["plain written"] != expected
        accepted, drafted = first[f"{rule} accepted"]
        assert 0 < accepted < drafted
        # The ranks were seeded differently; what the first draws counts, and both go on from its state.
        assert first[f"{rule} sampled"] == second[f"{rule} sampled"]
        assert first[f"{rule} random state"] == second[f"{rule} random state"]
    assert len({str(first[f"{rule} sampled"]) for rule in CHAINS} | {str(expected)}) > 1
    assert "trees are for targets in one process" in first["tree"]
    assert "is spread over 2 processes" in first["early exit"]
    assert "is spread over 2 processes" in first["eagle3"]


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_other(tmp_path: Path) -> None:
    first, second = run(tmp_path, "dies")
    assert not second
    assert first["error"].startswith("RuntimeError")


@pytest.mark.slow
def test_a_draft_that_fails_ends_both(tmp_path: Path) -> None:
    first, second = run(tmp_path, "fails")
    assert first["error"] == "ValueError: the draft is broken"
    assert second["error"].startswith("RuntimeError: The first rank of the target has failed")
    assert (first["steps"], second["steps"]) == (4, 0)
